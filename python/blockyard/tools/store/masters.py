"""The values of a Mooncake cluster. The master's HTTP server lists them, and Mooncake's client removes them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final
from urllib.request import urlopen

import numpy as np

from blockyard.errors import StoreError
from blockyard.stores.mooncake import FOLDER, Client, MooncakeURL, connect_client, read_url
from blockyard.stores.namespace import TEXT_NAME
from blockyard.tools.store.contents import DIGITS, Contents, StoredPage, read_text

__all__ = ["Masters", "open_url"]

_VALUE: Final = re.compile(rf"{FOLDER}([0-9a-f]{{{DIGITS}}})/[0-9a-f]{{64}}")
_AT_ONCE: Final = 64
_MAX_TEXT: Final = 1 << 16


class Masters(Contents):
    """The values that a master knows.

    Args:
        found: the URL.
    """

    def __init__(self, found: MooncakeURL) -> None:
        super().__init__()
        self._url = found

    @cached_property
    def _client(self) -> Client:
        return connect_client(self._url)

    def pages(self) -> Iterator[StoredPage]:
        """Yield the blocks by namespace. Mooncake does not tell their ages."""
        by_namespace = defaultdict(list)
        for path in self._ask("get_all_keys").decode().splitlines():
            if match := _VALUE.fullmatch(path):
                by_namespace[match[1]].append(path)
        for namespace, paths in by_namespace.items():
            for start in range(0, len(paths), _AT_ONCE):
                found = json.loads(self._ask(f"batch_query_keys?keys={','.join(paths[start : start + _AT_ONCE])}"))
                there = {path: one["values"] for path, one in found["data"].items() if one["values"]}
                sizes = {path: replicas[0]["size_"] for path, replicas in there.items()}
                ages, tenants = np.full(len(sizes), np.nan), [""] * len(sizes)
                yield StoredPage(namespace, list(sizes), np.array([*sizes.values()], np.int64), ages, tenants)

    def parts(self, namespace: str) -> dict[str, str]:
        """Read the text beside the blocks."""
        (text,) = self._client.read([f"{FOLDER}{namespace}/{TEXT_NAME}"], _MAX_TEXT)
        return {} if isinstance(text, int) else read_text(text.tobytes())

    def remove(self, places: list[Any]) -> int:
        """Remove values."""
        return int(self._client.call("batch_remove", places, force=True).count(0))

    def _ask(self, what: str) -> bytes:
        address = f"http://{self._url.host}:{self._url.admin}/{what}"
        try:
            with urlopen(address, timeout=self._url.timeout_base) as answer:
                return bytes(answer.read())
        except (OSError, ValueError) as error:
            why = f"the master's HTTP server at port {self._url.admin}, which lists the blocks: {error}"
        raise StoreError(f"{self._url.parts.url!r}: {why}; name another port by ?admin=")


def open_url(url: str, *, payloads: bool) -> Masters:  # noqa: ARG001 (only slabs have it)
    """Look into a Mooncake cluster."""
    return Masters(read_url(url))
