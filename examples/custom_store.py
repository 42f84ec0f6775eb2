"""A store of your own: blocks in an SQLite database. Run it with `python examples/custom_store.py`.

`KVCache(layout, device_blocks=64, external="sqlite:///path/kv")` opens it in the same way.
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

    def put(self, keys, rows):
        """Store blocks under their keys. An exception is a miss."""
        with closing(sqlite3.connect(self.url.removeprefix("sqlite://"))) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS blocks (key PRIMARY KEY, bytes)")
            database.executemany("REPLACE INTO blocks VALUES (?, ?)", zip(keys, rows, strict=True))
        return np.ones(len(keys), dtype=bool)

    def get(self, keys, out):
        """Read blocks by their keys."""
        with closing(sqlite3.connect(self.url.removeprefix("sqlite://"))) as database:
            for key, row in zip(keys, out, strict=True):
                row.data[:] = database.execute("SELECT bytes FROM blocks WHERE key = ?", [key]).fetchone()[0]
        return np.ones(len(keys), dtype=bool)


with tempfile.TemporaryDirectory() as folder, open_store(f"sqlite://{folder}/kv", bytes_per_block=4096) as store:
    blocks = np.random.default_rng().integers(0, 256, (100, 4096), dtype=np.uint8)
    assert store.wait(store.submit_write(np.arange(100), blocks)).ok.all()
    assert np.array_equal(store.wait(store.submit_read(np.arange(100))).rows, blocks)
    print(f"{len(blocks)} blocks came back from SQLite")
