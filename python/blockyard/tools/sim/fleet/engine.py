"""`FleetEngine`: what the engines of a fleet share. `SimulatedEngine`: one that makes random calls to a real store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreError
from blockyard.stores import Completion, Owners
from blockyard.stores.threaded.epochs import name_of
from blockyard.stores.threaded.remote import RemoteStore
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.tools.sim.fleet.log import FleetLog
from blockyard.tools.sim.fleet.oracle import BLOCK_BYTES, BrokenPromiseError, Oracle, Put
from blockyard.tools.sim.fleet.servers.link import DEADLINE, Link, Server
from blockyard.tools.sim.loop import EngineRuntime, Loop

__all__ = ["CLOCK_STEP", "NEW_KEYS", "NUM_KEYS", "WEIGHTS", "FleetEngine", "SimulatedEngine", "key_of"]

NUM_KEYS: Final = 8
WEIGHTS: Final = ("", "step-1", "step-2")
CLOCK_STEP: Final = 5.0  # seconds by which a clock jumps
_TENANTS: Final = 2
_LATE_SECONDS: Final = 5.0  # how long an abandoned request may still arrive
NEW_KEYS: Final = 6  # per second
_HIDDEN: Final = 3.0  # seconds after a failure during which the store may report a key as absent
_IN_FLIGHT: Final = 5
_BURSTS: Final = 0.95  # up to this draw of a call, several puts, deletions and gets of the same keys at once
_OLD: Final = 0.25  # share of gets of any keys that it has put, not only of the present ones
_READS_BACK: Final = 0.25  # share of puts that it reads as soon as it has their answer


def key_of(key: int) -> bytes:
    """Return a key's number as 32 bytes."""
    return key.to_bytes(32, "little")


@dataclass(eq=False)
class _Pending:
    """A batch that has not been collected."""

    kind: str
    ticket: int
    keys: list[int]
    puts: list[Put]
    rows: NDArray[np.uint8] | None
    weights: str
    at: float
    changed_at: float
    number: int = 0
    reason: str = ""  # of the first key, when it has been collected


class FleetEngine(ABC):
    """One engine of a fleet.

    Args:
        loop: provides time, tasks and randomness.
        server: shared by all engines.
        oracle: records what all engines do.
        number: number of this engine.
        log: gets each event.
        has_tenants: whether tenants have quotas, which change.

    Attributes:
        link: the link to the server.
        weights: name of the weights that it computes with.
        due: revisions for which it must call `forget` as soon as it can.
        called_at: start of the blocking store call in progress; None if there is none.
        num_operations: number of requests and of store calls.
        reasons: the reasons of all blocks read or written, "" for success.
        runtime: its own clock, and the loop.
    """

    link: Link

    def __init__(
        self, loop: Loop, server: Server, oracle: Oracle, number: int, log: FleetLog, *, has_tenants: bool
    ) -> None:
        self.loop, self.server, self.oracle, self.number = loop, server, oracle, number
        self.weights = ""
        self.due: list[str | None] = []
        self.called_at: float | None = None
        self.num_operations = 0
        self.reasons: Counter[str] = Counter()
        self._log, self._who, self._has_tenants = log, f"engine {number}", has_tenants
        self.runtime = EngineRuntime(loop)

    @abstractmethod
    def run(self, until: float) -> None:
        """Work until a time, then finish what is in flight."""

    @abstractmethod
    def crash(self) -> None:
        """Die at once. Requests already sent still arrive."""

    @abstractmethod
    def restart(self) -> None:
        """Restart with empty memory and the same weights."""

    @abstractmethod
    def collect_all(self) -> None:
        """Finish everything in flight."""

    @abstractmethod
    def forget(self, revision: str | None) -> bool:
        """Forget all blocks. Returns whether the store confirmed it."""

    @abstractmethod
    def lift_quotas(self) -> bool:
        """Remove all quotas. Returns whether the store confirmed it."""

    @abstractmethod
    def works(self) -> bool:
        """Store blocks and read them; return whether all are found."""

    @abstractmethod
    def close(self) -> None:
        """Close the store, and check that no bytes are in flight and its counters match the answers."""

    def heal(self) -> None:
        """End all faults of its link."""
        self.link.heal()

    def turn_clock(self, ahead: float) -> None:
        """Set how far the engine's clock is ahead."""
        self.runtime.ahead = ahead

    def read_again(self) -> None:  # noqa: B027 (prompts repeat anyway)
        """Read every block that it has stored, unless its work does."""

    def was_told(self, at: float) -> bool:  # noqa: ARG002 (only `SimulatedEngine` knows)
        """Return whether it is known to have known at time `at` that its weights had been forgotten."""
        return False

    def _call(self, call: Callable[[], object]) -> str:
        """Call the store. Returns "ok", or the error."""
        said, self.called_at = "ok", self.loop.now
        try:
            call()
        except StoreError as error:
            said = str(error)
        self.called_at = None
        return said

    def _call_forget(self, revision: str | None, call: Callable[[], object]) -> str:
        """Call the store's `forget` for the weights of today. Returns "ok", or the error."""
        self.num_operations += 1
        began_at, name, begins = self.loop.now, name_of(self.weights), revision is None
        until = self.oracle.begin_forget(name, begins=begins)
        said = self._call(call)
        until(self.loop.now + _LATE_SECONDS)
        if said == "ok":
            self.oracle.check_forgot(name, began_at, begins=begins)
        return said

    def _note_call(self, what: str, text: str, said: str) -> bool:
        """Log what a call of the store has returned. Returns whether it is confirmed."""
        self._say(f"{text}: {said}")
        self._log.mark(self._who, what)
        return said == "ok"

    def _say(self, text: str) -> None:
        self._log.say(self._who, text)


