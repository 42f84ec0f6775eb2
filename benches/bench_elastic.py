"""Host time of giving an elastic cache of 100 GB its memory, over a stand-in for the driver that does nothing.

    python benches/bench_elastic.py [--repeat 3]

160 planes (80 layers, K and V), as on one device. `elastic_map_100_gb_ms` is the time with the default chunk
size, `elastic_map_100_gb_units_ms` with chunks of the driver's unit, 2 MiB. The driver's time is not included. With
BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

import argparse
import mmap
import time
from types import ModuleType, SimpleNamespace
from typing import cast

import torch
from figures import keep

from blockyard.engine.elastic.cuda import DeviceMemory

LAYERS, UNIT = 80, 2 << 20
SIZES = [100 * 10**9 // LAYERS] * LAYERS
MAP_NORESERVE = 0x4000


class Driver:
    """Accepts every call; addresses belong to this process, and no memory is touched."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self) -> None:
        self.handles = 0

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: (0,)

    def cuMemGetAllocationGranularity(self, *_: object) -> tuple[int, int]:  # noqa: N802 (the driver's name)
        """Give the unit."""
        return 0, UNIT

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[int, int]:  # noqa: N802
        """Reserve without memory."""
        self.room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        return 0, torch.frombuffer(self.room, dtype=torch.uint8).data_ptr()

    def cuStreamCreate(self, *_: int) -> tuple[int, int]:  # noqa: N802
        """Give a stream."""
        return 0, 1

    def cuMemCreate(self, *_: object) -> tuple[int, int]:  # noqa: N802
        """Give a handle."""
        self.handles += 1
        return 0, self.handles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="turns; the best counts")
    repeat = parser.parse_args().repeat
    figures = {}
    for name, chunk_bytes in (("elastic_map_100_gb_ms", None), ("elastic_map_100_gb_units_ms", UNIT)):
        best = float("inf")
        for _ in range(repeat):
            driver = Driver()
            memory = DeviceMemory(
                SIZES,
                device=torch.device("cpu"),
                chunk_bytes=chunk_bytes,
                planes=2 * LAYERS,
                driver=cast("ModuleType", driver),
            )
            chunks = memory.tensor.numel() // memory.chunk
            start = time.thread_time()
            memory.commit(0, chunks)
            best = min(best, time.thread_time() - start)
            print(f"{chunks} chunks of {memory.chunk >> 20} MiB: {driver.handles} allocations")
        figures[name] = 1e3 * best
    for name, value in figures.items():
        print(f"{name:32} {value:8.2f}")
    keep(figures)


if __name__ == "__main__":
    main()
