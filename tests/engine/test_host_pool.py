"""The host pool: chunks become ready in order, failures are told with numbers, and closing gives everything back."""

import gc
import mmap
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import in_child
from hypothesis import given
from hypothesis import strategies as st

from blockyard import KVCache
from blockyard.engine import host_pool
from blockyard.engine.engine import CacheEngine
from blockyard.engine.host_pool import CudaLocker, HostPool, blocks_per_chunk
from blockyard.errors import BlockyardError, ForkedError, InvalidArgumentError, OutOfMemoryError, PageLockError
from blockyard.layout.kv import KVLayout

PAGE = mmap.PAGESIZE
CHUNK = 2 << 20
BLOCK = 64 << 10
PER_CHUNK = CHUNK // BLOCK
CHUNKS = 4


class StepLocker:
    """Locks one chunk for each permit, and fails where it is told to; knows what is locked."""

    def __init__(self, *, permits: int = 100, fails_at: int | None = None, keeps: bool = False) -> None:
        self.permits = threading.Semaphore(permits)
        self.fails_at, self.keeps = fails_at, keeps
        self.calls: list[tuple[int, int]] = []
        self.locked: dict[int, int] = {}
        self.threads: set[str] = set()

    def lock(self, address: int, num_bytes: int) -> str:
        self.permits.acquire()
        self.threads.add(threading.current_thread().name)
        self.calls.append((address, num_bytes))
        if len(self.calls) - 1 == self.fails_at:
            return "the test says no (712)"
        self.locked[address] = num_bytes
        return ""

    def unlock(self, address: int) -> str:
        if self.keeps:
            return "still in use (1)"
        del self.locked[address]
        return ""


def pool_of(locker: StepLocker | None, **options: object) -> HostPool:
    return HostPool(CHUNKS * PER_CHUNK, BLOCK, locker=locker, chunk_bytes=CHUNK, **options)


