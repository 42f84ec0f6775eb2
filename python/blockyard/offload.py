"""`OffloadManager`: tracks the chunks of a host cache, for the offload connector of an engine with its own manager."""

from blockyard._core import OffloadManager, PreparedStore

__all__ = ["OffloadManager", "PreparedStore"]
