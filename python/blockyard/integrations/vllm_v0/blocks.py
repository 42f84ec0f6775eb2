"""Blocks and the allocators of one device, over the Rust pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import Any

from blockyard import _core
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.integrations.vllm_v0.interfaces import Block, BlockAllocator


def _require(holds: object, message: str) -> None:
    # V0 asserts; its callers may rely on the exception, also under python -O.
    if not holds:
        raise AssertionError(message)


class NaiveBlock(Block):
    """A block of token ids without a key."""

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: BlockAllocator,
        block_id: int | None = None,
        _cow_target: Block | None = None,
        extra_hash: int | None = None,
    ) -> None:
        _require(len(token_ids) <= block_size, f"{len(token_ids)} tokens do not fit into a block of {block_size}")
        self.token_ids, self.block_size, self.block_id = list(token_ids), block_size, block_id
        self.prev_block, self._allocator, self._cow_target = prev_block, allocator, _cow_target or self
        self.extra_hash = None

    def append_token_ids(self, token_ids: list[int]) -> None:
        room = self.block_size - len(self.token_ids)
        _require(len(token_ids) <= room, f"asked for {len(token_ids)} slots, {room} are empty")
        if self.block_id is not None:
            self.block_id = self._allocator.cow_block_if_not_appendable(self._cow_target)
        self.token_ids.extend(token_ids)

    @property
    def num_empty_slots(self) -> int:
        return self.block_size - len(self.token_ids)

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) == self.block_size

    def _not_used(self, *_: object) -> Any:
        raise NotImplementedError(f"not used for {type(self).__name__}")

    computed: Any = property(_not_used, _not_used)
    last_accessed: Any = property(_not_used, _not_used)
    num_tokens_total: Any = property(_not_used)
    content_hash: Any = property(lambda _: None)


class PrefixCachingBlock(NaiveBlock):
    """A block that others find by its key once it is full."""

    computed: Any = None
    last_accessed: Any = None

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: BlockAllocator,
        block_id: int | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> None:
        _require(isinstance(allocator, PrefixCachingBlockAllocator), f"allocator is {allocator!r}, must cache prefixes")
        _require(prev_block is None or isinstance(prev_block, PrefixCachingBlock), f"got block {prev_block!r}")
        super().__init__(prev_block, token_ids, block_size, allocator, block_id)
        self.computed, self.extra_hash, self.last_accessed = computed, extra_hash, -1.0
        self._content_hash: int | None = None
        self._before = prev_block.num_tokens_total if prev_block is not None else 0

    @property
    def num_tokens_total(self) -> int:
        return self._before + len(self.token_ids)

    def append_token_ids(self, token_ids: list[int]) -> None:
        _require(self.content_hash is None and not self.computed, "a full block is not appended to")
        if token_ids:
            super().append_token_ids(token_ids)
            if self.content_hash is not None and self.block_id is not None:
                self.block_id = self._allocator.promote_to_immutable_block(self)

    @property
    def content_hash(self) -> int | None:
        """The block's key, a SHA-256 chaining value as a number; None until the block and those before it are full."""
        if self._content_hash is None and self.is_full:
            parent = None if self.prev_block is None else self.prev_block.content_hash
            if parent is not None or self.prev_block is None:
                first = self.prev_block is None
                self._content_hash = self.hash_block_tokens(first, parent, self.token_ids, self.extra_hash)
        return self._content_hash

    @classmethod
    def hash_block_tokens(
        cls,
        is_first_block: bool,
        prev_block_hash: int | None,
        cur_block_token_ids: list[int],
        extra_hash: int | None = None,
    ) -> int:
        """Key of a full block, from that of the block before it, its tokens and what else decides its bytes."""
        parent = None if is_first_block else prev_block_hash
        return hash_blocks(parent, cur_block_token_ids, len(cur_block_token_ids), extra_hash)[0]


