"""Carries out each decision on the executors of all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import BlockyardError, InvalidArgumentError, UnknownTicketError, WorkerError
from blockyard.executor.executor import Executor, StepDone, all_lost, engine_sizes
from blockyard.executor.remote import RemoteExecutor

__all__ = ["ParallelExecutor"]


class _RankReports(NamedTuple):
    """A decision that not all ranks have reported, and the reports of those that have."""

    decision: StepDecision
    reports: dict[int, StepDone]


class ParallelExecutor(Executor):
    """Submits each decision to every rank, and reports it when all ranks have carried it out.

    Block ids are the same on every rank, because each holds its share of every block's heads. A block lost by one rank
    is lost for all: the report contains the union of the ranks' losses, so that the manager drops the sequence. A rank
    that does not know a decision, for instance because it refused it, counts as having lost all of it.

    If an exception from outside, such as `KeyboardInterrupt`, ends a call, the next one first lets every rank give up
    everything in flight. All running decisions are then reported as completely lost.

    Args:
        executors: one for each rank, rank 0 first. Each has an engine with the same numbers of blocks, of the same
            bytes with several page classes, and, if there is an external tier, its own store.

    Attributes:
        executors: as given.

    Raises:
        InvalidArgumentError: there are no executors, one is given twice, or engines differ in their numbers of blocks,
            or, with several page classes, in their bytes, as pipeline stages do.
        BlockyardError: an engine is closed.
        WorkerError: a worker does not tell its sizes.

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
        _check(executors)
        self.executors = tuple(executors)
        self._open: dict[int, _RankReports] = {}  # by ticket, until all ranks have reported
        self._is_changing = False  # if set when a call begins, an exception ended the last one

    def __repr__(self) -> str:
        return f"ParallelExecutor({len(self.executors)} ranks, decisions in flight: {sorted(self._open)})"

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision on every rank; see `StepExecutor.submit`.

        Raises:
            BlockyardError: raised by the first rank that refuses it; the others have started it. Call `wait` to end it;
                all of it is reported as lost.
            UnknownTicketError: its ticket is already in use; nothing was started.
        """
        self._recover()
        if decision.ticket in self._open:
            raise UnknownTicketError(f"decision {decision.ticket} is already in flight")
        reports: dict[int, StepDone] = {}
        self._is_changing = True
        self._open[decision.ticket] = _RankReports(decision, reports)
        refused: dict[int, BlockyardError] = {}
        # Workers start first, so that they run concurrently with this process.
        for rank in sorted(range(len(self.executors)), key=lambda rank: not _is_remote(self.executors[rank])):
            try:
                self.executors[rank].submit(decision, by_layer=by_layer)
            except BlockyardError as error:  # noqa: PERF203 (the others must still start)
                refused[rank] = error
        self._wait_for(decision, refused, reports)
        reports.update((rank, all_lost(decision, error)) for rank, error in refused.items())
        self._is_changing = False
        if refused:
            raise next(iter(refused.values()))

    def give_up_all(self) -> None:
        """Let every rank give up everything in flight; `poll` then reports all decisions as completely lost."""
        self._is_changing = True
        why = BlockyardError("a call was interrupted: it is unknown whether the blocks landed")
        for executor in self.executors:
            executor.give_up_all()
            executor.poll()  # part of the reports below
        for known in self._open.values():
            known.reports.update(dict.fromkeys(range(len(self.executors)), all_lost(known.decision, why)))
        self._is_changing = False

    def _recover(self) -> None:
        """After an exception has ended the last call, give up everything in flight."""
        if self._is_changing:
            self.give_up_all()

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Make compute of this process wait for one layer of a step's loads; workers wait for theirs."""
        for executor in self.executors:
            executor.wait_for_layer(ticket, layer)

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Return the pairs known so far to be lost on any rank."""
        self._recover()
        found = [pairs for lost in self._ask_all("lost", ticket) for pairs in lost]
        return _union([*found, *self._reported_lost(ticket)])

    def is_awaited(self, ticket: int) -> bool:
        """Whether a rank must end the decision before its step's results are valid, or a rank has reported a loss."""
        self._recover()
        return any(self._ask_all("is_awaited", ticket)) or bool(self._reported_lost(ticket))

    def poll(self) -> list[StepDone]:
        """Return the decisions that ended on all ranks since the last call; never waits for a transfer."""
        self._take("poll")
        return self._take_whole()

    def collect(self, ticket: int) -> list[StepDone]:
        """Return the decisions that ended, including this one if a rank awaits it; see `Executor`."""
        self._take("collect", ticket)
        if self._reported_lost(ticket):
            self._finish(ticket)
        return self._take_whole()

    def wait(self, ticket: int) -> StepDone:
        """Wait until every rank has ended a decision; `poll` will not report it.

        Raises:
            UnknownTicketError: no such decision is open.
        """
        self._recover()
        merged = _merged(ticket, self._finish(ticket))
        del self._open[ticket]
        return merged

    def _take(self, name: str, *arguments: object) -> None:
        """Ask all ranks which decisions ended, and note their answers."""
        self._recover()
        self._is_changing = True
        answers, failure = _answers(self._begin_all(name, *arguments))
        for rank, reported in answers.items():
            for done in reported:
                if done.ticket in self._open:
                    self._open[done.ticket].reports[rank] = done
        self._is_changing = False
        if failure is not None:
            raise failure

    def _take_whole(self) -> list[StepDone]:
        """Return the decisions that all ranks have reported."""
        whole = {ticket for ticket, known in self._open.items() if len(known.reports) == len(self.executors)}
        merged = [_merged(ticket, self._open[ticket].reports) for ticket in self._open if ticket in whole]
        self._open = {ticket: known for ticket, known in self._open.items() if ticket not in whole}
        return merged

    def _ask_all(self, name: str, *arguments: object) -> list[Any]:
        """Call a method on every rank."""
        answers, failure = _answers(self._begin_all(name, *arguments))
        if failure is not None:
            raise failure
        return list(answers.values())

    def _begin_all(self, name: str, *arguments: object) -> dict[int, Callable[[], Any]]:
        return {rank: _begin(each, name, *arguments) for rank, each in enumerate(self.executors)}

    def _wait_for(self, decision: StepDecision, ranks: Iterable[int], reports: dict[int, StepDone]) -> None:
        """Wait until ranks have ended a decision. One that does not know it counts as having lost all of it."""
        begun = {rank: _begin(self.executors[rank], "wait", decision.ticket) for rank in ranks}
        answers, failure = _answers(begun, decision)
        reports.update(answers)
        if failure is not None:
            raise failure

    def _finish(self, ticket: int) -> dict[int, StepDone]:
        """Wait until every rank has reported a decision. Raises UnknownTicketError."""
        if ticket not in self._open:
            raise UnknownTicketError(f"decision {ticket} is not in flight")
        decision, reports = self._open[ticket]
        self._wait_for(decision, [rank for rank in range(len(self.executors)) if rank not in reports], reports)
        return reports

    def _reported_lost(self, ticket: int) -> list[Pairs]:
        """Return what is lost of a decision, on the ranks that have reported it."""
        known = self._open.get(ticket)
        return [pairs for done in known.reports.values() for pairs in done.lost] if known else []


