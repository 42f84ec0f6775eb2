"""Processes that share a store, killed and started again: what they find, what is deleted, bounds and quotas.

The rules are those of `fleet.py`, the faults that show that it can fail those of `planted_faults.py`.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis
from bounds_watch import BoundsWatch
from fleet import Fleet, Report, opened
from servers import ObjectServer, Server, serving, serving_cluster, serving_objects
from shared_blocks import TENANTS

from blockyard.stores import ExternalStore
from blockyard.stores.redis import RedisStore

SECRET = "s3cr3t/of+the-test"
SLOTS, CLUSTER_SLOTS = 600, 1024
# Orders of magnitude of a run: operations of each process, and kills.
QUICK, LONG = (250, 6), (10_000, 100)
LENGTHS = [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("valkey-server", tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    (tmp_path / "objects").mkdir()
    with serving_objects(tmp_path / "objects", SECRET) as found:
        yield found


def fleet_in(folder: Path, url: str, length: tuple[int, int], **more: Any) -> Fleet:
    (folder / "fleet").mkdir()
    operations, kills = length
    return Fleet(url, folder / "fleet", operations, kills, **{"num_slots": 4096, **more})


def run(fleet: Fleet, *, keeps_all: bool = True) -> Report:
    fleet.run()
    report = fleet.check(keeps_all=keeps_all)
    print(report)
    return report


def check(report: Report, fleet: Fleet) -> None:
    assert not report.wrong, (len(report.wrong), report.wrong[:5], fleet.seed)
    assert report.operations == fleet.processes * fleet.operations
    assert report.kills == fleet.kills
    assert report.forgets["began"] > 5
    assert report.hits > fleet.operations
    assert not {name for name in report.seen if name.endswith("_checksum")}


# ---- Redis ----


@contextmanager
def troubled(clients: list["redis.Redis"], store: ExternalStore, seed: int = 0) -> Iterator[None]:
    """Close the connections of all clients now and then, and change the tenants' quotas a little."""
    choices, is_over = random.Random(seed), threading.Event()

    def trouble() -> None:
        while not is_over.wait(choices.uniform(0.1, 0.6)):
            if choices.random() < 0.3:
                choices.choice(clients).execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            elif store.keeps_quotas:
                store.set_quota(tenant(choices.randint(1, TENANTS)), choices.randint(30, 36))

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tenant(number: int) -> bytes:
    return sha256(b"tenant %d" % number).digest()


def run_watched(fleet: Fleet, servers: list[Server], most: int) -> tuple[Report, BoundsWatch]:
    """Run a fleet over Redis, counting what the servers have all the time."""
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis(port=server.port)) for server in servers]
        for client in clients:
            client.flushall()
        store = stack.enter_context(opened(fleet.url, fleet.num_slots))
        watch = BoundsWatch(clients, store, most)
        if store.keeps_quotas:
            for number in range(TENANTS):
                store.set_quota(tenant(number + 1), 30)
        plant_orphans(store, clients[0])
        with watch.watching(), troubled(clients, store):
            report = run(fleet, keeps_all=False)
        end = watch.count()
        watch.check(end)
    report.wrong += watch.wrong
    print(f"{watch.samples} samples, {watch.least} to {watch.highest} of {fleet.num_slots} blocks, at the end {end}")
    if end.orphans:
        report.wrong.append(f"blocks in no list at the end: {end}")
    return report, watch


def plant_orphans(store: ExternalStore, client: "redis.Redis") -> None:
    """Store values that no list has, as after a loss of the list."""
    assert isinstance(store, RedisStore)
    if store.keeps_quotas:
        for number in range(store.num_slots // 50):
            client.set(store._prefix + sha256(b"orphan %d" % number).digest(), bytes(320))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_server_keeps_bounds_quotas_and_epochs(valkey: Server, tmp_path: Path, length: tuple[int, int]):
    fleet = fleet_in(tmp_path, f"redis://127.0.0.1:{valkey.port}", length, num_slots=SLOTS)
    report, watch = run_watched(fleet, [valkey], SLOTS)
    check(report, fleet)
    assert watch.is_full
    assert watch.samples > 50


@pytest.mark.parametrize("length", LENGTHS)
def test_a_cluster_keeps_bounds_and_epochs(tmp_path: Path, length: tuple[int, int]):
    (tmp_path / "cluster").mkdir()
    with serving_cluster(tmp_path / "cluster") as nodes:
        fleet = fleet_in(tmp_path, f"redis+cluster://127.0.0.1:{nodes[0].port}", length, num_slots=CLUSTER_SLOTS)
        report, watch = run_watched(fleet, nodes, CLUSTER_SLOTS // 64)
        check(report, fleet)
        assert watch.is_full
        assert watch.samples > 50


# ---- stores that evict nothing ----


@pytest.mark.parametrize("length", LENGTHS)
def test_a_directory_keeps_epochs_and_loses_no_block(tmp_path: Path, length: tuple[int, int]):
    fleet = fleet_in(tmp_path, f"local://{tmp_path}/store", length, most=16, fails=0.01)
    check(run(fleet), fleet)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_object_store_keeps_epochs_and_loses_no_block(
    objects: ObjectServer, tmp_path: Path, length: tuple[int, int]
):
    fleet = fleet_in(tmp_path, objects.url("bucket/fleet")[:-1], length, most=8, fails=0.01, limit=3000.0)
    check(run(fleet), fleet)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_slab_keeps_epochs_and_loses_no_block(tmp_path: Path, length: tuple[int, int]):
    fleet = fleet_in(tmp_path, f"file://{tmp_path}/slab", length, at_once=False)
    check(run(fleet), fleet)


# ---- faults that must be found ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("clocks", "a forget began at"),
        ("landing", "a block of other weights"),
        ("trim", "of the size"),
    ],
)
def test_a_fleet_over_redis_finds_a_planted_fault(valkey: Server, tmp_path: Path, fault: str, why: str):
    fleet = fleet_in(tmp_path, f"redis://127.0.0.1:{valkey.port}", QUICK, num_slots=SLOTS, fault=fault)
    report, _ = run_watched(fleet, [valkey], SLOTS)
    assert [line for line in report.wrong if why in line], report.wrong[:5]


@pytest.mark.slow
def test_a_fleet_over_a_directory_finds_a_store_that_deletes_on_a_passing_error(tmp_path: Path):
    fleet = fleet_in(tmp_path, f"local://{tmp_path}/store", QUICK, most=16, fails=0.02, fault="passing")
    report = run(fleet)
    assert [line for line in report.wrong if "is gone" in line], report.wrong[:5]
