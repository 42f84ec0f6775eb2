"""The Mooncake store over a fake client; `tests/engines/test_mooncake_store.py` has a real cluster."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from fake_mooncake import ABSENT, FAILED, FakeCluster, fake_mooncake
from memory_stores import PATIENCE

from blockyard import KVLayout
from blockyard.errors import StoreError, StoreURLError
from blockyard.stores import ExternalStore, open_store, store_namespace
from blockyard.stores.mooncake import Client, MooncakeStore, client, read_url
from blockyard.stores.mooncake import store as stores
from blockyard.stores.threaded import known_keys
from blockyard.stores.value import HEADER
from blockyard.testing.store_suite import RECORD_BYTES, PrefixStoreSuite, StoreSuite
from blockyard.tools.store import Selection, masters, open_contents, survey

WIDTH = 5000
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
ROWS = np.random.default_rng(0).integers(0, 256, (len(KEYS), WIDTH), np.uint8)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCluster, str]]:
    with fake_mooncake(monkeypatch) as found:
        yield found


def opened(address: str, options: str = "", **more: Any) -> Any:
    url = f"mooncake://{address}?size=1MiB{options}"
    return open_store(url, **{"bytes_per_block": WIDTH, "use": "prefix", **more})


class TestSwapSpace(StoreSuite):
    @pytest.fixture(autouse=True)
    def _address(self, fake: tuple[FakeCluster, str]) -> None:
        self.address = fake[1]

    def open_store(self) -> ExternalStore:
        return open_store(f"mooncake://{self.address}", bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


class TestPrefixStore(PrefixStoreSuite):
    evicts = False

    @pytest.fixture(autouse=True)
    def _address(self, fake: tuple[FakeCluster, str]) -> None:
        self.address = fake[1]

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(f"mooncake://{self.address}", use="prefix", **options)


def test_a_batch_of_many_calls_comes_back_whole(fake: tuple[FakeCluster, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stores, "_KEYS", 3)
    with opened(fake[1]) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        read = store.wait(store.submit_get([*KEYS, KEYS[0], bytes(32)]))
        assert read.reasons == (*[""] * 9, "absent")
        assert np.array_equal(read.rows[:9], ROWS[[*range(8), 0]])


def test_slots_are_gone_after_closing_and_the_client_is_closed(fake: tuple[FakeCluster, str]):
    cluster, address = fake
    with opened(address, use="swap") as store:
        assert store.wait(store.submit_write(np.arange(3), ROWS[:3])).ok.all()
        assert len(cluster.values) == 3
    assert (cluster.values, cluster.closed) == ({}, 1)
    with pytest.raises(StoreError, match="the client is closed"):
        store.delete(np.zeros((1, 32), np.uint8))


def test_at_most_threads_calls_hang_and_then_all_are_misses_at_once(fake: tuple[FakeCluster, str]):
    cluster, address = fake
    is_over, hanging = threading.Event(), threading.Semaphore(0)
    count = [0]

    def before(name: str, keys: list[str]) -> None:
        if name == "get" and not any("epoch" in key for key in keys):
            count[0] += 1
            hanging.release()
            is_over.wait(PATIENCE)

    with opened(address) as first:
        assert first.wait(first.submit_put(KEYS, ROWS)).ok.all()
    store = opened(address, "&timeout_base=0.05")
    cluster.before = before
    try:
        number = 0
        while count[0] < 4:  # each time that a probe is answered, one more call can hang
            number += 1
            store.wait(store.submit_get([number.to_bytes(32, "little")]))
        for key in KEYS:
            while (reason := store.wait(store.submit_get([key])).reasons[0]) == "timeout":  # the last one to hang
                pass
            assert reason == "unavailable"
        assert count == [4]
        assert store.close(0.01) is False
        assert cluster.closed == 1, "closing it during a call would crash"
    finally:
        is_over.set()


def test_a_late_write_of_the_client_changes_no_block(fake: tuple[FakeCluster, str]):
    """Its timeouts may leave a transfer behind that still writes."""
    cluster, address = fake
    with opened(address) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        out = np.zeros_like(ROWS)
        read = store.wait(store.submit_get(KEYS, out))
        cluster.write_late()
        assert read.ok.all()
        assert np.array_equal(out, ROWS)
        assert np.array_equal(store.wait(store.submit_get(KEYS)).rows, ROWS)


def test_a_block_that_another_process_is_writing_is_not_stored_yet(fake: tuple[FakeCluster, str]):
    cluster, address = fake
    with opened(address) as store:
        names = store._paths(store._keyed_blocks.names_of(KEYS, store._keyed_blocks.confirm().token))
        cluster.being_written.add(names[1])
        assert store.wait(store.submit_put(KEYS[:3], ROWS[:3])).reasons == ("", "refused", "")
        assert store.wait(store.submit_put(KEYS[1:2], ROWS[1:2])).reasons == ("refused",)
        assert store.stats().errors == 0
        cluster.being_written.clear()
        assert store.wait(store.submit_put(KEYS[:3], ROWS[:3])).ok.all()


def test_codes_of_the_client_are_reasons(fake: tuple[FakeCluster, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known_keys, "FAILED_SECONDS", 0.0)
    codes: dict[str, int] = {}
    read = Client.read

    def changed(self: Any, paths: list[str], width: int) -> list[Any]:
        return [codes.get(path, value) for path, value in zip(paths, read(self, paths, width), strict=True)]

    with opened(fake[1]) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        paths = store._paths(store._keyed_blocks.names_of(KEYS, store._keyed_blocks.confirm().token))
        monkeypatch.setattr(Client, "read", changed)
        codes |= {paths[0]: FAILED, paths[1]: ABSENT, paths[2]: -703}
        assert store.wait(store.submit_get(KEYS[:4])).reasons == ("error", "absent", "absent", "")
        assert "get: the transfer failed (-800)" in store.stats().last_error
        codes |= dict.fromkeys(paths, -12345)
        assert set(store.wait(store.submit_get(KEYS)).reasons) == {"error"}
        assert "error -12345 of Mooncake's client" in store.stats().last_error


def record(number: int) -> Any:
    return np.full(RECORD_BYTES, number, np.uint8)


KEY = np.frombuffer(KEYS[0], np.uint8)


def test_of_two_processes_that_replace_the_record_one_succeeds(fake: tuple[FakeCluster, str]):
    cluster, address = fake
    with opened(address) as one, opened(address) as two:
        one.replace_epoch(KEY, None, record(1))
        found: list[Any] = []

        def before(name: str, keys: list[str]) -> None:
            if name == "put" and not found:
                found.append(None)
                found[0] = two.replace_epoch(KEY, record(1), record(3))

        cluster.before = before
        assert one.replace_epoch(KEY, record(1), record(2)).tolist() == found[0].tolist() == record(3).tolist()
        assert one.read_epoch(KEY).tolist() == two.read_epoch(KEY).tolist() == record(3).tolist()


def test_a_record_that_another_process_is_writing_is_read_again(
    fake: tuple[FakeCluster, str], monkeypatch: pytest.MonkeyPatch
):
    waits: list[float] = []
    with opened(fake[1]) as store:
        store.replace_epoch(KEY, None, record(1))
        reads, read = iter([[-703, ABSENT], [ABSENT, -703], [FAILED, ABSENT]]), Client.read
        monkeypatch.setattr(store._runtime, "sleep", waits.append)
        monkeypatch.setattr(Client, "read", lambda *arguments: next(reads, None) or read(*arguments))
        with pytest.raises(StoreError, match=r"read the epoch: the transfer failed \(-800\)"):
            store.read_epoch(KEY)
        assert waits == [stores._BUSY_SECONDS] * 2
        assert store.read_epoch(KEY).tolist() == record(1).tolist()


def test_a_process_that_is_late_to_replace_the_record_undoes_nothing(fake: tuple[FakeCluster, str]):
    cluster, address = fake
    with opened(address) as one, opened(address) as two:
        for number in range(1, 5):
            one.replace_epoch(KEY, record(number - 1) if number > 1 else None, record(number))
        cluster.values[one._record_path(KEY)] = record(2).tobytes()  # by a process that began before the others
        for store in (two, one):
            assert store.read_epoch(KEY).tolist() == record(4).tolist()
        del cluster.values[one._record_path(KEY)]
        assert one.read_epoch(KEY) is None
        cluster.values[one._record_path(KEY)] = bytes(9000)
        assert len(one.read_epoch(KEY)) == 0, "a record of another length is damaged, not absent"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncake://", "must name the master"),
        ("mooncake://host/path", "is not part of the URL"),
        ("mooncake://host:99999", "has an invalid port"),
        ("mooncake://user:secret@host", "Mooncake has none"),
        ("mooncake://host?protocol=udp", "must be tcp or rdma"),
        ("mooncake://host?device=mlx5_0", "has no effect without protocol=rdma"),
        ("mooncake://host?threads=1", "must be 2 to 64"),
    ],
)
def test_a_wrong_url_names_its_part_and_no_secret(url: str, why: str):
    with pytest.raises(StoreURLError, match=why) as caught:
        read_url(url)
    assert "secret" not in str(caught.value)


def test_a_url_has_defaults():
    found = read_url("mooncake://host?protocol=rdma&device=mlx5_0&metadata=http://u:p%40meta:8080/metadata")
    assert (found.host, found.port, found.admin, found.device) == ("host", 50051, 9003, "mlx5_0")
    assert found.metadata == "http://u:p@meta:8080/metadata"
    assert "u:p" not in repr(found)


def test_a_client_that_cannot_be_set_up_is_no_store(fake: tuple[FakeCluster, str], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StoreError, match="Connection refused"):
        open_store("mooncake://127.0.0.1:1?size=1MiB", bytes_per_block=WIDTH)
    monkeypatch.undo()
    with fake_mooncake(monkeypatch) as (_, address):
        monkeypatch.setattr(client, "_SETUP", "import sys; sys.exit('Failed to connect to master')")
        monkeypatch.setattr(client, "_rehearse", REHEARSE)
        with pytest.raises(StoreError, match="cannot be set up: Failed to connect to master"):
            opened(address)
        monkeypatch.setattr(client, "_SETUP", "import time; time.sleep(600)")
        monkeypatch.setattr(client, "_SETUP_SECONDS", 0.01)
        with pytest.raises(StoreError, match="found no master in"):
            opened(address)
        monkeypatch.setattr(sys.modules["mooncake.store"].MooncakeDistributedStore, "setup", lambda *_: -900)
        monkeypatch.setattr(client, "_rehearse", lambda parts, setup: None)
        with pytest.raises(StoreError, match=r"the master does not answer \(-900\)"):
            opened(address)


REHEARSE = client._rehearse


def test_a_store_is_for_the_use_it_was_opened_for(fake: tuple[FakeCluster, str]):
    with opened(fake[1]) as store:
        assert isinstance(store, MooncakeStore)
        with pytest.raises(StoreError, match="no slots"):
            store.submit_read(np.zeros(1, np.int64))


class Admin(BaseHTTPRequestHandler):
    """The master's HTTP server, as far as `blockyard store` asks it."""

    cluster: FakeCluster

    def do_GET(self) -> None:
        values, (path, _, query) = self.cluster.values, self.path.partition("?keys=")
        answer = "\n".join([*values, "other/key", ""])
        if path == "/batch_query_keys":
            sizes = {key: [{"size_": len(values[key])}] if key in values else None for key in query.split(",")}
            answer = json.dumps({"data": {key: {"values": found} for key, found in sizes.items()}})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


