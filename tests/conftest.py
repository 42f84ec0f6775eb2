"""Fixtures and settings for all tests: traces, random-case budgets, and tests that need a CUDA device."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu"

# Machines differ too much for hypothesis to judge single examples by time.
settings.register_profile("quick", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=2000, stateful_step_count=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def built_files() -> dict[str, int]:
    """When each file was written that a build leaves among the sources."""
    package = ROOT / "python" / "blockyard"
    return {path.name: path.stat().st_mtime_ns for path in package.glob("_*") if path.suffix in {".so", ".json"}}


@pytest.fixture(scope="session", autouse=True)
def the_build_stays() -> Iterator[None]:
    """Fails the run if a test builds in the source tree: the next run would test something else."""
    before = built_files()
    yield
    assert built_files() == before


@pytest.fixture(scope="session")
def repo() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of request traces: BLOCKYARD_TRACES, or `shared/traces` beside the source tree."""
    folder = Path(os.environ.get("BLOCKYARD_TRACES") or ROOT.parent / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip(f"no traces in {folder}; BLOCKYARD_TRACES names another folder")
    return folder


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The stand-in for a device, with the op library's dispatch on top."""
    import stand_in

    from blockyard_build.toolchain import MissingError

    try:
        return stand_in.build_stand_in(tmp_path_factory.mktemp("fake"))
    except MissingError as missing:
        pytest.skip(f"no {missing}")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The copy kernels for a CPU."""
    import host_kernels

    return host_kernels.load_kernels(tmp_path_factory.mktemp("kernels"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("BLOCKYARD_TEST_GPU") == "require":
        pytest.fail("no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")
