"""A block manager of your own under Blockyard's test kit: it has four calls, its own exception, and no other interface.

Run it with `python examples/own_manager.py`, or let pytest or unittest collect `TestManager`. The kit opens, grows,
forks and frees random sequences, executes the copies, and reads every token back through the block tables.
"""

import unittest

from blockyard.testing import Config
from blockyard.testing.machines import manager_machine


class NoBlocks(Exception):  # noqa: N818 (as your manager names it)
    """Too few blocks are free; nothing has changed."""


class SmallManager:
    """Block tables with reference counts: sequences that share a block copy it before they write to it."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size, self.unused = block_size, list(range(num_blocks))
        self.users: dict[int, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.copied: list[tuple[int, int]] = []
        self.opened = 0

    def allocate(self, num_tokens: int) -> str:
        """Open a sequence of some tokens."""
        count = -(-num_tokens // self.block_size)
        if count > len(self.unused):
            raise NoBlocks(f"{count} blocks wanted, {len(self.unused)} free")
        return self.open([self.take() for _ in range(count)], num_tokens)

    def append(self, name: str) -> int:
        """Append a token, and return its slot."""
        table, length = self.tables[name], self.lengths[name]
        starts = length % self.block_size == 0
        if starts or self.users[table[-1]] > 1:
            if not self.unused:
                raise NoBlocks("1 block wanted, 0 free")
            if not starts:
                old = table.pop()
                self.users[old] -= 1
                self.copied.append((old, self.unused[-1]))
            table.append(self.take())
        self.lengths[name] += 1
        return table[-1] * self.block_size + length % self.block_size

    def fork(self, name: str) -> str:
        """Open a sequence that shares all blocks of another."""
        for block in self.tables[name]:
            self.users[block] += 1
        return self.open(list(self.tables[name]), self.lengths[name])

    def free(self, name: str) -> None:
        """Free a sequence, and the blocks that no other one uses."""
        for block in self.tables.pop(name):
            self.users[block] -= 1
            if not self.users[block]:
                self.unused.append(block)

    def copies(self) -> list[tuple[int, int]]:
        """Return the blocks to copy before the next step, as (from, to)."""
        copied, self.copied = self.copied, []
        return copied

    def take(self) -> int:
        """Take a free block."""
        block = self.unused.pop()
        self.users[block] = 1
        return block

    def open(self, table: list[int], length: int) -> str:
        """Give a block table a name."""
        self.opened += 1
        name = f"s{self.opened}"
        self.tables[name], self.lengths[name] = table, length
        return name


def make(config: Config) -> SmallManager:
    """Make the manager under test."""
    return SmallManager(config.block_size, config.device_blocks)


CALLS = {
    "allocate": lambda mine, num_tokens: mine.allocate(num_tokens),
    "append": lambda mine, name: mine.append(name),
    "fork": lambda mine, name: mine.fork(name),
    "free": lambda mine, name: mine.free(name),
    "copies": lambda mine: mine.copies(),
    "block_table": lambda mine, name: mine.tables[name],
}
TestManager = manager_machine(make, **CALLS, full=NoBlocks).TestCase

if __name__ == "__main__":
    unittest.main()
