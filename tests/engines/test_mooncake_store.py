"""The Mooncake store over a real cluster: a master and two processes that hold its memory, all from Mooncake's wheel.

`make test-mooncake` runs this; with `-s` it prints the table of `docs/operate/reliability.md`.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake_cluster import PATIENCE, Cluster, stopped, until

from blockyard import KVLayout
from blockyard.errors import StoreError
from blockyard.stores import ExternalStore, open_store, store_namespace
from blockyard.stores.mooncake import connect_client, read_url
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite
from blockyard.tools.setup_checks import check_store
from blockyard.tools.store import Selection, open_contents, survey

pytest.importorskip("mooncake.store", exc_type=ModuleNotFoundError)

WIDTH = 1 << 20
KEYS = [bytes([number]) * 32 for number in range(1, 17)]
ROWS = np.random.default_rng(0).integers(0, 256, (len(KEYS), WIDTH), np.uint8)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("shared"), stack)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


class TestSwapSpace(StoreSuite):
    @pytest.fixture(autouse=True)
    def _cluster(self, shared: Cluster) -> None:
        self.url = f"mooncake://127.0.0.1:{shared.port}"

    def open_store(self) -> ExternalStore:
        return open_store(self.url, bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


class TestPrefixStore(PrefixStoreSuite):
    evicts = False

    @pytest.fixture(autouse=True)
    def _cluster(self, shared: Cluster) -> None:
        self.url, self.salt = f"mooncake://127.0.0.1:{shared.port}", os.urandom(8)

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        own = hashlib.sha256(self.salt + namespace).digest()
        options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": own}
        return open_store(self.url, use="prefix", **options)


def opened(cluster: Cluster, **more: Any) -> Any:
    return open_store(cluster.url, **{"bytes_per_block": WIDTH, "use": "prefix", **more})


class Watch:
    """A store whose reads are compared with what was put; notes the longest call and the reasons of misses."""

    def __init__(self, store: Any) -> None:
        self.store, self.longest, self.reasons = store, 0.0, Counter[str]()

    def get(self) -> bool:
        """Return whether all blocks are hits."""
        done = self._collect(self.store.submit_get(KEYS))
        assert np.array_equal(done.rows[done.ok], ROWS[done.ok]), "a wrong byte"
        return bool(done.ok.all())

    def put(self) -> bool:
        return bool(self._collect(self.store.submit_put(KEYS, ROWS)).ok.all())

    def _collect(self, ticket: int) -> Any:
        began = time.monotonic()
        done = self.store.wait(ticket)
        self.longest = max(self.longest, time.monotonic() - began)
        self.reasons.update(filter(None, done.reasons))
        return done

    def back(self, name: str) -> None:
        """Wait until all blocks are stored and found again, and print a row of the table."""
        began = time.monotonic()
        until(lambda: self.put() and self.get())
        took, reasons = time.monotonic() - began, ", ".join(sorted(self.reasons))
        print(f"| {name} | {reasons or 'hits'} | {self.longest:.1f} s | {took:.1f} s |")


@contextmanager
def watched(cluster: Cluster) -> Iterator[Watch]:
    with opened(cluster) as store:
        watch = Watch(store)
        assert watch.put()
        assert watch.get()
        yield watch


def test_a_holder_that_is_stopped_is_a_miss_by_our_deadline(cluster: Cluster):
    with watched(cluster) as watch:
        with stopped(cluster.holders[0]):
            assert not watch.get()
            assert watch.reasons["timeout"] == len(KEYS)
            assert not watch.get()
            assert watch.reasons["unavailable"] + watch.reasons["absent"] == len(KEYS), "the next call does not wait"
            watch.back("a holder stopped")  # over the other one, once the master has dropped it
        watch.back("it goes on")


def test_a_holder_that_is_killed_takes_only_its_values_along(cluster: Cluster):
    with watched(cluster) as watch:
        cluster.holders[0].kill()
        watch.get()
        watch.back("a holder killed")


def test_a_master_that_is_stopped_is_misses(cluster: Cluster):
    with watched(cluster) as watch:
        with stopped(cluster.master):
            assert not watch.get()
            assert not watch.get()
            assert watch.reasons["unavailable"] == len(KEYS)
            with pytest.raises(StoreError, match="found no master in"):
                opened(cluster)
        watch.back("the master stopped, goes on")


def test_a_master_that_is_killed_comes_back_without_its_keys(cluster: Cluster):
    with watched(cluster) as watch:
        cluster.master.kill()
        cluster.master.wait()
        assert not watch.get()
        with pytest.raises(StoreError, match="Connection refused"):
            opened(cluster)
        cluster.master = cluster.start_master()
        watch.back("the master killed, another in its place")


def test_what_is_damaged_or_lost_is_a_miss_and_stored_again(cluster: Cluster):
    with watched(cluster) as watch, connect_client_of(cluster) as client:
        paths = watch.store._paths(watch.store._keyed_blocks.names_of(KEYS, watch.store._keyed_blocks.confirm().token))
        (value,) = client.read(paths[:1], WIDTH + 1000)
        changed = [value.copy(), value[:-5], np.zeros_like(value), np.append(value, value[:9])]
        changed[0][5000] ^= 1
        assert client.write("batch_upsert_from", paths[:4], [one.data for one in changed]) == [0] * 4
        assert client.call("batch_remove", paths[4:8], True) == [0] * 4
        assert not watch.get()
        assert watch.reasons["absent"] == 4
        assert watch.reasons.total() == 8
        watch.back("values damaged, cut, zero, longer, lost")


@contextmanager
def connect_client_of(cluster: Cluster) -> Iterator[Any]:
    client = connect_client(read_url(cluster.url))
    yield client
    client.close()


def test_a_full_cluster_refuses_blocks_and_gives_no_wrong_one(tmp_path: Path):
    with ExitStack() as stack:
        small = Cluster(tmp_path, stack, holders=1, size="16MB")
        with opened(small) as store:
            watch = Watch(store)
            for _ in range(8):
                watch.put()
                watch.get()
            assert watch.reasons["refused"] > 0
            assert store.stats().read_blocks > 0
            store.forget()


def test_processes_that_forget_at_once_share_blocks_again(shared: Cluster):
    namespace, count = os.urandom(32), 4
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(shared, namespace=namespace)) for _ in range(count)]
        for step in range(10):
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda store, step=step: until(partial(forgets, store, f"step-{step}")), stores))
            until(partial(puts, stores[0]))
            for store in stores:
                until(partial(finds, store))


def forgets(store: ExternalStore, revision: str) -> bool:
    """Forget; return whether it was confirmed, which on a busy machine may not be so before the deadline."""
    try:
        store.forget(revision)
    except StoreError:
        return False
    return True


def puts(store: ExternalStore) -> bool:
    return bool(store.wait(store.submit_put(KEYS[:2], ROWS[:2])).ok.all())


def finds(store: ExternalStore) -> bool:
    return bool(store.wait(store.submit_get(KEYS[:2])).ok.all())


HUNG = """
import os, signal, sys
import numpy as np
from blockyard.stores import open_store
store = open_store(sys.argv[1], bytes_per_block=4096, use="prefix")
keys, rows = [bytes([number]) * 32 for number in range(64)], np.ones((64, 4096), np.uint8)
assert store.wait(store.submit_put(keys, rows)).ok.all()
os.kill(int(sys.argv[2]), signal.SIGSTOP)
print(set(store.wait(store.submit_get(keys)).reasons), flush=True)
sys.exit(7)
"""
FORKED = """
import os, sys
import numpy as np
from blockyard.errors import ForkedError
from blockyard.stores import open_store
store = open_store(sys.argv[1], bytes_per_block=4096, use="prefix")
child = os.fork()
if child == 0:
    try:
        store.submit_get([bytes(32)])
    except ForkedError:
        del store
        sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert store.wait(store.submit_put([bytes(32)], np.ones((1, 4096), np.uint8))).ok.all()
