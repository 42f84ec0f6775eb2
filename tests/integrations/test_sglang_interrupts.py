"""An exception at any place of what SGLang loads ends every transfer once, keeps no memory, and gives no wrong byte."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import engine_drivers
import numpy as np
import pytest
import sglang_stand_in
import torch
from adapter_calls import ERRORS, PATIENCE, Caller, every, settled, swept
from cache_program import own_threads
from engine_drivers import FaultyStore, HostPool, indices
from interrupts import Interrupt

from blockyard.stores import register
from blockyard.stores.adapters import objects

register("faulty")(FaultyStore)
OBJECTS = "stores/adapters/objects.py"
PAGES, LAYERS, TOKENS, WIDTH = 4, 2, 4, 8


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FaultyStore, "fault", "")
    with engine_drivers.sglang():
        yield


# ---- HiCache ----


class HiCacheProgram(Caller):
    """Pages of a host pool that go to the store and come back to other places."""

    def __init__(self, interrupt: Interrupt) -> None:
        super().__init__(interrupt)
        FaultyStore.media.clear()
        self.keys = [f"page {number}" for number in range(PAGES)]
        self.engine = engine_drivers.SGLang({"url": "faulty://hicache"})
        self.backend, self.pool = self.engine.backend, self.engine.pool
        assert isinstance(self.pool, HostPool)
        self.data = np.random.default_rng(0).integers(0, 256, (PAGES, self.engine.page_bytes), dtype=np.uint8)

    def run(self) -> None:
        whole = [self.store() and self.leading() == PAGES and self.load() and self.load_tensors() for _ in range(3)]
        assert sum(whole) >= 2, "what was not stored or found before is not now"
        self.call(self.backend.clear)
        assert not self.backend.clear(), "other engines keep their pages"
        assert self.leading() == 0
        assert self.store() or self.interrupt.where
        store = self.backend._objects["kv"]._store
        settled(lambda: not (store.stats().pending_bytes or store._batches.open), "the store keeps memory for a batch")
        self.call(self.backend.close)
        self.backend.close()
        assert self.leading() == 0

    def store(self) -> bool:
        self.pool.rows()[:PAGES] = self.data
        return all(self.call(self.backend.batch_set_v1, self.keys, indices(range(PAGES))))

    def leading(self) -> int:
        storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        found = self.call(self.backend.batch_exists_v2, self.keys, [])
        assert found.kv_hit_pages == self.call(self.backend.batch_exists, self.keys) or self.interrupt.where
        assert isinstance(found, storage.PoolTransferResult)
        return int(found.kv_hit_pages)

    def load(self) -> bool:
        self.pool.rows()[:] = 7
        good = self.call(self.backend.batch_get_v1, self.keys, indices(range(PAGES, 2 * PAGES)))
        for ok, row, page in zip(good, self.pool.rows()[PAGES:], self.data, strict=False):
            assert not ok or np.array_equal(row, page), "a wrong byte"
        return all(good)

    def load_tensors(self) -> bool:
        found = self.call(self.backend.batch_get, self.keys)
        for page, data in zip(found, self.data, strict=True):
            assert page is None or np.array_equal(page.view(torch.uint8).numpy(), data), "a wrong byte"
        return all(page is not None for page in found)


@pytest.mark.parametrize("most", every(10))
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.usefixtures("sglang")
def test_an_exception_at_any_place_of_hicaches_backend_leaves_right_pages_or_misses(
    error: type[BaseException], most: int
):
    def run(interrupt: Interrupt) -> None:
        before = own_threads()
        with interrupt.installed():
            HiCacheProgram(interrupt).run()
        settled(lambda: not own_threads() - before, "a thread is left")

    assert swept(("sglang/storage.py", "sglang/pages.py", OBJECTS), run, error, most) > 80


# ---- the linker ----


class DevicePool:
    """A pool of a CPU with keys and values of each layer, as SGLang describes one."""

    name, layer_mapping = "kv", {layer: (layer, layer) for layer in range(LAYERS)}
    indices_from_pool = "kv"

    def __init__(self) -> None:
        self.components = [[torch.zeros(64, WIDTH, dtype=torch.uint8) for _ in range(LAYERS)] for _ in range(2)]
        self.buffer_meta = [[(0, 0, TOKENS * WIDTH)] * LAYERS for _ in range(2)]

    def prepare_locations(self, slots: torch.Tensor) -> list[int]:
        return [int(slot) for slot in slots[::TOKENS]]

    def pages(self, first: int) -> torch.Tensor:
        rows = slice(first * TOKENS, (first + PAGES) * TOKENS)
        return torch.stack([buffer[rows].clone() for component in self.components for buffer in component])


class Counter:
    """SGLang's counter of layers, as far as the linker uses it."""

    def __init__(self) -> None:
        self.events: list[list[threading.Event]] = []
        self.errors: dict[int, BaseException] = {}

    def update_producer(self) -> int:
        self.events.append([threading.Event() for _ in range(LAYERS)])
        return len(self.events) - 1

    def complete(self, index: int, layer: int) -> None:
        self.events[index][layer].set()

    def fail(self, index: int, error: BaseException) -> None:
        self.errors[index] = error
        for event in self.events[index]:
            event.set()

    def finish(self, index: int) -> bool:
        assert all(event.wait(PATIENCE) for event in self.events[index]), "a load does not end"
        return index not in self.errors

    def reset(self) -> None:
        self.errors.clear()


