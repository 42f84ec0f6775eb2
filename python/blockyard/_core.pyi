"""The Rust core of Blockyard.

Block ids count from 0 in each tier: `"device"`, `"host"`, `"external"`. Sequence handles are opaque uint64 numbers; one
kept past `free` is recognised. Where a call takes `sequences`, a uint64 array is quickest; a list of ints or one int
will do. A failed call changes nothing. All classes may be used from several threads; each call is atomic.
"""

from collections.abc import Iterable
from collections.abc import Sequence as _Each
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

__all__ = [
    "AllocStatus",
    "BlockAllocator",
    "BlockManager",
    "BlockObserver",
    "BoundViews",
    "CacheGroup",
    "Completion",
    "Defrag",
    "DefragReport",
    "EventBatch",
    "Fit",
    "Fragmentation",
    "FreeBlocks",
    "HashedPrompt",
    "ManagerStats",
    "Mapping",
    "MovePlan",
    "NaiveAllocator",
    "OffloadManager",
    "Pairs",
    "Pins",
    "Pool",
    "Prefix",
    "PrefixCaching",
    "PrefixCachingAllocator",
    "PrefixHit",
    "PreparedStore",
    "RedisClient",
    "Residency",
    "ResizeProgress",
    "Sequence",
    "SlabReport",
    "SlabStore",
    "StepDecision",
    "StoreJob",
    "StoreJobs",
    "StoreStats",
    "V0BlockTable",
    "V0CpuGpuBlockAllocator",
    "V0NaiveBlock",
    "V0NaiveBlockAllocator",
    "V0NullBlock",
    "V0PoolAllocator",
    "V0PrefixCachingBlock",
    "V0PrefixCachingBlockAllocator",
    "__version__",
    "build_profile",
    "chain_keys",
    "check_slab",
    "checksum_rows",
    "expand_span",
    "export_keys",
    "inspect_slab",
    "v0_hash_blocks",
]

__version__: str
build_profile: Literal["debug", "release"]

_Tier: TypeAlias = Literal["device", "host", "external"]
_Reuse: TypeAlias = Literal["lowest", "fifo", "lru", "lifo"]
_Handle: TypeAlias = Sequence | int | np.uint64
_Handles: TypeAlias = NDArray[np.uint64] | _Each[_Handle] | _Handle
_TokenIds: TypeAlias = NDArray[np.uint32] | _Each[int]
_Prompt: TypeAlias = _TokenIds | HashedPrompt
_Counts: TypeAlias = NDArray[np.uint32] | _Each[int] | int

@final
class AllocStatus:
    """Whether a request fits: now, later or never. Only `OK` is true.

    Attributes:
        OK: it fits now.
        LATER: it fits once other sequences have left.
        NEVER: it does not fit even into an empty tier.

    Example:
        >>> from blockyard import AllocStatus, BlockManager
        >>> manager = BlockManager(block_size=16, device_blocks=8, watermark=0)
        >>> manager.can_allocate(1000).status is AllocStatus.NEVER
        True
    """

    OK: AllocStatus
    LATER: AllocStatus
    NEVER: AllocStatus
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __bool__(self) -> bool: ...

_IdPairs: TypeAlias = NDArray[np.integer[Any]] | _Each[_Each[int]]
_Blocks: TypeAlias = NDArray[np.int32] | _Each[int] | int

@disjoint_base
class BlockAllocator:
    """The blocks of one tier, given out and taken back by reference; what the two allocators have in common.

    The caller owns one reference for each id that it was given. Block ids are int32 `[n]`; every verb takes a batch and
    succeeds whole or changes nothing.

    Raises:
        OutOfBlocksError: the call needs more blocks than are free.
        InvalidArgumentError: a block is out of range, has fewer references than the call names, or is the null block.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks of the tier."""
    @property
    def num_free(self) -> int:
        """Blocks that nothing references, cached ones included."""
    @property
    def lookups(self) -> tuple[int, int] | None:
        """Keys asked for and keys found since the last reset; None without a prefix cache."""
    def refs(self, block: int) -> int:
        """Return how many references a block has.

        Args:
            block: its id.
        """
    def allocate(self, count: int) -> NDArray[np.int32]:
        """Take free blocks, one reference each. Cached blocks are evicted if needed.

        Args:
            count: how many.
        Returns:
            Block ids, int32 `[count]`.
        Raises:
            OutOfBlocksError: fewer blocks are free.
        """
    def allocate_keyed(
        self, keys: _Each[bytes], depths: _Each[int], *, plain: int = 0
    ) -> tuple[NDArray[np.int32], int]:
        """Takes one block for each key, the one that has it where there is one, then `plain` more.

        Args:
            keys: keys of full blocks, 32 bytes each, from `chain_keys`.
            depths: length of the prefix that each one ends; of blocks used equally long ago the longest goes first.
            plain: blocks without a key.
        Returns:
            The blocks, int32 `[keys + plain]`, and how many keys had one.
        """
    def share(self, blocks: _Blocks) -> None:
        """Add one reference to each block.

        Args:
            blocks: ids, int32 `[n]`, a list, or one.
        """
    def require(self, blocks: _Blocks) -> None:
        """Raises what `free` would raise, and changes nothing."""
    def free(self, blocks: _Blocks) -> None:
        """Give one reference to each block back.

        Args:
            blocks: ids, int32 `[n]`, a list, or one.
        """
    def make_writable(self, blocks: _Blocks) -> NDArray[np.int32]:
        """Exchanges blocks that others use for new ones; where an id differs, the caller copies the bytes."""
    def publish(self, block: int, key: bytes, depth: int = 0) -> int:
        """Gives a full block its key; returns the block to use from now on, which may be another one with that key."""
    def find(self, keys: _Each[bytes]) -> NDArray[np.int32]:
        """Blocks of the longest prefix of the keys that is computed; nothing is taken."""
    def cost(self, keys: _Each[bytes]) -> int:
        """Free blocks that taking these keys would use up."""
    def has_key(self, key: bytes) -> bool:
        """Return whether a cached block has this key.

        Args:
            key: 32 bytes.
        """
    def is_computed(self, block: int) -> bool:
        """Return whether the block's contents are computed: `publish` gave it a key, or it came from a hit.

        Args:
            block: its id.
        """
    def mark_computed(self, blocks: _Blocks | None = None) -> None:
        """These blocks, or all in use, count as computed where they have a key: the step that writes them is over."""
    def touch(self, blocks: _Blocks, now: float) -> None:
        """Notes when blocks were last used, in seconds of any clock."""
    def reset(self) -> bool:
        """Forgets all keys; False and nothing done while a block is in use."""
    def null_block(self) -> int:
        """The block that stands for those that fell out of a window; taken at the first call, never freed."""
    def upcoming(self, limit: int | None = None) -> NDArray[np.int32]:
        """Free blocks in the order in which they would be given out, int32 `[n]`; nothing is taken.

        Those that hold nothing go first, then cached ones in the order of eviction.
        """
    def iter_upcoming(self) -> FreeBlocks:
        """As `upcoming`, one by one: only as many are looked up as are asked for. See `FreeBlocks`."""
    def check(self) -> None:
        """Recount the whole state and compare.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """

@final
class NaiveAllocator(BlockAllocator):
    """An allocator that counts references and knows nothing of tokens.

    Args:
        num_blocks: blocks of the tier.
        tier: name of the tier in errors.
        reuse: which free block goes next: `"lowest"` id, `"fifo"` (or `"lru"`), or `"lifo"`.

    Example:
        >>> from blockyard.allocators import NaiveAllocator
        >>> allocator = NaiveAllocator(8)
        >>> blocks = allocator.allocate(3)
        >>> blocks.tolist(), allocator.num_free
        ([0, 1, 2], 5)
        >>> allocator.free(blocks)
    """

    def __new__(cls, num_blocks: int, *, tier: _Tier = "device", reuse: _Reuse = "lowest") -> NaiveAllocator: ...

@final
class PrefixCachingAllocator(BlockAllocator):
    """An allocator that finds full blocks by their keys, also after their last reference has gone.

    Args:
        num_blocks: blocks of the tier.
        tier: name of the tier in errors.
        reuse: which free block goes next, as for `NaiveAllocator`.
        eviction: which cached block goes once none is free: the one `"released"` or `"accessed"` least recently.

    Example:
        >>> from blockyard.allocators import PrefixCachingAllocator, chain_keys
        >>> allocator = PrefixCachingAllocator(8)
        >>> keys = chain_keys([1, 2, 3, 4, 5, 6, 7, 8], block_size=4)
        >>> blocks = allocator.allocate(2)
        >>> blocks = [allocator.publish(block, key, depth) for depth, (block, key) in enumerate(zip(blocks, keys))]
        >>> allocator.mark_computed(blocks)
        >>> allocator.free(blocks)
        >>> allocator.find(keys).tolist()
        [0, 1]
    """

    def __new__(
        cls,
        num_blocks: int,
        *,
        tier: _Tier = "device",
        reuse: _Reuse = "lowest",
        eviction: Literal["released", "accessed"] = "released",
    ) -> PrefixCachingAllocator: ...

@final
class FreeBlocks:
    """An iterator over free blocks in the order in which they would be given out. Nothing is taken.

    It reads ids ahead in chunks, first 64, then twice as many each time, so the first few cost little in any pool. If
    the pool changes meanwhile, ids that were read ahead stay as they were, and the next chunk continues at the same
    place of the new order: an id may be missed or come twice.
    """

    def __iter__(self) -> FreeBlocks: ...
    def __next__(self) -> int: ...

