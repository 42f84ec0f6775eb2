"""A secondary tier of vLLM's `TieringOffloadingSpec` over a bounded, verified, persistent prefix store."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log
from blockyard.integrations.options.vllm import check_tier
from blockyard.integrations.vllm.metrics import hit_source
from blockyard.stores import open_store
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards
from blockyard.stores.adapters.jobs import Steps, StoreJobs
from blockyard.stores.adapters.objects import BATCH_BYTES, about_store, store_url
from blockyard.stores.namespace import Namespace
from blockyard.stores.value import is_damage
from blockyard.workers.interrupts import keep

__all__ = ["BlockyardTier", "namespace"]

_LOG = engine_log("vLLM")
_DOMAIN: Final = b"blockyard vllm tier 2"
_PARALLEL: Final = ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")

_CANONICAL: Final = ("kv_cache_layout", "canonical_layout")
_LAYOUT: Final = ("kv_cache_layout", "replicated_layout", "canonical_layout")


class _Outcome(NamedTuple):
    done: list[OffloadKey]
    num_bytes: int
    ended: float


@dataclass(slots=True, eq=False)
class _TierJob:
    """A job of the scheduler's thread. It ends with its future, so that an exception elsewhere cannot lose it."""

    job_id: int
    keys: list[OffloadKey]
    is_load: bool
    begun: float
    futures: list[Future[_Outcome]] = field(default_factory=list)  # empty if submitting it raised

    @property
    def is_ended(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> JobResult:
        outcome = _Outcome([], 0, self.begun)
        for future in self.futures:
            if (error := future.exception()) is None:
                outcome = future.result()
            else:
                _LOG.error("job %d failed", self.job_id, exc_info=error)
        success = len(outcome.done) == len(self.keys)
        return JobResult(
            job_id=self.job_id,
            success=success,
            successful_keys=None if success or not self.is_load else outcome.done,
            transfer_time=outcome.ended - self.begun,
            transfer_bytes=outcome.num_bytes,
        )


class BlockyardTier(SecondaryTierManager):
    """Chunks evicted from vLLM's host memory, in a Blockyard store. Named in vLLM's `secondary_tiers`.

    Chunks are verified when read. A damaged one is deleted. A transient read failure is a failed load, and a miss until
    the store reads the chunk again. The engine recomputes both. Chunks are found only by engines with the same model
    name, dtype, layout and `revision`. vLLM does not tell a tier what else the model computes with.

    Args:
        offloading_spec: from vLLM.
        primary_kv_view: vLLM's host memory, one row per chunk.
        tier_type: from vLLM.
        backpressure_detector: from vLLM.
        root_dir: directory of a file store; only one engine at a time can open it.
        size: size limit of that file store in bytes; None for 1 GiB. A `url` has its own.
        url: instead of `root_dir`, the URL of any store with keys, see `blockyard.open_store`.
        revision: names the weights, adapters, RoPE settings and quantization; other revisions do not find its chunks.
            Required, except with a store in memory.
        unknown: options that do not exist, to refuse them by name.

    Raises:
        InvalidArgumentError: an option is unknown or wrong, `revision` is missing, not exactly one of `root_dir` and
            `url` is given, or the view does not have one row per chunk.
        StoreError: the store cannot be opened.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        root_dir: str | None = None,
        size: int | str | None = None,
        url: str | None = None,
        revision: str | None = None,
        **unknown: object,
    ) -> None:
        _, revision = check_tier(root_dir=root_dir, size=size, url=url, revision=revision, **unknown)
        url = store_url(root_dir, url, size)
        super().__init__(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            tier_type=tier_type,
            backpressure_detector=backpressure_detector,
        )
        self.cache_hit_source = hit_source(url)
        host = _rows(primary_kv_view)
        width = int(host.shape[1])
        self._width, self._rows = width, ChunkRows([host])
        name = namespace(offloading_spec, width, revision)
        self._store = open_store(url, bytes_per_block=width, namespace=name, use="prefix")
        self._batch = max(1, BATCH_BYTES // width)
        # Loads never queue behind stores.
        self._work = StoreJobs(self._store, "blockyard-vllm", {"load": 1, "store": 1})
        self._jobs: list[_TierJob] = []  # not yet reported
        self._storing: dict[OffloadKey, _TierJob] = {}  # latest job of each key
        _LOG.info("Blockyard tier: chunks of %d bytes, %s", width, about_store(self._store, url, name))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Request chunks as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a key can be loaded; RETRY while it is being stored."""
        job = self._storing.get(key)
        if job is not None and not job.is_ended:
            return LookupResult.RETRY
        return LookupResult.HIT if self._store.contains([_digest(key)])[0] else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start copying host chunks to the store; keys already stored are not written again."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob, expedited: bool = False) -> None:
        """Start copying chunks from the store into host chunks; no other host byte is written."""
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return one result per job that ended since the last call."""
        ended = [job for job in self._jobs if job.is_ended]
        if not ended:
            return []
        results = [job.result() for job in ended if job.futures]
        self._storing = {key: job for key, job in self._storing.items() if job not in ended}
        left = [job for job in self._jobs if job not in ended]
        self._jobs = left  # last, so that the next call returns what this one does not
        return results

    def drain_jobs(self) -> None:
        """Wait until every job has ended; `get_finished_jobs` then has their results."""
        wait([future for job in self._jobs for future in job.futures])

    def shutdown(self) -> None:
        """Wait for running jobs, and close the store. Idempotent."""
        self._work.close()
        self._store.close()

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        keys, chunks = list(job.keys), np.array(job.chunk_ids, np.int64)
        if len(keys) != len(chunks):
            raise InvalidArgumentError(f"job {job.job_id} has {len(keys)} keys and {len(chunks)} chunk_ids")
        made = _TierJob(job.job_id, keys, is_load, time.perf_counter())
        self._jobs.append(made)
        if not is_load:
            self._storing.update(dict.fromkeys(keys, made))
        steps = self._get(keys, chunks) if is_load else self._put(keys, chunks)
        keep(made.futures, self._work.submit, "load" if is_load else "store", steps)

    def _put(self, keys: list[OffloadKey], chunks: NDArray[np.int64]) -> Steps[_Outcome]:
        done: list[OffloadKey] = []
        for part in self._parts(len(keys)):
            rows = self._rows.read(chunks[part])
            entry = yield self._store.submit_put, _digests(keys[part]), rows
            self._rows.give(rows, entry)
            done += [key for key, ok in zip(keys[part], entry.ok, strict=True) if ok]
        return self._outcome(done)

    def _get(self, keys: list[OffloadKey], chunks: NDArray[np.int64]) -> Steps[_Outcome]:
        done: list[OffloadKey] = []
        for part in self._parts(len(keys)):
            digests, rows = _digests(keys[part]), self._rows.take(len(keys[part]))
            num_damaged = 0
            try:
                entry = yield self._store.submit_get, digests, rows
                ok = entry.ok
                num_damaged = sum(map(is_damage, entry.reasons))
                self._rows.write(chunks[part][ok], entry.rows, np.flatnonzero(ok))
                self._rows.give(rows, entry)
            except Exception:  # noqa: BLE001 (a load that failed is a miss)
                _LOG.exception("a load failed")
                ok = np.zeros(len(digests), np.bool_)
            done += [key for key, good in zip(keys[part], ok, strict=True) if good]
            if not ok.all():
                _LOG.warning("%d chunks could not be loaded, %d are damaged", len(ok) - int(ok.sum()), num_damaged)
        return self._outcome(done)

    def _outcome(self, done: list[OffloadKey]) -> _Outcome:
        return _Outcome(done, len(done) * self._width, time.perf_counter())

    def _parts(self, count: int) -> Iterable[slice]:
        return (slice(first, min(first + self._batch, count)) for first in range(0, count, self._batch))


def _rows(view: memoryview) -> NDArray[np.uint8]:
    """View vLLM's host memory as uint8 `[chunks, bytes]`, without a copy."""
    array = np.asarray(view)
    if array.ndim < 2:
        raise InvalidArgumentError(f"primary_kv_view has shape {array.shape}, must have a row for each chunk")
    rows = array.reshape(len(array), -1).view(np.uint8)
    if len(rows) and not np.may_share_memory(rows, array):
        raise InvalidArgumentError(f"primary_kv_view has strides {array.strides}, its rows must be contiguous")
    return rows


def _digest(key: OffloadKey) -> bytes:
    """Return the name of a key in the store: vLLM's keys have any length."""
    return hashlib.sha256(key).digest()


def _digests(keys: Sequence[OffloadKey]) -> list[bytes]:
    return [_digest(key) for key in keys]


def namespace(
    spec: Any, width: int, revision: str, identities: Sequence[bytes] = (), *, shards: HeadShards | None = None
) -> bytes:
    """Digest everything that determines a chunk's bytes besides its key, which covers tokens, adapter and salt.

    `identities` tell what each worker computes with, so that a copy of the model under another name shares its chunks.
    With `shards`, a chunk's bytes do not depend on how many workers there are, and which heads each of them has; with
    an order of tokens, they do not depend on the block size either.
    """
    config = getattr(spec, "config", None)
    model, cache, parallel = (getattr(config, name, None) for name in ("model", "cache", "parallel"))
    groups = getattr(config, "groups", None) or ()
    fields = {
        "bytes": width,
        "revision": revision,
        "model": [None if all(map(any, identities)) and identities else getattr(model, "name", None)],
        "dtype": getattr(model, "dtype", None),
        "workers": [identity.hex() for identity in (sorted(set(identities)) if shards else identities)],
        "cache": [getattr(cache, name, None) for name in ("tokens_per_hash", "blocks_per_chunk")],
        "parallel": "any" if shards else [getattr(parallel, name, None) for name in _PARALLEL],
        "layout": [getattr(config, name, None) for name in (_CANONICAL if shards else _LAYOUT)],
        "groups": [[group.tokens_per_block, *group.layer_names] for group in groups],
    }
    if shards and shards.tokens:
        fields["cache"] = {"tokens_per_key": spec.tokens_per_key, "tokens_per_chunk": spec.tokens_per_chunk}
        fields["groups"] = [list(group.layer_names) for group in groups]
    digest = hashlib.sha256(_DOMAIN + json.dumps(fields, sort_keys=True).encode()).digest()
    return Namespace(digest, {"engine": "vllm"} | fields | {"model": getattr(model, "name", None)})
