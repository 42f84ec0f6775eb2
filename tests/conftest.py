"""Fixtures and settings for all tests: traces, random-case budgets, and tests that need a CUDA device."""

import ctypes
import fcntl
import gc
import logging
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu"
SharedFolder = Callable[[str], AbstractContextManager[Path]]

# Machines differ too much for hypothesis to judge single examples by time.
# The quick tests draw the same cases each time: new ones are drawn by the thorough.
settings.register_profile(
    "quick", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough", settings.get_profile("quick"), derandomize=False, max_examples=2000, stateful_step_count=200
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A worker of a parallel run has one processor: torch's threads would wait for each other, here and in child processes.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run in the background of a script (`nohup make test &`) ignores Ctrl-C, as all would that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Deletes what tests leave among temporary files: examples in the docs do, and processes that are killed."""
    tmp_path_factory.getbasetemp()  # pytest's own stays, for tests that fail
    with (
        tempfile.TemporaryDirectory(prefix="blockyard-tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def logging_stays_usable() -> Iterator[None]:
    """Fails a test that leaves a log handler's lock taken, as an interrupt may: all threads that log would wait.

    An adapter of an engine that another test has loaded passes no lines on.
    """
    ours = logging.getLogger("blockyard")
    ours.handlers.clear()
    ours.propagate = True
    yield
    for handler in logging.root.handlers:
        assert handler.lock is None or not handler.lock._is_owned()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def torch_draws_the_same() -> None:
    """Starts torch's random numbers again: a test's must not depend on which tests ran before, nor on chance."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Has torch compute in one thread: tiny models wait for the others longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> SharedFolder:
    """Gives a folder by its name that all workers of a run share, to one at a time."""
    base = tmp_path_factory.getbasetemp()

    @contextmanager
    def lent(name: str) -> Iterator[Path]:
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder

    return lent


@pytest.fixture(scope="session")
def fake(shared_folder: SharedFolder) -> ctypes.CDLL:
    """The stand-in for a device, with the op library's dispatch on top."""
    import stand_in

    from blockyard_build.toolchain import MissingError

    try:
        with shared_folder("fake") as folder:
            return stand_in.build_stand_in(folder)
    except MissingError as missing:
        pytest.skip(f"no {missing}")


@pytest.fixture(scope="session")
def kernels(shared_folder: SharedFolder) -> ctypes.CDLL:
    """The copy kernels for a CPU."""
    import host_kernels

    with shared_folder("kernels") as folder:
        return host_kernels.load_kernels(folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Keep imported modules and collected tests out of garbage collections: they stay for the whole run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    yield
    if os.environ.get("BLOCKYARD_TEST_GPU") != "require" and any(map(needs_device, items)):
        import torch

        if not torch.cuda.is_available():
            for item in filter(needs_device, items):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    fold_skipped(config, items)


def needs_device(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def fold_skipped(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one of the tests that are skipped for the same reason, to say how many are: a line, and not hundreds."""
    folded: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if reason := skip_reason(item):
            folded[reason].append(item)
    for reason, (first, *others) in folded.items():
        if others:
            mark = pytest.mark.skipif(True, reason=f"{reason}: {1 + len(others)} tests")
            first.add_marker(mark, append=False)
            config.hook.pytest_deselected(items=others)
    left_out = {item for _, *others in folded.values() for item in others}
    items[:] = [item for item in items if item not in left_out]


def skip_reason(item: pytest.Item) -> str:
    """Say why an item's marks skip it; empty if they do not."""
    for mark in [*item.iter_markers("skipif"), *item.iter_markers("skip")]:
        if mark.name == "skip" or mark.args[0]:
            return str(mark.kwargs.get("reason") or mark.args[-1])
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if needs_device(item) and os.environ.get("BLOCKYARD_TEST_GPU") == "require":
        import torch

        if not torch.cuda.is_available():
            pytest.fail("no CUDA device", pytrace=False)


# Workers collect, but do not tell how many tests they leave out; the closing line is to say it.


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items and "PYTEST_XDIST_WORKER" in os.environ:
        output: dict[str, Any] = vars(items[0].config)["workeroutput"]
        output["deselected"] = output.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if node.gateway.id == "gw0" and hasattr(node, "workeroutput"):  # it has none if it crashed
        node.config.hook.pytest_deselected(items=[SimpleNamespace()] * node.workeroutput.get("deselected", 0))
