"""Threads that work for an engine or a host pool: how the interpreter ends beside them, and what a fork is told."""

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import in_child
from memory_stores import KeyedStore, put
from typing_extensions import Self

from blockyard import Pairs, StepDecision
from blockyard.engine import streams as module
from blockyard.engine.engine import CacheEngine
from blockyard.engine.host_pool import HostPool, _Work
from blockyard.engine.streams import WorkerStreams
from blockyard.engine.transfers import Transfer
from blockyard.errors import BlockyardError, ForkedError, OutOfMemoryError
from blockyard.executor.executor import StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.stores.adapters.jobs import Steps, StoreJobs
from blockyard.workers import threads

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
IDS = np.array([[0, 1]])
PATIENCE = 300.0
KINDS = ("swap_out", "swap_in", "copy", "move", "exchange")

# ---- the interpreter ends ----

SETUP = """
    import atexit, sys, threading
    import numpy as np, torch
    torch.set_num_threads(1)
    from blockyard.layout.kv import KVLayout
    from blockyard.engine.engine import CacheEngine
    from blockyard.engine.host_pool import HostPool
    layout = KVLayout("kv_first", num_layers=4, block_size=16, num_kv_heads=4, head_size=64, dtype="float32")
    ids = np.column_stack((np.arange(64), np.arange(64)))
    def engine():
        return CacheEngine(layout, device_blocks=64, host_blocks=64)
"""
BUSY = {
    "an engine with transfers": """
        kept = engine()
        for _ in range(200): kept.submit("swap_out", ids)
    """,
    "many small transfers, and the engine forgotten": """
        kept = engine()
        for _ in range(1000): kept.submit("swap_out", ids[:2])
        del kept
    """,
    "an engine whose worker waits for one that hangs": """
        first, kept = engine(), engine()
        gate = threading.Event()
        hangs = first.transfers.streams.launch("in", gate.wait)
        kept.transfers.streams.launch("in", lambda: None, [hangs])
        threading.Timer(0.5, gate.set).start()
    """,
    "a host pool that is made ready": """
        class Locker:
            def lock(self, address, num_bytes):
                torch.ones(1 << 16).sum()
                return ""
            def unlock(self, address): return ""
        kept = HostPool(1 << 16, 4096, locker=Locker(), chunk_bytes=4096)
    """,
}
ENDS = [("sys.exit(3)", 3, ""), ("raise ValueError('my bug')", 1, "ValueError: my bug"), ("pass", 0, "")]


