"""The slabs of a file store."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from blockyard._core import read_slab, wipe_slab
from blockyard.errors import StoreError
from blockyard.stores.file import read_url, text_name
from blockyard.tools.store.contents import DIGITS, Contents, DamagedBlock, StoredPage, read_text
from blockyard.types import SlabContents

__all__ = ["Slabs", "open_url"]

_HEADER_BYTES = 4096
_SLAB = "blockyard-prefix.slab"


class Slabs(Contents):
    """The slab in each directory of a URL.

    Args:
        directories: the directories.
        payloads: whether to read each block.
    """

    def __init__(self, directories: tuple[str, ...], *, payloads: bool) -> None:
        super().__init__()
        self._directories = directories
        self._payloads = payloads
        self.facts = dict.fromkeys(("slots", "empty", "forgotten", "replaced"), 0)

    def pages(self) -> Iterator[StoredPage]:
        """Yield the blocks of each slab, by namespace."""
        for directory in self._directories:
            found = read_slab(directory, payloads=self._payloads)
            self.facts["slots"] += found.num_slots
            for name in ("empty", "forgotten", "replaced"):
                self.facts[name] += getattr(found, name)
            self.damaged += [
                DamagedBlock(f"{found.path} slot {slot}", reason, (directory, slot, generation))
                for slot, generation, reason in found.damaged
            ]
            yield from _pages_of(directory, found)

    def parts(self, namespace: str) -> dict[str, str]:
        """Read the parts from the first directory that has them."""
        for directory in self._directories:
            path = Path(directory, text_name(namespace))
            if path.is_file() and not path.is_symlink():
                return read_text(path.read_bytes())
        return {}

    def remove(self, places: list[Any]) -> int:
        """Wipe slots; raises `StoreError` if a store has the slab open."""
        slots: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for directory, slot, generation in places:
            slots[directory].append((slot, generation))
        return sum(wipe_slab(directory, found) for directory, found in slots.items())


def open_url(url: str, *, payloads: bool) -> Slabs:
    """Look into a file store.

    Raises:
        StoreError: a directory has no store. Those in its folders are named: adapters create one for each rank or use.
    """
    found = read_url(url).directories
    for directory in map(Path, found):
        if not directory.joinpath(_SLAB).exists():
            inner = sorted(path.parent for path in directory.glob(f"*/{_SLAB}"))
            those = f": look into {', '.join(f'file://{quote(str(path))}' for path in inner)}" if inner else ""
            raise StoreError(f"there is no store in {directory}{those}")
    return Slabs(found, payloads=payloads)


def _pages_of(directory: str, found: SlabContents) -> Iterator[StoredPage]:
    stride = _HEADER_BYTES + -(-found.bytes_per_block // _HEADER_BYTES) * _HEADER_BYTES
    ages = np.maximum(time.time() - found.generations / 1e9, 0.0)
    for namespace in np.unique(found.namespaces, axis=0):
        at = np.flatnonzero((found.namespaces == namespace).all(axis=1))
        slots, generations = found.slots[at].tolist(), found.generations[at].tolist()
        yield StoredPage(
            namespace.tobytes().hex()[:DIGITS],
            [(directory, slot, generation) for slot, generation in zip(slots, generations, strict=True)],
            np.full(len(at), stride, np.int64),
            ages[at],
            [tenant.tobytes().hex()[:DIGITS] if tenant.any() else "" for tenant in found.tenants[at]],
        )
