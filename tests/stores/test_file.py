"""The file store: what it keeps, what it notices, and what it leaves behind."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError
from blockyard.stores import ExternalStore, open_store
from blockyard.stores.file import open_file
from blockyard.testing.faults import PARTS, corrupt_slots
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite

WIDTH = 5000
HOLDER = """
import os, signal, sys
import numpy as np
from blockyard.stores import open_store
store = open_store(sys.argv[1], bytes_per_block=5000)
store.wait(store.submit_write(np.arange(8), np.ones((8, 5000), np.uint8)))
print(store.path, flush=True)
sys.stdin.read()
"""


class TestDirect(StoreSuite):
    direct = "auto"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_store(self) -> ExternalStore:
        url = f"file://{self.folder}?direct={self.direct}&size=8MiB"
        return open_store(url, bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


class TestBuffered(TestDirect):
    direct = "off"


class TestWholePages(TestDirect):
    bytes_per_block = 8192


def blocks(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), dtype=np.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlabStore]:
    with SlabStore(tmp_path / "swap", bytes_per_block=WIDTH, num_slots=16) as store:
        yield store


def write(store: SlabStore, slots: list[int], seed: int = 0) -> NDArray[np.uint8]:
    rows = blocks(len(slots), seed)
    assert store.wait(store.submit_write(np.array(slots), rows)).ok.all()
    return rows


def reasons(store: SlabStore, slots: list[int]) -> tuple[str, ...]:
    return store.wait(store.submit_read(np.array(slots))).reasons


def test_blocks_are_read_into_the_callers_rows_and_misses_leave_theirs(store: SlabStore):
    rows = write(store, [2, 4])
    out = np.full((3, WIDTH), 7, np.uint8)
    slots = np.array([2, 3, 4])
    bad = [out[:2], out[:, :-1], out.view(np.int8), np.asfortranarray(out), out[0], "rows"]
    out.flags.writeable = False
    for given in (*bad, out):
        with pytest.raises(InvalidArgumentError, match="rows"):
            store.submit_read(slots, given)
    out.flags.writeable = True
    read = store.wait(store.submit_read(slots, out))
    assert np.shares_memory(read.rows, out)
    assert read.ok.tolist() == [True, False, True]
    assert np.array_equal(out[[0, 2]], rows)
    assert (out[1] == 7).all()
    written = store.wait(store.submit_write(np.array([5]), rows[:1]))
    assert written.rows.shape == (0, WIDTH), "only reads have rows"


@pytest.mark.parametrize("part", ["payload", *PARTS])
def test_damage_of_any_part_is_a_counted_miss(store: SlabStore, part: str):
    rows = write(store, [2, 3, 4])
    corrupt_slots(store, [3], part=part)
    expected = {"payload": "payload_checksum", "magic": "magic", "version": "version"}.get(part, "header_checksum")
    read = store.wait(store.submit_read(np.array([2, 3, 4])))
    assert read.reasons == ("", expected, "")
    assert not read.rows[1].any()
    assert np.array_equal(read.rows[[0, 2]], rows[[0, 2]])
    stats = store.stats()
    assert stats.misses == {expected: 1}
    assert (stats.damaged_blocks, stats.errors) == (1, 0)
    assert stats.checksum_failures == (part not in {"magic", "version"})


def test_a_damaged_slot_is_whole_again_after_the_next_write(store: SlabStore):
    write(store, [1])
    corrupt_slots(store, [1])
    assert reasons(store, [1]) == ("payload_checksum",)
    write(store, [1], seed=9)
    assert reasons(store, [1]) == ("",)


def test_a_block_copied_to_another_slot_is_a_miss(store: SlabStore):
    write(store, [1, 2])
    with store.path.open("r+b") as file:
        file.seek(store.slot_offset(1))
        block = file.read(store.slot_offset(2) - store.slot_offset(1))
        file.seek(store.slot_offset(2))
        file.write(block)
    assert reasons(store, [1, 2]) == ("", "slot")


def test_a_write_that_the_disk_swallowed_is_a_miss(store: SlabStore):
    write(store, [1])
    before = store.path.read_bytes()
    write(store, [1], seed=1)
    store.path.write_bytes(before)
    assert reasons(store, [1]) == ("generation",)


def test_a_file_cut_short_is_a_miss(store: SlabStore):
    write(store, [0, 15])
    os.truncate(store.path, store.slot_offset(15) + 4096)
    assert reasons(store, [0, 15]) == ("", "truncated")
    os.truncate(store.path, 0)
    assert reasons(store, [0, 15]) == ("truncated", "truncated")


def test_the_file_is_private_and_preallocated(store: SlabStore):
    found = store.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    assert found.st_size == 4096 + 16 * (4096 + 8192)
    assert found.st_blocks * 512 >= found.st_size
    assert store.path.read_bytes()[:8] == b"BLKYSLAB"


def test_closing_removes_the_file(tmp_path: Path):
    store = SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4)
    write(store, [0])
    assert store.close()
    assert not list(tmp_path.iterdir())


def test_letting_go_of_a_store_removes_the_file(tmp_path: Path):
    store = SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4)
    del store
    assert not list(tmp_path.iterdir())


def test_closing_leaves_a_file_that_took_the_name(store: SlabStore):
    store.path.unlink()
    store.path.write_text("mine")
    store.close()
    assert store.path.read_text() == "mine"


def test_a_second_store_in_a_directory_gets_its_own_file(tmp_path: Path):
    with (
        SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4) as one,
        SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4) as two,
    ):
        assert one.path != two.path
        first, second = write(one, [0]), write(two, [0], seed=1)
        for store, rows in ((one, first), (two, second)):
            assert np.array_equal(store.wait(store.submit_read(np.array([0]))).rows, rows)


def hold(url: str) -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    return child, Path(child.stdout.readline().strip())


def end(child: subprocess.Popen[str]) -> None:
    child.communicate()
    child.wait()


def test_files_of_a_killed_process_are_removed_and_never_read(tmp_path: Path):
    child, left = hold(f"file://{tmp_path}?size=1MiB")
    child.kill()
    end(child)
    assert left.exists()
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=16) as store:
        assert not left.exists()
        assert set(reasons(store, list(range(16)))) == {"empty"}


def test_the_file_of_a_live_process_is_left_alone(tmp_path: Path):
    child, path = hold(f"file://{tmp_path}?size=1MiB")
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4) as store:
        assert path.exists()
        assert store.path != path
    end(child)
    assert not path.exists()


def test_a_file_under_the_next_name_is_stepped_over(tmp_path: Path):
    target = tmp_path / "precious"
    target.write_text("precious")
    for n in range(2):
        (tmp_path / f"blockyard-swap-{os.getpid()}-{n}.slab").symlink_to(target)
    os.mkfifo(tmp_path / "blockyard-swap-1-0.slab")
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4) as store:
        assert store.path.name == f"blockyard-swap-{os.getpid()}-2.slab"
        write(store, [0])
    assert target.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 4


WITHOUT_LOCKS = """
import ctypes, errno, platform, struct, sys
from blockyard.errors import StoreError
from blockyard.stores import open_store
flock = {"x86_64": 73, "aarch64": 32}[platform.machine()]
filters = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, flock),  # is it flock?
        (0x06, 0, 0, 0x00050000 | errno.ENOSYS),  # then it fails
        (0x06, 0, 0, 0x7FFF0000),  # others are allowed
    )
)
program = ctypes.create_string_buffer(filters, len(filters))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
length_and_address = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
assert libc.prctl(22, 2, length_and_address) == 0, f"seccomp: {ctypes.get_errno()}"
for _ in range(2):
    try:
        open_store(sys.argv[1], bytes_per_block=4096)
    except StoreError as error:
        print(error)
