"""Two caches over one store that refuses, loses, damages, delays and hangs: no wrong byte, and every count holds."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kept_prefixes import BLOCK, WIDTH, CheckedCache, tokens
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard.errors import OutOfBlocksError

HOSTS = (8, 0)
CACHES = st.integers(0, len(HOSTS) - 1)
STREAMS = st.integers(0, 3)
LENGTHS = st.integers(1, 7 * BLOCK)
WHICH = st.integers(0, 10_000)
FAULTS = ("none", "refuse", "lose", "delay", "hang")


class FaultyStore(KeyedStore):
    """A prefix store that fails as it is told."""

    def __init__(self, medium: dict[bytes, NDArray[np.uint8]]) -> None:
        super().__init__(medium, bytes_per_block=WIDTH)
        self.num_slots = 12
        self.goes = threading.Event()
        self.fault = "none"
        self.before = self._fail

    def fail(self, fault: str) -> None:
        """Fail so from now on; what hangs goes on unless that is the fault."""
        self.fault = fault
        if fault == "hang":
            self.goes.clear()
        else:
            self.goes.set()

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        if self.fault == "lose":
            return np.ones(len(keys), np.bool_)
        return super().put(keys, rows)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        if self.fault == "lose":
            return np.zeros(len(keys), np.bool_)
        return super().get(keys, out)

    def _fail(self, name: str) -> None:
        if self.fault == "refuse":
            raise OSError("no space left")
        if self.fault == "delay":
            time.sleep(0.001)
        if self.fault == "hang":
            self.goes.wait(60)


class Machine(RuleBasedStateMachine):
    """Requests come to two caches; a store under both fails in every way."""

    @initialize(writes=st.sampled_from(("through", "back", "second_use")))
    def begin(self, writes: str) -> None:
        self.medium: dict[bytes, NDArray[np.uint8]] = {}
        self.writes = writes
        self.stores: list[FaultyStore] = []
        self.caches: list[CheckedCache] = []
        for host in HOSTS:
            self.stores.append(FaultyStore(self.medium))
            self.caches.append(self.open(self.stores[-1], host))

    def open(self, store: FaultyStore, host: int) -> CheckedCache:
        return CheckedCache(store, host=host, prefetch_timeout_base=0.02, prefix_writes=self.writes)

    @rule(at=CACHES, stream=STREAMS, count=LENGTHS)
    def load_and_serve(self, at: int, stream: int, count: int) -> None:
        self.caches[at].fetch(tokens(stream, count))
        self.serve(at, stream, count)

    @rule(at=CACHES, stream=STREAMS, count=LENGTHS)
    def load_beside(self, at: int, stream: int, count: int) -> None:
        self.caches[at].prefixes.prefetch(tokens(stream, count))

    @rule(at=CACHES, stream=STREAMS, count=LENGTHS)
    def serve(self, at: int, stream: int, count: int) -> None:
        with contextlib.suppress(OutOfBlocksError):  # blocks are being loaded or read for the store
            self.caches[at].serve(tokens(stream, count))

    @rule(at=CACHES)
    def poll(self, at: int) -> None:
        self.caches[at].prefixes.poll()

    @rule(blocks=st.integers(1, 4))
    def offload(self, blocks: int) -> None:
        cache = self.caches[0]
        cache.manager.prefix.offload(blocks)
        with cache.cache.step():
            pass
        cache.cache.drain()

    @rule(at=CACHES, fault=st.sampled_from(FAULTS))
    def fail(self, at: int, fault: str) -> None:
        self.stores[at].fail(fault)

    # What the store holds depends on its threads: nothing is drawn from that.
    @rule(which=WHICH, byte=WHICH, bit=st.integers(0, 7))
    def damage(self, which: int, byte: int, bit: int) -> None:
        rows = [row for row in list(self.medium.values()) if row.nbytes > WIDTH]
        if rows:
            row = rows[which % len(rows)]
            row[byte % row.nbytes] ^= 1 << bit

    @rule(which=WHICH, other=WHICH)
    def exchange(self, which: int, other: int) -> None:
        names = [name for name, row in list(self.medium.items()) if row.nbytes > WIDTH]
        if names:
            one, two = names[which % len(names)], names[other % len(names)]
            with contextlib.suppress(KeyError):  # the store evicts meanwhile
                self.medium[one], self.medium[two] = self.medium[two], self.medium[one]

    @rule(at=CACHES)
    def restart(self, at: int) -> None:
        self.stores[at].fail("none")
        self.caches[at].close()
        self.stores[at] = FaultyStore(self.medium)
        self.caches[at] = self.open(self.stores[at], HOSTS[at])

    @invariant()
    def all_that_can_be_found_has_its_bytes(self) -> None:
        for cache in getattr(self, "caches", ()):
            cache.check()

    def teardown(self) -> None:
        for store, cache in zip(getattr(self, "stores", ()), getattr(self, "caches", ()), strict=True):
            store.fail("none")
            assert cache.prefixes.wait(60)
            assert cache.prefixes.wait(60, until=lambda cache=cache: not cache.prefixes.num_open)  # type: ignore[misc]
            cache.check()
            assert not any(cache.cache.stats().leased_blocks.values()), "a lease is left behind"
            cache.close()


def test_whatever_a_store_does_no_byte_is_wrong_and_nothing_stays_leased() -> None:
    thorough = settings().max_examples >= 1000
    chosen = settings(max_examples=300 if thorough else 12, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Machine, settings=chosen)  # type: ignore[no-untyped-call]
