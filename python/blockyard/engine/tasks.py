"""What transfers do: mappings of block ids, checked and joined with the engine's memory, and cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from blockyard.engine import ops
from blockyard.engine.mapping import Ids, check_blocks, check_pairs, in_runs
from blockyard.engine.memory import EngineTier, Memory, Rows, as_tensor
from blockyard.engine.mover import BlockMover
from blockyard.engine.ops.checks import check_exchange
from blockyard.engine.streams import StreamName
from blockyard.errors import InvalidArgumentError, LayoutError

__all__ = ["KINDS", "Kind", "Task", "Work", "moving", "reading", "writing"]

Kind: TypeAlias = Literal["swap_out", "swap_in", "copy", "move", "exchange"]
Work: TypeAlias = Callable[[], None]

_BETWEEN: Final[dict[str, tuple[EngineTier, EngineTier]]] = {
    "swap_out": ("device", "host"),
    "swap_in": ("host", "device"),
}
_WITHIN: Final[dict[str, Callable[[BlockMover, Tensor], None]]] = {
    "copy": BlockMover.copy,
    "move": BlockMover.move,
    "exchange": BlockMover.exchange,
}
KINDS: Final = (*_BETWEEN, *_WITHIN)
_STREAMS: Final[dict[tuple[str, str], StreamName]] = {
    ("device", "host"): "out",
    ("device", "rows"): "out",
    ("host", "device"): "in",
    ("rows", "device"): "in",
    ("device", "device"): "copy",
}


class Task(NamedTuple):
    """What a transfer does.

    Attributes:
        kind: one of `KINDS`, or `"read"` or `"write"`.
        src: `"device"`, `"host"` or `"rows"` (of the caller).
        dst: the same.
        pairs: block ids (from, to), int64 `[n, 2]`; of a read or a write one column counts rows.
        num_bytes: that it moves.
        cut: makes the pieces of the work, at least one, from the pairs in their buffer.
        layers: how many there are if each has a piece of its own; else 0.
        kept: memory that must stay until it has ended.
        rows: what it fills for the caller.
    """

    kind: str
    src: str
    dst: str
    pairs: Ids
    num_bytes: int
    cut: Callable[[Tensor], Sequence[Work]]
    layers: int = 0
    kept: tuple[Tensor, ...] = ()
    rows: Tensor | None = None

    @property
    def stream(self) -> StreamName:
        """Where it runs, if not on the caller's own stream."""
        return _STREAMS.get((self.src, self.dst), "host")

    @property
    def device_columns(self) -> list[int]:
        """The columns of the pairs that name blocks of the device."""
        return [column for column, side in enumerate((self.src, self.dst)) if side == "device"]

    def blocks(self, column: int) -> Ids:
        """Give the blocks that are read (column 0) or written (1); an exchange reads and writes both."""
        return np.ascontiguousarray(self.pairs.reshape(-1) if self.kind == "exchange" else self.pairs[:, column])


def moving(
    memory: Memory, kind: Kind, ids: Ids, tier: EngineTier, *, chunk: int | None, by_layer: bool = False
) -> Task:
    """Check a mapping of block ids, and join it with the memory.

    Args:
        memory: of the engine.
        kind: see `CacheEngine.submit`.
        ids: see there.
        tier: see there.
        chunk: blocks of one piece; all if None.
        by_layer: see there.

    Raises:
        InvalidArgumentError: there is no such kind or tier.
        MappingError: the mapping is malformed or out of range.
    """
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    src, dst = _BETWEEN.get(kind, (tier, tier))
    blocks = memory.num_blocks(src), memory.num_blocks(dst)
    if kind == "exchange":
        pairs = check_exchange(as_tensor(ids), blocks[0])
    else:
        pairs = in_runs(check_pairs(ids, src_blocks=blocks[0], dst_blocks=blocks[1], in_place=kind == "copy"))
    num_bytes = len(pairs) * memory.bytes_per_block * (2 if kind == "exchange" else 1)
    for column, side in enumerate((src, dst)):
        if side == "host":
            memory.wait_for_host(pairs[:, column])
    if kind in _WITHIN:
        # In one piece: what is both read and written is seen over all of them, and so is the order of moves.
        return Task(kind, src, dst, pairs, num_bytes, partial(_whole, _WITHIN[kind], memory.movers[src]))
    views = memory.views[src], memory.views[dst]
    layers = memory.by_layer() if by_layer else []
    cut = partial(_by_layer, *views, layers) if layers else partial(_chunks, *views, chunk)
    return Task(kind, src, dst, pairs, num_bytes, cut, layers=len(layers))


def reading(memory: Memory, tier: EngineTier, blocks: Ids, *, chunk: int | None) -> Task:
    """Check ids of blocks, int64 `[n]`, to be copied into fresh rows; raises MappingError."""
    checked = check_blocks(blocks, memory.num_blocks(tier))
    rows = memory.staging(len(checked))
    pairs = in_runs(np.column_stack((checked, np.arange(len(checked)))))
    return Task(
        "read", tier, "rows", pairs, rows.numel(), partial(_chunks, *memory.between(tier, rows), chunk), rows=rows
    )


def writing(
    memory: Memory, tier: EngineTier, blocks: Ids, rows: Rows, *, chunk: int | None, copies: bool = False
) -> Task:
    """Check ids of blocks, int64 `[n]` without repeats, to be written from rows; raises MappingError, LayoutError.

    Rows for a CUDA device are copied, if they are not page-locked; with `copies` in any case.
    """
    checked = check_blocks(blocks, memory.num_blocks(tier), unique=True)
    wanted = (len(checked), memory.bytes_per_block)
    if rows.dtype != np.uint8 or rows.shape != wanted:
        raise LayoutError(f"rows are {rows.dtype} {list(rows.shape)}, wanted uint8 {list(wanted)}")
    source = as_tensor(rows)
    # An asynchronous copy needs page-locked rows; and an array of no rows has no strides to go by.
    pageable = tier == "device" and memory.device.type == "cuda" and (copies or not source.is_pinned())
    if pageable or not len(checked):
        source = memory.staging(len(checked)).copy_(source)
    cache, pieces = memory.between(tier, source)
    pairs = in_runs(np.column_stack((np.arange(len(checked)), checked)))
    cut = partial(_chunks, pieces, cache, chunk)
    return Task("write", "rows", tier, pairs, source.numel(), cut, kept=(source,))


def _whole(move: Callable[[BlockMover, Tensor], None], mover: BlockMover, pairs: Tensor) -> list[Work]:
    return [partial(move, mover, pairs)]


def _chunks(src: Sequence[Tensor], dst: Sequence[Tensor], step: int | None, pairs: Tensor) -> list[Work]:
    """Cut a transfer into pieces of so many whole blocks."""
    if step is None or step >= len(pairs):
        return [partial(ops.swap_blocks, src, dst, pairs)]
    return [partial(ops.swap_blocks, src, dst, pairs[i : i + step]) for i in range(0, len(pairs), step)]


def _by_layer(
    src: Sequence[Tensor], dst: Sequence[Tensor], layers: Sequence[Sequence[int]], pairs: Tensor
) -> list[Work]:
    # A layer whose bytes come with those of another one has a piece too, in which nothing is left to do.
    return [partial(_swap_views, [src[i] for i in layer], [dst[i] for i in layer], pairs) for layer in layers]


def _swap_views(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor) -> None:
    if src:
        ops.swap_blocks(src, dst, pairs)
