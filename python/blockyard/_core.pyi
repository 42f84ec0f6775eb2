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
    "AllocatorPair",
    "BlockAllocator",
    "BlockManager",
    "BlockObserver",
    "CacheGroup",
    "Completion",
    "CopyRoute",
    "Defrag",
    "DefragReport",
    "EventBatch",
    "Expired",
    "FillMap",
    "Fit",
    "Fragmentation",
    "FreeBlocks",
    "ManagerStats",
    "MovePlan",
    "NaiveAllocator",
    "Pairs",
    "Pins",
    "Pool",
    "Prefix",
    "PrefixCaching",
    "PrefixCachingAllocator",
    "PrefixHit",
    "ResizeProgress",
    "Sequence",
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
    "merge_runs",
    "move_rows",
    "order_moves",
    "plan_moves",
    "transfer_orders",
    "v0_hash_blocks",
]

__version__: str

_Tier: TypeAlias = Literal["device", "host", "external"]
_Reuse: TypeAlias = Literal["lowest", "fifo", "lru", "lifo"]
_Handle: TypeAlias = Sequence | int | np.uint64
_Handles: TypeAlias = NDArray[np.uint64] | _Each[_Handle] | _Handle
_TokenIds: TypeAlias = NDArray[np.uint32] | _Each[int]
_Counts: TypeAlias = NDArray[np.uint32] | _Each[int] | int

