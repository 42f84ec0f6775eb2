"""Finds the tools of the op library: nvcc, g++ and torch's headers."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The toolkit of the nvcc wheels on PyPI; torch 2.11 is built against the same CUDA release.
NVCC_REQUIREMENT = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2"
# The stable ABI of torch 2.11: one library works with every later torch.
TORCH_TARGET = (2, 11)


class MissingError(Exception):
    """A part of the toolchain is missing; the message says which."""


@dataclass(frozen=True)
class Toolchain:
    """Inputs of the compile commands.

    Attributes:
        cuda_home: folder that contains `bin/nvcc`.
        cuda_libs: folder that contains `libcudart_static.a`.
        cuda_version: nvcc's release, such as "13.0".
        gxx: the C++ compiler's command; it compiles and links (nvcc cannot link with the layout of the PyPI wheels).
        gxx_version: version of the compiler, such as "12.2.0".
        torch_home: the installed torch's package folder.
        torch_version: version of the installed torch, such as "2.11.0+cu130".
    """

    cuda_home: Path
    cuda_libs: Path
    cuda_version: str
    gxx: str
    gxx_version: str
    torch_home: Path
    torch_version: str


def find_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """Find the whole toolchain.

    Args:
        environ: `os.environ` or a stand-in; CUDA_HOME and CXX are read.

    Returns:
        The toolchain.

    Raises:
        MissingError: a part is missing.
    """
    torch_home, torch_version = find_torch()
    cuda_home = find_cuda_home(environ)
    if cuda_home is None:
        raise MissingError(f"no nvcc at build time (neither in CUDA_HOME nor from the {NVCC_REQUIREMENT} wheels)")
    gxx = shutil.which(environ.get("CXX") or "g++")
    if gxx is None:
        raise MissingError(f"no C++ compiler at build time ({environ.get('CXX') or 'g++'} was not found)")
    return Toolchain(
        cuda_home=cuda_home,
        cuda_libs=_find_cudart(cuda_home),
        cuda_version=_nvcc_version(cuda_home),
        gxx=gxx,
        gxx_version=_output(gxx, "-dumpfullversion", "-dumpversion").strip(),
        torch_home=torch_home,
        torch_version=torch_version,
    )


def find_cuda_home(environ: Mapping[str, str]) -> Path | None:
    """Find the folder that contains `bin/nvcc`: CUDA_HOME first, then the nvcc wheels; None if there is none."""
    asked = environ.get("CUDA_HOME")
    candidates = [Path(asked)] if asked else []
    spec = importlib.util.find_spec("nvidia")
    wheels = (spec.submodule_search_locations or []) if spec else []
    candidates.extend(Path(folder) / "cu13" for folder in wheels)
    return next((home for home in candidates if (home / "bin" / "nvcc").is_file()), None)


def find_torch() -> tuple[Path, str]:
    """Find the installed torch without importing it.

    Returns:
        Its package folder and its version.

    Raises:
        MissingError: torch is missing, or lacks the stable ABI of the op library.
    """
    spec = importlib.util.find_spec("torch")
    home = Path(spec.origin).parent if spec and spec.origin else None
    if home is None or not (home / "include" / "torch" / "csrc" / "stable").is_dir():
        raise MissingError("no torch headers at build time")
    match = re.search(r"^__version__ = '([^']+)'", (home / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    version = match.group(1) if match else "0"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TORCH_TARGET:
        wanted = ".".join(map(str, TORCH_TARGET))
        raise MissingError(f"torch {version} at build time lacks the stable ABI of torch {wanted}")
    return home, version


def _find_cudart(cuda_home: Path) -> Path:
    # The PyPI wheels have `lib`, an installed toolkit has `lib64`.
    for name in ("lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (cuda_home / name / "libcudart_static.a").is_file():
            return cuda_home / name
    raise MissingError(f"no libcudart_static.a under {cuda_home} at build time")


def _nvcc_version(cuda_home: Path) -> str:
    match = re.search(r"release (\d+\.\d+)", _output(str(cuda_home / "bin" / "nvcc"), "--version"))
    return match.group(1) if match else "unknown"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
