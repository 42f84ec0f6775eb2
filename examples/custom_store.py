"""A store of your own: blocks in an SQLite database. Run it with `python examples/custom_store.py`."""

import sqlite3
import tempfile
from contextlib import closing

import numpy as np

from blockyard import KVCache, KVLayout
from blockyard.stores import StoreURL, ThreadedStore, register


@register("sqlite")
class SQLiteStore(ThreadedStore):
    """Blocks as rows of a table, in the database that `sqlite:///path` names."""

    num_slots, threads = 1000, 1

    def put(self, keys, rows):
        """Store blocks under their keys; an exception is a miss."""
        with closing(sqlite3.connect(StoreURL.parse(self.url).path)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS blocks (key PRIMARY KEY, bytes)")
            database.executemany("REPLACE INTO blocks VALUES (?, ?)", zip(keys, rows, strict=True))
        return np.ones(len(keys), dtype=bool)

    def get(self, keys, out):
        """Read blocks by their keys."""
        with closing(sqlite3.connect(StoreURL.parse(self.url).path)) as database:
            for key, row in zip(keys, out, strict=True):
                (row.data[:],) = database.execute("SELECT bytes FROM blocks WHERE key = ?", [key]).fetchone()
        return np.ones(len(keys), dtype=bool)


layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
with (
    tempfile.TemporaryDirectory() as folder,
    KVCache(layout, device_blocks=8, external=f"sqlite://{folder}/kv") as cache,
):
    sequence = cache.manager.allocate(100)
