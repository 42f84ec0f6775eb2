"""The exceptions that Blockyard raises; all derive from `BlockyardError`.

They are defined here, in Python, so that they pickle and document like any class; the Rust core imports them.
"""

from __future__ import annotations

__all__ = [
    "BlockyardError",
    "CaptureError",
    "ForkedError",
    "InvalidArgumentError",
    "InvariantError",
    "LayoutError",
    "MappingError",
    "OpLibraryError",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "PageLockError",
    "SequenceStateError",
    "StepOrderError",
    "StoreError",
    "StoreFullError",
    "StoreURLError",
    "TraceError",
    "TransferQueueFullError",
    "UnknownSequenceError",
    "UnknownTicketError",
    "UnsupportedModelError",
    "WorkerError",
]


class BlockyardError(Exception):
    """Base of every error that Blockyard raises on purpose."""


class OutOfBlocksError(BlockyardError):
    """A tier has fewer free blocks than the call asked for; nothing was changed.

    Attributes:
        tier: `"device"`, `"host"` or `"external"`.
        wanted: blocks that the whole call needed.
        free: blocks that were free.
        total: blocks in the tier.
    """

    def __init__(self, message: str, tier: str = "device", wanted: int = 0, free: int = 0, total: int = 0) -> None:
        super().__init__(message, tier, wanted, free, total)
        self.tier = tier
        self.wanted = wanted
        self.free = free
        self.total = total

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownSequenceError(BlockyardError, KeyError):
    """The sequence has been freed, belongs to another manager, or never existed; nothing was changed."""

    def __str__(self) -> str:
        return str(self.args[0])


class SequenceStateError(BlockyardError):
    """A sequence is in the wrong tier, still moving, or lost its bytes; nothing was changed."""


class UnknownTicketError(BlockyardError, KeyError):
    """A ticket was never issued or is already closed; nothing was changed."""

    def __str__(self) -> str:
        return str(self.args[0])


class StepOrderError(BlockyardError):
    """A step's calls came out of order; nothing was changed. The message says what to call."""


class InvalidArgumentError(BlockyardError, ValueError):
    """An argument has the wrong value, shape or dtype; nothing was changed."""


class MappingError(InvalidArgumentError):
    """Block ids are out of range, repeated among destinations, or malformed; nothing was copied."""


class LayoutError(InvalidArgumentError):
    """Cache tensors do not have the layout that was declared."""


class TransferQueueFullError(BlockyardError):
    """More bytes would be under way than the copy engine's limit allows; nothing was submitted."""


class ForkedError(BlockyardError):
    """A copy engine or host pool is used in a fork, which has none of its threads and page-locked memory."""


class CaptureError(BlockyardError):
    """Something cannot be done while a CUDA graph is being captured, such as a copy into it; nothing was done."""


class PageLockError(BlockyardError):
    """Memory for host blocks is there, and could not be page-locked for a device, or not be unlocked.

    Attributes:
        wanted: bytes that the whole pool has.
        ready: bytes that are page-locked.
    """

    def __init__(self, message: str, wanted: int = 0, ready: int = 0) -> None:
        super().__init__(message, wanted, ready)
        self.wanted = wanted
        self.ready = ready

    def __str__(self) -> str:
        return str(self.args[0])


class OutOfMemoryError(BlockyardError, MemoryError):
    """The device or the system has less memory, or fewer addresses, than a call asks for; nothing was changed.

    Attributes:
        wanted: bytes that were asked for in all; 0 where only a driver's call says so.
    """

    def __init__(self, message: str, wanted: int = 0) -> None:
        super().__init__(message, wanted)
        self.wanted = wanted

    def __str__(self) -> str:
        return str(self.args[0])


class OpLibraryError(BlockyardError):
    """The compiled op library is missing or cannot be loaded; the message says why."""


class StoreError(BlockyardError):
    """A store could not be opened, or refused an operation."""


class StoreURLError(StoreError, ValueError):
    """The URL of a store is malformed; the message shows the part that is wrong."""


class StoreFullError(StoreError):
    """The storage behind a store cannot hold the size asked for."""


class TraceError(BlockyardError, ValueError):
    """A trace file is unreadable; the message names the line."""


class UnsupportedModelError(BlockyardError):
    """The model does not use the attention interface that paged attention plugs into."""


class WorkerError(BlockyardError):
    """A worker process has ended, has failed or does not answer; the message names it and says why."""


class InvariantError(BlockyardError):
    """The state contradicts itself: a bug in Blockyard."""
