"""The table of what works with which layers: each cell is tried, and each yes has a test that runs a real model."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from huggingface import reference_generate
from numpy.typing import NDArray
from tiny_models import tiny_model
from transformers import (
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from blockyard import BlockManager, CacheGroup, KVCache, KVLayout, PrefixCaching, Request, Scheduler
from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.transformers import Generator, SamplingParams, hybrid

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "concepts" / "hybrid.md"
LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
FULL, WINDOW = CacheGroup.full_attention(), CacheGroup.sliding_window(8)
GROUPS = {
    "sliding window": [WINDOW],
    "window and full": [FULL, WINDOW],
    "chunks and full": [FULL, CacheGroup.chunked_attention(8)],
    "recurrent and full": [FULL, CacheGroup.recurrent()],
    "drafter and full": [FULL, CacheGroup.drafter()],
    "cross attention": [FULL, CacheGroup.cross_attention()],
}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "eos_token_id": None}
PROMPT = list(range(1, 18))

Groups = Sequence[CacheGroup]


def track(kind: str) -> None:
    """Allocate, append and free."""
    manager = manager_of(GROUPS[kind], prefix_caching=False)
    (sequence,) = allocated(manager, GROUPS[kind])
    complete(manager)
    manager.append([sequence], [3])
    manager.check()
    assert manager.num_tokens(sequence) == len(PROMPT) + 3
    manager.free([sequence])


def find_a_prefix(kind: str) -> None:
    """Compute a prompt; the next one with its tokens begins with what was computed."""
    manager = manager_of(GROUPS[kind], prefix_caching=True)
    compute_prompt(manager, PROMPT)
    assert manager.allocate(PROMPT, chunk_tokens=8).cached_tokens == 16


def find_on_the_host(kind: str) -> None:
    """Compute a prompt, which the device then evicts; the next one with its tokens loads it."""
    manager = manager_of(GROUPS[kind], prefix_caching=PrefixCaching(host=True))
    compute_prompt(manager, PROMPT)
    manager.prefix.offload(64)
    complete(manager)
    hit = manager.prefix.lookup(PROMPT)
    assert (hit.tokens, hit.host_blocks > 0) == (16, True)
    sequence = manager.allocate(PROMPT, chunk_tokens=8)
    decision = manager.take_decision()
    assert sequence.cached_tokens == 16
    assert sum(len(pairs) for pairs in decision.swap_in) == hit.host_blocks


def swap(kind: str) -> None:
    """Bring a sequence to the host and to a store, and back, with its bytes."""
    groups = GROUPS[kind]
    options = {"device_blocks": 24, "host_blocks": 24, "swap_store": "memory://table?size=1MiB", "groups": groups}
    with KVCache(LAYOUT, **options) as cache:  # type: ignore[arg-type]
        (sequence,) = allocated(cache.manager, groups)
        with cache.step():
            cache.engine.tensors[0].normal_()
        written = held(cache, sequence, groups)
        for tier in ("host", "external"):
            cache.manager.swap_out(sequence, to=tier)
            with cache.step():
                pass
            cache.drain()
            cache.engine.tensors[0].zero_()
            cache.manager.swap_in(sequence)
            with cache.step() as step:
                assert not len(step.lost)
            assert np.array_equal(held(cache, sequence, groups), written)
            assert written.any()
        cache.manager.free([sequence])


def schedule(kind: str) -> None:
    """Let the reference scheduler serve a request to its end, and a second one that finds its prompt."""
    scheduler = Scheduler(manager_of(GROUPS[kind], prefix_caching=kind != "cross attention"))
    for cached_tokens in (0, 16):
        scheduler.add(Request("one", PROMPT, 5))
        finished: list[object] = []
        for _ in range(10):
            step = scheduler.schedule()
            scheduler.complete(step.decision.ticket)
            finished += scheduler.update(step, np.ones(step.samples, np.int64))
            if finished:
                break
        assert len(finished) == 1
        assert scheduler.stats().cached_tokens == cached_tokens


def schedule_drafts(kind: str) -> None:
    """Let the reference scheduler serve a request with draft tokens, some accepted and some rejected."""
    manager = manager_of(GROUPS[kind], prefix_caching=False)
    scheduler = Scheduler(manager, num_lookahead_tokens=3)
    scheduler.add(Request("one", PROMPT, 12))
    finished: list[object] = []
    while not finished:
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        # The model says 1, so the first draft token is right and the others are wrong.
        step.set_draft_token_ids([[1, 2, 2][: step.lengths[row] - 1] for row in range(step.decodes)])
        finished = list(scheduler.update(step, np.ones(step.num_draws, np.int64)))
        manager.check()
    stats = scheduler.stats()
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens


def store_prefixes(kind: str) -> None:
    """Keep cached blocks in a prefix store; the next process loads them."""
    with TemporaryDirectory() as folder:
        options = {
            "device_blocks": 24,
            "host_blocks": 24,
            "prefix_store": f"file://{folder}?size=1MiB",
            "namespace": b"t",
        }
        for found in (0, 16):
            with KVCache(LAYOUT, groups=GROUPS[kind], prefix_caching=True, **options) as cache:  # type: ignore[arg-type]
                scheduler = Scheduler(cache)
                scheduler.add(Request("one", PROMPT, 1))
                while scheduler.num_unfinished:
                    with scheduler.step() as step:
                        sampled = np.ones(step.num_draws, np.int64)
                    scheduler.update(step, sampled)
                assert scheduler.stats().cached_tokens == found


def generate(kind: str) -> None:
    """Serve a Hugging Face model with such layers; the second request finds its prompt."""
    model, params = MODELS[kind](), SamplingParams(max_tokens=4)
    with Generator(model, block_size=4, device_blocks=48, host_blocks=0) as generator:
        assert kinds(generator.model.groups) == kinds(GROUPS[kind]) - {"drafter"}
        for cached_tokens in (0, 16):
            (output,) = generator.generate([PROMPT], params)
            assert output.tokens == reference_generate(model, PROMPT, params)
            assert generator.scheduler.stats().cached_tokens == cached_tokens


ROWS: dict[str, Callable[[str], None]] = {
    "`BlockManager`": track,
    "its prefix cache": find_a_prefix,
    "its prefix cache on the host": find_on_the_host,
    "`KVCache`: swap to the host and to a store": swap,
    "`Scheduler`": schedule,
    "its draft tokens": schedule_drafts,
    "prefix stores": store_prefixes,
    "`Generator`": generate,
}
# The tests that run a column's model: their file, and the model's name in their ids.
TESTS = {
    "sliding window": ("test_hybrid_models.py", "Mistral"),
    "window and full": ("test_hybrid_models.py", "gpt-oss"),
    "chunks and full": ("test_hybrid_models.py", "Llama 4"),
    "recurrent and full": ("test_hybrid_models.py", "Qwen3.5"),
    "drafter and full": ("test_drafters.py", ""),
    "cross attention": ("test_cross_attention.py", ""),
}
# How the name of a row's test begins.
BEGINNINGS = {
    "`BlockManager`": "preempted_sequences_come_back",
    "its prefix cache": "a_prompt_that_continues_at_any_position",
    "its prefix cache on the host": "a_prompt_found_on_the_host",
    "`KVCache`: swap to the host and to a store": "preempted_sequences_come_back",
    "`Scheduler`": "preempted_sequences_come_back",
    "its draft tokens": "rejected_draft_tokens_leave_no_trace",
    "prefix stores": "a_prompt_found_in_a_store_after_a_restart",
    "`Generator`": "a_prompt_that_continues_at_any_position",
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{column: partial(tiny_model, name or "DeepSeek-V3") for column, (_, name) in TESTS.items()},
    "cross attention": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ),
}


def kinds(groups: Groups) -> set[str]:
    return {group.kind for group in groups}


def compute_prompt(manager: BlockManager, prompt: list[int]) -> None:
    sequence = manager.allocate(prompt, chunk_tokens=8)
    complete(manager)
    manager.mark_computed(sequence)
    while chunk := manager.next_chunk(sequence, 8):
        manager.append([sequence], chunk)
        complete(manager)
        manager.mark_computed(sequence)
    manager.free([sequence])
    complete(manager)
    manager.check()


def manager_of(groups: Groups, *, prefix_caching: bool | PrefixCaching) -> BlockManager:
    return BlockManager(
        block_size=4, device_blocks=64, host_blocks=32, watermark=0.0, groups=groups, prefix_caching=prefix_caching
    )


def allocated(manager: BlockManager, groups: Groups) -> list[int]:
    encoder = {"encoder_tokens": [6]} if groups[-1].kind == "cross_attention" else {}
    return list(manager.allocate(counts=[len(PROMPT)], **encoder))


def complete(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)


def held(cache: KVCache, sequence: int, groups: Groups) -> NDArray[np.uint8]:
    """The bytes of a sequence's blocks, without the null block, which groups with windows and states have."""
    blocks = np.concatenate([cache.manager.block_table(sequence, group=group) for group in range(len(groups))])
    has_null = any(group.kind in {"sliding_window", "chunked_attention", "recurrent"} for group in groups)
    rows = cache.engine.read("device", (blocks[blocks != 0] if has_null else blocks).astype(np.int64))
    return np.asarray(rows)


