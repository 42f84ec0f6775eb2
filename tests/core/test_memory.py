"""Arrays that calls write, `rust/binding/src/convert/memory.rs`: changed in place, of any layout, with one memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard._core import BlockObserver, BoundViews, Mapping, expand_span
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.events import export_keys

Array = np.ndarray[Any, Any]
GUARD = 64


def forget(_value: object) -> None:
    """Stand for a result that no test looks at."""


class Guarded:
    """Arrays that lie between bytes that nobody may change."""

    def __init__(self) -> None:
        self.memories: list[Array] = []

    def __call__(self, shape: int | tuple[int, ...], dtype: Any, value: int = 0) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)
        self.memories.append(memory)
        array = memory[GUARD : GUARD + size].view(dtype).reshape(shape)
        array[...] = value
        return array

    def check(self) -> None:
        for memory in self.memories:
            assert (memory[:GUARD] == 0xA5).all()
            assert (memory[-GUARD:] == 0xA5).all()

    def bytes(self) -> list[bytes]:
        return [memory.tobytes() for memory in self.memories]


@dataclass
class Case:
    """A call, the arrays that it writes and those that it reads."""

    call: Callable[..., object]
    written: dict[str, Array]
    read: dict[str, Array] = field(default_factory=dict)

    def run(self, **other: Array) -> object:
        return self.call(**{**self.written, **self.read, **other})


def new_manager() -> tuple[BlockManager, Array]:
    manager = BlockManager(block_size=4, device_blocks=64, watermark=0.0)
    handles = manager.allocate(counts=[3, 5, 6])
    manager.complete(manager.take_decision().ticket)
    return manager, handles


def append(new: Guarded) -> Case:
    manager, handles = new_manager()

    def call(handles: Array, counts: Array, out: Array) -> list[int]:
        manager.append(handles, counts, out=out)
        return [manager.num_tokens(int(handle)) for handle in given]

    given = handles.copy()
    return Case(call, {"out": new(6, np.int64)}, {"handles": handles, "counts": np.array([1, 2, 3], np.uint32)})


def append_with_tables(new: Guarded) -> Case:
    manager = BlockManager(block_size=4, device_blocks=64, watermark=0.0, prefix_caching=True)
    prompts = [np.arange(5, dtype=np.uint32), np.arange(7, 13, dtype=np.uint32)]
    handles, _ = allocate_prompts(manager, prompts)
    manager.complete(manager.take_decision().ticket)
    given = handles.copy()

    def call(handles: Array, counts: Array, token_ids: Array, table: Array, out: Array) -> list[int]:
        manager.append(handles, counts, token_ids=token_ids, block_tables=table, out=out)
        return [manager.num_tokens(int(handle)) for handle in given]

    read = {"handles": handles, "counts": np.array([2, 4], np.uint32), "token_ids": np.arange(6, dtype=np.uint32)}
    return Case(call, {"table": new((4, 8), np.int32), "out": new(6, np.int64)}, read)


def block_tables(new: Guarded) -> Case:
    manager, handles = new_manager()
    call = lambda handles, out: forget(manager.block_tables(handles, out))  # noqa: E731
    return Case(call, {"out": new((3, 4), np.int32)}, {"handles": handles})


def slot_mapping(new: Guarded) -> Case:
    manager, handles = new_manager()
    return Case(lambda out: forget(manager.slot_mapping(int(handles[1]), 0, 5, out)), {"out": new(5, np.int64)})


def span(new: Guarded) -> Case:
    call = lambda blocks, out: expand_span(blocks, out, per_block=4, first=1, last=3)  # noqa: E731
    return Case(call, {"out": new(6, np.int64)}, {"blocks": np.array([7, 2], np.int64)})


def resolve(new: Guarded) -> Case:
    observer = BlockObserver(32)
    observer.use_ids([9])
    observer.commit(observer.plan("dense", 0))
    call = lambda ids, out: forget(observer.resolve(ids, out=out))  # noqa: E731
    return Case(call, {"out": new((2, 3), np.int32)}, {"ids": np.array([[1, 3, 5], [9, 2, 4]], np.int32)})


def copy(new: Guarded) -> Case:
    def call(src: Array, dst: Array, pairs: Array) -> None:
        BoundViews([src], [dst]).run(Mapping(pairs, src_blocks=5, dst_blocks=5, rule="swap"), num_threads=1)

    src = np.arange(40, dtype=np.uint8).reshape(5, 8)
    return Case(call, {"dst": new((5, 8), np.uint8)}, {"src": src, "pairs": np.array([[0, 4], [3, 1]], np.int64)})


def within(rows: Array, pairs: Array, rule: Any) -> None:
    BoundViews([rows]).run(Mapping(pairs, src_blocks=5, dst_blocks=5, rule=rule), num_threads=1)


def exchange(new: Guarded) -> Case:
    rows = new((5, 8), np.uint8)
    rows[...] = np.arange(40).reshape(5, 8)
    call = lambda rows, pairs: within(rows, pairs, "exchange")  # noqa: E731
    return Case(call, {"rows": rows}, {"pairs": np.array([[0, 4], [3, 1]], np.int64)})


def move(new: Guarded) -> Case:
    case = exchange(new)
    case.call = lambda rows, pairs: within(rows, pairs, "move")
    case.read = {"pairs": np.array([[0, 1], [1, 2], [2, 0]], np.int64)}
    return case


WRITERS: dict[str, Callable[[Guarded], Case]] = {
    case.__name__: case
    for case in (append, append_with_tables, block_tables, slot_mapping, span, resolve, copy, exchange, move)
}


# ---- arrays that are changed in place ----


def narrower(array: Array) -> None:
    array.dtype = np.dtype(f"i{array.itemsize // 2 or 1}")


def as_float(array: Array) -> None:
    array.dtype = np.dtype({1: "b", 4: "f4", 8: "f8"}[array.itemsize])


def swapped(array: Array) -> None:
    array.dtype = array.dtype.newbyteorder()


def flat(array: Array) -> None:
    array.shape = (array.size,)


def folded(array: Array) -> None:
    array.shape = (1, *array.shape)


def turned(array: Array) -> None:
    array.shape = array.shape[::-1]


def read_only(array: Array) -> None:
    array.flags.writeable = False


def of_one_item(array: Array) -> None:
    array.strides = (0,) * array.ndim


MUTATIONS = {
    change.__name__: change for change in (narrower, as_float, swapped, flat, folded, turned, read_only, of_one_item)
}


def is_idle(array: Array, mutation: str) -> bool:
    """Tell whether a mutation leaves an array as it is."""
    return (array.ndim == 1 and mutation in ("flat", "turned")) or (array.itemsize == 1 and mutation == "swapped")


@contextmanager
def changed(array: Array, mutation: str) -> Iterator[None]:
    """Change an array in place for a while."""
    dtype, shape, strides = array.dtype, array.shape, array.strides
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        MUTATIONS[mutation](array)
        try:
            yield
        finally:
            array.flags.writeable = True
            if mutation == "of_one_item":
                array.strides = strides
            else:
                array.dtype = dtype
                array.shape = shape
            assert (array.dtype, array.shape, array.strides) == (dtype, shape, strides)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("writer", WRITERS)
def test_an_array_changed_in_place_is_refused_or_written_within_its_bytes(writer: str, mutation: str) -> None:
    for name in WRITERS[writer](Guarded()).written:
        new, plain = Guarded(), Guarded()
        case, wanted = WRITERS[writer](new), WRITERS[writer](plain)
        result, array = wanted.run(), case.written[name]
        before, idle = new.bytes(), is_idle(array, mutation)
        with changed(array, mutation):
            try:
                done = case.run()
            except InvalidArgumentError:
                assert not idle
                assert new.bytes() == before
                continue
            assert mutation != "read_only"
            new.check()
            assert not idle or (done, new.bytes()) == (result, plain.bytes())


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("rule", ["swap", "copy", "move", "exchange"])
def test_bound_views_copy_the_rows_that_were_bound_whatever_becomes_of_the_arrays(rule: Any, mutation: str) -> None:
    new = Guarded()
    rows, other = new((5, 8), np.uint8), new((5, 8), np.uint8, 7)
    rows[...] = np.arange(40).reshape(5, 8)
    before = rows.copy()
    bound = BoundViews([rows], [other]) if rule == "swap" else BoundViews([rows])
    with changed(rows, mutation), changed(other, mutation):
        bound.run(Mapping([[0, 4], [3, 1]], src_blocks=5, dst_blocks=5, rule=rule), num_threads=1)
    new.check()
    target, wanted = (other, np.full((5, 8), 7, np.uint8)) if rule == "swap" else (rows, before.copy())
    wanted[[4, 1]] = before[[0, 3]]
    if rule == "exchange":
        wanted[[0, 3]] = before[[4, 1]]
    np.testing.assert_array_equal(target, wanted)


def test_bound_views_keep_the_memory_of_what_was_bound() -> None:
    memories = [bytearray(range(40)), bytearray(40)]
    held = [memoryview(memory) for memory in memories]
    bound = BoundViews(*([np.frombuffer(memory, np.uint8).reshape(5, 8)] for memory in memories))
    del memories
    bound.run(Mapping([[4, 0]], src_blocks=5, dst_blocks=5, rule="swap"), num_threads=1)
    assert bytes(held[1][:8]) == bytes(held[0][32:])
    with pytest.raises(BufferError):
        held[1].obj.extend(b"more")  # type: ignore[attr-defined]


class Kept:
    """Block tables and slots that a caller keeps from append to append, in guarded arrays."""

    def __init__(self) -> None:
        self.manager, self.handles = new_manager()
        self.new = Guarded()
        self.table, self.slots = self.new((4, 8), np.int32), self.new(3, np.int64)
        self.count = 2

    def append(self, counts: list[int] | None = None) -> None:
        out = self.slots[: self.count]
        self.manager.append(self.handles[: self.count], counts, block_tables=self.table, out=out)

    def calls(self) -> dict[str, Callable[[], object]]:
        return {
            "append": self.append,
            "append counts": lambda: self.append([1] * self.count),
            "add": lambda: setattr(self, "count", 3),
            "remove": lambda: setattr(self, "count", max(1, self.count - 1)),
            "write": lambda: self.manager.block_tables(self.handles[: self.count], self.table[: self.count]),
        }

    def state(self) -> object:
        tokens = [self.manager.num_tokens(int(handle)) for handle in self.handles]
        return self.new.bytes(), tokens, self.manager.pool().num_free

    def assert_right(self) -> None:
        for row, handle in zip(self.table, self.handles[: self.count], strict=False):
            table = self.manager.block_table(handle)
            np.testing.assert_array_equal(row[: len(table)], table)
        self.new.check()
        self.manager.check()


STEPS = st.tuples(
    st.sampled_from(["append", "append", "append counts", "add", "remove", "write"]),
    st.sampled_from(["table", "slots"]),
    st.sampled_from([None, None, *MUTATIONS]),
)


@given(st.lists(STEPS, max_size=12))
def test_kept_tables_stay_right_whatever_calls_on_changed_arrays_are_refused(
    steps: list[tuple[str, str, str | None]],
) -> None:
    kept = Kept()
    kept.append()
    for call, name, mutation in steps:
        if mutation is None or not call.startswith("append"):
            with suppress(InvalidArgumentError, OutOfBlocksError):
                kept.calls()[call]()
            if call in ("add", "remove"):
                kept.calls()["write"]()
        else:
            before = kept.state()
            try:
                with changed(getattr(kept, name), mutation):
                    kept.calls()[call]()
            except InvalidArgumentError:
                assert kept.state() == before
            else:
                # Rows of another shape lie elsewhere in the array.
                kept.new.check()
                kept.calls()["write"]()
        kept.assert_right()


# ---- arrays with one memory ----


@pytest.mark.parametrize("writer", [name for name in WRITERS if name not in ("slot_mapping", "exchange", "move")])
def test_what_is_read_may_lie_in_what_is_written(writer: str) -> None:
    plain = Guarded()
    wanted = WRITERS[writer](plain)
    result = wanted.run()
    for name in wanted.read:
        for target in wanted.written:
            new = Guarded()
            case = WRITERS[writer](new)
            values, memory = case.read[name], case.written[target].reshape(-1).view(np.uint8)
            if values.nbytes > memory.nbytes or (writer, name) == ("copy", "src"):
                continue
            memory[: values.nbytes] = values.reshape(-1).view(np.uint8)
            overlaid = memory[: values.nbytes].view(values.dtype).reshape(values.shape)
            assert case.run(**{name: overlaid}) == result
            new.check()
            for key, array in case.written.items():
                if writer != "append_with_tables" and key not in ("dst", "out"):
                    np.testing.assert_array_equal(array, wanted.written[key])


@pytest.mark.parametrize("owners", ["one", "two"])
def test_two_arrays_to_write_may_not_share_memory(owners: str) -> None:
    manager, handles = new_manager()
    memory = bytearray(256)
    first = np.frombuffer(memory, np.int32)
    other = first if owners == "one" else np.frombuffer(memory, np.int32)
    table, slots = first[:32].reshape(4, 8), other[30:62].view(np.int64)
    with pytest.raises(InvalidArgumentError, match="shares memory"):
        manager.append(handles, 1, block_tables=table, out=slots[:3])
    assert not any(memory)
    assert manager.append(handles, 1, block_tables=table, out=other[32:38].view(np.int64)).tolist() == [3, 9, 18]


# ---- arrays of any layout ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_an_array_of_any_layout_is_written_right_or_refused(writer: str, layout: str) -> None:
    names = list(WRITERS[writer](Guarded()).written)
    for name in names:
        case, wanted = WRITERS[writer](Guarded()), WRITERS[writer](Guarded())
        array = LAYOUTS[layout](case.written[name])
        before = array.tobytes()
        try:
            done = case.run(**{name: array})
        except InvalidArgumentError:
            assert layout in ("strided", "backwards", "fortran", "unaligned", "wide", "locked", "other_order")
            assert array.tobytes() == before
            continue
        assert layout != "locked"
        assert done == wanted.run()
        np.testing.assert_array_equal(array, wanted.written[name])


# ---- arguments that change while they are read ----


class Meddler:
    """An int whose conversion runs some Python code."""

    def __init__(self, value: int, meddle: Callable[[], object]) -> None:
        self.value, self.meddle = value, meddle

    def __index__(self) -> int:
        self.meddle()
        return self.value


@pytest.mark.parametrize("mutation", ["narrower", "as_float", "of_one_item"])
def test_a_prompt_that_another_prompt_changes_is_refused_or_read_within_its_bytes(mutation: str) -> None:
    manager = BlockManager(block_size=2, device_blocks=64, watermark=0.0, prefix_caching=True)
    tokens = Guarded()(8, np.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(InvalidArgumentError, match="changed while"):
            allocate_prompts(manager, [tokens, [Meddler(1, lambda: MUTATIONS[mutation](tokens))]])
    assert (manager.stats().sequences, manager.pool().num_free) == (0, 64)


def test_handles_that_the_counts_change_are_those_that_were_handed_over() -> None:
    manager, handles = new_manager()
    mine = handles.copy()
    counts = [Meddler(1, lambda: mine.fill(7)), 1, Meddler(1, lambda: mine.resize(0, refcheck=False))]
    manager.append(mine, counts)
    assert [manager.num_tokens(int(handle)) for handle in handles] == [4, 6, 7]


def test_a_list_that_its_own_items_change_is_read_as_python_reads_it() -> None:
    tokens: list[Any] = [1, 2]
    tokens += [Meddler(3, tokens.clear), 4]
    with suppress(InvalidArgumentError):
        assert len(export_keys(tokens, block_size=1)) <= 4
    tokens[:] = [Meddler(1, lambda: tokens.extend([5] * 100)), 2]
    assert len(export_keys(tokens, block_size=1)) >= 2


def test_an_out_that_the_counts_change_is_refused() -> None:
    manager, handles = new_manager()
    new = Guarded()
    out = new(3, np.int64)
    before = new.bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(InvalidArgumentError, match="out is ndarray of int32"):
            manager.append(handles, [1, Meddler(1, lambda: narrower(out)), 1], out=out)
    assert new.bytes() == before
    assert [manager.num_tokens(int(handle)) for handle in handles] == [3, 5, 6]