def hash_blocks(parent: int | None, token_ids: list[int], block_size: int, extra_hash: int | None) -> list[int]:
    """Keys of the full blocks of `token_ids`."""
    before = None if parent is None else _bytes(parent)
    extra = None if extra_hash is None else repr(extra_hash).encode()
    try:
        keys = _core.chain_keys(token_ids, block_size=block_size, parent=before, extra=extra)
    except InvalidArgumentError:
        # Engines put -1 for a token that is not known yet; ids of real ones stay below 2^31.
        known = [token if token >= 0 else (1 << 31) - token for token in token_ids]
        keys = _core.chain_keys(known, block_size=block_size, parent=before, extra=extra)
    return [int.from_bytes(key, "big") for key in keys]


def _bytes(key: int) -> bytes:
    return (key % (1 << 256)).to_bytes(32, "big")


class _PoolAllocator(BlockAllocator):
    """What both allocators share: blocks `block_ids`, in the Rust pool from 0 on."""

    def __init__(
        self, pool: _core.BlockAllocator, create: Callable[..., Any], size: int, ids: Iterable[int] | None
    ) -> None:
        self._ids: Sequence[int] = range(pool.num_blocks) if ids is None else sorted(set(ids))
        _require(len(self._ids) == pool.num_blocks, f"{len(self._ids)} block ids, must be {pool.num_blocks}")
        if self._ids and self._ids[-1] - self._ids[0] + 1 == len(self._ids):
            self._ids = range(self._ids[0], self._ids[-1] + 1)
        self._index = None if isinstance(self._ids, range) else {name: i for i, name in enumerate(self._ids)}
        self._pool, self._create_block, self._block_size = pool, create, size
        self._cows: list[tuple[int, int]] = []

    # Ids: the engine's count over all devices, the pool's from 0.

    @property
    def all_block_ids(self) -> frozenset[int]:
        return frozenset(self._ids)

    def owns(self, block_id: int) -> bool:
        return block_id in (self._ids if self._index is None else self._index)

    def get_physical_block_id(self, absolute_id: int) -> int:
        if not self.owns(absolute_id):
            raise ValueError(f"block {absolute_id} is not one of the {len(self._ids)} of this allocator")
        return absolute_id - self._ids[0] if self._index is None else self._index[absolute_id]

    def _call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return verb(*args, **options)
        except OutOfBlocksError as error:
            raise BlockAllocator.NoFreeBlocksError(*error.args) from None
        except InvalidArgumentError as error:
            raise AssertionError(str(error)) from None

    def _local(self, blocks: Iterable[Block]) -> list[int]:
        ids = [block.block_id for block in blocks]
        _require(None not in ids, "a block has no physical block, it has been freed")
        return [self.get_physical_block_id(name) for name in ids]

    # References.

    def require(self, count: int) -> None:
        """Fail unless so many blocks are free."""
        if count > (free := self._pool.num_free):
            total = self._pool.num_blocks
            raise BlockAllocator.NoFreeBlocksError(
                f"asked for {count} blocks, {free} of {total} are free", "", count, free
            )

    def is_shared(self, block: Block) -> bool:
        """Whether others use the block too."""
        return self._pool.refs(self._local([block])[0]) > 1

    def require_refs(self, blocks: Sequence[Block]) -> None:
        """Fail unless each physical block has as many references as blocks here name it."""
        self._call(self._pool.require, self._local(blocks))

    def add_refs(self, blocks: Sequence[Block]) -> None:
        """Take one more reference for each block."""
        self._call(self._pool.share, self._local(blocks))

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        """Give back one reference each, all or none."""
        self._call(self._pool.free, self._local(blocks))
        for block in blocks:
            block.block_id = None

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        self.free_blocks([block])

    def share_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """Chain of new blocks over the physical blocks of others."""
        self.add_refs(blocks)
        copies: list[Block] = []
        for block in blocks:
            copy = self._block(
                copies[-1] if copies else block.prev_block, block.token_ids, block.block_id, block.extra_hash
            )
            if isinstance(block, PrefixCachingBlock):
                copy._content_hash = block.content_hash  # noqa: SLF001
            copies.append(copy)
        return copies

    def fork(self, last_block: Block) -> list[Block]:
        blocks = [last_block]
        while (block := blocks[-1].prev_block) is not None:
            blocks.append(block)
        return self.share_blocks(blocks[::-1])

    # Taking blocks.

    def _block(self, prev: Block | None, token_ids: list[int], block_id: int | None, extra: int | None) -> Any:
        return self._create_block(
            prev_block=prev,
            token_ids=token_ids,
            block_size=self._block_size,
            allocator=self,
            block_id=block_id,
            extra_hash=extra,
        )

    def take(self, hashes: list[int | None], depths: list[int]) -> list[int]:
        """One physical block for each hash, all or none."""
        return [self._ids[i] for i in self._call(self._pool.allocate, len(hashes)).tolist()]

    def allocate_chain(
        self, prev_block: Block | None, full: list[list[int]], tail: list[int], extra_hash: int | None
    ) -> list[Block]:
        """Blocks for full chunks of tokens and a last one that is not full, all or none."""
        hashes = self._hashes(prev_block, full, extra_hash)
        ids = self.take([*hashes, *([None] if tail else [])], self._depths(prev_block, len(full) + bool(tail)))
        blocks: list[Block] = []
        for token_ids, block_id, key in zip([*full, tail], ids, [*hashes, None], strict=False):
            block = self._block(blocks[-1] if blocks else prev_block, token_ids, block_id, extra_hash)
            if key is not None:
                block._content_hash = key  # noqa: SLF001
            blocks.append(block)
        return blocks

    def _hashes(self, prev_block: Block | None, full: list[list[int]], extra: int | None) -> list[int | None]:
        return [None] * len(full)

    def _depths(self, prev_block: Block | None, count: int) -> list[int]:
        before = prev_block.num_tokens_total if isinstance(prev_block, PrefixCachingBlock) else 0
        return list(range(before + self._block_size, before + self._block_size * count + 1, self._block_size))

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: object = None,
    ) -> list[Block]:
        _require(device is None, "an allocator has one device")
        return self.allocate_chain(prev_block, block_token_ids, [], extra_hash)

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], extra_hash: int | None = None, device: object = None
    ) -> Block:
        return self.allocate_immutable_blocks(prev_block, [token_ids], extra_hash, device)[0]

    def allocate_mutable_block(
        self, prev_block: Block | None, extra_hash: int | None = None, device: object = None
    ) -> Block:
        _require(device is None, "an allocator has one device")
        block: Block = self._block(prev_block, [], self.take([None], [0])[0], extra_hash)
        return block

    def cow_block_if_not_appendable(self, block: Block) -> int:
        (local,), source = self._local([block]), block.block_id
        target = self._ids[int(self._call(self._pool.make_writable, local)[0])]
        if target != source:
            self._cows.append((source, target))
        return target

    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        cows, self._cows = self._cows, []
        return cows

    # Swapping. `CpuGpuBlockAllocator.swap` takes the blocks before it gives the others back.

    def swap_out(self, blocks: list[Block]) -> None:
        self.free_blocks(blocks)

    def swap_in(self, blocks: list[Block]) -> None:
        for block, block_id in zip(blocks, self.take_for(blocks), strict=True):
            block.block_id = block_id

    def take_for(self, blocks: Sequence[Block]) -> list[int]:
        """One physical block for each block that comes from another device, all or none."""
        keyed = [block.content_hash for block in blocks]
        return self.take(
            keyed, [0 if key is None else block.num_tokens_total for key, block in zip(keyed, blocks, strict=True)]
        )

    # Figures.

    def get_num_total_blocks(self) -> int:
        return self._pool.num_blocks

    def get_num_free_blocks(self) -> int:
        return self._pool.num_free

    def get_num_full_blocks_touched(self, blocks: list[Block]) -> int:
        return len({block.block_id for block in blocks if block.is_full})

    def get_prefix_cache_hit_rate(self) -> float:
        if (lookups := self._pool.lookups) is None:
            return -1
        return lookups[1] / lookups[0] if lookups[0] else 0.0

    # The prefix cache, of which a pool without keys knows nothing.

    def promote_to_immutable_block(self, block: Block) -> int:
        raise NotImplementedError("there is no promotion for naive blocks")

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        try:
            self._pool.touch([self.get_physical_block_id(name) for name in block_ids], now)
        except InvalidArgumentError as error:
            raise ValueError(f"mark block as accessed which is not belonged to GPU: {error}") from None

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        self._pool.mark_computed([self.get_physical_block_id(name) for name in block_ids] or None)

    def reset_prefix_cache(self) -> bool:
        return self._pool.reset()

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        return block_hashes[: len(self._pool.find([_bytes(key) for key in block_hashes]))]

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        if self._pool.lookups is None:
            return []
        if len(computed_seq_block_ids) == 1:
            return computed_seq_block_ids[0]
        rows = zip(*(ids for ids in computed_seq_block_ids if ids), strict=False)
        return [row[0] for row in takewhile(lambda row: len(set(row)) == 1, rows)]


