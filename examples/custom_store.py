"""A store of your own: blocks in an SQLite database. Run it with `python examples/custom_store.py`.

`KVCache(layout, device_blocks=64, swap_store="sqlite:///path/kv")` opens it in the same way.
"""

import sqlite3
import tempfile
from contextlib import closing

import numpy as np

from blockyard.stores import ThreadedStore, open_store, register


@register("sqlite")
class SQLiteStore(ThreadedStore):
    """Blocks as rows of a table, in the database that `sqlite:///path` names."""

    num_slots, threads = 1000, 1

    def connect(self):
        """Open the database."""
        database = sqlite3.connect(self.url.removeprefix("sqlite://"))
        database.execute("CREATE TABLE IF NOT EXISTS blocks (key PRIMARY KEY, bytes)")
        return closing(database)

    def put(self, keys, rows):
        """Store blocks under their keys. An exception is a miss."""
        with self.connect() as database, database:
            database.executemany("REPLACE INTO blocks VALUES (?, ?)", zip(keys, rows, strict=True))
        return np.ones(len(keys), dtype=bool)

    def get(self, keys, out):
        """Read blocks by their keys; False for those that are not there."""
        with self.connect() as database:
            found = [database.execute("SELECT bytes FROM blocks WHERE key = ?", [key]).fetchone() for key in keys]
        for block, row in zip(found, out, strict=True):
            if block is not None and len(block[0]) == len(row):
                row.data[:] = block[0]
        return np.array([block is not None for block in found], dtype=bool)


with tempfile.TemporaryDirectory() as folder, open_store(f"sqlite://{folder}/kv", bytes_per_block=4096) as store:
    blocks = np.random.default_rng().integers(0, 256, (100, 4096), dtype=np.uint8)
    assert store.wait(store.submit_write(np.arange(100), blocks)).ok.all()
    assert np.array_equal(store.wait(store.submit_read(np.arange(100))).rows, blocks)
    print(f"{len(blocks)} blocks came back from SQLite")