@final
class Pairs:
    """Pairs of block ids between two tiers.

    Args:
        src: tier that is read.
        dst: tier that is written.
        ids: `(from, to)`: int64 `[n, 2]`, another array of ints, or a sequence of pairs.
    Raises:
        MappingError: an id is negative or too large, or the array has another dtype or shape.
        InvalidArgumentError: a tier has another name.

    Example:
        >>> from blockyard import Pairs
        >>> pairs = Pairs("device", "host", [(3, 0), (4, 1)])
        >>> len(pairs), pairs.ids.tolist()
        (2, [[3, 0], [4, 1]])
    """

    def __new__(cls, src: _Tier, dst: _Tier, ids: _IdPairs) -> Pairs: ...
    @property
    def src(self) -> _Tier:
        """Tier that is read."""
    @property
    def dst(self) -> _Tier:
        """Tier that is written."""
    @property
    def ids(self) -> NDArray[np.int64]:
        """Block ids `(from, to)`, int64 `[n, 2]`."""
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class StepDecision:
    """The transfers of one step, and the ticket that holds leases on all their blocks until it is completed or failed.

    Each kind is a tuple with one `Pairs` for each pair of tiers, empty if there is nothing to do. `after` names the
    tickets, perhaps this one too, whose device reads must have finished before this step writes to the device.

    Args:
        ticket: number to complete or fail.
        transfers: kind and pairs; sorted into the order in which they are safe to run.
        after: tickets to wait for.
        prefetch: whether nothing that the step computes reads what it loads.
    Attributes:
        MAX_BYTES: most bytes of a decision that `to_bytes` writes and `from_bytes` reads.
    Raises:
        InvalidArgumentError: a kind has another name.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=16, device_blocks=8, host_blocks=8)
        >>> sequence = manager.allocate(20)
        >>> _ = manager.complete(manager.take_decision().ticket)
        >>> manager.swap_out([sequence])
        >>> decision = manager.take_decision()
        >>> [(kind, pairs.ids.tolist()) for kind, pairs in decision.transfers()]
        [('swap_out', [[0, 0], [1, 1]])]
    """

    def __new__(
        cls, ticket: int, transfers: _Each[tuple[str, Pairs]], *, after: _Each[int] = ..., prefetch: bool = False
    ) -> StepDecision: ...
    @property
    def ticket(self) -> int:
        """Number to complete or fail."""
    @property
    def prefetch(self) -> bool:
        """Whether nothing that the step computes reads what it loads: compute does not wait for it."""
    @property
    def after(self) -> tuple[int, ...]:
        """Tickets whose device reads must end before this step writes to the device, a tuple of ints."""
    @property
    def swap_out(self) -> tuple[Pairs, ...]:
        """Away from the device, to the host or the external tier: a tuple with one `Pairs` for each pair of tiers."""
    @property
    def swap_in(self) -> tuple[Pairs, ...]:
        """Towards the device, from the host or the external tier: a tuple with one `Pairs` for each pair of tiers."""
    @property
    def copy(self) -> tuple[Pairs, ...]:
        """Copy-on-write on the device: a tuple of `Pairs`."""
    @property
    def move(self) -> tuple[Pairs, ...]:
        """Moves of defragmentation on the device: a tuple of `Pairs`."""
    @property
    def exchange(self) -> tuple[Pairs, ...]:
        """Exchanges of defragmentation on the device: a tuple of `Pairs`."""
    @property
    def blocks_to_swap_in(self) -> NDArray[np.int64]:
        """Host to device, int64 `[n, 2]`; vLLM's name."""
    @property
    def blocks_to_swap_out(self) -> NDArray[np.int64]:
        """Device to host, int64 `[n, 2]`; vLLM's name."""
    @property
    def blocks_to_copy(self) -> NDArray[np.int64]:
        """Copy-on-write on the device, int64 `[n, 2]`; vLLM's name."""
    def transfers(self) -> list[tuple[str, Pairs]]:
        """All kinds and pairs, in the order in which they are safe to run one after another."""
    MAX_BYTES: ClassVar[int]
    """Bytes of the longest decision that is written or read."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def to_bytes(self) -> bytes:
        """The decision as bytes with version and checksum, the same in every process, less entries without pairs.

        Raises:
            MappingError: it cannot be carried out as it is written, as `from_bytes` says, or is too long.
        """
    @staticmethod
    def from_bytes(data: bytes) -> StepDecision:
        """The decision that was written as these bytes; runs no code in them, takes memory in proportion to them.

        The checksum finds damage, not a forger who computes it: bytes of unknown origin need a signature of yours.
        Whoever wrote them, kinds and tiers fit and nothing is written twice; ids are bounded where they are used.

        Args:
            data: what `to_bytes` gave.
        Raises:
            MappingError: the bytes are not whole or of another version, a kind is out of order or there twice for its
                tiers, or joins other tiers, a block is written twice or both copied and written, or the ticket waits
                for a later one.
        """
    def __len__(self) -> int: ...

@final
class CacheGroup:
    """What the layers of one cache group need of the tokens before.

    Example:
        >>> from blockyard import BlockManager, CacheGroup
        >>> groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(32)]
        >>> manager = BlockManager(block_size=16, device_blocks=64, groups=groups)
        >>> [group.peak_blocks(100, block_size=16, chunk_tokens=16) for group in groups]
        [7, 4]
    """

    @staticmethod
    def full_attention() -> CacheGroup:
        """All of them."""
    @staticmethod
    def sliding_window(window: int) -> CacheGroup:
        """The token itself and the `window - 1` before it; blocks before those are given back."""
    @staticmethod
    def recurrent() -> CacheGroup:
        """One state, which a block holds after its last token.

        A step reads it from the block of the token before and writes it into the block of its own last token; blocks
        that a longer step passes over are 0 in the table. A state cannot be taken back: truncation is refused.
        """
    @staticmethod
    def cross_attention() -> CacheGroup:
        """The tokens of an encoder, given once; forks share them. Not together with prefix caching."""
    @property
    def kind(self) -> Literal["full_attention", "sliding_window", "recurrent", "cross_attention"]:
        """`"full_attention"`, `"sliding_window"`, `"recurrent"` or `"cross_attention"`."""
    @property
    def window(self) -> int | None:
        """Tokens of the window; None for other kinds."""
    def peak_blocks(
        self, num_tokens: int, *, block_size: int, lookahead: int = 0, chunk_tokens: int | None = None
    ) -> int:
        """Most blocks that a sequence holds at once in this group if at most `chunk_tokens` are put in at a time."""
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Fit:
    """Whether a request for blocks fits, and the numbers that decide it. True only where `status` is `OK`.

    Args:
        status: `AllocStatus`.
        blocks: blocks that the request takes.
        free: blocks that can be given out.
    """

    def __new__(cls, status: AllocStatus, blocks: int, free: int) -> Fit: ...
    def __bool__(self) -> bool: ...
    @property
    def status(self) -> AllocStatus:
        """`AllocStatus.OK`, `LATER` or `NEVER`."""
    @property
    def blocks(self) -> int:
        """Blocks that the request takes; 0 for sequences that cannot move as they are."""
    @property
    def free(self) -> int:
        """Blocks that can be given out now; where the request must keep the watermark, without the watermark's."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Sequence:
    """The handle of one sequence. Every call that takes a handle takes it; so does numpy.

    It equals and hashes as its number, and prints as that number.

    Args:
        handle: the number, uint64.
        cached_tokens: first tokens of the prompt that need not be computed.
    """

    def __new__(cls, handle: int, cached_tokens: int = 0) -> Sequence: ...
    @property
    def cached_tokens(self) -> int:
        """First tokens of the prompt that need not be computed: the prefix cache had them. The last token is always
        computed.
        """
    def __index__(self) -> int: ...
    def __int__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __lt__(self, value: int | Sequence, /) -> bool: ...
    def __le__(self, value: int | Sequence, /) -> bool: ...
    def __gt__(self, value: int | Sequence, /) -> bool: ...
    def __ge__(self, value: int | Sequence, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class PrefixCaching:
    """Options of the prefix cache, for `BlockManager(prefix_caching=...)`.

    Args:
        eviction: which cached block goes first once no block is free. `"adaptive"`: by the rule that has most hits just
            now, which it finds out by trying each on a sample of the blocks. It is rarely far from the best fixed
            policy, and takes 10 % more time a request than `"lru"`. `"lru"`: the least recently used. `"priority"`: by
            `prefix.set_priority`. Each takes a prompt's blocks from its end.
        host: whether the host is a second level of the cache. Blocks that would be evicted from the device are copied
            there by the step's decision (`swap_out`), and a hit there is loaded by it (`swap_in`). The least recently
            used copy goes first. Prompts of several cache groups, or of a window, do not look there yet.
        host_copies_per_step: with `host=True`, the most blocks that one decision copies before they are evicted, at
            most an eighth of the device or the host. Steps that take more new blocks than this evict the others without
            a copy. 0 copies only what is swapped out and what `prefix.offload` is told to.
        max_events: most events that wait for `prefix.take_events`; 0 records none.
        max_pinned: fraction of the device blocks that pins may hold, 0 to below 1.
    Raises:
        InvalidArgumentError: an option is out of range or has another name.

    Example:
        >>> from blockyard import BlockManager, PrefixCaching
        >>> options = PrefixCaching(eviction="lru", host=True, max_events=1000)
        >>> manager = BlockManager(block_size=16, device_blocks=64, host_blocks=64, prefix_caching=options)
    """

    def __new__(
        cls,
        *,
        eviction: str = "adaptive",
        host: bool = False,
        host_copies_per_step: int = 256,
        max_events: int = 0,
        max_pinned: float = 0.5,
    ) -> PrefixCaching: ...
    @property
    def eviction(self) -> str:
        """Name of the eviction policy."""
    @property
    def host(self) -> bool:
        """Whether the host is a second level of the cache."""
    @property
    def host_copies_per_step(self) -> int:
        """Most blocks that a decision copies to the host before they are evicted."""
    @property
    def max_events(self) -> int:
        """Most events that wait."""
    @property
    def max_pinned(self) -> float:
        """Fraction of the device blocks that pins may hold."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Pool:
    """The blocks of one tier, as `manager.pool("device")`. Iterate over it for the free blocks, one by one.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=4, device_blocks=8)
        >>> _ = manager.allocate(12)
        >>> pool = manager.pool("device")
        >>> pool.num_free, pool.free_ids(limit=2).tolist()
        (5, [3, 4])
    """

    @property
    def tier(self) -> _Tier:
        """`"device"`, `"host"` or `"external"`."""
    @property
    def num_blocks(self) -> int:
        """Blocks of the tier."""
    @property
    def num_free(self) -> int:
        """Blocks that nothing references and no transfer leases; cached ones count."""
    @property
    def reserved(self) -> int:
        """Blocks that admission keeps free: the device's watermark, 0 in the other tiers."""
    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups whose block tables use the pool, a tuple of `CacheGroup` in the order of their numbers."""
    def free_ids(self, limit: int | None = None) -> NDArray[np.int32]:
        """Return the free blocks that hold nothing cached, in the order in which they are given out. Nothing is taken.

        Args:
            limit: how many at most; None for all.
        Returns:
            Block ids, int32 `[n]`.
        """
    def uses(self) -> NDArray[np.uint8]:
        """Return what each block is used for.

        Returns:
            uint8 `[num_blocks]`, while a pool shrinks `[defrag.progress().extent]`. 0: free. 1: cached; its key finds
            it, and it is given out if needed. 2: only transfers or pins hold it. 3: sequences use it; a null block
            counts as such.
        """
    def __iter__(self) -> FreeBlocks: ...

@final
class HashedPrompt:
    """A prompt whose tokens were hashed once: looking it up and admitting it hash nothing.

    `manager.prefix.hash` makes it. Any manager with the same block size takes it in place of a prompt's token ids; it
    has its salt, adapter and extras. `len()` is its number of tokens.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
        >>> prompt = manager.prefix.hash([1, 2, 3, 4, 5, 6])
        >>> len(prompt), manager.prefix.lookup(prompt).tokens
        (6, 0)
        >>> sequence = manager.allocate(prompt)
    """

    def __len__(self) -> int: ...

@final
class StoreJob:
    """A load from a prefix store, or a write to it: which block is to have, or has, the bytes of which key."""

    @property
    def job(self) -> int:
        """Number of the job. A job without blocks has ended."""
    @property
    def tier(self) -> Literal["device", "host"]:
        """Tier of the blocks, `"device"` or `"host"`."""
    @property
    def keys(self) -> NDArray[np.uint8]:
        """Keys in the store, uint8 `[n, 32]`."""
    @property
    def blocks(self) -> NDArray[np.int64]:
        """The blocks, int64 `[n]`."""
    @property
    def tenants(self) -> NDArray[np.uint8]:
        """Each block's tenant, uint8 `[n, 32]`: SHA-256 of its salt, zeros for prompts without a salt."""
    @property
    def parents(self) -> NDArray[np.uint8]:
        """Key of the block before each in its prompt, uint8 `[n, 32]`; zeros for the first."""
    @property
    def awaited(self) -> int:
        """Of a load: blocks of its prompt that other loads are bringing."""
    def __len__(self) -> int: ...

@final
class StoreJobs:
    """Loads from a prefix store and writes to it, as `manager.prefix.store_jobs`.

    `KVCache(prefix_store=...)` carries them out.

    A block that is loaded is found by nobody before `end_load` says that its bytes have landed. Blocks of open jobs
    are neither given out, evicted nor moved.
    """

    def start(self, writes: str) -> None:
        """Note from now on which blocks the store is to be given.

        Args:
            writes: `"through"`: each block once it is computed. `"back"`: a block that is among the next to be
                evicted and has no copy on another tier. `"second_use"`: a block that is computed or hit a second
                time. `"never"`: none.
        Raises:
            InvalidArgumentError: another name, something is cached already, or the manager has no prefix caching,
                several cache groups or a window.
        """
    def missing(
        self, prompt: _Prompt, max_blocks: int, *, salt: bytes | None = None, lora_id: int = 0
    ) -> NDArray[np.uint8]:
        """Return the keys of a prompt's blocks that no tier has and no load is bringing, first to last.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`.
            max_blocks: most keys.
            salt: of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            uint8 `[n, 32]`.
        Raises:
            InvalidArgumentError: a token id is out of range.
        """
    def begin_load(self, prompt: _Prompt, max_blocks: int, *, salt: bytes | None = None, lora_id: int = 0) -> StoreJob:
        """Begin to load the first of those blocks, as far as there is room.

        Loads take at most half of the host's blocks, or a quarter of the device's where the host has no room or
        keeps no copies (`PrefixCaching(host=True)`).

        Args:
            prompt: as for `missing`.
            max_blocks: most blocks.
            salt: of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            `StoreJob`; it ends with `end_load`, unless it has no blocks.
        Raises:
            InvalidArgumentError: a token id is out of range.
        """
    def end_load(self, job: int, landed: NDArray[np.bool_] | _Each[bool]) -> int:
        """End a load: prompts find the blocks that have landed, the others go free.

        Args:
            job: number of the job.
            landed: for each block whether its bytes have landed, bool `[n]` or a list.
        Returns:
            Blocks that can be found for it.
        Raises:
            UnknownTicketError: there is no such load, or it has ended.
            InvalidArgumentError: there is not one entry a block.
        """
    @property
    def num_waiting(self) -> int:
        """Blocks that wait for `begin_write`. A block that is evicted before its turn counts until then."""
    def begin_write(self, max_blocks: int) -> StoreJob:
        """Begin to read blocks for the store, all of one tier.

        All writes hold at most a quarter of the device's blocks. A call that needs a block in their hands takes it:
        `end_write` says so.

        Args:
            max_blocks: most blocks.
        Returns:
            `StoreJob`; it ends with `end_write` once its blocks have been read, unless it has no blocks.
        """
    def end_write(self, job: int) -> bool:
        """End the reading of blocks for the store. With `"back"` they are free then, unless they are in use again.

        Args:
            job: number of the job.
        Returns:
            False if a call has taken blocks meanwhile: what was read must not be stored.
        Raises:
            UnknownTicketError: there is no such write, or it has ended.
        """

