"""The cache engine: has the blocks of the device and of the host, and moves them between and within the two."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from blockyard._core import Pairs, StepDecision
from blockyard.engine.cuda.streams import CudaStreams, with_index
from blockyard.engine.host_pool import OnFailure
from blockyard.engine.mapping import Ids
from blockyard.engine.memory import EngineTier, Memory, Rows
from blockyard.engine.ops.library import prepare_device
from blockyard.engine.plans import Kind, TransferPlan, moving, reading, writing
from blockyard.engine.streams import PIECE_BYTES, Event, StreamName, Streams, WorkerStreams
from blockyard.engine.transfers import OnFull, Transfer, Transfers
from blockyard.errors import InvalidArgumentError, MappingError, PageLockError
from blockyard.layout.kv import BlockLayout
from blockyard.types import Histogram

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheEngine", "EngineTier", "Kind", "Rows", "Traffic", "wait_for_engines"]

_alive: weakref.WeakSet[CacheEngine] = weakref.WeakSet()


class Traffic(NamedTuple):
    """What went from one tier to another.

    Attributes:
        blocks: blocks that have landed.
        num_bytes: their bytes.
    """

    blocks: int
    num_bytes: int


class CacheEngine:
    """Moves blocks between the device (an engine's own tensors) and the host (rows), and within each.

    Each kind of transfer exists in two forms, and they may be mixed.

    *Asynchronous*: `submit`, `submit_read` and `submit_write` return a `Transfer`. Work runs on streams of its own (on
    a CPU: in a worker thread), after all compute that was queued before the call, or before `after_compute`, a place
    that `fence` has marked; after the transfers in `after`; in order with earlier work of the same direction, and in no
    other order. Compute waits for nothing until `Transfer.order_compute` says so. Loads go before stores where they
    share a worker, and loads that somebody waits for before those that are a `prefetch`. Of the prefetches the first
    submitted is first; loads of one block keep their order.

    *Synchronous*: `run`, `read`, `write` and `execute` submit the same transfers to the stream of compute, after all
    transfers that are open. On a CPU the work runs in the calling thread, and is done when the call returns. On CUDA it
    is queued on the current stream, and the CPU does not wait, except in `read`.

    A CUDA graph can hold `run` and `execute` alone, once all transfers have ended. While one is captured on the current
    stream, every other call, `Transfer`'s included, raises `CaptureError` before it touches a stream; graph and engine
    go on.

    All calls belong to one thread. An engine belongs to the process that made it: in a forked child every call but
    `close` raises `ForkedError`, and `close` lets go of the child's view of the memory alone. When the interpreter
    ends, work that has not begun is given up.

    On CUDA an engine reserves 96 MiB of the device, once in a process, for staged copies.

    The blocks start as zeros: attention over a gathered block meets no NaN in slots that were never written.

    Args:
        layout: of the device's tensors; of one group, or of several.
        device_blocks: at least 1; what the tensors hold if None.
        host_blocks: 0 means no host tier. A host block is as large as a device block; `unequal_pairs` addresses parts
            of larger chunks.
        device: where the device's tensors live; by default where those that are given are, or on the CPU. `"cuda"` is
            the device of the tensors, else the one that is current now; the engine keeps to it.
        max_outstanding: bytes that may be under way on one stream; a longer transfer goes alone.
        max_ahead: bytes of prefetches that may stand before a load that is waited for.
        streams: what runs the transfers' work; by default what the device has.
        tensors: tensors that exist already, as `layout.views` takes them; made here if None.
        pin_memory: whether host and staging memory is page-locked, which needs a CUDA device; by default if there is
            one. Copies from and to pageable memory are slower and hold up the calling thread.
        on_host_failure: what follows where memory of the host cannot be page-locked: an error (`"raise"`), or ordinary
            memory from there on, which copies slowly (`"unpinned"`; `memory.host_pool.problem` says why).

    Attributes:
        layout: as given.
        device: where the device's tensors are.
        memory: the blocks of both tiers.
        transfers: those that are open.
        streams: what runs their work.
        counters: what has landed so far, by (source, destination) tier; reads and writes of rows do not count.
        seconds: how long transfers to the host (`"write"`) and back (`"read"`) took, from their submission to when
            their end was seen.

    Raises:
        InvalidArgumentError: a number of blocks or bytes is too small, `on_host_failure` is another word, or
            `pin_memory` is true and the device is not a CUDA device.
        LayoutError: the tensors given do not have the layout.
        OutOfMemoryError: memory of the host cannot be had; later, from transfers.
        PageLockError: it cannot be page-locked; later, from transfers.
        OpLibraryError: the op library has no code for this device.

    Example:
        >>> from blockyard import CacheEngine, KVLayout
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> engine = CacheEngine(layout, device_blocks=8, host_blocks=8)
        >>> transfer = engine.submit("swap_out", [(0, 3), (1, 4)])  # device blocks 0 and 1 to host blocks 3 and 4
        >>> transfer.wait()
        Transfer(landed)
        >>> engine.run("copy", [(0, 2)])
        >>> engine.close()
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        device_blocks: int | None = None,
        host_blocks: int = 0,
        device: str | torch.device | None = None,
        max_outstanding: int = 1 << 30,
        max_ahead: int = 8 * PIECE_BYTES,
        streams: Streams | None = None,
        tensors: Sequence[Tensor] | None = None,
        pin_memory: bool | None = None,
        on_host_failure: OnFailure = "raise",
    ) -> None:
        there = tensors[0].device if tensors else torch.device("cpu")
        # A kind of device alone is the one that has the tensors, or else the current one.
        self.device = there if device is None or str(device) == there.type else with_index(device)
        self._on_cuda = self.device.type == "cuda"
        if self._on_cuda:
            prepare_device(self.device)
        if streams is None:
            streams = CudaStreams(self.device) if self._on_cuda else WorkerStreams()
            if self._on_cuda:
                # Memory of an engine that is forgotten is given out again while copies on these streams still use it.
                weakref.finalize(self, streams.close).atexit = False
        self.layout = layout
        self.streams = streams
        self.transfers = Transfers(streams, max_outstanding=max_outstanding, max_ahead=max_ahead)
        self.memory = Memory(
            layout,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            device=self.device,
            tensors=tensors,
            pin_memory=pin_memory,
            on_host_failure=on_host_failure,
        )
        self.counters: dict[tuple[str, str], Traffic] = {}
        self.seconds = {"read": Histogram(), "write": Histogram()}
        _alive.add(self)

    @property
    def tensors(self) -> list[Tensor]:
        """The device's tensors."""
        return self.memory.tensors

    def num_blocks(self, tier: EngineTier) -> int:
        """Give the number of blocks of a tier, `"device"` or `"host"`."""
        return self.memory.num_blocks(tier)

    # ---- asynchronous ----

    def submit(
        self,
        kind: Kind,
        pairs: Ids,
        *,
        tier: EngineTier = "device",
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        by_layer: bool = False,
        prefetch: bool = False,
        on_full: OnFull = "wait",
    ) -> Transfer:
        """Start to move blocks.

        Args:
            kind: `"swap_out"` copies from the device to the host, `"swap_in"` back. `"copy"` copies within a tier; no
                block is both read and written. `"move"` moves within a tier, as if all were read before the first is
                written: chains and rings are legal. `"exchange"` lets the two blocks of each pair change places; no
                block is named twice, `(-1, -1)` is padding.
            pairs: block ids (from, to), int64 `[n, 2]`; no destination repeats. They are copied.
            tier: of a copy, move or exchange. Compute does not touch the host, so `after_compute` has no effect there.
            after: transfers that must have ended before.
            after_compute: a place in compute that must have been reached before; by default the present one.
            by_layer: the layers of a swap in arrive one after another, for `Transfer.order_compute(layer)`; on CUDA in
                groups of at least 128 KiB a block.
            prefetch: nobody waits for this swap in yet; `poll` starts it when no other load is under way.
            on_full: whether to `"wait"` or to `"refuse"` if too many bytes are under way.

        Returns:
            The transfer. If an exchange fails, both blocks of a pair are lost.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was submitted.
            TransferQueueFullError: too many bytes are under way, and `on_full` is `"refuse"`.
            InvalidArgumentError: another argument is out of range, or a transfer in `after` is of another engine.
            CaptureError: a graph is being captured; nothing was submitted.
        """
        self.transfers.check()
        if (by_layer or prefetch) and kind != "swap_in":
            raise InvalidArgumentError(f"kind is {kind!r}: by_layer and prefetch are for 'swap_in'")
        plan = moving(self.memory, kind, pairs, tier, chunk=self._chunk(prefetch=prefetch), by_layer=by_layer)
        return self._submit(plan, after, after_compute, on_full, prefetch=prefetch)

    def submit_read(
        self,
        tier: EngineTier,
        blocks: Ids,
        rows: Rows | None = None,
        *,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        on_full: OnFull = "wait",
    ) -> Transfer:
        """Start to copy blocks into rows on the CPU, which are the transfer's `rows` when it has ended.

        Args:
            tier: `"device"` or `"host"`; see `submit` for this and the other arguments.
            blocks: ids, int64 `[n]`; they may repeat. They are copied.
            rows: where to, uint8 `[n, bytes_per_block]`, C-contiguous and writable, page-locked where host memory is;
                nobody else may use them meanwhile. Fresh ones if None, which cost ten times as much on a CPU.
            after: transfers that must have ended before.
            after_compute: a place in compute that must have been reached before.
            on_full: whether to `"wait"` or to `"refuse"`.

        Raises:
            LayoutError: the rows are other ones; nothing was submitted.
            MappingError, TransferQueueFullError, InvalidArgumentError, CaptureError: as for `submit`.
        """
        self.transfers.check()
        plan = reading(self.memory, tier, blocks, chunk=self._chunk(), into=rows)
        return self._submit(plan, after, after_compute, on_full)

    def submit_write(
        self,
        tier: EngineTier,
        blocks: Ids,
        rows: Rows,
        *,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        prefetch: bool = False,
        on_full: OnFull = "wait",
    ) -> Transfer:
        """Start to copy rows on the CPU into blocks; the rows must stay as they are until the transfer has ended.

        Args:
            tier: `"device"` or `"host"`; see `submit` for this and the other arguments.
            blocks: ids, int64 `[n]`, no repeats. They are copied.
            rows: uint8 `[n, bytes_per_block]`.
            after: transfers that must have ended before.
            after_compute: a place in compute that must have been reached before.
            prefetch: nobody waits for it yet; has no effect for the host.
            on_full: whether to `"wait"` or to `"refuse"`.

        Raises:
            LayoutError: the rows have another shape or dtype; nothing was submitted.
            MappingError, TransferQueueFullError, InvalidArgumentError, CaptureError: as for `submit`.
        """
        self.transfers.check()
        prefetch = prefetch and tier == "device"
        plan = writing(self.memory, tier, blocks, rows, chunk=self._chunk(prefetch=prefetch))
        return self._submit(plan, after, after_compute, on_full, prefetch=prefetch)

    # ---- synchronous ----

    def run(self, kind: Kind, pairs: Ids, *, tier: EngineTier = "device") -> None:
        """Move blocks on the stream of compute, after all open transfers; see `submit` for the arguments.

        On a CPU the blocks have moved when this returns. On CUDA the work is queued on the current stream, in the order
        of the calls; compute that reads or writes the same blocks belongs on that stream.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was moved.
            CaptureError: a graph is being captured, and transfers are open or the blocks are the host's.
        """
        self.transfers.process.check()
        plan = moving(self.memory, kind, pairs, tier, chunk=None)
        if len(plan.mapping):
            self._run(plan)

    def read(self, tier: EngineTier, blocks: Ids) -> Rows:
        """Copy blocks into fresh rows on the CPU; waits until they are there.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, int64 `[n]`; they may repeat.

        Returns:
            uint8 `[n, bytes_per_block]`.

        Raises:
            MappingError: an id is out of range.
            CaptureError: a graph is being captured.
        """
        self.transfers.check()
        plan = reading(self.memory, tier, blocks, chunk=None)
        self._run(plan).wait()
        rows: Rows = cast("Tensor", plan.rows).numpy()
        return rows

    def write(self, tier: EngineTier, blocks: Ids, rows: Rows) -> None:
        """Copy rows on the CPU into blocks; the rows are free for other use when it returns.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, int64 `[n]`, no repeats.
            rows: uint8 `[n, bytes_per_block]`.

        Raises:
            MappingError: an id is out of range or repeats; nothing was written.
            LayoutError: the rows have another shape or dtype; nothing was written.
            CaptureError: a graph is being captured; nothing was written.
        """
        self.transfers.check()
        plan = writing(self.memory, tier, blocks, rows, chunk=None, copies=True)
        if len(plan.mapping):
            self._run(plan)

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry a decision out with `run`, transfer by transfer.

        Args:
            decision: transfers within the device or the host, and between the two.

        Returns:
            The pairs that did not land: none.

        Raises:
            MappingError: an id is out of range, or a transfer is of the external tier.
            OutOfMemoryError, PageLockError: memory of the host cannot be made ready.
        """
        for kind, pairs in decision.transfers():
            if "external" in (pairs.src, pairs.dst):
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} name the external tier, and there is none")
        for kind, pairs in decision.transfers():
            self.run(kind, pairs.ids, tier="host" if pairs.src == pairs.dst == "host" else "device")  # type: ignore[arg-type]
        return []

    # ---- both ----

    def fence(self) -> Event:
        """Mark the present end of compute, for `after_compute`; raises CaptureError inside a graph capture."""
        self.transfers.check()
        return self.streams.fence()

    def poll(self) -> None:
        """End transfers that have ended, and start prefetches that may start by now; never waits.

        Raises:
            CaptureError: a graph is being captured.
        """
        self.transfers.poll()

    def close(self) -> None:
        """Wait for queued work and release all memory, also if the device has failed. Idempotent.

        Raises:
            CaptureError: a graph is being captured; nothing was closed.
            torch.AcceleratorError: the device has failed; the memory is released all the same.
        """
        if self.transfers.process.is_current:
            self.transfers.check()
            try:
                self.transfers.synchronize()
                self.streams.close()
            except torch.AcceleratorError:
                # A lost device copies nothing and unlocks nothing. Where only a call failed, this waits for its work.
                with suppress(torch.AcceleratorError):
                    self.streams.close()
                with suppress(PageLockError):
                    self.memory.release()
                raise
        self.memory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chunk(self, *, prefetch: bool = False) -> int | None:
        """Blocks of one piece, where longer ones would hold others up."""
        chunk = self.streams.chunk_bytes or (PIECE_BYTES if prefetch else None)
        return chunk and max(1, chunk // self.memory.bytes_per_block)

    def _submit(
        self,
        plan: TransferPlan,
        after: Sequence[Transfer],
        after_compute: Event | None,
        on_full: OnFull,
        *,
        prefetch: bool = False,
    ) -> Transfer:
        self.transfers.make_room(plan.stream, plan.num_bytes, on_full)
        if plan.stream == "host":
            after_compute = None
        elif after_compute is None:
            after_compute = self.streams.fence()
        return self.transfers.submit(
            plan.stream,
            plan,
            after=after,
            after_compute=after_compute,
            prefetch=prefetch,
            on_end=partial(self._ended, plan, time.monotonic()),
        )

    def _run(self, plan: TransferPlan) -> Transfer:
        on_device = bool(plan.device_columns)
        if on_device and self.streams.capturing():
            return self.transfers.capture(plan)
        stream: StreamName = "compute" if on_device else "caller"
        if not (self._on_cuda and on_device):
            return self._run_here(plan, stream)
        self.transfers.poll()  # what has ended is forgotten, however long only synchronous calls are made
        after = self.transfers.open()
        transfer = self.transfers.submit(stream, plan, after=after, on_end=partial(self._ended, plan, time.monotonic()))
        if self.transfers.failed_to_launch(transfer):
            transfer.wait()
        return transfer

    def _run_here(self, plan: TransferPlan, stream: StreamName) -> Transfer:
        """Run a plan in this thread, when all that is open has ended."""
        self.transfers.synchronize()
        transfer, began = Transfer(self.transfers), time.monotonic()
        events = [self.streams.launch(stream, plan.in_range(piece)) for piece in plan.pieces]
        for event in events:
            event.synchronize()
            transfer.error = transfer.error or event.error
        self._ended(plan, began, transfer)
        if transfer.error is not None:
            raise transfer.error
        return transfer

    def _ended(self, plan: TransferPlan, began: float, transfer: Transfer) -> None:
        if transfer.error is None and "rows" not in {plan.src, plan.dst}:
            before = self.counters.get((plan.src, plan.dst), Traffic(0, 0))
            blocks = plan.num_bytes // self.memory.bytes_per_block  # an exchange moves two of a pair
            self.counters[plan.src, plan.dst] = Traffic(before.blocks + blocks, before.num_bytes + plan.num_bytes)
            if {plan.src, plan.dst} == {"device", "host"}:
                self.seconds["read" if plan.src == "host" else "write"].observe(time.monotonic() - began)


def wait_for_engines(memory: Tensor, first: int) -> None:
    """Wait for the transfers of all engines that touch blocks of a device cache; a fork has none under way.

    Args:
        memory: that the cache's tensors lie in, uint8 `[bytes]`.
        first: the lowest of the blocks.
    """
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for engine in tuple(_alive):
        over = any(start <= tensor.data_ptr() < end for tensor in engine.tensors)
        if over and engine.transfers.process.is_current:
            engine.transfers.synchronize(first)
