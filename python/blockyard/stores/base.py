"""What every external store offers, and how one is opened by URL.

A store is swap space, where blocks live in numbered slots that die with the process; or a prefix store, where they are
found by key and outlive it. It is written and read in batches that are submitted and collected by ticket, and a block
that does not come back whole is a miss, never an exception.

A plug-in subclasses `ThreadedStore`, whose functions may block, and passes `blockyard.testing.store_suite.StoreSuite`.
It takes its URL scheme by `register`, or by an entry point of the group `blockyard.stores` that names a function like
`open_store`. `ExternalStore` is what engines see of any store: only `wait`, `forget`, the quotas and `close` wait.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, StoreStats
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError, StoreURLError
from blockyard.stores.url import public_url, require_room, require_text
from blockyard.stores.value import is_damage
from blockyard.workers import RateLimit

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
}

Keys: TypeAlias = NDArray[np.uint8] | Sequence[bytes]
Use: TypeAlias = Literal["swap", "prefix"]
Maker = TypeVar("Maker", bound=Callable[..., "ExternalStore"])
_registered: dict[str, Callable[..., "ExternalStore"]] = {}
_log = logging.getLogger("blockyard.stores")


class Owners(NamedTuple):
    """Whose blocks are, for the quotas of a store.

    Attributes:
        tenants: the tenant of each block, uint8 `[n, 32]`: SHA-256 of its salt, zeros for prompts without a salt.
        parents: the key of the block before each in its prompt, uint8 `[n, 32]`; zeros for the first.
    """

    tenants: NDArray[np.uint8]
    parents: NDArray[np.uint8]


class ExternalStore(ABC):
    """Storage for blocks: swap space that is addressed by slot, or a prefix store that is addressed by key.

    The base of plug-ins is `ThreadedStore`. This one is for objects that stand before a store, such as those of
    `blockyard.testing.faults`.

    Batches run in the background. Operations on one slot or key keep the order in which they were submitted: a read
    sees the last write submitted before it. Submitting never waits for the storage; a batch beyond the store's memory
    for blocks in flight is refused block by block, as misses with the reason `"queue_full"`.

    A prefix store keeps blocks until it needs their room, evicts what was not used for longest, and finds its blocks
    again when it is opened under the same namespace. A store that has no keys raises `StoreError` at those methods.

    Attributes:
        keeps_quotas: whether `set_quota` works. If not, nothing passes `owners` to the store.
    """

    keeps_quotas: bool = False

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Blocks that the store can hold; in swap space its slots, numbered from 0."""

    @property
    @abstractmethod
    def bytes_per_block(self) -> int:
        """Bytes that one slot holds for the caller."""

    @abstractmethod
    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks.

        The store may take the bytes straight from `rows`: they must not change until the ticket is collected. A block
        whose row changes is a miss when it is read. The row of a block that ends as `"timeout"` or `"closed"` is the
        store's for longer, as a thread may hang: take other memory for the next batch. The store keeps the array alive.

        Args:
            slots: where to, int64 `[n]`, no repeats.
            rows: the blocks, uint8 `[n, bytes_per_block]`, on the CPU. The file store copies rows that do not begin on
                a page of 4 KiB, or are not whole pages long.

        Returns:
            A ticket for `wait`.

        Raises:
            MappingError: a slot is out of range or repeated; nothing was submitted.
            InvalidArgumentError: wrong dtype or shape, or a store still uses these rows; nothing was submitted.
            StoreError: the store is closed.
        """

    @abstractmethod
    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks.

        Args:
            slots: where from, int64 `[n]`, repeats allowed.
            rows: for the blocks, uint8 `[n, bytes_per_block]`, C-contiguous, writable; new ones if None. The store may
                read straight into them, and nobody else may use them until the ticket is collected; for the rest see
                `submit_write`. Rows of misses may be left as they are.

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

        A key that is there already keeps its block, since equal keys stand for equal bytes. Other keys may be evicted.

        Args:
            keys: uint8 `[n, 32]` or 32 bytes each, as `blockyard.events.export_keys` gives them.
            rows: the blocks, uint8 `[n, bytes_per_block]`, on the CPU.
            owners: whose the blocks are, for a store that `keeps_quotas`; None for blocks that count towards no quota.
                A block beyond its tenant's quota is a miss, `"refused"`.

        Returns:
            A ticket for `wait`. A block whose entry is `ok` outlives the process, however that ends.

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

        A key without a block is a miss, `"absent"`. A damaged block is deleted. A key whose block does not come for a
        reason that passes may be absent in this process for a few seconds, see `lacks`.

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
            keys: as for `submit_put`; those that are absent are deleted already.

        Returns:
            A ticket for `wait`. A key whose entry is `ok` is not found by later processes either, unless power fails.

        Raises:
            InvalidArgumentError: wrong dtype or shape; nothing was submitted.
            StoreError: the store is closed, or has no keys.
        """
        raise no_keys_error()

    def contains(self, keys: Keys) -> NDArray[np.bool_]:  # noqa: ARG002 (a store with keys has its own)
        """Return whether each key has a block whose write has landed, bool `[n]`.

        Never waits, and reads nothing: a block can be damaged. Only a read that comes back proves a hit. A store that
        must ask a server may say False for a key that it meets for the first time, and know better soon: see `lacks`.
        """
        raise no_keys_error()

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a read of each key is known to be a miss now, bool `[n]`; then do not read it. Never waits.

        A key is lacked while the store knows that it has no block; for a second after the storage has said so; for two
        after a read that failed for a reason that passes, and until `delete` has ended. While the storage does not
        answer, all may be lacked. A key that is neither there nor lacked is not known yet: read it.
        """
        return np.zeros(len(keys), np.bool_)

    def forget(self, revision: str | None = None) -> None:  # noqa: ARG002 (a store with keys has its own)
        """Forget every key at once, in all processes, also those that are being written.

        Nothing that was put before is found again. Other processes that have the store open find and store nothing from
        then on, `"forgotten"`, until each has called `forget` too: only it knows which weights it computes with.
        Processes whose weights change together find each other's blocks again by the name of their revision.

        It takes the same time however many keys there are, and waits for the storage.

        Args:
            revision: names the weights that this process computes with from now on, such as `"step-1800"`; `""` for
                those that the namespace names. The first process that names a revision forgets; the next ones join it.
                None: the weights have the name they had. If they do change, name them, or processes that compute with
                others may find their blocks.

        Raises:
            StoreError: the storage did not confirm it. This process finds and stores nothing until a call succeeds.
                Or the store has no keys.

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

        The storage counts, in one step with each put, whoever makes it. Beyond its quota a tenant's own blocks are
        dropped: first those that no stored block follows in a prompt, and of these the least recently used. So the
        beginning of a prompt that is longer than its quota stays. Blocks that were put before the tenant had a quota
        may not count.

        Args:
            tenant: 32 bytes, see `Owners`.
            num_blocks: most blocks; None for no limit.

        Raises:
            StoreError: the storage did not confirm it, or the store keeps no quotas.
        """
        raise quotaless()

    def quota(self, tenant: bytes) -> tuple[int, int] | None:  # noqa: ARG002 (a store with quotas has its own)
        """Return the blocks that count towards a tenant's quota, and the quota; None without one.

        Waits for the storage.

        Args:
            tenant: 32 bytes, see `Owners`.

        Raises:
            StoreError: the storage does not answer, or the store keeps no quotas.
        """
        raise quotaless()

    def event_fd(self) -> int:
        """Return a file descriptor that is readable while tickets have ended since the last `poll`.

        It belongs to the store. Deadlines do not make it readable: wait on it with a timeout.
        """
        raise StoreError("the store has no event descriptor; call poll")

    @abstractmethod
    def poll(self) -> list[int]:
        """Return tickets that finished or passed their deadline since the last call, and are not collected yet.

        Never waits. Each ticket is reported once.
        """

    @abstractmethod
    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket, waiting until it is finished or given up.

        Every ticket must be collected, once: until then it holds memory.

        Args:
            ticket: from a call `submit_*`.
            timeout: seconds; it can only shorten the ticket's own deadline, which grows with the bytes under way.

        Returns:
            One entry for each slot or key, in the order of the batch. What missed the deadline is `"timeout"`. A read
            that was given rows returns these.

        Raises:
            UnknownTicketError: the ticket was never issued or has been collected.
            OutOfMemoryError: there is no memory for the result; the ticket can still be collected.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the counters since the store was opened."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """Give up what is under way and release the storage; closing again does nothing.

        Args:
            timeout: seconds to wait for storage that answers late.

        Returns:
            False if storage did not answer in time and was left behind.
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
    """Refuse what is no tenant or no number of blocks.

    Raises:
        InvalidArgumentError: one of them is wrong.
    """
    if not isinstance(tenant, bytes) or len(tenant) != 32:
        raise InvalidArgumentError(f"tenant is {tenant!r:.100}, must be 32 bytes")
    if num_blocks is not None and not (isinstance(num_blocks, int) and 0 <= num_blocks < 1 << 32):
        raise InvalidArgumentError(f"num_blocks is {num_blocks!r:.100}, must be 0 to 2**32 - 1, or None")


