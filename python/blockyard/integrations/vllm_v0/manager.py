"""`SelfAttnBlockSpaceManager` and its per-sequence trackers."""

from __future__ import annotations

from abc import ABC
from typing import Any, NamedTuple

from blockyard.integrations.vllm_v0.block import hash_blocks
from blockyard.integrations.vllm_v0.device import CpuGpuBlockAllocator
from blockyard.integrations.vllm_v0.interfaces import (
    AllocStatus,
    Device,
    DeviceAwareBlockAllocator,
    Sequence,
    SequenceGroup,
    abstract,
    require,
)
from blockyard.integrations.vllm_v0.table import BlockTable


class _Abilities(NamedTuple):
    """Which optional methods a sequence class has."""

    extra_hash: bool
    is_prefill: bool


_abilities: dict[type, _Abilities] = {}


def _abilities_of(seq: Any) -> _Abilities:
    # Looked up once per class, as these calls happen for every sequence and step.
    if (known := _abilities.get(type(seq))) is None:
        known = _abilities[type(seq)] = _Abilities(hasattr(seq, "extra_hash"), hasattr(seq, "is_prefill"))
    return known


def _extra_hash(seq: Any) -> int | None:
    """Return what a sequence's blocks depend on besides its tokens, such as a LoRA adapter."""
    hashed: int | None = seq.extra_hash() if _abilities_of(seq).extra_hash else None
    return hashed


def _is_prefill(seq: Any, num_tokens: int) -> bool:
    if _abilities_of(seq).is_prefill:
        return bool(seq.is_prefill())
    # After the prefill, all tokens except the last sampled one are computed.
    return bool(seq.data.get_num_computed_tokens() + 1 < num_tokens)


class ComputedBlocksTracker:
    """Tracks how much of each sequence is cached; hashes every token once."""

    def __init__(self, allocator: DeviceAwareBlockAllocator, block_size: int, enable_caching: bool) -> None:
        self._allocator, self._block_size, self._enable_caching = allocator, block_size, enable_caching
        self._hashes: dict[int, list[int]] = {}
        self._num_cached: dict[int, int] = {}

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Return the tokens of the longest computed prefix; during prefill, at most as many as at the first call.

        V0 keeps that count while the sequence waits, although the blocks may be evicted in the meantime, and asserts
        that a swapped-out prefill has computed no more.
        """
        if not self._enable_caching:
            return 0
        hashes, token_ids, size = self._hashes.setdefault(seq.seq_id, []), seq.get_token_ids(), self._block_size
        require(len(token_ids) >= len(hashes) * size, f"sequence {seq.seq_id} lost tokens without being freed")
        if len(token_ids) >= (len(hashes) + 1) * size:
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(parent, token_ids[len(hashes) * size :], size, _extra_hash(seq))
        if (prefill := _is_prefill(seq, len(token_ids))) and (first := self._num_cached.get(seq.seq_id)) is not None:
            hashes = hashes[: first // size]
        found = self._allocator.find_cached_blocks_prefix(hashes) if hashes else ()
        cached = self._num_cached[seq.seq_id] = len(found) * size
        return max(cached, seq.data.get_num_computed_tokens()) if prefill else cached

    def remove_seq(self, seq_id: int) -> None:
        """Forget a sequence, known or not."""
        self._hashes.pop(seq_id, None)
        self._num_cached.pop(seq_id, None)


class LastAccessBlocksTracker:
    """Tracks when each sequence was last scheduled; its blocks are touched with that time when they are freed."""

    def __init__(self, allocator: DeviceAwareBlockAllocator) -> None:
        self._allocator = allocator
        self._seq_last_access: dict[int, float | None] = {}

    def add_seq(self, seq_id: int) -> None:
        require(seq_id not in self._seq_last_access, f"sequence {seq_id} is tracked already")
        self._seq_last_access[seq_id] = None

    def remove_seq(self, seq_id: int) -> None:
        require(seq_id in self._seq_last_access, f"sequence {seq_id} is not tracked")
        del self._seq_last_access[seq_id]

    def update_last_access(self, seq_id: int, time: float) -> None:
        require(seq_id in self._seq_last_access, f"sequence {seq_id} is not tracked")
        self._seq_last_access[seq_id] = time

    def update_seq_blocks_last_access(self, seq_id: int, block_ids: list[int]) -> None:
        require(seq_id in self._seq_last_access, f"sequence {seq_id} is not tracked")
        if (time := self._seq_last_access[seq_id]) is not None:
            self._allocator.mark_blocks_as_accessed(block_ids, time)


class BlockSpaceManager(ABC):
    """The interface through which V0's scheduler decides what may run."""

    can_allocate = allocate = can_append_slots = append_slots = fork = free = abstract
    can_swap_in = swap_in = can_swap_out = swap_out = get_block_table = abstract
    get_num_free_gpu_blocks = get_num_free_cpu_blocks = access_all_blocks_in_seq = mark_blocks_as_computed = abstract
    get_common_computed_block_ids = get_prefix_cache_hit_rate = reset_prefix_cache = get_num_cached_tokens = abstract

    @staticmethod
    def get_block_space_manager_class(version: str) -> type[BlockSpaceManager]:
        """Return the manager of that name; there is one, `selfattn`."""
        if version.lower() != "selfattn":
            raise ValueError(f"version is {version!r}, must be 'selfattn'")
        return SelfAttnBlockSpaceManager


