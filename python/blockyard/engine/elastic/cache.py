"""KV caches whose memory grows and shrinks while in use: tensors keep their addresses, and blocks their ids.

Addresses are reserved once, for the maximum number of blocks; memory behind them is added and removed in chunks: system
pages on a CPU (`elastic/host.py`), driver allocations on a GPU (`elastic/cuda.py`). If K and V, or layers, are planes
of one tensor, each plane has its own tail and returns its own chunks. So do cache groups whose tensors differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from blockyard.engine.cuda.streams import with_index
from blockyard.engine.engine import wait_for_engines
from blockyard.engine.memory import torch_dtype
from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.layout.arena import ArenaLayout
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KVLayout, check_layout
from blockyard.layout.sizes import as_int

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ElasticCache", "MemoryRange", "Resized", "Span", "plane_spans", "reserve"]

# First byte or chunk, and one past the last.
Span: TypeAlias = tuple[int, int]


class MemoryRange(Protocol):
    """A range of addresses whose memory is added and removed in chunks; new memory is zeroed.

    Attributes:
        chunk: bytes per chunk, the unit of all arguments.
        tensor: uint8 `[bytes]` over the whole range; only committed parts may be touched.
    """

    chunk: int
    tensor: Tensor

    def commit(self, first: int, last: int) -> None:
        """Add memory behind chunks `first` to `last` (exclusive), all or none; raises OutOfMemoryError."""

    def release(self, first: int, last: int) -> None:
        """Free the memory behind chunks `first` to `last` (exclusive), which must all be committed."""

    def synchronize(self) -> None:
        """Wait until no earlier queued work touches the range."""


class Resized(NamedTuple):
    """The effect of a resize, in bytes.

    Attributes:
        blocks: current number of blocks.
        committed: memory added.
        returned: memory returned to the system.
        kept: memory of removed blocks that stays because it shares chunks with remaining blocks.
    """

    blocks: int
    committed: int
    returned: int
    kept: int


class ElasticCache:
    """The tensors of one cache group, or of several that share block ids, over memory that can be returned.

    The tensors always span `max_blocks` and never move; only the first `num_blocks` blocks of each may be touched. On a
    GPU, touching others is a fatal device error, and code compiled by `torch.compile` may copy whole tensors; on a CPU
    they read as zeros.

    Args:
        layout: layout of the tensors, which are ordered group by group, as in `CacheEngine`. With an `ArenaLayout`, the
            one tensor is the arena, and `extent_bytes` are the bytes of a block.
        num_blocks: initial number of blocks, all zeros.
        max_blocks: maximum number of blocks; costs address space, not memory.
        device: device of the memory.
        chunk_bytes: unit in which memory is added and removed, a multiple of the device's own unit. None: a page on a
            CPU; on CUDA chosen so that `Resized.kept` is at most 1/32 of the memory of `max_blocks`, or the driver's
            unit if that keeps more.
        memory: memory for the tensors; None means to `reserve` it.
        extent_bytes: bytes of an arena's extent, which then counts as a block.

    Attributes:
        layout: as given.
        max_blocks: as given.
        tensors: tensors spanning `max_blocks`, group by group.

    Raises:
        InvalidArgumentError: a number is out of range, or the system cannot release parts of a mapping.
        LayoutError: torch has no such dtype.
        OutOfMemoryError: there is not enough memory.

    Example:
        >>> from blockyard import KVLayout
        >>> from blockyard.engine import ElasticCache
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> with ElasticCache(layout, num_blocks=64, max_blocks=1024) as cache:
        ...     cache.tensors[0][:, :64] = 1.0
        ...     cache.resize(16).returned == 48 * layout.bytes_per_block
        True
    """

    def __init__(
        self,
        layout: KVLayout | GroupedLayout | ArenaLayout,
        *,
        num_blocks: int,
        max_blocks: int,
        device: str | torch.device = "cpu",
        chunk_bytes: int | None = None,
        memory: MemoryRange | None = None,
        extent_bytes: int | None = None,
    ) -> None:
        if not isinstance(layout, ArenaLayout):
            check_layout(layout, others=", GroupedLayout or ArenaLayout")
        num_blocks, max_blocks = as_int("num_blocks", num_blocks), as_int("max_blocks", max_blocks)
        chunk_bytes = None if chunk_bytes is None else as_int("chunk_bytes", chunk_bytes)
        if not 1 <= num_blocks <= max_blocks:
            raise InvalidArgumentError(f"num_blocks is {num_blocks}, must be 1 to max_blocks, {max_blocks}")
        self.layout, self.max_blocks = layout, max_blocks
        self._bytes_per_block = _bytes_per_block(layout, extent_bytes)
        parts = _parts(layout, max_blocks, self._bytes_per_block)
        sizes = [part.num_bytes for part in parts]
        if memory is None:
            planes = sum(len(part.planes) for part in parts)
            memory = reserve(sizes, device=device, chunk_bytes=chunk_bytes, planes=planes)
        self._memory = memory
        self.tensors: list[Tensor] = []
        self._planes: list[tuple[int, int]] = []
        starts = accumulate((-(-size // memory.chunk) * memory.chunk for size in sizes), initial=0)
        for part, start in zip(parts, starts, strict=False):
            rows = memory.tensor[start : start + part.num_bytes]
            self.tensors.append(rows.view(part.dtype).view(part.shape))
            self._planes += [(start + first, width) for first, width in part.planes]
        self._num_blocks = 0
        self._closed = False
        self.resize(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Current number of blocks."""
        return self._num_blocks

    @property
    def committed_bytes(self) -> int:
        """Bytes of memory currently behind the tensors; on a CPU the system allocates them on first touch."""
        return _length(self._chunks(self._num_blocks)) * self._memory.chunk

    def resize(self, num_blocks: int) -> Resized:
        """Resize to `num_blocks` blocks. Existing blocks keep their bytes; new ones are zeroed.

        Shrinking waits for copy engine transfers that touch removed blocks, and on a GPU for the device. Growing waits
        for the device only if new blocks share a chunk with existing ones. Like an engine's calls, call it from the
        engine's thread.

        Args:
            num_blocks: from 1 to `max_blocks`.

        Returns:
            The bytes added, returned and kept.

        Raises:
            InvalidArgumentError: the number is out of range; nothing was changed.
            OutOfMemoryError: there is not enough memory; nothing was changed.
            BlockyardError: the cache is closed.
        """
        if self._closed:
            raise BlockyardError("the elastic cache is closed")
        num_blocks = as_int("num_blocks", num_blocks)
        if not 1 <= num_blocks <= self.max_blocks:
            raise InvalidArgumentError(f"num_blocks is {num_blocks}, must be 1 to max_blocks, {self.max_blocks}")
        if num_blocks < self._num_blocks:
            # Ids of blocks do not say which extents they lie in.
            wait_for_engines(self._memory.tensor, 0 if isinstance(self.layout, ArenaLayout) else num_blocks)
        before, after = self._chunks(self._num_blocks), self._chunks(num_blocks)
        come, gone = list(_without(after, before)), list(_without(before, after))
        if gone:
            self._memory.synchronize()
        self._commit(come)
        if num_blocks > self._num_blocks:
            self._clear(self._num_blocks, num_blocks, before)
        for first, last in gone:
            self._memory.release(first, last)
        self._num_blocks = num_blocks
        chunk = self._memory.chunk
        kept = _length(after) * chunk - num_blocks * self._bytes_per_block
        return Resized(num_blocks, _length(come) * chunk, _length(gone) * chunk, kept)

    def close(self) -> None:
        """Free all memory, once copy engine transfers over it have ended. Idempotent.

        Do not touch the tensors afterwards. The addresses are released with the last tensor over them.
        """
        if not self._closed:
            self._closed = True
            wait_for_engines(self._memory.tensor, 0)
            self._memory.synchronize()
            for first, last in self._chunks(self._num_blocks):
                self._memory.release(first, last)
            self.tensors, self._num_blocks = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chunks(self, num_blocks: int) -> list[Span]:
        """Return the chunks that contain `num_blocks` blocks, as ascending, disjoint, non-adjacent spans."""
        chunk = self._memory.chunk
        spans: list[Span] = []
        for start, width in self._planes if num_blocks else ():
            first, last = start // chunk, -(-(start + num_blocks * width) // chunk)
            if spans and first <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(last, spans[-1][1]))
            else:
                spans.append((first, last))
        return spans

    def _commit(self, spans: Sequence[Span]) -> None:
        done = []
        try:
            for first, last in spans:
                self._memory.commit(first, last)
                done.append((first, last))
        except BaseException:
            for first, last in done:
                self._memory.release(first, last)
            raise

    def _clear(self, first: int, last: int, committed: Sequence[Span]) -> None:
        """Zero the parts of blocks `first` to `last` that lie in chunks committed earlier."""
        there = [(a * self._memory.chunk, b * self._memory.chunk) for a, b in committed]
        new = ((start + first * width, start + last * width) for start, width in self._planes)
        spans = [span for plane in new for span in _common([plane], there)]
        if spans:
            # Work queued before the blocks were removed may still touch them, on any stream.
            self._memory.synchronize()
            for begin, end in spans:
                self._memory.tensor[begin:end].zero_()
            self._memory.synchronize()


