"""Cached blocks go to an external store, and prompts get them back from it, in this process or another.

A prompt that may have its beginning in the store is *prefetched* before it is admitted:

    fetch = prefixes.prefetch(prompt)       # starts; never waits
    ...                                     # steps go on
    if fetch.done:                          # loaded, or given up: `lookup` and `allocate` tell the truth
        sequence = manager.allocate(prompt)

The bytes are read into staging rows and checked there. Only then do they get host blocks (device blocks where the host
keeps no copies) and can be found. A prefix ends at the first block that does not come before its prefetch's deadline.
"""

from blockyard.prefix_store.loads import Prefetch
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.prefix_store.store import PrefixStore

__all__ = ["Prefetch", "PrefixStore", "PrefixStoreStats"]
