"""A prefix store in a file: restarts, other processes, damage, and the commands that look at it."""

import fcntl
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError
from blockyard.events import export_keys
from blockyard.stores import ThreadedStore, open_store, opening
from blockyard.testing.faults import PARTS, corrupt_slots

WIDTH = 5000
SPACE = bytes(range(32))
NAME = "blockyard-prefix.slab"


def store_at(folder: Path, num_slots: int = 8, namespace: bytes = SPACE) -> SlabStore:
    return SlabStore(folder, bytes_per_block=WIDTH, num_slots=num_slots, namespace=namespace, use="prefix")


def keys_of(count: int) -> list[bytes]:
    return export_keys(list(range(16 * count)), block_size=16)


def rows_of(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), dtype=np.uint8)


def put(store: SlabStore, count: int) -> None:
    assert store.wait(store.submit_put(keys_of(count), rows_of(count))).ok.all()


HOLDER = """
import sys
import numpy as np
from blockyard.events import export_keys
from blockyard.stores import open_store
store = open_store(sys.argv[1], bytes_per_block=5000, namespace=bytes(range(32)), use="prefix")
rows = np.random.default_rng(0).integers(0, 256, (4, 5000), dtype=np.uint8)
assert store.wait(store.submit_put(export_keys(list(range(64)), block_size=16), rows)).ok.all()
print(store.path, flush=True)
sys.stdin.read()
"""


def test_blocks_of_a_killed_process_come_back_in_the_next(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size=1MiB"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    assert Path(child.stdout.readline().strip()) == tmp_path / "kv" / NAME
    with pytest.raises(StoreError, match=f"{NAME} is in use by another store"):
        open_store(url, bytes_per_block=WIDTH, namespace=SPACE, use="prefix")
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with open_store(url, bytes_per_block=WIDTH, namespace=SPACE, use="prefix") as store:
        read = store.wait(store.submit_get(keys_of(5)))
        assert read.reasons == ("", "", "", "", "absent")
        assert np.array_equal(read.rows[:4], rows_of(4))


def test_a_lock_that_goes_soon_is_waited_for(tmp_path: Path):
    """A killed process holds it until its last write has ended."""
    with store_at(tmp_path) as store:
        put(store, 3)
        path = store.path
    with path.open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, fcntl.flock, (other, fcntl.LOCK_UN))
        timer.start()
        with store_at(tmp_path) as store:
            assert store.wait(store.submit_get(keys_of(3))).ok.all()
        timer.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_that_lives_on_holds_no_lock_of_a_closed_store(tmp_path: Path):
    with store_at(tmp_path) as store:
        put(store, 3)
        child = get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    try:
        with store_at(tmp_path) as store:
            assert store.wait(store.submit_get(keys_of(3))).ok.all()
    finally:
        child.kill()
        child.join()


def test_swap_space_and_a_prefix_store_share_a_directory(tmp_path: Path):
    url = f"file://{tmp_path}?size=1MiB"
    with (
        open_store(url, bytes_per_block=WIDTH, use="prefix") as prefix,
        open_store(url, bytes_per_block=WIDTH) as swap,
    ):
        prefix.wait(prefix.submit_put(keys_of(1), rows_of(1)))
        swap.wait(swap.submit_write(np.array([0]), rows_of(1, 1)))
        assert prefix.wait(prefix.submit_get(keys_of(1))).ok.all()
        with pytest.raises(StoreError, match="swap space, which has no keys"):
            swap.submit_get(keys_of(1))
        with pytest.raises(InvalidArgumentError, match="slot 0 is out of range, the store has 0 slots"):
            prefix.submit_read(np.array([0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blockyard-prefix.checkpoint", NAME]


@pytest.mark.parametrize("part", ["payload", *PARTS])
@pytest.mark.parametrize("reopened", [False, True])
def test_damage_is_a_miss_and_the_key_is_dropped(tmp_path: Path, part: str, reopened: bool):
    store = store_at(tmp_path)
    put(store, 4)
    corrupt_slots(store, [1], part=part)
    if reopened:
        store.close()
        (tmp_path / "blockyard-prefix.checkpoint").unlink()
        store = store_at(tmp_path)
    with store:
        read = store.wait(store.submit_get(keys_of(4)))
        assert read.ok.tolist() == [True, False, True, True]
        assert not read.rows[1].any()
        assert np.array_equal(read.rows[[0, 2, 3]], rows_of(4)[[0, 2, 3]])
        assert store.contains(keys_of(4)).tolist() == [True, False, True, True]
        put(store, 4)
        assert store.wait(store.submit_get(keys_of(4))).ok.all()


def test_a_block_is_read_into_the_callers_rows(tmp_path: Path):
    with store_at(tmp_path) as store:
        put(store, 2)
        out = np.full((3, WIDTH), 7, np.uint8)
        read = store.wait(store.submit_get(keys_of(3), out))
        assert np.shares_memory(read.rows, out)
        assert np.array_equal(out[:2], rows_of(2))
        assert (out[2] == 7).all()


def test_an_event_wakes_a_selector(tmp_path: Path):
    with store_at(tmp_path) as store:
        event = store.event_fd()
        store.poll()
        assert not select.select([event], [], [], 0)[0]
        ticket = store.submit_put(keys_of(1), rows_of(1))
        assert select.select([event], [], [], 30)[0] == [event]
        assert store.poll() == [ticket]
        assert not select.select([event], [], [], 0)[0]


def test_eviction_keeps_the_size_and_is_counted(tmp_path: Path):
    with store_at(tmp_path) as store:
        put(store, 20)
        stats = store.stats()
        assert (stats.cached_blocks, stats.evicted_blocks, store.num_slots) == (8, 12, 8)
        assert store.path.stat().st_size == 4096 + 8 * (4096 + 8192)
        assert store.contains(keys_of(20)).tolist() == [False] * 12 + [True] * 8


def test_the_disk_must_have_room_for_the_rest_of_the_file(tmp_path: Path):
    with pytest.raises(StoreFullError, match="are available"):
        open_store(f"file://{tmp_path}/kv?size=1024TiB", bytes_per_block=1 << 20, use="prefix")
    assert not list(tmp_path.iterdir())


def test_use_is_swap_or_prefix(tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="use is 'both', must be 'swap' or 'prefix'"):
        open_store(f"file://{tmp_path}?size=1MiB", bytes_per_block=WIDTH, use="both")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="use is 'both', must be 'swap' or 'prefix'"):
        SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=1, use="both")
    assert not list(tmp_path.iterdir())


def test_a_plug_in_without_keys_cannot_be_a_prefix_store(monkeypatch: pytest.MonkeyPatch):
    closed = []

    class Plain(ThreadedStore):
        num_slots = 4

        def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
            return np.ones(len(keys), bool)

        def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
            return np.ones(len(keys), bool)

        def close(self, timeout: float = 5.0) -> bool:
            closed.append(self)
            return super().close(timeout)

    monkeypatch.setitem(opening._registered, "plain", Plain)
    with pytest.raises(StoreError, match="'plain://': the store has no keys"):
        open_store("plain://", bytes_per_block=8, use="prefix")
    assert len(closed) == 1
