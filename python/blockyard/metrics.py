"""Prometheus metrics of caches, schedulers, block managers and stores: `pip install "blockyard[metrics]"`.

    from prometheus_client import REGISTRY, start_http_server
    from blockyard.metrics import Collector

    REGISTRY.register(Collector(cache, scheduler, labels={"engine": "0"}))
    start_http_server(9400)

A scrape reads counters that exist anyway. Only the residency of blocks is measured for the collector, on a sample of
the blocks. `docs/operate/metrics.md` lists the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, nan
from typing import Any, Final, TypeAlias

from blockyard._core import BlockManager
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.offload import OffloadManager
from blockyard.scheduler import Scheduler
from blockyard.stores import ExternalStore, StoreStats
from blockyard.stores.base import fails_since
from blockyard.types import Histogram
from blockyard.workers.extras import missing

try:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    from blockyard.cache import KVCache
    from blockyard.prefix_store import PrefixStore
except ModuleNotFoundError as error:
    raise missing("blockyard.metrics", error) from None

__all__ = ["Collector"]

# Reasons for misses that are exported from the first scrape on. Plug-ins may add others.
_STORE_MISSES: Final = dict.fromkeys(
    (
        *("empty", "lost", "absent", "forgotten", "io", "error", "timeout", "unavailable", "closed"),
        *("queue_full", "refused", "magic", "version", "header_checksum", "namespace", "key", "slot"),
        *("generation", "length", "payload_checksum", "truncated", "codec"),
    ),
    0,
)
_MISSES: Final = dict.fromkeys((*_STORE_MISSES, "no_room", "copy_failed", "interrupted"), 0)

_Source: TypeAlias = KVCache | Scheduler | BlockManager | ExternalStore | OffloadManager


@dataclass(frozen=True)
class _Spec:
    """One metric, and how to read it from its source or from what the source's `stats` returns."""

    name: str
    text: str
    read: Callable[[Any], float | dict[str, float] | dict[tuple[str, str], float]]
    label: str = ""
    """Label of the keys that `read` returns, or two with a comma; "" if it returns one number."""


def _by_tier(name: str, text: str, attribute: str) -> _Spec:
    return _Spec(name, text, lambda stats: getattr(stats, attribute), "tier")


def _one(name: str, text: str, attribute: str = "") -> _Spec:
    return _Spec(name, text, lambda stats: getattr(stats, attribute or name))


def _by_class(name: str, text: str, attribute: str) -> _Spec:
    def read(stats: Any) -> dict[tuple[str, str], float]:
        by_tier = getattr(stats, attribute).items()
        return {(tier, str(at)): count for tier, counts in by_tier for at, count in enumerate(counts)}

    return _Spec(name, text, read, "tier,page_class")


def _usage(stats: Any) -> dict[str, float]:
    return {tier: stats.usage(tier) for tier in stats.used_blocks}


