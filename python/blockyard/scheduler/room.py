"""Whether requests fit the device, which may change its size."""

from __future__ import annotations

from blockyard._core import AllocStatus, BlockManager, Pool
from blockyard.errors import OutOfBlocksError
from blockyard.scheduler.request import RequestState

__all__ = ["capacity", "lack_of_room"]


def capacity(device: Pool) -> int:
    """Blocks of the device that sequences may use."""
    return device.num_blocks - device.reserved


def lack_of_room(manager: BlockManager, state: RequestState) -> OutOfBlocksError | None:
    """Why a request could never run to its end, if so: it would be preempted for ever."""
    device, size = manager.pool(), manager.block_size
    wanted, total, kept = state.blocks_to_end(size), device.num_blocks, device.reserved
    if wanted + kept <= total and manager.can_allocate(wanted * size).status != AllocStatus.NEVER:
        return None
    # What the manager wants beyond these two is the null block of a window.
    kept += wanted + kept <= total
    message = (
        f"request {state.request.request_id!r} needs up to {wanted} device blocks and {kept} kept free, "
        f"there are {total}"
    )
    return OutOfBlocksError(message, "device", wanted, total - kept, total)
