"""What `BlockyardHiCache` records under `BLOCKYARD_RECORD`, over SGLang's own interfaces or stand-ins."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_drivers
import pytest

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
