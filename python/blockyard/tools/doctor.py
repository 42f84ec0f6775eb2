"""`blockyard doctor`: describes this installation, its problems and how to solve them.

It changes nothing. Broken parts are reported; they raise nothing.
"""

import importlib.util
import json
import os
import platform
import re
import resource
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

import numpy as np

import blockyard
from blockyard.progress import Progress

_PACKAGE = Path(__file__).parent.parent
# The torch release whose stable ABI the op library uses.
_MIN_TORCH = (2, 11)
_WITHOUT = "blocks are copied by plain torch calls instead"
_OPTIONAL: Final = ("transformers", "rich", "prometheus-client", "obstore", "msgspec", "pyzmq", "cuda-bindings")
"""Packages of the extras, except torch."""
_CPU_FEATURES: Final = {"x86_64": ("sha_ni", "avx2", "avx512f"), "aarch64": ("sha2", "asimd")}
"""CPU features that speed up hashes of prompts and checksums of blocks."""
_NVIDIA: Final = Path("/dev/nvidiactl")
"""A file that exists while an NVIDIA driver is loaded."""

_BUILD_FOR_IT: Final = "build with BLOCKYARD_CUDA_ARCHS=<major><minor> of its compute capability"

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One part of the installation.

    Attributes:
        name: the part, in snake_case.
        status: `ok`; `warn` if it is missing or slower than it could be; `fail` if it is broken.
        found: description of what was found.
        advice: what to do; empty if nothing needs to be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class OpLibraryFile:
    """What is known about the op library without loading it.

    Attributes:
        path: the library's file; None if it is missing.
        reason: why it is missing; empty if it is there.
        torch: version of the torch headers that it was compiled with.
        cuda: CUDA release that it was compiled with.
        archs: targets of its kernels, such as "sm_90" (machine code) or "compute_80" (PTX).
        compiler: the C++ compiler and its version.
    """

    path: Path | None
    reason: str = ""
    torch: str = "unknown"
    cuda: str = "unknown"
    archs: tuple[str, ...] = ()
    compiler: str = "unknown"


def run_doctor(view: Progress, package: Path = _PACKAGE) -> list[Check]:
    """Check every part of the installation.

    Args:
        view: progress, updated before each slow check.
        package: folder of the installed package.
    """
    library = find_op_library(package)
    python = f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})"
    checks = [
        Check("blockyard", "ok", f"{blockyard.__version__}, in {package}"),
        Check("python", "ok", python),
        Check("numpy", "ok", np.__version__),
        Check("optional_packages", "ok", _optional_packages()),
        Check("cpu", "ok", _describe_cpu()),
    ]
    view.step(1, 3, "importing torch")
    torch, of_torch = _import_torch()
    view.step(2, 3, "loading the op library")
    checks += [of_torch, check_op_library(library), _try_loading(library, torch)]
    view.step(3, 3, "looking for CUDA devices")
    devices = _check_devices(library, torch)
    has_device = torch is not None and torch.cuda.is_available()
    return [*checks, *devices, check_memory_lock(has_device=has_device), check_direct_io(Path(tempfile.gettempdir()))]


