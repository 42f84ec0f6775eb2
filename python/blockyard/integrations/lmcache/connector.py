"""A connector that LMCache wraps as an L2 adapter: its objects in a prefix store, bounded, verified, kept."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.integrations.objects import PrefixObjects, store_url
from blockyard.stores import parse_size

__all__ = ["BlockyardConnector"]

_LOG = logging.getLogger(__name__)
_LOADERS = 4
_Completion = tuple[int, bool, str, list[bool]]


@dataclass(slots=True, eq=False)
class _Operation:
    ticket: int
    work: Callable[[], list[bool]]
    count: int
    is_put: bool
    found: list[bool] = field(default_factory=list)
    error: str = "the operation was given up"

    def completion(self) -> _Completion:
        found, error = self.found or [False] * self.count, self.error
        if self.is_put and not all(found):
            error = error or f"{found.count(False)} of {self.count} objects were not stored"
        return self.ticket, not error, error, found


class BlockyardConnector:
    """Objects of LMCache in a Blockyard store. LMCache names it in an L2 adapter of the type `native_plugin`.

    An object is checked when it is read; one that is damaged, lost or late is a miss, and its memory stays as it was.
    No operation ends later than the store's deadline, and none fails but as a miss. Objects are found only with the
    same key, length, version of LMCache, `kv_dtype` and `revision`. LMCache's key has model, ranks, tokens and salt.

    Args:
        kv_dtype: of the KV cache: LMCache's keys do not tell one float8 from another.
        root_dir: folder of a file store; one process at a time has it open.
        url: instead of `root_dir`, any store with keys, as for `blockyard.open_store`.
        size: most bytes of the file store.
        part: bytes of a block; an object takes as many as it needs.
        revision: of the weights, if the model's name does not say it.

    Raises:
        InvalidArgumentError: an argument is missing or wrong.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        *,
        kv_dtype: str,
        root_dir: str | None = None,
        url: str | None = None,
        size: int | str = "1GiB",
        part: int | str = "1MiB",
        revision: str = "",
    ) -> None:
        if not kv_dtype:
            raise InvalidArgumentError(f"kv_dtype is {kv_dtype!r}, must be the type of the KV cache, such as bfloat16")
        try:
            part_bytes = parse_size(str(part))
        except ValueError as error:
            raise InvalidArgumentError(f"part is {part!r}: {error}") from None
        if not 1 << 12 <= part_bytes <= 1 << 26:
            raise InvalidArgumentError(f"part is {part!r}, must be 4KiB to 64MiB")
        self._objects = PrefixObjects(
            store_url(root_dir, url, size, "lmcache"),
            object_bytes=part_bytes,
            fields={
                "engine": f"lmcache {version('lmcache')}",
                "part": part_bytes,
                "dtype": kv_dtype,
                "revision": revision,
            },
        )
        # A file closes its descriptor once, however often it is closed.
        self._event = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._ids = itertools.count(1)
        self._changed = threading.RLock()  # an operation that ends at once ends within `_submit`
        self._open: dict[int, _Operation] = {}  # those whose completions were not drained
        self._done: list[_Completion] = []
        self._closed = False
        # What waits for storage never queues before lookups, nor stores before loads.
        self._lookups = ThreadPoolExecutor(1, "blockyard-lmcache-lookup")
        self._loads = ThreadPoolExecutor(_LOADERS, "blockyard-lmcache-load")
        self._stores = ThreadPoolExecutor(1, "blockyard-lmcache-store")

    def event_fd(self) -> int:
        """Return the file descriptor that is readable while there are completions to drain."""
        return self._event.fileno()

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Start to load objects, each into its memory, which is written only by a whole object; return an id."""
        names, rows = list(keys), _rows(keys, memoryviews)

        def take(index: int, data: NDArray[np.uint8]) -> None:
            rows[index][:] = data

        sizes = [row.nbytes for row in rows]
        return self._submit(self._loads, lambda: self._objects.get(names, sizes, take), len(names))

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Start to store objects; return an id."""
        names, rows = list(keys), _rows(keys, memoryviews)
        sizes = [row.nbytes for row in rows]

        def put() -> list[bool]:
            return self._objects.put(names, sizes, rows.__getitem__)

        return self._submit(self._stores, put, len(names), is_put=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Start to look for objects; return an id. One that is found can still be damaged: then its load is a miss."""
        names = list(keys)
        return self._submit(self._lookups, lambda: self._objects.contains(names), len(names))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Start to delete objects; return an id."""
        names = list(keys)
        return self._submit(self._stores, lambda: self._objects.delete(names), len(names))

    def drain_completions(self) -> list[_Completion]:
        """Return what has ended since the last call: id, whether it succeeded, an error, and which keys did.

        A lookup, load or deletion succeeds with any number of keys, a store only with all: so LMCache reads it. One
        thread at a time calls this.
        """
        with self._changed:
            count = len(self._done)
            done = list({completion[0]: completion for completion in self._done}.values())
            for completion in done:
                self._open.pop(completion[0], None)
            if not self._event.closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._event.fileno())
        del self._done[:count]  # last: what this call does not return, the next one does
        return done

    def close(self) -> None:
        """Give up what has not begun, wait for what has, and close the store; twice does nothing.

        What is given up has failed; `drain_completions` says so.
        """
        with self._changed:
            self._closed = True
        for pool in (self._lookups, self._loads, self._stores):
            pool.shutdown(cancel_futures=True)
        self._objects.close()
        for operation in list(self._open.values()):
            self._end(operation)
        with self._changed:
            self._event.close()

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[], list[bool]], count: int, *, is_put: bool = False
    ) -> int:
        with self._changed:
            if self._closed:
                raise StoreError("the connector is closed")
            operation = _Operation(next(self._ids), work, count, is_put)
            self._open[operation.ticket] = operation
            try:
                future = pool.submit(self._run, operation)
                # Whatever raises in the thread, at any place, the operation ends. So it does when it is cancelled.
                future.add_done_callback(partial(self._end, operation))
            except BaseException:
                self._open.pop(operation.ticket, None)  # it waits for the lock, and will not begin
                raise
        return operation.ticket

    def _run(self, operation: _Operation) -> None:
        with self._changed:
            if operation.ticket not in self._open:
                return
        try:
            operation.found = operation.work()
            operation.error = ""
        except Exception as caught:  # noqa: BLE001 (LMCache waits for a completion)
            operation.error = repr(caught)
            _LOG.exception("operation %d failed", operation.ticket)
        finally:
            self._end(operation)

    def _end(self, operation: _Operation, _future: Future[None] | None = None) -> None:
        """Complete an operation, unless that is done. It may be noted twice until it is drained."""
        with self._changed:
            if operation.ticket in self._open and not self._event.closed:
                self._done.append(operation.completion())
                os.eventfd_write(self._event.fileno(), 1)
                self._open.pop(operation.ticket, None)


def _rows(keys: Sequence[str], views: Sequence[memoryview]) -> list[NDArray[np.uint8]]:
    """See LMCache's memory as bytes, whatever its format, which is `<B`."""
    if len(keys) != len(views):
        raise InvalidArgumentError(f"there are {len(keys)} keys and {len(views)} memoryviews")
    return [np.frombuffer(view, np.uint8) for view in views]
