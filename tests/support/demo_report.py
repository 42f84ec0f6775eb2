"""The report of a successful run of the demo."""

from __future__ import annotations

from dataclasses import replace

from blockyard import BlockManager
from blockyard.scheduler import SchedulerStats
from blockyard.tools.demo.report import Report
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
    seconds=12.5,
    scheduler=SchedulerStats(
        steps=200, cached_tokens=96, preempted_swap_host=4, preempted_swap_external=3, preempted_recompute=2
    ),
    manager=replace(
        BlockManager(block_size=16, device_blocks=24, host_blocks=24, external_blocks=512).stats(),
        copied_blocks=5,
        swapped_out_blocks={"host": 40, "external": 35},
        swapped_in_blocks={"host": 38, "external": 30},
        peak_blocks={"device": 20, "host": 24, "external": 30},
    ),
    bytes_per_block=2**20,
    swap_store=StoreStats(written_blocks=35, written_bytes=35 * 2**20, read_blocks=35, read_bytes=35 * 2**20),
    prefix_store=None,
    damage=None,
    differences=[],
    ties=0,
)
