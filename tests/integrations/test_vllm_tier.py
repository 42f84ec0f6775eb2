"""`BlockyardTier`, over vLLM's own abstract class (`VLLM_SOURCE`) or a stand-in of it."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_modules
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, StoreFullError
from blockyard.stores import register
from blockyard.testing.faults import corrupt_slots

CHUNKS, SHAPE = 8, (4, 1000)
KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(30)]


def memory(seed: int = 0) -> NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-128, 128, (CHUNKS, *SHAPE), dtype=np.int8)


class Tier:
    """A tier, and the primary memory over which it was made."""

    def __init__(self, vllm: SimpleNamespace, root: Path, *, dtype: str = "float16", **options: Any) -> None:
        self.vllm, self.memory, self.jobs = vllm, memory(), 0
        model = vllm.config.OffloadingModelConfig(name="model", dtype=dtype)
        self.context = vllm.base.ReqContext(req_id="one")
        self.tier = vllm.ours.BlockyardTier(
            offloading_spec=SimpleNamespace(config=vllm_modules.config(vllm, {}, model=model)),
            primary_kv_view=memoryview(self.memory),
            tier_type="BlockyardTier",
            backpressure_detector=None,
            **({"revision": "1"} | ({} if "url" in options else {"root_dir": str(root), "size": "1MiB"}) | options),
        )

    def submit(self, call: Any, keys: list[bytes], chunks: list[int], **more: Any) -> None:
        self.jobs += 1
        ids = np.array(chunks)
        call(self.vllm.tiering.TransferJob(self.jobs, keys, ids, call == self.tier.submit_load, self.context), **more)

    def run(self, call: Any, keys: list[bytes], chunks: list[int], **more: Any) -> Any:
        self.submit(call, keys, chunks, **more)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def store(self, keys: list[bytes], chunks: list[int]) -> Any:
        return self.run(self.tier.submit_store, keys, chunks)

    def load(self, keys: list[bytes], chunks: list[int], **more: Any) -> Any:
        return self.run(self.tier.submit_load, keys, chunks, **more)

    def lookups(self, keys: list[bytes]) -> str:
        return " ".join(self.tier.lookup(key, self.context).name for key in keys)


def test_a_chunk_comes_back_into_another_row_and_no_other_changes(vllm: SimpleNamespace, tmp_path: Path):
    tier = Tier(vllm, tmp_path)
    assert tier.tier.on_new_request(tier.context) == vllm.base.RequestOffloadingContext()
    assert tier.lookups(KEYS[:2]) == "MISS MISS"
    stored = tier.store(KEYS[:2], [3, 5])
    assert (stored.success, stored.transfer_bytes) == (True, 8000)
    assert tier.lookups(KEYS[:3]) == "HIT HIT MISS"
    wanted = tier.memory.copy()
    wanted[[0, 1]] = wanted[[5, 3]]
    assert tier.load([KEYS[1], KEYS[0]], [0, 1]).success
    assert np.array_equal(tier.memory, wanted)
    assert tier.load([], []).success
    tier.tier.shutdown()
    tier.tier.shutdown()


def test_vllms_label_of_its_hits_is_that_of_the_storage(vllm: SimpleNamespace, tmp_path: Path):
    for options, source in (({}, "DISK"), ({"url": "memory://tier?size=1MiB"}, "HOST")):
        tier = Tier(vllm, tmp_path, **options)
        assert tier.tier.cache_hit_source.name == source
        tier.tier.shutdown()


def test_expedited_is_taken(vllm: SimpleNamespace, tmp_path: Path):
    tier = Tier(vllm, tmp_path)
    tier.store(KEYS[:1], [3])
    assert tier.load(KEYS[:1], [0], expedited=True).success
    tier.tier.shutdown()


def test_chunks_are_found_after_a_restart_by_the_same_model_alone(vllm: SimpleNamespace, tmp_path: Path):
    first = Tier(vllm, tmp_path)
    first.store(KEYS[:3], [1, 2, 3])
    first.tier.shutdown()
    for options in ({"dtype": "float8"}, {"revision": "2"}):
        other = Tier(vllm, tmp_path, **options)
        assert other.lookups(KEYS[:3]) == "MISS MISS MISS"
        other.tier.shutdown()
    second = Tier(vllm, tmp_path)
    second.memory[:] = 0
    assert second.load(KEYS[:3], [5, 6, 7]).success
    assert np.array_equal(second.memory[5:], memory()[1:4])
    second.tier.shutdown()


def test_a_damaged_chunk_is_a_failure_once_and_then_a_miss(vllm: SimpleNamespace, tmp_path: Path):
    tier = Tier(vllm, tmp_path)
    tier.store(KEYS[:3], [1, 2, 3])
    corrupt_slots(tier.tier._store, [1])
    before = tier.memory.copy()
    result = tier.load(KEYS[:4], [4, 5, 6, 7])
    assert not result.success
    good = [key for key in KEYS[:3] if key in result.successful_keys]
    assert len(good) == 2
    for key, chunk in zip(KEYS[:4], [4, 5, 6, 7], strict=True):
        source = KEYS.index(key) + 1 if key in good else chunk
        assert np.array_equal(tier.memory[chunk], before[source])
    assert tier.lookups(KEYS[:4]) == " ".join("HIT" if key in good else "MISS" for key in KEYS[:4])
    assert tier.store(KEYS[:3], [1, 2, 3]).success
    assert tier.load(KEYS[:3], [4, 5, 6]).success
    tier.tier.shutdown()


def test_chunks_that_do_not_come_for_a_reason_that_passes_stay_and_are_misses_for_a_while(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    medium: dict[bytes, NDArray[np.uint8]] = {}

    @register("troubled-tier")
    class Troubled(KeyedStore):
        def __init__(self, url: str, **options: Any) -> None:
            super().__init__(medium, **options)

    def refuse(called: str) -> None:
        if called == "get":
            raise ConnectionRefusedError("connection refused")

    tier = Tier(vllm, tmp_path, root_dir=None, url="troubled-tier://")
    assert tier.store(KEYS[:3], [1, 2, 3]).success
    before = dict(medium)
    tier.tier._store.before = refuse
    assert not tier.load(KEYS[:3], [4, 5, 6]).success
    assert tier.lookups(KEYS[:3]) == "MISS MISS MISS", "an engine would ask again in each step"
    tier.tier._store.before = lambda called: None
    assert medium == before
    until = time.monotonic() + 60
    while tier.lookups(KEYS[:3]) != "HIT HIT HIT":
        assert time.monotonic() < until
        time.sleep(0.01)
    assert tier.load(KEYS[:3], [4, 5, 6]).success
    tier.tier.shutdown()


def test_a_store_that_fails_is_a_result_and_a_miss(vllm: SimpleNamespace, tmp_path: Path):
    tier = Tier(vllm, tmp_path)
    tier.store(KEYS[:1], [1])
    tier.tier._store.close()
    assert not tier.store(KEYS[1:2], [1]).success
    failed = tier.load(KEYS[:1], [4])
    assert (failed.success, list(failed.successful_keys or [])) == (False, [])
    assert np.array_equal(tier.memory, memory())


def test_each_job_has_one_result_and_a_key_that_is_being_stored_is_retried(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier, hold = Tier(vllm, tmp_path), threading.Event()
    parts = tier.tier._parts
    monkeypatch.setattr(tier.tier, "_parts", lambda count: hold.wait(300) and parts(count))
    for n in range(5):
        tier.submit(tier.tier.submit_store, KEYS[n : n + 2], [0, 1])
    assert tier.lookups(KEYS[:7]) == "RETRY RETRY RETRY RETRY RETRY RETRY MISS"
    assert not list(tier.tier.get_finished_jobs())
    hold.set()
    tier.tier.drain_jobs()
    assert tier.lookups(KEYS[:7]) == "HIT HIT HIT HIT HIT HIT MISS"
    assert sorted(result.job_id for result in tier.tier.get_finished_jobs()) == [1, 2, 3, 4, 5]
    assert not list(tier.tier.get_finished_jobs())
    tier.tier.shutdown()


def test_a_job_larger_than_the_memory_of_the_store_goes_in_parts(vllm: SimpleNamespace, tmp_path: Path):
    tier = Tier(vllm, tmp_path, url=f"file://{tmp_path}?size=1MiB&memory=32KiB", root_dir=None)
    tier.tier._batch = 2
    assert tier.store(KEYS, [n % CHUNKS for n in range(30)]).success
    tier.memory[:] = 0
    assert tier.load(KEYS[:8], list(range(8))).success
    assert np.array_equal(tier.memory, memory())
    tier.tier.shutdown()


def test_the_store_stays_within_its_size(vllm: SimpleNamespace, tmp_path: Path):
    tier = Tier(vllm, tmp_path, size="64KiB")
    for key in KEYS:
        assert tier.store([key], [0]).success
    assert tier.lookups(KEYS[-3:]) == "HIT HIT HIT"
    assert 0 < tier.lookups(KEYS).count("HIT") < 16
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 80 << 10
    tier.tier.shutdown()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"root_dir": None}, InvalidArgumentError, "must give exactly one of them"),
        ({"url": "file:///x", "root_dir": "/x"}, InvalidArgumentError, "must give exactly one of them"),
        ({"size": 100}, StoreFullError, "100"),
        (
            {"revision": ""},
            InvalidArgumentError,
            "revision is empty.*vLLM tells a tier the model's name, not its weights",
        ),
    ],
)
def test_an_option_out_of_range_is_refused(
    vllm: SimpleNamespace, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        Tier(vllm, tmp_path, **options)
