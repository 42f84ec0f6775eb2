"""The commands: one function each, from the parsed options to a `Result`.

Only the commands that need torch import it, so that bad usage is rejected at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from blockyard._core import check_slab, inspect_slab
from blockyard.progress import Progress, show_progress
from blockyard.tools.cli import recording
from blockyard.tools.cli.result import EXIT_BAD_USAGE, EXIT_OK, EXIT_WRONG, Result
from blockyard.types import SlabReport

__all__ = [
    "calibrate",
    "demo",
    "doctor",
    "fsck",
    "inspect",
    "plan",
    "record",
    "replay",
    "simulate",
]

_MAX_LOGGED: Final = 20
"""Maximum number of log lines shown for a failed simulation; JSON has all."""
_MAX_SHOWN: Final = 20
"""Maximum number of damaged slots listed as text."""
_LOOK_SECONDS: Final = 0.2
"""Seconds between updates of the progress of `fsck`."""


def demo(options: argparse.Namespace) -> Result:
    """Serve a workload from three tiers, and compare every token with the unpaged model."""
    from blockyard.tools.demo import report, run  # noqa: PLC0415 (slow to import)

    fields = {name: getattr(options, name) for name in run.DemoOptions.__dataclass_fields__ if name in options}
    found = run.make_report(run.DemoOptions(**fields), quiet=options.quiet)
    problem = ""
    if found.exit_code == EXIT_BAD_USAGE:
        missed = "damaged block was read" if found.damage else f"{options.sabotage} could be dropped"
        problem = f"no {missed} in this run; give it smaller pools or more requests"
    return Result(found.as_dict(), partial(report.print_report, found), found.exit_code, problem)


def doctor(options: argparse.Namespace) -> Result:
    """Check the installation."""
    from blockyard.tools.doctor import run_doctor, worst  # noqa: PLC0415 (looks for torch)

    with show_progress("doctor", quiet=options.quiet) as view:
        checks = run_doctor(view)

    def show(stream: TextIO) -> None:
        for check in checks:
            print(f"{check.status:<4}  {check.name.replace('_', ' ')}: {check.found}", file=stream)
            if check.advice:
                print(f"      -> {check.advice}", file=stream)

    status = worst(checks)
    data = {"status": status, "checks": [asdict(check) for check in checks]}
    return Result(data, show, EXIT_WRONG if status == "fail" else EXIT_OK)


def calibrate(options: argparse.Namespace) -> Result:
    """Measure the copy strategies of each CUDA device."""
    measure = importlib.import_module("blockyard.engine.cuda.calibrate")  # it imports torch
    found = measure.run_calibrate(partial(show_progress, quiet=options.quiet))

    def show(stream: TextIO) -> None:
        for device in found.devices:
            for line in device.lines:
                print(line, file=stream)
            print(
                f"cuda:{device.index} {device.table.device}: saved to {device.path}; new processes choose their "
                f"copy strategies from it",
                file=stream,
            )
        if found.problem:
            print(found.problem, file=stream)

    devices = [{"index": device.index, "path": str(device.path), **asdict(device.table)} for device in found.devices]
    return Result({"devices": devices, "problem": found.problem}, show, found.exit_code)


def simulate(options: argparse.Namespace) -> Result:
    """Run fleets in virtual time."""
    sim = importlib.import_module("blockyard.tools.sim")  # it needs greenlet
    faults = None if options.replay is None else sim.read_faults(options.replay)
    kinds = {"all": tuple(sim.FAULTS), "none": ()}.get(options.faults, tuple(options.faults.split(",")))
    fleet = sim.FleetOptions(
        engines=options.engines,
        seconds=options.seconds,
        kinds=kinds,
        work=options.work,
        store=options.store,
        model=options.model,
    )
    count = options.seeds if faults is None else 1
    with show_progress("simulate", quiet=options.quiet) as view:
        found = sim.run_campaign(
            range(options.seed, options.seed + count),
            fleet,
            faults=faults,
            jobs=options.jobs or len(os.sched_getaffinity(0)),
            show=lambda done: view.step(done, count, "seeds"),
        )

    def show(stream: TextIO) -> None:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(found.faults.items())) or "none"
        print(f"{found.num_seeds} seeds, {found.num_operations} operations; faults: {faults}", file=stream)
        print(f"log digest {found.digest}", file=stream)
        if found.failure is None:
            print("no promise was broken", file=stream)
            return
        for line in found.failure.log[-_MAX_LOGGED:]:
            print(line, file=stream)
        print(f"seed {found.failure.seed}: {found.failure.broken}", file=stream)
        print(f"replay: {found.replay_command()}", file=stream)

    files = {}
    if options.trace_events:
        shown = found.failure or sim.simulate_fleet(options.seed, fleet, faults)
        files[options.trace_events] = shown.timeline.write_trace_events
    return Result(found.as_dict(), show, EXIT_OK if found.failure is None else EXIT_WRONG, files=files)


def replay(options: argparse.Namespace) -> Result:
    """Replay the prompts of traces through caches."""
    from blockyard.tools.cli import replays  # noqa: PLC0415 (only this command needs the scheduler)

    return replays.replay(options)


def record(options: argparse.Namespace) -> Result:
    """Run a program, and sum up what its engines recorded."""
    return recording.record(options)


def plan(options: argparse.Namespace) -> Result:
    """Find the tiers and policies that are worth their cost."""
    from blockyard.tools.cli import plans  # noqa: PLC0415 (only this command needs it)

    return plans.plan(options)


def inspect(options: argparse.Namespace) -> Result:
    """Read the headers of a store's file."""
    with show_progress("inspect", quiet=options.quiet):
        return _of_slab(inspect_slab(options.path))


