"""Changes the Rust core and store in small ways and counts how many changes their tests catch.

python buildsystem/mutants/run.py CARGO_MUTANTS N SEED

cargo-mutants makes the changes: it swaps an operator, or makes a function return at once. N of them are sampled by
SEED, from each file in proportion to its number of mutants. All run in one copy of the sources, so each rebuilds only
one crate.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
EXPLAINED = HERE / "explained.txt"
WORK = ROOT / ".make" / "mutants"
COPY = WORK / "sources"
KEPT = WORK / "outcomes.json"
SOURCES = ("Cargo.toml", "Cargo.lock", "rust")
PACKAGES = ("--package", "blockyard-core", "--package", "blockyard-store")
# Without inlining, a mutant rebuilds little more than its own function. The libraries that tests use stay fast.
CARGO_ARGUMENTS = ("--config", 'profile.test.package."*".opt-level=2')
ENVIRONMENT = {
    "CARGO_TARGET_DIR": str(WORK / "target"),
    "CARGO_INCREMENTAL": "1",
    "CARGO_PROFILE_TEST_DEBUG": "0",
    "CARGO_PROFILE_TEST_OPT_LEVEL": "0",
    "PROPTEST_MAX_SHRINK_ITERS": "0",
    "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true",
}
# Most mutants are caught by the unit tests, which build and run fastest; all tests run for the others.
STAGES = (("--lib", 32), ("--tests", 64))
MISSED = "MissedMutant"
# A mutant may allocate or write endlessly.
LIMITS = {resource.RLIMIT_AS: 8 << 30, resource.RLIMIT_FSIZE: 2 << 30}


@dataclass(frozen=True)
class Mutant:
    """A change, with a name that does not depend on line numbers."""

    name: str
    file: str
    title: str


def list_mutants(tool: str) -> list[Mutant]:
    """Ask cargo-mutants for all mutants of the copy."""
    listed: list[dict[str, Any]] = json.loads(run_tool(tool, "--list", "--json", capture=True))
    texts = {file: (COPY / file).read_text(encoding="utf-8").splitlines() for file in {one["file"] for one in listed}}
    seen: Counter[str] = Counter()
    mutants = []
    for one in listed:
        file, name = one["file"], one["name"]
        what = re.sub(r"^[^ ]+ ", "", name)
        line = texts[file][one["span"]["start"]["line"] - 1].strip()
        title = f"{file}: {what}: {line}"
        seen[title] += 1
        if seen[title] > 1:
            title += f" ({seen[title]})"
        mutants.append(Mutant(name, file, title))
    return mutants


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose mutants in proportion to each file's number. A larger sample contains the smaller ones of its seed."""
    files: dict[str, list[tuple[str, Mutant]]] = defaultdict(list)
    for mutant in mutants:
        files[mutant.file].append((digest(f"{seed} {mutant.title}"), mutant))
    ranked = []
    for file, found in files.items():
        shift = int(digest(f"{seed} {file}")[:8], 16) / (1 << 32)
        for rank, (_, mutant) in enumerate(sorted(found, key=lambda pair: pair[0])):
            ranked.append(((rank + shift) / len(found), mutant))
    return [mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0])[:count]]


def explained(mutants: Iterable[Mutant]) -> set[str]:
    """Read the mutants that no test can catch. Entries that name no mutant are an error."""
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines()
    titles = {line.strip() for line in lines if line.startswith(" ")}
    if stale := titles - {mutant.title for mutant in mutants}:
        sys.exit("\n".join([f"{EXPLAINED.name}: no such mutant:", *sorted(stale)]))
    return titles


