"""The report of a successful run of the demo."""

from __future__ import annotations

from blockyard.tools.demo.report import Peak, Report, TransferCount
from blockyard.types import StoreStats

REPORT = Report(
    version="0.1.0",
    model="Llama, 4 layers",
    device="cpu",
    workload="text of the standard library, seed 0",
    settings={"block_size": 16, "num_host_blocks": 24, "model": None},
    requests=48,
    sequences=64,
    prompt_tokens=6000,
    output_tokens=3000,
    cached_prompt_tokens=96,
    steps=200,
    seconds=12.5,
    tokens_per_second=240.0,
    preemptions={"swap_host": 4, "swap_external": 3, "recompute": 2},
    lost=0,
    transfers=[
        TransferCount("swap_out", "device", "host", 40, 40 * 2**20),
        TransferCount("swap_out", "device", "external", 30, 30 * 2**20),
        TransferCount("swap_out", "host", "external", 5, 5 * 2**20),
        TransferCount("copy", "device", "device", 7, 7 * 2**20),
    ],
    peak={"device": Peak(96, 96), "host": Peak(20, 24), "external": Peak(30, 512)},
    swap_store=StoreStats(written_blocks=35, written_bytes=35 * 2**20, read_blocks=35, read_bytes=35 * 2**20),
    damage=None,
    sabotage=None,
    compared=48,
    identical_requests=48,
    differences=[],
    ties=0,
)
