"""The lists of planted faults and of explained mutants fit the sources."""

import ast
import re
from pathlib import Path

import pytest

from mutants.python_faults import PlantedFault, all_faults

ROOT = Path(__file__).resolve().parents[2]

FAULTS = list(all_faults())
EXPLAINED = (ROOT / "buildsystem" / "mutants" / "explained.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}-{fault.original.strip()[:40]}")
def test_a_fault_changes_one_place_of_its_file_and_names_tests(fault: PlantedFault):
    text = (ROOT / "python" / "blockyard" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.original) == 1
    assert fault.faulty != fault.original
    ast.parse(text.replace(fault.original, fault.faulty))
    assert all((ROOT / "tests" / test).is_file() for test in fault.tests)


def test_no_fault_is_listed_twice_and_each_part_has_some():
    assert len({fault[:3] for fault in FAULTS}) == len(FAULTS) >= 60
    parts = {fault.file.split("/")[0] for fault in FAULTS}
    assert parts == {
        *("engine", "scheduler", "executor", "prefix_store", "cache.py", "integrations", "stores"),
        *("progress.py", "tools"),
    }


@pytest.mark.parametrize("entry", [line.strip() for line in EXPLAINED if line.startswith(" ")])
def test_an_explained_mutant_changes_a_line_of_its_file(entry: str):
    found = re.fullmatch(r"(\S+): .+?: (.+?)(?: \(\d+\))?", entry)
    assert found, "not `file: change: line`"
    file, line = found.groups()
    assert line in [text.strip() for text in (ROOT / file).read_text(encoding="utf-8").splitlines()]
