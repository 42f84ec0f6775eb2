"""The op library's loader: it loads what was built, and explains everything else."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from many_threads import hammer

from blockyard.engine.ops import library as native
from blockyard.errors import OpLibraryError

VERBS = ("swap", "copy", "move", "exchange", "gather", "scatter")
OPS = [f"blockyard::{verb}_blocks" for verb in VERBS]
BUILT = {"built": True, "reason": "", "torch_target": "2.11", "cuda": "13.0", "archs": ["sm_80", "sm_90", "compute_80"]}

# A process whose package has no op library.
WITHOUT_LIBRARY = """
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
name, root = "blockyard.engine.ops.library", Path(find_spec("blockyard").origin).parent
spec = spec_from_file_location(name, root / "engine" / "ops" / "library.py")
library = sys.modules[name] = module_from_spec(spec)
spec.loader.exec_module(library)
library.LIBRARY = library.MANIFEST = Path({path!r})
from blockyard.engine import ops
import torch
assert not library.op_library().loaded
for name in {names!r}:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
src, dst = [torch.arange(12, dtype=torch.uint8).view(4, 3)], [torch.zeros(4, 3, dtype=torch.uint8)]
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
torch.ops.blockyard.swap_blocks.default.redispatch(keys, src, dst, torch.tensor([[3, 0]]))
print(dst[0][0].tolist(), library.op_library().explain())
"""


@pytest.fixture
def loaded() -> native.OpLibrary:
    library = native.op_library()
    if not library.loaded:
        pytest.skip(library.explain())
    return library


def write(folder: Path, manifest: object, content: bytes | None = None) -> tuple[Path, Path]:
    library, record = folder / "_ops.so", folder / "_ops.json"
    record.write_text(json.dumps(manifest))
    if content is not None:
        library.write_bytes(content)
    return library, record


def test_the_built_library_loads_and_has_the_cuda_kernels(loaded: native.OpLibrary):
    import blockyard.engine.ops  # noqa: F401

    for name in OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    for name in (
        "run_swap",
        "run_steps",
        "run_gather",
        "run_scatter",
        "prepare",
        "set_region",
        "set_batch_pieces",
    ):
        # What Python registers is named by a file of Python's, the library's by its source file.
        assert (
            "ops.cpp"
            in re.search(r"\bCompositeExplicitAutograd\S*: .*", torch._C._dispatch_dump(f"blockyard::{name}")).group()
        )


def test_a_loaded_library_says_what_it_was_built_for(loaded: native.OpLibrary):
    assert loaded.reason == ""
    assert f"found torch {torch.__version__}" in loaded.explain()
    assert re.search(r"built for torch >= 2\.11, CUDA 13\.\d, sm_\d+", loaded.explain())
    assert native.op_library() is loaded


def test_the_library_needs_nothing_that_a_torch_without_cuda_lacks(loaded: native.OpLibrary):
    nm = ["nm", "--dynamic", "--format=posix"]
    needed = subprocess.run([*nm, str(loaded.path)], check=True, capture_output=True, text=True).stdout
    cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    given = subprocess.run([*nm, "--defined-only", str(cpu)], check=True, capture_output=True, text=True).stdout
    wanted = {line.split()[0] for line in needed.splitlines() if re.match(r"(aoti_)?torch_\w+ U", line)}
    assert wanted
    assert not wanted - {line.split()[0] for line in given.splitlines()}
    assert "aoti_torch_get_current_cuda_stream w" in needed


def test_the_library_needs_no_cuda_runtime(loaded: native.OpLibrary):
    dynamic = subprocess.run(["objdump", "-p", str(loaded.path)], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED\s+(\S+)", dynamic)
    assert "libtorch.so" in needed
    assert not [name for name in needed if "cuda" in name or "python" in name]


def test_a_library_that_was_not_built_gives_the_builds_reason(tmp_path: Path):
    library = native.load_library(*write(tmp_path, {"built": False, "reason": "no nvcc at build time"}))
    assert not library.loaded
    assert "built without it: no nvcc at build time" in library.explain()


def test_a_missing_record_is_explained(tmp_path: Path):
    library = native.load_library(tmp_path / "_ops.so", tmp_path / "_ops.json")
    assert "there is no _ops.so" in library.explain()


@pytest.mark.parametrize("record", [b"{", b"[]", b"\xff"])
def test_a_broken_record_is_not_an_error(tmp_path: Path, record: bytes):
    (tmp_path / "_ops.json").write_bytes(record)
    assert "there is no _ops.so" in native.load_library(tmp_path / "_ops.so", tmp_path / "_ops.json").reason


def test_threads_that_load_a_library_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch changes the flags with which the process loads every library, and sets them back."""
    inside = threading.Lock()

    def load(path: str) -> None:
        assert inside.acquire(blocking=False)
        time.sleep(0.01)
        inside.release()
        raise OSError(path)

    monkeypatch.setattr(torch.ops, "load_library", load)
    built = write(tmp_path, BUILT, b"")
    hammer(*[lambda: native.load_library(*built)] * 3, seconds=0.1)


