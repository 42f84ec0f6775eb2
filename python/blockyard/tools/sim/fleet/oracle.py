"""The promises that must hold in a fleet, whatever fails. The oracle sees all engines and the server's record."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import BlockyardError
from blockyard.stores.threaded.epochs import Epoch

__all__ = ["BLOCK_BYTES", "BrokenPromiseError", "Oracle", "Put"]

BLOCK_BYTES: Final = 80
_GIVEN_UP: Final = 10.0  # how long after it was asked for a deletion may still be sent, in seconds, with a margin
_LATE: Final = 1.5  # how long an engine may keep using an epoch that has ended, in seconds, with a margin


class BrokenPromiseError(BlockyardError):
    """A store broke one of its promises."""


@dataclass(eq=False)
class Put:
    """A block that an engine submitted, and when the store confirmed it."""

    number: int
    key: int
    weights: str
    submitted_at: float
    confirmed_at: float | None = None

    @cached_property
    def data(self) -> bytes:
        """Its bytes: a text that identifies the put, and filler derived from it."""
        head = f"{self.number:08d} {self.key:04d} {self.weights:<16}".encode()
        filler = hashlib.blake2b(head, digest_size=BLOCK_BYTES - len(head)).digest()
        return head + filler


@dataclass
class Oracle:
    """All puts, deletions and changes of weights so far.

    Attributes:
        puts: all puts; a put's number is its index.
        weights_changed_at: when the weights in the server's record first became valid.
        lost_at: when a lost or damaged record was last replaced; its writer may not know what was forgotten.
        records: the records that the server stored, each with its time.
        forgetting: until when an engine may be beginning or joining an epoch, by name of its weights.
        beginning: the same, only for engines that may not join another engine's epoch.
        deletions: the confirmed deletions of each key by engines with the same weights: when each was submitted and
            confirmed. One by an engine that has not heard of the weights of today deletes none of their blocks.
        undone: places in `records` of those that failovers have undone.
        forgets: for each confirmed `forget`, the places in `records` of the epochs that it may have begun or joined.
        rolled_back_at: when the server last failed over; it may have lost anything submitted before that.
        unsettled_at: when a deletion may last have removed each key; under -1, when a fault or a `forget` may last have
            removed all keys.
        removals: number of deletions and calls of `forget` that are under way, likewise by key.
        may_evict: whether the server drops blocks to make room, or after a time.
    """

    puts: list[Put] = field(default_factory=list)
    weights_changed_at: float = 0.0
    lost_at: float = 0.0
    deletions: dict[tuple[int, str], list[tuple[float, float]]] = field(default_factory=dict)
    rolled_back_at: float = -1.0
    records: list[tuple[float, Epoch]] = field(default_factory=list)
    undone: set[int] = field(default_factory=set)
    forgets: list[list[int]] = field(default_factory=list)
    forgetting: dict[bytes, float] = field(default_factory=dict)
    beginning: dict[bytes, float] = field(default_factory=dict)
    unsettled_at: dict[int, float] = field(default_factory=dict)
    removals: Counter[int] = field(default_factory=Counter)
    may_evict: bool = False
    _since: dict[tuple[bytes, ...], float] = field(default_factory=dict)

    def see_record(self, new: bytes, now: float, *, replaces: bytes | None) -> None:
        """Check an epoch's record that the server stores; `replaces` is the intact record it replaces, if any."""
        epoch = Epoch.read(new)
        if replaces is not None and Epoch.read(replaces)[1:] != epoch[1:]:
            if now > self.forgetting.get(epoch.name, -1.0):
                raise BrokenPromiseError("the weights changed, but no engine has called forget for the new ones")
            if epoch.name == Epoch.read(replaces).name and now > self.beginning.get(epoch.name, -1.0):
                raise BrokenPromiseError("an engine began an epoch instead of joining one with the same name")
        self.records.append((now, epoch))
        # After the record was lost, earlier weights may be valid again; those before the first `forget` always may.
        if any(epoch.weights):
            self.weights_changed_at = self._since.setdefault(epoch[1:], now)
        else:
            self.weights_changed_at = 0.0
        if replaces is None:
            self.lost_at = now

    def begin_forget(self, name: bytes, *, begins: bool) -> Callable[[float], None]:
        """Record a call of `forget`. When it ends, call the result with the time until which it may still arrive."""
        kinds = [self.forgetting, self.beginning] if begins else [self.forgetting]
        for until in kinds:
            until[name] = inf

        def end(at: float) -> None:
            for until in kinds:
                until[name] = at

        return end

    def roll_back(self, record: bytes | None, to: float, now: float) -> None:
        """Record that the server has rolled back to time `to`, and to this record; None if that is lost.

        Raises:
            BrokenPromiseError: a `forget` was confirmed, and its record is undone.
        """
        self.unsettle(-1, now)
        self.rolled_back_at = now
        for name, found in self.deletions.items():
            self.deletions[name] = [(began, ended) for began, ended in found if ended < to]
        epoch = None if record is None else Epoch.read(record)
        self.weights_changed_at = 0.0
        if epoch is not None:
            self.weights_changed_at = self._since.get(epoch[1:], 0.0)
            last = max((place for place, (_, found) in enumerate(self.records) if found == epoch), default=-1)
            self.undone.update(range(last + 1, len(self.records)))
            self.records.append((now, epoch))
            if not all(map(self._is_kept, self.forgets)):
                raise BrokenPromiseError("forget was confirmed, but a failover has undone it")
        self.lost_at = now

    def _is_kept(self, places: list[int]) -> bool:
        return not self.undone.issuperset(places)

    def put(self, key: int, weights: str, now: float) -> Put:
        """Record a block that is being submitted."""
        self.puts.append(Put(len(self.puts), key, weights, now))
        return self.puts[-1]

    def check_forgot(self, name: bytes, began_at: float, *, begins: bool) -> None:
        """Check that a confirmed `forget` began an epoch of this name, or joined one if not `begins`.

        Raises:
            BrokenPromiseError: no record with that name has been valid since the call, or a failover has undone it.
        """
        before = sum(at < began_at for at, _ in self.records)
        places = range(before if begins else max(0, before - 1), len(self.records))
        found = [place for place in places if self.records[place][1].name == name]
        if not found or not self._is_kept(found):
            raise BrokenPromiseError("forget was confirmed, but the storage has no record of it")
        self.forgets.append(found)

    def has_counted(self, name: bytes, since: float) -> bool:
        """Return whether weights of this name have counted again: a record was lost and then written again."""
        return any(at >= since and epoch.name == name for at, epoch in self.records)

    def confirm_deletion(self, key: int, weights: str, submitted_at: float, now: float) -> None:
        """Record that a deletion was confirmed, unless a failover may have undone it before its answer arrived."""
        if submitted_at > self.rolled_back_at:
            self.deletions.setdefault((key, weights), []).append((submitted_at, now))

    def check_changed(self, computed_at: float, asked_at: float, changed_at: float) -> None:
        """Check that a block was computed after all were forgotten; a failover may undo a `forget`.

        Args:
            computed_at: when the block was computed.
            asked_at: when an engine submitted the read that found it.
            changed_at: `weights_changed_at` at that time.

        Raises:
            BrokenPromiseError: the block must no longer be found.
        """
        if computed_at < changed_at and asked_at > self.rolled_back_at:
            raise BrokenPromiseError(
                f"found a block computed at {computed_at:.3f} s; all were forgotten at {changed_at:.3f} s"
            )

    def unsettle(self, key: int, until: float) -> None:
        """Record that a key may have gone until a time; -1 for all keys."""
        self.unsettled_at[key] = max(until, self.unsettled_at.get(key, 0.0))

    def begin_removal(self, key: int) -> None:
        """Record that an engine asks for the deletion of a key, or of all (-1)."""
        self.removals[key] += 1

    def end_removal(self, key: int, until: float) -> None:
        """Record that such a deletion has ended; others of the key may still be under way."""
        self.removals[key] -= 1
        self.unsettle(key, until)

    def _last_unsettled(self, key: int, otherwise: float = 0.0) -> float:
        return inf if self.removals[key] else self.unsettled_at.get(key, otherwise)

    def check_absent(self, put: Put | None, key: int, asked_at: float) -> None:
        """Check that a block which an engine has put may be absent.

        Args:
            put: the engine's last put of this key.
            key: the key it read.
            asked_at: when it submitted the read.

        Raises:
            BrokenPromiseError: the put was confirmed, and nothing since then could have removed the block.
        """
        last = max(self._last_unsettled(-1), self.weights_changed_at) + _LATE
        last = max(last, self._last_unsettled(key))
        if self.may_evict:
            return
        if put is not None and last < put.submitted_at < asked_at and put.confirmed_at is not None:
            raise BrokenPromiseError(
                f"key {key}: absent, though put {put.number} of {put.submitted_at:.3f} s was confirmed"
            )

    def check_deleted(self, key: int, sent_at: float, damaged_at: float) -> None:
        """Check that an engine may delete an intact block: it was asked to, or has just read a damaged one.

        Args:
            key: the block's key.
            sent_at: when the engine sent the request.
            damaged_at: when the server last sent a damaged block under this name; it may have been replaced since.

        Raises:
            BrokenPromiseError: what the engine has read may have been wrong, what is stored never was.
        """
        if max(self._last_unsettled(key, -inf), damaged_at) + _GIVEN_UP < sent_at:
            raise BrokenPromiseError(f"key {key}: an intact block is deleted, though no engine was asked to delete it")

    def check_known(self, key: int, weights: str, began_at: float) -> None:
        """Check a key that an engine says to have a block, right after its `forget` was confirmed.

        Args:
            key: the key.
            weights: the engine's weights.
            began_at: when it called `forget`.

        Raises:
            BrokenPromiseError: no engine with these weights has put the key since.
        """
        since = min(began_at, self.weights_changed_at) - _LATE
        if not any(put.key == key and put.weights == weights and put.submitted_at >= since for put in self.puts):
            raise BrokenPromiseError(f"key {key}: known to be there right after forget, but not put since")

    def check_hit(self, row: NDArray[np.uint8], key: int, weights: str, asked_at: float, changed_at: float) -> None:
        """Check a block that an engine has found.

        Args:
            row: the block.
            key: the key that the engine read.
            weights: the engine's weights when it submitted the read.
            asked_at: when it submitted the read.
            changed_at: `weights_changed_at` at that time.

        Raises:
            BrokenPromiseError: it is another block, or one that must no longer be found.
        """
        number = bytes(row[:8])
        put = self.puts[int(number)] if number.isdigit() and int(number) < len(self.puts) else None
        if put is None or put.data != row.tobytes():
            raise BrokenPromiseError(f"key {key}: found bytes that nobody stored: {bytes(row[:32])!r}")
        if put.key != key:
            raise BrokenPromiseError(f"key {key}: found the block of key {put.key}")
        if put.weights != weights:
            raise BrokenPromiseError(f"key {key}: an engine with weights {weights!r} found a block of {put.weights!r}")
        self.check_changed(put.submitted_at, asked_at, changed_at)
        for submitted_at, confirmed_at in self.deletions.get((key, weights), ()):
            is_before = put.confirmed_at is not None and put.confirmed_at < submitted_at
            if is_before and confirmed_at < asked_at:
                raise BrokenPromiseError(
                    f"key {key}: found a block whose deletion was confirmed at {confirmed_at:.3f} s"
                )
