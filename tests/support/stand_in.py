"""A stand-in for a device: `tests/fake_cuda.cpp` with the library's own dispatch, and memories to copy between."""

import ctypes
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from blockyard.engine.ops.strategy import STRATEGIES
from blockyard_build.toolchain import find_toolchain

TESTS = Path(__file__).resolve().parent.parent
BLOCKS, WIDTH = 40, 64
DIRECTIONS = {"h2d": 0, "d2h": 1, "d2d": 2}
UNBOUNDED = 2**62

Cut = Callable[[torch.Tensor], list[torch.Tensor]]


def build_stand_in(folder: Path, optimize: str = "-O1") -> ctypes.CDLL:
    """Compile and load the stand-in, `torch.ops.blockyard_fake`; raises MissingError where there is no toolchain.

    A library that is already in the folder is reused.
    """
    tools = find_toolchain({})
    library = folder / "fake.so"
    if library.exists():
        return load_stand_in(library)
    flags = ["-std=c++17", optimize, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DUSE_CUDA"]
    flags += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-Wl,-Bsymbolic", "-Wno-unknown-pragmas"]
    includes = [f"-I{TESTS.parent / 'cuda'}", "-isystem", str(tools.torch_home / "include")]
    includes += ["-isystem", str(tools.cuda_home / "include")]
    command = [tools.gxx, *flags, *includes, str(TESTS / "fake_cuda.cpp"), "-o", str(library)]
    subprocess.run([*command, f"-L{tools.torch_home / 'lib'}", "-Wl,--no-as-needed", "-ltorch"], check=True)
    return load_stand_in(library)


def load_stand_in(library: Path) -> ctypes.CDLL:
    """Load a compiled stand-in; a process can have only one."""
    torch.ops.load_library(str(library))
    loaded = ctypes.CDLL(str(library))
    loaded.fake_calls.restype = ctypes.c_char_p
    loaded.fake_reset.argtypes = [*[ctypes.c_size_t] * 2, *[ctypes.c_bool] * 3, ctypes.c_size_t]
    loaded.fake_host.argtypes = [ctypes.c_size_t] * 2
    loaded.fake_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64]
    loaded.fake_map.argtypes = [ctypes.c_size_t] * 2
    loaded.fake_declare.argtypes = [ctypes.c_size_t] * 3
    loaded.fake_is_declared.argtypes = [ctypes.c_size_t]
    loaded.fake_is_declared.restype = ctypes.c_bool
    loaded.fake_is_forbidden.restype = ctypes.c_bool
    loaded.fake_fail.argtypes = [ctypes.c_int, ctypes.c_bool]
    loaded.fake_full.argtypes = [ctypes.c_bool]
    loaded.fake_driver.argtypes = [ctypes.c_uint]
    loaded.fake_batch_pieces.argtypes = [ctypes.c_size_t]
    loaded.fake_strategy.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    loaded.fake_dry.argtypes = [ctypes.c_bool]
    loaded.cudaHostRegister.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint]
    loaded.cudaHostUnregister.argtypes = [ctypes.c_size_t]
    return loaded


def rows_of(memory: torch.Tensor, width: int) -> torch.Tensor:
    """Return blocks of this many bytes; the first is aligned to 64 bytes."""
    start = -memory.data_ptr() % 64
    return memory[start : start + BLOCKS * width].view(BLOCKS, width)


def uncut(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return a single view of whole rows."""
    return [rows]


class Case:
    """One host memory, and two that stand for device memory.

    Args:
        fake: the stand-in.
        width: bytes per block.
        pinned: number of host blocks that are page-locked, by one registration.
        registered: the registrations instead: byte offsets into host memory, from and to.
        mapped: device memory consists of mappings that end at these byte offsets, and at its end.
        shift: device address minus host address of registered memory, for the first registration; twice that for the
            second, and so on.
        max_pieces: a larger batch crashes.
        flags: flags of the stand-in.
    """

    def __init__(
        self,
        fake: ctypes.CDLL,
        *,
        width: int = WIDTH,
        pinned: int = BLOCKS,
        registered: list[tuple[int, int]] | None = None,
        mapped: tuple[int, ...] = (),
        shift: int = 0,
        max_pieces: int = UNBOUNDED,
        **flags: bool,
    ) -> None:
        random = np.random.default_rng(width)
        host, device, other = (torch.from_numpy(random.integers(0, 256, BLOCKS * width + 64, np.uint8)) for _ in "hdo")
        self.host, self.device, self.other = (rows_of(memory, width) for memory in (host, device, other))
        chosen = {"own_stream": True, "capturing": False, "reports_ranges": True, **flags}
        start, size = self.host.data_ptr(), BLOCKS * width
        fake.fake_reset(start, start + size, *chosen.values(), max_pieces)
        ranges = [(0, pinned * width)] if registered is None else registered
        for place, (first, end) in enumerate(ranges, 1):
            if first < end:
                fake.fake_register(start + first, start + end, place * shift)
        for memory in (self.device, self.other):
            bounds = (0, *mapped, size)
            for first, end in pairwise(bounds):
                fake.fake_map(memory.data_ptr() + first, memory.data_ptr() + end)
        self.fake = fake

    def go(
        self,
        direction: str,
        strategy: str,
        pairs: np.ndarray,
        cut: Cut = uncut,
        cut_device: Cut | None = None,
        blocks: int = 12,
    ) -> str:
        """Copy, and compare the whole destination. Returns the calls made.

        Args:
            direction: one of `DIRECTIONS`.
        strategy: one of `STRATEGIES`; any other name means the choice without a table.
        pairs: block pairs.
        cut: the views of a memory.
        cut_device: the views of device memory, if different.
        blocks: number of thread blocks.
        """
        if direction != "d2d":
            self.fake.fake_strategy(DIRECTIONS[direction], STRATEGIES.get(strategy, 0), blocks)
        src = self.host if direction == "h2d" else self.device
        dst = {"h2d": self.device, "d2h": self.host, "d2d": self.other}[direction]
        wanted = dst.clone()
        sides = direction != "h2d", direction != "d2h"
        cut_src, cut_dst = ((cut_device or cut) if on_device else cut for on_device in sides)
        for source, target in zip(cut_src(src), cut_dst(wanted), strict=True):
            target[pairs[:, 1]] = source[pairs[:, 0]]
        before = len(self.fake.fake_calls())
        torch.ops.blockyard_fake.swap(cut_src(src), cut_dst(dst), torch.from_numpy(pairs), *sides)
        assert torch.equal(dst, wanted)
        assert self.fake.fake_faults() == 0
        assert self.fake.cudaPeekAtLastError() == 0
        return str(self.fake.fake_calls()[before:], "ascii")


def scattered(count: int = 20, below: int = BLOCKS) -> np.ndarray:
    """Return pairs in random order."""
    random = np.random.default_rng(count)
    return np.column_stack((random.permutation(below)[:count], random.permutation(below)[:count]))
