"""The object store over SeaweedFS and obstore's own memory and directory: both suites, damage, a server that stops."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from numpy.typing import NDArray
from servers import ObjectServer, serving_objects

from blockyard.errors import StoreError, StoreFullError, StoreURLError
from blockyard.events import export_keys
from blockyard.stores import ExternalStore, object_store, open_store
from blockyard.stores.object_store import ObjectStore, read_url
from blockyard.stores.threaded.call_pool import CallPool
from blockyard.stores.threaded.epochs import EPOCH_BYTES
from blockyard.stores.value import HEADER, is_damage
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite

WIDTH = 5000
SPACE = bytes(range(32))
FOLDER = f"blockyard/{SPACE[:8].hex()}/"
SECRET = "s3cr3t/of+the-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serving_objects(tmp_path_factory.mktemp("objects"), SECRET) as found:
        yield found


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture(params=["s3", "memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL with a question mark, of a place that nobody else uses."""
    if request.param == "s3":
        return str(request.getfixturevalue("server").url(f"bucket/{tmp_path.name}"))
    return f"{request.param}://{tmp_path}?" if request.param == "local" else f"memory://here{tmp_path}?"


class TestSwapSpace(StoreSuite):
    @pytest.fixture(autouse=True)
    def _place(self, place: str) -> None:
        self.url = place

    def open_store(self) -> ExternalStore:
        return open_store(self.url, bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


class TestPrefixStore(PrefixStoreSuite):
    evicts = False

    @pytest.fixture(autouse=True)
    def _place(self, place: str) -> None:
        self.url = place

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(self.url, use="prefix", **options)


def opened(url: str, **more: Any) -> ExternalStore:
    return open_store(url, **{"bytes_per_block": WIDTH, "namespace": SPACE, "use": "prefix", "num_slots": 4096, **more})


def keys_of(count: int) -> list[bytes]:
    return export_keys(list(range(16 * count)), block_size=16)


def rows_of(count: int, seed: int = 0, width: int = WIDTH) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, (count, width), dtype=np.uint8)


def put(store: ExternalStore, count: int, width: int = WIDTH) -> None:
    done = store.wait(store.submit_put(keys_of(count), rows_of(count, width=width)))
    assert done.ok.all(), (done.reasons, store.stats())


def names_of(store: ObjectStore, count: int) -> list[str]:
    return [
        FOLDER + name.tobytes().hex()
        for name in store._keyed_blocks.names_of(keys_of(count), store._keyed_blocks.epochs.confirm().token)
    ]


def damaged(random: np.random.Generator, value: bytes, foreign: bytes, other: bytes) -> bytes:
    """Flip a bit, cut the value, take another namespace's or another key's, raise the version, or add a byte."""
    at, kind = int(random.integers(len(value))), int(random.integers(6))
    flipped = value[:at] + bytes([value[at] ^ 1 << int(random.integers(8))]) + value[at + 1 :]
    return [flipped, value[:at], foreign, other, value[:24] + b"\2" + value[25:], value + b"\0"][kind]


@pytest.mark.parametrize("length", [0, 100, 191])
def test_a_record_of_the_epoch_that_was_cut_short_is_replaced(length: int):
    url = f"memory://torn{length}?"
    with opened(url) as store:
        put(store, 2)
        assert isinstance(store, ObjectStore)
        path = store._path(np.frombuffer(store._keyed_blocks.record.key, np.uint8))
        obstore.put(store._client, path, bytes(obstore.get(store._client, path).bytes())[:length])
        assert not store.wait(store.submit_get(keys_of(2))).ok.any()
    with opened(url) as store:
        put(store, 2)
        assert store.wait(store.submit_get(keys_of(2))).ok.all()


def test_an_object_of_another_size_is_no_block():
    """A gateway answers HEAD with the size of its page; the engine would not store the block for a minute."""
    url = "memory://another-size?"
    with opened(url) as store:
        put(store, 2)
        assert isinstance(store, ObjectStore)
        obstore.put(store._client, names_of(store, 2)[1], b"<html>The service is being maintained.</html>")
    with opened(url) as store:
        until = time.monotonic() + 60
        while not store.contains(keys_of(2)).any():
            assert time.monotonic() < until
            time.sleep(0.001)
        assert store.contains(keys_of(2)).tolist() == [True, False]
        assert store.lacks(keys_of(2)).tolist() == [False, True]


