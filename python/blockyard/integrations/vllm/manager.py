"""vLLM's offloading manager over `OffloadManager`: which host chunks hold which keys."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.options.vllm import ExternalOptions
from blockyard.integrations.vllm.external import ExternalTier, UsedBefore
from blockyard.integrations.vllm.hints import OUTCOMES, Pins, read_hints
from blockyard.integrations.vllm.metrics import hit_source
from blockyard.integrations.vllm.recording import ChunkRecorder
from blockyard.integrations.vllm.region import SharedRegion
from blockyard.integrations.vllm.units import UnitOffload, Units
from blockyard.offload import OffloadManager, PreparedStore
from blockyard.stores.adapters.chunks import HeadShards
from blockyard.stores.base import ExternalStore
from blockyard.workers.interrupts import keep

__all__ = ["BlockyardManager"]

STORE_DEADLINE_SECONDS: Final = 60.0
"""A key stays a pending hit for at most this long, so that a store that never ends does not block lookups."""
_REMEMBERED: Final = 8
"""Keys to remember for each chunk of the host, to know those that are used a second time."""

_HIT: Final = LookupResult.HIT
_RESULTS: Final = {"hit": LookupResult.HIT, "pending": LookupResult.HIT_PENDING, "miss": LookupResult.MISS}
# vLLM 0.33 reports when the transfers in flight at a reset have ended. 0.32 orders its later transfers after them.
_HAS_FLUSH: Final = hasattr(OffloadingManager, "on_reset_flushed")
_SAYS_METADATA: Final = "metadata_only" in OffloadingEvent.__dataclass_fields__


@dataclass(slots=True, eq=False)
class _Chain:
    """The keys that a request stored or loaded.

    Attributes:
        keys: whether each was there before the request.
        storing: those whose stores are under way.
        needed: those that were hits, or may become some, when the request looked them up in host and external store.
        ended: when the request ended, in seconds, until its chunks have aged as one chain; None while it runs.
    """

    keys: dict[OffloadKey, bool] = field(default_factory=dict)
    storing: set[OffloadKey] = field(default_factory=set)
    needed: set[OffloadKey] = field(default_factory=set)
    ended: float | None = None

    @classmethod
    def of(cls, req_context: ReqContext) -> _Chain:
        """Return the chain of a request, which begins with the first call."""
        chain: _Chain | None = req_context.get_state(cls)
        if chain is None:
            req_context.set_state(chain := cls())
        return chain

    def add(self, keys: Iterable[OffloadKey], *, are_found: bool) -> None:
        """Add keys; those that the request has itself stored stay so."""
        for key in keys:
            self.keys.setdefault(key, are_found)

    def in_order(self, req_context: ReqContext) -> list[OffloadKey]:
        """Return all keys of the request by the end of their tokens, also those found on the device.

        A chunk that the device has served must not be evicted before what comes after it. If vLLM does not know the
        position of a key that was stored or loaded, return those as they came.
        """
        ends: dict[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
        return sorted(ends, key=ends.__getitem__) if self.keys.keys() <= ends.keys() else list(self.keys)


class BlockyardManager(OffloadingManager):
    """The scheduler side: decides which keys have host chunks, which can be loaded, and which are evicted.

    Args:
        num_chunks: chunks of host memory.
        policy: which chunk is evicted first, a name as for `blockyard.PrefixCaching`.
        enable_events: whether `take_events` reports what was stored and removed.
        weights_fixed: whether the weights stay the same while the engine runs, even across a cache reset.
        info: facts for `config_info`.
        recorder: records the requests to a trace; None for no recording.
        units: if chunks are units, how many of them a block of each group takes.

    Attributes:
        region: memory that the workers share without an external store. Its name goes once all have mapped it.
        is_elsewhere: whether a key that is missing here counts as a hit, since it can be brought here; None: none can.
        external: the store below, if there is one.
        changes: what the store's threads have stored here and evicted, in order, for who keeps an order; None: nobody.
    """

    def __init__(
        self,
        num_chunks: int,
        *,
        policy: str = "lru",
        enable_events: bool = False,
        weights_fixed: bool = False,
        info: dict[str, str | int] | None = None,
        recorder: ChunkRecorder | None = None,
        units: Units | None = None,
    ) -> None:
        self._recorder = recorder
        offload = OffloadManager(num_chunks, eviction=policy)
        self._offload = offload if units is None else cast(OffloadManager, UnitOffload(offload, units.counts))
        self._lookup = self._offload.lookup
        self._lock = threading.RLock()
        self._info = dict(info or {})
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._storing: set[OffloadKey] = set()
        self._loading: Counter[OffloadKey] = Counter()
        # Transfers in flight at a reset: their chunks stay reserved until they have ended.
        self._stale_storing: set[OffloadKey] = set()
        self._stale_loading: Counter[OffloadKey] = Counter()
        self._flushed_loading: set[OffloadKey] = set()
        self._spoilt: set[OffloadKey] = set()
        # What a call ends, and whether it did: after an exception the next call counts it.
        self._ending: list[OffloadKey] = []
        self._stored: list[list[bytes]] = []
        self._flushed: list[list[bytes]] = []
        self._left: dict[OffloadKey, tuple[int, int]] = {}  # loads of each key, stale ones first
        self._ended: list[object] = []
        self._evictions = 0  # by `evict`
        self._reported_evictions = 0
        self._reported_external = [0] * 6
        self._weights_fixed = weights_fixed
        self._url = ""  # of the external store
        self.external: ExternalTier | None = None
        self._used: UsedBefore | None = None  # if only chunks that are used twice are written to it
        self._awaits_flush = False
        # Hits of this step, which vLLM may still load: the external store's threads must not evict them.
        self._looked_up: dict[OffloadKey, list[object]] = {}  # held keys have a chunk
        self._let: list[object] = []
        most = 1 if units is None else units.most  # chunks of a key
        self._pins = Pins(self._offload, share=0.5 / most)
        self._retained = Pins(self._offload, "retain", share=1.0 / most)
        self._hints = Counter(dict.fromkeys(OUTCOMES, 0))
        self._reported_hints = self._hints.copy()
        self.region: SharedRegion | None = None
        self.is_elsewhere: Callable[[OffloadKey], bool] | None = None
        self.changes: list[tuple[list[OffloadKey], list[OffloadKey]]] | None = None

    @property
    def num_chunks(self) -> int:
        """Total number of chunks."""
        return self._offload.num_chunks

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock to hold across calls that belong together."""
        return self._lock

    @property
    def num_empty(self) -> int:
        """Chunks that hold no key, are not being written, and that no chunk of the store will need."""
        coming = 0 if self.external is None else self.external.num_coming
        return self._offload.num_chunks - self._offload.num_stored - self._offload.num_storing - coming

    @property
    def num_free(self) -> int:
        """Chunks that a store can get: empty ones, and those whose keys can be evicted."""
        return self._offload.num_free

    def use_external(
        self, store: ExternalStore, region: SharedRegion, options: ExternalOptions, shards: HeadShards | None = None
    ) -> None:
        """Use a prefix store for chunks missing on the host, and write the host's chunks to it; see `ExternalTier`."""
        self._url = options.url
        if options.prefix_writes == "second_use":
            self._used = UsedBefore(_REMEMBERED * self.num_chunks)
        self.external = ExternalTier(
            store,
            region,
            self._offload,
            lock=self._lock,
            report=self._report_both,
            give_room=self.release_retained,
            timeout_base=options.timeout_base,
            shards=shards,
        )

    # ---- requests and lookups ----

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Request that each chunk is stored once, when it is computed.

        For a request that pins or retains its chunks, request that `prepare_store` gets all of them, even those found
        on the device.
        """
        if self._recorder is not None:
            self._recorder.add(req_context)
        hints = read_hints(req_context)
        self._hints.update(hints.outcomes)
        if hints.pin or hints.retain:
            return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Let the request's chunks age as one chain, and forget its lookups in the external store."""
        if self._recorder is not None:
            self._recorder.finish(req_context)
        chain = _Chain.of(req_context)
        chain.ended = time.monotonic()
        self._age(chain, req_context)
        if self.external is not None:
            keys = chain.in_order(req_context)
            if self._used is not None:  # found on the device or the host: another request has used them
                found = self._used.found([key for key in keys if chain.keys.get(key, True)])
                self.external.write(found, req_context)
            self.external.finish(req_context)

    def _age(self, chain: _Chain, req_context: ReqContext) -> None:
        """Let the chunks of a request that has ended age as one chain, once the last of them is stored.

        vLLM stores a request's last chunks after its end. They must not outlive those before them, and what the policy
        knows of the conversation goes for them, too.
        """
        if chain.ended is None or chain.storing:
            return
        keys = chain.in_order(req_context)
        not_used = [key for key in keys if not chain.keys.get(key)]
        ended, chain.ended = chain.ended, None
        self._offload.touch(keys, not_used, ended=ended, hint=read_hints(req_context).conversation)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a key can be loaded, is being stored, is coming from an external store, or is missing."""
        found = self._lookup([key])[0]
        if found == "miss" and self.is_elsewhere is not None and self.is_elsewhere(key):
            return _HIT
        if self.external is None:
            return _RESULTS[found]
        if self._let:
            self._let_go()
        chain = _Chain.of(req_context)
        if found == "hit" and (self._looked_up.get(key) or self._keep(key)):
            chain.needed.add(key)
            return _HIT
        return _RESULTS["pending"] if found == "pending" else self.external.lookup(key, req_context, chain.needed)

    def find_all(self, keys: list[OffloadKey]) -> list[str]:
        """Return "hit", "pending" or "miss" for each key."""
        return list(self._lookup(keys))

    def idle(self, keys: Iterable[OffloadKey]) -> Iterator[OffloadKey]:
        """Yield those of some keys whose chunks no load, no lookup, no write to the store and no hint holds."""
        written = set() if self.external is None else self.external.being_written()
        held = (self._loading, self._looked_up, written, self._pins, self._retained)
        return (key for key in keys if not any(key in holder for holder in held))

    def release_retained(self, count: int) -> bool:
        """Let up to `count` chunks that requests only asked to retain be evicted; return whether there was one."""
        with self._lock:
            return self._retained.release(count) > 0

    def evict(self, keys: list[OffloadKey]) -> None:
        """Evict keys."""
        with self._lock:
            evicted = _keys(self._offload.forget(keys))
            self._evictions += len(evicted)
            self._report(evicted, removed=True)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Return the source of a hit: the external store if this request waited for it, else host memory."""
        is_loaded = self.external is not None and self.external.has_loaded(key, req_context)
        return hit_source(self._url if is_loaded else None)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark keys as just used; the first key is evicted last."""
        keys = list(keys)
        self._offload.touch(keys)
        self._pin(keys, req_context)

    # ---- stores ----

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Allocate chunks for keys without one, evicting others; None, changing nothing, if that is impossible."""
        keys = list(keys)
        self._settle()
        made: list[PreparedStore | None] = []
        prepare = partial(self._offload.prepare_store, deadline=_now() + _ms(STORE_DEADLINE_SECONDS))
        try:
            with self._lock:
                if not self._stale_storing.isdisjoint(keys):
                    self._free_stale()
                store = keep(made, prepare, keys)
                while store is None and (self._free_stale() or self.release_retained(len(keys))):
                    store = keep(made, prepare, keys)
                if store is not None:
                    self._report(_keys(store.evicted), removed=True)
                    self._storing.update(store.keys)
                    chain = _Chain.of(req_context)
                    chain.add(_keys(store.keys), are_found=False)
                    chain.storing.update(_keys(store.keys))
                    chain.add(keys, are_found=True)
                # Keys already here, whoever stored them.
                self._pin(keys, req_context)
            if store is None:
                return None
            stored, evicted = _keys(store.keys), _keys(store.evicted)
            return PrepareStoreOutput(
                keys_to_store=stored, store_spec=CPULoadStoreSpec(store.chunks), evicted_keys=evicted
            )
        except BaseException:
            for store in made:
                self._offload.complete_store([] if store is None else store.keys, success=False)
                self._storing.difference_update([] if store is None else store.keys)
                _Chain.of(req_context).storing.difference_update([] if store is None else store.keys)
            raise

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """End stores: their keys become hits, or on failure misses whose chunks are freed."""
        keys = list(keys)
        self._settle()
        self._note_flushed()
        success = success and self._spoilt.isdisjoint(keys)
        self._spoilt.difference_update(keys)
        failed = [] if success else [key for key in dict.fromkeys(keys) if key in self._storing]
        with self._lock:
            # The end of a prefix is useless without its head, so the head counts as used last.
            self._ending = keys
            stored = _keys(keep(self._stored, self._offload.complete_store, keys[::-1], success))[::-1]
            chain = _Chain.of(req_context)
            chain.storing.difference_update(keys)
            self._age(chain, req_context)
            self._settle()
            self._report(stored, removed=False)
            if failed and _SAYS_METADATA:
                self._report(failed, removed=True, metadata_only=True)
            if stored and self.external is not None:
                self.external.write(stored if self._used is None else self._used.computed(stored))
        self._pin(stored, req_context)

    def spoil(self, keys: Iterable[OffloadKey]) -> None:
        """Let the stores of keys that are being stored fail, whatever `complete_store` says."""
        self._spoilt.update(self._storing.intersection(keys))

    # ---- loads ----

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Hold the chunks of hit keys until `complete_load` has been called as often as this."""
        keys = list(keys)
        self._settle()
        before = {key: self._loading.get(key, 0) for key in keys}
        made: list[object] = []
        try:
            spec = CPULoadStoreSpec(keep(made, self._offload.prepare_load, keys))
            self._pin(keys, req_context)
            _Chain.of(req_context).add(keys, are_found=True)
            self._loading.update(keys)
            return spec
        except BaseException:
            if made:
                self._offload.complete_load(keys)
            self._count(self._loading, before)
            raise

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """End one load of each key; loads already ended by a reset are skipped.

        Raises:
            InvalidArgumentError: a key is not being loaded; nothing is changed.
        """
        known = list(keys)
        self._note_flushed()
        self._settle()
        loading, stale = self._loading, self._stale_loading
        if self._flushed_loading:
            known = [key for key in known if key in loading or key not in self._flushed_loading]
        left: dict[OffloadKey, tuple[int, int]] = {}
        if not stale and len(set(known)) == list(map(loading.get, known)).count(1) == len(known):
            self._end_loads(known[::-1], dict.fromkeys(known, (0, 0)))  # the usual case: one load per key
            return
        for key in known:
            old, new = left[key] if key in left else (stale.get(key, 0), loading.get(key, 0))
            if not old + new:
                raise InvalidArgumentError(f"keys has {key!r}, which is not being loaded")
            # Loads from before a reset end first.
            left[key] = (old - 1, new) if old else (0, new - 1)
        self._end_loads(known[::-1], left)

    def _end_loads(self, keys: list[OffloadKey], left: dict[OffloadKey, tuple[int, int]]) -> None:
        self._left = left
        keep(self._ended, self._offload.complete_load, keys)
        self._settle()

    def _settle(self) -> None:
        """Count the stores and loads that the last call ended."""
        if self._stored:
            self._storing.difference_update(self._ending)
            self._stale_storing.difference_update(self._ending)
            del self._stored[:]
        if self._flushed:
            self._stale_storing.clear()
            del self._flushed[:]
        if self._ended:
            if self._stale_loading:
                self._count(self._stale_loading, {key: old for key, (old, _) in self._left.items()})
            self._count(self._loading, {key: new for key, (_, new) in self._left.items()})
            del self._ended[:]

    @staticmethod
    def _count(counts: Counter[OffloadKey], new: dict[OffloadKey, int]) -> None:
        for key, count in new.items():
            if count:
                counts[key] = count
            else:
                counts.pop(key, None)

    # ---- the end of a step, and resets ----

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Expire overdue stores so that lookups stop waiting, and look up misses in the external store."""
        if self._recorder is not None:
            self._recorder.begin(context.new_req_ids)
        self._let_go()
        if self._storing or self.external is not None:
            self._offload.expire(_now())
        with self._lock:
            for held in (self._pins, self._retained):
                held.expire(_now())
        if self.external is not None:
            self.external.end_step(list(context.preempted_req_ids))

    def reset_cache(self) -> None:
        """Forget all keys. Chunks of transfers in flight are reused only after those have ended.

        vLLM 0.32 does not report when that is, but orders its transfers: they have ended once a later one has. If vLLM
        needs their chunks or stores their keys before that, it gets them, and the external store gets none until then.

        vLLM resets both when it goes to sleep and when weights change, and does not say which. Unless the weights are
        known to stay the same, the external store forgets everything, in the background.
        """
        self._settle()
        self._awaits_flush = not _HAS_FLUSH
        with self._lock:
            self._let_go()
            self._offload.reset()
            if self.external is not None:
                self.external.reset(keep=self._weights_fixed)
        if self._used is not None and not self._weights_fixed:
            self._used.clear()
        with self._lock:
            for held in (self._pins, self._retained):
                held.clear()
        self._stale_storing |= self._storing
        self._storing.clear()
        self._spoilt.clear()
        self._stale_loading, self._loading = self._stale_loading + self._loading, Counter()
        if self._events is not None:
            self._events.clear()

    def on_reset_flushed(self) -> None:
        """Reclaim the chunks of transfers that were in flight at the last reset: they have ended."""
        self._settle()
        keep(self._flushed, self._offload.complete_store, list(self._stale_storing), False)
        self._settle()
        stale, loading = self._stale_loading, self._loading
        if stale:  # empty if this call is repeated
            self._flushed_loading = set(stale)
        self._end_loads(list(stale.elements()), {key: (0, loading.get(key, 0)) for key in stale})

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield the chunks stored and removed since the last call."""
        if not self._events:
            return
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            # Another request may by now be storing a key that had failed.
            gone = getattr(event, "metadata_only", False) and self._offload.lookup(event.keys)
            keys = [key for key, found in zip(event.keys, gone, strict=True) if found == "miss"] if gone else event.keys
            if keys:
                event.keys = keys
                yield event

    def get_stats(self) -> Any:
        """Return the values listed by `BlockyardSpec.build_metric_definitions`, for vLLM's metrics."""
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: PLC0415 (imports much)
                OffloadingConnectorStats,
            )
        except ImportError:
            return None
        from blockyard.integrations.vllm.metrics import Metrics  # noqa: PLC0415 (only the engine needs it)

        stats, manager = OffloadingConnectorStats(), self._offload
        chunks = max(1, manager.num_chunks)
        held, writing = manager.num_chunks - manager.num_free, manager.num_storing
        stats.set_gauge(Metrics.USAGE, held / chunks)
        stats.set_gauge(Metrics.WRITE_USAGE, writing / chunks)
        stats.set_gauge(Metrics.READ_USAGE, max(0, held - writing) / chunks)
        stats.set_gauge(Metrics.STORED, manager.num_stored / chunks)
        # Read once: the external store's thread may evict more meanwhile.
        evicted = self._evictions + manager.num_evicted
        stats.increase_counter(Metrics.EVICTED, evicted - self._reported_evictions)
        self._reported_evictions = evicted
        for name, outcome in zip(Metrics.HINTS, OUTCOMES, strict=True):
            stats.increase_counter(name, self._hints[outcome] - self._reported_hints[outcome])
        self._reported_hints = self._hints.copy()
        if self.external is not None:
            counts, (is_up, num_damaged) = self.external.counts, self.external.health()
            stats.set_gauge(Metrics.EXTERNAL_UP, float(is_up))
            now = [counts.loaded, counts.missed, counts.written, counts.present, counts.not_written, num_damaged]
            for name, count, before in zip(Metrics.EXTERNAL, now, self._reported_external, strict=True):
                stats.increase_counter(name, count - before)
            self._reported_external = now
        return stats

    def config_info(self) -> Sequence[dict[str, str | int]]:
        """Return the labels listed by `BlockyardSpec.config_info_keys`."""
        return [dict(self._info)]

    def shutdown(self) -> None:
        """Forget all keys, and wait a while for writes to the external store to end."""
        if self._recorder is not None:
            self._recorder.close()
        if self.external is not None:
            self.external.close()
        if self.region is not None:
            self.region.close()
        self._offload.reset()

    def _keep(self, key: OffloadKey) -> bool:
        """Hold a hit until the step ends; False if it is gone by now."""
        with self._lock:
            if self._lookup([key])[0] != "hit":
                return False
            keep(self._looked_up.setdefault(key, []), self._offload.prepare_load, [key])
        return True

    def _let_go(self) -> None:
        """Release this step's hits: vLLM's loads hold theirs by now."""
        if self._looked_up:
            if not self._let:
                held = [key for key, chunk in self._looked_up.items() if chunk]
                keep(self._let, self._offload.complete_load, held[::-1])
            self._looked_up.clear()
        del self._let[:]

    def _note_flushed(self) -> None:
        """Record that a transfer that started after the last reset has ended: those before it have, too."""
        if self._awaits_flush:
            self.on_reset_flushed()
            if self.external is not None:
                self.external.may_stage = True
            self._awaits_flush = False

    def _free_stale(self) -> bool:
        """Give vLLM the chunks of transfers in flight at the last reset; False if there are none, or it will report."""
        if not self._awaits_flush or not (self._stale_storing or self._stale_loading):
            return False
        if self.external is not None:
            self.external.may_stage = False
        self.on_reset_flushed()
        return True

    def _pin(self, keys: list[OffloadKey], req_context: ReqContext) -> None:
        if req_context.kv_hints is not None:
            with self._lock:
                for held in (self._pins, self._retained):
                    held.add(keys, req_context, _now())

    def _report_both(self, stored: list[bytes], evicted: list[bytes]) -> None:
        if self.changes is not None:
            self.changes.append((_keys(stored), _keys(evicted)))
        self._report(_keys(evicted), removed=True)
        self._report(_keys(stored), removed=False)

    def _report(self, keys: list[OffloadKey], *, removed: bool, **more: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed, **more))


def _keys(keys: list[bytes]) -> list[OffloadKey]:
    return keys


def _now() -> int:
    return _ms(time.monotonic())


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
