"""`Contents`: the blocks that a store holds, page by page, without opening the store itself."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreURLError
from blockyard.stores.opening import check_url
from blockyard.stores.url import public_url

__all__ = ["DIGITS", "Contents", "DamagedBlock", "Selection", "StoredPage", "open_contents", "read_text"]

DIGITS: Final = 16
"""Hexadecimal digits of a namespace or tenant that are shown, and that name a namespace in Redis and object stores."""
_MODULES: Final = {
    "file": "files",
    **dict.fromkeys(("redis", "rediss", "unix", "redis+cluster", "rediss+cluster"), "servers"),
    **dict.fromkeys(("valkey", "valkeys", "valkey+cluster", "valkeys+cluster"), "servers"),
    **dict.fromkeys(("s3", "gs", "az", "local"), "buckets"),
    "mooncake": "masters",
}


class StoredPage(NamedTuple):
    """Some blocks of one namespace.

    Attributes:
        namespace: first digits of the namespace; for swap space `swap`, a space and the digits.
        places: where each block is, for `Contents.remove`.
        sizes: bytes of each block in the storage, int64 `[n]`.
        ages: seconds since each block was written, or on a Redis server last used, float64 `[n]`; NaN if unknown.
        tenants: first digits of each block's tenant; empty for none.
    """

    namespace: str
    places: list[Any]
    sizes: NDArray[np.int64]
    ages: NDArray[np.float64]
    tenants: list[str]

    def where(self, chosen: NDArray[np.bool_]) -> StoredPage:
        """Return the chosen blocks."""
        numbers = np.flatnonzero(chosen).tolist()
        places, tenants = [self.places[i] for i in numbers], [self.tenants[i] for i in numbers]
        return StoredPage(self.namespace, places, self.sizes[chosen], self.ages[chosen], tenants)


class DamagedBlock(NamedTuple):
    """A damaged block.

    Attributes:
        what: its place as text.
        reason: why a read would be a miss.
        place: for `Contents.remove`.
    """

    what: str
    reason: str
    place: Any


class Contents(ABC):
    """What a store holds. Methods raise `StoreError` if the storage does not answer.

    Attributes:
        facts: more about the storage, complete once all pages have been read.
        damaged: damaged blocks that were met while reading pages.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.damaged: list[DamagedBlock] = []

    @abstractmethod
    def pages(self) -> Iterator[StoredPage]:
        """Yield the blocks that stores can find, in no particular order."""

    @abstractmethod
    def parts(self, namespace: str) -> dict[str, str]:
        """Return the parts of a namespace; none if no store has kept them."""

    @abstractmethod
    def remove(self, places: list[Any]) -> int:
        """Remove blocks, even those that a store is using: its reads become misses. Returns how many are gone now."""


class Selection(NamedTuple):
    """Which blocks a command is about; the default is all of them.

    Attributes:
        namespaces: first digits of a namespace, or `name=value` of one of its parts; all must match.
        tenant: first digits of a tenant.
        older_than: minimum age in seconds; blocks of unknown age are not chosen.
    """

    namespaces: tuple[str, ...] = ()
    tenant: str = ""
    older_than: float = 0.0

    def takes(self, namespace: str, parts: dict[str, str]) -> bool:
        """Return whether the blocks of a namespace may be chosen."""
        digits = namespace.rsplit(maxsplit=1)[-1]
        return all(digits.startswith(wanted) or wanted in _pairs(parts) for wanted in self.namespaces)

    def choose(self, page: StoredPage, parts: dict[str, str]) -> StoredPage:
        """Return the chosen blocks of a page."""
        chosen = np.ones(len(page.places), np.bool_)
        if self.tenant and not parts.get("salt", "").startswith(self.tenant):
            chosen = np.array([tenant.startswith(self.tenant) for tenant in page.tenants], np.bool_)
        return page.where(chosen & (page.ages >= self.older_than) if self.older_than else chosen)


def open_contents(url: str, *, payloads: bool = False) -> Contents:
    """Look into the store that a URL names.

    Args:
        url: as for `blockyard.open_store`; options that matter only to an open store have no effect.
        payloads: read each block and check it, which only a file's blocks need.

    Raises:
        StoreURLError: the URL is malformed, or its store cannot be looked into.
        StoreError: the storage cannot be opened.
    """
    check_url(url)
    scheme = url.partition(":")[0]
    if scheme not in _MODULES:
        raise StoreURLError(f"{public_url(url)!r}: stores with the scheme {scheme!r} cannot be looked into")
    if payloads and scheme != "file":
        why = "a read checks each of its blocks and deletes damaged ones"
        raise StoreURLError(f"{public_url(url)!r}: --verify and --damaged are for file stores; here {why}")
    module = import_module(f"blockyard.tools.store.{_MODULES[scheme]}")
    contents: Contents = module.open_url(url, payloads=payloads)
    return contents


def read_text(text: bytes | None) -> dict[str, str]:
    """Parse the text that a store keeps beside its blocks; anything else has no parts. Others may have written it."""
    with suppress(ValueError, AttributeError, TypeError):
        parts = json.loads(text or b"{}").get("parts", {})
        return {_printable(name): _printable(value) for name, value in parts.items()}
    return {}


def _printable(text: object) -> str:
    return "".join(character if character.isprintable() else "?" for character in str(text))[:300]


def _pairs(parts: dict[str, str]) -> set[str]:
    return {f"{name}={value}" for name, value in parts.items()}
