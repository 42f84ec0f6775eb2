"""The cache engine: owns the caches of the device and of the host, and moves blocks between and within them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError
from blockyard.layout import KVLayout
from blockyard.plan import CopyPlan, Ids, check_blocks, join
from blockyard.transfer import ops
from blockyard.transfer.cuda import check_device, op_library

if TYPE_CHECKING:
    from typing_extensions import Self

EngineTier = Literal["device", "host"]
Rows = NDArray[np.uint8]


class Traffic(NamedTuple):
    """What went from one tier to another."""

    blocks: int
    num_bytes: int


class CacheEngine:
    """Owns the caches of the device (the engine's own tensors) and of the host (rows), and moves blocks.

    On a CUDA device the work is queued on the current stream, in the order of the calls; compute that reads or writes
    the same blocks belongs on that stream. Calls that hand bytes to the CPU wait for what is queued; `close` does too.
    The caches start as zeros: attention over a gathered block meets no NaN in slots that were never written.

    Args:
        layout: of the device's tensors.
        num_device_blocks: at least 1.
        num_host_blocks: 0 means no host tier; page-locked memory with a CUDA device.
        device: where the device's caches live; `"cpu"` needs no GPU.

    Raises:
        InvalidArgumentError: a number of blocks is too small.
        OpLibraryError: the op library has no code for this device.
    """

    def __init__(
        self, layout: KVLayout, *, num_device_blocks: int, num_host_blocks: int, device: str | torch.device = "cpu"
    ) -> None:
        if num_device_blocks < 1 or num_host_blocks < 0:
            raise InvalidArgumentError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks: wanted at least 1 and 0"
            )
        self.layout = layout
        self.device = torch.device(device)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            check_device(self.device, op_library())
        shape, dtype = layout.tensor_shape(num_device_blocks), _torch_dtype(layout.dtype)
        self.device_caches: list[Tensor] = [
            torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(layout.num_layers)
        ]
        self.host_cache = torch.zeros((num_host_blocks, layout.bytes_per_block), dtype=torch.uint8, pin_memory=on_cuda)
        self._views: dict[EngineTier, list[Tensor]] = {
            "device": layout.views(self.device_caches),
            "host": layout.row_views(self.host_cache),
        }
        self._num_blocks: dict[EngineTier, int] = {"device": num_device_blocks, "host": num_host_blocks}
        self._traffic: dict[tuple[EngineTier, EngineTier], Traffic] = {}
        # Queued work that reads or writes memory of the host, with the staging it needs until its event fires.
        self._queued: deque[tuple[torch.cuda.Event, Tensor | None]] = deque()
        self._closed = False

    @property
    def counters(self) -> dict[tuple[EngineTier, EngineTier], Traffic]:
        """What was moved so far, by (source, destination) tier; `read_blocks` and `write_blocks` do not count."""
        return dict(self._traffic)

    @property
    def bytes_moved(self) -> int:
        """Bytes moved so far, over all tier pairs."""
        return sum(traffic.num_bytes for traffic in self._traffic.values())

    def num_blocks(self, tier: EngineTier) -> int:
        """Give the number of blocks of a tier, `"device"` or `"host"`."""
        self._check_tier(tier)
        return self._num_blocks[tier]

    def swap_out(self, ids: Ids) -> None:
        """Copy blocks from the device to the host.

        Args:
            ids: (device block, host block), int64 `[n, 2]`; no host block repeats.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was copied.
        """
        self._swap("device", "host", ids)

    def swap_in(self, ids: Ids) -> None:
        """Copy blocks from the host to the device.

        Args:
            ids: (host block, device block), int64 `[n, 2]`; no device block repeats.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was copied.
        """
        self._swap("host", "device", ids)

    def copy(self, ids: Ids) -> None:
        """Copy blocks within the device, as copy-on-write wants it.

        Args:
            ids: (from, to), int64 `[n, 2]`; no block is both read and written, none is written twice.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was copied.
        """
        plan = self._join("device", "device", ids)
        if len(plan):
            ops.copy_blocks(self._views["device"], _tensor(plan.pairs))
            self._count("device", "device", plan)

    def read_blocks(self, tier: EngineTier, blocks: Ids) -> Rows:
        """Copy blocks into fresh rows on the CPU; waits until they are there.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, int64 `[n]`; they may repeat.

        Returns:
            uint8 `[n, bytes_per_block]`.

        Raises:
            MappingError: an id is out of range.
        """
        checked = check_blocks(blocks, self.num_blocks(tier))
        rows = self._staging(len(checked))
        if tier == "host":
            self._drain()
        if len(checked):
            cache, pieces = self._between(tier, rows)
            self._submit(cache, pieces, np.column_stack((checked, np.arange(len(checked)))), rows)
        self._drain()
        filled: Rows = rows.numpy()
        return filled

    def write_blocks(self, tier: EngineTier, blocks: Ids, rows: Rows) -> None:
        """Copy rows on the CPU into blocks; the rows are free for other use when it returns.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, int64 `[n]`, no repeats.
            rows: uint8 `[n, bytes_per_block]`.

        Raises:
            MappingError: an id is out of range or repeats; nothing was written.
            LayoutError: the rows have another shape or dtype; nothing was written.
        """
        checked = check_blocks(blocks, self.num_blocks(tier), unique=True)
        wanted = (len(checked), self.layout.bytes_per_block)
        if rows.dtype != np.uint8 or rows.shape != wanted:
            raise LayoutError(f"rows are {rows.dtype} {list(rows.shape)}, wanted uint8 {list(wanted)}")
        if not len(checked):
            return
        if tier == "host":
            self._drain()
        queued = tier == "device" and self.device.type == "cuda"
        source = self._staging(len(checked)).copy_(_tensor(rows)) if queued else _tensor(rows)
        cache, pieces = self._between(tier, source)
        self._submit(pieces, cache, np.column_stack((np.arange(len(checked)), checked)), source)

    def close(self) -> None:
        """Wait for queued work and let go of all memory; twice does nothing."""
        if self._closed:
            return
        self._drain()
        self._closed = True
        self._views.clear()
        self.device_caches = []
        self.host_cache = self.host_cache.new_empty((0, self.layout.bytes_per_block))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _swap(self, src: EngineTier, dst: EngineTier, ids: Ids) -> None:
        plan = self._join(src, dst, ids)
        if len(plan):
            self._submit(self._views[src], self._views[dst], plan.pairs, None)
            self._count(src, dst, plan)

    def _submit(self, src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids, staging: Tensor | None) -> None:
        try:
            ops.swap_blocks(src, dst, _tensor(pairs))
        finally:
            # A call that fails half-way has queued the other half.
            self._fence(staging)

    def _join(self, src: EngineTier, dst: EngineTier, ids: Ids) -> CopyPlan:
        self._check_tier(src)
        return join(
            ids,
            self.layout,
            src_blocks=self._num_blocks[src],
            dst_blocks=self._num_blocks[dst],
            in_place=src == dst,
        )

    def _count(self, src: EngineTier, dst: EngineTier, plan: CopyPlan) -> None:
        before = self._traffic.get((src, dst), Traffic(0, 0))
        self._traffic[src, dst] = Traffic(before.blocks + len(plan), before.num_bytes + plan.num_bytes)

    def _check_tier(self, tier: EngineTier) -> None:
        if self._closed:
            raise BlockyardError("the cache engine is closed")
        if tier not in self._num_blocks:
            raise InvalidArgumentError(f"tier {tier!r} is not one of device, host")

    def _between(self, tier: EngineTier, rows: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Give a tier's views and those of rows that go with them; rows of the host need no cutting."""
        if tier == "host":
            return [self.host_cache], [rows]
        return self._views["device"], self.layout.row_views(rows)

    def _staging(self, num_rows: int) -> Tensor:
        shape = (num_rows, self.layout.bytes_per_block)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _fence(self, staging: Tensor | None) -> None:
        """Mark the place in the stream up to which memory of the host is in use."""
        if self.device.type != "cuda":
            return
        while self._queued and self._queued[0][0].query():
            self._queued.popleft()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._queued.append((event, staging))

    def _drain(self) -> None:
        while self._queued:
            self._queued[0][0].synchronize()
            self._queued.popleft()


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this torch has no dtype {name!r}")
    return dtype


def _tensor(array: NDArray[np.generic]) -> Tensor:
    """See an array as a tensor; torch takes only writable ones without a warning."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
