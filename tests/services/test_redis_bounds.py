"""The bounds of a Redis store hold whoever stores, and again after the server has lost what keeps them."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kept_prefixes
import numpy as np
import pytest
import redis
from numpy.typing import NDArray
from servers import Server, serving, serving_cluster

from blockyard._core import RedisClient
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError
from blockyard.stores import ExternalStore, Owners, open_store
from blockyard.stores.redis import RedisStore, read_url
from blockyard.stores.redis.lists import SEGMENTS

WIDTH = 500
TENANT = hashlib.sha256(b"a tenant").digest()
NOBODY = bytes(32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("valkey-server", tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator["redis.Redis"]:
    with redis.Redis(port=server.port) as found:
        found.flushall()
        yield found


def opened(server: Server, num_slots: int = 100) -> ExternalStore:
    options: Any = {"bytes_per_block": WIDTH, "num_slots": num_slots, "use": "prefix"}
    return open_store(f"redis://127.0.0.1:{server.port}", **options)


def chain(seed: int, count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (seed, index)).digest() for index in range(count)]


def array(keys: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def put(store: ExternalStore, keys: list[bytes], parent: bytes = NOBODY, tenant: bytes = TENANT) -> list[bool]:
    """Store blocks that follow each other. Returns which were kept."""
    owners = Owners(array([tenant] * len(keys)), array([parent, *keys[:-1]]))
    found: list[bool] = store.wait(store.submit_put(keys, np.ones((len(keys), WIDTH), np.uint8), owners)).ok.tolist()
    return found


def hits(store: ExternalStore, keys: list[bytes]) -> int:
    """Return how many blocks of a prompt's beginning are there."""
    ok = [*store.wait(store.submit_get(keys)).ok.tolist(), False]
    return ok.index(False)


def values(client: "redis.Redis") -> list[bytes]:
    return [name for name in client.scan_iter() if client.type(name) == b"string" and client.strlen(name) > WIDTH]


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_prompt_longer_than_its_quota_keeps_its_beginning(server: Server, client: "redis.Redis"):
    keys = chain(0, 18)
    with opened(server) as first, opened(server) as second:
        assert first.keeps_quotas
        first.set_quota(TENANT, 9)
        for store in (first, second, first, second):
            put(store, keys[hits(store, keys) :], keys[hits(store, keys) - 1] if hits(store, keys) else NOBODY)
            assert hits(store, keys) == 9
            assert second.quota(TENANT) == first.quota(TENANT) == (9, 9)
        assert len(values(client)) == 9


