"""`PrefixStore`: cached blocks go to an external store, and prompts get them back from it, in this process or another.

A prompt that may have its beginning in the store is *prefetched* before it is admitted:

    fetch = prefixes.prefetch(prompt)       # starts; never waits
    ...                                     # steps go on
    if fetch.done:                          # loaded, or given up: `lookup` and `allocate` tell the truth
        sequence = manager.allocate(prompt)

The bytes are read into staging rows and checked there. Only then do they get host blocks (device blocks where the host
keeps no copies) and can be found. A prefix ends at the first block that does not come before its prefetch's deadline.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from blockyard._core import BlockManager, HashedPrompt, StoreJob
from blockyard.engine.engine import CacheEngine
from blockyard.engine.transfers import Transfer
from blockyard.errors import BlockyardError, InvalidArgumentError, UnknownTicketError
from blockyard.executor.staging import Buffers
from blockyard.executor.store_side import StoreSide
from blockyard.executor.store_stats import LOAD_SECONDS, PrefixStoreStats
from blockyard.executor.store_worker import StoreTask, StoreWorker, StoreWrite
from blockyard.stores.base import ExternalStore, Owners
from blockyard.stores.url import read_bytes
from blockyard.stores.value import is_damage
from blockyard.workers import keep

if TYPE_CHECKING:
    from blockyard.executor.store_side import Answer

__all__ = ["LOAD_SECONDS", "Prefetch", "PrefixStore", "PrefixStoreStats"]

WRITTEN_AT_ONCE: Final = 16 << 20  # bytes of one batch of writes
ABSENT_SECONDS: Final = 0.5  # how long a key that was not there is not asked for again
FAILED_SECONDS: Final = 2.0  # how long a key whose block did not come is not
CLOSING_PART: Final = 0.7  # of the time of `close` in which blocks are still written
PAUSES: Final = (0.5, 8.0)  # least and most seconds without reads after one that passed its deadline
MOST_FAILED: Final = 1 << 16  # keys that are known to be of no use


class Prefetch:
    """A prompt whose beginning is looked for in the store.

    Attributes:
        prompt: with its keys; `allocate` takes it in place of the token ids.
        tokens: tokens that were loaded for it.
    """

    def __init__(self, store: PrefixStore, prompt: HashedPrompt, keys: NDArray[np.uint8]) -> None:
        self._store = store
        self._task: StoreTask | None = None
        self._transfer: Transfer | None = None
        self._until = 0.0
        self.prompt = prompt
        self.tokens = 0
        self._began = time.monotonic()
        self._keys = keys
        self._landed = np.zeros(0, np.bool_)
        self._brought: set[bytes] = set()  # keys of blocks that were loaded
        self._job: StoreJob | None = None
        self._is_behind = False  # another prefetch reads the same blocks
        self._state = "waiting"

    @property
    def done(self) -> bool:
        """Whether the prompt can be admitted: what the store had is loaded, or its time is over. Never waits."""
        if self._state != "done":
            self._store.poll()
        return self._state == "done"

    def __repr__(self) -> str:
        return f"Prefetch({len(self.prompt)} tokens, {self.tokens} loaded, {self._state})"


class PrefixStore:
    """Loads blocks from a prefix store before their prompts are admitted, and writes blocks to it.

    Only `wait`, `close`, `forget`, `set_quota` and `quota` wait. All calls come from one thread at a time, that of the
    engine. The manager must not have cached anything yet.

    Args:
        manager: of the blocks, with prefix caching, one cache group and no window.
        engine: owner of the device and host blocks.
        store: opened with `use="prefix"`. Only this object may use it.
        writes: which blocks go to the store. `"through"`: each once it is computed; `"back"`: those about to be
            evicted that no other tier has; `"second_use"`: those that are computed or hit a second time; `"never"`.
        deadline: least seconds after which a prompt goes on without the store; a second more for every 200 MB.
        max_staging: bytes of blocks on their way from the store, and as many on their way to it; an int or text.

    Raises:
        InvalidArgumentError: an argument is out of range, the store's blocks have another size, or the manager has
            several cache groups, a window, cached blocks or no prefix caching.

    Attributes:
        store: as given.

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
        deadline: float = 0.25,
        max_staging: int | str = 256 << 20,
    ) -> None:
        if not 0 < deadline <= 3600:
            raise InvalidArgumentError(f"deadline is {deadline}, must be above 0 and at most 3600 seconds")
        size = engine.layout.bytes_per_block
        max_staging = read_bytes("max_staging", max_staging, holds=size)
        side = StoreSide(store, size)
        manager.prefix.store_jobs.start(writes)
        self.store = store
        self._stats = PrefixStoreStats()
        self._manager, self._engine, self._size = manager, engine, size
        self._deadline = deadline
        self._max_blocks = max_staging // size
        self._write_blocks = max(1, min(self._max_blocks, WRITTEN_AT_ONCE // size))
        self._writes = writes
        self._news = threading.Lock()  # free once tasks have ended; no interrupt leaves it in the way, as an Event's
        self._buffers, self._buffers_lock = Buffers(engine.memory.staging, max_staging), threading.Lock()
        self._worker = StoreWorker(side, self._notify)
        self._open: list[Prefetch] = []
        self._abandoned: list[StoreTask] = []  # reads past their deadline: their rows are the store's until they end
        self._writing: list[StoreWrite] = []
        self._load_jobs: list[StoreJob] = []  # the manager's jobs that have not ended
        self._write_jobs: list[StoreJob] = []
        self._failed: dict[bytes, float] = {}
        self._retry_at, self._pause = 0.0, PAUSES[0]
        self._torn = False  # a call changes the fields above; if it is set when one begins, the last was interrupted

    def __repr__(self) -> str:
        return f"PrefixStore({self.store!r}, {len(self._open)} prefetches, {len(self._writing)} writes under way)"

    @property
    def num_open(self) -> int:
        """Prefetches that are not done."""
        return len(self._open)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that are to be written and are not in the store yet."""
        return self._manager.prefix.store_jobs.num_waiting + sum(len(write.job) for write in self._writing)

    def prefetch(
        self, prompt: HashedPrompt | NDArray[np.uint32] | list[int], *, salt: bytes | None = None, lora_id: int = 0
    ) -> Prefetch:
        """Start to load what the store has of a prompt and no tier has; never waits.

        Args:
            prompt: token ids, uint32 `[tokens]` or a list of ints; or what `manager.prefix.hash` has made of them.
            salt: of its tenant, bytes.
            lora_id: its adapter; 0 for none.

        Returns:
            The `Prefetch`. Admit the prompt when it is `done`; earlier only costs hits.

        Raises:
            InvalidArgumentError: a token id is out of range.
        """
        prefix = self._manager.prefix
        hashed = prompt if isinstance(prompt, HashedPrompt) else prefix.hash(prompt, salt=salt, lora_id=lora_id)
        self._mend()
        fetch = Prefetch(self, hashed, self._missing(hashed))
        if not len(fetch._keys):
            fetch._state = "done"
            return fetch
        self._torn = True
        self._stats.prefetches += 1
        fetch._until = fetch._began + self._deadline + len(fetch._keys) * self._size / 200e6
        self._open.append(fetch)
        self._advance(fetch)
        self._torn = False
        return fetch

    def poll(self) -> None:
        """Go on with what can go on, in both directions; never waits."""
        self._mend()
        self._torn = True
        self._news.acquire(blocking=False)
        if self._open or self._writing:
            self._engine.poll()
        for task in self._abandoned:
            self._give_back(task)
        self._abandoned = [task for task in self._abandoned if not task.ended]
        for fetch in tuple(self._open):
            self._advance(fetch)
        self._write()
        self._torn = False

    def wait(self, timeout: float | None = None, *, until: Callable[[], bool] | None = None) -> bool:
        """Wait until all blocks that are to be written are in the store, or have been refused.

        Args:
            timeout: seconds; for ever if None.
            until: waits for this to be true instead.

        Returns:
            Whether that happened in time.
        """
        end = None if timeout is None else time.monotonic() + timeout
        met = until or (lambda: not self._writing)
        while True:
            self.poll()
            if met():
                return True
            if end is not None and time.monotonic() >= end:
                return False
            for write in self._writing:
                if write.task is None:
                    self._engine.transfers.wait(write.transfer)
            self._news.acquire(timeout=0.001)

    def stats(self) -> PrefixStoreStats:
        """Return the counters since the store was connected."""
        return deepcopy(self._stats)

    def forget(self, revision: str | None = None) -> bool:
        """Forget all that is cached, in the manager and in the store, for instance because the weights change.

        Waits for the store.

        Args:
            revision: names the new weights, see `ExternalStore.forget`.

        Returns:
            False, and nothing is forgotten, while a block is in use or on its way.

        Raises:
            StoreError: the store could not forget its keys.
        """
        self._mend()
        if self._open or self._writing or not self._manager.prefix.reset():
            return False
        self.store.forget(revision)
        self._failed.clear()
        return True

    def set_quota(self, salt: bytes | None, num_bytes: int | str | None) -> None:
        """Limit what one tenant keeps in the store, as `manager.prefix.set_quota` limits what it keeps on the device.

        Waits for the store, which counts what all processes put there: see `ExternalStore.set_quota`. The quota
        outlives this process. Blocks that are refused beyond it are unwritten, see `stats`.

        Args:
            salt: the tenant; None for prompts without a salt.
            num_bytes: most bytes of its blocks, an int or text such as `"40GiB"`; 0 for none, None for no limit.

        Raises:
            InvalidArgumentError: the number is negative, or above 0 but less than a block.
            StoreError: the store keeps no quotas, or did not confirm this one.
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
            StoreError: the store keeps no quotas, or does not answer.
        """
        found = self.store.quota(_tenant(salt))
        return None if found is None else (found[0] * self._size, found[1] * self._size)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is left, and let go of the store; waits at most `timeout` seconds for it. False if it hung."""
        until = time.monotonic() + timeout
        self.wait(timeout * CLOSING_PART)
        self._give_up_all("closed")
        self._writes = "never"
        in_time = self._worker.close(max(0.0, until - time.monotonic()))
        return self.store.close(max(0.0, until - time.monotonic())) if in_time else False

    # ---- after an exception ----

    def _mend(self) -> None:
        """After an interrupt, give up what is under way: how far it came is not known."""
        if self._torn:
            self._give_up_all("interrupted")
            self._torn = False

    def _give_up_all(self, why: str) -> None:
        """Let prompts go on without the store, and forget writes that the store has not got; can be called again."""
        if self._load_jobs or self._write_jobs:
            self._engine.transfers.synchronize()  # nothing reads or writes their blocks from now on
        jobs = self._manager.prefix.store_jobs
        while self._load_jobs:
            with suppress(UnknownTicketError):  # it has ended
                jobs.end_load(self._load_jobs[-1].job, [False] * len(self._load_jobs[-1]))
            del self._load_jobs[-1]
        while self._write_jobs:
            with suppress(UnknownTicketError):
                jobs.end_write(self._write_jobs[-1].job)
            del self._write_jobs[-1]
        while self._open:
            fetch = self._open[-1]
            if fetch._task is not None:
                self._abandoned.append(fetch._task)
            fetch._job = fetch._transfer = fetch._task = None
            fetch._state = "done"
            del self._open[-1]
            self._stats.misses[why] += 1
        self._stats.unwritten_blocks += sum(len(write.job) for write in self._writing if write.task is None)
        self._writing = [write for write in self._writing if write.task is not None]
        tasks = [write.task for write in self._writing if write.task is not None]
        for task in (*tasks, *self._abandoned):
            self._worker.submit(task)  # it takes none twice

    def _notify(self) -> None:
        with suppress(RuntimeError):  # it is free
            self._news.release()

    # ---- from the store ----

    def _missing(self, hashed: HashedPrompt) -> NDArray[np.uint8]:
        """Keys that no tier has, up to the first that is known to be of no use."""
        keys = self._manager.prefix.store_jobs.missing(hashed, self._max_blocks)
        if self._failed and len(keys):
            now = time.monotonic()
            for index, key in enumerate(keys):
                until = self._failed.get(key.tobytes())
                if until is not None and until > now:
                    self._stats.misses["failed_before"] += not index
                    return keys[:index]
        return keys

    def _advance(self, fetch: Prefetch) -> None:
        """Take a prefetch as far as it goes."""
        while fetch._state != "done":
            before = fetch._state
            if before == "waiting":
                self._begin_read(fetch)
            elif before == "reading":
                self._take_rows(fetch)
            elif before == "copying":
                self._take_copies(fetch)
            if fetch._state == before:
                # Copies end by themselves: nothing gives their blocks back before.
                if before != "copying" and time.monotonic() >= fetch._until:
                    self._give_up(fetch)
                return

    def _begin_read(self, fetch: Prefetch) -> None:
        if time.monotonic() < self._retry_at:
            self._finish(fetch, "unavailable")
            return
        first = fetch._keys[0].tobytes()
        others = (other for other in self._open if other._state != "waiting")
        if any(other._keys[0].tobytes() == first for other in others):
            fetch._is_behind = True
            return
        if fetch._is_behind:  # another one has brought these blocks, or found out that the store has them not
            fetch._keys, fetch._is_behind = self._missing(fetch.prompt), False
            if not len(fetch._keys):
                self._finish(fetch)
                return
        room = self._max_blocks - sum(len(task.keys) for task in self._reads())
        if room < min(len(fetch._keys), self._max_blocks // 4 or 1):
            return
        keys = fetch._keys[:room]
        fetch._task = StoreTask(keys, take=self._take)
        fetch._state = "reading"
        self._worker.submit(fetch._task)

    def _reads(self) -> list[StoreTask]:
        return [fetch._task for fetch in self._open if fetch._task is not None] + self._abandoned

    def _take_rows(self, fetch: Prefetch) -> None:
        """Give the blocks that came a place, up to the first that did not."""
        task = fetch._task
        if task is None or not task.ended or task.answer is None:
            return
        self._pause = PAUSES[0]
        ok = task.answer.ok
        count = len(ok) if ok.all() else int(ok.argmin())
        if count < len(ok):
            self._note_failed(task, count, task.answer)
        if not count:
            self._finish(fetch)
            return
        job = keep(self._load_jobs, self._manager.prefix.store_jobs.begin_load, fetch.prompt, count)
        if not len(job):
            self._load_jobs.remove(job)
            self._finish(fetch, "no_room" if len(self._missing(fetch.prompt)) else "")
            return
        fetch._job, fetch._state = job, "copying"
        # The job has later blocks of the prompt if another prefetch has brought those that came.
        blocks, rows, fetch._landed = _rows_of(job, task.keys[:count], task.answer.rows[:count])
        try:
            fetch._transfer = self._engine.submit_write(
                job.tier, blocks, rows, after_compute=self._engine.fence(), on_full="refuse"
            )
        except BlockyardError:
            self._end_load(fetch, has_landed=False)

    def _take(self, count: int) -> Tensor:
        with self._buffers_lock:
            return self._buffers.take(count)

    def _give_back(self, task: StoreTask | None) -> None:
        """Let the rows of a read be used again, once neither store nor engine has them."""
        if task is not None and task.ended and task.taken is not None:
            rows, task.taken = task.taken, None  # first: nobody gives them back twice
            with self._buffers_lock:
                if task.answer is not None and task.answer.are_rows_free:
                    self._buffers.give_back(rows)
            task.answer = None

    def _note_failed(self, task: StoreTask, index: int, answer: Answer) -> None:
        reason = answer.reasons[index] if index < len(answer.reasons) else "error"
        self._stats.misses[reason or "error"] += 1
        seconds = ABSENT_SECONDS if reason == "absent" or is_damage(reason) else FAILED_SECONDS  # damage is deleted
        self._fail(task.keys[index].tobytes(), seconds)

    def _fail(self, key: bytes, seconds: float) -> None:
        self._failed.pop(key, None)
        self._failed[key] = time.monotonic() + seconds
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _take_copies(self, fetch: Prefetch) -> None:
        transfer = fetch._transfer
        if transfer is not None and transfer.done:
            self._end_load(fetch, has_landed=transfer.error is None)

    def _end_load(self, fetch: Prefetch, *, has_landed: bool) -> None:
        job = fetch._job
        assert job is not None  # noqa: S101 (for the type checker)
        found = self._manager.prefix.store_jobs.end_load(job.job, fetch._landed & has_landed)
        self._load_jobs.remove(job)
        self._give_back(fetch._task)
        fetch._job = fetch._transfer = fetch._task = None
        if not has_landed:
            self._finish(fetch, "copy_failed")
            return
        self._stats.hit_blocks += found
        self._stats.hit_bytes += found * self._size
        fetch.tokens += found * self._manager.block_size
        fetch._brought.update(key.tobytes() for key in job.keys[fetch._landed])
        fetch._keys = self._missing(fetch.prompt)
        fetch._state = "waiting"
        if not len(fetch._keys):
            self._finish(fetch)
        elif fetch._keys[0].tobytes() in fetch._brought:  # it has been evicted since, for this prompt or another
            self._finish(fetch, "no_room")

    def _give_up(self, fetch: Prefetch) -> None:
        """The deadline has passed: go on without the store, and leave it alone for a while."""
        task = fetch._task
        if task is not None:
            self._abandoned.append(task)
            self._fail(task.keys[0].tobytes(), FAILED_SECONDS)
            self._retry_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
        self._finish(fetch, "timeout")

    def _finish(self, fetch: Prefetch, miss: str = "") -> None:
        if miss:
            self._stats.misses[miss] += 1
        if fetch._job is not None:
            # The engine may still write there: its transfers end without any storage.
            if fetch._transfer is not None:
                self._engine.transfers.wait(fetch._transfer)
            self._manager.prefix.store_jobs.end_load(fetch._job.job, [False] * len(fetch._job))
            self._load_jobs.remove(fetch._job)
        self._give_back(fetch._task)
        fetch._job = fetch._transfer = fetch._task = None
        fetch._state = "done"
        self._open.remove(fetch)
        self._stats.load_seconds[bisect_left(LOAD_SECONDS, time.monotonic() - fetch._began)] += 1

    # ---- to the store ----

    def _write(self) -> None:
        self._writing = [write for write in self._writing if not self._advance_write(write)]
        if self._writes == "never":
            return
        while True:
            room = self._max_blocks - sum(write.num_bytes for write in self._writing) // self._size
            if room < 1:
                return
            job = keep(self._write_jobs, self._manager.prefix.store_jobs.begin_write, min(room, self._write_blocks))
            if not len(job):
                self._write_jobs.remove(job)
                return
            try:
                fence = self._engine.fence()
                transfer = self._engine.submit_read(job.tier, job.blocks, after_compute=fence, on_full="refuse")
            except BlockyardError:
                self._end_write(job)
                self._stats.unwritten_blocks += len(job)
                return
            self._writing.append(StoreWrite(job, transfer, len(job) * self._size))
            self._advance_write(self._writing[-1])

    def _end_write(self, job: StoreJob) -> bool:
        is_whole = self._manager.prefix.store_jobs.end_write(job.job)
        self._write_jobs.remove(job)
        return is_whole

    def _advance_write(self, write: StoreWrite) -> bool:
        """Take a write as far as it goes. Returns whether it has ended."""
        if write.task is None:
            if not write.transfer.done:
                return False
            is_whole = self._end_write(write.job)
            rows, write.transfer.rows = write.transfer.rows, None
            is_whole = is_whole and rows is not None and write.transfer.error is None
            write.task = self._put_task(write.job, rows if is_whole else None)
        task = write.task
        if not task.ended:
            return False
        if task.answer is not None:
            ok, task.answer = task.answer.ok, None
            written = int(ok.sum())
            self._stats.written_blocks += written
            self._stats.written_bytes += written * self._size
            self._stats.unwritten_blocks += len(ok) - written
            if self._failed:
                for key in task.keys:
                    self._failed.pop(key.tobytes(), None)
        return True

    def _put_task(self, job: StoreJob, rows: NDArray[np.uint8] | None) -> StoreTask:
        """Give the store the blocks that were read."""
        if rows is None:
            self._stats.unwritten_blocks += len(job)
            return StoreTask(job.keys, ended=True)
        task = StoreTask(job.keys, rows=rows, owners=Owners(job.tenants, job.parents))
        self._worker.submit(task)
        return task


def _tenant(salt: bytes | None) -> bytes:
    """The name of a tenant in stores, as `StoreJob.tenants` has it."""
    return bytes(32) if salt is None else hashlib.sha256(salt).digest()


def _rows_of(
    job: StoreJob, keys: NDArray[np.uint8], rows: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Find the blocks of a job that were read: their ids, their rows, and which of the job's they are, bool `[n]`.

    `rows` are the blocks of `keys`; all of them came.
    """
    count = len(job)
    if np.array_equal(job.keys, keys[:count]):
        return job.blocks, rows[:count], np.ones(count, np.bool_)
    # Blocks have come or gone since the keys were asked for.
    index = {key.tobytes(): at for at, key in enumerate(keys)}
    at = np.array([index.get(key.tobytes(), -1) for key in job.keys])
    return job.blocks[at >= 0], np.ascontiguousarray(rows[at[at >= 0]]), at >= 0