def resident(address: int) -> int:
    """Bytes of a pool that have memory behind them, as the system sees it."""
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(address // PAGE * 8)
        entries = pages.read(CHUNKS * CHUNK // PAGE * 8)
    return PAGE * sum(entry >> 63 for entry in memoryview(entries).cast("Q"))


def test_a_small_pool_is_ready_at_once_and_starts_no_thread():
    before = threading.active_count()
    with HostPool(7, 13) as pool:
        assert (pool.ready_blocks, pool.pinned_blocks, pool.problem) == (7, 0, "")
        assert pool.rows.shape == (7, 13)
        assert not pool.rows.any()
        assert threading.active_count() == before
        pool.wait(7)
        with pytest.raises(InvalidArgumentError, match="num_blocks is 8, the host pool has 7"):
            pool.wait(8)


def test_blocks_are_used_while_later_chunks_are_made_ready():
    locker = StepLocker(permits=1)
    pool = pool_of(locker)
    assert (pool.ready_blocks, pool.pinned_blocks) == (PER_CHUNK, PER_CHUNK)
    pool.rows[: pool.ready_blocks] = 5
    pool.wait(PER_CHUNK)
    done = threading.Event()

    def wait() -> None:
        pool.wait(PER_CHUNK + 1)
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not done.wait(0.05)
    locker.permits.release()
    waiting.join(300)
    assert done.is_set()
    assert 2 * PER_CHUNK <= pool.ready_blocks < CHUNKS * PER_CHUNK
    for _ in range(CHUNKS):
        locker.permits.release()
    pool.wait(pool.num_blocks)
    assert pool.rows[:PER_CHUNK].eq(5).all()
    assert not pool.rows[PER_CHUNK:].any()
    assert locker.calls == [(pool.rows.data_ptr() + n * CHUNK, CHUNK) for n in range(CHUNKS)]
    pool.close()
    assert not locker.locked


def test_memory_grows_in_the_background_without_a_locker_too():
    with pool_of(None) as pool:
        assert pool.ready_blocks >= PER_CHUNK
        pool.wait(pool.num_blocks)
        assert pool.pinned_blocks == 0
        assert resident(pool.rows.data_ptr()) == CHUNKS * CHUNK


def test_memory_grows_by_chunks_and_is_given_back():
    locker = StepLocker(permits=1)
    pool = pool_of(locker)
    address = pool.rows.data_ptr()
    for chunk in range(1, CHUNKS + 1):
        pool.wait(chunk * PER_CHUNK)
        # The next chunk may have been touched already, and waits for its permit.
        assert chunk * CHUNK <= resident(address) <= min(chunk + 1, CHUNKS) * CHUNK
        locker.permits.release()
    left = pool.rows[-1].fill_(9)
    pool.close()
    assert pool.num_blocks == 0
    # Not while somebody has it.
    assert left.eq(9).all()
    del left
    assert resident(address) == 0


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_chunk_that_cannot_be_locked_is_an_error_for_its_blocks(fails_at: int):
    locker = StepLocker(fails_at=fails_at)
    pool = pool_of(locker)
    with pytest.raises(PageLockError) as caught:
        pool.wait(pool.num_blocks)
    message = str(caught.value)
    assert f"chunk {fails_at} of {CHUNKS} ({CHUNK} bytes) of the host pool could not be page-locked" in message
    assert f"the test says no (712); {fails_at * CHUNK} of {CHUNKS * CHUNK} bytes are" in message
    assert "RLIMIT_MEMLOCK is " in message
    assert (caught.value.wanted, caught.value.ready) == (CHUNKS * CHUNK, fails_at * CHUNK)
    # The others go on, and the error is told each time.
    pool.wait(fails_at * PER_CHUNK)
    assert pool.ready_blocks == pool.pinned_blocks == fails_at * PER_CHUNK
    with pytest.raises(PageLockError):
        pool.wait(fails_at * PER_CHUNK + 1)
    pool.close()
    assert not locker.locked


def test_a_first_chunk_that_cannot_be_locked_makes_no_pool():
    locker = StepLocker(fails_at=0)
    with pytest.raises(PageLockError, match="chunk 0 of 4"):
        pool_of(locker)
    assert len(locker.calls) == 1


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_pool_goes_on_unpinned_if_it_may(fails_at: int):
    locker = StepLocker(fails_at=fails_at)
    pool = pool_of(locker, on_failure="unpinned")
    pool.wait(pool.num_blocks)
    assert (pool.ready_blocks, pool.pinned_blocks) == (CHUNKS * PER_CHUNK, fails_at * PER_CHUNK)
    assert f"chunk {fails_at} of {CHUNKS}" in pool.problem
    assert len(locker.calls) == fails_at + 1
    pool.rows.fill_(1)
    pool.close()
    assert not locker.locked


def test_memory_that_runs_out_behind_the_first_chunk_is_an_error_for_its_blocks(monkeypatch: pytest.MonkeyPatch):
    def populate(_mapping: object, first: int, end: int) -> bool:
        if first:
            raise OutOfMemoryError("no more")
        return True

    monkeypatch.setattr(host_pool.HostMapping, "populate", populate)
    with HostPool(3 * PER_CHUNK, BLOCK, chunk_bytes=CHUNK) as pool:
        with pytest.raises(OutOfMemoryError, match="no more"):
            pool.wait(2 * PER_CHUNK)
        assert pool.ready_blocks == PER_CHUNK


def test_closing_ends_the_thread_and_waits_for_nobody():
    locker = StepLocker(permits=2)
    pool = pool_of(locker)
    pool.wait(2 * PER_CHUNK)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            pool.wait(CHUNKS * PER_CHUNK)
        except BlockyardError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    # The chunk that is under way when the pool is closed ends first, and no other is begun.
    late = threading.Timer(0.1, locker.permits.release)
    late.start()
    pool.close()
    pool.close()
    waiting.join(300)
    late.join()
    assert [str(error) for error in failed] == ["the host pool is closed"]
    assert len(locker.calls) == 3
    assert not locker.locked
    assert not [thread for thread in threading.enumerate() if thread.name == "blockyard-host-pool"]
    with pytest.raises(InvalidArgumentError, match="the host pool has 0"):
        pool.wait(1)


def test_a_pool_that_is_forgotten_is_unlocked_and_its_rows_stay():
    locker = StepLocker()
    pool = pool_of(locker)
    pool.wait(pool.num_blocks)
    rows, gone = pool.rows, weakref.ref(pool)
    rows.fill_(4)
    del pool
    gc.collect()
    assert gone() is None
    assert not locker.locked
    assert rows.eq(4).all()


def test_memory_that_the_device_keeps_is_reported():
    pool = pool_of(StepLocker(keeps=True))
    pool.wait(pool.num_blocks)
    with pytest.raises(PageLockError, match="still page-locked: still in use"):
        pool.close()


def test_locking_and_unlocking_never_run_in_the_callers_thread():
    locker = StepLocker()
    with pool_of(locker) as pool:
        pool.wait(pool.num_blocks)
    assert locker.threads == {"blockyard-host-pool"}


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 26))
def test_chunks_hold_whole_blocks_and_end_with_a_page(bytes_per_block: int, chunk_bytes: int):
    blocks = blocks_per_chunk(bytes_per_block, chunk_bytes)
    size = blocks * bytes_per_block
    assert blocks >= 1
    assert size % PAGE == 0
    assert size >= chunk_bytes
    # Not one step more than it takes.
    assert size - chunk_bytes < np.lcm(bytes_per_block, PAGE)


