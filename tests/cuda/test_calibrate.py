"""Calibration without a device: what rules follow from measured times, and what the command says."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from forks import in_child

from blockyard import progress
from blockyard.engine.cuda import calibrate
from blockyard.engine.cuda.calibrate import BATCH_SIZES, choose_batch_pieces, choose_thread_blocks
from blockyard.engine.cuda.journal import Journal
from blockyard.engine.ops import strategy
from blockyard.engine.ops.strategy import Rule, StrategyTable
from blockyard.errors import BlockyardError
from blockyard.tools import cli

SIZES, COUNTS = (1024, 4096, 16384, 65536), (16, 1000, 50_000)


def choose_rules(direction: str, measure: calibrate.Measure, sizes: Sequence[int], counts: Sequence[int]) -> tuple:
    return calibrate.choose_rules(direction, measure, sizes, counts, {"kernel": 3})


def measured(size: int, count: int) -> dict[str, float]:
    """A batch costs a start and half a microsecond a piece; the kernel has less to pay but is slower on large ones."""
    num_bytes = size * count
    return {"batch": 5e-6 + max(5e-7 * count, num_bytes / 50e9), "kernel": 8e-6 + num_bytes / 40e9}


def test_small_pieces_of_large_numbers_go_by_kernel():
    table = StrategyTable("", "", choose_rules("h2d", measured, SIZES, COUNTS))
    assert table.rule("h2d", 4096, 1000).strategy == "kernel"
    assert table.rule("h2d", 4096, 10**9).strategy == "kernel"
    assert table.rule("h2d", 65536, 1000).strategy == "batch"
    assert table.rule("h2d", 1 << 20, 50_000).strategy == "batch"
    assert table.rule("h2d", 4096, 1000).thread_blocks == 3
    back = StrategyTable("", "", choose_rules("d2h", measured, SIZES, COUNTS))
    assert back.rule("d2h", 4096, 1000).strategy == "kernel"


def test_staging_is_chosen_with_what_copies_take_that_cannot_be_staged():
    def measure(size: int, _: int) -> dict[str, float]:
        return {
            "batch": 1.0,
            "kernel": 0.6 if size < 5000 else 0.95,
            "staged": 0.5 if size < 20000 else 2.0,
        }

    table = StrategyTable("", "", choose_rules("d2h", measure, SIZES, COUNTS))
    assert [table.rule("d2h", size, 16, host_rows=True).strategy for size in SIZES] == ["staged"] * 3 + ["batch"]
    assert [table.rule("d2h", size, 16).strategy for size in SIZES] == ["kernel", "kernel", "batch", "batch"]


def test_no_more_thread_blocks_are_taken_than_keep_the_link_busy():
    assert choose_thread_blocks({1: 4.0, 2: 2.0, 3: 1.02, 4: 1.0, 8: 1.0}) == 3
    assert choose_thread_blocks({1: 1.0, 2: 1.2}) == 1


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize(("size", "count"), [(1024, 16), (1024, 1000), (8192, 300), (1 << 20, 3)])
def test_what_is_measured_is_compared_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch, direction: str, size: int, count: int
):
    """On memory of the CPU, which stands for all."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(calibrate, "force_strategy", lambda *_: nullcontext())
    pieces = calibrate._Pieces(torch.device("cpu"), direction, size, count)
    assert pieces.num_views * len(pieces.pairs) * size <= size * count
    assert pieces.measure("batch", 1) > 0
    pieces.expected.view(-1)[-1] ^= 1
    with pytest.raises(BlockyardError, match=f"pieces of {size} bytes {direction} by batch delivers other bytes"):
        pieces.measure("batch", 1)


def test_each_count_is_judged_by_itself():
    few_by_kernel = choose_rules("h2d", lambda _, count: {"batch": float(count < 100), "kernel": 0.5}, SIZES, COUNTS)
    table = StrategyTable("", "", few_by_kernel)
    assert table.rule("h2d", 65536, 16).strategy == "kernel"
    assert table.rule("h2d", 1024, 17).strategy == "batch"


