"""After an exception at any call, all that was in flight counts as lost: nothing is wrong, leaked, stuck or hanging."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from cache_program import BLOCKS as CACHE_BLOCKS
from cache_program import WIDTH, Program, no_descriptor_left, own_threads
from interrupts import Interrupt, sweep
from memory_stores import MemoryStore, QuotaStore
from simulated_device import SimulatedStore

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.executor import ParallelExecutor, StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.stores import ExternalStore, open_store

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
BLOCKS = 8
CACHE = (
    "blockyard/cache.py",
    "engine/engine.py",
    "engine/transfers.py",
    "executor/executor.py",
    "executor/loop.py",
    "executor/parts.py",
    "stores/checked_store.py",
    "prefix_store/loads.py",
    "prefix_store/store.py",
    "prefix_store/writes.py",
)
STORES = tuple(
    f"stores/threaded/{name}.py" for name in ("batches", "keyed_blocks", "known_keys", "store", "stored_values")
)
STORES += ("stores/value.py", "workers/buffers.py", "workers/logs.py", "workers/threads.py")
STORES += ("workers/interrupts.py", "workers/ownership.py")
STRIPED = ("stores/striped.py", "stores/checked_store.py")


def every(*many: object) -> list[object]:
    """So many places, and in the slow run all of them."""
    return [*many, pytest.param(1 << 30, marks=pytest.mark.slow)]


# The first and last lines of threads are interrupted too, and nothing of ours is left to catch that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("most", every(10))
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("stores", "files"), [("memory", CACHE), ("file", CACHE), ("memory", STORES), ("disks", STRIPED)]
)
def test_after_an_exception_at_any_call_of_a_cache_three_quiet_steps_succeed(
    tmp_path: Path, stores: str, files: tuple[str, ...], error: type[BaseException], twice: bool, most: int
):
    numbers = count()

    def run(interrupt: Interrupt) -> None:
        folder, before = tmp_path / str(next(numbers)), own_threads()
        with interrupt.installed():
            if stores == "memory":
                external = MemoryStore(bytes_per_block=WIDTH)
                prefix: ExternalStore | str = QuotaStore(bytes_per_block=WIDTH)
                external.num_slots = CACHE_BLOCKS["external"]
            else:
                folder.mkdir()
                disks = 1 if stores == "file" else 2
                swap, prefix = (
                    "file://" + ",".join(f"{folder}/{name}{disk}" for disk in range(disks)) for name in ("swap", "keys")
                )
                external = open_store(swap, bytes_per_block=WIDTH, num_slots=CACHE_BLOCKS["external"])
                prefix += "?size=1MiB"
            program = Program(interrupt, external, prefix)
            try:
                program.run()
            finally:
                program.close()
        assert program.hits == 5 or interrupt.where
        until = time.monotonic() + 10.0
        while own_threads() - before:
            assert time.monotonic() < until, own_threads() - before
            time.sleep(0.001)

    with no_descriptor_left():
        places, raised = sweep(files, run, error, most=most, seed=most, twice=twice)
    assert raised > min(places, most) // 2


@pytest.mark.parametrize("most", every(40))
@pytest.mark.parametrize("call", ["poll", "collect", "wait"])
def test_after_an_interrupt_at_any_call_of_parallel_ranks_every_decision_ends_once(call: str, most: int):
    def run(interrupt: Interrupt) -> None:
        manager = BlockManager(block_size=4, device_blocks=BLOCKS, host_blocks=BLOCKS, watermark=0.0)
        handles = manager.allocate(counts=[12, 8])
        manager.complete(manager.take_decision().ticket)
        with ExitStack() as stack:
            engines = [
                stack.enter_context(CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS)) for _ in range(2)
            ]
            executor = ParallelExecutor([StepExecutor(engine) for engine in engines])
            stack.enter_context(interrupt.installed())
            for move in (manager.swap_out, manager.swap_in, manager.swap_out):
                move(handles)
                decision = manager.take_decision()
                with suppress(KeyboardInterrupt), interrupt.armed():
                    executor.submit(decision)
                    executor.lost(decision.ticket)
                    while not interrupt.where and call != "wait" and executor._open:
                        executor.poll() if call == "poll" else executor.collect(decision.ticket)
                    executor.wait(decision.ticket) if call == "wait" else None
                if interrupt.where:
                    executor.give_up_all()
                    assert [done.ticket for done in executor.poll()] in ([], [decision.ticket])
                assert executor.poll() == []
                manager.fail(decision.ticket) if interrupt.where else manager.complete(decision.ticket)
                if interrupt.where:
                    return

    places, raised = sweep(("executor/parallel.py",), run, KeyboardInterrupt, most=most, seed=len(call))
    assert places > 15
    assert raised > min(places, most) // 2


class InterruptedStore(SimulatedStore):
    """A plug-in that is interrupted inside one of its calls, before or after it has had its effect."""

    def __init__(self, call: str, *, after: bool) -> None:
        super().__init__(BLOCKS, LAYOUT.bytes_per_block, seed=0)
        self._eagerness = 1.0
        self.call, self.after = call, after

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name not in {"submit_write", "submit_read", "poll", "wait"}:
            return found

        def interrupted(*arguments: object) -> object:
            interrupts = self.call == name
            if interrupts and not self.after:
                self.call = ""
                raise KeyboardInterrupt
            answer = found(*arguments)  # type: ignore[operator]
            if interrupts:
                self.call = ""
                raise KeyboardInterrupt
            return answer

        return interrupted


@pytest.mark.parametrize("call", ["submit_write", "submit_read", "poll", "wait"])
@pytest.mark.parametrize("after", [False, True])
def test_a_decision_that_an_interrupt_inside_the_store_meets_is_reported_lost_and_the_next_one_lands(
    call: str, after: bool
):
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS) as engine:
        rows = np.random.default_rng(0).integers(0, 256, (2, LAYOUT.bytes_per_block), dtype=np.uint8)
        engine.write("device", [0, 1], rows)
        store = InterruptedStore("", after=after)
        executor = StepExecutor(engine, store)
        there = ("swap_out", Pairs("device", "external", np.array([[0, 0], [1, 1]])))
        back = ("swap_in", Pairs("external", "device", np.array([[0, 4], [1, 5]])))
        assert executor.execute(StepDecision(1, [there])) == []
        store.call = call
        decision = StepDecision(2, [back if call == "submit_read" else there])

        def carry_out() -> None:
            executor.submit(decision)
            while call != "wait":
                executor.poll()
            executor.wait(2)

        with pytest.raises(KeyboardInterrupt):
            carry_out()
        (done,) = executor.poll()
        assert (done.ticket, [pairs.ids.tolist() for pairs in done.lost]) == (
            2,
            [decision.transfers()[0][1].ids.tolist()],
        )
        assert (executor.num_in_flight, executor.staged_bytes, store.call) == (0, 0, "")
        for ticket in (3, 5, 7):
            assert executor.execute(StepDecision(ticket, [there])) == []
            assert executor.execute(StepDecision(ticket + 1, [back])) == []
        np.testing.assert_array_equal(engine.read("device", [4, 5]), rows)
        for _ in range(100):
            executor.poll()
        assert not store._batches, "a ticket that nobody knows is let go"
