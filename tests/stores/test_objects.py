"""`PrefixObjects`: objects of any length over blocks of one width."""

import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from stepped_store import Actor, Crash, SteppedStore

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters import objects
from blockyard.stores.adapters.objects import PrefixObjects, store_url


def test_an_object_of_another_length_is_a_miss(tmp_path: Path):
    store = PrefixObjects(f"file://{tmp_path}/one?size=1MiB", sizes=[100], fields={})
    data = np.arange(250, dtype=np.uint8)
    assert store.put(["a"], [250], lambda index: data) == [True]
    taken: list[bytes] = []
    for size in (249, 251, 300):
        assert store.contains(["a"]) == [True]
        assert store.get(["a"], [size], lambda index, found: taken.append(found.tobytes())) == [False]
        assert not taken
        assert store.contains(["a"]) == [True], "the object itself is good"
        assert store.put(["a"], [250], lambda index: data) == [True]
    assert store.get(["a"], [250], lambda index, found: taken.append(found.tobytes())) == [True]
    assert taken == [data.tobytes()]
    assert [store.put(["b"], [size], lambda index: data) for size in (249, 251)] == [[False], [False]]
    assert store.delete(["a"]) == [True]
    assert store.contains(["a"]) == [False]
    store.close()
    assert store.put(["a"], [250], lambda index: data) == [False]
    assert store.contains(["a"], [250]) == [False]


def test_a_lookup_waits_no_longer_than_for_the_answer():
    store = PrefixObjects("memory://bucket/lookup?size=1MiB", sizes=[100], fields={})
    store._patience = 3600.0
    try:
        assert store.contains(["b", "c"]) == [False, False]
    finally:
        store.close()