def test_a_kernel_that_is_little_faster_is_left_alone():
    rules = choose_rules("h2d", lambda *_: {"batch": 1.0, "kernel": 0.8}, SIZES, COUNTS)
    assert {rule.strategy for rule in rules} == {"batch"}
    rules = choose_rules("h2d", lambda *_: {"batch": 1.0, "kernel": 0.75}, SIZES[:2], COUNTS)
    assert {rule.strategy for rule in rules if rule.max_bytes <= SIZES[1]} == {"kernel"}


def test_no_more_memory_is_asked_for_than_there_may_be():
    asked = []

    def measure(size: int, count: int) -> dict[str, float]:
        asked.append(size * count)
        return {"batch": 2.0, "kernel": 1.0}

    rules = choose_rules("h2d", measure, calibrate.PIECE_BYTES, calibrate.COUNTS)
    assert max(asked) <= 1 << 30
    assert StrategyTable("", "", rules).rule("h2d", 1 << 20, 50_000).strategy == "batch"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0, 1.0), 512),
        ((1.0, 0.99, 0.9), 2048),
        ((1.0, 0.9, 0.89), 1024),
        ((1.0, None, 0.1), 512),
        ((None, 1.0, 1.0), 0),
    ],
)
def test_batches_are_longer_only_where_that_is_faster(seconds: tuple[float | None, ...], expected: int):
    taken = dict(zip(BATCH_SIZES, seconds, strict=True))
    assert choose_batch_pieces(lambda size: {} if taken[size] is None else {"batch": taken[size]}) == expected


def test_a_crash_costs_calibration_the_case_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured: list[tuple[str, int, int]] = []
    lines: list[str] = []

    def measure(_index: int, direction: str, size: int, count: int, thread_blocks: dict[str, int]) -> dict[str, float]:
        assert thread_blocks == {"kernel": 3}
        measured.append((direction, size, count))
        if crashes and size == 4096:
            os._exit(0)
        return {"batch": 2.0, "kernel": 1.0}

    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    monkeypatch.setattr(calibrate, "measure_strategies", measure)
    monkeypatch.setattr(calibrate, "measure_thread_blocks", lambda *_: 3)
    monkeypatch.setattr(calibrate, "measure_batches", lambda _index, max_pieces: 1.0 / max_pieces)
    monkeypatch.setattr(calibrate, "PIECE_BYTES", SIZES)
    monkeypatch.setattr(calibrate, "COUNTS", COUNTS)
    crashes = True
    in_child(lambda: pytest.fail(str(calibrate.calibrate_device(0, lines.append))))
    crashes = False
    table = calibrate.calibrate_device(0, lines.append)
    # The case that crashed is not tried again, nor those before it.
    assert measured[0] == ("h2d", 16384, 16)
    assert "h2d 4096 x 16: left out, since a process died measuring it" in lines
    assert [table.rule("h2d", size, 16).strategy for size in (1024, 4096, 16384)] == ["kernel", "batch", "kernel"]
    assert table.batch_pieces == 2048
    assert strategy.read_table(strategy.table_path("card")) == table
    strategy.use_cached.cache_clear()
    # All was measured: the next calibration begins afresh.
    assert [path.name for path in tmp_path.iterdir()] == ["copy-strategy-card.json"]


def test_a_case_that_was_ended_from_outside_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ended(*_: object) -> None:
        Journal(tmp_path / "partial", {}).measure("case", lambda: os.kill(os.getpid(), signal.SIGTERM))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(calibrate, "op_library", lambda: SimpleNamespace(loaded=True))
    monkeypatch.setattr(calibrate, "calibrate_device", ended)
    with pytest.raises(SystemExit) as left:
        cli.main(["calibrate"])
    assert left.value.code == 128 + signal.SIGTERM
    assert Journal(tmp_path / "partial", {}).measure("case", lambda: {"batch": 1.0}) == {"batch": 1.0}


