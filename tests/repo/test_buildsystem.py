"""The build backend: settings, commands, stamps, checks of archives, and the words of a build that lacks something."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

import blockyard_build
from blockyard import _core
from blockyard_build import audit, oplibrary, toolchain
from blockyard_build.oplibrary import LIBRARY, MANIFEST, build_op_library
from blockyard_build.settings import BuildError, read_settings
from blockyard_build.stub import STUB, documented_stub, read_docs, write_stub
from blockyard_build.toolchain import NVCC_REQUIREMENT, MissingError, Toolchain

SCRIPT = Path(__file__).resolve().parents[2] / "buildsystem" / "check_prerequisites.sh"

# Stands for nvcc and g++: notes the call and writes the file named after -o.
FAKE_COMPILER = """#!/bin/sh
echo "$0 $*" >> "{log}"
[ ! -e "{log}.fail" ] || exit 3
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


class FakeBuild:
    """A source tree and a tool chain whose compilers only note that they were called."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.log = folder / "log"
        (self.root / "cuda").mkdir(parents=True)
        (self.root / LIBRARY).parent.mkdir(parents=True)
        for name in ("copy.cu", "copy.h", "ops.cpp"):
            (self.root / "cuda" / name).write_text(f"// {name}\n")
        compiler = folder / "cuda_home" / "bin" / "nvcc"
        compiler.parent.mkdir(parents=True)
        compiler.write_text(FAKE_COMPILER.format(log=self.log))
        compiler.chmod(0o755)
        gxx = Path(shutil.copy(compiler, folder / "g++"))
        home = compiler.parent.parent
        self.tools = Toolchain(home, home / "lib", "13.0", str(gxx), "12.2.0", folder / "torch", "2.11.0+cu130")

    def run(self, **environ: str) -> oplibrary.Manifest:
        return build_op_library(self.root, environ)

    def compilers_called(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def written(self) -> dict[str, object]:
        loaded: dict[str, object] = json.loads((self.root / MANIFEST).read_text())
        return loaded


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild(tmp_path)
    monkeypatch.setattr(oplibrary, "find_toolchain", lambda environ: fake.tools)
    return fake


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(environ: object = None) -> Toolchain:
        raise MissingError("no torch headers at build time")

    monkeypatch.setattr(oplibrary, "find_toolchain", find_nothing)
    monkeypatch.setattr(blockyard_build, "find_torch", find_nothing)


# ---- settings ----


def test_defaults_are_auto_and_four_architectures():
    settings = read_settings({})
    assert settings.mode == "auto"
    assert settings.archs == ("80", "90", "100", "120")


def test_empty_variables_mean_the_defaults():
    assert read_settings({"BLOCKYARD_CUDA": "", "BLOCKYARD_CUDA_ARCHS": ""}) == read_settings({})


def test_architectures_are_sorted_by_number_and_repeats_dropped():
    assert read_settings({"BLOCKYARD_CUDA_ARCHS": "120, 90a,90,80,90"}).archs == ("80", "90", "90a", "120")


def test_only_the_lowest_architecture_has_ptx():
    flags = read_settings({"BLOCKYARD_CUDA_ARCHS": "100,90"}).gencode()
    assert flags == ["-gencode=arch=compute_90,code=[sm_90,compute_90]", "-gencode=arch=compute_100,code=sm_100"]


@pytest.mark.parametrize("archs", ["8.0", "sm_90", "90;100", ","])
def test_an_architecture_that_is_none_is_shown(archs: str):
    with pytest.raises(BuildError, match="BLOCKYARD_CUDA_ARCHS="):
        read_settings({"BLOCKYARD_CUDA_ARCHS": archs})


def test_an_unknown_mode_is_shown():
    with pytest.raises(BuildError, match="BLOCKYARD_CUDA='yes' is not one of auto, require, off"):
        read_settings({"BLOCKYARD_CUDA": "yes"})


# ---- commands ----


def commands(build: FakeBuild) -> list[list[str]]:
    return oplibrary.compile_commands(build.root, read_settings({}), build.tools, Path("scratch"))


def test_kernels_do_not_see_torch(build: FakeBuild):
    kernels = next(command for command in commands(build) if command[0].endswith("nvcc"))
    assert not [argument for argument in kernels if str(build.tools.torch_home) in argument or "TORCH" in argument]


def test_ops_target_the_stable_abi_of_torch_2_11(build: FakeBuild):
    ops = next(command for command in commands(build) if "cuda/ops.cpp" in command)
    assert "-DTORCH_TARGET_VERSION=0x020b000000000000" in ops


def test_gxx_links_with_a_shared_libstdcxx_and_a_static_cudart(build: FakeBuild):
    link = commands(build)[-1]
    assert link[0] == build.tools.gxx
    assert "-lcudart_static" in link
    assert not [argument for command in commands(build) for argument in command if "static-libstdc++" in argument]


def test_paths_of_the_tree_stay_out_of_the_commands(build: FakeBuild):
    assert not [argument for command in commands(build) for argument in command if str(build.root) in argument]


# ---- building ----


def test_a_built_library_says_what_it_was_built_for(build: FakeBuild):
    build.run()
    assert (build.root / LIBRARY).read_text() == "compiled\n"
    written = build.written()
    assert written["built"] is True
    assert written["torch"] == "2.11.0+cu130"
    assert written["cuda"] == "13.0"
    assert written["archs"] == ["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"]


def test_nothing_is_compiled_twice(build: FakeBuild):
    build.run()
    assert build.compilers_called() == 3
    build.run()
    assert build.compilers_called() == 3


@pytest.mark.parametrize("source", ["copy.cu", "copy.h", "ops.cpp"])
def test_a_changed_source_is_compiled_again(build: FakeBuild, source: str):
    build.run()
    (build.root / "cuda" / source).write_text("// changed\n")
    build.run()
    assert build.compilers_called() == 6


def test_other_architectures_are_compiled_again(build: FakeBuild):
    build.run()
    assert build.run(BLOCKYARD_CUDA_ARCHS="90")["archs"] == ["sm_90", "compute_90"]
    assert build.compilers_called() == 6


def test_a_deleted_library_is_compiled_again(build: FakeBuild):
    build.run()
    (build.root / LIBRARY).unlink()
    build.run()
    assert (build.root / LIBRARY).is_file()


def test_a_compiler_that_fails_stops_the_build_and_keeps_the_old_library(build: FakeBuild):
    before = build.run()
    Path(f"{build.log}.fail").touch()
    with pytest.raises(BuildError, match=r"(?s)exit status 3.*BLOCKYARD_CUDA=off"):
        build.run(BLOCKYARD_CUDA_ARCHS="90")
    assert build.written() == before
    assert sorted(path.name for path in (build.root / LIBRARY).parent.iterdir()) == ["_ops.json", "_ops.so"]


def test_off_removes_an_earlier_library_and_says_so(build: FakeBuild):
    build.run()
    build.run(BLOCKYARD_CUDA="off")
    assert not (build.root / LIBRARY).exists()
    assert build.written()["reason"] == "switched off at build time with BLOCKYARD_CUDA=off"


def test_the_library_is_built_without_maturin_too(repo: Path, tmp_path: Path):
    (tmp_path / MANIFEST).parent.mkdir(parents=True)
    (tmp_path / "rust").symlink_to(repo / "rust")
    environ = {**os.environ, "PYTHONPATH": str(repo / "buildsystem"), "BLOCKYARD_CUDA": "off"}
    subprocess.run([sys.executable, "-m", "blockyard_build"], check=True, cwd=tmp_path, env=environ)
    assert not json.loads((tmp_path / MANIFEST).read_text())["built"]
    assert (tmp_path / STUB).read_text() == documented_stub(repo)


def test_auto_builds_without_the_library_where_torch_is_missing(
    build: FakeBuild, no_torch: None, capfd: pytest.CaptureFixture[str]
):
    assert build_op_library(build.root, {})["built"] is False
    assert build.written()["reason"] == "no torch headers at build time"
    assert "building without the op library: no torch headers" in capfd.readouterr().err


def test_require_fails_where_torch_is_missing(build: FakeBuild, no_torch: None):
    with pytest.raises(BuildError, match="BLOCKYARD_CUDA=require, but there is no torch headers"):
        build.run(BLOCKYARD_CUDA="require")


# ---- tool chain ----


def test_the_installed_tools_are_found():
    tools = toolchain.find_toolchain({})
    assert (tools.cuda_home / "bin" / "nvcc").is_file()
    assert tools.cuda_version == "13.0"
    assert tools.torch_version.startswith("2.11.0")


def test_cuda_home_comes_before_the_wheels(build: FakeBuild):
    assert toolchain.find_cuda_home({"CUDA_HOME": str(build.tools.cuda_home)}) == build.tools.cuda_home


def test_a_missing_compiler_is_named():
    with pytest.raises(MissingError, match=r"no C\+\+ compiler at build time \(no-such-compiler was not found\)"):
        toolchain.find_toolchain({"CXX": "no-such-compiler"})


def test_a_torch_before_the_stable_abi_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "torch"
    (package / "include" / "torch" / "csrc" / "stable").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '2.10.0+cpu'\n")
    spec = toolchain.importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(MissingError, match=r"torch 2\.10\.0\+cpu at build time lacks the stable ABI of torch 2\.11"):
        toolchain.find_torch()


# ---- requirements ----


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockyard_build, "find_cuda_home", lambda environ: None)
    monkeypatch.delenv("BLOCKYARD_CUDA", raising=False)


@pytest.mark.usefixtures("no_nvcc")
def test_nvcc_is_required_where_it_is_missing():
    assert NVCC_REQUIREMENT in blockyard_build.get_requires_for_build_wheel()
    assert NVCC_REQUIREMENT in blockyard_build.get_requires_for_build_editable()


def test_nvcc_is_not_required_where_it_is_there(build: FakeBuild, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_HOME", str(build.tools.cuda_home))
    assert NVCC_REQUIREMENT not in blockyard_build.get_requires_for_build_wheel()


@pytest.mark.usefixtures("no_nvcc")
def test_nvcc_is_not_required_when_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOCKYARD_CUDA", "off")
    assert NVCC_REQUIREMENT not in blockyard_build.get_requires_for_build_wheel()


@pytest.mark.usefixtures("no_nvcc", "no_torch")
def test_nvcc_without_torch_is_required_only_on_demand(monkeypatch: pytest.MonkeyPatch):
    assert NVCC_REQUIREMENT not in blockyard_build.get_requires_for_build_wheel()
    monkeypatch.setenv("BLOCKYARD_CUDA", "require")
    assert NVCC_REQUIREMENT in blockyard_build.get_requires_for_build_wheel()


# ---- the stub ----

CLASS = """\
/// A class.
///
/// Example:
///     1
#[pyclass(
    frozen,
    name = "Box",
)]
struct PyBox {
    /// Its size.
    #[pyo3(get)]
    size: u32,
}
/// A function.
#[pyfunction]
pub(crate) fn open_box() {}
/// Not exported.
pub(crate) fn unused() {}
"""
METHODS = """\
#[pymethods]
impl PyBox {
    /// Moves it.
    fn r#move(&self) {}
    /// Its \\ lid.
    #[getter(lid)]
    const fn lid_of(&self) {}
    fn bare(&self) {}
}