def test_one_object_of_each_kind_takes_few_bytes_and_one_kind_one_block(tmp_path: Path):
    kib = 1 << 10
    kinds = [[100], [1 << 20], [64 * kib, 64 * kib], [256 * kib, 8640], [0, 23 * kib, 177 * kib, 785 * kib]]
    taken = []
    for number, sizes in enumerate(kinds):
        store = PrefixObjects(f"file://{tmp_path}/{number}?size=16MiB", sizes=sizes, fields={})
        data = [np.full(size, 7, np.uint8) for size in sizes]
        keys = [str(place) for place in range(len(sizes))]
        assert store.put(keys, sizes, data.__getitem__) == [True] * len(sizes)
        assert store.get(keys, sizes, lambda index, found: None) == [True] * len(sizes)
        blocks = store.stats().cached_blocks
        taken.append((blocks, blocks * (store._width + mmap.PAGESIZE) // kib))
        store.close()
    assert taken[:3] == [(1, 8), (1, 1032), (2, 144)]
    assert taken[3] == (4, 368)  # 528 with blocks of the longest
    assert taken[4] == (12, 1248)  # 1,848 with blocks of 256 KiB


def test_an_object_that_is_larger_than_a_batch_is_one_and_no_batch_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(objects, "BATCH_BYTES", 10_000)
    store = PrefixObjects(f"file://{tmp_path}/one?size=1MiB", sizes=[100], fields={})
    assert list(store._batches([1000, 1000, 100, 100, 100])) == [(0, 1, 10), (1, 2, 10), (2, 4, 2), (4, 5, 1)]
    store.close()


def test_objects_in_a_file_are_read_in_place_into_rows_that_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = PrefixObjects(f"file://{tmp_path}/one?size=1MiB", sizes=[5000], fields={})
    made: list[int] = []
    make = store._buffers._make
    monkeypatch.setattr(store._buffers, "_make", lambda size: made.append(size) or make(size))
    data = np.random.default_rng(0).integers(0, 256, (4, 5000), dtype=np.uint8)
    keys, sizes = [str(number) for number in range(4)], [5000] * 4
    first = 0
    for _ in range(3):
        data += 1
        assert store.put(keys, sizes, data.__getitem__) == [True] * 4
        taken: dict[int, bytes] = {}
        assert store.get(keys, sizes, lambda index, got: taken.update({index: got.tobytes()})) == [True] * 4  # noqa: B023
        assert taken == {index: row.tobytes() for index, row in enumerate(data)}
        first = first or len(made)
    assert len(made) == first
    assert all(size % mmap.PAGESIZE == 0 for size in made)
    store.close()


@pytest.mark.parametrize("batch_bytes", [1, 10_000, 1 << 20])
def test_objects_of_many_lengths_come_back_from_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
):
    monkeypatch.setattr(objects, "BATCH_BYTES", batch_bytes)
    store = PrefixObjects(f"file://{tmp_path}/one?size=1MiB", sizes=[100], fields={"model": "one"})
    sizes = [0, 1, 92, 99, 100, 101, 207, 208, 209, 1000]
    random = np.random.default_rng(0)
    data = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    keys = [f"key {size}" for size in sizes]
    assert store.put(keys, sizes, data.__getitem__) == [True] * len(sizes)
    assert store.contains([*keys, "other"], [*sizes, 5]) == [*[True] * len(sizes), False]
    taken: dict[int, bytes] = {}
    found = store.get([*keys, "other"], [*sizes, 5], lambda index, got: taken.update({index: got.tobytes()}))
    assert found == [*[True] * len(sizes), False]
    assert taken == {index: one.tobytes() for index, one in enumerate(data)}
    assert store.put([], [], data.__getitem__) == []
    assert store.get([], [], lambda index, got: None) == []
    store.close()


def test_an_object_that_has_lost_one_of_its_blocks_is_a_miss(tmp_path: Path):
    store = PrefixObjects(f"file://{tmp_path}/one?size=1MiB", sizes=[100], fields={})
    data = np.arange(250, dtype=np.uint8)
    assert store.put(["a"], [250], lambda index: data) == [True]
    names = store._names(["a"], [250])
    assert store._store.wait(store._store.submit_delete(names[1:2])).ok.all()
    taken: list[bytes] = []
    assert store.get(["a"], [250], lambda index, found: taken.append(found.tobytes())) == [False]
    assert not taken
    store.close()


def test_a_clear_leaves_the_objects_of_others_alone():
    fleet = [PrefixObjects("memory://fleet?size=1MiB", sizes=[100], fields={}) for _ in range(3)]
    taken: dict[str, bytes] = {}

    def put(number: int, key: str) -> bool:
        return fleet[number].put([key], [100], lambda index: np.full(100, number, np.uint8)) == [True]

    def get(number: int, key: str) -> bool:
        return fleet[number].get([key], [100], lambda index, data: taken.update({key: data.tobytes()})) == [True]

    assert put(0, "old")
    assert fleet[0].clear() is False, "a later process finds them"
    assert not fleet[0].contains(["old"])[0]
    assert not get(0, "old")
    assert get(1, "old")
    assert get(2, "old")
    assert put(1, "new")
    assert get(2, "new"), "the others share on"
    assert not get(0, "new")
    assert put(0, "own")
    assert get(0, "own")
    assert not get(1, "own")
    assert fleet[0].delete(["old"]) == fleet[0].delete(["own"]) == [True]
    assert get(1, "old")
    assert not get(0, "own")
    fleet[1].clear()
    assert not get(0, "old") and not get(1, "old") and get(2, "old")  # noqa: PT018 (one state of the fleet)
    assert taken == {key: bytes([number]) * 100 for key, number in (("old", 0), ("new", 1), ("own", 0))}
    for store in fleet:
        store.close()


def test_a_root_dir_is_made_for_its_owner_alone_and_any_path_is_one(tmp_path: Path):
    url = store_url(str(tmp_path / "a folder" / "100%"), None, "1MiB", "rank")
    PrefixObjects(url, sizes=[100], fields={}).close()
    assert (tmp_path / "a folder" / "100%" / "rank" / "blockyard-prefix.slab").exists()
    assert (tmp_path / "a folder" / "100%").stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidArgumentError, match="must give exactly one of them"):
        store_url(None, None, 0, "")


# ---- processes that share a store ----

PART = 40
SIZES = [100, 100, 100, 90, 150]
CONTENTS = [np.random.default_rng(place).integers(0, 256, size, dtype=np.uint8) for place, size in enumerate(SIZES)]


class Event(NamedTuple):
    """What a process did to a key, and when: `content` is what it put or got, None for a miss."""

    verb: str
    key: str
    content: int | None
    begin: int
    end: int
    ok: bool


