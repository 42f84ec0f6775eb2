"""The copy kernels of `cuda/` built for a CPU: `tests/kernels/`."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from blockyard_build.toolchain import find_cuda_home

TESTS = Path(__file__).resolve().parent.parent
CUDA = TESTS.parent / "cuda"
MAX_STEPS = 2048
"""Of one launch."""
WITHIN_DEVICE, BESIDE_HOST = range(2)
"""Routes of a copy."""

FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-sanitize-recover=all"]
# Unset registers are never stored, which the compiler cannot know.
FLAGS += ["-Wno-maybe-uninitialized"]
LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>")
# A file of `cuda/`, an expression, and its faulty replacement. The program contains all faults and
# enables the one whose number it gets, so one build serves all.
MISTAKES = {
    "a row is one access longer": ("copy_kernel.h", "at < count", "at <= count"),
    "one row more than there are": ("copy_kernel.h", "step < params.num_groups", "step <= params.num_groups"),
    "a moved row is one access longer": ("copy_kernel.h", "at >= count", "at > count"),
    "a host row is one access longer": ("copy_kernel.h", "first + i * kWarp < count", "first + i * kWarp <= count"),
    "the grid ends a chunk early": ("copy.cu", "(widest + kChunk<Access> - 1)", "widest"),
    "warps miss the last chunk": ("copy.cu", "(widest + kHostChunk<Access> - 1)", "widest"),
    "accesses wider than the rows allow": ("copy.cu", "bits % 16 == 0", "bits % 8 == 0"),
    "a tensor more than a launch takes": (
        "launch.h",
        "std::min(kMaxTensors, num_tensors - t)",
        "std::min(kMaxTensors + 1, num_tensors - t)",
    ),
    "a step more than a launch takes": ("steps.cpp", "next - begin > max_steps", "next - begin > max_steps + 1"),
}


def build_kernels(folder: Path, *, program: bool) -> Path:
    """Compile the kernels, as a program with AddressSanitizer or as a library; skips the test without CUDA headers.

    Args:
        folder: folder for sources and result; an existing result is reused.
        program: whether to build a program; a library cannot use AddressSanitizer unless Python is started with it.
    """
    home = find_cuda_home({})
    if home is None:
        pytest.skip("no CUDA headers")
    built = folder / ("kernels" if program else "kernels.so")
    if built.exists():
        return built
    for source in [*CUDA.glob("*.h"), CUDA / "copy.cu", CUDA / "steps.cpp"]:
        text = source.read_text()
        for number, (name, right, wrong) in enumerate(MISTAKES.values(), 1):
            if name == source.name and program:
                assert right in text, right
                text = text.replace(right, f"(planted == {number} ? ({wrong}) : ({right}))")
        text = LAUNCH.sub(r"on_grid(\1, \2)", text)
        (folder / source.name).write_text(
            text.replace("const __grid_constant__ CopyParams params", "const CopyParams& params")
        )
    flags = ["-g", "-fsanitize=address,undefined"] if program else ["-shared", "-fPIC", "-fsanitize=undefined"]
    includes = [f"-I{folder}", f"-I{TESTS / 'kernels'}", "-isystem", str(home / "include")]
    command = ["g++", *FLAGS, *flags, *includes, str(TESTS / "kernels" / "kernels.cpp"), "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def load_kernels(folder: Path) -> ctypes.CDLL:
    """Build and load the library."""
    return ctypes.CDLL(str(build_kernels(folder, program=False)))
