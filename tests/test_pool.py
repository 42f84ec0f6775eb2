"""The picture of the device pool, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blockyard.sim.pool import PoolReport, PoolSample, Shrink, draw_bar, draw_pool, pool_rows, sample_pool


def uses(text: str) -> np.ndarray:
    return np.array(["fchl".index(letter) for letter in text], dtype=np.uint8)


def sample(step: int, text: str, *, blocks: int = 8, moves: int = 0) -> PoolSample:
    return sample_pool(
        step, uses(text), blocks=blocks, capacity=8, moves=moves, block_bytes=100, memory_bytes=100 * len(text)
    )


SHRINK = Shrink(
    blocks_before=8,
    blocks_after=4,
    step=2,
    steps=1,
    memory="resident set",
    memory_before=5000,
    memory_after=4500,
    returned=400,
    fell=400,
    kept=0,
)
REPORT = PoolReport(
    "max_id", SHRINK, [sample(1, "llfllffl"), sample(2, "llfllffl"), sample(3, "llll", blocks=4, moves=3)]
)


def test_a_sample_counts_blocks_by_use() -> None:
    found = sample(7, "lfchlfff", moves=2)
    assert (found.live, found.held, found.cached, found.free) == (2, 1, 1, 4)
    assert (found.max_id, found.gap, found.extent, found.moved_bytes, found.memory_bytes) == (4, 2, 8, 200, 800)
    empty = sample(8, "ffff", blocks=4)
    assert (empty.max_id, empty.gap, empty.bar) == (-1, 0, "....    ")


@pytest.mark.parametrize(
    ("text", "capacity", "columns", "bar"),
    [
        ("llfffclhfl", 10, 10, "##...o##.#"),
        ("llllfffc", 16, 4, "#o  "),
        ("llllllflffflffff", 16, 4, "#+-."),
        ("l", 3, 64, "#  "),
    ],
)
def test_a_bar_shows_shares_and_what_was_given_back(text: str, capacity: int, columns: int, bar: str) -> None:
    assert draw_bar(uses(text), capacity, columns) == bar


def test_the_picture_has_the_pool_before_and_after() -> None:
    lines = draw_pool(REPORT)
    assert lines == [
        "    1 |##.##..#| max id    7 gap    3 moves    0",
        "    2 |##.##..#| max id    7 gap    3 moves    0  before: 8 blocks",
        "    3 |####    | max id    3 gap    0 moves    3  after: 4 blocks",
    ]


def test_a_long_run_is_cut_to_few_lines_and_keeps_the_steps_of_the_shrink() -> None:
    samples = [sample(step, "llff") for step in range(1, 1001)]
    shrink = replace(SHRINK, step=501, steps=33)
    lines = draw_pool(PoolReport(None, shrink, samples), rows=5)
    assert [int(line.split()[0]) for line in lines] == [1, 251, 501, 534, 750, 1000]
    assert lines[2].endswith("before: 8 blocks")
    assert lines[3].endswith("after: 4 blocks")
    assert draw_pool(PoolReport(None, None, [])) == []


def test_a_shrink_within_one_step_is_shown_twice() -> None:
    samples = [sample(1, "llffffff"), sample(1, "llff", blocks=4)]
    lines = draw_pool(PoolReport(None, replace(SHRINK, step=1, steps=0), samples))
    assert [line.rpartition("  ")[2] for line in lines] == ["before: 8 blocks", "after: 4 blocks"]


def test_rows_say_the_figures_in_bytes() -> None:
    table = dict(pool_rows(REPORT))
    assert table["device pool, gap below the highest block in use"] == "mean 2.0, most 3 blocks"
    assert table["moved within the device, goal max_id"] == "3 blocks, 300 bytes"
    assert table["device pool shrunk"] == "8 to 4 blocks at step 2, ended 1 steps later"
    assert table["resident set before and after"] == "5000 and 4500 bytes"
    assert table["memory given back"] == "400 bytes; resident set fell by 400 bytes at once"
    unended = PoolReport(None, replace(SHRINK, steps=None), REPORT.samples)
    assert "not ended in this run" in dict(pool_rows(unended))["device pool shrunk"]
    assert len(draw_pool(unended)) == 3