class SelfAttnBlockSpaceManager(BlockSpaceManager):
    """V0's block manager, extended by external blocks.

    A group is swapped out to the CPU, or as a whole to the external blocks if the CPU has no room for it. The
    scheduler's calls are the same for both: in `swap_out` and `swap_in`, ids from `num_cpu_blocks` on are external
    blocks. `CacheSwapper` executes such swaps.

    Args:
        block_size: token slots in a block.
        num_gpu_blocks: blocks of the device.
        num_cpu_blocks: blocks in host memory, for swapping.
        watermark: fraction of the GPU blocks that admission keeps free.
        sliding_window: tokens that attention looks back, or None for all.
        enable_caching: keep full blocks cached by their tokens.
        num_external_blocks: slots of an external store, for swapping.

    Source: vLLM 0.7.3, `vllm/core/block_manager.py`.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        num_external_blocks: int = 0,
    ) -> None:
        require(watermark >= 0.0, f"watermark is {watermark}, must be at least 0")
        self.block_size, self.num_total_gpu_blocks, self.num_total_cpu_blocks = (
            block_size,
            num_gpu_blocks,
            num_cpu_blocks,
        )
        self.num_total_external_blocks = num_external_blocks
        self.watermark, self.watermark_blocks = watermark, int(watermark * num_gpu_blocks)
        self.sliding_window, self.enable_caching = sliding_window, enable_caching
        # A window that does not start at a block boundary touches one more block, and one is being filled.
        self.max_block_sliding_window = None if sliding_window is None else sliding_window // block_size + 2
        kind = "prefix_caching" if enable_caching else "naive"
        self.block_allocator = CpuGpuBlockAllocator.create(
            kind, num_gpu_blocks, num_cpu_blocks, block_size, num_external_blocks
        )
        self.block_tables: dict[int, BlockTable] = {}
        self.cross_block_tables: dict[str, BlockTable] = {}
        self._computed_blocks_tracker = ComputedBlocksTracker(self.block_allocator, block_size, enable_caching)
        self._last_access_blocks_tracker = LastAccessBlocksTracker(self.block_allocator)

    def _encoder_tokens(self, seq_group: SequenceGroup) -> Sequence | None:
        if not seq_group.is_encoder_decoder():
            return None
        if self.max_block_sliding_window is not None:
            raise NotImplementedError("sliding window attention is not supported for encoder/decoder models")
        if self.enable_caching:
            raise NotImplementedError("prefix caching is not supported for encoder/decoder models")
        encoder = seq_group.get_encoder_seq()
        require(encoder is not None, f"request {seq_group.request_id} has no encoder sequence")
        return encoder

    def _refuse_images(self, seq_group: SequenceGroup, seq: Sequence) -> None:
        if self.enable_caching and getattr(seq, "multi_modal_data", None):
            request = seq_group.request_id
            raise NotImplementedError(f"prefix caching is not supported for the multi_modal_data of request {request}")

    def can_allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return whether a waiting group may be admitted above the watermark."""
        encoder, waiting = self._encoder_tokens(seq_group), _with_status(seq_group, "WAITING")
        self._refuse_images(seq_group, waiting[0])
        tokens = waiting[0].get_token_ids()
        required = BlockTable.get_num_required_blocks(tokens, self.block_size, num_lookahead_slots)
        if encoder is not None:
            required += BlockTable.get_num_required_blocks(encoder.get_token_ids(), self.block_size)
        if self.max_block_sliding_window is not None:
            required = min(required, self.max_block_sliding_window)
        if self.num_total_gpu_blocks - required < self.watermark_blocks:
            return AllocStatus.NEVER
        enough = self.get_num_free_gpu_blocks() - required >= self.watermark_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def _allocate_sequence(self, seq: Sequence) -> BlockTable:
        table = BlockTable(self.block_size, self.block_allocator, None, self.max_block_sliding_window)
        if tokens := seq.get_token_ids():
            table.allocate(tokens, extra_hash=_extra_hash(seq))
        return table

    def allocate(self, seq_group: SequenceGroup) -> None:
        """Allocate blocks for a waiting group, all or none; its sequences share those of the first."""
        waiting, encoder = _with_status(seq_group, "WAITING"), self._encoder_tokens(seq_group)
        known = {seq.seq_id for seq in waiting} & self.block_tables.keys()
        require(not known, f"block table already exists for sequences {sorted(known)}")
        request = seq_group.request_id
        require(request not in self.cross_block_tables, f"block table already exists for request {request}")
        self._refuse_images(seq_group, waiting[0])
        table = self._allocate_sequence(waiting[0])
        if encoder is not None:
            try:
                self.cross_block_tables[request] = self._allocate_sequence(encoder)
            except ValueError:
                table.free()
                raise
        for seq in waiting:
            self.block_tables[seq.seq_id] = table if seq is waiting[0] else table.fork()
            self._last_access_blocks_tracker.add_seq(seq.seq_id)

    def _touched(self, seq: Sequence, num_lookahead_slots: int) -> int:
        table = self.block_tables[seq.seq_id]
        return table.get_num_blocks_touched_by_append_slots(
            table.get_unseen_token_ids(seq.get_token_ids()), num_lookahead_slots
        )

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> bool:
        """Return whether the running sequences of a group can continue, if every block that they touch is new."""
        touched = sum(self._touched(seq, num_lookahead_slots) for seq in _with_status(seq_group, "RUNNING"))
        return touched <= self.get_num_free_gpu_blocks()

    def append_slots(self, seq: Sequence, num_lookahead_slots: int) -> list[tuple[int, int]]:
        """Allocate slots for a sequence's new tokens. Returns the blocks to copy since the last call, as (from, to)."""
        table = self.block_tables[seq.seq_id]
        unseen = table.get_unseen_token_ids(seq.get_token_ids())
        table.append_token_ids(unseen, num_lookahead_slots, seq.data.get_num_computed_tokens(), _extra_hash(seq))
        return self.block_allocator.clear_copy_on_writes()

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Make a child share its parent's blocks; an unknown parent has none."""
        if (table := self.block_tables.get(parent_seq.seq_id)) is not None:
            self._last_access_blocks_tracker.add_seq(child_seq.seq_id)
            self.block_tables[child_seq.seq_id] = table.fork()

    def free(self, seq: Sequence) -> None:
        """Free a sequence's blocks, on whichever device they are; an unknown sequence has none."""
        if (table := self.block_tables.pop(seq.seq_id, None)) is not None:
            self._last_access_blocks_tracker.update_seq_blocks_last_access(seq.seq_id, table.physical_block_ids)
            self._last_access_blocks_tracker.remove_seq(seq.seq_id)
            self._computed_blocks_tracker.remove_seq(seq.seq_id)
            table.free()

    def free_cross(self, seq_group: SequenceGroup) -> None:
        """Free a request's encoder blocks, if it has any."""
        if (table := self.cross_block_tables.pop(seq_group.request_id, None)) is not None:
            table.free()

    def get_block_table(self, seq: Sequence) -> list[int]:
        return self.block_tables[seq.seq_id].physical_block_ids

    def get_cross_block_table(self, seq_group: SequenceGroup) -> list[int]:
        require(seq_group.request_id in self.cross_block_tables, f"request {seq_group.request_id} has no cross table")
        return self.cross_block_tables[seq_group.request_id].physical_block_ids

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        if self.enable_caching:
            self._last_access_blocks_tracker.update_last_access(seq.seq_id, now)

    def mark_blocks_as_computed(self, seq_group: SequenceGroup, token_chunk_size: int) -> None:
        """Publish the full blocks whose tokens will be computed by the step being scheduled.

        V0 marks every allocated block, even those of later prefill chunks, which are not computed yet.
        """
        for seq in seq_group.get_seqs() if self.enable_caching else ():
            if (table := self.block_tables.get(seq.seq_id)) is not None:
                table.mark_computed(seq.data.get_num_computed_tokens() + token_chunk_size)

    def get_common_computed_block_ids(self, seqs: list[Sequence]) -> list[int]:
        """Return the leading blocks common to all these sequences that need no prefill."""
        cached = [(self.block_tables[seq.seq_id], self.get_num_cached_tokens(seq) // self.block_size) for seq in seqs]
        return self.block_allocator.get_common_computed_block_ids([table.physical_block_ids[:n] for table, n in cached])

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        return self._computed_blocks_tracker.get_num_cached_tokens(seq)

    def _can_swap(self, seq_group: SequenceGroup, device: Device, status: str, lookahead: int) -> AllocStatus:
        seqs = _with_status(seq_group, status)
        blocks = [block for seq in seqs for block in self.block_tables[seq.seq_id].blocks]
        touched = sum(self._touched(seq, lookahead) for seq in seqs)
        touched += self.block_allocator.get_num_full_blocks_touched(blocks, device)
        watermark = self.watermark_blocks if device is Device.GPU else 0
        if self.block_allocator.get_num_total_blocks(device) < touched:
            return AllocStatus.NEVER
        enough = self.block_allocator.get_num_free_blocks(device) - touched >= watermark
        return AllocStatus.OK if enough else AllocStatus.LATER

    def _swap(self, seq_group: SequenceGroup, src: Device, dst: Device, status: str) -> list[tuple[int, int]]:
        # Move the whole group at once: shared blocks stay shared, and it moves completely or not at all.
        tables = [self.block_tables[seq.seq_id] for seq in _with_status(seq_group, status)]
        mapping = self.block_allocator.swap([block for table in tables for block in table.blocks], src, dst)
        for table in tables:
            table.update(table.blocks)
        return [(self._local(src, source), self._local(dst, target)) for source, target in mapping.items()]

    def _local(self, device: Device, absolute_id: int) -> int:
        # One numbering for all blocks off the GPU: the CPU's, then the external ones.
        first = self.num_total_cpu_blocks if device is Device.EXTERNAL else 0
        return first + self.block_allocator.get_physical_block_id(device, absolute_id)

    def _place(self, seq_group: SequenceGroup) -> Device:
        """Return where a swapped group is; it is in a single place."""
        ids = [self.get_block_table(seq) for seq in _with_status(seq_group, "SWAPPED")]
        end = self.num_total_gpu_blocks + self.num_total_cpu_blocks
        return Device.EXTERNAL if any(table and table[-1] >= end for table in ids) else Device.CPU

    def _place_for(self, seq_group: SequenceGroup) -> Device | None:
        """Return where a running group can be swapped out to, if anywhere."""
        places = [Device.CPU, *([Device.EXTERNAL] if self.num_total_external_blocks else [])]
        fits = (place for place in places if self._can_swap(seq_group, place, "RUNNING", 0) is AllocStatus.OK)
        return next(fits, None)

    def can_swap_in(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> AllocStatus:
        return self._can_swap(seq_group, Device.GPU, "SWAPPED", num_lookahead_slots)

    def swap_in(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Bring a group's blocks back. Returns (from, to), numbered as in `swap_out`."""
        return self._swap(seq_group, self._place(seq_group), Device.GPU, "SWAPPED")

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        return self._place_for(seq_group) is not None

    def swap_out(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's blocks off the GPU.

        Returns:
            Blocks as (from, to). GPU blocks are numbered from 0; CPU blocks also from 0, followed by the external
            blocks from `num_cpu_blocks` on.
        """
        place = self._place_for(seq_group) if self.num_total_external_blocks else Device.CPU
        return self._swap(seq_group, Device.GPU, place or Device.CPU, "RUNNING")

    def get_num_free_gpu_blocks(self) -> int:
        return self.block_allocator.get_num_free_blocks(Device.GPU)

    def get_num_free_cpu_blocks(self) -> int:
        return self.block_allocator.get_num_free_blocks(Device.CPU)

    def get_num_free_external_blocks(self) -> int:
        return self.block_allocator.get_num_free_blocks(Device.EXTERNAL)

    def get_prefix_cache_hit_rate(self, device: Any) -> float:
        return self.block_allocator.get_prefix_cache_hit_rate(device)

    def reset_prefix_cache(self) -> bool:
        return self.block_allocator.reset_prefix_cache()


def _with_status(seq_group: SequenceGroup, status: str) -> list[Sequence]:
    # By name: the enum is the engine's.
    return [seq for seq in seq_group.get_seqs() if seq.status.name == status]