class NaiveBlockAllocator(_PoolAllocator):
    """Blocks without keys; ids that were freed last are reused first."""

    def __init__(
        self,
        create_block: Callable[..., Any],
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        block_pool: object = None,
    ) -> None:
        del block_pool  # block objects are cheap here and not pooled
        super().__init__(_core.NaiveAllocator(num_blocks, reuse="lifo"), create_block, block_size, block_ids)


class PrefixCachingBlockAllocator(_PoolAllocator):
    """Blocks that are found again by their keys; the least recently accessed go first, then the longest prefixes."""

    def __init__(self, num_blocks: int, block_size: int, block_ids: Iterable[int] | None = None) -> None:
        pool = _core.PrefixCachingAllocator(num_blocks, reuse="lifo", eviction="accessed")
        super().__init__(pool, PrefixCachingBlock, block_size, block_ids)

    def _hashes(self, prev_block: Block | None, full: list[list[int]], extra: int | None) -> list[int | None]:
        _require(all(len(token_ids) == self._block_size for token_ids in full), "an immutable block must be full")
        _require(prev_block is None or isinstance(prev_block, PrefixCachingBlock), f"got block {prev_block!r}")
        parent = None if prev_block is None else prev_block.content_hash
        _require(prev_block is None or parent is not None or not full, "the block before an immutable one must be full")
        return [*hash_blocks(parent, list(chain.from_iterable(full)), self._block_size, extra)]

    def take(self, hashes: list[int | None], depths: list[int]) -> list[int]:
        keyed = [(_bytes(key), depth) for key, depth in zip(hashes, depths, strict=True) if key is not None]
        keys, lengths = [key for key, _ in keyed], [depth for _, depth in keyed]
        taken = self._call(self._pool.allocate_keyed, keys, lengths, plain=len(hashes) - len(keys))[0].tolist()
        found, plain = iter(taken[: len(keys)]), iter(taken[len(keys) :])
        return [self._ids[next(plain if key is None else found)] for key in hashes]

    def promote_to_immutable_block(self, block: Block) -> int:
        (local,), key = self._local([block]), block.content_hash
        _require(key is not None, "only a full block is promoted")
        return self._ids[int(self._call(self._pool.publish, local, _bytes(key), block.num_tokens_total))]

    def is_block_cached(self, block: Block) -> bool:
        return block.content_hash is not None and self._pool.has_key(_bytes(block.content_hash))

    def block_is_computed(self, block_id: int) -> bool:
        return self._pool.is_computed(self.get_physical_block_id(block_id))

    def get_num_full_blocks_touched(self, blocks: list[Block]) -> int:
        full = [block.content_hash for block in blocks if block.is_full]
        keys = [_bytes(key) for key in full if key is not None]
        return self._pool.cost(keys) + len(full) - len(keys)