def test_a_cluster_is_listed_by_namespace_and_cleared_but_for_the_record(
    fake: tuple[FakeCluster, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(masters, "_AT_ONCE", 3)
    cluster, address = fake
    layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=16, dtype="float16")
    namespace = store_namespace(model="tiny", revision="1", layout=layout)
    handler = type("Handler", (Admin,), {"cluster": cluster})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, opened(address, namespace=namespace) as store:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"mooncake://{address}?admin={server.server_port}"
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        found = survey(open_contents(url), Selection(("model=tiny",)), keep_places=True)
        assert (found.blocks, found.bytes) == (len(KEYS), len(KEYS) * (WIDTH + HEADER))
        assert survey(open_contents(url), Selection(("model=big",))).blocks == 0
        assert survey(open_contents(url), Selection(older_than=1.0)).blocks == 0, "ages are unknown"
        assert open_contents(url).remove([*found.places, "blockyard/gone"]) == len(KEYS)
        assert survey(open_contents(url), Selection()).blocks == 0
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        assert store.wait(store.submit_get(KEYS)).ok.all()
        server.shutdown()
    with pytest.raises(StoreError, match=r"port 1, which lists the blocks: .*; name another port by \?admin="):
        survey(open_contents(f"mooncake://{address}?admin=1"), Selection())
