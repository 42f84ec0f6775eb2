"""The allocators of all devices, combined into one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from blockyard.integrations.vllm_v0.block import NaiveBlock, NullBlock
from blockyard.integrations.vllm_v0.interfaces import Block, Device, DeviceAwareBlockAllocator, require
from blockyard.integrations.vllm_v0.pool import (
    FREED,
    NaiveBlockAllocator,
    PoolAllocator,
    PrefixCachingBlockAllocator,
    take_all,
)

_TIERS: Final = {"GPU": "device", "CPU": "host", "EXTERNAL": "external"}


class CpuGpuBlockAllocator(DeviceAwareBlockAllocator):
    """The blocks of all devices, with common ids: the GPU's first, then the CPU's, then the external ones.

    Devices are compared by name, since each engine has its own enum. V0 has no external one.
    """

    def __init__(
        self,
        cpu_block_allocator: PoolAllocator,
        gpu_block_allocator: PoolAllocator,
        external: PoolAllocator | None = None,
    ) -> None:
        both = cpu_block_allocator.all_block_ids & gpu_block_allocator.all_block_ids
        require(not both, f"{len(both)} block ids belong to both devices")
        if external is None:
            external = NaiveBlockAllocator(NaiveBlock, 0, gpu_block_allocator.block_size, tier="external")
        self._gpu = gpu_block_allocator
        self._pools = {"GPU": gpu_block_allocator, "CPU": cpu_block_allocator, "EXTERNAL": external}
        self._swaps: list[tuple[int, int]] = []
        self._null: NullBlock | None = None
        self._null_lock = threading.Lock()

    @staticmethod
    def create(
        allocator_type: str,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        num_external_blocks: int = 0,
    ) -> CpuGpuBlockAllocator:
        """Create the allocators, `naive` or `prefix_caching`."""
        if allocator_type not in {"naive", "prefix_caching"}:
            raise ValueError(f"allocator_type is {allocator_type!r}, must be 'naive' or 'prefix_caching'")
        pools: list[PoolAllocator] = []
        first = 0
        for tier, count in zip(_TIERS.values(), (num_gpu_blocks, num_cpu_blocks, num_external_blocks), strict=True):
            ids = range(first, first := first + count)
            if allocator_type == "naive":
                pools.append(NaiveBlockAllocator(NaiveBlock, count, block_size, ids, tier=tier))
            else:
                pools.append(PrefixCachingBlockAllocator(count, block_size, ids, tier=tier))
        gpu, cpu, external = pools
        return CpuGpuBlockAllocator(cpu, gpu, external)

    def of(self, device: Any) -> PoolAllocator:
        """Return the allocator of one device."""
        return self._pools[device.name]

    def _owner(self, block_id: int | None) -> PoolAllocator:
        """Return the allocator that an id belongs to."""
        if block_id is None:
            raise AssertionError(FREED)
        for pool in self._pools.values():
            if pool.owns(block_id):
                return pool
        raise KeyError(block_id)

    # ---- the null block ----

    @property
    def has_null_block(self) -> bool:
        """Whether the null block has been taken."""
        return self._null is not None

    def allocate_or_get_null_block(self) -> NullBlock:
        """Return the null block."""
        with self._null_lock:
            if self._null is None:
                self._null = NullBlock(self._gpu.allocate_mutable_block(None))
            return self._null

    # ---- blocks ----

    def allocate_mutable_block(
        self, prev_block: Block | None, device: Any, extra_hash: int | None = None
    ) -> NaiveBlock:
        """Allocate an empty block."""
        return self.of(device).allocate_mutable_block(prev_block, extra_hash)

    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Any, extra_hash: int | None = None
    ) -> list[NaiveBlock]:
        """Allocate several full blocks."""
        return self.of(device).allocate_immutable_blocks(prev_block, block_token_ids, extra_hash)

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Any, extra_hash: int | None = None
    ) -> NaiveBlock:
        """Allocate a full block, the cached one if it exists."""
        return self.of(device).allocate_immutable_block(prev_block, token_ids, extra_hash)

    def free(self, block: Block) -> None:
        """Free a block."""
        self.release([block])

    def release(self, blocks: Sequence[Block]) -> None:
        """Release one reference each; ignore null blocks."""
        if live := _live(blocks):
            self._owner(live[0].block_id).release(live)

    def fork(self, last_block: Block) -> list[NaiveBlock]:
        """Return new references to the blocks up to this one."""
        if not isinstance(last_block, NaiveBlock):
            raise AssertionError(f"cannot fork {last_block!r}, a null block")
        return self._owner(last_block.block_id).fork(last_block)

    def share(self, blocks: Sequence[Block]) -> list[Block]:
        """Return new blocks over the same physical ones; null blocks are returned themselves."""
        if not (live := _live(blocks)):
            return list(blocks)
        copies = iter(self._owner(live[0].block_id).share(live))
        return [block if isinstance(block, NullBlock) else next(copies) for block in blocks]

    # ---- swaps ----

    def _is_complete(self, block: NaiveBlock) -> bool:
        """Return whether all of a block's bytes are computed.

        A block still in prefill is not shared on the other device: it must neither overwrite nor replace a complete
        block with the same key.
        """
        return block.block_id is None or self._owner(block.block_id).is_computed(block.block_id)

    def swap(self, blocks: Sequence[Block], src_device: Any, dst_device: Any) -> dict[int, int]:
        """Move blocks to another device, all or none. Blocks that share a physical block still share one afterwards.

        Returns:
            The new physical block of each one, in the order of first use.
        """
        src, dst, live = self.of(src_device), self.of(dst_device), _live(blocks)
        src.require_refs(live)
        first: dict[Any, NaiveBlock] = {}
        again = [(block.block_id, block) for block in live if first.setdefault(block.block_id, block) is not block]
        places = src.places(first.values(), self._is_complete)
        targets = dst.take(places)
        mapping = dict(zip(first, targets, strict=True))
        src.release(live)
        for source, block in (*first.items(), *again):
            block.block_id = mapping[source]
        dst.add_refs([block for _, block in again])
        if dst is not self._gpu:
            # On the GPU, the manager marks them at the end of the step that loads the bytes.
            dst.mark_computed([target for place, target in zip(places, targets, strict=True) if place is not None])
        self._swaps.extend(mapping.items())
        return mapping

    def get_and_reset_swaps(self) -> list[tuple[int, int]]:
        """Return and clear the swaps since the last call, `(from, to)`."""
        return take_all(self._swaps)

    def get_num_full_blocks_touched(self, blocks: Sequence[Block], device: Any) -> int:
        """Return how many full blocks a swap would allocate."""
        return self.of(device).touched(_live(blocks), self._is_complete)

    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        """Return and clear the copies since the last call, `(from, to)`."""
        return self._gpu.clear_copy_on_writes()

    # ---- counts, and the cache ----

    def get_num_free_blocks(self, device: Any) -> int:
        """Return the number of free blocks."""
        return self.of(device).get_num_free_blocks()

    def get_num_total_blocks(self, device: Any) -> int:
        """Return the number of blocks."""
        return self.of(device).get_num_total_blocks()

    def get_physical_block_id(self, device: Any, absolute_id: int) -> int:
        """Return a block's id within its device."""
        return self.of(device).get_physical_block_id(absolute_id)

    @property
    def all_block_ids(self) -> frozenset[int]:
        """Ids of all blocks."""
        return frozenset().union(*(pool.all_block_ids for pool in self._pools.values()))

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        """Record when blocks were used."""
        if block_ids:
            owner = self._owner(block_ids[-1])  # never null, so it shows the sequence's device
            owner.mark_blocks_as_accessed([block_id for block_id in block_ids if owner.owns(block_id)], now)

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Make these blocks of the GPU findable by their keys, or all in use if there are none."""
        self._gpu.mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """Return the computed blocks that all lists share at their start."""
        return self._gpu.get_common_computed_block_ids(computed_seq_block_ids)

    def get_prefix_cache_hit_rate(self, device: Any) -> float:
        """Return the hit rate of lookups; -1 without a prefix cache."""
        return self.of(device).get_prefix_cache_hit_rate()

    def reset_prefix_cache(self) -> bool:
        """Drop the cache; return whether that was possible."""
        were_reset = [pool.reset_prefix_cache() for pool in self._pools.values()]
        return all(were_reset)

    def find_cached_blocks_prefix(self, block_hashes: list[int], device: Any = Device.GPU) -> list[int]:
        """Return the hashes, from the first on, whose blocks are cached."""
        return self.of(device).find_cached_blocks_prefix(block_hashes)


def _live(blocks: Sequence[Any]) -> list[NaiveBlock]:
    """Return the blocks that can be moved or freed: all but null blocks."""
    return [block for block in blocks if not isinstance(block, NullBlock)]
