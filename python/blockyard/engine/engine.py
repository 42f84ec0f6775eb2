"""The cache engine: owns the caches of the device and of the host, and moves blocks between and within them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from blockyard.engine import ops
from blockyard.engine.at_once import AtOnce
from blockyard.engine.caches import EngineTier, Rows, Traffic, as_tensor
from blockyard.engine.cuda.streams import CudaStreams
from blockyard.engine.host_pool import OnFailure
from blockyard.engine.mapping import CopyPlan, Ids, check_blocks
from blockyard.engine.ops.library import check_device, op_library
from blockyard.engine.streams import CHUNK_BYTES, Event, StreamName, Streams, WorkerStreams
from blockyard.engine.tickets import Callback, Done, MappingBuffers, OnFull, Transfers
from blockyard.layout.kv import BlockLayout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheEngine", "EngineTier", "Rows", "Traffic", "wait_for_engines"]

_Cut = Callable[[Tensor], Sequence[Callable[[], None]]]
_alive: weakref.WeakSet[CacheEngine] = weakref.WeakSet()


class CacheEngine(AtOnce):
    """Owns the caches of the device (the engine's own tensors) and of the host (rows), and moves blocks.

    There are two ways to use it, and they may be mixed; each call of either comes after all earlier ones of the other.

    *At once*: `swap_out`, `swap_in`, `copy`, `move`, `exchange`, `read_blocks`, `write_blocks`, see `AtOnce`.

    *By ticket*: the `submit_` calls. Work runs on streams of its own (on a CPU: in a worker thread), after all compute
    that was queued before the call, or before `behind`, a place that `fence` has marked; after the tickets in `after`;
    in order with earlier work of the same direction, and in no other order. So compute is overtaken by nothing, and
    waits for nothing until `order_compute` or `wait_for_layer` says so. `poll` and `wait` report what has ended; a
    ticket is reported once. Loads go before stores where they share a worker, and loads that somebody waits for before
    those that are a `prefetch`, among which the first submitted is first; loads of one block keep their order. Until
    it has started, a prefetch can be given up by `cancel`. All these calls belong to one thread.

    An engine belongs to the process that made it: in a forked child every call but `close` raises `ForkedError`, and
    `close` lets go of the child's view of the memory alone. When the interpreter ends, work that has not begun is given
    up.

    The caches start as zeros: attention over a gathered block meets no NaN in slots that were never written.

    Args:
        layout: of the device's tensors; of one group, or of several.
        num_device_blocks: at least 1.
        num_host_blocks: 0 means no host tier; page-locked memory with a CUDA device.
        device: where the device's caches live; `"cpu"` needs no GPU.
        max_outstanding: bytes of tickets that may be under way on one stream; a longer transfer goes alone.
        max_ahead: bytes of prefetches that may stand before a load that is waited for.
        streams: what runs the tickets' work; by default what the device has.
        device_caches: tensors that there are already, as `layout.views` takes them; made here if None.
        blocks_per_host_block: device blocks in a host block, see `Caches`; `fill` then knows what is there.
        on_host_failure: what follows where memory of the host cannot be page-locked: an error (`"raise"`), or ordinary
            memory from there on, which copies slowly (`"unpinned"`; `host_pool.problem` says why).

    Raises:
        InvalidArgumentError: a number of blocks or bytes is too small, or `on_host_failure` is another word.
        LayoutError: the tensors given do not have the layout.
        OutOfMemoryError: memory of the host cannot be had; later, from transfers.
        PageLockError: it cannot be page-locked; later, from transfers.
        OpLibraryError: the op library has no code for this device.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        device: str | torch.device = "cpu",
        max_outstanding: int = 1 << 30,
        max_ahead: int = 8 * CHUNK_BYTES,
        streams: Streams | None = None,
        device_caches: Sequence[Tensor] | None = None,
        blocks_per_host_block: int | None = None,
        on_host_failure: OnFailure = "raise",
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        if on_cuda:
            check_device(torch.device(device), op_library())
        if streams is None:
            streams = CudaStreams(torch.device(device)) if on_cuda else WorkerStreams()
            if on_cuda:
                # Memory of an engine that is forgotten is given out again while copies on these streams still use it.
                weakref.finalize(self, streams.close).atexit = False
        mappings = MappingBuffers(pinned=on_cuda)
        self._queued = deque()
        self._transfers = Transfers(streams, max_outstanding=max_outstanding, mappings=mappings, max_ahead=max_ahead)
        super().__init__(
            layout,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            device=device,
            device_caches=device_caches,
            blocks_per_host_block=blocks_per_host_block,
            on_host_failure=on_host_failure,
        )
        _alive.add(self)

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
        cut = partial(self._cut, self._views["device"], self._views["host"], self._chunk)
        parts = plan.pairs[:, 1]
        return self._launch("out", cut, plan, after, behind, on_full, counted=("device", "host"), filled=parts)

    def submit_swap_in(
        self,
        ids: Ids,
        *,
        after: Sequence[int] = (),
        behind: Event | None = None,
        by_layer: bool = False,
        prefetch: bool = False,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to copy blocks from the host to the device; see `submit_swap_out`.

        Args:
            ids: (host block, device block), int64 `[n, 2]`; no device block repeats. They are copied.
            after: tickets that must have ended before.
            behind: a place in compute that must have been reached before; by default the present one.
            by_layer: the layers arrive one after another, for `wait_for_layer`.
            prefetch: nobody waits for it yet; `poll` starts it when no other load is under way.
            on_full: whether to `"wait"` or to `"refuse"` if too many bytes are under way.

        Returns:
            A ticket.

        Raises:
            MappingError: as for `submit_swap_out`, or a part of a host block that holds no bytes is named.
            TransferQueueFullError, UnknownTicketError: as for `submit_swap_out`.
        """
        plan = self._join("host", "device", ids)
        self._require(plan.pairs[:, 0], after)
        places = self._places_by_layer() if by_layer else []
        src, dst = self._views["host"], self._views["device"]
        chunk = self._chunk or (CHUNK_BYTES if prefetch else None)
        cut = partial(self._cut_layers, src, dst, places) if places else partial(self._cut, src, dst, chunk)
        return self._launch(
            "in",
            cut,
            plan,
            after,
            behind,
            on_full,
            layers=len(places),
            prefetch=prefetch,
            counted=("host", "device"),
        )

    def submit_copy(
        self, ids: Ids, *, after: Sequence[int] = (), behind: Event | None = None, on_full: OnFull = "wait"
    ) -> int:
        """Start to copy blocks within the device; see `submit_swap_out`, and `copy` for the mapping."""
        plan = self._join("device", "device", ids)
        cut = partial(self._cut_within, ops.copy_blocks, "device")
        return self._launch("copy", cut, plan, after, behind, on_full, counted=("device", "device"))

    def submit_move(
        self,
        ids: Ids,
        *,
        tier: EngineTier = "device",
        after: Sequence[int] = (),
        behind: Event | None = None,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to move blocks within a tier, as if all were read before the first is written.

        Args:
            ids: (from, to), int64 `[n, 2]`; no destination repeats. Chains and rings are legal. They are copied.
            tier: `"device"` or `"host"`; compute does not touch the host, so `behind` says nothing there.
            after: tickets that must have ended before.
            behind: as for `submit_swap_out`.
            on_full: as for `submit_swap_out`.

        Returns:
            A ticket.

        Raises:
            MappingError: as for `submit_swap_out`, or a part of a host block that holds no bytes is named.
            TransferQueueFullError, UnknownTicketError: as for `submit_swap_out`.
        """
        plan = self._join(tier, tier, ids, moves=True)
        touched = plan.pairs[:, 0], plan.pairs[:, 1]
        return self._launch_within(ops.move_blocks, tier, plan, touched, after=after, behind=behind, on_full=on_full)

    def submit_exchange(
        self,
        ids: Ids,
        *,
        tier: EngineTier = "device",
        after: Sequence[int] = (),
        behind: Event | None = None,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to let two blocks of each pair change places; see `submit_move`.

        Args:
            ids: int64 `[n, 2]`; no block is named twice. `(-1, -1)` is padding. They are copied.
            tier: `"device"` or `"host"`.
            after: tickets that must have ended before.
            behind: as for `submit_swap_out`.
            on_full: as for `submit_swap_out`.

        Returns:
            A ticket. If it fails, both blocks of a pair are lost.

        Raises:
            MappingError, TransferQueueFullError, UnknownTicketError: as for `submit_move`.
        """
        plan, op = self._plan_exchange(tier, ids), ops.exchange_blocks
        both = plan.pairs.reshape(-1)
        return self._launch_within(op, tier, plan, (both, both), after=after, behind=behind, on_full=on_full)

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
            MappingError: as for `submit_swap_out`, or a part of a host block that holds no bytes is named.
            TransferQueueFullError, UnknownTicketError: as for `submit_swap_out`.
        """
        checked = check_blocks(blocks, self.num_blocks(tier))
        if tier == "host":
            self._require(checked, after)
        rows = self._staging(len(checked))
        cache, pieces = self._between(tier, rows)
        plan = self._plan(checked, np.arange(len(checked)))
        cut = partial(self._cut, cache, pieces, self._chunk)
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
        prefetch: bool = False,
        on_full: OnFull = "wait",
    ) -> int:
        """Start to copy rows on the CPU into blocks; the rows must stay as they are until the ticket has ended.

        Args:
            tier: `"device"` or `"host"`; compute does not touch the host, so `behind` says nothing there.
            blocks: ids, int64 `[n]`, no repeats. They are copied.
            rows: uint8 `[n, bytes_per_block]`.
            after: tickets that must have ended before.
            behind: as for `submit_swap_out`.
            prefetch: as for `submit_swap_in`; says nothing for the host.
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
        chunk = self._chunk or (CHUNK_BYTES if prefetch else None)
        cut = partial(self._cut, pieces, cache, chunk)
        if tier == "host":
            return self._launch("host", cut, plan, after, None, on_full, kept=(source,), filled=plan.pairs[:, 1])
        return self._launch("in", cut, plan, after, behind, on_full, kept=(source,), prefetch=prefetch)

    def fence(self) -> Event:
        """Mark the present end of compute, for `behind`."""
        self._transfers.process.check()
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

    def cancel(self, ticket: int) -> bool:
        """Give a ticket up that has not started, as a prefetch may not have.

        Args:
            ticket: of any transfer.

        Returns:
            Whether it was given up: then `poll` or `wait` reports it with a `TransferCancelledError`, and no byte was
            moved. False if it has started; it runs to its end.

        Raises:
            UnknownTicketError: it was never issued.
        """
        return self._transfers.cancel(ticket)

    def poll(self) -> list[Done]:
        """Give the tickets that have ended since the last call and were not waited for; never waits.

        It also starts prefetches that may start by now.
        """
        return self._transfers.poll()

    def wait(self, ticket: int) -> Done:
        """Wait for a ticket to end; `poll` will not report it.

        Raises:
            UnknownTicketError: it was never issued, or has been reported.
        """
        return self._transfers.wait(ticket)

    def synchronize(self) -> None:
        """Wait until no ticket is under way; `poll` and `wait` report them."""
        self._transfers.synchronize()

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
        if self._transfers.process.is_current:
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

    @property
    def _chunk(self) -> int | None:
        return self._transfers.streams.chunk_bytes

    def _launch_within(
        self,
        op: Callable[[Sequence[Tensor], Tensor], None],
        tier: EngineTier,
        plan: CopyPlan,
        touched: tuple[Ids, Ids],
        *,
        after: Sequence[int],
        behind: Event | None,
        on_full: OnFull,
    ) -> int:
        """Launch what reads and writes one tier; `touched` are the blocks read and those written."""
        cut = partial(self._cut_within, op, tier)
        if tier == "device":
            return self._launch("copy", cut, plan, after, behind, on_full, counted=(tier, tier))
        self._require(touched[0], after)
        return self._launch("host", cut, plan, after, None, on_full, counted=(tier, tier), filled=touched[1])

    def _launch(
        self,
        stream: StreamName,
        cut: _Cut,
        plan: CopyPlan,
        after: Sequence[int],
        behind: Event | None,
        on_full: OnFull,
        *,
        prefetch: bool = False,
        layers: int = 0,
        rows: Tensor | None = None,
        kept: tuple[Tensor, ...] = (),
        counted: tuple[EngineTier, EngineTier] | None = None,
        filled: Ids | None = None,
    ) -> int:
        self._transfers.make_room(stream, plan.num_bytes, on_full)
        if behind is None and stream != "host":
            behind = self.fence()
        ticket = self._transfers.submit(
            stream,
            cut,
            plan.pairs,
            num_bytes=plan.num_bytes,
            after=after,
            behind=behind,
            prefetch=prefetch,
            layers=layers,
            kept=kept,
            rows=rows,
            on_landed=partial(self._count, *counted, plan) if counted else None,
        )
        if self._fill and filled is not None:
            self._fill.begin(ticket, np.ascontiguousarray(filled))
            self._transfers.on_done(ticket, self._note_filled)
        return ticket

    def _note_filled(self, done: Done) -> None:
        self.fill.end(done.ticket, landed=done.error is None)

    def _cut(
        self, src: Sequence[Tensor], dst: Sequence[Tensor], chunk_bytes: int | None, pairs: Tensor
    ) -> list[Callable[[], None]]:
        """Cut a transfer into pieces of whole blocks, where it would hold others up."""
        step = max(1, len(pairs) if chunk_bytes is None else chunk_bytes // self.layout.bytes_per_block)
        return [partial(ops.swap_blocks, src, dst, pairs[i : i + step]) for i in range(0, max(1, len(pairs)), step)]

    def _cut_layers(
        self, src: Sequence[Tensor], dst: Sequence[Tensor], places: Sequence[Sequence[int]], pairs: Tensor
    ) -> list[Callable[[], None]]:
        # A layer whose bytes come with those of another one has a piece too, in which nothing is left to do.
        return [partial(_swap_views, [src[i] for i in layer], [dst[i] for i in layer], pairs) for layer in places]

    def _cut_within(
        self, op: Callable[[Sequence[Tensor], Tensor], None], tier: EngineTier, pairs: Tensor
    ) -> list[Callable[[], None]]:
        # In one piece: what is both read and written is seen over all of them, and so is the order of moves.
        return [partial(op, self._within(tier), pairs)]


def _swap_views(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor) -> None:
    if src:
        ops.swap_blocks(src, dst, pairs)


def wait_for_engines(memory: Tensor, first: int) -> None:
    """Wait for the tickets of all engines that touch blocks of a device cache; a fork has none under way.

    Args:
        memory: that the cache's tensors lie in, uint8 `[bytes]`.
        first: the lowest of the blocks.
    """
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for engine in tuple(_alive):
        over = any(start <= cache.data_ptr() < end for cache in engine.device_caches)
        if over and engine._transfers.process.is_current:  # noqa: SLF001 (its own module)
            engine._transfers.synchronize(first)  # noqa: SLF001