def cells() -> list[tuple[str, str, str]]:
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    columns = next(line for line in lines if line.startswith("| works with |")).strip("| ").split(" | ")[1:]
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        row, *words = line.strip("| ").split(" | ")
        found += [(row, column, word) for column, word in zip(columns, words, strict=True)]
    return found


def test_the_table_has_each_row_and_column():
    assert {(row, column) for row, column, _ in cells()} == {(row, kind) for row in ROWS for kind in GROUPS}


def test_each_yes_has_a_test_with_a_real_model():
    files = [f"tests/integrations/test_{name}.py" for name in ("hybrid_models", "drafters", "cross_attention")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for row, column, word in cells():
        file, model = TESTS[column]
        named = rf"\[(.*-)?{re.escape(model)}(-.*)?\]" if model else r"(\[.*\])?"
        runs_it = rf"^tests/integrations/{file}::test_{BEGINNINGS[row]}\w*{named}$"
        assert word == "no" or re.search(runs_it, found, re.MULTILINE), f"no test of {row} runs {column}"


@pytest.mark.parametrize("column", [column for column, (_, model) in TESTS.items() if model])
def test_the_model_of_a_column_has_its_layers(column: str):
    assert kinds(hybrid.open_model(MODELS[column](), block_size=4).groups) == kinds(GROUPS[column])


@pytest.mark.parametrize(("row", "column", "word"), cells())
def test_each_cell_of_the_table_is_true(row: str, column: str, word: str):
    assert word in {"yes", "no"} or (row, word) == ("`Generator`", "without the drafter")
    if word != "no":
        ROWS[row](column)
        return
    with pytest.raises((InvalidArgumentError, UnsupportedModelError), match=r"group|window|layers|encoder|recurrent"):
        ROWS[row](column)
