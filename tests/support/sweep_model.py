"""All interleavings of clients that sweep a Redis store's lists, puts, deletions, and faults.

The commands are those of `blockyard.stores.redis.lists`, and Lua runs their scripts over an in-memory server. A state
holds the server's keys, those of a lagging replica, and the answers to each sweeper, which determine what it sends
next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockyard.stores.redis.lists import Lists
from blockyard.tools.sim.fleet.servers.redis_data import RedisData

PREFIX = b"blockyard:test:"
RECORD = PREFIX + bytes(32)
NAMES = tuple(bytes([97 + number]) * 32 for number in range(3))

Keys = frozenset[tuple[bytes, Any]]


class WrongListError(AssertionError):
    """A block is in no list although all should be, or is gone although nothing requested that."""


class State(NamedTuple):
    """Counters say how much has happened so far."""

    keys: Keys
    replica: Keys | None = None  # a replica's contents, once it falls behind
    sweeps: tuple[tuple[Any, ...] | None, ...] = ()  # the answers so far; None once it has ended
    failovers: int = 0
    puts: int = 0
    deletes: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Bounds:
    """What is searched.

    Attributes:
        capacity: of the store; there are three blocks.
        sweeps: number of sweeps, each by its own client.
        failovers: number of failovers, to a replica that may lag.
        puts: number of puts, of one block each.
        deletes: number of deletions, of one block each.
        losses: losses of the list, of the key that marks all as listed, or of the sweeper's key, which also expires.
        keys_per_scan: names in a page.
        asks_replica: a page may come from a replica that has the same keys in another order.
        plant: a script, a part of it, and the planted replacement.
    """

    capacity: int = 3
    sweeps: int = 2
    failovers: int = 1
    puts: int = 1
    deletes: int = 0
    losses: int = 1
    keys_per_scan: int = 3
    asks_replica: bool = False
    plant: tuple[tuple[str, bytes, bytes], ...] = ()


class Model:
    """The steps."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.lists = Lists(PREFIX, bounds.capacity, has_quotas=False)
        for script, old, new in bounds.plant:
            source = getattr(self.lists._scripts, script)
            assert old in source, source.decode()
            self.lists._scripts = self.lists._scripts._replace(**{script: source.replace(old, new)})
        self.data = RedisData(lambda: 0.0, lambda _: None)
        self.data.keys_per_scan = bounds.keys_per_scan
        self.ended = 0  # sweeps that have found every block
        self._ran: dict[tuple[Any, ...], tuple[Any, Keys]] = {}
        self._next: dict[tuple[Any, ...], list[bytes] | None] = {}
        self._mended: set[tuple[Keys, int]] = set()

    def start(self) -> State:
        """Return the start: two blocks are stored, and the server's lost list has been restarted with one of them."""
        keys = frozenset({(RECORD, b"record"), *((PREFIX + name, b"value") for name in NAMES[:2])})
        return self._put(State(keys), NAMES[0])

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every possible step, with its name."""
        for what, after in self._steps(state):
            self._check(after)
            yield what, after
        self._check_mends(state)

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        bounds = self.bounds
        if state.puts < bounds.puts:
            for name in NAMES:
                yield f"puts {name[:1]!r}", self._put(state, name)._replace(puts=state.puts + 1)
        if state.deletes < bounds.deletes:
            for name in NAMES:
                after = self._run(state, self.lists.drop([name]), name)[1]
                yield f"deletes {name[:1]!r}", after._replace(deletes=state.deletes + 1)
        if state.losses < bounds.losses:
            for key in (b"order", b"listed", b"sweeper"):
                keys = frozenset(pair for pair in state.keys if pair[0] != PREFIX + key)
                if keys != state.keys:
                    yield f"loses {key.decode()}", state._replace(keys=keys, losses=state.losses + 1)
        if state.failovers < bounds.failovers:
            if state.replica is None:
                yield "the replica falls behind", state._replace(replica=state.keys)
            yield (
                "fails over",
                state._replace(
                    keys=state.keys if state.replica is None else state.replica,
                    replica=None,
                    failovers=state.failovers + 1,
                ),
            )
        yield from self._sweep(state)

    def _sweep(self, state: State) -> Iterator[tuple[str, State]]:
        if len(state.sweeps) < self.bounds.sweeps:
            yield "a sweep begins", self._send(state._replace(sweeps=(*state.sweeps, ())), len(state.sweeps))
        for who, answers in enumerate(state.sweeps):
            if answers is not None:
                yield f"sweep {who}", self._send(state, who)
                if self.bounds.asks_replica and self.lists._scripts.scan in (self._command(who, answers) or ()):
                    yield f"sweep {who} asks a replica", self._send(state, who, asks_replica=True)

    def _put(self, state: State, name: bytes) -> State:
        stored = state.keys | {(PREFIX + name, b"value")}
        return self._run(state._replace(keys=stored), self.lists.settle([name]), name)[1]

    def _send(self, state: State, who: int, *, asks_replica: bool = False) -> State:
        """Let the server execute a sweep's next command, and give the sweep the answer."""
        answers = state.sweeps[who] or ()
        command = self._command(who, answers)
        assert command is not None
        answer, state = self._run(state, command, asks_replica=asks_replica)
        answers = (*answers, answer)
        has_more = self._command(who, answers) is not None
        self.ended += not has_more and len(answers) > 1 and answer == 1
        sweeps = (*state.sweeps[:who], answers if has_more else None, *state.sweeps[who + 1 :])
        return state._replace(sweeps=sweeps)

    def _command(self, who: int, answers: tuple[Any, ...]) -> list[bytes] | None:
        """Return what a sweep sends after some answers; None if it has ended."""
        if (who, answers) not in self._next:
            sweep = self.lists.sweep(bytes([who]) * 16, RECORD)
            command: list[bytes] | None = next(sweep)
            try:
                for answer in answers:
                    command = sweep.send(answer)
            except StopIteration:
                command = None
            self._next[who, answers] = command
        return self._next[who, answers]

    def _run(
        self, state: State, command: list[bytes], named: bytes = b"", *, asks_replica: bool = False
    ) -> tuple[Any, State]:
        call = (state.keys, state.failovers, asks_replica, *command)
        if call not in self._ran:
            data = self.data
            data.values = {name: dict(value) if isinstance(value, frozenset) else value for name, value in state.keys}
            data.server, data.num_failovers = (state.failovers + asks_replica) % 2, state.failovers
            answer = _frozen(data.run(command))
            data.expires.clear()
            self._ran[call] = answer, frozenset((name, _frozen(value)) for name, value in data.values.items())
        answer, keys = self._ran[call]
        self._check_dropped(state.keys, keys, named)
        return answer, state._replace(keys=keys)

    # ---- rules ----

    def _check(self, state: State) -> None:
        """Check that each block is listed if all are marked as listed; an empty list counts as lost."""
        stored, order = _stored(state.keys), _order(state.keys)
        if not set(order) <= stored:
            raise WrongListError("the list has a block that is not stored")
        if order and (PREFIX + b"listed", b"1") in state.keys and not stored <= set(order):
            raise WrongListError("a block is in no list, and all are said to be")

    def _check_dropped(self, before: Keys, after: Keys, named: bytes) -> None:
        """Check that blocks dropped without being named exceed the capacity, and were unlisted or used longest ago."""
        dropped = _stored(before) - _stored(after) - {named}
        if not dropped:
            return
        uses, kept = _order(before), _order(after)
        oldest = min((uses.get(name, 0.0) for name in kept if name != named), default=0.0)
        if len(kept) < self.bounds.capacity or (
            len(kept) > 1 and max(uses.get(name, 0.0) for name in dropped) > oldest
        ):
            raise WrongListError("a block was dropped that the bound did not ask for")

    def _check_mends(self, state: State) -> None:
        """Check that without further faults, a put and a sweep list every block."""
        keys = frozenset(pair for pair in state.keys if pair[0] != PREFIX + b"sweeper")  # it has expired
        if (keys, state.failovers) in self._mended:
            return
        self._mended.add((keys, state.failovers))
        who = self.bounds.sweeps
        after = self._put(state._replace(keys=keys, sweeps=(None,) * who), NAMES[0])
        after = after._replace(sweeps=(*after.sweeps, ()))
        while after.sweeps[who] is not None:
            after = self._send(after, who)
        if (PREFIX + b"listed", b"1") not in after.keys:
            raise WrongListError("a sweep without faults does not end")
        self._check(after)
        if len(_stored(after.keys)) > self.bounds.capacity:
            raise WrongListError("more blocks are stored than the bound allows")


def _frozen(value: Any) -> Any:
    """Return an answer or a key's content as something hashable."""
    if isinstance(value, dict):
        return frozenset(value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _stored(keys: Keys) -> set[bytes]:
    return {name[-32:] for name, _ in keys if len(name) == len(PREFIX) + 32 and name != RECORD}


def _order(keys: Keys) -> dict[bytes, float]:
    return next((dict(value) for name, value in keys if name == PREFIX + b"order"), {})
