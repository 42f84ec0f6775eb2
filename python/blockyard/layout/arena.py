"""The layout of blocks whose bytes depend on the cache group, and of the arena that holds them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blockyard._core import CacheGroup
from blockyard.errors import LayoutError
from blockyard.layout.kv import ITEM_SIZES, cut_rows
from blockyard.layout.model import LayerCache, ModelMemory
from blockyard.layout.sizes import as_int

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ArenaLayout", "LayerField", "PageLayout"]

PAGE: Final = 4096
"""A file store reads and writes whole pages."""
_MAX_CUTS: Final = 64
_LARGE_STATES: Final = 32 << 20
"""Bytes of a sequence's states from which on they are split. With less, more groups cost more than they save."""
ALIGNMENT: Final = 16
"""Fields of a block begin at multiples of this many bytes."""

# The cache group of each kind of layer, in the order in which a manager wants them.
_LIFECYCLES: Final[dict[str, str]] = {
    "full": "full_attention",
    "mla": "full_attention",
    "indexer": "full_attention",
    "window": "sliding_window",
    "chunked": "chunked_attention",
    "compressor": "chunked_attention",
    "recurrent": "recurrent",
    "conv": "recurrent",
    "cross": "cross_attention",
}

# The field of a cache that has no keys and values in heads.
_NAMES: Final = {"mla": "latent", "indexer": "index", "window": "window", "compressor": "open"}
_DRAFTERS: Final = {"full_attention": "drafter", "sliding_window": "windowed_drafter"}


