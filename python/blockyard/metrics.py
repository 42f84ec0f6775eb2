"""Prometheus metrics of caches, schedulers, block managers and stores: `pip install "blockyard[metrics]"`.

    from prometheus_client import REGISTRY, start_http_server
    from blockyard.metrics import Collector

    REGISTRY.register(Collector(cache, scheduler, labels={"engine": "0"}))
    start_http_server(9400)

Nothing is counted for it: a scrape reads the counters that the objects keep anyway. `docs/metrics.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from blockyard._core import BlockManager
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Scheduler
from blockyard.stores import ExternalStore
from blockyard.workers import missing

try:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    from blockyard.cache import KVCache
    from blockyard.prefix_store import LOAD_SECONDS, PrefixStore
except ModuleNotFoundError as error:
    raise missing("blockyard.metrics", error) from None

__all__ = ["Collector"]

# Reasons for misses that are exported from the first scrape on. Stores add their own.
_MISSES: Final = dict.fromkeys(("absent", "timeout", "no_room", "unavailable", "copy_failed"), 0)


@dataclass(frozen=True)
class _Spec:
    """One metric: how it is read, off what `stats` of its source gives or the source itself."""

    name: str
    text: str
    read: Callable[[Any], float | Mapping[str, float]]
    label: str = ""
    """Of the keys that `read` gives; '': it gives one number."""


def _by_tier(name: str, text: str, attribute: str) -> _Spec:
    return _Spec(name, text, lambda stats: getattr(stats, attribute), "tier")


def _one(name: str, text: str, attribute: str = "") -> _Spec:
    return _Spec(name, text, lambda stats: getattr(stats, attribute or name))


def _usage(stats: Any) -> dict[str, float]:
    return {tier: used / max(1, stats.num_blocks[tier]) for tier, used in stats.used_blocks.items()}


_MANAGER_GAUGES: Final = (
    _Spec("kv_cache_usage_perc", "Part of a tier's blocks in use, 0 to 1.", _usage, "tier"),
    _by_tier("blocks", "Blocks of a tier.", "num_blocks"),
    _by_tier("used_blocks", "Blocks in use: referenced, or leased by transfers.", "used_blocks"),
    _by_tier("leased_blocks", "Blocks that transfers lease.", "leased_blocks"),
    _by_tier("cached_blocks", "Blocks that the prefix cache finds.", "cached_blocks"),
    _by_tier("pinned_blocks", "Blocks that pins keep.", "pinned_blocks"),
    _one("sequences", "Open sequences."),
    _Spec("open_tickets", "Steps whose transfers have not ended.", lambda stats: len(stats.open_tickets)),
)
_MANAGER_COUNTERS: Final = (
    _one("steps", "Decisions taken."),
    _one("prompts", "Prompts admitted with their token ids."),
    _Spec("prefix_cache_queries", "Tokens of prompts looked up.", lambda stats: stats.hit_tokens + stats.missed_tokens),
    _one("prefix_cache_hits", "Tokens of prompts that need not be computed.", "hit_tokens"),
    _one("host_hit_blocks", "Cached blocks of prompts that only the host had.", "loaded_blocks"),
    _one("merged_blocks", "Blocks computed twice and merged into one."),
    _one("copied_blocks", "Copies on write."),
    _by_tier("evicted_blocks", "Cached blocks evicted.", "evicted_blocks"),
    _by_tier("swapped_out_blocks", "Blocks swapped out to a tier.", "swapped_out_blocks"),
    _by_tier("swapped_in_blocks", "Blocks swapped in from a tier.", "swapped_in_blocks"),
    _one("moved_blocks", "Blocks moved by defragmentation."),
    _one("cancelled_moves", "Moves given up: the block was written, freed or leased meanwhile."),
    _one("failed_moves", "Moves whose bytes did not land."),
)
_SCHEDULER_GAUGES: Final = (
    _one("num_requests_running", "Requests that run.", "num_running"),
    _one("num_requests_swapped", "Requests whose blocks are swapped out.", "num_swapped"),
    _one("num_requests_loading", "Requests held back while the prefix store loads their prompts.", "num_loading"),
    _one("num_requests_unfinished", "Requests added and not ended.", "num_unfinished"),
)
_SCHEDULER_COUNTERS: Final = (
    _Spec(
        "num_preemptions",
        "Requests preempted, by what became of their blocks.",
        lambda stats: {
            "swap_host": stats.preempted_swap_host,
            "swap_external": stats.preempted_swap_external,
            "recompute": stats.preempted_recompute,
        },
        "mode",
    ),
    _one("scheduled_tokens", "Tokens scheduled.", "tokens"),
    _one("lost_sequences", "Sequences that lost bytes in a transfer and started again.", "lost"),
    _one("refused_requests", "Requests ended because the device became too small.", "refused"),
    _one("spec_decode_num_drafts", "Rows that computed draft tokens."),
    _one("spec_decode_num_draft_tokens", "Draft tokens computed."),
    _one("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
)
_PREFIX_STORE_COUNTERS: Final = (
    _one("prefix_store_prefetches", "Prompts that lacked blocks when they were prefetched.", "prefetches"),
    _one("prefix_store_hit_blocks", "Blocks loaded from the prefix store.", "hit_blocks"),
    _one("prefix_store_hit_bytes", "Bytes loaded from the prefix store.", "hit_bytes"),
    _Spec("prefix_store_misses", "Blocks or prompts not served, by reason.", lambda s: _MISSES | s.misses, "reason"),
    _one("prefix_store_written_blocks", "Blocks written to the prefix store, or there already.", "written_blocks"),
    _one("prefix_store_written_bytes", "Bytes written to the prefix store.", "written_bytes"),
    _one("prefix_store_unwritten_blocks", "Blocks not written to the prefix store.", "unwritten_blocks"),
)
_STORE_GAUGES: Final = (
    _one("store_cached_blocks", "Blocks of a store that can be read.", "cached_blocks"),
    _one("store_pending_bytes", "Bytes of blocks in flight and of results not collected.", "pending_bytes"),
    _one("store_errors_in_a_row", "Errors of a store since it answered last.", "errors_in_a_row"),
)
_STORE_COUNTERS: Final = (
    _one("store_written_blocks", "Blocks written.", "written_blocks"),
    _one("store_written_bytes", "Bytes written.", "written_bytes"),
    _one("store_read_blocks", "Blocks read.", "read_blocks"),
    _one("store_read_bytes", "Bytes read.", "read_bytes"),
    _Spec("store_misses", "Blocks not read, by reason.", lambda stats: stats.misses, "reason"),
    _one("store_errors", "Errors of a store.", "errors"),
    _one("store_evicted_blocks", "Blocks evicted.", "evicted_blocks"),
)


class Collector:
    """Metrics for a registry of `prometheus_client`, under names that begin with `blockyard_`.

    Args:
        sources: objects of this process that belong together: a `KVCache`, which brings its manager and its stores, a
            `Scheduler`, which brings its manager, a `BlockManager`, or stores.
        labels: of every metric, to tell several collectors of a registry apart.

    Raises:
        ImportError: prometheus-client is not installed; raised on import.
        InvalidArgumentError: a source is none of these, or two of them have a manager or scheduler each.
    """

    def __init__(
        self, *sources: KVCache | Scheduler | BlockManager | ExternalStore, labels: Mapping[str, str] | None = None
    ) -> None:
        self._labels = dict(labels or {})
        self._objects: dict[str, Any] = {}
        self._stores: dict[str, ExternalStore] = {}
        for source in sources:
            self._add(source)

    def collect(self) -> Iterator[Metric]:
        """Give all metrics, as of now."""
        if (manager := self._objects.get("manager")) is not None:
            stats = manager.stats()
            yield from self._gauges(_MANAGER_GAUGES, {"": stats})
            yield from self._counters(_MANAGER_COUNTERS, {"": stats})
        if (scheduler := self._objects.get("scheduler")) is not None:
            yield from self._gauges(_SCHEDULER_GAUGES, {"": scheduler})
            yield from self._counters(_SCHEDULER_COUNTERS, {"": scheduler.stats()})
        if (prefix_store := self._objects.get("prefix store")) is not None:
            yield from self._of_prefix_store(prefix_store)
        if self._stores:
            by_store = {name: store.stats() for name, store in self._stores.items()}
            yield from self._gauges(_STORE_GAUGES, by_store)
            yield from self._counters(_STORE_COUNTERS, by_store)

    def _add(self, source: object) -> None:
        match source:
            case KVCache():
                self._keep("manager", source.manager)
                if source.swap_store is not None:
                    self._stores["swap"] = source.swap_store
                if source.prefix_store is not None:
                    self._keep("prefix store", source.prefix_store)
                    self._stores["prefix"] = source.prefix_store.store
            case Scheduler():
                self._keep("scheduler", source)
                self._keep("manager", source.manager)
            case BlockManager():
                self._keep("manager", source)
            case ExternalStore():
                self._stores[type(source).__name__] = source
            case _:
                raise InvalidArgumentError(
                    f"a source is {source!r}, must be a KVCache, Scheduler, BlockManager or ExternalStore"
                )

    def _keep(self, kind: str, found: object) -> None:
        if self._objects.setdefault(kind, found) is not found:
            raise InvalidArgumentError(f"two sources have a {kind} each: give each a Collector, and labels")

    def _of_prefix_store(self, source: PrefixStore) -> Iterator[Metric]:
        stats = source.stats()
        yield from self._counters(_PREFIX_STORE_COUNTERS, {"": stats})
        waiting = _one("prefix_store_waiting_blocks", "Blocks to be written, and not there yet.", "waiting_blocks")
        yield from self._gauges((waiting,), {"": source})
        loads = HistogramMetricFamily(
            "blockyard_prefix_store_load_seconds", "How long prefetches took.", labels=list(self._labels)
        )
        ends = [*map(str, LOAD_SECONDS), "+Inf"]
        buckets = list(zip(ends, accumulate(stats.load_seconds), strict=True))
        loads.add_metric(list(self._labels.values()), buckets, stats.load_seconds_sum)
        yield loads

    def _gauges(self, specs: tuple[_Spec, ...], sources: Mapping[str, object]) -> Iterator[Metric]:
        return self._families(GaugeMetricFamily, specs, sources)

    def _counters(self, specs: tuple[_Spec, ...], sources: Mapping[str, object]) -> Iterator[Metric]:
        return self._families(CounterMetricFamily, specs, sources)

    def _families(
        self,
        make: type[GaugeMetricFamily | CounterMetricFamily],
        specs: tuple[_Spec, ...],
        sources: Mapping[str, object],
    ) -> Iterator[Metric]:
        of_store = "" not in sources
        for spec in specs:
            names = [*self._labels, *(["store"] if of_store else []), *([spec.label] if spec.label else [])]
            family = make(f"blockyard_{spec.name}", spec.text, labels=names)
            for store, source in sources.items():
                value = spec.read(source)
                own = [*self._labels.values(), *([store] if of_store else [])]
                for key, number in value.items() if isinstance(value, Mapping) else (("", value),):
                    family.add_metric([*own, key] if spec.label else own, number)
            yield family
