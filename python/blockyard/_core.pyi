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

from blockyard.types import (
    DefragReport,
    Fragmentation,
    ManagerStats,
    Residency,
    ResizeProgress,
    SlabReport,
    StoreStats,
)

__all__ = [
    "AllocStatus",
    "BlockAllocator",
    "BlockManager",
    "BlockObserver",
    "BoundViews",
    "CacheGroup",
    "Completion",
    "Defrag",
    "EventBatch",
    "Fit",
    "FreeBlocks",
    "HashedPrompt",
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
    "Sequence",
    "SlabStore",
    "StepDecision",
    "StepOwner",
    "StoreJob",
    "StoreJobs",
    "__version__",
    "build_profile",
    "chain_keys",
    "check_slab",
    "checksum_rows",
    "expand_span",
    "export_keys",
    "inspect_slab",
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
_Extras: TypeAlias = _Each[tuple[int, int, bytes]]

@final
class AllocStatus:
    """Whether a request fits: now, later or never. Only `OK` is true.

    Attributes:
        OK: it fits now.
        LATER: it fits once other sequences have left the tier.
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
    @property
    def name(self) -> Literal["OK", "LATER", "NEVER"]:
        """Its name, as of an `enum.Enum`: `"OK"`, `"LATER"` or `"NEVER"`."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __bool__(self) -> bool: ...

_IdPairs: TypeAlias = NDArray[np.integer[Any]] | _Each[_Each[int]]
_Blocks: TypeAlias = NDArray[np.int32] | _Each[int] | int

@disjoint_base
class BlockAllocator:
    """The blocks of one tier with their reference counts; the base of both allocators.

    The caller owns one reference for each id that it received. Block ids are int32 `[n]`. Every method takes a batch,
    and either succeeds completely or changes nothing.

    Raises:
        OutOfBlocksError: the call needs more blocks than are free.
        InvalidArgumentError: a block is out of range, has too few references, or is the null block.
    """

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the tier."""
    @property
    def num_free(self) -> int:
        """Number of unreferenced blocks, including cached ones."""
    @property
    def lookups(self) -> tuple[int, int] | None:
        """Number of keys looked up, and of keys found, since the last reset; None without a prefix cache."""
    def refs(self, block: int) -> int:
        """Return how many references a block has.

        Args:
            block: its id.
        """
    def allocate(self, count: int) -> NDArray[np.int32]:
        """Take free blocks, one reference each. Cached blocks are evicted if needed.

        Args:
            count: number of blocks.
        Returns:
            Block ids, int32 `[count]`.
        Raises:
            OutOfBlocksError: fewer blocks are free.
        """
    def allocate_keyed(
        self, keys: _Each[bytes], depths: _Each[int], *, plain: int = 0
    ) -> tuple[NDArray[np.int32], int]:
        """Take one block for each key, the cached one if it exists, and `plain` blocks without a key.

        Args:
            keys: keys of full blocks, 32 bytes each, from `chain_keys`.
            depths: length of the prefix that ends with each block; of equally old blocks, the deepest is evicted first.
            plain: number of blocks without a key.
        Returns:
            The blocks, int32 `[keys + plain]`, and how many keys were cached.
        """
    def share(self, blocks: _Blocks) -> None:
        """Add one reference to each block.

        Args:
            blocks: ids, int32 `[n]`, a list, or one int.
        """
    def require(self, blocks: _Blocks) -> None:
        """Raise the error that `free` would raise, if any; change nothing."""
    def free(self, blocks: _Blocks) -> None:
        """Release one reference to each block.

        Args:
            blocks: ids, int32 `[n]`, a list, or one int.
        """
    def make_writable(self, blocks: _Blocks) -> NDArray[np.int32]:
        """Replace shared blocks by new ones. Where the returned id differs, the caller must copy the bytes."""
    def publish(self, block: int, key: bytes, depth: int = 0) -> int:
        """Give a full block its key. Return the block to use from now on: this one, or another one with that key."""
    def find(self, keys: _Each[bytes]) -> NDArray[np.int32]:
        """Return the blocks of the longest computed prefix of the keys, without taking them."""
    def cost(self, keys: _Each[bytes]) -> int:
        """Return how many free blocks it would take to allocate these keys."""
    def has_key(self, key: bytes) -> bool:
        """Return whether a cached block has this key.

        Args:
            key: 32 bytes.
        """
    def is_computed(self, block: int) -> bool:
        """Return whether the block's content is computed: `publish` gave it a key, or it came from a hit.

        Args:
            block: its id.
        """
    def mark_computed(self, blocks: _Blocks | None = None) -> None:
        """Mark these blocks, or all in use, as computed if they have a key: the step that writes them is over."""
    def touch(self, blocks: _Blocks, now: float) -> None:
        """Record when blocks were last used, in seconds of any clock."""
    def reset(self) -> bool:
        """Forget all keys. While a block is in use, do nothing and return False."""
    def null_block(self) -> int:
        """Return the null block, which replaces blocks outside a window. The first call takes it; it is never freed."""
    def upcoming(self, limit: int | None = None) -> NDArray[np.int32]:
        """Return free blocks in the order in which they would be allocated, int32 `[n]`, without taking them.

        Empty blocks come first, then cached ones in the order of eviction.
        """
    def iter_upcoming(self) -> FreeBlocks:
        """Iterate over the blocks of `upcoming` lazily. See `FreeBlocks`."""
    def check(self) -> None:
        """Recount the whole state and compare.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """

@final
class NaiveAllocator(BlockAllocator):
    """An allocator that only counts references, without a prefix cache.

    Args:
        num_blocks: number of blocks in the tier.
        tier: name of the tier in errors.
        reuse: which free block is taken next: `"lowest"` id, `"fifo"` (or `"lru"`), or `"lifo"`.

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
    """An allocator with a prefix cache: it finds full blocks by key, even after their last reference is released.

    Args:
        num_blocks: number of blocks in the tier.
        tier: name of the tier in errors.
        reuse: which free block is taken next, as for `NaiveAllocator`.
        eviction: which cached block is evicted if no block is empty: the least recently `"released"` or `"accessed"`.

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
    """An iterator over free blocks in the order in which they would be allocated. It takes none of them.

    It reads ids in chunks: 64 first, then twice as many each time, so that the first few cost little in any pool. If
    the pool changes during the iteration, ids already read stay as they were, and the next chunk continues at the same
    position of the new order: an id may be missed or repeated.
    """

    def __iter__(self) -> FreeBlocks: ...
    def __next__(self) -> int: ...

@final
class Pairs:
    """Pairs of block ids between two tiers.

    Args:
        src: tier to read.
        dst: tier to write.
        ids: `(from, to)`: int64 `[n, 2]`, another array of ints, or a sequence of pairs.
    Raises:
        MappingError: an id is negative or too large, or the array has another dtype or shape.
        InvalidArgumentError: a tier's name is unknown.

    Example:
        >>> from blockyard import Pairs
        >>> pairs = Pairs("device", "host", [(3, 0), (4, 1)])
        >>> len(pairs), pairs.ids.tolist()
        (2, [[3, 0], [4, 1]])
    """

    def __new__(cls, src: _Tier, dst: _Tier, ids: _IdPairs) -> Pairs: ...
    @property
    def src(self) -> _Tier:
        """Tier to read."""
    @property
    def dst(self) -> _Tier:
        """Tier to write."""
    @property
    def ids(self) -> NDArray[np.int64]:
        """Block ids `(from, to)`, int64 `[n, 2]`."""
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class StepDecision:
    """The transfers of one step. Its ticket holds leases on all their blocks until you complete or fail it.

    Each kind is a tuple with one `Pairs` for each pair of tiers, empty if there is nothing to do. `after` lists the
    tickets, possibly including this one, whose device reads must finish before this step writes to the device.

    Args:
        ticket: number to complete or fail.
        transfers: kinds and pairs, in any order; they are sorted so that they are safe to run in sequence.
        after: tickets to wait for.
        prefetch: whether the step computes without reading the blocks that it loads.
    Attributes:
        MAX_BYTES: maximum size of a decision for `to_bytes` and `from_bytes`.
    Raises:
        InvalidArgumentError: a kind's name is unknown.

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
        """Whether the step computes without the blocks that it loads, so that compute does not wait for them."""
    @property
    def after(self) -> tuple[int, ...]:
        """Tickets whose device reads must finish before this step writes to the device, a tuple of ints."""
    @property
    def swap_out(self) -> tuple[Pairs, ...]:
        """Transfers to the host or the external tier: a tuple with one `Pairs` for each pair of tiers."""
    @property
    def swap_in(self) -> tuple[Pairs, ...]:
        """Transfers from the host or the external tier: a tuple with one `Pairs` for each pair of tiers."""
    @property
    def copy(self) -> tuple[Pairs, ...]:
        """Copy-on-write on the device: a tuple of `Pairs`."""
    @property
    def move(self) -> tuple[Pairs, ...]:
        """Defragmentation moves on the device: a tuple of `Pairs`."""
    @property
    def exchange(self) -> tuple[Pairs, ...]:
        """Defragmentation exchanges on the device: a tuple of `Pairs`."""
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
        """Return all kinds and pairs, in an order that is safe to run in sequence."""
    MAX_BYTES: ClassVar[int]
    """Bytes of the longest decision that is written or read."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def to_bytes(self) -> bytes:
        """Serialize the decision, with version and checksum; empty entries are omitted. All processes write the same
        bytes.

        Raises:
            MappingError: `from_bytes` would reject the decision, or it is too long.
        """
    @staticmethod
    def from_bytes(data: bytes) -> StepDecision:
        """Deserialize a decision. This runs no code from the bytes, and uses memory in proportion to their length.

        The checksum detects damage, but anyone can compute it: sign bytes that cross a trust boundary. For any input,
        kinds match their tiers and no block is written twice; ids are checked where they are used.

        Args:
            data: output of `to_bytes`.
        Raises:
            MappingError: the bytes are damaged or of another version; a kind is out of order, repeated for its tiers,
                or has the wrong tiers; a block is written twice, or both copied and written; or the ticket waits for a
                later one.
        """
    def __len__(self) -> int: ...

@final
class CacheGroup:
    """Which preceding tokens the layers of one cache group need.

    Example:
        >>> from blockyard import BlockManager, CacheGroup
        >>> groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(32)]
        >>> manager = BlockManager(block_size=16, device_blocks=64, groups=groups)
        >>> [group.peak_blocks(100, block_size=16, chunk_tokens=16) for group in groups]
        [7, 4]
    """

    @staticmethod
    def full_attention() -> CacheGroup:
        """All preceding tokens."""
    @staticmethod
    def sliding_window(window: int) -> CacheGroup:
        """The token itself and the `window - 1` before it; earlier blocks are freed."""
    @staticmethod
    def recurrent() -> CacheGroup:
        """One state, stored in a block: the state after the block's last token.

        A step reads the state from the previous token's block and writes it to the block of its own last token. Blocks
        that a longer step skips are 0 in the table. A state cannot be undone, so truncation is refused.
        """
    @staticmethod
    def cross_attention() -> CacheGroup:
        """The tokens of an encoder, set once; forks share them. Not supported with prefix caching."""
    @property
    def kind(self) -> Literal["full_attention", "sliding_window", "recurrent", "cross_attention"]:
        """`"full_attention"`, `"sliding_window"`, `"recurrent"` or `"cross_attention"`."""
    @property
    def window(self) -> int | None:
        """Tokens of the window; None for other kinds."""
    def peak_blocks(
        self, num_tokens: int, *, block_size: int, lookahead: int = 0, chunk_tokens: int | None = None
    ) -> int:
        """Return the maximum number of blocks that a sequence holds in this group, with chunks of `chunk_tokens`."""
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Fit:
    """Whether a request for blocks fits, and the numbers that decide it. True only if `status` is `OK`.

    Args:
        status: `AllocStatus`.
        blocks: number of blocks that the request takes.
        free: number of blocks that can be allocated.
    """

    def __new__(cls, status: AllocStatus, blocks: int, free: int) -> Fit: ...
    def __bool__(self) -> bool: ...
    @property
    def status(self) -> AllocStatus:
        """`AllocStatus.OK`, `LATER` or `NEVER`."""
    @property
    def blocks(self) -> int:
        """Number of blocks that the request takes; 0 for sequences that cannot move in their current state."""
    @property
    def free(self) -> int:
        """Number of blocks that can be allocated now, without those of the watermark if the request must keep it."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Sequence:
    """The handle of one sequence. Every method that takes a handle accepts it, and so does numpy.

    It compares, hashes and prints like its number.

    Args:
        handle: the number, uint64.
        cached_tokens: number of tokens at the start of the prompt that need no compute.
    """

    def __new__(cls, handle: int, cached_tokens: int = 0) -> Sequence: ...
    @property
    def cached_tokens(self) -> int:
        """Number of tokens at the start of the prompt that the prefix cache had, so that they need no compute. The last
        token is always computed.
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
        eviction: which cached block is evicted first once no block is free. `"adaptive"`: uses the rule with the most
            current hits, found by simulating each rule on a sample of the blocks. Its hit rate is rarely far below the
            best fixed policy's, and it takes 10 % more time per request than `"lru"`. `"lru"`: the least recently used
            block. `"priority"`: by `prefix.set_priority`. All evict a prompt's blocks from its end.
        host: whether the host is a second level of the cache. The step's decision copies blocks there before they would
            be evicted from the device (`swap_out`), and loads hits from there (`swap_in`). The least recently used copy
            is evicted first. Prompts with several cache groups or a window do not use host copies yet.
        host_copies_per_step: with `host=True`, the maximum number of blocks that one decision copies before they are
            evicted; never more than an eighth of the device or the host. Steps that take more new blocks than this
            evict the others without a copy. 0 copies only swapped blocks and those of `prefix.offload`.
        max_events: maximum number of events that wait for `prefix.take_events`; 0 records none.
        max_pinned: fraction of the device blocks that pins may hold, 0 to below 1.
    Raises:
        InvalidArgumentError: an option is out of range, or its name is unknown.

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
        host_copies_per_step: int = 4096,
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
        """Maximum number of blocks that a decision copies to the host before they are evicted."""
    @property
    def max_events(self) -> int:
        """Maximum number of waiting events."""
    @property
    def max_pinned(self) -> float:
        """Fraction of the device blocks that pins may hold."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Pool:
    """The blocks of one tier, as returned by `manager.pool("device")`. Iterate over it to get the free blocks one by
    one.

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
        """Number of blocks in the tier."""
    @property
    def num_free(self) -> int:
        """Number of blocks that are neither referenced nor leased, including cached ones."""
    @property
    def reserved(self) -> int:
        """Number of blocks that admission keeps free: the device's watermark, 0 in the other tiers."""
    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups whose block tables use the pool, a tuple of `CacheGroup` ordered by number."""
    def free_ids(self, limit: int | None = None) -> NDArray[np.int32]:
        """Return the free blocks without cached content, in the order in which they are allocated, without taking them.

        Args:
            limit: maximum number of blocks; None for all.
        Returns:
            Block ids, int32 `[n]`.
        """
    def uses(self) -> NDArray[np.uint8]:
        """Return the use of each block.

        Returns:
            uint8 `[num_blocks]`, or `[defrag.progress().extent]` while a pool shrinks. 0: free. 1: cached; its key
            finds it, and it is evicted if needed. 2: only transfers or pins hold it. 3: in use by sequences, or the
            null block.
        """
    def __iter__(self) -> FreeBlocks: ...

@final
class HashedPrompt:
    """A prompt whose tokens are already hashed, so that lookup and admission do not hash it again.

    `manager.prefix.hash` creates it. Any manager with the same block size accepts it instead of token ids. It includes
    salt, adapter and extras. `len()` is its number of tokens.

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
    """A load from a prefix store, or a write to it: the keys, and the block for each."""

    @property
    def job(self) -> int:
        """Number of the job. A job without blocks has already ended."""
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
        """Key of the preceding block in the prompt, uint8 `[n, 32]`; zeros for the first block."""
    def __len__(self) -> int: ...