@final
class PrefixHit:
    """What the prefix cache holds of the start of a prompt."""

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed: whole blocks, and never the prompt's last token."""
    @property
    def host_blocks(self) -> int:
        """Blocks of them that only the host has; `allocate` loads them."""
    def __bool__(self) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Prefix:
    """A manager's prefix cache, as `manager.prefix`.

    A block is cached once its tokens are computed (`mark_computed`) and its bytes have landed. It stays cached after
    its sequences are freed, until its place is needed.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
        >>> prompt = [1, 2, 3, 4, 5, 6]
        >>> first = manager.allocate(prompt)
        >>> decision = manager.take_decision()  # the model computes the prompt
        >>> manager.mark_computed([first])
        >>> _ = manager.complete(decision.ticket)
        >>> manager.prefix.lookup(prompt).tokens
        4
    """

    @property
    def enabled(self) -> bool:
        """Whether the manager was made with prefix caching."""
    @property
    def store_jobs(self) -> StoreJobs:
        """Loads from a prefix store, and writes to it."""
    def lookup(self, prompt: _Prompt, *, salt: bytes | None = None, lora_id: int = 0) -> PrefixHit:
        """Look up how much of a prompt is cached. Nothing is taken.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`.
            salt: of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            `PrefixHit`, true if anything is cached.
        Raises:
            InvalidArgumentError: a token id is out of range.
        """
    def hash(
        self,
        token_ids: _TokenIds,
        *,
        salt: bytes | None = None,
        lora_id: int = 0,
        extras: _Each[tuple[int, int, int, bytes]] = ...,
    ) -> HashedPrompt:
        """Hash a prompt once, to look it up and admit it as often as a scheduler asks.

        Args:
            token_ids: uint32 `[tokens]` or a list of ints; copied.
            salt: of its tenant, bytes.
            lora_id: its adapter; 0 for none.
            extras: other inputs that decide a block's bytes: `(0, block, kind, bytes)`, by rising block.
        Returns:
            `HashedPrompt`, for `lookup`, `can_allocate` and `allocate` of managers with the same block size.
        Raises:
            InvalidArgumentError: a token id is out of range, or an extra names a block that is not full.
        """
    def note_tokens(self, sequences: _Handles, token_ids: _TokenIds, num_tokens: _Counts | None = None) -> None:
        """Tell the cache token ids that were not known when their slots were given, as in a scheduler one step ahead.

        `append` without `token_ids` gives the slots; this names the tokens once they are sampled. Sequences that were
        admitted by counts, or that share the blocks of these tokens with a fork, are passed over.

        Args:
            sequences: handles, uint64 `[n]`, none twice; a list, or one.
            token_ids: ids of the next tokens that are not known yet, uint32 `[tokens]`, sequence by sequence.
            num_tokens: ids for each sequence, one int or uint32 `[n]`; 1 by default.
        Raises:
            InvalidArgumentError: more ids than tokens without, an id is out of range, or a handle is given twice.
            UnknownSequenceError: there is no such sequence.
        """
    def common_blocks(self, sequences: _Handles) -> NDArray[np.int32]:
        """Return the computed blocks that all the sequences share at their start, as cascade attention wants them.

        Args:
            sequences: handles, uint64 `[n]` or a list.
        Returns:
            Block ids, int32 `[blocks]`.
        Raises:
            UnknownSequenceError: there is no such sequence.
        """
    def reset(self) -> bool:
        """Forget everything that is cached, for instance after the model's weights changed.

        Returns:
            False, and nothing is forgotten, while a block is in use.
        """
    def offload(self, max_blocks: int) -> int:
        """Copy the blocks that would be evicted next to the host, by this step's decision (`swap_out`).

        Each step does so by itself for as many blocks as the next one may take, see `PrefixCaching`. Prompts still find
        the blocks meanwhile, and this step's own work may take them. When the ticket completes, the remaining device
        blocks are freed and found on the host. Older copies there make room.

        Args:
            max_blocks: cached device blocks to look at, in the order of eviction; those with a copy are freed.
        Returns:
            Blocks that are copied.
        Raises:
            InvalidArgumentError: the manager was made without `PrefixCaching(host=True)`.
        """
    def set_priority(self, sequences: _Handles, priority: int) -> None:
        """Set how long the cached blocks of sequences are kept once they are freed, for `eviction="priority"`.

        Each level keeps a block for as long as it takes to evict the whole pool once more. A shared block counts by its
        highest priority.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            priority: 0, the default, to 15.
        Raises:
            InvalidArgumentError: the priority is out of range.
            UnknownSequenceError: there is no such sequence.
        """
    def set_quota(self, salt: bytes | None, blocks: int | None) -> None:
        """Limit the cached device blocks that one tenant leaves behind: published, and used by no sequence.

        The tenant's least recently used blocks beyond the quota are freed whenever sequences are freed, tickets end or
        decisions are taken. If room is needed earlier, they go before the blocks of other tenants. Blocks that the
        tenant published before its first quota do not count.

        Args:
            salt: the tenant; None for prompts without a salt.
            blocks: most such blocks; None for no limit.
        Raises:
            InvalidArgumentError: the device has fewer blocks, prefix caching is off, or 65535 tenants have quotas.
        """
    def quota(self, salt: bytes | None) -> tuple[int, int | None] | None:
        """Return the blocks that count towards a tenant's quota, and the quota.

        Args:
            salt: the tenant; None for prompts without a salt.
        Returns:
            `(blocks, quota)`; None for a tenant that never had a quota.
        """
    def sample_residency(self, sample_rate: float) -> None:
        """Measure from now on how long blocks stay cached, on a sample of them; see `residency`.

        Args:
            sample_rate: part of the blocks that is measured, above 0 to 1.
        Raises:
            InvalidArgumentError: the rate is out of range.
        """
    def residency(self) -> dict[str, Residency]:
        """Return how long sampled blocks stayed cached, since `sample_residency`.

        Returns:
            `Residency` of the tiers that cache: `"device"` and `"host"`.
        """
    def take_events(self) -> EventBatch:
        """Take all events that wait: blocks stored, removed, the cache cleared. A router follows the cache with them.

        Returns:
            `EventBatch`, empty without `PrefixCaching(max_events=...)`.
        """

@final
class Pins:
    """A manager's pins, as `manager.pins`. A pin keeps cached device blocks for a reader such as a connector.

    Pinned blocks are neither evicted nor written, whatever becomes of their sequences. Only `unpin` ends a pin, so call
    it also for a reader that has died. Pins hold at most `max_pinned` of the device blocks.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
        >>> sequence = manager.allocate([1, 2, 3, 4, 5])
        >>> ticket = manager.take_decision().ticket
        >>> manager.mark_computed([sequence])
        >>> _ = manager.complete(ticket)
        >>> pin = manager.pins.pin(sequence)
        >>> manager.pins.blocks(pin).tolist()
        [0]
        >>> manager.pins.unpin(pin)
    """

    def pin(self, sequence: _Handle) -> int:
        """Pin the published device blocks of a sequence.

        Args:
            sequence: handle of a sequence on the device.
        Returns:
            The pin's number.
        Raises:
            OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the sequence is not on the device, is still loading, or has lost bytes.
        """
    def pin_prompt(self, prompt: _Prompt, *, salt: bytes | None = None, lora_id: int = 0) -> tuple[int, int]:
        """Pin the blocks at the start of a prompt that are cached on the device.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints.
            salt: of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            The pin's number, and the tokens in its blocks.
        Raises:
            OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
            InvalidArgumentError: a token id is out of range.
        """
    def blocks(self, pin: int) -> NDArray[np.int32]:
        """Return the blocks of a pin, in the order of their tokens.

        Args:
            pin: its number.
        Returns:
            Block ids, int32 `[n]`.
        Raises:
            UnknownTicketError: the pin has ended, or there never was one.
        """
    def unpin(self, pin: int) -> None:
        """End a pin: its reader is done.

        Args:
            pin: its number.
        Raises:
            UnknownTicketError: the pin has ended, or there never was one.
        """

@final
class Defrag:
    """Defragmentation of a manager's device pool, as `manager.defrag`.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=4, device_blocks=8)
        >>> first, second = manager.allocate(8, 8)
        >>> _ = manager.complete(manager.take_decision().ticket)
        >>> manager.free([first])
        >>> report = manager.defrag.run("dense", 0)
        >>> [pairs.ids.tolist() for pairs in manager.take_decision().move]
        [[[2, 0], [3, 1]]]
    """

    def run(
        self,
        goal: _Goal | Literal["contiguous"] | Iterable[_Wanted],
        number: int | None = None,
        *,
        sequences: _Handles | None = None,
        max_moves: int = 512,
        max_bytes: int | None = None,
        block_bytes: int | None = None,
        cached: Literal["move", "drop", "exchange"] = "move",
    ) -> DefragReport:
        """Decide moves of device blocks into holes: `move` pairs of this step's decision.

        Until the ticket completes, block tables, slots and cached blocks name the old blocks, which are read and
        written as before. Then each target replaces its source everywhere, unless the source was written, freed or
        leased meanwhile. Targets are not free from this call on. A move that is cancelled or fails gives its target
        back and loses no byte. Blocks that were written in this step or the step before move last.

        Args:
            goal: `"max_id"`: no block above `number`. `"free_tail"`: no block among the last `number`. `"dense"`: as
                low as possible, within `number` ids. `"contiguous"`: no block table in more than `number` runs of
                neighbours, as far as holes allow. Or a list of `(goal, number)`, the most important first: none undoes
                what an earlier one won. With `(goal, number, slack)` nothing moves until the goal is missed by more
                than `slack` ids or runs.
            number: see above, in blocks or runs. None with a list of goals; with `"free_tail"` all that are free.
            sequences: handles that `"contiguous"` is about, the most important first, with their tables in all cache
                groups; None for all on the device.
            max_moves: most blocks to move in this step; an exchange counts as two.
            max_bytes: most bytes to write in this step; None for no limit.
            block_bytes: bytes of a block in all layers; needed with `max_bytes`.
            cached: what happens to cached blocks that no sequence uses. `"move"`: they move like others and keep their
                place in the order of eviction. `"drop"`: they count as holes; those in the way are evicted.
                `"exchange"`: as `"drop"`, but their contents move on to a free block while there is one out of the way;
                they are found again once the ticket completes, and count as just used.
        Returns:
            `DefragReport`.
        Raises:
            InvalidArgumentError: a goal or `cached` has another name, a number is missing or out of range, or
                `max_bytes` lacks `block_bytes`.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is not on the device.
        """
    def resize(self, blocks: int) -> ResizeProgress:
        """Resize the device pool while sequences run.

        A larger pool is there at once. A smaller one counts at once for admission, watermark and `max_pinned`; blocks
        beyond its end are not given out any more. Cached blocks there are dropped. Blocks that sequences use there
        leave when they are freed or moved, and leases are waited for. A later call replaces an unfinished one.

        Args:
            blocks: of the device.
        Returns:
            `ResizeProgress`, as of now.
        Raises:
            InvalidArgumentError: too many; or too few for the null block, pinned blocks, the watermark and one free
                block.
        """
    def progress(self) -> ResizeProgress:
        """Return what is still in use beyond the end of the device pool: `ResizeProgress`."""
    def fragmentation(self) -> Fragmentation:
        """Measure how scattered the device's blocks are. Takes time in proportion to the pool and the block tables.

        Returns:
            `Fragmentation`.
        """

