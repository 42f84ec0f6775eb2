"""The two devices' allocators behind one, and the block table of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blockyard.integrations.vllm_v0.blocks import (
    NaiveBlock,
    NaiveBlockAllocator,
    PrefixCachingBlockAllocator,
    _PoolAllocator,
    _require,
)
from blockyard.integrations.vllm_v0.interfaces import Block, Device, DeviceAwareBlockAllocator


class NullBlock(Block):
    """Stands for blocks that fell out of a sliding window; wraps a block that is never written."""

    def __init__(self, proxy: Block) -> None:
        self._proxy = proxy

    def append_token_ids(self, token_ids: list[int]) -> None:
        raise ValueError("null block should not be modified")

    @property
    def block_id(self) -> Any:
        return self._proxy.block_id

    @block_id.setter
    def block_id(self, value: int | None) -> None:
        raise ValueError("null block should not be modified")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)


class CpuGpuBlockAllocator(DeviceAwareBlockAllocator):
    """The blocks of both devices under one count of ids: the GPU's first, then the CPU's."""

    def __init__(self, cpu_block_allocator: _PoolAllocator, gpu_block_allocator: _PoolAllocator) -> None:
        both = cpu_block_allocator.all_block_ids & gpu_block_allocator.all_block_ids
        _require(not both, f"{len(both)} block ids belong to both devices")
        # By name: an engine has an enum of its own.
        self._allocators = {"GPU": gpu_block_allocator, "CPU": cpu_block_allocator}
        self._swap_mapping: dict[int, int] = {}
        self._null_block: NullBlock | None = None

    @staticmethod
    def create(allocator_type: str, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int) -> CpuGpuBlockAllocator:
        """Make both allocators, `naive` or `prefix_caching`."""
        gpu, cpu = range(num_gpu_blocks), range(num_gpu_blocks, num_gpu_blocks + num_cpu_blocks)
        make: Any
        if allocator_type == "naive":
            make = lambda ids: NaiveBlockAllocator(NaiveBlock, len(ids), block_size, ids)  # noqa: E731
        elif allocator_type == "prefix_caching":
            make = lambda ids: PrefixCachingBlockAllocator(len(ids), block_size, ids)  # noqa: E731
        else:
            raise ValueError(f"allocator_type is {allocator_type!r}, must be 'naive' or 'prefix_caching'")
        return CpuGpuBlockAllocator(cpu_block_allocator=make(cpu), gpu_block_allocator=make(gpu))

    def of(self, device: Any) -> _PoolAllocator:
        """Allocator of a device."""
        return self._allocators[device.name]

    def owner(self, block_id: int | None) -> _PoolAllocator:
        """Allocator that a block id belongs to."""
        _require(block_id is not None, "a block has no physical block, it has been freed")
        return next(allocator for allocator in self._allocators.values() if allocator.owns(block_id))  # type: ignore[arg-type]

    def allocate_or_get_null_block(self) -> Block:
        if self._null_block is None:
            self._null_block = NullBlock(self.allocate_mutable_block(None, Device.GPU))
        return self._null_block

    @property
    def has_null_block(self) -> bool:
        return self._null_block is not None

    def allocate_mutable_block(self, prev_block: Block | None, device: Any, extra_hash: int | None = None) -> Block:
        return self.of(device).allocate_mutable_block(prev_block, extra_hash)

    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Any, extra_hash: int | None = None
    ) -> list[Block]:
        return self.of(device).allocate_immutable_blocks(prev_block, block_token_ids, extra_hash)

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Any, extra_hash: int | None = None
    ) -> Block:
        return self.of(device).allocate_immutable_block(prev_block, token_ids, extra_hash)

    def free(self, block: Block) -> None:
        self.free_blocks([block])

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Give back one reference each; null blocks stay."""
        live = [block for block in blocks if not isinstance(block, NullBlock)]
        if live:
            self.owner(live[0].block_id).free_blocks(live)

    def fork(self, last_block: Block) -> list[Block]:
        _require(not isinstance(last_block, NullBlock), "the null block is not forked")
        return self.owner(last_block.block_id).fork(last_block)

    def share_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """As `fork`, for a table, whose first blocks may be null blocks."""
        live = [block for block in blocks if not isinstance(block, NullBlock)]
        copies = iter(self.owner(live[0].block_id).share_blocks(live)) if live else iter(())
        return [block if isinstance(block, NullBlock) else next(copies) for block in blocks]

    def swap(self, blocks: list[Block], src_device: Any, dst_device: Any) -> dict[int, int]:
        """Move blocks to the other device, all or none; blocks that share a physical block go on sharing one.

        Returns:
            Physical block there for each one here, in the order of first use.
        """
        src, dst = self.of(src_device), self.of(dst_device)
        live = [block for block in blocks if not isinstance(block, NullBlock)]
        sources: list[Any] = [block.block_id for block in live]
        first: dict[int, Block] = {}
        for source, block in zip(sources, live, strict=True):
            first.setdefault(source, block)
        src.require_refs(live)
        mapping = dict(zip(first, dst.take_for(list(first.values())), strict=True))
        src.free_blocks(live)
        for source, block in zip(sources, live, strict=True):
            block.block_id = mapping[source]
        dst.add_refs([block for source, block in zip(sources, live, strict=True) if first[source] is not block])
        self._swap_mapping.update(mapping)
        return mapping

    def get_and_reset_swaps(self) -> list[tuple[int, int]]:
        mapping, self._swap_mapping = self._swap_mapping, {}
        return list(mapping.items())

    def get_num_free_blocks(self, device: Any) -> int:
        return self.of(device).get_num_free_blocks()

    def get_num_total_blocks(self, device: Any) -> int:
        return self.of(device).get_num_total_blocks()

    def get_num_full_blocks_touched(self, blocks: list[Block], device: Any) -> int:
        return self.of(device).get_num_full_blocks_touched(blocks)

    def get_physical_block_id(self, device: Any, absolute_id: int) -> int:
        return self.of(device).get_physical_block_id(absolute_id)

    @property
    def all_block_ids(self) -> frozenset[int]:
        return self.of(Device.GPU).all_block_ids | self.of(Device.CPU).all_block_ids

    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        return self.of(Device.GPU).clear_copy_on_writes()

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        if block_ids:  # the last one is no null block, so it says where the sequence is
            owner = self.owner(block_ids[-1])
            owner.mark_blocks_as_accessed([name for name in block_ids if owner.owns(name)], now)

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        self.of(Device.GPU).mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        return self.of(Device.GPU).get_common_computed_block_ids(computed_seq_block_ids)

    def get_prefix_cache_hit_rate(self, device: Any) -> float:
        return self.of(device).get_prefix_cache_hit_rate()

    def reset_prefix_cache(self) -> bool:
        done = [allocator.reset_prefix_cache() for allocator in self._allocators.values()]
        return all(done)

    def find_cached_blocks_prefix(self, block_hashes: list[int], device: Any = Device.GPU) -> list[int]:
        return self.of(device).find_cached_blocks_prefix(block_hashes)