class _ElasticTensor(NamedTuple):
    """A tensor over reserved memory, and where its planes begin with the bytes of a block in each."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    planes: list[tuple[int, int]]


def _bytes_per_block(layout: KVLayout | GroupedLayout | ArenaLayout, extent_bytes: int | None) -> int:
    if not isinstance(layout, ArenaLayout):
        if extent_bytes is not None:
            raise InvalidArgumentError(f"extent_bytes is {extent_bytes}, must be None without an ArenaLayout")
        return layout.bytes_per_block
    if extent_bytes is None or (size := as_int("extent_bytes", extent_bytes)) < 1:
        raise InvalidArgumentError(f"extent_bytes is {extent_bytes}, must be at least 1 with an ArenaLayout")
    return size


def _parts(
    layout: KVLayout | GroupedLayout | ArenaLayout, max_blocks: int, bytes_per_block: int
) -> list[_ElasticTensor]:
    """Return the tensors of a layout, group by group."""
    if isinstance(layout, ArenaLayout):
        num_bytes = max_blocks * bytes_per_block
        return [_ElasticTensor((num_bytes,), torch.uint8, num_bytes, [(0, bytes_per_block)])]
    found = []
    for group in [group for _, group in layout.groups] if isinstance(layout, GroupedLayout) else [layout]:
        for index, (shape, _) in enumerate(group.tensor_shapes(max_blocks)):
            planes = list(plane_spans(group, max_blocks, index))
            found.append(_ElasticTensor(shape, torch_dtype(group.dtype), prod(shape) * group.itemsize, planes))
    return found


def plane_spans(layout: KVLayout, num_blocks: int, index: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where the planes of one tensor begin, and how many bytes a block has in each.

    There is one plane per index of the dimensions before the block dimension: in `[2, blocks, ...]`, K is one plane and
    V another. Within a plane the blocks are consecutive.

    Args:
        layout: layout of the tensors, which have no padding.
        num_blocks: blocks of a tensor.
        index: index of the tensor in the layout.

    Yields:
        First byte of a plane within its tensor, and bytes of one block.
    """
    shape, _ = layout.tensor_shapes(num_blocks)[index]
    planes = layout.planes(index)
    width = prod(shape) * layout.itemsize // (num_blocks * planes)
    for plane in range(planes):
        yield plane * num_blocks * width, width