@pytest.mark.parametrize("numbers", [(-1, 8, 1), (1, 0, 1), (1, 8, 0)])
def test_numbers_that_make_no_pool_are_refused(numbers: tuple[int, int, int]):
    with pytest.raises(InvalidArgumentError, match=f"num_blocks is {numbers[0]}, bytes_per_block {numbers[1]}, "):
        HostPool(numbers[0], numbers[1], chunk_bytes=numbers[2])


def test_a_missing_numa_node_is_reported():
    with HostPool(4, 8, node=900) as pool:
        assert pool.node is None
        assert "node 900" in pool.problem


def test_a_pool_of_nothing_is_ready():
    with HostPool.for_device(0, 100, torch.device("cuda:0")) as pool:
        assert pool.rows.shape == (0, 100)
        pool.wait(0)


def test_a_pool_for_the_cpu_is_ordinary_memory():
    blocks = (1 << 32) // BLOCK
    with HostPool.for_device(3, 100, torch.device("cpu")) as pool:
        assert (pool.ready_blocks, pool.pinned_blocks, pool.node) == (3, 0, None)
    pool = HostPool.for_device(blocks, BLOCK, torch.device("cpu"))
    # Ready, and nothing is taken yet.
    assert pool.ready_blocks == blocks
    assert resident(pool.rows.data_ptr()) == 0
    pool.rows[-1] = 3
    assert pool.rows[-1].eq(3).all()
    pool.close()


def test_a_pool_for_cuda_is_pageable_if_it_is_asked_to_be(monkeypatch: pytest.MonkeyPatch):
    lockers: list[StepLocker] = []

    def locker_of(_device: torch.device) -> StepLocker:
        lockers.append(StepLocker())
        return lockers[-1]

    monkeypatch.setattr(host_pool, "CudaLocker", locker_of)
    monkeypatch.setattr(host_pool, "node_of_device", lambda _: 0)
    blocks = CHUNKS * CHUNK // BLOCK
    for pin_memory in (True, False):
        with HostPool.for_device(blocks, BLOCK, torch.device("cuda:0"), pin_memory=pin_memory) as pool:
            pool.wait(blocks)
            assert pool.pinned_blocks == (blocks if pin_memory else 0)
            assert resident(pool.rows.data_ptr()) > 0, "touched ahead of use"
    assert len(lockers) == 1


