"""Rows that are lent to the file store: read and written in place, and whose they are."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError
from blockyard.stores.file import open_file

WIDTH = 3 * 4096
SLOTS = np.array([5, 6, 7, 1])


def on_pages(count: int, seed: int | None = None, width: int = WIDTH, shift: int = 0) -> NDArray[np.uint8]:
    """Rows that begin on a page, or so many bytes behind one."""
    whole = np.zeros(count * width + 8192, dtype=np.uint8)
    start = -whole.ctypes.data % 4096 + shift
    rows = whole[start : start + count * width].reshape(count, width)
    if seed is not None:
        rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8)
    return rows


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlabStore]:
    with open_file(f"file://{tmp_path}", bytes_per_block=WIDTH, num_slots=16) as store:
        assert isinstance(store, SlabStore)
        yield store


def ended(store: SlabStore, ticket: int) -> None:
    while ticket not in store.poll():
        time.sleep(0.001)


def test_blocks_are_read_straight_into_rows_on_pages(store: SlabStore):
    rows, out = on_pages(4, seed=1), on_pages(4)
    assert store.wait(store.submit_write(SLOTS, rows)).ok.all()
    ticket = store.submit_read(SLOTS, out)
    ended(store, ticket)
    assert np.array_equal(out, rows), "before the ticket is collected"
    read = store.wait(ticket)
    assert read.ok.all()
    assert np.shares_memory(read.rows, out)


@pytest.mark.parametrize("shift", [1, 64, 2048])
def test_rows_elsewhere_are_copied_when_the_ticket_is_collected(store: SlabStore, shift: int):
    rows, out = on_pages(4, seed=2, shift=shift), on_pages(4, shift=shift)
    written = store.submit_write(SLOTS, rows)
    expected = rows.copy()
    rows[:] = 0  # copied before the call returned
    assert store.wait(written).ok.all()
    ticket = store.submit_read(SLOTS, out)
    ended(store, ticket)
    assert not out.any()
    assert np.shares_memory(store.wait(ticket).rows, out)
    assert np.array_equal(out, expected)


def test_blocks_that_are_not_whole_pages_are_copied(tmp_path: Path):
    with open_file(f"file://{tmp_path}", bytes_per_block=5000, num_slots=16) as store:
        rows, out = on_pages(4, seed=3, width=5000), on_pages(4, width=5000)
        assert store.wait(store.submit_write(SLOTS, rows)).ok.all()
        assert store.wait(store.submit_read(SLOTS, out)).ok.all()
        assert np.array_equal(out, rows)


def test_rows_that_a_store_writes_to_are_lent_once(store: SlabStore):
    rows, out = on_pages(4, seed=4), on_pages(8)
    assert store.wait(store.submit_write(SLOTS, rows)).ok.all()
    first = store.submit_read(SLOTS, out[:4])
    with pytest.raises(InvalidArgumentError, match="still in use by a store"):
        store.submit_read(SLOTS, out[3:7])
    with pytest.raises(InvalidArgumentError, match="still in use by a store"):
        store.submit_write(SLOTS[:1], out[:1])
    second = store.submit_read(SLOTS, out[4:])
    for ticket in (first, second):
        assert store.wait(ticket).ok.all()
    assert store.wait(store.submit_write(SLOTS, out[2:6])).ok.all(), "given back"
    assert store.stats().pending_bytes == 0


def test_the_store_keeps_rows_that_the_caller_has_let_go_of(store: SlabStore):
    expected = on_pages(4, seed=5)
    tickets = [store.submit_write(SLOTS, on_pages(4, seed=seed)) for seed in (4, 3, 2, 5)]
    gc.collect()
    on_pages(16, seed=9)
    for ticket in tickets:
        assert store.wait(ticket).ok.all()
    assert np.array_equal(store.wait(store.submit_read(SLOTS)).rows, expected)


def test_a_read_only_array_is_refused_for_a_read(store: SlabStore):
    rows = on_pages(4, seed=6)
    rows.flags.writeable = False
    assert store.wait(store.submit_write(SLOTS, rows)).ok.all()
    with pytest.raises(InvalidArgumentError, match="read-only"):
        store.submit_read(SLOTS, rows)


def test_keys_take_lent_rows_too(tmp_path: Path):
    keys = np.random.default_rng(0).integers(0, 256, (4, 32), dtype=np.uint8)
    with open_file(f"file://{tmp_path}", bytes_per_block=WIDTH, num_slots=16, use="prefix") as store:
        rows, out = on_pages(4, seed=7), on_pages(5)
        assert store.wait(store.submit_put(keys, rows)).ok.all()
        assert store.wait(store.submit_put(keys, rows)).ok.all(), "stored already"
        absent = np.zeros((1, 32), dtype=np.uint8)
        read = store.wait(store.submit_get(np.concatenate((keys, absent)), out))
        assert read.reasons == ("", "", "", "", "absent")
        assert np.array_equal(out[:4], rows)
        assert store.stats().pending_bytes == 0
