"""Managers for tests, which take prefix cache options together with all others."""

from typing import Any

from blockyard import BlockManager, PrefixCaching

CACHING = ("eviction", "host", "host_copies_per_step", "max_events", "max_pinned")


def make_manager(*, prefix_caching: bool = True, **options: Any) -> BlockManager:
    """Make a manager; options of `PrefixCaching` turn the prefix cache on."""
    caching = {name: options.pop(name) for name in CACHING if name in options}
    return BlockManager(**options, prefix_caching=PrefixCaching(**caching) if prefix_caching or caching else False)


def step(manager: BlockManager) -> None:
    """Ends a step whose transfers have landed."""
    manager.complete(manager.take_decision().ticket)
    manager.check()
