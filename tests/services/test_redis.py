"""The Redis store over real servers: both suites, damage, a server that stops, secrets, and what is left behind."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import redis
from numpy.typing import NDArray
from servers import PASSWORD, SERVERS, Server, behind_tls, free_ports, serving

from blockyard.errors import StoreError, StoreFullError, StoreURLError
from blockyard.events import export_keys
from blockyard.stores import ExternalStore, Owners, open_store
from blockyard.stores.redis import RedisStore, read_url
from blockyard.stores.value import HEADER
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite

WIDTH = 5000
SPACE = bytes(range(32))


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(request.param, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator["redis.Redis"]:
    with redis.Redis(port=server.port) as found:
        found.flushall()
        yield found


def url_of(server: Server, transport: str) -> str:
    return f"redis://127.0.0.1:{server.port}" if transport == "tcp" else f"unix://{server.socket}"


@pytest.mark.parametrize("transport", ["tcp", "unix"])
class TestSwapSpace(StoreSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server, transport: str, client: "redis.Redis") -> None:
        self.url = url_of(server, transport)

    def open_store(self) -> ExternalStore:
        return open_store(self.url, bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
class TestPrefixStore(PrefixStoreSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server, transport: str, client: "redis.Redis") -> None:
        self.url = url_of(server, transport)

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(self.url, use="prefix", **options)


def opened(server: Server, options: str = "", **more: Any) -> ExternalStore:
    more = {"bytes_per_block": WIDTH, "namespace": SPACE, "use": "prefix", "num_slots": 64, **more}
    return open_store(f"redis://127.0.0.1:{server.port}{options}", **more)


def keys_of(count: int) -> list[bytes]:
    return export_keys(list(range(16 * count)), block_size=16)


def rows_of(count: int, seed: int = 0, width: int = WIDTH) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, (count, width), dtype=np.uint8)


def put(store: ExternalStore, count: int, seed: int = 0) -> None:
    done = store.wait(store.submit_put(keys_of(count), rows_of(count, seed)))
    assert done.ok.all(), (done.reasons, store.stats())


def values_of(client: "redis.Redis") -> list[bytes]:
    return sorted(key for key in list(client.keys()) if client.type(key) == b"string" and client.strlen(key) > WIDTH)


def damaged(random: np.random.Generator, value: bytes, foreign: bytes, other: bytes) -> bytes:
    """Flip a bit, cut the value, take another namespace's or another key's, or raise the version."""
    at, kind = int(random.integers(len(value))), int(random.integers(5))
    flipped = value[:at] + bytes([value[at] ^ 1 << int(random.integers(8))]) + value[at + 1 :]
    return [flipped, value[:at], foreign, other, value[:24] + b"\2" + value[25:]][kind]


@pytest.mark.parametrize("rounds", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_damaged_value_is_a_hit(server: Server, client: "redis.Redis", rounds: int):
    """500 values a round: a flipped bit, a cut, another namespace, another key's value, another version."""
    random = np.random.default_rng(11)
    width, count = 64, 500
    keys, rows = keys_of(count), rows_of(count, width=width)
    options: Any = {"bytes_per_block": width, "num_slots": 2 * count}
    with opened(server, namespace=bytes(32), **options) as other:
        assert other.wait(other.submit_put(keys, rows)).ok.all()
    foreign = [client.get(key) for key in client.keys("blockyard:0000000000000000:*") if len(key) == 59]
    tried = hits = 0
    with opened(server, "?timeout_base=60", **options) as store:
        assert isinstance(store, RedisStore)
        for _ in range(rounds):
            assert store.wait(store.submit_put(keys, rows)).ok.all()
            names = store._keyed_blocks.names_of(keys, store._keyed_blocks.epochs.confirm().token)
            stored = [b"blockyard:0001020304050607:" + name.tobytes() for name in names]
            values = client.mget(stored)
            pipe = client.pipeline()
            for index, name in enumerate(stored):
                pipe.set(name, damaged(random, values[index], foreign[index], values[index - 1]))
            pipe.execute()
            read = store.wait(store.submit_get(keys))
            tried, hits = tried + count, hits + int(read.ok.sum())
            assert not read.rows.any()
            assert not store.contains(keys).any()
            assert client.exists(*stored) == count, "one look deletes nothing; the next put replaces them"
        assert (tried, hits) == (500 * rounds, 0)
        assert set(store.stats().misses) >= {"payload_checksum", "magic", "namespace", "key", "version"}