def _check(executors: Sequence[Executor]) -> None:
    """Check that there is one executor per rank, over engines of one size."""
    for rank, executor in enumerate(executors):
        if not isinstance(executor, Executor):
            raise InvalidArgumentError(f"executors[{rank}] is {executor!r:.100}, must be an Executor")
        if (first := next(at for at, other in enumerate(executors) if other is executor)) < rank:
            raise InvalidArgumentError(f"executors[{rank}] is executors[{first}], must be one for each rank")
    if len(executors) == 1:
        return
    # A closed engine is found before workers are asked, and a lost worker once all have answered.
    known = {rank: engine_sizes(each) for rank, each in enumerate(executors) if not _is_remote(each)}
    answers, failure = _answers(
        {rank: _begin(each, "sizes") for rank, each in enumerate(executors) if rank not in known}
    )
    if failure is not None:
        raise failure
    sizes = {size: rank for rank, size in sorted((known | answers).items())}
    sizes.pop("", None)  # an executor of another kind
    if len(sizes) > 1:
        found = ", ".join(f"{size} on rank {rank}" for size, rank in sizes.items())
        raise InvalidArgumentError(f"the engines have different numbers of device and host blocks: {found}")


def _is_remote(executor: Executor) -> bool:
    return isinstance(executor, RemoteExecutor)


def _begin(executor: Executor, name: str, *arguments: object) -> Callable[[], Any]:
    """Send a call to a worker, or prepare it for a local executor. Returns a function that returns the answer."""
    if not isinstance(executor, RemoteExecutor):
        return partial(getattr(executor, name), *arguments)
    try:
        return executor.begin(name, *arguments)
    except WorkerError as error:  # raised once the other ranks have been asked, too
        return partial(_raise, error)


def _raise(error: WorkerError) -> NoReturn:
    raise error


def _answers(
    begun: dict[int, Callable[[], Any]], decision: StepDecision | None = None
) -> tuple[dict[int, Any], Exception | None]:
    """Return each rank's answer, and the first error; a rank that does not know the decision has lost all of it."""
    answers: dict[int, Any] = {}
    failure: Exception | None = None
    for rank, answer in begun.items():
        try:
            answers[rank] = answer()
        except Exception as error:  # noqa: BLE001, PERF203 (the others must still answer)
            if decision is not None and isinstance(error, UnknownTicketError):
                answers[rank] = all_lost(decision, error)
            else:
                failure = failure or error
    return answers, failure


def _merged(ticket: int, reports: dict[int, StepDone]) -> StepDone:
    ordered = [reports[rank] for rank in sorted(reports)]
    lost = _union([pairs for done in ordered for pairs in done.lost])
    return StepDone(ticket, lost, tuple(error for done in ordered for error in done.errors))


def _union(lost: Iterable[Pairs]) -> tuple[Pairs, ...]:
    """Merge pairs between the same tiers, without duplicates."""
    by_tiers: dict[tuple[str, str, int], list[NDArray[np.int64]]] = {}
    for pairs in lost:
        by_tiers.setdefault((pairs.src, pairs.dst, pairs.page_class), []).append(pairs.ids)
    return tuple(
        Pairs(src, dst, np.unique(np.concatenate(ids), axis=0), page_class)  # type: ignore[arg-type]  # of other pairs
        for (src, dst, page_class), ids in by_tiers.items()
    )
