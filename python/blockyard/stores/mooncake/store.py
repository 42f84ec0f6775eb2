"""`MooncakeStore`: blocks in a Mooncake cluster; `blockyard.stores.mooncake` describes it."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreError
from blockyard.stores.base import ExternalStore, Owners, Use
from blockyard.stores.mooncake.client import (
    ABSENT,
    AREA,
    BEING_WRITTEN,
    NO_ROOM,
    TOO_LONG,
    connect_client,
    text_of_code,
)
from blockyard.stores.mooncake.url import MooncakeURL, read_url
from blockyard.stores.namespace import TEXT_NAME, text_of
from blockyard.stores.threaded.remote import RemoteStore, batched, count_slots
from blockyard.stores.value import Bytes

__all__ = ["FOLDER", "MooncakeStore", "open_mooncake"]

FOLDER: Final = "blockyard/"
_KEYS: Final = 512  # keys of one call
_RECORD: Final = 4096  # bytes read of a record; a longer one is damaged
_STEPS: Final = 100  # how often the record may change while it is read
_BUSY: Final = {-601, BEING_WRITTEN}  # -601: another process has replaced the value before this one had written it
_BUSY_SECONDS: Final = 0.01
_CLOSE_SECONDS: Final = 5.0


def open_mooncake(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
    **options: Any,
) -> ExternalStore:
    """Open the Mooncake store. `open_store` calls this for `mooncake://`.

    Args:
        url: `mooncake://master:50051?size=64GiB`; `docs/reference/store-urls.md` lists the options.
        bytes_per_block: bytes of one block.
        num_slots: number of blocks to track; None for as many as fit into `size`.
        namespace: 32-byte digest of everything that determines the bytes.
        use: `"swap"` or `"prefix"`.
        options: `codec` and `mac_key`, as for `open_store`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part.
        StoreFullError: `size` holds too few blocks.
        StoreError: the master does not answer, or the client or a library that it needs is missing.
    """
    found = read_url(url)
    blocks = count_slots(found.parts, found.size, bytes_per_block, num_slots, example="64GiB")
    store = MooncakeStore(
        found, bytes_per_block=bytes_per_block, num_slots=blocks, namespace=namespace, use=use, **options
    )
    store.ping()
    store.describe()
    return store


class MooncakeStore(RemoteStore):
    """Blocks in a Mooncake cluster; created by `open_mooncake`."""

    _reuses_rows = True
    _there_seconds = 3.0  # the master evicts blocks, and a lookup is one short round trip

    def __init__(self, found: MooncakeURL, **options: Any) -> None:
        super().__init__(found.parts, **options)
        self.threads = found.threads - 1  # a probe has a thread more, which may hang in the next batch
        self.memory, self.timeout_base = found.memory, found.timeout_base
        self._folder = f"{FOLDER}{self.namespace[:8].hex()}/"
        self._last_record = b""
        self._client = connect_client(found, max(self._stored_values.width, AREA))

    def put(self, keys: Bytes, rows: Bytes) -> NDArray[np.bool_]:
        """Store values, replacing existing ones."""
        return self.put_blocks(keys, rows, None, {key.tobytes() for key in keys})

    def put_blocks(self, keys: Bytes, rows: Bytes, owners: Owners | None, damaged: set[bytes]) -> NDArray[np.bool_]:  # noqa: ARG002 (there are no quotas)
        """Store values, keeping existing ones that are not damaged."""
        is_kept = np.array([key.tobytes() not in damaged for key in keys], np.bool_)
        codes = np.zeros(len(keys), np.int64)
        for verb, chosen in (("batch_put_from", is_kept), ("batch_upsert_from", ~is_kept)):
            at = np.flatnonzero(chosen)
            for part in batched(rows[: len(at)], _KEYS, AREA):
                codes[at[part]] = self._put_part(verb, self._paths(keys[at[part]]), rows[at[part]])
        self._judge("put", codes, {0, NO_ROOM, BEING_WRITTEN})
        return np.asarray(codes == 0, np.bool_)

    def _put_part(self, verb: str, paths: list[str], rows: Bytes) -> NDArray[np.int64]:
        values = [self._stored_values.stored(row) for row in rows]
        codes = np.array(self._client.write(verb, paths, values))
        if verb == "batch_put_from":  # the code is also 0 while another process puts the key, which may still fail
            there = np.array(self._client.call("batch_is_exist", paths))
            codes[(codes == 0) & (there != 1)] = BEING_WRITTEN
        return codes

    def get(self, keys: Bytes, out: Bytes) -> list[str]:
        """Read values. The header check rejects those of another length."""
        codes = np.zeros(len(keys), np.int64)
        for part in batched(out, _KEYS, AREA):
            paths = self._paths(keys[part])
            single = list(dict.fromkeys(paths))  # the client fills only one of the buffers of a repeated key
            found = dict(zip(single, self._client.read(single, out.shape[1]), strict=True))
            for row, path in zip(out[part], paths, strict=True):
                value = found[path]
                if isinstance(value, np.ndarray) and self._stored_values.accepts_size(row, value):
                    row[: len(value)] = value
            codes[part] = [code if isinstance(code := found[path], int) else 0 for path in paths]
        codes[codes == BEING_WRITTEN] = ABSENT
        self._judge("get", codes, {0, ABSENT, TOO_LONG})
        return ["absent" if code == ABSENT else "" if code in {0, TOO_LONG} else "error" for code in codes.tolist()]

    def delete(self, keys: Bytes) -> None:
        """Delete values, even those that another process is reading."""
        self._require("remove", self._client.call("batch_remove", self._paths(keys), force=True), {0, ABSENT})

    def has(self, keys: Bytes) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        codes = self._client.call("batch_is_exist", self._paths(keys))
        self._require("look up", codes, {0, 1})
        return np.array([code == 1 for code in codes], np.bool_)

    # ---- the epoch ----

    def read_epoch(self, key: Bytes) -> Bytes | None:
        """Return the row that identifies the valid blocks; see `replace_epoch`."""
        for _ in range(_STEPS):
            try:
                last = self._last_record
                row, successor = self._records([self._record_path(key), self._record_path(key, last)])
                if row is None:
                    return None
                if row.tobytes() != last:
                    self._last_record = row.tobytes()
                elif successor is None:
                    return row
                else:  # finish what another process has begun
                    self._keep("batch_upsert_from", self._record_path(key), successor.data)
            except _BeingWrittenError:  # noqa: PERF203 (rare)
                self._runtime.sleep(_BUSY_SECONDS)
        raise StoreError(f"other processes have written the epoch's record {_STEPS} times")

    def replace_epoch(self, key: Bytes, old: Bytes | None, new: Bytes) -> Bytes | None:
        """Replace a row by its successor.

        The client can store a value atomically if its key is absent, but not replace one if it is unchanged. So each
        row has at most one successor, whose key is derived from the row; the first process to store it decides. Every
        reader replaces a row that has a successor, so that a process that was late to replace it undoes nothing.
        """
        there = self.read_epoch(key)
        if (None if there is None else there.tobytes()) != (None if old is None else old.tobytes()):
            return there
        with suppress(_BeingWrittenError):  # another process is first
            self._keep("batch_put_from", self._record_path(key, None if old is None else old.tobytes()), new.data)
        return self.read_epoch(key)

    def _record_path(self, key: Bytes, row: bytes | None = None) -> str:
        """Return the key of the current row, or of a row's successor."""
        name = key.tobytes().hex()
        return f"{self._folder}epoch/{name}" + ("" if row is None else f"/{hashlib.sha256(row).hexdigest()}")

    def _records(self, paths: list[str]) -> list[Bytes | None]:
        found = self._client.read(paths, _RECORD)
        self._require("read the epoch", [code for code in found if isinstance(code, int)], {ABSENT, TOO_LONG})
        empty = np.zeros(0, np.uint8)  # of a value that is too long
        return [(None if row == ABSENT else empty) if isinstance(row, int) else row for row in found]

    # ---- the client ----

    def _ask(self) -> None:
        self.has(np.zeros((1, 32), np.uint8))

    def describe(self) -> None:
        """Keep the text of the namespace beside its blocks, if it has one and there is room."""
        if self._use == "prefix" and (text := text_of(self.namespace)):
            with suppress(StoreError):
                self._keep("batch_put_from", self._folder + TEXT_NAME, memoryview(text))

    def _disconnect(self) -> None:
        closer = self._runtime.start_worker("blockyard-store", self._client.close, lambda: None)
        closer.join(_CLOSE_SECONDS)

    def _paths(self, keys: Bytes) -> list[str]:
        return [self._folder + key.tobytes().hex() for key in keys]

    def _keep(self, verb: str, path: str, value: memoryview) -> None:
        """Store a value that is never evicted."""
        self._require("keep the epoch", self._client.write(verb, [path], [value], self._client.pinned), {0})

    def _judge(self, what: str, codes: NDArray[np.int64], good: set[int]) -> None:
        """Note the first failure; raise if all failed."""
        bad = [code for code in codes.tolist() if code not in good]
        if bad:
            error = StoreError(f"{what}: {text_of_code(bad[0])}")
            if len(bad) == len(codes):
                raise error
            self._note(error)

    def _require(self, what: str, codes: Sequence[int] | NDArray[np.int64], good: set[int]) -> None:
        """Raise the first failure."""
        for code in codes:
            if code not in good:
                raise (_BeingWrittenError if code in _BUSY else StoreError)(f"{what}: {text_of_code(int(code))}")


class _BeingWrittenError(StoreError):
    """Another process is writing the value."""
