"""Runs many seeds of a fleet, and shrinks a failure to the fewest faults that still cause it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

from blockyard.tools.sim.fleet.faults import FAULTS, Fault
from blockyard.tools.sim.fleet.fleet import FleetOptions, FleetReport, digest_of, simulate_fleet
from blockyard.tools.sim.fleet.log import BlockCounts
from blockyard.tools.timeline import Timeline
from blockyard.workers.interrupts import interrupts_blocked

__all__ = ["Campaign", "run_campaign", "shrink"]

_AT_ONCE: Final = 8  # seeds handed to a process at a time


@dataclass
class Campaign:
    """The results of many seeds.

    Attributes:
        options: the options of every fleet.
        num_seeds: number of seeds that were run.
        num_operations: number of calls by all engines of all seeds.
        faults: how often each kind of fault happened.
        reasons: the reasons of all blocks read or written, "" for success.
        blocks: what the engines of each seed read and wrote.
        digest: digest of all logs, in the order of the seeds.
        failure: the run that broke a promise, with the fewest faults that break it; None if none did.
    """

    options: FleetOptions
    num_seeds: int = 0
    num_operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    blocks: list[BlockCounts] = field(default_factory=list)
    digest: str = ""
    failure: FleetReport | None = None

    def replay_command(self) -> str:
        """Return the command that repeats the failure, "" if there is none."""
        if self.failure is None:
            return ""
        faults = ",".join(map(str, self.failure.faults)) or "none"
        options, work = self.options, self.options.work_of(self.failure.seed)
        model = f" --model {options.model}" if work == "serving" else ""
        return (
            f"blockyard simulate --store {options.store_of(self.failure.seed)} "
            f"--work {work}{model} --engines {options.engines} "
            f"--seconds {options.seconds:g} --seed {self.failure.seed} "
            f"--replay {shlex.quote(faults)}"
        )

    def show_blocks(self) -> str:
        """Return what the stores were worth: blocks found, computed again and not stored, with the range by seed."""
        counts = self._counts()
        shares = [each.found / each.read for each in self.blocks if each.read] or [0.0]
        again, read, written = counts["computed_again"], sum(counts["read"]), sum(counts["written"])
        lost = [each.written - each.stored for each in self.blocks] or [0]
        return (
            f"read: {sum(counts['found'])} of {read} blocks found ({min(shares):.1%} to {max(shares):.1%} by seed)\n"
            f"computed again: {sum(again)} blocks that the store had before ({min(again)} to {max(again)} by seed)\n"
            f"not stored: {sum(lost)} of {written} blocks ({min(lost)} to {max(lost)} by seed)"
        )

    def _counts(self) -> dict[str, list[int]]:
        """Return each count of every seed, by name."""
        blocks = self.blocks or [BlockCounts()]
        return {one.name: [getattr(each, one.name) for each in blocks] for one in fields(BlockCounts)}

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        found: dict[str, Any] = {
            "work": self.options.work,
            "store": self.options.store,
            "model": self.options.model,
            "engines": self.options.engines,
            "seconds": self.options.seconds,
            "num_seeds": self.num_seeds,
            "num_operations": self.num_operations,
            "faults": {kind: self.faults[kind] for kind in FAULTS},
            "blocks": {reason or "ok": count for reason, count in sorted(self.reasons.items())},
            "counts": {name: {"sum": sum(of), "by_seed": [min(of), max(of)]} for name, of in self._counts().items()},
            "digest": self.digest,
            "failure": None,
        }
        if self.failure is not None:
            found["failure"] = {
                "seed": self.failure.seed,
                "broken": self.failure.broken,
                "faults": [str(fault) for fault in self.failure.faults],
                "replay": self.replay_command(),
                "log": self.failure.log,
            }
        return found


def run_campaign(
    seeds: Iterable[int],
    options: FleetOptions,
    *,
    faults: list[Fault] | None = None,
    jobs: int = 1,
    show: Callable[[int], object] = bool,
) -> Campaign:
    """Run one fleet per seed, until one breaks a promise. The result does not depend on `jobs`.

    Args:
        seeds: seeds of the fleets.
        options: options of every fleet.
        faults: used instead of drawn faults; None draws them.
        jobs: number of processes. They are spawned: a script needs `if __name__ == "__main__"`.
        show: called with the number of seeds that are done.
    """
    found, digests = Campaign(options), list[str]()
    with _reports(list(seeds), partial(_run, options=options, faults=faults), jobs) as reports:
        for report in reports:
            found.num_seeds += 1
            found.num_operations += report.num_operations
            found.faults.update(fault.kind for fault in report.faults)
            found.reasons.update(report.reasons)
            found.blocks.append(report.blocks)
            digests.append(report.digest)
            show(found.num_seeds)
            if report.broken:
                found.failure = shrink(report, options)
                break
    found.digest = digest_of(digests)
    return found


def _run(seed: int, options: FleetOptions, faults: list[Fault] | None) -> FleetReport:
    report = simulate_fleet(seed, options, faults)
    if not report.broken:
        # They are not needed, and would be most of the data that a process sends.
        report.log, report.timeline = [], Timeline()
    return report


@contextmanager
def _reports(seeds: list[int], run: Callable[[int], FleetReport], jobs: int) -> Iterator[Iterable[FleetReport]]:
    """Yield the reports of seeds, in order."""
    jobs = min(jobs, -(-len(seeds) // _AT_ONCE))
    if jobs <= 1:
        yield map(run, seeds)
        return
    with ExitStack() as stack:
        with interrupts_blocked():
            pool = stack.enter_context(get_context("spawn").Pool(jobs))
        yield pool.imap(run, seeds, _AT_ONCE)


def shrink(report: FleetReport, options: FleetOptions) -> FleetReport:
    """Remove faults one by one until every remaining fault is needed to break a promise."""
    place = 0
    while place < len(report.faults):
        fewer = report.faults[:place] + report.faults[place + 1 :]
        again = simulate_fleet(report.seed, options, fewer)
        # A fault that was needed before may be unneeded now.
        report, place = (again, 0) if again.broken else (report, place + 1)
    return report
