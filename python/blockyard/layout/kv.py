"""The layout of a KV cache in an engine's tensors, and of one block in a row of bytes.

A *row* holds one block of all layers: tensor after tensor, each with the layout's dimensions in order, without the
block dimension. With `"kv_first"` and `"blocks_first"` each layer has K, then V, both token-major
`[block_size, heads, dim]`. Host cache, staging buffers and stores hold rows; the device holds the engine's tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast, get_args

from blockyard._core import CacheGroup
from blockyard.errors import LayoutError
from blockyard.layout.dimensions import Order, check_kind, orders_of, shorten, spell_out
from blockyard.layout.extents import check_apart, extent_of
from blockyard.layout.model import LayerCache, ModelMemory
from blockyard.layout.sizes import as_int

if TYPE_CHECKING:
    from torch import Tensor, dtype

LayoutKind = Literal["kv_first", "blocks_first"]
"""Named layouts; see `KVLayout` for all others."""
KINDS: Final[tuple[LayoutKind, ...]] = get_args(LayoutKind)

# ROCm's paged attention reads this many bytes at a time.
_VECTOR_BYTES = 16
# A prime unlike any other size in a layout.
_SENTINEL = 1_000_003

# Part of every fingerprint; incremented when the byte order of a row changes.
_ROW_FORMAT = 1
ITEM_SIZES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}


class BlockLayout(Protocol):
    """The interface between layouts and the copy engine: `KVLayout`, or `GroupedLayout` for several groups."""

    @property
    def num_layers(self) -> int:
        """Number of layers over all groups."""

    @property
    def bytes_per_block(self) -> int:
        """Size of one block over all layers, in bytes."""

    @property
    def view_layers(self) -> list[int]:
        """Layer of each view; if views are not in layer order, the first layer that any of them belongs to."""

    def tensor_shapes(self, num_blocks: int) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor that `views` takes."""

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Cut tensors into uint8 views `[blocks, bytes]`."""

    def row_views(self, rows: Tensor) -> list[Tensor]:
        """Cut rows, uint8 `[blocks, bytes_per_block]`, into the same pieces."""


@dataclass(frozen=True)
class KVLayout:
    """The layout of one cache group, whose tensors all have the same shape.

    Attributes:
        kind: `"kv_first"` for tensors `[2, blocks, block_size, heads, dim]`, `"blocks_first"` for
            `[blocks, 2, block_size, heads, dim]`, or the names of any other tensor's dimensions, outermost first:
            `"blocks"`, `"tokens"`, `"kv"`, `"heads"`, `"dim"`, and `"layers"` if one tensor holds all layers. `"*"`
            joins names that share a dimension, and `"slots"` is `"blocks*tokens"`. So MLA is `"blocks tokens dim"`,
            flat slots are `"slots heads dim"`, and `"flat"` is `"kv blocks tokens*heads*dim"`. `"dim/x"` and `"x"`
            split a head into vectors of `x` adjacent elements. `"|"` separates the dimensions of keys from those of
            values: `"rocm"` is `"blocks heads dim/x tokens x | blocks heads dim tokens"`.
        num_layers: number of layers in the group.
        block_size: number of tokens in a block.
        num_kv_heads: number of K heads (and of V heads) in a layer; 1 if no dimension is `"heads"`.
        head_size: number of elements in a head.
        dtype: torch's name for the element type, without `torch.`.
        itemsize: bytes per element; 0 looks it up by dtype.
        tensors_per_layer: 2 if keys and values are separate tensors, in the order K and V of layer 0, of layer 1, ...;
            always 2 with `"|"`.
        split: number of dimensions after the block dimension that become separate views, which padding inside blocks
            requires. It changes the views, not the bytes of a row.
        x: size of dimension `"x"`, if the kind has one; 0 means as many elements as fit in 16 bytes.
        cache_groups: the cache groups that share these tensors, from `from_config`; `KVCache` passes them to its
            manager. Not part of the layout of a row.

    Raises:
        LayoutError: a number is not positive, kind or dtype is unknown, or the kind's names are inconsistent.

    Example:
        >>> import torch
        >>> from blockyard import KVLayout
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
        >>> layout.bytes_per_block, layout.tensor_shape(100)
        (16384, (2, 100, 16, 2, 64))
        >>> tensors = [torch.zeros(2, 100, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
        >>> KVLayout.from_tensors(tensors, kind="kv_first") == layout
        True
    """

    kind: str
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    itemsize: int = 0
    tensors_per_layer: int = 1
    split: int = 0
    x: int = 0
    cache_groups: tuple[CacheGroup, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_kind(self.kind)
        names = self._order(0).names
        # Equal layouts have one fingerprint: a store's blocks are found by it.
        for name in (
            "num_layers",
            "block_size",
            "num_kv_heads",
            "head_size",
            "itemsize",
            "tensors_per_layer",
            "split",
            "x",
        ):
            object.__setattr__(self, name, as_int(name, getattr(self, name), LayoutError))
        if "|" in spell_out(self.kind):
            object.__setattr__(self, "tensors_per_layer", 2)
        for name in ("num_layers", "block_size", "num_kv_heads", "head_size", "tensors_per_layer"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_kv_heads > 1 and "heads" not in names:
            raise LayoutError(f"num_kv_heads is {self.num_kv_heads}, {self.kind!r} has no heads")
        if self.tensors_per_layer > 1 + ("kv" not in names):
            raise LayoutError(f"tensors_per_layer is {self.tensors_per_layer}, {self.kind!r} allows 1, or 2 without kv")
        if not 0 <= self.split < len(self._order(0).inner):
            raise LayoutError(f"split is {self.split}, must be 0 to {len(self._order(0).inner) - 1}")
        known = ITEM_SIZES.get(self.dtype, 0)
        if self.itemsize < 0 or (self.itemsize and known not in {0, self.itemsize}):
            raise LayoutError(f"itemsize is {self.itemsize} bytes, {self.dtype} has {known}")
        if not self.itemsize and not known:
            known_names = ", ".join(sorted(ITEM_SIZES))
            raise LayoutError(f"dtype is {self.dtype!r}, must be one of {known_names}, or be given with its itemsize")
        object.__setattr__(self, "itemsize", self.itemsize or known)
        object.__setattr__(self, "x", self._vector() if "x" in names else 0)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Tensor],
        *,
        kind: str | None = None,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
        tensors_per_layer: int = 1,
    ) -> KVLayout:
        """Describe an engine's cache tensors.

        Args:
            tensors: tensors of one shape on any device; gaps between and inside blocks are allowed.
            kind: their layout, as in the attributes. None infers it from the position of the dimension of size 2,
                for tensors of five dimensions. `probe_kind` infers it from an engine's attention backend.
            block_size: number of tokens in a block; needed if slots or blocks are flat.
            num_kv_heads: number of K heads, if heads and their elements share a dimension; None means a single head.
            tensors_per_layer: 2 for separate keys and values, see `interleave`.

        Returns:
            A layout whose `views` accepts these tensors.

        Raises:
            LayoutError: the tensors differ, do not have these dimensions or have blocks that share memory; or the kind
                is ambiguous, for example with exactly two blocks.
        """
        if not tensors:
            raise LayoutError("got 0 tensors, a layout needs at least one")
        shape = tuple(tensors[0].shape)
        order = orders_of(kind)[0] if kind is not None else None
        wanted = len(order.dimensions) if order else 5
        if len(shape) != wanted:
            raise LayoutError(f"tensor 0 has {len(shape)} dimensions, wanted {wanted}: shape {list(shape)}")
        kind = kind if kind is not None else _derive_kind(shape)
        check_kind(kind)
        order = orders_of(kind)[0]
        known = {"tokens": block_size, "heads": num_kv_heads, "kv": 2}
        sizes = order.read(
            shape, {name: size for name, size in known.items() if size is not None and name in order.names}
        )
        layout = cls(
            kind=kind,
            num_layers=sizes.get("layers", len(tensors) // (2 if "|" in spell_out(kind) else tensors_per_layer)),
            block_size=sizes["tokens"],
            num_kv_heads=sizes.get("heads", 1),
            head_size=sizes["dim"] if "dim" in sizes else sizes["dim/x"] * sizes["x"],
            dtype=str(tensors[0].dtype).removeprefix("torch."),
            itemsize=tensors[0].element_size(),
            tensors_per_layer=tensors_per_layer,
            x=sizes.get("x", 0),
        )
        layout = replace(layout, split=max(layout._padded(index, tensor) for index, tensor in enumerate(tensors)))
        layout.check(tensors)
        return layout

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | str | Path | Any,
        *,
        block_size: int = 16,
        dtype: str | None = None,
        mtp: bool = False,
    ) -> KVLayout:
        """Describe the cache that a model needs, from its Hugging Face configuration.

        Full and window layers with equal keys and values are grouped as vLLM groups them: each group has one layer in
        every tensor, and all groups share block ids.

        Args:
            config: a dictionary, the path of a `config.json` or its folder, or a configuration object of transformers.
            block_size: number of tokens in a block.
            dtype: dtype of keys and values, such as `"float8_e4m3fn"` or `"fp8"`; None for the configuration's.
            mtp: also the model's MTP layers. They share the group of full attention, or of a window, which becomes a
                drafter's.

        Returns:
            A layout of kind `"kv_first"`, or `"blocks tokens dim"` with latent attention, and its `cache_groups`.

        Raises:
            InvalidArgumentError: the configuration lacks a field, or has one that is not known.
            LayoutError: no layout of equal blocks holds exactly what the model caches, such as with recurrent layers.

        Example:
            >>> from blockyard import KVLayout
            >>> config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
            >>> config |= {"model_type": "gpt_oss", "sliding_window": 128}
            >>> config |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
            >>> layout = KVLayout.from_config(config)
            >>> layout.num_layers, layout.bytes_per_block, layout.cache_groups
            (2, 16384, (CacheGroup.full_attention(), CacheGroup.sliding_window(128)))
        """
        memory = ModelMemory.from_config(config, dtype=dtype, mtp=mtp)
        try:
            first, width = memory.layers[0] if memory.layers else None, _group_width(memory.layers)
        except LayoutError as error:
            raise LayoutError(f"{error}; other models have an ArenaLayout.from_config") from None
        if first is None or memory.dtype not in ITEM_SIZES:
            raise LayoutError(f"config caches {len(memory.layers)} layers of {memory.dtype}, which no layout describes")
        size = first.head_size if first.heads else first.entry_bytes // ITEM_SIZES[memory.dtype]
        return cls(
            "kv_first" if first.heads else "blocks tokens dim",
            num_layers=width,
            block_size=block_size,
            num_kv_heads=first.heads or 1,
            head_size=size,
            dtype=memory.dtype,
            cache_groups=_groups_of(memory.layers, width),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a tensor's dimensions, outermost first; those of the keys if the kind has a `"|"`."""
        return tuple(spell_out(self.kind).partition("|")[0].split())

    @property
    def kv_dim_before_num_blocks(self) -> bool | None:
        """Whether the K/V dimension comes before the block dimension; None without a K/V dimension."""
        order = self._order(0)
        return "kv" in order.before if "kv" in order.names else None

    @property
    def num_tensors(self) -> int:
        """Number of tensors that `views` takes."""
        return self.tensors_per_layer * (1 if "layers" in self.names else self.num_layers)

    @property
    def bytes_per_block(self) -> int:
        """Size of one block in bytes, over all layers, keys and values."""
        return sum(self._piece_sizes)

    @property
    def piece_sizes(self) -> list[int]:
        """Width in bytes of every view that `views` returns, in the same order."""
        return list(self._piece_sizes)

    @cached_property
    def _piece_sizes(self) -> tuple[int, ...]:
        sizes, found = self._sizes(), []
        for index in range(self.num_tensors):
            outer, inner = self._parts(index)
            width = prod(sizes[name] for name in inner) * self.itemsize
            found += [width] * prod(sizes[name] for name in outer)
        return tuple(found)

    @property
    def view_layers(self) -> list[int]:
        """Layer of each view that `views` returns, in order; all 0 if views are not in layer order."""
        count = len(self.piece_sizes)
        follows = "layers" not in self.names or (self.names[0] == "layers" and self.tensors_per_layer == 1)
        return [index * self.num_layers // count if follows else 0 for index in range(count)]

    def tensor_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the first cache tensor; with a `"|"` in the kind, tensors of values differ."""
        return self._order(0).shape(self._sizes(as_int("num_blocks", num_blocks, LayoutError)))

    def tensor_shapes(self, num_blocks: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of every tensor that `views` takes."""
        sizes = self._sizes(as_int("num_blocks", num_blocks, LayoutError))
        return [(self._order(index).shape(sizes), self.dtype) for index in range(self.num_tensors)]

    def planes(self, index: int) -> int:
        """Return the number of planes of a tensor. A plane is a region with one part of every block, in block order."""
        sizes = self._sizes()
        return prod(sizes[name] for name in self._order(index).before)

    def num_blocks(self, tensor: Tensor) -> int:
        """Return the number of blocks in a cache tensor; with a `"|"` in the kind, a tensor of keys."""
        return self._order(0).num_blocks(tensor, self._sizes())

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Check that cache tensors have this layout.

        Args:
            tensors: all tensors of the group.

        Raises:
            LayoutError: number, shape, dtype, device or strides do not match, a tensor requires grad, or two share
                memory; the message has the numbers.
        """
        self.views(tensors)

    def _check_each(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.num_tensors:
            raise LayoutError(
                f"got {len(tensors)} tensors, the layout has {self.num_layers} layers in {self.num_tensors}"
            )
        for index, tensor in enumerate(tensors):
            self._check_tensor(index, tensor, tensors[0])

    def _check_tensor(self, index: int, tensor: Tensor, first: Tensor) -> None:
        shape, strides, order = tuple(tensor.shape), tensor.stride(), self._order(index)
        blocks = self.num_blocks(first) if first.dim() == len(self._order(0).dimensions) else 0
        wanted = order.shape(self._sizes(blocks))
        if shape != wanted:
            raise LayoutError(f"tensor {index} has shape {list(shape)}, {self.kind} wants {list(wanted)}")
        name = str(tensor.dtype).removeprefix("torch.")
        if name != self.dtype or tensor.element_size() != self.itemsize:
            raise LayoutError(f"tensor {index} is {name}, the layout says {self.dtype}")
        if tensor.requires_grad:
            raise LayoutError(f"tensor {index} requires grad, which block copies do not support: pass its detach()")
        if tensor.device != first.device:
            raise LayoutError(f"tensor {index} is on {tensor.device}, tensor 0 on {first.device}")
        if self._padded(index, tensor) > self.split:
            dense = _dense([self._sizes()[name] for name in order.inner])
            raise LayoutError(f"tensor {index} has strides {list(strides)}, inside a block they must be {dense}")
        if not _apart(shape, strides):
            raise LayoutError(f"tensor {index} has strides {list(strides)}: its blocks overlap")

    def _padded(self, index: int, tensor: Tensor) -> int:
        """Return how many dimensions after the block dimension have padding at or after them."""
        order, by_name = self._order(index), self._sizes()
        if tensor.dim() != len(order.dimensions):
            return 0  # reported later, when shapes are compared
        strides, inner = order.strides(tensor, by_name), order.inner
        sizes = [by_name[name] for name in inner]
        fits = [
            size == 1 or strides[name] == want for name, size, want in zip(inner, sizes, _dense(sizes), strict=True)
        ]
        # The bytes of an element are adjacent, but torch can only view them if the innermost stride is 1.
        if tensor.stride(-1) != 1 and (sizes[-1] > 1 or self.itemsize > 1):
            raise LayoutError(f"a tensor has strides {list(tensor.stride())}, the innermost must be 1")
        return max((at + 1 for at, fit in enumerate(fits) if not fit), default=0)

    def _sizes(self, num_blocks: int = 0) -> dict[str, int]:
        return {
            "layers": self.num_layers,
            "kv": 2,
            "blocks": num_blocks,
            "tokens": self.block_size,
            "heads": self.num_kv_heads,
            "dim": self.head_size,
            "dim/x": self.head_size // self.x if self.x else 0,
            "x": self.x,
        }

    def _vector(self) -> int:
        """Check and return the number of elements in a vector."""
        x = self.x or max(1, _VECTOR_BYTES // self.itemsize)
        if x < 1 or self.head_size % x:
            raise LayoutError(f"x is {x}, must divide head_size, which is {self.head_size}")
        return x

    def _order(self, index: int) -> Order:
        """Return the dimensions of a tensor by its index."""
        orders = orders_of(self.kind)
        return orders[index % len(orders)]

    def _parts(self, index: int) -> tuple[list[str], tuple[str, ...]]:
        """Return the names to index for each view of a tensor, and the names inside each view."""
        order = self._order(index)
        inner = order.inner[min(self.split, len(order.inner) - 1) :]
        return [name for name in order.names if name != "blocks" and name not in inner], inner

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Cut cache tensors into canonical views that share their memory.

        Args:
            tensors: all tensors of the group; they must pass `check`.

        Returns:
            uint8 views `[blocks, bytes]` with contiguous rows, in row byte order. Their widths are `piece_sizes`, which
            add up to `bytes_per_block`.

        Raises:
            LayoutError: the tensors do not have this layout, or two of them share memory.
        """
        self._check_each(tensors)
        views: list[Tensor] = []
        sizes = self._sizes()
        for index, tensor in enumerate(tensors):
            flat, (outer, inner) = tensor.view(_byte_dtype(tensor)), self._parts(index)
            strides = self._order(index).strides(tensor, sizes)
            width = prod(sizes[name] for name in inner) * self.itemsize
            shape = self._order(index).num_blocks(tensor, sizes), width
            for places in product(*(range(sizes[name]) for name in outer)):
                start = sum(place * strides[name] for name, place in zip(outer, places, strict=True))
                row = strides["blocks"] * self.itemsize
                views.append(flat.as_strided(shape, (row, 1), flat.storage_offset() + start * self.itemsize))
        check_views(views)
        return views

    def row_views(self, rows: Tensor) -> list[Tensor]:
        """Split rows into the same pieces as `views` splits cache tensors.

        Args:
            rows: uint8 `[blocks, bytes_per_block]` with contiguous rows.

        Returns:
            uint8 views `[blocks, bytes]`; view i corresponds to view i of the cache tensors.

        Raises:
            LayoutError: the rows have the wrong shape, dtype or stride.
        """
        return cut_rows(rows, self._piece_sizes)

    def fingerprint(self) -> str:
        """Return the SHA-256, in hexadecimal, of all fields that determine the bytes of a row.

        It is the same in every process. Layouts that differ in any field except `split` have different fingerprints. It
        is part of the namespace of keys that leave the process.
        """
        fields = {
            name: getattr(self, name)
            for name in ("kind", "num_layers", "block_size", "num_kv_heads", "head_size", "dtype", "itemsize")
        }
        if self.tensors_per_layer > 1:
            fields["tensors_per_layer"] = self.tensors_per_layer
        if self.x:
            fields["x"] = self.x
        described = json.dumps({"format": _ROW_FORMAT, **fields}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(described.encode("ascii")).hexdigest()


def _lifecycles(layers: Sequence[LayerCache]) -> dict[tuple[str, int | None], int]:
    """Count the layers of each lifecycle, those with full attention first."""
    found: dict[tuple[str, int | None], int] = {}
    for layer in sorted(layers, key=lambda layer: layer.entries or 0):
        key = (layer.kind, layer.entries)
        found[key] = found.get(key, 0) + 1
    return found


def _group_width(layers: Sequence[LayerCache]) -> int:
    """Return the number of layers per group if groups of equal blocks hold all layers exactly. Raises LayoutError."""
    for layer in layers:
        if layer.kind not in {"full", "mla", "window"} or layer.ratio > 1:
            raise LayoutError(f"config has a layer that caches {layer.kind!r} entries, must be full, mla or window")
        if layer.kind != "mla" and not layer.head_size:
            raise LayoutError(f"config has a {layer.kind} layer whose keys and values differ in size, must be equal")
        if layer.entry_bytes != layers[0].entry_bytes or layer.heads != layers[0].heads:
            sizes = sorted({layer.entry_bytes for layer in layers})
            raise LayoutError(f"config has layers of {sizes} bytes per token, must have equal keys and values")
    counts = list(_lifecycles(layers).values())
    width = min(counts, default=0)
    if any(count % width for count in counts):
        raise LayoutError(f"config has {counts} layers by kind, must be multiples of {width} to share blocks exactly")
    return width


def _groups_of(layers: Sequence[LayerCache], width: int) -> tuple[CacheGroup, ...]:
    groups: list[CacheGroup] = []
    # Both keep the same blocks; only the last entry of one tells a drafter's layers from others.
    drafts = {layer.entries for layer in layers if layer.is_draft}
    for (_, window), count in _lifecycles(layers).items():
        if window is None:
            group = CacheGroup.drafter() if None in drafts else CacheGroup.full_attention()
        else:
            group = CacheGroup.windowed_drafter(window) if window in drafts else CacheGroup.sliding_window(window)
        groups += [group] * (count // width)
    return tuple(groups)


def interleave(keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Interleave one tensor of keys and one of values per layer in the order that `tensors_per_layer=2` expects."""
    if len(keys) != len(values):
        raise LayoutError(f"got {len(keys)} tensors of keys and {len(values)} of values, must be as many")
    return [tensor for pair in zip(keys, values, strict=True) for tensor in pair]


def probe_kind(
    shape_of: Callable[[int, int, int, int], Sequence[int]], *, block_size: int, num_kv_heads: int, head_size: int
) -> str:
    """Infer a backend's layout from its shapes: a dimension that scales with an argument gets the argument's name.

    Args:
        shape_of: the backend's shape function of (number of blocks, block size, KV heads, head size).
        block_size: number of tokens in a block that the engine will use.
        num_kv_heads: number of K heads.
        head_size: number of elements in a head.

    Returns:
        A kind for `KVLayout`.

    Raises:
        LayoutError: a dimension that scales with no argument cannot be K/V, or several could be.

    Source: vLLM 0.33 determines `kv_dim_before_num_blocks` with such a probe.
    """
    usual = (_SENTINEL, block_size, num_kv_heads, head_size)
    shape = tuple(shape_of(*usual))
    names: list[list[str]] = [[] for _ in shape]
    for argument, name in enumerate(("blocks", "tokens", "heads", "dim")):
        other = tuple(shape_of(*(value * (1 + (at == argument)) for at, value in enumerate(usual))))
        if len(other) != len(shape):
            raise LayoutError(f"the backend's shapes are {list(shape)} and {list(other)}: numbers of dimensions differ")
        for place in (place for place, size in enumerate(shape) if other[place] != size):
            if other[place] != 2 * shape[place]:
                raise LayoutError(f"dimension {place} of the backend's shape {list(shape)} depends on {name} and more")
            names[place].append(name)
    # A head split into vectors: the vector dimension scales with no argument.
    heads = [place for place, found in enumerate(names) if found == ["dim"]]
    vectors = (
        [
            place
            for place, found in enumerate(names)
            if not found and shape[heads[0]] * shape[place] == head_size > shape[heads[0]]
        ]
        if heads
        else []
    )
    if len(heads) == 1 == len(vectors):
        names[heads[0]], names[vectors[0]] = ["dim/x"], ["x"]
    unnamed = [place for place, found in enumerate(names) if not found]
    if [shape[place] for place in unnamed] not in ([], [2]):
        raise LayoutError(
            f"dimensions {unnamed} of the backend's shape {list(shape)} have no name, must be one of size 2 for K and V"
        )
    kind = " ".join("*".join(found) or "kv" for found in names)
    check_kind(kind)
    return shorten(kind)


def _dense(sizes: Sequence[int]) -> list[int]:
    """Return the strides without padding, in elements."""
    return [prod(sizes[at + 1 :]) for at in range(len(sizes))]


def _apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether no elements share memory: each dimension must step past all dimensions of smaller stride."""
    reach = 1
    if 0 in shape:
        return True
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += stride * (size - 1)
    return True


def check_layout(layout: object, *, others: str = "") -> None:
    """Check that an argument is a layout, a KVLayout or one of `others`; duck-typed, see `BlockLayout`."""
    if not callable(getattr(layout, "tensor_shapes", None)):
        raise LayoutError(f"layout is {layout!r:.100}, must be a KVLayout{others}")


def check_views(views: Sequence[Tensor]) -> None:
    """Check that views of cache tensors share no memory. Raises LayoutError."""
    if views[0].device.type != "meta":
        check_apart("views of the cache tensors", [extent_of(view) for view in views])


def cut_rows(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split rows, uint8 `[blocks, sum of sizes]`, into views `[blocks, size]`. Raises LayoutError if they differ."""
    shape, name = tuple(rows.shape), str(rows.dtype).removeprefix("torch.")
    if name != "uint8" or len(shape) != 2 or shape[1] != sum(sizes) or rows.stride(1) != 1:
        raise LayoutError(
            f"rows are {name} {list(shape)} with strides {list(rows.stride())}, "
            f"wanted uint8 [blocks, {sum(sizes)}] with contiguous rows"
        )
    return list(rows.split_with_sizes(list(sizes), 1))


def _derive_kind(shape: tuple[int, ...]) -> LayoutKind:
    fits = [kind for kind, place in (("kv_first", 0), ("blocks_first", 1)) if shape[place] == 2]
    if len(fits) != 1:
        problem = "matches more than one layout: pass its kind" if fits else "matches no layout"
        raise LayoutError(f"a cache tensor of shape {list(shape)} {problem}: keys and values need a dimension of 2")
    return cast(LayoutKind, fits[0])


def _byte_dtype(tensor: Tensor) -> dtype:
    """Return uint8 of the tensor's library; torch is not imported for callers that only read shapes."""
    return tensor[:0].byte().dtype
