"""The allocators of one device, over `NaiveAllocator` and `PrefixCachingAllocator`.

Ids are the engine's, common to all devices. The ids of the pools, which start at 0 in each, stay internal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar

from blockyard import _core
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.integrations.vllm_v0.block import Keyed, NaiveBlock, PrefixCachingBlock, chain, key_bytes
from blockyard.integrations.vllm_v0.interfaces import Block, BlockAllocator, NoFreeBlocksError, require

Pool: TypeAlias = _core.BlockAllocator
_Made = TypeVar("_Made")


class _V0Errors:
    """Raises V0's exceptions in place of the pools'."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OutOfBlocksError):
            raise NoFreeBlocksError(*error.args) from None
        if isinstance(error, InvalidArgumentError):
            raise AssertionError(str(error)) from None


_V0_ERRORS: Final = _V0Errors()
FREED: Final = "a block has no physical block, it has been freed"


class PoolAllocator(BlockAllocator):
    """The blocks of one device; the base of both allocators.

    Args:
        pool: their states, reference counts and keys.
        block_size: token slots in a block.
        ids: the engine's ids, ascending.
        tier: name of the device in errors.
    """

    def __init__(self, pool: Pool, block_size: int, ids: Sequence[int], tier: str) -> None:
        self.pool, self.block_size = pool, block_size
        self._tier = tier
        self._ids = ids
        self._index = None if isinstance(ids, range) else {block_id: index for index, block_id in enumerate(ids)}
        self._copies: list[tuple[int, int]] = []

    # ---- ids ----

    @property
    def all_block_ids(self) -> frozenset[int]:
        """Ids of all blocks."""
        return frozenset(self._ids)

    def owns(self, block_id: int) -> bool:
        """Return whether an id is one of this allocator's."""
        return block_id in (self._ids if self._index is None else self._index)

    def get_physical_block_id(self, absolute_id: int) -> int:
        """Return a block's id within its device."""
        if not self.owns(absolute_id):
            raise ValueError(f"block {absolute_id} is not one of the {len(self._ids)} of this allocator")
        return absolute_id - self._ids[0] if self._index is None else self._index[absolute_id]

    def _locals(self, blocks: Iterable[NaiveBlock]) -> list[int]:
        return [self._local(block) for block in blocks]

    def _local(self, block: NaiveBlock) -> int:
        if block.block_id is None:
            raise AssertionError(FREED)
        return self.get_physical_block_id(block.block_id)

    # ---- references ----

    def require_free(self, wanted: int) -> None:
        """Fail unless `wanted` blocks are free."""
        free, total = self.pool.num_free, self.pool.num_blocks
        if wanted > free:
            message = f"asked for {wanted} {self._tier} blocks, {free} of {total} are free"
            raise NoFreeBlocksError(message, self._tier, wanted, free, total)

    def require_refs(self, blocks: list[NaiveBlock]) -> None:
        """Fail unless each physical block has at least as many references as it appears in `blocks`."""
        with _V0_ERRORS:
            self.pool.require(self._locals(blocks))

    def add_refs(self, blocks: list[NaiveBlock]) -> None:
        """Add one reference to each block."""
        with _V0_ERRORS:
            self.pool.share(self._locals(blocks))

    def release(self, blocks: list[NaiveBlock]) -> None:
        """Release one reference to each block, all or none."""
        with _V0_ERRORS:
            self.pool.free(self._locals(blocks))
        for block in blocks:
            block.block_id = None

    def is_shared(self, block: NaiveBlock) -> bool:
        """Return whether a block has several references."""
        return self.pool.refs(self._local(block)) > 1

    def free(self, block: NaiveBlock, keep_block_object: bool = False) -> None:
        """Free a block. `keep_block_object` has no effect: block objects are not pooled."""
        self.release([block])

    def take(self, places: Sequence[Keyed | None]) -> list[int]:
        """Allocate one physical block for each place, all or none.

        A place with a key gets the block with that key if it exists.
        """
        keyed = [place for place in places if place is not None]
        with _V0_ERRORS:
            if keyed:
                keys, depths = zip(*keyed, strict=True)
                found, _ = self.pool.allocate_keyed(list(keys), list(depths), plain=len(places) - len(keyed))
            else:
                found = self.pool.allocate(len(places))
        taken = [self._ids[block] for block in found.tolist()]
        with_key, plain = iter(taken), iter(taken[len(keyed) :])
        return [next(plain if place is None else with_key) for place in places]

    # ---- new blocks ----

    def allocate_mutable_block(
        self, prev_block: Block | None, extra_hash: int | None = None, device: None = None
    ) -> NaiveBlock:
        """Allocate an empty block."""
        _one_device(device)
        return self._made(self.take([None]), lambda ids: self._create(prev_block, [], ids[0], extra_hash))

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], extra_hash: int | None = None, device: None = None
    ) -> NaiveBlock:
        """Allocate a full block, the cached one if it exists."""
        return self.allocate_immutable_blocks(prev_block, [token_ids], extra_hash, device)[0]

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: None = None,
    ) -> list[NaiveBlock]:
        """Allocate several full blocks."""
        _one_device(device)
        return self.allocate_chain(prev_block, block_token_ids, [], extra_hash)

    def allocate_chain(
        self, prev: Block | None, full: list[list[int]], tail: list[int], extra_hash: int | None
    ) -> list[NaiveBlock]:
        """Allocate blocks for full chunks of tokens and a last, partial one, all or none."""
        places = [*self._keys_of(prev, full, extra_hash), *([None] if tail else [])]
        chunks = [*full, *([tail] if tail else [])]

        def create(ids: list[int]) -> list[NaiveBlock]:
            blocks: list[NaiveBlock] = []
            for tokens, block_id, keyed in zip(chunks, ids, places, strict=True):
                block = self._create(blocks[-1] if blocks else prev, tokens, block_id, extra_hash)
                self._set_key(block, keyed)
                blocks.append(block)
            return blocks

        return self._made(self.take(places), create)

    def fork(self, last_block: NaiveBlock) -> list[NaiveBlock]:
        """Return new references to the blocks up to this one."""
        chained: list[Any] = [last_block]
        while (prev := chained[-1].prev_block) is not None:
            chained.append(prev)
        return self.share(chained[::-1])

    def share(self, blocks: list[NaiveBlock]) -> list[NaiveBlock]:
        """Return a chain of new blocks over the physical blocks of others."""
        self.add_refs(blocks)

        def create(ids: list[int]) -> list[NaiveBlock]:
            copies: list[NaiveBlock] = []
            for block, block_id in zip(blocks, ids, strict=True):
                prev = copies[-1] if copies else block.prev_block
                copy = self._create(prev, block.token_ids, block_id, block.extra_hash)
                self._set_key(copy, self._keyed(block))
                copies.append(copy)
            return copies

        return self._made([block.block_id for block in blocks if block.block_id is not None], create)

    def _made(self, ids: list[int], create: Callable[[list[int]], _Made]) -> _Made:
        """Return the new blocks, or free their physical blocks on an error."""
        try:
            return create(ids)
        except BaseException:
            self.pool.free([self.get_physical_block_id(block_id) for block_id in ids])
            raise

    def _create(self, prev: Block | None, tokens: list[int], block_id: int, extra_hash: int | None) -> NaiveBlock:
        raise NotImplementedError

    def _keys_of(self, prev: Block | None, full: list[list[int]], extra_hash: int | None) -> Sequence[Keyed | None]:
        return [None] * len(full)

    def _set_key(self, block: NaiveBlock, keyed: Keyed | None) -> None:
        """Give a new block a key that is known already."""

    def _keyed(self, block: NaiveBlock) -> Keyed | None:
        return None

    # ---- writes ----

    def cow_block_if_not_appendable(self, block: NaiveBlock) -> int:
        """Return the block id to write to: a copy's if the block is shared."""
        local = self._local(block)
        with _V0_ERRORS:
            target = self._ids[int(self.pool.make_writable([local])[0])]
        if target != block.block_id:
            self._copies.append((block.block_id, target))
        return target

    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        """Return and clear the copies since the last call, `(from, to)`."""
        return take_all(self._copies)

    def promote_to_immutable_block(self, block: NaiveBlock) -> int:
        """Return the id of a full block, or of the cached block with the same tokens if it exists."""
        raise NotImplementedError("there is no promotion for naive blocks")

    # ---- swaps ----

    def places(self, blocks: Iterable[NaiveBlock], is_complete: Callable[[NaiveBlock], bool]) -> list[Keyed | None]:
        """Return the keys of blocks that come from another device; only of complete ones."""
        return [self._keyed(block) if is_complete(block) else None for block in blocks]

    def swap_out(self, blocks: list[NaiveBlock]) -> None:
        """Free the blocks of a list."""
        self.release(blocks)

    def swap_in(self, blocks: list[NaiveBlock]) -> None:
        """Allocate blocks for a list that is swapped in."""
        for block, block_id in zip(blocks, self.take([self._keyed(block) for block in blocks]), strict=True):
            block.block_id = block_id

    def get_num_full_blocks_touched(self, blocks: list[NaiveBlock]) -> int:
        """Return how many full blocks a swap would allocate."""
        return self.touched(blocks, lambda _: True)

    def touched(self, blocks: list[NaiveBlock], is_complete: Callable[[NaiveBlock], bool]) -> int:
        """Return how many free blocks full blocks would take here; complete ones are found by key."""
        full = [block for block in blocks if block.is_full]
        places = self.places(full, is_complete)
        alone = {block.block_id for block, place in zip(full, places, strict=True) if place is None}
        keys = [place[0] for place in places if place is not None]
        return len(alone) + (self.pool.cost(keys) if keys else 0)

    # ---- counts, and the cache ----

    def get_num_total_blocks(self) -> int:
        """Return the number of blocks."""
        return self.pool.num_blocks

    def get_num_free_blocks(self, device: None = None) -> int:
        """Return the number of free blocks."""
        _one_device(device)
        return self.pool.num_free

    def get_prefix_cache_hit_rate(self) -> float:
        """Return the hit rate of lookups; -1 without a prefix cache."""
        if (lookups := self.pool.lookups) is None:
            return -1.0
        queries, hits = lookups
        return hits / max(queries, 1)

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        """Record when blocks were used."""
        blocks = [self.get_physical_block_id(block_id) for block_id in block_ids]
        try:
            self.pool.touch(blocks, now)
        except InvalidArgumentError as error:
            raise ValueError(f"mark block as accessed which is not belonged to GPU: {error}") from None

    def mark_computed(self, block_ids: Iterable[int]) -> None:
        """Make blocks findable by their keys."""
        self.pool.mark_computed([self.get_physical_block_id(block_id) for block_id in block_ids])

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Make these blocks findable by their keys, or all in use if there are none."""
        if block_ids:
            self.mark_computed(block_ids)
        else:
            self.pool.mark_computed()

    def is_computed(self, block_id: int) -> bool:
        """Return whether a block's content is computed."""
        return self.pool.is_computed(self.get_physical_block_id(block_id))

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """Return the computed blocks that all lists share at their start; none without keys."""
        return []

    def reset_prefix_cache(self) -> bool:
        """Drop the cache; return whether that was possible."""
        return self.pool.reset()

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """Return the hashes, from the first on, whose blocks are cached."""
        return []


