"""The cache engine: owns the caches of the device and of the host, and moves blocks between and within them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from blockyard.layout import KVLayout
from blockyard.plan import CopyPlan, Ids, check_blocks
from blockyard.transfer import ops
from blockyard.transfer.caches import Caches, EngineTier, Rows, Traffic, as_tensor
from blockyard.transfer.cuda import check_device, op_library
from blockyard.transfer.cuda_streams import CudaStreams
from blockyard.transfer.streams import Event, StreamName, Streams, WorkerStreams
from blockyard.transfer.tickets import Callback, Done, MappingBuffers, OnFull, Transfers

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheEngine", "EngineTier", "Rows", "Traffic"]


class CacheEngine(Caches):
    """Owns the caches of the device (the engine's own tensors) and of the host (rows), and moves blocks.

    There are two ways to use it, and they may be mixed; each call of either comes after all earlier ones of the other.

    *At once*: `swap_out`, `swap_in`, `copy`, `read_blocks`, `write_blocks`. On a CUDA device the work is queued on the
    current stream, in the order of the calls; compute that reads or writes the same blocks belongs on that stream.
    Calls that hand bytes to the CPU wait for what is queued; `close` does too.

    *By ticket*: the `submit_` calls. Work runs on streams of its own (on a CPU: in a worker thread), after all compute
    that was queued before the call, or before `behind`, a place that `fence` has marked; after the tickets in `after`;
    in order with earlier work of the same direction, and in no other order. So compute is overtaken by nothing, and
    waits for nothing until `order_compute` or `wait_for_layer` says so. `poll` and `wait` report what has ended; a
    ticket is reported once. Loads go before stores where they share a worker. All these calls belong to one thread.

    The caches start as zeros: attention over a gathered block meets no NaN in slots that were never written.

    Args:
        layout: of the device's tensors.
        num_device_blocks: at least 1.
        num_host_blocks: 0 means no host tier; page-locked memory with a CUDA device.
        device: where the device's caches live; `"cpu"` needs no GPU.
        max_outstanding: bytes of tickets that may be under way on one stream; a longer transfer goes alone.
        streams: what runs the tickets' work; by default what the device has.
        device_caches: tensors that there are already, as `layout.views` takes them; made here if None.

    Raises:
        InvalidArgumentError: a number of blocks or bytes is too small.
        OpLibraryError: the op library has no code for this device.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        device: str | torch.device = "cpu",
        max_outstanding: int = 1 << 30,
        streams: Streams | None = None,
        device_caches: Sequence[Tensor] | None = None,
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        if on_cuda:
            check_device(torch.device(device), op_library())
        super().__init__(
            layout,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            device=device,
            device_caches=device_caches,
        )
        if streams is None:
            streams = CudaStreams(self.device) if on_cuda else WorkerStreams()
        self._transfers = Transfers(streams, max_outstanding=max_outstanding, mappings=MappingBuffers(pinned=on_cuda))
        # Queued work that reads or writes memory of the host, with the staging it needs until its event fires.
        self._queued: deque[tuple[torch.cuda.Event, Tensor | None]] = deque()

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
            self._settle()
            ops.copy_blocks(self._views["device"], as_tensor(plan.pairs))
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
        self._settle(on_cpu=tier == "host")
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
        checked = self._check_rows(tier, blocks, rows)
        if not len(checked):
            return
        self._settle(on_cpu=tier == "host")
        if tier == "host":
            self._drain()
        queued = tier == "device" and self.device.type == "cuda"
        source = self._staging(len(checked)).copy_(as_tensor(rows)) if queued else as_tensor(rows)
        cache, pieces = self._between(tier, source)
        self._submit(pieces, cache, np.column_stack((np.arange(len(checked)), checked)), source)

    # ---- by ticket ----

    def submit_swap_out(
        self, ids: Ids, *, after: Sequence[int] = (), behind: Event | None = None, on_full: OnFull = "wait"
    ) -> int:
        """Start to copy blocks from the device to the host.

        Args:
            ids: (device block, host block), int64 `[n, 2]`; no host block repeats. They are copied.
            after: tickets that must have ended before.
            behind: a place in compute that must have been reached before; by default the present one.
            on_full: whether to `"wait"` or to `"refuse"` if too many bytes are under way.

        Returns:
            A ticket.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was submitted.
            TransferQueueFullError: too many bytes are under way, and `on_full` is `"refuse"`.
            UnknownTicketError: a ticket in `after` was never issued; nothing was submitted.
        """
        plan = self._join("device", "host", ids)
        cut = partial(self._cut, self._views["device"], self._views["host"])
        return self._launch("out", cut, plan, after, behind, on_full, counted=("device", "host"))

    def submit_swap_in(
        self,
        ids: Ids,
        *,
        after: Sequence[int] = (),
        behind: Event | None = None,
        by_layer: bool = False,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to copy blocks from the host to the device; see `submit_swap_out`.

        Args:
            ids: (host block, device block), int64 `[n, 2]`; no device block repeats. They are copied.
            after: tickets that must have ended before.
            behind: a place in compute that must have been reached before; by default the present one.
            by_layer: the layers arrive one after another, for `wait_for_layer`.
            on_full: whether to `"wait"` or to `"refuse"` if too many bytes are under way.

        Returns:
            A ticket.

        Raises:
            MappingError, TransferQueueFullError, UnknownTicketError: as for `submit_swap_out`.
        """
        plan = self._join("host", "device", ids)
        places = self._places_by_layer() if by_layer else []
        src, dst = self._views["host"], self._views["device"]
        cut = partial(self._cut_layers, src, dst, places) if places else partial(self._cut, src, dst)
        layers = len(places)
        return self._launch("in", cut, plan, after, behind, on_full, counted=("host", "device"), layers=layers)

    def submit_copy(
        self, ids: Ids, *, after: Sequence[int] = (), behind: Event | None = None, on_full: OnFull = "wait"
    ) -> int:
        """Start to copy blocks within the device; see `submit_swap_out`, and `copy` for the mapping."""
        plan = self._join("device", "device", ids)
        return self._launch("copy", self._cut_copy, plan, after, behind, on_full, counted=("device", "device"))

    def submit_read(
        self,
        tier: EngineTier,
        blocks: Ids,
        *,
        after: Sequence[int] = (),
        behind: Event | None = None,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to copy blocks into fresh rows on the CPU, which the ticket's `Done` hands over.

        Args:
            tier: `"device"` or `"host"`; compute does not touch the host, so `behind` says nothing there.
            blocks: ids, int64 `[n]`; they may repeat. They are copied.
            after: tickets that must have ended before.
            behind: as for `submit_swap_out`.
            on_full: as for `submit_swap_out`.

        Returns:
            A ticket.

        Raises:
            MappingError, TransferQueueFullError, UnknownTicketError: as for `submit_swap_out`.
        """
        checked = check_blocks(blocks, self.num_blocks(tier))
        rows = self._staging(len(checked))
        cache, pieces = self._between(tier, rows)
        plan = self._plan(checked, np.arange(len(checked)))
        cut = partial(self._cut, cache, pieces)
        if tier == "host":
            return self._launch("host", cut, plan, after, None, on_full, rows=rows)
        return self._launch("out", cut, plan, after, behind, on_full, rows=rows)

    def submit_write(
        self,
        tier: EngineTier,
        blocks: Ids,
        rows: Rows,
        *,
        after: Sequence[int] = (),
        behind: Event | None = None,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to copy rows on the CPU into blocks; the rows must stay as they are until the ticket has ended.

        Args:
            tier: `"device"` or `"host"`; compute does not touch the host, so `behind` says nothing there.
            blocks: ids, int64 `[n]`, no repeats. They are copied.
            rows: uint8 `[n, bytes_per_block]`.
            after: tickets that must have ended before.
            behind: as for `submit_swap_out`.
            on_full: as for `submit_swap_out`.

        Returns:
            A ticket.

        Raises:
            LayoutError: the rows have another shape or dtype; nothing was submitted.
            MappingError, TransferQueueFullError, UnknownTicketError: as for `submit_swap_out`.
        """
        checked = self._check_rows(tier, blocks, rows)
        # Page-locked, so that the copy is asynchronous; and an array of no rows has no strides to go by.
        staged = not len(checked) or (tier == "device" and self.device.type == "cuda")
        source = self._staging(len(checked)).copy_(as_tensor(rows)) if staged else as_tensor(rows)
        cache, pieces = self._between(tier, source)
        plan = self._plan(np.arange(len(checked)), checked)
        cut = partial(self._cut, pieces, cache)
        if tier == "host":
            return self._launch("host", cut, plan, after, None, on_full, kept=(source,))
        return self._launch("in", cut, plan, after, behind, on_full, kept=(source,))

    def fence(self) -> Event:
        """Mark the present end of compute, for `behind`."""
        return self._transfers.streams.fence()

    def order_compute(self, ticket: int) -> None:
        """Let compute that is queued from now on wait for a ticket; on a CPU, wait for it.

        Raises:
            UnknownTicketError: it was never issued.
        """
        self._transfers.order_compute(ticket)

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute that is queued from now on wait until a layer has arrived; on a CPU, wait for it.

        Args:
            ticket: of a load. One that was not submitted `by_layer` is waited for as a whole.
            layer: 0-based.

        Raises:
            UnknownTicketError: it was never issued.
            InvalidArgumentError: there is no such layer.
        """
        self._transfers.order_compute_layer(ticket, layer)

    def poll(self) -> list[Done]:
        """Give the tickets that have ended since the last call and were not waited for; never waits."""
        return self._transfers.poll()

    def wait(self, ticket: int) -> Done:
        """Wait for a ticket to end; `poll` will not report it.

        Raises:
            UnknownTicketError: it was never issued, or has been reported.
        """
        return self._transfers.wait(ticket)

    def on_done(self, ticket: int, callback: Callback) -> None:
        """Have a function called with the ticket's `Done`, by the call that first sees that it has ended.

        Raises:
            UnknownTicketError: it was never issued, or has been reported.
        """
        self._transfers.on_done(ticket, callback)

    def close(self) -> None:
        """Wait for queued work and let go of all memory; twice does nothing."""
        if self._closed:
            return
        self._transfers.synchronize()
        self._transfers.streams.close()
        self._drain()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self, *, on_cpu: bool = False) -> None:
        """Put what is called at once after all tickets; with `on_cpu` it is the CPU that goes on."""
        if self.device.type == "cuda" and not on_cpu:
            self._transfers.order_compute_all()
        else:
            self._transfers.synchronize()
        if self.device.type != "cuda":
            self.fence().synchronize()

    def _launch(
        self,
        stream: StreamName,
        cut: Callable[[Tensor], Sequence[Callable[[], None]]],
        plan: CopyPlan,
        after: Sequence[int],
        behind: Event | None,
        on_full: OnFull,
        *,
        layers: int = 0,
        rows: Tensor | None = None,
        kept: tuple[Tensor, ...] = (),
        counted: tuple[EngineTier, EngineTier] | None = None,
    ) -> int:
        self._transfers.make_room(stream, plan.num_bytes, on_full)
        if behind is None and stream != "host":
            behind = self.fence()
        return self._transfers.submit(
            stream,
            cut,
            plan.pairs,
            num_bytes=plan.num_bytes,
            after=after,
            behind=behind,
            layers=layers,
            kept=kept,
            rows=rows,
            on_landed=partial(self._count, *counted, plan) if counted else None,
        )

    def _cut(self, src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor) -> list[Callable[[], None]]:
        """Cut a transfer into pieces of whole blocks, where it would hold others up."""
        chunk_bytes = self._transfers.streams.chunk_bytes
        step = max(1, len(pairs) if chunk_bytes is None else chunk_bytes // self.layout.bytes_per_block)
        return [partial(ops.swap_blocks, src, dst, pairs[i : i + step]) for i in range(0, max(1, len(pairs)), step)]

    def _cut_layers(
        self, src: Sequence[Tensor], dst: Sequence[Tensor], places: Sequence[Sequence[int]], pairs: Tensor
    ) -> list[Callable[[], None]]:
        return [partial(ops.swap_blocks, [src[i] for i in layer], [dst[i] for i in layer], pairs) for layer in places]

    def _cut_copy(self, pairs: Tensor) -> list[Callable[[], None]]:
        # In one piece: no block is both read and written, but that is checked over all of them.
        return [partial(ops.copy_blocks, self._views["device"], pairs)]

    def _swap(self, src: EngineTier, dst: EngineTier, ids: Ids) -> None:
        plan = self._join(src, dst, ids)
        if len(plan):
            self._settle()
            self._submit(self._views[src], self._views[dst], plan.pairs, None)
            self._count(src, dst, plan)

    def _submit(self, src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids, staging: Tensor | None) -> None:
        try:
            ops.swap_blocks(src, dst, as_tensor(pairs))
        finally:
            # A call that fails half-way has queued the other half.
            self._fence(staging)

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
