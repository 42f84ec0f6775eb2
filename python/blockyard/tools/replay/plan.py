"""Plans: how many engines, and which host memory, store and policy pay off for a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import PreemptionMode
from blockyard.tools.replay.engine import EngineOptions, StepTime, Times, replay_times
from blockyard.tools.replay.serving import Served, modes_with
from blockyard.tools.replay.sweep import run_all
from blockyard.tools.replay.traffic import has_prefixes, part_of, redraw_arrivals, spread_by_prefix
from blockyard.traces import TraceRequest

__all__ = ["Choice", "Configuration", "Plan", "Prices", "make_plan"]

GIB: Final = 1 << 30
_QUANTILE: Final = 0.9
_SAME: Final = 1e-6
"""Relative difference up to which two costs are equal."""
_BEHIND: Final = 0.1
"""Share of the time of all arrivals that engines must be behind, and first tokens late, to be overloaded."""
_KNEE: Final = 0.05
"""Share of the time that more host memory must save to be worth a mention."""


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in any currency.

    Attributes:
        device: price of one engine's accelerators.
        host_gib: price of a GiB of host memory; 0 for memory that you own.
        store_gib: price of a GiB of the store.
    """

    device: float
    host_gib: float
    store_gib: float

    def of(self, options: EngineOptions) -> float:
        """Return the price of one engine per hour."""
        host, store = (count * options.bytes_per_block / GIB for count in (options.host_blocks, options.store_blocks))
        return self.device + host * self.host_gib + store * self.store_gib


@dataclass(frozen=True, eq=False)
class Choice:
    """Engines of one kind that serve the trace.

    Attributes:
        options: options of each engine.
        engines: number of engines.
        runs: the times of all requests, for each seed of arrivals.
        per_hour: price of all engines per hour.
        by_clock: whether engines cost money while they have no requests.
        is_best: whether no other choice is both cheaper per token and faster.
    """

    options: EngineOptions
    engines: int
    runs: tuple[Times, ...]
    per_hour: float
    by_clock: bool = False
    is_best: bool = False

    @property
    def served(self) -> Served:
        """How the trace's own arrivals were served."""
        return Served(self.options, self.runs[0])

    @property
    def refused(self) -> int:
        """Requests that need more blocks than the device has. All times and costs leave them out."""
        return max(run.refused for run in self.runs)

    @property
    def costs(self) -> tuple[float, ...]:
        """Cost of a million generated tokens for each seed of arrivals."""
        return tuple(map(self._cost, self.runs))

    def _cost(self, times: Times) -> float:
        tokens = times.output_tokens[~np.isnan(times.last_token)].sum()
        # Not until the last write to the store has ended: engines that run on write it meanwhile.
        seconds = float(np.nanmax(times.last_token)) if self.by_clock and tokens else times.busy_seconds / self.engines
        return float(self.per_hour * seconds / 3600 / tokens * 1e6) if tokens else float("inf")

    @property
    def per_million_tokens(self) -> float:
        """Mean cost of a million generated tokens."""
        return float(np.mean(self.costs))

    @property
    def ttfts(self) -> tuple[float, ...]:
        """90th percentile of the time to first token in seconds, for each seed of arrivals."""
        return tuple(float(np.quantile(run.ttft, _QUANTILE)) if len(run.ttft) else float("inf") for run in self.runs)

    @property
    def ttft(self) -> float:
        """Mean of these percentiles."""
        return float(np.mean(self.ttfts))

    @property
    def host_gib(self) -> float:
        """Host memory of each engine in GiB."""
        return self.options.host_blocks * self.options.bytes_per_block / GIB

    @property
    def store_gib(self) -> float:
        """Size of each engine's store in GiB."""
        return self.options.store_blocks * self.options.bytes_per_block / GIB

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        return self.served.as_dict() | {
            "engines": self.engines,
            "host_gib": self.host_gib,
            "store_gib": self.store_gib,
            "cost_per_hour": self.per_hour,
            "cost_per_million_output_tokens": self.per_million_tokens,
            "costs": list(self.costs),
            "ttfts": list(self.ttfts),
            "is_on_front": self.is_best,
        }