class SimulatedEngine(FleetEngine):
    """Puts, gets, deletes and forgets blocks until its time is up.

    Args:
        loop: as for `FleetEngine`, like those not listed here.
        shares: shares of its calls that are deletions, and `forget`.
    """

    def __init__(
        self,
        loop: Loop,
        server: Server,
        oracle: Oracle,
        number: int,
        log: FleetLog,
        shares: tuple[float, float],
        *,
        has_tenants: bool = False,
    ) -> None:
        super().__init__(loop, server, oracle, number, log, has_tenants=has_tenants)
        self._shares = shares
        self._pending: list[_Pending] = []
        self._counted: Counter[str] = Counter()
        self._ok_at = inf  # first success since it opened the store or forgot; from then on it has an epoch
        self._forgotten_at: float | None = None  # when it learned that its weights were forgotten
        self._asked_at = 0.0  # when it submitted the read that revealed this
        self._forgot_at = 0.0  # end of its last `forget` call
        self._last_put: dict[int, Put] = {}
        # Own batches of each key, by number: puts, confirmed deletions, and hits with the number of the put they found.
        self._put_in: dict[int, int] = {}
        self._deleted: dict[int, list[_Pending]] = {}
        self._hits: dict[int, list[tuple[_Pending, Put]]] = {}
        self._late_puts: list[list[int]] = []  # keys of puts that missed their deadline
        self._failed_at: dict[int, float] = {}  # last failed read or write of each key
        self._sure_at = 0.0  # time from which its last clock jump no longer matters
        self.link = server.connect()
        self.store = self._open()

    def _open(self) -> RemoteStore:
        with use_runtime(self.runtime):
            return self.link.open(self.weights, BLOCK_BYTES)

    def run(self, until: float) -> None:
        """Work until a time, then collect the remaining batches."""
        chance, link = self.loop.random, self.link
        while self.loop.now < until and not link.is_dead:
            if len(self._pending) >= _IN_FLIGHT or (self._pending and chance.random() < 0.4):
                batch = self._collect(chance.randrange(len(self._pending)))
                if (batch.kind, batch.reason) == ("put", "timeout"):
                    self._late_puts.append(batch.keys)
                if batch.kind == "put" and not link.is_dead and chance.random() < _READS_BACK:
                    self.get(batch.keys)
            else:
                self._act()
            if chance.random() < 0.7:
                self.loop.sleep(chance.expovariate(1 / 0.05))
        if not link.is_dead:
            self.collect_all()

    def crash(self) -> None:
        """Die at once. Requests already sent still arrive."""
        link, store = self.link, self.store
        link.is_dead = True
        for batch in self._pending:
            self._lose(batch)
        self._pending.clear()
        self.loop.start("killed", lambda: store.close(0.0))

    def _lose(self, batch: _Pending) -> None:
        """Record that nobody collects a batch; what it asks for may still happen."""
        for key in batch.keys if batch.kind == "delete" else ():
            self.oracle.end_removal(key, self.loop.now + _LATE_SECONDS)

    def restart(self) -> None:
        """Restart with empty memory and the same weights."""
        self.link, self._counted = self.server.connect(), Counter()
        self._ok_at, self._forgotten_at = inf, None
        self._last_put, self._failed_at, self._put_in, self._late_puts = {}, {}, {}, []
        self.store = self._open()

    def turn_clock(self, ahead: float) -> None:
        """Set how far the engine's clock is ahead."""
        super().turn_clock(ahead)
        self._sure_at = self.loop.now + 2 * CLOCK_STEP

    def collect_all(self) -> None:
        """Collect every batch."""
        while self._pending:
            self._collect(0)

    def close(self) -> None:
        """Close the store, and check that no bytes are in flight and its counters match the answers."""
        stats = self.store.stats()
        counted = Counter({reason: count for reason, count in self._counted.items() if reason})
        if stats.pending_bytes:
            raise BrokenPromiseError(f"engine {self.number}: {stats.pending_bytes} bytes are in flight, no batch is")
        if Counter(stats.misses) != counted:
            raise BrokenPromiseError(
                f"engine {self.number}: counts misses {stats.misses}, its batches had {dict(counted)}"
            )
        if not self.store.close(60.0):
            raise BrokenPromiseError(f"engine {self.number}: calls go on a minute after the last deadline")

    def read_again(self) -> None:
        """Read every block that it has stored."""
        if self._last_put:
            self.get(list(self._last_put))
            self.collect_all()

    def was_told(self, at: float) -> bool:
        """Return whether it knew at time `at` that its weights had been forgotten."""
        if self._forgotten_at is None or at <= self._forgotten_at:
            return False
        return not self.oracle.has_counted(name_of(self.weights), self._asked_at)

    def works(self) -> bool:
        """Store blocks and read them; return whether all are found."""
        keys = list(range(NUM_KEYS))
        for act in (self.put, self.get):
            before = self.reasons[""]
            act(keys)
            self.collect_all()
            if self.reasons[""] - before < NUM_KEYS:
                return False
        return True

    def forget(self, revision: str | None) -> bool:
        """Forget all blocks. Returns whether the store confirmed it."""
        self._ok_at, self._forgotten_at = inf, None
        if revision is not None:
            self.weights = revision
        began_at = self.loop.now
        self.oracle.begin_removal(-1)
        said = self._call_forget(revision, lambda: self.store.forget(revision))
        self._forgot_at = self.loop.now
        if said == "ok":
            self._check_known(began_at)
        self.oracle.end_removal(-1, self.loop.now)
        return self._note_call("forget", f"forget {revision!r}", said)

    def _check_known(self, began_at: float) -> None:
        """Check that the store, which has just forgotten all blocks, knows of none that is older."""
        keys = list(self._last_put)
        for key, is_known in zip(keys, self.store.contains([key_of(key) for key in keys]).tolist(), strict=True):
            if is_known and not self.link.is_dead:
                self.oracle.check_known(key, self.weights, began_at)

    def lift_quotas(self) -> bool:
        """Remove all quotas. Returns whether the store confirmed it."""
        return not self._has_tenants or all(self._set_quota(tenant, None) for tenant in range(_TENANTS))

    def put(self, keys: list[int]) -> None:
        """Submit blocks of keys."""
        puts = [self.oracle.put(key, self.weights, self.loop.now) for key in keys]
        self._last_put.update(zip(keys, puts, strict=True))
        rows = np.frombuffer(bytearray(b"".join(put.data for put in puts)), np.uint8).reshape(-1, BLOCK_BYTES)
        names, owners = [key_of(key) for key in keys], self._owners(keys) if self._has_tenants else None
        self._submit("put", keys, puts, rows, lambda: self.store.submit_put(names, rows, owners))

    def get(self, keys: list[int]) -> None:
        """Submit reads of keys."""
        rows = np.zeros((len(keys), BLOCK_BYTES), np.uint8) if self.loop.random.random() < 0.5 else None
        self._submit("get", keys, [], rows, lambda: self.store.submit_get([key_of(key) for key in keys], rows))

    def delete(self, keys: list[int]) -> None:
        """Submit deletions."""
        for key in keys:
            self.oracle.begin_removal(key)
        self._submit("delete", keys, [], None, lambda: self.store.submit_delete([key_of(key) for key in keys]))

    def _owners(self, keys: list[int]) -> Owners:
        """Return the owners of the blocks: a tenant's blocks follow each other by key."""
        tenants = [(key % _TENANTS).to_bytes(32, "little") for key in keys]
        parents = [key_of(max(0, key - _TENANTS)) for key in keys]
        return Owners(*(np.frombuffer(b"".join(of), np.uint8).reshape(-1, 32) for of in (tenants, parents)))

    def _set_quota(self, tenant: int, most: int | None) -> bool:
        said = self._call(lambda: self.store.set_quota(tenant.to_bytes(32, "little"), most))
        return self._note_call("quota", f"quota {tenant} {most}", said)

    def _act(self) -> None:
        chance = self.loop.random
        first = int(self.loop.now * NEW_KEYS)  # all engines move on to new keys together
        keys = chance.sample(range(first, first + NUM_KEYS), chance.randint(1, 3))
        deletes, forgets = self._shares
        draw = chance.random()
        if draw < forgets or self.due:
            self.forget(self.due.pop(0) if self.due else chance.choice((None, *WEIGHTS)))
        elif self._late_puts and not self.store.stats().is_down:
            keys = self._late_puts.pop()  # they may still land: a deletion must not be confirmed before they do
            self.delete(keys)
            self.get(keys)
        elif self._has_tenants and chance.random() < 0.2:
            self._set_quota(chance.randrange(_TENANTS), chance.choice((None, 0, 2, 4)))
        elif draw < forgets + deletes:
            self.delete(keys)
        elif draw < 0.5:
            self.put(keys)
        elif draw < 0.9:
            is_old = self._last_put and chance.random() < _OLD
            self.get(chance.sample(list(self._last_put), min(3, len(self._last_put))) if is_old else keys)
        elif draw < _BURSTS:  # of keys whose batches wait for each other
            for act in chance.choices((self.put, self.delete, self.get), k=chance.randint(3, 6)):
                act(keys)
        else:
            there = self.store.contains([key_of(key) for key in keys])
            lacked = self.store.lacks([key_of(key) for key in keys])
            if (there & lacked).any():
                raise BrokenPromiseError(f"engine {self.number}: keys {keys} are there and lacked at once")

    def _submit(
        self, kind: str, keys: list[int], puts: list[Put], rows: NDArray[np.uint8] | None, call: Callable[[], int]
    ) -> None:
        self.num_operations += 1
        at, changed_at = self.loop.now, self.oracle.weights_changed_at
        pending = _Pending(kind, call(), keys, puts, rows, self.weights, at, changed_at, self.num_operations)
        self._put_in.update((put.number, pending.number) for put in puts)
        self._pending.append(pending)
        self._say(f"{kind} {keys} is {pending.ticket}")

    def _collect(self, place: int) -> _Pending:
        batch, store, link = self._pending.pop(place), self.store, self.link
        began = self.loop.now
        done = store.wait(batch.ticket)
        if link.is_dead:  # killed while it waited: the answer is lost
            self._lose(batch)
            return batch
        if self.loop.now - began > DEADLINE + 1.0 + (CLOCK_STEP if batch.at < self._sure_at else 0.0):
            raise BrokenPromiseError(
                f"engine {self.number}: {batch.kind} took {self.loop.now - began:.3f} s, its deadline is {DEADLINE} s"
            )
        batch.reason = done.reasons[0]
        self.reasons.update(done.reasons)
        self._counted.update(done.reasons)
        self._say(f"{batch.ticket}: {','.join(reason or 'ok' for reason in done.reasons)}")
        self._log.add_batch(self._who, batch.kind, batch.at, done.reasons)
        self._log.count(batch.kind, [(batch.weights, key) for key in batch.keys], done.reasons)
        self._judge(batch, done)
        if batch.rows is not None and not set(done.reasons) & {"timeout", "closed"}:
            batch.rows[:] = 7  # the caller may reuse its rows now
        return batch

    def _judge(self, batch: _Pending, done: Completion) -> None:
        """Check an answer against what the fleet has done."""
        told_at, ok = self._forgotten_at, done.ok.tolist()
        if any(ok):
            self._ok_at = min(self._ok_at, self.loop.now)
        is_told = "forgotten" in done.reasons and batch.kind == "get" and batch.at > self._forgot_at
        if is_told and told_at is None and batch.at > self._ok_at:
            self._forgotten_at, self._asked_at = self.loop.now, batch.at
        if told_at is not None and batch.at > told_at and self.oracle.lost_at < self._asked_at and any(ok):
            raise BrokenPromiseError(f"engine {self.number}: its weights were forgotten, and its {batch.kind} is ok")
        for key, reason in zip(batch.keys, done.reasons, strict=True):
            if batch.kind == "delete":
                # One that failed may still arrive.
                self.oracle.end_removal(key, self.loop.now + (_LATE_SECONDS if reason else 0.0))
            self._judge_miss(batch, key, reason)
        for index in (index for index, is_ok in enumerate(ok) if is_ok):
            key = batch.keys[index]
            if batch.kind == "get":
                self.oracle.check_hit(done.rows[index], key, batch.weights, batch.at, batch.changed_at)
                put = self.oracle.puts[int(bytes(done.rows[index][:8]))]
                self._hits.setdefault(key, []).append((batch, put))
            elif batch.kind == "put":
                batch.puts[index].confirmed_at = self.loop.now
            else:
                self.oracle.confirm_deletion(key, batch.weights, batch.at, self.loop.now)
                self._deleted.setdefault(key, []).append(batch)
            self._check_order(key)

    def _check_order(self, key: int) -> None:
        """Check that no read of this engine has found its own block behind its own deletion, in order of submission.

        So a put that ended late must not land behind a confirmed deletion, unless its request was given up.
        """
        for read, put in self._hits.get(key, ()):
            begun = self._put_in.get(put.number)
            settled = max(self._sure_at, self._forgot_at, self.oracle.rolled_back_at, self.oracle.lost_at)
            may_come = put.confirmed_at is None and key_of(key) in self.link.given_up
            if begun is None or may_come or put.submitted_at <= settled:
                continue
            if any(begun < deletion.number < read.number for deletion in self._deleted.get(key, ())):
                raise BrokenPromiseError(
                    f"key {key}: a read found put {put.number} behind a deletion submitted before it"
                )

    def _judge_miss(self, batch: _Pending, key: int, reason: str) -> None:
        if not reason:
            return
        # Another batch may have failed and hidden the key, but not been collected yet.
        is_unsure = any(key in other.keys and other.at <= batch.at for other in self._pending)
        is_unsure |= batch.at < self._failed_at.get(key, -inf) + _HIDDEN
        # After its clock jumps back, a store hides keys for longer and may put blocks under an old epoch.
        is_unsure |= (put := self._last_put.get(key)) is not None and put.submitted_at < self._sure_at
        if reason == "absent" and batch.kind == "get" and not is_unsure:
            self.oracle.check_absent(put, key, batch.at)
        else:
            self._failed_at[key] = self.loop.now
