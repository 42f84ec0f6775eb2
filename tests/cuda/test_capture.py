"""A host pool is made ready beside graph captures, over a stand-in that forbids what the runtime forbids."""

import ctypes
import gc
import threading
from contextlib import nullcontext

import pytest
import torch

from blockyard.engine import host_pool
from blockyard.engine.cuda import capture
from blockyard.engine.host_pool import CudaLocker, HostPool
from blockyard.errors import PageLockError

CHUNK, BLOCK, CHUNKS = 2 << 20, 64 << 10, 4


def pool_of(locker: CudaLocker) -> HostPool:
    return HostPool(CHUNKS * CHUNK // BLOCK, BLOCK, locker=locker, chunk_bytes=CHUNK)


GLOBAL, THREAD_LOCAL, RELAXED = range(3)


class FakeRuntime:
    """What torch gives of the CUDA runtime, over the stand-in."""

    def __init__(self, fake: ctypes.CDLL) -> None:
        self.fake, self.codes = fake, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.codes.append(self.fake.cudaHostRegister(address, num_bytes, flags))
        return self.codes[-1]

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.codes.append(self.fake.cudaHostUnregister(address))
        return self.codes[-1]

    def cudaGetErrorString(self, _error: int) -> str:  # noqa: N802
        return "as the test wants it"


@pytest.fixture
def runtime(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(fake)
    fake.fake_reset(0, 0, *[True, False, True], 1024)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(capture, "load_driver", lambda: fake)
    return made


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_pool_is_made_ready_and_closed_while_another_thread_captures(
    fake: ctypes.CDLL, runtime: FakeRuntime, mode: int
):
    fake.fake_begin_capture(mode)
    try:
        with pool_of(CudaLocker(torch.device("cuda:0"))) as pool:
            pool.wait(pool.num_blocks)
            assert fake.fake_registered() == CHUNKS
        assert runtime.codes == [0] * 2 * CHUNKS
    finally:
        assert fake.fake_end_capture() == 0


@pytest.mark.usefixtures("runtime")
def test_blocks_are_copied_across_chunks_and_the_driver_is_not_asked_about_each(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_pool, "declare_region", fake.fake_declare)
    with pool_of(CudaLocker(torch.device("cuda:0"))) as pool:
        pool.wait(pool.num_blocks)
        start, size = pool.rows.data_ptr(), CHUNKS * CHUNK
        device = torch.arange(size // 8).view(torch.uint8).view(-1, BLOCK)
        fake.fake_host(start, start + size)
        fake.fake_map(device.data_ptr(), device.data_ptr() + size)
        fake.fake_strategy(1, 1, 12)
        fake.fake_batch_pieces(CHUNKS - 1)
        blocks = torch.arange(pool.num_blocks)
        pairs = torch.stack((blocks, blocks), 1)
        torch.ops.blockyard_fake.swap([device], [pool.rows], pairs, True, False)
        assert torch.equal(pool.rows, device)
        # One piece a chunk, and questions about both ends of the pool and the device's memory.
        assert (fake.fake_calls(), fake.fake_questions()) == (b"BB", 3)
    # Whatever has these addresses next is asked about.
    assert not fake.fake_is_declared(start)


def test_a_thread_is_as_strict_after_it_has_registered_memory_as_before(fake: ctypes.CDLL, runtime: FakeRuntime):
    memory = host_pool.HostMapping(CHUNK)
    locker = CudaLocker(torch.device("cuda:0"))
    mode = ctypes.c_int(THREAD_LOCAL)
    fake.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert (locker.lock(memory.address, CHUNK), locker.unlock(memory.address)) == ("", "")
    fake.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == THREAD_LOCAL
    assert runtime.codes == [0, 0]


def test_what_a_capture_forbids_is_done_after_it(
    fake: ctypes.CDLL, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
):
    # A driver that knows no modes: the capture is lost, the pool is not.
    monkeypatch.setattr(capture, "load_driver", lambda: None)
    monkeypatch.setattr(host_pool, "_CAPTURE_PAUSE", 1e-3)
    ended: list[int] = []

    def end_captures() -> None:
        fake.fake_begin_capture(GLOBAL)
        refused.set()
        while CAPTURE_FORBIDS not in runtime.codes:
            threading.Event().wait(1e-3)
        ended.append(fake.fake_end_capture())

    for work in (lambda pool: pool.wait(pool.num_blocks), HostPool.close):
        refused, locker = threading.Event(), CudaLocker(torch.device("cuda:0"))
        pool = pool_of(locker) if work is HostPool.close else None
        if pool is not None:
            pool.wait(pool.num_blocks)
        runtime.codes.clear()
        capturing = threading.Thread(target=end_captures)
        capturing.start()
        refused.wait(300)
        work(pool or pool_of(locker))
        capturing.join(300)
        assert ended.pop() == CAPTURE_INVALIDATED
    gc.collect()
    assert fake.fake_registered() == 0


CAPTURE_FORBIDS, CAPTURE_INVALIDATED = 900, 901


def test_a_capture_without_end_is_a_reason(fake: ctypes.CDLL, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capture, "load_driver", lambda: None)
    monkeypatch.setattr(host_pool, "_CAPTURE_PATIENCE", 0.0)
    fake.fake_begin_capture(GLOBAL)
    try:
        with pytest.raises(PageLockError, match=r"cudaHostRegister says as the test wants it \(900\); 0 of"):
            pool_of(CudaLocker(torch.device("cuda:0")))
        assert runtime.codes == [CAPTURE_FORBIDS]
    finally:
        fake.fake_end_capture()
