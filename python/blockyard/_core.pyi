"""The Rust core of Blockyard.

Block ids count from 0 in each tier: `"device"`, `"host"`, `"external"`. Sequence handles are opaque uint64 numbers; one
kept past `free` is recognised. Where a call takes `sequences`, a uint64 array is quickest; a list of ints or one int
will do. A failed call changes nothing. All classes may be used from several threads; each call is atomic.
"""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

__all__ = [
    "AllocStatus",
    "BlockAllocator",
    "BlockManager",
    "BlockObserver",
    "CacheGroup",
    "Completion",
    "DefragReport",
    "EventBatch",
    "Expired",
    "FillMap",
    "Fragmentation",
    "FreeBlocks",
    "ManagerStats",
    "MovePlan",
    "NaiveAllocator",
    "Pairs",
    "PrefixCachingAllocator",
    "PrefixStats",
    "ResizeProgress",
    "SlabStore",
    "StepDecision",
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
    "chain_keys",
    "copy_rows",
    "exchange_rows",
    "expand_span",
    "export_keys",
    "move_rows",
    "v0_hash_blocks",
]

__version__: str

_Tier: TypeAlias = Literal["device", "host", "external"]
_Reuse: TypeAlias = Literal["lowest", "fifo", "lru", "lifo"]
_Handles: TypeAlias = NDArray[np.uint64] | Sequence[int] | int
_Counts: TypeAlias = NDArray[np.uint32] | Sequence[int] | int

@final
class AllocStatus:
    """Whether something fits: `OK` now, `LATER` once other sequences have left, `NEVER` even into an empty tier."""

    OK: AllocStatus
    LATER: AllocStatus
    NEVER: AllocStatus
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

