"""One decision to all ranks: a report when the last has ended, the union of their losses, and workers that fail."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import pytest
from ranks_world import Forgetful, World

from blockyard import CacheEngine, KVLayout, Pairs, StepDecision, StepExecutor
from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError, WorkerError
from blockyard.executor import Executor, ParallelExecutor, RemoteExecutor, StepDone, serve_executor
from blockyard.tools.demo.executors import Wrapper

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="uint8")


def own_executor() -> StepExecutor:
    return StepExecutor(CacheEngine(LAYOUT, device_blocks=8, host_blocks=8))


def out(ticket: int, *blocks: int) -> StepDecision:
    return StepDecision(ticket, [("swap_out", Pairs("device", "host", [(block, block) for block in blocks]))])


class Losing(Wrapper):
    """Loses one block of each decision, and reports it on request."""

    def __init__(self, inner: Executor, block: int | None, *, held: bool = False) -> None:
        super().__init__(inner)
        self._block = block
        self.held = held

    def poll(self) -> list[StepDone]:
        return [] if self.held else [self._lose(done) for done in super().poll()]

    def wait(self, ticket: int) -> StepDone:
        return self._lose(super().wait(ticket))

    def _lose(self, done: StepDone) -> StepDone:
        if self._block is None:
            return done
        return done._replace(lost=(Pairs("device", "host", [(self._block, self._block)]),))


@contextmanager
def worker(executor: Executor, run=None) -> Iterator[RemoteExecutor]:
    """An executor behind a connection, in a thread."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve_executor, args=(theirs, executor, run))
    thread.start()
    try:
        yield RemoteExecutor(ours, name="rank 1")
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("seed", range(6))
def test_bytes_of_living_sequences_are_right_on_every_rank_whatever_is_lost(tmp_path: Path, seed: int):
    world = World(2 + seed % 3, seed, tmp_path, share=0.1)
    compared = 0
    for _ in range(12):
        for _ in range(10):
            world.step()
        world.drain()
        compared += world.check()
    assert compared > 500
    assert world.voided
    assert all(rank.losses for rank in world.faulty)
    world.close()


def test_a_loss_that_one_rank_keeps_to_itself_shows_in_the_bytes(tmp_path: Path):
    world = World(2, 0, tmp_path, share=0.3, merge=Forgetful)

    def run() -> None:
        while True:
            world.step()
            world.drain()
            world.check()

    with pytest.raises(AssertionError):
        run()
    world.close()


def test_a_decision_is_reported_when_the_last_rank_has_ended_it_with_all_losses():
    slow = Losing(own_executor(), 3, held=True)
    executor = ParallelExecutor([Losing(own_executor(), 1), slow, Losing(own_executor(), 1)])
    executor.submit(out(7, 1, 2, 3))
    for _ in range(200):
        assert executor.poll() == []
    assert [pairs.ids.tolist() for pairs in executor.lost(7)] == [[[1, 1]]]
    assert executor.is_awaited(7)
    slow.held = False
    ended = []
    while not ended:
        ended = executor.poll()
    assert [done.ticket for done in ended] == [7]
    assert [pairs.ids.tolist() for pairs in ended[0].lost] == [[[1, 1], [3, 3]]]
    assert executor.lost(7) == ()
    with pytest.raises(UnknownTicketError):
        executor.wait(7)


def test_a_step_waits_for_all_ranks_once_one_is_known_to_have_lost_blocks():
    executor = ParallelExecutor([Losing(own_executor(), None, held=True), Losing(own_executor(), 2)])
    executor.submit(out(1, 1, 2))
    ended = []
    while not ended:
        ended = executor.collect(1)
    assert [pairs.ids.tolist() for pairs in ended[0].lost] == [[[2, 2]]]


class Refusing(Wrapper):
    """Refuses its first decision."""

    refuses = True

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        if self.refuses:
            self.refuses = False
            raise MappingError("block 5 is out of range")
        super().submit(decision, by_layer=by_layer)