impl PyBox {
    /// Not exported.
    fn lid(&self) {}
}
"""
PLAIN = """\
def open_box(
    size: int,
) -> Box: ...

class Box:
    size: int
    @property
    def lid(self) -> str: ...
    @overload
    def move(self) -> None: ...
    @overload
    def move(self, by: int) -> None: ...
    def bare(self) -> None: ...
"""
DOCUMENTED = '''\
def open_box(
    size: int,
) -> Box:
    """A function."""

class Box:
    """A class.

    Example:
        1
    """

    size: int
    @property
    def lid(self) -> str:
        """Its \\\\ lid."""
    @overload
    def move(self) -> None:
        """Moves it."""
    @overload
    def move(self, by: int) -> None: ...
    def bare(self) -> None: ...
'''


def test_doc_comments_of_what_python_sees_are_read():
    found = {"Box": "A class.\n\nExample:\n    1", "Box.size": "Its size."}
    found |= {"open_box": "A function.", "Box.move": "Moves it.", "Box.lid": "Its \\ lid."}
    assert read_docs([CLASS, METHODS]) == found == read_docs([METHODS, CLASS])


def test_the_stub_gets_docstrings_where_it_has_none(tmp_path: Path):
    (tmp_path / "rust/binding/src").mkdir(parents=True)
    (tmp_path / "python/blockyard").mkdir(parents=True)
    (tmp_path / "rust/binding/_core.pyi").write_text(PLAIN)
    for number, text in enumerate((CLASS, METHODS)):
        (tmp_path / f"rust/binding/src/{number}.rs").write_text(text)
    write_stub(tmp_path)
    head, _, rest = (tmp_path / STUB).read_text().partition("\n")
    assert head.startswith("# Generated")
    assert rest == DOCUMENTED
    before = (tmp_path / STUB).stat().st_mtime_ns
    write_stub(tmp_path)
    assert (tmp_path / STUB).stat().st_mtime_ns == before


# ---- archives ----


def write_wheel(folder: Path, *names: str, tag: str = "linux_x86_64") -> Path:
    path = folder / f"blockyard-0.1.0-cp310-abi3-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("_core.pyi", *names):
            archive.writestr(f"blockyard/{name}", "")
    return path


def test_a_wheel_that_lost_the_library_is_refused(tmp_path: Path):
    wheel = write_wheel(tmp_path, "_ops.json")
    with pytest.raises(BuildError, match=r"_ops\.so is packed: False, was built: True"):
        audit.check_wheel(wheel, tmp_path, with_library=True)


def test_a_wheel_without_stub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "STUB", Path("python/blockyard/_other.pyi"))
    with pytest.raises(BuildError, match=r"lacks blockyard/_other\.pyi: see include"):
        audit.check_wheel(write_wheel(tmp_path, "_ops.json"), tmp_path, with_library=False)


def test_a_wheel_with_a_stale_library_is_refused(tmp_path: Path):
    wheel = write_wheel(tmp_path, "_ops.json", "_ops.so")
    with pytest.raises(BuildError, match=r"_ops\.so is packed: True, was built: False"):
        audit.check_wheel(wheel, tmp_path, with_library=False)


def test_a_wheel_without_library_passes_when_none_was_built(tmp_path: Path):
    audit.check_wheel(write_wheel(tmp_path, "_ops.json"), tmp_path, with_library=False)


def test_a_tag_that_promises_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "newest_glibc", lambda library: (2, 34))
    fitting = write_wheel(tmp_path, "_ops.json", "_ops.so", tag="manylinux_2_34_x86_64")
    audit.check_wheel(fitting, tmp_path, with_library=True)
    promising = write_wheel(tmp_path, "_ops.json", "_ops.so", tag="manylinux_2_28_x86_64")
    with pytest.raises(BuildError, match=r"needs glibc 2\.34, newer than the tag says"):
        audit.check_wheel(promising, tmp_path, with_library=True)


def test_the_newest_glibc_of_a_library_is_read(repo: Path):
    assert (2, 2) <= audit.newest_glibc(repo / "python" / "blockyard" / "_core.abi3.so") < (3, 0)


def test_a_source_archive_that_lacks_a_source_is_refused(tmp_path: Path):
    path = tmp_path / "blockyard-0.1.0.tar.gz"
    (tmp_path / "copy.cu").touch()
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tmp_path / "copy.cu", "blockyard-0.1.0/cuda/copy.cu")
    audit.check_sdist(path, [Path("cuda/copy.cu")])
    with pytest.raises(BuildError, match=r"lacks cuda/ops\.cpp: see include"):
        audit.check_sdist(path, [Path("cuda/copy.cu"), Path("cuda/ops.cpp")])


# ---- profiles ----


@pytest.mark.parametrize(("profile", "runs"), [("debug", False), ("release", True)])
def test_benchmarks_run_over_a_release_build_only(monkeypatch: pytest.MonkeyPatch, profile: str, runs: bool):
    monkeypatch.setattr(_core, "build_profile", profile)
    monkeypatch.delitem(sys.modules, "figures", raising=False)
    with nullcontext() if runs else pytest.raises(SystemExit, match="run `make release` first"):
        importlib.import_module("figures")


# ---- prerequisites ----


def check_prerequisites(path: str, python: str = "python3") -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(SCRIPT), python]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PATH": path})


def path_without(folder: Path, *missing: str) -> str:
    for tool in ("git", "g++", "python3", "cargo", "rustc", "cut", "sort", "head"):
        found = sys.executable if tool == "python3" else shutil.which(tool)
        if tool not in missing and found:
            (folder / tool).symlink_to(found)
    return str(folder)


def test_a_complete_machine_passes():
    finished = subprocess.run(["/bin/sh", str(SCRIPT), "python3"], check=False, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("tool", "advice"),
    [
        ("g++", "apt install g++"),
        ("git", "apt install git"),
        ("python3", "apt install python3"),
        ("cargo", "rustup.rs"),
    ],
)
def test_a_missing_tool_is_one_line_that_says_what_to_install(tmp_path: Path, tool: str, advice: str):
    finished = check_prerequisites(path_without(tmp_path, tool))
    assert finished.returncode == 1
    assert len(finished.stderr.splitlines()) == 1
    assert advice in finished.stderr


def test_an_old_rust_is_refused(tmp_path: Path):
    path = path_without(tmp_path, "rustc")
    (tmp_path / "rustc").write_text("#!/bin/sh\necho 'rustc 1.84.1 (e71f9a9a9 2025-01-27)'\n")
    (tmp_path / "rustc").chmod(0o755)
    finished = check_prerequisites(path)
    assert finished.returncode == 1
    assert finished.stderr.startswith("blockyard: rustc is 1.84.1: Blockyard needs Rust 1.85 or newer")


def test_an_old_python_is_refused(tmp_path: Path):
    path = path_without(tmp_path)
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2" && exit\nexit 1\n')
    old.chmod(0o755)
    finished = check_prerequisites(path, python=str(old))
    assert finished.returncode == 1
    assert "Python 3.9.2: Blockyard is built with Python 3.10" in finished.stderr


def test_make_reports_what_is_missing(repo: Path, tmp_path: Path):
    # In a copy without .venv, so that the set-up has to start anew.
    for name in ("Makefile", "requirements-dev.txt", "Cargo.lock"):
        shutil.copy(repo / name, tmp_path)
    shutil.copytree(repo / "buildsystem", tmp_path / "buildsystem")
    command = ["make", "PYTHON=no-such-python", "setup"]
    environ = {**os.environ, "MAKEFLAGS": ""}
    finished = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert finished.returncode != 0
    assert "blockyard: no-such-python is missing: install Python 3.10 or newer" in finished.stderr
