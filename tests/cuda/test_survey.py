"""The scripts for the first minutes on a device: they end well without one, and with stand-ins run their whole path."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cuda_on_cpu import patch_cuda

from blockyard.engine.ops import strategy
from blockyard.engine.ops.library import op_library
from blockyard_build.toolchain import MissingError, find_toolchain

SHELL = ("limits", "tests", "rates", "goals", "counters", "all")
# Seconds of one call on a machine that is held for minutes only, less what it takes to install the wheel.
MAX_SECONDS = 570

needs_op_library = pytest.mark.skipif(not op_library().loaded, reason=op_library().explain())


def load(repo: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = repo / "benches" / "gpu"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(Path(name).stem, folder / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path))
    strategy.use_cached.cache_clear()
    with patch_cuda(monkeypatch):
        yield
    strategy.use_cached.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which the survey would use for minutes")
@pytest.mark.parametrize(
    ("script", "status", "said"),
    [("smoke.py", 1, "no CUDA device"), ("capture.py", 1, "no CUDA device"), ("views.py", 0, "GB/s")],
)
def test_the_survey_ends_properly_without_a_device(repo: Path, script: str, status: int, said: str):
    finished = subprocess.run(
        [sys.executable, repo / "benches/gpu/survey" / script, "global"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == status, finished.stderr
    assert said in finished.stdout
    assert not finished.stderr


@pytest.mark.usefixtures("on_cpu")
def test_the_views_are_copied_by_every_strategy_each_way(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    views = load(repo, "survey/views.py", monkeypatch)
    engine, layout, forced = views.CacheEngine, views.KVLayout, []

    def force(device: int, strategy: str) -> contextlib.AbstractContextManager[None]:
        forced.append((device, strategy))
        return contextlib.nullcontext()

    monkeypatch.setattr(views, "CUDA", True)
    monkeypatch.setattr(views, "BLOCKS", 260)
    monkeypatch.setattr(views, "KVLayout", lambda kind, layers, **sizes: layout(kind, 2, **sizes))
    monkeypatch.setattr(views, "CacheEngine", lambda *sizes, device, **more: engine(*sizes, device="cpu", **more))
    monkeypatch.setattr(views, "force_strategy", force)
    views.main()
    out = capsys.readouterr().out
    strategies = ["default", *views.STRATEGIES]
    assert [strategy for _, strategy in forced] == strategies[1:] * 6
    for count in (16, 64, 256):
        for way in ("out", "in"):
            for named in strategies:
                assert f"{count:4d} blocks, {4 * count:6d} pieces, {way:3s} {named:7s}" in out


@needs_op_library
@pytest.mark.usefixtures("on_cpu")
def test_every_case_of_the_smoke_test_runs(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    smoke = load(repo, "survey/smoke.py", monkeypatch)
    monkeypatch.setattr(smoke, "WIDTHS", (16, 24, 4096))
    # The stand-in takes memory that is page-locked in part, so nothing fails in the last case.
    every = smoke.cases()[:-1]
    monkeypatch.setattr(smoke, "cases", lambda: every)
    cases = len(every)
    assert smoke.main() == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.count(" ok ") == cases >= 30
    assert "failed: 0" in out
    # It compares bytes: a swap that copies nothing is found.
    first = smoke.cases()[:1]
    monkeypatch.setattr(smoke, "cases", lambda: first)
    monkeypatch.setattr(smoke.ops, "swap_blocks", lambda *_: None)
    assert smoke.main() == 1
    assert "FAILED AssertionError: other bytes than plain indexing" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
def test_the_capture_beside_the_host_pool_runs(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    capture = load(repo, "survey/capture.py", monkeypatch)
    monkeypatch.setattr(capture, "BLOCKS", 300)
    monkeypatch.setattr(capture.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    assert capture.main("global") == 0
    out = capsys.readouterr().out
    assert out.startswith("global: ")
    assert "pool: 300 blocks page-locked, no problem" in out


@pytest.mark.slow
@needs_op_library
@pytest.mark.usefixtures("on_cpu")
def test_the_benchmark_runs_every_direction_and_judges_the_goals(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bench = load(repo, "bench_transfer.py", monkeypatch)
    monkeypatch.setattr(bench, "shapes", lambda **_: [(8192, 160), (65536, 32)])
    monkeypatch.setattr(bench, "GOAL_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "MATRIX", 64)
    monkeypatch.setattr(bench, "COMPUTE_SECONDS", 1e-3)
    monkeypatch.setattr(bench, "pool_figures", lambda _: {"pool_gb_s": 1.0})
    monkeypatch.setattr(sys, "argv", ["bench", "--no-calibrate", "--repeat", "1"])
    assert bench.main() == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^direction=\w+ piece_bytes=\d+ .* to_large=.* wall_to_large=", out, re.MULTILINE)) == 8
    for direction in ("h2d", "d2h", "d2d"):
        assert re.search(rf"^goal to_large {direction}: [\d.]+ of 0\.\d+, (met|missed)", out, re.MULTILINE)
    assert "goal to_loop h2d" in out


def test_goals_hold_for_large_copies_alone(repo: Path, monkeypatch: pytest.MonkeyPatch):
    bench = load(repo, "bench_transfer.py", monkeypatch)
    case = {"direction": "h2d", "piece_bytes": 65536}
    small, large = ({**case, "count": count, "to_large": ratio} for count, ratio in ((100, 0.5), (2000, 0.96)))
    assert bench.judged([small]) == []
    assert bench.judged([small, large]) == ["goal to_large h2d: 0.960 of 0.95, met (65536 bytes x 2000)"]
    assert "missed" in bench.judged([large | {"to_large": 0.94}])[0]


def test_the_docs_have_the_table_of_the_cost_model(repo: Path, monkeypatch: pytest.MonkeyPatch):
    model = load(repo, "copy_model.py", monkeypatch)
    assert "\n".join(model.table()) in (repo / "docs/benchmarks/copies.md").read_text()
    # What the library takes without a table is what the model finds best.
    for direction in ("h2d", "d2h"):
        assert model.crossing(direction) == model.LARGE_STAGED == strategy._LARGE_STAGED_PIECE
    header = (repo / "cuda/staged.h").read_text()
    for constant, name in ((model.SLOT, "kSlotBytes"), (model.MIN_PART, "kMinPartBytes")):
        assert f"{name} = {constant >> 20} << 20" in header


@pytest.mark.slow
def test_the_probe_compiles_and_links_as_the_scripts_build_it(repo: Path, tmp_path: Path):
    try:
        tools = find_toolchain(os.environ)
    except MissingError as missing:
        pytest.skip(f"no {missing}")
    line = next(line for line in (repo / "benches/gpu/survey/common.sh").read_text().splitlines() if " nvcc " in line)
    script = f"SURVEY=benches/gpu/survey PROBE={tmp_path}/probe; {line.replace('timeout 100', '').rstrip(' |')}"
    environ = os.environ | {
        "PATH": f"{tools.cuda_home}/bin:{os.environ['PATH']}",
        "NVCC_FLAGS": f"-O0 -L{tools.cuda_libs}",
    }
    built = subprocess.run(["bash", "-c", script], cwd=repo, env=environ, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "probe").exists()


# ---- the shell scripts, with stand-ins for every tool ----

NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >> "$NOTES"\n'


def run_script(repo: Path, folder: Path, script: str, tools: tuple[str, ...]) -> tuple[int, str, list[str]]:
    """Run one on a copy of the tree's part that it uses; gives its status, what it says and which tools it called."""
    tree, path = folder / "tree", folder / "bin"
    path.mkdir(parents=True)
    for name in tools:
        (path / name).write_text(NOTE)
        (path / name).chmod(0o755)
    # What it builds is a program that notes its calls.
    if "nvcc" in tools:
        (path / "nvcc").write_text(NOTE + 'for last; do :; done\ncp "$(dirname "$0")/ncu" "$last"\n')
    (tree / "benches").mkdir(parents=True)
    (tree / "benches" / "gpu").symlink_to(repo / "benches" / "gpu")
    (tree / "dist").mkdir()
    (tree / "dist" / "blockyard-0.whl").touch()
    survey = tree / "survey" / "a" / "b"
    survey.mkdir(parents=True)
    for source in (repo / "benches/gpu/survey").glob("*.sh"):
        (survey / source.name).write_text(source.read_text())
    environ = {"PATH": f"{path}:{os.environ['PATH']}", "NOTES": str(folder / "notes"), "TMPDIR": str(folder)}
    environ["PYTHONPATH"] = "/theirs"
    (folder / "notes").touch()
    ended = subprocess.run(
        ["bash", str(survey / f"{script}.sh")], env=environ, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr, (folder / "notes").read_text().splitlines()


@pytest.mark.parametrize("script", SHELL)
def test_a_script_says_that_there_is_no_device(repo: Path, tmp_path: Path, script: str):
    (tmp_path / "bin").mkdir()
    environ = {"PATH": os.environ["PATH"], "OUT": str(tmp_path / "out")}
    command = ["bash", str(repo / f"benches/gpu/survey/{script}.sh")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if "no CUDA device" not in ended.stdout:
        pytest.skip("there is a CUDA device")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not (tmp_path / "out").exists()


TOOLS = ("nvidia-smi", "nvcc", "ncu", "compute-sanitizer", "python3")
CALLED = {
    "limits": ["python3 -m blockyard doctor", "probe limits", "probe batch 100000", "smoke.py", "capture.py relaxed"],
    "tests": ["python3 -m pytest -q -m gpu tests/gpu", "test_capture_cuda.py", "compute-sanitizer"],
    "rates": ["probe rates", "views.py"],
    "goals": ["python3 -m blockyard calibrate", "bench_transfer.py --require --no-calibrate --quick"],
    "counters": ["ncu --clock-control none -k regex:copy_"],
    "all": ["bench_transfer.py --require --no-calibrate --repeat 5 --json"],
}


@pytest.mark.parametrize("script", SHELL)
def test_a_script_calls_all_its_tools(repo: Path, tmp_path: Path, script: str):
    status, said, calls = run_script(repo, tmp_path, script, TOOLS)
    assert status == 0, said
    for wanted in CALLED[script]:
        assert any(wanted in call for call in calls), (wanted, calls, said)
    assert any("pip install" in call for call in calls)
    if script == "counters":
        assert next(call for call in calls if call.startswith("ncu")).endswith("/probe counters")


def test_what_the_caller_put_on_the_path_of_python_stays(repo: Path, tmp_path: Path):
    common = (repo / "benches/gpu/survey/common.sh").read_text()
    line = next(line for line in common.splitlines() if "PYTHONPATH=" in line)
    for before, after in (("/theirs", "/site/site:/theirs"), ("", "/site/site")):
        shell = f'SITE=/site; PYTHONPATH={before}; {line}; echo "$PYTHONPATH"'
        assert subprocess.check_output(["bash", "-c", shell], text=True).strip() == after


@pytest.mark.parametrize("script", SHELL)
def test_a_script_ends_within_one_call(repo: Path, script: str):
    text = (repo / f"benches/gpu/survey/{script}.sh").read_text()
    seconds, times = 0, 1
    for line in text.splitlines():
        if found := re.match(r"\s*for \w+ in (.*); do$", line):
            times = len(found.group(1).split())
        elif line.strip() == "done":
            times = 1
        seconds += times * sum(int(limit) for limit in re.findall(r"\btimeout (?:-k \d+ )?(\d+) ", line))
        seconds += 100 * (line.strip() == "build_probe")
    assert 60 < seconds <= MAX_SECONDS
