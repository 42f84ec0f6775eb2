"""Faults planted in the code of shared stores, each with the seeds within which a simulated fleet finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blockyard.errors import StoreError
from blockyard.stores import ThreadedStore, object_store, remote
from blockyard.stores.threaded import batches, breaker, epochs, known_keys, order, store, value_format
from blockyard.stores.threaded.epochs import Epoch, ForgottenError, SharedEpoch

__all__ = ["PLANTED", "planted"]

Patch = Callable[[pytest.MonkeyPatch], None]


def _landing(patch: pytest.MonkeyPatch) -> None:
    carry_out = ThreadedStore._carry_out_under_epoch

    def land(self: Any, batch: Any) -> Any:
        batch.age = 1 << 60
        return carry_out(self, batch)

    patch.setattr(ThreadedStore, "_carry_out_under_epoch", land)


def _clocks(patch: pytest.MonkeyPatch) -> None:
    times = iter(range(1, 1 << 30))

    def begin(name: bytes, _stored: Any, *, joins: bool) -> Epoch:
        stamp = next(times) * 7919 % 65537  # of clocks that disagree
        return Epoch(stamp.to_bytes(16, "big"), stamp.to_bytes(16, "big"), name)

    def go_on(self: Epoch, stored: Epoch | None) -> Epoch:
        return self if stored is None else max(self, stored, key=lambda epoch: epoch.weights)

    patch.setattr(Epoch, "begun", staticmethod(begin))
    patch.setattr(Epoch, "continued", go_on)


def _behind(patch: pytest.MonkeyPatch) -> None:
    take = SharedEpoch._take

    def forget_it(self: Any, age: int, epoch: Any, asked_at: float) -> None:
        take(self, age, epoch, asked_at)
        self._is_behind = False

    patch.setattr(SharedEpoch, "_take", forget_it)


def _unconfirmed(patch: pytest.MonkeyPatch) -> None:
    begin = SharedEpoch.begin

    def pretend(self: Any) -> None:
        try:
            begin(self)
        except (StoreError, OSError):
            self._mine, self._is_due = Epoch(bytes(15) + b"1", bytes(15) + b"1", self._name), False

    patch.setattr(SharedEpoch, "begin", pretend)


def _delete_under_old_epoch(patch: pytest.MonkeyPatch) -> None:
    confirm = SharedEpoch.confirm
    patch.setattr(SharedEpoch, "confirm", lambda self, *, seconds=0.0: confirm(self, seconds=max(seconds, 1.0)))


def _all_stored(patch: pytest.MonkeyPatch) -> None:
    put_good = ThreadedStore._put_good

    def pretend(self: Any, names: Any, rows: Any, reasons: list[str], *more: Any) -> None:
        put_good(self, names, rows, reasons, *more)
        reasons[:] = [""] * len(reasons)

    patch.setattr(ThreadedStore, "_put_good", pretend)


def _no_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(order.BatchOrder, "add", lambda self, batch: self._last.update(dict.fromkeys(batch.names, batch)))


def _leak(patch: pytest.MonkeyPatch) -> None:
    release = batches.BatchStore._release

    def keep(self: Any, batch: Any) -> None:
        batch.num_bytes -= batch.kind == "put"
        release(self, batch)

    patch.setattr(batches.BatchStore, "_release", keep)


def _miscount(patch: pytest.MonkeyPatch) -> None:
    count = batches.BatchStore._count_misses

    def twice(self: Any, batch: Any, reasons: list[str]) -> None:
        count(self, batch, reasons + [reason for reason in reasons if reason == "unavailable"])

    patch.setattr(batches.BatchStore, "_count_misses", twice)


def _wrong_row(patch: pytest.MonkeyPatch) -> None:
    """Two blocks of one batch change places."""
    spread = store.spread_out

    def swap(rows: Any, where: Any, count: int) -> Any:
        return spread(rows, where, count)[::-1] if count > 1 else spread(rows, where, count)

    patch.setattr(store, "spread_out", swap)


def _no_key_check(patch: pytest.MonkeyPatch) -> None:
    check = remote.check_parts
    patch.setattr(remote, "check_parts", lambda *arguments: [""] * len(check(*arguments)))
    patch.setattr(value_format.ValueFormat, "check", lambda self, values, keys: [""] * len(keys))


def _no_token(patch: pytest.MonkeyPatch) -> None:
    names = ThreadedStore._names_of
    patch.setattr(ThreadedStore, "_names_of", lambda self, keys, epoch: names(self, keys, bytes(16)))


def _deletes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(object_store.ObjectStore, "delete", lambda self, keys: None)


def _forgets_alone(patch: pytest.MonkeyPatch) -> None:
    def replace(self: Any, stored: Any, epoch: Epoch) -> epochs.Record:
        return epochs.Record(epoch.record(), epoch)

    patch.setattr(epochs.EpochRecord, "replace", replace)


def _hangs_on_close(patch: pytest.MonkeyPatch) -> None:
    stop = batches.BatchStore._stop

    def stay(self: Any) -> None:
        stop(self)
        self._num_threads += 1

    patch.setattr(batches.BatchStore, "_stop", stay)


def _found_when_forgotten(patch: pytest.MonkeyPatch) -> None:
    known = SharedEpoch.known

    def any_epoch(self: Any) -> Epoch | None:
        return self._mine or known(self)

    patch.setattr(SharedEpoch, "known", any_epoch)
    patch.setattr(SharedEpoch, "counts", lambda self, epoch, stored: True)


_FAULTS: dict[str, tuple[int, Patch]] = {
    "a put has the epoch that counts when it lands": (300, _landing),
    "the latest clock's epoch counts": (100, _clocks),
    "a process that was told forgets it": (100, _behind),
    "forget does not wait for the storage": (200, _unconfirmed),
    "forget joins the epoch of any name": (
        100,
        lambda patch: patch.setattr(
            Epoch, "begun", staticmethod(lambda name, stored, *, joins: stored or Epoch(name[:16], name[16:], name))
        ),
    ),
    "forget tells nobody": (100, _forgets_alone),
    "reads do not look at the record": (100, _found_when_forgotten),
    "names do not depend on the epoch": (100, _no_token),
    "a deletion uses an epoch of a second ago": (400, _delete_under_old_epoch),
    "a deletion deletes nothing": (100, _deletes_nothing),
    "damage is not looked for": (100, _no_key_check),
    "a refused put is said to be stored": (100, _all_stored),
    "batches of one key run in any order": (100, _no_order),
    "rows of a batch change places": (20, _wrong_row),
    "memory of a put is not given back": (20, _leak),
    "a miss is counted twice": (100, _miscount),
    "storage that was down is never asked again": (
        100,
        lambda patch: patch.setattr(breaker.Breaker, "is_probe_due", lambda self, now: False),
    ),
    "a key that failed is never read again": (500, lambda patch: patch.setattr(known_keys, "FAILED_SECONDS", 1e9)),
    "close waits for a thread that is gone": (20, _hangs_on_close),
}
PLANTED = tuple(_FAULTS)


def planted(name: str, patch: pytest.MonkeyPatch) -> int:
    """Plant a fault; return the seeds within which it must be found."""
    most, plant = _FAULTS[name]
    plant(patch)
    return most


_ = ForgottenError
