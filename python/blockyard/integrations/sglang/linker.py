"""An external cache linker of SGLang: pages of the device pools in a prefix store, without host pools of SGLang.

SGLang aborts a request whose load fails. So `lookup` reads the pages into host memory and verifies them before it
reports them as restorable; a load is then a copy from host memory, which no store can break.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as LateError
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.utils import get_device_module
from sglang.version import __version__ as sglang_version

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log, require_fit
from blockyard.integrations.options.sglang import read_linker
from blockyard.integrations.sglang.identity import identify
from blockyard.integrations.sglang.pages import as_bytes, refuse_own_folders, restorable_pages, sizes_of_store
from blockyard.integrations.sglang.recording import QueryRecorder, record_queries
from blockyard.stores.adapters.checkpoint import require_revision
from blockyard.stores.adapters.jobs import Steps
from blockyard.stores.adapters.objects import PrefixObjects, store_url
from blockyard.stores.adapters.options import read_size
from blockyard.workers.interrupts import keep

__all__ = ["BlockyardLinker"]

_LOG = engine_log("SGLang")
_MAX_READS: Final = 16
"""Maximum number of reads that outlived their lookup, and whose pages are kept for the next one."""
_Pages = dict[tuple[str, str], NDArray[np.uint8]]
"""Values by source and key: the pages that all pools with the slots of this source have for the key, in one piece."""


class BlockyardLinker(UnifiedCacheLinker):
    """Pages of SGLang's device pools in a Blockyard store. Named in SGLang's external linker configuration.

    Args:
        server_args: from SGLang.
        params: from SGLang.
        components: from SGLang.
        extra_config: options: `root_dir` or `url`, `size` and `revision` as for `BlockyardHiCache`; `staging`, the
            limit on host memory for looked-up pages in bytes; `lookup_seconds`, how long a lookup waits for them.
        forward_stream: from SGLang.

    Raises:
        InvalidArgumentError: an option is missing, unknown or wrong.
        StoreError: the store cannot be opened.
    """

    _recorder: QueryRecorder | None = None

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        options = read_linker(extra_config or {})
        identity, problem = identify(server_args)
        require_revision(options.revision, options.url or "", problem)
        self.forward_stream = forward_stream
        self._group = _device_pools(params, components)
        self.pools = self._group.entry_map
        rank, ranks = _rank(params)
        refuse_own_folders(options.root_dir, ranks, share_pages=self._group.rank_replicated)
        self._owner, self._ranks = not self._group.rank_replicated or rank == 0, ranks
        place = [params.pp_rank, params.pp_size, params.attn_cp_rank, params.attn_cp_size]
        place += [] if self._group.rank_replicated else [rank, ranks]
        self._spans: dict[str, dict[Any, slice]] = {}  # by source, the bytes of each pool in its values
        for entry in self._group.entries:
            spans = self._spans.setdefault(str(entry.indices_from_pool), {})
            begin = max((span.stop for span in spans.values()), default=0)
            spans[entry.name] = slice(begin, begin + sum(size for _, size in _parts(entry)))
        self._sizes = {source: max(span.stop for span in spans.values()) for source, spans in self._spans.items()}
        self._staging_bytes = read_size("staging", options.staging, holds=max(self._sizes.values()), what="page")
        self._lookup_seconds = options.lookup_seconds
        self._objects = PrefixObjects(
            store_url(
                options.root_dir,
                options.url,
                options.size,
                f"linker-tp{rank}-pp{params.pp_rank}-cp{params.attn_cp_rank}",
            ),
            sizes=sizes_of_store(self._sizes),
            fields={
                "engine": f"sglang linker {sglang_version}",
                "model": identity or server_args.model_path,
                "revision": options.revision,
                "place": place,
                "page": params.page_size,
                "pools": {str(name): _describe(pool) for name, pool in self.pools.items()},
                "values": {source: list(map(str, spans)) for source, spans in self._spans.items()},
            },
        )
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._start(next(buffer.device for pool in self.pools.values() for buffer, _ in _parts(pool)))
        self._recorder = record_queries([rank, params.pp_rank, params.attn_cp_rank], params.page_size)
        _LOG.info("Blockyard: %d bytes of staging, %s", self._staging_bytes, self._objects.about)

    def _start(self, device: torch.device) -> None:
        self._changed = threading.Lock()
        self._staged: OrderedDict[str, _Pages] = OrderedDict()
        self._staged_bytes = 0
        self._reading: dict[str, Future[_Pages]] = {}
        self._pending: dict[str, list[tuple[PoolTransfer, NDArray[np.uint8] | None]]] = {}
        self._offloads: list[Future[bool]] = []  # not yet popped, oldest first
        self._reads = self._objects.jobs("blockyard-sglang-read", {"read": 2})
        # Device copies block their thread, so each direction has its own.
        self._loads = ThreadPoolExecutor(1, "blockyard-sglang-load")
        self._stores = ThreadPoolExecutor(1, "blockyard-sglang-store")
        self._load_stream, self._store_stream = _side_stream(device), _side_stream(device)
        self._copies: list[Future[Any]] = []  # loads, and offloads whose call was interrupted
        self._closed = False

    # ---- loads ----

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Read a prompt's available pages, and return which prefixes are in host memory, verified and complete.

        Waits `lookup_seconds` at most. Pages that arrive later are used by the request's next lookup.
        """
        until = time.monotonic() + self._lookup_seconds
        keys = next((list(transfer.keys) for transfer in transfers if transfer.name == PoolName.KV), [])
        if self._recorder is not None:
            self._recorder.add_request(rid, keys)
        if not keys or not self._group.resolve_transfers(transfers):
            return []
        others = [transfer for transfer in transfers if transfer.name != PoolName.KV and transfer.name in self._sizes]
        found = restorable_pages(others, lambda name: self._contains(str(name), keys, until))
        pages = found.kv_hit_pages
        if not pages:
            return []
        wanted = [(str(PoolName.KV), key) for key in keys[:pages]]
        trailing = False
        for transfer in others:
            window = pages
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window, trailing = min(pages, max(1, len(transfer.keys or ()))), True
            wanted += [(str(transfer.name), key) for key in keys[pages - window : pages]]
        staged = self._stage(rid, wanted, until)
        if trailing:
            # States of windows that end earlier were not read.
            return [pages] if all(page in staged for page in wanted) else []
        if len(staged) == len(wanted):
            return list(range(1, pages + 1))
        names = {name for name, _ in wanted}
        whole = [all((name, key) in staged for name in names) for key in keys[:pages]]
        return list(range(1, [*whole, False].index(False) + 1))

    def _contains(self, name: str, keys: Sequence[str], until: float) -> list[bool]:
        names, sizes = [f"{name} {key}" for key in keys], [self._sizes[name]] * len(keys)
        return self._objects.contains(names, sizes, until)

    def _stage(self, rid: str, wanted: list[tuple[str, str]], until: float = math.inf) -> _Pages:
        """Read pages into host memory; return those that arrive in time, which are staged for this request."""
        with self._changed:
            staged = self._staged.get(rid, {})
            missing = [page for page in wanted if page not in staged]
            reading = self._reading.get(rid)
            if not missing or self._closed:
                return staged
            if sum(self._sizes[name] for name, _ in wanted) > self._staging_bytes:
                _LOG.warning("the pages of %s do not fit into staging of %d bytes", rid, self._staging_bytes)
                return {}
            if reading is None:
                # Late pages of a request that never comes back are dropped.
                while len(self._reading) >= _MAX_READS:
                    self._reading.pop(next(iter(self._reading))).cancel()
                reading = self._reading[rid] = self._reads.submit("read", self._read(missing))
        try:
            read = reading.result(None if until == math.inf else max(0.0, until - time.monotonic()))
        except LateError:
            return {}
        except Exception:  # noqa: BLE001 (a failed read is a miss)
            _LOG.exception("pages were not read")
            read = {}
        with self._changed:
            self._reading.pop(rid, None)
            both = self._unstage(rid) | read
            staged = {page: both[page] for page in wanted if page in both}
            if staged:
                total = self._staged_bytes + _bytes_of(staged)
                self._staged[rid] = staged
                self._staged_bytes = total
            while self._staged_bytes > self._staging_bytes and len(self._staged) > 1:
                self._unstage(next(iter(self._staged)))
        return staged

    def _unstage(self, rid: str) -> _Pages:
        """Take a request's pages out of staging; `_changed` is held."""
        pages = self._staged.get(rid)
        if pages is None:
            return {}
        left = self._staged_bytes - _bytes_of(pages)
        del self._staged[rid]
        self._staged_bytes = left  # nothing can raise in between
        return pages

    def _read(self, wanted: list[tuple[str, str]]) -> Steps[_Pages]:
        read: _Pages = {}

        def take(index: int, data: NDArray[np.uint8]) -> None:
            read[wanted[index]] = data.copy()

        names, sizes = [f"{name} {key}" for name, key in wanted], [self._sizes[name] for name, _ in wanted]
        yield from self._objects.get_steps(names, sizes, take)
        return read

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a copy of pages found by `lookup`; False if some are gone, so that the request computes them."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not expanded or rid in self._pending:
            return False
        with self._changed:
            staged = self._unstage(rid)
        work: list[tuple[PoolTransfer, NDArray[np.uint8] | None]] = []
        for transfer in expanded:
            source = str(self.pools[transfer.name].indices_from_pool)
            span = self._spans[source][transfer.name]
            pages = [staged.get((source, key)) for key in transfer.keys]
            whole = [page[span] for page in pages if page is not None]
            if len(whole) < len(pages) and self._ranks == 1:
                return False
            # All ranks must give the same answer, so a rank that lost pages accepts the load and lets it fail.
            work.append((transfer, np.stack(whole) if len(whole) == len(pages) else None))
        self._pending[rid] = work
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancel a load that has not started."""
        return self._pending.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads; return their index in `layer_done_counter`, -1 if there are none."""
        work = [item for items in self._pending.values() for item in items]
        self._pending.clear()
        if not work:
            return -1
        begun: list[int] = []
        try:
            index = int(keep(begun, self.layer_done_counter.update_producer))
            ready = get_device_module().Event()
            ready.record()
            self._copies = [copy for copy in self._copies if not copy.done()]
            copy = keep(self._copies, self._loads.submit, self._copy_in, index, work, ready)
            copy.add_done_callback(partial(self._fail_load, index))
        except BaseException as error:
            for index in begun:
                self.layer_done_counter.fail(int(index), error)
            raise
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for a load to end; True if all of it landed."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _copy_in(self, index: int, work: list[tuple[PoolTransfer, NDArray[np.uint8] | None]], ready: Any) -> None:
        try:
            _enter(self._load_stream)
            ready.synchronize()
            lost = [transfer.name for transfer, data in work if data is None]
            if lost:
                raise InvalidArgumentError(f"pages of {lost} are no longer in staging")
            places = [_rows(self.pools[transfer.name], transfer.host_indices) for transfer, _ in work]
            for layer in range(self._group.num_layers):
                for (transfer, data), rows in zip(work, places, strict=True):
                    assert data is not None  # noqa: S101 (checked above)
                    _copy_layer(self.pools[transfer.name], layer, rows, data)
                done = get_device_module().Event()
                done.record()
                done.synchronize()
                self.layer_done_counter.complete(index, layer)
        except BaseException as error:
            self.layer_done_counter.fail(index, error)  # the forward pass waits for every layer
            _LOG.exception("load %d failed", index)
            raise

    def _fail_load(self, index: int, copy: Future[None]) -> None:
        """End a load that raised, unless already ended. Idempotent."""
        if not copy.cancelled() and (error := copy.exception()) is not None:
            self.layer_done_counter.fail(index, error)

    # ---- stores ----

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Start storing pages of all pools; False if there is nothing to store."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded or self._closed:
            return False
        if self._owner:
            before = len(self._offloads)
            try:
                keep(self._offloads, self._stores.submit, self._put, expanded, self.record_offload_ready())
            except BaseException:
                self._copies += self._offloads[before:]  # SGLang does not wait for its result
                del self._offloads[before:]
                raise
        else:
            done: Future[bool] = Future()
            done.set_result(True)
            self._offloads.append(done)
        return True

    def _put(self, transfers: list[PoolTransfer], ready: list[Any]) -> bool:
        _enter(self._store_stream)
        for event in ready:
            event.synchronize()
        by_name = {transfer.name: transfer for transfer in transfers}
        # Store every source, even after one has failed.
        stored = [
            self._put_source(source, [by_name[name] for name in spans])
            for source, spans in self._spans.items()
            if all(name in by_name for name in spans)
        ]
        return all(stored)

    def _put_source(self, source: str, transfers: list[PoolTransfer]) -> bool:
        keys = list(transfers[0].keys)
        parts = []
        for transfer in transfers:
            pool = self.pools[transfer.name]
            rows = _rows(pool, transfer.host_indices)
            for buffer, size in _parts(pool):
                parts.append(as_bytes(buffer.index_select(0, rows).cpu()).reshape(len(keys), size))
        data = np.concatenate(parts, axis=1)
        return all(
            self._objects.put([f"{source} {key}" for key in keys], [data.shape[1]] * len(keys), data.__getitem__)
        )

    def num_completed_offloads(self) -> int:
        """Return how many ended offloads were not popped yet."""
        return sum(1 for _ in itertools.takewhile(Future.done, self._offloads))

    def pop_completed_offload(self) -> bool:
        """Pop the oldest offload, and return whether it stored all its pages."""
        error = self._offloads[0].exception()
        if error is not None:
            _LOG.error("pages were not stored", exc_info=error)
        success = error is None and self._offloads[0].result()
        del self._offloads[0]  # last, so that the next call returns what this one does not
        return success

    # ---- the rest ----

    def reset(self) -> None:
        """Wait for running operations and drop queued and staged ones; stored pages stay."""
        self._pending.clear()
        wait(self._copies + self._offloads)
        with self._changed:
            self._staged.clear()
            self._staged_bytes = 0
            self._reading.clear()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Reset, and close the store. Idempotent."""
        with self._changed:
            self._closed = True
        self.reset()
        self._reads.close(cancel=True)
        for pool in (self._loads, self._stores):
            pool.shutdown(cancel_futures=True)
        if self._recorder is not None:
            self._recorder.close()
        self._objects.close()


def _side_stream(device: torch.device) -> Any:
    """Return a stream for one worker, separate from those of compute; None on a CPU."""
    return None if device.type == "cpu" else get_device_module().Stream(device)


def _enter(stream: Any) -> None:
    """Make a stream and its device current in a worker: new threads start on device 0, and events would go there."""
    if stream is not None:
        module = get_device_module()
        module.set_device(stream.device)
        module.set_stream(stream)


def _bytes_of(pages: _Pages) -> int:
    return sum(data.nbytes for data in pages.values())


def _device_pools(params: Any, components: Any) -> Any:
    """Return the device pools as SGLang groups them, plus our group for plain attention, which it omits."""
    cache, page_size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    if type(cache) is not MHATokenToKVPool or set(components) != {ComponentType.FULL}:
        return resolve_hybrid_device_pool_group(
            kvcache=cache, page_size=page_size, params=params, components=components
        )
    if cache.k_scale_buffer is not None:
        raise InvalidArgumentError("the KV cache has scales, which the linker does not store")
    entry = DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=cache,
        components=[cache.k_buffer, cache.v_buffer],
        layer_mapping={layer: layer for layer in range(cache.layer_num)},
        page_size=page_size,
        rows_are_pages=False,
    )
    return DevicePoolGroup([entry], cache.layer_num, page_size)


def _rank(params: Any) -> tuple[int, int]:
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)


def _parts(pool: Any) -> list[tuple[torch.Tensor, int]]:
    """Return the buffers of a pool in page byte order, with the bytes of a page in each."""
    sizes = [size for component in pool.buffer_meta for _, _, size in component]
    return list(zip((buffer for component in pool.components for buffer in component), sizes, strict=True))


def _describe(pool: Any) -> list[Any]:
    """Return all that determines a page's bytes. The pool's dtype distinguishes float8 types; its buffers do not."""
    buffers = [[str(buffer.dtype), *buffer.shape[1:], size] for buffer, size in _parts(pool)]
    mapping = sorted((layer, str(buffers)) for layer, buffers in pool.layer_mapping.items())
    return [str(getattr(pool.device_pool, "dtype", "")), pool.page_size, buffers, mapping]


def _rows(pool: Any, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of a pool's buffers that hold the pages, page by page."""
    first = torch.tensor(pool.prepare_locations(indices), dtype=torch.int64)
    buffer, size = _parts(pool)[0]
    span = size // (buffer.nbytes // buffer.shape[0])
    return (first[:, None] + torch.arange(span)).flatten().to(buffer.device)


def _copy_layer(pool: Any, layer: int, rows: torch.Tensor, data: NDArray[np.uint8]) -> None:
    """Copy one layer of pages, uint8 `[pages, bytes]`, to a pool's buffers."""
    mapped = pool.layer_mapping.get(layer)
    if mapped is None:
        return
    chosen = {mapped} if isinstance(mapped, int) else set(mapped)
    end = 0
    for component, meta in zip(pool.components, pool.buffer_meta, strict=True):
        for number, (buffer, (_, _, size)) in enumerate(zip(component, meta, strict=True)):
            begin, end = end, end + size
            if number in chosen:
                part = torch.from_numpy(np.ascontiguousarray(data[:, begin:end]).reshape(-1))
                buffer.index_copy_(
                    0, rows, part.view(buffer.dtype).reshape(len(rows), *buffer.shape[1:]).to(buffer.device)
                )


require_fit(BlockyardLinker, UnifiedCacheLinker, f"SGLang {sglang_version}")
