"""Schedulers over page classes whose device is resized: no byte is wrong, what `add` accepts ends, runs are alike."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from arena_memory import ArenaMemory
from arena_program import ArenaProgram
from hypothesis import settings

SUPPORT = Path(__file__).parents[1] / "support"
OPERATIONS = 118
"""Those of a program, on average."""
FEW = [*range(140), 193, 267, 288, 388, 399, 1162]
PARTS = 5


@pytest.fixture(scope="module")
def programs() -> Sequence[int]:
    """Seeds of programs that have BLOCKYARD_OPERATIONS in all, each in three ways; or many; or few."""
    if asked := os.environ.get("BLOCKYARD_OPERATIONS"):
        others = set(range(int(asked) // OPERATIONS // 3 + 1)).difference(FEW)
        return [*FEW, *sorted(others)]  # each part has its few, which meet what is rare
    return range(4000) if settings().max_examples >= 1000 else FEW


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("option", ["", "pins", "late"])
def test_what_a_scheduler_accepts_ends_and_no_byte_is_wrong_whatever_the_sizes_of_its_device_were_before(
    programs: Sequence[int], option: str, part: int
):
    counts: Counter[str] = Counter()
    for seed in programs[part::PARTS]:
        program = ArenaProgram(seed, **({option: True} if option else {}))
        program.run()
        assert not program.scheduler.num_unfinished, f"program {seed}: {program.counts}"
        counts += program.counts + program.memory.counts
    rare = {"": ["alone", "move"], "pins": ["alone", "move", "pinned", "pinned alone"], "late": ["late", "one class"]}
    met = ["finished", "refused", "shrunk away", "words", "extents", "swap_out", "swap_in", "copy", *rare[option]]
    assert min(counts[name] for name in met) > 0, counts


END, CELLS = ArenaMemory.end, ArenaMemory._cells


def reads_after_its_ticket(self: Any, ticket: int) -> None:
    """The manager gives blocks and extents away that copies still read."""
    late = [copy for copy in self._running[ticket] if copy.reads_device and copy.row is None]
    self._running[ticket] = [copy for copy in self._running[ticket] if copy not in late]
    END(self, ticket)
    for copy in self.__dict__.get("late", ()):
        copy.land()
    self.late = late


def of_another_class(self: Any, group: int) -> Any:
    return CELLS(self, (group + 1) % len(self._groups))


def at_once(self: Any) -> None:
    if not self.split:
        self.memory.forget_behind(self.manager.defrag.progress().blocks)


FAULTS: dict[str, tuple[type, str, Any]] = {
    "copies read after their tickets": (ArenaMemory, "end", reads_after_its_ticket),
    "ids count in the units of another class": (ArenaMemory, "_cells", of_another_class),
    "memory goes before the device has shrunk": (ArenaProgram, "forget", at_once),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*FAULTS[fault])

    def reads_wrong(seed: int) -> bool:
        try:
            ArenaProgram(seed).run()
        except (AssertionError, IndexError) as error:
            return "reads wrong bytes" in str(error)
        return False

    assert any(map(reads_wrong, range(140)))


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