@final
class AllocStatus:
    """Whether something fits: `OK` now, `LATER` once other sequences have left, `NEVER` even into an empty tier."""

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
    def share(self, blocks: _Blocks) -> None: ...
    def require(self, blocks: _Blocks) -> None:
        """Raises what `free` would raise, and changes nothing."""
    def free(self, blocks: _Blocks) -> None: ...
    def make_writable(self, blocks: _Blocks) -> NDArray[np.int32]:
        """Exchanges blocks that others use for new ones; where an id differs, the caller copies the bytes."""
    def publish(self, block: int, key: bytes, depth: int = 0) -> int:
        """Gives a full block its key; returns the block to use from now on, which may be another one with that key."""
    def find(self, keys: _Each[bytes]) -> NDArray[np.int32]:
        """Blocks of the longest prefix of the keys that is computed; nothing is taken."""
    def cost(self, keys: _Each[bytes]) -> int:
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
class AllocatorPair:
    """A device and a host allocator behind one space of ids: the device's first, then the host's.

    Either side has all verbs of `BlockAllocator`, with ids from 0 on; a swap moves references from one to the other.

    Args:
        device_blocks: blocks of the device.
        host_blocks: blocks of the host.
        prefix_caching: whether the two are `PrefixCachingAllocator`s.
        reuse: which free block goes next, as for `NaiveAllocator`.
        eviction: which cached block goes once none is free, as for `PrefixCachingAllocator`.

    Example:
        >>> from blockyard._core import AllocatorPair
        >>> pair = AllocatorPair(4, 8)
        >>> table = pair.device.allocate(2)
        >>> table, copies = pair.swap_out(table)
        >>> copies.ids.tolist(), pair.device.num_free, pair.absolute("host", int(table[1]))
        ([[0, 0], [1, 1]], 4, 5)
    """

    def __new__(
        cls,
        device_blocks: int,
        host_blocks: int,
        *,
        prefix_caching: bool = False,
        reuse: _Reuse = "lowest",
        eviction: Literal["released", "accessed"] = "released",
    ) -> AllocatorPair: ...
    @property
    def device(self) -> NaiveAllocator | PrefixCachingAllocator:
        """The device's side; a new view at each call, over the same blocks."""
    @property
    def host(self) -> NaiveAllocator | PrefixCachingAllocator:
        """The host's side; a new view at each call, over the same blocks."""
    def locate(self, absolute: int) -> tuple[_Tier, int]:
        """Tier of an id of the common space, and the id there.

        Raises:
            InvalidArgumentError: neither side has that many blocks.
        """
    def absolute(self, tier: Literal["device", "host"], block: int) -> int:
        """Id in the common space of a block of one side.

        Raises:
            InvalidArgumentError: the side has no such block, or there is no such side.
        """
    def swap_out(self, blocks: _Blocks) -> tuple[NDArray[np.int32], Pairs]:
        """Exchange one reference to each device block for one to a host block, all or none.

        A block that is named several times stays one block, so sharing is kept. The caller copies the bytes.

        Args:
            blocks: device ids, int32 `[n]`.
        Returns:
            Host ids, int32 `[n]`, and the copies to make, each source once.
        Raises:
            OutOfBlocksError: the host has fewer free blocks.
            InvalidArgumentError: a block has fewer references than the call names, or is the null block.
        """
    def swap_in(self, blocks: _Blocks) -> tuple[NDArray[np.int32], Pairs]:
        """As `swap_out`, from host to device."""
    def check(self) -> None: ...

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

    def __new__(cls, ticket: int, transfers: _Each[tuple[str, Pairs]], *, after: _Each[int] = ...) -> StepDecision: ...
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
class Fit:
    def __new__(cls, status: AllocStatus, blocks: int, free: int) -> Fit: ...
    def __bool__(self) -> bool: ...
    @property
    def status(self) -> AllocStatus: ...
    @property
    def blocks(self) -> int: ...
    @property
    def free(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Sequence:
    def __new__(cls, handle: int, cached_tokens: int = 0) -> Sequence: ...
    @property
    def cached_tokens(self) -> int: ...
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
    def __new__(
        cls,
        *,
        eviction: Literal["lru", "s3fifo", "adaptive", "priority"] = "lru",
        host: bool = False,
        max_events: int = 0,
        max_pinned: float = 0.5,
    ) -> PrefixCaching: ...
    @property
    def eviction(self) -> str: ...
    @property
    def host(self) -> bool: ...
    @property
    def max_events(self) -> int: ...
    @property
    def max_pinned(self) -> float: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Pool:
    @property
    def tier(self) -> _Tier: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def groups(self) -> tuple[CacheGroup, ...]: ...
    def free_ids(self, limit: int | None = None) -> NDArray[np.int32]: ...
    def uses(self) -> NDArray[np.uint8]: ...
    def quarantined_ids(self) -> NDArray[np.int32]: ...
    def __iter__(self) -> FreeBlocks: ...

@final
class PrefixHit:
    @property
    def tokens(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Prefix:
    @property
    def enabled(self) -> bool: ...
    def lookup(self, prompt: _TokenIds, *, salt: bytes | None = None, lora_id: int = 0) -> PrefixHit: ...
    def common_blocks(self, sequences: _Handles) -> NDArray[np.int32]: ...
    def reset(self) -> bool: ...
    def offload(self, max_blocks: int) -> int: ...
    def set_priority(self, sequences: _Handles, priority: int) -> None: ...
    def set_quota(self, salt: bytes | None, blocks: int | None) -> None: ...
    def quota(self, salt: bytes | None) -> tuple[int, int | None] | None: ...
    def take_events(self) -> EventBatch: ...

@final
class Pins:
    def pin(self, sequence: _Handle, deadline: int) -> int: ...
    def pin_prompt(
        self, prompt: _TokenIds, deadline: int, *, salt: bytes | None = None, lora_id: int = 0
    ) -> tuple[int, int]: ...
    def blocks(self, pin: int) -> NDArray[np.int32]: ...
    def submit(self, pin: int) -> None: ...
    def unpin(self, pin: int) -> None: ...

@final
class Defrag:
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
    ) -> DefragReport: ...
    def resize(self, blocks: int) -> ResizeProgress: ...
    def progress(self) -> ResizeProgress: ...
    def fragmentation(self, *, page_blocks: int = 64) -> Fragmentation: ...

@final
class BlockManager:
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
    ) -> BlockManager: ...
    @property
    def block_size(self) -> int: ...
    @property
    def prefix(self) -> Prefix: ...
    @property
    def pins(self) -> Pins: ...
    @property
    def defrag(self) -> Defrag: ...
    def pool(self, tier: _Tier = "device") -> Pool: ...
    def can_allocate(
        self,
        prompt: int | _TokenIds,
        *,
        salt: bytes | None = None,
        lora_id: int = 0,
        lookahead: int = 0,
        encoder_tokens: int = 0,
        chunk_tokens: int | None = None,
    ) -> Fit: ...
    @overload
    def allocate(
        self,
        prompt: int | _TokenIds,
        /,
        *,
        salt: bytes | _Each[bytes | None] | None = None,
        lora_id: int | _Each[int] | None = None,
        extras: _Each[tuple[int, int, int, bytes]] = ...,
        chunk_tokens: int | None = None,
        encoder_tokens: _Counts | None = None,
    ) -> Sequence: ...
    @overload
    def allocate(self, *, counts: _Counts, encoder_tokens: _Counts | None = None) -> NDArray[np.uint64]: ...
    @overload
    def allocate(
        self,
        *prompts: int | _TokenIds,
        salt: bytes | _Each[bytes | None] | None = None,
        lora_id: int | _Each[int] | None = None,
        extras: _Each[tuple[int, int, int, bytes]] = ...,
        chunk_tokens: int | None = None,
        encoder_tokens: _Counts | None = None,
    ) -> tuple[Sequence, ...]: ...
    @overload
    def fork(self, sequence: _Handle, count: None = None) -> Sequence: ...
    @overload
    def fork(self, sequence: _Handle, count: int) -> NDArray[np.uint64]: ...
    @overload
    def fork(self, sequence: _Handle, count: None = None, *, shared_tokens: int, num_tokens: int) -> Sequence: ...
    def free(self, sequences: _Handles) -> None: ...
    def can_append(self, sequences: _Handles, num_tokens: _Counts | None = None, *, lookahead: int = 0) -> Fit: ...
    def append(
        self,
        sequences: _Handles,
        num_tokens: _Counts | None = None,
        *,
        token_ids: _TokenIds | None = None,
        lookahead: int = 0,
        block_tables: NDArray[np.int32] | None = None,
        out: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]: ...
    def next_chunk(self, sequence: _Handle, budget: int) -> int: ...
    def mark_computed(self, sequences: _Handles, num_computed: _Counts | None = None) -> None: ...
    def truncate(self, sequence: _Handle, num_tokens: int) -> None: ...
    def can_swap_out(self, sequences: _Handles, to: Literal["host", "external"] = "host") -> Fit: ...
    def swap_out(self, sequences: _Handles, to: Literal["host", "external"] = "host") -> None: ...
    def can_swap_in(
        self, sequences: _Handles, to: Literal["device", "host"] = "device", *, lookahead: int = 0
    ) -> Fit: ...
    def swap_in(self, sequences: _Handles, to: Literal["device", "host"] = "device") -> None: ...
    def take_decision(self, *, deadline: int | None = None) -> StepDecision: ...
    def submit(self, ticket: int) -> None: ...
    def complete(self, ticket: int) -> None: ...
    def fail(self, ticket: int, lost: Iterable[Pairs] | None = None) -> NDArray[np.uint64]: ...
    def expire(self, now: int) -> Expired: ...
    def block_table(self, sequence: _Handle, group: int = 0) -> NDArray[np.int32]: ...
    def block_tables(
        self, sequences: _Handles, out: NDArray[np.int32] | None = None, *, group: int = 0
    ) -> NDArray[np.int32]: ...
    def slot_mapping(
        self, sequence: _Handle, first: int, last: int, out: NDArray[np.int64] | None = None, *, group: int = 0
    ) -> NDArray[np.int64]: ...
    def num_tokens(self, sequence: _Handle, group: int = 0) -> int: ...
    def tier(self, sequence: _Handle) -> _Tier: ...
    def stats(self) -> ManagerStats: ...
    def check(self) -> None: ...
    def snapshot(self) -> bytes: ...
    @staticmethod
    def restore(data: bytes) -> BlockManager: ...

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
    def hit_rate(self) -> float: ...
    @property
    def sequences(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def open_tickets(self) -> list[int]: ...
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
        cls, ticket: int, ok: NDArray[np.bool_], rows: NDArray[np.uint8], reasons: _Each[str]
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
        extra: what else decides the bytes of each of these blocks.
    """

def export_keys(
    tokens: NDArray[np.uint32] | _Each[int],
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
class CopyRoute:
    """Views of two sets of memory, joined once, so that compiling a mapping costs an addition a side and piece.

    Block `id` of a side begins at `base + id // per_row * row + id % per_row * sub` bytes. Regions of one part that lie
    side by side on both sides are one.

    Args:
        regions: uint64 `[n, 8]`: base, row and sub of the source, of the destination, bytes of a block, part; parts
            rise from 0 one by one.
        src_blocks: ids that are read are below it.
        dst_blocks: ids that are written are below it.
        src_per_row: blocks in a row of the source.
        dst_per_row: blocks in a row of the destination.
        in_place: source and destination are the same blocks, so none may be both read and written.
    Raises:
        InvalidArgumentError: blocks overlap or reach beyond the address space, or the array has another dtype or shape.
    """

    def __new__(
        cls,
        regions: NDArray[np.uint64],
        *,
        src_blocks: int,
        dst_blocks: int,
        src_per_row: int = 1,
        dst_per_row: int = 1,
        in_place: bool = False,
    ) -> CopyRoute: ...
    @property
    def num_parts(self) -> int: ...
    @property
    def num_regions(self) -> int:
        """Most pieces that one pair becomes."""
    def compile(self, pairs: _IdPairs, out: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Write the pieces of a mapping, part by part and in each in the order of the pairs, runs merged.

        Args:
            pairs: `(from, to)`, int64 `[n, 2]`.
            out: uint64 `[3, pieces]`, C-contiguous: where each piece is read, where it is written, its bytes.
        Returns:
            Where each part begins, and last the number of pieces: int64 `[num_parts + 1]`.
        Raises:
            MappingError: an id is out of range, a destination repeats, a block is read and written in place, or the
                pieces are more than `out` holds. Nothing was written.
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
    src: _Each[NDArray[np.uint8]],
    dst: _Each[NDArray[np.uint8]],
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

def exchange_rows(arrays: _Each[NDArray[np.uint8]], pairs: _IdPairs, *, num_threads: int) -> None:
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

def move_rows(arrays: _Each[NDArray[np.uint8]], pairs: _IdPairs, *, num_threads: int) -> None:
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

def order_moves(pairs: _IdPairs, num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order moves within one tier, such as into holes, into waves of which each is finished before the next begins.

    Args:
        pairs: `(from, to)`, int64 `[n, 2]`.
        num_blocks: blocks in the tier.
    Returns:
        The pairs, and where each wave of them begins and the last ends: int64 `[waves + 1]`. No block is both read and
        written in a wave.
    Raises:
        MappingError: an id is out of range, a destination repeats, or moves follow one another in a circle.
    """

def transfer_orders(decision: StepDecision) -> tuple[tuple[int, ...], ...]:
    """For each of `decision.transfers()`, the earlier ones that must have finished before it begins.

    Those are the ones that write what it reads or writes, or read what it writes; the others may run beside it.
    """

def merge_runs(ids: _IdPairs) -> NDArray[np.int64]:
    """Merge pairs whose source and destination both continue the pair before, order kept.

    Args:
        ids: `(from, to)`, int64 `[n, 2]`.
    Returns:
        `(from, to, length)`, int64 `[m, 3]`.
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
    def get_num_full_blocks_touched(self, blocks: _Each[_V0Block], device: Any) -> int: ...
    def get_num_total_blocks(self, device: Any) -> int: ...
    def get_physical_block_id(self, device: Any, absolute_id: int) -> int: ...
    def get_prefix_cache_hit_rate(self, device: Any) -> float: ...
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None: ...
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None: ...
    def of(self, device: Any) -> V0PoolAllocator:
        """The allocator of one device."""

    def reset_prefix_cache(self) -> bool: ...
    def swap(self, blocks: _Each[_V0Block], src_device: Any, dst_device: Any) -> dict[int, int]:
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
        _blocks: _Each[_V0Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> Self: ...
    @staticmethod
    def get_num_required_blocks(token_ids: _Each[int], block_size: int, num_lookahead_slots: int = 0) -> int:
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

    def get_num_blocks_touched_by_append_slots(self, token_ids: _Each[int], num_lookahead_slots: int) -> int:
        """Blocks that appending may write or take, at worst."""

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Tokens that the table does not have yet."""

    def mark_computed(self, num_tokens: int) -> None:
        """Let the full blocks be found by their keys that end within the first `num_tokens` tokens."""

    def update(self, blocks: _Each[_V0Block]) -> None:
        """Take over these blocks, or their new ids."""

def v0_hash_blocks(parent: int | None, token_ids: list[int], block_size: int, extra_hash: int | None) -> list[int]:
    """Keys of the full blocks of `token_ids`, the first after `parent`; a negative id is a token not known yet."""

_Goal: TypeAlias = Literal["max_id", "free_tail", "dense", "empty_pages"]
_Wanted: TypeAlias = tuple[_Goal | Literal["contiguous"], int] | tuple[_Goal | Literal["contiguous"], int, int]
_BlockIds: TypeAlias = NDArray[np.int64] | NDArray[np.int32] | _Each[int]

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

def plan_moves(
    goal: _Goal,
    number: int,
    *,
    num_blocks: int,
    live: _BlockIds,
    fixed: _BlockIds | None = None,
    moves: int | None = None,
) -> MovePlan:
    """Plan the fewest moves that bring live blocks where the goal wants them.

    However often a plan with a budget is made and carried out, the moves add up to those of one plan without.

    Args:
        goal: `"max_id"`: none above `number`. `"free_tail"`: none among the last `number` blocks. `"dense"`: as low as
            can be, give or take `number` ids. `"empty_pages"`: in as few pages of `number` blocks as can be.
        number: see above.
        num_blocks: blocks of the pool.
        live: block ids in use that can be moved.
        fixed: block ids that are neither moved nor moved into: leased, pinned, the null block.
        moves: budget of this plan; None means all that are needed.

    Raises:
        InvalidArgumentError: the goal is unknown, its page has no blocks, or a block is out of range.
    """

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
        """Plan a step's moves; nothing changes until `commit`.

        Args:
            goal: see `plan_moves`.
            number: see `plan_moves`.
            slack: the plan is empty while the goal is missed by no more ids or pages; once begun, it is carried on
                until the goal is met.
            moves: budget of this step.

        Raises:
            InvalidArgumentError: the goal is unknown, or its page has no blocks.
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

    def runs(self, sequences: _Each[_BlockIds]) -> tuple[int, int]:
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
