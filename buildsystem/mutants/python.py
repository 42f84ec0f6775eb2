"""Plants faults in the Python sources, one at a time, and counts how many the tests catch.

PYTHONPATH=buildsystem python -m mutants.python [N SEED]

`python_faults.py` lists the faults. N of them are sampled by SEED, all by default. Each is planted in a copy of
`python/`; the tests that should catch it run over the copy until one fails.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants.python_faults import PlantedFault, all_faults

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
"""Timeout of a test: a fault that hangs it is caught, too."""
TESTS_FAILED = 1


def run_tests(sources: Path, tests: tuple[str, ...]) -> int:
    """Run test files over a copy of the sources. Returns pytest's exit status."""
    environment = os.environ | {
        "PYTHONPATH": f"{sources}{os.pathsep}{ROOT / 'buildsystem'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow"]
    paths = [str(ROOT / "tests" / test) for test in tests]
    try:
        done = subprocess.run(
            [*command, *paths],
            cwd=ROOT,
            env=environment,
            timeout=SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED
    return done.returncode


def is_caught(sources: Path, fault: PlantedFault) -> bool:
    """Plant a fault, run its tests and remove it again."""
    path = sources / "blockyard" / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.original, fault.faulty), encoding="utf-8")
    try:
        return any(run_tests(sources, (test,)) != 0 for test in fault.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Plant the faults and print the survivors, then how many were caught."""
    faults = list(all_faults())
    count, seed = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else (len(faults), 0)
    chosen = random.Random(seed).sample(faults, min(count, len(faults)))
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "python"
        shutil.copytree(ROOT / "python", sources, ignore=shutil.ignore_patterns("__pycache__"))
        for test in sorted({test for fault in chosen for test in fault.tests}):
            # On a busy machine, a test with a short timeout may fail by chance.
            if run_tests(sources, (test,)) and (status := run_tests(sources, (test,))):
                print(f"{test} ends with {status} without a fault")
                return 1
        for number, fault in enumerate(chosen, 1):
            found = is_caught(sources, fault)
            caught += found
            if not found:
                print(f"missed {fault.file}: {fault.original.strip()!r} -> {fault.faulty.strip()!r}")
            print(f"{number} of {len(chosen)}, {caught} caught", file=sys.stderr, flush=True)
    print(f"caught {caught} of {len(chosen)} viable")
    return 0


if __name__ == "__main__":
    sys.exit(main())
