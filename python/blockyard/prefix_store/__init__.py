"""Saves cached blocks to an external store, and loads them for prompts of this or another process.

A prompt whose beginning may be in the store is *prefetched* before it is admitted:

    fetch = prefixes.prefetch(prompt)       # starts loading; never waits
    ...                                     # meanwhile, run steps
    if fetch.done:                          # loaded or given up: `lookup` and `allocate` now see all hits
        sequence = manager.allocate(prompt)

The bytes are read into staging rows and verified there. Only then do they get host blocks (device blocks if the host
keeps no copies) and become findable. A prefix ends at the first block that does not arrive by the prefetch's deadline.
"""

from blockyard.prefix_store.loads import Prefetch
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.prefix_store.store import PrefixStore

__all__ = ["Prefetch", "PrefixStore", "PrefixStoreStats"]