def digest(text: str) -> str:
    """Return a fixed hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def update_copy() -> None:
    """Make the copy equal to the sources. Files that have not changed keep their times, so cargo does too."""
    tops = [ROOT / name for name in SOURCES]
    files = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top]) if path.is_file()]
    wanted = {name for path in files if "target" not in (name := path.relative_to(ROOT)).parts}
    for path in [path for path in COPY.rglob("*") if path.is_file()]:
        if path.relative_to(COPY) not in wanted:
            path.unlink()
    for name in wanted:
        source, copy = (ROOT / name).read_bytes(), COPY / name
        if not copy.exists() or copy.read_bytes() != source:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source)


def run_tool(tool: str, *arguments: str, capture: bool = False, variables: Mapping[str, str] | None = None) -> str:
    """Run cargo-mutants in the copy; return its output if it is captured."""
    command = [tool, "mutants", "--dir", str(COPY), "--config", str(HERE / "config.toml"), *PACKAGES, *arguments]
    env = {**os.environ, **ENVIRONMENT, **(variables or {})}
    done = subprocess.run(command, env=env, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    # 2: mutants were missed, 3: some timed out. Both are results.
    if done.returncode not in {0, 2, 3}:
        sys.exit(f"cargo-mutants failed with exit code {done.returncode}")
    return done.stdout or ""


def test_mutants(tool: str, stage: tuple[str, int], mutants: Iterable[Mutant], others: Iterable[Mutant]) -> None:
    """Run some tests for each mutant and keep the outcomes."""
    tests, cases = stage
    results = WORK / "mutants.out" / "outcomes.json"
    shutil.rmtree(results.parent, ignore_errors=True)
    results.parent.mkdir()
    # Filters by name do not work for all kinds of mutants, so the others are listed as caught before and skipped.
    names = "".join(f"{mutant.name}\n" for mutant in others)
    (results.parent / "previously_caught.txt").write_text(names, encoding="utf-8")
    try:
        run_tool(
            tool,
            *("--in-place", "--iterate", "--output", str(WORK)),
            *(f"--cargo-arg={argument}" for argument in (tests, *CARGO_ARGUMENTS)),
            *("--timeout-multiplier", "4", "--minimum-test-timeout", "40"),
            variables={"PROPTEST_CASES": str(cases)},
        )
    finally:
        # Also the outcomes of an interrupted run.
        if results.exists():
            titles = {mutant.name: mutant.title for mutant in mutants}
            outcomes = json.loads(results.read_text(encoding="utf-8"))["outcomes"]
            ran = [outcome for outcome in outcomes if outcome["scenario"] != "Baseline"]
            keep({titles[outcome["scenario"]["Mutant"]["name"]]: outcome["summary"] for outcome in ran})


def kept() -> dict[str, str]:
    """Return the outcomes of mutants whose file has not changed. Missed mutants run again."""
    if not KEPT.exists():
        return {}
    entries: dict[str, list[str]] = json.loads(KEPT.read_text(encoding="utf-8"))
    return {title: outcome for title, (outcome, version) in entries.items() if version == version_of(title)}


def keep(found: Mapping[str, str]) -> None:
    """Save outcomes for the next run."""
    entries = {title: [outcome, version_of(title)] for title, outcome in {**kept(), **found}.items()}
    KEPT.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")


def version_of(title: str) -> str:
    """Return the hash of the file that a mutant changes."""
    path = COPY / title.split(":", 1)[0]
    return digest(path.read_text(encoding="utf-8")) if path.exists() else ""


def main(tool: str, count: int, seed: int) -> int:
    """Sample mutants, test them, and print a summary."""
    for limit, most in LIMITS.items():
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    update_copy()
    mutants = list_mutants(tool)
    left_out = explained(mutants)
    chosen = sample((mutant for mutant in mutants if mutant.title not in left_out), count, seed)
    print(f"{len(mutants)} mutants, {len(left_out)} explained, {len(chosen)} chosen", flush=True)
    for stage, left in zip(STAGES, (None, MISSED), strict=True):
        outcomes = kept()
        if todo := {mutant for mutant in chosen if outcomes.get(mutant.title) == left}:
            test_mutants(tool, stage, todo, set(mutants) - todo)
    outcomes = kept()
    results = {mutant: outcomes[mutant.title] for mutant in chosen if mutant.title in outcomes}
    missed = [mutant for mutant, outcome in results.items() if outcome == MISSED]
    viable = sum(outcome != "Unviable" for outcome in results.values())
    for mutant in missed:
        print(f"missed: {mutant.name}\n        {mutant.title}")
    print(f"caught {viable - len(missed)} of {viable} viable")
    return 0 if len(missed) <= 0.05 * viable else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
