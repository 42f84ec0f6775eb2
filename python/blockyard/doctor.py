"""Describes this installation and why something is missing: `blockyard doctor`.

It changes nothing. A broken part is reported, not raised.
"""

import importlib.util
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

import blockyard

_PACKAGE = Path(__file__).parent
# The torch release whose stable ABI the op library uses.
_OLDEST_TORCH = (2, 11)
_WITHOUT = "blocks are copied by plain torch calls instead"


@dataclass(frozen=True)
class OpLibrary:
    """The op library, as far as known without loading it.

    Attributes:
        path: the library's file, or None if it is missing.
        reason: why it is missing; empty if it is not.
        torch: version of the torch headers it was compiled with.
        cuda: CUDA release it was compiled with.
        archs: targets of its kernels, such as "sm_90" (machine code) or "compute_80" (PTX).
        compiler: the C++ compiler and its version.
    """

    path: Path | None
    reason: str = ""
    torch: str = "unknown"
    cuda: str = "unknown"
    archs: tuple[str, ...] = ()
    compiler: str = "unknown"


def run_doctor() -> int:
    """Print the report.

    Returns:
        The exit status, 0: an incomplete installation is not an error.
    """
    for line in report():
        print(line)
    return 0


def report(package: Path = _PACKAGE) -> list[str]:
    """Describe the installation.

    Args:
        package: folder of the installed package.

    Returns:
        Lines of the form `name: finding`.
    """
    library = find_op_library(package)
    torch, torch_line = _import_torch()
    return [
        f"blockyard: {blockyard.__version__}, in {package}",
        f"python: {platform.python_version()} ({platform.python_implementation()}, {platform.platform()})",
        f"numpy: {np.__version__}",
        torch_line,
        f"op library: {describe_op_library(library)}",
        f"op library loads: {_try_loading(library, torch)}",
        f"CUDA device: {_describe_devices(library, torch)}",
    ]


def find_op_library(package: Path = _PACKAGE) -> OpLibrary:
    """Find the op library and the build's record of it.

    Args:
        package: folder of the installed package.

    Returns:
        What was found; `path` is None with a `reason` if there is no library.
    """
    path = package / "_ops.so"
    try:
        written = json.loads((package / "_ops.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if path.is_file():
            return OpLibrary(path)
        return OpLibrary(None, f"_ops.so is missing and so is the build's record ({type(error).__name__}: {error})")
    if not written.get("built"):
        return OpLibrary(None, f"built without the op library: {written.get('reason', 'unknown')}")
    if not path.is_file():
        return OpLibrary(None, f"it was built for CUDA {written['cuda']}, but {path} is gone")
    return OpLibrary(path, "", written["torch"], written["cuda"], tuple(written["archs"]), written["compiler"])


def describe_op_library(library: OpLibrary) -> str:
    """Say what the op library was built for, or why it is missing."""
    if library.path is None:
        return library.reason
    oldest = ".".join(map(str, _OLDEST_TORCH))
    archs = ", ".join(f"{arch} (PTX)" if arch.startswith("compute_") else arch for arch in library.archs)
    return (
        f"built for torch >= {oldest} (with headers of {library.torch}), CUDA {library.cuda}, {archs or 'unknown'}, "
        f"by {library.compiler}"
    )


def explain_torch(version: str) -> str:
    """Say why the op library does not work with a version of torch; empty if it does."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= _OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, _OLDEST_TORCH))
    return f"no: it needs torch {oldest} or newer, found {version}, which lacks parts of the stable ABI; {_WITHOUT}"


def explain_device(name: str, capability: tuple[int, int], archs: tuple[str, ...]) -> str:
    """Say how the op library's kernels run on a device.

    Args:
        name: the device's name.
        capability: its compute capability.
        archs: targets of the library.

    Returns:
        The name, and how kernels run there: as compiled, from PTX, or not at all.
    """
    major, minor = capability
    title = f"{name} (compute capability {major}.{minor})"
    compiled = [_capability(arch) for arch in archs if re.fullmatch(r"sm_\d+", arch)]
    portable = [_capability(arch) for arch in archs if arch.startswith("compute_")]
    # Machine code runs on later minor versions of its major version, PTX on every later device.
    exact = re.compile(rf"sm_{major}{minor}[af]?")
    if any(exact.fullmatch(arch) for arch in archs) or any(m == major and n <= minor for m, n in compiled):
        return f"{title}: kernels run as compiled"
    if any(ptx <= capability for ptx in portable):
        return f"{title}: kernels are compiled from PTX when first used"
    return f"{title}: not supported, kernels were compiled for {', '.join(archs) or 'nothing'}"


def _capability(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]), int(digits[-1])


def _import_torch() -> tuple[ModuleType | None, str]:
    if importlib.util.find_spec("torch") is None:
        return None, 'torch: not installed: pip install "blockyard[torch]"'
    try:
        import torch  # noqa: PLC0415 - importing blockyard never loads torch
    except (ImportError, OSError) as error:
        return None, f"torch: installed, but cannot be imported ({type(error).__name__}: {error})"
    return torch, f"torch: {torch.__version__}, {_describe_torch_build(torch)}"


def _describe_torch_build(torch: ModuleType) -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def _try_loading(library: OpLibrary, torch: ModuleType | None) -> str:
    if library.path is None:
        return f"no, there is none; {_WITHOUT}"
    if torch is None:
        return "not tried, without torch"
    if unfit := explain_torch(torch.__version__):
        return unfit
    from blockyard.engine.ops.library import load_library  # noqa: PLC0415 - it imports torch

    loading = load_library(library.path, library.path.with_suffix(".json"))
    return f"yes, found {loading.found}" if loading.loaded else f"no: {loading.reason}; {_WITHOUT}"


def _describe_devices(library: OpLibrary, torch: ModuleType | None) -> str:
    if torch is None:
        return "not looked for, without torch"
    if not torch.version.cuda:
        return "none, torch is built without CUDA"
    if not torch.cuda.is_available():
        return "none that torch can use; caches live in CPU tensors"
    devices = range(torch.cuda.device_count())
    return "; ".join(
        explain_device(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n), library.archs)
        for n in devices
    )
