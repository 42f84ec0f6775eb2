"""What a process remembers of a shared store's keys, and for how long."""

import pytest

from blockyard.stores.threaded.known_keys import ABSENT_SECONDS, FAILED_SECONDS, KnownKeys

KEY = bytes(32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(clock: Clock) -> KnownKeys:
    return KnownKeys(clock)


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


def test_an_absent_key_is_looked_up_again_after_a_second(known: KnownKeys, clock: Clock):
    ended(known, "absent")
    assert state(known) == (False, True, False)
    assert not known.look_up([KEY])[1]
    clock.now += ABSENT_SECONDS + 0.01
    assert not known.is_lacked(KEY)
    assert known.look_up([KEY])[1]


def test_a_read_that_failed_hides_its_key_for_two_seconds(known: KnownKeys, clock: Clock):
    ended(known)
    ended(known, "error")
    assert state(known) == (False, True, True)
    clock.now += FAILED_SECONDS + 0.01
    assert state(known) == (False, False, False)


def test_a_deleted_key_is_hidden_until_it_is_put(known: KnownKeys, clock: Clock):
    known.note_deleted([KEY])
    clock.now += 1e6
    assert state(known) == (False, True, True)
    ended(known, "error", is_delete=True)
    assert known.is_hidden(KEY), "the deletion may not have happened"
    ended(known, "absent")
    assert known.is_hidden(KEY), "a read that was submitted before"
    ended(known)
    assert state(known) == (True, False, False)


def test_a_deletion_that_was_confirmed_lets_the_key_be_read(known: KnownKeys, clock: Clock):
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