_IdPairs: TypeAlias = NDArray[np.integer[Any]] | Sequence[Sequence[int]]
_Blocks: TypeAlias = NDArray[np.int32] | Sequence[int] | int

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
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int:
        """Blocks that nothing references, cached ones included."""
    @property
    def lookups(self) -> tuple[int, int] | None:
        """Keys asked for and keys found since the last reset; None without a prefix cache."""
    def refs(self, block: int) -> int: ...
    def allocate(self, count: int) -> NDArray[np.int32]: ...
    def allocate_keyed(
        self, keys: Sequence[bytes], depths: Sequence[int], *, plain: int = 0
    ) -> tuple[NDArray[np.int32], int]:
        """Takes one block for each key, the one that has it where there is one, then `plain` more.

        Args:
            keys: keys of full blocks, 32 bytes each, from `chain_keys`.
            depths: length of the prefix that each one ends; of blocks used equally long ago the longest goes first.
            plain: blocks without a key.
        Returns:
            The blocks, int32 `[keys + plain]`, and how many keys had one.
        """
    def share(self, blocks: _Blocks) -> None: ...
    def require(self, blocks: _Blocks) -> None:
        """Raises what `free` would raise, and changes nothing."""
    def free(self, blocks: _Blocks) -> None: ...
    def make_writable(self, blocks: _Blocks) -> NDArray[np.int32]:
        """Exchanges blocks that others use for new ones; where an id differs, the caller copies the bytes."""
    def publish(self, block: int, key: bytes, depth: int = 0) -> int:
        """Gives a full block its key; returns the block to use from now on, which may be another one with that key."""
    def find(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """Blocks of the longest prefix of the keys that is computed; nothing is taken."""
    def cost(self, keys: Sequence[bytes]) -> int:
        """Free blocks that taking these keys would use up."""
    def has_key(self, key: bytes) -> bool: ...
    def is_computed(self, block: int) -> bool: ...
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
    def check(self) -> None: ...

@final
class NaiveAllocator(BlockAllocator):
    """An allocator that counts references and knows nothing of tokens.

    Args:
        num_blocks: blocks of the tier.
        tier: name of the tier in errors.
        reuse: which free block goes next: `"lowest"` id, `"fifo"` (or `"lru"`), or `"lifo"`.
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
    """Free blocks in the order in which they would be given out, one by one; nothing is taken.

    Ids are read ahead in chunks, 64 first and each chunk twice the one before, so the first few cost little in a pool
    of any size. Where the pool changes meanwhile, ids read ahead are those of before the change, and the next chunk
    goes on at the same place of the order that is then in force: ids may be missed or come twice. For one moment's
    whole take `free_block_ids` or `upcoming`.
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
    """

    def __new__(cls, src: _Tier, dst: _Tier, ids: _IdPairs) -> Pairs: ...
    @property
    def src(self) -> _Tier: ...
    @property
    def dst(self) -> _Tier: ...
    @property
    def ids(self) -> NDArray[np.int64]: ...
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
    Raises:
        InvalidArgumentError: a kind has another name.
    """

    def __new__(
        cls, ticket: int, transfers: Sequence[tuple[str, Pairs]], *, after: Sequence[int] = ...
    ) -> StepDecision: ...
    @property
    def ticket(self) -> int: ...
    @property
    def after(self) -> tuple[int, ...]: ...
    @property
    def spill(self) -> tuple[Pairs, ...]: ...
    @property
    def swap_out(self) -> tuple[Pairs, ...]: ...
    @property
    def swap_in(self) -> tuple[Pairs, ...]: ...
    @property
    def fetch(self) -> tuple[Pairs, ...]: ...
    @property
    def copy(self) -> tuple[Pairs, ...]: ...
    @property
    def move(self) -> tuple[Pairs, ...]: ...
    @property
    def exchange(self) -> tuple[Pairs, ...]: ...
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

        The checksum finds damage, not a forger who makes it anew: bytes of unknown origin need a signature of yours.
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
    """What the layers of one cache group need of the tokens before."""

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
    def kind(self) -> Literal["full_attention", "sliding_window", "recurrent", "cross_attention"]: ...
    @property
    def window(self) -> int | None: ...
    def peak_blocks(
        self, num_tokens: int, *, block_size: int, lookahead: int = 0, chunk_tokens: int | None = None
    ) -> int:
        """Most blocks that a sequence holds at once in this group if at most `chunk_tokens` are put in at a time."""
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class BlockManager:
    """The books of a paged KV cache: which blocks hold whose tokens, who may run, what is to be copied or moved.

    Args:
        block_size: token slots in a block.
        device_blocks: blocks that attention kernels read.
        host_blocks: blocks in host memory.
        external_blocks: slots of the external tier.
        watermark: fraction of the device blocks that admission keeps free.
        prefix_caching: whether full device blocks stay findable by their keys after their sequences have gone.
        reuse_order: which free block is taken next. `"lowest"`: the lowest id, which keeps the pool dense. `"fifo"`:
            ids never used, then the one that came free first. `"lru"`: ids never used, then the one whose last use
            ended first. `"pages:N"`, N from 1 to 65536: the lowest id of the page of N blocks that has the fewest free
            ones; pages in use are filled before one is opened, so that whole pages can be given back.
        eviction: which cached block goes first, once none is free. `"lru"`: the least recently used. `"s3fifo"`: those
            never hit pass through a small queue, the others get second chances. `"adaptive"`: by hits and, before the
            first, by how often blocks as deep in their prompts are hit. `"priority"`: by `set_priority`. With each, a
            prompt's blocks go from its end.
        events: events of the prefix cache that wait for `take_events` at most; 0 for none at all.
        sliding_window: tokens that a query sees, itself included, in a model whose layers are all alike: blocks that
            fell out of the window are given back, and block 0 of each tier stands for them in block tables.
        groups: what the layers of a hybrid model need; every sequence has a block table in each group, all over the
            same pool. `[CacheGroup.full_attention()]` if not given.
        host_prefix_cache: whether host copies of published blocks stay findable, the least recently used first to go. A
            prompt finds them as if they were on the device; its step's decision loads them (`swap_in`), and they are
            published there once the ticket is completed. A load that fails loses its prompt and the copy's key.
        max_pinned: fraction of the device blocks that pins may hold, below 1.
        max_open_tickets: above so many open tickets `take_decision` warns, once: a `complete` may be missing. A manager
            that is restored has the default.
    Raises:
        InvalidArgumentError: a size or a fraction is out of range, a policy has another name, or events or host copies
            are asked for without prefix caching.
    """

    def __new__(
        cls,
        *,
        block_size: int,
        device_blocks: int,
        host_blocks: int = 0,
        external_blocks: int = 0,
        watermark: float = 0.01,
        prefix_caching: bool = False,
        reuse_order: str = "lowest",
        eviction: Literal["lru", "s3fifo", "adaptive", "priority"] = "lru",
        events: int = 0,
        sliding_window: int | None = None,
        groups: Sequence[CacheGroup] | None = None,
        host_prefix_cache: bool = False,
        max_pinned: float = 0.5,
        max_open_tickets: int = 1000,
    ) -> BlockManager: ...
    @property
    def block_size(self) -> int: ...
    @property
    def watermark_blocks(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    def num_blocks(self, tier: _Tier = "device") -> int:
        """Blocks of a tier."""
    def num_free(self, tier: _Tier = "device") -> int:
        """Blocks of a tier that nothing references and no transfer holds."""
    def free_block_ids(self, tier: _Tier = "device", limit: int | None = None) -> NDArray[np.int32]:
        """Free blocks that hold nothing cached, in the order in which they are given out; nothing is taken.

        Args:
            tier: whose blocks.
            limit: how many at most; all if not given.
        Returns:
            Block ids, int32 `[n]`.
        """
    def iter_free_blocks(self, tier: _Tier = "device") -> FreeBlocks:
        """As `free_block_ids`, one by one: only as many are looked up as are asked for. See `FreeBlocks`."""
    def set_priority(self, sequences: _Handles, priority: int) -> None:
        """Set how much sequences want their cached blocks to be kept once they have gone; for `eviction="priority"`.

        Each level keeps a block as long as it takes to evict the whole pool once more; then it goes like any other. A
        shared block goes by the highest priority among its users.

        Args:
            sequences: handles, uint64 `[n]`.
            priority: 0, the default, to 15.
        Raises:
            InvalidArgumentError: the priority is out of range.
            UnknownSequenceError: a handle is not in the books.
        """
    @property
    def groups(self) -> list[CacheGroup]:
        """Cache groups, in the order of their numbers."""
    def can_allocate(
        self, num_tokens: int, *, lookahead: int = 0, encoder_tokens: int = 0, chunk_tokens: int | None = None
    ) -> AllocStatus:
        """Whether a new sequence may be admitted, the watermark kept.

        Args:
            num_tokens: its tokens.
            lookahead: slots beyond them.
            encoder_tokens: tokens of its encoder, for a group of cross attention.
            chunk_tokens: most tokens that are put in at a time: of a window only what it holds at once counts then.
        """
    def allocate(self, num_tokens: _Counts, *, encoder_tokens: _Counts | None = None) -> NDArray[np.uint64]:
        """Open one sequence for each entry, with blocks for that many tokens.

        Args:
            num_tokens: tokens of each new sequence, uint32 `[n]`.
            encoder_tokens: tokens of each one's encoder, uint32 `[n]`; for a group of cross attention, else not given.
        Returns:
            Handles, uint64 `[n]`.
        Raises:
            OutOfBlocksError: the device has too few blocks for the whole batch.
            InvalidArgumentError: encoder lengths are missing, too many or not asked for.
        """
    def allocate_prompts(
        self,
        prompts: Sequence[NDArray[np.uint32] | Sequence[int]],
        *,
        salt: bytes | None = None,
        lora_id: int = 0,
        extras: Sequence[tuple[int, int, int, bytes]] = ...,
        chunk_tokens: int | None = None,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Open one sequence for each prompt, sharing the longest prefix of it that is cached.

        Args:
            prompts: token ids of each prompt, uint32 `[tokens]`; 4294967295 is no token.
            salt: keeps tenants apart: what has one salt never shares with what has another; `b""` is a salt, too.
            lora_id: adapter that the prompts run with; 0 for none.
            extras: `(prompt, block, kind, bytes)` of what else decides a block's bytes, such as an image's hash, by
                rising block.
            chunk_tokens: blocks are given to at most so many tokens of a prompt beyond the cached ones; the rest is put
                in by `append`, as much at a time as `next_chunk` says. All at once if not given.

        Returns:
            Handles, uint64 `[n]`, and how many of each prompt's first tokens need not be computed, uint32 `[n]`; the
            last token always is to be computed. Those tokens count that this step loads from the host: the step that
            computes the rest runs behind its decision's `swap_in`, as it does when sequences are swapped in.

        Raises:
            OutOfBlocksError: the device has too few blocks for the whole batch.
            InvalidArgumentError: a token id is out of range, or an extra is of no full block.
        """
    def cached_tokens(
        self, prompt: NDArray[np.uint32] | Sequence[int], *, salt: bytes | None = None, lora_id: int = 0
    ) -> int:
        """Tokens at the start of a prompt whose blocks are cached; nothing is taken."""
    def blocks_to_allocate(
        self, prompt: NDArray[np.uint32] | Sequence[int], *, salt: bytes | None = None, lora_id: int = 0
    ) -> int:
        """Device blocks that must be free for `allocate_prompts` of one prompt.

        They are new ones, those it loads into, and cached ones that nothing uses: what others use costs nothing.
        """
    def next_chunk(self, sequence: int, budget: int) -> int:
        """Tokens of a sequence's prompt to append next, at most `budget`; 0 once all are in.

        With a recurrent group and prefix caching a chunk ends with a block where it can: only states there are cached.
        """
    def mark_computed(self, sequences: _Handles, num_computed: _Counts | None = None) -> None:
        """Publish the full blocks of sequences whose tokens the model has computed.

        A block whose key another block already has is given up for that one, and what fell out of a window is given
        back: block tables may change.

        Args:
            sequences: handles, uint64 `[n]`, none twice.
            num_computed: how many of each one's first tokens are computed, uint32 `[n]`; all if not given.

        Raises:
            UnknownSequenceError: a handle is not in the books.
            InvalidArgumentError: a sequence has fewer tokens, or there is not one number a sequence.
            SequenceStateError: a sequence has tokens that the present step is yet to write.
        """
    def common_computed_blocks(self, sequences: _Handles) -> NDArray[np.int32]:
        """Computed blocks at the start of all the sequences that they share, int32 `[blocks]`."""
    def reset_prefix_cache(self) -> bool:
        """Forget everything that is cached, unless a device block is in use; returns whether it did."""
    def offload_cached(self, max_blocks: int) -> int:
        """Copy the next `max_blocks` device blocks to be evicted to the host, those that have no copy there.

        The copies are `swap_out` pairs of this step's decision. Meanwhile prompts still find the blocks, and the step's
        own work may take them; what is left once the ticket is completed goes free, findable on the host.

        Args:
            max_blocks: cached blocks to look at, in their order of eviction.

        Returns:
            Blocks that are copied: no more than there is room for on the host, older copies given up.

        Raises:
            InvalidArgumentError: the manager has no `host_prefix_cache`.
        """
    def resize_device(self, blocks: int) -> ResizeProgress:
        """Give the device so many blocks from now on, while sequences run.

        Growing is done at once. Shrinking goes on: blocks beyond the end are not given out any more and what is only
        cached there is dropped; what sequences use there leaves as they do, or is moved, and what transfers and pins
        hold is waited for. Admission, watermark and `max_pinned` go by the new size at once, and each block that a
        sequence still uses beyond counts as one fewer that is free. Another call, larger or smaller, changes what this
        one has not ended; quotas stay the numbers that they were.

        Args:
            blocks: of the device.

        Returns:
            What is in use beyond the end, now.

        Raises:
            InvalidArgumentError: too many; or too few for the null block, what is pinned, the watermark, and one to
                give out; nothing was changed.
        """
    def device_uses(self) -> NDArray[np.uint8]:
        """What every device block is used for, uint8 `[resize_progress().extent]`.

        0: free. 1: cached, found by its key and given out if needed. 2: only transfers or pins hold it. 3: sequences
        use it; a null block counts as such.
        """
    def resize_progress(self) -> ResizeProgress:
        """What is in use beyond the device's blocks."""
    def defragment(
        self,
        goal: _Goal | Literal["contiguous"] | Sequence[_Wanted],
        number: int | None = None,
        *,
        sequences: _Handles | None = None,
        max_moves: int = 512,
        max_bytes: int | None = None,
        block_bytes: int | None = None,
        cached: Literal["move", "drop", "exchange"] = "move",
    ) -> DefragReport:
        """Decide moves of device blocks into holes, as `move` pairs of this step's decision.

        Nothing else changes before the step's ticket is completed: block tables, slots and cached blocks name the old
        blocks, which are read and written as ever. Then a target takes the place of its source in all books, unless the
        source was written, freed or leased meanwhile. Targets are not free from this call on; a move that is cancelled,
        or whose pair `fail` names, gives its target back and costs nobody a byte.

        Blocks of sequences written in this step or the one before move last.

        Args:
            goal: `"max_id"`: no block above `number`. `"free_tail"`: none among the last `number` blocks. `"dense"`: as
                low as can be, give or take `number` ids. `"empty_pages"`: in as few pages of `number` blocks as can be.
                `"contiguous"`: no block table in more than `number` runs of neighbours, as far as holes allow. Or
                several, `(goal, number)` each, the most important first: none undoes what those before it have won.
                With a third number, a slack, nothing moves for a goal until it is missed by more ids, pages or runs,
                then until it is met; calls with the same goals count as one after the other.
            number: see above, in blocks or runs; None where there are several goals.
            sequences: those that `"contiguous"` is about, the first in front, with the tables of all their cache
                groups; None for all on the device.
            max_moves: most blocks to move in this step; an exchange takes two of them.
            max_bytes: most bytes to write in this step; None for any number.
            block_bytes: bytes of a block, all layers; needed for `max_bytes`.
            cached: what becomes of cached blocks that no sequence uses. `"move"`: they move like others and keep their
                place in the order of eviction. `"drop"`: they count as holes for every goal; those that blocks move
                into are evicted, and so are those in the way of `"max_id"`, `"free_tail"` or `"empty_pages"`, all of
                them at once. `"exchange"`: as `"drop"`, but what is in them moves on to a free block, as long as there
                is one that is not in the way: nobody finds it until the ticket is completed, then it counts as just
                used.

        Returns:
            How many moves are planned, and what stays in the way of the goals.

        Raises:
            InvalidArgumentError: there is no such goal or no such policy, a page has no blocks, a table is to lie in no
                run, a goal lacks its number, or `max_bytes` lacks `block_bytes`.
            UnknownSequenceError: there is no such sequence.
            SequenceStateError: a sequence is not on the device.
        """
    def fragmentation(self, *, page_blocks: int = 64) -> Fragmentation:
        """How the device's blocks lie, for metrics: takes time that rises with the pool and the block tables.

        Args:
            page_blocks: blocks of a page, for `empty_pages`.

        Raises:
            InvalidArgumentError: a page has no blocks.
        """
    def set_quota(self, blocks: int | None, *, salt: bytes | None = None) -> None:
        """Limit the cached device blocks that one tenant leaves behind: published, and used by no sequence.

        Held whenever sequences are freed, tickets end and decisions are taken: what is beyond goes free, the tenant's
        least recently used first. If room is needed before that, it goes before all other tenants' blocks.

        Args:
            blocks: most such blocks; None for as many as there is room for.
            salt: the tenant; None for the prompts without a salt. What it published before its first quota is nobody's.

        Raises:
            InvalidArgumentError: there are fewer device blocks, the prefix cache is off, or 65535 tenants have quotas.
        """
    def quota(self, *, salt: bytes | None = None) -> tuple[int, int | None] | None:
        """Blocks that count towards a tenant's quota, and the quota; None for a tenant that never had one."""
    def pin(self, sequence: int, deadline: int) -> int:
        """Keep a sequence's published device blocks for a reader such as a connector.

        Whatever becomes of the sequence, they are neither evicted nor written. The pin ends with `unpin`; without
        `submit_pin` also with `expire(now)` at its deadline.

        Args:
            sequence: handle of a sequence on the device.
            deadline: on the caller's clock, any unit.

        Returns:
            The pin's number.

        Raises:
            OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
            UnknownSequenceError: the handle is not in the books.
            SequenceStateError: the sequence is not on the device, still loading or has lost bytes.
        """
    def pin_prompt(
        self,
        prompt: NDArray[np.uint32] | Sequence[int],
        deadline: int,
        *,
        salt: bytes | None = None,
        lora_id: int = 0,
    ) -> tuple[int, int]:
        """As `pin`, for the blocks at the start of a prompt that are cached on the device.

        Returns:
            The pin's number, and how many tokens its blocks hold.

        Raises:
            OutOfBlocksError: pins would hold more device blocks than `max_pinned` allows.
        """
    def pinned_blocks(self, pin: int) -> NDArray[np.int32]:
        """Blocks of a pin in the order of their tokens, int32 `[n]`.

        Raises:
            UnknownTicketError: the pin has ended or expired.
        """
    def submit_pin(self, pin: int) -> None:
        """The reader's transfer has begun: only `unpin` ends the pin from now on.

        Raises:
            UnknownTicketError: the pin has ended or expired; the blocks must not be read.
        """
    def unpin(self, pin: int) -> None:
        """The reader needs the blocks no more.

        Raises:
            UnknownTicketError: the pin has ended or expired.
        """
    def set_deadline(self, ticket: int, deadline: int) -> None:
        """Give a decision's ticket a deadline, on the caller's clock: until `submit`, and from then on for its end.

        Raises:
            UnknownTicketError: the ticket was never handed out, or has ended.
        """
    def submit(self, ticket: int) -> None:
        """The ticket's transfers have begun: only `complete` and `fail` end it from now on.

        Raises:
            UnknownTicketError: the ticket has ended or expired; its transfers must not run.
        """
    def expire(self, now: int) -> Expired:
        """End each pin and ticket whose deadline is `now` or earlier and that is not submitted.

        Such a ticket ends as if all of its transfers had failed; what its step was to compute is the caller's to drop.
        A submitted one that is late goes on holding its blocks, which are quarantined until its end, while the
        sequences that wait for it can be freed and start again on other blocks.
        """
    def quarantined_blocks(self, tier: _Tier) -> NDArray[np.int32]:
        """Blocks that late transfers and late submitted pins still hold, int32 `[n]`, rising."""
    @property
    def prefix_stats(self) -> PrefixStats:
        """Counters of the prefix cache."""
    def fork(self, sequence: int, count: int = 1) -> NDArray[np.uint64]:
        """Open `count` sequences that share all blocks of one; a write to a shared block copies it first.

        Raises:
            UnknownSequenceError: the handle is not in the books.
            SequenceStateError: the sequence has lost bytes.
        """
    def fork_prefix(self, sequence: int, shared_tokens: int, num_tokens: int) -> int:
        """Open a sequence of `num_tokens` that shares the first `shared_tokens` of another's, whole blocks.

        Raises:
            InvalidArgumentError: `shared_tokens` is no multiple of the block size, or more than either sequence has.
            OutOfBlocksError: the device has too few blocks for the rest.
            SequenceStateError: the other sequence is not on the device, still loading or has lost bytes, or the step is
                yet to write the recurrent state that the new tokens need.
        """
    def blocks_to_append(self, sequences: _Handles, num_tokens: _Counts | None = None, *, lookahead: int = 0) -> int:
        """Device blocks that `append` would take: new ones, and one for each copy-on-write."""
    def can_append(self, sequences: _Handles, num_tokens: _Counts | None = None, *, lookahead: int = 0) -> bool:
        """Whether `append` has the blocks it would take."""
    def append(
        self,
        sequences: _Handles,
        num_tokens: _Counts | None = None,
        *,
        token_ids: NDArray[np.uint32] | Sequence[int] | None = None,
        lookahead: int = 0,
        block_tables: NDArray[np.int32] | None = None,
        out: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Append tokens to a batch of sequences; shared blocks that are written are copied by this step's decision.

        Args:
            sequences: handles, uint64 `[n]`, none twice.
            num_tokens: tokens for each sequence, one number or uint32 `[n]`; 1 if not given.
            token_ids: ids of those tokens, uint32 `[tokens]`, for the prefix cache; a sequence that gets tokens
                without ids is no longer published.
            lookahead: slots beyond those tokens for which each sequence gets blocks of its own too; drafts may be
                written there.
            block_tables: int32 `[n or more, max_blocks]`, C-contiguous, kept by the caller from call to call: row i
                belongs to sequence i. What has changed since the sequence's last such call is written, at its first
                one the whole row. Who moves a sequence to another row or array writes that with `block_tables` first.
                With several cache groups, the rows of one group come after those of another, `n` each.
            out: int64 array for the slots, one for each token and group, C-contiguous. What is read may lie in arrays
                that are written; those two may not share memory.
        Returns:
            Slot (`block * block_size + offset`) of each token, sequence by sequence, int64 `[tokens]`; with several
            cache groups `[groups, tokens]`, an encoder's left out.
        Raises:
            OutOfBlocksError: the device has too few blocks for the whole batch.
            UnknownSequenceError: a handle is not in the books.
            SequenceStateError: a sequence is not on the device, still loading or has lost bytes.
            InvalidArgumentError: a sequence is named twice, or an array has the wrong length or cannot be written.
        """
    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Cut a sequence to its first `num_tokens` tokens, after a speculative decoder's were rejected.

        Blocks that hold none of them go free, those of an earlier lookahead too. The next append copies the last block
        first if another sequence or the prefix cache has it too.

        Raises:
            UnknownSequenceError: the handle is not in the books.
            SequenceStateError: the sequence has lost bytes, or tokens that the present step is yet to write.
            InvalidArgumentError: the sequence is shorter.
        """
    def num_tokens(self, sequence: int, group: int = 0) -> int:
        """Tokens in a sequence; those of its encoder in a group of cross attention."""
    def tier(self, sequence: int) -> _Tier:
        """Tier that a sequence's blocks are in."""
    def block_table(self, sequence: int, group: int = 0) -> NDArray[np.int32]:
        """Blocks of a sequence in its present tier and one cache group, int32 `[blocks]`; 0 for what fell out of it."""
    def block_tables(
        self, sequences: _Handles, out: NDArray[np.int32] | None = None, *, group: int = 0
    ) -> NDArray[np.int32]:
        """Block tables of sequences on the device, of one cache group, int32 `[n, max_blocks]`, padded with 0.

        Raises:
            SequenceStateError: a sequence is not on the device, still loading or has lost bytes.
            InvalidArgumentError: `out` has too few rows or columns.
        """
    def slot_mapping(
        self, sequence: int, first: int, last: int, out: NDArray[np.int64] | None = None, *, group: int = 0
    ) -> NDArray[np.int64]:
        """Slots of tokens `first` to `last` (not included) of a sequence on the device, int64 `[last - first]`."""
    def can_swap_out(self, sequences: _Handles) -> bool:
        """Whether the host has room and nothing moves the sequences."""
    def swap_out(self, sequences: _Handles) -> None:
        """Move sequences from the device to the host; a block shared among them moves once.

        Raises:
            OutOfBlocksError: the host has too few blocks for the whole batch.
            SequenceStateError: a sequence is not on the device, moving, written in this step or has lost bytes.
        """
    def can_swap_in(self, sequences: _Handles, *, lookahead: int = 0) -> AllocStatus:
        """Whether the sequences fit on the device with one more token each, the watermark kept."""
    def swap_in(self, sequences: _Handles) -> None:
        """Move sequences from the host to the device."""
    def can_spill(self, sequences: _Handles) -> bool:
        """Whether the external tier has room and nothing moves the sequences, all of one tier."""
    def spill(self, sequences: _Handles) -> None:
        """Move sequences, all on the device or all on the host, to the external tier."""
    def can_fetch(self, sequences: _Handles, *, lookahead: int = 0) -> AllocStatus:
        """Whether the sequences fit on the device with one more token each, the watermark kept."""
    def fetch(self, sequences: _Handles, *, to: Literal["device", "host"] = "device") -> None:
        """Move sequences from the external tier to the device, or to the host to be swapped in from there."""
    def free(self, sequences: _Handles) -> None:
        """Forget sequences; their blocks go free once nothing references them and no transfer holds them.

        Raises:
            UnknownSequenceError: a handle is not in the books.
            InvalidArgumentError: a handle is named twice.
        """
    def take_decision(self) -> StepDecision:
        """End the step: the transfers decided since the last call, to be carried out, then completed or failed.

        Warns:
            RuntimeWarning: once, if more than `max_open_tickets` tickets are open; it names the oldest. Where warnings
                are errors, the step goes on and can be ended by the next call.
        """
    def open_tickets(self) -> tuple[int, ...]:
        """Tickets that are neither completed nor failed, oldest first."""
    def complete(self, ticket: int) -> None:
        """End a ticket whose bytes have all landed.

        Raises:
            UnknownTicketError: the ticket was never handed out, or has ended.
        """
    def fail(self, ticket: int, lost: Sequence[Pairs]) -> NDArray[np.uint64]:
        """End a ticket of which the pairs `lost` did not land.

        Returns:
            The sequences that lost bytes, uint64 `[n]`; they can only be freed.
        Raises:
            UnknownTicketError: the ticket was never handed out, or has ended.
            MappingError: the ticket writes no such block.
        """
    def stats(self) -> ManagerStats:
        """All counters, as of now."""
    def take_events(self) -> EventBatch:
        """Take all events of the prefix cache that wait; none if they were not asked for."""
    def snapshot(self) -> bytes:
        """The whole books as bytes, versioned and checksummed, for `restore` of the same version.

        They say what the caches hold and are worth nothing without the caches' bytes. They hold the in-process keys of
        cached blocks: keep them as the caches themselves are kept. The order of eviction is kept; what `s3fifo` and
        `adaptive` have learnt is not, so that they may evict in another order later.

        Raises:
            SnapshotError: tickets are in flight, or the open step has transfers.
        """
    @staticmethod
    def restore(data: bytes) -> BlockManager:
        """The books that `snapshot` wrote; handles, tickets and events go on as if nothing had happened.

        The order of eviction is kept. What `s3fifo` and `adaptive` have learnt is not: they may evict in another order
        later.

        Raises:
            SnapshotError: the bytes are no snapshot of this version, cut short, damaged, too long, or contradictory.
        """
    def check(self) -> None:
        """Count everything again and compare.

        Raises:
            InvariantError: the books contradict themselves; a bug in Blockyard.
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
    """

    KINDS: tuple[str, str, str]
    TIERS: tuple[str, str, str]
    REASONS: tuple[str, str, str, str, str]
    @property
    def first(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def kinds(self) -> NDArray[np.uint8]: ...
    @property
    def tiers(self) -> NDArray[np.uint8]: ...
    @property
    def blocks(self) -> NDArray[np.int32]: ...
    @property
    def keys(self) -> NDArray[np.uint8]: ...
    @property
    def parents(self) -> NDArray[np.uint8]: ...
    @property
    def tokens(self) -> NDArray[np.uint32]: ...
    @property
    def lora_ids(self) -> NDArray[np.uint64]: ...
    @property
    def reasons(self) -> NDArray[np.uint8]: ...
    @property
    def remaining(self) -> NDArray[np.uint8]: ...
    @property
    def groups(self) -> NDArray[np.uint8]: ...
    def __len__(self) -> int: ...

@final
class Expired:
    """What `BlockManager.expire` has put an end to, or found to be late for the first time."""

    @property
    def tickets(self) -> list[int]:
        """Tickets that are closed; their transfers must not run any more."""
    @property
    def pins(self) -> list[int]:
        """Pins that are gone."""
    @property
    def overdue(self) -> list[int]:
        """Submitted tickets whose blocks are quarantined from now on."""
    @property
    def sequences(self) -> NDArray[np.uint64]:
        """Sequences that waited for either kind of ticket, uint64 `[n]`: they can only be freed."""

@final
class ResizeProgress:
    """How far the device's size has changed.

    Counts blocks: `blocks` of the device, `live` beyond them that sequences use, `held` beyond them that only transfers
    and pins hold. `extent` is one past the highest block in use, and at least `blocks`: memory behind it can go.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def live(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def extent(self) -> int: ...
    @property
    def done(self) -> bool:
        """Whether nothing is in use beyond the end."""

@final
class ManagerStats:
    """Counters since the manager was made, and what is the case now: `sequences`, `open_tickets`, and of each tier the
    blocks that are `used` (referenced, or held by a transfer), `leased` (held by a transfer), `cached` (findable),
    `pinned`, and `quarantined` (held past a deadline).

    Transfers count when they are decided; `loaded` blocks were found on the host alone. Blocks and tokens are missed if
    a prompt did not find them. Moves of `defragment` count when they end: `moved` blocks lie elsewhere now; `cancelled`
    ones were written, freed or leased meanwhile, and the bytes of `failed` ones did not land.
    """

    @property
    def sequences(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def open_tickets(self) -> int: ...
    @property
    def prompts(self) -> int: ...
    @property
    def hit_blocks(self) -> int: ...
    @property
    def missed_blocks(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def missed_tokens(self) -> int: ...
    @property
    def merged_blocks(self) -> int: ...
    @property
    def loaded_blocks(self) -> int: ...
    @property
    def copied_blocks(self) -> int: ...
    @property
    def swapped_out_blocks(self) -> int: ...
    @property
    def swapped_in_blocks(self) -> int: ...
    @property
    def spilled_blocks(self) -> int: ...
    @property
    def fetched_blocks(self) -> int: ...
    @property
    def moved_blocks(self) -> int: ...
    @property
    def cancelled_moves(self) -> int: ...
    @property
    def failed_moves(self) -> int: ...
    @property
    def used_blocks(self) -> dict[_Tier, int]: ...
    @property
    def peak_blocks(self) -> dict[_Tier, int]: ...
    @property
    def leased_blocks(self) -> dict[_Tier, int]: ...
    @property
    def cached_blocks(self) -> dict[_Tier, int]: ...
    @property
    def evicted_blocks(self) -> dict[_Tier, int]: ...
    @property
    def pinned_blocks(self) -> dict[_Tier, int]: ...
    @property
    def quarantined_blocks(self) -> dict[_Tier, int]: ...
    def as_dict(self) -> dict[str, int]:
        """All counters by name; those of a tier as `used_blocks_device` and so on."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Completion:
    def __new__(
        cls, ticket: int, ok: NDArray[np.bool_], rows: NDArray[np.uint8], reasons: Sequence[str]
    ) -> Completion: ...
    def __getnewargs__(self) -> tuple[int, NDArray[np.bool_], NDArray[np.uint8], tuple[str, ...]]: ...
    @property
    def ticket(self) -> int: ...
    @property
    def ok(self) -> NDArray[np.bool_]: ...
    @property
    def rows(self) -> NDArray[np.uint8]: ...
    @property
    def reasons(self) -> tuple[str, ...]: ...

@final
class StoreStats:
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
        pending_bytes: int = 0,
    ) -> StoreStats: ...
    @property
    def written_blocks(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def read_blocks(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def misses(self) -> dict[str, int]: ...
    @property
    def errors(self) -> int: ...
    @property
    def last_error(self) -> str: ...
    @property
    def pending_bytes(self) -> int: ...
    @property
    def checksum_failures(self) -> int: ...
    @property
    def damaged_blocks(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def as_dict(self) -> dict[str, int | str | dict[str, int]]: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class SlabStore:
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
        deadline: float = 10.0,
        namespace: bytes = ...,
    ) -> SlabStore: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def path(self) -> Path: ...
    @property
    def direct(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def slot_offset(self, slot: int) -> int: ...
    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int: ...
    def submit_read(self, slots: NDArray[np.int64]) -> int: ...
    def poll(self) -> list[int]: ...
    def wait(self, ticket: int, timeout: float | None = None) -> Completion: ...
    def stats(self) -> StoreStats: ...
    def close(self, timeout: float = 5.0) -> bool: ...
    def __enter__(self) -> SlabStore: ...
    def __exit__(self, *_details: object) -> None: ...

@final
class PrefixStats:
    """Counters of the prefix cache since the manager was made; `cached_blocks` is findable now."""

    @property
    def prompts(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def hit_blocks(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def merged(self) -> int: ...
    @property
    def loaded(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def cached_blocks(self) -> int: ...
    @property
    def hit_rate(self) -> float:
        """Full blocks found, of all that were looked up; 0 before the first."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

def chain_keys(
    tokens: NDArray[np.uint32] | Sequence[int],
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
        extra: what else decides the bytes of each of these blocks.
    """

def export_keys(
    tokens: NDArray[np.uint32] | Sequence[int],
    *,
    block_size: int,
    salt: bytes | None = None,
    lora_id: int = 0,
    cache_group: int = 0,
) -> list[bytes]:
    """Keys of a prompt's full blocks for other processes: SHA-256 digests, 32 bytes each.

    The stream hashed is a 64-byte header (`BLKYKEYS`, then format 1, block size, cache group and 0 as little-endian
    u32, the adapter as u64, 32 bytes of salt: its SHA-256, or zeros for none), then each block's tokens as
    little-endian u32, padded to 64 bytes with 0xFF; a block's key is the digest of the stream up to its end.
    """

@final
class FillMap:
    """Which parts of the host's blocks hold bytes, where a host block holds several device blocks.

    A part's id is `block * per_block + offset`. Mark parts once their bytes have landed; clear a block before it is
    given out again.

    Args:
        num_blocks: blocks of the host.
        per_block: device blocks in each.
    Raises:
        InvalidArgumentError: `per_block` is 0, or there are 2^32 parts or more.
    """

    def __new__(cls, num_blocks: int, per_block: int) -> FillMap: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def per_block(self) -> int: ...
    def mark(self, parts: NDArray[np.int64]) -> None:
        """Note that parts, int64 `[n]`, hold bytes. Raises: MappingError, and notes nothing."""
    def unmark(self, parts: NDArray[np.int64]) -> None:
        """Note that parts, int64 `[n]`, are empty. Raises: MappingError, and notes nothing."""
    def clear(self, blocks: NDArray[np.int64]) -> None:
        """Note that all parts of blocks, int64 `[n]`, are empty. Raises: MappingError, and notes nothing."""
    def require(self, parts: NDArray[np.int64]) -> None:
        """Raise MappingError at the first of the parts, int64 `[n]`, that holds no bytes."""
    def count(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Parts of each of the blocks, int64 `[n]`, that hold bytes."""

def expand_span(blocks: NDArray[np.int64], out: NDArray[np.int64], *, per_block: int, first: int, last: int) -> None:
    """Write the ids of the small blocks of a stretch of large ones, which may begin and end within one.

    Args:
        blocks: the large blocks, int64 `[m]`.
        out: int64 `[n]`, of any stride: takes `block * per_block + offset`.
        per_block: small blocks in a large one.
        first: offset in the first large block where the stretch begins.
        last: offset in the last large block before which it ends, 1 to `per_block`.
    Raises:
        MappingError: an offset or id is out of range, or `n` is not what the stretch holds. Nothing was written.
    """

def copy_rows(
    src: Sequence[NDArray[np.uint8]],
    dst: Sequence[NDArray[np.uint8]],
    pairs: _IdPairs,
    *,
    num_threads: int,
) -> None:
    """Copy row `from` of each array to row `to` of its partner.

    Args:
        src: arrays to read, uint8 `[rows, bytes]`, rows contiguous and apart.
        dst: as many to write, of the same widths, apart from one another: side by side, or with rows that alternate
            within one stride. They may be the arrays that are read, in the same order, or share no memory with those.
        pairs: rows `(from, to)`, int64 `[n, 2]`; `to` has no repeats, and within arrays shares no row with `from`.
        num_threads: at most so many share a large call.
    Raises:
        InvalidArgumentError: an array is of another form, cannot be written or shares memory with another, or the two
            lists do not fit one another; nothing was copied.
        MappingError: a row does not exist, is written twice, or read and written; nothing was copied.
    """

def exchange_rows(arrays: Sequence[NDArray[np.uint8]], pairs: _IdPairs, *, num_threads: int) -> None:
    """Let two rows of each pair change places in each array.

    Args:
        arrays: uint8 `[rows, bytes]`, rows contiguous and apart, as those that `copy_rows` writes.
        pairs: rows, int64 `[n, 2]`, none twice.
        num_threads: at most so many share a large call.
    Raises:
        InvalidArgumentError: an array is of another form, cannot be written or shares memory with another; nothing was
            exchanged.
        MappingError: a row does not exist or is named twice; nothing was exchanged.
    """

def move_rows(arrays: Sequence[NDArray[np.uint8]], pairs: _IdPairs, *, num_threads: int) -> None:
    """Move rows within each array, as if all were read first.

    Args:
        arrays: uint8 `[rows, bytes]`, rows contiguous and apart, as those that `copy_rows` writes.
        pairs: rows `(from, to)`, int64 `[n, 2]`; `to` has no repeats.
        num_threads: at most so many share a large call.
    Raises:
        InvalidArgumentError: an array is of another form, cannot be written or shares memory with another; nothing was
            moved.
        MappingError: a row does not exist or is written twice; nothing was moved.
        OutOfMemoryError: rings of moves need more memory than there is; nothing was moved.
    """

# The objects of vLLM V0's block manager (0.7.3), exported by `blockyard.integrations.vllm_v0`. A device is an enum's
# member named `GPU` or `CPU`. Raises, as V0 does: `NoFreeBlocksError` where fewer blocks are free, AssertionError for a
# broken rule of the call, ValueError for an id of nobody's; a failed call changes nothing.

@disjoint_base
class V0NaiveBlock:
    """A block of token ids without a key."""

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
    def block_size(self) -> int: ...
    @property
    def content_hash(self) -> int | None:
        """The block's key, a SHA-256 chaining value; None until the block and those before it are full."""

    @property
    def extra_hash(self) -> int | None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def num_empty_slots(self) -> int: ...
    @property
    def num_tokens_total(self) -> int | None: ...
    @property
    def prev_block(self) -> Any | None: ...
    @property
    def token_ids(self) -> list[int]: ...
    def append_token_ids(self, token_ids: list[int]) -> None: ...

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
        """Key of a full block, from that of the block before it, its tokens and what else decides its bytes."""

@final
class V0NullBlock:
    """Stands for blocks that fell out of a sliding window; wraps a block that is never written."""

    def __new__(cls, proxy: Any) -> V0NullBlock: ...
    block_id: int | None
    def append_token_ids(self, token_ids: list[int]) -> None: ...

_V0Block: TypeAlias = V0NaiveBlock | V0NullBlock

@disjoint_base
class V0PoolAllocator:
    """What the two allocators of one device share."""

    @property
    def all_block_ids(self) -> frozenset[int]: ...
    def allocate_immutable_block(
        self,
        prev_block: Any | None,
        token_ids: list[int],
        extra_hash: int | None = None,
        device: None = None,
    ) -> V0NaiveBlock: ...
    def allocate_immutable_blocks(
        self,
        prev_block: Any | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: None = None,
    ) -> list[V0NaiveBlock]: ...
    def allocate_mutable_block(
        self, prev_block: Any | None, extra_hash: int | None = None, device: None = None
    ) -> V0NaiveBlock: ...
    def clear_copy_on_writes(self) -> list[tuple[int, int]]: ...
    def cow_block_if_not_appendable(self, block: V0NaiveBlock) -> int: ...
    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]: ...
    def fork(self, last_block: V0NaiveBlock) -> list[V0NaiveBlock]: ...
    def free(self, block: V0NaiveBlock, keep_block_object: bool = False) -> None: ...
    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]: ...
    def get_num_free_blocks(self, device: None = None) -> int: ...
    def get_num_full_blocks_touched(self, blocks: list[V0NaiveBlock]) -> int: ...
    def get_num_total_blocks(self) -> int: ...
    def get_physical_block_id(self, absolute_id: int) -> int: ...
    def get_prefix_cache_hit_rate(self) -> float: ...
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None: ...
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Let blocks be found by their keys, those of these ids; all in use for an empty list, as V0 does."""

    def promote_to_immutable_block(self, block: V0NaiveBlock) -> int: ...
    def reset_prefix_cache(self) -> bool: ...
    def swap_in(self, blocks: list[V0NaiveBlock]) -> None: ...
    def swap_out(self, blocks: list[V0NaiveBlock]) -> None: ...

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
    def block_is_computed(self, block_id: int) -> bool: ...
    def is_block_cached(self, block: V0NaiveBlock) -> bool: ...

@disjoint_base
class V0CpuGpuBlockAllocator:
    """The blocks of both devices under one count of ids: the GPU's first, then the CPU's."""

    def __new__(cls, cpu_block_allocator: V0PoolAllocator, gpu_block_allocator: V0PoolAllocator) -> Self: ...
    @staticmethod
    def create(
        allocator_type: str, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int
    ) -> V0CpuGpuBlockAllocator:
        """Make both allocators, `naive` or `prefix_caching`."""

    @property
    def all_block_ids(self) -> frozenset[int]: ...
    def allocate_immutable_block(
        self, prev_block: Any | None, token_ids: list[int], device: Any, extra_hash: int | None = None
    ) -> V0NaiveBlock: ...
    def allocate_immutable_blocks(
        self, prev_block: Any | None, block_token_ids: list[list[int]], device: Any, extra_hash: int | None = None
    ) -> list[V0NaiveBlock]: ...
    def allocate_mutable_block(
        self, prev_block: Any | None, device: Any, extra_hash: int | None = None
    ) -> V0NaiveBlock: ...
    def allocate_or_get_null_block(self) -> V0NullBlock: ...
    def clear_copy_on_writes(self) -> list[tuple[int, int]]: ...
    def find_cached_blocks_prefix(self, block_hashes: list[int], device: Any | None = None) -> list[int]:
        """The first of these keys, as many as computed blocks have; on the GPU if no device is named."""

    def fork(self, last_block: _V0Block) -> list[V0NaiveBlock]: ...
    def free(self, block: _V0Block) -> None:
        """Give back one reference; a null block stays."""

    def get_and_reset_swaps(self) -> list[tuple[int, int]]: ...
    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]: ...
    def get_num_free_blocks(self, device: Any) -> int: ...
    def get_num_full_blocks_touched(self, blocks: Sequence[_V0Block], device: Any) -> int: ...
    def get_num_total_blocks(self, device: Any) -> int: ...
    def get_physical_block_id(self, device: Any, absolute_id: int) -> int: ...
    def get_prefix_cache_hit_rate(self, device: Any) -> float: ...
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None: ...
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None: ...
    def of(self, device: Any) -> V0PoolAllocator:
        """The allocator of one device."""

    def reset_prefix_cache(self) -> bool: ...
    def swap(self, blocks: Sequence[_V0Block], src_device: Any, dst_device: Any) -> dict[int, int]:
        """Move blocks to the other device, all or none; blocks that share a physical block go on sharing one.

        A block that is still in prefill gets one of its own there: it must not overwrite the bytes of a block that has
        its key and is complete.

        Returns:
            Physical block there for each one here, in the order of first use.
        """

@disjoint_base
class V0BlockTable:
    """The blocks of one sequence."""

    def __new__(
        cls,
        block_size: int,
        block_allocator: V0CpuGpuBlockAllocator,
        _blocks: Sequence[_V0Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> Self: ...
    @staticmethod
    def get_num_required_blocks(token_ids: Sequence[int], block_size: int, num_lookahead_slots: int = 0) -> int:
        """Blocks for so many tokens and slots, hits left out of account."""

    @property
    def _num_empty_slots(self) -> int: ...
    @property
    def blocks(self) -> list[_V0Block]: ...
    @property
    def num_full_slots(self) -> int: ...
    @property
    def physical_block_ids(self) -> list[int]: ...
    def allocate(self, token_ids: list[int], device: Any | None = None, extra_hash: int | None = None) -> None:
        """Take blocks for all tokens, or none; on the GPU if no device is named."""

    def append_token_ids(
        self,
        token_ids: list[int],
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Append tokens and make room for more, all or nothing; shared blocks that are written are copied."""

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Take blocks until so many slots are empty, or none."""

    def fork(self) -> V0BlockTable:
        """Table over the same physical blocks."""

    def free(self) -> None:
        """Give all blocks back."""

    def get_num_blocks_touched_by_append_slots(self, token_ids: Sequence[int], num_lookahead_slots: int) -> int:
        """Blocks that appending may write or take, at worst."""

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Tokens that the table does not have yet."""

    def mark_computed(self, num_tokens: int) -> None:
        """Let the full blocks be found by their keys that end within the first `num_tokens` tokens."""

    def update(self, blocks: Sequence[_V0Block]) -> None:
        """Take over these blocks, or their new ids."""

def v0_hash_blocks(parent: int | None, token_ids: list[int], block_size: int, extra_hash: int | None) -> list[int]:
    """Keys of the full blocks of `token_ids`, the first after `parent`; a negative id is a token not known yet."""

_Goal: TypeAlias = Literal["max_id", "free_tail", "dense", "empty_pages"]
_Wanted: TypeAlias = tuple[_Goal | Literal["contiguous"], int] | tuple[_Goal | Literal["contiguous"], int, int]
_BlockIds: TypeAlias = NDArray[np.int64] | NDArray[np.int32] | Sequence[int]

@final
class DefragReport:
    """What one `BlockManager.defragment` has decided, in blocks.

    Attributes:
        planned: moves that the step's decision is going to have; also the report's length.
        left: moves that the goals need beyond these; `contiguous` adds none.
        stuck: blocks in the way for which there is no hole.
        held: blocks in the way that cannot be moved now: they are being filled, or what they hold may turn out lost.
        dropped: cached blocks that were evicted.
    """

    @property
    def planned(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def stuck(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Fragmentation:
    """How the device's blocks lie.

    Attributes:
        max_id: the highest block that is not free; None if all are.
        gap: blocks between the highest one that could move and the highest that there need be.
        holes: free blocks that hold nothing findable.
        empty_pages: whole pages of the pool of which all blocks are holes.
        tables: block tables of sequences on the device, one for each cache group; those without blocks left out.
        runs: runs of neighbouring ids that these tables consist of; `runs / tables` is 1 where all are contiguous.
    """

    @property
    def max_id(self) -> int | None: ...
    @property
    def gap(self) -> int: ...
    @property
    def holes(self) -> int: ...
    @property
    def empty_pages(self) -> int: ...
    @property
    def tables(self) -> int: ...
    @property
    def runs(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class MovePlan:
    """Moves towards goals; nothing has moved yet. No block is named twice.

    Attributes:
        pairs: all, block ids `(from, to)`, int64 `[n, 2]`.
        move: those whose destination holds nothing of worth.
        exchange: those whose destination's bytes must be kept: the two change places.
        left: moves that the goals need beyond these; `contiguous` adds nothing to it.
        stuck: live blocks in the way of the goals for which there is no hole.
    """

    @property
    def pairs(self) -> NDArray[np.int64]: ...
    @property
    def move(self) -> NDArray[np.int64]: ...
    @property
    def exchange(self) -> NDArray[np.int64]: ...
    @property
    def left(self) -> int: ...
    @property
    def stuck(self) -> int: ...
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
            fresh: what they hold is of no worth: those not in use are bound to the lowest blank blocks.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """

    def release_ids(self, ids: _BlockIds, *, fresh: bool = False) -> None:
        """Take a reference from the blocks of ids.

        Args:
            ids: any number of times each.
            fresh: what they hold is of no worth once nobody refers to them: their blocks become blank.

        Raises:
            InvalidArgumentError: a block has fewer references; nothing was changed.
        """

    def forget_ids(self, ids: _BlockIds) -> None:
        """Say that ids that are not in use hold nothing of worth.

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

    def refs(self, block: int) -> int:
        """References to a block."""

    def set_refs(self, block: int, refs: int) -> None:
        """Set the references to a block.

        Raises:
            InvalidArgumentError: it is out of range.
        """

    def add_ref(self, block: int, by: int) -> None:
        """Add a reference to a block, or take one if `by` is negative.

        Raises:
            InvalidArgumentError: it is out of range, or has none to take.
        """

    def swap_refs(self, a: int, b: int) -> None:
        """Exchange the references of two blocks.

        Raises:
            InvalidArgumentError: one is out of range.
        """

    def update_mapping(self, block_id: int, block: int) -> None:
        """Put an id into a block; the id that was there gets the place that this one had.

        Raises:
            InvalidArgumentError: one is out of range, or one of them alone is the null block.
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

    def resolve_rows(self, rows: Sequence[Sequence[int]], *, pass_negative: bool = False) -> list[list[int]]:
        """Blocks of ids, for rows of ints.

        Raises:
            InvalidArgumentError: an id is out of range.
        """

    def unresolve(self, block: int) -> int:
        """The id of a block.

        Raises:
            InvalidArgumentError: it is out of range.
        """

    @property
    def forward(self) -> NDArray[np.int64]:
        """The block of each id known so far: a copy."""

    @property
    def backward(self) -> NDArray[np.int64]:
        """The id of each block known so far: a copy."""

    def used(self) -> NDArray[np.int64]:
        """Blocks with references, rising, and how many, int64 `[n, 2]`."""

    def holes(self) -> NDArray[np.int64]:
        """Blocks that nobody refers to or leases, rising, int64 `[n]`."""

    @property
    def gap(self) -> int:
        """Ids between the highest block in use and the highest there need be."""

    def plan(self, goal: _Goal, number: int, *, slack: int = 0, moves: int | None = None) -> MovePlan:
        """Plan the fewest moves that meet a goal; nothing changes until `commit`.

        However often a plan with a budget is made and carried out, the moves add up to those of one plan without.

        Args:
            goal: `"max_id"`: no block in use above `number`. `"free_tail"`: none among the last `number` blocks.
                `"dense"`: as low as can be, give or take `number` ids. `"empty_pages"`: in as few pages of `number`
                blocks as can be.
            number: see above.
            slack: the plan is empty while the goal is missed by no more ids or pages; once begun, it is carried on
                until the goal is met.
            moves: budget of this step.

        Raises:
            InvalidArgumentError: the goal is unknown, or its page has no blocks.
        """

    def plan_all(
        self,
        goals: Sequence[_Wanted],
        *,
        sequences: Sequence[_BlockIds] | None = None,
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

    def runs(self, sequences: Sequence[_BlockIds]) -> tuple[int, int]:
        """Runs of neighbours that the blocks of sequences lie in: all, shared ones once; and the most of a sequence.

        Raises:
            InvalidArgumentError: an id is out of range.
        """

    def used_pages(self, page_blocks: int) -> int:
        """Pages of so many blocks that hold a block in use, a leased one or the null block.

        Raises:
            InvalidArgumentError: a page has no blocks.
        """

    @property
    def highest(self) -> int | None:
        """The highest block in use that can be moved, None if there is none."""

    def commit(self, plan: MovePlan) -> None:
        """Take over a plan whose bytes have moved: the ids of each pair change places.

        Raises:
            InvalidArgumentError: the books have changed so that the plan no longer fits; nothing was changed.
        """

    def check(self) -> None:
        """Count everything again.

        Raises:
            InvariantError: the books contradict themselves.
        """