def test_no_damaged_value_is_a_hit():
    """Ten thousand values: a flipped bit, a cut, another namespace, another key's value, another version."""
    random, width, count = np.random.default_rng(5), 64, 500
    keys, rows = keys_of(count), rows_of(count, width=width)
    url = "memory://damage?"
    with opened(url, bytes_per_block=width, namespace=bytes(32)) as other:
        put(other, count, width)
        assert isinstance(other, ObjectStore)
        medium = other._client
        names = other._keyed_blocks.names_of(keys, other._keyed_blocks.epochs.confirm().token)
        foreign = [other._folder + name.tobytes().hex() for name in names]
        foreign = [bytes(obstore.get(medium, name).bytes()) for name in foreign]
    tried = hits = 0
    with opened(url, bytes_per_block=width) as store:
        assert isinstance(store, ObjectStore)
        for _ in range(20):
            put(store, count, width)
            names = names_of(store, count)
            values = [bytes(obstore.get(medium, name).bytes()) for name in names]
            for index, name in enumerate(names):
                obstore.put(medium, name, damaged(random, values[index], foreign[index], values[index - 1]))
            read = store.wait(store.submit_get(keys))
            tried, hits = tried + count, hits + int(read.ok.sum())
            assert not read.rows.any()
            assert not store.contains(keys).any()
            assert obstore.head(medium, names[7]), "one look deletes nothing; the next put replaces it"
        assert (tried, hits) == (10_000, 0)
        assert set(store.stats().misses) >= {"payload_checksum", "magic", "namespace", "key", "version"}
    assert np.array_equal(rows, rows_of(count, width=width))


def test_a_server_that_stops_costs_one_deadline_and_comes_back(server: ObjectServer, tmp_path: Path):
    with opened(server.url(f"bucket/{tmp_path.name}") + "timeout_base=0.5") as store:
        put(store, 4)
        with server.stopped():
            first, second = store.submit_get(keys_of(2)), store.submit_put(keys_of(6)[5:], rows_of(1))
            assert set(store.wait(first).reasons) <= {"timeout", "error"}
            assert set(store.wait(second).reasons) <= {"timeout", "error", "unavailable"}
            for _ in range(100):
                assert set(store.wait(store.submit_get(keys_of(4))).reasons) == {"unavailable"}
                assert not store.contains(keys_of(4))[2:].all()
        until = time.monotonic() + 300
        while "unavailable" in (found := store.wait(store.submit_get(keys_of(4)))).reasons:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert found.reasons == ("absent", "absent", "", "")
        put(store, 4)
        assert store.wait(store.submit_get(keys_of(4))).ok.all()


