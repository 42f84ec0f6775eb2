"""Codecs and keyed MACs: blocks come back as they were, and whatever a codec or a forger does is never a wrong byte."""

import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_stores import SIZE, KeyedStore, names, put, rows

from blockyard._core import checksum_rows
from blockyard.errors import InvalidArgumentError, OutOfMemoryError, StoreError, UnknownTicketError
from blockyard.stores import Codec, ExternalStore, open_store
from blockyard.stores.value import HEADER, seal_values
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite

KEY = bytes(range(100, 132))


def decompress(encoded: memoryview, max_length: int) -> bytes:
    return zlib.decompressobj().decompress(encoded, max_length)


def plain(encoded: memoryview, max_length: int) -> bytes:
    return bytes(encoded)


ZLIB = Codec("zlib-1", lambda block: zlib.compress(block, 1), decompress)


class TestSwapSpaceWithCodecAndKey(StoreSuite):
    def open_store(self) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots}
        return open_store("memory://swap", codec=ZLIB, mac_key=KEY, **options)


class TestSwapSpaceWithKey(StoreSuite):
    def open_store(self) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots}
        return open_store("memory://swap", mac_key=KEY, **options)


class TestSlabWithCodecAndKey(StoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/here"

    def open_store(self) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots}
        return open_store(self.url, codec=ZLIB, mac_key=KEY, **options)


