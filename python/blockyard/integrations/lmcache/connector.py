"""A connector that LMCache wraps as an L2 adapter: keeps objects in a bounded, verified, persistent prefix store."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.integrations.compat import engine_log
from blockyard.integrations.options.lmcache import read_options
from blockyard.stores.adapters.jobs import Steps
from blockyard.stores.adapters.objects import PrefixObjects, store_url
from blockyard.workers.interrupts import open_event

__all__ = ["BlockyardConnector"]

_LOG = engine_log("LMCache")
_LANES = {"lookup": 16, "load": 4, "store": 1}
"""Concurrent operations of each kind: lookups never queue behind loads or stores, nor loads behind stores."""
_Completion = tuple[int, bool, str, list[bool]]


@dataclass(slots=True, eq=False)
class _Operation:
    future: Future[list[bool]]
    count: int
    is_put: bool
    is_seen: bool = False  # whether a `drain_completions` has its completion

    def completion(self, ticket: int) -> _Completion:
        raised = None if self.future.cancelled() else self.future.exception()
        error = "the operation was given up" if self.future.cancelled() else repr(raised) if raised else ""
        found = [False] * self.count if error else self.future.result()
        if self.is_put and not all(found):
            error = error or f"{found.count(False)} of {self.count} objects were not stored"
        return ticket, not error, error, found


class BlockyardConnector:
    """LMCache objects in a Blockyard store. Named in the configuration of an L2 adapter of type `native_plugin`.

    Objects are verified when read; a damaged, lost or late object is a miss and leaves its target memory unchanged.
    Every operation ends by the store's deadline, and failures are misses. An object is found only with the same key,
    length, LMCache version, `kv_dtype` and `revision`. LMCache's key covers model, ranks, tokens and salt.

    Args:
        kv_dtype: dtype of the KV cache: LMCache's keys do not distinguish float8 types.
        root_dir: folder of a file store; only one process at a time can open it.
        url: instead of `root_dir`, the URL of any store with keys, see `blockyard.open_store`.
        size: size limit of the file store in bytes; None for 1 GiB. A `url` has its own.
        part: bytes in a block; an object takes as many blocks as it needs. None for 1 MiB.
        revision: names the weights, adapters, RoPE settings and quantization; LMCache's keys have the model's name.
            Required, except with a store in memory.
        unknown: options that do not exist, to refuse them by name.

    Raises:
        InvalidArgumentError: an argument is unknown, missing or wrong.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        *,
        kv_dtype: str,
        root_dir: str | None = None,
        url: str | None = None,
        size: int | str | None = None,
        part: int | str | None = None,
        revision: str | None = None,
        **unknown: object,
    ) -> None:
        given = {"kv_dtype": kv_dtype, "root_dir": root_dir, "url": url, "size": size, "part": part}
        dtype, part_bytes, revision = read_options({**given, "revision": revision, **unknown})
        self._objects = PrefixObjects(
            store_url(root_dir, url, size, "lmcache"),
            sizes=[part_bytes],
            fields={
                "engine": f"lmcache {version('lmcache')}",
                "part": part_bytes,
                "dtype": dtype,
                "revision": revision,
            },
        )
        self._event = open_event(self)
        self._ids = itertools.count(1)
        self._changed = threading.RLock()  # reentrant: an operation may end within `_submit`
        self._open: dict[int, _Operation] = {}  # operations not drained yet, and those in `_drained`
        self._drained: tuple[int, ...] = ()  # operations that the last `drain_completions` returned
        self._closed = False
        self._jobs = self._objects.jobs("blockyard-lmcache", _LANES)
        _LOG.info("Blockyard: parts of %d bytes of a %s KV cache, %s", part_bytes, dtype, self._objects.about)

    def event_fd(self) -> int:
        """Return a file descriptor that is readable while there are completions to drain."""
        return self._event

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Start loading objects into their memory, which is written only if the object is intact; return an id."""
        names, rows = list(keys), _rows(keys, memoryviews)

        def take(index: int, data: NDArray[np.uint8]) -> None:
            rows[index][:] = data

        sizes = [row.nbytes for row in rows]
        return self._submit("load", self._objects.get_steps(names, sizes, take), len(names))

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Start storing objects; return an id."""
        names, rows = list(keys), _rows(keys, memoryviews)
        sizes = [row.nbytes for row in rows]
        steps = self._objects.put_steps(names, sizes, rows.__getitem__)
        return self._submit("store", steps, len(names), is_put=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Start looking up objects; return an id. A found object may still be damaged; then its load is a miss."""
        names = list(keys)
        return self._submit("lookup", self._objects.contains_steps(names), len(names))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Start deleting objects; return an id."""
        names = list(keys)
        return self._submit("store", self._objects.delete_steps(names), len(names))

    def drain_completions(self) -> list[_Completion]:
        """Return the operations that ended since the last call: id, success, error, and success per key.

        As LMCache expects, a lookup, load or deletion succeeds with any number of keys, a store only with all. Only one
        thread at a time may call this.
        """
        try:
            with self._changed:
                for ticket in self._drained:
                    self._open.pop(ticket, None)
                self._drained = ()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._event)
                ended = {ticket: one for ticket, one in self._open.items() if one.future.done()}
                done = [one.completion(ticket) for ticket, one in ended.items()]
                for one in ended.values():
                    one.is_seen = True
                drained = tuple(ended)
        except BaseException:
            os.eventfd_write(self._event, 1)  # the next call returns what this one does not
            raise
        self._drained = drained  # no call follows, so no interrupt can come before the caller has the result
        return done

    def close(self) -> None:
        """Cancel operations that have not started, wait for the others, and close the store. Idempotent.

        `drain_completions` reports cancelled operations as failed.
        """
        with self._changed:
            self._closed = True
        self._jobs.close(cancel=True)
        self._objects.close()

    def _submit(self, lane: str, steps: Steps[list[bool]], count: int, *, is_put: bool = False) -> int:
        with self._changed:
            if self._closed:
                raise StoreError("the connector is closed")
            ticket = next(self._ids)
            try:
                future = self._jobs.submit(lane, self._steps(ticket, steps))
                self._open[ticket] = _Operation(future, count, is_put)
                for _ in range(2):  # one attempt may raise
                    future.add_done_callback(partial(self._signal, ticket))
            except BaseException:
                self._open.pop(ticket, None)  # it waits for the lock and will not start
                raise
        return ticket

    def _steps(self, ticket: int, steps: Steps[list[bool]]) -> Steps[list[bool]]:
        """Run an operation, unless submitting it raised: then its memory belongs to LMCache again."""
        with self._changed:
            is_open = ticket in self._open
        return (yield from steps) if is_open else []

    def _signal(self, ticket: int, _future: Future[list[bool]]) -> None:
        """Signal the descriptor for an ended operation."""
        with self._changed:
            operation = self._open.get(ticket)
            if operation is not None and not operation.is_seen:
                os.eventfd_write(self._event, 1)


def _rows(keys: Sequence[str], views: Sequence[memoryview]) -> list[NDArray[np.uint8]]:
    """View LMCache's memory as bytes, whatever its format, which is `<B`."""
    if len(keys) != len(views):
        raise InvalidArgumentError(f"there are {len(keys)} keys and {len(views)} memoryviews")
    return [np.frombuffer(view, np.uint8) for view in views]
