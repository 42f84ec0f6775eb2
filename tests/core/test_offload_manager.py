"""`OffloadManager`: chunks of a host cache by keys, against a plain model; rust/core/tests/offload.rs has the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockyard.errors import InvalidArgumentError
from blockyard.offload import OffloadManager

NAMES = [bytes([n]) * (n + 1) for n in range(10)]
KEYS = st.lists(st.sampled_from(NAMES), max_size=5)
EACH = st.sampled_from(NAMES)


class Machine(RuleBasedStateMachine):
    """Least recently used chunks go first; a transfer is known by its key."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = OffloadManager(6)
        self.stored: list[bytes] = []  # least recently used first
        self.storing: dict[bytes, int] = {}
        self.late: list[bytes] = []  # stores of keys that were forgotten
        self.loads: dict[bytes, int] = {}
        self.held = 0  # chunks of forgotten keys that loads hold

    def use(self, keys: list[bytes]) -> None:
        """Count keys as just used, the first last."""
        for key in reversed(keys):
            if key in self.stored:
                self.stored.remove(key)
                self.stored.append(key)

    @rule(keys=KEYS, deadline=st.none() | st.integers(0, 5))
    def prepare_store(self, keys: list[bytes], deadline: int | None) -> None:
        new = [key for key in dict.fromkeys(keys) if self.manager.lookup([key]) == ["miss"] and key not in self.late]
        known = [key for key in keys if key in self.stored]
        loose = [key for key in self.stored if key not in keys and not self.loads.get(key)]
        free = self.manager.num_free - len([key for key in self.stored if not self.loads.get(key)])
        store = self.manager.prepare_store(keys, deadline=deadline)
        assert (store is None) == (len(new) > free + len(loose))
        if store is None:
            return
        self.use([key for key in known if not self.loads.get(key)])
        assert store.keys == new
        assert store.evicted == loose[: max(0, len(new) - free)]
        assert store.chunks.dtype == np.int32
        assert len(set(store.chunks.tolist())) == len(new)
        self.stored = [key for key in self.stored if key not in store.evicted]
        self.storing |= dict.fromkeys(new, 99 if deadline is None else deadline)

    @rule(keys=KEYS, success=st.booleans())
    def complete_store(self, keys: list[bytes], success: bool) -> None:
        keys = list(dict.fromkeys(keys))
        done = [key for key in keys if key in self.storing and key not in self.late]
        assert self.manager.complete_store(keys, success) == (done if success else [])
        for key in done:
            del self.storing[key]
            if success:
                self.stored.append(key)
        self.late = [key for key in self.late if key not in keys]

    @rule(keys=KEYS)
    def prepare_load(self, keys: list[bytes]) -> None:
        if not all(key in self.stored for key in keys):
            with pytest.raises(InvalidArgumentError, match="is not a hit"):
                self.manager.prepare_load(keys)
            return
        assert len(set(self.manager.prepare_load(keys).tolist())) == len(set(keys))
        for key in keys:
            self.loads[key] = self.loads.get(key, 0) + 1

    @rule(key=EACH)
    def complete_load(self, key: bytes) -> None:
        if not self.loads.get(key):
            with pytest.raises(InvalidArgumentError, match=r"keys\[0\] is not being loaded"):
                self.manager.complete_load([key])
            return
        self.manager.complete_load((key,))
        self.loads[key] -= 1
        if not self.loads[key]:
            self.use([key])

    @rule(keys=KEYS, inserted=KEYS)
    def touch(self, keys: list[bytes], inserted: list[bytes]) -> None:
        self.manager.touch(keys, inserted)
        self.use([key for key in keys if not self.loads.get(key)])

    @rule(now=st.integers(0, 5))
    def expire(self, now: int) -> None:
        late = [key for key, deadline in self.storing.items() if deadline <= now]
        assert set(self.manager.expire(now)) == set(late)
        self.late += late
        for key in late:
            del self.storing[key]

    @rule(key=EACH)
    def forget(self, key: bytes) -> None:
        if self.loads.get(key):
            return  # rust/core/tests/offload.rs does so
        assert self.manager.forget({key}) == ([key] if key in self.stored or key in self.storing else [])
        if key in self.stored:
            self.stored.remove(key)
        if self.storing.pop(key, None) is not None:
            self.late.append(key)

    @invariant()
    def the_keys_are_what_they_should_be(self) -> None:
        self.manager.check()
        kinds = dict.fromkeys(self.stored, "hit") | dict.fromkeys(self.storing, "pending")
        assert self.manager.lookup(NAMES) == [kinds.get(name, "miss") for name in NAMES]
        in_use = len(self.storing) + len(self.late) + sum(map(bool, self.loads.values()))
        assert self.manager.num_free == self.manager.num_chunks - in_use


@pytest.mark.parametrize(("eviction", "gone"), [("lru", [NAMES[0], NAMES[2]]), ("adaptive", NAMES[2:0:-1])])
def test_keys_that_were_only_inserted_take_their_place_and_do_not_count_as_used(
    eviction: str, gone: list[bytes]
) -> None:
    manager = OffloadManager(3, eviction=eviction)
    manager.prepare_store(NAMES[:3])
    manager.complete_store(NAMES[:3])
    manager.touch(NAMES[:1])
    manager.touch(NAMES[1:3], NAMES[1:3])
    assert manager.evict(2) == gone


Machine.TestCase.settings = settings(stateful_step_count=40)
TestMachine = Machine.TestCase


def test_a_reset_forgets_all_keys_and_transfers_end_as_they_would():
    manager = OffloadManager(3)
    manager.prepare_store([b"a", b"b"])
    manager.complete_store([b"a"])
    chunk = manager.prepare_load([b"a"])
    assert sorted(manager.reset()) == [b"a", b"b"]
    assert (manager.lookup([b"a", b"b"]), manager.num_free) == (["miss", "miss"], 1)
    again = manager.prepare_store([b"a"])
    assert again is not None
    assert again.chunks.tolist() != chunk.tolist()
    manager.complete_load([b"a"])
    assert (manager.complete_store([b"b"]), manager.num_free) == ([], 2)
    manager.check()


@pytest.mark.parametrize("eviction", ["lru", "adaptive", "priority"])
def test_every_policy_gives_chunks_out_again(eviction: str):
    manager = OffloadManager(4, eviction=eviction)
    for n in range(20):
        keys = [bytes([n, i]) for i in range(3)]
        store = manager.prepare_store(keys)
        assert store is not None
        manager.complete_store(store.keys)
        assert manager.lookup(keys) == ["hit"] * 3
    assert (manager.num_stored, manager.num_evicted) == (4, 56)
    assert "num_chunks=4" in repr(manager)


def test_what_is_no_key_is_refused_and_nothing_changes():
    manager = OffloadManager(2)
    for bad, message in [
        ("ab", "keys"),
        ([b"a", "b"], r"keys\[1\] is 'b', must be bytes"),
        (3, "keys is 3"),
        ([bytearray(1)], "must be bytes"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            manager.prepare_store(bad)  # type: ignore[arg-type]
    assert manager.num_free == 2
    with pytest.raises(InvalidArgumentError, match="num_chunks is -1"):
        OffloadManager(-1)
    with pytest.raises(InvalidArgumentError, match='eviction is "best"'):
        OffloadManager(1, eviction="best")
