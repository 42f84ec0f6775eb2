"""Only damage deletes, and what did not come for a reason that passes comes later."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from memory_stores import PATIENCE, SIZE, KeyedStore
from numpy.typing import NDArray

from blockyard.stores import ExternalStore, open_store
from blockyard.stores.adapters import objects
from blockyard.stores.threaded import known_keys
from blockyard.stores.value import is_damage

KEYS = [bytes([n]) * 32 for n in range(8)]
ROWS = np.random.default_rng(0).integers(0, 256, (len(KEYS), SIZE), np.uint8)


def test_transient_misses_are_not_damage():
    passing = ["", "absent", "empty", "timeout", "error", "unavailable", "queue_full", "closed", "forgotten"]
    for reason in [*passing, "io", "refused", "lost", "codec", "no such reason"]:
        assert not is_damage(reason), reason
    for reason in ("magic", "version", "namespace", "key", "length", "header_checksum", "payload_checksum"):
        assert is_damage(reason), reason


class Medium(dict[bytes, NDArray[np.uint8]]):
    """What several stores share. It knows which values are damaged, and notes the deletions of others."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[bytes] = set()
        self.good_deleted: list[bytes] = []

    def damage(self, name: bytes, at: int) -> None:
        self[name] = self[name].copy()
        self[name][at] ^= 1
        self.damaged.add(name)

    def __setitem__(self, name: bytes, value: NDArray[np.uint8]) -> None:
        super().__setitem__(name, value)
        self.damaged.discard(name)

    def pop(self, name: bytes, default: Any = None) -> Any:
        if name in self and name not in self.damaged:
            self.good_deleted.append(name)
        self.damaged.discard(name)
        return super().pop(name, default)


class Troubled(KeyedStore):
    """Fails some reads, or all of them, or hangs in them until the deadline."""

    num_slots = 1000
    trouble = ""

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> Any:
        if self.trouble == "error":
            raise ConnectionRefusedError("connection refused")
        if self.trouble == "hang":
            assert self.gate.wait(PATIENCE)
        found = super().get(keys, out)
        if self.trouble != "some" or len(keys) == 1:
            return found
        return ["error" if at % 2 == 0 else "" if good else "absent" for at, good in enumerate(found)]

    gate = threading.Event()


