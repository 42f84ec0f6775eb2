"""`blockyard replay`: cache hits without a model of time, or whole engines in virtual time."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, cast

import numpy as np

from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.layout.arena import ArenaLayout
from blockyard.layout.model import LayerCache, ModelMemory, read_config
from blockyard.layout.weights import weight_bytes
from blockyard.progress import Progress, show_progress
from blockyard.scheduler import PREEMPTION_MODES, PreemptionMode
from blockyard.tools.cli import pictures
from blockyard.tools.cli.result import Result
from blockyard.tools.replay.engine import EngineOptions, replay_times
from blockyard.tools.replay.history import History
from blockyard.tools.replay.hits import OPTIMAL, POLICIES, ClassMemory, HybridMemory
from blockyard.tools.replay.packed import PackedTrace
from blockyard.tools.replay.plan import GIB, three_digits
from blockyard.tools.replay.serving import Served, modes_with, serve_all
from blockyard.tools.replay.step_time import EngineLimits, EngineRun, LinearStepTime, StepTime
from blockyard.tools.replay.step_time.fit import LONG_STEP, errors_text, fit_run, lower_bounds
from blockyard.tools.replay.step_time.run import ranks_of_run
from blockyard.tools.replay.sweep import Point, open_executor, read_blocks, sweep
from blockyard.tools.replay.traffic import has_prefixes, part_of, spread_by_prefix
from blockyard.tools.timeline import Timeline
from blockyard.traces import TraceRequest, read_groups, read_trace

__all__ = [
    "bytes_per_block",
    "count_of",
    "drawn_of",
    "engine_of",
    "limits_text",
    "memory_of_cache",
    "modes_of",
    "policies_of",
    "ranks_of",
    "replay",
    "requests_of",
    "starts_of",
    "step_time_of",
    "timeline_of",
]

_log = logging.getLogger("blockyard.tools.replay")

_MILLISECONDS: Final = 1e3
_MIB: Final = 1 << 20
_MAX_DRAWN: Final = 4
"""Engines whose timeline is drawn; each has three panels or four."""
_ENOUGH: Final = 0.9
"""Share of a policy's most hits from which on a larger cache is said to bring little."""
_LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens")
"""Options that `--fit` can take from its run."""
_BYTES_PER_TOKEN: Final = 131072  # of Llama-3.1-8B in bfloat16


@dataclass(frozen=True)
class FittedStepTime(LinearStepTime):
    """Step times fitted to a run.

    Attributes:
        condition: how much an error of the recorded times can grow in the four numbers, at least 1.
        errors: relative errors of the predicted mean times of the run.
    """

    condition: float
    errors: Mapping[str, float]

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; fitted, condition {self.condition:.3g}; predicts this run's mean "
            f"{errors_text(self.errors)}"
        )


def replay(options: argparse.Namespace) -> Result:
    """Run traces through caches, or serve them with engines."""
    pictures.require(options)
    step_time = step_time_of(options)
    traces = [(path, requests_of(path, options, hints=options.hints)) for path in options.traces]
    with (
        open_executor(options.jobs) as executor,
        show_progress("replay", quiet=options.quiet) as view,
    ):
        if step_time is None:
            return _hits(options, traces, executor, view)
        return _times(options, traces, step_time, executor, view)


def requests_of(path: Path, options: argparse.Namespace, *, hints: bool = False) -> list[TraceRequest]:
    """Read a trace; what it knows of the ends of answers stays in it only if hints are asked for.

    Warns if the model of `--model-config` cannot serve some of the requests.

    Raises:
        InvalidArgumentError: hints are asked for, and the trace has none.
    """
    requests = read_trace(path, first=options.first, hash_tokens=options.hash_tokens)
    _warn_of_long(path, options, requests)
    if not hints:
        return [replace(request, hint=None) for request in requests]
    if all(request.hint is None for request in requests):
        raise InvalidArgumentError(
            f"--hints needs a trace with hints, and {path} has none; those of kv-cache-tester do"
        )
    return requests