def test_a_decision_that_a_rank_refuses_is_raised_and_ends():
    executor = ParallelExecutor([Refusing(own_executor()), own_executor()])
    with pytest.raises(MappingError, match="out of range"):
        executor.submit(out(1, 5))
    with pytest.raises(UnknownTicketError, match="decision 1 is already in flight"):
        executor.submit(out(1, 5))
    done = executor.wait(1)
    assert [pairs.ids.tolist() for pairs in done.lost] == [[[5, 5]]]
    executor.submit(out(2, 1))
    assert executor.wait(2).lost == ()


@pytest.mark.parametrize("call", ["poll", "collect", "wait"])
def test_a_decision_that_a_rank_did_not_start_ends_on_all_and_is_lost(call: str):
    executor = ParallelExecutor([own_executor(), Refusing(own_executor())])
    with pytest.raises(MappingError, match="out of range"):
        executor.submit(out(1, 5))
    ended: list[StepDone] = []
    calls = {"poll": executor.poll, "collect": lambda: executor.collect(1), "wait": lambda: [executor.wait(1)]}
    while not ended:
        ended = calls[call]()
    assert [[pairs.ids.tolist() for pairs in done.lost] for done in ended] == [[[[5, 5]]]]
    assert executor.poll() == []


class Forgetting(Wrapper):
    """Knows no decision any more, and raises once when asked for those that ended."""

    raises = True

    def poll(self) -> list[StepDone]:
        if self.raises:
            self.raises = False
            raise StoreError("no answer")
        return []

    def wait(self, ticket: int) -> StepDone:
        raise UnknownTicketError(f"decision {ticket} is not under way")


def test_an_error_of_one_rank_costs_no_report_of_another():
    with worker(Losing(own_executor(), 2)) as remote:
        executor = ParallelExecutor([own_executor(), Forgetting(own_executor()), remote])
        executor.submit(out(1, 1, 2))
        executor.submit(out(2, 3))
        with pytest.raises(StoreError, match="no answer"):
            executor.collect(1)
        ended: list[StepDone] = []
        while not ended:
            ended = executor.collect(1)
        assert [[pairs.ids.tolist() for pairs in done.lost] for done in ended] == [[[[1, 1], [2, 2]]]]
        assert executor.wait(2).ticket == 2
        assert executor.poll() == []


def test_a_worker_answers_as_its_executor_does():
    with worker(Losing(own_executor(), 4)) as remote:
        executor = ParallelExecutor([own_executor(), remote])
        executor.submit(out(3, 4, 5))
        assert [pairs.ids.tolist() for pairs in executor.wait(3).lost] == [[[4, 4]]]
        with pytest.raises(UnknownTicketError, match=r"rank 1: .*decision 3 is not in flight"):
            remote.wait(3)
        assert remote.lost(3) == ()
        assert not remote.is_awaited(3)
        assert remote.poll() == []


def test_a_decision_that_a_worker_refuses_is_lost_with_a_reason():
    small = StepExecutor(CacheEngine(LAYOUT, device_blocks=8, host_blocks=2))
    with worker(small) as remote:
        remote.submit(out(1, 1, 5))
        assert remote.is_awaited(1)
        assert [pairs.ids.tolist() for pairs in remote.lost(1)] == [[[1, 1], [5, 5]]]
        done = remote.wait(1)
        assert [pairs.ids.tolist() for pairs in done.lost] == [[[1, 1], [5, 5]]]
        assert [type(error) for error in done.errors] == [StoreError]
        assert re.match(r"rank 1: .*5", str(done.errors[0]))
        remote.submit(out(2, 6))
        assert [done.ticket for done in remote.collect(2)] == [2]


def test_messages_run_in_order_with_the_ticket_of_the_last_decision():
    seen = []

    def run(message: object, ticket: int) -> object:
        seen.append((message, ticket))
        return len(seen)

    with worker(own_executor(), run) as remote:
        remote.tell("first")
        remote.submit(out(9, 1))
        remote.tell("second")
        assert remote.ask("third") == 3
    assert seen == [("first", 0), ("second", 9), ("third", 9)]


