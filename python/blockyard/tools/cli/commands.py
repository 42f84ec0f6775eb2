"""The commands: one function each, from the parsed options to a `Result`.

Only the commands that need torch import it, so that bad usage is rejected at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Final, TextIO, TypeVar

from blockyard.errors import InvalidArgumentError
from blockyard.progress import show_progress
from blockyard.stores.url import public_url
from blockyard.tools import setup_checks
from blockyard.tools import store as stores
from blockyard.tools.cli import recording
from blockyard.tools.cli.result import EXIT_BAD_USAGE, EXIT_OK, EXIT_WRONG, Result

__all__ = [
    "calibrate",
    "demo",
    "doctor",
    "plan",
    "record",
    "replay",
    "simulate",
    "store",
]

_Answer = TypeVar("_Answer")

_MAX_LOGGED: Final = 20
"""Maximum number of log lines shown for a failed simulation; JSON has all."""


def demo(options: argparse.Namespace) -> Result:
    """Serve a workload from three tiers, and compare every token with the unpaged model."""
    from blockyard.tools.demo import report, run  # noqa: PLC0415 (slow to import)

    fields = {name: getattr(options, name) for name in run.DemoOptions.__dataclass_fields__ if name in options}
    found = run.make_report(run.DemoOptions(**fields), quiet=options.quiet)
    unread = "no damaged block was read in this run; give it smaller pools or more requests"
    problem = unread if found.exit_code == EXIT_BAD_USAGE else ""
    return Result(found.as_dict(), partial(report.print_report, found), found.exit_code, problem)


def doctor(options: argparse.Namespace) -> Result:
    """Check the installation, and a set-up if one is named."""
    from blockyard.tools.doctor import run_doctor, worst  # noqa: PLC0415 (looks for torch)

    if options.config is not None and not options.config.exists():
        raise InvalidArgumentError(f"cannot read {options.config}: there is no such file")
    with show_progress("doctor", quiet=options.quiet) as view:
        checks = run_doctor(view)
        if options.store is not None:
            checks += setup_checks.check_store(options.store)
        if options.engine is not None:
            checks += setup_checks.check_engine(options.engine, options.config)

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
        print(f"{found.show_blocks()}\nlog digest {found.digest}", file=stream)
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


def store(options: argparse.Namespace) -> Result:
    """List what a store holds, or remove a part of it."""
    chosen = stores.Selection(tuple(options.namespace), options.tenant, options.older_than)
    if options.action == "rm" and chosen == stores.Selection() and not (options.damaged or options.all):
        raise InvalidArgumentError("rm needs a choice: --namespace, --tenant, --older-than, --damaged or --all")
    is_rm, damaged = options.action == "rm", options.damaged
    with show_progress("store", quiet=options.quiet) as view:
        contents = stores.open_contents(options.url, payloads=options.verify or damaged)
        found = _in_thread(
            lambda: stores.survey(
                contents, chosen, keep_places=is_rm and not damaged, step=lambda seen: view.step(seen, seen, "blocks")
            )
        )
        if damaged:
            found.groups.clear()
        places = [block.place for block in found.damaged] if damaged else found.places
        removed = contents.remove(places) if is_rm and options.yes else 0
    data = {
        "url": public_url(options.url),
        "action": options.action,
        "groups": [asdict(group) for group in found.groups],
        "blocks": found.blocks,
        "bytes": found.bytes,
        "facts": found.facts,
        "damaged": [{"block": block.what, "reason": block.reason} for block in found.damaged],
        "removed": removed,
    }

    def show(stream: TextIO) -> None:
        stores.show(found, options.action, stream)
        if is_rm:
            count = len(places)
            would = f"would remove {count} blocks: give --yes" if count else "no block is chosen, see ls"
            done = f"removed {removed} of {count} blocks" if options.yes else would
            print(done, file=stream)

    # Not if others were given, too: there may be no such blocks in it.
    is_missing = is_rm and options.namespace and not (found.groups or damaged or options.tenant or options.older_than)
    is_wrong = is_missing or (found.damaged and not removed)
    return Result(data, show, EXIT_WRONG if is_wrong else EXIT_OK)


def _in_thread(work: Callable[[], _Answer]) -> _Answer:
    """Run `work` in a thread, so that Ctrl-C can end the program while it is in the core."""
    done: Future[_Answer] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again by `result`)
            done.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return done.result()
