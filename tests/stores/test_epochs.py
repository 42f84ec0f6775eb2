"""The epoch of a shared store: what each step of the client does, and every order of the steps of two processes.

`rust/store/tests/epochs.rs` searches the same protocol as a model of its own, with more processes and faults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from epoch_model import Bounds, Model, WrongHitError, search

from blockyard.errors import StoreError
from blockyard.stores.threaded.epochs import EPOCH_BYTES, Epoch, ForgottenError, Record, RecordCheck, SharedEpoch


class Storage:
    """The record of a store."""

    def __init__(self) -> None:
        self.record: bytes | None = None
        self.is_lost = False

    def read(self) -> Record:
        if self.is_lost:
            raise StoreError("the server does not answer")
        return Record(self.record, None if self.record is None else Epoch.read(self.record))

    def replace(self, stored: Record, epoch: Epoch) -> Record:
        if stored.raw == self.record:
            self.record = epoch.record()
        return self.read()

    def process(self, revision: str = "") -> SharedEpoch:
        return SharedEpoch(self.read, self.replace, revision)


def forget(process: SharedEpoch, revision: str | None = None) -> None:
    process.stop(revision)
    process.begin()


def test_a_record_is_read_as_it_was_written():
    epoch = Epoch(b"t" * 16, b"w" * 16, b"n" * 32)
    assert len(epoch.record()) == EPOCH_BYTES
    assert Epoch.read(epoch.record()) == epoch


def test_processes_share_an_epoch_until_one_forgets():
    storage = Storage()
    one, two = storage.process(), storage.process()
    first = one.confirm()
    assert two.confirm() == first
    forget(one)
    assert one.confirm() not in {first, None}
    with pytest.raises(ForgottenError, match="another process has forgotten"):
        two.confirm()
    assert two.known() is None


def test_a_revision_is_forgotten_once_and_joined_by_name():
    storage = Storage()
    one, two, late = storage.process(), storage.process(), storage.process("step-2")
    one.confirm(), two.confirm()
    forget(one, "step-2")
    forget(two, "step-2")
    assert one.confirm() == two.confirm() == late.confirm()
    with pytest.raises(ForgottenError):
        storage.process("step-1").confirm()


def test_an_unconfirmed_epoch_is_not_begun():
    storage = Storage()
    one = storage.process()
    one.confirm()
    storage.is_lost = True
    one.stop(None)
    with pytest.raises(StoreError, match="does not answer"):
        one.begin()
    assert one.known() is None
    storage.is_lost = False
    with pytest.raises(ForgottenError, match="not been confirmed"):
        one.confirm()
    one.begin()
    assert one.confirm() == one.known() is not None


def test_a_lost_record_is_replaced_for_the_same_weights():
    storage = Storage()
    one, two = storage.process(), storage.process()
    before = one.confirm()
    two.confirm()
    storage.record = None
    after = two.confirm()
    assert after.token != before.token, "what was stored under the lost record is not found"
    assert one.confirm() == after


def test_puts_that_were_submitted_before_a_forget_are_void():
    storage = Storage()
    one = storage.process()
    one.confirm()
    age = one.age
    one.stop(None)
    between = one.age
    one.begin()
    assert age < between < one.age


PROCESSES = Bounds(processes=2, keys=1, forgets=1, faults=0)


def test_no_order_of_the_clients_steps_finds_a_wrong_block():
    model = Model(PROCESSES)
    assert search(model, 1_000_000) > 1000
    assert model.hits > 100


SHARED = replace(PROCESSES, shares_reads=True)


@pytest.mark.slow
def test_no_order_finds_a_wrong_block_where_batches_share_a_read_of_the_record():
    model = Model(SHARED)
    assert search(model, 1_000_000) > 100_000
    assert model.hits > 1000


@pytest.mark.slow
@pytest.mark.parametrize("record_is_lost", [False, True])
def test_no_order_of_steps_and_faults_finds_a_wrong_block(record_is_lost: bool):
    assert search(Model(replace(PROCESSES, faults=1, record_is_lost=record_is_lost)), 1_000_000) > 10_000


@pytest.mark.slow
def test_no_order_finds_a_wrong_block_where_each_forgets_twice():
    assert search(Model(Bounds(processes=2, keys=1, forgets=2, faults=0)), 10_000_000) > 100_000


class WithoutAge(SharedEpoch):
    """A put lands whenever it was submitted."""

    @property
    def age(self) -> int:
        return 0


class JoinsAny(SharedEpoch):
    """A process goes on under whatever epoch counts."""

    def confirm(self, **options: Any) -> Epoch:
        self._mine, self._name = None, (self.read().epoch or self._mine or Epoch(b"", b"", self._name)).name
        return super().confirm(**options)


class WithoutRecord(SharedEpoch):
    """A read does not ask for the record."""

    def counts(self, epoch: Epoch, stored: Record) -> bool:
        return True


class SharesReadsUnderWay(SharedEpoch):
    """A read of the record serves the batches that begin before its answer comes."""

    def take_due(self) -> list[RecordCheck]:
        return self._due


def test_a_batch_shares_no_read_that_began_before_it():
    with pytest.raises(WrongHitError, match="after: "):
        search(Model(SHARED, SharesReadsUnderWay), 1_000_000)


@pytest.mark.parametrize("fault", [WithoutAge, JoinsAny, WithoutRecord])
def test_each_rule_is_needed(fault: type[SharedEpoch]):
    with pytest.raises(WrongHitError, match="after: "):
        search(Model(PROCESSES, fault), 1_000_000)