def test_an_error_of_a_worker_is_raised_with_its_name_from_then_on():
    def run(message: object, ticket: int) -> object:
        raise ValueError(f"no {message}")

    ours, theirs = Pipe()

    def serve() -> None:
        with pytest.raises(ValueError, match="no luck"):
            serve_executor(theirs, own_executor(), run)

    thread = threading.Thread(target=serve)
    thread.start()
    remote = RemoteExecutor(ours, name="rank 1")
    remote.tell("luck")
    with pytest.raises(WorkerError, match="rank 1 has failed: ValueError: no luck"):
        remote.poll()
    with pytest.raises(WorkerError, match="rank 1 has failed: ValueError: no luck"):
        remote.submit(out(1, 1))
    thread.join()


def test_a_worker_that_ends_or_hangs_is_an_error_in_bounded_time():
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(WorkerError, match="rank 2 has ended"):
        RemoteExecutor(ours, name="rank 2").poll()
    ours, theirs = Pipe()
    silent = RemoteExecutor(ours, name="rank 2", timeout=0.05)
    with pytest.raises(WorkerError, match=r"rank 2 has not answered for 0\.05 seconds"):
        silent.wait(1)
    theirs.close()


def test_after_an_interrupt_before_an_answer_the_worker_is_not_used_any_more():
    with worker(own_executor()) as remote:
        remote.begin("poll")  # an interrupt keeps the caller from reading the answer
        with pytest.raises(WorkerError, match="a call of rank 1 was interrupted before its answer"):
            remote.poll()


def test_a_worker_with_other_numbers_of_blocks_is_refused():
    engine = CacheEngine(LAYOUT, device_blocks=5, host_blocks=7)
    said = r"different numbers of device and host blocks: 8 and 8 on rank 0, 5 and 7 on rank 1"
    with worker(StepExecutor(engine)) as remote, pytest.raises(InvalidArgumentError, match=said):
        ParallelExecutor([own_executor(), remote])


def test_a_worker_that_is_lost_leaves_the_others_usable():
    ours, theirs = Pipe()
    theirs.close()
    with worker(own_executor()) as remote:
        with pytest.raises(WorkerError, match="rank 2 has ended"):
            ParallelExecutor([RemoteExecutor(ours, name="rank 2"), remote])
        assert remote.poll() == []


def test_ranks_are_named_where_there_are_none():
    with pytest.raises(InvalidArgumentError, match="executors is empty, must have one for each rank"):
        ParallelExecutor([])


def test_a_worker_ends_when_its_driver_is_killed(tmp_path: Path):
    program = """if True:
        import subprocess, sys
        from multiprocessing import get_context
        from blockyard import CacheEngine, KVLayout, StepExecutor
        from blockyard.executor import serve_executor

        def work(connection):
            layout = KVLayout("kv_first", 1, 4, num_kv_heads=1, head_size=8, dtype="uint8")
            serve_executor(connection, StepExecutor(CacheEngine(layout, device_blocks=8)), lambda message, _: message)

        if __name__ == "__main__":
            from blockyard.executor import RemoteExecutor
            ours, theirs = get_context("spawn").Pipe()
            # Python would wait for any other worker after an error here, and that worker for the pipe's end: forever.
            process = get_context("spawn").Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            assert RemoteExecutor(ours, timeout=300).ask("hello") == "hello"
            print("ready", flush=True)
            sys.stdin.read()
    """
    path = tmp_path / "driver.py"
    path.write_text(program)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, path], **pipes) as driver:
        assert driver.stdout
        assert driver.stdout.readline() == "ready\n"
        driver.kill()
        # The pipe ends when the last process that holds it does: the worker, too.
        assert driver.stdout.read() == ""


def test_one_scheduler_drives_workers_in_their_own_processes_through_three_tiers():
    example = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
    finished = subprocess.run([sys.executable, example], check=False, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    found = re.search(r"100 steps, (\d+) pairs .* (\d+) sequences voided, (\d+) tokens compared", finished.stdout)
    assert found, finished.stdout
    pairs, voided, compared = map(int, found.groups())
    assert pairs > 100
    assert voided > 0
    assert compared > 100