@final
class StoreJobs:
    """Loads from a prefix store and writes to it; available as `manager.prefix.store_jobs`.

    `KVCache(prefix_store=...)` carries them out.

    No lookup finds a block being loaded before `end_load` reports that its bytes have landed. Blocks of open jobs are
    not allocated, evicted or moved.
    """

    def start(self, writes: str) -> None:
        """Start to collect blocks to write to the store.

        Args:
            writes: which blocks. `"through"`: each block once it is computed. `"back"`: blocks about to be evicted that
                have no copy in another tier. `"second_use"`: blocks that are computed or hit a second time. `"never"`:
                none.
        Raises:
            InvalidArgumentError: the name is unknown, blocks are cached already, or the manager has no prefix caching,
                several cache groups or a window.
        """
    def missing(
        self, prompt: _Prompt, max_blocks: int, *, salt: bytes | None = None, lora_id: int = 0
    ) -> tuple[NDArray[np.uint8], int]:
        """Return the keys of a prompt's blocks that no tier has and no load is bringing, and how many are being loaded.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`.
            max_blocks: maximum number of keys.
            salt: salt of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            `(keys, num_loading)`: the keys in the prompt's order, uint8 `[n, 32]`, and the number of its blocks that
            loads are bringing. If `n` is `max_blocks`, blocks beyond the last key may be left out of the number.
        Raises:
            InvalidArgumentError: a token id is out of range.
        """
    def begin_load(self, prompt: _Prompt, max_blocks: int, *, salt: bytes | None = None, lora_id: int = 0) -> StoreJob:
        """Begin to load the first of those blocks, as many as fit.

        Loads take at most half of the host's blocks, or a quarter of the device's if the host has no room or keeps no
        copies (`PrefixCaching(host=True)`).

        Args:
            prompt: as for `missing`.
            max_blocks: maximum number of blocks.
            salt: salt of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            `StoreJob`. End it with `end_load`, unless it has no blocks.
        Raises:
            InvalidArgumentError: a token id is out of range.
        """
    def end_load(self, job: int, landed: NDArray[np.bool_] | _Each[bool]) -> int:
        """End a load. Prompts find the blocks that have landed; the others are freed.

        Args:
            job: number of the job.
            landed: whether the bytes of each block have landed, bool `[n]` or a list.
        Returns:
            Number of blocks that prompts can now find.
        Raises:
            UnknownTicketError: there is no such load, or it has ended.
            InvalidArgumentError: `landed` does not have one entry per block.
        """
    @property
    def num_waiting(self) -> int:
        """Number of blocks waiting for `begin_write`; a block evicted while waiting counts until its turn comes."""
    def begin_write(self, max_blocks: int) -> StoreJob:
        """Begin to read blocks for the store, all from one tier.

        Writes together hold at most a quarter of the device's blocks. A call that needs one of these blocks takes it,
        and `end_write` then returns False.

        Args:
            max_blocks: maximum number of blocks.
        Returns:
            `StoreJob`. End it with `end_write` once its blocks have been read, unless it has no blocks.
        """
    def end_write(self, job: int) -> bool:
        """End a write once its blocks have been read. With `"back"`, they are freed unless they are in use again.

        Args:
            job: number of the job.
        Returns:
            False if another call took blocks of this job in the meantime: do not store the bytes.
        Raises:
            UnknownTicketError: there is no such write, or it has ended.
        """
    def give_up_all(self) -> None:
        """End all loads and writes: nothing has landed, and blocks that were being read may be written later.

        Call it when no copy to or from their blocks is running.
        """

