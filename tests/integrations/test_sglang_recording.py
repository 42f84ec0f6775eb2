"""What SGLang's adapters record under `BLOCKYARD_RECORD`, over its own interfaces or stand-ins."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_drivers
import pytest
import sglang_stand_in

from blockyard.tools.replay.hits import replay_hits
from blockyard.tools.replay.packed import PackedTrace
from blockyard.traces import read_trace

KEYS = [f"{n:064x}" for n in range(6)]


@pytest.fixture
def storage() -> Iterator[Any]:
    with engine_drivers.sglang():
        yield importlib.import_module("sglang.srt.mem_cache.hicache_storage")


def test_lookups_are_recorded_with_the_pages_before_them(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("BLOCKYARD_RECORD", str(path))
    engine = engine_drivers.SGLang({"root_dir": str(tmp_path / "pages"), "size": "1MiB"})
    backend, before = engine.backend, storage.HiCacheStorageExtraInfo(prefix_keys=KEYS[:2])
    other_rank = type(backend)(dataclasses.replace(engine.config, tp_rank=1, tp_size=2), {})
    other_rank.register_mem_pool_host(engine.pool)
    other_rank.on_host_pools_registered()
    backend.batch_exists(KEYS[:3])
    backend.batch_exists(KEYS[:3])  # asked again
    backend.batch_exists(KEYS[2:5], before)
    backend.batch_exists_v2(KEYS[2:3], [], before)
    backend.exists(KEYS[5])  # no prompt
    backend.batch_exists([])
    engine.close()
    other_rank.close()
    rows = read_trace(path)
    assert [list(row.hash_ids) for row in rows] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2]]
    page = engine.pool.page_size
    assert [(row.input_tokens, row.hash_tokens) for row in rows] == [
        (3 * page, page),
        (5 * page, page),
        (3 * page, page),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"trace.jsonl", "pages"}
    assert all(key not in path.read_text() for key in KEYS)


def test_without_the_variable_nothing_is_recorded(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLOCKYARD_RECORD", raising=False)
    engine = engine_drivers.SGLang({"root_dir": str(tmp_path / "pages"), "size": "1MiB"})
    assert engine.backend._recorder is None
    engine.close()


class Store(sglang_stand_in.Objects):
    """The objects that were offloaded."""

    def __init__(self, page_bytes: int) -> None:
        super().__init__(page_bytes)
        self.names: set[str] = set()

    def contains(self, keys: list[str], sizes: list[int], until: float) -> list[bool]:
        return [key in self.names for key in keys]


@pytest.fixture
def linker(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A linker that records to `trace.jsonl`; its store has what a test puts there."""
    monkeypatch.setenv("BLOCKYARD_RECORD", str(tmp_path / "trace.jsonl"))
    made = sglang_stand_in.linker(8, 1 << 20)
    made._objects = Store(8)
    made._recorder = importlib.import_module("blockyard.integrations.sglang.recording").record_queries([0, 0], 4)
    yield made
    made.close()


def look_up(linker: Any, request: str, keys: list[str]) -> int:
    """Return how many pages a request finds; afterwards the store has all of them."""
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    found = max(linker.lookup(request, [storage.PoolTransfer(name=storage.PoolName.KV, keys=keys)]), default=0)
    linker._objects.names.update(f"kv {key}" for key in keys)
    return found


def test_a_recording_of_the_linker_replays_to_the_same_hits(linker: Any, tmp_path: Path):
    chance, hits, texts = random.Random(1), [], [["root"]]
    for number in range(60):
        text = chance.choice(texts)[: chance.randint(1, 9)]
        text = [*text, *(f"{number}-{place}" for place in range(chance.randint(0, 4)))]
        texts.append(text)
        # A page that the engine has kept is not looked up, where an earlier lookup had it before the others.
        kept = chance.randrange(len(text)) if text in texts[:-1] else 0
        hits.append((kept, look_up(linker, f"{number}", text[kept:])))
        look_up(linker, f"{number}", text)  # asked again
    linker._recorder.close()
    trace = PackedTrace.of(read_trace(tmp_path / "trace.jsonl"))
    assert replay_hits(trace, "lru", 1000).device.tolist() == [kept + found for kept, found in hits]
    assert sum(kept for kept, _ in hits) > 5
    assert sum(found for _, found in hits) > 50


def test_the_linker_records_a_request_once_and_from_the_first_page_that_it_has_seen(linker: Any, tmp_path: Path):
    for request, keys in (
        ("a", KEYS[:3]),
        ("b", KEYS[4:]),
        ("a", KEYS[1:3]),
        ("c", KEYS[2:4]),
        ("d", []),
        ("e", KEYS[3:]),
    ):
        look_up(linker, request, keys)
    linker._recorder.close()
    rows = read_trace(tmp_path / "trace.jsonl")
    assert [list(row.hash_ids) for row in rows] == [[0, 1, 2], [3, 4], [0, 1, 2, 5], [0, 1, 2, 5, 3, 4]]
    assert [row.input_tokens for row in rows] == [13, 9, 17, 25]