def test_older_prompts_of_the_tenant_make_room_for_newer_ones(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        store.set_quota(TENANT, 10)
        for seed in range(5):
            assert all(put(store, chain(seed, 4)))
        assert [hits(store, chain(seed, 4)) for seed in range(5)] == [0, 0, 2, 4, 4]
        assert all(put(store, chain(9, 60), tenant=NOBODY)), "others have no quota"
        assert store.quota(NOBODY) is None


@pytest.mark.parametrize("again", ["without_a_quota", "without_owners"])
def test_a_tenants_block_that_is_stored_again_is_used(server: Server, client: "redis.Redis", again: str):
    with opened(server) as store:
        store.set_quota(TENANT, 3)
        for seed in range(3):
            assert put(store, chain(seed, 1)) == [True]
        if again == "without_a_quota":
            store.set_quota(TENANT, None)
            assert put(store, chain(0, 1)) == [True]
        else:
            assert store.wait(store.submit_put(chain(0, 1), np.ones((1, WIDTH), np.uint8))).ok.all()
        store.set_quota(TENANT, 2)
        assert [hits(store, chain(seed, 1)) for seed in range(3)] == [1, 0, 1]


def test_a_lost_list_does_not_make_a_tenants_older_blocks_the_newest(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        store.set_quota(TENANT, 2)
        for seed in range(4):
            assert put(store, chain(seed, 1)) == [True]
        client.delete(*client.keys("*:order"))
        assert hits(store, chain(3, 1)) == 1
        assert put(store, chain(4, 1)) == [True]
        assert [hits(store, chain(seed, 1)) for seed in range(5)] == [0, 0, 0, 1, 1]


def test_tenants_that_name_each_others_blocks_lose_only_their_own(server: Server, client: "redis.Redis"):
    """Keys depend on the salt, so engines never do that."""
    other, (first,), (child,) = hashlib.sha256(b"another").digest(), chain(0, 1), chain(1, 1)
    with opened(server) as store:
        store.set_quota(TENANT, 1)
        store.set_quota(other, 1)
        assert put(store, [child], parent=first, tenant=other) == [True]
        assert put(store, [first]) == [True]
        assert put(store, [first], tenant=other) == [True]
        assert store.quota(TENANT) == store.quota(other) == (1, 1)
        assert put(store, chain(2, 1), tenant=other) == [True]
        assert put(store, chain(3, 1), tenant=other) == [True]
        assert hits(store, [first]) == 1
        assert put(store, chain(4, 1)) == [True], "the first block has no child of the same tenant"
        assert [hits(store, keys) for keys in ([first], [child], chain(3, 1))] == [0, 0, 1]


def test_a_lower_quota_holds_at_once_and_none_ends_it(server: Server, client: "redis.Redis"):
    with opened(server, 3000) as store:
        store.set_quota(TENANT, 2600)
        for start in range(0, 2600, 200):
            assert all(put(store, chain(start, 200)))
        store.set_quota(TENANT, 3)
        assert store.quota(TENANT) == (3, 3)
        assert len(values(client)) == 3
        store.set_quota(TENANT, 0)
        assert not any(put(store, chain(1, 3)))
        store.set_quota(TENANT, None)
        assert store.quota(TENANT) is None
        assert all(put(store, chain(1, 3)))


def test_quotas_that_the_server_has_lost_are_set_again(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        store.set_quota(TENANT, 2)
        client.delete(*client.keys("*:quotas"))
        put(store, chain(0, 1))
        eventually(lambda: store.quota(TENANT) is not None)
        assert put(store, chain(1, 4)) == [True, True, False, False]


def test_a_process_that_has_removed_its_quotas_leaves_a_loss_to_others(server: Server, client: "redis.Redis"):
    with opened(server) as first, opened(server) as second:
        first.set_quota(TENANT, None)
        second.set_quota(TENANT, 2)
        put(first, chain(0, 1))
        eventually(lambda: swept(first, client))
        client.delete(*client.keys("*:quotas"))
        put(first, chain(1, 1))
        assert not first._is_sweeping  # type: ignore[attr-defined]
        put(second, chain(2, 1))
        eventually(lambda: first.quota(TENANT) is not None)


def test_the_last_quota_wins_whichever_process_set_it(server: Server, client: "redis.Redis"):
    """Each store looks for blocks without an entry, and must not set its own quota again on that occasion."""
    with opened(server) as first, opened(server) as second:
        for _ in range(20):
            first.set_quota(TENANT, 0)
            assert not any(put(first, chain(0, 3)))  # the list is empty again, so the next put starts a sweep
            second.set_quota(TENANT, None)
            assert all(put(first, chain(0, 3)))
            time.sleep(0.01)
            assert second.quota(TENANT) is None
            client.delete(*client.keys("*:order"))


def test_blocks_whose_list_the_server_has_lost_count_again(server: Server, client: "redis.Redis"):
    with opened(server, 20) as store:
        assert all(put(store, chain(0, 20)))
        client.delete(*client.keys("*:order"))
        assert all(put(store, chain(1, 8)))
        eventually(lambda: client.keys("*:listed") and not client.keys("*:sweeper"))
        assert len(values(client)) == client.zcard(client.keys("*:order")[0]) == 20
        assert hits(store, chain(1, 8)) == 8, "newer blocks stay"


def swept(store: ExternalStore, client: "redis.Redis") -> bool:
    return bool(client.keys("*:listed")) and not store._is_sweeping  # type: ignore[attr-defined]


def test_a_sweep_whose_list_the_server_evicts_runs_again(server: Server, client: "redis.Redis"):
    """The sweeper does not notice the loss, and must not report that every block is listed."""
    with opened(server) as store, opened(server) as other:
        assert all(put(store, chain(0, 20)))
        eventually(lambda: swept(store, client))
        client.delete(*client.keys("*:order"))
        adopts = list[int]()

        def run(commands: list[list[bytes]]) -> Any:
            answer = real.run(commands)
            if any(store._lists[0]._scripts.adopt in command for command in commands):
                adopts.append(len(adopts))
                if len(adopts) == 1:
                    client.delete(*client.keys("*:order"))
                    put(other, chain(2, 1))
            return answer

        assert isinstance(store, RedisStore)
        real = store._client
        store._client = SimpleNamespace(put=real.put, get=real.get, run=run, close=real.close)
        assert all(put(store, chain(1, 4)))
        eventually(lambda: put(store, chain(1, 4)) and swept(store, client))
        assert client.zcard(client.keys("*:order")[0]) == len(values(client)) == 25


def test_a_replica_does_not_go_on_with_a_sweep(server: Server, client: "redis.Redis", tmp_path: Path):
    """It misses a step of the sweep, and a deletion of a block that no list has."""
    with (
        serving("valkey-server", tmp_path) as second,
        redis.Redis(port=second.port) as replica,
        opened(server) as store,
    ):
        assert isinstance(store, RedisStore)
        assert all(put(store, chain(0, 20)))
        eventually(lambda: swept(store, client))
        client.delete(*client.keys("*:order"))
        client.config_set("repl-diskless-sync-delay", 0)
        replica.replicaof("127.0.0.1", str(server.port))
        eventually(lambda: replica.info("replication")["master_link_status"] == "up")
        old = store._client
        new = RedisClient(**read_url(f"redis://127.0.0.1:{second.port}?size=1GiB").client)
        lost = values(client)[0][-32:]

        def run(commands: list[list[bytes]]) -> Any:
            if store._client is not before or not any(store._lists[0]._scripts.scan in command for command in commands):
                return new.run(commands) if store._client is after else old.run(commands)
            client.set("last", 1)
            assert client.wait(1, 5000) == 1
            replica.replicaof("NO", "ONE")
            old.run([store._lists[0].drop([lost])])
            answer = old.run(commands)
            store._client = after
            return answer

        before = SimpleNamespace(put=old.put, get=old.get, run=run, close=old.close)
        after = SimpleNamespace(put=new.put, get=new.get, run=new.run, close=new.close)
        store._client = before
        assert all(put(store, chain(1, 4)))
        eventually(lambda: store._client is after and not store._is_sweeping)
        assert not replica.keys("*:listed")
        eventually(lambda: put(store, chain(1, 4)) and swept(store, replica))
        assert replica.zcard(replica.keys("*:order")[0]) == len(values(replica)) == 24


def test_no_batch_is_half_stored(server: Server, client: "redis.Redis"):
    """A server that is full refuses a batch as a whole: no value without an entry, no entry without a value."""
    with opened(server, 1000) as store:
        assert all(put(store, chain(0, 4)))
        client.config_set("maxmemory", 1)
        try:
            assert not any(put(store, chain(1, 4)))
            assert "maxmemory" in store.stats().last_error
        finally:
            client.config_set("maxmemory", 0)
        assert len(values(client)) == client.zcard(client.keys("*:order")[0]) == 4


def test_invalid_quotas_are_refused(server: Server, client: "redis.Redis", tmp_path: Path):
    with opened(server) as store:
        for tenant, blocks in ((b"short", 1), ("text", 1), (TENANT, -1), (TENANT, 1 << 32), (TENANT, "3")):
            with pytest.raises(InvalidArgumentError, match=r"tenant|num_blocks"):
                store.set_quota(tenant, blocks)  # type: ignore[arg-type]
        for owners in (Owners(array([TENANT]), array([])), Owners(array([TENANT]), array([TENANT]).astype(int))):  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match=r"owners\.parents"):
                store.submit_put([NOBODY], np.ones((1, WIDTH), np.uint8), owners)
    with pytest.raises(StoreError, match="closed"):
        store.set_quota(TENANT, 1)
    options: Any = {"bytes_per_block": WIDTH, "num_slots": 8, "use": "prefix"}
    for url in (f"local://{tmp_path}/objects", f"file://{tmp_path}/a,{tmp_path}/b"):
        for part in ("a", "b"):
            (tmp_path / part).mkdir(exist_ok=True)
        with open_store(url, **options) as other, pytest.raises(StoreError, match="cannot keep quotas"):
            other.set_quota(TENANT, 1)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with serving_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def counted(nodes: list[Server]) -> tuple[int, int]:
    """Return how many values the nodes of a cluster have, and how many their lists."""
    stored = listed = 0
    for node in nodes:
        with redis.Redis(port=node.port) as client:
            stored += sum(client.type(name) == b"string" for name in client.keys("*}:*") if len(name) > 59)
            listed += sum(client.zcard(name) for name in client.keys("*:order"))
    return stored, listed


def test_a_cluster_keeps_its_size_and_finds_blocks_whose_lists_are_lost(nodes: list[Server]):
    size = 4 * SEGMENTS
    options: Any = {"bytes_per_block": WIDTH, "use": "prefix"}
    url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
    with pytest.raises(StoreFullError, match=f"needs {SEGMENTS}"):
        open_store(url, num_slots=SEGMENTS - 1, **options)
    with open_store(url, num_slots=size, **options) as store:
        assert not store.keeps_quotas
        with pytest.raises(StoreError, match="cannot keep quotas"):
            store.quota(TENANT)
        for seed in range(8):
            put(store, chain(seed, 200))
            stored, listed = counted(nodes)
            assert stored == listed <= size
        assert listed == size
        for node in nodes:
            with redis.Redis(port=node.port) as client:
                for name in sorted(client.keys("*:order"))[::2]:
                    client.delete(name)
        for seed in range(8, 11):
            put(store, chain(seed, 200))
        eventually(lambda: counted(nodes) == (size, size))


def test_a_quota_can_be_set_though_the_server_has_lost_which_blocks_may_go(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        store.set_quota(TENANT, 8)
        assert put(store, chain(0, 6)) == [True] * 6
        for name in client.scan_iter(match="*:leaves:*"):
            client.delete(name)
        store.set_quota(TENANT, 2)
        assert store.quota(TENANT) == (2, 2)
        assert len(values(client)) == 2
        store.set_quota(TENANT, 8)
        assert put(store, chain(1, 6)) == [True] * 6


def test_a_quota_can_be_filled_though_the_server_has_lost_whose_blocks_are_whose(server: Server, client: "redis.Redis"):
    with opened(server) as store:
        store.set_quota(TENANT, 8)
        assert put(store, chain(0, 8)) == [True] * 8
        client.delete(*client.keys("*:owners"))
        assert put(store, chain(1, 8)) == [True] * 8
        assert store.quota(TENANT) == (8, 8)


@pytest.mark.parametrize("lost", ["parents", "children", "parents children"])
def test_new_blocks_find_room_though_the_server_has_lost_what_follows_what(
    server: Server, client: "redis.Redis", lost: str
):
    with opened(server, 20) as store:
        assert all(put(store, chain(0, 20)))
        client.delete(*(key for name in lost.split() for key in client.keys(f"*:{name}")))
        put(store, chain(1, 4))
        eventually(lambda: swept(store, client))
        assert all(put(store, chain(2, 12)))
        assert len(values(client)) == 20


def test_names_whose_values_are_gone_leave_the_lists_when_they_are_read(server: Server, client: "redis.Redis"):
    """The server drops values itself: by `ttl`, by `maxmemory`, in a failover."""
    keys, rows = chain(1, 8), np.ones((8, WIDTH), np.uint8)
    owners = Owners(
        np.frombuffer(TENANT * 8, np.uint8).reshape(-1, 32),
        np.frombuffer(b"".join([NOBODY, *keys[:-1]]), np.uint8).reshape(-1, 32),
    )
    with opened(server) as store:
        store.set_quota(TENANT, 8)
        assert store.wait(store.submit_put(keys, rows, owners)).ok.all()
        assert store.quota(TENANT) == (8, 8)
        names = [
            store._full_name(name.tobytes())
            for name in store._keyed_blocks.names_of(keys, store._keyed_blocks.confirm().token)
        ]
        client.delete(*names[4:])
        assert [not reason for reason in store.wait(store.submit_get(keys)).reasons] == [True] * 4 + [False] * 4
        assert client.zcard(store._lists[0]._order) == 4
        assert store.quota(TENANT) == (4, 8)
        assert store.wait(store.submit_put(keys, rows, owners)).ok.all()
        assert store.quota(TENANT) == (8, 8)


def test_a_smaller_size_drops_a_bounded_number_of_blocks_with_each_put(server: Server, client: "redis.Redis"):
    many, row = 2500, np.ones((1, WIDTH), np.uint8)
    with opened(server, 3000) as store:
        keys = [number.to_bytes(32, "little") for number in range(1, many + 1)]
        assert store.wait(store.submit_put(keys, np.ones((many, WIDTH), np.uint8))).ok.all()
    with opened(server, 100) as store:
        held = []
        for number in range(4):
            assert store.wait(store.submit_put([bytes(31) + bytes([number + 1])], row)).ok.all()
            held.append(client.zcard(store._lists[0]._order))
    assert held == [many - 1000, many - 2000, 100, 100]


def test_a_smaller_size_than_that_of_others_is_said_when_the_store_is_opened(
    server: Server, client: "redis.Redis", caplog: pytest.LogCaptureFixture
):
    with opened(server, 40) as large:
        put(large, chain(0, 30))
        with opened(server, 30):
            assert not caplog.messages
        with opened(server, 20) as small:
            (said,) = caplog.messages
            assert said.endswith(
                "holds 30 blocks, its size only 20: puts drop the rest for every process of the namespace"
            )
            assert put(small, chain(1, 1)) == [True]
        assert hits(large, chain(0, 30)) == 19


@pytest.mark.parametrize("host", [12, 0])
def test_a_prefix_that_the_server_has_dropped_is_stored_again_when_a_prompt_goes_on_from_it(
    server: Server, client: "redis.Redis", host: int
):
    del client
    url, hot = f"redis://127.0.0.1:{server.port}?size={60 * kept_prefixes.WIDTH}", kept_prefixes.tokens(1, 32)
    with kept_prefixes.checked(url, device=16, host=host) as cache:
        cache.serve([*hot, 5])
        for stream in range(10, 80):
            cache.serve(kept_prefixes.tokens(stream, 9))
            assert cache.serve([*hot, 5]) == len(hot), "the device keeps what is hit"
            assert cache.prefixes.wait(60)
        for token in (6, 7):
            cache.serve([*hot, token, *kept_prefixes.tokens(2, 4)])
            assert cache.prefixes.wait(60)
    with kept_prefixes.checked(url, host=host) as cache:
        assert cache.fetch([*hot, 8]).tokens == len(hot)
