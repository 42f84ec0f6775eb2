"""External tiers: storage beyond host memory, opened by URL. `base` has the interface, each other file one storage."""

from blockyard.tiers.base import Completion, ExternalStore, TierStats, open_store

__all__ = ["Completion", "ExternalStore", "TierStats", "open_store"]
