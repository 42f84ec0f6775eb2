"""`ThreadedStore`: an external store from functions that may block. The base of plug-ins and of stores on servers.

| module | state and rules |
|---|---|
| `storage` | a storage's functions, which plug-ins and servers have |
| `store` | tickets and threads, blocks in slots, and the breaker |
| `batches` | tickets, order, deadlines and memory of batches, and whether the storage answers |
| `keyed_blocks` | blocks by key: their names under an epoch, and how batches use them |
| `known_keys` | which keys have a block and which do not |
| `epochs` | which weights the stored blocks belong to |
| `runtime` | clock, locks, threads and randomness: the system's, or a simulation's |
| `call_pool` | concurrent calls, for storage that serves one block per call |
| `stored_values` | the bytes that are stored for a block, and how they are put and got |
"""

from blockyard.stores.threaded.store import ThreadedStore

__all__ = ["ThreadedStore"]
