"""The doctor's findings on installations that are whole, partial and broken."""

import importlib.util
import json
import platform
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import blockyard
from blockyard.tools import doctor
from blockyard.tools.cli import main

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


class View:
    """Takes note of what was shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, done: int, total: int, note: str = "") -> None:
        self.notes.append(f"{done}/{total} {note}")


def checks(package: Path = doctor._PACKAGE) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.run_doctor(View(), package)}


def test_every_part_is_checked_and_what_may_take_seconds_is_shown():
    view = View()
    names = dict.fromkeys(check.name for check in doctor.run_doctor(view))  # a machine may have several devices
    assert [name for name in names if name != "copy_strategies"] == [
        *("blockyard", "python", "numpy", "optional_packages", "cpu", "torch", "op_library", "op_library_loads"),
        *("cuda_device", "memory_lock_limit", "direct_io"),
    ]
    assert view.notes == ["1/3 importing torch", "2/3 loading the op library", "3/3 looking for CUDA devices"]


def test_report_gives_the_installed_versions():
    import numpy as np
    import torch

    found = checks()
    assert blockyard.__version__ in found["blockyard"].found
    assert np.__version__ in found["numpy"].found
    assert torch.__version__ in found["torch"].found
    assert f"rich {version('rich')}" in found["optional_packages"].found


def test_a_library_that_was_not_built_is_explained(tmp_path: Path):
    package = write_package(tmp_path, manifest={"built": False, "reason": "no torch headers at build time"})
    found = checks(package)
    assert found["op_library"] == doctor.Check(
        "op_library",
        "warn",
        "built without the op library: no torch headers at build time",
        "install a wheel, or build with torch and BLOCKYARD_CUDA=require",
    )
    assert "there is none" in found["op_library_loads"].found
    assert doctor.worst(list(found.values())) == "warn"


def test_a_built_library_is_described(tmp_path: Path):
    library = doctor.find_op_library(write_package(tmp_path, manifest=BUILT, library=True))
    check = doctor.check_op_library(library)
    assert check.status == "ok"
    assert "torch >= 2.11 (with headers of 2.11.0+cu130), CUDA 13.0, sm_80, sm_90, compute_80 (PTX)" in check.found
    assert check.found.endswith("by g++ 12.2.0")


def test_a_library_that_went_missing_is_named(tmp_path: Path):
    library = doctor.find_op_library(write_package(tmp_path, manifest=BUILT))
    check = doctor.check_op_library(library)
    assert (check.status, check.advice) == ("fail", "install Blockyard again")
    assert check.found.endswith("_ops.so is gone")


def test_a_missing_record_is_explained(tmp_path: Path):
    assert "record" in doctor.find_op_library(tmp_path).reason


def test_an_unreadable_record_is_explained(tmp_path: Path):
    (tmp_path / "_ops.json").write_text("{")
    assert "JSONDecodeError" in doctor.find_op_library(tmp_path).reason


def test_a_library_without_record_is_still_found(tmp_path: Path):
    assert doctor.find_op_library(write_package(tmp_path, library=True)).path == tmp_path / "_ops.so"


def test_a_broken_library_says_why_it_does_not_load(tmp_path: Path):
    package = write_package(tmp_path, manifest=BUILT, library=True)
    check = checks(package)["op_library_loads"]
    assert check.status == "fail"
    assert check.found.startswith("no: built for torch >= 2.11, CUDA 13.0, sm_80 sm_90 compute_80, found")
    assert check.found.endswith("blocks are copied by plain torch calls instead")


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
        assert said in checks(package)["op_library_loads"].found


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
    found, runs = doctor.explain_device("Some GPU", capability, ("sm_80", "sm_90", "compute_80"))
    assert expected in found
    assert runs == (capability != (7, 5))


def test_arch_specific_code_runs_on_that_arch_alone():
    archs = ("sm_90a",)
    assert "as compiled" in doctor.explain_device("Some GPU", (9, 0), archs)[0]
    assert "not supported" in doctor.explain_device("Some GPU", (10, 0), archs)[0]


def test_importing_the_doctor_does_not_load_torch():
    code = "import sys, blockyard.tools.doctor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_that_cannot_be_imported_is_a_fault_and_torch_that_is_absent_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert checks()["torch"] == doctor.Check("torch", "warn", "not installed", "pip install 'blockyard[torch]'")
    monkeypatch.undo()
    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, "torch", None)
        broken.setattr(importlib.util, "find_spec", lambda _name: object())
        check = checks()["torch"]
    assert check.status == "fail"
    assert check.found.startswith("installed, but cannot be imported (ModuleNotFoundError")


def fake_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]) -> None:
    import torch

    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path))
    for name, value in (
        *(("is_available", True), ("device_count", 1), ("get_device_name", "Some GPU")),
        ("get_device_capability", capability),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_a_device_is_asked_to_be_calibrated_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from blockyard.engine.ops.strategy import StrategyTable, table_path

    fake_device(monkeypatch, tmp_path, (9, 0))
    library = doctor.OpLibraryFile(tmp_path, archs=("sm_90",))
    device, copies = doctor._check_devices(library, sys.modules["torch"])
    assert (device.status, device.found) == (
        "ok",
        "cuda:0 Some GPU (compute capability 9.0): kernels run as compiled",
    )
    assert (copies.status, copies.advice) == ("warn", "blockyard calibrate")
    for torch_cuda, status in (("12.8", "warn"), ("13.0", "ok")):
        StrategyTable("Some GPU", torch_cuda, ()).save(table_path("Some GPU"))
        assert doctor._check_devices(library, sys.modules["torch"])[1].status == status


@pytest.mark.parametrize(
    ("archs", "path", "status"), [(("sm_90",), True, "fail"), (("sm_70",), True, "ok"), ((), False, "ok")]
)
def test_a_device_without_kernels_is_a_fault_unless_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, archs: tuple[str, ...], path: bool, status: str
):
    fake_device(monkeypatch, tmp_path, (7, 5))
    library = doctor.OpLibraryFile(tmp_path if path else None, archs=archs)
    assert doctor._check_devices(library, sys.modules["torch"])[0].status == status


def test_a_driver_without_a_device_for_torch_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_device(monkeypatch, tmp_path, (9, 0))
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)
    for there, status in ((tmp_path, "fail"), (tmp_path / "absent", "ok")):
        monkeypatch.setattr(doctor, "_NVIDIA", there)
        assert doctor._check_devices(doctor.OpLibraryFile(None), sys.modules["torch"])[0].status == status


@pytest.mark.parametrize(
    ("limit", "has_device", "status"),
    [(-1, True, "ok"), (8 << 20, True, "warn"), (8 << 20, False, "ok")],
)
def test_the_memory_lock_limit_matters_with_a_device(
    monkeypatch: pytest.MonkeyPatch, limit: int, has_device: bool, status: str
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    check = doctor.check_memory_lock(has_device=has_device)
    assert check.status == status
    assert ("ulimit -l unlimited" in check.advice) == (status == "warn")
    assert limit == -1 or str(limit) in check.found


def test_direct_io_is_tried_in_the_folder(tmp_path: Path):
    assert doctor.check_direct_io(tmp_path).found.endswith(str(tmp_path))
    refused = doctor.check_direct_io(Path("/proc"))
    assert refused.status == "warn"
    assert refused.found.startswith("/proc does not support it")


def test_features_of_the_cpu_are_named_if_they_are_there_and_if_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 sha_ni\n")
    assert doctor._describe_cpu(cpuinfo).endswith("cores usable, sha_ni, avx2, no avx512f")


FAILED = [
    doctor.Check("numpy", "ok", "2.3.4"),
    doctor.Check("op_library", "fail", "it is gone", "install Blockyard again"),
]


def test_the_command_says_each_finding_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "run_doctor", lambda _view: FAILED)
    assert main(["doctor"]) == 1
    assert capsys.readouterr() == (
        "ok    numpy: 2.3.4\nfail  op library: it is gone\n      -> install Blockyard again\n",
        "",
    )


@pytest.mark.parametrize(("found", "status", "code"), [(FAILED, "fail", 1), (FAILED[:1], "ok", 0)])
def test_its_json_has_the_same_for_machines(
    found: list[doctor.Check],
    status: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(doctor, "run_doctor", lambda _view: found)
    assert main(["doctor", "--format", "json"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "command": "doctor",
        "version": blockyard.__version__,
        "exit_code": code,
        "status": status,
        "checks": [
            {"name": each.name, "status": each.status, "found": each.found, "advice": each.advice} for each in found
        ],
    }
