"""`ThreadedStore`: an external store from functions that may block. The base of plug-ins and of stores on servers.

| module | state and rules |
|---|---|
| `store` | the functions of a storage, names, and what a batch does with them |
| `batches` | tickets, deadlines, memory and threads |
| `order` | which batch may run |
| `breaker` | whether the storage answers |
| `known_keys` | which keys are there, which are not |
| `epochs` | under which weights blocks count |
| `runtime` | clock, locks, threads and chance: the machine's, or a simulation's |
| `call_pool` | calls at once, for storage that serves one block a call |
| `value_format` | the bytes that are stored for a block |
"""

from blockyard.stores.threaded.store import ThreadedStore

__all__ = ["ThreadedStore"]
