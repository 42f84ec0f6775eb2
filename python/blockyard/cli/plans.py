"""`blockyard plan`: which tiers and policies are worth their cost for a trace."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any, TextIO

from blockyard.cli import pictures, replays
from blockyard.cli.result import EXIT_OK, EXIT_WRONG, Result
from blockyard.errors import InvalidArgumentError
from blockyard.progress import show_progress
from blockyard.replay.plan import Choice, Plan, Prices, make_plan
from blockyard.replay.sweep import open_executor
from blockyard.traces import read_trace

__all__ = ["plan"]


def plan(options: argparse.Namespace) -> Result:
    """Serve a trace with every choice, and recommend one."""
    pictures.require(options)
    step_time = replays.step_time_of(options)
    if step_time is None:
        raise InvalidArgumentError("plan needs step times: give --step-time, --fit or --system")
    requests = read_trace(options.trace, first=options.first, hash_tokens=options.hash_tokens)
    policies, modes = replays.names_of(options.policies), replays.modes_of(options)
    count = len(options.host_gib) * len(options.store_gib) * len(policies) * len(modes)
    with open_executor(options.jobs, options.executor) as executor, show_progress("plan", quiet=options.quiet) as view:
        found = make_plan(
            requests,
            replays.engine_of(options, options.device_blocks, requests),
            step_time,
            Prices(options.device_price, options.host_price, options.store_price),
            host_gib=options.host_gib,
            store_gib=options.store_gib,
            policies=policies,
            preemption_modes=modes,
            max_ttft=options.max_ttft or float("inf"),
            executor=executor,
            show=partial(view.step, total=count, note="choices"),
        )
    shown = found.recommended or min(found.choices, key=lambda choice: choice.ttft)
    timeline = replays.timeline_of(options, requests, shown.served.options, step_time)
    facts = {"trace": options.trace.name, "step time": repr(step_time), "recommendation": found.sentence()}
    files = pictures.files_of(options, f"Plan for {options.trace.name}", timeline, facts, partial(_draw, found))
    code = EXIT_WRONG if found.recommended is None else EXIT_OK
    return Result({"trace": str(options.trace)} | found.as_dict(), partial(_show, found), code, files=files)


def _draw(found: Plan, drawing: Any) -> dict[str, object]:
    cost = ("cost per million generated tokens", "currency")
    points = {_name(choice): (choice.per_million_tokens, choice.ttft) for choice in found.choices}
    samples = {_name(choice): choice.served.times.ttft for choice in found.choices if choice.is_best}
    return {
        "Cost against time to first token": drawing.pareto_figure(points, cost, ("TTFT of 90 %", "s")),
        "Time to first token of the best": drawing.cdf_figure(samples, ("TTFT", "s")),
    }


def _name(choice: Choice) -> str:
    options = choice.served.options
    return f"{choice.host_gib:g} host, {choice.store_gib:g} store, {options.eviction}, {options.preemption_mode}"


def _show(found: Plan, stream: TextIO) -> None:
    print(" host GiB store GiB policy   preempt    hits TTFT of 90 % TPOT, ms   an hour a million tokens", file=stream)
    for choice in found.choices:
        served, options = choice.served, choice.served.options
        tpot = served.times.tpot
        sizes = f"{choice.host_gib:>9g} {choice.store_gib:>9g} {options.eviction:<8} {options.preemption_mode:<9}"
        times = f"{served.times.hit_rate:>6.1%} {choice.ttft:>10.3f} s {tpot.mean() * 1e3 if len(tpot) else 0:>8.1f}"
        mark = " *" if choice.is_best else ""
        print(f"{sizes} {times} {choice.per_hour:>9.3f} {choice.per_million_tokens:>16.4f}{mark}", file=stream)
    print(f"* no other choice is both cheaper and faster\n\n{found.sentence()}", file=stream)
    if found.recommended is not None:
        cache, vllm = found.configuration()
        print(f"\n{cache}", file=stream)
        if vllm is not None:
            print(f"\nvllm serve ... --kv-transfer-config '{json.dumps(vllm)}'", file=stream)
