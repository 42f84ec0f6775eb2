"""A connector that LMCache wraps as an L2 adapter: its objects in a prefix store, bounded, verified, kept."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.integrations.objects import ObjectStore, store_url
from blockyard.stores import parse_size

__all__ = ["BlockyardConnector"]

_LOG = logging.getLogger(__name__)
_LOADERS = 4


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
        self._objects = ObjectStore(
            store_url(root_dir, url, size, "lmcache"),
            object_bytes=part_bytes,
            fields={
                "engine": f"lmcache {version('lmcache')}",
                "part": part_bytes,
                "dtype": kv_dtype,
                "revision": revision,
            },
        )
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ids = itertools.count(1)
        self._changed = threading.Lock()
        self._done: list[tuple[int, bool, str, list[bool]]] = []
        self._waiting: dict[int, int] = {}  # ids that have not begun, and how many keys each has
        self._closed = False
        # What waits for storage never queues before lookups, nor stores before loads.
        self._lookups = ThreadPoolExecutor(1, "blockyard-lmcache-lookup")
        self._loads = ThreadPoolExecutor(_LOADERS, "blockyard-lmcache-load")
        self._stores = ThreadPoolExecutor(1, "blockyard-lmcache-store")

    def event_fd(self) -> int:
        """Return the file descriptor that is readable while there are completions to drain."""
        return self._event

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

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """Return what has ended since the last call: id, whether it succeeded, an error, and which keys did.

        A lookup, load or deletion succeeds with any number of keys, a store only with all: so LMCache reads it.
        """
        with self._changed:
            if not self._closed:  # else its number may be another file's
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._event)
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Give up what has not begun, wait for what has, and close the store; twice does nothing.

        What is given up has failed; `drain_completions` says so.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        for pool in (self._lookups, self._loads, self._stores):
            pool.shutdown(cancel_futures=True)
        self._objects.close()
        with self._changed:
            self._done += [
                (ticket, False, "the connector is closed", [False] * count) for ticket, count in self._waiting.items()
            ]
            self._waiting.clear()
            os.close(self._event)

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[], list[bool]], count: int, *, is_put: bool = False
    ) -> int:
        with self._changed:
            if self._closed:
                raise StoreError("the connector is closed")
            ticket = next(self._ids)
            self._waiting[ticket] = count
            pool.submit(self._run, ticket, work, count, is_put)
        return ticket

    def _run(self, ticket: int, work: Callable[[], list[bool]], count: int, is_put: bool) -> None:  # noqa: FBT001
        error = ""
        with self._changed:
            del self._waiting[ticket]
        try:
            found = work()
        except Exception as caught:  # noqa: BLE001 (LMCache waits for a completion)
            _LOG.exception("operation %d failed", ticket)
            found, error = [False] * count, repr(caught)
        if is_put and not all(found):
            error = error or f"{found.count(False)} of {count} objects were not stored"
        with self._changed:
            self._done.append((ticket, not error, error, found))
            os.eventfd_write(self._event, 1)  # `close` waits for this


def _rows(keys: Sequence[str], views: Sequence[memoryview]) -> list[NDArray[np.uint8]]:
    """See LMCache's memory as bytes, whatever its format, which is `<B`."""
    if len(keys) != len(views):
        raise InvalidArgumentError(f"there are {len(keys)} keys and {len(views)} memoryviews")
    return [np.frombuffer(view, np.uint8) for view in views]