_MANAGER_GAUGES: Final = (
    _Spec("kv_cache_usage_perc", "Share of a tier in use, 0 to 1.", _usage, "tier"),
    _by_tier("blocks", "Blocks of a tier.", "num_blocks"),
    _by_tier("used_blocks", "Blocks in use: referenced, or leased by transfers.", "used_blocks"),
    _by_tier("leased_blocks", "Blocks leased by transfers.", "leased_blocks"),
    _by_tier("cached_blocks", "Blocks in the prefix cache.", "cached_blocks"),
    _by_tier("pinned_blocks", "Blocks kept by pins.", "pinned_blocks"),
    _by_tier("bytes", "Bytes of a tier, without null blocks; 0 if blocks have no bytes.", "num_bytes"),
    _by_class("class_bytes", "Bytes of the blocks that a page class has.", "class_bytes"),
    _by_class("used_bytes", "Bytes of those in use: referenced, or leased by transfers.", "used_bytes"),
    _by_class("cached_bytes", "Bytes of those in the prefix cache.", "cached_bytes"),
    _one("sequences", "Open sequences."),
    _Spec("open_tickets", "Steps whose transfers have not ended.", lambda stats: len(stats.open_tickets)),
)
_MANAGER_COUNTERS: Final = (
    _one("steps", "Decisions taken."),
    _one("prompts", "Prompts admitted with their token ids."),
    _Spec(
        "prefix_cache_queries",
        "Tokens of prompts looked up.",
        lambda stats: stats.hit_tokens + stats.missed_tokens,
    ),
    _one("prefix_cache_hits", "Tokens of prompts found in the prefix cache.", "hit_tokens"),
    _one("host_hit_blocks", "Cached blocks of prompts that only the host had.", "loaded_blocks"),
    _one("merged_blocks", "Blocks computed twice and merged into one."),
    _one("copied_blocks", "Blocks copied on write."),
    _by_tier("evicted_blocks", "Cached blocks evicted.", "evicted_blocks"),
    _Spec("hinted_turns", "Turns freed with a hint.", lambda stats: stats.hinted_turns, "hint"),
    _Spec("resumed_turns", "Those that another turn followed.", lambda stats: stats.resumed_turns, "hint"),
    _by_tier("swapped_out_blocks", "Blocks swapped out to a tier.", "swapped_out_blocks"),
    _by_tier("swapped_in_blocks", "Blocks swapped in from a tier.", "swapped_in_blocks"),
    _one("moved_blocks", "Blocks moved by defragmentation."),
    _one("cancelled_moves", "Moves cancelled because the block was written, freed or leased in the meantime."),
    _one("failed_moves", "Moves whose transfer failed."),
)
_SCHEDULER_GAUGES: Final = (
    _one("num_requests_running", "Running requests.", "num_running"),
    _one("num_requests_swapped", "Requests whose blocks are swapped out.", "num_swapped"),
    _one("num_requests_loading", "Requests held back while the prefix store loads their prompts.", "num_loading"),
    _one("num_requests_unfinished", "Requests that have not ended.", "num_unfinished"),
)
_SCHEDULER_COUNTERS: Final = (
    _Spec(
        "num_preemptions",
        "Requests preempted, by what happened to their blocks.",
        lambda stats: {
            "swap_host": stats.preempted_swap_host,
            "swap_external": stats.preempted_swap_external,
            "recompute": stats.preempted_recompute,
        },
        "mode",
    ),
    _one("scheduled_tokens", "Tokens scheduled.", "tokens"),
    _one("lost_sequences", "Sequences restarted because a transfer lost blocks.", "lost"),
    _one("refused_requests", "Requests ended because the device became too small.", "refused"),
    _Spec(
        "retained_sequences",
        "Ended sequences with a request to retain their blocks, by what became of it.",
        lambda stats: {
            "retained": stats.retained,
            "refused": stats.retain_refused,
            "given_up": stats.retain_given_up,
        },
        "outcome",
    ),
    _one("spec_decode_num_drafts", "Rows with draft tokens."),
    _one("spec_decode_num_draft_tokens", "Draft tokens computed."),
    _one("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
)
_PREFIX_STORE_COUNTERS: Final = (
    _one("prefix_store_prefetches", "Prefetches of prompts that lacked blocks.", "prefetches"),
    _one("prefix_store_hit_blocks", "Blocks loaded from the prefix store.", "hit_blocks"),
    _one("prefix_store_hit_bytes", "Bytes loaded from the prefix store.", "hit_bytes"),
    _Spec(
        "prefix_store_misses",
        "Prefetches that did not load all missing blocks, by reason.",
        lambda stats: _MISSES | stats.misses,
        "reason",
    ),
    _one("prefix_store_written_blocks", "Blocks written to the prefix store, or there already.", "written_blocks"),
    _one("prefix_store_written_bytes", "Bytes written to the prefix store.", "written_bytes"),
    _one("prefix_store_unwritten_blocks", "Blocks that could not be written to the prefix store.", "unwritten_blocks"),
    _one("prefix_store_write_pauses", "Times when the prefix store became too slow to write to.", "write_pauses"),
    _one("prefix_store_forgets", "Calls of forget, as for new weights.", "forgets"),
)
_STORE_GAUGES: Final = (
    _Spec(
        "store_up",
        "1 if a store answers; 0 if its breaker refuses all batches, or if it only failed since the last scrape.",
        lambda stats: not stats.is_down,
    ),
    _one("store_cached_blocks", "Readable blocks in a store.", "cached_blocks"),
    _one("store_pending_bytes", "Bytes of blocks in flight and of uncollected results.", "pending_bytes"),
    _one("store_errors_in_a_row", "Errors of a store since its last successful operation.", "errors_in_a_row"),
)
_STORE_COUNTERS: Final = (
    _one("store_written_blocks", "Blocks written.", "written_blocks"),
    _one("store_written_bytes", "Bytes written.", "written_bytes"),
    _one("store_read_blocks", "Blocks read.", "read_blocks"),
    _one("store_read_bytes", "Bytes read.", "read_bytes"),
    _Spec("store_misses", "Blocks not read or written, by reason.", lambda s: _STORE_MISSES | s.misses, "reason"),
    _one("store_damaged_blocks", "Blocks that failed their check when they were read.", "damaged_blocks"),
    _one("store_errors", "Errors of a store.", "errors"),
    _one("store_evicted_blocks", "Blocks evicted.", "evicted_blocks"),
)
_OFFLOAD_GAUGES: Final = (
    _one("offload_chunks", "Chunks of the host cache.", "num_chunks"),
    _one("offload_free_chunks", "Chunks that are empty or can be evicted.", "num_free"),
    _one("offload_stored_keys", "Keys that are hits.", "num_stored"),
    _one("offload_storing_keys", "Keys whose chunks are being written.", "num_storing"),
)
_OFFLOAD_COUNTERS: Final = (_one("offload_evicted_keys", "Keys evicted.", "num_evicted"),)


class Collector:
    """Metrics for a `prometheus_client` registry; their names begin with `blockyard_`.

    Args:
        sources: objects of this process that belong together: a `KVCache`, which brings its manager and its stores, a
            `Scheduler`, which brings its manager, a `BlockManager`, an `OffloadManager`, or stores.
        labels: labels of every metric, to tell several collectors of a registry apart.
        sample_rate: share of the blocks whose time in the cache is measured, above 0 to 1.
        tenants: tenants whose quotas are exported: values of the label `tenant`, and the salt of each; the salt None
            is for prompts without one. A scrape waits for the prefix store to know what they keep there.

    Raises:
        ImportError: prometheus-client is not installed; raised on import.
        InvalidArgumentError: a source has another type, two sources have the same part, or the rate is out of range.
    """

    def __init__(
        self,
        *sources: _Source,
        labels: Mapping[str, str] | None = None,
        sample_rate: float = 0.01,
        tenants: Mapping[str, bytes | None] | None = None,
    ) -> None:
        self._labels = dict(labels or {})
        self._tenants = dict(tenants or {})
        self._objects: dict[str, Any] = {}
        self._stores: dict[str, ExternalStore] = {}
        self._errors: dict[str, int] = {}  # of each store at the last scrape
        self._seconds: dict[str, dict[str, Histogram]] = {}
        for source in sources:
            self._add(source)
        if "manager" in self._objects:
            self._objects["manager"].prefix.sample_residency(sample_rate)

    def collect(self) -> Iterator[Metric]:
        """Return the current values of all metrics."""
        if (manager := self._objects.get("manager")) is not None:
            stats = manager.stats()
            yield from self._gauges(_MANAGER_GAUGES, {"": stats})
            yield from self._counters(_MANAGER_COUNTERS, {"": stats})
            yield from self._of_residency(manager)
        if (scheduler := self._objects.get("scheduler")) is not None:
            yield from self._gauges(_SCHEDULER_GAUGES, {"": scheduler})
            yield from self._counters(_SCHEDULER_COUNTERS, {"": scheduler.stats()})
        if (offload := self._objects.get("offload manager")) is not None:
            yield from self._gauges(_OFFLOAD_GAUGES, {"": offload})
            yield from self._counters(_OFFLOAD_COUNTERS, {"": offload})
        if self._seconds:
            yield self._of_transfers()
        by_store = {name: self._since_scrape(name, store.stats()) for name, store in self._stores.items()}
        if (prefix_store := self._objects.get("prefix store")) is not None:
            yield from self._of_prefix_store(prefix_store)
        if self._tenants:
            yield from self._of_tenants(is_down="prefix" in by_store and by_store["prefix"].is_down)
        if by_store:
            yield from self._gauges(_STORE_GAUGES, by_store)
            yield from self._counters(_STORE_COUNTERS, by_store)

    def _since_scrape(self, name: str, stats: StoreStats) -> StoreStats:
        """Count a store as down that only failed since the last scrape."""
        before, self._errors[name] = self._errors.get(name, 0), stats.errors
        return replace(stats, is_down=fails_since(stats, before))

    def _add(self, source: object) -> None:
        match source:
            case KVCache():
                self._keep("manager", source.manager)
                self._seconds["host"] = source.engine.seconds
                if source.swap_store is not None:
                    self._keep_store("swap", source.swap_store)
                if source.executor.store_seconds is not None:
                    self._seconds["external"] = source.executor.store_seconds
                if source.prefix_store is not None:
                    self._keep("prefix store", source.prefix_store)
                    self._keep_store("prefix", source.prefix_store.store)
                    self._seconds["prefix"] = source.prefix_store.store_seconds
            case Scheduler():
                self._keep("scheduler", source)
                self._keep("manager", source.manager)
            case BlockManager():
                self._keep("manager", source)
            case OffloadManager():
                self._keep("offload manager", source)
            case ExternalStore():
                self._keep_store(type(source).__name__, source)
            case _:
                raise InvalidArgumentError(
                    f"a source is {source!r}, must be a KVCache, Scheduler, BlockManager, OffloadManager or "
                    "ExternalStore"
                )

    def _keep(self, kind: str, found: object) -> None:
        if self._objects.setdefault(kind, found) is not found:
            raise InvalidArgumentError(f"two sources have a {kind} each: give each its own Collector with labels")

    def _keep_store(self, name: str, store: ExternalStore) -> None:
        if self._stores.setdefault(name, store) is not store:
            raise InvalidArgumentError(
                f"two stores would have the label {name!r}: give each its own Collector with labels"
            )

    def _of_residency(self, manager: BlockManager) -> Iterator[Metric]:
        found = manager.prefix.residency()
        for name, text in (
            ("lifetime", "How long sampled blocks were cached before they were evicted."),
            ("idle_before_evict", "How long sampled blocks were unused before they were evicted."),
            ("reuse_gap", "How long sampled blocks were unused before a prompt used them again."),
        ):
            rows = {(tier,): (stays.bounds, *getattr(stays, name)) for tier, stays in found.items()}
            yield self._histogram(f"kv_block_{name}_seconds", text, ("tier",), rows)

    def _of_transfers(self) -> Metric:
        rows = {
            (tier, direction): (found.bounds, found.counts, found.sum)
            for tier, by_direction in self._seconds.items()
            for direction, found in by_direction.items()
        }
        text = "How long transfers to and from a tier took, from submission until their end was noticed."
        return self._histogram("transfer_seconds", text, ("tier", "direction"), rows)

    def _of_prefix_store(self, source: PrefixStore) -> Iterator[Metric]:
        stats = source.stats()
        yield from self._counters(_PREFIX_STORE_COUNTERS, {"": stats})
        waiting = _one(
            "prefix_store_waiting_blocks", "Blocks that wait to be written, or are being written.", "waiting_blocks"
        )
        yield from self._gauges((waiting,), {"": source})
        found = stats.load_seconds
        rows = {(): (found.bounds, found.counts, found.sum)}
        yield self._histogram("prefix_store_load_seconds", "How long prefetches took.", (), rows)

    def _of_tenants(self, *, is_down: bool) -> Iterator[Metric]:
        """Quotas of the named tenants: on the device, and in the prefix store unless it does not answer."""
        manager, prefix_store = self._objects.get("manager"), self._objects.get("prefix store")
        if manager is not None:
            held = {name: manager.prefix.quota(salt) or (0, None) for name, salt in self._tenants.items()}
            unit = "blocks" if manager.num_page_classes == 1 else "bytes"
            yield from self._quotas(f"tenant_cached_{unit}", f"tenant_quota_{unit}", "on the device", held)
        if prefix_store is not None and prefix_store.store.keeps_quotas:
            kept = {name: _kept(prefix_store, salt, is_down=is_down) for name, salt in self._tenants.items()}
            where = "in the prefix store"
            yield from self._quotas("prefix_store_tenant_bytes", "prefix_store_tenant_quota_bytes", where, kept)

    def _quotas(
        self, used: str, quota: str, where: str, found: Mapping[str, tuple[float, float | None]]
    ) -> Iterator[Metric]:
        counted = {name: count for name, (count, _) in found.items()}
        limits = {name: inf if limit is None else limit for name, (_, limit) in found.items()}
        specs = (
            _Spec(used, f"Usage that counts towards a tenant's quota {where}.", lambda both: both[0], "tenant"),
            _Spec(quota, f"A tenant's quota {where}.", lambda both: both[1], "tenant"),
        )
        return self._gauges(specs, {"": (counted, limits)})

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], rows: Mapping[Any, tuple[Any, ...]]) -> Metric:
        family = HistogramMetricFamily(f"blockyard_{name}", text, labels=[*self._labels, *labels])
        for values, (bounds, counts, total) in rows.items():
            buckets = list(zip((*map(str, bounds), "+Inf"), accumulate(counts), strict=True))
            family.add_metric([*self._labels.values(), *values], buckets, total)
        return family

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
        shared = [*self._labels, "store"] if of_store else [*self._labels]
        own = {store: [*self._labels.values(), *([store] if of_store else [])] for store in sources}
        for spec in specs:
            names = [*shared, *spec.label.split(",")] if spec.label else shared
            family = make(f"blockyard_{spec.name}", spec.text, labels=names)
            for store, source in sources.items():
                value = spec.read(source)
                if isinstance(value, dict):
                    for key, number in value.items():
                        family.add_metric([*own[store], *(key if isinstance(key, tuple) else (key,))], number)
                else:
                    family.add_metric(own[store], value)
            yield family


def _kept(store: PrefixStore, salt: bytes | None, *, is_down: bool) -> tuple[float, float]:
    """Return a tenant's usage of a prefix store and its quota; NaN if the store does not report them."""
    if is_down:
        return nan, nan
    try:
        return store.quota(salt) or (0, inf)
    except StoreError:
        return nan, nan
