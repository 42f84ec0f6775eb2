"""The wheel is built by the backend, installs into a fresh environment, and works there."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from blockyard_build.stub import documented_stub

UV = Path(sys.executable).parent / "uv"
AUDIT = Path("buildsystem/audit_wheel.py")

# Run in the fresh environment: the wheel's own core, without torch.
CORE_CHECK = """
import sys
import blockyard
from blockyard import BlockManager
assert blockyard.__file__.startswith(sys.prefix), blockyard.__file__
manager = BlockManager(block_size=4, device_blocks=8)
sequences = manager.allocate(counts=[5, 3])
assert manager.pool("device").num_free == 5
slots = manager.append(sequences, 1)
assert len(slots) == 2
manager.free(sequences)
manager.check()
assert manager.pool("device").num_free == 8
assert "torch" not in sys.modules
"""

DOCTOR = "import sys; from blockyard.tools import cli; assert cli.__file__.startswith(sys.prefix); cli.main(['doctor'])"


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **environ}
    finished = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished


def install(python: Path, wheel: Path) -> None:
    """Install with what the set-up has left in uv's cache, else from the index."""
    command = [UV, "pip", "install", "--quiet", "--python", python, wheel, f"numpy=={version('numpy')}"]
    if subprocess.run([*command, "--offline"], check=False, capture_output=True).returncode:
        run(*command)


def copy_sources(repo: Path, tree: Path) -> None:
    """Copy what the backend reads and writes, with the op library if there is one. Cargo's part is linked: at another
    path Cargo would compile everything again.
    """
    for name in ("python", "cuda", "buildsystem"):
        shutil.copytree(repo / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".ops-*"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo / name, tree)
    for name in ("Cargo.toml", "Cargo.lock", "rust"):
        (tree / name).symlink_to(repo / name)


@pytest.fixture(scope="module", params=["editable", pytest.param("release", marks=pytest.mark.slow)])
def wheel(request: pytest.FixtureRequest, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a copy: the build writes the op library among the sources."""
    tree = tmp_path_factory.mktemp("tree")
    copy_sources(repo, tree)
    build = [UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
    run(*build, "--config-setting", f"build-args=--profile {request.param}", "--out-dir", tree / "dist", tree)
    return next((tree / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def manifest(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        loaded: dict[str, object] = json.loads(archive.read("blockyard/_ops.json"))
        return loaded


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, folder)
    install(folder / "bin" / "python", wheel)
    return folder / "bin" / "python"


def test_the_wheel_serves_every_python_from_3_10(wheel: Path):
    assert re.fullmatch(r"blockyard-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)


def test_the_wheel_holds_the_license_and_the_types(wheel: Path, repo: Path):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert "blockyard/py.typed" in names
    assert archive.read("blockyard/_core.pyi").decode() == documented_stub(repo)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_no_tests_and_no_caches(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_the_wheel_passes_the_audit_of_a_release(wheel: Path, repo: Path, manifest: dict[str, object]):
    if not manifest["built"]:
        pytest.skip(f"the wheel has no op library: {manifest['reason']}")
    assert "blockyard/_core.abi3.so" in run(sys.executable, repo / AUDIT, wheel).stdout


def test_a_wheel_that_promises_an_older_system_is_refused(
    wheel: Path, repo: Path, manifest: dict[str, object], tmp_path: Path
):
    if not manifest["built"]:
        pytest.skip(f"the wheel has no op library: {manifest['reason']}")
    promising = shutil.copy(wheel, tmp_path / wheel.name.replace("-linux_", "-manylinux_2_5_"))
    found = subprocess.run([sys.executable, repo / AUDIT, promising], check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert "promises older systems" in found.stderr


def test_the_core_works_in_a_fresh_environment(fresh_python: Path):
    run(fresh_python, "-c", CORE_CHECK)


def test_the_doctor_tells_that_torch_is_not_installed(fresh_python: Path):
    assert "torch: not installed" in run(fresh_python, "-m", "blockyard", "doctor").stdout


def test_the_op_library_loads_into_a_torch_from_elsewhere(fresh_python: Path, manifest: dict[str, object]):
    if not manifest["built"]:
        pytest.skip(f"the wheel has no op library: {manifest['reason']}")
    found = run(fresh_python, "-c", DOCTOR, PYTHONPATH=sysconfig.get_path("purelib")).stdout
    assert "op library loads: yes" in found


def test_the_op_library_needs_no_cuda_library_to_load(wheel: Path, manifest: dict[str, object], tmp_path: Path):
    if not manifest["built"]:
        pytest.skip(f"the wheel has no op library: {manifest['reason']}")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("blockyard/_ops.so", tmp_path)
    needed = set(re.findall(r"NEEDED\s+(\S+)", run("objdump", "--private-headers", library).stdout))
    assert "libtorch.so" in needed
    assert not [name for name in needed if "cuda" in name or "nvrtc" in name or "c10" in name]
    # Only a torch with CUDA has this symbol; a weak reference leaves it unresolved elsewhere.
    stream = re.findall(r".*aoti_torch_get_current_cuda_stream", run("objdump", "--dynamic-syms", library).stdout)
    assert all(re.search(r"\bw\b", line) for line in stream)
