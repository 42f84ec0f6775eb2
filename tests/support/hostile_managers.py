"""Managers for hostile calls: one at ease, and one whose device shrinks under a ticket, a pin and jobs of a store."""

from __future__ import annotations

from collections.abc import Callable

import blockyard


class _Handle:
    """The handle of the first sequence of the manager that was made last."""

    number = 0

    def __index__(self) -> int:
        return self.number


HANDLE = _Handle()


def new_manager() -> blockyard.BlockManager:
    """A sequence that is pinned; a write of two blocks is job 1, a load of one is job 2."""
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
    """As `new_manager`, with ticket 2 under way."""
    manager = new_manager()
    manager.allocate(counts=[3])
    manager.swap_out([HANDLE])
    manager.take_decision()
    return manager


def shrinking() -> blockyard.BlockManager:
    """No block is free, one is cached, ticket 2 reads one, and one is in use beyond the end; pin and jobs as above."""
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