class NaiveBlockAllocator(PoolAllocator):
    """An allocator of blocks without keys; it reuses the last freed ids first.

    Args:
        create_block: makes the blocks; `NaiveBlock`, or a function with the same arguments.
        num_blocks: number of blocks.
        block_size: token slots in a block.
        block_ids: the engine's ids; from 0 on if None.
        block_pool: has no effect; block objects are not pooled.
    """

    def __init__(
        self,
        create_block: Callable[..., NaiveBlock],
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        block_pool: Any = None,
        *,
        tier: Any = "device",
    ) -> None:
        self._create_block = create_block
        pool = _core.NaiveAllocator(num_blocks, tier=tier, reuse="lifo")
        super().__init__(pool, block_size, _ids(block_ids, num_blocks), tier)

    def _create(self, prev: Block | None, tokens: list[int], block_id: int, extra_hash: int | None) -> NaiveBlock:
        return self._create_block(
            prev_block=prev,
            token_ids=tokens,
            block_size=self.block_size,
            allocator=self,
            block_id=block_id,
            extra_hash=extra_hash,
        )


class PrefixCachingBlockAllocator(PoolAllocator):
    """An allocator that finds blocks by their keys. It evicts the least recently used, then the longest prefixes.

    Args:
        num_blocks: number of blocks.
        block_size: token slots in a block.
        block_ids: the engine's ids; from 0 on if None.
        eviction_policy: V0's only policy, LRU; compared by name, since the enum belongs to the engine.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        eviction_policy: Any = None,
        *,
        tier: Any = "device",
    ) -> None:
        if eviction_policy is not None and eviction_policy.name != "LRU":
            raise ValueError(f"eviction_policy is {eviction_policy!r}, must be LRU")
        pool = _core.PrefixCachingAllocator(num_blocks, tier=tier, reuse="lifo", eviction="accessed")
        super().__init__(pool, block_size, _ids(block_ids, num_blocks), tier)

    def promote_to_immutable_block(self, block: NaiveBlock) -> int:
        """Return the id of a full block, or of the cached block with the same tokens if it exists."""
        local = self._local(block)
        if (keyed := self._keyed(block)) is None:
            raise AssertionError("only a full block can be promoted")
        with _V0_ERRORS:
            return self._ids[self.pool.publish(local, *keyed)]

    def is_block_cached(self, block: PrefixCachingBlock) -> bool:
        """Return whether the content of a block is cached."""
        key = block.key()
        return key is not None and self.pool.has_key(key)

    def block_is_computed(self, block_id: int) -> bool:
        """Return whether a block's content is computed."""
        return self.is_computed(block_id)

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """Return the computed blocks that all lists share at their start."""
        if len(computed_seq_block_ids) == 1:
            return list(computed_seq_block_ids[0])
        rows = [ids for ids in computed_seq_block_ids if ids]
        return [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))]

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """Return the hashes, from the first on, whose blocks are cached."""
        return block_hashes[: len(self.pool.find([key_bytes(content_hash) for content_hash in block_hashes]))]

    def _create(self, prev: Block | None, tokens: list[int], block_id: int, extra_hash: int | None) -> NaiveBlock:
        return PrefixCachingBlock(prev, tokens, self.block_size, self, block_id, extra_hash=extra_hash)

    def _keyed(self, block: NaiveBlock) -> Keyed | None:
        return block.keyed if isinstance(block, PrefixCachingBlock) else None

    def _set_key(self, block: NaiveBlock, keyed: Keyed | None) -> None:
        if keyed is not None and isinstance(block, PrefixCachingBlock):
            block.set_key(keyed[0])

    def _keys_of(self, prev: Block | None, full: list[list[int]], extra_hash: int | None) -> Sequence[Keyed | None]:
        require(all(len(tokens) == self.block_size for tokens in full), "an immutable block must be full")
        parent, end = None, 0
        if isinstance(prev, PrefixCachingBlock):
            parent, end = prev.key(), prev.num_tokens_total
            require(parent is not None or not full, "the previous block of an immutable one must be full")
        keys = chain(parent, [token for tokens in full for token in tokens], self.block_size, extra_hash)
        return [(key, end + number * self.block_size) for number, key in enumerate(keys, 1)]


def take_all(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what a list holds and clear it; what another thread appends meanwhile stays."""
    found = pairs[:]
    del pairs[: len(found)]
    return found


def _one_device(device: object) -> None:
    require(device is None, "an allocator has one device")


def _ids(block_ids: Iterable[int] | None, num_blocks: int) -> Sequence[int]:
    if block_ids is None:
        return range(num_blocks)
    ids = sorted(set(block_ids))
    require(len(ids) == num_blocks, f"{len(ids)} block ids, must be {num_blocks}")
    if ids and ids[-1] - ids[0] != len(ids) - 1:
        return ids
    return range(ids[0], ids[0] + num_blocks) if ids else range(0)
