"""The cache engine: holds the blocks of device and host, and moves them between and within the two."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from blockyard._core import BlockManager, Pairs, StepDecision
from blockyard.engine.cuda.streams import CudaStreams, with_index
from blockyard.engine.host_pool import OnFailure
from blockyard.engine.mapping import IdList, IdPairs
from blockyard.engine.memory import EngineTier, Memory, Rows
from blockyard.engine.ops.library import prepare_device
from blockyard.engine.pages import field_tensors, page_memories
from blockyard.engine.plans import Kind, moving, reading, writing
from blockyard.engine.streams import PIECE_BYTES, Event, Streams, WorkerStreams
from blockyard.engine.transfers import OnFull, Transfer, Transfers
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError, PageLockError
from blockyard.layout.arena import ArenaLayout
from blockyard.layout.kv import BlockLayout, check_layout
from blockyard.types import Histogram

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheEngine", "EngineTier", "Kind", "Rows", "Traffic", "wait_for_engines"]

_alive: list[weakref.ref[CacheEngine]] = []  # not a WeakSet: threads may make engines while another iterates


class Traffic(NamedTuple):
    """Traffic from one tier to another.

    Attributes:
        blocks: blocks that have landed.
        num_bytes: their bytes.
    """

    blocks: int
    num_bytes: int


class CacheEngine:
    """Moves blocks between the device (an engine's own tensors) and the host (rows), and within each.

    Each kind of transfer exists in two forms, and they may be mixed.

    *Asynchronous*: `submit`, `submit_read` and `submit_write` return a `Transfer`. Work runs on separate streams (on a
    CPU: in a worker thread). It runs after all compute queued before the call, or up to `after_compute`, a point marked
    by `fence`; after the transfers in `after`; and in order with earlier work of the same direction. There is no other
    ordering. Compute waits for a transfer only if you call `Transfer.order_compute`. Where loads and stores share a
    worker, loads go first, and `prefetch` loads after other loads. Prefetches run in submission order; loads of one
    block keep their order.

    *Synchronous*: `run`, `read`, `write` and `execute` submit the same transfers to the compute stream, after all open
    transfers. On a CPU the work runs in the calling thread and is done when the call returns. On CUDA it is queued on
    the current stream, and the CPU does not wait, except in `read`.

    A CUDA graph can capture only `run` and `execute`, once all transfers have ended. While one is being captured on the
    current stream, every other call, including `Transfer`'s, raises `CaptureError` before touching a stream; graph and
    engine are unaffected.

    Call an engine from a single thread, in the process that created it: in a forked child every call except `close`
    raises `ForkedError`, and `close` releases only the child's view of the memory. At interpreter shutdown, work that
    has not started is dropped.

    On CUDA, the first engine of a process reserves 96 MiB of the device for staged copies.

    Blocks are initialized to zeros, so that attention over a gathered block finds no NaN in unwritten slots.

    Args:
        layout: layout of the device's tensors. An `ArenaLayout` needs its `manager`.
        manager: whose blocks these are: with an `ArenaLayout` it gives the numbers of blocks of each page class.
        device_blocks: number of device blocks, at least 1; None means as many as the tensors hold.
        host_blocks: number of host blocks; 0 means no host tier. Host and device blocks have the same size;
            `unequal_pairs` addresses parts of larger chunks.
        device: device of the tensors; by default that of the given tensors, or the CPU. `"cuda"` is the device of the
            given tensors, or else the current one, from then on.
        max_outstanding: maximum bytes in flight on one stream; a longer transfer runs alone.
        max_ahead: maximum bytes of prefetches ahead of a load that is waited for.
        streams: runs the transfers; by default the device's streams.
        tensors: existing tensors, as accepted by `layout.views`; for an `ArenaLayout` one, uint8 `[bytes]`. None means
            to allocate them.
        pin_memory: whether to page-lock host and staging memory, which requires a CUDA device; by default if there is
            one. Copies from and to pageable memory are slower and block the calling thread.
        on_host_failure: what to do if host memory cannot be page-locked: raise an error (`"raise"`), or use pageable
            memory from there on, which copies slowly (`"unpinned"`; `memory.host_pool.problem` says why).

    Attributes:
        layout: as given.
        device: device of the tensors.
        memories: the blocks of both tiers, by page class.
        memory: those of the first, or only, page class.
        transfers: the open transfers.
        streams: run the transfers.
        counters: what has landed so far, by (source, destination) tier; reads and writes of rows do not count.
        seconds: how long transfers to the host (`"write"`) and back (`"read"`) took, from submission until their end
            was noticed.

    Raises:
        InvalidArgumentError: a number of blocks or bytes is too small, `on_host_failure` is invalid, the device is
            neither a CPU nor a CUDA device, or `pin_memory` is true and it is not a CUDA device.
        LayoutError: `layout` is no layout, or the tensors given do not have it.
        OutOfMemoryError: host memory is not available; transfers may raise it later.
        PageLockError: it cannot be page-locked; transfers may raise it later.
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
        layout: BlockLayout | ArenaLayout,
        *,
        manager: BlockManager | None = None,
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
        if not isinstance(layout, ArenaLayout):
            check_layout(layout, others=", GroupedLayout or ArenaLayout")
        check_list_of_tensors(tensors)
        there = tensors[0].device if tensors else torch.device("cpu")
        # A device without index is that of the tensors, or else the current one.
        self.device = with_index(there if device is None or str(device) == there.type else device)
        self._on_cuda = self.device.type == "cuda"
        if self._on_cuda:
            prepare_device(self.device)
        if streams is None:
            streams = CudaStreams(self.device) if self._on_cuda else WorkerStreams()
            if self._on_cuda:
                # Memory of a dropped engine could be reused while copies on these streams still use it.
                weakref.finalize(self, streams.close).atexit = False
        self.layout = layout
        self.streams = streams
        if isinstance(layout, ArenaLayout):
            if device_blocks is not None or host_blocks or manager is None:
                raise InvalidArgumentError("layout is an ArenaLayout: give its manager instead of numbers of blocks")
            self.memories = page_memories(
                layout,
                manager,
                tensors=tensors,
                device=self.device,
                pin_memory=pin_memory,
                on_host_failure=on_host_failure,
            )
        else:
            if manager is not None:
                raise InvalidArgumentError("manager is given, must be None unless layout is an ArenaLayout")
            self.memories = [
                Memory(
                    layout,
                    device_blocks=device_blocks,
                    host_blocks=host_blocks,
                    device=self.device,
                    tensors=tensors,
                    pin_memory=pin_memory,
                    on_host_failure=on_host_failure,
                )
            ]
        self.memory = self.memories[0]
        self.counters: dict[tuple[str, str], Traffic] = {}
        self.seconds = {"read": Histogram(), "write": Histogram()}
        # Not a method: a reference to the engine would keep it from being freed at once.
        ended = partial(_count, self.counters, self.seconds)
        self.transfers = Transfers(streams, max_outstanding=max_outstanding, max_ahead=max_ahead, on_end=ended)
        _alive.append(weakref.ref(self, _alive.remove))

    @property
    def tensors(self) -> list[Tensor]:
        """The device's tensors; of an `ArenaLayout` one for each of its `fields`."""
        if isinstance(self.layout, ArenaLayout):
            return field_tensors(self.layout, [memory.views["device"][0] for memory in self.memories])
        return self.memory.tensors

    def num_blocks(self, tier: EngineTier, page_class: int = 0) -> int:
        """Return the number of blocks in a tier, `"device"` or `"host"`."""
        return self.of_class(page_class).num_blocks(tier)

    def of_class(self, page_class: int) -> Memory:
        """Return the blocks of a page class. Raises MappingError."""
        if not 0 <= page_class < len(self.memories):
            raise MappingError(f"page_class is {page_class}, the engine has {len(self.memories)}")
        return self.memories[page_class]

    # ---- asynchronous ----

    def submit(
        self,
        kind: Kind,
        pairs: IdPairs,
        *,
        tier: EngineTier = "device",
        page_class: int = 0,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        by_layer: bool = False,
        prefetch: bool = False,
        on_full: OnFull = "wait",
    ) -> Transfer:
        """Start moving blocks.

        Args:
            kind: `"swap_out"` copies from the device to the host, `"swap_in"` back. `"copy"` copies within a tier; no
                block is both read and written. `"move"` moves within a tier, as if all were read before any is written:
                chains and rings are allowed. `"exchange"` swaps the two blocks of each pair; no block may repeat,
                `(-1, -1)` is padding.
            pairs: block ids (from, to), ints `[n, 2]`; no destination repeats. They are copied.
            tier: tier of a copy, move or exchange. Compute does not touch the host, so `after_compute` has no effect
                there.
            page_class: page class of the blocks. Blocks of two classes may share bytes: their manager sees to it that
                only one of them is in use.
            after: transfers that must end first.
            after_compute: a point in compute that must be reached first; by default the current one.
            by_layer: load a swap-in layer by layer, for `Transfer.order_compute(layer)`; on CUDA in groups of at least
                128 KiB per block. Blocks of an `ArenaLayout` load as a whole.
            prefetch: this swap-in is not needed yet; `poll` starts it when no other load is in flight.
            on_full: whether to `"wait"` or to `"refuse"` if too many bytes are in flight.

        Returns:
            The transfer. If an exchange fails, both blocks of each pair are lost.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was submitted.
            TransferQueueFullError: too many bytes are in flight, and `on_full` is `"refuse"`.
            InvalidArgumentError: another argument is out of range, or a transfer in `after` is of another engine.
            CaptureError: a graph is being captured; nothing was submitted.
        """
        self.transfers.check()
        if (by_layer or prefetch) and kind != "swap_in":
            raise InvalidArgumentError(f"kind is {kind!r}: by_layer and prefetch are for 'swap_in'")
        memory = self.of_class(page_class)
        chunk = self._chunk(memory, prefetch=prefetch)
        made = moving(memory, kind, pairs, tier, chunk=chunk, by_layer=by_layer)
        after_compute = self._make_room(made, after_compute, on_full)
        return self.transfers.submit(made, after=after, after_compute=after_compute, prefetch=prefetch)

    def submit_read(
        self,
        tier: EngineTier,
        blocks: IdList,
        rows: Rows | None = None,
        *,
        page_class: int = 0,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        on_full: OnFull = "wait",
    ) -> Transfer:
        """Start copying blocks into rows on the CPU; when it has ended, they are the transfer's `rows`.

        Args:
            tier: `"device"` or `"host"`; see `submit` for this and the other arguments.
            blocks: ids, ints `[n]`; they may repeat. They are copied.
            rows: destination, uint8 `[n, bytes_per_block]`, writable, each row contiguous, page-locked if host memory
                is; must not be used by others until the transfer ends. None means fresh rows, which cost ten times as
                much on a CPU.
            page_class: page class of the blocks.
            after: transfers that must end first.
            after_compute: a point in compute that must be reached first.
            on_full: whether to `"wait"` or to `"refuse"`.

        Raises:
            LayoutError: the rows are not as described; nothing was submitted.
            MappingError, TransferQueueFullError, InvalidArgumentError, CaptureError: as for `submit`.
        """
        self.transfers.check()
        memory = self.of_class(page_class)
        made = reading(memory, tier, blocks, chunk=self._chunk(memory), into=rows)
        after_compute = self._make_room(made, after_compute, on_full)
        return self.transfers.submit(made, after=after, after_compute=after_compute)

    def submit_write(
        self,
        tier: EngineTier,
        blocks: IdList,
        rows: Rows,
        *,
        page_class: int = 0,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        prefetch: bool = False,
        on_full: OnFull = "wait",
    ) -> Transfer:
        """Start copying rows on the CPU into blocks; the rows must not change until the transfer has ended.

        Args:
            tier: `"device"` or `"host"`; see `submit` for this and the other arguments.
            blocks: ids, ints `[n]`, no repeats. They are copied.
            rows: uint8 `[n, bytes_per_block]`.
            page_class: page class of the blocks.
            after: transfers that must end first.
            after_compute: a point in compute that must be reached first.
            prefetch: the blocks are not needed yet; has no effect for the host.
            on_full: whether to `"wait"` or to `"refuse"`.

        Raises:
            LayoutError: the rows have another shape or dtype; nothing was submitted.
            MappingError, TransferQueueFullError, InvalidArgumentError, CaptureError: as for `submit`.
        """
        self.transfers.check()
        prefetch = prefetch and tier == "device"
        memory = self.of_class(page_class)
        made = writing(memory, tier, blocks, rows, chunk=self._chunk(memory, prefetch=prefetch))
        after_compute = self._make_room(made, after_compute, on_full)
        return self.transfers.submit(made, after=after, after_compute=after_compute, prefetch=prefetch)

    # ---- synchronous ----

    def run(self, kind: Kind, pairs: IdPairs, *, tier: EngineTier = "device", page_class: int = 0) -> None:
        """Move blocks on the compute stream, after all open transfers; see `submit` for the arguments.

        On a CPU the blocks have moved when this returns. On CUDA the work is queued on the current stream, in the order
        of the calls; compute that reads or writes the same blocks belongs on that stream.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was moved.
            CaptureError: a graph is being captured, and transfers are open or the blocks are on the host.
        """
        self.transfers.process.check()
        made = moving(self.of_class(page_class), kind, pairs, tier, chunk=None)
        if len(made.mapping):
            self._run(made)

    def read(self, tier: EngineTier, blocks: IdList, *, page_class: int = 0) -> Rows:
        """Copy blocks into fresh rows on the CPU, and wait for them.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, ints `[n]`; they may repeat.
            page_class: page class of the blocks.

        Returns:
            uint8 `[n, bytes_per_block]`.

        Raises:
            MappingError: an id is out of range.
            CaptureError: a graph is being captured.
        """
        self.transfers.check()
        made = self._run(reading(self.of_class(page_class), tier, blocks, chunk=None)).wait()
        return cast("Rows", made.rows)

    def write(self, tier: EngineTier, blocks: IdList, rows: Rows, *, page_class: int = 0) -> None:
        """Copy rows on the CPU into blocks; the rows can be reused when it returns.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, ints `[n]`, no repeats.
            rows: uint8 `[n, bytes_per_block]`.
            page_class: page class of the blocks.

        Raises:
            MappingError: an id is out of range or repeats; nothing was written.
            LayoutError: the rows have another shape or dtype; nothing was written.
            CaptureError: a graph is being captured; nothing was written.
        """
        self.transfers.check()
        made = writing(self.of_class(page_class), tier, blocks, rows, chunk=None, copies=True)
        if len(made.mapping):
            self._run(made)

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision with `run`, transfer by transfer.

        Args:
            decision: transfers within the device or the host, and between the two.

        Returns:
            An empty list: all pairs have landed, or the call raises.

        Raises:
            MappingError: an id is out of range, or a transfer is of the external tier.
            OutOfMemoryError, PageLockError: host memory is not available.
        """
        for kind, pairs in decision.transfers():
            if "external" in (pairs.src, pairs.dst):
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} name the external tier, but there is none")
        for kind, pairs in decision.transfers():
            tier: EngineTier = "host" if pairs.src == pairs.dst == "host" else "device"
            self.run(kind, pairs.ids, tier=tier, page_class=pairs.page_class)  # type: ignore[arg-type]
        return []

    # ---- both ----

    def fence(self) -> Event:
        """Mark the current end of compute, for `after_compute`; raises CaptureError inside a graph capture."""
        self.transfers.check()
        return self.streams.fence()

    def poll(self) -> None:
        """Complete finished transfers, and start prefetches that are due; never waits.

        Raises:
            CaptureError: a graph is being captured.
        """
        self.transfers.poll()

    def close(self) -> None:
        """Wait for queued work and release all memory, even if the device has failed. Idempotent.

        Raises:
            CaptureError: a graph is being captured; nothing was closed.
            torch.AcceleratorError: the device has failed; the memory is released anyway.
        """
        if self.transfers.process.is_current:
            try:
                self.transfers.check()
                self.transfers.synchronize()
                self.streams.close()
            except torch.AcceleratorError:
                # A lost device neither copies nor unlocks. If only a call failed, this waits for its work.
                with suppress(torch.AcceleratorError):
                    self.streams.close()
                with suppress(PageLockError):
                    self._release()
                raise
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release(self) -> None:
        with ExitStack() as stack:  # if one cannot be unlocked, the others are released
            for memory in self.memories:
                stack.callback(memory.release)

    def _chunk(self, memory: Memory, *, prefetch: bool = False) -> int | None:
        """Return the maximum number of blocks per piece, if longer pieces would delay others."""
        chunk = self.streams.chunk_bytes or (PIECE_BYTES if prefetch else None)
        return chunk and max(1, chunk // memory.bytes_per_block)

    def _make_room(self, transfer: Transfer, after_compute: Event | None, on_full: OnFull) -> Event | None:
        """Make room for a transfer. Returns the point in compute that it comes after."""
        self.transfers.make_room(transfer.stream, transfer.num_bytes, on_full)
        if transfer.stream == "host":
            return None
        return self.streams.fence() if after_compute is None else after_compute

    def _run(self, transfer: Transfer) -> Transfer:
        on_device = bool(transfer.device_columns)
        if on_device and self.streams.capturing():
            return self.transfers.capture(transfer)
        if not (self._on_cuda and on_device):
            return self.transfers.run(transfer, "compute" if on_device else "caller")
        self.transfers.poll()  # drop ended transfers, even if only synchronous calls are made
        self.transfers.submit(transfer, "compute", after=self.transfers.open())
        if self.transfers.failed_to_launch(transfer):
            transfer.wait()
        return transfer


def check_list_of_tensors(tensors: object) -> None:
    """Raise LayoutError for a tensor that is not in a list."""
    if isinstance(tensors, Tensor):
        raise LayoutError(f"tensors is one tensor {list(tensors.shape)}, must be a list of the layout's tensors")


def _count(counters: dict[tuple[str, str], Traffic], seconds: dict[str, Histogram], transfer: Transfer) -> None:
    """Count what has landed."""
    src, dst = transfer.src, transfer.dst
    if transfer.error is None and "rows" not in {src, dst}:
        before = counters.get((src, dst), Traffic(0, 0))
        blocks = len(transfer.mapping) * (2 if transfer.kind == "exchange" else 1)
        counters[src, dst] = Traffic(before.blocks + blocks, before.num_bytes + transfer.num_bytes)
        if {src, dst} == {"device", "host"}:
            seconds["read" if src == "host" else "write"].observe(time.monotonic() - transfer.began)


def wait_for_engines(memory: Tensor, first: int) -> None:
    """Wait for all engines' transfers that touch blocks of a device cache; in a fork there are none.

    Args:
        memory: memory of the cache's tensors, uint8 `[bytes]`.
        first: the lowest block to wait for.
    """
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for engine in filter(None, [alive() for alive in tuple(_alive)]):
        over = any(start <= tensor.data_ptr() < end for tensor in engine.memory.tensors)
        if over and engine.transfers.process.is_current:
            engine.transfers.synchronize(first)
