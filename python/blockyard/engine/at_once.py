"""The copy engine's calls that do their work at once, in the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from blockyard.engine import ops
from blockyard.engine.caches import Caches, EngineTier, Rows, as_tensor
from blockyard.engine.mapping import CopyPlan, Ids, check_blocks
from blockyard.engine.ops.checks import check_exchange
from blockyard.engine.tickets import Transfers

__all__ = ["AtOnce"]


class AtOnce(Caches):
    """Caches whose blocks are moved by calls that need no ticket, each after all tickets that were issued before.

    On a CUDA device the work is queued on the current stream, in the order of the calls; compute that reads or writes
    the same blocks belongs on that stream. Calls that hand bytes to the CPU wait for what is queued.

    The engine sets what its two halves share.

    Attributes:
        _transfers: the tickets.
        _queued: work of the device that reads or writes memory of the host, with the staging it needs until its event
            fires.
    """

    _transfers: Transfers
    _queued: deque[tuple[torch.cuda.Event, Tensor | None]]

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
            MappingError: the mapping is malformed or out of range, or a part of a host block that holds no bytes is
                named; nothing was copied.
        """
        self._swap("host", "device", ids)

    def copy(self, ids: Ids) -> None:
        """Copy blocks within the device, as copy-on-write wants it.

        Args:
            ids: (from, to), int64 `[n, 2]`; no block is both read and written, none is written twice.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was copied.
        """
        self._run_within(ops.copy_blocks, self._join("device", "device", ids))

    def move(self, ids: Ids) -> None:
        """Move blocks within the device, as if all were read before the first is written.

        Args:
            ids: (from, to), int64 `[n, 2]`; no destination repeats. Chains and rings are legal.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was moved.
        """
        self._run_within(ops.move_blocks, self._join("device", "device", ids, moves=True))

    def exchange(self, ids: Ids) -> None:
        """Let the two blocks of each pair change places.

        Args:
            ids: int64 `[n, 2]`; no block is named twice. `(-1, -1)` is padding.

        Raises:
            MappingError: the mapping is malformed or out of range; nothing was moved.
        """
        self._run_within(ops.exchange_blocks, self._plan_exchange("device", ids))

    def read_blocks(self, tier: EngineTier, blocks: Ids) -> Rows:
        """Copy blocks into fresh rows on the CPU; waits until they are there.

        Args:
            tier: `"device"` or `"host"`.
            blocks: ids, int64 `[n]`; they may repeat.

        Returns:
            uint8 `[n, bytes_per_block]`.

        Raises:
            MappingError: an id is out of range, or names a part of a host block that holds no bytes.
        """
        checked = check_blocks(blocks, self.num_blocks(tier))
        rows = self._staging(len(checked))
        self._settle(on_cpu=tier == "host")
        if tier == "host":
            self._drain()
            self._require(checked)
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
        if tier == "host" and self._fill:
            self._fill.mark(checked)

    def _check_tier(self, tier: EngineTier) -> None:
        self._transfers.process.check()
        super()._check_tier(tier)

    def _swap(self, src: EngineTier, dst: EngineTier, ids: Ids) -> None:
        plan = self._join(src, dst, ids)
        if not len(plan):
            return
        self._settle()
        if src == "host":
            self._require(plan.pairs[:, 0])
        self._submit(self._views[src], self._views[dst], plan.pairs, None)
        if dst == "host" and self._fill:
            self._fill.mark(np.ascontiguousarray(plan.pairs[:, 1]))
        self._count(src, dst, plan)

    def _plan_exchange(self, tier: EngineTier, ids: Ids) -> CopyPlan:
        pairs = check_exchange(as_tensor(ids), self.num_blocks(tier))
        return CopyPlan(pairs, 2 * len(pairs) * self.layout.bytes_per_block)

    def _require(self, parts: Ids, after: Sequence[int] = ()) -> None:
        """Refuse to read parts of the host's blocks that hold nothing."""
        if self._fill:
            self._fill.require(np.ascontiguousarray(parts), after)

    def _run_within(self, op: Callable[[Sequence[Tensor], Tensor], None], plan: CopyPlan) -> None:
        if len(plan):
            self._settle()
            op(self._views["device"], as_tensor(plan.pairs))
            self._count("device", "device", plan)

    def _settle(self, *, on_cpu: bool = False) -> None:
        """Put what is called at once after all tickets; with `on_cpu` it is the CPU that goes on."""
        if self.device.type == "cuda" and not on_cpu:
            self._transfers.order_compute_all()
        else:
            self._transfers.synchronize()
        if self.device.type != "cuda":
            self._transfers.streams.fence().synchronize()

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
