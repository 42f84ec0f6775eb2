"""`KVCache`: manager, copy engine, external store and executor, created from one set of sizes."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeGuard
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard._core import Arena, BlockManager, CacheGroup, PrefixCaching, StepDecision, StepOwner
from blockyard.engine.elastic.cache import ElasticCache, Resized
from blockyard.engine.engine import CacheEngine, check_list_of_tensors
from blockyard.engine.memory import MAX_BLOCKS
from blockyard.errors import BlockyardError, ForkedError, InvalidArgumentError, LayoutError
from blockyard.executor.executor import Executor, StepExecutor
from blockyard.executor.loop import StepEnd, StepLoop
from blockyard.layout import ArenaLayout, GroupedLayout, KVLayout
from blockyard.layout.kv import check_layout
from blockyard.layout.sizes import as_int
from blockyard.prefix_store import PrefixStore
from blockyard.prefix_store.unused import Unused
from blockyard.stores import ExternalStore, open_store
from blockyard.stores.base import Use
from blockyard.stores.checked_store import bytes_per_value, check_store, slots_per_extent
from blockyard.stores.namespace import Namespace, describe_layout, parts_of
from blockyard.stores.url import read_bytes, sized_url
from blockyard.types import ManagerStats, ResizeProgress
from blockyard.workers.ownership import Process

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheStep", "Health", "KVCache", "StepEnd"]

PREFIX_WRITES: Final = ("through", "back", "second_use", "never")

_log = logging.getLogger("blockyard.cache")
_caches: WeakSet[KVCache] = WeakSet()
_opening = threading.RLock()  # held while a cache takes its tensors


@dataclass(frozen=True)
class Health:
    """Whether a cache works, for an orchestrator's probes.

    Attributes:
        ok: False once the cache is closed, in a fork, and while its steps fail repeatedly: the engine should restart. A
            failing store costs hits but stops nothing, so `ok` stays True.
        reasons: problems, one line each, including those of stores; empty if there are none.
    """

    ok: bool
    reasons: tuple[str, ...] = ()


class KVCache:
    """The paged KV cache of one device: `manager` decides, `executor` executes its decisions.

    The cache takes each decision and ends its ticket: call `step`. `manager.take_decision`, `complete`, `fail` and
    `lose` raise `StepOrderError`. With a `Scheduler(cache)`, call the scheduler's `step`, `poll` and `drain` instead.

    If an exception, such as `KeyboardInterrupt`, ends a call, the next call first gives up everything in flight, and
    reports all open tickets as lost. No byte is wrong after that, and no block is leaked. An exception in the moment in
    which `poll` or `drain` returns can lose what it returned: the next use of a lost sequence raises
    `SequenceStateError`.

    Args:
        layout: layout of the device's tensors.
        tensors: existing tensors, as accepted by `layout.views`, that no other open cache has, or the arena of an
            `ArenaLayout`, one tensor uint8 `[bytes]`; None means to allocate them.
        device: device to allocate the tensors on, such as `"cuda:0"`.
        device_blocks: number of device blocks; None means as many as the tensors hold.
        device_bytes: size of device memory in bytes, instead of `device_blocks`: an int or text such as `"40GiB"`.
        max_device_blocks: maximum number of device blocks for `resize`. Memory then returns to the system
            when the device shrinks. None means `device_blocks`, in ordinary memory.
        max_device_bytes: maximum bytes of device memory for `resize`, instead of `max_device_blocks`: an int or text.
        host_blocks: number of blocks in host memory.
        host_bytes: size of host memory in bytes, instead of `host_blocks`: an int or text such as `"64GiB"`.
        pin_memory: whether host memory is page-locked, see `CacheEngine`.
        swap_store: URL of an external store, such as `"file:///var/kv?size=1TiB"`, or an open store that nothing else
            uses; `close` closes it. With several page classes its blocks are an `ArenaLayout.bytes_per_value` each.
        external_blocks: number of that store's slots to use; None, or more than it has, means all. Ranks of a
            tensor-parallel model use as many slots as their smallest store has.
        swap_store_bytes: size of the store in bytes, instead of `size` in its URL: an int or text such as `"1TiB"`.
        prefix_caching: a bool or `PrefixCaching`, see `BlockManager`.
        prefix_store: URL of a store for cached blocks, such as `"file:///var/kv?size=1TiB"`, or a store opened
            with `use="prefix"` that nothing else uses; `close` closes it. Prompts find blocks there that this or
            another process computed earlier, see `PrefixStore`. Requires prefix caching and a `namespace`.
        prefix_store_bytes: size of the store in bytes, instead of `size` in its URL.
        prefix_writes: which blocks are written to it: `"through"`, `"back"`, `"second_use"` or `"never"`, see
            `PrefixStore`.
        prefetch_timeout_base: minimum timeout in seconds for loading a prompt from the store; each 200 MB to load add a
            second.
        groups: cache groups, see `BlockManager`; by default those of the layout, see `KVLayout.from_config`.
        watermark: see `BlockManager`.
        reuse_order: see `BlockManager`.
        namespace: identifies everything that a block's bytes depend on, except the layout: any bytes;
            `store_namespace` derives them from the model, its weight revision and other inputs. A store treats blocks
            of another namespace or layout as misses.
        max_staging: maximum bytes of staging memory for transfers to or from a store, an int or text.

    Attributes:
        layout: as given.
        manager: the `BlockManager`.
        engine: the `CacheEngine`; `engine.tensors` are the device's tensors.
        swap_store: the external store that backs the external tier, or None.
        executor: the `StepExecutor`.
        prefix_store: the `PrefixStore`, or None.
        elastic: the memory behind the tensors with `max_device_blocks` or `max_device_bytes`; otherwise None.

    Raises:
        InvalidArgumentError: a size is out of range, missing or given twice; a store is closed, for the other use or in
            use elsewhere; or an open cache has the tensors. Stores that were given open stay open after any error.
        LayoutError: the tensors do not have the layout, or its groups have different block sizes.
        OutOfMemoryError: there is not enough memory.
        StoreError: the store cannot be opened.

    Example:
        >>> from blockyard import KVCache, KVLayout
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> with KVCache(layout, device_blocks=8, host_bytes="1MiB") as cache:
        ...     sequence = cache.manager.allocate(40)
        ...     with cache.step():
        ...         pass  # the model computes 40 tokens
        ...     cache.manager.swap_out(sequence)
        ...     with cache.step() as step:
        ...         pass
        ...     ended = step.ended + cache.drain()
        ...     [end.lost.tolist() for end in ended], cache.manager.tier(sequence)
        ([[]], 'host')
    """

    _is_closed = False
    swap_store: ExternalStore | None = None
    prefix_store: PrefixStore | None = None
    _unused: Unused | None = None

    def __init__(
        self,
        layout: KVLayout | GroupedLayout | ArenaLayout,
        *,
        tensors: Sequence[Tensor] | None = None,
        device: str | torch.device = "cpu",
        device_blocks: int | None = None,
        device_bytes: int | str | None = None,
        max_device_blocks: int | None = None,
        max_device_bytes: int | str | None = None,
        host_blocks: int | None = None,
        host_bytes: int | str | None = None,
        pin_memory: bool | None = None,
        swap_store: str | ExternalStore | None = None,
        external_blocks: int | None = None,
        swap_store_bytes: int | str | None = None,
        prefix_caching: bool | PrefixCaching = False,
        prefix_store: str | ExternalStore | None = None,
        prefix_store_bytes: int | str | None = None,
        prefix_writes: str = "through",
        prefetch_timeout_base: float = 0.25,
        groups: Sequence[CacheGroup] | None = None,
        watermark: float = 0.01,
        reuse_order: str = "lowest",
        namespace: bytes = b"",
        max_staging: int | str = "256MiB",
    ) -> None:
        groups = _groups(layout, groups)
        name, block_size = _namespace(namespace, layout), _block_size(layout, groups)
        _check_writes(prefix_writes)
        size = 1 if _has_classes(layout) else layout.bytes_per_block  # with several classes, sizes are in bytes
        given, growth = (device_blocks, device_bytes), (max_device_blocks, max_device_bytes)
        device_blocks, max_device_blocks = _device(layout, tensors, given, growth, host_blocks)
        host = _blocks("host", host_blocks, host_bytes, size) or 0
        value = getattr(layout, "bytes_per_value", size)
        swap_store = _sized("swap_store", swap_store, swap_store_bytes, value)
        prefix_store = _sized("prefix_store", prefix_store, prefix_store_bytes, value)
        staging = read_bytes("max_staging", max_staging, holds=size if swap_store or prefix_store else 1)
        prefix_caching = _with_store(prefix_store, given=prefix_caching, host=host)
        self.layout, self._process = layout, Process("a cache")
        self._closers: list[Callable[[], object]] = []  # each is idempotent
        try:
            tensors = self._open_elastic(device_blocks, max_device_blocks, device) or tensors
            self.swap_store = None if swap_store is None else self._take_store(swap_store, value, name)
            slots = _external_blocks(self.swap_store, external_blocks)
            own, arena = self._space((device_blocks, max_device_blocks), host, slots, tensors)
            self.manager = BlockManager(
                block_size=block_size,
                device_blocks=own,
                host_blocks=0 if arena else host,
                external_blocks=0 if arena else slots,
                watermark=watermark,
                reuse_order=reuse_order,
                groups=groups,
                arena=arena,
                prefix_caching=prefix_caching,
            )
            tensors = self._open_elastic_arena(arena, max_device_blocks, device) or tensors
            self._open_engine(max_device_blocks or own, host, tensors, device, pin_memory=pin_memory)
            self.executor = StepExecutor(self.engine, self.swap_store, max_staging=staging)
            self._closers.append(self.executor.close)
            # Others would end tickets whose bytes were never moved.
            self._steps = StepOwner(self.manager, instead="KVCache.step, or step of Scheduler(cache)")
            self.prefix_store = self._join(prefix_store, namespace, prefix_writes, prefetch_timeout_base, staging)
            self._loop = self._step_loop(None)
            self._unused = _unused(self.manager, self.prefix_store, prefix_caching)
        except BaseException:
            self._close_opened(swap_store, prefix_store)
            raise

    def __repr__(self) -> str:
        return f"KVCache({self.manager!r}, {len(self._loop)} steps open)"

    def step(self, *, by_layer: bool = False, prefetch: bool = False) -> CacheStep:
        """End the manager's step and start its transfers.

        The step waits for its loads, so that its body can compute with them. The device waits for loads from the host.
        For blocks from the external store the calling thread waits here for the store's answer, at most until the
        store's deadline; sequences whose blocks did not arrive are in `CacheStep.lost`. With `prefetch=True` the body
        computes other sequences in the meantime.

        Args:
            by_layer: loads from the host arrive layer by layer; the model waits for each layer with
                `CacheStep.wait_for_layer`.
            prefetch: do not wait for loads that the step does not compute with. Until the step's ticket has ended, the
                manager refuses to append to those sequences or to return their block tables. The step waits anyway if
                it has already appended to one of them, see `BlockManager.take_decision`.

        Returns:
            The step, a context manager: its body computes, its exit completes landed transfers.

        Raises:
            StepOrderError: a ticket is open that other code, such as a `Scheduler`, has taken from the manager.
            ForkedError: this is a fork of the process that created the cache.
            BlockyardError: the cache is closed; nothing was changed.
            MappingError: raised by the executor. The whole ticket has failed: the next `poll`, `drain` or step end
                names the sequences that lost bytes.
        """
        self._refuse_others("step")
        self.give_back()
        decision = self._loop.begin(by_layer=by_layer, prefetch=prefetch)
        if self.prefix_store is not None:
            self.prefix_store.poll()
        return CacheStep(self._loop, decision)

    def poll(self) -> list[StepEnd]:
        """End the tickets whose transfers have ended since the last call; never waits.

        Also advances loads and writes of the prefix store. While there is nothing to compute, call it about every
        10 ms, so that an idle engine's blocks reach the store.

        Raises:
            StepOrderError, ForkedError: as for `step`.
        """
        self._refuse_others("poll")
        self._loop.poll()
        return self._loop.report()

    def drain(self) -> list[StepEnd]:
        """Wait for all started transfers and end their tickets.

        Raises:
            StepOrderError, ForkedError: as for `step`.
        """
        self._refuse_others("drain")
        self._loop.drain()
        return self._loop.report()

    def resize(self, blocks: int | None = None, *, device_bytes: int | str | None = None) -> ResizeProgress:
        """Change the size of the device while sequences run.

        When the device grows, memory is allocated first. When it shrinks, memory is freed as blocks become unused: see
        `give_back`.

        Args:
            blocks: new number of blocks, at most `max_device_blocks` or what the tensors hold.
            device_bytes: new bytes of device memory instead, an int or text; with several page classes always this.

        Returns:
            The blocks that are still in use beyond the new end.

        Raises:
            ForkedError: this is a fork of the process that created the cache.
            InvalidArgumentError: the tensors are too small for `blocks` blocks, or the manager needs more.
            OutOfMemoryError: there is not enough memory to grow.
        """
        self._process.check()
        if (blocks is None) == (device_bytes is None):
            raise InvalidArgumentError(f"blocks is {blocks} and device_bytes {device_bytes}, give one of them")
        if _has_classes(self.layout):
            return self._resize_arena(blocks, device_bytes)
        size = self.layout.bytes_per_block
        if device_bytes is not None:
            given = read_bytes("device_bytes", device_bytes, holds=size)
            blocks = given // size
        blocks = as_int("blocks", blocks)
        max_blocks = self.engine.num_blocks("device")
        if not 1 <= blocks <= max_blocks:
            raise InvalidArgumentError(f"blocks is {blocks}, must be 1 to {max_blocks}, the blocks of the tensors")
        if self.elastic is not None and blocks > self.elastic.num_blocks:
            self.elastic.resize(blocks)
        before, progress = self.manager.pool().num_blocks, self.manager.defrag.resize(blocks)
        fields = {"blocks": blocks, "blocks_before": before, "blocks_in_use": progress.live + progress.held}
        _log.info("the device has %d blocks, had %d; %d removed ones are in use", *fields.values(), extra=fields)
        return progress

    def _resize_arena(self, blocks: int | None, device_bytes: int | str | None) -> ResizeProgress:
        if device_bytes is None:
            raise InvalidArgumentError(f"blocks is {blocks}, must be None with several page classes: give device_bytes")
        pool = self.manager.pool()
        per_extent = pool.per_extent or 1
        size, most = (pool.block_stride or 1) * per_extent, pool.max_blocks // per_extent
        given = read_bytes("device_bytes", device_bytes, holds=size)
        extents = given // size
        if extents > most:
            limit = f"at most {most * size}, {most} extents"
            raise InvalidArgumentError(f"device_bytes is {device_bytes!r}, must be {limit}: see max_device_bytes")
        if self.elastic is not None and extents > self.elastic.num_blocks:
            self.elastic.resize(extents)
        had, progress = pool.num_blocks // per_extent, self.manager.defrag.resize(device_bytes=extents * size)
        fields = {"extents": extents, "extents_before": had, "blocks_in_use": progress.live + progress.held}
        _log.info(
            "the device has %d extents, had %d; %d blocks in removed ones are in use", *fields.values(), extra=fields
        )
        return progress

    def give_back(self) -> Resized | None:
        """Return memory that a smaller device pool no longer uses to the system; each step does this too.

        Returns:
            The number of bytes returned; None if there were none, or without `max_device_blocks`.

        Raises:
            BlockyardError: the cache is closed.
        """
        if self._is_closed:
            raise BlockyardError("the cache is closed")
        if self._unused is not None:
            self._unused.note_step()  # here, because a scheduler's steps call it as well
        if self.elastic is None:
            return None
        extent = self.manager.defrag.progress().extent
        return None if extent >= self.elastic.num_blocks else self.elastic.resize(extent)

    def stats(self) -> ManagerStats:
        """Return the manager's counters."""
        return self.manager.stats()

    def health(self) -> Health:
        """Return whether the cache works. Never waits; any thread can call it.

        Example:
            >>> from blockyard import KVCache, KVLayout
            >>> sizes = {"num_layers": 2, "block_size": 16, "num_kv_heads": 2, "head_size": 64}
            >>> layout = KVLayout("kv_first", dtype="float32", **sizes)
            >>> with KVCache(layout, device_blocks=8) as cache:
            ...     cache.health()
            Health(ok=True, reasons=())
            >>> cache.health()
            Health(ok=False, reasons=('the cache is closed',))
        """
        if self._is_closed:
            return Health(ok=False, reasons=("the cache is closed",))
        try:
            self._process.check()
        except ForkedError as error:
            return Health(ok=False, reasons=(str(error),))
        failing = self.executor.is_failing
        reasons = ["steps fail: their transfers cannot be started"] if failing else []
        prefix_store = None if self.prefix_store is None else self.prefix_store.store
        for name, store in (("swap store", self.swap_store), ("prefix store", prefix_store)):
            if store is not None and (trouble := _trouble(store)):
                reasons.append(f"{name}: {trouble}")
        return Health(not failing, tuple(reasons))

    def close(self) -> None:
        """Wait for transfers, write the blocks left to the prefix store, close stores and engine, and free all memory.

        Idempotent, also after an exception. A cache with a prefix store that is collected without it gives a
        `ResourceWarning`.
        """
        if self._unused is not None and self._process.is_current and not self._is_closed:
            self._unused.look()
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            for close in self._closers:
                stack.callback(close)

    def __del__(self) -> None:
        # A swap store that is left open deletes its slots, or warns itself.
        if self.prefix_store is not None and not self._is_closed and self._process.is_current:
            what = f"unclosed {self!r}: {self.prefix_store.waiting_blocks} blocks are not written, call its close()"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_elastic(
        self, blocks: int | None, max_blocks: int | None, device: str | torch.device
    ) -> list[Tensor] | None:
        """Reserve memory for `max_blocks` blocks, if it is given; return its tensors."""
        self.elastic: ElasticCache | None = None
        if max_blocks is None or blocks is None or _has_classes(self.layout):
            return None
        extent = self.layout.bytes_per_block if isinstance(self.layout, ArenaLayout) else None
        self.elastic = ElasticCache(
            self.layout, num_blocks=blocks, max_blocks=max_blocks, device=device, extent_bytes=extent
        )
        self._closers.append(self.elastic.close)
        return self.elastic.tensors

    def _open_elastic_arena(
        self, arena: Arena | None, max_bytes: int | None, device: str | torch.device
    ) -> list[Tensor] | None:
        """Reserve memory for an arena that can grow to `max_bytes`, if they are given; return its tensor."""
        if arena is None or max_bytes is None:
            return None
        pool = self.manager.pool()
        per_extent = pool.per_extent or 1
        self.elastic = ElasticCache(
            self.layout,
            num_blocks=pool.num_blocks // per_extent,
            max_blocks=pool.max_blocks // per_extent,
            device=device,
            extent_bytes=(pool.block_stride or 1) * per_extent,
        )
        self._closers.append(self.elastic.close)
        return self.elastic.tensors

    def _open_engine(
        self,
        blocks: int | None,
        host: int,
        tensors: Sequence[Tensor] | None,
        device: str | torch.device,
        *,
        pin_memory: bool | None,
    ) -> None:
        is_counted = isinstance(self.layout, ArenaLayout)  # the manager knows the numbers of blocks
        self.engine = CacheEngine(
            self.layout,
            manager=self.manager if is_counted else None,
            device_blocks=None if is_counted else blocks,
            host_blocks=0 if is_counted else host,
            pin_memory=pin_memory,
            device=device if tensors is None else None,
            tensors=tensors,
        )
        self._closers.append(self.engine.close)
        self._own_tensors()

    def _space(
        self, sizes: tuple[int | None, int | None], host: int, slots: int, tensors: Sequence[Tensor] | None
    ) -> tuple[int | None, Arena | None]:
        """Return the number of device blocks, or the arena of several page classes."""
        device, most = sizes
        if _has_classes(self.layout):
            return None, _arena(self.layout, (device or 0, most), host, slots)
        if device is None and tensors is not None and not isinstance(self.layout, ArenaLayout):
            check_list_of_tensors(tensors)
            return len(self.layout.views(tensors)[0]), None
        return device, None

    def _step_loop(self, executor: Executor | None) -> StepLoop:
        """Return a loop for a scheduler."""
        return StepLoop(self.manager, self._steps, self.executor if executor is None else executor, self.prefix_store)

    def _refuse_others(self, call: str) -> None:
        self._process.check()
        self._loop.check(call)

    def _take_store(self, store: str | ExternalStore, size: int, name: bytes) -> ExternalStore:
        taken = _open(store, size, name, "swap")
        self._closers.append(taken.close)
        return taken

    def _close_opened(self, *given: object) -> None:
        """Close everything except stores that the caller opened."""
        kept = [store.close for store in given if isinstance(store, ExternalStore)]
        self._closers = [close for close in self._closers if close not in kept]
        self.close()

    def _own_tensors(self) -> None:
        """Take the tensors. Their blocks belong to one cache: two would write over each other's."""
        with _opening:
            others = [cache for cache in _caches if not cache._is_closed]  # noqa: SLF001 (of this class)
            if any(other.engine.memory.shares_device(self.engine.memory) for other in others):
                raise InvalidArgumentError("tensors share blocks with another open cache, must be this cache's alone")
            _caches.add(self)

    def _join(
        self, store: str | ExternalStore | None, namespace: bytes, writes: str, timeout_base: float, staging: int
    ) -> PrefixStore | None:
        if store is None:
            return None
        if not namespace:
            raise InvalidArgumentError(
                "namespace is b'', must name the model and the revision of its weights for a prefix store"
            )
        size = bytes_per_value(self.engine)
        opened = _open(store, size, _namespace(namespace, self.layout), "prefix")
        try:
            connected = PrefixStore(
                self.manager,
                self.engine,
                opened,
                writes=writes,
                prefetch_timeout_base=timeout_base,
                max_staging=staging,
            )
        except BaseException:
            if opened is not store:
                opened.close()
            raise
        self._closers.append(connected.close)
        return connected