def test_a_server_that_stops_costs_one_deadline_and_comes_back(server: Server, client: "redis.Redis"):
    with opened(server, "?timeout_base=0.5") as store:
        put(store, 4)
        with server.stopped():
            read = store.wait(store.submit_get(keys_of(2)))
            assert set(read.reasons) <= {"timeout", "error"}
            for _ in range(300):  # 600 batches, of which none waits
                assert set(store.wait(store.submit_get(keys_of(4))).reasons) == {"unavailable"}
                assert set(store.wait(store.submit_put(keys_of(1), rows_of(1))).reasons) == {"unavailable"}
                assert not store.contains(keys_of(4)).any()
                store.poll()
        until = time.monotonic() + 300
        while "unavailable" in (found := store.wait(store.submit_get(keys_of(4)))).reasons:
            assert time.monotonic() < until
            time.sleep(0.01)
        # A key whose read failed is not read for two seconds.
        while not found.ok.all():
            assert set(found.reasons) == {"absent", ""}
            assert time.monotonic() < until
            time.sleep(0.01)
            found = store.wait(store.submit_get(keys_of(4)))


def test_processes_share_blocks_and_forget_together(server: Server, client: "redis.Redis"):
    with opened(server) as first, opened(server) as second:
        put(first, 3)
        read = second.wait(second.submit_get(keys_of(3)))
        assert np.array_equal(read.rows, rows_of(3))
        first.forget("step-2")
        assert second.wait(second.submit_get(keys_of(3))).reasons == ("forgotten",) * 3
        assert second.wait(second.submit_put(keys_of(1), rows_of(1))).reasons == ("forgotten",)
        second.forget("step-2")
        put(second, 1)
        assert first.wait(first.submit_get(keys_of(1))).ok.all()


