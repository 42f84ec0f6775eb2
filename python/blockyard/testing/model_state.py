"""State of the reference model: tables, leases and links between blocks of equal bytes; the rest is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from blockyard.errors import OutOfBlocksError
from blockyard.testing.interfaces import Config, TierName

__all__ = ["Lease", "ModelBlock", "ModelState", "ModelStep", "Row"]


class ModelBlock(NamedTuple):
    """A block of a tier."""

    tier: TierName
    id: int


class Lease(NamedTuple):
    """`use` is "drain" (read on the device, ahead of the step's writes), "read" or "write"."""

    block: ModelBlock
    use: str


@dataclass(slots=True)
class Row:
    """One sequence: its block table and transfers in flight."""

    tier: TierName
    table: list[int]
    length: int
    written: int = 0  # step in which tokens last got slots
    ticket: int = 0  # last ticket that moves or copies its blocks
    moving: bool = False  # whether that ticket moves it between tiers
    lost: bool = False


@dataclass(slots=True)
class ModelStep:
    """The transfers of one step, until its ticket ends."""

    transfers: dict[tuple[str, TierName, TierName], list[tuple[int, int]]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    fresh: set[ModelBlock] = field(default_factory=set)  # blocks written in this step that others may share
    reuses_drained: bool = False


class ModelState:
    """Tables and leases of three tiers; derived numbers are not stored.

    Args:
        config: tier sizes.
    """

    def __init__(self, config: Config) -> None:
        self.block_size = config.block_size
        self.blocks = config.blocks()
        self.sequences: dict[int, Row] = {}
        self.ticket = 1  # ticket of the open step
        self.step = ModelStep()
        self.running: dict[int, ModelStep] = {}
        self.tier_copies: dict[ModelBlock, ModelBlock] = {}
        # Unfinished transfers that a block's bytes depend on: if one fails, the bytes are lost.
        self.unlanded: dict[ModelBlock, set[tuple[int, ModelBlock]]] = {}

    def count(self, tokens: int) -> int:
        """Return the number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def refs(self, block: ModelBlock) -> int:
        """Count the tables that name a block."""
        return sum(row.table.count(block.id) for row in self.sequences.values() if row.tier == block.tier)

    def uses(self, tier: TierName) -> dict[int, list[str]]:
        """For each block of a tier, its uses by unfinished transfers and by this step's."""
        uses: dict[int, list[str]] = {block: [] for block in range(self.blocks[tier])}
        for step in (*self.running.values(), self.step):
            for lease in step.leases:
                if lease.block.tier == tier:
                    uses[lease.block.id].append(lease.use)
        return uses

    def _unreferenced(self, tier: TierName) -> list[int]:
        used = {block for row in self.sequences.values() if row.tier == tier for block in row.table}
        return [block for block in range(self.blocks[tier]) if block not in used]

    def free_blocks(self, tier: TierName) -> list[int]:
        """List the blocks that no table names and no transfer uses."""
        uses = self.uses(tier)
        return [block for block in self._unreferenced(tier) if not uses[block]]

    def overlappable_blocks(self, tier: TierName) -> list[int]:
        """List the blocks that are only being read on the device: work ordered after the reads may take them."""
        uses = self.uses(tier)
        return [block for block in self._unreferenced(tier) if set(uses[block]) == {"drain"}]

    def available(self, tier: TierName) -> int:
        """Return the number of blocks that the open step may take for work on the device."""
        return len(self.free_blocks(tier)) + len(self.overlappable_blocks(tier))

    def require(self, tier: TierName, wanted: int, *, draining_too: bool = True) -> None:
        """Raise `OutOfBlocksError` unless `wanted` blocks are available."""
        free = self.available(tier) if draining_too else len(self.free_blocks(tier))
        if wanted > free:
            total = self.blocks[tier]
            message = f"asked for {wanted} {tier} blocks, {free} of {total} are free"
            raise OutOfBlocksError(message, tier, wanted, free, total)

    def take(self, tier: TierName, count: int) -> list[int]:
        """Take blocks, lowest ids first; those still being read come last."""
        free = self.free_blocks(tier)[:count]
        if len(free) < count:
            self.step.reuses_drained = True
            free += self.overlappable_blocks(tier)[: count - len(free)]
        for block in free:
            self.unlanded.pop(ModelBlock(tier, block), None)
        return free

    def drop(self, row: Row, index: int) -> None:
        """Remove a block from a table."""
        block = ModelBlock(row.tier, row.table.pop(index))
        if self.refs(block) == 0:
            self.unlink(block)

    def transfer(self, kind: str, source: ModelBlock, target: ModelBlock, use: str) -> None:
        """Add a transfer to this step."""
        pairs = self.step.transfers.setdefault((kind, source.tier, target.tier), [])
        pairs.append((source.id, target.id))
        self.step.leases += [Lease(source, use), Lease(target, "write")]
        self.unlanded[target] = self.unlanded.get(source, set()) | {(self.ticket, target)}

    def unlink(self, block: ModelBlock) -> None:
        """Drop a block's link to the block of equal bytes."""
        tier_copy = self.tier_copies.pop(block, None)
        if tier_copy is not None:
            del self.tier_copies[tier_copy]

    def link(self, a: ModelBlock, b: ModelBlock) -> None:
        """Record that exactly these two blocks hold the same bytes."""
        self.unlink(a)
        self.unlink(b)
        self.tier_copies[a], self.tier_copies[b] = b, a

    def tier_copy(self, block: ModelBlock, to: TierName) -> ModelBlock | None:
        """Return the block of the other tier that holds the same bytes, or will after this step.

        A link outlives its call only between full blocks; a sequence truncated since then may share one, too.
        """
        tier_copy = self.tier_copies.get(block)
        if tier_copy is None or tier_copy.tier != to:
            return None
        landed = "write" not in self.uses(to)[tier_copy.id]
        return tier_copy if landed or tier_copy in self.step.fresh else None