def run_python(tmp_path: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text("\n".join(textwrap.dedent(part) for part in parts), encoding="utf-8")
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


# Each starts an interpreter and loads torch: every way to be busy once, and every way to end.
@pytest.mark.parametrize(("busy", "end"), list(zip(BUSY, [*ENDS, ENDS[0]], strict=True)))
def test_the_exit_code_and_the_traceback_are_the_programs_own(busy: str, end: tuple[str, int, str], tmp_path: Path):
    statement, code, last = end
    done = run_python(tmp_path, SETUP, BUSY[busy], statement)
    assert (done.returncode, "\n".join(done.stderr.splitlines()[-1:])) == (code, last), done.stderr


def test_exit_handlers_see_what_ended_and_what_was_given_up(tmp_path: Path):
    # Handlers run in the reverse order of their registration: the first after the workers have ended, the last before.
    before = """
        import atexit
        late = []
        atexit.register(lambda: [call() for call in late])
    """
    rest = """
        kept = engine()
        gate, hangs = threading.Event(), threading.Event()
        def hang():
            hangs.set()
            gate.wait()
        kept.transfers.streams.launch("in", hang)
        hangs.wait()
        first, second = kept.submit("swap_out", ids), kept.submit("swap_out", ids)
        # The worker is let go once the handlers run.
        threading.Timer(0.5, gate.set).start()
        late.append(lambda: [kept.transfers.wait(each) for each in (first, second)])
        late.append(lambda: print(first.error, second.error, sep="; "))
        late.append(kept.close)
        late.append(lambda: print("closed"))
    """
    done = run_python(tmp_path, before, SETUP, rest)
    given_up = "the interpreter ended before this work began"
    # The timer's thread is waited for first: by then all may have run.
    assert done.stdout.splitlines() in (
        [f"{given_up}; {given_up}", "closed"],
        [f"None; {given_up}", "closed"],
        ["None; None", "closed"],
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cache_that_is_closed_by_a_finalizer_does_not_abort_the_end_of_the_interpreter(tmp_path: Path):
    rest = """
        from blockyard import KVCache, KVLayout
        class Engine:
            def __init__(self):
                layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
                options = {"prefix_caching": True, "namespace": b"model", "prefix_store": f"file://{folder}?size=1MiB"}
                self.cache = KVCache(layout, device_blocks=16, **options)
            def __del__(self):
                self.cache.close()
        kept = Engine()
        sequence = kept.cache.manager.allocate(list(range(13)))
        with kept.cache.step():
            kept.cache.manager.mark_computed([sequence])
        sys.exit(3)
    """
    done = run_python(tmp_path, "import sys", f"folder = {str(tmp_path / 'store')!r}", rest)
    assert done.returncode == 3, done.stderr
    assert re.fullmatch(r"3 blocks were not written to .* before it was closed\n|", done.stderr)


def test_work_that_is_given_up_says_so_and_the_streams_take_no_more():
    streams, gate, begun = WorkerStreams(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert gate.wait(PATIENCE)

    running = streams.launch("in", hang)
    assert begun.wait(PATIENCE)
    queued = [streams.launch(name, gate.set) for name in ("out", "in")]
    streams._give_up()
    assert [str(event.error) for event in queued] == ["the interpreter ended before this work began"] * 2
    assert not running.query()
    gate.set()
    running.synchronize()
    assert running.error is None
    with pytest.raises(BlockyardError, match="the streams are closed"):
        streams.launch("in", gate.set)
    streams.close()


# ---- no memory ----


def wait_for_a_copy() -> None:
    event = WorkerStreams().launch("in", lambda: None)
    event.synchronize()
    assert event.error is not None
    raise event.error


def wait_for_host_memory() -> None:
    class Locker:
        lock = unlock = staticmethod(lambda *_: "")

    with HostPool(4, 1 << 16, locker=Locker()) as pool:
        pool.wait(4)


def wait_for_a_job() -> None:
    def job() -> Steps[None]:
        yield 0.001

    StoreJobs(KeyedStore(), "blockyard-test", {"one": 1}).submit("one", job()).result(PATIENCE)


STARVED: dict[str, tuple[type, str, Callable[[], None]]] = {
    "streams": (WorkerStreams, "_serve", wait_for_a_copy),
    "a host pool": (_Work, "run", wait_for_host_memory),
    "jobs over a store": (StoreJobs, "_serve", wait_for_a_job),
}


@pytest.mark.parametrize("what", STARVED)
def test_whoever_waits_for_a_thread_that_gets_no_memory_gets_an_error(what: str, monkeypatch: pytest.MonkeyPatch):
    def run(_: object) -> None:
        raise MemoryError

    owner, work, wait = STARVED[what]
    monkeypatch.setattr(owner, work, run)
    monkeypatch.setattr(threads, "_PAUSE_SECONDS", 0.001)
    with pytest.raises(OutOfMemoryError, match=r"thread blockyard-.* ended: out of memory"):
        wait()


def test_a_store_whose_threads_got_no_memory_starts_others(monkeypatch: pytest.MonkeyPatch):
    def run(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(threads, "_PAUSE_SECONDS", 0.001)
    with KeyedStore() as store:
        store.timeout_base = 0.1
        with monkeypatch.context() as patched:
            patched.setattr(KeyedStore, "_serve", run)
            while store.stats().errors < store.threads:
                put(store, 1)
        store.timeout_base = PATIENCE
        assert put(store, 1) == ("",)


def test_a_store_recovers_a_batch_once_there_is_memory(monkeypatch: pytest.MonkeyPatch):
    with KeyedStore() as store:
        store.threads = 1
        recover, fails = store._recover, [MemoryError] * 3

        def lack(taken: Any, error: BaseException) -> None:
            if fails:
                raise fails.pop()
            recover(taken, error)

        def end(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(store, "_recover", lack)
        with monkeypatch.context() as patched:
            patched.setattr(store, "_end", end)
            assert put(store, 1) == ("error",)
        assert put(store, 1) == ("",)


def test_work_whose_error_cannot_be_reported_ends_all_the_same(monkeypatch: pytest.MonkeyPatch):
    reported, fails = module._reported, [MemoryError]

    def report(error: BaseException) -> Exception:
        if fails:
            raise fails.pop()
        return reported(error)

    def work() -> None:
        raise SystemExit

    monkeypatch.setattr(module, "_reported", report)
    event = WorkerStreams().launch("in", work)
    event.synchronize()
    assert isinstance(event.error, MemoryError)


# ---- a fork ----


ENGINE_CALLS: dict[str, Callable[[CacheEngine, Transfer], object]] = {
    **{f"run {kind}": lambda e, _, kind=kind: e.run(kind, IDS) for kind in KINDS},
    **{f"submit {kind}": lambda e, _, kind=kind: e.submit(kind, IDS) for kind in KINDS},
    "submit, a prefetch": lambda e, _: e.submit("swap_in", IDS, prefetch=True),
    "read": lambda e, _: e.read("host", IDS[0]),
    "write": lambda e, _: e.write("host", IDS[0], np.zeros((2, LAYOUT.bytes_per_block), np.uint8)),
    "submit_read": lambda e, _: e.submit_read("device", IDS[0]),
    "submit_write": lambda e, _: e.submit_write("host", IDS[0], np.zeros((2, LAYOUT.bytes_per_block), np.uint8)),
    "fence": lambda e, _: e.fence(),
    "poll": lambda e, _: e.poll(),
    "order_compute": lambda _, transfer: transfer.order_compute(),
    "order_compute by layer": lambda _, transfer: transfer.order_compute(0),
    "done": lambda _, transfer: transfer.done,
    "wait": lambda _, transfer: transfer.wait(),
}


class Held:
    """An engine whose worker is in the middle of something, with a transfer behind it."""

    def __init__(self) -> None:
        self.engine = CacheEngine(LAYOUT, device_blocks=4, host_blocks=4)
        self.gate, begun = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            assert self.gate.wait(PATIENCE)

        self.streams = self.engine.transfers.streams
        self.hangs = self.streams.launch("in", hang)
        assert begun.wait(PATIENCE)
        self.transfer = self.engine.submit("swap_out", IDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.gate.set()
        assert self.transfer.wait().done, "the parent goes on"
        self.engine.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("locked", [False, True], ids=["idle", "locked"])
def test_every_call_of_an_engine_fails_at_once_in_a_fork_and_close_returns(locked: bool):
    with Held() as held:

        def check() -> None:
            for name, call in ENGINE_CALLS.items():
                with pytest.raises(ForkedError, match=f"a copy engine was created by process {os.getppid()}"):
                    call(held.engine, held.transfer)
                assert held.engine.transfers._submitted == 1, name
            with pytest.raises(ForkedError, match="a worker stream was created by"):
                held.hangs.synchronize()
            with pytest.raises(ForkedError, match="a worker stream was created by"):
                held.streams.launch("in", print)
            held.engine.close()
            held.engine.close()

        if not locked:
            in_child(check)
            return
        # As if the worker had been interrupted by the fork while it held its lock.
        with held.streams._changed:
            in_child(check)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_executor_in_a_fork_says_that_its_engine_is_not_there():
    with Held() as held:
        executor = StepExecutor(held.engine)
        executor.submit(StepDecision(1, [("swap_out", Pairs("device", "host", IDS))]))

        def check() -> None:
            more = StepDecision(2, [("swap_out", Pairs("device", "host", IDS))])
            for call in (lambda: executor.submit(more), lambda: executor.execute(more), executor.poll):
                with pytest.raises(ForkedError):
                    call()
            with pytest.raises(ForkedError):
                executor.wait(1)
            assert not executor.is_open(2)

        in_child(check)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_host_pool_in_a_fork_neither_waits_nor_unlocks_the_parents_memory():
    gate, begun, unlocked = threading.Event(), threading.Event(), []

    class Locker:
        def lock(self, address: int, num_bytes: int) -> str:
            if begun.is_set():
                assert gate.wait(PATIENCE)
            begun.set()
            return ""

        def unlock(self, address: int) -> str:
            unlocked.append(address)
            return ""

    pool = HostPool(4, 1 << 16, locker=Locker(), chunk_bytes=1 << 16)

    def check() -> None:
        # Ready or not: page-locked memory is the parent's.
        for blocks in (1, 4):
            with pytest.raises(ForkedError, match="a host pool was created by"):
                pool.wait(blocks)
        pool.close()
        assert not unlocked

    with pool._work.changed:
        in_child(check)
    gate.set()
    pool.wait(4)
    pool.close()
    assert len(unlocked) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_that_leaves_by_the_usual_way_waits_for_nothing(tmp_path: Path):
    fork = """
        import os
        kept = engine()
        for _ in range(200): kept.submit("swap_out", ids)
        pid = os.fork()
        if pid:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        sys.exit(7)
    """
    done = run_python(tmp_path, SETUP, fork)
    assert (done.returncode, done.stdout.strip()) == (7, "7"), done.stderr


def test_a_new_engine_works_in_a_fork():
    def check() -> None:
        torch.set_num_threads(1)
        with CacheEngine(LAYOUT, device_blocks=4, host_blocks=4) as engine:
            assert engine.submit("swap_out", IDS).wait().error is None

    in_child(check)