class CacheStep:
    """One step of a `KVCache`: its transfers run while the body of the `with` statement computes.

    If the body raises, the transfers continue and a later `KVCache.poll` ends their ticket. The manager assumes that
    the body has written its tokens, also if `KVCache.step` raises: free those sequences and start them again.

    Attributes:
        decision: the step's transfers.
        lost: sequences known to have lost bytes, uint64 `[n]`: do not compute them. They can only be freed and started
            again. The end of the step adds those that lost bytes since; the `StepEnd` of a ticket names them too.
        ended: tickets, of this step or older ones, that had ended when the step ended.
    """

    def __init__(self, loop: StepLoop, decision: StepDecision) -> None:
        self.decision = decision
        self.lost: NDArray[np.uint64] = loop.known_lost()
        self.ended: list[StepEnd] = []
        self._loop = loop

    def wait_for_layer(self, layer: int) -> None:
        """Make compute that is queued later wait for a layer's loads; on a CPU, wait for them now."""
        self._loop.executor.wait_for_layer(self.decision.ticket, layer)

    def finish(self) -> list[StepEnd]:
        """Complete landed transfers, as the end of the `with` statement does.

        Returns:
            The tickets that have ended. Waits for this step's ticket only if the step waited for loads, or is known to
            have lost some.
        """
        self._loop.finish(self.decision.ticket)
        self.lost = self._loop.known_lost()
        self.ended = self._loop.report()
        return self.ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()


