"""Damage on purpose: it hits exactly the bytes that it names."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, MappingError
from blockyard.testing.faults import PARTS, FailingStore, corrupt_slots, flip_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlabStore]:
    with SlabStore(tmp_path, bytes_per_block=5000, num_slots=8) as store:
        slots = np.arange(8)
        store.wait(store.submit_write(slots, np.full((8, 5000), 7, np.uint8)))
        yield store


def changed(store: SlabStore, before: bytes) -> list[int]:
    return np.flatnonzero(np.frombuffer(before, np.uint8) != np.fromfile(store.path, np.uint8)).tolist()


@pytest.mark.parametrize("part", ["payload", *PARTS])
def test_only_the_chosen_part_of_the_chosen_slots_changes(store: SlabStore, part: str):
    before = store.path.read_bytes()
    corrupt_slots(store, [5, 2, 5], part=part, flips=3)
    start, length = {**PARTS, "payload": (4096, 5000)}[part]
    places = changed(store, before)
    assert len(places) == 6
    for slot, hits in ((2, places[:3]), (5, places[3:])):
        first = store.slot_offset(slot) + start
        assert all(first <= hit < first + length for hit in hits)


def test_the_same_seed_does_the_same_damage(store: SlabStore):
    before = store.path.read_bytes()
    corrupt_slots(store, [1, 2], seed=4)
    assert changed(store, before)
    corrupt_slots(store, [1, 2], seed=4)
    assert not changed(store, before)


def test_parts_cover_the_header_but_for_the_reserved_bytes():
    covered = sorted(byte for start, length in PARTS.values() for byte in range(start, start + length))
    assert covered == [byte for byte in range(4096) if not 12 <= byte < 16]


def test_what_cannot_be_damaged_is_refused(store: SlabStore, tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="part is 'tail', must be one of magic"):
        corrupt_slots(store, [1], part="tail")
    with pytest.raises(MappingError, match="slot 8 is out of range"):
        corrupt_slots(store, [1, 8])
    with pytest.raises(InvalidArgumentError, match="store is a dict"):
        corrupt_slots({}, [1])
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(OSError, match="ends before byte 3"):
        flip_bytes(tmp_path / "short", [3], masks=[1])
    (tmp_path / "link").symlink_to(tmp_path / "short")
    with pytest.raises(OSError, match="symbolic links"):
        flip_bytes(tmp_path / "link", [0], masks=[1])


def test_an_unknown_fault_is_refused_and_changes_nothing(store: SlabStore):
    failing = FailingStore(store)
    failing.fault = "hang"
    with pytest.raises(
        InvalidArgumentError, match=r"fault is 'refused', must be one of \['', 'lose', 'refuse', 'hang'\]"
    ):
        failing.fault = "refused"  # type: ignore[assignment]
    assert failing.fault == "hang"
