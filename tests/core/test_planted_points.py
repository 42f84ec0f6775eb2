"""Faults planted in what groups need and in resume points: the core's byte model finds each in seconds."""

from pathlib import Path

import planted_points
import pytest
from planted_points import FAULTS

CASES = 20_000
"""Random programs that may be run to find a fault; `python tests/support/planted_points.py` prints the seconds."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    planted_points.plant(folder)
    return planted_points.build_core_machine(folder)


def test_a_fault_changes_one_place(tmp_path: Path):
    planted_points.plant(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_a_planted_fault_is_found(machine: Path, number: int):
    assert planted_points.search_core(machine, number, 0, CASES) is not None


@pytest.mark.slow
def test_without_a_fault_nothing_is_found(machine: Path):
    assert planted_points.search_core(machine, -1, 0, 3000) is None