class Processes:
    """Processes that put, get and delete objects of one store; blocks are evicted, and processes crash."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, *, count: int, trouble: bool) -> None:
        self.rng, self.trouble = random.Random(seed), trouble
        self.medium: dict[bytes, Any] = {}
        self.history: list[Event] = []
        self.now = 0
        views = [SteppedStore(self.medium, self.rng, replaces=bool(seed % 2)) for _ in range(count)]
        opened = iter(views)

        def open_store(url: str, *, bytes_per_block: int, **more: Any) -> SteppedStore:
            return next(opened)

        monkeypatch.setattr(objects, "open_store", open_store)
        stores = [PrefixObjects("stepped://", sizes=[PART], fields={}) for _ in views]
        self.actors: list[Actor] = []
        for view, store in zip(views, stores, strict=True):
            store._patience = 0.0

            def work(actor: Actor, view: SteppedStore = view, store: PrefixObjects = store) -> None:
                view.step = actor.step
                for _ in range(8):
                    self.act(store)

            self.actors.append(Actor(work))

    def act(self, store: PrefixObjects) -> None:
        verb, key, content = self.rng.choice(["put", "put", "get", "get", "get", "delete"]), self.rng.choice("ab"), None
        wanted, begin, ok = self.rng.choices(range(len(CONTENTS)), [6, 6, 6, 1, 1])[0], self.now, False
        taken: list[bytes] = []
        try:
            if verb == "put":
                content = wanted
                (ok,) = store.put([key], [SIZES[wanted]], lambda index: CONTENTS[wanted])
            elif verb == "get":
                (ok,) = store.get([key], [SIZES[wanted]], lambda index, data: taken.append(data.tobytes()))
            else:
                (ok,) = store.delete([key])
        except Crash:
            ok = False
        if taken:
            (content,) = [place for place, data in enumerate(CONTENTS) if data.tobytes() == taken[0]]
        self.history.append(Event(verb, key, content, begin, self.now, ok))

    def run(self) -> None:
        while running := [actor for actor in self.actors if not actor.ended]:
            self.now += 1
            actor = self.rng.choice(running)
            if self.trouble and self.rng.random() < 0.02:
                actor.crashes = True
            if self.trouble and self.medium and self.rng.random() < 0.02:
                del self.medium[self.rng.choice(sorted(self.medium))]
            actor.go()

    def replaced(self, put: Event, by: int) -> Iterator[Event]:
        """What came after a put and had ended at that time: nobody may get the put's bytes then."""
        for other in self.history:
            if other.verb != "get" and other.key == put.key and other.ok and put.end < other.begin and other.end < by:
                yield other


@pytest.mark.parametrize("seed", range(150))
def test_a_get_brings_one_puts_bytes_whole_and_none_that_were_replaced(monkeypatch: pytest.MonkeyPatch, seed: int):
    processes = Processes(monkeypatch, seed, count=1 + seed % 3, trouble=seed % 4 > 0)
    processes.run()
    for got in processes.history:
        if got.verb == "get" and got.content is not None:
            puts = [one for one in processes.history if (one.verb, one.key, one.content) == ("put", *got[1:3])]
            assert any(not list(processes.replaced(one, got.begin)) for one in puts if one.begin < got.end), got


def test_a_single_process_reads_its_last_put(monkeypatch: pytest.MonkeyPatch):
    for seed in range(40):
        processes = Processes(monkeypatch, seed, count=1, trouble=False)
        processes.run()
        known: dict[str, int | None] = {}
        for one in processes.history:
            assert one.ok or one.verb == "get"
            if one.verb != "get":
                known[one.key] = one.content
            elif one.ok:
                assert one.content == known[one.key]


def test_a_put_of_the_same_bytes_writes_nothing_and_one_of_others_replaces_them(tmp_path: Path):
    store = PrefixObjects(f"file://{tmp_path}/one?size=1MiB", sizes=[100], fields={})
    old, new = np.full(250, 1, np.uint8), np.full(250, 2, np.uint8)
    for _ in range(2):
        assert store.put(["a", "b"], [250, 100], [old, old[:100]].__getitem__) == [True, True]
    assert store.stats().written_blocks == 4
    assert store.put(["a", "b"], [250, 100], [new, old[:100]].__getitem__) == [True, True]
    assert store.stats().written_blocks == 7
    taken: list[bytes] = []
    assert store.get(["a"], [250], lambda index, data: taken.append(data.tobytes())) == [True]
    assert taken == [new.tobytes()]
    assert store.delete(["a"]) == [True]
    assert store.put(["a"], [250], lambda index: old) == [True]
    assert store.get(["a"], [250], lambda index, data: taken.append(data.tobytes())) == [True]
    assert taken[1] == old.tobytes()
    store.close()