def _namespace(name: bytes, layout: KVLayout | GroupedLayout | ArenaLayout) -> bytes:
    if not isinstance(name, bytes | bytearray):
        raise InvalidArgumentError(f"namespace is {name!r:.100}, must be bytes")
    digest = sha256(bytes.fromhex(layout.fingerprint()) + name).digest()
    return Namespace(digest, {"layout": describe_layout(layout)} | parts_of(name))


def _check_writes(writes: object) -> None:
    if writes not in PREFIX_WRITES:
        raise InvalidArgumentError(f"prefix_writes is {writes!r:.100}, must be one of {PREFIX_WRITES}")


def _prefix_caching(*, given: bool | PrefixCaching, host: int) -> bool | PrefixCaching:
    """Return the prefix cache options for use with a prefix store."""
    if given is False:
        raise InvalidArgumentError("prefix_store is given and prefix_caching is False, must be True")
    return PrefixCaching(host=host > 0) if given is True else given


def _device(
    layout: KVLayout | GroupedLayout | ArenaLayout,
    tensors: Sequence[Tensor] | None,
    given: tuple[int | None, int | str | None],
    growth: tuple[int | None, int | str | None],
    host_blocks: int | None,
) -> tuple[int | None, int | None]:
    """Return the blocks of the device and their maximum, given as such or in bytes; with several classes, bytes."""
    size, (blocks, num_bytes) = 1 if _has_classes(layout) else layout.bytes_per_block, given
    if isinstance(layout, ArenaLayout):
        if _has_classes(layout):
            _refuse_blocks(layout, device_blocks=blocks, host_blocks=host_blocks, max_device_blocks=growth[0])
        num_bytes = _arena_bytes(tensors, blocks, num_bytes)
    count, most = _blocks("device", blocks, num_bytes, size), _blocks("max_device", *growth, size)
    if most is not None and (tensors is not None or count is None):
        raise InvalidArgumentError("max_device_blocks needs device_blocks, and allocates the tensors itself")
    if tensors is None and count is None:
        raise InvalidArgumentError(
            "device_blocks is None, must be an int without tensors, unless device_bytes is given"
        )
    if count is not None and most is not None and not 1 <= count <= most:
        name, value = ("max_device_bytes", growth[1]) if growth[0] is None else ("max_device_blocks", growth[0])
        blocks_or_bytes = "bytes" if _has_classes(layout) else "blocks"
        must = f"at least {count} {blocks_or_bytes}, those of the device" if count else "None for a device of 0 blocks"
        raise InvalidArgumentError(f"{name} is {value!r}, must be {must}")
    return count, most