def reserve(
    sizes: Sequence[int],
    *,
    device: str | torch.device = "cpu",
    chunk_bytes: int | None = None,
    planes: int | None = None,
) -> MemoryRange:
    """Reserve addresses for tensors, each starting at a chunk boundary.

    Args:
        sizes: bytes of each tensor.
        device: device of the memory.
        chunk_bytes: see `ElasticCache`.
        planes: number of planes over all tensors: parts with consecutive blocks. By default one per tensor.

    Returns:
        The range, without memory.

    Raises:
        InvalidArgumentError: the chunk is not a multiple of the device's unit, or the device type is not supported.
        OutOfMemoryError: the process has too little address space.
    """
    kind = with_index(device)
    if kind.type == "cpu":
        from blockyard.engine.elastic.host import HostMemory  # noqa: PLC0415 - each needs modules that may be missing

        return HostMemory(sizes, chunk_bytes=chunk_bytes)
    from blockyard.engine.elastic.cuda import DeviceMemory  # noqa: PLC0415 - needs CUDA's bindings

    return DeviceMemory(sizes, device=kind, chunk_bytes=chunk_bytes, planes=planes)


def _length(spans: Iterable[Span]) -> int:
    return sum(last - first for first, last in spans)


def _common(one: Sequence[Span], other: Sequence[Span]) -> Iterator[Span]:
    """Yield the intersection of two lists of spans."""
    for first, last in one:
        for begin, end in other:
            if max(first, begin) < min(last, end):
                yield max(first, begin), min(last, end)


def _without(spans: Sequence[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of `spans` that are not in `others`; both are ascending and disjoint."""
    for first, last in spans:
        at = first
        for begin, end in _common([(first, last)], others):
            if at < begin:
                yield at, begin
            at = end
        if at < last:
            yield at, last
