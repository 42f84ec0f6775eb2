"""The Redis store over a cluster of three Valkey nodes: both suites, keys that move, nodes that are lost."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import bench_valkey_cluster
import numpy as np
import pytest
import redis
from numpy.typing import NDArray
from servers import Server, serving_cluster, serving_replica, wait_for_cluster

from blockyard.errors import StoreError, StoreURLError
from blockyard.events import export_keys
from blockyard.stores import ExternalStore, open_store
from blockyard.stores.redis import RedisStore
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
    wait_for_cluster(nodes)
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
    num_slots = 16 * 64  # so that a segment does not evict what a test stores

    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(self.url, use="prefix", **options)


def opened(url: str, options: str = "") -> ExternalStore:
    return open_store(f"{url}{options}", bytes_per_block=WIDTH, num_slots=4096, use="prefix")


def names_on(node: Server) -> list[bytes]:
    """Return the names of the blocks on a node."""
    with redis.Redis(port=node.port) as client:
        return [name for name in list(client.keys("blockyard:{*")) if len(name.partition(b"}:")[2]) == 32]


def test_blocks_are_spread_over_the_nodes(nodes: list[Server], url: str):
    with opened(url.replace("redis", "valkey", 1)) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
    with opened(url) as store:
        assert np.array_equal(store.wait(store.submit_get(KEYS)).rows, ROWS)
        assert all(len(names_on(node)) > 4 for node in nodes)
        assert store.wait(store.submit_delete(KEYS)).ok.all()
    assert sum(len(names_on(node)) for node in nodes) == 0


def test_blocks_are_found_where_their_slots_have_moved(nodes: list[Server], url: str):
    """Slots of the last node move to the first one while a store is open, which reads on the way and afterwards."""
    with opened(url) as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        clients = [redis.Redis(port=node.port) for node in nodes]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        source, target = clients[2], clients[0]
        moved = []
        while names := list(source.keys()):  # the store's own thread may add some
            for name in names:
                slot = source.execute_command("CLUSTER", "KEYSLOT", name)
                target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[2])
                source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[0])
                source.migrate("127.0.0.1", nodes[0].port, name, 0, 5000)
                moved.append(slot)
        assert len(moved) > 4
        read = store.wait(store.submit_get(KEYS))
        assert np.array_equal(read.rows, ROWS), read.reasons
        for slot in moved:
            for client in (target, source, clients[1]):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[0])
        read = store.wait(store.submit_get(KEYS))
        assert np.array_equal(read.rows, ROWS), read.reasons
        for slot in moved:
            for client in clients:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[0])
        for client in clients:
            client.close()


@pytest.mark.parametrize("first", ["list", "block"])
def test_a_deletion_while_a_slot_moves_leaves_no_unlisted_block(nodes: list[Server], url: str, first: str):
    """The list of a segment and a block of it are on different nodes when the block is deleted."""
    with opened(url) as store, ExitStack() as stack:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        clients = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        block = store._full_name(
            store._keyed_blocks.names_of([bytes(KEYS[0])], store._keyed_blocks.epochs.confirm().token)[0].tobytes()
        )
        order, slot = block[:-32] + b"order", clients[0].execute_command("CLUSTER", "KEYSLOT", block)
        source = node_of(nodes, block)
        target = (source + 1) % len(nodes)
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        names = [order if first == "list" else block]
        while names:
            for name in names:
                clients[source].migrate("127.0.0.1", nodes[target].port, name, 0, 5000)
            if len(names) == 1:
                assert not store.wait(store.submit_delete(KEYS[:1])).ok.any()
            names = clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        for client in (clients[target], clients[source], *clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        assert clients[target].exists(block)
        assert clients[target].zscore(order, block[-32:]) is not None
        assert store.wait(store.submit_delete(KEYS[:1])).ok.all()
        assert not clients[target].exists(block)


def node_of(nodes: list[Server], name: bytes) -> int:
    """Return the number of the node that has a name's slot."""
    with redis.Redis(port=nodes[0].port) as client:
        slot = client.execute_command("CLUSTER", "KEYSLOT", name)
        ranges = client.execute_command("CLUSTER", "SLOTS")
    port = next(found[2][1] for found in ranges if found[0] <= slot <= found[1])
    return [node.port for node in nodes].index(port)


def record_of(store: ExternalStore) -> bytes:
    """Return the name of the record of the epoch."""
    assert isinstance(store, RedisStore)
    return store._prefix + store._keyed_blocks.record.key


