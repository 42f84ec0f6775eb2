"""Elastic caches on a CUDA device: addresses are reserved once, and driver allocations mapped behind them.

Needs CUDA's Python bindings (`pip install "blockyard[elastic]"`); the driver has had these calls since CUDA 10.2.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, Final, cast

import torch

from blockyard.engine.elastic.dlpack import tensor_at
from blockyard.engine.ops.library import declare_region
from blockyard.errors import BlockyardError, InvalidArgumentError, OutOfMemoryError
from blockyard.workers.extras import missing
from blockyard.workers.ownership import Process

__all__ = ["DeviceMemory", "choose_chunk", "load_driver"]

# Chunks chosen here keep at most 1/32.
_KEPT: Final = 32


class DeviceMemory:
    """Addresses of one reservation on a CUDA device; see `MemoryRange` in `elastic`.

    Each chunk is a separate allocation, so that each can be freed alone. Its handle is released as soon as it is
    mapped: from then on only the mapping keeps the memory. The addresses are released with the last tensor over them.

    Args:
        sizes: bytes of each tensor, which begins with a chunk.
        device: the CUDA device.
        chunk_bytes: bytes of a chunk, a multiple of the driver's granularity, mostly 2 MiB; see `choose_chunk` if None.
        planes: number of planes over all tensors: parts with consecutive blocks. By default one per tensor.
        driver: the module `cuda.bindings.driver`, or a stand-in; loaded if None.

    Raises:
        InvalidArgumentError: the bindings are missing, or the chunk is not a multiple of the granularity.
        OutOfMemoryError: the process has too little address space.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        device: torch.device,
        chunk_bytes: int | None = None,
        planes: int | None = None,
        driver: ModuleType | None = None,
    ) -> None:
        device = torch.empty(0, device=device).device  # resolves `cuda` to the current device
        calls = _DriverCalls(driver or load_driver(), device)
        unit = calls.granularity()
        self.chunk = choose_chunk(sizes, planes or len(sizes), unit) if chunk_bytes is None else chunk_bytes
        if self.chunk < 1 or self.chunk % unit:
            raise InvalidArgumentError(f"chunk_bytes is {self.chunk}, must be a multiple of {unit}")
        total = sum(-(-size // self.chunk) * self.chunk for size in sizes)
        self._range = _Range(calls, calls.reserve(total), total)
        declare_region(self._range.address, total, self.chunk)
        self.tensor = tensor_at(self._range.address, total, device=device, owner=self._range)

    def commit(self, first: int, last: int) -> None:
        """Map new memory, all zeros, behind chunks `first` to `last` (exclusive).

        Raises:
            OutOfMemoryError: the device has too little memory; nothing was mapped.
        """
        self._range.map(first, last, self.chunk)

    def release(self, first: int, last: int) -> None:
        """Unmap chunks `first` to `last` (exclusive), which frees their device memory."""
        self._range.unmap(first, last, self.chunk)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._range.calls.synchronize()


def choose_chunk(sizes: Sequence[int], planes: int, unit: int) -> int:
    """Choose the chunk size: each chunk costs three driver calls to add and one to remove.

    At each end, a plane keeps less than one chunk more than its blocks need. The chunk is the largest power-of-two
    multiple of the unit for which that is at most 1/32 of all tensors, or the unit itself.

    Args:
        sizes: bytes of each tensor.
        planes: number of planes over all tensors, at least 1.
        unit: the driver's granularity.
    """
    chunk, max_chunk = unit, sum(sizes) // (_KEPT * 2 * planes)
    while 2 * chunk <= max_chunk:
        chunk *= 2
    return chunk


def load_driver() -> ModuleType:
    """Load CUDA's driver bindings.

    Raises:
        InvalidArgumentError: they are not installed.
    """
    try:
        return import_module("cuda.bindings.driver")
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(str(missing("an elastic cache on a GPU", error))) from None


class _Range:
    """Reserved addresses and the chunks mapped in them; all are released with the last reference."""

    def __init__(self, calls: _DriverCalls, address: int, size: int) -> None:
        self.calls, self.address = calls, address
        self._mapped: dict[int, int] = {}
        weakref.finalize(self, _end, calls, address, size, self._mapped, Process("memory of a device"))

    def map(self, first: int, last: int, chunk: int) -> None:
        with self.calls.context():
            try:
                for place in range(first, last):
                    self.calls.map(self.address + place * chunk, chunk)
                    self._mapped[self.address + place * chunk] = chunk
                start, size = self.address + first * chunk, (last - first) * chunk
                self.calls.call("cuMemSetAccess", start, size, [self.calls.access], 1)
                self.calls.zero(start, size)
            except BaseException:
                mapped = [place for place in range(first, last) if self.address + place * chunk in self._mapped]
                for place in mapped:
                    self.unmap(place, place + 1, chunk)
                raise

    def unmap(self, first: int, last: int, chunk: int) -> None:
        with self.calls.context():
            for place in range(first, last):
                self.calls.call("cuMemUnmap", self.address + place * chunk, chunk)
                del self._mapped[self.address + place * chunk]


def _end(calls: _DriverCalls, address: int, size: int, mapped: dict[int, int], process: Process) -> None:
    declare_region(address, 0, 1)
    if not process.is_current:  # CUDA does not work in a fork
        return
    # At process exit the driver may already be gone, and has then freed everything.
    with contextlib.suppress(BlockyardError), calls.context():
        calls.synchronize()
        for start, length in mapped.items():
            calls.call("cuMemUnmap", start, length)
        calls.call("cuMemAddressFree", address, size)
        calls.call("cuStreamDestroy", calls.stream)


class _DriverCalls:
    """Driver calls for one device; error codes are raised as exceptions."""

    def __init__(self, driver: ModuleType, device: torch.device) -> None:
        # The bindings are compiled and come without types.
        self._driver = cast("Any", driver)
        self._device = device
        self._on_cuda = device.type == "cuda"
        self.synchronize()  # creates the context that all calls need
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index or 0
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = location
        self.access = driver.CUmemAccessDesc()
        self.access.location = location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with self.context():
            self.stream = self.call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def context(self) -> AbstractContextManager[object]:
        """Make the device's context current inside a `with` block."""
        return torch.cuda.device(self._device) if self._on_cuda else contextlib.nullcontext()

    def synchronize(self) -> None:
        with self.context():
            if self._on_cuda:
                torch.cuda.synchronize()
            self.call("cuCtxSynchronize")

    def granularity(self) -> int:
        option = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self.context():
            return int(self.call("cuMemGetAllocationGranularity", self._kind, option))

    def reserve(self, size: int) -> int:
        with self.context():
            return int(self.call("cuMemAddressReserve", size, 0, 0, 0))

    def map(self, address: int, size: int) -> None:
        try:
            handle = self.call("cuMemCreate", size, self._kind, 0)
        except OutOfMemoryError:
            torch.cuda.empty_cache()  # torch caches freed memory
            handle = self.call("cuMemCreate", size, self._kind, 0)
        try:
            self.call("cuMemMap", address, size, 0, handle, 0)
        finally:
            # The mapping keeps the memory; without one it is freed now.
            self.call("cuMemRelease", handle)

    def zero(self, address: int, size: int) -> None:
        """Zero unused memory concurrently with the device's other work, and wait only for that."""
        self.call("cuMemsetD8Async", address, 0, size, self.stream)
        try:
            self.call("cuStreamSynchronize", self.stream)
        except BaseException:
            self.synchronize()  # before the caller unmaps it
            raise

    def call(self, name: str, *arguments: object) -> Any:
        """Call the driver.

        Returns:
            Its result without the error code, if any.

        Raises:
            OutOfMemoryError: there is not enough memory, or address space.
            BlockyardError: any other code.
        """
        code, *results = getattr(self._driver, name)(*arguments)
        codes = self._driver.CUresult
        if code != codes.CUDA_SUCCESS:
            kind = OutOfMemoryError if code == codes.CUDA_ERROR_OUT_OF_MEMORY else BlockyardError
            raise kind(f"{name}{arguments}: {code.name}")
        return results[0] if results else None