def gpu_benchmark(repo: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo / "benches/gpu"))
    spec = importlib.util.spec_from_file_location("bench_transfer", repo / "benches/gpu/bench_transfer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_crash_costs_the_gpu_benchmark_the_case_under_way(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench, path = gpu_benchmark(repo, monkeypatch), tmp_path / "gpu.json"

    class Case:
        def __init__(self, direction: str, size: int, count: int, _device: int) -> None:
            self.figures = {"direction": direction, "piece_bytes": size, "count": count}

        def measure(self, _repeat: int, _table: StrategyTable | None) -> dict[str, object]:
            if self.figures["direction"] == "both":
                raise ZeroDivisionError
            return self.figures

    for name, result in (("is_available", True), ("current_device", 0), ("get_device_name", "card")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setattr(bench, "op_library", lambda: SimpleNamespace(loaded=True))
    monkeypatch.setattr(bench, "Case", Case)
    monkeypatch.setattr(bench, "use_cached", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--no-calibrate", "--json", str(path)])
    with pytest.raises(ZeroDivisionError):
        bench.main()
    written = json.loads(path.read_text())
    assert [result["direction"] for result in written["results"]] == ["d2h", "h2d"]
    assert written["device"] == "card"


def test_the_command_says_that_there_is_nothing_to_calibrate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate"]) == 0
    assert capsys.readouterr().out == "no CUDA device that torch can use: nothing was measured or saved\n"


def test_a_device_without_the_op_library_is_found_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibrate, "op_library", lambda: SimpleNamespace(loaded=False, explain=lambda: "it is gone"))
    assert cli.main(["calibrate"]) == 1
    assert capsys.readouterr().out == "nothing was measured or saved: it is gone\n"


@pytest.fixture
def one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that is measured at once; gives the file of its table."""

    def measured(_index: int, say: Callable[[str], None]) -> StrategyTable:
        say("h2d 1024 bytes x 16: batch 7.0 GB/s")
        return StrategyTable("card", "13.0", (Rule("h2d", 1024, 16, "batch", 1),), 512)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(calibrate, "op_library", lambda: SimpleNamespace(loaded=True))
    monkeypatch.setattr(calibrate, "calibrate_device", measured)
    monkeypatch.setattr(calibrate, "table_path", lambda name: tmp_path / f"{name}.json")
    return tmp_path / "card.json"


def test_the_command_says_what_it_measured_and_where_it_saved_it(
    one_device: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert cli.main(["calibrate"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        f"h2d 1024 bytes x 16: batch 7.0 GB/s\ncuda:0 card: saved to {one_device}; new processes choose "
        f"their copy strategies from it\n"
    )
    assert printed.err == "cuda:0: 1 of 95, h2d 1024 bytes x 16: batch 7.0 GB/s\n"
    assert cli.main(["calibrate", "--format", "json", "-q"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["devices"] == [
        {
            "index": 0,
            "path": str(one_device),
            "device": "card",
            "torch_cuda": "13.0",
            "rules": [
                {"direction": "h2d", "max_bytes": 1024, "max_count": 16, "strategy": "batch", "thread_blocks": 1}
            ],
            "batch_pieces": 512,
        }
    ]
    assert (found["problem"], printed.err) == ("", "")


def test_bytes_that_come_out_wrong_are_found_wrong(
    one_device: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def wrong(*_: object) -> None:
        raise BlockyardError("copying 16 pieces by batch delivers other bytes")

    monkeypatch.setattr(calibrate, "calibrate_device", wrong)
    assert cli.main(["calibrate"]) == 1
    assert capsys.readouterr().out == "cuda:0: copying 16 pieces by batch delivers other bytes\n"


@pytest.mark.parametrize("required", [False, True])
def test_the_gpu_benchmark_says_that_there_is_nothing_to_measure(repo: Path, tmp_path: Path, required: bool):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, str(repo / "benches/gpu/bench_transfer.py"), "--json", str(tmp_path / "gpu.json")]
    finished = subprocess.run([*command, *["--require"] * required], capture_output=True, text=True, check=False)
    assert finished.returncode == int(required), finished.stderr
    assert finished.stdout.startswith("nothing measured: ")
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == []
