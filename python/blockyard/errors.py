"""The exceptions that Blockyard raises; all derive from `BlockyardError`.

They are Python classes so that pickling and documentation work as usual; the Rust core imports them.
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
    """Base class of all errors that Blockyard raises deliberately."""


class OutOfBlocksError(BlockyardError):
    """A tier has fewer free blocks than the call needs; nothing was changed.

    Attributes:
        tier: `"device"`, `"host"` or `"external"`.
        wanted: total number of blocks that the call needed.
        free: number of free blocks.
        total: number of blocks in the tier.
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
    """A step's calls were made out of order; nothing was changed. The message says what to call."""


class InvalidArgumentError(BlockyardError, ValueError):
    """An argument has the wrong value, shape or dtype; nothing was changed."""


class MappingError(InvalidArgumentError):
    """Block ids are out of range, repeated as destinations, or malformed; nothing was copied."""


class LayoutError(InvalidArgumentError):
    """Cache tensors do not have the declared layout."""


class TransferQueueFullError(BlockyardError):
    """The transfer would exceed the copy engine's limit on bytes in flight; nothing was submitted."""


class ForkedError(BlockyardError):
    """An object was used in a fork of the process that created it, whose threads and connections are not the fork's."""


class CaptureError(BlockyardError):
    """The operation is not possible while a CUDA graph is being captured; nothing was done."""


class PageLockError(BlockyardError):
    """Memory for host blocks was allocated but could not be page-locked for a device, or could not be unlocked.

    Attributes:
        wanted: size of the whole pool, in bytes.
        ready: number of bytes already page-locked.
    """

    def __init__(self, message: str, wanted: int = 0, ready: int = 0) -> None:
        super().__init__(message, wanted, ready)
        self.wanted = wanted
        self.ready = ready

    def __str__(self) -> str:
        return str(self.args[0])


class OutOfMemoryError(MemoryError, BlockyardError):
    """The device or system does not have the memory, or the address space, that a call needs; nothing was changed.

    Attributes:
        wanted: total number of bytes requested; 0 if the failed driver call does not report it.
    """

    def __init__(self, message: str, wanted: int = 0) -> None:
        super().__init__(message, wanted)
        self.wanted = wanted

    def __str__(self) -> str:
        return str(self.args[0])


class OpLibraryError(BlockyardError):
    """The compiled op library is missing or cannot be loaded; the message says why."""


class StoreError(BlockyardError):
    """A store could not be opened, or rejected an operation."""


class StoreURLError(StoreError, ValueError):
    """A store's URL is malformed; the message shows the faulty part."""


class StoreFullError(StoreError):
    """The storage behind a store is too small for the requested size."""


class TraceError(BlockyardError, ValueError):
    """A trace file cannot be read or written; the message names the file and, if known, the line."""


class UnsupportedModelError(BlockyardError):
    """The model does not use the attention interface that paged attention replaces."""


class WorkerError(BlockyardError):
    """A worker process exited, failed or does not respond; the message names it and says why."""


class InvariantError(BlockyardError):
    """The state contradicts itself: a bug in Blockyard."""
