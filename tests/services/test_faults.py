"""Every kind of store meets every kind of fault: what is wrong on the way is a hit later, damage at rest is replaced.

`pytest tests/services/test_faults.py -s` prints the table that `docs/operate/reliability.md` shows. The file store's
errors and late answers are in `rust/store/tests/keyed.rs`, since Python cannot come between it and its disk.
"""

import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_mooncake import fake_mooncake
from memory_stores import PATIENCE, KeyedStore
from numpy.typing import NDArray
from servers import Server, serving

from blockyard.errors import StoreError
from blockyard.stores import Codec, ThreadedStore, open_store
from blockyard.stores.base import ExternalStore
from blockyard.stores.mooncake import MooncakeStore
from blockyard.stores.redis import RedisStore
from blockyard.stores.threaded import known_keys
from blockyard.stores.value import HEADER

redis = pytest.importorskip("redis")

WIDTH = 8192
PAGE = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>maintenance</Message></Error>"
SLAB_HIDDEN = 2.2  # seconds; a slab does not read a block again for two seconds
Change = Callable[[bytes, int], bytes]


def fail(value: bytes, look: int) -> bytes:
    raise ConnectionResetError("connection reset by peer")


def flip(value: bytes, look: int) -> bytes:
    """Flip a bit, another one at each look."""
    at = len(value) - 1000 - look
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


