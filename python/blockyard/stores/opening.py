"""Opens external stores by URL.

A plug-in claims a URL scheme with `register`, or with an entry point in the group `blockyard.stores` that names a
function like `open_store`.
"""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, cast

from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError, StoreURLError
from blockyard.layout.sizes import as_int
from blockyard.stores.base import ExternalStore, Use
from blockyard.stores.codec import Codec, MacKey
from blockyard.stores.url import public_url, require_room, require_text

__all__ = ["check_url", "open_store", "register"]

ENTRY_POINTS = "blockyard.stores"
_REDIS = ("blockyard.stores.redis", "open_redis")
_OBJECTS = ("blockyard.stores.object_store", "open_object_store")
_BUILT_IN = {
    "file": ("blockyard.stores.file", "open_file"),
    **dict.fromkeys(("redis", "rediss", "unix", "redis+cluster", "rediss+cluster"), _REDIS),
    **dict.fromkeys(("valkey", "valkeys", "valkey+cluster", "valkeys+cluster"), _REDIS),
    **dict.fromkeys(("s3", "gs", "az", "local", "memory"), _OBJECTS),
    "mooncake": ("blockyard.stores.mooncake", "open_mooncake"),
}

Maker = TypeVar("Maker", bound=Callable[..., ExternalStore])
_registered: dict[str, Callable[..., ExternalStore]] = {}


class Opener(Protocol):
    """A function that an entry point in the group `blockyard.stores` names."""

    def __call__(self, url: str, *, bytes_per_block: int, num_slots: int | None, namespace: bytes) -> ExternalStore:
        """Open the store that the URL names; see `open_store`. `use` is passed only if it is not `"swap"`."""