def _blocks(tier: str, blocks: int | None, num_bytes: int | str | None, size: int) -> int | None:
    """Return the number of blocks of a tier, given as such or in bytes."""
    if blocks is not None and num_bytes is not None:
        raise InvalidArgumentError(f"{tier}_blocks is {blocks} and {tier}_bytes {num_bytes}, give one of them")
    if num_bytes is None:
        count = None if blocks is None else as_int(f"{tier}_blocks", blocks)
        if count is not None and count < 0:
            raise InvalidArgumentError(f"{tier}_blocks is {count}, must be at least 0")
        return count
    found = read_bytes(f"{tier}_bytes", num_bytes, holds=size) // size
    if size > 1 and found > MAX_BLOCKS:
        raise InvalidArgumentError(
            f"{tier}_bytes is {num_bytes!r}, {found} blocks of {size} bytes, must be at most {MAX_BLOCKS} blocks"
        )
    return found


def _has_classes(layout: KVLayout | GroupedLayout | ArenaLayout) -> TypeGuard[ArenaLayout]:
    """Whether there are several page classes."""
    return isinstance(layout, ArenaLayout) and len(layout.pages) > 1


def _arena(layout: ArenaLayout, sizes: tuple[int, int | None], host: int, slots: int) -> Arena:
    """Return the arena of several page classes, whose external extents are whole numbers of a store's slots."""
    device, most = sizes
    arena = Arena(device_bytes=device, host_bytes=host, max_device_bytes=most)
    if not slots:
        return arena
    sized = BlockManager(block_size=layout.block_size, groups=layout.cache_groups, arena=arena)
    pools = [sized.pool(page_class=number) for number in range(sized.num_page_classes)]
    per_extent = [pool.per_extent or 1 for pool in pools]
    extent, wanted = (pools[0].block_stride or 1) * per_extent[0], slots_per_extent(layout, per_extent)
    if slots < 2 * wanted:
        raise InvalidArgumentError(
            f"swap_store has {slots} slots of {layout.bytes_per_value} bytes, must have at least {2 * wanted}: extents "
            f"have {wanted}, and the first one stays empty"
        )
    external = slots // wanted * extent
    return Arena(
        device_bytes=device, host_bytes=host, external_bytes=external, extent_bytes=extent, max_device_bytes=most
    )