# Wrong on the way, at two reads in a row; 1 and 2 number the reads.
ON_THE_WAY: dict[str, Change] = {
    "error": fail,
    "late": lambda value, look: (_ for _ in ()).throw(TimeoutError(f"{len(value)} bytes, look {look}")),
    "error page": lambda value, look: PAGE,
    "cut answer": lambda value, look: value[: len(value) // 2],
    "flipped bit": flip,
}
# Wrong where it lies.
AT_REST: dict[str, Change] = {
    "flipped bit": lambda value, look: flip(value, 0),
    "other version": lambda value, look: b"".join([value[:24], bytes([value[24] ^ 6]), value[25:]]),
    "cut": lambda value, look: value[: len(value) // 2],
    "zeros": lambda value, look: bytes(len(value)),
    "lost": lambda value, look: b"",
}
# Those that cannot be the storage's answer are kept until a put replaces them: a proxy may have sent them.
DELETED = {"flipped bit", "other version"}


class Place(NamedTuple):
    """Where values are: reads one, or replaces it (`b""` removes it), by a store's name for its key."""

    read: Callable[[ExternalStore, bytes], bytes]
    write: Callable[[ExternalStore, bytes, bytes], None]
    hook: Callable[[ExternalStore, Callable[[bytes], bytes]], None]


class Kind(NamedTuple):
    open: Callable[..., ExternalStore]
    place: Place


def name_of(store: Any, key: bytes) -> bytes:
    return bytes(store._keyed_blocks.names_of([key], store._keyed_blocks.confirm().token).tobytes())


# ---- a plug-in ----


class Hooked(KeyedStore):
    num_slots = 1000
    hook: Callable[[bytes], bytes] = staticmethod(lambda value: value)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        found = super().get(keys, out)
        for index in np.flatnonzero(found) if out.shape[1] > 192 else ():
            value = self.hook(out[index].tobytes())
            if len(value) == out.shape[1]:
                out[index] = np.frombuffer(value, np.uint8)
            else:
                out[index, :HEADER] = 0
        return found


def change_medium(medium: dict[bytes, NDArray[np.uint8]], name: bytes, value: bytes) -> None:
    if value:
        medium[name] = np.frombuffer(value, np.uint8).copy()
    else:
        medium.pop(name, None)


def plug_in(folder: Path, stack: ExitStack) -> Kind:
    medium: dict[bytes, NDArray[np.uint8]] = {}
    place = Place(
        lambda store, key: medium[name].tobytes() if (name := name_of(store, key)) in medium else b"",
        lambda store, key, value: change_medium(medium, name_of(store, key), value),
        lambda store, hook: setattr(store, "hook", hook),
    )
    return Kind(lambda **options: Hooked(medium, bytes_per_block=WIDTH, **options), place)


# ---- objects ----


def hook_objects(store: Any, hook: Callable[[bytes], bytes]) -> None:
    read = type(store)._read_whole

    def changed(path: str, max_bytes: int) -> Any:
        found = read(store, path, max_bytes)
        return None if found is None else np.frombuffer(hook(found.tobytes()), np.uint8)

    store._read_whole = changed


def objects(folder: Path, stack: ExitStack) -> Kind:
    def path(store: Any, key: bytes) -> Path:
        return folder / "l" / store._path(np.frombuffer(name_of(store, key), np.uint8))

    def write(store: ExternalStore, key: bytes, value: bytes) -> None:
        if value:
            path(store, key).write_bytes(value)
        else:
            path(store, key).unlink(missing_ok=True)

    place = Place(
        lambda store, key: path(store, key).read_bytes() if path(store, key).exists() else b"", write, hook_objects
    )
    url = f"local://{folder}/l?size=8MiB"
    return Kind(lambda **options: open_store(url, bytes_per_block=WIDTH, use="prefix", **options), place)


# ---- Redis ----


class HookedClient:
    def __init__(self, client: Any, hook: Callable[[bytes], bytes]) -> None:
        self._client, self._hook = client, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, names: Any, rows: NDArray[np.uint8], **options: Any) -> Any:
        found, heads, answers, why = self._client.get(names, rows, **options)
        heads = np.array(heads)
        for index in np.flatnonzero(found):
            value = self._hook(heads[index].tobytes() + rows[index].tobytes())
            start = heads.shape[1]
            if len(value) == start + rows.shape[1]:
                heads[index] = np.frombuffer(value[:start], np.uint8)
                rows[index] = np.frombuffer(value[start:], np.uint8)
            else:
                heads[index] = 0
                rows[index, : HEADER - start] = 0
        return found, heads, answers, why


def hook_redis(store: Any, hook: Callable[[bytes], bytes]) -> None:
    client = store._client
    store._client = HookedClient(getattr(client, "_client", client), hook)


def on_redis(folder: Path, stack: ExitStack) -> Kind:
    server: Server = stack.enter_context(serving("valkey-server", folder))
    client = stack.enter_context(redis.Redis(port=server.port))
    full = lambda store, key: store._full_name(name_of(store, key))  # noqa: E731
    place = Place(
        lambda store, key: client.get(full(store, key)) or b"",
        lambda store, key, value: client.set(full(store, key), value) if value else client.delete(full(store, key)),
        hook_redis,
    )
    url = f"redis://127.0.0.1:{server.port}?size=8MiB"
    return Kind(lambda **options: open_store(url, bytes_per_block=WIDTH, use="prefix", **options), place)


# ---- Mooncake, over a fake client ----


def hook_mooncake(store: Any, hook: Callable[[bytes], bytes]) -> None:
    read = type(store._client).read

    def changed(paths: list[str], width: int) -> list[Any]:
        found = read(store._client, paths, width)
        is_block = [
            isinstance(row, np.ndarray) and "/epoch/" not in path for path, row in zip(paths, found, strict=True)
        ]
        return [
            np.frombuffer(hook(row.tobytes()), np.uint8) if good else row
            for good, row in zip(is_block, found, strict=True)
        ]

    store._client.read = changed


def on_mooncake(folder: Path, stack: ExitStack) -> Kind:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    cluster, address = stack.enter_context(fake_mooncake(patch))

    def path(store: Any, key: bytes) -> str:
        return store._paths(np.frombuffer(name_of(store, key), np.uint8)[None])[0]

    def write(store: ExternalStore, key: bytes, value: bytes) -> None:
        if value:
            cluster.values[path(store, key)] = value
        else:
            cluster.values.pop(path(store, key), None)

    place = Place(lambda store, key: cluster.values.get(path(store, key), b""), write, hook_mooncake)
    url = f"mooncake://{address}?size=8MiB"
    return Kind(lambda **options: open_store(url, bytes_per_block=WIDTH, use="prefix", **options), place)


KINDS = {"plug-in": plug_in, "objects": objects, "Redis": on_redis, "Mooncake": on_mooncake}


@contextmanager
def kind_of(name: str, folder: Path) -> Iterator[Kind]:
    with ExitStack() as stack:
        yield KINDS[name](folder, stack)


def keys_of(faults: dict[str, Change]) -> dict[str, bytes]:
    return {fault: bytes([number]) * 32 for number, fault in enumerate(faults, 1)}


def rows_of(keys: dict[str, bytes]) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (len(keys), WIDTH), np.uint8)


