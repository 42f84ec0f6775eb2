"""Weights and configurations are named alike in all processes and folders, and apart if any tensor differs."""

import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import COMMIT, checkpoint, llama, snapshot, tensors

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters.checkpoint import canonical, describe_config, name_weights, require_revision


def test_two_copies_of_a_checkpoint_have_one_name(tmp_path: Path):
    one = checkpoint(tmp_path / "one")
    two = Path(shutil.copytree(one, tmp_path / "two"))
    (two / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert name_weights(str(one)) == name_weights(str(two)) != ""
    assert (two / "config.json").unlink() is None
    assert name_weights(str(one)) == name_weights(str(two))


@pytest.mark.parametrize("name", tensors())
def test_a_fine_tune_of_any_tensor_has_another_name(tmp_path: Path, name: str):
    one = checkpoint(tmp_path / "one")
    two = checkpoint(tmp_path / "two", **{name: tensors()[name] + np.float32(1e-3)})
    files = [(folder / "model.safetensors").read_bytes() for folder in (one, two)]
    headers = {data[: 8 + int.from_bytes(data[:8], "little")] for data in files}
    assert (len(headers), len({len(data) for data in files})) == (1, 1)
    assert name_weights(str(one)) != name_weights(str(two))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.gguf", "model.pt", "broken.safetensors"])
def test_weights_in_other_formats_are_named_by_size_and_samples(tmp_path: Path, file: str):
    names = set()
    content = bytearray(300_000)
    for change in (None, 0, 100_000, 299_999):
        if change is not None:
            content[change] ^= 1
        (tmp_path / file).write_bytes(content)
        names.add(name_weights(str(tmp_path)))
        assert name_weights(str(tmp_path / file)) != ""
    (tmp_path / file).write_bytes(content + b"\0")
    names.add(name_weights(str(tmp_path)))
    assert len(names) == 5


def test_code_and_settings_beside_the_weights_count(tmp_path: Path):
    folder = checkpoint(tmp_path / "one")
    names = {name_weights(str(folder))}
    for file in ("modeling_own.py", "hf_quant_config.json", "preprocessor_config.json"):
        (folder / file).write_text("{}", encoding="utf-8")
        names.add(name_weights(str(folder)))
    assert len(names) == 4


def test_a_checkpoint_in_the_hubs_cache_is_named_by_its_commit(tmp_path: Path):
    folder = snapshot(tmp_path / "one")
    assert name_weights("an/llm", cache_dir=str(tmp_path / "one")) == f"commit {COMMIT}"
    assert name_weights("an/llm", revision=COMMIT, cache_dir=str(tmp_path / "one")) == f"commit {COMMIT}"
    assert name_weights(str(folder)) == f"commit {COMMIT}"


def test_a_snapshot_whose_weights_were_replaced_is_not_named_by_its_commit(tmp_path: Path):
    folder = snapshot(tmp_path / "one")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    assert name_weights(str(folder)).startswith("files ")


def test_what_has_no_weights_has_no_name(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    llama().save_pretrained(tmp_path / "config alone")
    for model in ("empty", "config alone", "missing"):
        assert name_weights(str(tmp_path / model)) == ""
    for model in ("an/llm", "not a name of the hub: /", ""):
        assert name_weights(model, cache_dir=str(tmp_path / "cache")) == ""


def test_many_tensors_are_sampled_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("blockyard.stores.adapters.checkpoint._SAMPLES", 64)
    from safetensors.numpy import save_file

    for seed in range(2):
        random = np.random.default_rng(seed)
        many = {f"expert.{n}": random.standard_normal((4, 4), dtype=np.float32) for n in range(1000)}
        (tmp_path / f"{seed}").mkdir()
        save_file(many, tmp_path / f"{seed}" / "model.safetensors")
    assert name_weights(str(tmp_path / "0")) != name_weights(str(tmp_path / "1"))


def test_fields_that_change_no_byte_are_left_out_at_any_depth():
    nested = {"text_config": {"_name_or_path": "a", "rope_theta": 1e4}, "transformers_version": "5", "use_cache": True}
    assert describe_config(nested) == {"text_config": {"rope_theta": 10000}}
    one, other = llama(), llama(use_cache=False)
    other._name_or_path = "/elsewhere"
    assert describe_config(one) == describe_config(other) != describe_config(llama(rms_norm_eps=1e-5))


class Kind(Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"b": 1, 2: (1, 2.0)}, {"b": 1, "2": [1, 2]}),
        ({"z", "a"}, ["a", "z"]),
        (Kind.ONE, "ONE"),
        (Path("a/b"), "a/b"),
        (np.float32, "numpy.float32"),
        (SimpleNamespace(a=1), "namespace(a=1)"),
    ],
)
def test_settings_of_any_type_have_one_form(value: Any, wanted: Any):
    assert canonical(value) == wanted


def test_an_object_without_a_text_of_its_own_counts_by_its_attributes():
    class Plain:
        def __init__(self, factor: int) -> None:
            self.factor = factor

    assert canonical(Plain(1)) == canonical(Plain(1)) != canonical(Plain(2))


def test_names_are_equal_in_all_processes(tmp_path: Path):
    folder = checkpoint(tmp_path / "one")
    program = (
        "import sys; from blockyard.stores.adapters.checkpoint import describe_config, name_weights; "
        "print(describe_config({'set': {'a', 'b', 'c'}, 'class': int}), name_weights(sys.argv[1]))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program, folder], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


@pytest.mark.parametrize("url", ["", "file:///x", "redis://host", "faulty://one"])
def test_a_store_that_others_read_wants_a_revision_if_something_cannot_be_seen(url: str):
    with pytest.raises(
        InvalidArgumentError, match="revision is empty, and other processes read the store, but it rains"
    ):
        require_revision("", url, "it rains")
    require_revision("a", url, "it rains")
    require_revision("", url, "")
    require_revision("", "memory://x", "it rains")