def _refuse_blocks(layout: ArenaLayout, **given: object) -> None:
    """Refuse numbers of blocks that differ in size."""
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(
                f"{name} is {value!r:.100}, must be None for blocks of {list(layout.block_bytes)} bytes: give sizes in "
                "bytes, or a layout with equal_blocks=True"
            )


def _arena_bytes(tensors: Sequence[Tensor] | None, blocks: int | None, num_bytes: int | str | None) -> int | str | None:
    """Return the size of the device's arena: as given, or that of the tensor."""
    if tensors is None or blocks is not None or num_bytes is not None:
        return num_bytes
    return sum(tensor.numel() for tensor in tensors)


def _sized(
    name: str, store: str | ExternalStore | None, num_bytes: int | str | None, size: int
) -> str | ExternalStore | None:
    """Add a store's separately given size to its URL."""
    if num_bytes is None:
        return store
    if not isinstance(store, str):
        raise InvalidArgumentError(f"{name}_bytes is {num_bytes}, but {name} is not a URL")
    read_bytes(f"{name}_bytes", num_bytes, holds=size)
    return sized_url(store, f"{name}_bytes", num_bytes)


def _unused(
    manager: BlockManager,
    prefix_store: PrefixStore | None,
    options: bool | PrefixCaching,  # noqa: FBT001 (as given)
) -> Unused | None:
    if options is False:
        return None
    return Unused(manager, prefix_store, keeps_host_copies=isinstance(options, PrefixCaching) and options.host)


