"""Memory for host blocks, prepared chunk by chunk in the background."""

from __future__ import annotations

import math
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args

import torch
from torch import Tensor

from blockyard.engine.cuda.capture import relaxed_capture
from blockyard.engine.cuda.streams import with_index
from blockyard.engine.host_memory import HostMapping, node_of_device
from blockyard.engine.ops.library import declare_region
from blockyard.errors import BlockyardError, CaptureError, InvalidArgumentError, OutOfMemoryError, PageLockError
from blockyard.layout.sizes import as_int
from blockyard.workers.ownership import Process
from blockyard.workers.threads import Condition, start_worker

if TYPE_CHECKING:
    from typing_extensions import Self

OnFailure = Literal["raise", "unpinned"]
POOL_CHUNK_BYTES: Final = 256 << 20
# Portable to all contexts, and accessible to kernels.
_REGISTER_FLAGS: Final = 3
_FORBIDDEN_BY_CAPTURE: Final = 900
# A capture that forbids registration ends eventually.
_CAPTURE_PATIENCE: Final = 60.0
_CAPTURE_PAUSE: Final = 0.1


class Locker(Protocol):
    """Page-locks memory for a device."""

    def lock(self, address: int, num_bytes: int) -> str:
        """Page-lock a range. Returns why it could not be; empty on success.

        Raises:
            CaptureError: a graph capture forbids it now.
        """

    def unlock(self, address: int) -> str:
        """Undo `lock` for the range that starts there; returns and raises as `lock`."""