def _warn_of_long(path: Path, options: argparse.Namespace, requests: Sequence[TraceRequest]) -> None:
    """Warn of requests with more tokens than the model has positions."""
    if options.bytes_per_token is not None or options.model_config is None:
        return
    config = read_config(options.model_config)
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(positions, int):
        return
    if isinstance(scaling, Mapping):
        factor, original = (scaling.get(name) for name in ("factor", "original_max_position_embeddings"))
        if isinstance(factor, (int, float)) and isinstance(original, int):
            positions = max(positions, factor * original)
    lengths = [request.input_tokens + request.output_tokens for request in requests]
    if long := sum(length > positions for length in lengths):
        _log.warning(
            "%d of %d requests of %s have more tokens than max_position_embeddings of --model-config, %d; the longest "
            "has %d: they are replayed, but an engine refuses them unless you extend its positions",
            *(long, len(lengths), path, positions, max(lengths)),
        )


def count_of(requests: Sequence[TraceRequest]) -> str:
    """Return the number of requests, and of sessions if the trace knows them, in words."""
    sessions = {request.session for request in requests} - {None}
    return f"{len(requests)} requests" + (f" of {len(sessions)} sessions" if sessions else "")


def starts_of(options: argparse.Namespace, requests: Sequence[TraceRequest]) -> str:
    """Return a note if all sessions of a trace begin at once and no option limits them, else an empty text."""
    begins: dict[int, float] = {}
    for request in requests:
        if request.session is not None and not request.after:
            begins[request.session] = min(request.arrival, begins.get(request.session, request.arrival))
    if options.sessions is not None or len(begins) < 2 or len(set(begins.values())) > 1:
        return ""
    return f"; all {len(begins)} sessions start together, see --sessions"


def step_time_of(options: argparse.Namespace) -> LinearStepTime | None:
    """Return the step times that the options ask for, or None."""
    if options.fit is not None:
        return _fit(options)
    if options.step_time is None:
        return None
    if options.step_time[0] > LONG_STEP:
        _log.warning("--step-time: a step takes %s s; are the numbers in seconds?", f"{options.step_time[0]:g}")
    return LinearStepTime(*options.step_time)


def ranks_of(options: argparse.Namespace) -> int:
    """Return the accelerators of an engine: as given, else those of the run of `--fit`, else one."""
    return options.tensor_parallel_size or _ranks_of_run(options) or 1


def _ranks_of_run(options: argparse.Namespace) -> int | None:
    return None if options.fit is None else ranks_of_run(options.fit)


def _fit(options: argparse.Namespace) -> FittedStepTime:
    """Fit step times to a run of an engine, whose limits are in the `meta.json` beside it.

    Warns if the replayed engines have another number of accelerators, or may have.
    """
    given, of_run = options.tensor_parallel_size or 1, _ranks_of_run(options)
    if given > 1 and of_run is None:
        _log.warning(
            "--tensor-parallel-size is %d: no meta.json says that the run %s is of %d accelerators",
            *(given, options.fit, given),
        )
    elif options.tensor_parallel_size is not None and given != (of_run or 1):
        _log.warning(
            "--tensor-parallel-size is %d, but the step times are those of the %d accelerators of the run %s",
            *(given, of_run, options.fit),
        )
    limits = _limits_of_run(options)
    bounds = (0.0, 0.0, 0.0, 0.0)
    if options.device_bandwidth is not None:
        if options.model_config is None:
            raise InvalidArgumentError("--device-bandwidth needs --model-config, a model's config.json")
        ranks = _ranks_of_run(options) or ranks_of(options)
        token = _memory_of(options, ranks).bytes_per_token
        bandwidth = options.device_bandwidth * 1e9 * ranks
        try:
            weights = weight_bytes(options.model_config, active=True)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"--device-bandwidth has no use with this model: {error}") from None
        bounds = lower_bounds(weights, token, bandwidth)
    run = EngineRun.read(options.fit)
    if bounds[0] and len(run.tpot) and bounds[0] > (step := float(np.median(run.tpot))):
        _log.warning(
            "--device-bandwidth is %s GB/s: the weights are read in %s s, but the run has steps of %s s",
            *(f"{options.device_bandwidth:g}", f"{bounds[0]:.3g}", f"{step:.3g}"),
        )
    try:
        fit = fit_run(run, limits, LinearStepTime, at_least=bounds)
    except OutOfBlocksError as error:
        what = "--fit-blocks" if options.fit_blocks else "num_gpu_blocks in the meta.json of --fit"
        raise InvalidArgumentError(f"{what} is {limits.num_blocks}, too few for the run: {error}") from None
    fixed, prefill_token, decode_row, context_token = fit.numbers
    return FittedStepTime(fixed, prefill_token, decode_row, context_token, fit.condition, fit.errors)


