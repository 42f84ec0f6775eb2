"""The timeline of a demo run adds up to the counters of the run."""

from __future__ import annotations

from collections import Counter as Counts
from itertools import pairwise

import pytest

from blockyard.integrations.transformers.generator import Generator
from blockyard.progress import show_progress
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.history import StepHistory
from blockyard.tools.demo.serve import Faults, PagedRun, serve
from blockyard.tools.demo.workload import StandardText, text_workload
from blockyard.tools.timeline import Timeline


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[PagedRun, Faults, Timeline]:
    config = demo_config(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2)
    model, faults, timeline = demo_model(config), Faults(corrupt=3, seed=1), Timeline("step")
    items = text_workload(10, seed=0, prompt_tokens=(16, 60), output_tokens=(24, 60), text=StandardText())
    url = f"file://{tmp_path_factory.mktemp('store')}?size=16MiB"
    with (
        Generator(
            model, device_blocks=14, host_blocks=5, swap_store=url, preemption_mode="swap", wrap_executor=faults.wrap
        ) as generator,
        show_progress("run", quiet=True) as view,
    ):
        return serve(generator, items, faults, view, [StepHistory(generator, faults, timeline)]), faults, timeline


def test_spans_count_each_transfer_preemption_and_fault(run: tuple[PagedRun, Faults, Timeline]) -> None:
    served, faults, timeline = run
    counts: Counts[tuple[str, str]] = Counts()
    for span in timeline.spans:
        assert span.end == span.start + 1
        counts[span.track, span.name] += int(span.args["count"])
    stats, corrupting = served.stats, faults.corrupting
    assert corrupting is not None
    wanted = {(f"{src} to {dst}", kind): blocks for (kind, src, dst), blocks in served.blocks.items()}
    wanted |= {
        ("preemptions", "swap to host"): stats.preempted_swap_host,
        ("preemptions", "swap to external"): stats.preempted_swap_external,
        ("preemptions", "recompute"): stats.preempted_recompute,
        ("faults", "request lost bytes"): stats.lost,
        ("faults", "stored block damaged"): corrupting.stored,
        ("faults", "damaged block read"): corrupting.read,
    }
    assert counts == Counts(wanted)
    assert stats.preempted_swap_host
    assert stats.preempted_swap_external
    assert stats.lost
    assert list(timeline.lanes())[:2] == ["faults", "preemptions"]


def test_counters_reach_the_peaks_and_end_where_the_run_ends(run: tuple[PagedRun, Faults, Timeline]) -> None:
    served, _, timeline = run
    values: dict[tuple[str, str], list[float]] = {}
    for counter in timeline.counters:
        values.setdefault((counter.track, counter.name), []).append(counter.value)
        assert 0 <= counter.time <= served.stats.steps
    for tier, peak in (("device", served.stats.peak_device_blocks), ("host", served.stats.peak_host_blocks)):
        # The scheduler's peak is of the moment between a step's allocations and its end.
        assert 0 < max(values[f"{tier} (blocks)", "in use"]) <= peak
        assert values[f"{tier} (blocks)", "size"] == [served.totals[tier]]
        assert values[f"{tier} (blocks)", "in use"][-1] == 0
    assert values["prefix cache (tokens)", "hits"][-1] == served.stats.cached_tokens
    assert {name: values["requests", name][-1] for name in ("running", "waiting", "swapped")} == {
        "running": 0,
        "waiting": 0,
        "swapped": 0,
    }
    for series in values.values():  # a value is added where it changes
        assert all(before != after for before, after in pairwise(series))
