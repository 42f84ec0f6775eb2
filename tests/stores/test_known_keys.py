"""What a process remembers of a shared store's keys, and for how long."""

import pytest

from blockyard.stores.threaded.known_keys import ABSENT_SECONDS, FAILED_SECONDS, KnownKeys
from blockyard.tools.virtual_time import VirtualTime

KEY = bytes(32)


@pytest.fixture
def clock() -> VirtualTime:
    return VirtualTime(100.0)


@pytest.fixture
def known(clock: VirtualTime) -> KnownKeys:
    return KnownKeys(clock.monotonic)


def ended(known: KnownKeys, reason: str = "", *, is_delete: bool = False) -> None:
    known.note_ended(KEY, reason, is_delete=is_delete)


def state(known: KnownKeys) -> tuple[bool, bool, bool]:
    """Whether the key is there, known to be a miss, and not even read."""
    return known.look_up([KEY])[0][0], known.is_lacked(KEY), known.is_hidden(KEY)


def test_an_unknown_key_is_looked_up_once(known: KnownKeys):
    assert known.look_up([KEY]) == ([False], True)
    assert known.take_wanted() == [KEY]
    assert known.take_wanted() == []
    known.note(KEY, is_there=True)
    assert known.look_up([KEY]) == ([True], False)


def test_an_absent_key_is_looked_up_again_after_a_second(known: KnownKeys, clock: VirtualTime):
    ended(known, "absent")
    assert state(known) == (False, True, False)
    assert not known.look_up([KEY])[1]
    clock.now += ABSENT_SECONDS + 0.01
    assert not known.is_lacked(KEY)
    assert known.look_up([KEY])[1]


def test_a_read_that_failed_hides_its_key_for_two_seconds(known: KnownKeys, clock: VirtualTime):
    ended(known)
    ended(known, "error")
    assert state(known) == (False, True, True)
    clock.now += FAILED_SECONDS + 0.01
    assert state(known) == (False, False, False)


def test_a_deleted_key_is_hidden_until_it_is_put(known: KnownKeys, clock: VirtualTime):
    known.note_deleted([KEY])
    clock.now += 1e6
    assert state(known) == (False, True, True)
    ended(known, "error", is_delete=True)
    assert known.is_hidden(KEY), "the deletion may not have happened"
    ended(known, "absent")
    assert known.is_hidden(KEY), "a read that was submitted before"
    ended(known)
    assert state(known) == (True, False, False)


def test_a_deletion_that_was_confirmed_lets_the_key_be_read(known: KnownKeys, clock: VirtualTime):
    known.note_deleted([KEY])
    ended(known, is_delete=True)
    assert state(known) == (False, True, False)


@pytest.mark.parametrize("reason", ["closed", "unavailable"])
def test_storage_that_was_not_asked_says_nothing_about_a_key(known: KnownKeys, reason: str):
    ended(known)
    ended(known, reason)
    assert known.look_up([KEY])[0] == [True]


def test_the_oldest_entries_are_forgotten_first(known: KnownKeys):
    keys = [number.to_bytes(32, "little") for number in range(2000)]
    for key in keys:
        known.note(key, is_there=True)
    known.note(keys[0], is_there=True)
    known.trim(1500)
    assert known.count_there() == 1500
    assert known.look_up([keys[0], keys[1], keys[-1]])[0] == [True, False, True]
    known.trim(1)
    assert known.count_there() == 1024


def test_a_key_that_is_there_is_looked_up_again_and_unknown_after_its_time(clock: VirtualTime):
    known = KnownKeys(clock.monotonic, 4.0)
    ended(known)
    assert known.look_up([KEY]) == ([True], False)
    clock.now += 2.1
    assert known.look_up([KEY]) == ([True], True)
    assert known.take_wanted() == [KEY]
    assert known.is_due(KEY)
    known.note(KEY, is_there=True)
    clock.now += 4.1
    assert known.look_up([KEY]) == ([False], True)
    assert not known.is_lacked(KEY)


def test_what_is_there_is_unknown_after_a_lost_connection(known: KnownKeys):
    ended(known)
    known.expire()
    assert known.look_up([KEY]) == ([False], True)
    assert known.count_there() == 0


def test_a_damaged_key_is_read_again_after_two_seconds_and_not_looked_up(known: KnownKeys, clock: VirtualTime):
    ended(known)
    assert not known.doubt(KEY, b"one")
    ended(known, "payload_checksum")
    assert state(known) == (False, True, True)
    clock.now += FAILED_SECONDS + 0.01
    assert state(known) == (False, False, False)
    assert not known.look_up([KEY])[1]
    assert not known.is_due(KEY)
    ended(known)
    assert not known.is_doubted(KEY)
    assert known.look_up([KEY]) == ([True], False)


def test_damage_is_confirmed_by_the_same_bytes_alone(known: KnownKeys):
    assert not known.doubt(KEY, b"one")
    assert not known.doubt(KEY, b"two")
    assert not known.doubt(KEY, b"")
    assert not known.doubt(KEY, b"")
    assert not known.doubt(KEY, b"one")
    assert known.doubt(KEY, b"one")
    ended(known, "absent")
    assert not known.doubt(KEY, b"one")