def find_op_library(package: Path = _PACKAGE) -> OpLibraryFile:
    """Find the op library and the build's record of it.

    Args:
        package: folder of the installed package.

    Returns:
        What is known; `path` is None with a `reason` if there is no library.
    """
    path = package / "_ops.so"
    try:
        written = json.loads((package / "_ops.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if path.is_file():
            return OpLibraryFile(path)
        return OpLibraryFile(None, f"_ops.so and the build's record are missing ({type(error).__name__}: {error})")
    if not written.get("built"):
        return OpLibraryFile(None, f"built without the op library: {written.get('reason', 'unknown')}")
    if not path.is_file():
        return OpLibraryFile(None, f"it was built for CUDA {written['cuda']}, but {path} is gone")
    return OpLibraryFile(path, "", written["torch"], written["cuda"], tuple(written["archs"]), written["compiler"])


def check_op_library(library: OpLibraryFile) -> Check:
    """Return what the op library was built for, or why it is missing."""
    if library.path is None:
        gone = library.reason.endswith("is gone")
        return Check(
            "op_library",
            "fail" if gone else "warn",
            library.reason,
            "install Blockyard again" if gone else "install a wheel, or build with torch and BLOCKYARD_CUDA=require",
        )
    oldest = ".".join(map(str, _MIN_TORCH))
    archs = ", ".join(f"{arch} (PTX)" if arch.startswith("compute_") else arch for arch in library.archs)
    return Check(
        "op_library",
        "ok",
        f"built for torch >= {oldest} (with headers of {library.torch}), CUDA {library.cuda}, {archs or 'unknown'}, "
        f"by {library.compiler}",
    )


def check_memory_lock(*, has_device: bool) -> Check:
    """Return how much memory this process can lock; host memory of a CUDA device is page-locked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("memory_lock_limit", "ok", "unlimited")
    found = f"{limit} bytes"
    if not has_device:
        return Check("memory_lock_limit", "ok", f"{found}; it matters only with a CUDA device")
    advice = "ulimit -l unlimited; in systemd LimitMEMLOCK=infinity; in Docker --ulimit memlock=-1"
    return Check("memory_lock_limit", "warn", f"{found}: a larger host pool may fail to be page-locked", advice)


def check_direct_io(folder: Path) -> Check:
    """Check whether files in a folder can bypass the page cache."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        found = f"{folder} does not support it ({error.strerror}): a file store there goes through the page cache"
        return Check("direct_io", "warn", found, "put stores on a local ext4 or xfs disk; for the demo, set TMPDIR")
    return Check("direct_io", "ok", f"works in {folder}")


def worst(checks: list[Check]) -> Status:
    """Return the worst status, which is the installation's status."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((check.status for check in checks), key=order.index)


def explain_torch(version: str) -> str:
    """Return why the op library does not work with a version of torch; empty if it does."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= _MIN_TORCH:
        return ""
    oldest = ".".join(map(str, _MIN_TORCH))
    return f"no: it needs torch {oldest} or newer, found {version}, which lacks part of the stable ABI; {_WITHOUT}"


def explain_device(name: str, capability: tuple[int, int], archs: tuple[str, ...]) -> tuple[str, bool]:
    """Return how the op library's kernels run on a device.

    Args:
        name: the device's name.
        capability: its compute capability.
        archs: targets of the library.

    Returns:
        The device's name with how kernels run on it (as compiled, from PTX, or not at all), and whether they run.
    """
    major, minor = capability
    title = f"{name} (compute capability {major}.{minor})"
    compiled = [_capability(arch) for arch in archs if re.fullmatch(r"sm_\d+", arch)]
    portable = [_capability(arch) for arch in archs if arch.startswith("compute_")]
    # Machine code runs on later minor versions of its major version, PTX on every later device.
    exact = re.compile(rf"sm_{major}{minor}[af]?")
    if any(exact.fullmatch(arch) for arch in archs) or any(m == major and n <= minor for m, n in compiled):
        return f"{title}: kernels run as compiled", True
    if any(ptx <= capability for ptx in portable):
        return f"{title}: kernels are compiled from PTX when first used", True
    return f"{title}: not supported, kernels were compiled for {', '.join(archs) or 'nothing'}", False


def _capability(arch: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]), int(digits[-1])


def _optional_packages() -> str:
    found = []
    for name in _OPTIONAL:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # noqa: PERF203 (seven packages)
            found.append(f"no {name}")
    return ", ".join(found)


def _describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    wanted = _CPU_FEATURES.get(platform.machine(), ())
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        text = ""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = listed[1].split() if listed else []
    features = ", ".join(name if name in flags else f"no {name}" for name in wanted)
    usable = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {usable} of {os.cpu_count()} cores usable, {features or 'features unknown'}"


def _import_torch() -> tuple[ModuleType | None, Check]:
    if importlib.util.find_spec("torch") is None:
        return None, Check("torch", "warn", "not installed", "pip install 'blockyard[torch]'")
    try:
        import torch  # noqa: PLC0415 - importing blockyard never loads torch
    except (ImportError, OSError) as error:
        found = f"installed, but cannot be imported ({type(error).__name__}: {error})"
        return None, Check("torch", "fail", found, "install torch again, for this Python and platform")
    return torch, Check("torch", "ok", f"{torch.__version__}, {_describe_torch_build(torch)}")


def _describe_torch_build(torch: ModuleType) -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def _try_loading(library: OpLibraryFile, torch: ModuleType | None) -> Check:
    name = "op_library_loads"
    if library.path is None:
        return Check(name, "ok", f"no, there is none; {_WITHOUT}")
    if torch is None:
        return Check(name, "ok", "not tried, without torch")
    if unfit := explain_torch(torch.__version__):
        return Check(name, "fail", unfit, "pip install --upgrade torch")
    from blockyard.engine.ops.library import load_library  # noqa: PLC0415 - it imports torch

    loading = load_library(library.path, library.path.with_suffix(".json"))
    if loading.loaded:
        return Check(name, "ok", f"yes, found {loading.found}")
    advice = "install torch, a driver and an op library for the same CUDA release"
    return Check(name, "fail", f"no: {loading.reason}; {_WITHOUT}", advice)


def _check_devices(library: OpLibraryFile, torch: ModuleType | None) -> list[Check]:
    name = "cuda_device"
    if torch is None:
        return [Check(name, "ok", "not looked for, without torch")]
    if not torch.version.cuda:
        advice = "install a torch that is built for CUDA" if _NVIDIA.exists() else ""
        return [Check(name, "warn" if advice else "ok", "none: torch is built without CUDA", advice)]
    if not torch.cuda.is_available():
        found = "none that torch can use; caches live in CPU tensors"
        if _NVIDIA.exists():
            advice = "nvidia-smi shows the driver's CUDA release; torch needs the same or an older one"
            return [Check(name, "fail", found, advice)]
        return [Check(name, "ok", found)]
    from blockyard.engine.ops.strategy import read_table, table_path  # noqa: PLC0415 - it imports torch

    checks = []
    for index in range(torch.cuda.device_count()):
        title = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        found, runs = f"{title}: {_WITHOUT}", True
        if library.path is not None:
            found, runs = explain_device(title, capability, library.archs)
        checks.append(Check(name, "ok" if runs else "fail", f"cuda:{index} {found}", "" if runs else _BUILD_FOR_IT))
        table = read_table(table_path(title))
        if table is None or table.torch_cuda != torch.version.cuda:
            found = f"cuda:{index} has no measured copy strategies: copies may be slower than necessary"
            checks.append(Check("copy_strategies", "warn", found, "blockyard calibrate"))
        else:
            checks.append(Check("copy_strategies", "ok", f"cuda:{index}: {table_path(title)}"))
    return checks
