"""What the binding takes and refuses: `rust/binding/src/convert/arrays.rs`."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from handles import first_handles

from blockyard import (
    AllocStatus,
    Arena,
    BlockManager,
    BlockyardError,
    CacheGroup,
    Pairs,
    PrefixCaching,
    StepDecision,
    _core,
    open_store,
)
from blockyard._core import Completion, Mapping, read_slab
from blockyard.errors import InvalidArgumentError, MappingError, UnknownSequenceError, UnknownTicketError
from blockyard.events import export_keys
from blockyard.offload import OffloadManager
from blockyard.types import Fit, Sequence, StoreStats


@pytest.fixture
def manager() -> BlockManager:
    manager = BlockManager(block_size=4, device_blocks=16, host_blocks=4)
    manager.allocate(counts=[3, 3])
    manager.complete(manager.take_decision().ticket)
    return manager


def handles(manager: BlockManager) -> np.ndarray:
    """The two sequences of the fixture, whose rows are 0 and 1."""
    return np.array(first_handles(manager, 2), dtype=np.uint64)


def test_sequences_may_be_an_array_a_strided_array_a_list_or_one_int(manager: BlockManager) -> None:
    both = handles(manager)
    strided = np.repeat(both, 2)[::2]
    for sequences in (both, strided, [int(h) for h in both], tuple(int(h) for h in both)):
        assert manager.can_append(sequences, 2).blocks == 2
    assert manager.can_append(int(both[0]), 2).blocks == 1


def test_counts_may_be_one_int_an_array_or_a_list(manager: BlockManager) -> None:
    both = handles(manager)
    for counts in (2, np.array([2, 2], dtype=np.uint32), [2, 2]):
        assert manager.can_append(both, counts).blocks == 2


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_a_list_of_tokens_has_the_keys_of_the_array(length: int) -> None:
    tokens = np.arange(length, dtype=np.uint32) * 20_000_003
    keys = export_keys(tokens, block_size=1)
    mixed = [np.int64(token) if i % 7 == 6 else int(token) for i, token in enumerate(tokens)]
    assert len(keys) == length
    assert export_keys(tokens.tolist(), block_size=1) == export_keys(mixed, block_size=1) == keys


def test_one_numpy_number_is_a_handle_and_a_count(manager: BlockManager) -> None:
    both = handles(manager)
    assert manager.can_append(both[0], np.uint32(2)).blocks == 1


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70, 1.5, "a", None])
def test_a_list_with_what_is_no_token_is_refused(token: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tokens is list, must be uint32|tokens\[100\] is .* uint32"):
        export_keys([*range(100), token], block_size=16)  # type: ignore[list-item]


REFUSED: dict[str, tuple[type[BlockyardError], str, Callable[[BlockManager, np.ndarray], object]]] = {
    "a negative count": (InvalidArgumentError, "prompt is -1", lambda m, h: m.can_allocate(-1)),
    "a count beyond 32 bits": (InvalidArgumentError, "prompt is 4294967296", lambda m, h: m.can_allocate(1 << 32)),
    "a float count": (
        InvalidArgumentError,
        "prompt is 1.5, must be token ids or a token count",
        lambda m, h: m.can_allocate(1.5),  # type: ignore[call-overload]
    ),
    "a count that is text": (
        InvalidArgumentError,
        "prompts.0. is 'a', must be token ids",
        lambda m, h: m.allocate("a"),
    ),  # type: ignore[call-overload]
    "a salt with a count": (InvalidArgumentError, "salt, lora_id", lambda m, h: m.allocate(1, salt=b"a")),
    "an adapter with counts": (
        InvalidArgumentError,
        "salt, lora_id",
        lambda m, h: m.allocate(counts=[1], lora_id=1),  # type: ignore[call-overload]
    ),
    "a chunk with a count": (InvalidArgumentError, "chunk_tokens", lambda m, h: m.allocate(9, chunk_tokens=4)),
    "extras with a count": (InvalidArgumentError, "extras", lambda m, h: m.allocate(9, extras=[(0, 1, b"x")])),
    "counts and prompts": (InvalidArgumentError, "give only one of the two", lambda m, h: m.allocate(1, counts=[1])),  # type: ignore[call-overload]
    "a count beside token ids": (InvalidArgumentError, "must be of one kind", lambda m, h: m.allocate(1, [2, 3])),
    "no prompt at all": (InvalidArgumentError, "prompts are missing", lambda m, h: m.allocate()),
    "too few salts": (
        InvalidArgumentError,
        "salt has 1 values, there are 2 prompts",
        lambda m, h: m.allocate([1], [2], salt=[b"a"]),
    ),
    "an encoder with token ids": (
        InvalidArgumentError,
        "encoder_tokens",
        lambda m, h: m.allocate([1], encoder_tokens=[2]),
    ),
    "an encoder with token ids to be asked for": (
        InvalidArgumentError,
        "encoder_tokens is 2",
        lambda m, h: m.can_allocate([1], encoder_tokens=2),
    ),
    "half of a fork's prefix": (
        InvalidArgumentError,
        "must be given together",
        lambda m, h: m.fork(int(h[0]), shared_tokens=0),
    ),  # type: ignore[call-overload]
    "a prefix and a number of forks": (
        InvalidArgumentError,
        "must be given together",
        lambda m, h: m.fork(int(h[0]), 2, shared_tokens=0, num_tokens=1),  # type: ignore[call-overload]
    ),
    "a negative handle": (InvalidArgumentError, "sequence is -1", lambda m, h: m.fork(-1, 1)),
    "a handle never given out": (UnknownSequenceError, "sequence 5", lambda m, h: m.append([5])),
    "float sequences": (InvalidArgumentError, "float32", lambda m, h: m.append(h.astype(np.float32))),
    "text sequences": (InvalidArgumentError, "sequences is 'x'", lambda m, h: m.append("x")),  # type: ignore[arg-type]
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
        "size of block_tables is 4",
        lambda m, h: m.block_tables(h, np.zeros((1, 4), np.int32)),
    ),
    "tables too narrow": (
        InvalidArgumentError,
        "width of block_tables is 0",
        lambda m, h: m.block_tables(h, np.zeros((2, 0), np.int32)),
    ),
    "slots of tokens that are not there": (
        InvalidArgumentError,
        "last is 9, must be at most 3, the tokens of the sequence",
        lambda m, h: m.slot_mapping(int(h[0]), 0, 9),
    ),
    "a tier of another name": (InvalidArgumentError, "'gpu'", lambda m, h: m.pool("gpu").num_free),  # type: ignore[arg-type]
    "more forks than the manager holds": (
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
def test_bad_input_is_a_named_error_and_changes_nothing(manager: BlockManager, what: str) -> None:
    error, message, call = REFUSED[what]
    free = manager.pool().num_free
    with pytest.raises(error, match=message):
        call(manager, handles(manager))
    assert (manager.pool().num_free, manager.stats().sequences) == (free, 2)
    assert [manager.num_tokens(int(h)) for h in handles(manager)] == [3, 3]
    manager.check()


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], ((1, 2), (3, 4)), np.array([[1, 2], [3, 4]], np.uint8)], ids=type)
def test_pairs_may_be_any_ints(ids: object) -> None:
    given = Pairs("device", "host", ids)  # type: ignore[arg-type]
    assert given == Pairs("device", "host", np.array([[1, 2], [3, 4]]))
    assert given.ids.dtype == np.int64
    assert Mapping(ids, src_blocks=8, dst_blocks=8, rule="swap").pairs.tolist() == [[1, 2], [3, 4]]  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[[1]], [[1, 2, 3]], [[1, -1]], [[1, 1.5]], [[1, 2**32]], np.zeros((1, 2)), [1, 2], 3])
def test_what_is_no_pairs_is_refused_everywhere(ids: object) -> None:
    with pytest.raises(InvalidArgumentError, match="pair"):
        Pairs("device", "host", ids)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"pair|entry 0: block"):
        Mapping(ids, src_blocks=8, dst_blocks=8, rule="swap")  # type: ignore[arg-type]


NOTHING = Pairs("host", "external", [])
VALUES = [
    *(Fit(AllocStatus.LATER, 3, 1), Sequence(2**64 - 1, 7), PrefixCaching(), PrefixCaching(host=True, max_events=3)),
    *(AllocStatus.OK, AllocStatus.NEVER, CacheGroup.full_attention(), CacheGroup.sliding_window(7)),
    *(Arena(device_bytes=1 << 20, extent_bytes=1 << 16), Arena.split(device_blocks=[3, 4], host_blocks=[1, 2])),
    *(CacheGroup.recurrent(), Pairs("host", "device", [[4, 1]]), StoreStats(misses={"timeout": 2}, last_error="late")),
    StepDecision(
        5, [("copy", Pairs("device", "device", [[0, 1]])), ("swap_out", Pairs("host", "external", []))], after=[3]
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_can_be_copied_and_pickled(value: object) -> None:
    again = [copy.copy(value), copy.deepcopy(value), copy.deepcopy([value])[0]]
    again += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in again:
        assert type(other) is type(value)
        assert other == value
    assert value != object()


HANDLES = {"BlockAllocator", "NaiveAllocator", "PrefixCachingAllocator", "FreeBlocks", "BlockManager", "Defrag", "Pins"}
HANDLES |= {"Pool", "StoreJobs", "StoreSearch", "Prefix", "BlockObserver", "OffloadManager", "RedisClient", "SlabStore"}
HANDLES |= {"BoundViews", "Mapping", "HashedPrompt", "MovePlan", "StepOwner"}
"""Classes with state that no copy shares, and prepared arguments."""


def results(folder: Path) -> list[object]:
    """One object of each class of results that has no public constructor, with as many values as easily possible."""
    caching = PrefixCaching(host=True, max_events=9)
    manager = BlockManager(block_size=4, device_blocks=16, host_blocks=8, watermark=0.0, prefix_caching=caching)
    sequence = manager.allocate([1, 2, 3, 4, 5])
    manager.prefix.sample_residency(1.0)
    manager.prefix.store_jobs.start("through")
    ticket = manager.take_decision().ticket
    manager.mark_computed([sequence])
    manager.complete(ticket)
    job = manager.prefix.store_jobs.begin_write(8)
    defrag = manager.defrag
    found = [manager.stats(), manager.prefix.lookup([1, 2, 3, 4, 5]), manager.prefix.residency()["device"], job]
    found += [manager.prefix.take_events(), defrag.fragmentation(), defrag.run("dense", 0), defrag.resize(12)]
    found.append(OffloadManager(4).prepare_store([b"a", b"b"]))
    with open_store(f"file://{folder}?size=1MiB", bytes_per_block=64, use="prefix"):
        found.append(read_slab(folder))
    return found


def fields(value: object) -> dict[str, object]:
    """The public attributes of an object, with arrays as lists."""
    names = [name for name in dir(value) if not (name.startswith("_") or callable(getattr(value, name)))]
    plain = {name: getattr(value, name) for name in names}
    return {name: item.tolist() if isinstance(item, np.ndarray) else item for name, item in plain.items()}


def test_each_class_of_the_core_that_is_no_handle_can_be_copied_and_pickled(tmp_path: Path) -> None:
    found = results(tmp_path)
    for value in found:
        again = [copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))]
        for other in again:
            assert type(other) is type(value)
            assert fields(other) == fields(value), value
    seen = {type(value).__name__ for value in [*found, *VALUES]} | {"Completion"}
    classes = {name for name, found in vars(_core).items() if inspect.isclass(found)}
    assert classes - HANDLES <= seen


def test_a_completion_can_be_copied_and_pickled() -> None:
    value = Completion(3, np.array([True, False]), np.ones((2, 4), np.uint8), ["", "timeout"])
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (other.ticket, other.ok.tolist(), other.reasons) == (3, [True, False], ("", "timeout"))
        assert other.rows.tolist() == value.rows.tolist()


def test_a_copied_decision_shares_no_pairs() -> None:
    value = StepDecision(5, [("copy", Pairs("device", "device", [[0, 1]]))])
    other = copy.deepcopy(value)
    other.copy[0].ids[0, 1] = 7
    assert value.blocks_to_copy.tolist() == [[0, 1]]
    assert other != value


def test_slots_that_cannot_be_written_are_refused(manager: BlockManager) -> None:
    slots = np.zeros(2, np.int64)
    slots.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        manager.append(handles(manager), out=slots)
    manager.check()


def test_a_status_is_no_number() -> None:
    assert AllocStatus.OK == AllocStatus.OK
    assert AllocStatus.OK != AllocStatus.LATER
    assert AllocStatus.OK != 0
    statuses = (AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER)
    assert [status.name for status in statuses] == ["OK", "LATER", "NEVER"]
    assert all(getattr(AllocStatus, status.name) is status for status in statuses)
    assert len({AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER}) == 3
