"""Transfers in a profiler's trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from blockyard import CacheEngine, KVLayout
from blockyard.engine import plans, transfers
from blockyard_build.toolchain import MissingError, find_toolchain

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
SIZE = LAYOUT.bytes_per_block
OUT = f"blockyard swap_out device->host 3 blocks {3 * SIZE} bytes"
IN = f"blockyard swap_in host->device 2 blocks {2 * SIZE} bytes"
READ = f"blockyard read device->rows 1 blocks {SIZE} bytes"


def transfer(engine: CacheEngine) -> None:
    engine.run("swap_out", [(0, 0), (1, 1), (2, 2)])
    engine.submit("swap_in", [(0, 5), (2, 6)]).wait()
    engine.read("device", np.array([5]))


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that NVTX is told of, with `pop` for their ends."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    return told


def ours(traced: profile) -> list[str]:
    return [event.name for event in traced.events() or () if event.name.startswith("blockyard ")]


def test_transfers_are_ranges_in_torchs_profiler(nvtx: list[str]):
    with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as engine:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as traced:
            transfer(engine)
        assert {OUT, READ} <= set(ours(traced))
        transfer(engine)
    assert not nvtx


def test_a_range_holds_the_copies_of_its_transfer(nvtx: list[str]):
    with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as engine:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as traced:
            engine.run("swap_out", [(0, 0)])
        (found,) = [event for event in traced.events() or () if event.name.startswith("blockyard ")]
        assert found.time_range.elapsed_us() > 0


@pytest.mark.parametrize("stream", ["calling thread", "worker"])
def test_transfers_are_nvtx_ranges_where_a_tool_reads_them(
    stream: str, nvtx: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfers, "_NVTX", True)
    with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as engine:
        if stream == "worker":
            engine.submit("swap_in", [(0, 5), (2, 6)]).wait()
            assert nvtx == [IN, "pop"]
        else:
            transfer(engine)
            assert nvtx == [OUT, "pop", IN, "pop", READ, "pop"]


def test_a_transfer_that_fails_leaves_its_range(nvtx: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfers, "_NVTX", True)
    with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as engine:
        plan = plans.moving(engine.memory, "copy", [(0, 1)], "device", chunk=None)

        def fail() -> None:
            raise RuntimeError("the device is lost")

        with pytest.raises(RuntimeError, match="lost"):
            plan.in_range(fail)()
    assert [name[-3:] for name in nvtx] == ["tes", "pop"]


def test_without_a_profiler_a_piece_is_unchanged(nvtx: list[str]):
    with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as engine:
        plan = plans.moving(engine.memory, "copy", [(0, 1)], "device", chunk=None)
        assert plan.in_range(plan.pieces[0]) is plan.pieces[0]
        transfer(engine)
    assert not nvtx


PROGRAM = """
from blockyard import CacheEngine, KVLayout
layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
with CacheEngine(layout, device_blocks=8, host_blocks=8) as engine:
    engine.run("swap_out", [(0, 0), (1, 1), (2, 2)])
    engine.submit("swap_in", [(0, 5), (2, 6)]).wait()
"""


def test_a_tool_that_has_started_the_process_sees_its_transfers(tmp_path: Path):
    try:
        tools = find_toolchain({})
    except MissingError as missing:
        pytest.skip(f"no {missing}")
    tool, source = tmp_path / "tool.so", Path(__file__).resolve().parents[1] / "nvtx_tool.cpp"
    include = ["-isystem", str(tools.cuda_home / "include")]
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([tools.gxx, *flags, *include, str(source), "-o", str(tool)], check=True)
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(tool)}
    told = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    assert told.stdout.splitlines() == [f"push {OUT}", "pop", f"push {IN}", "pop"]