def read_when_up(store: ExternalStore, key: bytes) -> str:
    """As `read`, once the store is asked again: on a busy machine, calls that came late count as failures."""
    until = time.monotonic() + 60
    while (reason := read(store, key)) == "unavailable" and time.monotonic() < until:
        time.sleep(0.05)
    return reason


def read(store: ExternalStore, key: bytes) -> str:
    """Return the reason for a miss; `""` for a hit."""
    done = store.wait(store.submit_get([key], np.zeros((1, WIDTH), np.uint8)))
    return done.reasons[0]


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch):
    """A key may be read again at once after a failed read, and is looked up at once."""
    monkeypatch.setattr(known_keys, "FAILED_SECONDS", 0.0)
    monkeypatch.setattr(known_keys, "ABSENT_SECONDS", 0.0)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_wrong_on_the_way_is_a_hit_later(name: str, tmp_path: Path):
    keys = keys_of(ON_THE_WAY)
    rows, cells = rows_of(keys), dict[str, str]()
    with kind_of(name, tmp_path) as kind, kind.open() as store:
        assert store.wait(store.submit_put(list(keys.values()), rows)).ok.all()
        for fault, change in ON_THE_WAY.items():
            looks: list[str] = []
            for look in (1, 2, 3):
                kind.place.hook(store, lambda value, change=change, look=look: change(value, look))
                looks.append(read(store, keys[fault]))
                assert looks[-1], f"{name}, {fault}: a hit"
                if looks[-1] != "error":  # a call that failed says nothing of the block
                    assert not store.contains([keys[fault]])[0]
            kind.place.hook(store, lambda value: value)
            assert kind.place.read(store, keys[fault]), f"{name}, {fault}: deleted"
            assert read_when_up(store, keys[fault]) == "", f"{name}, {fault}"
            cells[fault] = f"{looks[0]}, hit later"
        with kind.open() as other:
            assert other.wait(other.submit_get(list(keys.values()))).ok.all()
    print(f"| {name} |", " | ".join(f"{fault}: {cell}" for fault, cell in cells.items()), "|")


@pytest.mark.parametrize("name", KINDS)
def test_what_is_wrong_at_rest_is_deleted_at_the_second_look_or_replaced(name: str, tmp_path: Path):
    keys = keys_of(AT_REST)
    rows, cells = rows_of(keys), dict[str, str]()
    with kind_of(name, tmp_path) as kind, kind.open() as store:
        assert store.wait(store.submit_put(list(keys.values()), rows)).ok.all()
        for number, (fault, change) in enumerate(AT_REST.items()):
            key, there = keys[fault], True
            kind.place.write(store, key, change(kind.place.read(store, key), 0))
            looks = []
            for _ in range(2):
                assert bool(kind.place.read(store, key)) == (fault != "lost"), f"{name}, {fault}: one look deletes"
                looks.append(read(store, key))
                assert looks[-1], f"{name}, {fault}: a hit"
                assert not store.contains([key])[0]
            there = bool(kind.place.read(store, key))
            assert there == (fault not in DELETED | {"lost"}), f"{name}, {fault}"
            assert store.wait(store.submit_put([key], rows[number : number + 1])).ok.all()
            with kind.open() as other:
                assert read(other, key) == "", f"{name}, {fault}: a put replaces it"
            assert read(store, key) == ""
            cells[fault] = (
                f"{looks[0]}, {'kept' if there else 'deleted' if fault in DELETED else 'gone'}, put replaces it"
            )
    print(f"| {name} |", " | ".join(f"{fault}: {cell}" for fault, cell in cells.items()), "|")


def inflated(encoded: memoryview, max_length: int) -> bytes:
    inflater = zlib.decompressobj()
    found = inflater.decompress(encoded, max_length)
    if not inflater.eof:
        raise ValueError("the end is missing")
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_value_that_the_codec_refuses_is_kept_until_a_put_replaces_it(name: str, tmp_path: Path):
    good = Codec("zlib", lambda block: zlib.compress(block, 1), inflated)
    broken = Codec("zlib", lambda block: zlib.compress(block, 1)[:-9], inflated)
    key, rows = bytes([9]) * 32, np.ones((1, WIDTH), np.uint8)
    with kind_of(name, tmp_path) as kind:
        with kind.open(codec=broken) as store:
            assert store.wait(store.submit_put([key], rows)).ok.all()
        with kind.open(codec=good) as store:
            for _ in range(3):
                assert store.wait(store.submit_get([key])).reasons == ("codec",)
                assert kind.place.read(store, key)
            assert not store.contains([key])[0]
            assert store.wait(store.submit_put([key], rows)).ok.all()
        with kind.open(codec=good) as store:
            assert store.wait(store.submit_get([key])).ok.all()


