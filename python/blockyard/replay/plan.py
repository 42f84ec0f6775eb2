"""Plans: which host memory, store and policy pay off for a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np

from blockyard.errors import InvalidArgumentError
from blockyard.replay.engine import EngineOptions, StepTime
from blockyard.replay.serving import Served, serve_all
from blockyard.scheduler import PreemptionMode
from blockyard.traces import TraceRequest

__all__ = ["Choice", "Plan", "Prices", "make_plan"]

GIB: Final = 1 << 30
_QUANTILE: Final = 0.9


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in any currency.

    Attributes:
        device: price of one engine's accelerators.
        host_gib: price of a GiB of host memory.
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
    """One engine of a plan.

    Attributes:
        served: how it served the trace.
        per_hour: its price per hour.
        is_best: whether no other choice is both cheaper per token and faster.
    """

    served: Served
    per_hour: float
    is_best: bool = False

    @property
    def per_million_tokens(self) -> float:
        """Cost of a million generated tokens if the engine is always busy."""
        times = self.served.times
        done = ~np.isnan(times.last_token)
        tokens = times.output_tokens[done].sum()
        return float(self.per_hour * times.busy_seconds / 3600 / tokens * 1e6) if tokens else float("inf")

    @property
    def ttft(self) -> float:
        """90th percentile of the time to first token, in seconds."""
        times = self.served.times.ttft
        return float(np.quantile(times, _QUANTILE)) if len(times) else float("inf")

    @property
    def host_gib(self) -> float:
        """Host memory in GiB."""
        return self.served.options.host_blocks * self.served.options.bytes_per_block / GIB

    @property
    def store_gib(self) -> float:
        """Size of the store in GiB."""
        return self.served.options.store_blocks * self.served.options.bytes_per_block / GIB

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        return self.served.as_dict() | {
            "host_gib": self.host_gib,
            "store_gib": self.store_gib,
            "cost_per_hour": self.per_hour,
            "cost_per_million_output_tokens": self.per_million_tokens,
            "is_on_front": self.is_best,
        }


@dataclass(frozen=True, eq=False)
class Plan:
    """All choices, and the recommended one.

    Attributes:
        choices: the choices, in the order of their cost per token.
        recommended: the cheapest choice whose time to first token is within the limit; None if there is none.
        max_ttft: that limit in seconds; infinite without one.
    """

    choices: Sequence[Choice]
    recommended: Choice | None
    max_ttft: float

    def sentence(self) -> str:
        """Return a sentence that recommends a choice and says why."""
        if self.recommended is None:
            quickest = min(self.choices, key=lambda choice: choice.ttft)
            return (
                f"No choice gives 90 % of first tokens within {self.max_ttft:g} s; the fastest gives them within "
                f"{quickest.ttft:.3g} s: {_words(quickest)}."
            )
        choice = self.recommended
        highest = max(other.per_million_tokens for other in self.choices)
        why = "the cheapest" if self.max_ttft == float("inf") else f"the cheapest within {self.max_ttft:g} s"
        return (
            f"Take {_words(choice)}: {choice.per_million_tokens:.3g} per million generated tokens, and 90 % of first "
            f"tokens within {choice.ttft:.3g} s. It is {why}; the most expensive costs {highest:.3g}."
        )

    def configuration(self) -> tuple[str, dict[str, Any] | None]:
        """Return the recommended engine as arguments of `KVCache`, and as vLLM's `--kv-transfer-config`.

        The second is None without host memory, since vLLM's offloading needs it.

        Raises:
            InvalidArgumentError: nothing is recommended.
        """
        if self.recommended is None:
            raise InvalidArgumentError(f"max_ttft is {self.max_ttft:g} seconds, and no choice is that fast")
        options = self.recommended.served.options
        host = options.host_blocks * options.bytes_per_block
        store = options.store_blocks * options.bytes_per_block
        lines = [f"device_blocks={options.device_blocks}", f"host_blocks={options.host_blocks}"]
        caching = f'PrefixCaching(eviction="{options.eviction}", host={options.host_blocks > 0})'
        lines.append(f"prefix_caching={caching}")
        extra: dict[str, Any] = {
            "spec_module_path": "blockyard.integrations.vllm",
            "spec_name": "BlockyardSpec",
            "host_bytes": f"{host / GIB:g}GiB",
            "policy": options.eviction,
        }
        if store:
            url = f"file:///var/cache/blockyard?size={store / GIB:g}GiB"
            lines.append(f'prefix_store="{url}", namespace=b"MODEL@REVISION"')
            extra["prefix_store"] = url
        vllm = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return f"KVCache(layout, {', '.join(lines)})", vllm if host else None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        found: dict[str, Any] = {
            "recommendation": self.sentence(),
            "choices": [choice.as_dict() for choice in self.choices],
            "recommended": None,
        }
        if self.recommended is not None:
            cache, vllm = self.configuration()
            found["recommended"] = {
                "choice": list(self.choices).index(self.recommended),
                "kv_cache": cache,
                "kv_transfer_config": vllm,
            }
        return found


def _words(choice: Choice) -> str:
    options = choice.served.options
    host = f"{choice.host_gib:g} GiB of host memory" if options.host_blocks else "no host memory"
    store = f", a store of {choice.store_gib:g} GiB" if options.store_blocks else ""
    return f"{host}{store}, {options.eviction} eviction and {options.preemption_mode} preemption"


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
    max_ttft: float = float("inf"),
    executor: Executor | None = None,
    show: Callable[[int], object] = bool,
) -> Plan:
    """Serve a trace with every choice, and recommend one.

    Args:
        requests: the trace.
        engine: options that all choices share.
        step_time: predicts how long a step takes.
        prices: prices per hour.
        host_gib: sizes of the host tier to try, in GiB.
        store_gib: sizes of the store to try, in GiB.
        policies: eviction policies to try.
        preemption_modes: preemption modes to try; without host memory only the first, since nothing can be swapped.
        max_ttft: time in seconds within which 90 % of first tokens must arrive.
        executor: runs the replays; None for this thread.
        show: called with the number of choices that are done.

    Raises:
        InvalidArgumentError: an option is out of range, or no request fits the device.
    """
    engines = []
    for host, store, policy, mode in product(host_gib, store_gib, policies, preemption_modes):
        if not host and mode != preemption_modes[0]:
            continue
        blocks = [int(size * GIB // engine.bytes_per_block) for size in (host, store)]
        engines.append(
            replace(engine, host_blocks=blocks[0], store_blocks=blocks[1], eviction=policy, preemption_mode=mode)
        )
    served = serve_all(requests, engines, step_time, executor=executor, show=show)
    if all(one.times.refused == len(requests) for one in served):
        shortest = min(-(-(row.input_tokens + row.output_tokens) // engine.block_size) for row in requests)
        raise InvalidArgumentError(f"device_blocks is {engine.device_blocks}, the shortest request needs {shortest}")
    choices = sorted((Choice(one, prices.of(one.options)) for one in served), key=lambda one: one.per_million_tokens)
    marked, quickest = [], float("inf")
    for choice in choices:
        marked.append(replace(choice, is_best=choice.ttft < quickest))
        quickest = min(quickest, choice.ttft)
    return Plan(marked, next((choice for choice in marked if choice.ttft <= max_ttft), None), max_ttft)
