"""Host memory that an engine's workers share with its scheduler, also after processes were killed."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_modules
from forks import PATIENCE, in_child

from blockyard.errors import InvalidArgumentError, OutOfMemoryError


@pytest.fixture
def region() -> Iterator[Any]:
    with vllm_modules.loaded(vllm_modules.KINDS[0]):
        from blockyard.integrations.vllm.region import SharedRegion

        yield SharedRegion


def start(work: Callable[[], object]) -> int:
    """Run this in a forked child, which then ends at once; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return pid


def killed(work: Callable[[], object]) -> None:
    """Run this in a child that is killed while it has what this returns."""
    os.waitpid(start(lambda: (work(), os.kill(os.getpid(), signal.SIGKILL))), 0)


def test_an_engine_that_ends_before_all_have_come_leaves_no_file(region: Any):
    one = region(f"test-{os.getpid()}-early", 4096, 2, 0)
    assert one._path.exists()
    one.close()
    assert not one._path.exists()


def test_the_scheduler_reads_what_each_worker_computes_with(region: Any):
    name = f"test-{os.getpid()}-identities"
    workers = [region(name, 4096, 3, 0, b"a" * 32), region(name, 4096, 3, 1)]
    scheduler = region(name, 4096, 3, 3)
    assert scheduler.identities == [b"a" * 32, bytes(32), bytes(32)]
    workers.append(region(name, 4096, 3, 2, b"c" * 32))
    assert scheduler.identities == [b"a" * 32, bytes(32), b"c" * 32]
    assert scheduler.is_complete


def test_the_scheduler_uses_no_memory_that_a_worker_has_not_mapped(region: Any):
    name = f"test-{os.getpid()}-alone"
    scheduler = region(name, 4096, 1, 1)
    assert not scheduler.is_complete
    with pytest.raises(InvalidArgumentError, match="place is 1, which another process has"):
        region(name, 4096, 1, 1)
    with pytest.raises(InvalidArgumentError, match="workers and scheduler have other options"):
        region(name, 8192, 1, 0)
    worker = region(name, 4096, 1, 0)
    assert scheduler.is_complete
    worker.mapping.tensor[7] = 9
    assert scheduler.rows(4)[0][0, 7] == 9
    with pytest.raises(OutOfMemoryError, match="bytes free, the host tier needs"):
        region(name, 1 << 50, 1, 0)
    with pytest.raises(InvalidArgumentError, match="place is 2, must be 0 to world_size 1"):
        region(name, 4096, 1, 2)


@pytest.mark.parametrize("part_bytes", [4096, 8192])
def test_a_name_whose_owners_were_killed_is_taken_over_with_fresh_memory(region: Any, part_bytes: int):
    name = f"test-{os.getpid()}-killed"

    def fill() -> Any:
        one = region(name, 4096, 1, 0)
        one.mapping.tensor.fill_(1)
        return one

    killed(fill)
    worker = region(name, part_bytes, 1, 0)
    assert not worker.mapping.tensor.any()
    assert not worker.is_complete
    scheduler = region(name, part_bytes, 1, 1)
    assert scheduler.is_complete
    assert not scheduler._path.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_of_a_process_leaves_its_file(region: Any):
    worker = region(f"test-{os.getpid()}-fork", 4096, 1, 0)
    in_child(worker.close)
    assert worker._path.exists()
    assert region(f"test-{os.getpid()}-fork", 4096, 1, 1).is_complete


def test_a_file_that_was_left_half_made_is_taken_over(region: Any):
    name = f"test-{os.getpid()}-half"
    one = region(name, 4096, 1, 0)
    path = one._path
    one.close()
    for size in (0, 4096, 3 * 4096):
        path.touch(0o600)
        os.truncate(path, size)
        again = region(name, 4096, 1, 0)
        assert path.stat().st_size == 3 * 4096
        again.close()


def test_a_name_with_an_owner_that_lives_is_not_taken(region: Any):
    name = f"test-{os.getpid()}-alive"
    scheduler = region(name, 4096, 2, 2)
    killed(lambda: region(name, 4096, 2, 0))
    # Its memory is of no use to the scheduler, which cannot know that a worker was replaced.
    with pytest.raises(InvalidArgumentError, match="place is 0, which another process has"):
        region(name, 4096, 2, 0)
    region(name, 4096, 2, 1)
    assert scheduler.is_complete


def test_processes_that_start_and_are_killed_at_any_time_end_in_one_memory(region: Any):
    rng = random.Random(5)

    def join(name: str, place: int) -> bool:
        """Map the memory; the worker writes what the scheduler then reads."""
        one = region(name, 4096, 1, place)
        until = time.monotonic() + PATIENCE
        if place == 0:
            one.mapping.tensor[:8] = 7
        while not (one.is_complete and one._parts[0].tensor[0] == 7):
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    for turn in range(12):
        name = f"test-{os.getpid()}-{turn}"
        first = start(lambda name=name, turn=turn: join(name, turn % 2))
        time.sleep(rng.random() * 0.01)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        both = [start(lambda name=name, place=place: join(name, place)) for place in (0, 1)]
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both] == [0, 0]
