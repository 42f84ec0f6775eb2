"""Finds, loads and prepares the compiled op library, and explains failures.

The library implements the ops of `blockyard.engine.ops` for CUDA. Without it, CUDA tensors use plain torch calls, which
are slower but move the same bytes.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from blockyard.errors import OpLibraryError

LIBRARY = Path(__file__).resolve().parents[2] / "_ops.so"
MANIFEST = LIBRARY.with_suffix(".json")
_log = logging.getLogger("blockyard.engine")
_loading = threading.Lock()  # torch changes the process's flags for loading meanwhile, and sets them back


@dataclass(frozen=True)
class OpLibrary:
    """Status of the op library in this process.

    Attributes:
        loaded: whether CUDA tensors use it.
        path: where it is, or was searched for.
        built_for: what it was built for, such as `torch >= 2.11, CUDA 13.0, sm_80 sm_90 compute_80`; empty if unknown.
        found: the current torch and its CUDA release, and the driver if the library loads.
        reason: why it is not loaded; empty if it is.
    """

    loaded: bool
    path: Path
    built_for: str
    found: str
    reason: str

    def explain(self) -> str:
        """Describe the status in one line, with the reason for a failure."""
        if self.loaded:
            return f"op library loaded: built for {self.built_for or 'unknown'}, found {self.found}"
        return f"op library not loaded: {self.reason} (CUDA tensors go through plain torch calls)"


@cache
def op_library() -> OpLibrary:
    """Load the op library of this package, once per process.

    Returns:
        The status; failure to load is reported there, not raised.
    """
    return load_library(LIBRARY, MANIFEST)


def load_library(library: Path, manifest: Path) -> OpLibrary:
    """Load an op library.

    Args:
        library: the shared object.
        manifest: the JSON file that the build wrote next to it.

    Returns:
        What happened.
    """
    written = _read_manifest(manifest)
    built_for = _describe_build(written)
    found = f"torch {torch.__version__} with {_torch_cuda()}"

    def report(reason: str) -> OpLibrary:
        return OpLibrary(loaded=not reason, path=library, built_for=built_for, found=found, reason=reason)

    if not library.is_file():
        return report(f"built without it: {written.get('reason') or f'there is no {library.name}'}")
    try:
        with _loading:
            torch.ops.load_library(str(library))
    except OSError as error:
        wanted = f"built for {built_for}" if built_for else "built for unknown versions"
        # torch's own message only says that loading failed.
        return report(f"{wanted}, found {found}: {error.__cause__ or error}")
    driver, runtime = _versions(library)
    found += f", a driver for CUDA {_release(driver)}" if driver else ", no CUDA driver"
    return report(explain_driver(driver, runtime))


def explain_driver(driver: int, runtime: int) -> str:
    """Return why a driver does not support the CUDA runtime inside the op library; empty if it does.

    Args:
        driver: newest CUDA release supported by the driver, 1000 * major + 10 * minor; 0 without a driver, when there
            can be no CUDA tensors and the library is harmless.
        runtime: release of the runtime, in the same form.
    """
    # A driver supports all minor releases of its major release.
    if not driver or driver // 1000 >= runtime // 1000:
        return ""
    return (
        f"it needs a driver for CUDA {runtime // 1000}.0 or newer, found one for CUDA {_release(driver)}: install a "
        f"newer driver, or build with an nvcc of CUDA {driver // 1000}"
    )


def check_device(device: torch.device, library: OpLibrary) -> None:
    """Check that the loaded library has code for a CUDA device.

    Args:
        device: a CUDA device.
        library: result of `op_library`.

    Raises:
        OpLibraryError: the device is older than all that the library was built for.
    """
    archs = [int(name.removeprefix("sm_").rstrip("af")) for name in library.built_for.split() if name.startswith("sm_")]
    major, minor = torch.cuda.get_device_capability(device)
    if library.loaded and archs and 10 * major + minor < min(archs):
        raise OpLibraryError(
            f"op library built for {library.built_for}, found sm_{major}{minor} on {device}: "
            f"build with BLOCKYARD_CUDA_ARCHS={major}{minor}"
        )


def prepare_device(device: torch.device) -> None:
    """Allocate the staging memory for copies of a CUDA device, 48 MiB per direction, before others take its memory.

    If there is not enough memory, logs a warning, and other copy strategies are used.

    Args:
        device: a CUDA device, with its index.

    Raises:
        OpLibraryError: the device is older than all that the library was built for.
    """
    library = op_library()
    check_device(device, library)
    if library.loaded:
        torch.ops.blockyard.prepare(device.index)
    else:
        _warn_once(library)


def declare_region(address: int, num_bytes: int, chunk_bytes: int) -> None:
    """Declare where registrations or mappings end, so that copies need not ask the driver.

    A piece of a batched copy must not cross the end of its registration or mapping. The library asks the driver about
    undeclared memory.

    Args:
        address: address of the first byte; replaces an earlier declaration that starts there.
        num_bytes: size; 0 removes the declaration.
        chunk_bytes: bytes per registration or mapping; the last may be shorter. 0: device memory with unknown mappings
            that do not change until removed; the driver is asked once for each.
    """
    if op_library().loaded:
        torch.ops.blockyard.set_region(address, num_bytes, chunk_bytes)


@cache
def _warn_once(library: OpLibrary) -> None:
    _log.warning("copies on CUDA devices are slow: %s", library.explain(), extra={"reason": library.reason})


def _read_manifest(manifest: Path) -> dict[str, object]:
    try:
        written = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return written if isinstance(written, dict) else {}


def _versions(library: Path) -> tuple[int, int]:
    """Return the driver release and the runtime release inside a loaded library; 0 if unknown."""
    calls = ctypes.CDLL(str(library))
    names = ("blockyard_driver_version", "blockyard_runtime_version")
    driver, runtime = (int(call()) if (call := getattr(calls, name, None)) else 0 for name in names)
    return driver, runtime


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _describe_build(written: dict[str, object]) -> str:
    if not written.get("built"):
        return ""
    archs = written.get("archs")
    names = " ".join(map(str, archs)) if isinstance(archs, list) else ""
    return f"torch >= {written.get('torch_target')}, CUDA {written.get('cuda')}, {names}"


def _torch_cuda() -> str:
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
