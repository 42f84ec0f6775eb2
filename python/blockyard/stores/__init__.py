"""External stores: storage beyond host memory, opened by URL. `base` defines the interface; each storage has a module.

`ThreadedStore` turns two functions, `put` and `get`, into a store; `register` gives it a URL scheme.
"""

from blockyard.stores.base import (
    Completion,
    ExternalStore,
    Owners,
    StoreStats,
)
from blockyard.stores.codec import Codec
from blockyard.stores.namespace import store_namespace
from blockyard.stores.opening import open_store, register
from blockyard.stores.threaded import ThreadedStore
from blockyard.stores.url import StoreURL, parse_size

__all__ = [
    "Codec",
    "Completion",
    "ExternalStore",
    "Owners",
    "StoreStats",
    "StoreURL",
    "ThreadedStore",
    "open_store",
    "parse_size",
    "register",
    "store_namespace",
]
