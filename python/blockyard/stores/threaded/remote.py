"""`RemoteStore`: the base of stores on servers. It removes slots on closing, and hides secrets.

This module also has the parsers of URL options.
"""

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from blockyard.errors import StoreError, StoreFullError
from blockyard.stores.base import Use
from blockyard.stores.threaded.store import ThreadedStore
from blockyard.stores.url import StoreURL, hide_secrets, parse_size
from blockyard.stores.value import HEADER, Bytes
from blockyard.workers.interrupts import as_error

__all__ = ["SIZE", "RemoteStore", "batched", "count", "count_slots", "positive", "public_text", "seconds"]

SIZE: Final = "a size, for example 2GiB, 500MB or plain bytes"
_REMOVED_AT_ONCE: Final = 512


class RemoteStore(ThreadedStore):
    """Blocks on a server: either a prefix store, or swap space whose slots are deleted on closing.

    Args:
        parts: the URL; messages show it without user name and password.
        num_slots: as `ExternalStore.num_slots`.
        use: `"swap"` or `"prefix"`.
        options: as for `ThreadedStore`.
    """

    def __init__(self, parts: StoreURL, *, num_slots: int, use: Use, **options: Any) -> None:
        super().__init__(parts.url, **options)
        self.num_slots = num_slots
        self._use = use
        self._secrets = parts.secrets

    def __del__(self) -> None:
        if getattr(self, "_digests", ()) and not self._closed and self._process.is_current:
            what = f"unclosed {self!r}: {len(self._digests)} slots are not deleted, call its close()"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)

    @abstractmethod
    def _ask(self) -> None:
        """Make any request to the server; raises the client's exceptions."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Release the client; called once, when no call is running."""

    def ping(self) -> None:
        """Raise StoreError if the server does not answer."""
        failure = None
        try:
            self._ask()
        except BaseException as error:  # noqa: BLE001 (any exception of the client)
            failure = self._public(error)
        if failure is not None:  # without the client's exception as its context, which may quote a secret
            raise StoreError(f"{self.url!r}: {failure}")
        if self._use == "prefix":
            # Otherwise puts before the first look at the record might be older than the last `forget`.
            with suppress(Exception):  # forgotten, or a node is lost: blocks are misses for now
                self._keyed_blocks.confirm()

    def close(self, timeout: float = 5.0) -> bool:
        """Give up batches in flight, and delete the blocks of swap space; see `ExternalStore.close`."""
        until = self._runtime.monotonic() + timeout
        in_time = super().close(timeout)
        if self._process.is_current and self._digests:
            try:
                cleaner = self._runtime.start_worker("blockyard-store", self._remove_slots, lambda: None)
            except RuntimeError as error:  # the interpreter is ending, or there are too many threads
                self._note(error)
            else:
                cleaner.join(max(0.0, until - self._runtime.monotonic()))
                in_time = in_time and not cleaner.is_alive()
        if in_time and self._process.is_current:
            self._disconnect()
        return in_time

    def _remove_slots(self) -> None:
        with self._lock:
            slots = list(self._digests)
            late = {slot for batch in self._batches.running for slot in batch.names}  # a hanging call may still write
            self._digests = {slot: digests for slot, digests in self._digests.items() if slot in late}
        try:
            for start in range(0, len(slots), _REMOVED_AT_ONCE):
                self.delete(self._slot_names(slots[start : start + _REMOVED_AT_ONCE]))
        except Exception as error:  # noqa: BLE001 (on Redis they expire)
            self._note(self._public(error))

    def _public(self, error: BaseException) -> StoreError:
        """Return an error without secrets, which servers sometimes quote."""
        return StoreError(public_text(error, self._secrets))


def public_text(error: BaseException, secrets: Sequence[str]) -> str:
    """Return the first line of an error without secrets, and without the queries of URLs: one may have a signature.

    The other lines of obstore's errors show its options.
    """
    text = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {as_error(error)}"
    return re.sub(r"\?\S*", "?***", hide_secrets(text, secrets).partition("\n")[0])


def batched(rows: Bytes, max_rows: int, max_bytes: int) -> Iterator[slice]:
    """Split rows into parts of at most `max_rows` rows and `max_bytes` bytes, but at least one row."""
    size = min(max_rows, max(1, max_bytes // max(1, rows.shape[1])))
    return (slice(start, start + size) for start in range(0, len(rows), size))


def count_slots(parts: StoreURL, size: int | None, bytes_per_block: int, num_slots: int | None, *, example: str) -> int:
    """Return the number of blocks that a store holds: `num_slots`, or as many values as fit into `size`.

    Raises:
        StoreURLError: neither is given; the message suggests the size `example`.
        StoreFullError: `size` holds too few blocks.
    """
    if size is None:
        if num_slots is None:
            parts.reject(parts.host or parts.path, f"needs ?size=, for example ?size={example}")
        return num_slots or 1
    width = HEADER + bytes_per_block
    fit, minimum = size // width, num_slots or 1
    if fit < minimum:
        raise StoreFullError(f"{parts.url!r}: size holds {fit} blocks of {width} bytes, must hold at least {minimum}")
    return num_slots or fit


# ---- parsers of URL options ----


def positive(text: str) -> int:
    """Parse a size of at least one byte."""
    size = parse_size(text)
    if not size:
        raise ValueError(text)
    return size


def count(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a parser of integers in a range."""

    def read(text: str) -> int:
        if not minimum <= int(text) <= maximum:
            raise ValueError(text)
        return int(text)

    return read


def seconds(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return a parser of numbers in a range."""

    def read(text: str) -> float:
        if not minimum <= float(text) <= maximum:
            raise ValueError(text)
        return float(text)

    return read