@final
class BlockManager:
    """Tracks every block of a paged KV cache: who uses it, what it holds, and which tier it is in.

    It decides who can run and which blocks to copy or move. `take_decision` returns those transfers once a step. It
    moves no bytes itself.

    Args:
        block_size: token slots in a block, 1 to 1048576.
        device_blocks: blocks that attention kernels read.
        host_blocks: blocks in host memory.
        external_blocks: slots of the external store.
        watermark: fraction of the device blocks that admission keeps free, 0 to below 1.
        reuse_order: which free block is taken next. `"lowest"`: the lowest id, which keeps the pool dense. `"fifo"`:
            ids never used, then the block that came free first. `"lru"`: ids never used, then the block whose last use
            ended first.
        groups: cache groups of a hybrid model, a list of `CacheGroup`. Each sequence has a block table in each group;
            all groups share the pools. None: one group with full attention.
        prefix_caching: whether prompts share the blocks of earlier prompts that begin alike; True, False or a
            `PrefixCaching` with options.
        max_open_tickets: open tickets above which `take_decision` warns: a `complete` is probably missing.
    Raises:
        InvalidArgumentError: a size or fraction is out of range, or an option has another name.

    Example:
        >>> from blockyard import BlockManager
        >>> manager = BlockManager(block_size=16, device_blocks=1024, host_blocks=4096)
        >>> sequence = manager.allocate(100)
        >>> manager.append([sequence]).tolist()
        [100]
        >>> manager.block_table(sequence).tolist()
        [0, 1, 2, 3, 4, 5, 6]
    """

    def __new__(
        cls,
        *,
        block_size: int,
        device_blocks: int,
        host_blocks: int = 0,
        external_blocks: int = 0,
        watermark: float = 0.01,
        reuse_order: str = "lowest",
        groups: Iterable[CacheGroup] | None = None,
        prefix_caching: bool | PrefixCaching = ...,
        max_open_tickets: int = 16,
    ) -> BlockManager: ...
    @property
    def block_size(self) -> int:
        """Token slots in a block."""
    @property
    def prefix(self) -> Prefix:
        """The prefix cache: lookup, priorities, quotas, events."""
    @property
    def pins(self) -> Pins:
        """Pins: cached blocks that a reader outside keeps, such as a connector."""
    @property
    def defrag(self) -> Defrag:
        """Defragmentation of the device pool, and its size."""
    def pool(self, tier: _Tier = "device") -> Pool:
        """Return the blocks of one tier: how many there are, which are free.

        Args:
            tier: `"device"`, `"host"` or `"external"`.
        """
    def can_allocate(
        self,
        prompt: int | _Prompt,
        *,
        salt: bytes | None = None,
        lora_id: int = 0,
        lookahead: int = 0,
        encoder_tokens: int = 0,
        chunk_tokens: int | None = None,
    ) -> Fit:
        """Return whether a new sequence can be admitted while the watermark stays free.

        The whole prompt is counted, even if `chunk_tokens` puts it in step by step. Nothing is taken.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or their number, an int, which
                finds no cached blocks.
            salt: keeps tenants apart, bytes; see `allocate`.
            lora_id: adapter of the prompt; 0 for none.
            lookahead: slots beyond the prompt.
            encoder_tokens: tokens of its encoder, where there is a group with cross attention.
            chunk_tokens: most tokens that go in at a time; a sliding window then needs fewer blocks at once.
        Returns:
            `Fit`, true if the sequence fits now.
        Raises:
            InvalidArgumentError: a number or a token id is out of range.
        """
    @overload
    def allocate(
        self,
        prompt: int | _Prompt,
        /,
        *,
        counts: None = None,
        salt: bytes | _Each[bytes | None] | None = None,
        lora_id: int | _Each[int] | None = None,
        extras: _Each[tuple[int, int, int, bytes]] = ...,
        chunk_tokens: int | None = None,
        encoder_tokens: _Counts | None = None,
    ) -> Sequence:
        """Open sequences, all or none. Each positional argument is one sequence.

        `allocate([40, 40])` opens one sequence, whose prompt has two token ids. `allocate(40, 40)` opens two sequences
        of 40 tokens.

        With prefix caching a prompt shares the longest cached prefix; its last token is always computed. A prefix that
        is only on the host is loaded by this step's decision (`swap_in`): the step that computes the rest runs after
        it.

        Args:
            prompts: for each sequence its token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or their
                number, an int. Token id 4294967295 is reserved.
            counts: instead of prompts, the number of tokens of each sequence, uint32 `[n]`.
            salt: keeps tenants apart: prompts share only with prompts of the same salt. Bytes or None for all prompts,
                or a list with one for each. `b""` is a salt too.
            lora_id: adapter of the prompts, 0 for none; one int, or one for each prompt.
            extras: other inputs that decide a block's bytes, such as an image's hash: `(prompt, block, kind, bytes)`,
                by rising block.
            chunk_tokens: most tokens beyond the cached ones to take blocks for; `next_chunk` and `append` put
                the rest in. None: all at once.
            encoder_tokens: tokens of each sequence's encoder, where there is a group with cross attention.
        Returns:
            One `Sequence` for one prompt, a tuple of them for several, uint64 `[n]` for `counts`.
        Raises:
            OutOfBlocksError: the device has too few free blocks for all of them.
            InvalidArgumentError: a token id is out of range, counts and prompts are mixed, or there is not one salt,
                adapter or encoder length for each.
        """
    @overload
    def allocate(self, *, counts: _Counts, encoder_tokens: _Counts | None = None) -> NDArray[np.uint64]: ...
    @overload
    def allocate(
        self,
        *prompts: int | _Prompt,
        counts: None = None,
        salt: bytes | _Each[bytes | None] | None = None,
        lora_id: int | _Each[int] | None = None,
        extras: _Each[tuple[int, int, int, bytes]] = ...,
        chunk_tokens: int | None = None,
        encoder_tokens: _Counts | None = None,
    ) -> tuple[Sequence, ...]: ...
    @overload
    def fork(
        self,
        sequence: _Handle,
        count: None = None,
        *,
        shared_tokens: int | None = None,
        num_tokens: int | None = None,
    ) -> Sequence:
        """Open sequences that share the blocks of one. A write to a shared block copies it first.

        What this step is yet to write of shared blocks must be written even if `sequence` is freed before it runs.

        Args:
            sequence: handle.
            count: of sequences to open; None opens one.
            shared_tokens: share only the first tokens, a multiple of the block size; the new sequence gets blocks of
                its own for the rest. Together with `num_tokens`.
            num_tokens: tokens of the new sequence.
        Returns:
            `Sequence`, or uint64 `[count]`.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the sequence has lost bytes; or, with `shared_tokens`, it is not on the device, is still
                loading, or this step is yet to write the recurrent state that the new tokens need.
            InvalidArgumentError: `shared_tokens` is no multiple of the block size or more than either sequence has.
            OutOfBlocksError: the device has too few free blocks for the rest.
        """
    @overload
    def fork(
        self, sequence: _Handle, count: int, *, shared_tokens: None = None, num_tokens: None = None
    ) -> NDArray[np.uint64]: ...
    def free(self, sequences: _Handles) -> None:
        """Free sequences. Their blocks are free once nothing references them and no transfer leases them.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a handle is given twice.
        """
    def can_append(self, sequences: _Handles, num_tokens: _Counts | None = None, *, lookahead: int = 0) -> Fit:
        """Return whether `append` has the blocks it takes: new ones, and one for each copy-on-write.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            num_tokens: tokens for each sequence, one int or uint32 `[n]`.
            lookahead: slots beyond those tokens for which each sequence gets blocks too.
        Returns:
            `Fit`, true if `append` finds its blocks.
        Raises:
            UnknownSequenceError, SequenceStateError, InvalidArgumentError: as `append`.
        """
    def append(
        self,
        sequences: _Handles,
        num_tokens: _Counts | None = None,
        *,
        token_ids: _TokenIds | None = None,
        lookahead: int = 0,
        block_tables: NDArray[np.int32] | None = None,
        out: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Append tokens to a batch of sequences and return their slots. A shared block is copied before it is written.

        Args:
            sequences: handles, uint64 `[n]`, none twice; a list, or one.
            num_tokens: tokens for each sequence, one int or uint32 `[n]`; 1 by default.
            token_ids: ids of those tokens, uint32 `[tokens]`, sequence by sequence, for the prefix cache. Where
                they are not known yet, leave them out and name them later with `prefix.note_tokens`; what is behind
                tokens without ids is not published.
            lookahead: slots beyond those tokens for which each sequence gets blocks too, for draft tokens.
            block_tables: int32 `[n or more, max_blocks]`, C-contiguous, that the caller keeps from call to call: row i
                is sequence i. Only what changed since the sequence's last such call is written. After you move a
                sequence to another row or array, copy its row or write it with `block_tables`. With several groups the
                rows of one group follow those of another, `n` each.
            out: int64 array to write the slots to, C-contiguous; it shares no memory with `block_tables`.
        Returns:
            Slots, `block * block_size + offset`, int64 `[tokens]`; with several groups `[groups, tokens]`, groups with
            cross attention left out.
        Raises:
            OutOfBlocksError: the device has too few free blocks for the whole batch.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes.
            InvalidArgumentError: a handle is given twice, or an array has the wrong shape or dtype or cannot be
                written.
        """
    def next_chunk(self, sequence: _Handle, budget: int) -> int:
        """Return how many tokens of a sequence's prompt to append next.

        With a recurrent group and prefix caching a chunk ends at a block's end where it can: only states there are
        cached.

        Args:
            sequence: handle of a sequence that was allocated with `chunk_tokens`.
            budget: most tokens.
        Returns:
            Tokens, at most `budget`; 0 once the whole prompt is in.
        Raises:
            UnknownSequenceError: there is no such sequence.
        """
    def mark_computed(self, sequences: _Handles, num_computed: _Counts | None = None) -> None:
        """Publish the full blocks of sequences whose tokens the model has computed.

        A block that another block already duplicates is replaced by it, and blocks outside a window are given back:
        block tables may change.

        Args:
            sequences: handles, uint64 `[n]`, none twice; a list, or one.
            num_computed: how many of each sequence's first tokens are computed, uint32 `[n]`; all by default.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a sequence has fewer tokens, or there is not one number for each.
            SequenceStateError: a sequence has tokens that this step is yet to write.
        """
    def truncate(self, sequence: _Handle, num_tokens: int) -> None:
        """Cut a sequence to its first tokens, for instance after draft tokens were rejected. Blocks that hold none of
        them, and those of an earlier lookahead, are freed.

        Args:
            sequence: handle.
            num_tokens: tokens to keep.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the sequence has lost bytes, or tokens that this step is yet to write.
            InvalidArgumentError: the sequence is shorter, or has a recurrent state, which cannot be taken back.
        """
    def can_swap_out(self, sequences: _Handles, to: Literal["host", "external"] = "host") -> Fit:
        """Return whether `swap_out` can move the sequences: nothing else moves them, and the tier has room.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"host"` or `"external"`.
        Returns:
            `Fit`, true if they can move now.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a handle is given twice, or `to` is another tier.
        """
    def swap_out(self, sequences: _Handles, to: Literal["host", "external"] = "host") -> None:
        """Move sequences away from the device, by this step's decision: from the device to the host, or from either to
        the external tier. A block that several of them share moves once.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"host"` or `"external"`.
        Raises:
            OutOfBlocksError: the tier has too few free blocks for all of them.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is in another tier, moving, written in this step, or has lost bytes.
            InvalidArgumentError: a handle is given twice, or `to` is another tier.
        """
    def can_swap_in(self, sequences: _Handles, to: Literal["device", "host"] = "device", *, lookahead: int = 0) -> Fit:
        """Return whether `swap_in` can move the sequences. On the device one more token each has room then, and the
        watermark stays free.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"device"` or `"host"`.
            lookahead: slots beyond that token.
        Returns:
            `Fit`, true if they can move now.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a handle is given twice, or `to` is another tier.
        """
    def swap_in(self, sequences: _Handles, to: Literal["device", "host"] = "device") -> None:
        """Move sequences back towards the device, by this step's decision: from the external tier to the host, or
        from either to the device.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"device"`, or `"host"` for sequences in the external tier.
        Raises:
            OutOfBlocksError, UnknownSequenceError, SequenceStateError, InvalidArgumentError: as `swap_out`.
        """
    def take_decision(self, *, prefetch: bool = False) -> StepDecision:
        """End the step and return its transfers. Carry them out, then `complete` or `fail` the ticket.

        Args:
            prefetch: let the step compute while its loads arrive. Until the ticket has ended, `append`, `slot_mapping`,
                `block_table` and `block_tables` refuse what it loads. If a sequence that it loads was appended to, or
                asked for its block table, before this call, the step computes with it: then `decision.prefetch` is
                False, and the step waits for all its loads.
        Returns:
            `StepDecision`.
        Warns:
            RuntimeWarning: once, if more than `max_open_tickets` tickets are open; it names the oldest.
        """
    def complete(self, ticket: int, lost: Iterable[Pairs] = ()) -> NDArray[np.uint64]:
        """End a ticket whose transfers have ended.

        Until then its blocks stay leased, however long it takes. Where the process or device that ran it has died and
        can write no more, give all its pairs as `lost`, or call `fail`. Where it only hangs, `lose` marks its sequences
        and keeps the blocks leased.

        Args:
            ticket: `decision.ticket`.
            lost: the `Pairs` that did not land.
        Returns:
            Sequences that lost bytes, uint64 `[n]`. They can only be freed.
        Raises:
            UnknownTicketError: the ticket was never handed out, or has ended.
            MappingError: the ticket writes no such block.
        """
    def fail(self, ticket: int) -> NDArray[np.uint64]:
        """End a ticket of which nothing landed, for instance because it was never carried out.

        Args:
            ticket: `decision.ticket`.
        Returns:
            Sequences that lost bytes, uint64 `[n]`. They can only be freed.
        Raises:
            UnknownTicketError: the ticket was never handed out, or has ended.
        """
    def lose(self, ticket: int, lost: Iterable[Pairs]) -> NDArray[np.uint64]:
        """Mark the sequences that have lost bytes while the ticket's other transfers still run.

        Args:
            ticket: `decision.ticket`. It stays open; give `complete` the same pairs when it ends.
            lost: the `Pairs` that are known not to land.
        Returns:
            Sequences that lost bytes, uint64 `[n]`. They can only be freed.
        Raises:
            UnknownTicketError: the ticket was never handed out, or has ended.
            MappingError: the ticket writes no such block.
        """
    def block_table(self, sequence: _Handle, group: int = 0) -> NDArray[np.int32]:
        """Return the blocks of a sequence in its present tier.

        Args:
            sequence: handle.
            group: cache group.
        Returns:
            Block ids, int32 `[blocks]`; 0 for blocks that fell out of a window.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: its blocks are being prefetched, see `take_decision`.
            InvalidArgumentError: there is no such group.
        """
    def block_tables(
        self, sequences: _Handles, out: NDArray[np.int32] | None = None, *, group: int = 0
    ) -> NDArray[np.int32]:
        """Return the block tables of sequences on the device, padded with 0, as attention kernels read them.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            out: int32 array `[n, max_blocks or more]` to write to, C-contiguous.
            group: cache group.
        Returns:
            Block ids, int32 `[n, max_blocks]`, or `out`.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes.
            InvalidArgumentError: `out` has another number of rows or too few columns, or there is no such group.
        """
    def slot_mapping(
        self,
        sequences: _Handles,
        first: _Counts,
        last: _Counts,
        out: NDArray[np.int64] | None = None,
        *,
        group: int = 0,
    ) -> NDArray[np.int64]:
        """Return the slots of some tokens of sequences on the device, one sequence after the other.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            first: first token, for all or one a sequence.
            last: token after the last, for all or one a sequence.
            out: int64 array `[sum of last - first]` to write to, C-contiguous.
            group: cache group.
        Returns:
            Slots, `block * block_size + offset`, int64 `[sum of last - first]`, or `out`.
        Raises:
            UnknownSequenceError, SequenceStateError: as `block_tables`.
            InvalidArgumentError: a sequence has fewer tokens, `out` another length, or there is no such group.
        """
    def num_tokens(self, sequence: _Handle, group: int = 0) -> int:
        """Return the number of tokens in a sequence.

        Args:
            sequence: handle.
            group: cache group; one with cross attention has the encoder's tokens.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: there is no such group.
        """
    def tier(self, sequence: _Handle) -> _Tier:
        """Return the tier that a sequence's blocks are in: `"device"`, `"host"` or `"external"`.

        Args:
            sequence: handle.
        Raises:
            UnknownSequenceError: there is no such sequence.
        """
    def stats(self) -> ManagerStats:
        """Return all counters, as of now: `ManagerStats`."""
    def check(self) -> None:
        """Recount the whole state and compare. For tests and debugging; it takes time in proportion to the pools.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """

@final
class EventBatch:
    """Events of the prefix cache taken in one go, one array entry an event, oldest first.

    Event `i` has the number `first + i`. Numbers rise by one from batch to batch; `dropped` events before `first` had
    no room. Replaying `stored`, `removed` and `cleared` by tier and key gives exactly what can be found.

    - `kinds`: uint8 `[n]`, indexes `KINDS`; `tiers`: uint8 `[n]`, indexes `TIERS`; `blocks`: int32 `[n]`, -1 if
      cleared.
    - `keys`: uint8 `[n, 32]`, the exported key as `export_keys` gives it; `groups`, uint8 `[n]`, the block's cache
      group: blocks of several groups have the same key.
    - Of `stored` alone: `parents`, uint8 `[n, 32]`, key of the block before, zeros for a sequence's first; `tokens`,
      uint32 `[n]`; `lora_ids`, uint64 `[n]`.
    - Of `removed` alone: `reasons`, uint8 `[n]`, indexes `REASONS`; `remaining`, uint8 `[n]`, copies of the bytes in
      other tiers, those on their way included: they cannot be found until a swapped sequence brings them back, by a
      new `stored`.

    Attributes:
        KINDS: names of the numbers in `kinds`.
        TIERS: names of the numbers in `tiers`.
        REASONS: names of the numbers in `reasons`; the first is of what was not removed.

    Example:
        >>> from blockyard import BlockManager, PrefixCaching
        >>> manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=PrefixCaching(max_events=100))
        >>> sequence = manager.allocate([1, 2, 3, 4, 5])
        >>> ticket = manager.take_decision().ticket
        >>> manager.mark_computed([sequence])
        >>> _ = manager.complete(ticket)
        >>> events = manager.prefix.take_events()
        >>> [(events.KINDS[kind], block) for kind, block in zip(events.kinds, events.blocks.tolist())]
        [('stored', 0)]
    """

    KINDS: tuple[str, str, str]
    TIERS: tuple[str, str, str]
    REASONS: tuple[str, str, str, str, str]
    @property
    def first(self) -> int:
        """Number of the first event."""
    @property
    def dropped(self) -> int:
        """Events before `first` that had no room."""
    @property
    def kinds(self) -> NDArray[np.uint8]:
        """uint8 `[n]`, index of `KINDS`."""
    @property
    def tiers(self) -> NDArray[np.uint8]:
        """uint8 `[n]`, index of `TIERS`."""
    @property
    def blocks(self) -> NDArray[np.int32]:
        """Block ids, int32 `[n]`; -1 for `cleared`."""
    @property
    def keys(self) -> NDArray[np.uint8]:
        """Exported keys, uint8 `[n, 32]`, as `export_keys` returns them."""
    @property
    def parents(self) -> NDArray[np.uint8]:
        """For `stored`, the key of the block before, uint8 `[n, 32]`; zeros for the first block of a sequence."""
    @property
    def tokens(self) -> NDArray[np.uint32]:
        """For `stored`, tokens in the block, uint32 `[n]`."""
    @property
    def lora_ids(self) -> NDArray[np.uint64]:
        """For `stored`, the adapter, uint64 `[n]`."""
    @property
    def reasons(self) -> NDArray[np.uint8]:
        """For `removed`, index of `REASONS`, uint8 `[n]`."""
    @property
    def remaining(self) -> NDArray[np.uint8]:
        """For `removed`, copies of the bytes that are left in other tiers, uint8 `[n]`."""
    @property
    def groups(self) -> NDArray[np.uint8]:
        """Cache group of the block, uint8 `[n]`; blocks of several groups have the same key."""
    def __len__(self) -> int: ...

@final
class ResizeProgress:
    """How far a resize of the device pool has come."""

    @property
    def blocks(self) -> int:
        """Blocks of the device."""
    @property
    def live(self) -> int:
        """Blocks beyond them that sequences use."""
    @property
    def held(self) -> int:
        """Blocks beyond them that only transfers and pins hold."""
    @property
    def extent(self) -> int:
        """One past the highest block in use, at least `blocks`: memory behind it can be given back."""
    @property
    def done(self) -> bool:
        """Whether nothing is in use beyond `blocks`."""

@final
class ManagerStats:
    """Counters since the manager was made, and the state of each tier now. Transfers count when they are decided."""

    @property
    def hit_rate(self) -> float:
        """Hit blocks of all full blocks that were looked up; 0 before the first."""
    @property
    def sequences(self) -> int:
        """Sequences that are open now."""
    @property
    def steps(self) -> int:
        """Decisions taken."""
    @property
    def open_tickets(self) -> list[int]:
        """Tickets that are neither completed nor failed, a list of ints, oldest first."""
    @property
    def prompts(self) -> int:
        """Prompts admitted with their token ids."""
    @property
    def hit_blocks(self) -> int:
        """Full blocks of those prompts that were cached."""
    @property
    def missed_blocks(self) -> int:
        """Full blocks of those prompts that were not."""
    @property
    def hit_tokens(self) -> int:
        """Tokens that need not be computed."""
    @property
    def missed_tokens(self) -> int:
        """Tokens that must be computed."""
    @property
    def merged_blocks(self) -> int:
        """Blocks that were computed twice and merged into one."""
    @property
    def loaded_blocks(self) -> int:
        """Hit blocks that only the host had."""
    @property
    def copied_blocks(self) -> int:
        """Copies on write that were decided."""
    @property
    def swapped_out_blocks(self) -> dict[_Tier, int]:
        """For host and external tier, blocks swapped out to it."""
    @property
    def swapped_in_blocks(self) -> dict[_Tier, int]:
        """For host and external tier, blocks swapped in from it."""
    @property
    def moved_blocks(self) -> int:
        """Moves by defragmentation that ended."""
    @property
    def cancelled_moves(self) -> int:
        """Moves given up because the block was written, freed or leased meanwhile."""
    @property
    def failed_moves(self) -> int:
        """Moves whose bytes did not land."""
    @property
    def num_blocks(self) -> dict[_Tier, int]:
        """For each tier, the blocks that it has now."""
    @property
    def used_blocks(self) -> dict[_Tier, int]:
        """For each tier, blocks that are referenced or leased now."""
    @property
    def peak_blocks(self) -> dict[_Tier, int]:
        """For each tier, the most blocks ever used at once."""
    @property
    def leased_blocks(self) -> dict[_Tier, int]:
        """For each tier, blocks that transfers lease now."""
    @property
    def cached_blocks(self) -> dict[_Tier, int]:
        """For each tier, blocks whose key finds them now."""
    @property
    def evicted_blocks(self) -> dict[_Tier, int]:
        """For each tier, cached blocks that were evicted."""
    @property
    def pinned_blocks(self) -> dict[_Tier, int]:
        """For each tier, blocks that pins keep now."""
    def as_dict(self) -> dict[str, float]:
        """Return all counters by name, for metrics.

        Returns:
            A dict of numbers; those of a tier as `used_blocks_device` and so on, the number of `open_tickets`, and
            `device_cache_usage_sys` and so on: the part of a tier that is in use, 0 to 1.
        """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Completion:
    """What became of one batch."""

    def __new__(
        cls, ticket: int, ok: NDArray[np.bool_], rows: NDArray[np.uint8], reasons: _Each[str]
    ) -> Completion: ...
    def __getnewargs__(self) -> tuple[int, NDArray[np.bool_], NDArray[np.uint8], tuple[str, ...]]: ...
    @property
    def ticket(self) -> int:
        """The ticket that was collected."""
    @property
    def ok(self) -> NDArray[np.bool_]:
        """Whether each block came back or went in, bool `[n]`."""
    @property
    def rows(self) -> NDArray[np.uint8]:
        """The blocks that were read, uint8 `[n, bytes_per_block]`; rows of misses hold nothing of use. `[0,
        bytes_per_block]` for writes.
        """
    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a block is a miss, one string a block; empty where it is not."""

