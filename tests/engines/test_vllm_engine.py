"""vLLM itself, on a CPU, with and without ours: equal greedy tokens, and other tokens once a load is broken on purpose.

`make test-engines` makes the environment and names its Python in `ENGINES_PYTHON`.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import OURS, PYTHON, SPEC, serve

from blockyard.traces import read_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

POLICY = {
    "spec_name": "PolicyOnCpu",
    "spec_module_path": "cpu_specs",
    "cpu_bytes_to_use": 1 << 24,
    "eviction_policy": "AdaptivePolicy",
    "cache_policy_module_path": OURS,
}
# Eight chunks: most of what is stored leaves the host.
TIERING = {"spec_name": "TieringOnCpu", "spec_module_path": "cpu_specs", "cpu_bytes_to_use": 8 * 32768}
LOADED, STORED = "vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"
PROMOTED, FAILED = "vllm:kv_offload_tiering_read_bytes", "vllm:kv_offload_tiering_promotion_job_failures"


def tier(root: Path) -> dict[str, Any]:
    options = {"type": "BlockyardTier", "module_path": OURS, "root_dir": str(root), "size": "64MiB"}
    options["revision"] = "1"
    return {**TIERING, "secondary_tiers": [options]}


@pytest.mark.parametrize("extra", [SPEC, {**SPEC, "blocks_per_chunk": 2, "policy": "adaptive"}, POLICY])
def test_tokens_are_those_of_vllm_alone(folder: Path, alone: Any, extra: dict[str, Any]):
    found = serve(folder, extra=extra)
    assert found["tokens"] == alone["tokens"]
    assert found["counters"][STORED] > 0
    assert found["counters"][LOADED] > 0
    assert found["cached"] > alone["cached"]


def test_requests_are_recorded_with_their_chunks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("BLOCKYARD_RECORD", str(path))
    serve(folder, extra=SPEC)  # two rounds of six prompts of 100 tokens, with answers of 60
    rows = read_trace(path)
    assert [list(row.hash_ids) for row in rows] == 2 * [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(6)]
    assert {(row.input_tokens, row.hash_tokens) for row in rows} == {(96, 32.0)}
    answers = [list(row.output_hash_ids) for row in rows]
    assert sorted(number for answer in answers[:6] for number in answer) == list(range(18, 30))
    assert answers[6:11] == answers[:5]  # the engine ends before it tells that the last request has ended


def test_vllms_log_has_one_line_for_the_start_and_one_for_options_without_effect(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    store = f"file://{tmp_path}?size=64MiB"
    extra = {**SPEC, "prefix_store": store, "eviction_policy": "arc", "prefix_stores": store}
    for found in (r"0 blocks found", r"[1-9]\d* blocks found"):
        log = "\n".join(serve(folder, extra=extra, rounds=1)["log"])
        assert len(re.findall(r"Blockyard: |without effect", log)) == 2
        assert re.search(
            r"WARNING [\d-]+ [\d:]+ \[spec.py:\d+\] kv_connector_extra_config has options without effect: "
            r"'eviction_policy' \(use 'policy'\), 'prefix_stores' \(did you mean 'prefix_store'\?\)\n",
            log,
        )
        assert re.search(
            r"INFO [\d-]+ [\d:]+ \[spec.py:\d+\] Blockyard: 512 host chunks of 32768 bytes, policy lru, "
            rf"store {re.escape(store)}, namespace [0-9a-f]{{8}}, {found}\n",
            log,
        )


@pytest.mark.parametrize("what", ["loads", "wrong chunks"])
def test_a_broken_load_shows_in_the_tokens(folder: Path, alone: Any, what: str):
    assert serve(folder, extra=SPEC, sabotage=what)["tokens"] != alone["tokens"]


def test_chunks_come_back_from_the_tier_also_after_a_restart_and_damage_costs_no_token(
    folder: Path, alone: Any, tmp_path: Path
):
    found = serve(folder, extra=tier(tmp_path))
    assert found["tokens"] == alone["tokens"]
    assert found["counters"][PROMOTED] > 0
    again = serve(folder, extra=tier(tmp_path), rounds=1)
    assert again["tokens"] == alone["tokens"][:1]
    assert again["counters"][PROMOTED] > 0
    # Every second chunk loses a byte.
    slab = tmp_path / "blockyard-prefix.slab"
    content = bytearray(slab.read_bytes())
    for place in range(20000, len(content), 2 * 36864):
        content[place] ^= 0xFF
    slab.write_bytes(content)
    damaged = serve(folder, extra=tier(tmp_path), rounds=1)
    assert damaged["tokens"] == alone["tokens"][:1]
    assert damaged["counters"][FAILED] > 0


def test_a_broken_promotion_shows_in_the_tokens(folder: Path, alone: Any, tmp_path: Path):
    serve(folder, extra=tier(tmp_path), rounds=1)
    assert serve(folder, extra=tier(tmp_path), sabotage="promotions", rounds=1)["tokens"] != alone["tokens"][:1]
