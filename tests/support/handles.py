"""Handles in a manager's format (decision 0004), for tests without a manager."""

import re

from blockyard import BlockManager


def first_handles(manager: BlockManager, count: int) -> list[int]:
    """Return the handles of a manager's first sequences, in rows that no other sequence had."""
    number = re.match(r"BlockManager\(number=(\d+),", repr(manager))
    assert number is not None
    return [int(number[1]) << 48 | 1 << 24 | row for row in range(count)]