@final
class PrefixHit:
    """How much of the start of a prompt is in the prefix cache."""

    @property
    def tokens(self) -> int:
        """Number of tokens that need no compute: whole blocks, and never the prompt's last token."""
    @property
    def host_blocks(self) -> int:
        """Number of these blocks that only the host has; `allocate` loads them."""
    def __bool__(self) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Prefix:
    """A manager's prefix cache; available as `manager.prefix`.

    A block is cached once its tokens are computed (`mark_computed`) and its bytes have landed. It stays cached after
    its sequences are freed, until it is evicted.

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
        """Whether the manager has prefix caching."""
    @property
    def store_jobs(self) -> StoreJobs:
        """Loads from a prefix store, and writes to it."""
    def lookup(self, prompt: _Prompt, *, salt: bytes | None = None, lora_id: int = 0) -> PrefixHit:
        """Return how much of a prompt is cached, without taking blocks.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`.
            salt: salt of its tenant, bytes.
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
        extras: _Extras = ...,
    ) -> HashedPrompt:
        """Hash a prompt once, so that repeated lookups and admission do not hash it again.

        Args:
            token_ids: uint32 `[tokens]` or a list of ints; copied.
            salt: salt of its tenant, bytes.
            lora_id: its adapter; 0 for none.
            extras: other inputs that determine what the model computes, such as images: `(start, length, digest)`, see
                `allocate`. They may name tokens beyond the prompt.
        Returns:
            `HashedPrompt`, for `lookup`, `can_allocate` and `allocate` of managers with the same block size.
        Raises:
            InvalidArgumentError: a token id or an extra is out of range.
        """
    def note_tokens(self, sequences: _Handles, token_ids: _TokenIds, num_tokens: _Counts | None = None) -> None:
        """Record token ids that were unknown at `append`, for instance in a scheduler that runs one step ahead.

        `append` without `token_ids` returns the slots; call this once the tokens are sampled. Sequences that were
        admitted by counts, or that share the blocks of these tokens with a fork, are skipped.

        Args:
            sequences: handles, uint64 `[n]` without repeats, a list, or one.
            token_ids: ids of the next unknown tokens, uint32 `[tokens]`, sequence by sequence.
            num_tokens: number of ids for each sequence, one int or uint32 `[n]`; 1 by default.
        Raises:
            InvalidArgumentError: there are more ids than unknown tokens, an id is out of range, or a handle is
                repeated.
            UnknownSequenceError: there is no such sequence.
        """
    def common_blocks(self, sequences: _Handles) -> NDArray[np.int32]:
        """Return the computed blocks that all sequences share at their start, for cascade attention.

        Args:
            sequences: handles, uint64 `[n]` or a list.
        Returns:
            Block ids, int32 `[blocks]`.
        Raises:
            UnknownSequenceError: there is no such sequence.
        """
    def reset(self) -> bool:
        """Drop the whole cache, for instance after the model's weights changed.

        Returns:
            False, without dropping anything, while a block is in use.
        """
    def offload(self, max_blocks: int) -> int:
        """Copy the blocks that would be evicted next to the host, by this step's decision (`swap_out`).

        Each step does this automatically for as many blocks as the next one may take, see `PrefixCaching`. Until the
        ticket completes, prompts still find the blocks, and this step may take them. Then the remaining device blocks
        are freed, and are found on the host. Older copies there make room.

        Args:
            max_blocks: number of cached device blocks to consider, in the order of eviction; those that already have a
                copy are freed.
        Returns:
            Number of blocks to be copied.
        Raises:
            InvalidArgumentError: the manager has no `PrefixCaching(host=True)`.
        """
    def set_priority(self, sequences: _Handles, priority: int) -> None:
        """Set how long the blocks of sequences stay cached after they are freed, for `eviction="priority"`.

        Each level adds the time that it takes to evict the whole pool once. A shared block has its highest priority.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            priority: 0, the default, to 15.
        Raises:
            InvalidArgumentError: the priority is out of range.
            UnknownSequenceError: there is no such sequence.
        """
    def set_quota(self, salt: bytes | None, blocks: int | None) -> None:
        """Limit a tenant's cached device blocks: published, and used by no sequence.

        The tenant's least recently used blocks beyond the quota are freed whenever sequences are freed, tickets end or
        decisions are taken. If room is needed earlier, they are evicted before the blocks of other tenants. Blocks that
        the tenant published before its first quota do not count.

        Args:
            salt: the tenant; None for prompts without a salt.
            blocks: maximum number of such blocks; None for no limit.
        Raises:
            InvalidArgumentError: the device has fewer blocks, prefix caching is off, or 65535 tenants have quotas.
        """
    def quota(self, salt: bytes | None) -> tuple[int, int | None] | None:
        """Return how many blocks count towards a tenant's quota, and the quota.

        Args:
            salt: the tenant; None for prompts without a salt.
        Returns:
            `(blocks, quota)`; None for a tenant that never had a quota.
        """
    def sample_residency(self, sample_rate: float) -> None:
        """Start to measure how long blocks stay cached, on a sample; see `residency`.

        Args:
            sample_rate: fraction of the blocks to measure, above 0 to 1.
        Raises:
            InvalidArgumentError: the rate is out of range.
        """
    def residency(self) -> dict[str, Residency]:
        """Return how long sampled blocks stayed cached, since `sample_residency`.

        Returns:
            `Residency` for each tier that caches: `"device"` and `"host"`.
        """
    def take_events(self) -> EventBatch:
        """Return and remove all waiting events: blocks stored or removed, cache cleared. A router tracks the cache with
        them.

        Returns:
            `EventBatch`, empty without `PrefixCaching(max_events=...)`.
        """

@final
class Pins:
    """A manager's pins; available as `manager.pins`. A pin keeps cached device blocks for a reader such as a connector.

    Pinned blocks are neither evicted nor written, even after their sequences are freed. Only `unpin` ends a pin, so
    call it even for a reader that has died. Pins hold at most the fraction `max_pinned` of the device blocks.

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
            The number of the pin.
        Raises:
            OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the sequence is not on the device, is still loading, or has lost bytes.
        """
    def pin_prompt(self, prompt: _Prompt, *, salt: bytes | None = None, lora_id: int = 0) -> tuple[int, int]:
        """Pin the cached device blocks at the start of a prompt.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints.
            salt: salt of its tenant, bytes.
            lora_id: its adapter; 0 for none.
        Returns:
            The number of the pin, and the number of tokens in its blocks.
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
            UnknownTicketError: the pin has ended, or never existed.
        """
    def unpin(self, pin: int) -> None:
        """End a pin when its reader is done.

        Args:
            pin: its number.
        Raises:
            UnknownTicketError: the pin has ended, or never existed.
        """

@final
class Defrag:
    """Defragments and resizes a manager's device pool; available as `manager.defrag`.

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
        """Decide moves of device blocks into holes, as `move` pairs of this step's decision.

        Until the ticket completes, block tables, slots and cached blocks name the old blocks, which are still read and
        written. Then each target replaces its source everywhere, unless the source was written, freed or leased in the
        meantime. Targets are no longer free after this call. A cancelled or failed move frees its target and loses no
        data. Blocks written in this step or the previous one move last.

        Args:
            goal: `"max_id"`: no block above `number`. `"free_tail"`: no block among the last `number`. `"dense"`: as
                low as possible, within `number` ids. `"contiguous"`: no block table in more than `number` runs of
                adjacent blocks, as far as holes allow. Or a list of `(goal, number)`, most important first: a later
                goal never undoes an earlier one. With `(goal, number, slack)`, nothing moves until the goal is missed
                by more than `slack` ids or runs.
            number: see above, in blocks or runs. None with a list of goals; with `"free_tail"`, None means all free
                blocks.
            sequences: handles for `"contiguous"`, most important first, with their tables in all cache groups; None for
                all on the device.
            max_moves: maximum number of blocks to move in this step; an exchange counts as two.
            max_bytes: maximum bytes to write in this step; None for no limit.
            block_bytes: bytes of a block in all layers; required with `max_bytes`.
            cached: how to treat cached blocks that no sequence uses. `"move"`: they move like others and keep their
                place in the order of eviction. `"drop"`: they count as holes; those in the way are evicted.
                `"exchange"`: as `"drop"`, but their contents move to a free block if one is out of the way; they are
                found again once the ticket completes, and count as just used.
        Returns:
            `DefragReport`.
        Raises:
            InvalidArgumentError: the name of a goal or `cached` is unknown, a number is missing or out of range, or
                `max_bytes` is given without `block_bytes`.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is not on the device.
        """
    def resize(self, blocks: int) -> ResizeProgress:
        """Resize the device pool while sequences run.

        Growing takes effect at once. Shrinking takes effect at once for admission, watermark and `max_pinned`. Blocks
        beyond the new end are no longer allocated, and cached blocks there are dropped. Blocks in use there remain
        until they are freed or moved and their leases end. A later call replaces an unfinished one.

        Args:
            blocks: the new number of device blocks.
        Returns:
            `ResizeProgress`, the current state.
        Raises:
            InvalidArgumentError: too many blocks; or too few for the null block, pinned blocks, the watermark and one
                free block.
        """
    def progress(self) -> ResizeProgress:
        """Return how much is still in use beyond the end of the device pool: `ResizeProgress`."""
    def fragmentation(self) -> Fragmentation:
        """Measure how fragmented the device pool is. Takes time in proportion to the pool and the block tables.

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
        device_blocks: number of blocks in device memory.
        host_blocks: number of blocks in host memory.
        external_blocks: number of slots in the external store.
        watermark: fraction of the device blocks that admission keeps free, 0 to below 1.
        reuse_order: which free block is taken next. `"lowest"`: the lowest id, which keeps the pool dense. `"fifo"`:
            unused ids, then the block that was freed first. `"lru"`: unused ids, then the least recently used block.
        groups: cache groups of a hybrid model, a list of `CacheGroup`. Each sequence has a block table in each group;
            all groups share the pools. None: one group with full attention.
        prefix_caching: whether prompts share the blocks of earlier prompts with the same beginning; True, False or a
            `PrefixCaching` with options.
        max_open_tickets: with more open tickets than this, `take_decision` warns: a `complete` is probably missing.
    Raises:
        InvalidArgumentError: a size or fraction is out of range, or an option's name is unknown.

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
        """Pins: cached blocks kept for an external reader, such as a connector."""
    @property
    def defrag(self) -> Defrag:
        """Defragments and resizes the device pool."""
    def pool(self, tier: _Tier = "device") -> Pool:
        """Return the pool of one tier: its size and free blocks.

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
        """Return whether a new sequence can be admitted while keeping the watermark free, without taking blocks.

        The whole prompt counts, even if `chunk_tokens` adds it step by step.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or a token count, an int, which
                finds no cached blocks.
            salt: separates tenants, bytes; see `allocate`.
            lora_id: adapter of the prompt; 0 for none.
            lookahead: number of slots beyond the prompt.
            encoder_tokens: tokens of its encoder, if there is a group with cross attention.
            chunk_tokens: maximum tokens added at a time; a sliding window then needs fewer blocks at once.
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
        extras: _Extras | _Each[_Extras] | None = None,
        chunk_tokens: int | None = None,
        encoder_tokens: _Counts | None = None,
        preempted: bool = False,
    ) -> Sequence:
        """Open sequences, all or none. Each positional argument is one sequence.

        `allocate([40, 40])` opens one sequence, whose prompt has two token ids. `allocate(40, 40)` opens two sequences
        of 40 tokens.

        With prefix caching, a prompt shares the longest cached prefix; its last token is always computed. This step's
        decision loads a prefix that is only on the host (`swap_in`); the step that computes the rest must run after it.

        Args:
            prompts: token ids of each sequence, uint32 `[tokens]` or a list of ints; or a `HashedPrompt`; or a token
                count, an int. Token id 4294967295 is reserved.
            counts: instead of prompts, the number of tokens of each sequence, uint32 `[n]`.
            salt: separates tenants: a prompt shares blocks only with prompts of the same salt. Bytes or None for all
                prompts, or a list with one for each. `b""` is a salt, too.
            lora_id: adapter of the prompts, 0 for none; one int, or one for each prompt.
            extras: other inputs that determine what the model computes, such as images: a list of `(start, length,
                digest)` with the position of the first token, the number of tokens and bytes. Prompts share a block
                only if the extras of its tokens and of all before them are equal. Those of tokens that `append` adds
                count too: the sequence and its forks keep them. One list for all prompts, or a list with one for each.
            chunk_tokens: maximum tokens beyond the cached ones to take blocks for; `next_chunk` and `append` add the
                rest. None: all at once.
            encoder_tokens: tokens of each sequence's encoder, if there is a group with cross attention.
            preempted: whether the prompts were admitted before and lost their blocks, for instance by a preemption.
                `ManagerStats` counts the hits of first admissions only.
        Returns:
            One `Sequence` for one prompt, a tuple of them for several, uint64 `[n]` for `counts`.
        Raises:
            OutOfBlocksError: the device has too few free blocks for all of them.
            InvalidArgumentError: a token id or an extra is out of range, counts and prompts are mixed, or the number of
                salts, adapters, lists of extras or encoder lengths is wrong.
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
        extras: _Extras | _Each[_Extras] | None = None,
        chunk_tokens: int | None = None,
        encoder_tokens: _Counts | None = None,
        preempted: bool = False,
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
        """Open sequences that share the blocks of another. A write to a shared block copies it first.

        If this step writes to shared blocks, it must do so even if `sequence` is freed before the step runs.

        Args:
            sequence: handle.
            count: number of sequences to open; None opens one.
            shared_tokens: share only this many tokens, a multiple of the block size; the new sequence gets its own
                blocks for the rest. Requires `num_tokens`.
            num_tokens: number of tokens of the new sequence.
        Returns:
            `Sequence`, or uint64 `[count]`.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the sequence has lost bytes; or, with `shared_tokens`, it is not on the device, is still
                loading, or this step has not yet written the recurrent state that the new tokens need.
            InvalidArgumentError: `shared_tokens` is not a multiple of the block size, or exceeds either sequence's
                length.
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
            InvalidArgumentError: a handle is repeated.
        """
    def free_all(self) -> None:
        """Free all sequences, for instance to start again after an exception whose effect is unknown."""
    def can_append(self, sequences: _Handles, num_tokens: _Counts | None = None, *, lookahead: int = 0) -> Fit:
        """Return whether `append` would find enough blocks: new ones, and one for each copy-on-write.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            num_tokens: number of tokens for each sequence, one int or uint32 `[n]`.
            lookahead: number of slots beyond those tokens that each sequence also gets blocks for.
        Returns:
            `Fit`, true if there are enough blocks.
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
            sequences: handles, uint64 `[n]` without repeats, a list, or one.
            num_tokens: number of tokens for each sequence, one int or uint32 `[n]`; 1 by default.
            token_ids: ids of those tokens, uint32 `[tokens]`, sequence by sequence, for the prefix cache. If they are
                not known yet, omit them and pass them to `prefix.note_tokens` later; blocks after tokens without ids
                are not published.
            lookahead: number of slots beyond those tokens that each sequence also gets blocks for, for draft tokens.
            block_tables: int32 `[n or more, max_blocks]`, C-contiguous, that you keep from call to call: row i is
                sequence i. Only the entries that changed since the sequence's last such call are written. If you move a
                sequence to another row or array, copy its row or write it with `block_tables`. With several groups, the
                rows of each group follow those of the previous one, `n` each.
            out: int64 array to write the slots to, C-contiguous; must not share memory with `block_tables`.
        Returns:
            Slots, `block * block_size + offset`, int64 `[tokens]`; with several groups `[groups, tokens]`, without
            groups with cross attention.
        Raises:
            OutOfBlocksError: the device has too few free blocks for the whole batch.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes.
            InvalidArgumentError: a handle is repeated, or an array has the wrong shape or dtype or is read-only.
        """
    def next_chunk(self, sequence: _Handle, budget: int) -> int:
        """Return how many tokens of a sequence's prompt to append next.

        With a recurrent group and prefix caching, chunks end at the end of a block if possible, since only the states
        there are cached.

        Args:
            sequence: handle of a sequence that was allocated with `chunk_tokens`.
            budget: maximum number of tokens.
        Returns:
            Number of tokens, at most `budget`; 0 once the whole prompt has been appended.
        Raises:
            UnknownSequenceError: there is no such sequence.
        """
    def mark_computed(self, sequences: _Handles, num_computed: _Counts | None = None) -> None:
        """Publish the full blocks of sequences whose tokens the model has computed.

        Block tables may change: a block is replaced by an existing duplicate, and blocks outside a window are freed.

        Args:
            sequences: handles, uint64 `[n]` without repeats, a list, or one.
            num_computed: how many of each sequence's first tokens are computed, uint32 `[n]`; all by default.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a sequence has fewer tokens, or `num_computed` does not have one entry per sequence.
            SequenceStateError: a sequence has tokens that this step has not written yet.
        """
    def truncate(self, sequence: _Handle, num_tokens: int) -> None:
        """Truncate a sequence to its first tokens, for instance after draft tokens were rejected. Blocks without any of
        these tokens are freed, and so are those of an earlier lookahead.

        Args:
            sequence: handle.
            num_tokens: number of tokens to keep.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the sequence has lost bytes, or tokens that this step has not written yet.
            InvalidArgumentError: the sequence is shorter, or has a recurrent state, which cannot be undone.
        """
    def can_swap_out(self, sequences: _Handles, to: Literal["host", "external"] = "host") -> Fit:
        """Return whether `swap_out` can move the sequences: they are not moving already, and the tier has room.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"host"` or `"external"`.
        Returns:
            `Fit`, true if they can move now.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a handle is repeated, or `to` is another tier.
        """
    def swap_out(self, sequences: _Handles, to: Literal["host", "external"] = "host") -> None:
        """Move sequences away from the device in this step's decision: from the device to the host, or from either to
        the external tier. A block that several of them share moves once.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"host"` or `"external"`.
        Raises:
            OutOfBlocksError: the tier has too few free blocks for all of them.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is in another tier, moving, written in this step, or has lost bytes.
            InvalidArgumentError: a handle is repeated, or `to` is another tier.
        """
    def can_swap_in(self, sequences: _Handles, to: Literal["device", "host"] = "device", *, lookahead: int = 0) -> Fit:
        """Return whether `swap_in` can move the sequences. On the device, there must also be room for one more token
        each, with the watermark still free.

        Args:
            sequences: handles, all of one tier; uint64 `[n]`, a list, or one.
            to: `"device"` or `"host"`.
            lookahead: number of slots beyond that token.
        Returns:
            `Fit`, true if they can move now.
        Raises:
            UnknownSequenceError: there is no such sequence.
            InvalidArgumentError: a handle is repeated, or `to` is another tier.
        """
    def swap_in(self, sequences: _Handles, to: Literal["device", "host"] = "device") -> None:
        """Move sequences back towards the device in this step's decision: from the external tier to the host, or from
        either to the device.

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
                `block_table` and `block_tables` reject the sequences that it loads. If you have already appended to
                such a sequence in this step, or requested its block table, the step computes with it:
                `decision.prefetch` is then False, and the step waits for all its loads.
        Returns:
            `StepDecision`.
        Raises:
            StepOrderError: this is a `KVCache`'s manager: call `KVCache.step`, or `step` of a `Scheduler(cache)`. The
                cache's manager also refuses `complete`, `fail` and `lose`.
        Warns:
            RuntimeWarning: once, if more than `max_open_tickets` tickets are open; it names the oldest.
        """
    def complete(self, ticket: int, lost: Iterable[Pairs] = ()) -> NDArray[np.uint64]:
        """End a ticket whose transfers have ended.

        Until then its blocks stay leased, however long it takes. If the process or device that ran it has died and can
        no longer write, pass all its pairs as `lost`, or call `fail`. If it only hangs, `lose` marks its sequences and
        keeps the blocks leased.

        Args:
            ticket: `decision.ticket`.
            lost: the `Pairs` that did not land.
        Returns:
            Sequences that lost bytes, uint64 `[n]`. They can only be freed.
        Raises:
            UnknownTicketError: the ticket was never issued, or has ended.
            MappingError: the ticket does not write such a block.
        """
    def fail(self, ticket: int) -> NDArray[np.uint64]:
        """End a ticket whose transfers did not land at all, for instance because they were never run.

        Args:
            ticket: `decision.ticket`.
        Returns:
            Sequences that lost bytes, uint64 `[n]`. They can only be freed.
        Raises:
            UnknownTicketError: the ticket was never issued, or has ended.
        """
    def lose(self, ticket: int, lost: Iterable[Pairs] | None = None) -> NDArray[np.uint64]:
        """Mark the sequences that have lost bytes while the ticket's other transfers still run.

        Args:
            ticket: `decision.ticket`. It stays open; pass the same pairs to `complete` when it ends.
            lost: the `Pairs` that are known not to land; None means all of the ticket's.
        Returns:
            Sequences that lost bytes, uint64 `[n]`. They can only be freed.
        Raises:
            UnknownTicketError: the ticket was never issued, or has ended.
            MappingError: the ticket does not write such a block.
        """
    def block_table(self, sequence: _Handle, group: int = 0) -> NDArray[np.int32]:
        """Return the blocks of a sequence in its current tier.

        Args:
            sequence: handle.
            group: cache group.
        Returns:
            Block ids, int32 `[blocks]`; 0 for blocks outside a window.
        Raises:
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: the blocks are being prefetched, see `take_decision`.
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
            InvalidArgumentError: `out` has the wrong number of rows or too few columns, or there is no such group.
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
        """Return the slots of a range of tokens of sequences on the device, one sequence after the other.

        Args:
            sequences: handles, uint64 `[n]`, a list, or one.
            first: first token, for all or one per sequence.
            last: end of the range, exclusive, for all or one per sequence.
            out: int64 array `[sum of last - first]` to write to, C-contiguous.
            group: cache group.
        Returns:
            Slots, `block * block_size + offset`, int64 `[sum of last - first]`, or `out`.
        Raises:
            UnknownSequenceError, SequenceStateError: as `block_tables`.
            InvalidArgumentError: a sequence has fewer tokens, `out` has the wrong length, or there is no such group.
        """
    def num_tokens(self, sequence: _Handle, group: int = 0) -> int:
        """Return the number of tokens in a sequence.

        Args:
            sequence: handle.
            group: cache group; for cross attention, the encoder's tokens are counted.
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
    @property
    def num_open_tickets(self) -> int:
        """Number of tickets that have not ended."""
    def stats(self) -> ManagerStats:
        """Return all counters: `ManagerStats`."""
    def check(self) -> None:
        """Recount the whole state and compare. For tests and debugging; it takes time in proportion to the pools.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """

@final
class StepOwner:
    """Ends a manager's steps; the manager's own `take_decision`, `complete`, `fail` and `lose` then raise.

    Args:
        manager: a manager without an owner, for good.
        instead: what others must call, for the error.

    Raises:
        StepOrderError: the manager has an owner, or a ticket is open.
    """

    def __new__(cls, manager: BlockManager, *, instead: str) -> Self: ...
    def take_decision(self, *, prefetch: bool = False) -> StepDecision:
        """See `BlockManager.take_decision`."""
    def complete(self, ticket: int, lost: Iterable[Pairs] = ()) -> NDArray[np.uint64]:
        """See `BlockManager.complete`."""
    def fail(self, ticket: int) -> NDArray[np.uint64]:
        """See `BlockManager.fail`."""
    def lose(self, ticket: int, lost: Iterable[Pairs] | None = None) -> NDArray[np.uint64]:
        """See `BlockManager.lose`."""

@final
class EventBatch:
    """A batch of prefix cache events, one array entry per event, oldest first.

    Event `i` has the number `first + i`. Numbers continue from batch to batch; `dropped` events before `first` were
    lost for lack of room. Replaying `stored`, `removed` and `cleared` by tier and key yields exactly the cache's
    content.

    - `kinds`: uint8 `[n]`, indexes `KINDS`; `tiers`: uint8 `[n]`, indexes `TIERS`; `blocks`: int32 `[n]`, -1 if
      cleared.
    - `keys`: uint8 `[n, 32]`, the exported key as `export_keys` returns it; `groups`: uint8 `[n]`, the block's cache
      group, since blocks of several groups have the same key.
    - Only for `stored`: `parents`, uint8 `[n, 32]`, key of the preceding block, zeros for a sequence's first; `tokens`,
      uint32 `[n]`; `lora_ids`, uint64 `[n]`.
    - Only for `removed`: `reasons`, uint8 `[n]`, indexes `REASONS`; `remaining`, uint8 `[n]`, number of copies in other
      tiers, including those in transfer. They cannot be found until a swapped sequence returns, with a new `stored`.

    Attributes:
        KINDS: names of the numbers in `kinds`.
        TIERS: names of the numbers in `tiers`.
        REASONS: names of the numbers in `reasons`; the first, empty, is for events other than `removed`.

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
        """Number of events before `first` that were lost for lack of room."""
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
        """For `stored`, the key of the preceding block, uint8 `[n, 32]`; zeros for the first block of a sequence."""
    @property
    def tokens(self) -> NDArray[np.uint32]:
        """For `stored`, number of tokens in the block, uint32 `[n]`."""
    @property
    def lora_ids(self) -> NDArray[np.uint64]:
        """For `stored`, the adapter, uint64 `[n]`."""
    @property
    def reasons(self) -> NDArray[np.uint8]:
        """For `removed`, index of `REASONS`, uint8 `[n]`."""
    @property
    def remaining(self) -> NDArray[np.uint8]:
        """For `removed`, number of copies left in other tiers, uint8 `[n]`."""
    @property
    def groups(self) -> NDArray[np.uint8]:
        """Cache group of the block, uint8 `[n]`, since blocks of several groups have the same key."""
    def __len__(self) -> int: ...

@final
class Completion:
    """The results of one batch."""

    def __new__(
        cls, ticket: int, ok: NDArray[np.bool_], rows: NDArray[np.uint8], reasons: _Each[str]
    ) -> Completion: ...
    def __getnewargs__(self) -> tuple[int, NDArray[np.bool_], NDArray[np.uint8], tuple[str, ...]]: ...
    @property
    def ticket(self) -> int:
        """The ticket that was collected."""
    @property
    def ok(self) -> NDArray[np.bool_]:
        """Whether each block was read or written, bool `[n]`."""
    @property
    def rows(self) -> NDArray[np.uint8]:
        """The blocks that were read, uint8 `[n, bytes_per_block]`; the content of misses is unspecified. For writes,
        `[0, bytes_per_block]`.
        """
    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each block is a miss, one string per block; empty if it is not."""

@final
class RedisClient:
    """Connections to a Redis or Valkey server or cluster, one for each running call. Calls block without the
    interpreter's lock. In a cluster, a node that does not answer affects only its own values. Calls skip it until it
    answers a probe, which a separate thread sends every second.

    Args:
        host: host name of the server, or with `transport="unix"` the path of its socket.
        port: port of the server.
        transport: `"tcp"`, `"tls"` or `"unix"`.
        cluster: whether the server is a node of a cluster.
        username, password: None for none.
        db: database number.
        ca, cert, key: PEM files for `"tls"`: the CA of the server's certificate; client certificate and key.
        connect_timeout: timeout in seconds for connecting.
        timeout: maximum seconds without an answer from the server.
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
        """Store values, separately or in groups.

        The values of a group and its command are one transaction at the server, and the command runs last. In a
        cluster, all keys of a group must be in the hash slot of its first name.

        Args:
            names: keys of the values, bytes each.
            rows: uint8 `[n, width]`.
            ttl_ms: milliseconds after which the server drops the values.
            lengths: number of bytes of each row to store.
            sizes: number of values in each group, in order; they add up to n. None for no groups.
            last: the command of each group, words of bytes.
        Returns:
            Whether the server stored each value, bool `[n]`; the answers to `last`; and None, or why nodes of a cluster
            do not answer.
        Raises:
            StoreError: the server, or every node of the cluster, does not answer.
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
        """Read values into rows. A value of another length leaves its row unchanged; with `varies`, a shorter one is
        read and padded with zeros.

        Args:
            names: keys of the values, bytes each.
            out: uint8 `[n, width]`, C-contiguous.
            varies: whether values may be shorter than rows.
            head_bytes: number of first bytes of each value to return separately instead of in `out`, 0 to 4096.
            first: commands, as for `run`, to run before the reads in the same round trip.
        Returns:
            Whether each value was found, bool `[n]`; the first bytes of each, uint8 `[n, head_bytes]`, zeros if absent;
            the answers to `first`; and None, or why nodes of a cluster do not answer.
        Raises:
            StoreError: the server, or every node of the cluster, does not answer; or one refuses.
        """
    def run(self, commands: _Each[_Each[bytes]]) -> tuple[list[Any], str | None]:
        """Run commands in one round trip; in a cluster, one to each node.

        Args:
            commands: words of bytes each, at least one. In a cluster, the second word is the key, or the fourth of
                `EVAL`; the third of `CLUSTER` is the slot.
        Returns:
            The answer to each command: an int, bytes, None or a list; or a StoreError if the server refused it; or None
            if the node of a cluster does not answer. And None, or why nodes do not answer.
        Raises:
            StoreError: the server, or every node of the cluster, does not answer.
        """
    def close(self) -> None:
        """Close the idle connections."""

def check_slab(path: str | PathLike[str], *, repair: bool = False) -> SlabReport:
    """Read every block of a slab that no store has open.

    Args:
        path: the file, or the directory of a prefix store.
        repair: wipe damaged slots.
    Raises:
        StoreError: the file cannot be read or written, is not a slab, or is in use.
    """

def checksum_rows(
    rows: NDArray[np.uint8], key: bytes | None = None, heads: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Return the XXH3-128 of each row, little-endian, uint8 `[n, 16]`; with a key, the first 16 bytes of the keyed
    BLAKE3.

    Args:
        rows: uint8 `[n, width]`.
        key: 32 bytes, known only to trusted writers: nobody else can compute these checksums.
        heads: bytes in front of each row, uint8 `[n, m]`; the checksum covers both.
    Raises:
        InvalidArgumentError: wrong dtype or shape, or the key does not have 32 bytes.
    """

def inspect_slab(path: str | PathLike[str]) -> SlabReport:
    """Read the headers of a slab, even while a store has it open.

    Args:
        path: the file, or the directory of a prefix store.
    Raises:
        StoreError: the file cannot be read, or is not a slab.
    """

@final
class SlabStore:
    """Blocks in one preallocated file; `blockyard.stores.open_store` opens it by URL. With `use="swap"`, blocks are
    addressed by slot and die with the process; with `use="prefix"`, they are found by key and outlive it.
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
        drop: bool = False,
    ) -> SlabStore: ...

    keeps_quotas: ClassVar[bool]
    @property
    def num_slots(self) -> int:
        """Number of blocks that the store can hold; in swap space the slots, numbered from 0."""
    @property
    def uses(self) -> tuple[str]:
        """What the store can be used for, see `ExternalStore.uses`."""
    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, as the caller sees it."""
    @property
    def max_blocks_in_flight(self) -> int:
        """Maximum number of blocks in flight and in uncollected results."""
    @property
    def path(self) -> Path:
        """The slab's file."""
    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about features that the system refused."""
    def slot_offset(self, slot: int) -> int:
        """Return the offset of a slot's header in the file, in bytes."""
    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks: `slots` int64 `[n]`, `rows` uint8 `[n, bytes_per_block]`. Returns a ticket. Rows that
        are not whole pages are copied first. See `ExternalStore.submit_write`.
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
        """Return whether each key has a block, bool `[n]`, without reading it. See `ExternalStore.contains`."""
    def lacks(self, keys: NDArray[np.uint8] | _Each[bytes]) -> NDArray[np.bool_]:
        """Return whether a read of each key would be a miss, bool `[n]`. See `ExternalStore.lacks`."""
    def forget(self, revision: str | None = None) -> None:
        """Forget every key, also for later processes; waits for the disk. See `ExternalStore.forget`."""
    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of one tenant and drop excess ones; waits for the disk. The quota ends when this store is
        closed; later stores still count these blocks. See `ExternalStore.set_quota`.
        """
    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return how many blocks count towards a tenant's quota, and the quota; None without a quota. See
        `ExternalStore.quota`.
        """
    def event_fd(self) -> int:
        """Return a file descriptor that is readable after a ticket has ended, until the next `poll`. See
        `ExternalStore.event_fd`.
        """
    def poll(self) -> list[int]:
        """Return uncollected tickets that finished or expired since the last call. Never waits."""
    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; waits until its deadline, or for `timeout` seconds. See `ExternalStore.wait`."""
    def stats(self) -> StoreStats:
        """Return the counters since the store was opened."""
    def close(self, timeout: float = 5.0) -> bool:
        """Abandon batches in flight, and delete the file of swap space. Returns False if the disk did not answer within
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
    """Return the in-process keys of the full blocks of `tokens`, 32 bytes each.

    Args:
        tokens: token ids, uint32 `[n]`; tokens that do not fill a block are ignored.
        block_size: tokens in a block.
        parent: key of the preceding block.
        extra: other inputs that determine the bytes of each of these blocks.
    """

def export_keys(
    tokens: NDArray[np.uint32] | _Each[int],
    *,
    block_size: int,
    salt: bytes | None = None,
    lora_id: int = 0,
    cache_group: int = 0,
    extras: _Extras = ...,
) -> list[bytes]:
    """Return the keys of a prompt's full blocks for other processes: SHA-256 digests, 32 bytes each.

    The hashed stream starts with a 64-byte header: `BLKYKEYS`, then format 1, block size, cache group and 0 as
    little-endian u32, the adapter as u64, and 32 bytes of salt (its SHA-256, or zeros for none). Each block's extras
    follow, sorted, and its tokens as little-endian u32; together they are padded to 64 bytes with 0xFF. The extras are
    those that touch the block: 0xFFFFFFFF, 1, the number of bytes that follow, `start` and `length` as little-endian
    u32, and `digest`, padded to 4 bytes with 0xFF. A block's key is the digest of the stream up to its end.

    Args:
        tokens: token ids, uint32 `[n]` or a list of ints.
        block_size: tokens in a block.
        salt: salt of the tenant, bytes.
        lora_id: adapter; 0 for none.
        cache_group: number of the cache group.
        extras: `(start, length, digest)` of each other input, such as an image; see `BlockManager.allocate`.
    Returns:
        A key for each full block, bytes.
    Raises:
        InvalidArgumentError: a token id, an extra or `block_size` is out of range.
    """

def expand_span(blocks: NDArray[np.int64], out: NDArray[np.int64], *, per_block: int, first: int, last: int) -> None:
    """Write the ids of the small blocks in a range of large ones."""

_Rule: TypeAlias = Literal["swap", "copy", "move", "exchange"]

@final
class Mapping:
    """Pairs of block ids `(from, to)`, checked and ordered by destination.

    `Mapping([[3, 0], [5, 1]], src_blocks=8, dst_blocks=4, rule="swap")`

    Args:
        pairs: int64 `[n, 2]`, or other ints, as for `Pairs`.
        src_blocks: number of blocks that can be read; ids are 0-based.
        dst_blocks: number of blocks that can be written.
        rule: `"swap"` copies from one cache to another: no destination repeats. `"copy"` copies within a cache:
            also, no block is both read and written. `"move"` moves within a cache, as if all blocks were read before
            any is written: chains and rings are allowed. `"exchange"` swaps the blocks of each pair: no block is named
            twice, and `(-1, -1)` is padding.
    Raises:
        MappingError: the pairs are not ints `[n, 2]`, an id is out of range, or the pairs break the rule.
        InvalidArgumentError: there is no such rule.
    """

    def __new__(cls, pairs: _IdPairs, *, src_blocks: int, dst_blocks: int, rule: _Rule) -> Mapping: ...
    def __len__(self) -> int: ...
    @property
    def rule(self) -> _Rule:
        """Its rule: `"swap"`, `"copy"`, `"move"` or `"exchange"`."""
    @property
    def pairs(self) -> NDArray[np.int64]:
        """The pairs, int64 `[n, 2]`, sorted by destination; those of an exchange in the given order.

        Padding and moves of a block onto itself are omitted.
        """
    @property
    def reach(self) -> tuple[int, int]:
        """The number of blocks needed to read from and to write to: the highest id plus one, 0 without pairs."""
    def steps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The mapping as single steps, int64 `[n, 2]`, and the start of each group of steps, int64 `[groups + 1]`.

        Steps of a group run in sequence. A step to -1 sets a block aside; a step from -1 writes it to its destination.
        """
    def split(self, most: int) -> list[Mapping]:
        """Split into mappings of at most `most` pairs, to run one after the other.

        Moves that depend on one another stay together.
        """

@final
class BoundViews:
    """Views of caches in host memory, checked once, that mappings run over.

    It keeps the memory of all arrays alive. Later changes to an array (its shape, read-only) have no effect here.

    Args:
        src: arrays to read, uint8 `[blocks, bytes]`, each row contiguous, rows not overlapping.
        dst: arrays to write, as many and of the same widths. No two arrays may overlap; their rows may alternate within
            one stride. None: `src` is changed in place, under the same conditions.
    Raises:
        InvalidArgumentError: an array has another form, is read-only or shares memory with another, or the two lists do
            not match.
    """

    def __new__(cls, src: _Each[NDArray[np.uint8]], dst: _Each[NDArray[np.uint8]] | None = None) -> BoundViews: ...
    def run(self, mapping: Mapping, *, num_threads: int) -> None:
        """Run a mapping in each view.

        Args:
            mapping: with the rule `"swap"` or `"copy"` between two lists; with any rule but `"swap"` within one.
            num_threads: maximum number of threads for a large call.
        Raises:
            MappingError: the mapping names blocks that the views do not have, or has another rule; nothing was copied.
            OutOfMemoryError: not enough memory for rings of moves; nothing was moved.
        """

_Goal: TypeAlias = Literal["max_id", "free_tail", "dense"]
_Wanted: TypeAlias = tuple[_Goal | Literal["contiguous"], int] | tuple[_Goal | Literal["contiguous"], int, int]
_BlockIds: TypeAlias = NDArray[np.int64] | NDArray[np.int32] | _Each[int]

@final
class MovePlan:
    """Planned moves towards goals. Nothing has moved yet, and no block appears twice.

    Attributes:
        pairs: all pairs of block ids `(from, to)`, int64 `[n, 2]`.
        move: the pairs whose destination is empty.
        exchange: the pairs whose destination holds bytes to keep: the two blocks change places.
        left: number of further moves that the goals need, not counting `contiguous`.
        stuck: number of live blocks in the way of the goals for which there is no hole.
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
        """Number of blocks in the way that the budget leaves for later."""
    @property
    def stuck(self) -> int:
        """Number of blocks in the way that have nowhere to go."""
    def __len__(self) -> int: ...

@final
class BlockObserver:
    """Tracks where another allocator's blocks are, and plans moves to defragment them.

    An *id* is the allocator's name for a block; a *block* is where the id's bytes are. Moves permute them. Block 0 is
    the null block. Methods that take ids are fastest with an int64 array `[n]`.

    Args:
        num_blocks: number of blocks in the pool, 1 to 2147483647; None learns ids as they are used.

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
        """Upper bound of ids, exclusive."""

    def set_limit(self, num_blocks: int) -> None:
        """Set the number of blocks.

        Raises:
            InvalidArgumentError: higher ids are known already.
        """

    def use_ids(self, ids: _BlockIds, *, fresh: bool = False) -> None:
        """Add a reference to the blocks of ids.

        Args:
            ids: ids, with repeats; if fresh, grouped by sequence, long sequences first.
            fresh: whether the ids have no content; unused ones are then bound to the lowest empty blocks.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def release_ids(self, ids: _BlockIds, *, fresh: bool = False) -> None:
        """Release a reference to the blocks of ids.

        Args:
            ids: ids, with repeats.
            fresh: whether blocks without references become empty.

        Raises:
            InvalidArgumentError: a block has too few references; nothing was changed.
        """

    def forget_ids(self, ids: _BlockIds) -> None:
        """Mark ids that are not in use as empty.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def lease(self, ids: _BlockIds) -> int:
        """Keep the blocks of ids and their bytes in place until `end_lease`.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def end_lease(self, lease: int) -> None:
        """End a lease.

        Raises:
            InvalidArgumentError: there is no such lease.
        """

    def resolve(
        self,
        ids: NDArray[np.int64] | NDArray[np.int32],
        *,
        out: NDArray[np.int64] | NDArray[np.int32] | None = None,
        pass_negative: bool = False,
    ) -> NDArray[np.int64] | NDArray[np.int32]:
        """Return the blocks of ids.

        Args:
            ids: array of any shape.
            out: array of the same shape and dtype, any layout; may be `ids`.
            pass_negative: whether to return negative ids unchanged.

        Returns:
            `out`, or a new array of the shape and dtype of `ids`.

        Raises:
            InvalidArgumentError: an id is out of range, or an array's shape or dtype is wrong; `out` was not written.
        """

    def resolve_rows(self, rows: _Each[_Each[int]], *, pass_negative: bool = False) -> list[list[int]]:
        """Return the blocks of ids, for lists of ints.

        Raises:
            InvalidArgumentError: an id is out of range.
        """

    def unresolve(self, block: int) -> int:
        """Return the id of a block.

        Raises:
            InvalidArgumentError: the block is out of range.
        """

    def used(self) -> NDArray[np.int64]:
        """Return the referenced blocks in ascending order, each with its number of references, int64 `[n, 2]`."""

    def holes(self) -> NDArray[np.int64]:
        """Return the blocks without references or leases in ascending order, int64 `[n]`."""

    @property
    def gap(self) -> int:
        """By how many blocks the highest block in use could be lower."""

    def plan(self, goal: _Goal, number: int, *, slack: int = 0, moves: int | None = None) -> MovePlan:
        """Plan a step's moves; nothing changes until `commit`.

        Args:
            goal: see `Defrag.run`.
            number: see `Defrag.run`.
            slack: the plan is empty while the goal is missed by at most this many ids or runs; once begun, moves
                continue until the goal is met.
            moves: maximum number of moves in this step.

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
        """Plan a step for several goals, most important first; nothing changes until `commit`.

        A later goal never undoes an earlier one: it moves no block to where an earlier goal wants none, and no block of
        the sequences of `"contiguous"`. If two goals contradict each other, the later one is missed.

        Args:
            goals: `(name, number)` or `(name, number, slack)`, as in `plan`; also `"contiguous"`: no sequence has more
                than `number` runs, with slack in runs. While the goals stay the same, each continues where the previous
                step stopped.
            sequences: the sequences for `"contiguous"`: ids of each, in order, most important first.
            hot: ids of running sequences: their blocks move last, and a sequence whose last id is hot is made
                contiguous last.
            moves: maximum number of pairs in this step.
            num_bytes: maximum bytes to write; an exchange writes both of its blocks.
            bytes_per_block: bytes of a block in all layers; required with `num_bytes`.

        Raises:
            InvalidArgumentError: a goal is unknown or invalid, or an id is out of range.
        """

    def fragmentation(self, sequences: _Each[_BlockIds] = ...) -> Fragmentation:
        """Measure how fragmented the blocks in use are, including leased ones and the null block. Scans all blocks.

        Args:
            sequences: ids of each sequence, in order, for `tables` and `runs`; shared blocks count once.
        Returns:
            `Fragmentation`.
        Raises:
            InvalidArgumentError: an id is out of range.
        """

    def commit(self, plan: MovePlan) -> None:
        """Apply a plan whose bytes have moved: the ids of each pair change places.

        Raises:
            InvalidArgumentError: the plan no longer fits the current state; nothing was changed.
        """

    def check(self) -> None:
        """Recount the whole state and compare.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """

_ByteKeys: TypeAlias = Iterable[bytes]

@final
class PreparedStore:
    """The result of `OffloadManager.prepare_store`."""

    @property
    def keys(self) -> list[bytes]:
        """The keys to store, in the order given."""
    @property
    def chunks(self) -> NDArray[np.int32]:
        """The chunk of each, int32 `[n]`."""
    @property
    def evicted(self) -> list[bytes]:
        """The keys that were evicted for them."""

@final
class OffloadManager:
    """The chunks of a host cache, and the keys whose bytes they hold, for an engine's offload manager.

    A key is any bytes object. It is pending from `prepare_store` to `complete_store`, then a hit until it is evicted or
    forgotten. Loads keep their chunks from being evicted. A key forgotten during its transfers is a miss at once; its
    chunk is reused only after they have ended.

    Args:
        num_chunks: number of chunks in the host cache.
        eviction: which chunk to evict first, as for `PrefixCaching`.
    Raises:
        InvalidArgumentError: `num_chunks` is out of range, or the name of `eviction` is unknown.
        OutOfMemoryError: not enough memory to track the chunks.

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
        """Return the state of each key: `"hit"`, `"pending"` while it is being stored, or `"miss"`.

        Args:
            keys: bytes, in any collection.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def prepare_store(self, keys: _ByteKeys, *, deadline: int | None = None) -> PreparedStore | None:
        """Assign chunks to the keys without one. The other keys count as just used, and are not evicted by this call.

        Args:
            keys: bytes, in any collection. A key that was forgotten during its store is skipped until that store ends.
            deadline: time from which `expire` forgets the keys unless their stores have ended; None for never.
        Returns:
            `PreparedStore`; or None, without any change, if too few chunks are empty or can be evicted.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def complete_store(self, keys: _ByteKeys, success: bool = True) -> list[bytes]:
        """End the stores of keys. Keys that are not being stored are ignored.

        Args:
            keys: bytes, in any collection.
            success: whether the bytes are in the chunks. If not, the keys become misses and their chunks are freed.
        Returns:
            The keys that have become hits.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def prepare_load(self, keys: _ByteKeys) -> NDArray[np.int32]:
        """Start to load keys: their chunks are not evicted until `complete_load`.

        Args:
            keys: bytes, each a hit, in any collection.
        Returns:
            The chunk of each key, int32 `[n]`.
        Raises:
            InvalidArgumentError: a key is not a hit, or not bytes; nothing was changed.
        """
    def complete_load(self, keys: _ByteKeys) -> None:
        """End one load of each key.

        Args:
            keys: bytes, in any collection.
        Raises:
            InvalidArgumentError: a key is not bytes, or is not being loaded; the loads of the keys before it have
                ended.
        """
    def touch(self, keys: _ByteKeys) -> None:
        """Mark keys as just used; misses are ignored.

        Args:
            keys: bytes, in any collection, most important first: the first key is evicted last.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def evict(self, count: int, protected: _ByteKeys | None = None) -> list[bytes] | None:
        """Evict keys that are not being loaded, in the order of the eviction policy, and free their chunks.

        Args:
            count: number of keys to evict.
            protected: keys to keep: bytes, in any collection.
        Returns:
            The evicted keys; or None, without any change, if fewer than `count` can be evicted.
        Raises:
            InvalidArgumentError: `count` is negative, or a key is not bytes.
        """
    def forget(self, keys: _ByteKeys) -> list[bytes]:
        """Forget keys whose bytes are bad or no longer needed; they become misses.

        Args:
            keys: bytes, in any collection.
        Returns:
            The keys that had chunks.
        Raises:
            InvalidArgumentError: a key is not bytes.
        """
    def expire(self, now: int) -> list[bytes]:
        """Forget the keys whose stores have passed their deadlines.

        Args:
            now: the current time, in the unit of the deadlines.
        Returns:
            The forgotten keys.
        """
    def reset(self) -> list[bytes]:
        """Forget all keys.

        Returns:
            The keys that had chunks, whether hits or pending.
        """
    @property
    def num_chunks(self) -> int:
        """Total number of chunks."""
    @property
    def num_free(self) -> int:
        """Number of chunks available to a store: empty ones, and those that can be evicted."""
    @property
    def num_stored(self) -> int:
        """Number of keys that are hits."""
    @property
    def num_storing(self) -> int:
        """Number of pending keys."""
    @property
    def num_evicted(self) -> int:
        """Number of keys evicted so far."""
    def check(self) -> None:
        """Raise InvariantError if the state contradicts itself, which is a bug in Blockyard."""