class LinkerProgram(Caller):
    """Pages of a device pool that are offloaded, looked up, and loaded into other places, layer by layer."""

    def __init__(self, interrupt: Interrupt) -> None:
        super().__init__(interrupt)
        FaultyStore.media.clear()
        page = 2 * LAYERS * TOKENS * WIDTH
        self.pool = DevicePool()
        self.linker = sglang_stand_in.linker(page, 1 << 20)
        del self.linker.close  # the stand-in's
        self.linker._objects = objects.PrefixObjects("faulty://linker", sizes=[page], fields={})
        self.linker._reads = self.linker._objects.jobs("blockyard-sglang-read", {"read": 2})
        self.linker._group.num_layers, self.linker.pools = LAYERS, {"kv": self.pool}
        self.linker._owner, self.linker._ranks = True, 1
        self.linker.layer_done_counter = Counter()
        self.linker.record_offload_ready = list
        self.keys = [f"{number:064x}" for number in range(PAGES)]
        random = torch.Generator().manual_seed(0)
        self.data = torch.randint(0, 256, (2 * LAYERS, PAGES * TOKENS, WIDTH), generator=random, dtype=torch.uint8)

    def run(self) -> None:
        whole = [self.offload() and self.load() for _ in range(3)]
        assert sum(whole) >= 2, "what was not stored or found before is not now"
        self.call(self.linker.lookup, "staged", self.transfers())
        self.call(self.linker.cancel_queued_load, "nobody")
        held = sum(page.nbytes for pages in self.linker._staged.values() for page in pages.values())
        assert self.linker._staged_bytes == held
        self.call(self.linker.reset)
        assert (self.linker._staged_bytes, len(self.linker._staged), self.linker.num_completed_offloads()) == (0, 0, 0)
        store = self.linker._objects._store
        settled(lambda: not (store.stats().pending_bytes or store._batches.open), "the store keeps memory for a batch")
        self.call(self.linker.close)
        self.linker.close()
        assert self.linker.lookup("late", self.transfers()) == []

    def transfers(self, first: int | None = None) -> list[Any]:
        slots = None if first is None else torch.arange(first * TOKENS, (first + PAGES) * TOKENS)
        storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        return [storage.PoolTransfer(name=storage.PoolName.KV, keys=list(self.keys), host_indices=slots)]

    def offload(self) -> bool:
        for buffer, rows in zip((b for component in self.pool.components for b in component), self.data, strict=True):
            buffer[: PAGES * TOKENS] = rows
        assert self.call(self.linker.offload, self.transfers(0))
        until = time.monotonic() + PATIENCE
        while not self.call(self.linker.num_completed_offloads):
            assert time.monotonic() < until, "an offload does not end"
            time.sleep(0.001)
        good = self.call(self.linker.pop_completed_offload)
        assert self.linker.num_completed_offloads() == 0, "an offload has ended twice"
        return good

    def load(self) -> bool:
        """Look pages up and load them as SGLang does; what an interrupted call has started has failed or landed."""
        self.pool.components[0][0][:] = 0
        found = self.call(self.linker.lookup, "one", self.transfers())
        if found != list(range(1, PAGES + 1)):
            return False
        if not self.call(self.linker.load, "one", self.transfers(8)):
            self.call(self.linker.cancel_queued_load, "one")
            return False
        ended, index = self.attempt(self.linker.start_layer_wise_loading)
        if not ended:
            index = self.linker.start_layer_wise_loading()  # what it has not started
        for number in range(len(self.linker.layer_done_counter.events)):
            self.linker.layer_done_counter.finish(number)
        if index == -1:
            return False
        good = self.call(self.linker.finish_layer_wise_loading, index)
        assert not good or torch.equal(self.pool.pages(8), self.data), "a wrong byte"
        return good


class Device:
    """A device whose events are there at once."""

    class Event:
        def record(self) -> None: ...
        def synchronize(self) -> None: ...


@pytest.mark.parametrize("most", every(25))
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.usefixtures("sglang")
def test_an_exception_at_any_place_of_the_linker_ends_every_transfer_once(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], most: int
):
    module = importlib.import_module("blockyard.integrations.sglang.linker")
    monkeypatch.setattr(module, "get_device_module", lambda: Device)

    def run(interrupt: Interrupt) -> None:
        before = own_threads()
        with interrupt.installed():
            LinkerProgram(interrupt).run()
        settled(lambda: not own_threads() - before, "a thread is left")

    assert swept(("sglang/linker.py", "sglang/pages.py", "stores/adapters/jobs.py"), run, error, most) > 80
