"""The examples that a newcomer reads first run, and stay short."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockyard.tools.demo.demo_model import demo_config, demo_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "most_lines", "last"),
    [
        ("own_scheduler", 65, r"50 sequences, \d+ swap ins, \d+ tokens cached, 2000 compared"),
        ("prefix_router", 64, r"engine 1 has 24 tokens of the prompt"),
        ("custom_store", 50, r"100 blocks came back from SQLite"),
        ("cpu_offload", 60, r"\d+ blocks loaded, \d+ chunks evicted, all bytes compared 40 times"),
    ],
)
def test_an_example_is_short_and_runs(name: str, most_lines: int, last: str):
    assert re.fullmatch(last, output(name, most_lines).strip())


def test_the_example_with_metrics_exports_what_happens():
    printed = output("metrics", 60, "1", "0")
    found = re.fullmatch(r"(\d+) requests, (\d+) series at http://localhost:\d+/metrics\n", printed)
    requests, series = map(int, found.groups())
    assert requests > 5
    assert series > 250


@pytest.mark.parametrize("blocks_a_chunk", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_offload_example_loads_and_evicts_whatever_the_size_of_a_chunk(
    blocks_a_chunk: int, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["cpu_offload.py", str(blocks_a_chunk), str(seed)])
    runpy.run_path(str(EXAMPLES / "cpu_offload.py"))
    assert all(int(number) > 10 for number in re.findall(r"\d+", capsys.readouterr().out))


def test_the_example_that_serves_a_model_gives_its_texts(tmp_path: Path):
    model = demo_model(demo_config(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2))
    model.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    prompts = ["one " * 20, "two", "three " * 20]
    texts = {}
    for index, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        texts[index] = tokenizer.decode(tokens)
    printed = output("serve_model", 15, str(tmp_path), *prompts)
    assert sorted(printed.splitlines()) == sorted("".join(f"{i}: {text}\n" for i, text in texts.items()).splitlines())


def output(name: str, most_lines: int, *arguments: str) -> str:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most_lines
    command = [sys.executable, "-W", "error", str(path), *arguments]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
