"""An external store below the host: chunks are read, verified and copied to host memory before they become hits."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext

from blockyard.integrations.compat import engine_log
from blockyard.integrations.options.vllm import TIMEOUT_BASE_SECONDS
from blockyard.integrations.vllm.hints import read_hints
from blockyard.integrations.vllm.region import SharedRegion
from blockyard.offload import OffloadManager, PreparedStore
from blockyard.prefix_store.pressure import WritePressure
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards
from blockyard.stores.adapters.jobs import Steps, StoreJobs
from blockyard.stores.base import SLOWEST, ExternalStore, fails_since
from blockyard.stores.value import is_damage
from blockyard.workers.interrupts import keep, let_go
from blockyard.workers.threads import start_worker

__all__ = ["ExternalTier", "UsedBefore"]

_LOG = engine_log("vLLM")
_WINDOW: Final = 64  # keys of one request looked up before the first answer is known
_JOB_BYTES: Final = 8 << 20  # of a job: one is copied while others are read, and it holds its host chunks until it ends
_STAGING_DEADLINE_MS: Final = 60_000
_CLOSE_SECONDS: Final = 10.0
_END_SECONDS: Final = 1.0
_FORGET_SECONDS: Final = 0.005  # how often a job checks whether the store has forgotten
_FULL_SECONDS: Final = 0.01  # before a chunk that found no room in host memory is read again
_NOT_FORGOTTEN: Final = (
    "the store has not confirmed that it forgot its chunks after a reset. Give engines whose weights differ from those "
    "before the reset another revision"
)

_NOTHING: Final[list[Any]] = []  # replaces returned chunks: assigning it cannot raise

Report = Callable[[list[OffloadKey], list[OffloadKey]], None]


class UsedBefore:
    """Which chunks were used before, also those that the host has evicted since.

    Args:
        max_keys: maximum number of keys to remember, the last ones.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._is_written: dict[OffloadKey, bool] = {}  # by key, in order of its last use

    def computed(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return those of some computed keys that were used before. They must be written."""
        return self._use(keys, lambda key: key in self._is_written)

    def found(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return those of some found keys that were not returned yet. They must be written."""
        return self._use(keys, lambda key: not self._is_written.get(key))

    def _use(self, keys: list[OffloadKey], is_due: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        due = list(filter(is_due, keys))
        used = self._is_written
        used |= {key: used.pop(key, False) for key in keys} | dict.fromkeys(due, True)
        for key in list(islice(used, max(0, len(used) - self._max_keys))):
            del used[key]
        return due

    def clear(self) -> None:
        """Forget all keys."""
        self._is_written.clear()


@dataclass(slots=True)
class _Lookups:
    """Keys that one request has looked up. Each is read once, so that none makes it wait forever, or `again`.

    Attributes:
        needed: these, and those that were hits in host memory.
        again: those to read from a time on, since host memory had no room for them, or had and evicted them.
    """

    until: float
    needed: set[OffloadKey]
    asked: set[OffloadKey] = field(default_factory=set)
    again: dict[OffloadKey, float] = field(default_factory=dict)
    loaded: set[OffloadKey] = field(default_factory=set)  # those that came from the store
    pending: set[OffloadKey] = field(default_factory=set)

    def ask(self, key: OffloadKey) -> None:
        self.asked.add(key)
        self.needed.add(key)


@dataclass(slots=True, eq=False)
class _ChunkJob:
    """A thread's job. Its host chunks are returned when it ends, or if that raises, by `_reap`."""

    keys: list[OffloadKey]
    held: list[NDArray[np.int32]] = field(default_factory=list)  # chunks read by a write
    stores: list[PreparedStore | None] = field(default_factory=list)  # chunks filled by a load
    futures: list[Future[None]] = field(default_factory=list)  # empty if submitting it raised

    @property
    def is_ended(self) -> bool:
        return all(future.done() for future in self.futures)


@dataclass(slots=True)
class Counts:
    """Numbers of chunks since the start."""

    loaded: int = 0
    missed: int = 0
    written: int = 0
    present: int = 0  # known to be in the store already
    not_written: int = 0


class ExternalTier:
    """Loads chunks from a prefix store to host memory, and writes chunks back; the scheduler never waits for it.

    A chunk is read into separate memory and verified there. Only then does it get a host chunk, evicting another, and
    become a hit. Storage that damages, loses, refuses or hangs only causes misses, at the latest by its timeout.

    Args:
        store: opened as a prefix store; its blocks are the chunks of all workers.
        region: host memory of all workers.
        offload: which host chunks hold which keys.
        lock: held while host chunks change owners.
        report: called with the keys stored in host memory, and the keys evicted.
        give_room: lets up to that number of chunks more be evicted; returns whether there was one.
        timeout_base: seconds that a request waits, plus one for every 16 MB that it requested.
        shards: of the workers, if the store's blocks have the heads in order; None if they are the workers' chunks.
    """

    def __init__(
        self,
        store: ExternalStore,
        region: SharedRegion,
        offload: OffloadManager,
        *,
        lock: Any,
        report: Report,
        give_room: Callable[[int], bool],
        timeout_base: float = TIMEOUT_BASE_SECONDS,
        shards: HeadShards | None = None,
    ) -> None:
        self._store, self._region, self._offload = store, region, offload
        self._lock, self._report, self._give_room, self._timeout_base = lock, report, give_room, timeout_base
        self._rows = ChunkRows(region.rows(offload.num_chunks), shards)
        self._batch = max(1, _JOB_BYTES // store.bytes_per_block)
        self._max_writing = max(1, offload.num_chunks // 2)
        self._epoch = b""
        self._resets = 0
        self.may_stage = True  # False while free chunks may still be in use by a transfer
        self._has_forgotten = True  # False from a reset until the store confirms it; until then unused
        self._state = threading.Lock()  # guards all below; taken after `lock`, never before
        self._requests: dict[str, _Lookups] = {}
        self._wanted: dict[OffloadKey, None] = {}
        self._reads_again: _Lookups | None = None  # the first request of this step that must
        self._num_without_room = 0  # chunks that this step would read if the host had room
        self._unwritten: dict[OffloadKey, None] = {}  # stored on the host, to be written as soon as that may be
        self._pressure = WritePressure()
        self._coming: dict[OffloadKey, _ChunkJob] = {}
        self._jobs: list[_ChunkJob] = []
        # Loads never queue behind stores.
        self._work = StoreJobs(store, "blockyard-vllm-external", {"load": 4, "store": 1})
        self.counts = Counts()
        self._health = (0.0, True, 0)  # until when it holds, and what `health` returns
        self._errors = 0  # of the store, at that time

    @property
    def is_busy(self) -> bool:
        """Whether a thread has work to do."""
        with self._state:
            return not all(job.is_ended for job in self._jobs)

    def health(self) -> tuple[bool, int]:
        """Return whether the store answers and is used, and how many damaged chunks it returned; up to a second old."""
        now = time.monotonic()
        if now >= self._health[0]:
            stats = self._store.stats()
            damaged = sum(count for reason, count in stats.misses.items() if is_damage(reason))
            is_up = not fails_since(stats, self._errors) and self._has_forgotten
            self._errors = stats.errors
            self._health = (now + 1.0, is_up, damaged)
        return self._health[1:]

    @property
    def can_write(self) -> bool:
        """Whether `write` writes now: the last write has not just failed, and `_may_write`."""
        return self._may_write and not self._is_paused

    @property
    def _may_write(self) -> bool:
        """Whether all workers have mapped host memory, and the store has forgotten what it must."""
        return self._region.is_complete and self._has_forgotten

    @property
    def _is_paused(self) -> bool:
        return self._pressure.paused_until > time.monotonic()

    @property
    def num_coming(self) -> int:
        """Chunks that are being read, or will be from the end of this step on, and that have no place yet."""
        with self._state:
            return len(self._wanted) + len(self._coming)

    @property
    def num_unwritten(self) -> int:
        """Chunks that are being written, or wait for it."""
        with self._state:
            return len(self._unwritten) + sum(len(job.keys) for job in self._jobs if job.held)

    def being_written(self) -> set[OffloadKey]:
        """Return the keys whose host chunks are being written to the store."""
        with self._state:
            return {key for job in self._jobs if job.held for key in job.keys}

    # ---- lookups ----

    def lookup(self, key: OffloadKey, context: ReqContext, needed: set[OffloadKey]) -> LookupResult:
        """Return whether a key that misses in host memory may become a hit: RETRY while looking it up, else MISS.

        Args:
            key: of the chunk.
            context: of the request.
            needed: the request's keys that were hits in host memory; always the same set; it gets a key that may come.
        """
        now = time.monotonic()
        with self._state:
            request = self._requests.get(context.req_id)
            if request is None:
                request = self._requests[context.req_id] = _Lookups(now + self._timeout_base_of(context), needed)
            is_coming = now < request.until and self._is_coming(key, request, context)
        return LookupResult.RETRY if is_coming else LookupResult.MISS

    def _is_coming(self, key: OffloadKey, request: _Lookups, context: ReqContext) -> bool:
        """Return whether a key may come; one that the request has not looked up yet is looked up at the step's end."""
        if self._is_under_way(key):
            request.ask(key)
            return True
        if not self._is_allowed(context):
            return False
        if key in request.asked:
            return self._is_asked_again(key, request)
        if len(request.pending) >= _WINDOW:
            request.pending = {other for other in request.pending if self._is_under_way(other)}
        # Beyond the window vLLM stops looking in this step, and asks again in the next.
        if len(request.pending) >= _WINDOW or self._store.lacks(self._digests([key]))[0]:
            return False
        request.ask(key)
        request.pending.add(key)
        request.until += self._store.bytes_per_block / SLOWEST
        self._want(key, request)
        return True

    def _is_asked_again(self, key: OffloadKey, request: _Lookups) -> bool:
        """Return whether a key that was looked up found no room, or has left the host since, and may come yet.

        Of the requests that wait for such keys, the first one reads: two would evict each other's chunks.
        """
        if key in request.loaded and self._can_hold(request):
            request.loaded.remove(key)
            request.again[key] = 0.0
        at = request.again.get(key)
        if at is None:
            return False
        if self._reads_again is None:
            self._reads_again = request
        if self._reads_again is request and time.monotonic() >= at:
            self._want(key, request)
        return True

    def _want(self, key: OffloadKey, request: _Lookups) -> None:
        """Read a key at the step's end, or if the host has no room for it and may have it soon, in a later step."""
        # A key with several chunks counts as one: what finds no room is read again.
        if self._offload.num_free > len(self._wanted) + len(self._coming) or not self._can_hold(request):
            request.again.pop(key, None)
            self._wanted[key] = None
        else:
            request.again[key] = 0.0
            self._num_without_room += 1

    def _can_hold(self, request: _Lookups) -> bool:
        """Return whether what a request would load leaves room on the host."""
        return len(request.needed) < self._offload.num_chunks

    def has_loaded(self, key: OffloadKey, context: ReqContext) -> bool:
        """Return whether a hit of this request came from the store, at its own lookup."""
        with self._state:
            request = self._requests.get(context.req_id)
            return request is not None and key in request.loaded

    def end_step(self, preempted: Sequence[str] = ()) -> None:
        """Start reading the chunks looked up in this step. Preempted requests may ask again."""
        self._reap()
        if self._unwritten:
            self._write_more()
        with self._state:
            for req_id in preempted:
                self._requests.pop(req_id, None)
            keys, self._wanted, self._reads_again = list(self._wanted), {}, None
            lacking, self._num_without_room = self._num_without_room, 0
            epoch, resets = self._epoch, self._resets
        if lacking:
            self._give_room(lacking)
        for first in range(0, len(keys), self._batch):
            job = self._add(_ChunkJob(keys[first : first + self._batch]))
            with self._state:
                self._coming.update(dict.fromkeys(job.keys, job))
            self._submit("load", job, self._load(job, epoch, resets))

    def finish(self, context: ReqContext) -> None:
        """Forget the lookups of a finished request."""
        with self._state:
            self._requests.pop(context.req_id, None)

    # ---- stores ----

    def write(self, keys: Iterable[OffloadKey], reader: ReqContext | None = None) -> None:
        """Start writing chunks from host memory; those beyond the limit follow as writes end, if still there.

        Args:
            keys: of the chunks.
            reader: a request; what it has loaded from the store is not written.
        """
        if not self._may_write:
            return
        self._reap()
        with self._state:
            request = None if reader is None else self._requests.get(reader.req_id)
            loaded = () if request is None else request.loaded
            self._unwritten.update((key, None) for key in keys if key not in loaded)
        self._write_more()

    def _write_more(self) -> None:
        """Start as many writes as the limit allows; none for a while after one that failed."""
        with self._lock:
            while not self._is_paused:
                with self._state:
                    room = self._max_writing - sum(len(job.keys) for job in self._jobs if job.held)
                    chosen = list(islice(self._unwritten, max(0, min(room, self._batch))))
                    for key in chosen:
                        del self._unwritten[key]
                    epoch = self._epoch
                if not chosen:
                    return
                found = self._offload.lookup(chosen)
                here = [key for key, state in zip(chosen, found, strict=True) if state == "hit"]
                with self._state:
                    self.counts.not_written += len(chosen) - len(here)
                if here:
                    job = self._add(_ChunkJob(here))
                    chunks = keep(job.held, self._offload.prepare_load, here)
                    self._submit("store", job, self._put(job, chunks, epoch))

    def reset(self, *, keep: bool) -> None:
        """Drop operations in flight; unless `keep`, forget everything in the store, as the weights may have changed."""
        with self._state:
            self._resets += 1
            self._requests.clear()
            self._wanted.clear()
            self._num_without_room = 0
            self._unwritten.clear()
            self._coming.clear()
            if not keep:
                # Chunks stored from now on may belong to unnamed weights: use a namespace that no other engine has.
                self._epoch, self._has_forgotten = os.urandom(16), False
            epoch = self._epoch
        if not keep:
            # An earlier write that has started ends first; the others write nothing.
            self._submit("store", self._add(_ChunkJob([])), self._forget(epoch))

    def close(self) -> None:
        """Wait a while for writes to end, then close the store. Idempotent."""
        until = time.monotonic() + _CLOSE_SECONDS
        while running := self._running():
            if not wait(running, until - time.monotonic()).done:
                break
        with self._state:
            self.counts.not_written += len(self._unwritten)
            self._unwritten.clear()  # a job that ends now must not submit others
        if not self._has_forgotten:
            _LOG.error("the engine ends: %s", _NOT_FORGOTTEN)
        self._work.close(cancel=True, timeout=0.0)
        self._store.close()
        self._work.close(timeout=_END_SECONDS)  # the store has given up the jobs' operations
        self._region.close()
        self._reap()

    def _running(self) -> list[Future[None]]:
        with self._state:
            return [future for job in self._jobs for future in job.futures if not future.done()]

    # ---- jobs over the store, in its thread ----

    def _forget(self, epoch: bytes) -> Steps[None]:
        has_forgotten: list[bool] = []

        def forget() -> None:
            try:
                self._store.forget()
                has_forgotten.append(True)
            except Exception:  # noqa: BLE001 (in any case the store has not confirmed that it forgot)
                _LOG.exception("this engine continues without its external store: %s", _NOT_FORGOTTEN)

        thread = start_worker("blockyard-vllm-external-forget", forget, lambda: None)  # waits for the storage
        while thread.is_alive():
            yield _FORGET_SECONDS
        with self._state:
            self._has_forgotten = bool(has_forgotten) and epoch == self._epoch

    def _load(self, job: _ChunkJob, epoch: bytes, resets: int) -> Steps[None]:
        keys = job.keys
        staged: set[OffloadKey] = set()
        places: dict[OffloadKey, int] = {}
        try:
            rows = self._rows.take(len(keys))
            entry = yield self._store.submit_get, self._digests(keys, epoch), rows
            places = {key: place for place, key in enumerate(keys) if entry.ok[place]}
            staged = self._stage(job, places, entry.rows, resets)
            self._rows.give(rows, entry)
        finally:
            self._give_back(job)
            with self._state:
                self.counts.loaded += len(staged)
                self.counts.missed += len(keys) - len(staged)
                if resets == self._resets:
                    self._ask_again(set(places) - staged)
                    for key in keys:
                        self._coming.pop(key, None)

    def _ask_again(self, keys: set[OffloadKey]) -> None:
        """Let requests look up keys again that found no room, but not those whose keys alone would fill the host."""
        at = time.monotonic() + _FULL_SECONDS
        for request in self._requests.values():
            if keys and self._can_hold(request):
                request.again.update(dict.fromkeys(keys & request.asked, at))

    def _stage(
        self, job: _ChunkJob, places: dict[OffloadKey, int], rows: NDArray[np.uint8], resets: int
    ) -> set[OffloadKey]:
        """Copy the verified chunks at these rows to host memory, as many as get a chunk; only then are they hits."""
        store, keys = None, list(places)
        deadline = int(time.monotonic() * 1000) + _STAGING_DEADLINE_MS
        while keys and store is None:
            with self._lock:
                if resets != self._resets or not self.may_stage:
                    return set()
                store = keep(job.stores, partial(self._offload.prepare_store, deadline=deadline), keys)
                if store is not None:
                    self._report([], store.evicted)
                    with self._state:
                        for key in store.keys:
                            self._coming.pop(key, None)  # it is pending in host memory from now on
                elif not self._give_room(len(keys)):
                    keys = keys[: len(keys) // 2]
        if store is None:
            return set()
        self._rows.write(store.chunks, rows, np.array([places[key] for key in store.keys], np.int64))
        with self._lock:
            with self._state:
                for request in self._requests.values():
                    request.loaded |= request.asked.intersection(store.keys)
            stored = self._offload.complete_store(store.keys)
            job.stores = _NOTHING
            self._report(stored, [])
        return set(store.keys)

    def _put(self, job: _ChunkJob, chunks: NDArray[np.int32], epoch: bytes) -> Steps[None]:
        keys = job.keys
        done, new, has_failed = 0, np.arange(len(keys)), False
        try:
            if epoch != self._epoch:
                return
            has_failed = True  # until the store has answered
            digests = self._digests(keys, epoch)
            new = np.flatnonzero(~self._store.contains(digests))
            has_failed = bool(len(new))
            if has_failed:
                rows = self._rows.read(chunks[new])
                entry = yield self._store.submit_put, [digests[place] for place in new], rows
                done = int(np.count_nonzero(entry.ok))
                has_failed = not done and "refused" not in entry.reasons
                self._rows.give(rows, entry)
        finally:
            self._give_back(job)
            with self._state:
                self.counts.written += done
                self.counts.present += len(keys) - len(new)
                self._pressure.note_outcome(time.monotonic(), failed=has_failed)
                if has_failed and epoch == self._epoch:  # written later, if still on the host
                    self._unwritten.update((keys[place], None) for place in new)
                else:
                    self.counts.not_written += len(new) - done
            self._write_more()

    def _give_back(self, job: _ChunkJob) -> None:
        """Release a job's host chunks."""
        let_go(job.held, self._offload.complete_load, job.keys)
        if job.stores:
            with self._lock:
                for store in job.stores:
                    self._offload.complete_store([] if store is None else store.keys, success=False)
                job.stores = _NOTHING

    # ---- jobs ----

    def _add(self, job: _ChunkJob) -> _ChunkJob:
        with self._state:
            self._jobs.append(job)
        return job

    def _submit(self, lane: str, job: _ChunkJob, steps: Steps[None]) -> None:
        keep(job.futures, self._work.submit, lane, _logged(steps))

    def _reap(self) -> None:
        """Remove ended jobs, and return chunks that they could not return."""
        with self._lock, self._state:  # a thread that starts a write has submitted it by then, or has failed
            ended = [job for job in self._jobs if job.is_ended]
        for job in ended:
            self._give_back(job)
        with self._state:
            self._jobs = [job for job in self._jobs if job not in ended]
            self._coming = (
                {key: job for key, job in self._coming.items() if job not in ended} if ended else self._coming
            )

    def _is_under_way(self, key: OffloadKey) -> bool:
        job = self._coming.get(key)
        return key in self._wanted or (job is not None and not job.is_ended)

    def _digests(self, keys: Sequence[OffloadKey], epoch: bytes | None = None) -> list[bytes]:
        epoch = self._epoch if epoch is None else epoch
        return [hashlib.sha256(epoch + key).digest() for key in keys]

    def _timeout_base_of(self, context: ReqContext) -> float:
        wanted = read_hints(context).wait
        return self._timeout_base if wanted is None else min(wanted, self._timeout_base)

    def _is_allowed(self, context: ReqContext) -> bool:
        tiers = getattr(context, "load_tier_filter", None)
        is_open = self._region.is_complete and self.may_stage and self._has_forgotten
        return is_open and (tiers is None or bool(tiers.allows(Medium.STORAGE, None)))


def _logged(steps: Steps[None]) -> Steps[None]:
    try:
        yield from steps
    except Exception:  # noqa: BLE001 (in any case its keys are misses)
        _LOG.exception("the external store failed")
