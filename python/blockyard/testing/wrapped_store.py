"""`WrappedStore`: what stores that wrap another one pass on unchanged."""

from blockyard.stores.base import ExternalStore, Use
from blockyard.types import StoreStats

__all__ = ["WrappedStore"]


class WrappedStore(ExternalStore):
    """Forwards the calls that concern the whole store.

    Args:
        inner: the wrapped store.
    """

    def __init__(self, inner: ExternalStore) -> None:
        self._inner = inner

    @property
    def num_slots(self) -> int:
        """Number of blocks that the inner store can hold."""
        return self._inner.num_slots

    @property
    def bytes_per_block(self) -> int:
        """Bytes per block."""
        return self._inner.bytes_per_block

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the inner store can be used for."""
        return self._inner.uses

    @property
    def is_closed(self) -> bool:
        """Whether the inner store is closed."""
        return self._inner.is_closed

    @property
    def max_blocks_in_flight(self) -> int | None:
        """Maximum number of blocks in flight and in uncollected results, None for no limit."""
        return self._inner.max_blocks_in_flight

    @property
    def keeps_quotas(self) -> bool:  # type: ignore[override]
        """Whether the inner store keeps quotas."""
        return self._inner.keeps_quotas

    def stats(self) -> StoreStats:
        """Return the counters of the inner store."""
        return self._inner.stats()

    def close(self, timeout: float = 5.0) -> bool:
        """Close the inner store."""
        return self._inner.close(timeout)
