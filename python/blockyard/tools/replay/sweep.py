"""Sweeps: replay one trace through caches of many sizes and policies, on all cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.hits import ClassMemory, HybridMemory, replay_hits
from blockyard.tools.replay.packed import PackedTrace
from blockyard.workers.interrupts import interrupts_blocked

__all__ = ["Point", "open_executor", "read_blocks", "run_all", "sweep"]

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """The hits of one cache, within a window of the trace.

    Attributes:
        policy: eviction policy.
        device_blocks: blocks on the device.
        host_blocks: blocks on the host.
        hit_tokens: prompt tokens found in the window.
        host_hit_tokens: those of them that were found on the host.
        total_tokens: prompt tokens in the window.
        too_long: requests of the whole trace that do not fit the device.
        classes: memory of each page class at the end.
    """

    policy: str
    device_blocks: int
    host_blocks: int
    hit_tokens: int
    host_hit_tokens: int
    total_tokens: int
    too_long: int
    classes: tuple[ClassMemory, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found."""
        return self.hit_tokens / self.total_tokens if self.total_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        return asdict(self) | {"hit_rate": self.hit_rate}


def sweep(
    trace: PackedTrace,
    caches: Sequence[tuple[str, int, int]],
    *,
    first: int = 0,
    max_num_batched_tokens: int = 8192,
    hybrid: HybridMemory | None = None,
    executor: Executor | None = None,
    show: Callable[[int], object] = bool,
) -> list[Point]:
    """Replay a trace through many caches.

    Args:
        trace: the requests.
        caches: policy, device blocks and host blocks of each cache.
        first: the first request of the window; earlier ones only fill the cache.
        max_num_batched_tokens: maximum number of tokens in a step.
        hybrid: of a model with windows or states.
        executor: runs the replays; None for this thread.
        show: called with the number of caches that are done.

    Returns:
        One point per cache, in the same order.

    Raises:
        InvalidArgumentError: a policy is unknown, or a size out of range.
    """
    measure = partial(_measure, trace, first=first, max_num_batched_tokens=max_num_batched_tokens, hybrid=hybrid)
    return run_all([partial(measure, cache) for cache in caches], executor, show)


def run_all(calls: Sequence[Callable[[], T]], executor: Executor | None, show: Callable[[int], object]) -> list[T]:
    """Make calls in an executor, or in this thread if it is None; return their results in order.

    `show` is called with the number of calls that are done.
    """
    if executor is None:
        found = []
        for done, call in enumerate(calls, 1):
            found.append(call())
            show(done)
        return found
    with interrupts_blocked():  # this starts the processes
        futures = [executor.submit(call) for call in calls]
    for done, _ in enumerate(as_completed(futures), 1):
        show(done)
    return [future.result() for future in futures]


def _measure(trace: PackedTrace, cache: tuple[str, int, int], *, first: int, **options: Any) -> Point:
    policy, device_blocks, host_blocks = cache
    found = replay_hits(trace, policy, device_blocks, host_blocks=host_blocks, **options)
    host = int(found.host[first:].sum()) * trace.block_tokens
    return Point(
        policy=policy,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        hit_tokens=int(found.device[first:].sum()) * trace.block_tokens + host,
        host_hit_tokens=host,
        total_tokens=int(trace.input_tokens[first:].sum()),
        too_long=found.too_long,
        classes=found.classes,
    )


def read_blocks(text: str, distinct: int, *, least: int = 0) -> list[int]:
    """Parse sizes: numbers of blocks, or percentages of the trace's distinct blocks, separated by commas.

    A percentage of few blocks is rounded up to `least`; a number below it is refused.

        >>> read_blocks("1%,50", 1000)
        [10, 50]

    Raises:
        InvalidArgumentError: a size is neither, or out of range.
    """
    sizes = []
    for part in text.split(","):
        number, is_share = part.strip().removesuffix("%"), part.strip().endswith("%")
        try:
            value = float(number) * distinct / 100 if is_share else int(number)
        except ValueError:
            raise InvalidArgumentError(f"size {part.strip()!r} is neither a number nor a percentage") from None
        if not (0 if is_share else least) <= value < 2**31:
            raise InvalidArgumentError(f"size {part.strip()!r} is not from {least} to {2**31 - 1} blocks")
        sizes.append(max(round(value), least))
    return sizes


@contextmanager
def open_executor(jobs: int | None) -> Iterator[Executor | None]:
    """Open what runs the replays: `jobs` processes, one per core if None; yields None for this thread.

    The processes end with the block, even if an exception ends it before their work.
    """
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield None
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            for process in tuple(pool._processes.values()):  # noqa: SLF001 (`terminate_workers` is new in Python 3.14)
                process.terminate()
            if sys.version_info < (3, 11, 5):  # it waits forever for its thread that writes to them (gh-94777)
                pool._call_queue._reader.close()  # type: ignore[attr-defined]  # noqa: SLF001
            raise