def fsck(options: argparse.Namespace) -> Result:
    """Read every block of a store's file."""
    with show_progress("fsck", quiet=options.quiet) as view:
        return _of_slab(_watched(partial(check_slab, options.path, repair=options.repair), options.path, view))


def _watched(work: Callable[[], SlabReport], path: Path, view: Progress) -> SlabReport:
    """Run `work` in a thread, so that Ctrl-C can end it, and show how much of the file has been read."""
    answers: list[SlabReport | BaseException] = []

    def do() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 (raised again below)
            answers.append(error)

    began = _bytes_read()
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            file = next(path.glob("*.slab"), path)
            total = file.stat().st_size
            view.step(min(_bytes_read() - began, total) >> 20, total >> 20, "MiB")
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


def _bytes_read() -> int:
    """Return how many bytes this process has read; 0 if the system does not report it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("rchar:")).split()[1])
    return 0


def _of_slab(report: SlabReport) -> Result:
    data = {
        "path": str(report.path),
        "num_slots": report.num_slots,
        "bytes_per_block": report.bytes_per_block,
        "empty": report.empty,
        "blocks": dict(report.blocks),
        "forgotten": report.forgotten,
        "replaced": report.replaced,
        "damaged": [{"slot": slot, "reason": reason} for slot, reason in report.damaged],
        "wiped": report.wiped,
    }
    return Result(data, partial(_show_slab, report), EXIT_WRONG if report.damaged else EXIT_OK)


def _show_slab(report: SlabReport, stream: TextIO) -> None:
    say = partial(print, file=stream)
    say(f"slab       {report.path}")
    say(f"slots      {report.num_slots} of {report.bytes_per_block} bytes, {report.empty} empty")
    for namespace, count in report.blocks.items():
        say(f"blocks     {count} of namespace {namespace}")
    say(f"forgotten  {report.forgotten}")
    say(f"replaced   {report.replaced}")
    say(f"damaged    {len(report.damaged)}")
    for slot, reason in report.damaged[:_MAX_SHOWN]:
        say(f"           slot {slot}: {reason}")
    if len(report.damaged) > _MAX_SHOWN:
        say(f"           and {len(report.damaged) - _MAX_SHOWN} more")
    if report.wiped:
        say(f"wiped      {report.wiped} slots")
