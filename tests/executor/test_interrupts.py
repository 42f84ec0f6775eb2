"""An exception at any place strands no step, hides no loss, leaks no staging, and lets no wrong byte through."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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
from blockyard.errors import UnknownTicketError
from blockyard.executor.executor import StepDone, StepExecutor
from blockyard.executor.parallel import ParallelExecutor
from blockyard.layout.kv import KVLayout
from blockyard.stores import Completion, ExternalStore, open_store

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
BLOCKS = 8
EXECUTOR = ("executor/executor.py", "executor/legs.py", "stores/checked_store.py", "engine/transfers.py")
CACHE = (
    "blockyard/cache.py",
    "executor/executor.py",
    "executor/parts.py",
    "executor/legs.py",
    "stores/checked_store.py",
    "executor/tickets.py",
    "prefix_store/loads.py",
    "prefix_store/store.py",
    "prefix_store/writes.py",
)
STORES = tuple(
    f"stores/threaded/{name}.py" for name in ("batches", "breaker", "known_keys", "order", "store", "value_format")
)
STORES += ("stores/value.py", "blockyard/workers.py")
STRIPED = ("stores/striped.py", "stores/checked_store.py")
TIERS = ("device", "host", "external")


class Rig:
    """Two sequences with known bytes, and each way of going through the tiers and back."""

    def __init__(self, engine: CacheEngine, store: ExternalStore, *, polls: bool) -> None:
        self.engine = engine
        self.polls = polls
        self.executor = StepExecutor(engine, store, chunk_bytes=LAYOUT.bytes_per_block)
        self.manager = BlockManager(
            block_size=4, device_blocks=BLOCKS, host_blocks=BLOCKS, external_blocks=BLOCKS, watermark=0.0
        )
        self.live = [int(handle) for handle in self.manager.allocate(counts=[12, 8])]
        self.manager.complete(self.manager.take_decision().ticket)
        self.rows = {}
        for seed, handle in enumerate(self.live):
            blocks = self.blocks(handle)
            random = np.random.default_rng(seed)
            self.rows[handle] = random.integers(0, 256, (len(blocks), LAYOUT.bytes_per_block), dtype=np.uint8)
            engine.write("device", blocks, self.rows[handle])

    def blocks(self, handle: int) -> np.ndarray:
        return self.manager.block_table(handle).astype(np.int64)

    def run(self, interrupt: Interrupt) -> None:
        """Move both to every tier and back, with one interrupt; what is interrupted is called again."""
        first, second = self.live
        store, swap_in = partial(self.manager.swap_out, to="external"), self.manager.swap_in
        for moves in (
            ((store, first), (self.manager.swap_out, second)),
            ((swap_in, first), (swap_in, second)),
            ((self.manager.swap_out, first), (store, second)),
            ((swap_in, first), (swap_in, second)),
        ):
            for move, handle in moves:
                if handle in self.live:
                    move([handle])
            self.carry_out(self.manager.take_decision(), interrupt)
            self.manager.check()

    def carry_out(self, decision: StepDecision, interrupt: Interrupt) -> None:
        lost = self.polled(decision, interrupt) if self.polls else self.executed(decision, interrupt)
        assert not self.executor.is_open(decision.ticket)
        for handle in self.manager.complete(decision.ticket, lost).tolist():
            self.live.remove(handle)
            self.manager.free([handle])

    def executed(self, decision: StepDecision, interrupt: Interrupt) -> list[Pairs]:
        try:
            with interrupt.armed():
                return self.executor.execute(decision)
        except KeyboardInterrupt:
            return self.executor.execute(decision)

    def polled(self, decision: StepDecision, interrupt: Interrupt) -> list[Pairs]:
        ended: list[StepDone] = []
        deadline = time.monotonic() + 300
        while not ended:
            assert time.monotonic() < deadline, interrupt.where
            with suppress(KeyboardInterrupt), interrupt.armed():
                if not self.executor.num_in_flight:
                    self.executor.submit(decision)
                self.executor.lost(decision.ticket)
                ended = self.executor.poll()
        ((ticket, lost, _),) = ended
        assert ticket == decision.ticket
        return list(lost)

    def check(self) -> None:
        assert (self.executor.num_in_flight, self.executor.staged_bytes) == (0, 0)
        assert self.executor.poll() == []
        for handle in self.live:
            assert self.manager.tier(handle) == "device"
            assert np.array_equal(self.engine.read("device", self.blocks(handle)), self.rows[handle])
        self.manager.free(self.live)
        self.manager.check()
        assert all(self.manager.pool(tier).num_free == self.manager.pool(tier).num_blocks for tier in TIERS)


@contextmanager
def rig(folder: Path, *, polls: bool) -> Iterator[Rig]:
    with (
        open_store(f"file://{folder}", bytes_per_block=LAYOUT.bytes_per_block, num_slots=BLOCKS) as store,
        CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS) as engine,
    ):
        yield Rig(engine, store, polls=polls)


def every(*many: object) -> list[object]:
    """So many places, and in the slow run all of them."""
    return [*many, pytest.param(1 << 30, marks=pytest.mark.slow)]


@pytest.mark.parametrize("most", every(60))
@pytest.mark.parametrize("polls", [False, True])
def test_an_interrupt_at_any_place_ends_every_step_once(tmp_path: Path, polls: bool, most: int):
    def run(interrupt: Interrupt) -> None:
        with rig(tmp_path, polls=polls) as made, interrupt.installed():
            made.run(interrupt)
            made.check()

    places, raised = sweep(EXECUTOR, run, KeyboardInterrupt, most=most, seed=len(str(tmp_path)))
    assert places > 150
    assert raised > min(places, most) // 2


def test_what_an_interrupted_collect_has_found_is_reported_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_ticket: int) -> bool:
        raise KeyboardInterrupt

    with rig(tmp_path, polls=True) as made:
        made.manager.swap_out(made.live)
        decision = made.manager.take_decision()
        made.executor.submit(decision)
        with monkeypatch.context() as patched:
            patched.setattr(made.executor, "is_awaited", interrupted)
            until = time.monotonic() + 300
            while made.executor._steps:
                assert time.monotonic() < until
                with pytest.raises(KeyboardInterrupt):
                    made.executor.collect(decision.ticket)
        assert [done.ticket for done in made.executor.collect(decision.ticket)] == [decision.ticket]
        made.manager.complete(decision.ticket)


@pytest.mark.parametrize("most", every(60))
@pytest.mark.parametrize("call", ["poll", "collect", "wait"])
def test_an_interrupt_at_any_place_of_parallel_ranks_ends_every_decision_once(call: str, most: int):
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
                before = interrupt.where
                with suppress(KeyboardInterrupt), interrupt.armed():
                    executor.submit(decision)
                if may_lose := interrupt.where != before:
                    with suppress(UnknownTicketError):  # it was under way already
                        executor.submit(decision)
                ended: list[StepDone] = []
                until = time.monotonic() + 300
                while not ended:
                    assert time.monotonic() < until, interrupt.where
                    with suppress(KeyboardInterrupt), interrupt.armed():
                        if call == "wait":
                            ended.append(executor.wait(decision.ticket))
                        else:
                            ended = executor.poll() if call == "poll" else executor.collect(decision.ticket)
                assert [done.ticket for done in ended] == [decision.ticket]
                assert executor.poll() == []
                void = manager.complete(decision.ticket, ended[0].lost).tolist()
                assert void in ([[], handles.tolist()] if may_lose else [[]])
                if void:
                    return

    places, raised = sweep(("executor/parallel.py",), run, KeyboardInterrupt, most=most, seed=len(call))
    assert places > 15
    assert raised > min(places, most) // 2


# The first and last lines of threads are interrupted too, and nothing of ours is left to catch that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("most", every(10))
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("stores", "files"), [("memory", CACHE), ("file", CACHE), ("memory", STORES), ("disks", STRIPED)]
)
def test_an_exception_at_any_place_of_a_cache_loses_nothing(
    tmp_path: Path, stores: str, files: tuple[str, ...], error: type[BaseException], most: int
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
        until = time.monotonic() + 300
        while own_threads() - before:
            assert time.monotonic() < until, own_threads() - before
            time.sleep(0.001)

    with no_descriptor_left():
        places, raised = sweep(files, run, error, most=most, seed=most)
    assert raised > min(places, most) // 2


class SlowStore(SimulatedStore):
    """Storage that takes half a second for what is waited for."""

    def poll(self) -> list[int]:
        return []

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        if timeout != 0:
            time.sleep(0.5)
        return super().wait(ticket, timeout)


def test_an_interrupted_wait_for_storage_loses_nothing_and_can_be_made_again():
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        executor = StepExecutor(engine, SlowStore(BLOCKS, LAYOUT.bytes_per_block, seed=0))
        decision = StepDecision(1, [("swap_out", Pairs("device", "external", np.array([[0, 0], [1, 1]])))])
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(KeyboardInterrupt):
                executor.execute(decision)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert executor.num_in_flight == 1
        assert executor.execute(decision) == []
        assert (executor.num_in_flight, executor.staged_bytes) == (0, 0)


class InterruptedStore(SimulatedStore):
    """A plug-in that is interrupted inside each of its calls, before or after it has had its effect."""

    def __init__(self, call: str, *, after: bool) -> None:
        super().__init__(BLOCKS, LAYOUT.bytes_per_block, seed=0)
        self._eagerness = 1.0
        self.call, self.after = call, after

    def interrupt(self, call: str, *, after: bool) -> None:
        if (self.call, self.after) == (call, after):
            self.call = ""
            raise KeyboardInterrupt

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name not in {"submit_write", "submit_read", "poll", "wait"}:
            return found

        def interrupted(*arguments: object) -> object:
            self.interrupt(name, after=False)
            answer = found(*arguments)  # type: ignore[operator]
            self.interrupt(name, after=True)
            return answer

        return interrupted


@pytest.mark.parametrize("call", ["submit_write", "submit_read", "poll", "wait"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("polls", [False, True])
def test_an_interrupt_inside_the_store_ends_every_step_once(call: str, after: bool, polls: bool):
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS) as engine:
        store = InterruptedStore(call, after=after)
        made = Rig(engine, store, polls=polls)
        made.run(Interrupt(()))
        made.check()
        assert store.call == ""
