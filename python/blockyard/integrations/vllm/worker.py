"""vLLM's offloading worker with Blockyard's copies: device blocks, or blocks of CPU tensors, to and from host chunks.

A host chunk holds `blocks_per_chunk` device blocks, each with all tensors side by side. A transfer may begin and end
inside a chunk, as given by `block_indices` and `group_sizes`; nothing else is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from blockyard._core import Mapping
from blockyard.engine.cuda.streams import CudaStreams
from blockyard.engine.host_pool import HostPool
from blockyard.engine.mapping import unequal_pairs
from blockyard.engine.ops import bind
from blockyard.engine.ops.library import prepare_device
from blockyard.engine.streams import Event, StreamName, Streams, WorkerStreams, refuse_capture
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log
from blockyard.integrations.vllm.region import SharedRegion
from blockyard.integrations.vllm.units import BlockPieces, Units
from blockyard.workers.interrupts import keep

__all__ = ["BlockyardWorker"]

_LOG = engine_log("vLLM")
_Run = Callable[[Mapping], None]
_Copy = Callable[[], None]


class _GroupCopies(NamedTuple):
    """The copies of one cache group; None if the group has no tensors here."""

    store: _Run | None
    load: _Run | None


@dataclass(slots=True)
class _CopyJob:
    num_bytes: int
    reads: frozenset[int] = frozenset()  # device blocks
    events: list[Event] = field(default_factory=list)
    begun: Any = None
    ended: Any = None

    @property
    def error(self) -> Exception | None:
        return next((event.error for event in self.events if event.error is not None), None)

    def seconds(self) -> float:
        if isinstance(self.begun, float):
            return float(self.ended - self.begun)
        return float(self.begun.elapsed_time(self.ended)) * 1e-3


class BlockyardWorker(OffloadingWorker):
    """Copies between one worker's KV caches and its host chunks, in the background.

    Loads go before stores, and expedited loads before other loads: on CUDA each has its own stream, and on a CPU a
    thread serves them in that order, piece by piece. All wait for compute queued before they were submitted, and a load
    waits for the stores that read the blocks it writes to.

    While a CUDA graph is being captured on the current stream, every call raises `CaptureError`; graph and jobs are
    unaffected.

    Args:
        kv_caches: from vLLM, on a CPU or a CUDA device.
        blocks_per_chunk: device blocks in a host chunk.
        num_chunks: number of host chunks, as in the manager.
        region: memory for them shared with the scheduler; None means private memory.
        block_bytes: bytes per block in that region.
        stores: False for a worker whose stores copy nothing, since another one writes the same bytes to the region.
        units: of which host memory has `num_chunks`, with one block a chunk; None for chunks of equal bytes.

    Raises:
        InvalidArgumentError: the tensors do not match one another.
        OutOfMemoryError: the host has too little memory.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        blocks_per_chunk: int,
        num_chunks: int,
        region: SharedRegion | None = None,
        block_bytes: int | None = None,
        stores: bool = True,
        units: Units | None = None,
    ) -> None:
        device_rows = [_rows(cache.tensor, cache.page_size_bytes) for cache in kv_caches.tensors]
        if not device_rows:
            raise InvalidArgumentError("kv_caches.tensors is empty, must hold at least one tensor")
        self._device = device_rows[0].device
        self._per_chunk, self._num_chunks, self._stores = blocks_per_chunk, num_chunks, stores
        widths = [rows.shape[1] for rows in device_rows]
        starts = [sum(widths[:index]) for index in range(len(widths))]
        width = sum(widths) if block_bytes is None else block_bytes
        if sum(widths) > width and units is None:
            raise InvalidArgumentError(f"kv_caches have {sum(widths)} bytes per block, block_bytes is {width}")
        self._pieces_of = None if units is None else BlockPieces(kv_caches, units)
        width = width if units is None else units.unit_bytes
        self._region = region
        self._host = HostPool.for_device(
            num_chunks * blocks_per_chunk,
            width,
            self._device,
            on_failure="unpinned",
            mapping=region.mapping if region is not None else None,
        )
        if self._host.problem:
            _LOG.warning("copies will be slow: %s", self._host.problem)
        if self._on_cuda:
            prepare_device(self._device)
        self._streams: Streams = CudaStreams(self._device) if self._on_cuda else WorkerStreams()
        self._groups: list[_GroupCopies] = []
        self._block_bytes: list[int] = []
        self._device_blocks = min(rows.shape[0] for rows in device_rows)
        if self._pieces_of is not None:
            device, host = [self._pieces_of.rows], [self._host.rows]
            self._groups = [_GroupCopies(bind(device, host), bind(host, device))]
            self._block_bytes = [width]
        for refs in kv_caches.group_data_refs if units is None else ():
            # Layers of a group may share one tensor.
            pages: dict[int, int] = {}
            for ref in refs:
                pages[ref.tensor_idx] = max(ref.page_size_bytes, pages.get(ref.tensor_idx, 0))
            device = [device_rows[index][:, :page] for index, page in pages.items()]
            host = [self._host.rows[:, starts[index] : starts[index] + page] for index, page in pages.items()]
            self._groups.append(
                _GroupCopies(bind(device, host), bind(host, device)) if pages else _GroupCopies(None, None)
            )
            self._block_bytes.append(sum(pages.values()))
        self._jobs: dict[int, _CopyJob] = {}

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy device blocks to host chunks.

        Raises:
            InvalidArgumentError: blocks and chunks do not match, an id is out of range, or a job has this id; nothing
                is copied.
        """
        return self._submit(job_id, src_spec, dst_spec, "out", to="large")

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy host chunks, or parts of the first and last, to device blocks; raises as `submit_store`.

        Args:
            job_id: must differ from all jobs not yet reported by `get_finished`.
            src_spec: host chunks of each group's blocks.
            dst_spec: device blocks, group by group.
            expedited: whether to go before other loads.
        """
        return self._submit(job_id, dst_spec, src_spec, "copy" if expedited else "in", to="small")

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in submission order; never waits."""
        refuse_capture(self._streams)
        ended = [job_id for job_id, job in self._jobs.items() if job.events[-1].query()]
        results = [self._result(job_id, self._jobs[job_id]) for job_id in ended]
        left = {job_id: job for job_id, job in self._jobs.items() if job_id not in ended} if ended else self._jobs
        self._jobs = left  # last, so that the next call returns what this one does not
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs to end; `get_finished` still reports them."""
        refuse_capture(self._streams)
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs[job_id].events[-1].synchronize()

    def shutdown(self) -> None:
        """Wait for all jobs and free the host memory. Idempotent."""
        refuse_capture(self._streams)
        self._streams.close()
        self._jobs.clear()
        self._groups = [_GroupCopies(None, None)] * len(self._groups)
        self._host.close()
        if self._region is not None:
            self._region.close()

    def _submit(
        self,
        job_id: int,
        device: GPULoadStoreSpec,
        host: LoadStoreSpec,
        stream: StreamName,
        *,
        to: Literal["small", "large"],
    ) -> bool:
        refuse_capture(self._streams)
        if job_id in self._jobs:
            raise InvalidArgumentError(f"job_id is {job_id}, which is already in flight")
        chunks = np.asarray(host.block_ids, np.int64)
        mappings = self._mappings(device, chunks, to)
        if to == "large" and not self._stores:
            mappings = []
        blocks = frozenset(device.block_ids.tolist())
        job = _CopyJob(sum(len(mapping) * self._block_bytes[group] for group, mapping in mappings))
        waits = [self._streams.fence()]
        if to == "large":
            job.reads = blocks
        else:
            waits += [other.events[-1] for other in self._jobs.values() if not blocks.isdisjoint(other.reads)]
        if len(chunks):
            self._host.wait((int(chunks.max()) + 1) * self._per_chunk)
        copies: list[_Copy] = []
        for group, mapping in mappings:
            run = self._groups[group].store if to == "large" else self._groups[group].load
            if run is not None:
                copies += [partial(run, piece) for piece in self._pieces(mapping, self._block_bytes[group])]
        # Each launch may wake a thread, so the first copy notes the job's begin, and the last its end.
        works = [
            partial(self._run, job, [copy], begins=copy is copies[0], ends=copy is copies[-1]) for copy in copies
        ] or [partial(self._run, job, [])]
        try:
            for work in works:
                keep(job.events, self._streams.launch, stream, work, waits)
            self._jobs[job_id] = job
        except BaseException:
            for event in job.events:
                event.synchronize()  # the job is rejected: none of it may be in flight
            raise
        return True

    def _mappings(
        self, device: GPULoadStoreSpec, chunks: NDArray[np.int64], to: Literal["small", "large"]
    ) -> list[tuple[int, Mapping]]:
        """Pair the blocks of each group with parts of its chunks; checks everything before copying."""
        blocks, sizes = np.asarray(device.block_ids, np.int64), list(device.group_sizes)
        if self._pieces_of is not None:
            return self._mappings_of_pieces(self._pieces_of, blocks, sizes, chunks, to)
        if len(sizes) != len(self._groups) or len(device.block_indices) != len(sizes):
            raise InvalidArgumentError(
                f"group_sizes has {len(sizes)} groups and block_indices {len(device.block_indices)}, "
                f"must be {len(self._groups)}"
            )
        mappings = []
        block = chunk = 0
        for group, (size, index) in enumerate(zip(sizes, device.block_indices, strict=True)):
            if size == 0:
                continue
            first = index % self._per_chunk
            used = -(-(first + size) // self._per_chunk)
            pairs = unequal_pairs(
                blocks[block : block + size],
                chunks[chunk : chunk + used],
                per_block=self._per_chunk,
                first=first,
                last=(first + size - 1) % self._per_chunk + 1,
                to=to,
            )
            bounds = (self._device_blocks, self._num_chunks * self._per_chunk)
            src, dst = bounds if to == "large" else bounds[::-1]
            mappings.append((group, Mapping(pairs, src_blocks=src, dst_blocks=dst, rule="swap")))
            block, chunk = block + size, chunk + used
        if (block, chunk) != (len(blocks), len(chunks)):
            raise InvalidArgumentError(
                f"{len(blocks)} device blocks and {len(chunks)} host chunks are given, "
                f"the groups use {block} and {chunk}"
            )
        return mappings

    def _mappings_of_pieces(
        self,
        pieces: BlockPieces,
        blocks: NDArray[np.int64],
        sizes: list[int],
        units: NDArray[np.int64],
        to: Literal["small", "large"],
    ) -> list[tuple[int, Mapping]]:
        """Pair the pieces of all groups' blocks with units of the host: one mapping for the whole job."""
        counts, ends = pieces.counts, np.cumsum([0, *sizes])
        if len(sizes) != len(counts) or ends[-1] != len(blocks):
            raise InvalidArgumentError(
                f"group_sizes is {sizes} for {len(blocks)} device blocks, must have {len(counts)} groups and their sum"
            )
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self._device_blocks:
            raise InvalidArgumentError(
                f"device blocks are {blocks.min()} to {blocks.max()}, must be 0 to {self._device_blocks - 1}"
            )
        found = np.concatenate([pieces.of(group, blocks[ends[group] : ends[group + 1]]) for group in range(len(sizes))])
        if len(found) != len(units):
            raise InvalidArgumentError(
                f"{len(units)} host units are given for {sizes} blocks of {counts} units, must be {len(found)}"
            )
        if not len(found):
            return []
        pairs, bounds = np.stack([found, units], axis=1), (len(pieces.rows), self._num_chunks)
        pairs, (src, dst) = (pairs, bounds) if to == "large" else (pairs[:, ::-1], bounds[::-1])
        return [(0, Mapping(np.ascontiguousarray(pairs), src_blocks=src, dst_blocks=dst, rule="swap"))]

    def _pieces(self, mapping: Mapping, block_bytes: int) -> Sequence[Mapping]:
        limit = self._streams.chunk_bytes
        return [mapping] if limit is None else mapping.split(max(1, limit // max(1, block_bytes)))

    def _run(self, job: _CopyJob, copies: list[_Copy], *, begins: bool = True, ends: bool = True) -> None:
        """Run copies, and note when the job began and ended."""
        job.begun = self._mark() if begins else job.begun
        for copy in copies:
            copy()
        job.ended = self._mark() if ends else job.ended

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _result(self, job_id: int, job: _CopyJob) -> TransferResult:
        if job.error is not None:
            # vLLM stops the engine, rightly: if a copy within this machine fails, nothing can be relied on.
            _LOG.error("job %d failed: %s", job_id, job.error)
            return TransferResult(job_id=job_id, success=False)
        return TransferResult(job_id=job_id, success=True, transfer_size=job.num_bytes, transfer_time=job.seconds())


def _rows(tensor: Tensor, page_bytes: int) -> Tensor:
    """View a cache as uint8 `[blocks, page_bytes]`."""
    view = tensor.view(torch.uint8)
    # A packed layout has strides larger than pages, and already two dimensions.
    return view if view.dim() == 2 and view.shape[1] == page_bytes else view.view(-1, page_bytes)
