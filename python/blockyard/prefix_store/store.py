"""`PrefixStore`: the facade of a prefix store: loads, writes, quotas, and recovery from exceptions."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, HashedPrompt
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.layout.sizes import as_float
from blockyard.prefix_store.loads import Loads, Prefetch
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.prefix_store.values import Values
from blockyard.prefix_store.writes import Writes
from blockyard.stores.base import ExternalStore
from blockyard.stores.checked_store import CheckedStore, bytes_per_value
from blockyard.stores.log_lines import MissLog
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.url import read_bytes
from blockyard.types import Histogram
from blockyard.workers.ownership import Claims, Process

if TYPE_CHECKING:
    from blockyard.engine.engine import CacheEngine

__all__ = ["PrefixStore"]

_log = logging.getLogger("blockyard.prefix_store")
_managers = Claims()

CLOSING_PART: Final = 0.7  # fraction of the time of `close` in which blocks are still written
_PAUSE: Final = 0.001  # seconds between polls


class PrefixStore:
    """Loads blocks from a prefix store before their prompts are admitted, and writes blocks to it.

    Only `wait`, `close`, `forget`, `set_quota` and `quota` block. Make all calls from the engine's thread. The manager
    must not have cached anything yet.

    If an exception, such as `KeyboardInterrupt`, ends a call, the next one first calls `give_up_all`.

    Args:
        manager: the manager of the blocks, with prefix caching; with `PrefixCaching(host=True)` unless it has one cache
            group, of full attention.
        engine: owner of the device and host blocks.
        store: a store opened with `use="prefix"`. Only this object may use it; `close` closes it.
        writes: which blocks are written to the store, each prompt from its beginning. `"through"`: each block once it
            is computed; `"back"`: the same, but only once blocks that are not written yet outnumber the free ones, and
            in `close`; `"second_use"`: blocks computed or hit a second time; `"never"`.
        prefetch_timeout_base: minimum timeout in seconds for loading a prompt, plus one for every 200 MB to load.
        max_staging: maximum bytes in flight from the store, and the same to it; an int or text. At most half of what
            the store can have in flight, see `ExternalStore.max_blocks_in_flight`.

    Raises:
        InvalidArgumentError: an argument is out of range; the store has another block size, is closed, has no keys or
            is in use elsewhere; or the manager has cached blocks, a prefix store, no prefix caching, or no host copies
            that it needs.
        BlockyardError: the engine is closed.

    Attributes:
        store: as given.
        has_prefetched: whether `prefetch` was ever called. If not, nothing is read from the store.

    Example:
        >>> import tempfile
        >>> from blockyard import KVCache, KVLayout
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
        >>> options = {"device_blocks": 8, "prefix_caching": True, "namespace": b"model"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for _ in range(2):
        ...         with KVCache(layout, prefix_store=f"file://{folder}?size=1MiB", **options) as cache:
        ...             fetch = cache.prefix_store.prefetch([1, 2, 3, 4, 5])
        ...             while not fetch.done:
        ...                 pass  # steps go on
        ...             print(fetch.tokens)
        ...             sequence = cache.manager.allocate(fetch.prompt)
        ...             with cache.step():
        ...                 cache.manager.mark_computed([sequence])  # the model computes the rest
        0
        4
    """

    def __init__(
        self,
        manager: BlockManager,
        engine: CacheEngine,
        store: ExternalStore,
        *,
        writes: str = "through",
        prefetch_timeout_base: float = 0.25,
        max_staging: int | str = 256 << 20,
    ) -> None:
        if not isinstance(manager, BlockManager):
            raise InvalidArgumentError(f"manager is {manager!r:.100}, must be a BlockManager")
        if not 0 < as_float("prefetch_timeout_base", prefetch_timeout_base) <= 3600:
            raise InvalidArgumentError(
                f"prefetch_timeout_base is {prefetch_timeout_base}, must be above 0 and at most 3600 seconds"
            )
        if not callable(getattr(engine, "num_blocks", None)):
            raise InvalidArgumentError(f"engine is {engine!r:.100}, must be a CacheEngine")
        engine.num_blocks("device")  # raises if it is closed
        if _managers.user(manager) is not None:
            raise InvalidArgumentError(f"manager is {manager!r:.100}, which has a prefix store, must have none yet")
        size = bytes_per_value(engine)
        max_bytes = read_bytes("max_staging", max_staging, holds=size)
        checked = CheckedStore(store, size, "prefix")
        try:
            values = Values(engine, checked, max_bytes)
            manager.prefix.store_jobs.start(writes)
        except BaseException:
            checked.disconnect()
            raise
        self.store = store
        self._stats = PrefixStoreStats()
        self._runtime = runtime()
        self._process = Process("a prefix store")
        self._manager, self._engine, self._checked, self._size = manager, engine, checked, size
        self._timeout_base = prefetch_timeout_base
        log = MissLog(store, self._runtime.monotonic)
        self._loads = Loads(manager, engine, checked, values, self._stats, log)
        self._writes = Writes(manager, engine, checked, values, self._stats, log)
        if writes == "never":
            self._writes.close()
        self.has_prefetched = False
        self._is_refusing = False  # whether the last `forget` cleared nothing
        self._is_changing = False  # if set when a call begins, an exception ended the last one
        _managers.take(manager, self)

    def __repr__(self) -> str:
        return f"PrefixStore({self.store!r}, {self.num_open} prefetches, {len(self._writes)} writes in flight)"

    @property
    def num_open(self) -> int:
        """Number of unfinished prefetches."""
        return len(self._loads.open)

    @property
    def waiting_blocks(self) -> int:
        """Number of blocks not yet written to the store."""
        return self._manager.prefix.store_jobs.num_waiting + self._writes.num_blocks

    @property
    def store_seconds(self) -> dict[str, Histogram]:
        """How long the store's reads and writes took, see `CheckedStore.seconds`."""
        return self._checked.seconds

    def prefetch(
        self, prompt: HashedPrompt | NDArray[np.uint32] | list[int], *, salt: bytes | None = None, lora_id: int = 0
    ) -> Prefetch:
        """Start loading the blocks of a prompt that no tier has; never waits.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or the result of `manager.prefix.hash`.
            salt: the tenant's salt, bytes.
            lora_id: the prompt's adapter; 0 for none.

        Returns:
            The `Prefetch`. Admit the prompt when it is `done`; admitting it earlier only loses hits.

        Raises:
            InvalidArgumentError: a token id is out of range.
        """
        self.has_prefetched = True
        prefix = self._manager.prefix
        hashed = prompt if isinstance(prompt, HashedPrompt) else prefix.hash(prompt, salt=salt, lora_id=lora_id)
        self._process.check()
        if self._is_changing:
            self.give_up_all()
        self._is_changing = True
        load = self._loads.begin(hashed, self._timeout_base)
        self._is_changing = False
        return Prefetch(load, self.poll)

    def poll(self) -> None:
        """Make progress in both directions without waiting."""
        self._process.check()
        if self._is_changing:
            self.give_up_all()
        self._is_changing = True
        if self._loads.open or not self._writes.have_ended:
            self._engine.poll()
        self._checked.poll()
        self._loads.advance()
        self._writes.advance()
        self._is_changing = False

    def wait(self, timeout: float | None = None, *, until: Callable[[], bool] | None = None) -> bool:
        """Wait until all blocks that are due for writing are in the store or were refused, or the store fails.

        Args:
            timeout: seconds to wait; None waits forever.
            until: if given, wait until this returns true instead.

        Returns:
            False on timeout.
        """
        end = None if timeout is None else self._runtime.monotonic() + timeout
        met = until or (lambda: self._writes.have_ended)
        if until is None:
            self._writes.resume()
        while True:
            self.poll()
            if met():
                return True
            if end is not None and self._runtime.monotonic() >= end:
                return False
            self._writes.wait_for_engine()
            if not self._checked.is_busy and self._loads.are_copying:
                self._loads.wait_for_engine()
            else:
                self._wait_for_news()

    def _wait_for_copies(self) -> bool:
        """Wait until the engine has read the blocks of all started writes, which hold them. False if there are none."""
        if not self._writes.are_reading:
            return False
        self._writes.wait_for_engine()
        self.poll()
        return True

    def stats(self) -> PrefixStoreStats:
        """Return the counters since the store was connected. Any thread can call it."""
        # One C call copies the misses: the engine's thread may add a reason meanwhile.
        stats = replace(self._stats, misses=self._stats.misses.copy())
        return replace(stats, load_seconds=deepcopy(stats.load_seconds))

    def forget(self, revision: str | None = None) -> bool:
        """Clear the caches of the manager and the store, for example because the weights change.

        Waits for the store.

        Args:
            revision: identifies the new weights, see `ExternalStore.forget`.

        Returns:
            False, without clearing anything, while a block is in use or in flight. The first of several such calls logs
            why to `blockyard.prefix_store`.

        Raises:
            StoreError: the store could not forget its keys.
        """
        self._process.check()
        if self._is_changing:
            self.give_up_all()
        if self._loads.open or self._writes or not self._manager.prefix.reset():
            self._log_refusal()
            return False
        self._is_refusing = False
        self.store.forget(revision)
        self._stats.forgets += 1
        return True

    def _log_refusal(self) -> None:
        """Log why `forget` cleared nothing, once until it does."""
        if self._is_refusing:
            return
        self._is_refusing = True
        stats = self._manager.stats()
        counts = {
            "prompts are being loaded": len(self._loads.open),
            "batches are being written": len(self._writes),
            "sequences are open": stats.sequences,
            "steps are in flight": len(stats.open_tickets),
            "blocks are pinned": sum(stats.pinned_blocks.values()),
        }
        why = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "blocks are leased"
        _log.warning("nothing was forgotten, call forget again: %s", why, extra={"cause": why})

    def set_quota(self, salt: bytes | None, num_bytes: int | str | None) -> None:
        """Limit one tenant's blocks in the store, as `manager.prefix.set_quota` does on the device.

        Waits for the store, which counts the blocks of all processes: see `ExternalStore.set_quota`. The quota outlives
        this process. Blocks refused beyond it count as unwritten, see `stats`.

        Args:
            salt: the tenant; None for prompts without a salt.
            num_bytes: maximum bytes of its blocks, an int or text such as `"40GiB"`; 0 for none, None for no limit.

        Raises:
            InvalidArgumentError: the number is negative, or positive but less than a block.
            StoreError: the store does not support quotas, or did not confirm this one.
        """
        num_blocks = None if num_bytes is None else 0
        if num_bytes:
            num_blocks = read_bytes("num_bytes", num_bytes, holds=self._size) // self._size
        self.store.set_quota(_tenant(salt), num_blocks)

    def quota(self, salt: bytes | None) -> tuple[int, int] | None:
        """Return the bytes that count towards a tenant's quota, and the quota in whole blocks. Waits for the store.

        Args:
            salt: the tenant; None for prompts without a salt.

        Returns:
            `(bytes, quota)`; None for a tenant without a quota.

        Raises:
            StoreError: the store does not support quotas, or does not respond.
        """
        found = self.store.quota(_tenant(salt))
        return None if found is None else (found[0] * self._size, found[1] * self._size)

    def close(self, timeout: float = 5.0) -> bool:
        """Write the remaining blocks and close the store, within `timeout` seconds. Returns False if the store hung.

        Logs the number of blocks that were not written to `blockyard.prefix_store`.
        """
        if not self._process.is_current:
            return self.store.close(timeout)
        until = self._runtime.monotonic() + timeout
        self._manager.prefix.store_jobs.flush()
        # Late in the interpreter's shutdown, torch aborts the process if it has to allocate.
        if not sys.is_finalizing():
            self.wait(timeout * CLOSING_PART)
        if self.waiting_blocks:
            blocks, fields = self.waiting_blocks, {"store": str(self.store), "blocks": self.waiting_blocks}
            _log.warning("%d blocks were not written to %r before it was closed", blocks, self.store, extra=fields)
        self._end_all("closed")
        self._loads.close()
        self._writes.close()
        return self.store.close(max(0.0, until - self._runtime.monotonic()))

    def give_up_all(self) -> None:
        """After an exception has ended a call: wait for the copies under way, and end all loads and writes.

        Their prompts go on without the store. May be called again.
        """
        self._process.check()
        self._is_changing = True
        self._checked.give_up_all(waits=False)
        self._end_all("interrupted")
        self._is_changing = False

    def _end_all(self, why: str) -> None:
        """End all loads, and all writes that the store has not received."""
        if self._engine.transfers.open():
            self._engine.transfers.synchronize()  # afterwards nothing reads or writes their blocks
        self._manager.prefix.store_jobs.give_up_all()
        self._loads.give_up_all(why)
        self._writes.give_up_all(why)

    def _wait_for_news(self) -> None:
        """Wait briefly until the store may have answers; briefly, because the engine has answers too."""
        if self._checked.is_busy:
            with suppress(StoreError):  # a plug-in may have no descriptor
                self._runtime.wait_readable(self.store.event_fd(), _PAUSE)
                return
        self._runtime.sleep(_PAUSE)


def _tenant(salt: bytes | None) -> bytes:
    """Return a tenant's name in stores, as in `StoreJob.tenants`."""
    return bytes(32) if salt is None else hashlib.sha256(salt).digest()