class CudaLocker:
    """Registers memory with CUDA, even while other threads capture graphs.

    Args:
        device: a device that uses the memory; all others may use it too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)  # the pool's thread has another current device

    def lock(self, address: int, num_bytes: int) -> str:
        """Register a range."""
        with relaxed_capture(), torch.cuda.device(self.device):
            error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, _REGISTER_FLAGS)
        return _reason("cudaHostRegister", error)

    def unlock(self, address: int) -> str:
        """Unregister a range."""
        with relaxed_capture(), torch.cuda.device(self.device):
            error = torch.cuda.cudart().cudaHostUnregister(address)
        return _reason("cudaHostUnregister", error)


class HostPool:
    """Rows for the blocks of the host tier, initially zeros.

    The first chunk is ready when the constructor returns; a thread prepares the others, in order. A chunk is ready when
    its memory is allocated and, with a locker, page-locked; a device must not access blocks that are not ready. Chunks
    hold whole blocks. Forks do not inherit page-locked memory.

    Args:
        num_blocks: number of blocks, may be 0.
        bytes_per_block: at least 1.
        locker: page-locks the memory; without one it is pageable.
        node: the preferred NUMA node.
        touch: allocate memory ahead of use, chunk by chunk; otherwise, without a locker, all blocks are ready at once
            and memory is allocated as they are written.
        chunk_bytes: approximate number of bytes prepared at a time.
        on_failure: what to do if memory cannot be page-locked: raise an error, here or from `wait`, or use pageable
            memory from that chunk on, which copies slowly (`problem` says why).
        mapping: memory for at least all blocks; None means fresh memory.

    Attributes:
        node: NUMA node of the memory; None without a preference, or if the system does not accept it.

    Raises:
        OutOfMemoryError: the memory is not available.
        PageLockError: the first chunk could not be page-locked.
        InvalidArgumentError: a number is too small, or `on_failure` is neither `"raise"` nor `"unpinned"`.

    Example:
        >>> from blockyard.engine import HostPool
        >>> pool = HostPool(8, 4096)
        >>> pool.wait(8)
        >>> pool.rows.shape
        torch.Size([8, 4096])
        >>> pool.close()
    """

    def __init__(
        self,
        num_blocks: int,
        bytes_per_block: int,
        *,
        locker: Locker | None = None,
        node: int | None = None,
        touch: bool = True,
        chunk_bytes: int = POOL_CHUNK_BYTES,
        on_failure: OnFailure = "raise",
        mapping: HostMapping | None = None,
    ) -> None:
        num_blocks, bytes_per_block = as_int("num_blocks", num_blocks), as_int("bytes_per_block", bytes_per_block)
        chunk_bytes, node = as_int("chunk_bytes", chunk_bytes), None if node is None else as_int("node", node)
        if num_blocks < 0 or bytes_per_block < 1 or chunk_bytes < 1:
            raise InvalidArgumentError(
                f"num_blocks is {num_blocks}, bytes_per_block {bytes_per_block}, chunk_bytes {chunk_bytes}, must be at "
                f"least 0, 1 and 1"
            )
        if on_failure not in get_args(OnFailure):
            raise InvalidArgumentError(f"on_failure is {on_failure!r}, must be one of {get_args(OnFailure)}")
        wanted = num_blocks * bytes_per_block
        mapping = mapping or HostMapping(wanted)
        self._rows: Tensor = mapping.tensor[:wanted].view(num_blocks, bytes_per_block)
        problem = mapping.prefer(node) if node is not None else ""
        self.node = None if problem else node
        chunk_blocks = blocks_per_chunk(bytes_per_block, chunk_bytes)
        if not touch and locker is None:
            chunk_blocks = max(num_blocks, 1)
        self._work = _Work(
            mapping,
            num_blocks,
            bytes_per_block,
            chunk_blocks,
            locker=locker,
            touch=touch,
            on_failure=on_failure,
            problem=problem,
        )
        self._finish = weakref.finalize(self, self._work.end)
        # At exit the process frees everything, and CUDA may be gone.
        self._finish.atexit = False
        if num_blocks > chunk_blocks or locker is not None:
            self._work.start()
        else:
            self._work.run()
        try:
            self.wait(min(num_blocks, chunk_blocks))
        except (OutOfMemoryError, PageLockError):
            self.close()
            raise

    @classmethod
    def for_device(
        cls,
        num_blocks: int,
        bytes_per_block: int,
        device: torch.device,
        *,
        pin_memory: bool = True,
        on_failure: OnFailure = "raise",
        mapping: HostMapping | None = None,
    ) -> Self:
        """Make a pool for copies to and from a device: page-locked and near the device if it is a CUDA device.

        For the CPU it is pageable memory, allocated as it is written. With `pin_memory=False` the memory is near the
        CUDA device and pageable.
        """
        if device.type != "cuda" or not num_blocks:
            return cls(num_blocks, bytes_per_block, touch=False, on_failure=on_failure, mapping=mapping)
        locker, node = CudaLocker(device) if pin_memory else None, node_of_device(device)
        return cls(num_blocks, bytes_per_block, locker=locker, node=node, on_failure=on_failure, mapping=mapping)

    @property
    def rows(self) -> Tensor:
        """The blocks, uint8 `[num_blocks, bytes_per_block]`, page-aligned.

        Raises:
            ForkedError: this is a fork, and the memory is page-locked for the process that made the pool.
        """
        if self._work.lost and len(self._rows):
            self._work.process.check()
        return self._rows

    @property
    def problem(self) -> str:
        """What failed; empty if nothing did."""
        return self._work.problem

    @property
    def ready_blocks(self) -> int:
        """Number of blocks that are ready."""
        return self._work.ready_blocks

    @property
    def pinned_blocks(self) -> int:
        """Number of blocks that are page-locked."""
        return self._work.pinned_blocks

    @property
    def num_blocks(self) -> int:
        """Number of blocks, ready or not; 0 when closed."""
        return int(self._rows.shape[0])

    def wait(self, num_blocks: int) -> None:
        """Wait until the first `num_blocks` blocks are ready.

        Args:
            num_blocks: at most the number of blocks.

        Raises:
            OutOfMemoryError, PageLockError: they cannot be made ready.
            InvalidArgumentError: there are fewer blocks.
            ForkedError: this is a fork of the process that made the pool, and they are not ready or page-locked.
            BlockyardError: the pool is closed.
        """
        if num_blocks > self.num_blocks:
            raise InvalidArgumentError(f"num_blocks is {num_blocks}, the host pool has {self.num_blocks}")
        if num_blocks > self._work.ready_blocks:
            self._work.wait(num_blocks)

    def close(self) -> None:
        """Unlock and release the memory. Idempotent. The memory is freed with the last tensor over it.

        No copy may be in flight. A fork only releases its view: the memory stays locked for the process that made the
        pool.

        Raises:
            PageLockError: a chunk could not be unlocked.
        """
        self._rows = self._rows.new_empty((0, self._rows.shape[1]))
        if not self._finish.detach():
            return
        failed, wanted = self._work.end(), self._work.mapping.num_bytes
        if failed:
            raise PageLockError(f"host memory is still page-locked: {failed}", wanted)
        self._work.mapping = HostMapping(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Work:
    """The thread's work. It holds no reference to the pool, so that a dropped pool is collected."""

    def __init__(
        self,
        mapping: HostMapping,
        num_blocks: int,
        bytes_per_block: int,
        chunk_blocks: int,
        *,
        locker: Locker | None,
        touch: bool,
        on_failure: OnFailure,
        problem: str,
    ) -> None:
        self.process = Process("a host pool")
        self.mapping, self.touch = mapping, touch
        self.bytes_per_block = bytes_per_block
        self.firsts = range(0, num_blocks, chunk_blocks)
        self.num_blocks, self.chunk_blocks = num_blocks, chunk_blocks
        self.locker, self.on_failure, self.problem = locker, on_failure, problem
        self.locking = locker is not None
        self.ready_blocks = self.pinned_blocks = 0
        self.failure: BaseException | None = None
        self.locked: list[int] = []
        # Enter the lock itself, not the condition: an interrupt within `Condition.__enter__` would leave it locked.
        self.lock, self.ended = threading.RLock(), False
        self.changed = Condition(self.lock)
        self.thread: threading.Thread | None = None
        self.lost = False  # in a fork: page-locked memory was not inherited
        if self.locking:
            self.mapping.inherit(forks=False)
            _page_locked.add(self)

    def start(self) -> None:
        self.thread = start_worker("blockyard-host-pool", self.run, self.stop, self.abandon)

    def run(self) -> None:
        for chunk, first in enumerate(self.firsts):
            if self.ended:
                return
            if first < self.ready_blocks:
                continue  # called again: see `start_worker`
            end = min(first + self.chunk_blocks, self.num_blocks)
            try:
                self._make_ready(chunk, first * self.bytes_per_block, end * self.bytes_per_block)
            except (MemoryError, PageLockError) as error:
                self.abandon(error)
                return
            with self.lock:
                self.ready_blocks = end
                self.pinned_blocks = end if self.locking else self.pinned_blocks
                self.changed.notify_all()

    def abandon(self, error: BaseException) -> None:
        """Fail the blocks that are not ready."""
        with self.lock:
            self.failure = error
            self.changed.notify_all()

    def wait(self, num_blocks: int) -> None:
        self.process.check()
        with self.lock:
            self.changed.wait_for(lambda: self.ready_blocks >= num_blocks or self.failure or self.ended)
            if self.ready_blocks >= num_blocks:
                return
            if self.failure is None:
                raise BlockyardError("the host pool is closed")
            # A fresh exception each time, as a traceback grows with every raise.
            raise type(self.failure)(*self.failure.args)

    def stop(self) -> None:
        with self.lock:
            self.ended = True
            self.changed.notify_all()

    def end(self) -> str:
        """Stop and unlock everything. Returns the reasons for failures."""
        if not self.process.is_current:
            return ""
        self.stop()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        if not self.locked:
            self._inherit()
            return ""
        declare_region(self.mapping.address, 0, 1)
        # In a thread, like locking: CUDA's sticky error state stays there.
        failed: list[str] = []
        unlocking = threading.Thread(target=self._unlock, args=(failed,), name="blockyard-host-pool")
        unlocking.start()
        unlocking.join()
        if not failed:
            self._inherit()
        return "; ".join(failed)

    def lose(self) -> None:
        """Record in a fork that it has not inherited the memory."""
        self.lost, self.ready_blocks = True, 0
        self.mapping.hold_addresses()

    def _inherit(self) -> None:
        """Let forks inherit the memory, once none of it is page-locked."""
        if self in _page_locked:
            _page_locked.discard(self)
            self.mapping.inherit(forks=True)

    def _unlock(self, failed: list[str]) -> None:
        while self.locked and self.locker is not None:
            reason = self._outlast_captures(partial(self.locker.unlock, self.locked.pop()), even_ended=True)
            if reason:
                failed.append(reason)

    def _outlast_captures(self, work: Callable[[], str], *, even_ended: bool) -> str:
        """Do work that a capture may forbid, retrying until it ends. Returns why it failed, if it did."""
        until, seconds = time.monotonic() + _CAPTURE_PATIENCE, _CAPTURE_PAUSE
        while True:
            try:
                return work()
            except CaptureError as error:
                if time.monotonic() + seconds > until or (self.ended and not even_ended):
                    return str(error)
            with self.lock:
                self.changed.wait_for(lambda: self.ended and not even_ended, seconds)
            seconds *= 2

    def _make_ready(self, chunk: int, first: int, end: int) -> None:
        if self.touch:
            self.mapping.populate(first, end)
        if self.locker is None or not self.locking:
            return
        lock = partial(self.locker.lock, self.mapping.address + first, end - first)
        reason = self._outlast_captures(lock, even_ended=False)
        if not reason:
            self.locked.append(self.mapping.address + first)
            declare_region(self.mapping.address, end, self.chunk_blocks * self.bytes_per_block)
            return
        total = self.mapping.num_bytes
        message = (
            f"chunk {chunk} of {len(self.firsts)} ({end - first} bytes) of the host pool could not be page-locked: "
            f"{reason}; {first} of {total} bytes are, and RLIMIT_MEMLOCK is {_memlock_limit()}"
        )
        if self.on_failure == "raise":
            raise PageLockError(message, total, first)
        self.problem, self.locking = message, False
        if not self.locked:
            self._inherit()


# Pools whose memory forks do not inherit.
_page_locked: weakref.WeakSet[_Work] = weakref.WeakSet()


def _lose_page_locked() -> None:
    for work in tuple(_page_locked):
        work.lose()


os.register_at_fork(after_in_child=_lose_page_locked)


def blocks_per_chunk(bytes_per_block: int, chunk_bytes: int) -> int:
    """Return how many whole blocks make a chunk of at least `chunk_bytes` that ends on a page boundary.

    Args:
        bytes_per_block: at least 1.
        chunk_bytes: at least 1.
    """
    unit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, bytes_per_block)
    return unit * -(-chunk_bytes // (unit * bytes_per_block))


def _memlock_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"


def _reason(call: str, error: object) -> str:
    """Describe the result of a CUDA call; empty for success.

    Raises:
        CaptureError: a graph is being captured.
    """
    code = int(error)  # type: ignore[call-overload]
    if code == _FORBIDDEN_BY_CAPTURE:
        raise CaptureError(f"{call} says {torch.cuda.cudart().cudaGetErrorString(error)} ({code})")
    return f"{call} says {torch.cuda.cudart().cudaGetErrorString(error)} ({code})" if code else ""
