"""Managers for hostile calls: an idle one, and one whose device shrinks during a ticket, a pin and store jobs."""

from __future__ import annotations

from collections.abc import Callable

import blockyard


class _Handle:
    """The handle of the newest manager's first sequence."""

    number = 0

    def __index__(self) -> int:
        return self.number


HANDLE = _Handle()


def new_manager() -> blockyard.BlockManager:
    """Return a manager with a pinned sequence; job 1 writes two blocks, and job 2 loads one."""
    caching = blockyard.PrefixCaching(host=True, eviction="priority")
    manager = blockyard.BlockManager(
        block_size=4, device_blocks=16, host_blocks=4, external_blocks=4, watermark=0.0, prefix_caching=caching
    )
    manager.prefix.store_jobs.start("through")
    HANDLE.number = int(manager.allocate(list(range(10))))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed([HANDLE])
    manager.pins.pin(HANDLE)
    manager.prefix.store_jobs.begin_write(2)
    manager.prefix.store_jobs.begin_load(list(range(20, 26)), 1)
    return manager


def stepping() -> blockyard.BlockManager:
    """Return a `new_manager` with ticket 2 in flight."""
    manager = new_manager()
    manager.allocate(counts=[3])
    manager.swap_out([HANDLE])
    manager.take_decision()
    return manager


def shrinking() -> blockyard.BlockManager:
    """Return a manager with no free block, a cached one, one that ticket 2 reads, and one in use beyond the new end."""
    caching = blockyard.PrefixCaching(host=True, eviction="priority")
    manager = blockyard.BlockManager(
        block_size=4, device_blocks=16, host_blocks=3, external_blocks=4, watermark=0.0, prefix_caching=caching
    )
    manager.prefix.store_jobs.start("back")
    HANDLE.number = int(manager.allocate(list(range(10))))
    cached = manager.allocate(list(range(100, 108)))
    (moving, _) = manager.allocate(counts=[4, 4 * 10])
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed([HANDLE, cached])
    manager.free(cached)
    manager.pins.pin(HANDLE)
    manager.swap_out([moving])
    manager.take_decision()
    manager.prefix.store_jobs.begin_write(1)
    manager.prefix.store_jobs.begin_load(list(range(20, 26)), 1)
    manager.defrag.resize(15)
    return manager


MANAGERS: tuple[Callable[[], blockyard.BlockManager], ...] = (new_manager, shrinking)