store.close()
"""


def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_process_ends_with_its_own_status_while_a_call_hangs(cluster: Cluster):
    done = run(HUNG, cluster.url, str(cluster.holders[0].pid))
    cluster.holders[0].send_signal(signal.SIGCONT)
    assert (done.returncode, done.stdout) == (7, "{'timeout'}\n"), done.stderr[-2000:]


def test_a_forked_process_ends_with_its_own_status(cluster: Cluster):
    done = run(FORKED, cluster.url)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr[-2000:]


def test_a_cluster_can_be_looked_into_and_cleared_by_namespace(cluster: Cluster):
    layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=16, dtype="float16")
    names = [store_namespace(model=model, revision="1", layout=layout) for model in ("tiny", "big")]
    options: Any = {"bytes_per_block": 4096, "use": "prefix"}
    with (
        open_store(cluster.url, namespace=names[0], **options) as store,
        open_store(cluster.url, namespace=names[1], **options) as other,
    ):
        for each, count in ((store, 16), (other, 3)):
            rows = np.ones((count, 4096), np.uint8)
            assert each.wait(each.submit_put(KEYS[:count], rows)).ok.all()
        store.forget()
        assert store.wait(store.submit_put(KEYS[:9], np.ones((9, 4096), np.uint8))).ok.all()

        def found(*chosen: str) -> Any:
            return survey(open_contents(cluster.url), Selection(chosen), keep_places=True)

        counts = {group.parts["model"]: group.blocks for group in found().groups}
        assert counts == {"tiny": 25, "big": 3}
        report = found("model=tiny")
        assert report.bytes == 25 * (4096 + 128)
        assert open_contents(cluster.url).remove(report.places) == 25
        assert {group.parts["model"] for group in found().groups} == {"big"}
        assert set(store.wait(store.submit_get(KEYS[:9])).reasons) == {"absent"}
        assert store.wait(store.submit_put(KEYS[:2], np.ones((2, 4096), np.uint8))).ok.all(), "the record is there"
        assert other.wait(other.submit_get(KEYS[:3])).ok.all()
    with pytest.raises(StoreError, match=r"port 1, which lists the blocks"):
        survey(open_contents(re.sub("admin=.*", "admin=1", cluster.url)), Selection())


def test_the_doctor_tries_the_store(shared: Cluster):
    assert [check.status for check in check_store(shared.url)][:1] in (["ok"], ["warn"])