"""


def test_a_file_system_without_locks_is_refused_and_nothing_is_left(tmp_path: Path):
    (tmp_path / "blockyard-swap-1-0.slab").write_text("of somebody else, it may be")
    command = [sys.executable, "-c", WITHOUT_LOCKS, f"file://{tmp_path}?size=1MiB"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.count(f"the file system of {tmp_path} has no locks") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["blockyard-swap-1-0.slab"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_symbolic_link_in_the_place_of_the_directory_is_refused(tmp_path: Path, slash: str):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="link is a symbolic link"):
        open_file(f"file://{tmp_path}/link{slash}?size=1MiB", bytes_per_block=WIDTH)
    assert not list((tmp_path / "real").iterdir())


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="file is not a directory"):
        SlabStore(tmp_path / "file", bytes_per_block=WIDTH, num_slots=4)


def test_a_directory_whose_parent_is_missing_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match=r"cannot make directory .*No such file"):
        SlabStore(tmp_path / "a" / "b", bytes_per_block=WIDTH, num_slots=4)


def test_a_size_that_holds_no_slot_is_refused(tmp_path: Path):
    with pytest.raises(
        StoreFullError, match="size is 16383 bytes, must be at least 16384: one slot of 12288 and a superblock"
    ):
        open_file(f"file://{tmp_path}?size=16383", bytes_per_block=WIDTH)
    open_file(f"file://{tmp_path}?size=16384", bytes_per_block=WIDTH).close()


def test_more_slots_than_the_size_holds_are_refused(tmp_path: Path):
    with pytest.raises(StoreFullError, match="asked for 4 slots of 12288 bytes, size is 40960 bytes and holds 3"):
        open_file(f"file://{tmp_path}?size=40KiB", bytes_per_block=WIDTH, num_slots=4)


def test_more_than_the_disk_has_is_refused_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(StoreFullError, match=r"asked for \d+ bytes in .*swap, \d+ are available"):
        open_file(f"file://{tmp_path}/swap?size=1024TiB", bytes_per_block=1 << 20)
    assert not list(tmp_path.iterdir())


def test_a_limit_on_file_sizes_is_an_error_with_the_numbers(tmp_path: Path):
    code = (
        "import resource, sys\n"
        "from blockyard.errors import StoreFullError\n"
        "from blockyard.stores import open_store\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "try:\n    open_store(sys.argv[1], bytes_per_block=4096)\n"
        "except StoreFullError as error:\n    print(error)\n"
    )
    url = f"file://{tmp_path}/swap?size=2MiB"
    out = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    assert "asked for a file of 2093056 bytes" in out.stdout
    assert "the limit is 1048576 (RLIMIT_FSIZE)" in out.stdout
    assert not list(tmp_path.iterdir())


def test_a_write_beyond_the_limit_on_file_sizes_is_a_miss(store: SlabStore):
    write(store, [0, 15])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.slot_offset(8), hard))
    try:
        done = store.wait(store.submit_write(np.array([0, 15]), blocks(2, 7)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.reasons == ("", "io")
    assert store.stats().errors == 1
    assert os.strerror(errno.EFBIG) in store.stats().last_error
    read = store.wait(store.submit_read(np.array([0, 15])))
    assert read.reasons == ("", "lost")
    assert np.array_equal(read.rows[0], blocks(2, 7)[0])


def test_direct_off_is_buffered(tmp_path: Path):
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=4, direct="off") as store:
        assert (store.direct, store.notes) == (False, ())
        assert "buffered" in repr(store)


def test_blocks_beyond_the_memory_limit_are_misses_and_lose_their_slots(tmp_path: Path):
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=16, memory=4 * 12288) as store:
        write(store, [0, 1, 2, 3])
        write(store, [4, 5, 6, 7])
        done = store.wait(store.submit_write(np.arange(8), blocks(8, 5)))
        assert done.reasons == ("",) * 4 + ("queue_full",) * 4
        read = store.wait(store.submit_read(np.arange(8)))
        assert read.reasons[4:] == ("queue_full",) * 4
        assert np.array_equal(read.rows[:4], blocks(8, 5)[:4])
        assert reasons(store, [4, 5, 6, 7]) == ("lost",) * 4
        assert store.stats().pending_bytes == 0


def test_results_not_collected_hold_memory(tmp_path: Path):
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=16, memory=4 * 12288) as store:
        write(store, [0, 1])
        ticket = store.submit_read(np.array([0, 1, 0]))
        assert store.stats().pending_bytes == 3 * 12288
        assert store.wait(store.submit_read(np.array([0, 1]))).reasons == ("", "queue_full")
        assert store.wait(ticket).ok.all()
        assert store.stats().pending_bytes == 0


def test_closing_while_batches_are_under_way_ends_every_ticket(tmp_path: Path):
    store = SlabStore(tmp_path, bytes_per_block=1 << 20, num_slots=64)
    rows = np.zeros((64, 1 << 20), np.uint8)
    tickets = [store.submit_write(np.arange(64), rows) for _ in range(3)]
    waiting = threading.Thread(target=store.wait, args=(tickets.pop(),))
    waiting.start()
    assert store.close()
    waiting.join(300)
    assert not waiting.is_alive()
    assert not list(tmp_path.iterdir())
    assert {reason for ticket in tickets for reason in store.wait(ticket).reasons} <= {"", "closed"}


def test_many_threads_may_use_one_store(tmp_path: Path):
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=16, threads=4) as store:
        wrong: list[str] = []

        def work(slot: int) -> None:
            for seed in range(40):
                rows = blocks(1, seed * 16 + slot)
                ticket = store.submit_write(np.array([slot]), rows)
                read = store.wait(store.submit_read(np.array([slot])))
                if not (store.wait(ticket).ok.all() and read.ok.all() and np.array_equal(read.rows, rows)):
                    wrong.append(f"slot {slot}, write {seed}: {read.reasons}")

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def _use_in_child(store: SlabStore, sender: object) -> None:
    rows = np.zeros((1, WIDTH), dtype=np.uint8)
    calls = [
        lambda: store.submit_read(np.array([0])),
        lambda: store.submit_write(np.array([1]), rows),
        lambda: store.wait(1),
        store.poll,
        store.stats,
    ]
    for call in calls:
        with pytest.raises(StoreError) as raised:
            call()
        sender.send(str(raised.value))  # type: ignore[attr-defined]
    store.close()
    sender.send("closed")  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_must_open_its_own_store_and_harms_nothing(store: SlabStore):
    rows = write(store, [0])
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_use_in_child, args=(store, sender))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    for _ in range(5):
        assert f"opened by process {os.getpid()}, process {child.pid} must open its own" in receiver.recv()
    assert receiver.recv() == "closed"
    # The child's end has not unlocked the file either: whoever opens the directory next leaves it alone.
    SlabStore(store.path.parent, bytes_per_block=WIDTH, num_slots=1).close()
    assert store.path.exists()
    assert np.array_equal(store.wait(store.submit_read(np.array([0]))).rows, rows)


def test_batches_of_many_sizes_come_back(tmp_path: Path):
    random = np.random.default_rng(1)
    with SlabStore(tmp_path, bytes_per_block=WIDTH, num_slots=64) as store:
        for count in (1, 2, 7, 64):
            slots, rows = random.permutation(64)[:count], random.integers(0, 256, (count, WIDTH), dtype=np.uint8)
            written, read = store.submit_write(slots, rows), store.submit_read(slots)
            assert np.array_equal(store.wait(read).rows, rows)
            assert store.wait(written).ok.all()


def test_options_that_mean_nothing_are_refused(tmp_path: Path):
    for options in ({"direct": "maybe"}, {"threads": 1}, {"threads": 17}, {"memory": 1}, {"timeout_base": -1.0}):
        with pytest.raises(InvalidArgumentError):
            SlabStore(tmp_path / "swap", bytes_per_block=WIDTH, num_slots=4, **options)
    assert not list(tmp_path.iterdir())


def test_a_slot_lies_where_the_store_says(store: SlabStore):
    rows = write(store, [7])
    start = store.slot_offset(7) + 4096
    assert store.path.read_bytes()[start : start + WIDTH] == rows.tobytes()


def test_a_slab_whose_first_page_is_damaged_says_how_many_blocks_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    url, options = f"file://{tmp_path}/kv?size=1MiB", {"bytes_per_block": 4096, "use": "prefix"}
    with open_store(url, **options) as store:
        assert store.wait(store.submit_put([bytes([n]) * 32 for n in (1, 2, 3)], np.ones((3, 4096), np.uint8))).ok.all()
    slab = tmp_path / "kv" / "blockyard-prefix.slab"
    with slab.open("r+b") as file:
        file.write(bytes(4096))
    lines = []
    for _ in range(2):
        caplog.clear()
        with open_store(url, **options) as store:
            assert store.stats().cached_blocks == 0
        lines.append([record.getMessage() for record in caplog.records])
    assert lines == [[f"the first page of {slab} is damaged: its 3 blocks are gone"], []]


def test_counters_can_be_written_as_json(store: SlabStore):
    write(store, [0])
    reasons(store, [0, 1])
    found = json.loads(json.dumps(store.stats().as_dict()))
    assert found["misses"] == {"empty": 1}
    assert (found["written_blocks"], found["read_blocks"]) == (1, 1)
    assert store.stats() == store.stats()


SCARCE = """
import resource, sys
import numpy as np
from blockyard.errors import OutOfMemoryError
from blockyard.stores import open_store

store = open_store(sys.argv[1], bytes_per_block=1 << 20, num_slots=64)
store.wait(store.submit_write(np.arange(64), np.full((64, 1 << 20), 7, np.uint8)))
ticket = store.submit_read(np.arange(64))
while ticket not in store.poll():
    pass
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
for _ in range(2):
    try:
        store.wait(ticket)
    except OutOfMemoryError as error:
        print(error.wanted)
resource.setrlimit(resource.RLIMIT_AS, limits)
result = store.wait(ticket)
print(result.ok.all(), (result.rows == 7).all(), store.stats().pending_bytes)
"""


def test_a_result_that_memory_has_no_room_for_can_be_collected_later(tmp_path: Path):
    url = f"file://{tmp_path}/swap?memory=256MiB"
    done = subprocess.run([sys.executable, "-c", SCARCE, url], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(64 << 20)] * 2 + ["True", "True", "0"]


class TestPrefix(PrefixStoreSuite):
    direct = "auto"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        return open_store(
            f"file://{self.folder}?direct={self.direct}",
            bytes_per_block=self.bytes_per_block,
            num_slots=self.num_slots,
            namespace=namespace,
            use="prefix",
        )


class TestPrefixBuffered(TestPrefix):
    direct = "off"
