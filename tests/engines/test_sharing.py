"""Engines of vLLM with other block sizes read from a store what one wrote, if their chunks have as many tokens."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import CONNECTOR, HERE, PYTHON, SPEC, environment, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

LARGE = {"block_size": 64, "num_gpu_blocks_override": 24}


def test_blocks_of_64_tokens_are_read_from_chunks_of_two_blocks_of_32(folder: Path, alone: Any, tmp_path: Path):
    external = {"prefix_store": f"file://{tmp_path}?size=64MiB", "prefetch_timeout_base": 60, "weights_fixed": True}
    extra = {"host_bytes": "16MiB", "canonical_layout": True, **external}
    options: dict[str, Any] = {"connector": CONNECTOR, "rounds": 1}
    small = serve(folder, extra={**extra, "blocks_per_chunk": 2}, **options)
    assert small["tokens"] == alone["tokens"][:1]
    assert small["external"][0]["written"] > 0
    found = {}
    for order in ("", "token order"):
        found[order] = serve(folder, extra=extra, engine=LARGE, sabotage=order, **options)
        assert found[order]["external"][0]["loaded"] >= 6  # of each prompt one
    assert found[""]["tokens"] == alone["tokens"][:1]
    assert found["token order"]["tokens"] != alone["tokens"][:1]


def test_two_ranks_with_blocks_of_64_tokens_read_what_one_with_blocks_of_32_wrote(folder: Path, tmp_path: Path):
    external = {"prefix_store": f"file://{tmp_path}?size=64MiB", "prefetch_timeout_base": 60, "weights_fixed": True}
    extra = {**external, "canonical_layout": True}
    small = {**extra, "host_bytes": "16MiB", "blocks_per_chunk": 2}
    wrote = serve(folder, extra=small, connector=CONNECTOR, rounds=1)["external"][0]["written"]
    ranks = {**LARGE, "tensor_parallel_size": 2}
    wanted = serve(folder, engine=ranks, rounds=1)["tokens"]
    # With one block a chunk, vLLM's own keys are those of chunks.
    read = serve(folder, engine=ranks, extra={**SPEC, **extra}, rounds=1)
    assert wrote >= read["external"][0]["loaded"] >= 6
    assert read["tokens"] == wanted


def test_keys_of_chunks_are_those_of_an_engine_with_blocks_of_as_many_tokens():
    script = [PYTHON, str(HERE / "chunk_keys.py")]
    finished = subprocess.run(script, check=False, capture_output=True, text=True, timeout=1800, env=environment())
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.splitlines()[-1] == "4 kinds of requests: equal keys"
