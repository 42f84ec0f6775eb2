"""Breadth-first search of all interleavings of processes that share a store's epoch, running the client's code.

A state holds the storage's contents and, for each process, the fields of its `SharedEpoch`, its submitted puts
and the read in progress. A step restores those fields, calls the client's method on a storage in memory,
and saves the fields again. Between two storage calls, any other process may take a step. A read and the
replacement that depends on it are one step, because the storage rejects a replacement whose read is out of date.

Random bytes are numbered in the order in which they appear in a state, so equal states are recognized.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from state_search import explore

from blockyard.errors import StoreError
from blockyard.stores.threaded.epochs import Epoch, ForgottenError, Record, SharedEpoch
from blockyard.stores.threaded.runtime import Runtime, use_runtime

REVISION = "new"  # the revision that `forget` names; its number as weights is 1, that of the namespace's weights 0


class Value(NamedTuple):
    """A block in the storage, or a put in flight.

    Attributes:
        key: which block.
        weights: the weights that computed it.
        born: number of epochs begun before it was computed.
    """

    key: int
    weights: int
    born: int


class Put(NamedTuple):
    value: Value
    age: int  # calls of `forget` by its process before it


class Get(NamedTuple):
    key: int
    epoch: Epoch
    found: Value | None
    since: int  # epochs begun before it was submitted
    age: int
    shared: tuple[bytes | None] | None = None  # the record that another batch has read


class Process(NamedTuple):
    fields: tuple[Any, ...]  # of its `SharedEpoch`
    weights: int = 0
    put: Put | None = None
    get: Get | None = None
    calls: int = 0  # of `forget`
    reading: tuple[bytes | None] | None = None  # the answer to an earlier batch's read of the record, in flight


class State(NamedTuple):
    record: bytes | None
    blocks: frozenset[tuple[bytes, Value]]
    processes: tuple[Process, ...]
    begun: int = 0
    faults: int = 0


@dataclass(frozen=True)
class Bounds:
    """Limits of the search.

    Attributes:
        processes: number of processes that share the store.
        keys: number of different blocks that they put and get.
        forgets: calls of `forget` per process.
        faults: total number of lost answers, failed calls, crashes and lost records.
        record_is_lost: whether the record may be lost; a `forget` may then be lost with it.
        shares_reads: whether a process has other batches, whose reads of the record may serve its `Get`.
    """

    processes: int = 3
    keys: int = 1
    forgets: int = 1
    faults: int = 1
    record_is_lost: bool = False
    shares_reads: bool = False


class WrongHitError(AssertionError):
    """A process has found a block that it must not find."""


class Storage:
    """The epoch record, as one step of one process sees it."""

    def __init__(self, record: bytes | None, fault: str = "") -> None:
        self.record = record
        self.fault = fault

    def read(self) -> Record:
        self._fail("read")
        return record_of(self.record)

    def replace(self, stored: Record, epoch: Epoch) -> Record:
        self._fail("replace")
        if self.record == stored.raw:
            self.record = epoch.record()
        self._fail("answer")
        return self.read()

    def _fail(self, at: str) -> None:
        if self.fault == at:
            raise StoreError("the answer is lost")


def record_of(raw: bytes | None) -> Record:
    return Record(raw, None if raw is None else Epoch.read(raw))


class Model:
    """The steps.

    Args:
        bounds: limits of the search.
        make: creates the client's part from a storage's `read` and `replace`; `SharedEpoch` or another protocol.
        fields: names of that part's fields.
    """

    def __init__(
        self,
        bounds: Bounds,
        make: Callable[[Any, Any], Any] = SharedEpoch,
        fields: tuple[str, ...] = ("_name", "_mine", "_joins", "_is_due", "_is_behind", "_stopped_at", "_age"),
    ) -> None:
        self.bounds, self.make, self.fields = bounds, make, fields
        self.hits = 0
        self._part = make(None, None)
        self._fresh = self._take(self._part)

    def start(self) -> State:
        return State(None, frozenset(), (Process(self._fresh),) * self.bounds.processes)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every step that can follow, with its name."""
        more_faults = state.faults < self.bounds.faults
        if more_faults and self.bounds.record_is_lost and state.record is not None:
            yield "the record is lost", state._replace(record=None, faults=state.faults + 1)
        for who, process in enumerate(state.processes):
            for what, after, world in self._steps_of(state, process, more_faults=more_faults):
                processes = (*state.processes[:who], after, *state.processes[who + 1 :])
                yield f"{who} {what}", world._replace(processes=processes)

    def _steps_of(self, state: State, process: Process, *, more_faults: bool) -> Iterator[tuple[str, Process, State]]:
        if process.put is None:
            for key in range(self.bounds.keys):
                put = Put(Value(key, process.weights, state.begun), process.fields[-1])
                yield f"submits a put of {key}", process._replace(put=put), state
        else:
            yield from self._carry_out(state, process)
        if process.get is not None:
            yield self._end_get(state, process)
        # Reads change nothing for other processes.
        if not any(other is not process and (other.get or other.reading) for other in state.processes):
            yield from self._read(state, process)
        if process.calls < self.bounds.forgets:
            for revision in (None, REVISION):
                yield from self._forget(state, process, revision, more_faults=more_faults)
        elif self._is_due(process):
            yield from self._begin_again(state, process, more_faults=more_faults)
        if more_faults and process != Process(self._fresh, calls=process.calls):
            after = Process(self._fresh, calls=process.calls)  # it loads the namespace's weights again
            yield "crashes", after, state._replace(faults=state.faults + 1)

    def _carry_out(self, state: State, process: Process) -> Iterator[tuple[str, Process, State]]:
        """Execute a put, with the record that the process knows, however old, or with a newly read one."""
        put, done = process.put, process._replace(put=None)
        assert put is not None
        for asks in (False, True):
            part, storage = self._open(state, process)
            epoch = part.known()
            with suppress(ForgottenError):
                if epoch is None or asks:
                    epoch = part.confirm()
            after = done._replace(fields=self._take(part))
            world = state._replace(record=storage.record)
            if epoch is None or put.age < part.age:
                yield "drops its put", after, world
            else:
                yield "puts", after, world._replace(blocks=state.blocks | {(epoch.token, put.value)})

    def _read(self, state: State, process: Process) -> Iterator[tuple[str, Process, State]]:
        """Begin a read, or have another batch read the record."""
        for key in range(self.bounds.keys if process.get is None else 0):
            yield from self._begin_get(state, process, key)
        if not self.bounds.shares_reads or process.reading or (process.get and process.get.shared):
            return
        if process.get is None:
            yield "asks for the record", process._replace(reading=(state.record,)), state
            return
        part, _ = self._open(state, process)
        check = part.begin_check()
        part.read_for(part.begin_check())
        if check.record is not None:
            get = process.get._replace(shared=(check.record.raw,))
            yield "reads the record for another batch", process._replace(get=get), state

    def _begin_get(self, state: State, process: Process, key: int) -> Iterator[tuple[str, Process, State]]:
        part, storage = self._open(state, process)
        epoch = part.known()
        with suppress(ForgottenError):
            if epoch is None:
                epoch = part.confirm()
        due, check = part.take_due(), part.begin_check()  # an earlier batch's read has begun
        shared = process.reading if check in due else None
        after = process._replace(fields=self._take(part), reading=None)
        world = state._replace(record=storage.record)
        if epoch is None:
            if after != process:
                yield f"finds no {key}: forgotten", after, world
            return
        found = {value for token, value in state.blocks if token == epoch.token and value.key == key}
        for value in found or {None}:
            get = Get(key, epoch, value, state.begun, process.fields[-2], shared)
            yield f"reads {key}", after._replace(get=get), world

    def _end_get(self, state: State, process: Process) -> tuple[str, Process, State]:
        get = process.get
        assert get is not None
        part, storage = self._open(state, process)
        check = part.begin_check()
        if get.shared is not None:
            part.answer(part.take_due(), record_of(*get.shared))
        counts = part.counts(get.epoch, part.read_for(check)) and part.stopped_at == get.age
        with suppress(ForgottenError):
            if not counts:
                part.confirm()
        after, world = process._replace(fields=self._take(part), get=None), state._replace(record=storage.record)
        if counts and get.found is not None:
            self.hits += 1
            self._check(get, process)
        return f"takes {get.key}", after, world

    def _check(self, get: Get, process: Process) -> None:
        assert get.found is not None
        if get.found.weights != process.weights:
            raise WrongHitError(f"weights {process.weights} found a block of weights {get.found.weights}")
        if not self.bounds.record_is_lost and get.found.born < get.since:
            raise WrongHitError("found a block that was computed before a forget")

    def _forget(
        self, state: State, process: Process, revision: str | None, *, more_faults: bool
    ) -> Iterator[tuple[str, Process, State]]:
        part, _ = self._open(state, process)
        part.stop(revision)
        weights = process.weights if revision is None else 1
        stopped = process._replace(fields=self._take(part), weights=weights, calls=process.calls + 1)
        yield f"calls forget({revision})", stopped, state
        yield from self._begin_again(state, stopped, more_faults=more_faults, what=f"has forgotten, {revision}")

    def _begin_again(
        self, state: State, process: Process, *, more_faults: bool, what: str = "forgets"
    ) -> Iterator[tuple[str, Process, State]]:
        for fault in ("", "replace", "answer") if more_faults else ("",):
            part, storage = self._open(state, process, fault)
            with suppress(StoreError):
                part.begin()
            has_begun = storage.record != state.record
            begun = state.begun + (has_begun and not fault)
            world = state._replace(record=storage.record, begun=begun, faults=state.faults + bool(fault))
            yield f"{what} {fault}".rstrip(), process._replace(fields=self._take(part)), world

    def _is_due(self, process: Process) -> bool:
        return bool(dict(zip(self.fields, process.fields, strict=True)).get("_is_due"))

    def _open(self, state: State, process: Process, fault: str = "") -> tuple[Any, Storage]:
        storage = Storage(state.record, fault)
        part = self._part
        part.read, part._replace, part._confirmed_at, part._due = storage.read, storage.replace, 0.0, []
        for name, value in zip(self.fields, process.fields, strict=True):
            setattr(part, name, value)
        return part, storage

    def _take(self, part: Any) -> tuple[Any, ...]:
        return tuple(getattr(part, name) for name in self.fields)


