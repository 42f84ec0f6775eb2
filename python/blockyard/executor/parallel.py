"""Carries out each decision on the executors of all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import BlockyardError, InvalidArgumentError, UnknownTicketError
from blockyard.executor.executor import Executor, StepDone
from blockyard.executor.remote import RemoteExecutor

__all__ = ["ParallelExecutor"]

T = TypeVar("T")


class ParallelExecutor(Executor):
    """Submits each decision to every rank, and reports it when all ranks have carried it out.

    Block ids are the same on every rank, because each holds its share of every block's heads. A block lost by one rank
    is lost for all: the report contains the union of the ranks' losses, so that the manager drops the sequence.

    Args:
        executors: one for each rank, rank 0 first. Each has an engine with the same numbers of blocks and, if there is
            an external tier, its own store.

    Attributes:
        executors: as given.

    Raises:
        InvalidArgumentError: there are no executors.

    Example:
        >>> import numpy as np
        >>> from blockyard import BlockManager, CacheEngine, KVLayout, StepExecutor
        >>> from blockyard.executor import ParallelExecutor
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
        >>> engines = [CacheEngine(layout, device_blocks=8, host_blocks=8) for rank in range(2)]
        >>> executor = ParallelExecutor([StepExecutor(engine) for engine in engines])
        >>> manager = BlockManager(block_size=4, device_blocks=8, host_blocks=8)
        >>> sequence = manager.allocate(6)
        >>> _ = manager.complete(manager.take_decision().ticket)
        >>> manager.swap_out(sequence)
        >>> executor.submit(decision := manager.take_decision())
        >>> done = executor.wait(decision.ticket)
        >>> manager.complete(done.ticket, done.lost).tolist(), manager.tier(sequence)
        ([], 'host')
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        if not executors:
            raise InvalidArgumentError("executors is empty, must have one for each rank")
        self.executors = tuple(executors)
        self._reports: dict[int, dict[int, StepDone]] = {}  # by ticket and rank, until all ranks have reported
        self._answers: list[tuple[int, list[StepDone]]] = []  # by rank, of which the reports have no entries yet

    def __repr__(self) -> str:
        return f"ParallelExecutor({len(self.executors)} ranks, reported by some: {sorted(self._reports)})"

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision on every rank; see `StepExecutor.submit`.

        Raises:
            BlockyardError: raised by the first rank that refuses it; the others have started it. Call `wait` to end it.
        """
        refused: BlockyardError | None = None
        # Workers start first, so that they run concurrently with this process.
        for executor in sorted(self.executors, key=lambda each: not isinstance(each, RemoteExecutor)):
            try:
                executor.submit(decision, by_layer=by_layer)
            except BlockyardError as error:  # noqa: PERF203 (the others must still start)
                refused = refused or error
        if refused is not None:
            raise refused

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Make compute of this process wait for one layer of a step's loads; workers wait for theirs."""
        for executor in self.executors:
            executor.wait_for_layer(ticket, layer)

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Return the pairs known so far to be lost on any rank."""
        found = [pairs for lost in self._ask_all("lost", ticket) for pairs in lost]
        found += [pairs for done in self._reports.get(ticket, {}).values() for pairs in done.lost]
        return _union(found)

    def is_awaited(self, ticket: int) -> bool:
        """Whether any rank's compute has read blocks that the decision loads, or any rank has lost some."""
        known = any(done.lost for done in self._reports.get(ticket, {}).values())
        return any(self._ask_all("is_awaited", ticket)) or known

    def poll(self) -> list[StepDone]:
        """Return the decisions that ended on all ranks since the last call; never waits for a transfer."""
        self._take("poll")
        # No call follows, so no interrupt can come before the caller has the result.
        merged, self._reports = self._sort_out()
        return merged

    def collect(self, ticket: int) -> list[StepDone]:
        """Return the decisions that ended, including this one if a rank awaits it; see `Executor`."""
        self._take("collect", ticket)
        if any(done.lost for done in self._reports.get(ticket, {}).values()):
            self._finish(ticket)
        merged, self._reports = self._sort_out()  # as in `poll`
        return merged

    def wait(self, ticket: int) -> StepDone:
        """Wait until every rank has ended a decision; `poll` will not report it.

        Raises:
            UnknownTicketError: it is not open on some rank. The others have ended it.
        """
        self._note()
        self._finish(ticket)
        merged = _merged(ticket, self._reports[ticket])
        del self._reports[ticket]
        return merged

    def _ask_all(self, name: str, *arguments: object) -> list[Any]:
        """Call a method on every rank, on all workers concurrently."""
        return [answer() for answer in [_begin(executor, name, *arguments) for executor in self.executors]]

    def _take(self, name: str, *arguments: object) -> None:
        """Ask all ranks which decisions ended; after an interrupt the next call goes on with what they said."""
        for rank, answer in enumerate([_begin(executor, name, *arguments) for executor in self.executors]):
            self._answers.extend(_one(rank, answer))
        self._note()

    def _note(self) -> None:
        for rank, reported in self._answers:
            for done in reported:
                self._reports.setdefault(done.ticket, {})[rank] = done
        self._answers = []

    def _finish(self, ticket: int) -> None:
        """Wait until every rank has reported a decision. Raises UnknownTicketError."""
        reports = self._reports.setdefault(ticket, {})
        answers = {
            rank: _begin(executor, "wait", ticket)
            for rank, executor in enumerate(self.executors)
            if rank not in reports
        }
        unknown: UnknownTicketError | None = None
        for rank, answer in answers.items():
            try:
                reports.update(_one(rank, answer))
            except UnknownTicketError as error:  # noqa: PERF203 (the others must still end)
                unknown = unknown or error
        if unknown is not None:
            del self._reports[ticket]
            raise unknown

    def _sort_out(self) -> tuple[list[StepDone], dict[int, dict[int, StepDone]]]:
        """Return the decisions that all ranks have reported, and the reports of the others."""
        whole = {ticket for ticket, reports in self._reports.items() if len(reports) == len(self.executors)}
        merged = [_merged(ticket, reports) for ticket, reports in self._reports.items() if ticket in whole]
        return merged, {ticket: reports for ticket, reports in self._reports.items() if ticket not in whole}


def _begin(executor: Executor, name: str, *arguments: object) -> Callable[[], Any]:
    """Send a call to a worker, or prepare it for a local executor. Returns a function that returns the answer."""
    if isinstance(executor, RemoteExecutor):
        return executor.begin(name, *arguments)
    return partial(getattr(executor, name), *arguments)


def _one(rank: int, answer: Callable[[], T]) -> Iterator[tuple[int, T]]:
    """Ask a rank once the result is iterated over: from C code, so that no interrupt can come before it is kept."""
    return zip((rank,), starmap(answer, ((),)), strict=True)


def _merged(ticket: int, reports: dict[int, StepDone]) -> StepDone:
    ordered = [reports[rank] for rank in sorted(reports)]
    lost = _union([pairs for done in ordered for pairs in done.lost])
    return StepDone(ticket, lost, tuple(error for done in ordered for error in done.errors))


def _union(lost: Iterable[Pairs]) -> tuple[Pairs, ...]:
    """Merge pairs between the same tiers, without duplicates."""
    by_tiers: dict[tuple[str, str], list[NDArray[np.int64]]] = {}
    for pairs in lost:
        by_tiers.setdefault((pairs.src, pairs.dst), []).append(pairs.ids)
    return tuple(
        Pairs(src, dst, np.unique(np.concatenate(ids), axis=0))  # type: ignore[arg-type]  # tiers of other pairs
        for (src, dst), ids in by_tiers.items()
    )
