"""The Redis store over a cluster of three Valkey nodes: both suites, keys that move, a node that stops."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from servers import Server, serving_cluster

from blockyard.errors import StoreError, StoreURLError
from blockyard.events import export_keys
from blockyard.stores import ExternalStore, open_store
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite

WIDTH = 5000
ROWS = np.random.default_rng(3).integers(1, 256, (48, WIDTH), dtype=np.uint8)
KEYS = export_keys(list(range(16 * 48)), block_size=16)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with serving_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def url(nodes: list[Server]) -> str:
    for node in nodes:
        with redis.Redis(port=node.port) as client:
            client.flushall()
    return f"redis+cluster://127.0.0.1:{nodes[1].port}"


class TestSwapSpace(StoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def open_store(self) -> ExternalStore:
        return open_store(self.url, bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


class TestPrefixStore(PrefixStoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(self.url, use="prefix", **options)


def opened(url: str, options: str = "") -> ExternalStore:
    return open_store(f"{url}{options}", bytes_per_block=WIDTH, num_slots=64, use="prefix")


def names_on(node: Server) -> list[bytes]:
    with redis.Redis(port=node.port) as client:
        return [name for name in list(client.keys()) if not name.endswith(b":order")]


def test_blocks_are_spread_over_the_nodes(nodes: list[Server], url: str):
    with opened(url) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        assert np.array_equal(store.wait(store.submit_get(KEYS)).rows, ROWS)
        assert all(len(names_on(node)) > 4 for node in nodes)
        assert store.wait(store.submit_delete(KEYS)).ok.all()
    assert sum(len(names_on(node)) for node in nodes) == 1, "only the epoch is left"


def test_blocks_are_found_where_their_slots_have_moved(nodes: list[Server], url: str):
    """Every slot of the last node that has a block moves to the first one while a store is open."""
    with opened(url) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        clients = [redis.Redis(port=node.port) for node in nodes]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        source, target = clients[2], clients[0]
        moved = []
        for name in list(source.keys()):
            slot = source.execute_command("CLUSTER", "KEYSLOT", name)
            target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[2])
            source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[0])
            source.migrate("127.0.0.1", nodes[0].port, name, 0, 5000)
            for client in (target, source, clients[1]):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[0])
            moved.append(slot)
        assert len(moved) > 4
        read = store.wait(store.submit_get(KEYS))
        assert np.array_equal(read.rows, ROWS), read.reasons
        for slot in moved:
            for client in clients:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[0])
        for client in clients:
            client.close()


def test_a_node_that_stops_costs_one_deadline_and_comes_back(nodes: list[Server], url: str):
    with opened(url, "?deadline=0.5") as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        with nodes[0].stopped():
            read = store.wait(store.submit_get(KEYS[:20]))
            assert set(read.reasons) <= {"timeout", "error"}
            for _ in range(20):
                reasons = set(store.wait(store.submit_get(KEYS[20:])).reasons)
                assert reasons == {"unavailable"}
        until = time.monotonic() + 60
        while not store.wait(store.submit_get(KEYS[20:])).ok.all():
            assert time.monotonic() < until
            assert store.wait(store.submit_put(KEYS[20:], ROWS[20:]))
            time.sleep(0.05)
        assert np.array_equal(store.wait(store.submit_get(KEYS[20:])).rows, ROWS[20:])


def test_a_server_that_is_no_cluster_is_refused(nodes: list[Server], tmp_path: Path):
    with pytest.raises(StoreError):
        opened("redis+cluster://127.0.0.1:1")
    with pytest.raises(StoreURLError, match="db=1"):
        opened("redis+cluster://127.0.0.1:1", "?db=1")
