"""How the KV cache of one cache group lies in an engine's tensors, and how one block lies in a row of bytes.

A *row* holds one block of all layers, side by side: for each layer K, then V, each token-major `[block_size, heads,
dim]`. Host cache, staging buffers and external tiers hold rows; the device holds the engine's own tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from blockyard.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor, dtype

LayoutKind = Literal["kv_first", "blocks_first"]
KINDS: Final[tuple[LayoutKind, ...]] = get_args(LayoutKind)

# Goes into every fingerprint: raised whenever the order of bytes in a row changes.
_ROW_FORMAT = 1
_ITEM_SIZES = {
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


@dataclass(frozen=True)
class KVLayout:
    """The shape of one cache group: one tensor per layer, keys and values together.

    Attributes:
        kind: `"kv_first"` for tensors `[2, blocks, block_size, heads, dim]`, `"blocks_first"` for
            `[blocks, 2, block_size, heads, dim]`.
        num_layers: tensors in the group.
        block_size: tokens in a block.
        num_kv_heads: heads of K (and of V) in a layer.
        head_size: elements of one head.
        dtype: torch's name of the element type, without `torch.`.
        itemsize: bytes of an element; 0 looks the dtype up by its name.

    Raises:
        LayoutError: a number is not positive, or kind or dtype is unknown.
    """

    kind: LayoutKind
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    itemsize: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayoutError(f"layout kind {self.kind!r} is not one of {', '.join(KINDS)}")
        for name in ("num_layers", "block_size", "num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}, it must be at least 1")
        known = _ITEM_SIZES.get(self.dtype, 0)
        if self.itemsize < 0 or (self.itemsize and known not in {0, self.itemsize}):
            raise LayoutError(f"itemsize is {self.itemsize} bytes, {self.dtype} has {known}")
        if not self.itemsize and not known:
            raise LayoutError(f"dtype {self.dtype!r} is not known by its name: give its itemsize")
        object.__setattr__(self, "itemsize", self.itemsize or known)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], *, kind: LayoutKind | None = None) -> KVLayout:
        """Describe an engine's cache tensors.

        Args:
            tensors: one 5-D tensor per layer, any device; the three inner dimensions contiguous.
            kind: which layout they have; None derives it from the place of the dimension that has size 2.

        Returns:
            A layout whose `views` accepts these tensors.

        Raises:
            LayoutError: the tensors differ, have another number of dimensions or padded blocks, or the kind is
                ambiguous, as it is with two blocks.
        """
        if not tensors:
            raise LayoutError("a layout needs at least one tensor, 0 were given")
        first = tensors[0]
        shape = tuple(first.shape)
        if len(shape) != 5:
            raise LayoutError(f"tensor 0 has {len(shape)} dimensions, a cache has 5: shape {list(shape)}")
        layout = cls(
            kind=kind if kind is not None else _derive_kind(shape),
            num_layers=len(tensors),
            block_size=shape[2],
            num_kv_heads=shape[3],
            head_size=shape[4],
            dtype=str(first.dtype).removeprefix("torch."),
            itemsize=first.element_size(),
        )
        layout.check(tensors)
        return layout

    @property
    def _bytes_per_half(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * self.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.num_layers * self._bytes_per_half

    @property
    def piece_sizes(self) -> list[int]:
        """Width in bytes of every view that `views` returns, in the same order."""
        if self.kind == "kv_first":
            return [self._bytes_per_half] * (2 * self.num_layers)
        return [2 * self._bytes_per_half] * self.num_layers

    def tensor_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Give the shape of one layer's cache tensor that holds `num_blocks` blocks."""
        outer = (2, num_blocks) if self.kind == "kv_first" else (num_blocks, 2)
        return (*outer, self.block_size, self.num_kv_heads, self.head_size)

    def num_blocks(self, tensor: Tensor) -> int:
        """Give the number of blocks that one layer's cache tensor holds."""
        return int(tensor.shape[1 if self.kind == "kv_first" else 0])

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Check that cache tensors have this layout.

        Args:
            tensors: one per layer.

        Raises:
            LayoutError: number, shape, dtype, device or strides do not fit; the message has the numbers.
        """
        if len(tensors) != self.num_layers:
            raise LayoutError(f"{len(tensors)} tensors were given, the layout has {self.num_layers} layers")
        for index, tensor in enumerate(tensors):
            self._check_tensor(index, tensor, tensors[0])

    def _check_tensor(self, index: int, tensor: Tensor, first: Tensor) -> None:
        shape = tuple(tensor.shape)
        wanted = self.tensor_shape(self.num_blocks(first)) if first.dim() == 5 else self.tensor_shape(0)
        if shape != wanted:
            raise LayoutError(f"tensor {index} has shape {list(shape)}, {self.kind} wants {list(wanted)}")
        name = str(tensor.dtype).removeprefix("torch.")
        if name != self.dtype or tensor.element_size() != self.itemsize:
            raise LayoutError(f"tensor {index} is {name}, the layout says {self.dtype}")
        if tensor.device != first.device:
            raise LayoutError(f"tensor {index} is on {tensor.device}, tensor 0 on {first.device}")
        strides = tensor.stride()
        dense = (self.num_kv_heads * self.head_size, self.head_size, 1)
        inner = zip(strides[2:], dense, shape[2:], strict=True)
        if strides[4] != 1 or any(has != want for has, want, size in inner if size > 1):
            raise LayoutError(f"tensor {index} has strides {list(strides)}, inside a block they must be {list(dense)}")
        if self.kind == "blocks_first" and strides[1] != dense[0] * self.block_size:
            raise LayoutError(f"tensor {index} has strides {list(strides)}: K and V of a block must lie side by side")
        if shape.count(0) == 0 and not _rows_apart(self.kind, shape, strides):
            raise LayoutError(f"tensor {index} has strides {list(strides)}: its blocks overlap")

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Cut cache tensors into canonical views that share their memory.

        Args:
            tensors: one per layer, as `check` wants them.

        Returns:
            uint8 views `[blocks, bytes]` whose rows are contiguous, in the order of a row's bytes; their widths are
            `piece_sizes` and add up to `bytes_per_block`.

        Raises:
            LayoutError: the tensors do not have this layout.
        """
        self.check(tensors)
        views: list[Tensor] = []
        for tensor in tensors:
            flat = tensor.view(_byte_dtype(tensor))
            halves = [flat[0], flat[1]] if self.kind == "kv_first" else [flat]
            views.extend(half.view(half.shape[0], -1) for half in halves)
        return views

    def row_views(self, rows: Tensor) -> list[Tensor]:
        """Cut rows into the same pieces as `views` cuts cache tensors.

        Args:
            rows: uint8 `[blocks, bytes_per_block]`, rows contiguous.

        Returns:
            uint8 views `[blocks, bytes]`; view i takes the bytes of view i of the cache tensors.

        Raises:
            LayoutError: the rows have another shape, dtype or stride.
        """
        shape, name = tuple(rows.shape), str(rows.dtype).removeprefix("torch.")
        if name != "uint8" or len(shape) != 2 or shape[1] != self.bytes_per_block or rows.stride(1) != 1:
            raise LayoutError(
                f"rows are {name} {list(shape)} with strides {list(rows.stride())}, "
                f"wanted uint8 [blocks, {self.bytes_per_block}] with contiguous rows"
            )
        views: list[Tensor] = []
        start = 0
        for size in self.piece_sizes:
            views.append(rows[:, start : start + size])
            start += size
        return views

    def fingerprint(self) -> str:
        """Give the SHA-256, in hexadecimal, of everything here that decides the bytes of a row.

        It is the same in every process; two layouts that differ in any field have different ones.
        """
        described = json.dumps({"format": _ROW_FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(described.encode("ascii")).hexdigest()


def _derive_kind(shape: tuple[int, ...]) -> LayoutKind:
    fits = [kind for kind, place in (("kv_first", 0), ("blocks_first", 1)) if shape[place] == 2]
    if len(fits) != 1:
        problem = "fits more than one layout, name its kind" if fits else "fits no layout"
        raise LayoutError(f"a cache tensor of shape {list(shape)} {problem}: keys and values are a dimension of size 2")
    return cast(LayoutKind, fits[0])


def _rows_apart(kind: LayoutKind, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether no two (half, block) places of a tensor share memory; strides are in elements."""
    piece = shape[2] * shape[3] * shape[4]
    if kind == "blocks_first":
        return shape[0] == 1 or strides[0] >= 2 * piece
    halves, blocks = strides[0], strides[1]
    if shape[1] == 1:
        return halves >= piece
    # K and V either follow one another as wholes, or alternate inside one block's stride.
    whole = halves >= blocks * (shape[1] - 1) + piece and blocks >= piece
    return whole or (halves >= piece and blocks >= halves + piece)


def _byte_dtype(tensor: Tensor) -> dtype:
    """Give uint8 of the tensor's own library: importing torch here would load it for those who only read shapes."""
    return tensor[:0].byte().dtype
