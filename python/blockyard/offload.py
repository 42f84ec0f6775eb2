"""A host cache below an engine's own block manager: tracks which chunks hold which keys, for its offload connector."""

from blockyard._core import OffloadManager, PreparedStore

__all__ = ["OffloadManager", "PreparedStore"]
