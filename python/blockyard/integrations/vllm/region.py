"""Host memory shared by the workers and the scheduler of one engine."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard.engine.host_memory import HostMapping
from blockyard.errors import InvalidArgumentError, OutOfMemoryError
from blockyard.stores.adapters.chunks import TokenOrder
from blockyard.workers.ownership import Process

__all__ = ["MOST_PARTS", "SharedRegion", "WorkerPieces"]

MOST_PARTS: Final = 6
"""Maximum number of parts in a `TokenOrder`."""

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 (files there are 0600, and never follow links)
_WORD: Final = np.dtype("<u8")
_MAX_PLACES: Final = 8 * _WORD.itemsize
_DIGEST_BYTES: Final = 32
_PIECES: Final = struct.Struct(f"<QI3I{2 * MOST_PARTS}I")  # `WorkerPieces`; 0 bytes for none, 0 groups for no order
_STATE_BYTES: Final = -(-(_MAX_PLACES * (1 + _DIGEST_BYTES + _PIECES.size)) // mmap.PAGESIZE) * mmap.PAGESIZE
_LOCK: Final = struct.Struct("hhqqi")  # `struct flock` of a 64-bit Linux


class WorkerPieces(NamedTuple):
    """How a worker's blocks are cut, see `HeadShards`.

    Args:
        piece_bytes: bytes of a piece.
        shard: the worker's shard of the heads.
        tokens: the order of the tokens, if that is known.
    """

    piece_bytes: int
    shard: int
    tokens: TokenOrder | None = None

    def pack(self) -> bytes:
        """Return this as bytes for the page of the state."""
        order = self.tokens or TokenOrder(0, 0, 0, ())
        parts = [number for part in order.parts for number in part]
        return _PIECES.pack(self.piece_bytes, self.shard, *order[:3], *parts, *[0] * (2 * MOST_PARTS - len(parts)))

    @classmethod
    def unpack(cls, record: bytes) -> WorkerPieces | None:
        """Return what `pack` has packed; None for zeros."""
        piece_bytes, shard, groups, layers, repeats, *parts = _PIECES.unpack(record)
        pairs = tuple((runs, size) for runs, size in zip(parts[::2], parts[1::2], strict=True) if runs)
        order = TokenOrder(groups, layers, repeats, pairs) if groups else None
        return cls(piece_bytes, shard, order) if piece_bytes else None


class SharedRegion:
    """One process's view of the host memory shared by an engine's workers and its scheduler.

    The file in `/dev/shm` has one part per worker, or one for all, and pages that record which processes have mapped
    it, what each worker computes with, and how its blocks are cut by heads. The last process to map it unlinks the
    name, so the memory is freed with the last process, however that ends. Each process holds a lock on its place while
    it has the memory mapped; the lock ends with the process. A file without such locks was left by dead processes: the
    next process removes it and creates a new one.

    Args:
        engine_id: the engine's id, from vLLM.
        part_bytes: bytes of a part.
        world_size: number of workers, all on this machine.
        place: rank of this worker; `world_size` for the scheduler.
        identity: digest of what this worker computes with; see `identity`.
        pieces: how this worker's blocks are cut by heads; None if they cannot.
        is_one: whether all workers use one part, since they have the same bytes.

    Raises:
        OutOfMemoryError: `/dev/shm` has too little room.
        InvalidArgumentError: the file has another size, or another process holds this place.
    """

    def __init__(
        self,
        engine_id: str,
        part_bytes: int,
        world_size: int,
        place: int,
        identity: bytes = bytes(_DIGEST_BYTES),
        *,
        pieces: WorkerPieces | None = None,
        is_one: bool = False,
    ) -> None:
        if not 0 <= place <= world_size < _MAX_PLACES:
            raise InvalidArgumentError(f"place is {place}, must be 0 to world_size {world_size}, at most 63")
        self._part_bytes = part_bytes
        self._stride = -(-max(1, part_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._world_size, self._num_parts = world_size, 1 if is_one else world_size
        self._all, self._is_complete = (2 << world_size) - 1, False
        self._path = _FOLDER / f"blockyard-{os.geteuid()}-{hashlib.sha256(engine_id.encode()).hexdigest()[:32]}"
        file = self._open()
        try:
            self._attach(file, place, identity + (pieces or WorkerPieces(0, 0)).pack())
            # The mapping keeps the descriptor open, and with it the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
            self._state = HostMapping(_STATE_BYTES, file=file, offset=self._stride * self._num_parts)
            self._parts = [
                HostMapping(self._stride, file=file, offset=self._stride * part)
                for part in (range(self._num_parts) if place == world_size else [min(place, self._num_parts - 1)])
            ]
            # An engine that ends before all processes have mapped the file leaves none behind.
            process = Process("shared host memory")
            self._finish = weakref.finalize(self, _remove, self._path, os.fstat(file).st_ino, process)
        finally:
            os.close(file)

    @property
    def mapping(self) -> HostMapping:
        """The memory of this worker."""
        return self._parts[0]

    @property
    def is_complete(self) -> bool:
        """Whether all workers and the scheduler have mapped the memory."""
        if not self._is_complete:  # each lookup asks, and once it is complete, it stays so
            self._is_complete = int(self._state.tensor[: _WORD.itemsize].numpy().view(_WORD)[0]) == self._all
        return self._is_complete

    @property
    def identities(self) -> list[bytes]:
        """What each worker computes with; zeros for a worker that did not say, or has not mapped the memory yet."""
        page = self._state.tensor.numpy()
        places = (_place_of_identity(rank) for rank in range(self._world_size))
        return [page[place : place + _DIGEST_BYTES].tobytes() for place in places]

    @property
    def pieces(self) -> list[WorkerPieces | None]:
        """How each worker's blocks are cut; None also for a worker that has not mapped the memory yet."""
        page = self._state.tensor.numpy()
        places = (_place_of_identity(rank) + _DIGEST_BYTES for rank in range(self._world_size))
        return [WorkerPieces.unpack(page[place : place + _PIECES.size].tobytes()) for place in places]

    def close(self) -> None:
        """Unlink the file if not all processes have mapped it; the memory stays while it is used.

        Does nothing in a fork.
        """
        self._finish()

    def rows(self, count: int) -> list[NDArray[np.uint8]]:
        """View each part as rows, uint8 `[count, bytes]`; for the scheduler."""
        return [part.tensor[: self._part_bytes].numpy().reshape(count, -1) for part in self._parts]

    def _open(self) -> int:
        """Open the file by name, with the lock held; remove a left-over file first."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if _lock_name(self._path, file):
                    there = os.fstat(file)
                    if there.st_size == 0 or there.st_uid != os.geteuid() or _is_held(file):
                        return file
                    self._path.unlink()
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _attach(self, file: int, place: int, record: bytes) -> None:
        """Register this process; the first one creates the file, the last one unlinks it. The lock is held."""
        at = self._stride * self._num_parts
        size = at + _STATE_BYTES
        there = os.fstat(file)
        if there.st_uid != os.geteuid():
            raise InvalidArgumentError(f"{self._path} belongs to user {there.st_uid}, must be this one's")
        if there.st_size == 0:
            self._reserve(file, size)
        elif there.st_size != size:
            raise InvalidArgumentError(
                f"{self._path} has {there.st_size} bytes, must have {size}: workers and scheduler have other options"
            )
        present = int(np.frombuffer(os.pread(file, _WORD.itemsize, at), _WORD)[0])
        if present >> place & 1:
            raise InvalidArgumentError(f"place is {place}, which another process has in {self._path}")
        _hold(file, place)
        if place < self._world_size:
            os.pwrite(file, record, at + _place_of_identity(place))
        present |= 1 << place
        os.pwrite(file, np.array([present], _WORD).tobytes(), at)
        if present == self._all:
            self._path.unlink()

    def _reserve(self, file: int, size: int) -> None:
        room = os.fstatvfs(file)
        free = room.f_bavail * room.f_frsize
        if size > free:
            self._path.unlink()
            raise OutOfMemoryError(f"{_FOLDER} has {free} bytes free, the host tier needs {size}", size)
        os.ftruncate(file, size)


def _place_of_identity(rank: int) -> int:
    """Return where the state's pages hold what a worker computes with: after the word of places."""
    return _MAX_PLACES + rank * (_DIGEST_BYTES + _PIECES.size)


def _lock_name(path: Path, file: int) -> bool:
    """Wait for the lock that guards linking and unlinking a file. Returns whether this file is still linked."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _hold(file: int, place: int) -> None:
    """Hold a place for as long as the file is open or mapped."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))


def _is_held(file: int) -> bool:
    """Return whether another opener of the file holds a place."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _MAX_PLACES, 0)
    return bool(_LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)


def _remove(path: Path, inode: int, process: Process) -> None:
    """Unlink the file, if it is still linked and this is not a fork."""
    if not process.is_current:
        return
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino == inode and _lock_name(path, file):
                path.unlink()
        finally:
            os.close(file)
