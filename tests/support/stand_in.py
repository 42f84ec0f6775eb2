"""Builds the op library over a stand-in for the CUDA runtime: CPU tensors stand for a device's."""

import ctypes
import subprocess
from pathlib import Path

import torch

from blockyard_build.toolchain import find_toolchain

TESTS = Path(__file__).resolve().parent.parent


def build_stand_in(folder: Path, optimize: str = "-O1") -> ctypes.CDLL:
    """Compile `tests/fake_cuda.cpp` and load its ops, `torch.ops.blockyard_fake`; raises MissingError."""
    tools = find_toolchain({})
    library = folder / "fake.so"
    flags = ["-std=c++17", optimize, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DUSE_CUDA"]
    flags += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-Wl,-Bsymbolic", "-Wno-unknown-pragmas"]
    includes = [f"-I{TESTS.parent / 'cuda'}", "-isystem", str(tools.torch_home / "include")]
    includes += ["-isystem", str(tools.cuda_home / "include")]
    command = [tools.gxx, *flags, *includes, str(TESTS / "fake_cuda.cpp"), "-o", str(library)]
    subprocess.run([*command, f"-L{tools.torch_home / 'lib'}", "-Wl,--no-as-needed", "-ltorch"], check=True)
    torch.ops.load_library(str(library))
    loaded = ctypes.CDLL(str(library))
    loaded.fake_calls.restype = ctypes.c_char_p
    loaded.fake_reset.argtypes = [*[ctypes.c_size_t] * 3, *[ctypes.c_bool] * 4]
    loaded.fake_strategy.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    loaded.fake_dry.argtypes = [ctypes.c_bool]
    return loaded
