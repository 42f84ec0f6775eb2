"""vLLM on a CPU with two tensor-parallel ranks, processes of their own: a chunk is a hit when all have finished."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import HERE, PYTHON, SPEC, environment, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

RANKS = {"tensor_parallel_size": 2}
UNEVEN = {**SPEC, "spec_name": "UnevenRanks", "spec_module_path": "cpu_specs"}
LOADED, STORED = "vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Any:
    """What two ranks say without us."""
    return serve(folder, engine=RANKS)["tokens"]


def test_ranks_of_which_one_stores_late_serve_the_tokens_of_vllm_alone_also_from_a_store(
    folder: Path, wanted: Any, tmp_path: Path
):
    external = {"prefix_store": f"file://{tmp_path}?size=64MiB", "prefetch_timeout_base": 60, "weights_fixed": True}
    # Without a fault, but device and host are empty when a round begins.
    found = serve(folder, engine=RANKS, extra={**UNEVEN, **external, "last_rank": "late"}, faults=["", ""])
    assert found["tokens"] == [wanted[0]] * 2
    assert found["counters"][STORED] > 0
    assert found["counters"][LOADED] > 0
    cold, warm = found["external"]
    assert cold["written"] > 0
    assert warm["loaded"] > cold["loaded"]


def test_a_rank_that_loads_nothing_shows_in_the_tokens(folder: Path, wanted: Any):
    found = serve(folder, engine=RANKS, extra={**UNEVEN, "last_rank": "loads nothing"})
    assert found["counters"][LOADED] > 0
    assert found["tokens"] != wanted


def test_two_ranks_read_from_a_store_what_one_wrote(folder: Path, wanted: Any, tmp_path: Path):
    external = {"prefix_store": f"file://{tmp_path}?size=64MiB", "prefetch_timeout_base": 60, "weights_fixed": True}
    extra = {**SPEC, **external, "canonical_layout": True}
    (wrote,) = serve(folder, extra=extra, faults=[""])["external"]
    read = serve(folder, engine=RANKS, extra=extra, faults=[""])
    assert read["external"][0]["loaded"] == wrote["written"] > 0
    assert read["external"][0]["written"] == 0
    assert read["tokens"] == wanted[:1]
    swapped = {"spec_name": "SwappedHeads", "spec_module_path": "cpu_specs"}
    wrong = serve(folder, engine=RANKS, extra={**extra, **swapped}, faults=[""])
    assert wrong["external"][0]["loaded"] > 0
    assert wrong["tokens"] != wanted[:1]


def test_vllms_own_mappings_give_the_same_rows_at_every_size_and_in_every_layout():
    script = [PYTHON, str(HERE / "rows_of_sizes.py")]
    finished = subprocess.run(script, check=False, capture_output=True, text=True, timeout=1800, env=environment())
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.splitlines()[-1] == "56 layouts, 504 engines: equal rows"
