"""`make test-gpu` and the recipe for a GPU machine, with stand-ins for Python and compute-sanitizer."""

import os
import re
import subprocess
from pathlib import Path

import pytest

# It notes what it is called with; PROBE and PASS are the exit status of the probe and of the sanitizer's pass.
SANITIZER = """#!/bin/sh
echo "sanitizer caching=$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> "$NOTES"
case "$*" in *" -c "*) echo "no device 7"; exit ${PROBE:-0};; *) exit ${PASS:-0};; esac
"""
PYTHON = """#!/bin/sh
echo "python $*" >> "$NOTES"
"""


def make_test_gpu(repo: Path, folder: Path, **environ: str) -> tuple[int, str, list[str]]:
    notes = folder / "notes"
    for name, text in (("compute-sanitizer", SANITIZER), ("gpu-python", PYTHON)):
        if name == "gpu-python" or environ:
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    finished = subprocess.run(
        ["make", "--no-print-directory", "test-gpu", f"GPU_PYTHON={folder}/gpu-python"],
        cwd=repo,
        env={**os.environ, "PATH": path, "NOTES": str(notes), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout, notes.read_text().splitlines()


def test_the_sanitizer_sees_each_allocation_and_no_errors_of_calls(repo: Path, tmp_path: Path):
    status, _, notes = make_test_gpu(repo, tmp_path, PROBE="0")
    assert status == 0
    assert notes[0] == "python -m pytest -m gpu tests/gpu"
    probe, run = notes[1:]
    assert probe.startswith("sanitizer caching=1 ")
    # Both have the same flags.
    flags = re.match(r"sanitizer caching=1 (.*?) \S*gpu-python", probe).group(1)
    assert "--report-api-errors no" in flags
    assert "--error-exitcode 9" in flags
    assert run.startswith(f"sanitizer caching=1 {flags} {tmp_path}/gpu-python -m pytest")
    for name in re.findall(r"tests/gpu/\w+\.py", run):
        assert (repo / name).is_file()


def test_an_error_that_the_sanitizer_finds_fails_the_target(repo: Path, tmp_path: Path):
    status, _, _ = make_test_gpu(repo, tmp_path, PASS="9")
    assert status != 0


@pytest.mark.parametrize("environ", [{"PROBE": "1"}, {"PROBE": "127"}, {}])
def test_the_pass_is_left_out_where_it_could_not_run(repo: Path, tmp_path: Path, environ: dict[str, str]):
    status, said, notes = make_test_gpu(repo, tmp_path, **environ)
    assert status == 0
    assert "its pass is left out" in said
    assert ("no device 7" if environ else "compute-sanitizer") in said.splitlines()[-1]
    assert not [note for note in notes if "-m pytest" in note and "sanitizer" in note]


def test_the_probe_uses_the_device(repo: Path, tmp_path: Path):
    _, _, notes = make_test_gpu(repo, tmp_path, PROBE="0")
    assert "device='cuda'" in notes[1]
