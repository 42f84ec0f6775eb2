"""`ThreadedStore`: an external store from functions that may block. The base of plug-ins and of stores on servers.

| module | state and rules |
|---|---|
| `store` | a storage's functions, the names of blocks, how batches use them, and the threads that run these |
| `batches` | tickets, order, deadlines and memory of batches, and whether the storage answers |
| `known_keys` | which keys have a block and which do not |
| `epochs` | which weights the stored blocks belong to |
| `runtime` | clock, locks, threads and randomness: the system's, or a simulation's |
| `call_pool` | concurrent calls, for storage that serves one block per call |
| `value_format` | the bytes that are stored for a block |
"""

from blockyard.stores.threaded.store import ThreadedStore

__all__ = ["ThreadedStore"]
