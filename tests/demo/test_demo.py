"""The main job on a small workload: tokens identical whatever moved, and every planted fault noticed."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockyard import BlockManager, progress
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, StoreURLError
from blockyard.scheduler import Request, Scheduler
from blockyard.tools.cli import main
from blockyard.tools.demo import models, run, serve
from blockyard.tools.demo.demo_model import DEMO_CONFIGS, demo_config
from blockyard.tools.demo.report import Report
from blockyard.tools.demo.run import DemoOptions, make_report, pool_sizes
from blockyard.tools.demo.workload import read_text, text_workload

# Small enough for seconds, pressed enough that every kind of transfer and of preemption happens.
SMALL = DemoOptions(
    device="cpu",
    requests=12,
    prompt_tokens=(16, 96),
    output_tokens=(32, 96),
    num_device_blocks=24,
    num_host_blocks=4,
)


@pytest.fixture(autouse=True, scope="module")
def same_text() -> Iterator[None]:
    """Cut prompts from seeded lines: the standard library differs between Pythons, and with it what is swapped."""
    lines = np.random.default_rng(0).integers(33, 127, (1600, 40), dtype=np.uint8)
    lines[:, -1] = ord("\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(serve, "read_text", lines.tobytes)
        yield


@pytest.fixture(autouse=True, scope="module")
def smaller_model() -> Iterator[None]:
    """Let the demo's model be smaller: what the scheduler does to its blocks depends on lengths alone."""
    config = demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(models.DEMO_CONFIGS, "llama", lambda: config)
        yield


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(SMALL)


def check_that_blocks_went_every_way(report: Report) -> None:
    stats = report.manager
    assert stats.copied_blocks > 0
    assert all(
        stats.swapped_out_blocks[tier] > 0 and stats.swapped_in_blocks[tier] > 0 for tier in ("host", "external")
    )


def test_tokens_are_identical_though_blocks_went_every_way(report: Report) -> None:
    assert (report.identical_requests, report.requests, report.sequences) == (12, 12, 16)
    check_that_blocks_went_every_way(report)
    stats = report.scheduler
    assert min(stats.preempted_swap_host, stats.preempted_swap_external, stats.preempted_recompute) > 0
    assert report.exit_code == 0


def test_tokens_are_the_same_with_and_without_a_prefix_cache_and_in_chunks(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_report(replace(SMALL, prefix_caching=False))
    chunks = make_report(replace(SMALL, max_num_batched_tokens=24))
    monkeypatch.setattr(serve, "read_text", lambda: (b"x" * 39 + b"\n") * 400)
    alike = make_report(SMALL)
    assert [each.identical_requests for each in (report, plain, chunks, alike)] == [12, 12, 12, 12]
    assert alike.scheduler.cached_tokens > 0
    assert plain.scheduler.cached_tokens == 0
    assert chunks.scheduler.steps > report.scheduler.steps


def test_the_store_has_written_and_read_what_the_manager_swapped(report: Report) -> None:
    store, stats = report.swap_store, report.manager
    assert (store.checksum_failures, store.misses) == (0, {})
    assert store.written_blocks == stats.swapped_out_blocks["external"]
    assert store.read_blocks == stats.swapped_in_blocks["external"]
    assert report.bytes_per_block == store.written_bytes // store.written_blocks == 8192
    assert (report.settings["num_device_blocks"], stats.num_blocks["device"]) == (24, 24)


def test_same_options_give_the_same_run(report: Report) -> None:
    again = make_report(SMALL)
    assert replace(again, seconds=0.0) == replace(report, seconds=0.0)


def test_damaged_blocks_are_all_detected_and_tokens_stay_identical() -> None:
    report = make_report(replace(SMALL, corrupt=20))
    assert report.differences == []
    assert report.damage is not None
    assert report.damage.detected == report.damage.read >= 1
    assert report.damage.read <= report.damage.stored <= 20
    assert report.swap_store.checksum_failures == report.damage.detected
    assert report.scheduler.lost >= 1
    assert report.exit_code == 0


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_device_blocks": 384},
        {"block_size": 7, "num_device_blocks": 54, "num_lookahead_tokens": 3},
    ],
)
def test_neither_block_size_nor_drafts_show_in_the_tokens(options: dict[str, int]) -> None:
    assert make_report(replace(SMALL, **options)).differences == []  # type: ignore[arg-type]


