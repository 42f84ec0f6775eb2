"""`blockyard plan`: which tiers and policies are worth their cost for a trace."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TextIO

from blockyard.errors import InvalidArgumentError
from blockyard.layout.weights import weight_bytes
from blockyard.progress import show_progress
from blockyard.tools.cli import pictures, replays
from blockyard.tools.cli.result import EXIT_OK, EXIT_WRONG, Result
from blockyard.tools.replay.engine import EngineOptions
from blockyard.tools.replay.plan import GIB, Choice, Plan, Prices, make_plan, three_digits
from blockyard.tools.replay.sweep import open_executor

__all__ = ["plan"]

_log = logging.getLogger("blockyard.tools.replay")

_DEVICE_BLOCKS: Final = 20000
"""Blocks on the device if nothing says how many."""
_STORE_GIB: Final = (0, 1024)
"""Sizes of the store if nothing says which, except for models that are replayed without one."""


def plan(options: argparse.Namespace) -> Result:
    """Serve a trace with every choice, and recommend one."""
    pictures.require(options)
    step_time = replays.step_time_of(options)
    if step_time is None:
        how = "docs/operate/replay.md says how to get them for your GPU"
        raise InvalidArgumentError(f"plan needs step times: give --step-time or --fit ({how})")
    if options.fit is None and replays.ranks_of(options) > 1:
        ranks = replays.ranks_of(options)
        _log.warning("--tensor-parallel-size is %d: --step-time must be that of %d accelerators", ranks, ranks)
    requests = replays.requests_of(options.trace, options)
    policies, modes = replays.policies_of(options), replays.modes_of(options)
    engine = replays.engine_of(options, options.trace, requests)
    engine = replace(engine, device_blocks=_device_blocks(options, engine.bytes_per_block))
    for size in options.host_gib:
        _refuse_more("--host-gib", size, int(size * GIB // engine.bytes_per_block))
    with (
        open_executor(options.jobs) as executor,
        show_progress("plan", quiet=options.quiet) as view,
        _naming_the_size(options),
    ):
        found = make_plan(
            requests,
            engine,
            step_time,
            Prices(options.device_price, options.host_price, options.store_price),
            host_gib=options.host_gib,
            store_gib=_store_gib(options, engine),
            policies=policies,
            preemption_modes=modes,
            engines=options.engines or (),
            arrival_seeds=options.arrival_seeds,
            max_ttft=options.max_ttft or float("inf"),
            arguments="" if options.kv_cache_dtype == "auto" else f" --kv-cache-dtype {options.kv_cache_dtype}",
            tensor_parallel_size=replays.ranks_of(options),
            executor=executor,
            show=partial(view.step, note="replays"),
        )
    shown = found.recommended or min(found.choices, key=lambda choice: choice.ttft)
    timeline = replays.timeline_of(options, requests, shown.options, step_time, shown.engines)
    count = replays.count_of(requests) + replays.starts_of(options, requests)
    trace = f"{options.trace.name}: {count}; {replays.limits_text(engine)}"
    facts = {
        "trace": trace,
        "step time": str(step_time),
        "engine": _engine_words(found) + _model_words(options),
        "prices per hour": _price_words(options),
        "recommendation": found.sentence(),
        "over time": f"the {'fastest' if found.recommended is None else 'recommended'} choice: {_name(shown, found)}"
        + replays.drawn_of(shown.engines),
    }
    files = pictures.files_of(options, f"Plan for {options.trace.name}", timeline, facts, partial(_draw, found))
    code = EXIT_WRONG if found.recommended is None else EXIT_OK
    data = {"trace": str(options.trace), "step_time": asdict(step_time)} | found.as_dict()
    heads = [trace] + [f"step time: {step_time}"] * isinstance(step_time, replays.FittedStepTime)
    heads += [f"device of an engine: {_engine_words(found)}", f"prices per hour: {facts['prices per hour']}"]
    return Result(data, partial(_show, found, heads), code, files=files)


def _store_gib(options: argparse.Namespace, engine: EngineOptions) -> Sequence[float]:
    """Return the sizes of the store to try; a hybrid model's prompts come from device and host alone.

    Raises:
        InvalidArgumentError: the command line asks for a store below a hybrid model's caches.
    """
    sizes: Sequence[float] | None = options.store_gib
    if engine.hybrid is None:
        return _STORE_GIB if sizes is None else sizes
    if sizes is not None and any(sizes):
        shown = ",".join(f"{size:g}" for size in sizes)
        raise InvalidArgumentError(f"--store-gib is {shown}, must be 0 for a model with windows or states")
    return (0,)


def _device_blocks(options: argparse.Namespace, size: int) -> int:
    """Return the blocks on the devices of one engine, which must fit their memory beside the weights."""
    blocks = options.device_blocks
    if options.device_gib is not None:
        blocks = int(options.device_gib * GIB // size)
        if not blocks:
            raise InvalidArgumentError(
                f"--device-gib is {options.device_gib:g}, a block takes {three_digits(size / GIB)} GiB"
            )
        _refuse_more("--device-gib", options.device_gib, blocks)
    if options.memory_gib is None:
        return blocks or _DEVICE_BLOCKS
    if options.model_config is None and options.weights_gib is None:
        raise InvalidArgumentError("--memory-gib needs --model-config or --weights-gib: what do the weights take?")
    weights = options.weights_gib
    try:
        weights = weight_bytes(options.model_config) if weights is None else weights * GIB
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--memory-gib needs --weights-gib with this model: {error}") from None
    ranks = replays.ranks_of(options)
    all_memory = options.memory_gib * GIB * options.memory_utilization * ranks
    fit = int((all_memory - weights) // size)
    if fit < 1 or (blocks or 0) > fit:
        on = f"{ranks} accelerators" if ranks > 1 else "one accelerator"
        given = (
            f"--memory-gib is {options.memory_gib:g}: {options.memory_utilization:g} of it, on {on}, is "
            f"{three_digits(all_memory / GIB)} GiB"
        )
        cache = (
            f"{blocks} blocks take {three_digits(blocks * size / GIB)} GiB" if blocks else "the cache needs some, too"
        )
        raise InvalidArgumentError(f"{given}; the weights take {three_digits(weights / GIB)} GiB, and {cache}")
    _refuse_more("--memory-gib", options.memory_gib, blocks or fit)
    return blocks or fit


@contextmanager
def _naming_the_size(options: argparse.Namespace) -> Iterator[None]:
    """Name the option that an error about the number of device blocks comes from."""
    try:
        yield
    except InvalidArgumentError as error:
        if options.device_blocks is not None or not str(error).startswith("device_blocks is "):
            raise
        sizes = {"--device-gib": options.device_gib, "--memory-gib": options.memory_gib}
        given = next(
            (f"{option} is {size:g}" for option, size in sizes.items() if size is not None), "no size is given"
        )
        raise InvalidArgumentError(f"{given}: {error}") from None


def _refuse_more(option: str, gib: float, blocks: int) -> None:
    if blocks >= 2**31:
        raise InvalidArgumentError(f"{option} is {gib:g}: {blocks} blocks, must be at most {2**31 - 1}")


def _draw(found: Plan, drawing: Any) -> dict[str, object]:
    cost = ("cost per million tokens", "currency")
    names = {_name(choice, found): choice for choice in found.choices}
    points = {name: (choice.per_million_tokens, choice.ttft) for name, choice in names.items()}
    samples = {name: choice.served.times.ttft for name, choice in names.items() if choice.is_best}
    chosen = None if found.recommended is None else _name(found.recommended, found)
    return {
        "Cost against time to first token": drawing.pareto_figure(
            points, cost, ("TTFT of 90 %", "s"), recommended=chosen
        ),
        "Time to first token of the best": drawing.cdf_figure(samples, ("TTFT", "s")),
    }


def _name(choice: Choice, found: Plan) -> str:
    """Name a choice by what differs between the choices."""
    named = [_parts(one) for one in found.choices]
    differ = [len(set(column)) > 1 for column in zip(*named, strict=True)]
    return ", ".join(part for part, shown in zip(_parts(choice), differ, strict=True) if shown) or "the only choice"


def _parts(choice: Choice) -> tuple[str, ...]:
    sizes = (f"{three_digits(choice.host_gib)} GiB host", f"{three_digits(choice.store_gib)} GiB store")
    engines = f"{choice.engines} engine{'s' if choice.engines > 1 else ''}"
    return (engines, *sizes, choice.options.eviction, choice.options.preemption_mode)


def _engine_words(found: Plan) -> str:
    """Return the size of the device cache of an engine, in words."""
    device = found.choices[0].options
    size = device.device_blocks * device.bytes_per_block / GIB
    tokens, ranks = device.device_blocks * device.block_size, found.tensor_parallel_size
    each = f", {three_digits(size / ranks)} GiB on each of {ranks} accelerators" if ranks > 1 else ""
    mean = ", the mean over the trace's requests" if device.hybrid is not None else ""
    return (
        f"{device.device_blocks} blocks of {device.block_size} tokens = {tokens} tokens = "
        f"{three_digits(size)} GiB{each}; {device.bytes_per_block / device.block_size:.0f} bytes a token{mean}"
    )


def _model_words(options: argparse.Namespace) -> str:
    """Return which model the bytes are those of, if it is given."""
    has_model = options.bytes_per_token is None and options.model_config is not None
    return f"; model: {options.model_config}" if has_model else ""


def _price_words(options: argparse.Namespace) -> str:
    """Return the prices in words. That of several accelerators is the price of all: the default may not be meant so."""
    ranks = replays.ranks_of(options)
    engine = f"all {ranks} accelerators of an engine" if ranks > 1 else "the accelerator of an engine"
    usual = " (the default of --device-price)" if options.device_price == options.default_of("device_price") else ""
    return (
        f"{options.device_price:g} for {engine}{usual}, {options.host_price:g} for a GiB of host memory, "
        f"{options.store_price:g} for a GiB of the store"
    )


_LEGEND: Final = (
    "engines: engines that share the trace; host, store: GiB of each engine; preempt: how a sequence is preempted",
    "hits: share of the prompts' tokens that were cached; TTFT: 90 % of first tokens are within it; TPOT: per token",
    "hour: price of all engines; million: cost of a million generated tokens; *: no other choice is cheaper and faster",
    "refused: requests that need more blocks than the device has; the other columns leave them out",
)


def _show(found: Plan, heads: Sequence[str], stream: TextIO) -> None:
    columns = "engines  host store policy   preempt    hits    TTFT, s TPOT, ms     hour    million refused"
    print("\n".join((*heads, "", columns)), file=stream)
    for choice in found.choices:
        served, options = choice.served, choice.options
        tpot = served.times.tpot
        policy = options.eviction if found.has_prefixes else "-"
        host, store = three_digits(choice.host_gib), three_digits(choice.store_gib)
        sizes = f"{choice.engines:>7} {host:>5} {store:>5} {policy:<8} {options.preemption_mode:<9}"
        hits = f"{served.times.hit_rate:.1%}" if found.has_prefixes else "-"
        times = f"{hits:>6} {choice.ttft:>10.3f} {tpot.mean() * 1e3 if len(tpot) else 0:>8.1f}"
        mark = " *" if choice.is_best else ""
        costs = f"{choice.per_hour:>8.3f} {choice.per_million_tokens:>10.4f}"
        print(f"{sizes} {times} {costs} {choice.refused or '':>7}{mark}".rstrip(), file=stream)
    print("\n".join(("", *_LEGEND, "", found.sentence())), file=stream)
    if found.recommended is not None:
        paste = found.configuration()
        config = "" if paste.kv_transfer_config is None else json.dumps(paste.kv_transfer_config)
        print(f"\n{paste.kv_cache}\n{paste.scheduler}", file=stream)
        print(f"\n{paste.vllm}" + (f" --kv-transfer-config '{config}'" if config else ""), file=stream)
        if config and not found.recommended.options.host_blocks:
            print("vLLM reaches a store through host memory, of which the plan has none: host_bytes.", file=stream)
        if config and found.has_prefixes:
            print("vLLM and this connector choose themselves what to evict, whatever the plan says.", file=stream)
        if found.recommended.options.preemption_mode != "recompute" and found.recommended.served.preemptions:
            print("vLLM recomputes what it preempts, whatever the plan says.", file=stream)
