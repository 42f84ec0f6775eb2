"""The build backend (PEP 517 and 660): compiles the op library with nvcc and g++, then hands over to maturin.

Settings, as environment variables:
    BLOCKYARD_CUDA: `auto` (default: with the op library where it can be built), `require`, `off`.
    BLOCKYARD_CUDA_ARCHS: `80,90,100,120` by default; machine code for each, PTX for the lowest.
    CUDA_HOME: a toolkit to take nvcc from, instead of the wheels on PyPI.
"""

import os
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import maturin

from blockyard_build.oplibrary import LIBRARY, MANIFEST, SOURCES, build_op_library
from blockyard_build.settings import BuildError, read_settings
from blockyard_build.toolchain import NVCC_REQUIREMENT, MissingError, find_cuda_home, find_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = Mapping[str, object] | None

get_requires_for_build_sdist = maturin.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """Name what a build needs beside maturin: the nvcc wheels, unless they could not be used or CUDA_HOME has nvcc."""
    requirements: list[str] = maturin.get_requires_for_build_wheel(config_settings)
    if _wants_nvcc():
        requirements.append(NVCC_REQUIREMENT)
    return requirements


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Build the op library and the wheel; the wheel is checked to hold what was built."""
    manifest = build_op_library(Path(), os.environ)
    name: str = maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    _check_wheel(Path(wheel_directory) / name, with_library=manifest["built"])
    return name


def build_editable(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Build the op library and `_core` in place, and the wheel that points at them."""
    build_op_library(Path(), os.environ)
    name: str = maturin.build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def build_sdist(sdist_directory: str, config_settings: ConfigSettings = None) -> str:
    """Build the source archive; it is checked to hold the op library's sources and this backend."""
    name: str = maturin.build_sdist(sdist_directory, config_settings)
    with tarfile.open(Path(sdist_directory) / name) as archive:
        inside = {member.partition("/")[2] for member in archive.getnames()}
    needed = [*SOURCES.iterdir(), *Path(__file__).resolve().parent.relative_to(Path.cwd().resolve()).glob("*.py")]
    missing = sorted(str(path) for path in needed if str(path) not in inside)
    if missing:
        raise BuildError(f"{name} lacks {', '.join(missing)}: see include in [tool.maturin]")
    return name


def _wants_nvcc() -> bool:
    settings = read_settings(os.environ)
    if settings.mode == "off" or find_cuda_home(os.environ) is not None:
        return False
    if settings.mode == "require":
        return True
    try:
        find_torch()
    except MissingError:
        # An isolated build without torch's headers has no use for a compiler of 100 MB.
        return False
    return True


def _check_wheel(wheel: Path, *, with_library: bool) -> None:
    # maturin leaves out a file that it does not find, and says nothing.
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    library, manifest = (str(path.relative_to("python")) for path in (LIBRARY, MANIFEST))
    if manifest not in inside or (library in inside) != with_library:
        raise BuildError(f"{wheel.name} holds {library}: {library in inside}, expected {with_library}")
