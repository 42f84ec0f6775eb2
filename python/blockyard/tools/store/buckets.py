"""The objects of an object store, or the files of a shared directory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from blockyard.errors import StoreError
from blockyard.stores.namespace import TEXT_NAME
from blockyard.stores.object_store import ObjectURL, connect_client, read_url
from blockyard.stores.threaded.epochs import EPOCH_BYTES
from blockyard.stores.threaded.remote import public_text
from blockyard.stores.value import HEADER
from blockyard.tools.store.contents import DIGITS, Contents, StoredPage, read_text

__all__ = ["Objects", "open_url"]

_FOLDER: Final = "blockyard/"
_OBJECT: Final = re.compile(rf"{_FOLDER}([0-9a-f]{{{DIGITS}}})/([0-9a-f]{{64}})")
_AT_ONCE: Final = 1000
_KEY: Final = slice(64, 96)  # of a value's header
_MAX_TEXT: Final = 1 << 16


class Objects(Contents):
    """The objects below a URL.

    Args:
        found: the URL.
        obstore: the module, or what has its functions.
        client: its store.
    """

    def __init__(self, found: ObjectURL, obstore: Any, client: Any) -> None:
        super().__init__()
        self._url, self._obstore, self._client = found, obstore, client

    def pages(self) -> Iterator[StoredPage]:
        """Yield the blocks in the order of their names."""
        listed = iter(self._call(lambda: self._obstore.list(self._client, _FOLDER, chunk_size=_AT_ONCE)))
        while (chunk := self._call(lambda: next(listed, None))) is not None:
            pages: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for meta in chunk:
                if (match := _OBJECT.fullmatch(meta["path"])) and not self._is_record(meta, match[2]):
                    pages[match[1]].append(meta)
            now = datetime.now(timezone.utc)
            for namespace, metas in pages.items():
                ages = [max(0.0, (now - meta["last_modified"]).total_seconds()) for meta in metas]
                sizes = np.array([meta["size"] for meta in metas], np.int64)
                yield StoredPage(namespace, [meta["path"] for meta in metas], sizes, np.array(ages), [""] * len(metas))

    def parts(self, namespace: str) -> dict[str, str]:
        """Read the text beside the blocks."""
        return read_text(self._read(f"{_FOLDER}{namespace}/{TEXT_NAME}", _MAX_TEXT))

    def remove(self, places: list[Any]) -> int:
        """Delete objects."""
        if self._url.scheme == "s3":
            for start in range(0, len(places), _AT_ONCE):
                self._call(partial(self._obstore.delete, self._client, places[start : start + _AT_ONCE]))
            return len(places)
        return sum(self._delete(path) for path in places)

    def _delete(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            self._call(lambda: self._obstore.delete(self._client, path))
            return True
        return False

    def _is_record(self, meta: dict[str, Any], name: str) -> bool:
        """Return whether an object is the epoch's record: its name is the key in its header."""
        size = HEADER + EPOCH_BYTES
        return meta["size"] == size and (self._read(meta["path"], size) or b"")[_KEY].hex() == name

    def _read(self, path: str, max_bytes: int) -> bytes | None:
        with suppress(FileNotFoundError):
            answer = self._call(lambda: self._obstore.get(self._client, path))
            return bytes(answer.bytes()) if answer.range[1] <= max_bytes else None
        return None

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001 (any exception of the client)
            why = public_text(error, self._url.secrets)
        raise StoreError(f"{self._url.parts.url!r}: {why}")


def open_url(url: str, *, payloads: bool) -> Objects:  # noqa: ARG001 (only slabs have it)
    """Look into an object store or a shared directory."""
    found = read_url(url)
    if found.scheme == "local" and not Path(found.parts.path, _FOLDER).is_dir():
        raise StoreError(f"{found.parts.url!r}: there is no store in this directory")
    return Objects(found, *connect_client(found, found.timeout_base))