@final
class StoreStats:
    """Counters of a store since it was opened."""

    def __new__(
        cls,
        *,
        written_blocks: int = 0,
        written_bytes: int = 0,
        read_blocks: int = 0,
        read_bytes: int = 0,
        misses: dict[str, int] | None = None,
        errors: int = 0,
        last_error: str = "",
        errors_in_a_row: int = 0,
        is_down: bool = False,
        pending_bytes: int = 0,
        cached_blocks: int = 0,
        evicted_blocks: int = 0,
    ) -> StoreStats: ...
    @property
    def written_blocks(self) -> int:
        """Blocks whose write completed."""
    @property
    def written_bytes(self) -> int:
        """Bytes of those, headers not counted."""
    @property
    def read_blocks(self) -> int:
        """Blocks whose read was checked and accepted."""
    @property
    def read_bytes(self) -> int:
        """Bytes of those, headers not counted."""
    @property
    def misses(self) -> dict[str, int]:
        """Blocks that did not come back or go in, by reason."""
    @property
    def errors(self) -> int:
        """Operations that the system answered with an error."""
    @property
    def last_error(self) -> str:
        """The last of those errors, in words."""
    @property
    def errors_in_a_row(self) -> int:
        """Operations that the system answered with an error since the last that succeeded: 0 means healthy."""
    @property
    def is_down(self) -> bool:
        """Whether the storage does not answer: batches are refused until a probe is answered."""
    @property
    def cached_blocks(self) -> int:
        """Keys that have a block now."""
    @property
    def evicted_blocks(self) -> int:
        """Keys whose block gave way to another."""
    @property
    def pending_bytes(self) -> int:
        """Bytes of blocks in flight and of results not yet collected."""
    @property
    def checksum_failures(self) -> int:
        """Reads whose header or payload checksum did not match."""
    @property
    def damaged_blocks(self) -> int:
        """Reads that came back from storage and were refused, for any reason."""
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def as_dict(self) -> dict[str, int | str | dict[str, int]]:
        """All counters, for JSON."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class RedisClient:
    """Connections to a Redis or Valkey server or cluster, one for each call that is under way. Calls block without the
    interpreter's lock. In a cluster, a node that does not answer loses its own values alone. Calls leave it out until
    it answers a probe, which a thread of its own sends every second.

    Args:
        host: name of the server's machine, or with `transport="unix"` the path of its socket.
        port: of the server.
        transport: `"tcp"`, `"tls"` or `"unix"`.
        cluster: whether the server is a node of a cluster.
        username, password: None for none.
        db: number of the database.
        ca, cert, key: PEM files for `"tls"`: authorities of the server's certificate; our own.
        connect_timeout: most seconds that connecting takes.
        timeout: most seconds that the server may be silent.
    Raises:
        StoreError: a PEM file cannot be read.
    """

    def __new__(
        cls,
        host: str,
        *,
        port: int = 6379,
        transport: str = "tcp",
        cluster: bool = False,
        username: str | None = None,
        password: str | None = None,
        db: int = 0,
        ca: str | PathLike[str] | None = None,
        cert: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
        connect_timeout: float = 2.0,
        timeout: float = 2.0,
    ) -> RedisClient: ...
    def put(
        self,
        names: _Each[bytes],
        rows: NDArray[np.uint8],
        *,
        ttl_ms: int | None = None,
        lengths: _Each[int] | None = None,
        sizes: _Each[int] | None = None,
        last: _Each[_Each[bytes]] | None = None,
    ) -> tuple[NDArray[np.bool_], list[Any], str | None]:
        """Store values, all of them or in groups.

        The values of a group and its command are one transaction at the server: the command runs last, and nobody
        sees a part. In a cluster, all keys of a group must be in the slot of its first name.

        Args:
            names: bytes each.
            rows: uint8 `[n, width]`.
            ttl_ms: milliseconds after which the server drops them.
            lengths: bytes of each row that count.
            sizes: values of each group, in their order; they add up to n. None for no groups.
            last: the command of each group, words of bytes.
        Returns:
            Whether the server took each value, bool `[n]`, the answers to `last`, and None or why nodes of a cluster do
            not answer.
        Raises:
            StoreError: the server does not answer, or no node of the cluster.
        """
    def get(
        self,
        names: _Each[bytes],
        out: NDArray[np.uint8],
        *,
        varies: bool = False,
        head_bytes: int = 0,
        first: _Each[_Each[bytes]] | None = None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8], list[Any], str | None]:
        """Read values into rows. A value of another length leaves its row as it is; with `varies` a shorter one is
        taken, and zeros follow it.

        Args:
            names: bytes each.
            out: uint8 `[n, width]`, C-contiguous.
            varies: whether values may be shorter than rows.
            head_bytes: first bytes of each value that do not go into `out`, 0 to 4096.
            first: commands, as for `run`, that run before in the same round trip.
        Returns:
            Whether there was a value, bool `[n]`, the first bytes of each, uint8 `[n, head_bytes]`, zeros for none, the
            answers to `first`, and None or why nodes of a cluster do not answer.
        Raises:
            StoreError: the server does not answer, or no node of the cluster, or one refuses.
        """
    def run(self, commands: _Each[_Each[bytes]]) -> tuple[list[Any], str | None]:
        """Run commands in one round trip; in a cluster in one to each node.

        Args:
            commands: words of bytes each, at least one. In a cluster, the second is the key, or the fourth of
                `EVAL`; the third of `CLUSTER` is the slot.
        Returns:
            An answer each: an int, bytes, None or a list; or the StoreError with which the server refused. None also
            where the node of a cluster does not answer. Then None, or why nodes do not answer.
        Raises:
            StoreError: the server does not answer, or no node of the cluster.
        """
    def close(self) -> None:
        """Close the connections that no call uses."""

@final
class SlabReport:
    """What the slots of a slab hold."""

    @property
    def path(self) -> Path:
        """The slab's file."""
    @property
    def num_slots(self) -> int:
        """Slots of the slab."""
    @property
    def bytes_per_block(self) -> int:
        """Bytes that one slot holds."""
    @property
    def pid(self) -> int:
        """Process that wrote the superblock."""
    @property
    def blocks(self) -> dict[str, int]:
        """Blocks that a store can find, by namespace in hexadecimal digits."""
    @property
    def empty(self) -> int:
        """Slots without a block."""
    @property
    def forgotten(self) -> int:
        """Blocks that were forgotten all at once."""
    @property
    def replaced(self) -> int:
        """Blocks that a newer write of their key replaces."""
    @property
    def damaged(self) -> list[tuple[int, str]]:
        """Damaged slots and the reason that a read would have."""
    @property
    def wiped(self) -> int:
        """Damaged slots that were wiped."""

