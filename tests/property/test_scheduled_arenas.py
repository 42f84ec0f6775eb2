"""Schedulers over page classes whose device is resized: what `add` accepts ends, and all runs are alike."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from arena_program import ArenaProgram
from hypothesis import settings

PROGRAMS = range(4000) if settings().max_examples >= 1000 else [*range(140), 193, 267, 288, 388, 399]
SUPPORT = Path(__file__).parents[1] / "support"


def test_what_a_scheduler_accepts_ends_whatever_the_sizes_of_its_device_were_before():
    counts: Counter[str] = Counter()
    for seed in PROGRAMS:
        program = ArenaProgram(seed)
        program.run()
        assert not program.scheduler.num_unfinished, f"program {seed}: {program.counts}"
        counts += program.counts
    assert min(counts[name] for name in ("finished", "refused", "shrunk away", "alone")) > 0, counts


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