def loaded(store: ExternalStore) -> NDArray[np.bool_]:
    """Load all blocks; none may be wrong. Returns which are hits."""
    read = store.wait(store.submit_get(KEYS))
    assert np.array_equal(read.rows[read.ok], ROWS[read.ok])
    assert set(read.reasons) <= {"", "absent", "error", "unavailable"}, (read.reasons, store.stats())
    return read.ok


def stored(store: ExternalStore) -> NDArray[np.bool_]:
    """Store all blocks. Returns which are."""
    return store.wait(store.submit_put(KEYS, ROWS)).ok


def store_all(store: ExternalStore) -> None:
    """Store all blocks, again if a busy machine takes longer than the deadline."""
    while not stored(store).all():
        time.sleep(0.05)


def forget_at_last(store: ExternalStore) -> None:
    """Call `forget` until a server that was stopped confirms it."""
    until = time.monotonic() + 60
    is_forgotten = False
    while not is_forgotten:
        assert time.monotonic() < until
        with suppress(StoreError):
            store.forget()
            is_forgotten = True


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_blocks_on_the_other_nodes_hit_while_a_node_is_lost(nodes: list[Server], url: str, how: str):
    deadline = 3.0
    with opened(url, f"?timeout_base={deadline}") as store:
        store_all(store)
        epoch = node_of(nodes, record_of(store))
        lost = (epoch + 1) % 3
        assert loaded(store).all()
        there = len(names_on(nodes[lost]))
        with getattr(nodes[lost], how)():
            hits = loaded(store)
            assert hits.sum() == len(KEYS) - there
            for _ in range(5):
                assert np.array_equal(loaded(store), hits)
            time.sleep(1.1)  # the epoch is due
            assert np.array_equal(loaded(store), hits)
            assert np.array_equal(stored(store), hits)
            assert np.array_equal(loaded(store), hits)
            assert store.stats().last_error.count(str(nodes[lost].port)) == 1, store.stats()
        until = time.monotonic() + 60
        while not loaded(store).all():
            assert time.monotonic() < until
            assert stored(store) is not None
            time.sleep(0.05)
    listed = 0
    for node in nodes:
        with redis.Redis(port=node.port) as client:
            listed += sum(client.zcard(name) for name in client.keys("*:order"))
    assert listed == sum(len(names_on(node)) for node in nodes) == len(KEYS)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_nothing_is_found_while_the_node_is_lost_that_knows_of_forget(nodes: list[Server], url: str, how: str):
    with opened(url, "?timeout_base=1") as store:
        store_all(store)
        assert loaded(store).all()
        with getattr(nodes[node_of(nodes, record_of(store))], how)():
            for _ in range(3):
                assert not store.wait(store.submit_get(KEYS)).ok.any()
        until = time.monotonic() + 60
        while not (stored(store).all() and loaded(store).all()):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_replica_takes_the_place_of_a_lost_node(tmp_path: Path):
    with (
        serving_cluster(tmp_path) as nodes,
        serving_replica(tmp_path / "replica", nodes[2]) as replica,
        opened(f"redis+cluster://127.0.0.1:{nodes[0].port}", "?timeout_base=1") as store,
    ):
        store_all(store)
        with redis.Redis(port=nodes[2].port) as client:
            assert client.wait(1, 5000) == 1
        with nodes[2].stopped():
            assert not loaded(store).all()
            until = time.monotonic() + 60
            while not loaded(store).all():
                assert time.monotonic() < until
                time.sleep(0.1)
            assert len(names_on(replica)) > 4
            assert stored(store).all()


def test_a_confirmed_forget_outlives_its_primary(tmp_path: Path):
    with serving_cluster(tmp_path) as nodes, ExitStack() as stack:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        one, two = (stack.enter_context(opened(url)) for _ in range(2))
        assert stored(one).all()
        assert loaded(two).all()
        primary = nodes[node_of(nodes, record_of(one))]
        replica = stack.enter_context(serving_replica(tmp_path / "replica", primary))
        with replica.stopped(), pytest.raises(StoreError, match="a replica has not confirmed"):
            one.forget()
        forget_at_last(one)
        until = time.monotonic() + 300
        with primary.stopped(), redis.Redis(port=replica.port) as client:
            while client.info("replication")["role"] != "master" or b"cluster_state:ok" not in client.execute_command(
                "CLUSTER", "INFO"
            ):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert not two.wait(two.submit_get(KEYS)).ok.any()
            while not stored(one).all():
                assert time.monotonic() < until
                time.sleep(0.05)
        for _ in range(20):  # the former primary answers again
            assert not two.wait(two.submit_get(KEYS)).ok.any()