def test_a_connection_that_is_refused_is_an_error_at_opening_and_a_miss_later(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"s3://bucket?endpoint=http://127.0.0.1:{free.getsockname()[1]}&region=us-east-1&timeout_base=0.5"
    with pytest.raises(StoreError, match=r"127\.0\.0\.1") as caught:
        opened(url)
    assert SECRET not in str(caught.value)
    options: Any = {"bytes_per_block": WIDTH, "num_slots": 8, "namespace": SPACE, "use": "prefix"}
    with ObjectStore(read_url(url), **options) as store:
        assert set(store.wait(store.submit_put(keys_of(2), rows_of(2))).reasons) <= {"error", "timeout"}
        assert not store.contains(keys_of(2)).any()


def test_an_object_that_fails_costs_no_other_one(monkeypatch: pytest.MonkeyPatch):
    with opened("memory://one-fails") as store:
        assert isinstance(store, ObjectStore)
        put(store, 1)
        store._calls = CallPool(1)  # one after the other
        bad: set[str] = set()

        def failing(client: Any, path: str, *arguments: Any, real: Any, **options: Any) -> Any:
            if path in bad:
                raise OSError("the disk of this object is broken")
            return real(client, path, *arguments, **options)

        monkeypatch.setattr(obstore, "put", partial(failing, real=obstore.put))
        monkeypatch.setattr(obstore, "get", partial(failing, real=obstore.get))
        for at in (0, 3, 5):
            bad = {names_of(store, 6)[at]}
            wanted = [at != place for place in range(6)]
            done = store.wait(store.submit_put(keys_of(6), rows_of(6)))
            assert done.ok.tolist() == wanted
            bad = set()
            put(store, 6)
            bad = {names_of(store, 6)[at]}
            read = store.wait(store.submit_get(keys_of(6)))
            assert read.reasons == tuple("" if good else "error" for good in wanted)
            assert np.array_equal(read.rows[wanted], rows_of(6)[wanted])
            assert "the disk of this object is broken" in store.stats().last_error
            bad = set()
            put(store, 6)  # a failed read hides its key until then


def test_a_server_that_fails_everything_is_not_asked_for_a_whole_batch(monkeypatch: pytest.MonkeyPatch):
    with opened("memory://all-fail") as store:
        put(store, 1)
        asked = 0

        def failing(*arguments: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            raise OSError("503 slow down")

        monkeypatch.setattr(obstore, "get", failing)
        assert set(store.wait(store.submit_get(keys_of(100))).reasons) == {"error"}
        assert asked < 30


@pytest.mark.parametrize("left", [5000, 0, 9 << 20])
def test_a_large_block_that_was_cut_short_is_dropped_and_stored_again(tmp_path: Path, left: int):
    width = 17 << 20
    with opened(f"local://{tmp_path}", bytes_per_block=width) as store:
        put(store, 3, width)
        os.truncate(tmp_path / names_of(store, 3)[0], left)
    with opened(f"local://{tmp_path}", bytes_per_block=width) as store:
        # A put of a block that is there in part stores it.
        put(store, 1, width)
        assert store.wait(store.submit_get(keys_of(3))).ok.all()
        os.truncate(tmp_path / names_of(store, 3)[0], left)
        read = store.wait(store.submit_get(keys_of(3)))
        assert read.ok.tolist() == [False, True, True]
        assert is_damage(read.reasons[0])
        assert store.wait(store.submit_get(keys_of(1))).reasons == ("absent",)
        put(store, 1, width)
        assert store.wait(store.submit_get(keys_of(3))).ok.all()


def test_a_fork_of_a_process_that_used_an_object_store_raises():
    script = """
import os, numpy as np
from blockyard.errors import ForkedError
from blockyard.stores import open_store

def use():
    with open_store("memory://forked?size=1MiB", bytes_per_block=4096, use="prefix") as store:
        assert store.wait(store.submit_put([bytes(32)], np.ones((1, 4096), np.uint8))).ok.all()

def forked(work):
    child = os.fork()
    if not child:
        try:
            work()
        except ForkedError as error:
            os._exit(3 if "obstore" in str(error) else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert forked(use) == 0, "the parent has not used one yet"
use()
assert forked(use) == 3
use()
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_a_block_that_is_there_is_not_sent_again(place: str):
    with opened(place) as store:
        assert isinstance(store, ObjectStore)
        put(store, 1)
        before = obstore.head(store._client, names_of(store, 1)[0])
        done = store.wait(store.submit_put(keys_of(1), rows_of(1, seed=9)))
        assert done.ok.all()
        after = obstore.head(store._client, names_of(store, 1)[0])
        assert (before["e_tag"], before["last_modified"]) == (after["e_tag"], after["last_modified"])
        assert np.array_equal(store.wait(store.submit_get(keys_of(1))).rows, rows_of(1))


def test_large_blocks_are_sent_in_parts_and_read_in_ranges(place: str):
    width = (17 << 20) + 11
    with opened(place, bytes_per_block=width, num_slots=4) as store:
        put(store, 2, width)
        put(store, 1, width)
        read = store.wait(store.submit_get(keys_of(3)))
        assert read.reasons == ("", "", "absent")
        assert np.array_equal(read.rows[:2], rows_of(2, width=width))
        assert isinstance(store, ObjectStore)
        obstore.put(store._client, names_of(store, 1)[0], b"short")
        assert store.wait(store.submit_get(keys_of(2))).ok.tolist() in ([False, True], [False, False])


def test_swap_space_is_removed_on_closing(place: str):
    with opened(place, use="swap", num_slots=8) as store:
        assert isinstance(store, ObjectStore)
        client = store._client
        assert store.wait(store.submit_write(np.arange(8), rows_of(8))).ok.all()
        assert len(obstore.list(client, FOLDER).collect()) == 8
    assert not obstore.list(client, FOLDER).collect()


def test_processes_share_blocks_and_forget_together(place: str):
    with opened(place) as first, opened(place) as second:
        put(first, 3)
        assert np.array_equal(second.wait(second.submit_get(keys_of(3))).rows, rows_of(3))
        first.forget()
        until = time.monotonic() + 300
        while second.wait(second.submit_get(keys_of(3))).ok.any():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_no_message_shows_a_credential(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown, url = [], server.url("bucket")
    with opened(url) as store:
        assert isinstance(store, ObjectStore)
        shown += [
            repr(store),
            store.url,
            repr(store._client),
            repr(read_url(url)),
            str(store._public(ValueError(SECRET))),
        ]
    for bad in (f"{url}secret_access_key={SECRET}", f"{url}aws_session_token={SECRET}", f"s3://tester:{SECRET}@bucket"):
        with pytest.raises(StoreURLError, match=r"from the environment|write / . # @ in a password as") as caught:
            opened(bad)
        shown.append(repr(caught.value))
    wrong = SECRET[::-1]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    with pytest.raises(StoreError, match=r"403|PermissionDenied|Forbidden") as caught:
        opened(url)
    text = "\n".join([*shown, repr(caught.value)])
    assert SECRET not in text
    assert wrong not in text


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "must name a bucket"),
        ("local://host/path?size=1MiB", "must be the absolute path"),
        ("s3://bucket?connections=1", "'connections=1' must be 4 to 256"),
        ("s3://bucket?timeout_base=never", "'timeout_base=never' must be"),
        ("local:///tmp?speed=9", "is not an option"),
        ("s3://bucket", "needs .size="),
    ],
)
def test_a_malformed_url_says_which_part(url: str, why: str):
    with pytest.raises(StoreURLError, match=why):
        open_store(url, bytes_per_block=WIDTH)


def test_an_option_that_obstore_does_not_know_is_refused():
    with pytest.raises(StoreError, match="speed"):
        open_store("s3://bucket?size=1MiB&speed=9", bytes_per_block=WIDTH)


@pytest.mark.parametrize("option", ["allow_http=true", "timeout=5s", "proxy_url=http://127.0.0.1:1", "user_agent=x"])
def test_an_option_at_which_obstore_would_panic_is_refused_by_name(option: str):
    with pytest.raises(StoreURLError, match=f"'{option.partition('=')[0]}=.*' is not an option"):
        open_store(f"s3://bucket?size=1MiB&{option}", bytes_per_block=WIDTH)


def test_a_forged_epoch_record_is_not_read_whole_and_forget_replaces_it(place: str):
    with opened(place) as store:
        assert isinstance(store, ObjectStore)
        put(store, 1)
        key = np.frombuffer(store._keyed_blocks.record.key, np.uint8)
        obstore.put(store._client, store._path(key), bytes(8 << 20))
        assert store.read_epoch(key).nbytes == 0  # type: ignore[union-attr]
        store.forget()
        assert store.read_epoch(key).nbytes == HEADER + EPOCH_BYTES  # type: ignore[union-attr]
        put(store, 1)


def test_a_panic_of_obstore_is_a_store_error(monkeypatch: pytest.MonkeyPatch):
    """A panic is no `Exception`, so engines that catch those would die of it."""
    url = "s3://bucket?size=1MiB&endpoint=http://127.0.0.1:1&region=x&timeout_base=.05"
    with monkeypatch.context() as patched:
        patched.setitem(object_store._CONFIG, "s3", ("endpoint", "region", "allow_http"))
        with pytest.raises(StoreError, match="panic: Expected config prefix"):
            open_store(f"{url}&allow_http=true", bytes_per_block=WIDTH)
    with pytest.raises(BaseException, match="Expected config prefix") as caught:
        obstore.store.from_url("s3://bucket", allow_http="true")  # type: ignore[call-overload]
    panic = caught.value
    assert not isinstance(panic, Exception)
    monkeypatch.setattr(ObjectStore, "_ask", lambda self: (_ for _ in ()).throw(panic))
    with pytest.raises(StoreError, match="panic: Expected config prefix"):
        open_store(url, bytes_per_block=WIDTH)


def test_a_panic_in_a_call_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BaseException, match="Expected config prefix") as caught:
        obstore.store.from_url("s3://bucket", allow_http="true")  # type: ignore[call-overload]
    with opened(f"memory://panic{tmp_path}") as store:
        put(store, 3)
        with monkeypatch.context() as patched:
            patched.setattr(obstore, "get", lambda *_: (_ for _ in ()).throw(caught.value))
            assert not store.wait(store.submit_get(keys_of(3))).ok.any()
        until = time.monotonic() + 300
        while not store.wait(store.submit_get(keys_of(3))).ok.all():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert store.stats().errors


def test_a_size_that_holds_too_little_is_refused():
    with pytest.raises(StoreFullError, match=r"size holds 1 blocks of [0-9]+ bytes, must hold at least 2"):
        open_store(f"s3://bucket?size={HEADER + WIDTH}", bytes_per_block=WIDTH, num_slots=2)
