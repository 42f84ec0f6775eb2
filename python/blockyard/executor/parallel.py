"""One decision, carried out by the executors of all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import BlockyardError, InvalidArgumentError, UnknownTicketError
from blockyard.executor.executor import Executor, StepDone
from blockyard.executor.remote import RemoteExecutor

__all__ = ["ParallelExecutor"]


class ParallelExecutor(Executor):
    """Hands each decision to every rank, and reports it when all ranks have carried it out.

    Block ids are the same on every rank, because each holds its share of every block's heads. A block that one rank
    loses is lost: the report names the union of what the ranks lost, so the manager voids the sequence for all.

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

    def __repr__(self) -> str:
        return f"ParallelExecutor({len(self.executors)} ranks, reported by some: {sorted(self._reports)})"

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision on every rank; see `StepExecutor.submit`.

        Raises:
            BlockyardError: what the first rank to refuse it raises; the others have begun it. `wait` ends it.
        """
        refused: BlockyardError | None = None
        # Workers begin first, so that they work while this process does.
        for executor in sorted(self.executors, key=lambda each: not isinstance(each, RemoteExecutor)):
            try:
                executor.submit(decision, by_layer=by_layer)
            except BlockyardError as error:  # noqa: PERF203 (the others must still begin)
                refused = refused or error
        if refused is not None:
            raise refused

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute of this process wait for one layer of a step's loads; workers wait for theirs."""
        for executor in self.executors:
            executor.wait_for_layer(ticket, layer)

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Give the pairs that any rank is known to have lost, so far."""
        found = [pairs for lost in self._ask_all("lost", ticket) for pairs in lost]
        found += [pairs for done in self._reports.get(ticket, {}).values() for pairs in done.lost]
        return _union(found)

    def is_awaited(self, ticket: int) -> bool:
        """Whether compute of any rank has read what the decision loads, or any rank is known to have lost some."""
        known = any(done.lost for done in self._reports.get(ticket, {}).values())
        return any(self._ask_all("is_awaited", ticket)) or known

    def poll(self) -> list[StepDone]:
        """Give the decisions that the last rank has ended since the last call; never waits for a transfer."""
        self._note(self._ask_all("poll"))
        return self._complete()

    def collect(self, ticket: int) -> list[StepDone]:
        """Give the decisions that ended, and this one too if a rank awaits it; see `Executor`."""
        self._note(self._ask_all("collect", ticket))
        ended = self._complete()
        if any(done.lost for done in self._reports.get(ticket, {}).values()):
            ended.append(self.wait(ticket))
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait until every rank has ended a decision; `poll` will not report it.

        Raises:
            UnknownTicketError: a rank does not have it under way. The others have ended it.
        """
        reports = self._reports.setdefault(ticket, {})
        answers = {
            rank: _begin(executor, "wait", ticket)
            for rank, executor in enumerate(self.executors)
            if rank not in reports
        }
        unknown: UnknownTicketError | None = None
        for rank, answer in answers.items():
            try:
                reports[rank] = answer()
            except UnknownTicketError as error:  # noqa: PERF203 (the others must still end)
                unknown = unknown or error
        del self._reports[ticket]
        if unknown is not None:
            raise unknown
        return _merged(ticket, reports)

    def _ask_all(self, name: str, *arguments: object) -> list[Any]:
        """Call a method of every rank, all workers at once."""
        return [answer() for answer in [_begin(executor, name, *arguments) for executor in self.executors]]

    def _note(self, ended: Iterable[list[StepDone]]) -> None:
        for rank, reported in enumerate(ended):
            for done in reported:
                self._reports.setdefault(done.ticket, {})[rank] = done

    def _complete(self) -> list[StepDone]:
        """Take out what all ranks have reported."""
        whole = [ticket for ticket, reports in self._reports.items() if len(reports) == len(self.executors)]
        return [_merged(ticket, self._reports.pop(ticket)) for ticket in whole]


def _begin(executor: Executor, name: str, *arguments: object) -> Callable[[], Any]:
    """Ask a worker, or get ready to call an executor of this process; the result gives the answer."""
    if isinstance(executor, RemoteExecutor):
        return executor.begin(name, *arguments)
    return partial(getattr(executor, name), *arguments)


def _merged(ticket: int, reports: dict[int, StepDone]) -> StepDone:
    ordered = [reports[rank] for rank in sorted(reports)]
    lost = _union([pairs for done in ordered for pairs in done.lost])
    return StepDone(ticket, lost, tuple(error for done in ordered for error in done.errors))


def _union(lost: Iterable[Pairs]) -> tuple[Pairs, ...]:
    """Join pairs between the same tiers, each pair once."""
    by_tiers: dict[tuple[str, str], list[NDArray[np.int64]]] = {}
    for pairs in lost:
        by_tiers.setdefault((pairs.src, pairs.dst), []).append(pairs.ids)
    return tuple(
        Pairs(src, dst, np.unique(np.concatenate(ids), axis=0))  # type: ignore[arg-type]  # tiers of other pairs
        for (src, dst), ids in by_tiers.items()
    )
