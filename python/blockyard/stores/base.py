"""The interface of external stores, and how to open one by URL.

A store is either swap space or a prefix store. In swap space, blocks live in numbered slots that die with the process;
in a prefix store, blocks are found by key and outlive the process. Reads and writes are batches: you submit one, and
collect it by its ticket. A block that does not come back intact is a miss, never an exception.

A plug-in subclasses `ThreadedStore`, whose functions may block, and passes `blockyard.testing.store_suite.StoreSuite`.
It claims a URL scheme with `register`, or with an entry point in the group `blockyard.stores` that names a function
like `open_store`. Engines see every store as an `ExternalStore`. Only `wait`, `forget`, `close` and the quota methods
block.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError, StoreURLError
from blockyard.layout.sizes import as_int
from blockyard.stores.url import public_url, require_room, require_text
from blockyard.types import StoreStats

if TYPE_CHECKING:
    from typing_extensions import Self

    from blockyard.stores.codec import Codec, MacKey

__all__ = ["Completion", "ExternalStore", "Owners", "StoreStats", "open_store", "register"]

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

Keys: TypeAlias = NDArray[np.uint8] | Sequence[bytes]
Use: TypeAlias = Literal["swap", "prefix"]
Maker = TypeVar("Maker", bound=Callable[..., "ExternalStore"])
_registered: dict[str, Callable[..., "ExternalStore"]] = {}


class Owners(NamedTuple):
    """The tenants that blocks belong to, for a store's quotas.

    Attributes:
        tenants: the tenant of each block, uint8 `[n, 32]`: SHA-256 of its salt, zeros for prompts without a salt.
        parents: the key of the preceding block in the prompt, uint8 `[n, 32]`; zeros for the first block.
    """

    tenants: NDArray[np.uint8]
    parents: NDArray[np.uint8]


class ExternalStore(ABC):
    """Storage for blocks: swap space addressed by slot, or a prefix store addressed by key.

    Plug-ins subclass `ThreadedStore`. Subclass this one for wrappers around a store, such as those in
    `blockyard.testing.faults`.

    Batches run in the background. Operations on one slot or key run in the order of submission: a read sees the last
    write submitted before it. Submitting never waits for the storage. Blocks beyond `max_blocks_in_flight` are misses,
    `"queue_full"`.

    A prefix store that needs room evicts the least recently used blocks that no other block follows. It finds its
    blocks again when it is opened under the same namespace. Swap space raises `StoreError` from the methods that take
    keys.

    Attributes:
        keeps_quotas: whether `set_quota` works. If not, nothing passes `owners` to the store.
    """

    keeps_quotas: bool = False

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Number of blocks that the store can hold; in swap space the slots, numbered from 0."""

    @property
    @abstractmethod
    def bytes_per_block(self) -> int:
        """Bytes of one block, as the caller sees it."""

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the store can be used for: `"swap"` if its slots work, `"prefix"` if its keys do.

        Caches refuse a store of the wrong use. The default is `"swap"`, and `"prefix"` too for a class with its own
        `submit_put`. Override it if only one of them works, or in a wrapper: return those of the wrapped store.
        """
        return ("swap",) if type(self).submit_put is ExternalStore.submit_put else ("swap", "prefix")

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; caches refuse such a store. The default, False, lets them take it."""
        return False

    @property
    def max_blocks_in_flight(self) -> int | None:
        """Maximum number of blocks in flight and in uncollected results, None for no limit.

        Further ones are misses, `"queue_full"`. A cache keeps its transfers below it.
        """
        return None

    @abstractmethod
    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks.

        The store may read the bytes directly from `rows`, so do not change them until you have collected the ticket. A
        block whose row changes, or whose write ends as a miss, is a miss when it is read. If a block ends as
        `"timeout"` or `"closed"`, a hanging thread may still use its row: use other memory for the next batch. The
        store keeps the array alive.

        Args:
            slots: slots to write, int64 `[n]`, no repeats.
            rows: the blocks, uint8 `[n, bytes_per_block]`, on the CPU. The file store copies rows that are not aligned
                to 4 KiB, or whose length is not a multiple of it.

        Returns:
            A ticket for `wait`.

        Raises:
            MappingError: a slot is out of range or repeated; nothing was submitted.
            InvalidArgumentError: wrong dtype or shape, or a store is still using these rows; nothing was submitted.
            StoreError: the store is closed.
        """

    @abstractmethod
    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks.

        Args:
            slots: slots to read, int64 `[n]`, repeats allowed.
            rows: receive the blocks, uint8 `[n, bytes_per_block]`, C-contiguous, writable; None allocates them. The
                store may read directly into them, so do not use them until you have collected the ticket; see also
                `submit_write`. Rows of misses may keep their old content.

        Returns:
            A ticket for `wait`.

        Raises:
            MappingError: a slot is out of range; nothing was submitted.
            InvalidArgumentError: wrong dtype or shape; nothing was submitted.
            StoreError: the store is closed.
        """

    def submit_put(
        self,
        keys: Keys,  # noqa: ARG002 (a store with keys has its own)
        rows: NDArray[np.uint8],  # noqa: ARG002
        owners: Owners | None = None,  # noqa: ARG002
    ) -> int:
        """Start to store blocks under their keys, with rows as for `submit_write`.

        A key that already has a block keeps it and its tenant, since equal keys mean equal bytes. Other keys may be
        evicted.

        Args:
            keys: uint8 `[n, 32]` or 32 bytes each, as `blockyard.events.export_keys` returns them.
            rows: the blocks, uint8 `[n, bytes_per_block]`, on the CPU.
            owners: the blocks' tenants, for a store that `keeps_quotas`; None if the blocks count towards no quota. A
                block beyond its tenant's quota is a miss, `"refused"`.

        Returns:
            A ticket for `wait`. A block whose entry is `ok` survives the process, even if that is killed.

        Raises:
            InvalidArgumentError: wrong dtype or shape; nothing was submitted.
            StoreError: the store is closed, or has no keys.
        """
        raise no_keys_error()

    def submit_get(
        self,
        keys: Keys,  # noqa: ARG002 (a store with keys has its own)
        rows: NDArray[np.uint8] | None = None,  # noqa: ARG002
    ) -> int:
        """Start to read blocks by key.

        A key without a block is a miss, `"absent"`. After a failed read, this process may treat the key as absent for a
        few seconds; see `lacks`. A damaged block is deleted once a second read has found the same damage.

        Args:
            keys: as for `submit_put`; repeats are allowed.
            rows: as for `submit_read`.

        Returns:
            A ticket for `wait`.

        Raises:
            InvalidArgumentError: wrong dtype or shape; nothing was submitted.
            StoreError: the store is closed, or has no keys.
        """
        raise no_keys_error()

    def submit_delete(self, keys: Keys) -> int:  # noqa: ARG002 (a store with keys has its own)
        """Start to delete keys; calls after this one do not find them.

        Args:
            keys: as for `submit_put`; absent keys count as deleted.

        Returns:
            A ticket for `wait`. Later processes do not find a key whose entry is `ok` either, unless power fails.

        Raises:
            InvalidArgumentError: wrong dtype or shape; nothing was submitted.
            StoreError: the store is closed, or has no keys.
        """
        raise no_keys_error()

    def contains(self, keys: Keys) -> NDArray[np.bool_]:  # noqa: ARG002 (a store with keys has its own)
        """Return whether each key has a block whose write has finished, bool `[n]`.

        Never waits, and reads nothing: the block may be damaged. Only a successful read proves a hit. A store on a
        server may return False for a key that is new to this process, and look it up in the background: see `lacks`.
        """
        raise no_keys_error()

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a read of each key would be a miss now, bool `[n]`; if so, do not read it. Never waits.

        True while the store knows that a key has no block, for one second after the storage reported it absent, for two
        seconds after a transient read failure, and until a deletion has finished. While the storage does not answer,
        it may be True for all. If `contains` and `lacks` both return False, the key is not known yet: read it.
        """
        return np.zeros(len(keys), np.bool_)

    def forget(self, revision: str | None = None) -> None:  # noqa: ARG002 (a store with keys has its own)
        """Forget every key at once, in all processes, including keys that are being written.

        No block put before is found again. From then on, other processes that have the store open find and store
        nothing, `"forgotten"`, until each has called `forget` too: only that process knows which weights it computes
        with. Processes whose weights change together share blocks again if they pass the same revision.

        The time does not depend on the number of keys. Waits for the storage.

        Args:
            revision: names the weights that this process uses from now on, such as `"step-1800"`; `""` for the weights
                that the namespace names. The first process to name a revision forgets; later ones join it. None keeps
                the current name. If the weights change, name them: otherwise processes with other weights may find
                their blocks.

        Raises:
            StoreError: the storage did not confirm it, and this process finds and stores nothing until a call succeeds;
                or the store has no keys.

        Example:
            >>> import numpy as np
            >>> from blockyard.stores import open_store
            >>> url, options = "memory://a?size=1MiB", dict(bytes_per_block=4096, use="prefix")
            >>> with open_store(url, **options) as one, open_store(url, **options) as two:
            ...     one.forget("step-1800")
            ...     stored = one.wait(one.submit_put([bytes(32)], np.ones((1, 4096), np.uint8)))
            ...     before = two.wait(two.submit_get([bytes(32)])).reasons
            ...     two.forget("step-1800")
            ...     after = two.wait(two.submit_get([bytes(32)])).ok
            >>> before, after.tolist()
            (('forgotten',), [True])
        """
        raise no_keys_error()

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:  # noqa: ARG002 (a store with quotas has its own)
        """Limit the blocks of one tenant. Waits for the storage.

        The storage itself counts, atomically with each put from any process. If a tenant exceeds its quota, the store
        drops that tenant's blocks: those that no stored block follows in a prompt, the least recently used first. So a
        prompt longer than the quota keeps its beginning. Blocks put before the tenant had a quota may not count.

        The storage keeps the quota: it holds for later processes, too, and after `forget`.

        Args:
            tenant: 32 bytes, see `Owners`.
            num_blocks: maximum number of blocks; None for no limit.

        Raises:
            StoreError: the storage did not confirm it, or the store keeps no quotas.
        """
        raise quotaless()

    def quota(self, tenant: bytes) -> tuple[int, int] | None:  # noqa: ARG002 (a store with quotas has its own)
        """Return how many blocks count towards a tenant's quota, and the quota; None if there is no quota.

        Waits for the storage.

        Args:
            tenant: 32 bytes, see `Owners`.

        Raises:
            StoreError: the storage does not answer, or the store keeps no quotas.
        """
        raise quotaless()

    def event_fd(self) -> int:
        """Return a file descriptor that becomes readable when a ticket ends, until the next `poll`.

        The store owns it. A passed deadline does not make it readable, so wait on it with a timeout.
        """
        raise StoreError("the store has no event descriptor; call poll")

    @abstractmethod
    def poll(self) -> list[int]:
        """Return uncollected tickets that finished or passed their deadline since the last call.

        Never waits. Each ticket is reported once.
        """

    @abstractmethod
    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket. Waits until its batch has finished or been given up.

        Collect every ticket exactly once: it holds memory until then.

        Args:
            ticket: returned by a `submit_*` method.
            timeout: seconds; it can only shorten the ticket's own deadline, which grows with the bytes in flight.

        Returns:
            One entry for each slot or key, in the order of the batch. Blocks that missed the deadline are `"timeout"`.
            A read into given rows returns these rows.

        Raises:
            UnknownTicketError: the ticket was never issued or has been collected.
            OutOfMemoryError: not enough memory for the result; the ticket can still be collected.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the counters since the store was opened."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """Give up batches in flight and release the storage. Idempotent.

        Args:
            timeout: seconds to wait for calls in flight.

        Returns:
            False if calls were still running after the timeout; they are abandoned.
        """

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def no_keys_error() -> StoreError:
    """Return the error of a store without keys."""
    return StoreError("the store is swap space only and has no keys")


def check_quota(tenant: object, num_blocks: object = None) -> None:
    """Check the arguments of the quota methods.

    Raises:
        InvalidArgumentError: one of them is invalid.
    """
    if not isinstance(tenant, bytes) or len(tenant) != 32:
        raise InvalidArgumentError(f"tenant is {tenant!r:.100}, must be 32 bytes")
    if num_blocks is not None and not (isinstance(num_blocks, int) and 0 <= num_blocks < 1 << 32):
        raise InvalidArgumentError(f"num_blocks is {num_blocks!r:.100}, must be 0 to 2**32 - 1, or None")


def fails_since(stats: StoreStats, errors: int) -> bool:
    """Whether a store has stopped answering, or has only failed since `errors` of its operations had failed.

    An old error says nothing of the present: a store that fails still counts more, at least of its probes.
    """
    return stats.is_down or (stats.errors_in_a_row > 0 and stats.errors != errors)


def quotaless() -> StoreError:
    """Return the error of a store without quotas."""
    return StoreError("this store cannot keep quotas: a file:// store of one directory or a redis:// server can")


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
    codec: "Codec | None" = None,
    mac_key: "MacKey | None" = None,
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