def test_a_primary_without_a_majority_does_not_tell_the_epoch(nodes: list[Server], url: str):
    with opened(url, "?timeout_base=1") as store, ExitStack() as stack:
        store_all(store)
        record = record_of(store)
        number = node_of(nodes, record)
        client = stack.enter_context(redis.Redis(port=nodes[number].port))
        client.config_set("cluster-allow-reads-when-down", "yes")
        stack.callback(client.config_set, "cluster-allow-reads-when-down", "no")
        with nodes[number - 1].stopped(), nodes[number - 2].stopped():
            until = time.monotonic() + 300
            while b"cluster_state:fail" not in client.execute_command("CLUSTER", "INFO"):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert client.get(record)
            assert not store.wait(store.submit_get(KEYS)).ok.any()
        while not (stored(store).all() and loaded(store).all()):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_block_that_is_stored_again_while_its_slot_moves_is_no_failure(nodes: list[Server], url: str):
    with opened(url) as store, ExitStack() as stack:
        store_all(store)
        while store._is_sweeping:
            time.sleep(0.01)
        clients = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        block = store._full_name(
            store._keyed_blocks.names_of([bytes(KEYS[0])], store._keyed_blocks.epochs.confirm().token)[0].tobytes()
        )
        source, slot = node_of(nodes, block), clients[0].execute_command("CLUSTER", "KEYSLOT", block)
        target = (source + 1) % len(nodes)
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        assert store.wait(store.submit_put(KEYS[:1], ROWS[:1])).ok.all()
        assert not store.stats().last_error
        for node in (target, source):
            clients[node].execute_command("CLUSTER", "SETSLOT", slot, "STABLE")


def test_a_deleted_block_of_a_lost_node_is_reported(nodes: list[Server], url: str):
    with opened(url, "?timeout_base=1") as store:
        store_all(store)
        with nodes[2].stopped():
            assert not store.wait(store.submit_delete(KEYS)).ok.any()
            assert not store.wait(store.submit_get(KEYS)).ok.any()


def test_a_cluster_that_stops_costs_its_deadlines_and_comes_back(nodes: list[Server], url: str):
    with opened(url, "?timeout_base=0.5") as store, ExitStack() as stack:
        store_all(store)
        for node in nodes:
            stack.enter_context(node.stopped())
        for _ in range(3):
            assert not store.wait(store.submit_get(KEYS)).ok.any()
        assert set(store.wait(store.submit_get(KEYS)).reasons) <= {"unavailable", "absent"}, "no more deadlines"
        stack.close()
        until = time.monotonic() + 60
        while not store.wait(store.submit_get(KEYS)).ok.all():
            assert time.monotonic() < until
            assert store.wait(store.submit_put(KEYS, ROWS))
            time.sleep(0.05)
        assert loaded(store).all()


def test_forget_fails_while_the_node_of_its_row_is_lost(nodes: list[Server], url: str):
    with opened(url, "?timeout_base=1") as store:
        store_all(store)
        epoch = node_of(nodes, record_of(store))
        with nodes[epoch].stopped():
            with pytest.raises(StoreError, match="not confirmed"):
                store.forget()
            assert not store.wait(store.submit_get(KEYS)).ok.any()
        forget_at_last(store)
        assert not loaded(store).any()
        store_all(store)
        while not loaded(store).all():  # keys whose reads failed are left alone for two seconds
            time.sleep(0.05)


def test_a_process_that_never_knew_the_epoch_finds_nothing_while_it_is_lost(nodes: list[Server], url: str):
    with opened(url, "?timeout_base=1") as store:
        store_all(store)
        epoch = node_of(nodes, record_of(store))
        seed = f"redis+cluster://127.0.0.1:{nodes[(epoch + 1) % 3].port}"
        with nodes[epoch].stopped(), opened(seed, "?timeout_base=1") as other:
            for _ in range(3):
                assert not stored(other).any()
                assert not other.wait(other.submit_get(KEYS)).ok.any()
        until = time.monotonic() + 60
        while not loaded(store).all():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_server_that_is_not_a_cluster_is_refused(nodes: list[Server], tmp_path: Path):
    with pytest.raises(StoreError):
        opened("redis+cluster://127.0.0.1:1")
    with pytest.raises(StoreURLError, match="db=1"):
        opened("redis+cluster://127.0.0.1:1", "?db=1")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_processes_find_no_wrong_block_while_a_replica_takes_the_place_of_a_primary(
    tmp_path: Path, how: Literal["killed", "stopped"]
):
    found = bench_valkey_cluster.run(tmp_path, processes=2, seconds=15.0, lost="record", how=how)
    load = found.load
    assert load.wrong == 0
    assert load.hits > bench_valkey_cluster.KEYS
    assert found.failover > 0
