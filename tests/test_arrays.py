"""What the binding takes and refuses: `rust/python/src/arrays.rs`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from blockyard import (
    AllocStatus,
    BlockManager,
    BlockyardError,
    InvalidArgumentError,
    MappingError,
    Pairs,
    UnknownSequenceError,
    UnknownTicketError,
    export_keys,
)


@pytest.fixture
def books() -> BlockManager:
    manager = BlockManager(block_size=4, device_blocks=16, host_blocks=4)
    manager.allocate([3, 3])
    manager.complete(manager.take_decision().ticket)
    return manager


def handles(books: BlockManager) -> np.ndarray:
    """The two sequences of the fixture, whose rows are 0 and 1."""
    return np.array([1 << 32, 1 << 32 | 1], dtype=np.uint64)


def test_sequences_may_be_an_array_a_strided_array_a_list_or_one_int(books: BlockManager) -> None:
    both = handles(books)
    strided = np.repeat(both, 2)[::2]
    for sequences in (both, strided, [int(h) for h in both], tuple(int(h) for h in both)):
        assert books.blocks_to_append(sequences, 2) == 2
    assert books.blocks_to_append(int(both[0]), 2) == 1


def test_counts_may_be_one_int_an_array_or_a_list(books: BlockManager) -> None:
    both = handles(books)
    for counts in (2, np.array([2, 2], dtype=np.uint32), [2, 2]):
        assert books.blocks_to_append(both, counts) == 2


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_a_list_of_tokens_has_the_keys_of_the_array(length: int) -> None:
    tokens = np.arange(length, dtype=np.uint32) * 20_000_003
    keys = export_keys(tokens, block_size=1)
    mixed = [np.int64(token) if i % 7 == 6 else int(token) for i, token in enumerate(tokens)]
    assert len(keys) == length
    assert export_keys(tokens.tolist(), block_size=1) == export_keys(mixed, block_size=1) == keys


def test_one_numpy_number_is_a_handle_and_a_count(books: BlockManager) -> None:
    both = handles(books)
    assert books.blocks_to_append(both[0], np.uint32(2)) == 1


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70, 1.5, "a", None])
def test_a_list_with_what_is_no_token_is_refused(token: object) -> None:
    with pytest.raises(InvalidArgumentError, match="token ids are list, must be uint32"):
        export_keys([*range(100), token], block_size=16)  # type: ignore[list-item]


REFUSED: dict[str, tuple[type[BlockyardError], str, Callable[[BlockManager, np.ndarray], object]]] = {
    "a negative count": (InvalidArgumentError, "number is -1", lambda m, h: m.can_allocate(-1)),
    "a count beyond 32 bits": (InvalidArgumentError, "number is 4294967296", lambda m, h: m.can_allocate(1 << 32)),
    "a float count": (InvalidArgumentError, "number is 1.5", lambda m, h: m.can_allocate(1.5)),  # type: ignore[arg-type]
    "a negative handle": (InvalidArgumentError, "number is -1", lambda m, h: m.fork(-1)),
    "a handle never given out": (UnknownSequenceError, "sequence 5", lambda m, h: m.append([5])),
    "float sequences": (InvalidArgumentError, "float32", lambda m, h: m.append(h.astype(np.float32))),
    "text sequences": (InvalidArgumentError, "sequences are str", lambda m, h: m.append("x")),  # type: ignore[arg-type]
    "counts of another length": (InvalidArgumentError, "is 3, must be 2", lambda m, h: m.append(h, [1, 1, 1])),
    "a ticket below 0": (UnknownTicketError, "ticket -1", lambda m, h: m.complete(-1)),
    "a ticket beyond 64 bits": (UnknownTicketError, "is not open", lambda m, h: m.complete(1 << 70)),
    "a ticket of text": (InvalidArgumentError, "'a'", lambda m, h: m.complete("a")),  # type: ignore[arg-type]
    "slots of another dtype": (
        InvalidArgumentError,
        "int32",
        lambda m, h: m.append(h, out=np.zeros(2, np.int32)),  # type: ignore[arg-type]
    ),
    "slots of another length": (
        InvalidArgumentError,
        "3 slots, must have 2",
        lambda m, h: m.append(h, out=np.zeros(3, np.int64)),
    ),
    "strided slots": (
        InvalidArgumentError,
        "C-contiguous",
        lambda m, h: m.append(h, out=np.zeros(4, np.int64)[::2]),
    ),
    "tables of another dtype": (
        InvalidArgumentError,
        "float64",
        lambda m, h: m.block_tables(h, np.zeros((2, 4))),  # type: ignore[arg-type]
    ),
    "tables with too few rows": (
        InvalidArgumentError,
        "size of the block tables is 4",
        lambda m, h: m.block_tables(h, np.zeros((1, 4), np.int32)),
    ),
    "tables too narrow": (
        InvalidArgumentError,
        "width of the block tables is 0",
        lambda m, h: m.block_tables(h, np.zeros((2, 0), np.int32)),
    ),
    "slots of tokens that are not there": (
        InvalidArgumentError,
        "tokens 0 to 9 of a sequence of 3",
        lambda m, h: m.slot_mapping(int(h[0]), 0, 9),
    ),
    "a tier of another name": (InvalidArgumentError, "'gpu'", lambda m, h: m.num_free("gpu")),  # type: ignore[arg-type]
    "more forks than the books hold": (
        InvalidArgumentError,
        "number of new sequences is 4000000000",
        lambda m, h: m.fork(int(h[0]), 4_000_000_000),
    ),
    "pairs with a negative id": (
        MappingError,
        "pair 0 names block -1",
        lambda m, h: Pairs("device", "host", np.array([[0, -1]])),
    ),
    "pairs of another shape": (MappingError, "must be", lambda m, h: Pairs("device", "host", np.zeros(4, np.int64))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_a_named_error_and_changes_nothing(books: BlockManager, what: str) -> None:
    error, message, call = REFUSED[what]
    free = books.num_free()
    with pytest.raises(error, match=message):
        call(books, handles(books))
    assert (books.num_free(), books.num_sequences) == (free, 2)
    assert [books.num_tokens(int(h)) for h in handles(books)] == [3, 3]
    books.check()


def test_slots_that_cannot_be_written_are_refused(books: BlockManager) -> None:
    slots = np.zeros(2, np.int64)
    slots.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        books.append(handles(books), out=slots)
    books.check()


def test_a_status_is_no_number() -> None:
    assert AllocStatus.OK == AllocStatus.OK
    assert AllocStatus.OK != AllocStatus.LATER
    assert AllocStatus.OK != 0
    assert len({AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER}) == 3
