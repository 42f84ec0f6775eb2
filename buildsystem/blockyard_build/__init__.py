"""The build backend (PEP 517 and 660): writes the stub, compiles the op library, then hands over to maturin.

Settings, as environment variables:
    BLOCKYARD_CUDA: `auto` (default: build the op library if possible), `require`, `off`.
    BLOCKYARD_CUDA_ARCHS: `80,90,100,120` by default; machine code for each, PTX for the lowest.
    CUDA_HOME: a toolkit to take nvcc from, instead of the wheels on PyPI.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import maturin

from blockyard_build.audit import check_sdist, check_wheel
from blockyard_build.oplibrary import SOURCES, build_op_library
from blockyard_build.settings import read_settings
from blockyard_build.stub import SOURCE as STUB_SOURCE
from blockyard_build.stub import write_stub
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
    """Return the requirements of a build: maturin's, and the nvcc wheels if they are needed and usable."""
    requirements: list[str] = maturin.get_requires_for_build_wheel(config_settings)
    if _wants_nvcc():
        requirements.append(NVCC_REQUIREMENT)
    return requirements


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Write the stub, build the op library and the wheel, and check the wheel's contents."""
    write_stub(Path())
    manifest = build_op_library(Path(), os.environ)
    name: str = maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    check_wheel(Path(wheel_directory) / name, Path(), with_library=manifest["built"])
    return name


def build_editable(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Write the stub, build the op library and `_core`, all in place, and the wheel that points to them."""
    write_stub(Path())
    with ThreadPoolExecutor(1) as pool:
        library = pool.submit(build_op_library, Path(), os.environ)
        name: str = maturin.build_editable(wheel_directory, config_settings, metadata_directory)
        library.result()
    return name


def build_sdist(sdist_directory: str, config_settings: ConfigSettings = None) -> str:
    """Build the source archive, and check that it contains the sources of op library and stub, and this backend."""
    name: str = maturin.build_sdist(sdist_directory, config_settings)
    backend = Path(__file__).resolve().parent.relative_to(Path.cwd().resolve())
    check_sdist(Path(sdist_directory) / name, [*SOURCES.iterdir(), *backend.glob("*.py"), STUB_SOURCE])
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
        # An isolated build without torch's headers does not need the compiler, which has 100 MB.
        return False
    return True
