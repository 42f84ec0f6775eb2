"""A run whose device pool becomes smaller half-way: tokens as before, and memory that is really gone."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.generator import Generator
from blockyard.tools.demo.demo_model import demo_model
from blockyard.tools.demo.pool import PoolReport
from blockyard.tools.demo.report import Report, print_report
from blockyard.tools.demo.run import DemoOptions, make_report
from blockyard.tools.demo.shrink import PoolWatch

OPTIONS = DemoOptions(
    device="cpu",
    requests=16,
    prompt_tokens=(16, 96),
    output_tokens=(32, 96),
    num_device_blocks=48,
    num_host_blocks=6,
    defrag="max_id",
    shrink_to=24,
)
BLOCK_BYTES = 65536


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(OPTIONS)


def test_tokens_are_identical_though_half_of_the_pool_went(report: Report) -> None:
    assert report.identical
    assert report.pool is not None
    shrink = report.pool.shrink
    assert shrink is not None
    assert (shrink.blocks_before, shrink.blocks_after) == (48, 24)
    assert shrink.steps is not None


def test_what_was_given_back_left_the_resident_set(report: Report) -> None:
    assert report.pool is not None
    shrink = report.pool.shrink
    assert shrink is not None
    assert (shrink.memory, shrink.returned, shrink.kept) == ("resident set", 24 * BLOCK_BYTES, 0)
    assert shrink.fell == pytest.approx(shrink.returned, rel=0.2)


def test_blocks_moved_out_of_the_way_and_the_gap_was_watched(report: Report) -> None:
    assert report.pool is not None
    assert report.blocks("move") > 0
    assert 0 < report.pool.mean_gap <= report.pool.max_gap < 48


def test_the_report_shows_the_pool_before_and_after(report: Report) -> None:
    assert report.exit_code == 0
    stream = io.StringIO()
    print_report(report, stream)
    text = stream.getvalue()
    assert re.search(r"device pool shrunk +. 48 to 24 blocks at step \d+, finished \d+ steps later", text)
    assert re.search(r"memory released +. 1572864 bytes; resident set fell by \d+ bytes immediately", text)
    assert text.splitlines()[-1].endswith("16/16")


def test_a_pool_that_the_largest_request_does_not_fit_is_refused_with_the_numbers() -> None:
    wanted = r"shrink to 3 blocks, of which 0 stay free, but the largest request needs \d+"
    with pytest.raises(InvalidArgumentError, match=wanted):
        make_report(replace(OPTIONS, shrink_to=3))


def test_a_pool_cannot_shrink_to_what_it_has() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot shrink to 48 blocks, it has 48"):
        make_report(replace(OPTIONS, shrink_to=48))


def test_a_dense_pool_ends_its_shrink_at_once_where_blocks_may_move() -> None:
    report = make_report(replace(OPTIONS, requests=6, defrag="dense", prefix_caching=False))
    assert report.identical
    assert report.pool is not None
    assert report.pool.shrink is not None
    assert report.pool.shrink.steps is not None
    assert report.blocks("move") > 0


def test_a_goal_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="goal is 'upwards', must be one of max_id, dense"):
        make_report(replace(OPTIONS, defrag="upwards"))


def test_a_watch_without_a_new_size_only_notes_the_gap() -> None:
    with Generator(demo_model(), device_blocks=8, host_blocks=0) as generator:
        watch = PoolWatch(generator, goal="max_id")
        generator.add("a", [1, 2, 3], SamplingParams(max_tokens=3))
        while generator.num_unfinished:
            generator.step()
            watch.after_step(0, 1)
        report = watch.report()
    assert report == PoolReport("max_id", 0.0, 0, None)