def register(scheme: str) -> Callable[[Maker], Maker]:
    """Decorate a store class so that `open_store` opens it for a URL scheme, in this process.

    `open_store` calls the class with `(url, *, bytes_per_block, namespace)`, as for a `ThreadedStore`, and reads its
    capacity from `num_slots`.

    Args:
        scheme: the part of the URL before the colon: lower-case letters, digits and `+-.`, a letter first.

    Raises:
        InvalidArgumentError: the scheme is malformed, or belongs to another store.
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise InvalidArgumentError(f"scheme is {scheme!r}, must be lower-case letters, digits and +-., a letter first")

    def decorate(make: Maker) -> Maker:
        other = _registered.get(scheme, make)
        # Allow the same class again: a reloaded module or a rerun notebook cell redefines it.
        if scheme in _BUILT_IN or _full_name(other) != _full_name(make):
            raise InvalidArgumentError(f"scheme is {scheme!r}, which belongs to another store")
        _registered[scheme] = make
        return make

    return decorate


def _full_name(make: Callable[..., ExternalStore]) -> tuple[str, str]:
    return make.__module__, make.__qualname__


def open_store(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
    codec: Codec | None = None,
    mac_key: MacKey | None = None,
    revision: str = "",
) -> ExternalStore:
    """Open the external store that a URL names.

    Args:
        url: such as `file:///dir?size=2GiB`, `redis://host?size=2GiB` or `s3://bucket?size=1TiB`;
            `docs/reference/store-urls.md` lists all schemes and options. Or a plug-in's scheme, see `register`.
        bytes_per_block: bytes of one block, all layers.
        num_slots: number of blocks to hold; None for as many as fit.
        namespace: 32-byte digest of everything that determines the bytes, see `store_namespace`; a block of another
            namespace is a miss.
        use: `"swap"` for blocks that are addressed by slot and die with the process, `"prefix"` for blocks that are
            found by key and outlive it.
        codec: encodes blocks before they are stored: compresses, encrypts or quantizes them.
        mac_key: 32 bytes, or the path of a file that holds them, for untrusted storage: a value written without this
            key is a miss. Never part of a URL or a message.
        revision: names the weights that compute the blocks of a prefix store, if they differ from those that the
            namespace names; see `ExternalStore.forget`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part.
        StoreFullError: the storage, or the size in the URL, cannot hold that many blocks.
        StoreError: the storage cannot be opened, or has no keys.
        InvalidArgumentError: another argument is out of range.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from blockyard import open_store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_store(f"file://{folder}?size=1MiB", bytes_per_block=4096) as store:
        ...         written = store.wait(store.submit_write(np.array([3, 5]), np.ones((2, 4096), np.uint8)))
        ...         read = store.wait(store.submit_read(np.array([3, 5])))
        >>> bool(written.ok.all()), int(read.rows.sum())
        (True, 8192)
    """
    if use not in {"swap", "prefix"}:
        raise InvalidArgumentError(f"use is {use!r}, must be 'swap' or 'prefix'")
    bytes_per_block = _positive("bytes_per_block", bytes_per_block)
    num_slots = None if num_slots is None else _positive("num_slots", num_slots)
    _check_namespace(namespace)
    scheme = _scheme(url)
    if "{rank}" in url:
        why = "{rank} is for Generator only: write a number for each rank or engine"
        raise StoreURLError(f"{public_url(url)!r}: {why}")
    options: dict[str, Any] = {
        name: value
        for name, value in (("codec", codec), ("mac_key", mac_key), ("revision", revision or None))
        if value is not None
    }
    if scheme in _registered:
        store = _registered[scheme](url, bytes_per_block=bytes_per_block, namespace=namespace, **options)
        return _checked(store, url, bytes_per_block, num_slots or 1, use)
    if scheme in _BUILT_IN:
        require_room(url, bytes_per_block)
        module, name = _BUILT_IN[scheme]
        opener = cast("Opener", getattr(import_module(module), name))
    else:
        opener = cast("Opener", entry_points(group=ENTRY_POINTS)[scheme].load())
    options |= {} if use == "swap" else {"use": use}
    return opener(url, bytes_per_block=bytes_per_block, num_slots=num_slots, namespace=namespace, **options)


def _positive(name: str, value: int) -> int:
    if (value := as_int(name, value)) < 1:
        raise InvalidArgumentError(f"{name} is {value}, must be at least 1")
    return value


def _check_namespace(namespace: object) -> None:
    if not isinstance(namespace, bytes | bytearray):
        raise InvalidArgumentError(f"namespace is {namespace!r:.100}, must be 32 bytes")
    if len(namespace) != 32:
        raise InvalidArgumentError(f"namespace has {len(namespace)} bytes, must have 32: see store_namespace")


def _checked(store: ExternalStore, url: str, size: int, wanted: int, use: Use) -> ExternalStore:
    """Check that a store is large enough, and has the right block size and use."""
    url = public_url(url)
    error: StoreError | None = None
    if store.bytes_per_block != size:
        found = f"{type(store).__name__} has blocks of {store.bytes_per_block} bytes, must have {size}"
        raise StoreError(f"{url!r}: {found}: its __init__ must pass its arguments on to super().__init__")
    if store.num_slots < wanted:
        error = StoreFullError(f"{url!r}: the store has {store.num_slots} slots, must have at least {wanted}")
    elif use not in store.uses:
        lack = "keys" if use == "prefix" else "slots"
        error = StoreError(f"{url!r}: the store has no {lack}, use must be {' or '.join(map(repr, store.uses))}")
    if error is not None:
        store.close()
        raise error
    return store


def check_url(url: str) -> None:
    """Check a URL's syntax as `open_store` does, without running a plug-in's code.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part.
    """
    scheme = _scheme(url)
    if scheme in _BUILT_IN:
        import_module(_BUILT_IN[scheme][0]).read_url(url)


def _scheme(url: str) -> str:
    shown = public_url(url)
    require_text(url, url, "it")
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise StoreURLError(f"{shown!r} has no scheme; write for example file:///dir?size=2GiB")
    known = {*_BUILT_IN, *_registered}
    if scheme not in known:
        known.update(entry_points(group=ENTRY_POINTS).names)
    if scheme not in known:
        scheme = shown.partition(":")[0]
        raise StoreURLError(f"{shown!r}: no store has the scheme {scheme!r}; known are {', '.join(sorted(known))}")
    return scheme