def test_page_locking_needs_a_cuda_device():
    layout = KVLayout("kv_first", 2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    message = "pin_memory is True, device is cpu: page-locking needs a CUDA device"
    for make in (CacheEngine, KVCache):
        with pytest.raises(InvalidArgumentError, match=message):
            make(layout, device_blocks=4, host_blocks=9, pin_memory=True)
    with KVCache(layout, device_blocks=4, host_blocks=9, pin_memory=False) as cache:
        assert not cache.engine.memory.pin_memory
        assert cache.engine.memory.host_pool.pinned_blocks == 0


def test_cuda_says_why_it_does_not_lock(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available() or not hasattr(torch._C, "_cudart"):
        pytest.skip("there is a CUDA device, or a torch without CUDA")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: torch._C._cudart)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    locker = CudaLocker(torch.device("cuda:0"))
    # Without a driver both calls fail; how it is told is what counts here.
    assert locker.lock(0, 4096).startswith("cudaHostRegister says ")
    assert locker.unlock(0).startswith("cudaHostUnregister says ")
    monkeypatch.setattr(host_pool, "node_of_device", lambda _: 0)
    with pytest.raises(PageLockError, match=r"could not be page-locked: cudaHostRegister says .* \(\d+\); 0 of"):
        HostPool.for_device(4, 4096, torch.device("cuda:0"))
    with HostPool.for_device(4, 4096, torch.device("cuda:0"), on_failure="unpinned") as pool:
        pool.wait(4)
        assert pool.pinned_blocks == 0
        assert "cudaHostRegister says " in pool.problem


def mapping_of(address: int) -> tuple[str, str]:
    """Access and flags of the mapping that an address lies in, as the system sees it."""
    text = Path("/proc/self/smaps").read_text(encoding="ascii")
    access = found = ""
    for line in text.splitlines():
        words = line.split()
        first, dash, end = words[0].partition("-")
        if dash and int(first, 16) <= address < int(end, 16):
            access = words[1]
        elif words[0] == "VmFlags:" and access and not found:
            found = " ".join(words[1:])
    return access, found


def test_a_fork_does_not_inherit_page_locked_memory():
    locker = StepLocker()
    pool = pool_of(locker)
    pool.wait(pool.num_blocks)
    pool.rows.fill_(7)
    address = pool.rows.data_ptr()
    assert "dc" in mapping_of(address)[1].split()

    def check() -> None:
        for use in (lambda: pool.rows, lambda: pool.wait(1), lambda: pool.wait(pool.num_blocks)):
            with pytest.raises(ForkedError, match="a host pool was created by process"):
                use()
        # Nobody else gets the addresses, which go with the pool.
        assert [mapping_of(address + chunk * CHUNK)[0] for chunk in range(CHUNKS)] == ["---p"] * CHUNKS
        pool.close()

    in_child(check)
    assert pool.rows.eq(7).all()
    rows = pool.rows
    pool.close()
    # Ordinary memory again.
    assert "dc" not in mapping_of(address)[1].split()
    # torch's threads are not in the child.
    in_child(lambda: (rows.numpy() == 7).all() or pytest.fail("other bytes"))


def test_a_fork_inherits_memory_that_is_not_page_locked():
    def check() -> None:
        pool.wait(pool.num_blocks)
        assert (pool.rows.numpy() == 7).all()

    for locker in (None, StepLocker(fails_at=0)):
        pool = pool_of(locker, on_failure="unpinned")
        pool.wait(pool.num_blocks)
        pool.rows.fill_(7)
        in_child(check)
        pool.close()


def test_an_engine_in_a_fork_names_the_owner_of_its_memory(monkeypatch: pytest.MonkeyPatch):
    def for_device(
        rows: int, size: int, _device: torch.device, *, pin_memory: bool, on_failure: host_pool.OnFailure
    ) -> HostPool:
        assert not pin_memory, "of an engine on a CPU"
        return HostPool(rows, size, locker=StepLocker(), on_failure=on_failure)

    monkeypatch.setattr(HostPool, "for_device", for_device)
    layout = KVLayout("kv_first", 2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    with CacheEngine(layout, device_blocks=4, host_blocks=9) as engine:
        engine.run("swap_out", np.array([[1, 8]]))

        def check() -> None:
            uses = (
                lambda: engine.read("host", np.array([8])),
                lambda: engine.run("swap_in", np.array([[8, 1]])),
                lambda: engine.submit("swap_in", np.array([[8, 1]])),
            )
            for use in uses:
                with pytest.raises(ForkedError):
                    use()
            engine.close()

        in_child(check)


def test_on_host_failure_has_two_values():
    with pytest.raises(InvalidArgumentError, match=r"on_failure is 'ignore', must be one of \('raise', 'unpinned'\)"):
        HostPool(4, 4096, on_failure="ignore")  # type: ignore[arg-type]
    layout = KVLayout("kv_first", 2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    with pytest.raises(InvalidArgumentError, match="on_failure is 'ignore'"):
        CacheEngine(layout, device_blocks=4, host_blocks=9, on_host_failure="ignore")  # type: ignore[arg-type]


def test_an_engine_has_ordinary_memory_where_none_can_be_locked_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch):
    lockers: list[StepLocker] = []

    def for_device(
        rows: int, size: int, _device: torch.device, *, pin_memory: bool, on_failure: host_pool.OnFailure
    ) -> HostPool:
        assert not pin_memory, "of an engine on a CPU"
        lockers.append(StepLocker(fails_at=0))
        return HostPool(rows, size, locker=lockers[-1], on_failure=on_failure)

    monkeypatch.setattr(HostPool, "for_device", for_device)
    layout = KVLayout("kv_first", 2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    with pytest.raises(PageLockError, match="the test says no"):
        CacheEngine(layout, device_blocks=4, host_blocks=9)
    with CacheEngine(layout, device_blocks=4, host_blocks=9, on_host_failure="unpinned") as engine:
        assert "could not be page-locked: the test says no (712)" in engine.memory.host_pool.problem
        engine.tensors[0].fill_(3)
        before = engine.read("device", np.array([1]))
        engine.run("swap_out", np.array([[1, 8]]))
        assert np.array_equal(engine.read("host", np.array([8])), before)
    assert [locker.locked for locker in lockers] == [{}, {}]


def test_the_engines_host_blocks_are_of_a_pool_and_transfers_wait_for_them(monkeypatch: pytest.MonkeyPatch):
    layout = KVLayout("kv_first", 2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    with CacheEngine(layout, device_blocks=4, host_blocks=9) as engine:
        assert engine.memory.host_rows.data_ptr() == engine.memory.host_pool.rows.data_ptr()
        waited: list[int] = []
        monkeypatch.setattr(engine.memory.host_pool, "wait", waited.append)
        engine.run("swap_out", np.array([[0, 7], [3, 2]]))
        engine.run("swap_in", np.array([[5, 1], [8, 0]]))
        engine.submit("swap_in", np.array([[4, 1]])).wait()
        engine.run("copy", np.array([[1, 2]]))
        assert waited == [8, 9, 5]
        pool = engine.memory.host_pool
    assert pool.num_blocks == 0