@dataclass(frozen=True)
class Configuration:
    """What to paste to get the recommended engines.

    Attributes:
        kv_cache: the call of `KVCache`, whose sizes are those of one rank. Each rank has its own directory.
        scheduler: the call of `Scheduler`.
        vllm: the arguments of `vllm serve`, without the next one.
        kv_transfer_config: its `--kv-transfer-config`; None without host memory and store. With a store alone, it has
            host memory for the blocks on their way, which no choice has.
    """

    kv_cache: str
    scheduler: str
    vllm: str
    kv_transfer_config: dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class Plan:
    """All choices, and the recommended one.

    Attributes:
        choices: the choices, in the order of their cost per token, and of their time to first token where it is equal.
        recommended: the cheapest choice whose time to first token is within the limit for every seed, of those that
            refuse the fewest requests. Of choices that are not dearer for every seed, the fastest; None if none is
            within the limit.
        max_ttft: that limit in seconds; infinite without one.
        has_prefixes: whether the trace says which prompts share a beginning. If not, it says nothing about caches.
        arguments: more arguments of `vllm serve`.
        tensor_parallel_size: accelerators of an engine, which share the bytes of every block.
        longest_blocks: blocks of the longest request.
        is_one_draw: whether only the trace's own arrivals were served, and others of the same kind exist.
    """

    choices: Sequence[Choice]
    recommended: Choice | None
    max_ttft: float
    has_prefixes: bool = True
    arguments: str = ""
    tensor_parallel_size: int = 1
    longest_blocks: int = 0
    is_one_draw: bool = False

    def sentence(self) -> str:
        """Return sentences that recommend a choice, and say why and what more memory would bring."""
        why = _NO_PREFIXES if self.choices[0].options.prefix_caching else _NOT_CACHED
        about = self._refusals() + ("" if self.has_prefixes else why)
        draw = _ONE_DRAW if self.is_one_draw else ""
        about += _NO_STORE if self.has_prefixes and self.choices[0].options.hybrid is not None else ""
        if self.recommended is None:
            quickest = min(_least_refusing(self.choices), key=lambda choice: choice.ttft)
            return about + (
                f"No choice gives 90 % of first tokens within {self.max_ttft:g} s; the fastest gives them within "
                f"{three_digits(quickest.ttft)} s: {self._words(quickest)}.{draw}{_overload(quickest)}"
            )
        choice = self.recommended
        highest = max(other.per_million_tokens for other in self.choices)
        why = "the cheapest" if self.max_ttft == float("inf") else f"the cheapest within {self.max_ttft:g} s"
        return about + (
            f"Take {self._words(choice)}: {three_digits(choice.per_million_tokens)}{_spread(choice.costs)} per million "
            f"generated tokens, and 90 % of first tokens within {three_digits(choice.ttft)}{_spread(choice.ttfts)} s."
            + draw
            + (f" It is {why}; the most expensive costs {three_digits(highest)}." if len(self.choices) > 1 else "")
            + f"{self._ties()}{self._knee()}{_overload(choice)}"
        )

    def _refusals(self) -> str:
        """Return a sentence on the requests that even the best choices refuse."""
        best = _least_refusing(self.choices)[0]
        if not best.refused:
            return ""
        return (
            f"{best.refused} of {len(best.runs[0].arrival)} requests need more blocks than the device has; "
            "the times and costs are those of the others. "
        )

    def _words(self, choice: Choice) -> str:
        """Return a choice in words."""
        options = choice.options
        engines = f"{choice.engines} engines, each with " if choice.engines > 1 else ""
        device = three_digits(options.device_blocks * options.bytes_per_block / GIB)
        host = f"{three_digits(choice.host_gib)} GiB of host memory" if options.host_blocks else "no host memory"
        store = f", a store of {three_digits(choice.store_gib)} GiB" if options.store_blocks else ""
        policy = f", {options.eviction} eviction" if self.has_prefixes else ""
        rest = f"and {options.preemption_mode} preemption, beside {device} GiB on the device"
        return f"{engines}{host}{store}{policy} {rest}"

    def _ties(self) -> str:
        """Return a sentence on how many choices cost no more than arrivals change."""
        chosen = self.recommended
        if chosen is None:
            return ""
        others = [one for one in self.choices if one is not chosen]
        same = [one for one in others if not _is_more(one, chosen) and not _is_more(chosen, one)]
        count = "One other choice costs" if len(same) == 1 else f"{len(same)} other choices cost"
        return f" {count} as much, as far as the arrivals tell." if same else ""

    def _knee(self) -> str:
        """Say from which host size on more of it saves little of the busy time, and of the time to first token."""
        if (chosen := self.recommended) is None or not self.has_prefixes:
            return ""
        alike = [
            one
            for one in _least_refusing(self.choices)
            if one.engines == chosen.engines and _differ_in_host(one.options, chosen.options)
        ]
        most = max(one.host_gib for one in alike)
        knees = {
            "the engines' busy time": _knee_of({one.host_gib: one.served.times.busy_seconds for one in alike}),
            "the time to first token (90 %)": _knee_of({one.host_gib: one.ttft for one in alike}),
        }
        if all(knee == most for knee in knees.values()):
            return ""
        share, found = f"{100 * _KNEE:g} %", ""
        for time, knee in knees.items():
            if knee == most:
                found += f" Host memory up to {three_digits(most)} GiB, the most tried, still saves {share} of {time}."
            else:
                beyond = f" beyond {three_digits(knee)} GiB" if knee else ""
                found += f" Host memory{beyond} saves less than {share} of {time}."
        return found

    def configuration(self) -> Configuration:
        """Return what to paste for the recommended engines.

        Raises:
            InvalidArgumentError: nothing is recommended.
        """
        if self.recommended is None:
            raise InvalidArgumentError(f"max_ttft is {self.max_ttft:g} seconds, and no choice is that fast")
        options = self.recommended.options
        host = options.host_blocks * options.bytes_per_block
        store = options.store_blocks * options.bytes_per_block / GIB
        device = options.device_blocks * options.bytes_per_block
        in_bytes = options.hybrid is not None and options.hybrid.block_bytes > 0
        ranks = self.tensor_parallel_size
        lines = [f"device_blocks={options.device_blocks}", f"host_blocks={options.host_blocks}"]
        if in_bytes:  # blocks of each group's own size
            lines = [f"device_bytes={device // ranks}", f"host_bytes={host // ranks}"]
        if self.has_prefixes and options.prefix_caching:
            caching = f'PrefixCaching(eviction="{options.eviction}", host={options.host_blocks > 0})'
            lines.append(f"prefix_caching={caching}")
        extra: dict[str, Any] = {"host_bytes": f"{three_digits((host or self._staging(options)) / GIB)}GiB"}  # of all
        if store:
            folder = "file:///var/cache/blockyard"
            url = f"{folder}{'-RANK' * (ranks > 1)}?size={three_digits(store / ranks)}GiB"
            lines.append(f'prefix_store="{url}", prefix_writes="{options.store_writes}", namespace=b"MODEL@REVISION"')
            extra["prefix_store"] = f"{folder}?size={three_digits(store)}GiB"  # of all workers
            if options.store_writes != "through":
                extra["prefix_writes"] = options.store_writes
        limits = (("max_num_seqs", options.max_num_seqs), ("max_num_batched_tokens", options.max_num_batched_tokens))
        scheduler = ", ".join(f"{name}={value}" for name, value in limits)
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in limits]
        memory = (
            f"--kv-cache-memory-bytes {device // ranks}"  # of each accelerator
            if in_bytes
            else f"--num-gpu-blocks-override {options.device_blocks}"
        )
        flags = [f"--block-size {options.block_size}", memory, *flags]
        flags = [f"--tensor-parallel-size {ranks}"] * (ranks > 1) + flags
        # Its host holds what the device evicts, as that of the replay does. It has no option for the policy.
        vllm = {
            "kv_connector": "BlockyardKVConnector",
            "kv_connector_module_path": "blockyard.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        return Configuration(
            f"KVCache(layout, {', '.join(lines)})",
            f'Scheduler(cache, {scheduler}, preemption_mode="{options.preemption_mode}")',
            " ".join([f"vllm serve MODEL{self.arguments}", *flags]),
            vllm if host or store else None,
        )

    def _staging(self, options: EngineOptions) -> int:
        """Return the bytes, in whole GiB, through which vLLM's connector loads and stores without a host tier.

        A prompt of which the store has more than half of these is not retried where there is no room.
        """
        return max(1, -(-2 * self.longest_blocks * options.bytes_per_block // GIB)) * GIB

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        found: dict[str, Any] = {
            "recommendation": self.sentence(),
            "has_prefixes": self.has_prefixes,
            "choices": [choice.as_dict() for choice in self.choices],
            "recommended": None,
        }
        if self.recommended is not None:
            paste = self.configuration()
            found["recommended"] = {
                "choice": list(self.choices).index(self.recommended),
                "engines": self.recommended.engines,
                "kv_cache": paste.kv_cache,
                "scheduler": paste.scheduler,
                "vllm": paste.vllm,
                "kv_transfer_config": paste.kv_transfer_config,
            }
        return found


_NO_PREFIXES: Final = (
    "The trace does not say which prompts share a beginning, so this plan says nothing about caches: eviction policies "
    "and stores were not compared. "
)
_NOT_CACHED: Final = "Prefixes are not cached, so eviction policies and stores were not compared. "
_ONE_DRAW: Final = " This is one draw of the arrivals, and others may differ a lot: --arrival-seeds 5 serves five."
_NO_STORE: Final = "No store was compared: a model with windows or states is replayed without one. "


def make_plan(
    requests: Sequence[TraceRequest],
    engine: EngineOptions,
    step_time: StepTime,
    prices: Prices,
    *,
    host_gib: Sequence[float],
    store_gib: Sequence[float] = (0,),
    policies: Sequence[str] = ("adaptive",),
    preemption_modes: Sequence[PreemptionMode] = ("swap", "recompute"),
    engines: Sequence[int] = (),
    arrival_seeds: int = 1,
    max_ttft: float = float("inf"),
    arguments: str = "",
    tensor_parallel_size: int = 1,
    executor: Executor | None = None,
    show: Callable[[int, int], object] = max,
) -> Plan:
    """Serve a trace with every choice, and recommend one.

    Args:
        requests: the trace.
        engine: options that all choices share.
        step_time: predicts how long a step takes.
        prices: prices per hour.
        host_gib: sizes of the host tier to try, in GiB.
        store_gib: sizes of the store to try, in GiB; none for a trace without prefixes.
        policies: eviction policies to try; only the first for a trace without prefixes.
        preemption_modes: preemption modes to try; without host memory only `"auto"` or `"recompute"`, see `modes_with`.
        engines: numbers of engines to try, which share the requests by prefix, and cost money all the time. Empty for
            one engine that is always busy: its pauses cost nothing.
        arrival_seeds: how often each choice serves the trace, each time with other arrivals of the same kind.
        max_ttft: time in seconds within which 90 % of first tokens must arrive.
        arguments: more arguments of `vllm serve`, for what to paste.
        tensor_parallel_size: accelerators of an engine, for what to paste.
        executor: runs the replays; None for this thread.
        show: called with the number of replays that are done, and of all.

    Raises:
        InvalidArgumentError: an option is out of range, or no request fits the device.
    """
    if arrival_seeds < 1:
        raise InvalidArgumentError(f"arrival_seeds is {arrival_seeds}, must be at least 1")
    prefixes = has_prefixes(requests) and engine.prefix_caching
    store_gib, policies = (store_gib, policies) if prefixes else ((0,), policies[:1])
    kinds, counts = _kinds(engine, host_gib, store_gib, policies, preemption_modes), list(engines) or [1]
    spread = [spread_by_prefix(requests, count) for count in counts]
    drawn = [redraw_arrivals(requests, seed) for seed in range(arrival_seeds)]
    calls, places = [], []
    for options, places_of, arrivals in product(kinds, spread, drawn):
        parts = [part for part in places_of if part]
        places.append(parts)
        calls += [partial(replay_times, part_of(arrivals, part), options, step_time) for part in parts]
    times = iter(run_all(calls, executor, lambda done: show(done, len(calls))))
    runs = [_join([next(times) for _ in parts], parts, len(requests)) for parts in places]
    sizes = [-(-(row.input_tokens + row.output_tokens) // engine.block_size) for row in requests]
    if all(run.refused == len(requests) for run in runs):
        raise InvalidArgumentError(f"device_blocks is {engine.device_blocks}, {_least_of(min(sizes), engine)}")
    seeds = [tuple(runs[at : at + arrival_seeds]) for at in range(0, len(runs), arrival_seeds)]
    choices = [
        Choice(options, count, of_choice, prices.of(options) * count, by_clock=bool(engines))
        for (options, count), of_choice in zip(product(kinds, counts), seeds, strict=True)
    ]
    marked = _marked(choices, _recommend(choices, max_ttft))
    is_one_draw = arrival_seeds == 1 and redraw_arrivals(requests, 1) != list(requests)
    return Plan(*marked, max_ttft, prefixes, arguments, tensor_parallel_size, max(sizes), is_one_draw)


def _least_of(shortest: int, engine: EngineOptions) -> str:
    """Return what the shortest request, whose tokens fill `shortest` blocks, needs, in words."""
    if engine.hybrid is not None:
        return "too few for any request: beside its blocks, each has the windows and states of the model"
    return f"the shortest request needs {shortest}"


def _kinds(
    engine: EngineOptions,
    host_gib: Sequence[float],
    store_gib: Sequence[float],
    policies: Sequence[str],
    preemption_modes: Sequence[PreemptionMode],
) -> list[EngineOptions]:
    """Return every combination."""
    found: dict[EngineOptions, None] = {}
    for host, store, policy in product(host_gib, store_gib, policies):
        blocks = [int(size * GIB // engine.bytes_per_block) for size in (host, store)]
        sized = replace(engine, host_blocks=blocks[0], store_blocks=blocks[1], eviction=policy)
        found |= dict.fromkeys(replace(sized, preemption_mode=mode) for mode in modes_with(blocks[0], preemption_modes))
    return list(found)


def _overload(choice: Choice) -> str:
    """Return a sentence if requests arrive faster than the engines serve them, and so wait ever longer."""
    times = choice.runs[0]
    arrive, busy = float(np.nanmax(times.arrival)), times.busy_seconds / choice.engines
    if busy < arrive * (1 + _BEHIND) or choice.ttft < arrive * _BEHIND:
        return ""
    engines = "One engine" if choice.engines == 1 else f"{choice.engines} engines"
    return (
        f" {engines} cannot keep up: the requests arrive within {three_digits(arrive)} s and need "
        f"{three_digits(busy)} s of {'its' if choice.engines == 1 else 'their'} time; try more (--engines)."
    )


def _differ_in_host(one: EngineOptions, other: EngineOptions) -> bool:
    """Whether engines differ at most in host memory, and without it in the preemption that it allows."""
    has_both = one.host_blocks and other.host_blocks
    mode = one.preemption_mode if has_both else other.preemption_mode
    return replace(one, host_blocks=0, preemption_mode=mode) == replace(other, host_blocks=0)


def _marked(choices: Sequence[Choice], recommended: Choice | None) -> tuple[list[Choice], Choice | None]:
    """Return the choices in order of cost, then of time to first token, with the front marked; and the recommended."""
    marked, quickest, chosen = [], float("inf"), None
    comparable = _least_refusing(choices)
    for choice in sorted(choices, key=lambda one: (float(f"{one.per_million_tokens:.6g}"), one.ttft)):
        is_best = choice in comparable and choice.ttft < quickest
        marked.append(replace(choice, is_best=is_best))
        quickest = choice.ttft if is_best else quickest
        chosen = marked[-1] if choice is recommended else chosen
    return marked, chosen


def _recommend(choices: Sequence[Choice], max_ttft: float) -> Choice | None:
    """Return the cheapest choice; where arrivals decide which that is, the fastest, and then the first.

    A choice that refuses more requests than another one does is never recommended.
    """
    fitting = [choice for choice in _least_refusing(choices) if max(choice.ttfts) <= max_ttft]
    if not fitting:
        return None
    cheapest = min(fitting, key=lambda choice: choice.per_million_tokens)
    equal = [choice for choice in fitting if not _is_more(choice, cheapest)]
    fastest = min(equal, key=lambda choice: choice.ttft)
    pairs = ((choice, zip(choice.ttfts, fastest.ttfts, strict=True)) for choice in equal)
    return next(choice for choice, seeds in pairs if any(mine <= its * (1 + _SAME) for mine, its in seeds))


def _least_refusing(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that refuse the fewest requests."""
    fewest = min(choice.refused for choice in choices)
    return [choice for choice in choices if choice.refused == fewest]


def _is_more(choice: Choice, other: Choice) -> bool:
    """Whether a choice costs more than another one for every seed of arrivals."""
    return all(mine > its * (1 + _SAME) for mine, its in zip(choice.costs, other.costs, strict=True))


def _knee_of(seconds: Mapping[float, float]) -> float:
    """Return the least size whose time is nearly the shortest one."""
    return min(size for size, time in seconds.items() if time <= min(seconds.values()) * (1 + _KNEE))


def three_digits(value: float) -> str:
    """Return a number to three significant digits, or a whole number: blocks do not fill a size in GiB exactly."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float]) -> str:
    low, high = three_digits(min(values)), three_digits(max(values))
    return f" ({low} to {high} for {len(values)} seeds of arrivals)" if len(values) > 1 else ""


def _join(parts: Sequence[Times], places: Sequence[Sequence[int]], count: int) -> Times:
    """Join the times of several engines into those of the whole trace."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Any] = {}
    for name in ("arrival", "queued", "scheduled", "first_token", "last_token", "output_tokens"):
        whole = np.zeros(count, getattr(parts[0], name).dtype)
        for part, indices in zip(parts, places, strict=True):
            whole[list(indices)] = getattr(part, name)
        found[name] = whole
    for name in ("refused", "steps", "busy_seconds", "loaded_blocks"):
        found[name] = sum(getattr(part, name) for part in parts)
    prompts = [len(indices) for indices in places]
    names = [field.name for field in fields(parts[0].scheduler)]
    scheduler = {name: sum(getattr(part.scheduler, name) for part in parts) for name in names}
    stores = [part.store for part in parts if part.store is not None]
    return Times(
        **found,
        seconds=max(part.seconds for part in parts),
        scheduler=type(parts[0].scheduler)(**scheduler),
        hit_rate=float(np.average([part.hit_rate for part in parts], weights=prompts)),
        store={name: sum(store[name] for store in stores) for name in stores[0]} if stores else None,
    )