def test_a_run_shows_its_progress_writes_its_json_and_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    path = tmp_path / "report.json"
    sizes = ("--requests", "2", "--num-device-blocks", "26", "--num-host-blocks", "6", "--device", "cpu")
    assert main(["demo", *sizes, "--format", "json", "--output", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "paged run: 2 of 2, 0 running, 0 swapped, blocks " in printed.err
    assert "comparing with the unpaged model: 2 of 2\n" in printed.err
    loaded = json.loads(path.read_text())
    assert loaded["identical"] is True
    assert (loaded["settings"]["num_device_blocks"], loaded["identical_requests"]) == (26, 2)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_without_a_host_tier_blocks_go_to_the_file_whose_folder_stays(tmp_path: Path) -> None:
    report = make_report(replace(SMALL, num_host_blocks=0, swap_store=f"file://{tmp_path}?size=4MiB"))
    assert report.differences == []
    assert report.manager.swapped_out_blocks["external"] > report.manager.swapped_out_blocks["host"] == 0
    assert report.manager.swapped_in_blocks["external"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_mode_decides_what_becomes_of_victims(mode: str) -> None:
    options = replace(SMALL, preemption_mode=mode)  # type: ignore[arg-type]
    report = make_report(options)
    assert report.differences == []
    swapped = report.scheduler.preempted_swap_host + report.scheduler.preempted_swap_external
    # A victim whose blocks are still moving cannot be swapped: it is computed again.
    recomputed = report.scheduler.preempted_recompute
    assert swapped > 5 * recomputed if mode == "swap" else recomputed > swapped == 0


def test_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfBlocksError, match=r"needs up to \d+ device blocks .* there are 2"):
        make_report(replace(SMALL, num_device_blocks=2))


def test_bad_options_are_refused_before_any_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"there is no config\.json"):
        make_report(replace(SMALL, model=tmp_path))
    with pytest.raises(StoreURLError, match="has no scheme"):
        make_report(replace(SMALL, swap_store="/tmp/swap"))
    with pytest.raises(StoreURLError, match="2G"):
        make_report(replace(SMALL, swap_store="file:///tmp?size=2G"))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5"])
def test_models_with_windows_and_states_have_identical_tokens_from_host_and_file(name: str) -> None:
    sizes = {"requests": 6, "prompt_tokens": (16, 48), "output_tokens": (24, 40)}
    small = replace(SMALL, num_device_blocks=36, num_host_blocks=8, preemption_mode="swap", **sizes)  # type: ignore[arg-type]
    report = make_report(replace(small, model=Path(name)))
    assert (report.identical_requests, report.requests) == (6, 6)
    check_that_blocks_went_every_way(report)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5"])
def test_another_process_with_windows_and_states_continues_from_the_store(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "read_text", read_text)  # that of both processes
    lengths = {"requests": 4, "prompt_tokens": (40, 64), "output_tokens": (4, 8), "num_host_blocks": 24}
    options = replace(SMALL, model=Path(name), prefix_store=f"file://{tmp_path}/kv?size=16MiB", **lengths)  # type: ignore[arg-type]
    first = make_report(options)
    (tmp_path / "options").write_bytes(pickle.dumps(options))
    program = "import pickle, sys; from blockyard.tools.demo.run import make_report\n"
    program += "report = make_report(pickle.load(open(sys.argv[1], 'rb')))\n"
    program += "print(report.scheduler.cached_tokens, report.identical_requests)"
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "options")], check=True, capture_output=True, text=True
    )
    cached, identical = map(int, found.stdout.split())
    assert (first.scheduler.cached_tokens, cached > 0) == (0, True)
    assert (first.identical_requests, identical) == (4, 4)


def test_every_model_with_a_name_can_be_made() -> None:
    assert tuple(DEMO_CONFIGS) == run.OWN_MODELS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5"])
def test_default_run_of_models_with_windows_and_states_is_identical_48_of_48(name: str) -> None:
    report = make_report(DemoOptions(device="cpu", model=Path(name)))
    assert (report.identical_requests, report.requests) == (48, 48)
    check_that_blocks_went_every_way(report)


@pytest.mark.parametrize("seed", range(4))
def test_default_pools_send_blocks_every_way(seed: int) -> None:
    """Lengths alone decide what the scheduler does, so no model is needed to see it."""
    options = DemoOptions(seed=seed)
    items = text_workload(
        serve.read_text(),
        options.requests,
        seed=seed,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    device, host = pool_sizes(options, items)
    manager = BlockManager(block_size=16, device_blocks=device, host_blocks=host, external_blocks=512)
    scheduler = Scheduler(manager, max_num_seqs=options.max_num_seqs)
    for item in items:
        scheduler.add(Request(item.request_id, item.prompt.tolist(), item.sampling.max_tokens, n=item.sampling.n))
    ways = set()
    token = 0
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        ways |= {(kind, pairs.src, pairs.dst) for kind, pairs in step.decision.transfers()}
        scheduler.complete(step.decision.ticket)
        token += 1
        scheduler.update(step, [token % 251 + draw.sequence for draw in step.draws()])
    assert {way for way in ways if "external" in way} == {
        ("swap_out", "device", "external"),
        ("swap_in", "external", "device"),
    }
    assert {kind for kind, *_ in ways} == {"swap_out", "swap_in", "copy"}
    assert scheduler.stats().preempted_recompute > 0
    manager.check()


def test_pool_sizes_asked_for_are_kept() -> None:
    items = text_workload(serve.read_text(), 3, prompt_tokens=(20, 20), output_tokens=(20, 20))
    assert pool_sizes(replace(SMALL, num_device_blocks=99, num_host_blocks=0), items) == (99, 0)


def test_pools_hold_the_largest_request() -> None:
    items = text_workload(serve.read_text(), 2, prompt_tokens=(33, 33), output_tokens=(31, 31))
    device, host = pool_sizes(DemoOptions(), items)
    assert device >= 2 + 2 * 2  # request 1 has two sequences: two whole blocks shared, two more each
    assert host >= 2


@pytest.mark.slow
def test_default_run_is_identical_48_of_48() -> None:
    report = make_report(DemoOptions(device="cpu"))
    assert (report.identical_requests, report.requests) == (48, 48)
    check_that_blocks_went_every_way(report)
    assert report.scheduler.preempted_recompute > 0