def check_slab(path: str | PathLike[str], *, repair: bool = False) -> SlabReport:
    """Read every block of a slab that no store has open.

    Args:
        path: the file, or the directory of a prefix store.
        repair: wipe damaged slots.
    Raises:
        StoreError: it cannot be read or written, is no slab, or is in use.
    """

def checksum_rows(
    rows: NDArray[np.uint8], key: bytes | None = None, heads: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """XXH3-128 of each row of a uint8 array `[n, width]`, little-endian; with a key the first 16 bytes of its keyed
    BLAKE3. uint8 `[n, 16]`.

    Args:
        rows: uint8 `[n, width]`.
        key: 32 bytes that only who may write knows: nobody else can make these checksums.
        heads: bytes in front of each row, uint8 `[n, m]`; the checksum is that of both together.
    Raises:
        InvalidArgumentError: wrong dtype or shape, or the key has another length.
    """

def inspect_slab(path: str | PathLike[str]) -> SlabReport:
    """Read the headers of a slab, which a store may have open.

    Args:
        path: the file, or the directory of a prefix store.
    Raises:
        StoreError: it cannot be read, or is no slab.
    """

@final
class SlabStore:
    """Blocks in one preallocated file; `blockyard.stores.open_store` opens it by URL. With `use="swap"` they are
    addressed by slot and die with the process, with `use="prefix"` they are found by key and outlive it.
    """

    def __new__(
        cls,
        directory: str | PathLike[str],
        *,
        bytes_per_block: int,
        size: int | None = None,
        num_slots: int | None = None,
        threads: int = 4,
        direct: str = "auto",
        memory: int = 1073741824,
        timeout_base: float = 10.0,
        namespace: bytes = ...,
        use: str = "swap",
        revision: str = "",
    ) -> SlabStore: ...

    keeps_quotas: ClassVar[bool]
    @property
    def num_slots(self) -> int:
        """Blocks that the store can hold; in swap space its slots, numbered from 0."""
    @property
    def bytes_per_block(self) -> int:
        """Bytes that one slot holds for the caller."""
    @property
    def path(self) -> Path:
        """The slab's file."""
    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
    @property
    def notes(self) -> tuple[str, ...]:
        """What the system did not allow, in words."""
    def slot_offset(self, slot: int) -> int:
        """Where a slot's header begins in the file, in bytes."""
    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks: `slots` int64 `[n]`, `rows` uint8 `[n, bytes_per_block]`. Rows that are no whole pages
        are copied before this returns a ticket. See `ExternalStore.submit_write`.
        """
    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks: `slots` int64 `[n]`, into `rows` uint8 `[n, bytes_per_block]`. Returns a ticket.
        See `ExternalStore.submit_read`.
        """
    def submit_put(
        self,
        keys: NDArray[np.uint8] | _Each[bytes],
        rows: NDArray[np.uint8],
        owners: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None,
    ) -> int:
        """Start to store blocks under their keys: `keys` uint8 `[n, 32]` or 32 bytes each, and `rows` as for
        `submit_write`. Returns a ticket. See `ExternalStore.submit_put`.
        """
    def submit_get(self, keys: NDArray[np.uint8] | _Each[bytes], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks by key, with `rows` as for `submit_read`. Returns a ticket.
        See `ExternalStore.submit_get`.
        """
    def submit_delete(self, keys: NDArray[np.uint8] | _Each[bytes]) -> int:
        """Start to delete keys. Returns a ticket. See `ExternalStore.submit_delete`."""
    def contains(self, keys: NDArray[np.uint8] | _Each[bytes]) -> NDArray[np.bool_]:
        """Whether each key has a block, bool `[n]`; nothing is read. See `ExternalStore.contains`."""
    def lacks(self, keys: NDArray[np.uint8] | _Each[bytes]) -> NDArray[np.bool_]:
        """Whether a get of each key is sure to be a miss, bool `[n]`. See `ExternalStore.lacks`."""
    def forget(self, revision: str | None = None) -> None:
        """Forget every key, now and for later processes; waits for the disk. See `ExternalStore.forget`."""
    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of one tenant and drop those beyond; waits for the disk. The quota ends with this store. Its
        blocks count in later ones too. See `ExternalStore.set_quota`.
        """
    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Blocks that count for a tenant, and its quota; None without a quota. See `ExternalStore.quota`."""
    def event_fd(self) -> int:
        """File descriptor, readable while tickets have ended since the last `poll`. See `ExternalStore.event_fd`."""
    def poll(self) -> list[int]:
        """Tickets that finished or expired since the last call, not collected yet. Never waits."""
    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; waits until its deadline, or for `timeout` seconds. See `ExternalStore.wait`."""
    def stats(self) -> StoreStats:
        """Counters since the store was opened."""
    def close(self, timeout: float = 5.0) -> bool:
        """Give up what is under way, and remove the file of swap space. Returns False if the disk did not answer within
        `timeout` seconds.
        """
    def __enter__(self) -> SlabStore: ...
    def __exit__(self, *_details: object) -> None: ...

def chain_keys(
    tokens: NDArray[np.uint32] | _Each[int],
    *,
    block_size: int,
    parent: bytes | None = None,
    extra: bytes | None = None,
) -> list[bytes]:
    """In-process keys of the full blocks of `tokens`, 32 bytes each.

    Args:
        tokens: token ids, uint32 `[n]`; what does not fill a block is left out.
        block_size: tokens in a block.
        parent: key of the block before them.
        extra: other inputs that decide the bytes of each of these blocks.
    """

def export_keys(
    tokens: NDArray[np.uint32] | _Each[int],
    *,
    block_size: int,
    salt: bytes | None = None,
    lora_id: int = 0,
    cache_group: int = 0,
) -> list[bytes]:
    """Return the keys of a prompt's full blocks for other processes: SHA-256 digests, 32 bytes each.

    The hashed stream is a 64-byte header: `BLKYKEYS`, then format 1, block size, cache group and 0 as little-endian
    u32, the adapter as u64, and 32 bytes of salt (its SHA-256, or zeros for none). Each block's tokens follow as
    little-endian u32, padded to 64 bytes with 0xFF. A block's key is the digest of the stream up to its end.

    Args:
        tokens: token ids, uint32 `[n]` or a list of ints.
        block_size: tokens in a block.
        salt: of the tenant, bytes.
        lora_id: adapter; 0 for none.
        cache_group: number of the cache group.
    Returns:
        A key for each full block, bytes.
    Raises:
        InvalidArgumentError: a token id or `block_size` is out of range.
    """

def expand_span(blocks: NDArray[np.int64], out: NDArray[np.int64], *, per_block: int, first: int, last: int) -> None:
    """Writes the ids of the small blocks of a stretch of large ones."""

_Rule: TypeAlias = Literal["swap", "copy", "move", "exchange"]

@final
class Mapping:
    """Pairs of block ids `(from, to)`, checked and ordered by destination.

    `Mapping([[3, 0], [5, 1]], src_blocks=8, dst_blocks=4, rule="swap")`

    Args:
        pairs: int64 `[n, 2]`, or other ints, as for `Pairs`.
        src_blocks: blocks that can be read; ids are 0-based.
        dst_blocks: blocks that can be written.
        rule: `"swap"` copies from one cache to another: no destination repeats. `"copy"` copies within a cache:
            besides, no block is both read and written. `"move"` moves within a cache, as if all were read before the
            first is written: chains and rings are legal. `"exchange"` lets the blocks of a pair change places: no block
            is named twice, and `(-1, -1)` is padding.
    Raises:
        MappingError: the pairs are no ints `[n, 2]`, an id is out of range, or they break the rule.
        InvalidArgumentError: there is no such rule.
    """

    def __new__(cls, pairs: _IdPairs, *, src_blocks: int, dst_blocks: int, rule: _Rule) -> Mapping: ...
    def __len__(self) -> int: ...
    @property
    def rule(self) -> _Rule:
        """What it does: `"swap"`, `"copy"`, `"move"` or `"exchange"`."""
    @property
    def pairs(self) -> NDArray[np.int64]:
        """The pairs, int64 `[n, 2]`, in the order of their destinations, those of an exchange as they were given.

        Padding and moves of a block onto itself are left out.
        """
    @property
    def reach(self) -> tuple[int, int]:
        """Blocks that there must be to read and to write: one more than the highest that is named, 0 if none is."""
    def steps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All as steps, int64 `[n, 2]`, and where each group of them begins, int64 `[groups + 1]`.

        Steps of a group run one after the other. To -1, a block is set aside; from -1, it is put where it belongs.
        """
    def split(self, most: int) -> list[Mapping]:
        """Cut it into mappings of at most `most` pairs, to be run one after the other.

        Moves that depend on one another stay together.
        """

@final
class BoundViews:
    """Views of caches in host memory, checked once, over which mappings run.

    It keeps the memory of all arrays. What is done to an array later (another shape, read-only) changes nothing here.

    Args:
        src: arrays to read, uint8 `[blocks, bytes]`, rows contiguous and apart.
        dst: as many to write, of the same widths, apart from those that are read and from one another: side by side, or
            with rows that alternate within one stride. None: `src` is changed in place, and apart in the same sense.
    Raises:
        InvalidArgumentError: an array is of another form, cannot be written or shares memory with another, or the two
            lists do not fit one another.
    """

    def __new__(cls, src: _Each[NDArray[np.uint8]], dst: _Each[NDArray[np.uint8]] | None = None) -> BoundViews: ...
    def run(self, mapping: Mapping, *, num_threads: int) -> None:
        """Carry a mapping out in each view.

        Args:
            mapping: by the rule `"swap"` or `"copy"` between two lists, by any but `"swap"` within one.
            num_threads: most threads that share a large call.
        Raises:
            MappingError: it names blocks that the views do not have, or is by another rule; nothing was copied.
            OutOfMemoryError: rings of moves need more memory than there is; nothing was moved.
        """

@disjoint_base
class V0NaiveBlock:
    """A block of token ids without a key, and what a block with one is built on."""

    def __new__(
        cls,
        prev_block: Any | None,
        token_ids: list[int],
        block_size: int,
        allocator: Any,
        block_id: int | None = None,
        _cow_target: Any | None = None,
        extra_hash: int | None = None,
    ) -> Self: ...
    block_id: int | None
    computed: bool
    last_accessed: float
    @property
    def block_size(self) -> int:
        """Token slots in the block."""
    @property
    def content_hash(self) -> int | None:
        """Hash of the contents; None without one."""

    @property
    def extra_hash(self) -> int | None:
        """Hash of inputs beyond the tokens that the contents depend on; None if there are none."""
    @property
    def is_full(self) -> bool:
        """Whether all slots hold tokens."""
    @property
    def num_empty_slots(self) -> int:
        """Slots without a token."""
    @property
    def num_tokens_total(self) -> int | None:
        """Tokens up to the end of this block."""
    @property
    def prev_block(self) -> Any | None:
        """The block before; None for the first."""
    @property
    def token_ids(self) -> list[int]:
        """Token ids in the block, a list of ints."""
    def append_token_ids(self, token_ids: list[int]) -> None:
        """Append token ids to the block; a shared block is copied first."""

class V0PrefixCachingBlock(V0NaiveBlock):
    """A block that others find by its key once it is full."""

    def __new__(
        cls,
        prev_block: Any | None,
        token_ids: list[int],
        block_size: int,
        allocator: Any,
        block_id: int | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> Self: ...
    @classmethod
    def hash_block_tokens(
        cls,
        is_first_block: bool,
        prev_block_hash: int | None,
        cur_block_token_ids: list[int],
        extra_hash: int | None = None,
    ) -> int:
        """Return the hash of a block from the one before and its tokens."""

@final
class V0NullBlock:
    """Stands for blocks that fell out of a sliding window; wraps a block that is never written."""

    def __new__(cls, proxy: Any) -> V0NullBlock: ...
    block_id: int | None
    def append_token_ids(self, token_ids: list[int]) -> None:
        """Refuse: nothing is written to the null block."""

_V0Block: TypeAlias = V0NaiveBlock | V0NullBlock

@disjoint_base
class V0PoolAllocator:
    """What both allocators share."""

    @property
    def all_block_ids(self) -> frozenset[int]:
        """Ids of all blocks, a frozenset."""
    def allocate_immutable_block(
        self,
        prev_block: Any | None,
        token_ids: list[int],
        extra_hash: int | None = None,
        device: None = None,
    ) -> V0NaiveBlock:
        """Take a full block, a cached one if there is one."""
    def allocate_immutable_blocks(
        self,
        prev_block: Any | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: None = None,
    ) -> list[V0NaiveBlock]:
        """Take several full blocks."""
    def allocate_mutable_block(
        self, prev_block: Any | None, extra_hash: int | None = None, device: None = None
    ) -> V0NaiveBlock:
        """Take an empty block."""
    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        """Return the copies since the last call, `(from, to)`, and forget them."""
    def cow_block_if_not_appendable(self, block: V0NaiveBlock) -> int:
        """Return the id to write to, of a copy if the block is shared."""
    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """Return how many of the hashes are cached, from the first on."""
    def fork(self, last_block: V0NaiveBlock) -> list[V0NaiveBlock]:
        """Return the blocks up to this one, shared."""
    def free(self, block: V0NaiveBlock, keep_block_object: bool = False) -> None:
        """Give a block back."""
    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """Return the computed blocks that all lists share."""
    def get_num_free_blocks(self, device: None = None) -> int:
        """Return how many blocks are free."""
    def get_num_full_blocks_touched(self, blocks: list[V0NaiveBlock]) -> int:
        """Return how many full blocks a swap would take."""
    def get_num_total_blocks(self) -> int:
        """Return how many blocks there are."""
    def get_physical_block_id(self, absolute_id: int) -> int:
        """Return the id within the device of a block."""
    def get_prefix_cache_hit_rate(self) -> float:
        """Return the share of lookups that hit; -1 without a prefix cache."""
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        """Note when blocks were used."""
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Do nothing: blocks are computed once they are full."""

    def promote_to_immutable_block(self, block: V0NaiveBlock) -> int:
        """Return the id of a full block, of the cached block with the same tokens if there is one."""
    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; return whether it did."""
    def swap_in(self, blocks: list[V0NaiveBlock]) -> None:
        """Take blocks for a list that comes back."""
    def swap_out(self, blocks: list[V0NaiveBlock]) -> None:
        """Give the blocks of a list back."""

class V0NaiveBlockAllocator(V0PoolAllocator):
    """Blocks without keys; ids that were freed last are reused first."""

    def __new__(
        cls,
        create_block: Any,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        block_pool: Any | None = None,
    ) -> Self: ...

class V0PrefixCachingBlockAllocator(V0PoolAllocator):
    """Blocks that are found again by their keys; the least recently accessed go first, then the longest prefixes."""

    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        eviction_policy: Any | None = None,
    ) -> Self: ...
    def block_is_computed(self, block_id: int) -> bool:
        """Return whether a block's contents are computed."""
    def is_block_cached(self, block: V0NaiveBlock) -> bool:
        """Return whether the contents of a block are cached."""

@disjoint_base
class V0CpuGpuBlockAllocator:
    """The blocks of all devices under one count of ids: the GPU's first, then the CPU's, then the external ones."""

    def __new__(cls, cpu_block_allocator: V0PoolAllocator, gpu_block_allocator: V0PoolAllocator) -> Self: ...
    @staticmethod
    def create(
        allocator_type: str, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, num_external_blocks: int = 0
    ) -> V0CpuGpuBlockAllocator:
        """Makes the allocators, `naive` or `prefix_caching`."""

    @property
    def all_block_ids(self) -> frozenset[int]:
        """Ids of all blocks, a frozenset."""
    def allocate_immutable_block(
        self, prev_block: Any | None, token_ids: list[int], device: Any, extra_hash: int | None = None
    ) -> V0NaiveBlock:
        """Take a full block, a cached one if there is one."""
    def allocate_immutable_blocks(
        self, prev_block: Any | None, block_token_ids: list[list[int]], device: Any, extra_hash: int | None = None
    ) -> list[V0NaiveBlock]:
        """Take several full blocks."""
    def allocate_mutable_block(
        self, prev_block: Any | None, device: Any, extra_hash: int | None = None
    ) -> V0NaiveBlock:
        """Take an empty block."""
    def allocate_or_get_null_block(self) -> V0NullBlock:
        """Return the null block."""
    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        """Return the copies since the last call, `(from, to)`, and forget them."""
    def find_cached_blocks_prefix(self, block_hashes: list[int], device: Any | None = None) -> list[int]:
        """Return how many of the hashes are cached, from the first on."""

    def fork(self, last_block: _V0Block) -> list[V0NaiveBlock]:
        """Return the blocks up to this one, shared."""
    def free(self, block: _V0Block) -> None:
        """Give a block back."""

    def get_and_reset_swaps(self) -> list[tuple[int, int]]:
        """Return the swaps since the last call, `(from, to)`, and forget them."""
    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """Return the computed blocks that all lists share."""
    def get_num_free_blocks(self, device: Any) -> int:
        """Return how many blocks are free."""
    def get_num_full_blocks_touched(self, blocks: _Each[_V0Block], device: Any) -> int:
        """Return how many full blocks a swap would take."""
    def get_num_total_blocks(self, device: Any) -> int:
        """Return how many blocks there are."""
    def get_physical_block_id(self, device: Any, absolute_id: int) -> int:
        """Return the id within the device of a block."""
    def get_prefix_cache_hit_rate(self, device: Any) -> float:
        """Return the share of lookups that hit; -1 without a prefix cache."""
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        """Note when blocks were used."""
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Do nothing: blocks are computed once they are full."""
    def of(self, device: Any) -> V0PoolAllocator:
        """The allocator of one device."""

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; return whether it did."""
    def swap(self, blocks: _Each[_V0Block], src_device: Any, dst_device: Any) -> dict[int, int]:
        """Move blocks to another device, all or none. Blocks that share a physical block go on sharing one.

        Returns:
            The physical block there for each one here, in the order of first use.
        """

@disjoint_base
class V0BlockTable:
    """The blocks of one sequence."""

    def __new__(
        cls,
        block_size: int,
        block_allocator: V0CpuGpuBlockAllocator,
        _blocks: _Each[_V0Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> Self: ...
    @staticmethod
    def get_num_required_blocks(token_ids: _Each[int], block_size: int, num_lookahead_slots: int = 0) -> int:
        """Blocks for tokens and lookahead slots, without looking for hits."""

    @property
    def _num_empty_slots(self) -> int: ...
    @property
    def blocks(self) -> list[_V0Block]:
        """The blocks, a list."""
    @property
    def num_full_slots(self) -> int:
        """Tokens in the table."""
    @property
    def physical_block_ids(self) -> list[int]:
        """Ids of the blocks, a list of ints."""
    def allocate(self, token_ids: list[int], device: Any | None = None, extra_hash: int | None = None) -> None:
        """Takes blocks for all tokens, or none."""

    def append_token_ids(
        self,
        token_ids: list[int],
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Appends tokens and makes room for more, all or nothing; shared blocks that are written are copied."""

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Takes blocks until `num_empty_slots` slots are empty, or none."""

    def fork(self) -> V0BlockTable:
        """A table over the same physical blocks."""

    def free(self) -> None:
        """Gives all blocks back."""

    def get_num_blocks_touched_by_append_slots(self, token_ids: _Each[int], num_lookahead_slots: int) -> int:
        """Blocks that appending may write or take, at worst."""

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Tokens that the table does not have yet."""

    def mark_computed(self, num_tokens: int) -> None:
        """Lets the blocks be found by their keys whose tokens are among the first `num_tokens`."""

    def update(self, blocks: _Each[_V0Block]) -> None:
        """Takes over these blocks, or their new ids."""

def v0_hash_blocks(parent: int | None, token_ids: list[int], block_size: int, extra_hash: int | None) -> list[int]:
    """Keys of the full blocks of `token_ids`, the first after `parent`; a negative id is a token not known yet."""

_Goal: TypeAlias = Literal["max_id", "free_tail", "dense"]
_Wanted: TypeAlias = tuple[_Goal | Literal["contiguous"], int] | tuple[_Goal | Literal["contiguous"], int, int]
_BlockIds: TypeAlias = NDArray[np.int64] | NDArray[np.int32] | _Each[int]

@final
class DefragReport:
    """What one call of `defrag.run` decided."""

    @property
    def planned(self) -> int:
        """Moves planned, the same as `len(report)`."""
    @property
    def left(self) -> int:
        """Blocks in the way of the goals that the budget leaves for later."""
    @property
    def stuck(self) -> int:
        """Blocks in the way of the goals that have nowhere to go."""
    @property
    def held(self) -> int:
        """Blocks in the way of the goals that transfers or pins hold."""
    @property
    def dropped(self) -> int:
        """Cached blocks that were dropped."""
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Residency:
    """How long the sampled blocks of a tier stayed cached. Each is how many fell into each range, and their sum in
    seconds.
    """

    @property
    def bounds(self) -> list[float]:
        """Upper ends of the ranges in seconds; the last range has no end."""
    @property
    def lifetime(self) -> tuple[list[int], float]:
        """From when a block could be found to its eviction."""
    @property
    def idle_before_evict(self) -> tuple[list[int], float]:
        """From when a block was last used to its eviction."""
    @property
    def reuse_gap(self) -> tuple[list[int], float]:
        """From when nothing used a block any more to when a prompt did again."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Fragmentation:
    """How scattered the device's blocks are."""

    @property
    def max_id(self) -> int | None:
        """Highest block that is not free; None if all are."""
    @property
    def gap(self) -> int:
        """Blocks by which the highest block that can move could be lower."""
    @property
    def holes(self) -> int:
        """Free blocks that are not cached."""
    @property
    def tables(self) -> int:
        """Block tables with blocks of their own."""
    @property
    def runs(self) -> int:
        """Runs of neighbouring blocks in those tables."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class MovePlan:
    """Moves towards goals; nothing has moved yet. No block is named twice.

    Attributes:
        pairs: all, block ids `(from, to)`, int64 `[n, 2]`.
        move: those whose destination is empty.
        exchange: those whose destination holds bytes to keep: the two blocks change places.
        left: moves that the goals need beyond these; `contiguous` adds nothing to it.
        stuck: live blocks in the way of the goals for which there is no hole.
    """

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Moves and exchanges as one mapping, int64 `[n, 2]`."""
    @property
    def move(self) -> NDArray[np.int64]:
        """Moves into holes, int64 `[n, 2]`, `(from, to)`."""
    @property
    def exchange(self) -> NDArray[np.int64]:
        """Pairs of blocks that change places, int64 `[n, 2]`."""
    @property
    def left(self) -> int:
        """Blocks in the way that the budget leaves for later."""
    @property
    def stuck(self) -> int:
        """Blocks in the way that have nowhere to go."""
    def __len__(self) -> int: ...

@final
class BlockObserver:
    """Where a foreign allocator's blocks lie, and where they should.

    An *id* is what the allocator calls a block, a *block* is where the id's bytes lie: two permutations of each other.
    Block 0 is the null block. Where a call takes ids, an int64 array `[n]` is quickest.

    Args:
        num_blocks: blocks of the pool, 1 to 2147483647; None means that ids become known as they are named.

    Raises:
        InvalidArgumentError: the number of blocks is out of range.

    Example:
        >>> import numpy as np
        >>> from blockyard.allocators import BlockObserver
        >>> observer = BlockObserver(8)
        >>> observer.use_ids([5, 6])
        >>> plan = observer.plan("dense", 0)
        >>> plan.pairs.tolist()
        [[5, 1], [6, 2]]
        >>> observer.commit(plan)  # once the bytes have moved
        >>> observer.resolve(np.array([5, 6])).tolist()
        [1, 2]
    """

    def __new__(cls, num_blocks: int | None = None) -> Self: ...
    def __len__(self) -> int:
        """Ids known so far."""

    @property
    def limit(self) -> int:
        """Ids are below this."""

    def set_limit(self, num_blocks: int) -> None:
        """Say how many blocks there are.

        Raises:
            InvalidArgumentError: more are known.
        """

    def use_ids(self, ids: _BlockIds, *, fresh: bool = False) -> None:
        """Add a reference to the blocks of ids.

        Args:
            ids: any number of times each; where they are fresh, those of a sequence together, long ones first.
            fresh: the ids have no content; those not in use are bound to the lowest empty blocks.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def release_ids(self, ids: _BlockIds, *, fresh: bool = False) -> None:
        """Take a reference from the blocks of ids.

        Args:
            ids: any number of times each.
            fresh: blocks without references become empty.

        Raises:
            InvalidArgumentError: a block has fewer references; nothing was changed.
        """

    def forget_ids(self, ids: _BlockIds) -> None:
        """Mark ids that are not in use as empty.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def lease(self, ids: _BlockIds) -> int:
        """Keep the blocks of ids where they are, bytes included, until `end_lease`.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def end_lease(self, lease: int) -> None:
        """End a lease.

        Raises:
            InvalidArgumentError: it is not held.
        """

    def resolve(
        self,
        ids: NDArray[np.int64] | NDArray[np.int32],
        *,
        out: NDArray[np.int64] | NDArray[np.int32] | None = None,
        pass_negative: bool = False,
    ) -> NDArray[np.int64] | NDArray[np.int32]:
        """Blocks of ids.

        Args:
            ids: of any shape.
            out: of the same shape and dtype, any layout; may be `ids`.
            pass_negative: negative ids stay as they are.

        Returns:
            `out`, or a new array of the shape and dtype of `ids`.

        Raises:
            InvalidArgumentError: an id is out of range, or an array's shape or dtype is wrong; `out` was not written.
        """

    def resolve_rows(self, rows: _Each[_Each[int]], *, pass_negative: bool = False) -> list[list[int]]:
        """Blocks of ids, for rows of ints.

        Raises:
            InvalidArgumentError: an id is out of range.
        """

    def unresolve(self, block: int) -> int:
        """The id of a block.

        Raises:
            InvalidArgumentError: it is out of range.
        """

    def used(self) -> NDArray[np.int64]:
        """Blocks with references, rising, and how many, int64 `[n, 2]`."""

    def holes(self) -> NDArray[np.int64]:
        """Blocks without references or leases, rising, int64 `[n]`."""

    @property
    def gap(self) -> int:
        """Ids between the highest block in use and the highest there need be."""

    def plan(self, goal: _Goal, number: int, *, slack: int = 0, moves: int | None = None) -> MovePlan:
        """Plan a step's moves; nothing changes until `commit`.

        Args:
            goal: see `Defrag.run`.
            number: see `Defrag.run`.
            slack: the plan is empty while the goal is missed by no more ids or runs; once begun, it is carried on
                until the goal is met.
            moves: budget of this step.

        Raises:
            InvalidArgumentError: the goal is unknown.
        """

    def plan_all(
        self,
        goals: _Each[_Wanted],
        *,
        sequences: _Each[_BlockIds] | None = None,
        hot: _BlockIds | None = None,
        moves: int | None = None,
        num_bytes: int | None = None,
        bytes_per_block: int = 0,
    ) -> MovePlan:
        """Plan a step for several goals, the most important first; nothing changes until `commit`.

        A later goal undoes nothing of an earlier one: it moves no block to where the earlier one does not want any, and
        none of the sequences of `"contiguous"`. Where two contradict each other, the later is missed.

        Args:
            goals: `(name, number)` or `(name, number, slack)`, as in `plan`; also `"contiguous"`: no sequence lies in
                more than `number` runs, its slack is in runs. While the goals stay the same, each goes on where the
                step before left it.
            sequences: what `"contiguous"` is about: ids of each, in order. Those of less importance come later.
            hot: ids of sequences that run now: their blocks move when nothing else is left to move, and a sequence
                whose last id is one is put in order last.
            moves: budget of this step, in pairs.
            num_bytes: budget in bytes written: an exchange writes both of its blocks.
            bytes_per_block: of all layers; to be given with `num_bytes`.

        Raises:
            InvalidArgumentError: a goal is unknown or without meaning, or an id is out of range.
        """

    def fragmentation(self, sequences: _Each[_BlockIds] = ...) -> Fragmentation:
        """Measure how scattered the blocks in use are, leased ones and the null block too; looks at all blocks.

        Args:
            sequences: ids of each sequence, in order; `tables` and `runs` are theirs, shared blocks counted once.
        Returns:
            `Fragmentation`.
        Raises:
            InvalidArgumentError: an id is out of range.
        """

    def commit(self, plan: MovePlan) -> None:
        """Take over a plan whose bytes have moved: the ids of each pair change places.

        Raises:
            InvalidArgumentError: the state has changed so that the plan no longer fits; nothing was changed.
        """

    def check(self) -> None:
        """Count everything again.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """

_ByteKeys: TypeAlias = Iterable[bytes]

@final
class PreparedStore:
    """What `OffloadManager.prepare_store` decided."""

    @property
    def keys(self) -> list[bytes]:
        """Keys to store, of those that were offered, in their order."""
    @property
    def chunks(self) -> NDArray[np.int32]:
        """The chunk of each, int32 `[n]`."""
    @property
    def evicted(self) -> list[bytes]:
        """Keys that lost their chunks to them."""

@final
class OffloadManager:
    """The chunks of a host cache, and the keys whose bytes they hold, for an engine's offload manager.

    A key is any bytes. It is pending from `prepare_store` to `complete_store`, a hit from then until it is evicted or
    forgotten. Loads hold their chunks. A key that is forgotten while transfers of it run is a miss at once; its chunk
    is given out again only after they have ended.

    Args:
        num_chunks: chunks of the host cache.
        eviction: which stored chunk is given out again first, as for `PrefixCaching`.
    Raises:
        InvalidArgumentError: `num_chunks` is out of range, or `eviction` has another name.
        OutOfMemoryError: there is no memory to keep track of them.

    Example:
        >>> from blockyard.offload import OffloadManager
        >>> manager = OffloadManager(1024)
        >>> store = manager.prepare_store([b"a", b"b"])
        >>> store.chunks.tolist()  # copy the blocks there
        [0, 1]
        >>> _ = manager.complete_store(store.keys)
        >>> manager.prepare_load([b"a"]).tolist()  # copy from there
        [0]
        >>> manager.complete_load([b"a"])
    """

    def __new__(cls, num_chunks: int, *, eviction: str = "lru") -> OffloadManager: ...
    def lookup(self, keys: _ByteKeys) -> list[Literal["hit", "pending", "miss"]]:
        """Return what each key is: `"hit"`, `"pending"` while it is being stored, or `"miss"`.

        Args:
            keys: bytes, in any collection.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def prepare_store(self, keys: _ByteKeys, *, deadline: int | None = None) -> PreparedStore | None:
        """Give chunks to the keys that have none. Those that have one count as just used, and none of them is evicted.

        Args:
            keys: bytes, in any collection. One that was forgotten while it was being stored is left out until that
                store has ended.
            deadline: `expire` at this time or later forgets the keys unless their stores have ended; None for never.
        Returns:
            `PreparedStore`; or None, and nothing is changed, if there are too few chunks that no transfer holds.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def complete_store(self, keys: _ByteKeys, success: bool = True) -> list[bytes]:
        """End the stores of keys. Keys that are not being stored are passed over.

        Args:
            keys: bytes, in any collection.
            success: whether their bytes are in their chunks. Otherwise the keys are misses, and the chunks are free.
        Returns:
            The keys that have become hits.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def prepare_load(self, keys: _ByteKeys) -> NDArray[np.int32]:
        """Hold the chunks of keys for a load.

        Args:
            keys: bytes, each a hit, in any collection.
        Returns:
            The chunk of each key, int32 `[n]`.
        Raises:
            InvalidArgumentError: a key is no hit, or not bytes; nothing is held.
        """
    def complete_load(self, keys: _ByteKeys) -> None:
        """End one load of each key.

        Args:
            keys: bytes, in any collection.
        Raises:
            InvalidArgumentError: a key is not bytes, or is not being loaded; the loads of those before it have ended.
        """
    def touch(self, keys: _ByteKeys) -> None:
        """Count keys as just used; misses are passed over.

        Args:
            keys: bytes, in any collection, the most important first: of those touched together it goes last.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def evict(self, count: int, protected: _ByteKeys | None = None) -> list[bytes] | None:
        """Evict keys that nothing loads, those first that the eviction policy says; their chunks are free then.

        Args:
            count: keys to evict.
            protected: keys to keep: bytes, in any collection.
        Returns:
            The keys that were evicted; or None, and nothing is changed, if there are fewer.
        Raises:
            InvalidArgumentError: `count` is negative, or a key is not bytes.
        """
    def forget(self, keys: _ByteKeys) -> list[bytes]:
        """Forget keys whose bytes are bad or not wanted any more: they are misses from now on.

        Args:
            keys: bytes, in any collection.
        Returns:
            The keys that had chunks.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def expire(self, now: int) -> list[bytes]:
        """Forget the keys whose stores have not ended by their deadlines.

        Args:
            now: the time, in the unit of the deadlines.
        Returns:
            Those keys.
        """
    def reset(self) -> list[bytes]:
        """Forget all keys.

        Returns:
            The keys that had chunks, hits and pending ones.
        """
    @property
    def num_chunks(self) -> int:
        """Chunks in all."""
    @property
    def num_free(self) -> int:
        """Chunks that a store can have now: those that hold nothing, and those that can be evicted."""
    @property
    def num_stored(self) -> int:
        """Keys that are hits."""
    @property
    def num_storing(self) -> int:
        """Keys that are pending."""
    @property
    def num_evicted(self) -> int:
        """Keys that were evicted so far."""
    def check(self) -> None:
        """Raise InvariantError if the manager contradicts itself: a bug in Blockyard."""