def test_a_library_that_does_not_load_says_built_for_and_found(tmp_path: Path):
    library = native.load_library(*write(tmp_path, BUILT, b"not a library"))
    assert not library.loaded
    assert (
        f"built for torch >= 2.11, CUDA 13.0, sm_80 sm_90 compute_80, found torch {torch.__version__}" in library.reason
    )
    assert "CUDA tensors go through plain torch calls" in library.explain()


def test_symbols_that_torch_lacks_are_named(tmp_path: Path):
    source = tmp_path / "old.c"
    source.write_text("extern int torch_of_a_later_version(void);\nint (*f)(void) = torch_of_a_later_version;\n")
    library, record = write(tmp_path, BUILT)
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert "torch_of_a_later_version" in native.load_library(library, record).reason


def test_without_the_library_cuda_tensors_go_through_torch_calls():
    code = WITHOUT_LIBRARY.format(names=OPS, path="/nonexistent/_ops.so")
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert finished.stdout.startswith("[9, 10, 11] op library not loaded: built without it")


def with_versions(folder: Path, driver: int, runtime: int) -> tuple[Path, Path]:
    """A library that says so of its runtime and the machine's driver."""
    library, record = write(folder, BUILT)
    versions = {"driver": driver, "runtime": runtime}
    source = "".join(f"int blockyard_{name}_version(void) {{ return {n}; }}\n" for name, n in versions.items())
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(command, check=True, input=source, text=True)
    return library, record


@pytest.mark.parametrize(
    ("driver", "runtime", "fits", "found"),
    [
        (12090, 13000, False, "a driver for CUDA 12.9"),
        (13000, 13000, True, "a driver for CUDA 13.0"),
        (13000, 13020, True, "a driver for CUDA 13.0"),  # all minor releases of a major one
        (14010, 13000, True, "a driver for CUDA 14.1"),
        (0, 13000, True, "no CUDA driver"),  # nothing can be on a device
    ],
)
def test_a_driver_older_than_the_runtime_is_explained(
    tmp_path: Path, driver: int, runtime: int, fits: bool, found: str
):
    library = native.load_library(*with_versions(tmp_path, driver, runtime))
    assert (library.loaded, library.found.endswith(found)) == (fits, True)
    if not fits:
        assert "it needs a driver for CUDA 13.0 or newer, found one for CUDA 12.9" in library.explain()
        assert "CUDA tensors go through plain torch calls" in library.explain()


def test_with_an_old_driver_cuda_tensors_go_through_torch_calls(tmp_path: Path):
    library, _ = with_versions(tmp_path, 12040, 13000)
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY.format(names=OPS, path=str(library))],
        check=True,
        capture_output=True,
        text=True,
    )
    assert finished.stdout.startswith("[9, 10, 11] op library not loaded: it needs a driver for CUDA 13.0 or newer")


def test_the_built_library_knows_its_runtime(loaded: native.OpLibrary):
    driver, runtime = native._versions(loaded.path)
    assert f"CUDA {native._release(runtime)}," in loaded.built_for
    assert bool(driver) or not torch.cuda.is_available()


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 1), True)])
def test_devices_older_than_the_library_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool
):
    library = native.OpLibrary(True, Path("_ops.so"), "torch >= 2.11, CUDA 13.0, sm_80 sm_90a compute_80", "torch", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if fits:
        native.check_device(torch.device("cuda:0"), library)
    else:
        with pytest.raises(OpLibraryError, match=r"sm_80 sm_90a compute_80, found sm_75 on cuda:0"):
            native.check_device(torch.device("cuda:0"), library)
