"""The doctor's findings on installations that are whole, partial and broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockyard import doctor

BUILT = {
    "built": True,
    "reason": "",
    "torch": "2.11.0+cu130",
    "torch_target": "2.11",
    "cuda": "13.0",
    "archs": ["sm_80", "sm_90", "compute_80"],
    "compiler": "g++ 12.2.0",
    "key": "0",
}


def write_package(folder: Path, *, manifest: object = None, library: bool = False) -> Path:
    if manifest is not None:
        (folder / "_ops.json").write_text(json.dumps(manifest))
    if library:
        (folder / "_ops.so").write_bytes(b"not a library")
    return folder


def finding(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(f"{name}: "))


def test_report_names_every_part():
    names = [line.partition(": ")[0] for line in doctor.report()]
    assert names == ["blockyard", "python", "numpy", "torch", "op library", "op library loads", "CUDA device"]


def test_report_gives_the_installed_versions():
    import numpy as np
    import torch

    import blockyard

    lines = doctor.report()
    assert blockyard.__version__ in finding(lines, "blockyard")
    assert np.__version__ in finding(lines, "numpy")
    assert torch.__version__ in finding(lines, "torch")


def test_a_library_that_was_not_built_is_explained(tmp_path: Path):
    package = write_package(tmp_path, manifest={"built": False, "reason": "no torch headers at build time"})
    lines = doctor.report(package)
    assert finding(lines, "op library") == "op library: built without the op library: no torch headers at build time"
    assert "there is none" in finding(lines, "op library loads")


def test_a_built_library_is_described(tmp_path: Path):
    library = doctor.find_op_library(write_package(tmp_path, manifest=BUILT, library=True))
    text = doctor.describe_op_library(library)
    assert "torch >= 2.11 (with headers of 2.11.0+cu130), CUDA 13.0, sm_80, sm_90, compute_80 (PTX), by g++" in text


def test_a_library_that_went_missing_is_named(tmp_path: Path):
    library = doctor.find_op_library(write_package(tmp_path, manifest=BUILT))
    assert library.path is None
    assert "is gone" in library.reason


def test_a_missing_record_is_explained(tmp_path: Path):
    assert "record" in doctor.find_op_library(tmp_path).reason


def test_an_unreadable_record_is_explained(tmp_path: Path):
    (tmp_path / "_ops.json").write_text("{")
    assert "JSONDecodeError" in doctor.find_op_library(tmp_path).reason


def test_a_library_without_record_is_still_found(tmp_path: Path):
    assert doctor.find_op_library(write_package(tmp_path, library=True)).path == tmp_path / "_ops.so"


def test_a_broken_library_says_why_it_does_not_load(tmp_path: Path):
    package = write_package(tmp_path, manifest=BUILT, library=True)
    line = finding(doctor.report(package), "op library loads")
    assert line.startswith("op library loads: no: built for torch >= 2.11, CUDA 13.0, sm_80 sm_90 compute_80, found")
    assert "blocks are copied by plain torch calls instead" in line


def test_the_driver_is_part_of_what_loads(monkeypatch: pytest.MonkeyPatch):
    import torch

    from blockyard.engine.ops import library

    package = doctor._PACKAGE
    if doctor.find_op_library(package).path is None:
        pytest.skip("built without the op library")
    for driver, said in (
        (0, f"yes, found torch {torch.__version__} with {library._torch_cuda()}, no CUDA driver"),
        (99000, f"yes, found torch {torch.__version__} with {library._torch_cuda()}, a driver for CUDA 99.0"),
        (11080, "no: it needs a driver for CUDA"),
    ):
        monkeypatch.setattr(library, "_versions", lambda _, driver=driver: (driver, 13000))
        assert said in finding(doctor.report(package), "op library loads")


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1"])
def test_an_old_torch_is_explained(version: str):
    text = doctor.explain_torch(version)
    assert f"needs torch 2.11 or newer, found {version}" in text


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0+cpu", "3.0.0a0+git1234"])
def test_a_newer_torch_is_fine(version: str):
    assert not doctor.explain_torch(version)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "as compiled"),
        ((8, 6), "as compiled"),
        ((9, 0), "as compiled"),
        ((12, 0), "from PTX"),
        ((7, 5), "not supported"),
    ],
)
def test_each_device_is_told_how_kernels_run(capability: tuple[int, int], expected: str):
    assert expected in doctor.explain_device("Some GPU", capability, ("sm_80", "sm_90", "compute_80"))


def test_arch_specific_code_runs_on_that_arch_alone():
    archs = ("sm_90a",)
    assert "as compiled" in doctor.explain_device("Some GPU", (9, 0), archs)
    assert "not supported" in doctor.explain_device("Some GPU", (10, 0), archs)


def test_importing_the_doctor_does_not_load_torch():
    code = "import sys, blockyard.doctor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]):
    assert doctor.run_doctor() == 0
    assert capsys.readouterr().out.splitlines() == doctor.report()