def _open(store: str | ExternalStore, size: int, namespace: bytes, use: Use) -> ExternalStore:
    """Open a store by its URL, or check one that is open."""
    if isinstance(store, str):
        return open_store(store, bytes_per_block=size, namespace=namespace, use=use)
    check_store(f"{use}_store", store, size, use)
    return store


def _trouble(store: ExternalStore) -> str:
    """Return one line that says why a store's blocks are misses; empty if it works."""
    try:
        stats = store.stats()
    except Exception as error:  # noqa: BLE001 (a plug-in may raise anything)
        return f"stats() raised {type(error).__name__}: {error}"
    if stats.is_down:
        return "it does not answer, its blocks are misses"
    return f"{stats.errors_in_a_row} errors in a row, the last: {stats.last_error}" if stats.errors_in_a_row else ""


def _external_blocks(store: ExternalStore | None, blocks: int | None) -> int:
    slots = 0 if store is None else store.num_slots
    if blocks is None:
        return slots
    if (count := as_int("external_blocks", blocks)) < 0:
        raise InvalidArgumentError(f"external_blocks is {blocks}, must be at least 0")
    return min(slots, count)


def _with_store(store: str | ExternalStore | None, *, given: bool | PrefixCaching, host: int) -> bool | PrefixCaching:
    return given if store is None else _prefix_caching(given=given, host=host)


def _groups(
    layout: KVLayout | GroupedLayout | ArenaLayout, groups: Sequence[CacheGroup] | None
) -> Sequence[CacheGroup] | None:
    """Check the layout; return the groups as given, or the layout's."""
    if isinstance(layout, ArenaLayout):
        if groups is not None:
            raise InvalidArgumentError("groups is given, must be None with an ArenaLayout, which has its own")
        return layout.cache_groups
    check_layout(layout, others=", GroupedLayout or ArenaLayout")
    return groups if groups is not None else getattr(layout, "cache_groups", ()) or None


def _block_size(layout: KVLayout | GroupedLayout | ArenaLayout, groups: Sequence[CacheGroup] | None) -> int:
    """Return the block size of all groups with slots; a recurrent group has a state instead, of any size."""
    if not isinstance(layout, GroupedLayout):
        return layout.block_size
    parts = layout.groups
    if groups is not None and len(groups) == len(parts):
        parts = tuple(part for part, group in zip(parts, groups, strict=True) if group.kind != "recurrent") or parts
    sizes = {name: part.block_size for name, part in parts}
    if len(set(sizes.values())) > 1:
        raise LayoutError(f"block_size of the layout's groups is {sizes}, must be the same")
    return parts[0][1].block_size
