"""Schedulers over page classes whose device is resized: what `add` accepts ends, and all runs are alike."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from arena_program import ArenaProgram
from hypothesis import settings

SUPPORT = Path(__file__).parents[1] / "support"
OPERATIONS = 118
"""Those of a program, on average."""
FEW = [*range(140), 193, 267, 288, 388, 399, 1162]
PARTS = 5


@pytest.fixture(scope="module")
def programs() -> Sequence[int]:
    """Seeds of programs that have BLOCKYARD_OPERATIONS in all, half of them with pins; or many; or few."""
    if asked := os.environ.get("BLOCKYARD_OPERATIONS"):
        return range(max(len(FEW), int(asked) // OPERATIONS // 2 + 1))
    return range(4000) if settings().max_examples >= 1000 else FEW


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("pins", [False, True], ids=["", "pins"])
def test_what_a_scheduler_accepts_ends_whatever_the_sizes_of_its_device_were_before(
    programs: Sequence[int], pins: bool, part: int
):
    counts: Counter[str] = Counter()
    for seed in programs[part::PARTS]:
        program = ArenaProgram(seed, pins=pins)
        program.run()
        assert not program.scheduler.num_unfinished, f"program {seed}: {program.counts}"
        counts += program.counts
    met = ("finished", "refused", "shrunk away", "alone", *(["pinned", "pinned alone"] if pins else []))
    assert min(counts[name] for name in met) > 0, counts


def test_the_same_program_decides_the_same_in_another_process_at_the_same_times():
    program = "import sys; from arena_program import ArenaProgram\nfor seed in range(40):\n"
    program += "    it = ArenaProgram(seed)\n    it.run()\n    print(it.digest.hexdigest(), it.counts)"

    def output(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONPATH": f"{SUPPORT}", "PYTHONHASHSEED": hash_seed}
        made = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
        )
        return made.stdout

    first, second = output("1"), output("2")
    assert len(first.splitlines()) == 40
    assert first == second