@pytest.mark.parametrize("options", [{}, {"mac_key": b"k" * 32}], ids=["file", "file with a MAC key"])
def test_a_file_deletes_what_two_looks_find_damaged(options: dict[str, Any], tmp_path: Path):
    """Of two damaged blocks, one is whole again before the second look."""
    url, keys = f"file://{tmp_path}/f?size=1MiB&direct=off", [bytes([n]) * 32 for n in (1, 2, 3)]
    path = tmp_path / "f" / "blockyard-prefix.slab"
    rows = np.random.default_rng(2).integers(0, 256, (3, WIDTH), np.uint8)
    with open_store(url, bytes_per_block=WIDTH, use="prefix", **options) as store:
        assert store.wait(store.submit_put(keys, rows)).ok.all()

        def damage(index: int) -> None:
            at = path.read_bytes().index(rows[index].tobytes()) if index not in places else places[index]
            places[index] = at
            with path.open("r+b") as file:
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)

        places: dict[int, int] = {}
        damage(0)
        damage(1)
        assert [bool(reason) for reason in store.wait(store.submit_get(keys)).reasons] == [True, True, False]
        assert store.contains(keys).tolist() == [False, False, True]
        damage(1)  # as it was
        time.sleep(SLAB_HIDDEN)
        assert [bool(reason) for reason in store.wait(store.submit_get(keys)).reasons] == [True, False, False]
        assert store.contains(keys).tolist() == [False, True, True]
        assert store.wait(store.submit_put(keys, rows)).ok.all()
    with open_store(url, bytes_per_block=WIDTH, use="prefix", **options) as store:
        assert store.wait(store.submit_get(keys)).ok.all()


@pytest.mark.parametrize("name", KINDS)
def test_what_a_server_has_lost_is_forgotten_and_stored_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RedisStore, "_there_seconds", 0.2)
    monkeypatch.setattr(MooncakeStore, "_there_seconds", 0.2)
    monkeypatch.setattr(ThreadedStore, "_there_seconds", 0.2)
    keys = [bytes([n]) * 32 for n in range(1, 9)]
    rows = np.random.default_rng(3).integers(0, 256, (len(keys), WIDTH), np.uint8)
    with kind_of(name, tmp_path) as kind, kind.open() as store, kind.open() as other:
        assert store.wait(store.submit_put(keys, rows)).ok.all()
        for key in keys:
            kind.place.write(other, key, b"")
        until = time.monotonic() + PATIENCE
        while store.contains(keys).any():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert store.wait(store.submit_put(keys, rows)).ok.all()
        assert other.wait(other.submit_get(keys)).ok.all()


def test_a_store_that_was_once_forgotten_takes_the_first_puts_of_each_process(tmp_path: Path):
    keys, rows = [bytes([n]) * 32 for n in range(1, 6)], np.ones((1, WIDTH), np.uint8)
    with ExitStack() as stack:
        for kind in (objects(tmp_path, stack), on_redis(tmp_path, stack)):
            with kind.open() as store:
                store.forget()
            with kind.open() as store:
                tickets = [store.submit_put([key], rows) for key in keys]
                assert all(store.wait(ticket).ok.all() for ticket in tickets)


def test_a_server_that_refuses_a_command_is_refused_by_the_command_s_name(tmp_path: Path):
    with serving("valkey-server", tmp_path, "--rename-command", "GETEX", "") as server:
        url = f"redis://127.0.0.1:{server.port}?size=8MiB"
        with pytest.raises(StoreError, match=r"the server refuses GETEX: a prefix store needs Redis 6.2 or newer"):
            open_store(url, bytes_per_block=WIDTH, use="prefix")
    (tmp_path / "2").mkdir()
    with serving("valkey-server", tmp_path / "2") as server, redis.Redis(port=server.port) as client:
        client.acl_setuser("somebody", enabled=True, nopass=True, commands=["+@all", "-zadd"], keys=["*"])
        url = f"redis://somebody:none@127.0.0.1:{server.port}?size=8MiB"
        with pytest.raises(StoreError, match=r"the server refuses ZADD: .* a user with this right"):
            open_store(url, bytes_per_block=WIDTH, use="prefix")
