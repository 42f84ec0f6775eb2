"""External stores: storage beyond host memory, opened by URL. `base` has the interface, each other file one storage."""

from blockyard.stores.base import Completion, ExternalStore, StoreStats, StoreURL, open_store, parse_size

__all__ = ["Completion", "ExternalStore", "StoreStats", "StoreURL", "open_store", "parse_size"]
