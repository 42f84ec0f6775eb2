"""One process of many that share a store: random operations until it is done or killed; `fleet.py` starts it.

It checks what it can check alone: the bytes of each block that it finds, and the name of the weights that computed it.
For the rest it logs times, which the fleet compares after all have ended.

`BLOCKYARD_PLANTED` names a fault that the fleet must find.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final

import numpy as np
from planted_faults import plant
from shared_blocks import (
    CHAINS,
    FINAL,
    LENGTH,
    STORM,
    VOID,
    WAITING,
    WIDTH,
    Plan,
    Row,
    key_of,
    name_of,
    now,
    own_keys,
    row_of,
    tenant_of,
)

from blockyard.errors import StoreError
from blockyard.stores import Owners, open_store
from blockyard.stores.threaded.epochs import Epoch

_IN_FLIGHT: Final = 6  # tickets that are not collected
_FORGET_SECONDS: Final = 60.0  # after which an unconfirmed `forget` is blamed on the test environment


class WrongClock:
    """The time of day as this process sees it.

    Attributes:
        step: its error in seconds.
    """

    def __init__(self) -> None:
        self.step = 0.0
        self._time_ns = time.time_ns

    def set(self) -> None:
        """Install it for all modules that call `time.time` or `time.time_ns`."""
        time.time_ns = lambda: self._time_ns() + int(self.step * 1e9)
        time.time = lambda: time.time_ns() / 1e9


@dataclass
class Pending:
    """An uncollected ticket, and the state of the process when it was submitted."""

    kind: str
    ticket: int
    keys: list[int]
    weights: int
    at: int
    must_miss: frozenset[int] = frozenset()  # own keys that were deleted and not put since
    puts: dict[int, int] = field(default_factory=dict)  # of a deletion: how often each key had been put


class Writer:
    """The process.

    Attributes:
        weights: the number of its current weights.
        based_at: the latest time at which it got them; None while unknown. A newly opened store joins the
            current epoch at some time before its first block is found or stored.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.board = plan, plan.board
        self.random = random.Random(plan.seed * 1000 + plan.life)
        self.clock = WrongClock()
        self.clock.set()
        self.begun = Epoch.begun
        self.log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pending: deque[Pending] = deque()
        self.deleted: set[int] = set()  # own keys whose deletion was confirmed, and that were not put since
        self.puts: Counter[int] = Counter()  # of each own key
        self.seen: Counter[str] = Counter()
        self.is_final = False
        self.is_lost = False  # found its blocks forgotten
        self.weights = self.board.announced
        self._open()

    # ---- the store ----

    def _open(self) -> None:
        options: Any = {"bytes_per_block": WIDTH, "num_slots": self.plan.num_slots, "use": "prefix"}
        until = time.monotonic() + _FORGET_SECONDS
        while True:
            try:
                self.store = open_store(self.plan.url, revision=name_of(self.weights), **options)
                break
            except StoreError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        self.has_epochs = hasattr(self.store, "_keyed_blocks")
        self.based_at = None if self.has_epochs else now()

    def reopen(self) -> None:
        """Close the store, sometimes with tickets in flight, and reopen it."""
        if self.random.random() < 0.5:
            self.collect_all()
        self.pending.clear()
        self.deleted.clear()
        self.store.close()
        self.weights = self.board.announced if self.random.random() < 0.5 else self.weights
        self.is_lost = False
        self._open()

    def forget(self, weights: int | None) -> None:
        """Call `forget` until it succeeds."""
        target = self.weights if weights is None else weights
        until = time.monotonic() + _FORGET_SECONDS
        self.deleted.clear()
        has_changed = target != self.weights
        self.weights = target
        while True:
            begun, began_at = self._watched(), now()
            try:
                self.store.forget(None if weights is None else name_of(target))
                break
            except StoreError as error:
                self.say(event="forget failed", why=str(error)[-200:])
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        self.based_at, self.is_lost = now(), False
        # An open slab belongs to one process, which knows whether the weights change.
        begins = weights is None or (bool(begun) and begun[-1] if self.has_epochs else has_changed)
        self.say(event="forget", weights=target, began_at=began_at, ended_at=self.based_at, begins=begins)

    def _watched(self) -> list[bool]:
        """Return a list that takes whether `forget` begins an epoch, rather than joining one."""
        begun: list[bool] = []

        def begin(name: bytes, stored: Epoch | None, *, joins: bool) -> Epoch:
            epoch = self.begun(name, stored, joins=joins)
            begun.append(epoch is not stored)
            return epoch

        Epoch.begun = begin  # type: ignore[method-assign]
        return begun

    def forget_with_puts(self, weights: int | None) -> None:
        """Put blocks after `forget` has stopped the process and before it begins an epoch: nobody may find them."""
        if not self.has_epochs:
            self.forget(weights)
            return
        epochs, stopped, go_on = self.store._keyed_blocks.epochs, Event(), Event()  # type: ignore[attr-defined]
        real = epochs.begin

        def begin() -> None:
            stopped.set()
            go_on.wait(5)
            real()

        epochs.begin = begin
        with ThreadPoolExecutor(1) as pool:
            forgotten = pool.submit(self.forget, weights)
            if stopped.wait(1):
                keys = self._some_keys()
                for _ in range(3):
                    self._submit_put(keys, Row(0, VOID, self.plan.process, self.plan.life, 0))
            go_on.set()
            forgotten.result()
        del epochs.begin

    # ---- operations ----

    def step(self) -> None:
        """Do one random operation."""
        choice = self.random.random()
        if self.is_lost and self.random.random() < 0.5:
            self.forget(self.board.announced)
        elif choice < 0.42:
            self.put()
        elif choice < 0.82:
            self._submit("get", self._some_keys() if self.random.random() < 0.9 else own_keys(self.plan.process))
        elif choice < 0.90:
            self.store.contains([key_of(key) for key in self._some_keys()])
        elif choice < 0.96:
            self._submit("delete", self.random.sample(own_keys(self.plan.process), 1))
        elif choice < 0.985:
            self.clock.step = self.random.uniform(-3600, 3600)
        elif choice < 0.995 and not self.is_final:
            self._change_weights()
        elif choice >= 0.998:
            self.reopen()
        while len(self.pending) > _IN_FLIGHT or (self.pending and self.random.random() < 0.4):
            self.collect(self.random.randrange(len(self.pending)))

    def _change_weights(self) -> None:
        how, weights = self.random.random(), None
        if how < 0.4:
            weights = self.board.highest + 1
        elif how < 0.7:
            weights = self.random.randint(max(0, self.board.highest - 3), self.board.highest)
        (self.forget_with_puts if self.random.random() < 0.5 else self.forget)(weights)
        self.board.announce(self.weights)

    def _some_keys(self) -> list[int]:
        """Return the numbers of consecutive blocks of a prompt."""
        count = int(self.plan.most ** self.random.random() + 0.5)
        first = self.random.randrange(LENGTH - count + 1)
        chains = min(CHAINS, max(2, self.plan.most // 4))  # few, so that small batches hit
        chain = self.random.randrange(chains) * LENGTH
        return list(range(chain + first, chain + first + count))

    def put(self) -> None:
        """Put blocks, of the shared keys or of its own."""
        keys = self._some_keys() if self.random.random() < 0.9 else own_keys(self.plan.process)
        at = now()
        based_at = at if self.based_at is None else self.based_at
        self.deleted.difference_update(keys)
        self.puts.update(key for key in keys if key >= CHAINS * LENGTH)
        self._submit_put(keys, Row(0, self.weights, self.plan.process, self.plan.life, based_at))

    def _submit_put(self, keys: list[int], row: Row) -> None:
        data = b"".join(row._replace(key=key).packed() for key in keys)
        rows = np.frombuffer(data, np.uint8).reshape(-1, WIDTH)
        names = [key_of(key) for key in keys]
        if getattr(self.store, "keeps_quotas", False):
            owned = [key if key < CHAINS * LENGTH else 0 for key in keys]
            tenants = b"".join(map(tenant_of, owned))
            parents = b"".join(key_of(key - 1) if key % LENGTH and key in owned else bytes(32) for key in keys)
            owners = Owners(*(np.frombuffer(part, np.uint8).reshape(-1, 32) for part in (tenants, parents)))
            ticket = self.store.submit_put(names, rows, owners)
        else:
            ticket = self.store.submit_put(names, rows)
        self.pending.append(Pending("void" if row.weights == VOID else "put", ticket, keys, row.weights, now()))

    def _submit(self, kind: str, keys: list[int]) -> None:
        at, names = now(), [key_of(key) for key in keys]
        ticket = self.store.submit_get(names) if kind == "get" else self.store.submit_delete(names)
        batch = Pending(kind, ticket, keys, self.weights, at, frozenset(self.deleted & set(keys)))
        batch.puts = {key: self.puts[key] for key in keys} if kind == "delete" else {}
        self.pending.append(batch)

    # ---- results ----

    def collect_all(self) -> None:
        """Collect every ticket."""
        while self.pending:
            self.collect(0)

    def collect(self, place: int) -> None:
        """Collect a ticket, and check its results."""
        batch = self.pending[place]
        del self.pending[place]
        done = self.store.wait(batch.ticket)
        self.seen.update(f"{batch.kind} {reason or 'ok'}" for reason in done.reasons)
        self.is_lost = self.is_lost or ("forgotten" in done.reasons and batch.weights == self.weights)
        good = [key for key, ok in zip(batch.keys, done.ok.tolist(), strict=True) if ok]
        if good and self.based_at is None and batch.kind in {"get", "put"}:
            self.based_at = now()
        if batch.kind == "get" and good:
            self._check(batch, done.rows[done.ok], good)
        elif batch.kind == "put" and good and self.is_final:
            self.say(event="kept", keys=[key for key in good if key < CHAINS * LENGTH])
        elif batch.kind == "delete" and batch.weights == self.weights:
            self.deleted.update(key for key in good if self.puts[key] == batch.puts[key])

    def _check(self, batch: Pending, rows: np.ndarray[Any, Any], keys: list[int]) -> None:
        oldest = 1 << 63
        for key, data in zip(keys, rows, strict=True):
            row = row_of(data.tobytes())
            if data.tobytes() != row.packed() or row.key != key:
                self.say(event="wrong", why="other bytes than were put", key=key, row=row)
            elif row.weights != batch.weights:
                self.say(event="wrong", why="a block of other weights", key=key, row=row, weights=batch.weights)
            elif key in batch.must_miss:
                self.say(event="wrong", why="a block that was deleted", key=key, row=row)
            oldest = min(oldest, row.based_at)
        self.say(event="hits", at=batch.at, oldest=oldest, count=len(keys))

    def say(self, **line: Any) -> None:
        """Log a line with one system call, so a kill can only truncate it."""
        os.write(self.log, json.dumps(line).encode() + b"\n")

    # ---- the whole life ----

    def run(self) -> None:
        """Work until the operations are done."""
        done = self.board.done
        while int(done[self.plan.process]) < self.plan.operations:
            if self.board.phase == FINAL and not self.is_final:
                self._take_last_weights()
            elif self.board.phase != FINAL and done[self.plan.process] >= self.plan.storm:
                self._wait_for_others()
            else:
                self.step()
                done[self.plan.process] += 1
                if done[self.plan.process] % 50 == 0:
                    self._say_seen()
        self.collect_all()
        self._say_seen()
        self.store.close()

    def _say_seen(self) -> None:
        self.say(event="seen", counts=self.seen)
        self.seen.clear()

    def _wait_for_others(self) -> None:
        self.collect_all()
        self.board.waits[self.plan.process] = 1
        while self.board.phase in {STORM, WAITING}:
            time.sleep(0.01)

    def _take_last_weights(self) -> None:
        self.collect_all()
        self.forget(FINAL)
        self.is_final = True


def main() -> None:
    """Run the plan from standard input."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    plant(os.environ.get("BLOCKYARD_PLANTED", ""), plan)
    Writer(plan).run()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