def test_a_lost_epoch_costs_misses_only_in_new_processes(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        put(store, 2)
        store.forget()
        client.flushall()
        put(store, 2)
    with opened(server) as store:
        read = store.wait(store.submit_get(keys_of(2)))
        assert np.array_equal(read.rows[read.ok], rows_of(2)[read.ok])


def test_a_server_that_restarts_empty_is_filled_again(server: Server):
    keys, until = keys_of(4), time.monotonic() + 60
    with opened(server) as store:
        put(store, 4)
        with server.killed():
            assert not store.wait(store.submit_get(keys)).ok.any()
        while store.contains(keys).any() or not store.wait(store.submit_put(keys, rows_of(4))).ok.all():
            assert time.monotonic() < until
            time.sleep(0.01)
        with opened(server) as other:
            for one in (store, other):
                assert np.array_equal(one.wait(one.submit_get(keys)).rows, rows_of(4))


def test_blocks_are_read_into_the_callers_rows(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        put(store, 2)
        out = np.full((3, WIDTH), 7, np.uint8)
        read = store.wait(store.submit_get(keys_of(3), out))
        assert read.rows is out
        assert np.array_equal(out[:2], rows_of(2))
        assert (out[2] == 7).all()


def test_a_full_store_drops_the_least_recently_used_blocks(server: Server, client: "redis.Redis"):
    with opened(server, num_slots=8) as store:
        put(store, 8)
        assert store.wait(store.submit_get(keys_of(2))).ok.all()
        more = export_keys(list(range(5, 5 + 16 * 6)), block_size=16)
        assert store.wait(store.submit_put(more, rows_of(6, 1))).ok.all()
        assert store.wait(store.submit_get(keys_of(8))).ok.tolist() == [True] * 2 + [False] * 6
        assert len(values_of(client)) == 8


def test_swap_space_is_removed_on_closing_and_has_a_time_to_live(server: Server, client: "redis.Redis"):
    with opened(server, use="swap") as store:
        assert store.wait(store.submit_write(np.arange(8), rows_of(8))).ok.all()
        keys = client.keys()
        assert len(keys) == 8
        assert all(0 < client.ttl(key) <= 86400 for key in keys)
        with pytest.raises(StoreError, match="swap space only and has no keys"):
            store.submit_get(keys_of(1))
    assert not client.keys()


def test_blocks_live_as_long_as_the_url_says(server: Server, client: "redis.Redis"):
    with opened(server, "?ttl=0.2") as store:
        put(store, 2)
        time.sleep(0.3)
        assert store.wait(store.submit_get(keys_of(2))).reasons == ("absent", "absent")
        with pytest.raises(StoreError, match="prefix store, which has no slots"):
            store.submit_read(np.array([0]))


def test_a_server_that_lacks_replicas_gives_only_misses(tmp_path: Path):
    with (
        serving("valkey-server", tmp_path) as server,
        redis.Redis(port=server.port) as client,
        opened(server) as store,
    ):
        assert store.wait(store.submit_put(keys_of(1), rows_of(1))).ok.all()
        client.config_set("min-replicas-to-write", 1)
        assert not store.wait(store.submit_get(keys_of(1))).ok.any()
        with pytest.raises(StoreError, match="Not enough good replicas"):
            store.forget()
        client.config_set("min-replicas-to-write", 0)
        store.forget()
        assert store.wait(store.submit_put(keys_of(1), rows_of(1))).ok.all()


def test_a_server_that_is_out_of_memory_refuses(tmp_path: Path):
    with serving("valkey-server", tmp_path, "--maxmemory", "3mb") as small, opened(small, num_slots=4096) as store:
        done = store.wait(store.submit_put(keys_of(600), rows_of(600)))
        assert set(done.reasons) == {"", "refused"}
        read = store.wait(store.submit_get(keys_of(600)))
        assert read.ok.tolist() == done.ok.tolist()


def certify(name: Path, *options: str) -> None:
    """Make a key and a certificate for it."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name.name}"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem", *options]
    subprocess.run(command, check=True, capture_output=True)


def test_a_connection_is_encrypted_and_the_certificates_checked(tmp_path: Path):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    ca = tmp_path / "authority"
    certify(ca)
    issued = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    certify(tmp_path / "client", *issued)
    certify(tmp_path / "server", *issued, "-addext", "subjectAltName=IP:127.0.0.1")
    more: Any = {"bytes_per_block": 100_000, "use": "prefix", "num_slots": 8}
    ours = f"cert={tmp_path}/client.pem&key={tmp_path}/client.key"
    with (
        serving("valkey-server", tmp_path) as server,
        behind_tls(server.port, tmp_path / "server", Path(f"{ca}.pem")) as port,
    ):
        url = f"rediss://127.0.0.1:{port}"
        rows = rows_of(3, width=100_000)
        with open_store(f"{url}?ca={ca}.pem&{ours}", **more) as store:
            assert store.wait(store.submit_put(keys_of(3), rows)).ok.all(), store.stats()
        with open_store(f"valkeys://127.0.0.1:{port}?ca={ca}.pem&{ours}", **more) as store:
            assert np.array_equal(store.wait(store.submit_get(keys_of(3))).rows, rows)
        for bad, why in (
            (f"{url}?{ours}", "certificate"),
            (f"{url}?ca={ca}.pem", "."),
            (f"{url}?ca={tmp_path}/none.pem", "cannot read .*none.pem"),
            (f"rediss://127.0.0.1:{free_ports(1)[0]}?ca={ca}.pem", "refused"),
        ):
            with pytest.raises(StoreError, match=why):
                open_store(bad, **more)


# ---- secrets and URLs ----


def test_a_valkey_url_opens_the_store_that_the_redis_url_opens(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        put(store, 3)
    options: Any = {"bytes_per_block": WIDTH, "namespace": SPACE, "num_slots": 64}
    with open_store(f"valkey://127.0.0.1:{server.port}", use="prefix", **options) as store:
        assert isinstance(store, RedisStore)
        assert np.array_equal(store.wait(store.submit_get(keys_of(3))).rows, rows_of(3))
    with open_store(f"valkey://127.0.0.1:{server.port}", **options) as store:
        assert store.wait(store.submit_write(np.arange(3), rows_of(3))).ok.all()


@pytest.mark.parametrize(
    ("scheme", "same"),
    [
        ("valkey", "redis"),
        ("valkeys", "rediss"),
        ("valkey+cluster", "redis+cluster"),
        ("valkeys+cluster", "rediss+cluster"),
    ],
)
def test_valkey_schemes_are_read_as_the_redis_schemes(scheme: str, same: str):
    rest = "://me:secret@host:7000?size=2GiB&ttl=60" + ("&ca=/ca.pem" if "s" in scheme.partition("+")[0][6:] else "")
    (ours, *others), (theirs, *wanted) = read_url(scheme + rest)[1:], read_url(same + rest)[1:]
    assert ours == theirs
    assert others == wanted
    with pytest.raises(StoreURLError, match="'ca=/x' is not an option"):
        read_url("valkey://host?ca=/x")


def test_no_message_shows_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    secret = quote(PASSWORD, safe="")
    with serving("valkey-server", tmp_path, "--requirepass", PASSWORD) as locked:
        address = f"127.0.0.1:{locked.port}"
        options: Any = {"bytes_per_block": WIDTH, "use": "prefix", "num_slots": 8}
        shown = []
        with open_store(f"redis://:{secret}@{address}?timeout_base=30", **options) as store:
            assert isinstance(store, RedisStore)
            put(store, 2)
            shown += [
                repr(store),
                store.url,
                repr(read_url(f"redis://:{secret}@{address}")),
                repr(store._client),
            ]
        for url in (
            f"redis://:{secret}x@{address}",
            f"redis://:{secret}@{address}?speed=9",
            f"redis://:{secret}@{address}/path",
            f"redis://:{secret}@{address}#part",
            f"redis://:{secret}@127.0.0.1:1",
            f"rodis://:{secret}@{address}",
            f"redis://:{secret}\x01@{address}",
        ):
            with pytest.raises(StoreError) as caught:
                open_store(url, **options)
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
            shown.append(repr(caught.value))
    text = "\n".join([*shown, caplog.text])
    assert PASSWORD not in text
    assert secret not in text
    assert "***@127.0.0.1" in text


def test_a_password_is_read_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "secret"
    file.write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("OUR_PASSWORD", PASSWORD)
    options: Any = {"bytes_per_block": WIDTH, "use": "prefix", "num_slots": 8}
    shown = []
    with serving("valkey-server", tmp_path, "--requirepass", PASSWORD) as locked:
        for source in (f"password_file={quote(str(file), safe='')}", "password_env=OUR_PASSWORD"):
            url = f"redis://127.0.0.1:{locked.port}?timeout_base=30&{source}"
            with open_store(url, **options) as store:
                put(store, 2)
                shown += [repr(store), store.url, repr(read_url(url)), repr(store._client)]
        file.write_text(f"{PASSWORD}x")
        with pytest.raises(StoreError) as caught:
            open_store(f"redis://127.0.0.1:{locked.port}?password_file={file}", **options)
        shown += [repr(caught.value)]
    assert PASSWORD not in "\n".join([*shown, caplog.text])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://h?password_file=/nowhere", r"cannot be read \(No such file or directory\)"),
        ("redis://h?password_file=/dev/null", "is empty"),
        ("redis://h?password_file=/", r"cannot be read \(Is a directory\)"),
        ("redis://h?password_env=NOT_SET_HERE", "is not set in the environment"),
        ("redis://:p@h?password_env=HOME", "is given beside another password"),
        ("redis://h?password_env=HOME&password_file=/dev/null", "is given beside another password"),
    ],
)
def test_where_a_password_cannot_be_read_is_shown(url: str, why: str):
    with pytest.raises(StoreURLError, match=why) as caught:
        read_url(url)
    assert url.rpartition("?")[2].partition("&")[0] in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("option", ["password_file=hunter2", "password_env=hunter2", "password_env=HUNTER-2"])
def test_a_password_in_place_of_its_file_or_variable_is_not_shown(option: str):
    with pytest.raises(StoreURLError) as caught:
        read_url(f"redis://h?{option}")
    assert "unter" not in str(caught.value).lower()


def test_what_the_client_says_of_a_password_from_a_variable_is_masked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUR_PASSWORD", "hunter2")
    found = read_url("redis://h?password_env=OUR_PASSWORD")
    assert found.client["password"] == "hunter2"
    assert "hunter2" in found.parts.secrets


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://", "must name a host"),
        ("redis://host:port", "has an invalid port"),
        ("redis://host/3", "write .db=1"),
        ("redis://host?db=-1", "'db=-1' must be 0 or more"),
        ("redis://host?ttl=soon", "'ttl=soon' must be 0 to 1e9 seconds"),
        ("redis://host?timeout_base=nan", "'timeout_base=nan' must be"),
        ("redis://host?ca=/x", "is not an option"),
        ("unix://host/socket", "must be the absolute path of a socket"),
        ("unix:", "must be the absolute path of a socket"),
        ("redis://host", "needs .size="),
    ],
)
def test_a_malformed_url_says_which_part(url: str, why: str):
    with pytest.raises(StoreURLError, match=why):
        open_store(url, bytes_per_block=WIDTH)


def test_a_size_that_holds_too_little_is_refused():
    with pytest.raises(StoreFullError, match=r"size holds 1 blocks of [0-9]+ bytes, must hold at least 2"):
        open_store(f"redis://host?size={HEADER + WIDTH}", bytes_per_block=WIDTH, num_slots=2)
    with pytest.raises(StoreFullError, match=r'40 bytes hold no slot of 5000 bytes; did you mean "40GiB"\?'):
        open_store("redis://me:secret@host?size=40", bytes_per_block=WIDTH)


def test_a_block_that_its_own_batch_has_dropped_counts_towards_no_quota(server: Server, client: "redis.Redis"):
    """Block 3 takes the place of block 2, which comes again in the same batch."""
    tenant, keys, rows = b"t" * 32, keys_of(4), rows_of(4)
    parents = np.frombuffer(bytes(32) + b"".join(keys[:2]) + bytes(32), np.uint8).reshape(-1, 32)
    tenants = np.frombuffer(4 * tenant, np.uint8).reshape(-1, 32)
    with opened(server) as store:
        assert isinstance(store, RedisStore)

        def stored(*chosen: int) -> list[bool]:
            owners = Owners(tenants[list(chosen)], parents[list(chosen)])
            names = [keys[index] for index in chosen]
            return store.wait(store.submit_put(names, rows[list(chosen)], owners)).ok.tolist()

        store.set_quota(tenant, 3)
        assert stored(0, 1, 2) == [True] * 3
        assert stored(3, 2) == [True, False]
        assert store.wait(store.submit_get(keys)).ok.tolist() == [True, True, False, True]
        assert store.quota(tenant) == (3, 3)
        assert client.hlen(store._prefix + b"owners") == 3
