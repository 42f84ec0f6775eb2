"""What the report of a demo run says of its device pool."""

from __future__ import annotations

from dataclasses import replace

from blockyard.tools.demo.pool import PoolReport, Shrink, pool_rows

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


def test_rows_say_the_figures_in_bytes() -> None:
    table = dict(pool_rows(PoolReport("max_id", 2.0, 3, SHRINK)))
    assert table["device pool, gap below the highest block in use"] == "mean 2.0, maximum 3 blocks; goal max_id"
    assert table["device pool shrunk"] == "8 to 4 blocks at step 2, finished 1 steps later"
    assert table["resident set before and after"] == "5000 and 4500 bytes"
    assert table["memory released"] == "400 bytes; resident set fell by 400 bytes immediately"
    assert table["memory kept in shared chunks"] == "0 bytes"
    unended = PoolReport("max_id", 2.0, 3, replace(SHRINK, steps=None))
    assert "not finished in this run" in dict(pool_rows(unended))["device pool shrunk"]


def test_a_pool_that_did_not_shrink_has_its_gap_alone() -> None:
    ((_, figures),) = pool_rows(PoolReport(None, 0.0, 0, None))
    assert figures == "mean 0.0, maximum 0 blocks; goal none"