def quotaless() -> StoreError:
    """Return the error of a store without quotas."""
    return StoreError("this store cannot keep quotas: a file:// store of one directory or a redis:// server can")


class FailureLog:
    """Logs that a store fails, and that it works again: one line a minute and cause, in the logger `blockyard.stores`.

    Calls only take note, so that one can hold a lock; `flush` writes the lines.

    Args:
        clock: returns the time in seconds; the machine's if None.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._limit = RateLimit(clock)
        self._failures = 0  # since the store worked
        self._is_known = False  # whether one of them was logged
        self._lines: deque[str | int] = deque()  # a failure's cause, or how many there were before it worked again

    def failed(self, cause: str) -> None:
        """Note a failure.

        Args:
            cause: one line; lines of one cause begin alike up to the first colon.
        """
        self._failures += 1
        if self._limit.passes(cause.partition(":")[0]):
            self._is_known = True
            self._lines.append(cause)

    def worked(self) -> None:
        """Note that a batch was carried out."""
        if self._failures:
            if self._is_known:
                self._lines.append(self._failures)
            self._failures, self._is_known = 0, False

    def flush(self, store: object) -> None:
        """Log what was noted. `store` is the name in the log line. Thread-safe."""
        while self._lines:
            with suppress(IndexError):  # another thread has taken it
                line = self._lines.popleft()
                if isinstance(line, str):
                    fields: dict[str, object] = {"store": str(store), "cause": line}
                    _log.warning("%s fails, blocks are misses: %s", store, line, extra=fields)
                else:
                    fields = {"store": str(store), "failures": line}
                    _log.warning("%s works again after %d failures", store, line, extra=fields)


class MissLog:
    """Logs that blocks of a store are damaged or refused: one line a minute and reason, in `blockyard.stores`.

    Args:
        store: the name in the log line.
    """

    def __init__(self, store: object) -> None:
        self._store = store
        self._limit = RateLimit()

    def note(self, reasons: Iterable[str]) -> None:
        """Take note of why blocks of a batch are misses."""
        store = self._store
        for reason, count in Counter(reasons).items():
            if not ((is_damage(reason) or reason == "refused") and self._limit.passes(reason)):
                continue
            fields = {"store": str(store), "blocks": count, "reason": reason}
            if reason == "refused":
                _log.warning("%s refuses %d blocks, for instance beyond a quota", store, count, extra=fields)
            else:
                _log.warning("%s has %d damaged blocks, which are misses: %s", store, count, reason, extra=fields)


class Opener(Protocol):
    """What an entry point of the group `blockyard.stores` names."""

    def __call__(self, url: str, *, bytes_per_block: int, num_slots: int | None, namespace: bytes) -> ExternalStore:
        """Open the store that the URL names; see `open_store`. It is given `use` only if that is not `"swap"`."""


def register(scheme: str) -> Callable[[Maker], Maker]:
    """Give a class of stores a URL scheme in this process: `open_store` then opens it. Decorates the class.

    The class is called with `(url, *, bytes_per_block, namespace)`, as that of a `ThreadedStore`; its `num_slots` says
    how many blocks it holds.

    Args:
        scheme: what stands before the colon: lower-case letters, digits and `+-.`, a letter first.

    Raises:
        InvalidArgumentError: the scheme is malformed, or belongs to another store.
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise InvalidArgumentError(f"scheme is {scheme!r}, must be lower-case letters, digits and +-., a letter first")

    def decorate(make: Maker) -> Maker:
        other = _registered.get(scheme, make)
        # A module or a cell of a notebook that runs again defines its class again.
        if scheme in _BUILT_IN or _full_name(other) != _full_name(make):
            raise InvalidArgumentError(f"scheme is {scheme!r}, which another store has")
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
        url: `file:///dir?size=2GiB`, see `blockyard.stores.file`; `redis://host?size=2GiB`, also
            written `valkey://`, see `blockyard.stores.redis`; `s3://bucket?size=1TiB`, see
            `blockyard.stores.object_store`; or a plug-in's scheme, see `register`.
        bytes_per_block: bytes of one block, all layers.
        num_slots: blocks to hold; as many as fit if None.
        namespace: 32-byte digest of all that decides the bytes, see `store_namespace`; a block of another namespace is
            a miss.
        use: `"swap"` for blocks that are addressed by slot and die with the process, `"prefix"` for blocks that are
            found by key and outlive it.
        codec: encodes blocks before they are stored: compresses, encrypts or quantises them.
        mac_key: 32 bytes, or the path of a file with them, for storage that is not trusted: a value that was not
            written with this key is a miss. Never part of a URL or a message.
        revision: names the weights that compute the blocks of a prefix store, if they are not those that the namespace
            names; see `ExternalStore.forget`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong.
        StoreFullError: the storage, or the size in the URL, cannot hold what was asked for.
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
    for name, value in (("bytes_per_block", bytes_per_block), ("num_slots", num_slots)):
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} is {value}, must be at least 1")
    if len(namespace) != 32:
        raise InvalidArgumentError(f"namespace has {len(namespace)} bytes, must have 32")
    scheme = _scheme(url)
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


def _checked(store: ExternalStore, url: str, size: int, wanted: int, use: Use) -> ExternalStore:
    """Refuse a store that is too small, has other blocks or has no keys."""
    url = public_url(url)
    error: StoreError | None = None
    if store.bytes_per_block != size:
        found = f"{type(store).__name__} has blocks of {store.bytes_per_block} bytes, must have {size}"
        raise StoreError(f"{url!r}: {found}: its __init__ must pass its arguments on to super().__init__")
    if store.num_slots < wanted:
        error = StoreFullError(f"{url!r}: the store has {store.num_slots} slots, must have at least {wanted}")
    elif use == "prefix":
        try:
            store.contains([])
        except StoreError:
            error = StoreError(f"{url!r}: the store has no keys, use must be 'swap'")
    if error is not None:
        store.close()
        raise error
    return store


def check_url(url: str) -> None:
    """Refuse a URL that `open_store` would refuse for how it is written, as far as that shows without a plug-in's code.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong.
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
        raise StoreURLError(f"{shown!r}: no store has the scheme {scheme!r}; there are {', '.join(sorted(known))}")
    return scheme