class BlockTable:
    """The blocks of one sequence."""

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        _blocks: list[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        self._block_size, self._allocator, self._cap = block_size, block_allocator, max_block_sliding_window
        self._dropped = 0
        self.update(_blocks or [])
        self._num_full_slots = sum(len(block.token_ids) for block in self._blocks)

    @staticmethod
    def get_num_required_blocks(token_ids: list[int], block_size: int, num_lookahead_slots: int = 0) -> int:
        """Blocks for so many tokens and slots, hits left out of account."""
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    def update(self, blocks: list[Block]) -> None:
        """Take over these blocks, or their new ids."""
        self._blocks = list(blocks)
        self._ids: list[Any] = [block.block_id for block in self._blocks]

    def allocate(self, token_ids: list[int], device: Any = Device.GPU, extra_hash: int | None = None) -> None:
        """Take blocks for all tokens, or none."""
        _require(token_ids and not self._blocks, "an empty table is allocated once, for at least one token")
        size, full = self._block_size, len(token_ids) // self._block_size * self._block_size
        chunks = [token_ids[i : i + size] for i in range(0, full, size)]
        self.update(self._allocator.of(device).allocate_chain(None, chunks, token_ids[full:], extra_hash))
        self._num_full_slots = len(token_ids)

    def append_token_ids(
        self,
        token_ids: list[int],
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Append tokens and make room for more, all or nothing; shared blocks that are written are copied."""
        _require(self._blocks, "no blocks have been allocated")
        size, gpu, slots = self._block_size, self._allocator.of(Device.GPU), len(token_ids) + num_lookahead_slots
        first = self._num_full_slots // size
        cuts = [*range(size - self._num_full_slots % size, len(token_ids), size), len(token_ids)]
        drop = range(0)
        if self._cap is not None:
            _require(num_computed_slots is not None, "a sliding window needs num_computed_slots")
            drop = range(self._dropped, (num_computed_slots or 0) // size - self._cap)
        new = max(0, -(-(self._num_full_slots + slots) // size) - len(self._blocks))
        copies = sum(gpu.is_shared(block) for block in self._blocks[first : first + len(cuts)]) if token_ids else 0
        null = int(self._cap is not None and not self._allocator.has_null_block)
        if new + copies + null:
            # What falls out of the window goes free first, so it counts.
            gpu.require(new + copies + null - sum(not gpu.is_shared(self._blocks[i]) for i in drop))
        if self._cap is not None:
            self._drop(drop)
        self.ensure_num_empty_slots(slots, extra_hash)
        start = 0
        for index, end in enumerate(cuts if token_ids else [], first):
            self._blocks[index].append_token_ids(token_ids[start:end])
            self._ids[index] = self._blocks[index].block_id
            start = end
        self._num_full_slots += len(token_ids)

    def _drop(self, indices: range) -> None:
        null_block = self._allocator.allocate_or_get_null_block()
        for i in indices:
            self._allocator.free(self._blocks[i])
            self._blocks[i], self._ids[i] = null_block, null_block.block_id
            self._dropped = i + 1

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Take blocks until so many slots are empty, or none."""
        _require(self._blocks, "no blocks have been allocated")
        missing = -(-max(0, num_empty_slots - self._num_empty_slots) // self._block_size)
        if missing > 1:
            self._allocator.of(Device.GPU).require(missing)
        for _ in range(missing):
            block = self._allocator.allocate_mutable_block(self._blocks[-1], Device.GPU, extra_hash)
            self._blocks.append(block)
            self._ids.append(block.block_id)

    def fork(self) -> BlockTable:
        """Table over the same physical blocks."""
        _require(self._blocks, "no blocks have been allocated")
        fork = BlockTable(self._block_size, self._allocator, None, self._cap)
        fork.update(self._allocator.share_blocks(self._blocks))
        fork._num_full_slots, fork._dropped = self._num_full_slots, self._dropped
        return fork

    def free(self) -> None:
        """Give all blocks back."""
        self._allocator.free_blocks(self._blocks)
        self.update([])

    @property
    def physical_block_ids(self) -> list[int]:
        return self._ids

    @property
    def blocks(self) -> list[Block]:
        return self._blocks

    @property
    def num_full_slots(self) -> int:
        return self._num_full_slots

    @property
    def _num_empty_slots(self) -> int:
        return len(self._blocks) * self._block_size - self._num_full_slots

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Tokens that the table does not have yet."""
        return sequence_token_ids[self._num_full_slots :]

    def get_num_blocks_touched_by_append_slots(self, token_ids: list[int], num_lookahead_slots: int) -> int:
        """Blocks that appending may write or take, at worst."""
        room = self._block_size - self._num_full_slots % self._block_size
        return 1 + -((room - len(token_ids) - num_lookahead_slots) // self._block_size)