class TestPrefixSlabWithCodecAndKey(PrefixStoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/here"

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(self.url, use="prefix", codec=ZLIB, mac_key=KEY, **options)


class TestPrefixStoreWithCodecAndKey(PrefixStoreSuite):
    evicts = False

    @pytest.fixture(autouse=True)
    def _url(self, tmp_path: Path) -> None:
        self.url = f"memory://here{tmp_path}"

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(self.url, use="prefix", codec=ZLIB, mac_key=KEY, **options)


def fetched(store: ExternalStore, count: int) -> tuple[str, ...]:
    found = store.wait(store.submit_get(names(count)))
    assert np.array_equal(found.rows[found.ok], rows(count)[found.ok]), "a wrong byte"
    return found.reasons


def test_an_encoded_block_takes_the_bytes_that_the_codec_returned(tmp_path: Path):
    """A user's lines."""
    codec = Codec("zlib", zlib.compress, decompress)
    with open_store(f"local://{tmp_path}?size=1MiB", bytes_per_block=1 << 16, use="prefix", codec=codec) as store:
        blocks = np.full((2, 1 << 16), 7, np.uint8)
        assert store.wait(store.submit_put(names(2), blocks)).ok.all()
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
        assert sorted(sizes) == [192, *[HEADER + len(zlib.compress(bytes(blocks[0])))] * 2]
        assert np.array_equal(store.wait(store.submit_get(names(2))).rows, blocks)


def raises(block: memoryview) -> bytes:
    raise ValueError("the codec's own trouble")


@pytest.mark.parametrize("encode", [raises, lambda block: b"", lambda block: bytes(9999), lambda block: "text"])
def test_a_block_that_cannot_be_encoded_is_not_stored(encode: Callable[[memoryview], Any]):
    def sometimes(block: memoryview) -> Any:
        return encode(block) if block[0] == rows(3)[1][0] else bytes(block)

    for use in ("put", "write"):
        with KeyedStore(codec=Codec("odd", sometimes, plain)) as store:
            slots = np.arange(3)
            ticket = store.submit_put(names(3), rows(3)) if use == "put" else store.submit_write(slots, rows(3))
            assert store.wait(ticket).reasons == ("", "codec", "")
            found = store.wait(store.submit_get(names(3)) if use == "put" else store.submit_read(slots))
            assert found.ok.tolist() == [True, False, True]
            assert np.array_equal(found.rows[[0, 2]], rows(3)[[0, 2]])
            assert store.stats().errors == 1


@pytest.mark.parametrize("decode", [raises, lambda data: b"", lambda data: bytes(SIZE + 1), lambda data: None])
def test_a_block_that_cannot_be_decoded_is_a_miss(decode: Callable[[memoryview], Any]):
    with KeyedStore(codec=Codec("odd", bytes, lambda data, max_length: decode(data))) as store:
        assert put(store, 3) == ("", "", "")
        assert fetched(store, 3) == ("codec",) * 3
        assert fetched(store, 3) == ("absent",) * 3, "and is dropped"


def test_a_forged_value_takes_no_more_memory_than_a_block():
    bomb = zlib.compress(bytes(64 << 20), 9)
    with KeyedStore(bytes_per_block=1 << 17, codec=ZLIB) as store:
        blocks = np.ones((1, 1 << 17), np.uint8)
        assert store.wait(store.submit_put(names(1), blocks)).ok.all()
        name = next(name for name, value in store.blocks.items() if value.nbytes > 192)
        value = np.zeros((1, store.blocks[name].nbytes), np.uint8)
        value[0, HEADER : HEADER + len(bomb)] = np.frombuffer(bomb, np.uint8)
        seal_values(value, store.namespace, names(1), lengths=[len(bomb)], mac_key=None)
        store.blocks[name] = value[0]
        tracemalloc.start()
        try:
            found = store.wait(store.submit_get(names(1)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found.ok.all(), "decoded: without a key it is a value like any other"
        assert peak < 4 << 20


@pytest.mark.parametrize("decode", [zlib.decompress, lambda encoded: encoded])
def test_a_codec_that_cannot_be_told_a_length_is_refused(decode: Callable[..., Any]):
    with pytest.raises(InvalidArgumentError, match=r"^decode takes \(.*, must take \(encoded, max_length\)"):
        Codec("zlib", zlib.compress, decode)


def test_another_codec_or_key_finds_nothing_and_deletes_nothing():
    medium: dict[bytes, Any] = {}
    with KeyedStore(medium, codec=ZLIB, mac_key=KEY) as store:
        put(store, 3)
    others: list[dict[str, Any]] = [{}, {"codec": ZLIB}, {"mac_key": KEY}, {"codec": ZLIB, "mac_key": bytes(32)}]
    for options in [*others, {"codec": Codec("zlib-2", ZLIB.encode, ZLIB.decode), "mac_key": KEY}]:
        with KeyedStore(medium, **options) as other:
            assert fetched(other, 3) == ("absent",) * 3
    with KeyedStore(medium, codec=ZLIB, mac_key=KEY) as store:
        assert fetched(store, 3) == ("", "", "")


@pytest.mark.parametrize("codec", [None, ZLIB])
def test_damage_anywhere_is_a_miss(codec: Codec | None):
    random = np.random.default_rng(2)
    with KeyedStore(codec=codec, mac_key=KEY) as store:
        for _ in range(300):
            put(store, 2)
            value = next(value for value in store.blocks.values() if value[64] == 1 and value.nbytes > 192)
            length = HEADER + int.from_bytes(value[96:104].tobytes(), "little")
            value[random.integers(length)] ^= 1 << random.integers(8)
            assert [bool(reason) for reason in fetched(store, 2)] == [True, False]


def test_a_value_forged_without_the_key_is_a_miss():
    """Who can write to the server makes a value with a right header and a right XXH3; only the key is missing."""
    for key in (None, bytes(32)):
        with KeyedStore(mac_key=KEY) as store:
            put(store, 2)
            for value in store.blocks.values():
                if value.nbytes > 192:
                    value[HEADER:] ^= 1
                    value[:16] = 0
                    value[:16] = checksum_rows(value[None], key)[0]
            assert fetched(store, 2) == ("payload_checksum",) * 2


def test_an_older_block_of_a_slot_is_a_miss():
    with KeyedStore(mac_key=KEY, codec=ZLIB) as store:
        slots = np.arange(2)
        assert store.wait(store.submit_write(slots, rows(2))).ok.all()
        old = {name: value.copy() for name, value in store.blocks.items()}
        assert store.wait(store.submit_write(slots, rows(2, 1))).ok.all()
        store.blocks.update(old)
        assert store.wait(store.submit_read(slots)).reasons == ("payload_checksum",) * 2


def test_the_key_may_be_in_a_file_that_only_its_owner_reads(tmp_path: Path):
    path, medium = tmp_path / "key", dict[bytes, Any]()
    path.write_text(KEY.hex() + "\n")
    path.chmod(0o640)
    with pytest.raises(StoreError, match="others can read"):
        KeyedStore(mac_key=path)
    path.chmod(0o600)
    with KeyedStore(medium, mac_key=path) as store:
        put(store, 1)
    path.write_bytes(KEY)
    with KeyedStore(medium, mac_key=path) as store:
        assert fetched(store, 1) == ("",)
    for bad in (b"short", KEY + b"1", b"\xff" * 40, b""):
        path.write_bytes(bad)
        with pytest.raises(InvalidArgumentError, match="64 hexadecimal digits") as caught:
            KeyedStore(mac_key=path)
        assert not bad or bad.decode("latin1") not in str(caught.value)
    with pytest.raises(StoreError, match="cannot be read"):
        KeyedStore(mac_key=tmp_path / "none")


@pytest.mark.parametrize("bad", [b"", b"secret", "text", 7])
def test_a_key_of_another_length_is_refused_and_not_shown(bad: Any):
    with pytest.raises(InvalidArgumentError, match=r"mac_key is .* must be 32 bytes") as caught:
        open_store("memory://x?size=1MiB", bytes_per_block=SIZE, use="prefix", mac_key=bad)
    assert "secret" not in str(caught.value)


def test_no_message_shows_the_key():
    key = b"0123456789abcdef-the-secret-key!"
    with open_store("memory://shown?size=1MiB", bytes_per_block=SIZE, use="prefix", mac_key=key) as store:
        put(store, 1)
        text = f"{store!r} {store.stats()} {vars(store)['url']}"
    assert key.decode() not in text
    assert key.hex() not in text


def test_a_slab_that_was_forged_without_the_key_is_a_miss(tmp_path: Path):
    """Who can write to the directory makes a slab whose headers and XXH3 are right; only the key is missing."""
    url, plain = f"file://{tmp_path}/x?size=1MiB", rows(2, 1)
    with open_store(url, bytes_per_block=SIZE, use="prefix", mac_key=KEY) as store:
        assert put(store, 2) == ("", "")
        namespace = store.namespace  # type: ignore[attr-defined]
        slots = store._keyed_blocks.names_of(names(2), bytes(16))  # type: ignore[attr-defined]
    for key in (None, bytes(32)):
        with open_store(url, bytes_per_block=HEADER + SIZE, use="prefix", namespace=namespace) as slab:
            values = slab.wait(slab.submit_get(slots)).rows
            values[:, HEADER:], values[:, :16] = plain, 0
            values[:, :16] = checksum_rows(values, key)
            assert slab.wait(slab.submit_delete(slots)).ok.all()
            assert slab.wait(slab.submit_put(slots, values)).ok.all()
        with open_store(url, bytes_per_block=SIZE, use="prefix", mac_key=KEY) as store:
            assert fetched(store, 2) == ("payload_checksum",) * 2
            assert fetched(store, 2) == ("absent",) * 2, "and is dropped"
            assert put(store, 2) == ("", "")


def test_a_put_that_began_before_forget_is_forgotten_in_a_slab(tmp_path: Path):
    with open_store(f"file://{tmp_path}/x?size=1MiB", bytes_per_block=SIZE, use="prefix", mac_key=KEY) as store:
        slab, may_go_on, began = store._slab, threading.Event(), threading.Event()  # type: ignore[attr-defined]

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(slab, name)

            def submit_put(self, *arguments: Any) -> int:
                began.set()
                assert may_go_on.wait(60)
                return int(slab.submit_put(*arguments))

        store._slab = Slow()  # type: ignore[attr-defined]
        ticket = store.submit_put(names(2), rows(2))
        assert began.wait(60)
        threading.Timer(0.05, may_go_on.set).start()
        store.forget()
        assert fetched(store, 2) == ("absent",) * 2
        store.wait(ticket)
        assert put(store, 2) == ("", "")
        assert fetched(store, 2) == ("", "")


def test_a_disk_that_refuses_is_named_and_a_miss(tmp_path: Path):
    with open_store(f"file://{tmp_path}/x?size=1MiB", bytes_per_block=SIZE, mac_key=KEY) as store:
        slots = np.arange(2)
        assert store.wait(store.submit_write(slots, rows(2))).ok.all()
        slab = store._slab  # type: ignore[attr-defined]
        assert slab.close()
        assert not store.wait(store.submit_read(slots)).ok.any()
        assert "closed" in store.stats().last_error


def test_a_batch_whose_result_has_no_memory_is_let_go_by_the_slab(tmp_path: Path):
    with open_store(f"file://{tmp_path}/x?size=1MiB", bytes_per_block=SIZE, mac_key=KEY) as store:
        slab, tickets, slots = store._slab, list[int](), np.arange(2)  # type: ignore[attr-defined]

        class Tight:
            def __getattr__(self, name: str) -> Any:
                return getattr(slab, name)

            def wait(self, ticket: int, timeout: float | None = None) -> Any:
                tickets.append(ticket)
                if timeout is None:
                    raise OutOfMemoryError("no memory for 2 blocks", 2 * SIZE)
                return slab.wait(ticket, timeout)

        assert store.wait(store.submit_write(slots, rows(2))).ok.all()
        store._slab = Tight()  # type: ignore[attr-defined]
        assert not store.wait(store.submit_read(slots)).ok.any()
        with pytest.raises(UnknownTicketError):
            slab.wait(tickets[0])


def test_an_invalid_codec_raises_with_the_reason():
    with pytest.raises(InvalidArgumentError, match="name is ''"):
        Codec("", bytes, plain)
    with pytest.raises(InvalidArgumentError, match="max_bytes is 0"):
        Codec("x", bytes, plain, max_bytes=0)


def test_keyed_checksums_are_blake3s():
    """The first of BLAKE3's official test vectors, and its length."""
    sums = checksum_rows(np.zeros((1, 0), np.uint8), b"whats the Elvish word for friend")
    assert sums.tobytes().hex() == "92b2b75604ed3c761f9d6f62392c8a92"
    for bad in (b"", b"short", bytes(33)):
        with pytest.raises(InvalidArgumentError, match=r"key has .* bytes, must have 32"):
            checksum_rows(np.zeros((1, 4), np.uint8), bad)