def wait_for(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("trouble", ["error", "hang"])
def test_a_failed_read_heals(trouble: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known_keys, "FAILED_SECONDS", 0.2)
    medium = Medium()
    with Troubled(medium) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
    with Troubled(medium) as reader:
        assert reader.wait(reader.submit_get(KEYS[4:5])).ok.all()
        reader.gate, reader.trouble = threading.Event(), trouble
        first = reader.wait(reader.submit_get(KEYS[:4]), 0.1)
        assert set(first.reasons) == {"error" if trouble == "error" else "timeout"}
        reader.trouble = ""
        reader.gate.set()
        hidden = reader.contains(KEYS[:5])
        assert not hidden[:4].any()
        assert reader.lacks(KEYS[:5]).tolist() == [True] * 4 + [False]

        def is_back() -> bool:
            return bool(reader.wait(reader.submit_get(KEYS[:4])).ok.all())

        wait_for(is_back)
        assert reader.contains(KEYS[:5]).all()
        assert not reader.lacks(KEYS[:5]).any()
    assert not medium.good_deleted


def test_a_key_that_was_deleted_and_is_put_by_another_process_is_found():
    medium = Medium()
    with Troubled(medium) as store, Troubled(medium) as other:
        assert store.wait(store.submit_put(KEYS[:1], ROWS[:1])).ok.all()
        assert store.wait(store.submit_delete(KEYS[:1])).ok.all()
        assert store.wait(store.submit_get(KEYS[:1])).reasons == ("absent",)
        assert other.wait(other.submit_put(KEYS[:1], ROWS[:1])).ok.all()
        assert store.wait(store.submit_get(KEYS[:1])).ok.all()


def test_a_record_that_comes_damaged_is_looked_at_again():
    """The record of the epoch lies whole in the storage, and so do the blocks."""
    with KeyedStore(Medium()) as store:
        assert store.wait(store.submit_put(KEYS[:1], ROWS[:1])).ok.all()
        read, damage = store.read_epoch, iter((True, False))

        def read_epoch(key: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
            record = read(key)
            if record is not None and next(damage):
                record = record.copy()
                record[-1] ^= 1
            return record

        store.read_epoch = read_epoch  # type: ignore[method-assign]
        assert store.wait(store.submit_get(KEYS[:1])).reasons == ("",)
        assert not next(damage, False), "both looks have happened"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_whole_is_deleted_and_all_of_it_comes_back(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Stores and `objects.PrefixObjects` over one medium: puts, gets, trouble and damage in any order."""
    monkeypatch.setattr(known_keys, "FAILED_SECONDS", 0.01)
    monkeypatch.setattr(objects, "_ASK_SECONDS", 0.0)
    # After one process has deleted a damaged block, the others soon know.
    monkeypatch.setattr(Troubled, "_there_seconds", 0.05)
    rng, medium, stores = random.Random(seed), Medium(), list[Troubled]()

    def opened(url: str, *, bytes_per_block: int, namespace: bytes, use: str) -> ExternalStore:
        stores.append(Troubled(medium, bytes_per_block=bytes_per_block, namespace=namespace))
        return stores[-1]

    monkeypatch.setattr(objects, "open_store", opened)
    clients = [objects.PrefixObjects("troubled://", sizes=[100], fields={}) for _ in range(3)]
    sizes = {name: rng.choice([1, 100, 101, 250, 399]) for name in "abcdef"}
    data = {
        name: np.random.default_rng(at).integers(0, 256, size, np.uint8)
        for at, (name, size) in enumerate(sizes.items())
    }

    def put(client: objects.PrefixObjects, names: list[str]) -> list[bool]:
        return client.put(names, [sizes[name] for name in names], lambda index: data[names[index]])

    def get(client: objects.PrefixObjects, names: list[str]) -> list[bool]:
        taken: dict[int, bytes] = {}
        found = client.get(names, [sizes[name] for name in names], lambda at, row: taken.update({at: row.tobytes()}))
        assert taken == {at: data[names[at]].tobytes() for at, good in enumerate(found) if good}
        return found

    assert all(put(clients[0], list(sizes)))
    deleted = len(medium.good_deleted)
    for _ in range(30):
        client = rng.randrange(3)
        names = rng.sample(list(sizes), rng.randrange(1, 5))
        stores[client].trouble = rng.choice(["", "error", "some"])
        if rng.random() < 0.7:
            get(clients[client], names)
        else:
            clients[client].contains(names)
    assert len(medium.good_deleted) == deleted
    for store in stores:
        store.trouble = ""
    for client in clients:
        wait_for(lambda client=client: all(get(client, list(sizes))))
    medium.damage(rng.choice([name for name, value in medium.items() if value.nbytes != 192]), rng.randrange(128, 200))
    wait_for(lambda: not all(get(clients[1], list(sizes))))
    assert medium.damaged, "one look is not enough"
    wait_for(lambda: not (all(get(clients[1], list(sizes))) or medium.damaged))
    wait_for(lambda: all(put(clients[2], list(sizes))) and all(get(clients[2], list(sizes))))
    for client in clients:
        wait_for(lambda client=client: all(get(client, list(sizes))))
        client.close()


@pytest.mark.parametrize(
    "url",
    [
        "file://{0}?size=1MiB",
        "file://{0}/a,{0}/b?size=1MiB",
        "memory://lent?size=1MiB",
    ],
)
@pytest.mark.parametrize("keyed", [True, False])
def test_a_read_fills_the_rows_that_it_was_given(url: str, keyed: bool, tmp_path: Any):
    width = 4096
    (tmp_path / "s").mkdir()
    use: Any = "prefix" if keyed else "swap"
    with open_store(url.format(tmp_path / "s"), bytes_per_block=width, use=use, num_slots=16) as store:
        rows, slots = np.random.default_rng(0).integers(0, 256, (8, width), np.uint8), np.arange(8)
        assert store.wait(store.submit_put(KEYS, rows) if keyed else store.submit_write(slots, rows)).ok.all()
        for start in (0, 1):  # on a page, and beside it
            memory = np.zeros(10 * width, np.uint8)
            begin = -memory.ctypes.data % width + start
            given = memory[begin:][: 8 * width].reshape(8, width)
            found = store.wait(store.submit_get(KEYS, given) if keyed else store.submit_read(slots, given))
            assert found.ok.all()
            assert np.shares_memory(found.rows, given)
            assert np.array_equal(given, rows)
