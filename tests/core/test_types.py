"""Types that have behaviour of their own."""

import pytest

from blockyard.types import Histogram


def test_a_duration_counts_in_the_first_range_that_it_does_not_exceed():
    found = Histogram()
    for seconds in (0.0, 0.0001, 0.00011, 10.0, 10.1, 600.0):
        found.observe(seconds)
    assert (found.counts[:2], found.counts[-2:], sum(found.counts)) == ([2, 1], [1, 2], 6)
    assert found.sum == pytest.approx(620.10021)
    assert len(found.counts) == len(found.bounds) + 1
    assert Histogram().counts is not Histogram().counts