@dataclass(frozen=True)
class LayerField:
    """One tensor of a layer: for each token of a block, for several tokens, or one state.

    Attributes:
        layer: number of the layer.
        name: what it is, such as `"keys"`.
        shape: its dimensions for one token, for one compressed entry, or those of a state.
        dtype: torch's name for the element type, without `torch.`.
        is_state: whether a block holds one of it, instead of one for each token.
        ratio: tokens of a compressed entry.

    Raises:
        LayoutError: a number is not an int, or `ratio` is below 1, or not 1 for a state.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    is_state: bool = False
    ratio: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", as_int("layer", self.layer, LayoutError))
        object.__setattr__(self, "shape", tuple(as_int("shape", size, LayoutError) for size in self.shape))
        object.__setattr__(self, "ratio", as_int("ratio", self.ratio, LayoutError))
        if self.ratio < 1 or (self.is_state and self.ratio > 1):
            raise LayoutError(f"ratio is {self.ratio}, must be {'1 for a state' if self.is_state else 'at least 1'}")

    def shape_in_block(self, block_tokens: int) -> tuple[int, ...]:
        """Return the shape of all entries of a block, or of its state.

        Raises:
            LayoutError: `block_tokens` is not an int, or not a multiple of `ratio`.
        """
        if self.is_state:
            return self.shape
        entries, rest = divmod(as_int("block_tokens", block_tokens, LayoutError), self.ratio)
        if rest:
            raise LayoutError(f"block_tokens is {block_tokens}, must be a multiple of {self.ratio}, an entry's tokens")
        return (entries, *self.shape)

    def num_bytes(self, block_tokens: int) -> int:
        """Return its bytes in a block."""
        return prod(self.shape_in_block(block_tokens)) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class PageLayout:
    """Blocks of one page class: pieces of bytes at one stride, `[blocks, bytes]`.

    Attributes:
        bytes_per_block: bytes of a block.
    """

    bytes_per_block: int
    num_layers = 1

    @property
    def view_layers(self) -> list[int]:
        """The only view has all layers."""
        return [0]

    def tensor_shapes(self, num_blocks: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of the only tensor."""
        return [((num_blocks, self.bytes_per_block), "uint8")]

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensor itself, uint8 `[blocks, bytes]`; rows may lie apart. Raises LayoutError."""
        (blocks,) = tensors
        row = tuple(blocks.shape[1:])
        if not str(blocks.dtype).endswith("uint8") or row != (self.bytes_per_block,) or blocks.stride(1) != 1:
            raise LayoutError(
                f"blocks are {blocks.dtype} {list(blocks.shape)}, wanted uint8 [n, {self.bytes_per_block}]"
            )
        return [blocks]

    def row_views(self, rows: Tensor) -> list[Tensor]:
        """Return rows, uint8 `[blocks, bytes]`, as they are. Raises LayoutError."""
        return cut_rows(rows, [self.bytes_per_block])


@dataclass(frozen=True)
class ArenaLayout:
    """Cache groups whose blocks have bytes of their own, such as windows, full attention and states of a hybrid model.

    A block holds the fields of its group's layers one after the other. Groups with blocks of equal bytes are one page
    class. All classes share one arena of bytes, see `Arena`: `KVCache(layout, device_bytes="40GiB")`.

    Attributes:
        groups: each cache group with its layers' fields. The bytes of its blocks follow from these.
        block_size: tokens that a key stands for, and of a block unless the group has `block_tokens`.
        equal_blocks: give each group blocks of the widest group's bytes. There is a single page class then, which all
            features support, and blocks of narrow groups waste memory.

    Raises:
        LayoutError: there are no groups, one has no fields or already has bytes, or a dtype is unknown. Or the tokens
            of a block are not a multiple of those of a compressed entry.

    Example:
        >>> from blockyard.layout import ArenaLayout
        >>> config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        >>> config |= {"model_type": "gpt_oss", "sliding_window": 128}
        >>> config |= {"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}
        >>> layout = ArenaLayout.from_config(config)
        >>> [group.block_bytes for group in layout.cache_groups]
        [24576, 8192]
        >>> layout.fields[0]
        LayerField(layer=1, name='keys', shape=(2, 64), dtype='bfloat16', is_state=False, ratio=1)
    """

    groups: tuple[tuple[CacheGroup, tuple[LayerField, ...]], ...]
    block_size: int
    equal_blocks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", as_int("block_size", self.block_size, LayoutError))
        if self.block_size < 1:
            raise LayoutError(f"block_size is {self.block_size}, must be at least 1")
        if not self.groups:
            raise LayoutError("groups are (), must be at least one")
        for group, fields in self.groups:
            if not fields or group.block_bytes is not None:
                raise LayoutError(f"{group} has {len(fields)} fields, must have at least one, and no bytes of its own")
            for field in fields:
                if field.dtype not in ITEM_SIZES:
                    raise LayoutError(f"dtype is {field.dtype!r}, must be one of {', '.join(sorted(ITEM_SIZES))}")
                tokens = group.block_tokens or self.block_size
                if tokens % field.ratio:
                    name = "block_size" if group.block_tokens is None else "block_tokens"
                    must = f"a multiple of {field.ratio}, the tokens of a compressed entry of layer {field.layer}"
                    raise LayoutError(f"{name} is {tokens}, must be {must}")

    @classmethod
    def from_config(
        cls,
        config: ModelMemory | Mapping[str, Any] | str | Path | Any,
        *,
        block_size: int = 16,
        dtype: str | None = None,
        state_dtype: str | None = None,
        mtp: bool = False,
        equal_blocks: bool = False,
    ) -> ArenaLayout:
        """Describe the cache that a model needs, from its Hugging Face configuration.

        There is one cache group for each way in which layers keep tokens, with blocks of exactly their bytes. The
        states of a sequence are one block, or, if they are large, one in each of up to four groups: the null block of
        an arena, which holds nothing, is then as small as one of these. A model with compressed entries (DeepSeek-V4)
        needs a `block_size` of whole entries, 128 tokens; its windows and open entries have shorter blocks.

        Fields are `"keys"` and `"values"`, `[heads, size]` a token, or `"cross_keys"` and `"cross_values"`;
        `"latent"` and `"window"`, `[size]`; `"open"`, what a compressor keeps of a token that is not compressed yet,
        `[size]`; and bytes where a configuration tells no more: `"entry"` of a token, `"index"` of an indexer,
        `"state"`.

        Args:
            config: a `ModelMemory`, a dictionary, the path of a `config.json` or its folder, or a configuration object
                of transformers.
            block_size: number of tokens in a block.
            dtype: dtype of keys and values, see `ModelMemory.from_config`.
            state_dtype: dtype of recurrent states, see there.
            mtp: also the model's MTP layers. They share the group of full attention, or of a window, which becomes a
                drafter's.
            equal_blocks: as in the attributes.

        Raises:
            InvalidArgumentError: the configuration lacks a field, or has one that is not known.
            LayoutError: `block_size` is not a multiple of the tokens of a compressed entry.
        """
        memory = config
        if not isinstance(memory, ModelMemory):
            memory = ModelMemory.from_config(config, dtype=dtype, state_dtype=state_dtype, mtp=mtp)
        found: dict[tuple[str, int], list[LayerField]] = {}
        for layer in memory.layers:
            found.setdefault(_lifecycle(layer), []).extend(_fields_of(layer, memory.dtype))
        order = tuple(_LIFECYCLES.values())
        groups = sorted(found.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1]))
        # Both keep the same blocks; only the last entry of one tells a drafter's layers from others.
        drafts = {_lifecycle(layer) for layer in memory.layers if layer.is_draft}
        longest = max((layer.ratio for layer in memory.layers), default=1)
        lifecycles = (
            (_group(_DRAFTERS[kind] if (kind, window) in drafts else kind, window, tokens), tuple(part))
            for (kind, window), fields in groups
            for tokens in (_short(kind, window, longest) if longest > 1 else None,)
            for part in _parts(fields)
        )
        return cls(tuple(lifecycles), block_size, equal_blocks)

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups with the bytes of their blocks, for a `BlockManager`."""
        return tuple(
            group.with_blocks(tokens=group.block_tokens, bytes=size)
            for (group, _), size in zip(self.groups, self.block_bytes, strict=True)
        )

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        sizes = tuple(self.offsets(number)[-1] for number in range(len(self.groups)))
        return (max(sizes),) * len(sizes) if self.equal_blocks else sizes

    @cached_property
    def pages(self) -> tuple[PageLayout, ...]:
        """Layout of each page class's blocks, ordered by the first group that has it."""
        return tuple(PageLayout(size) for size in dict.fromkeys(self.block_bytes))

    def page_class(self, group: int) -> int:
        """Return the page class of a group's blocks, by the group's number."""
        return list(dict.fromkeys(self.block_bytes)).index(self.block_bytes[group])

    @property
    def fields(self) -> tuple[LayerField, ...]:
        """The fields of all groups, group by group: one for each of an engine's `tensors`."""
        return tuple(field for _, fields in self.groups for field in fields)

    @property
    def num_layers(self) -> int:
        """Number of layers, with those that cache nothing before the last that does."""
        return 1 + max(field.layer for field in self.fields)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block. Raises LayoutError if there are several page classes."""
        if len(self.pages) > 1:
            raise LayoutError(f"blocks of the groups have {list(self.block_bytes)} bytes, must be equal")
        return self.pages[0].bytes_per_block

    @cached_property
    def bytes_per_value(self) -> int:
        """Bytes of the values in which a prefix store keeps blocks: of each block, or of slices if they differ in size.

        Open such a store with this as its `bytes_per_block`.
        """
        sizes = sorted({page.bytes_per_block for page in self.pages})
        return sizes[0] if len(sizes) == 1 else min(_slice_sizes(sizes), key=lambda size: (_stored(sizes, size), -size))

    def by_group(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Split tensors in the order of `fields` into a list for each group. Raises LayoutError if not as many."""
        counts = [len(fields) for _, fields in self.groups]
        if len(tensors) != sum(counts):
            raise LayoutError(f"got {len(tensors)} tensors, the groups have {counts}")
        left = iter(tensors)
        return [list(islice(left, count)) for count in counts]

    def fingerprint(self) -> str:
        """Return the SHA-256, in hexadecimal, of all that determines the bytes of a block."""
        fields = [[repr(group), [_described(field) for field in fields]] for group, fields in self.groups]
        described = json.dumps(["arena", 1, self.block_size, list(self.block_bytes), fields], separators=(",", ":"))
        return hashlib.sha256(described.encode("ascii")).hexdigest()

    def tokens(self, group: int) -> int:
        """Return the tokens of a group's blocks."""
        return self.groups[group][0].block_tokens or self.block_size

    def offsets(self, group: int) -> list[int]:
        """Return where each field of a group begins in a block, and where the last one ends."""
        sizes = (field.num_bytes(self.tokens(group)) for field in self.groups[group][1])
        return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def _described(field: LayerField) -> list[Any]:
    """Return what of a field determines the bytes of a block. Fields without ratio are as before there was one."""
    return [value for name, value in vars(field).items() if name != "ratio" or value > 1]


def _lifecycle(layer: LayerCache) -> tuple[str, int]:
    """Return the kind of the cache group that a layer belongs to, and its window."""
    kind = "window" if layer.overlaps else layer.kind
    return _LIFECYCLES[kind], 0 if kind in {"recurrent", "conv", "cross"} else layer.entries or 0


def _short(kind: str, window: int, longest: int) -> int | None:
    """Return the tokens of the blocks of a group with a window, beside blocks of compressed entries.

    Blocks as long as those would waste most of what a window keeps. What a compressor has not compressed yet is kept
    only by running sequences, and none of it at most resume points: its blocks are the shortest.
    """
    if not window:
        return None
    return gcd(longest, max(1, window // (16 if kind == "chunked_attention" else 2)))


def num_state_groups(layers: int, num_bytes: int) -> int:
    """Return the number of groups for the states of some layers, which have this many bytes together."""
    counts = (4, 3, 2) if num_bytes > _LARGE_STATES else ()
    return next((count for count in counts if layers % count == 0), 1)


def _parts(fields: list[LayerField]) -> Iterator[list[LayerField]]:
    """Split the fields of a group, if they are large states of equal bytes, into those of several groups."""
    sizes, count = [field.num_bytes(1) for field in fields if field.is_state], 1
    if len(sizes) == len(fields) and len(set(sizes)) == 1:
        count = num_state_groups(len(fields), sum(sizes))
    size = len(fields) // count
    return (fields[at : at + size] for at in range(0, len(fields), size))


def _fields_of(layer: LayerCache, dtype: str) -> Iterator[LayerField]:
    """Yield the fields of one cache of a layer."""
    if layer.kind in {"recurrent", "conv"}:
        yield LayerField(layer.layer, "state", (layer.entry_bytes * (layer.entries or 0),), "uint8", is_state=True)
    elif layer.heads and layer.head_size:
        for name in ("cross_keys", "cross_values") if layer.kind == "cross" else ("keys", "values"):
            yield LayerField(layer.layer, name, (layer.heads, layer.head_size), dtype)
    else:
        name, size = "entry" if layer.heads else _NAMES.get(layer.kind, "entry"), layer.entry_bytes
        dtype = "float32" if name == "open" else dtype
        if name in {"entry", "index"} or size % ITEM_SIZES.get(dtype, size + 1):
            dtype = "uint8"
        yield LayerField(layer.layer, name, (size // ITEM_SIZES[dtype],), dtype, ratio=layer.ratio)


def _slice_sizes(sizes: Sequence[int]) -> set[int]:
    """Return sizes to consider for slices of blocks of these sizes."""
    unit = PAGE if sizes[0] >= 16 * PAGE else ALIGNMENT
    cuts = {-(-size // count) for size in sizes for count in range(1, _MAX_CUTS)}
    return {-(-cut // unit) * unit for cut in cuts if cut <= sizes[0]} or {sizes[0]}


def _stored(sizes: Sequence[int], cut: int) -> float:
    """Return the bytes that a store takes for a byte of a block, on average over blocks of these sizes."""
    header = min(PAGE, sizes[0] // 16)  # that of a file's slot is a page
    return sum(-(-size // cut) * (cut + header) / size for size in sizes)


def _group(kind: str, window: int, tokens: int | None) -> CacheGroup:
    make: Callable[..., CacheGroup] = getattr(CacheGroup, kind)
    group = make(window) if window else make()
    return group if tokens is None else group.with_blocks(tokens=tokens)