def numbered(state: State, names: dict[bytes, bytes] | None = None) -> State:
    """Number a state's random bytes in the order in which they appear in the state."""
    names = {bytes(16): bytes(16)} if names is None else names
    of = lambda drawn: names.setdefault(drawn, len(names).to_bytes(16, "big"))  # noqa: E731

    def epoch(old: Epoch) -> Epoch:
        return Epoch(of(old.token), of(old.weights), old.name)

    def process(old: Process) -> Process:
        fields = tuple(epoch(field) if isinstance(field, Epoch) else field for field in old.fields)
        get = old.get and old.get._replace(epoch=epoch(old.get.epoch), shared=old.get.shared and raw(*old.get.shared))
        return old._replace(fields=fields, get=get, reading=old.reading and raw(*old.reading))

    def raw(old: bytes | None) -> tuple[bytes | None]:
        return (old and epoch(Epoch.read(old)).record(),)

    (record,) = raw(state.record)
    processes = tuple(process(old) for old in state.processes)
    # Blocks whose epoch token no process has can never be found.
    blocks = frozenset((names[token], value) for token, value in state.blocks if token in names)
    return state._replace(record=record, processes=processes, blocks=blocks)


def search(model: Model, most: int) -> int:
    """Search all states, at most `most`.

    Returns:
        The number of states.

    Raises:
        WrongHitError: a wrong hit was found; the message has the steps that lead to it.
    """
    counter = itertools.count(1)
    drawn = lambda size: (1 << 100 | next(counter)).to_bytes(size, "big")  # noqa: E731

    class Numbered(Runtime):
        def random_bytes(self, count: int) -> bytes:
            return drawn(count)

    with use_runtime(Numbered()):
        steps = lambda state: ((what, numbered(after)) for what, after in model.steps(state))  # noqa: E731
        return explore(numbered(model.start()), steps, most, WrongHitError)
