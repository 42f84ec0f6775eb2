"""Damage to stored blocks, on purpose: what a bad disk does, for tests and for `blockyard demo --corrupt`.

The file of a live store is changed behind its back. Whatever is changed, the store must report a miss.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError

__all__ = ["PARTS", "corrupt_slots", "flip_bytes"]

HEADER_BYTES = 4096
PARTS: dict[str, tuple[int, int]] = {
    "magic": (0, 8),
    "version": (8, 4),
    "namespace": (16, 32),
    "key": (48, 32),
    "slot": (80, 8),
    "generation": (88, 8),
    "length": (96, 8),
    "payload_checksum": (104, 16),
    "header_padding": (120, 3960),
    "header_checksum": (4080, 16),
}
"""Where the fields of a slot's header lie: offset and length in bytes (`docs/decisions/0002-slab-header.md`)."""


def corrupt_slots(
    store: object, slots: Sequence[int] | NDArray[np.int64], *, part: str = "payload", flips: int = 1, seed: int = 0
) -> None:
    """Flip bytes of chosen slots on disk, in the file of a live store.

    Wait for the writes to these slots first, or they will write over the damage.

    Args:
        store: a file tier, as `blockyard.tiers.open_store` returns it for `file://`.
        slots: which; each is damaged once, however often it is named.
        part: `"payload"` or a field of the header, see `PARTS`.
        flips: bytes to change in each slot, at most as many as the part has.
        seed: of the positions and of the changes.

    Raises:
        InvalidArgumentError: the store has no slab file, or there is no such part.
        MappingError: a slot is out of range.
        OSError: the file is gone or cannot be written.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from blockyard.tiers import open_store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_store(f"file://{folder}?size=1MiB", bytes_per_block=4096) as store:
        ...         slots = np.array([3, 5])
        ...         _ = store.wait(store.submit_write(slots, np.ones((2, 4096), np.uint8)))
        ...         corrupt_slots(store, [5])
        ...         read = store.wait(store.submit_read(slots))
        >>> read.ok.tolist(), read.reasons
        ([True, False], ('', 'payload_checksum'))
    """
    if not isinstance(store, SlabStore):
        raise InvalidArgumentError(f"store is a {type(store).__name__}, only a SlabStore has a file to damage")
    parts = {**PARTS, "payload": (HEADER_BYTES, store.bytes_per_block)}
    if part not in parts:
        raise InvalidArgumentError(f"part is {part!r}, must be one of {', '.join(parts)}")
    start, length = parts[part]
    random = np.random.default_rng(seed)
    offsets = [store.slot_offset(int(slot)) + start for slot in np.unique(np.asarray(slots, dtype=np.int64))]
    for offset in offsets:
        places = random.choice(length, size=min(flips, length), replace=False)
        flip_bytes(store.path, (offset + places).tolist(), masks=random.integers(1, 256, places.size).tolist())


def flip_bytes(path: Path, offsets: Sequence[int], *, masks: Sequence[int]) -> None:
    """Change single bytes of a file, and see to it that they reach the disk.

    Args:
        path: the file; symbolic links are not followed.
        offsets: of the bytes to change.
        masks: what each is combined with by exclusive or, 1 to 255, so that it always changes.

    Raises:
        OSError: the file cannot be opened, or ends before an offset.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for offset, mask in zip(offsets, masks, strict=True):
            before = os.pread(descriptor, 1, offset)
            if not before:
                raise OSError(f"{path} ends before byte {offset}")
            os.pwrite(descriptor, bytes([before[0] ^ mask]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
