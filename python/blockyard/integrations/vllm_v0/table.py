"""The block table of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockyard.integrations.vllm_v0.device import CpuGpuBlockAllocator
from blockyard.integrations.vllm_v0.interfaces import Block, Device, require


class BlockTable:
    """The block table of one sequence.

    Args:
        block_size: token slots in a block.
        block_allocator: blocks of all devices.
        _blocks: blocks that the table takes over.
        max_block_sliding_window: blocks of the window, or None for all.
    """

    num_full_slots: int

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        _blocks: Sequence[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        require(block_size > 0, f"block_size is {block_size}, must be at least 1")
        self._block_size, self._allocator = block_size, block_allocator
        self._max_block_sliding_window = max_block_sliding_window
        self.num_full_slots = sum(len(block.token_ids) for block in _blocks or ())
        self._dropped = 0  # blocks at the start that are outside the window
        self.update(_blocks or ())

    @staticmethod
    def get_num_required_blocks(token_ids: Sequence[int], block_size: int, num_lookahead_slots: int = 0) -> int:
        """Return how many blocks tokens and lookahead slots need, ignoring hits."""
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    # The engine keeps these lists: they grow in place, and are replaced when blocks move.

    @property
    def physical_block_ids(self) -> list[int]:
        """Ids of the blocks."""
        return self._ids

    @property
    def blocks(self) -> list[Any]:
        """The blocks."""
        return self._blocks

    @property
    def _num_empty_slots(self) -> int:
        return len(self._blocks) * self._block_size - self.num_full_slots

    def update(self, blocks: Sequence[Block]) -> None:
        """Replace the blocks by these, or by these ids."""
        self._blocks: list[Any] = list(blocks)
        self._ids: list[Any] = [block.block_id for block in blocks]
        self._computed = 0  # full blocks at the start that are known to be computed

    def allocate(self, token_ids: list[int], device: Any = Device.GPU, extra_hash: int | None = None) -> None:
        """Allocate blocks for all tokens, or none."""
        is_new = len(token_ids) > 0 and not self._blocks
        require(is_new, "allocate needs an empty table and at least one token")
        size, end = self._block_size, len(token_ids) // self._block_size * self._block_size
        chunks = [token_ids[first : first + size] for first in range(0, end, size)]
        self.update(self._allocator.of(device).allocate_chain(None, chunks, token_ids[end:], extra_hash))
        self.num_full_slots, self._dropped = len(token_ids), 0

    def append_token_ids(
        self,
        token_ids: list[int],
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Append tokens and make room for more, all or nothing. Shared blocks are copied before they are written."""
        self._require_allocated()
        size, full = self._block_size, self.num_full_slots
        first, slots = full // size, len(token_ids) + num_lookahead_slots
        end = -(-(full + len(token_ids)) // size) if token_ids else first
        outside = self._outside(num_computed_slots)
        self._require_room(range(first, end), slots, outside)
        self._drop(outside)
        self.ensure_num_empty_slots(slots, extra_hash)
        at = 0
        for index in range(first, end):
            block = self._blocks[index]
            room = size - (full % size if index == first else 0)
            block.append_token_ids(token_ids[at : at + room])
            self._ids[index] = block.block_id
            at += room
        self.num_full_slots += len(token_ids)

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Allocate blocks until `num_empty_slots` slots are empty, or none."""
        self._require_allocated()
        missing = -(-max(num_empty_slots - self._num_empty_slots, 0) // self._block_size)
        gpu = self._allocator.of(Device.GPU)
        gpu.require_free(missing)
        for _ in range(missing):
            block = gpu.allocate_mutable_block(self._blocks[-1], extra_hash)
            self._ids.append(block.block_id)
            self._blocks.append(block)

    def fork(self) -> BlockTable:
        """Return a table over the same physical blocks."""
        self._require_allocated()
        shared = self._allocator.share(self._blocks)
        table = BlockTable(self._block_size, self._allocator, None, self._max_block_sliding_window)
        table.update(shared)
        table.num_full_slots, table._dropped, table._computed = self.num_full_slots, self._dropped, self._computed
        return table

    def free(self) -> None:
        """Free all blocks."""
        self._allocator.release(self._blocks)
        self.update([])

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Return the tokens that the table does not have yet."""
        return sequence_token_ids[self.num_full_slots :]

    def get_num_blocks_touched_by_append_slots(self, token_ids: Sequence[int], num_lookahead_slots: int) -> int:
        """Return the maximum number of blocks that appending may write or allocate."""
        slots = len(token_ids) + num_lookahead_slots + self.num_full_slots % self._block_size
        return -(-slots // self._block_size)

    def mark_computed(self, num_tokens: int) -> None:
        """Make the blocks of the first `num_tokens` tokens findable by their keys."""
        full = min(num_tokens, self.num_full_slots) // self._block_size
        first, self._computed = min(self._computed, full), full
        gpu = self._allocator.of(Device.GPU)
        gpu.mark_computed([block_id for block_id in self._ids[first:full] if gpu.owns(block_id)])

    def _require_allocated(self) -> None:
        require(self._blocks, "no blocks have been allocated")

    def _outside(self, num_computed_slots: int | None) -> range:
        """Return the blocks that leave the window."""
        if self._max_block_sliding_window is None:
            return range(0)
        if num_computed_slots is None:
            raise AssertionError("a sliding window needs num_computed_slots")
        return range(self._dropped, num_computed_slots // self._block_size - self._max_block_sliding_window)

    def _require_room(self, written: range, slots: int, outside: range) -> None:
        """Fail unless there are enough free blocks for appending."""
        gpu = self._allocator.of(Device.GPU)
        wanted = max(-(-(self.num_full_slots + slots) // self._block_size) - len(self._blocks), 0)
        wanted += sum(gpu.is_shared(block) for block in self._blocks[written.start : written.stop])
        wanted += self._max_block_sliding_window is not None and not self._allocator.has_null_block
        if wanted:
            # Blocks that leave the window are freed first, so they count as free.
            wanted -= sum(not gpu.is_shared(self._blocks[index]) for index in outside)
            gpu.require_free(max(wanted, 0))

    def _drop(self, outside: range) -> None:
        """Replace the blocks that leave the window by the null block."""
        if self._max_block_sliding_window is None:
            return
        null = self._allocator.allocate_or_get_null_block()
        for index in outside:
            self._allocator.free(self._blocks[index])
            self._blocks[index], self._ids[index] = null, null.block_id
            self._dropped = index + 1
