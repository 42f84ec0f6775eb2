"""The interface of external stores.

A store is either swap space or a prefix store. In swap space, blocks live in numbered slots that die with the process;
in a prefix store, blocks are found by key and outlive the process. Reads and writes are batches: you submit one, and
collect it by its ticket. A block that does not come back intact is a miss, never an exception.

A plug-in subclasses `ThreadedStore`, whose functions may block, and passes `blockyard.testing.store_suite.StoreSuite`.
Engines see every store as an `ExternalStore`. Only `wait`, `forget`, `close` and the quota methods block.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.types import StoreStats

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Completion", "ExternalStore", "Owners", "StoreStats"]

Keys: TypeAlias = NDArray[np.uint8] | Sequence[bytes]
Use: TypeAlias = Literal["swap", "prefix"]
SLOWEST: Final = 16e6
"""Bytes per second that deadlines allow for: slower storage causes misses."""


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