def _limits_of_run(options: argparse.Namespace) -> EngineLimits:
    """Return the limits of the engine of `--fit`; what its `meta.json` does not have is as given, or usual."""
    usual: dict[str, int] = {"block_size": options.block_size}
    usual |= {name: given for name in _LIMITS if (given := getattr(options, name)) is not None}
    try:
        return EngineLimits.of_run(options.fit, num_blocks=options.fit_blocks, **usual)
    except InvalidArgumentError as error:
        needs = "" if options.fit_blocks else " needs --fit-blocks"
        raise InvalidArgumentError(f"--fit{needs}: {error}") from None


def _limits_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the limits of replayed engines: those given, else those of the run of `--fit`, else the usual ones."""
    of_run = EngineLimits(1) if options.fit is None else _limits_of_run(options)
    given = {name: getattr(options, name) for name in _LIMITS}
    limits = {name: getattr(of_run, name) if value is None else value for name, value in given.items()}
    return limits | {"async_scheduling": of_run.async_scheduling}


def limits_text(engine: EngineOptions) -> str:
    """Return the limits of a step in words."""
    return f"a step has at most {engine.max_num_seqs} sequences and {engine.max_num_batched_tokens} tokens"


# ---- hits ----


class _HitReport(NamedTuple):
    """What caches of many sizes and policies find of a trace.

    Attributes:
        requests: how many requests and sessions there are, in words.
        block_bytes: bytes of a block of the cache.
        hybrid: of a model with windows or states.
        bytes_by_kind: what a request of the trace's mean length caches, by kind of layer; of such a model.
    """

    path: Path
    requests: str
    trace: PackedTrace
    points: list[Point]
    block_bytes: int
    hybrid: HybridMemory | None
    bytes_by_kind: Mapping[str, int]

    def as_dict(self, block_size: int) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        return {
            "trace": str(self.path),
            "num_requests": len(self.trace),
            "num_blocks": len(self.trace.blocks),
            "num_distinct_blocks": self.trace.num_distinct,
            "block_tokens": self.trace.block_tokens,
            "cache_block_tokens": block_size,
            "bytes_per_block": self.block_bytes,
            "cache_groups": [str(group) for group in self.hybrid.groups] if self.hybrid else [],
            "bytes_by_kind": dict(self.bytes_by_kind),
            "caches": [point.as_dict() for point in self.points],
        }


def _hits(
    options: argparse.Namespace,
    traces: Sequence[tuple[Path, list[TraceRequest]]],
    executor: Executor | None,
    view: Progress,
) -> Result:
    reports: list[_HitReport] = []
    for path, requests in traces:
        if not has_prefixes(requests):
            raise InvalidArgumentError(
                f"{path}: no request has hash ids, so shared prefixes are unknown: give --step-time, or use plan"
            )
        try:
            trace = PackedTrace.of(requests)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{path}: {error}") from None
        if options.block_size > trace.block_tokens:
            raise InvalidArgumentError(
                f"--block-size is {options.block_size}, must be at most {trace.block_tokens}, the tokens of a hash id "
                f"of {path}: larger blocks are shared less than its ids"
            )
        hybrid, size = memory_of_cache(options, path, requests, trace.block_tokens)
        sizes = _sizes(options, size, trace.num_distinct * trace.block_tokens // options.block_size)
        caches = _caches(options, sizes, is_hybrid=hybrid is not None)
        points = sweep(
            trace,
            [(policy, *_in_trace(options, trace, device, host)) for policy, device, host in caches],
            first=int(len(trace) * options.window),
            max_num_batched_tokens=options.max_num_batched_tokens or EngineLimits.max_num_batched_tokens,
            hybrid=hybrid,
            executor=executor,
            show=partial(view.step, total=len(caches), note="caches"),
        )
        block_bytes = size * trace.block_tokens // options.block_size  # of a block of the trace
        points = [
            replace(
                point,
                device_blocks=device,
                host_blocks=host,
                classes=tuple(one.of_blocks(block_bytes) for one in point.classes),
            )
            for point, (_, device, host) in zip(points, caches, strict=True)
        ]
        mean = int((trace.input_tokens + trace.output_tokens).mean())
        by_kind = _bytes_by_kind(options, hybrid, mean, trace.block_tokens) if hybrid else {}
        reports.append(_HitReport(path, count_of(requests), trace, points, size, hybrid, by_kind))

    def show(stream: TextIO) -> None:
        for report in reports:
            _show_hits(report, options.block_size, stream)

    facts: dict[str, object] = {
        path.name: f"{count}, {trace.num_distinct} distinct blocks of {trace.block_tokens} tokens"
        for path, count, trace, *_ in reports
    }
    draw = partial(_draw_hits, reports, in_gib=(options.device_gib, options.host_gib) != (None, None))
    files = pictures.files_of(options, "Hits over capacity", None, facts, draw)
    found = [report.as_dict(options.block_size) for report in reports]
    return Result({"window": options.window, "traces": found}, show, files=files)


def _draw_hits(reports: Sequence[_HitReport], drawing: Any, *, in_gib: bool) -> dict[str, object]:
    """Draw the hits over the size that varies, in the unit of the command line."""
    figures = {}
    for path, _, _, points, block_bytes, *_ in reports:
        unit, scale = ("GiB", block_bytes / GIB) if in_gib else ("blocks", 1)
        devices, hosts = ({getattr(point, f"{tier}_blocks") for point in points} for tier in ("device", "host"))
        over_host = len(devices) == 1 and len(hosts) > 1
        what = "host memory" if over_host else "device and host memory" if any(hosts) else "device memory"
        curves: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            size = point.host_blocks + (0 if over_host else point.device_blocks)
            host = f", {three_digits(point.host_blocks * scale)} {unit} of it host"
            name = point.policy + (host if point.host_blocks and not over_host else "")
            curves.setdefault(name, []).append((float(three_digits(size * scale)) if in_gib else size, point.hit_rate))
        optimum = curves.pop(OPTIMAL, [])
        figures[f"Hit rate of {path.name}"] = drawing.hit_rate_figure(curves, optimum=optimum, capacity=(what, unit))
    return figures


def memory_of_cache(
    options: argparse.Namespace, path: Path, requests: Sequence[TraceRequest], block_tokens: int
) -> tuple[HybridMemory | None, int]:
    """Return how a hybrid model uses a cache's memory, and the bytes of a block of `--block-size` tokens.

    The model is that of `--model-config`, else that of the recording. A model with compressed entries of more tokens
    than a block, or of a number that does not divide it, counts as one that keeps all tokens; a warning says so.

    Args:
        options: of the command.
        path: of the trace.
        requests: of the trace.
        block_tokens: tokens that a key of the cache stands for.
    """
    size = bytes_per_block(options, requests)
    if options.bytes_per_token is not None:
        return None, size
    if options.model_config is not None:
        memory = _memory_of(options)
        kinds = {layer.kind for layer in memory.layers}
        if not kinds & {"window", "chunked", "recurrent", "conv"} or "cross" in kinds:
            return None, size
        entry = max(layer.ratio for layer in memory.layers)
        if block_tokens % entry:
            _log.warning(
                "blocks have %d tokens, no multiple of the %d of a compressed entry: all tokens count as kept",
                block_tokens,
                entry,
            )
            return None, size
        groups = ArenaLayout.from_config(memory, block_size=block_tokens).cache_groups
        return HybridMemory(groups, size * block_tokens // options.block_size), size
    groups = read_groups(path)
    if not groups:
        return None, size
    recorded = {int(request.hash_tokens) for request in requests if request.hash_tokens}
    if recorded - {block_tokens}:
        raise InvalidArgumentError(
            f"--block-size is {options.block_size}, must be {max(recorded)}: {path} was recorded with cache groups, "
            "whose keys stand for that number of tokens"
        )
    lengths = (request.input_tokens + request.output_tokens for request in requests)
    hybrid = HybridMemory.of(groups, block_tokens, lengths)
    return hybrid, max(1, hybrid.block_bytes * options.block_size // block_tokens) if hybrid.block_bytes else size


def _bytes_by_kind(
    options: argparse.Namespace, hybrid: HybridMemory, tokens: int, block_tokens: int
) -> Mapping[Any, int]:
    """Return what a request of `tokens` tokens caches, by kind of layer; empty if blocks have no bytes."""
    if options.model_config is not None:
        return _memory_of(options).bytes_by_kind(tokens)
    found: dict[str, int] = {}
    for group in hybrid.groups if hybrid.block_bytes else ():
        blocks = group.peak_blocks(tokens, block_size=block_tokens, chunk_tokens=1)
        found[group.kind] = found.get(group.kind, 0) + blocks * (group.block_bytes or 0)
    return found


def _caches(
    options: argparse.Namespace, sizes: Sequence[tuple[int, int]], *, is_hybrid: bool
) -> list[tuple[str, int, int]]:
    policies = policies_of(options, OPTIMAL)
    if is_hybrid and OPTIMAL in policies:
        _refuse_given_optimal(options, "the best order to evict windows and states in is not known")
        policies.remove(OPTIMAL)
    caches = [(policy, device, host) for device, host in sizes for policy in policies]
    found = [cache for cache in caches if cache[0] != OPTIMAL or not cache[2]]  # the optimum has no host tier
    if OPTIMAL in policies and all(cache[0] != OPTIMAL for cache in found):
        _refuse_given_optimal(options, f"--host-blocks is {options.host_blocks}, must include 0 with it")
    return found


def _in_trace(options: argparse.Namespace, trace: PackedTrace, device: int, host: int) -> tuple[int, int]:
    """Convert sizes in blocks of the engine to whole blocks of the trace."""
    tokens = options.block_size
    return max(device * tokens // trace.block_tokens, 1), host * tokens // trace.block_tokens


def _refuse_given_optimal(options: argparse.Namespace, why: str) -> None:
    """Refuse `optimal`, which would be left out, unless it comes with the default policies."""
    if options.policies != options.default_of("policies"):
        raise InvalidArgumentError(f"--policies is {options.policies!r}, which has {OPTIMAL}: {why}")


def _sizes(options: argparse.Namespace, block_bytes: int, distinct: int) -> list[tuple[int, int]]:
    """Return every combination of device pool and host tier sizes, in blocks of the engine."""
    found = []
    for tier, least in (("device", 1), ("host", 0)):
        name, in_gib = f"{tier}_blocks", getattr(options, f"{tier}_gib")
        try:
            if in_gib is None:
                sizes = read_blocks(getattr(options, name), distinct, least=least)
            else:
                name = f"{tier}_gib"
                sizes = [_blocks_of(size, block_bytes, least) for size in in_gib]
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{_option(name)}: {error}") from None
        found.append(dict.fromkeys(sizes))
    return [(device, host) for device, host in product(*found)]


def _blocks_of(gib: float, size: int, least: int) -> int:
    if (blocks := int(gib * GIB // size)) < least:
        raise InvalidArgumentError(f"{gib:g} GiB hold no block of {size} bytes")
    if blocks >= 2**31:
        raise InvalidArgumentError(f"{gib:g} GiB hold {blocks} blocks of {size} bytes, must be at most {2**31 - 1}")
    return blocks


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Split a comma-separated list of known names."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"{option} has {name!r}, must be one of {', '.join(known)}")
    return names


_HITS_LEGEND: Final = (
    "device, host: blocks of the cache; tokens, GiB: of both tiers; hit rate: share of the prompts' tokens found",
    "of it host: share of these found on the host; LRU to best: how far from lru to the optimum",
    "too long: requests that the device cannot hold",
)


def _show_hits(report: _HitReport, block_size: int, stream: TextIO) -> None:
    path, count, trace, points, block_bytes, hybrid, by_kind = report
    print(
        f"{path.name}: {count}, {len(trace.blocks)} blocks of {trace.block_tokens} tokens, "
        f"{trace.num_distinct} distinct; a block of the cache has {block_size} tokens, {block_bytes} bytes",
        file=stream,
    )
    if hybrid is not None:
        kinds = ", ".join(f"{kind} {size / _MIB:.3g}" for kind, size in by_kind.items())
        mean = f"; a request of the mean length caches in MiB: {kinds}" if kinds else ""
        print(f"hits end at resume points{mean}", file=stream)
    print("   device      host     tokens      GiB policy    hit rate of it host LRU to best too long", file=stream)
    hits = {(point.device_blocks, point.policy): point.hit_tokens for point in points if not point.host_blocks}
    for point in points:
        host, way = _share_of(point.host_hit_tokens, point.hit_tokens), _way(point, hits)
        blocks = point.device_blocks + point.host_blocks
        both = f"{blocks * block_size:>10} {three_digits(blocks * block_bytes / GIB):>8}"
        sizes = f"{point.device_blocks:>9} {point.host_blocks:>9} {both}"
        found = f"{sizes} {point.policy:<9} {point.hit_rate:>8.2%} {host:>10} {way:>11} {point.too_long or '':>8}"
        print(found.rstrip(), file=stream)
        _show_classes(point.classes, stream)
    print("\n".join(filter(None, (*_HITS_LEGEND, _knee(points, block_bytes)))), file=stream)


def _show_classes(classes: Sequence[ClassMemory], stream: TextIO) -> None:
    """Print what each page class held at the end, if there are several."""
    held = sum(one.device + one.host for one in classes)
    if len(classes) > 1 and held:
        parts = (f"{' + '.join(one.kinds)} {(one.device + one.host) / held:.1%}" for one in classes)
        print(f"{'':20}of the bytes held at the end: {', '.join(parts)}", file=stream)


def _knee(points: Sequence[Point], block_bytes: int) -> str:
    """Return a sentence: which sizes of the first policy find nearly as much as any, and as much."""
    sizes: dict[int, float] = {}
    for point in points:
        if point.policy == points[0].policy:
            size = point.device_blocks + point.host_blocks
            sizes[size] = max(point.hit_rate, sizes.get(size, 0.0))
    best = max(sizes.values())
    if len(sizes) < 2 or not best:
        return ""
    enough = min(size for size, rate in sizes.items() if rate >= _ENOUGH * best)
    most = min(size for size, rate in sizes.items() if f"{rate:.1%}" == f"{best:.1%}")
    small, large = (f"{three_digits(blocks * block_bytes / GIB)} GiB" for blocks in (enough, most))
    both = " on device and host together" if any(point.host_blocks for point in points) else ""
    first = f"{sizes[enough]:.1%} with {small}{both}, and " if enough < most else ""
    is_last = most == max(sizes)
    beyond = ", the largest size tried: more may find more" if is_last else ", and larger sizes find no more"
    return f"{points[0].policy} finds {first}{best:.1%} with {large}{'' if first else both}{beyond}."


def _share_of(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else ""


def _way(point: Point, hits: dict[tuple[int, str], int]) -> str:
    """How far a policy gets from LRU to the optimum, at one size without a host tier."""
    worst, best = (hits.get((point.device_blocks, name), 0) for name in ("lru", OPTIMAL))
    if point.policy in {"lru", OPTIMAL} or point.host_blocks or best <= worst or not worst:
        return ""
    return f"{(point.hit_tokens - worst) / (best - worst):.0%}"


# ---- times ----


def _times(
    options: argparse.Namespace,
    traces: Sequence[tuple[Path, list[TraceRequest]]],
    step_time: LinearStepTime,
    executor: Executor | None,
    view: Progress,
) -> Result:
    reports = []
    for path, requests in traces:
        engines = _engines(options, path, requests)
        show_done = partial(view.step, total=len(engines), note="engines")
        reports.append((path, serve_all(requests, engines, step_time, executor=executor, show=show_done)))

    def show(stream: TextIO) -> None:
        if isinstance(step_time, FittedStepTime):
            print(f"step time: {step_time}", file=stream)
        for (path, engines), (_, requests) in zip(reports, traces, strict=True):
            count = count_of(requests) + starts_of(options, requests)
            title = f"{path.name}: {count}; {limits_text(engines[0].options)}"
            _show_times(title, engines, stream, is_known=has_prefixes(requests))

    found = [{"trace": str(path), "engines": [engine.as_dict() for engine in engines]} for path, engines in reports]
    timeline = timeline_of(options, traces[0][1], reports[0][1][0].options, step_time)
    facts = {"step time": str(step_time), "timeline": _name(reports[0][1][0].options)}
    files = pictures.files_of(options, "Engines in virtual time", timeline, facts, partial(_draw_times, reports))
    return Result({"step_time": asdict(step_time), "traces": found}, show, files=files)


def timeline_of(
    options: argparse.Namespace,
    requests: Sequence[TraceRequest],
    engine: EngineOptions,
    step_time: StepTime,
    engines: int = 1,
) -> Timeline | None:
    """Replay a trace with engines that share it for the timeline of the first ones; None if no file shows it."""
    if not pictures.have_timeline(options):
        return None
    timeline = Timeline("s")
    for number, part in enumerate(spread_by_prefix(requests, engines)[:_MAX_DRAWN], 1):
        history = History(timeline, f"engine {number}: " if engines > 1 else "")
        replay_times(part_of(requests, part), engine, step_time, watch=history)
    return timeline


def drawn_of(engines: int) -> str:
    """Return which of several engines `timeline_of` shows, if not all."""
    return f"; engines 1 to {_MAX_DRAWN} of {engines}" if engines > _MAX_DRAWN else ""


def _engines(options: argparse.Namespace, path: Path, requests: Sequence[TraceRequest]) -> list[EngineOptions]:
    engine = engine_of(options, path, requests)
    sizes = _sizes(options, engine.bytes_per_block, _distinct(requests, options.block_size))
    modes = modes_of(options)
    policies = policies_of(options, OPTIMAL)
    if OPTIMAL in policies:
        _refuse_given_optimal(options, "engines do not know the future, give lru, adaptive")
        policies = [policy for policy in policies if policy != OPTIMAL]
    return [
        replace(engine, device_blocks=device, host_blocks=host, preemption_mode=mode, eviction=policy)
        for (device, host), policy in product(sizes, policies)
        for mode in modes_with(host, modes)
    ]


def policies_of(options: argparse.Namespace, *more: str) -> list[str]:
    """Return the eviction policies to try; a trace has no priorities, so the policy that reads them is none of them."""
    return _names_of("--policies", options.policies, (*POLICIES, *more))


def modes_of(options: argparse.Namespace) -> list[PreemptionMode]:
    """Return the preemption modes to try."""
    return cast(list[PreemptionMode], _names_of("--preemption-modes", options.preemption_modes, PREEMPTION_MODES))


def engine_of(options: argparse.Namespace, path: Path, requests: Sequence[TraceRequest]) -> EngineOptions:
    """Return the engine that the options describe, with one device block and no tiers.

    Warns if the trace has fewer sessions than may run at a time: the limit then has no effect.
    """
    sessions = {at if row.session is None else row.session for at, row in enumerate(requests)}
    if options.sessions is not None and options.sessions > len(sessions):
        _log.warning("--sessions is %d, but %s has %d sessions: all run at once", options.sessions, path, len(sessions))
    hybrid, size = memory_of_cache(options, path, requests, options.block_size)
    return EngineOptions(
        device_blocks=1,
        block_size=options.block_size,
        bytes_per_block=size,
        hybrid=hybrid,
        host_bandwidth=options.host_bandwidth * 1e9,
        prefix_caching=options.prefix_caching,
        max_concurrent_sessions=options.sessions,
        **_limits_of(options),
    )


def bytes_per_block(options: argparse.Namespace, requests: Sequence[TraceRequest]) -> int:
    """Bytes of a block. For a model with windows or states, the mean over the trace's requests at their full length."""
    if options.bytes_per_token is not None or options.model_config is None:
        return int((options.bytes_per_token or _BYTES_PER_TOKEN) * options.block_size)
    memory = _memory_of(options)
    lengths = [request.input_tokens + request.output_tokens for request in requests] or [options.block_size]
    total: int = sum(map(memory.bytes, lengths))
    return max(-(-total * int(options.block_size) // max(sum(lengths), 1)), 1)


def _memory_of(options: argparse.Namespace, ranks: int | None = None) -> ModelMemory:
    """Return what the model of `--model-config` caches on all ranks of an engine, or on other ones, together."""
    ranks = ranks or ranks_of(options)
    dtype = None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    memory = ModelMemory.from_config(options.model_config, dtype=dtype)
    _check_ranks(options, memory, ranks)
    return replace(memory, layers=tuple(_on_ranks(layer, ranks) for layer in memory.layers))


def _check_ranks(options: argparse.Namespace, memory: ModelMemory, ranks: int) -> None:
    """Refuse a number of accelerators that cannot share the model's heads equally, as vLLM does."""
    of_queries = read_config(options.model_config).get("num_attention_heads")
    if isinstance(of_queries, int) and of_queries % ranks:
        raise InvalidArgumentError(f"--tensor-parallel-size is {ranks}, must divide the {of_queries} attention heads")
    for heads in (layer.heads for layer in memory.layers if layer.heads % ranks):
        if ranks % heads:
            raise InvalidArgumentError(f"--tensor-parallel-size is {ranks}, must divide the {heads} heads of keys")


def _on_ranks(layer: LayerCache, ranks: int) -> LayerCache:
    """Return what a layer caches on several ranks: each has a head at least, and latent entries as a whole."""
    if layer.kind in {"recurrent", "conv"}:
        return layer
    copies = max(1, ranks // layer.heads) if layer.heads else ranks
    return replace(layer, entry_bytes=layer.entry_bytes * copies, heads=layer.heads * copies)


def _distinct(requests: Sequence[TraceRequest], block_size: int) -> int:
    """Distinct blocks of the prompts; all blocks if the trace has no hash ids."""
    if any(len(request.hash_ids) for request in requests):
        trace = PackedTrace.of(requests)
        return trace.num_distinct * trace.block_tokens // block_size
    return sum(-(-request.input_tokens // block_size) for request in requests)


def _name(options: EngineOptions) -> str:
    host = f" + {options.host_blocks} host" if options.host_blocks else ""
    return f"{options.device_blocks} device{host} blocks, {options.eviction}, {options.preemption_mode}"


def _draw_times(reports: Sequence[tuple[Path, list[Served]]], drawing: Any) -> dict[str, object]:
    figures = {}
    for path, engines in reports:
        for title in ("TTFT", "TPOT"):
            samples = {_name(served.options): getattr(served.times, title.lower()) for served in engines}
            figures[f"{title} of {path.name}"] = drawing.cdf_figure(samples, (title, "s"))
    return figures


_TIMES_LEGEND: Final = (
    "device, host: blocks of an engine; policy: eviction; preempt: how a sequence is preempted; TTFT: to first token",
    "TPOT: time per token after the first; latency: from arrival to last token, mean; tokens/s: generated",
    "hits: share of the prompts' tokens that were cached; preempted: preemptions",
)


def _show_times(title: str, engines: Sequence[Served], stream: TextIO, *, is_known: bool) -> None:
    """Print the times of engines, and their hits if it is known which prompts share a beginning."""
    print(f"{title}; times in milliseconds", file=stream)
    print(
        "   device     host policy   preempt   TTFT mean      p99  TPOT mean  latency  tokens/s  hits  preempted",
        file=stream,
    )
    for served in engines:
        options, found = served.options, served.as_dict()
        ttft, tpot, latency = found["ttft"], found["tpot"], found["latency"]
        sizes = f"{options.device_blocks:>9} {options.host_blocks:>8}"
        what = f"{options.eviction:<8} {options.preemption_mode:<9}"
        times = f"{_ms(ttft, 'mean'):>9} {_ms(ttft, 'p99'):>8} {_ms(tpot, 'mean', 1):>10} {_ms(latency, 'mean'):>8}"
        hits = f"{served.times.hit_rate:.1%}" if is_known else "-"
        rates = f"{served.output_rate:>9.0f} {hits:>5} {served.preemptions:>10}"
        print(f"{sizes} {what} {times} {rates}", file=stream)
        _show_classes(served.times.classes, stream)
        if served.times.refused:
            print(f"   {served.times.refused} requests need more blocks than the device has", file=stream)
    print("\n".join(_TIMES_LEGEND), file=stream)


def _ms(times: dict[str, float], name: str, digits: int = 0) -> str:
    return f"{times[name] * _MILLISECONDS:.{digits}f}" if times else ""
