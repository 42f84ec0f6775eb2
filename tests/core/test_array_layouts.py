"""Arrays that calls read, of any layout: strided, backwards, in Fortran order, unaligned, read-only, byte-swapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from layouts import LAYOUTS, other_order
from prompts import allocate_prompts

from blockyard import BlockManager, Pairs
from blockyard._core import (
    BlockObserver,
    Completion,
    chain_keys,
    expand_span,
)
from blockyard.allocators import NaiveAllocator
from blockyard.errors import InvalidArgumentError
from blockyard.events import export_keys
from blockyard.stores import open_store

Array = np.ndarray[Any, Any]
Form = Callable[[Array], Array]


def new_manager() -> tuple[BlockManager, Array]:
    manager = BlockManager(block_size=4, device_blocks=64, watermark=0.0)
    handles = manager.allocate(counts=[3, 5, 6])
    manager.complete(manager.take_decision().ticket)
    return manager, handles


def new_allocator() -> NaiveAllocator:
    allocator = NaiveAllocator(16)
    allocator.allocate(8)
    return allocator


def expanded(chunks: Array) -> list[int]:
    out = np.zeros(4 * len(chunks) - 2, np.int64)
    expand_span(chunks, out, per_block=4, first=1, last=3)
    return out.tolist()


def observed(ids: Array, call: Callable[[BlockObserver, Array], object]) -> object:
    observer = BlockObserver(16)
    observer.use_ids([1, 2, 3, 5])
    call(observer, ids)
    return observer.used().tolist()


def prompt(tokens: Array, call: Callable[[BlockManager, Array], Any]) -> object:
    manager = BlockManager(block_size=2, device_blocks=16, watermark=0.0, prefix_caching=True)
    known = allocate_prompts(manager, [np.arange(5, dtype=np.uint32)])[0]
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(known)
    return np.asarray(call(manager, tokens)).tolist()


def formed(form: Form, array: Array) -> Array:
    other = form(array)
    np.testing.assert_array_equal(other, array)
    return other


def of(array: Array, read: Callable[[Array], object]) -> Callable[[Form], object]:
    """What is read of an array in some form."""
    return lambda form: read(formed(form, array))


def of_handles(call: Callable[[BlockManager, Array], Any]) -> Callable[[Form], object]:
    """What a new manager answers to the handles of its sequences in some form."""

    def read(form: Form) -> object:
        manager, handles = new_manager()
        return np.asarray(call(manager, formed(form, handles))).tolist()

    return read


def of_counts(call: Callable[[BlockManager, Array, Array], Any]) -> Callable[[Form], object]:
    """What a new manager answers to its handles and numbers in some form."""

    def read(form: Form) -> object:
        manager, handles = new_manager()
        return np.asarray(call(manager, handles, formed(form, np.array([1, 2, 9], np.uint32)))).tolist()

    return read


def stored(slots: Array, rows: Array, tmp_path: Any) -> object:
    with open_store(f"file://{tmp_path}", bytes_per_block=4096, num_slots=4) as store:
        assert store.wait(store.submit_write(slots, rows)).ok.all()
        found = store.wait(store.submit_read(np.array([2, 0])))
        return found.rows.tobytes(), store.wait(store.submit_read(slots)).rows.tobytes()


IDS = np.array([5, 2, 1, 3], np.int64)
PAIRS = np.array([[4, 6], [5, 7], [0, 3]], np.int64)
TOKENS = np.array([0, 1, 2, 3, 9, 8], np.uint32)
ROWS = np.random.default_rng(0).integers(0, 256, (2, 4096), np.uint8)
READERS: dict[str, Callable[[Form], object]] = {
    "handles": of_handles(lambda m, h: m.can_append(h, 2).blocks),
    "handles of a batch": of_handles(lambda m, h: m.append(h, 2)),
    "freed": of_handles(lambda m, h: (m.free(h), m.pool().num_free)[1]),
    "tables": of_handles(lambda m, h: m.block_tables(h)),
    "counts": of_counts(lambda m, h, c: m.append(h, c)),
    "lengths": of_counts(lambda m, _, c: [m.num_tokens(handle) for handle in m.allocate(counts=c)]),
    "exported": of(TOKENS, lambda a: export_keys(a, block_size=2)),
    "chained": of(TOKENS, lambda a: chain_keys(a, block_size=2)),
    "prompts": of(TOKENS, lambda a: prompt(a, lambda m, t: allocate_prompts(m, [t])[1])),
    "cached": of(TOKENS, lambda a: prompt(a, lambda m, t: m.prefix.lookup(t).tokens)),
    "to allocate": of(TOKENS, lambda a: prompt(a, lambda m, t: m.can_allocate(t).blocks)),
    "pinned": of(TOKENS, lambda a: prompt(a, lambda m, t: m.pins.pin_prompt(t))),
    "pairs": of(PAIRS, lambda a: Pairs("device", "host", a).ids.tolist()),
    "expanded": of(IDS, expanded),
    "used ids": of(IDS, lambda a: observed(a, lambda o, i: o.use_ids(i))),
    "used ids of 32 bits": of(IDS.astype(np.int32), lambda a: observed(a, lambda o, i: o.use_ids(i))),
    "released ids": of(IDS, lambda a: observed(a, lambda o, i: o.release_ids(i))),
    "leased ids": of(IDS, lambda a: observed(a, lambda o, i: o.lease(i))),
    "resolved": of(PAIRS.reshape(3, 2, 1), lambda a: BlockObserver(16).resolve(a).tolist()),
    "shared": of(IDS.astype(np.int32), lambda a: (m := new_allocator(), m.share(a), [m.refs(i) for i in range(8)])[2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reader", READERS)
def test_an_array_of_any_layout_is_read_as_the_plain_one(reader: str, layout: str) -> None:
    read = READERS[reader]
    wanted = read(np.copy)
    try:
        assert read(LAYOUTS[layout]) == wanted
    except InvalidArgumentError:
        assert layout == "other_order"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout_are_stored_as_the_plain_ones(layout: str, tmp_path: Any) -> None:
    slots = np.array([2, 0])
    wanted = stored(slots, ROWS, tmp_path)
    assert wanted == (ROWS.tobytes(), ROWS.tobytes())
    assert stored(slots, LAYOUTS[layout](ROWS), tmp_path) == wanted
    if layout == "other_order":
        with pytest.raises(InvalidArgumentError, match="slots must be an int64 array"):
            stored(other_order(slots), ROWS, tmp_path)
    else:
        assert stored(LAYOUTS[layout](slots), ROWS, tmp_path) == wanted


@pytest.mark.parametrize("rows", [ROWS.T.copy(), ROWS[0], ROWS.view(np.int8), ROWS[:1], ROWS[:, 1:]])
def test_rows_of_another_shape_or_type_are_refused(rows: Array, tmp_path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"rows is .*, must be uint8 \[2, 4096\]"):
        stored(np.array([2, 0]), rows, tmp_path)


# ---- results that hold arrays ----


def test_a_completion_of_odd_flags_and_shapes_is_shown() -> None:
    flags = np.array([0, 2, 255], np.uint8).view(np.bool_)
    completion = Completion(1, flags, np.zeros((3, 4), np.uint8), ["", "", ""])
    assert repr(completion) == "Completion(ticket=1, ok=2 of 3)"


def test_pairs_whose_array_was_changed_are_counted_and_refused() -> None:
    pairs = Pairs("device", "host", np.array([[1, 2]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pairs.ids.dtype = np.complex128
        pairs.ids.shape = ()
    assert len(pairs) == 0
    manager, handles = new_manager()
    with pytest.raises(InvalidArgumentError, match="must be ints"):
        manager.complete(1, [pairs])
    assert manager.num_tokens(int(handles[0])) == 3


def test_an_array_of_more_dimensions_than_ndarray_knows_is_read() -> None:
    ids = np.full((1,) * 40, 3)
    assert BlockObserver(8).resolve(ids).shape == ids.shape
