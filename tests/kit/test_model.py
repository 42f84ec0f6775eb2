"""The reference model: it refuses and answers as the manager does; `tests/property` compares the two at random."""

import inspect

import numpy as np
import pytest

from blockyard import AllocStatus, BlockManager
from blockyard.errors import (
    InvalidArgumentError,
    InvariantError,
    MappingError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownSequenceError,
    UnknownTicketError,
)
from blockyard.testing import Config, ManagerLike, ReferenceManager

CONFIG = Config(block_size=4, device_blocks=8, host_blocks=4, external_blocks=4)


def model() -> ReferenceManager:
    return ReferenceManager(**CONFIG.arguments())


def calls(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


# The model is a manager without a prefix cache, of which `prefix_model` says what must hold. It has no call that
# needs one, nor any for pins or defragmentation.
NOT_MODELLED = {
    "fail",
    "free_all",
    "lose",
    "defrag",
    "mark_computed",
    "next_chunk",
    "num_open_tickets",
    "groups",
    "num_page_classes",
    "pins",
    "prefix",
}


def test_the_model_has_every_call_of_the_manager_that_it_is_to_have():
    # `block_size` is an attribute of the model, set when it is made.
    assert calls(BlockManager) - NOT_MODELLED == calls(ReferenceManager) | {"block_size"}


def test_the_interface_names_every_call_of_the_manager_that_it_is_to_have():
    assert calls(BlockManager) - NOT_MODELLED == calls(ManagerLike)


@pytest.mark.parametrize("name", sorted(calls(ReferenceManager)))
def test_every_call_of_the_model_is_documented(name: str):
    assert inspect.getdoc(getattr(ReferenceManager, name))


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"device_blocks": 0}, {"host_blocks": -1}, {"watermark": 1.0}])
def test_sizes_out_of_range_are_refused(bad: dict[str, float]):
    with pytest.raises(InvalidArgumentError):
        ReferenceManager(**{**CONFIG.arguments(), **bad})


def test_the_model_allocates_the_lowest_blocks_and_counts_the_rest():
    manager = model()
    a, b = manager.allocate(counts=[5, 4])
    assert (manager.block_table(a).tolist(), manager.block_table(b).tolist()) == ([0, 1], [2])
    manager.free([a])
    assert manager.pool("device").num_free == 7
    with pytest.raises(OutOfBlocksError, match="asked for 8 device blocks, 7 of 8 are free"):
        manager.allocate(counts=[32])
    assert manager.can_allocate(32).status == AllocStatus.LATER


def test_the_model_refuses_what_the_manager_refuses():
    manager = model()
    (a,) = manager.allocate(counts=[5])
    ticket = manager.take_decision().ticket
    with pytest.raises(UnknownSequenceError):
        manager.free([99])
    with pytest.raises(InvalidArgumentError, match="named twice"):
        manager.append([a, a])
    with pytest.raises(SequenceStateError):
        manager.swap_in([a])
    with pytest.raises(UnknownTicketError):
        manager.complete(ticket + 1)
    manager.swap_out([a])
    decision = manager.take_decision()
    with pytest.raises(MappingError):
        manager.complete(ticket, list(decision.swap_out))


def test_the_model_notices_a_broken_table():
    manager = model()
    (a,) = manager.allocate(counts=[5])
    manager._get(a).table[1] = 0
    with pytest.raises(InvariantError):
        manager.check()
    manager._get(a).table[1] = 8
    with pytest.raises(InvariantError):
        manager.check()


def test_a_copy_of_a_lost_block_is_lost_even_after_the_copy_has_ended():
    manager = model()
    (a,) = manager.allocate(counts=[6])
    manager.complete(manager.take_decision().ticket)
    manager.swap_out([a], to="external")
    manager.complete(manager.take_decision().ticket)
    manager.swap_in([a])
    manager.append([a], 1)
    load = manager.take_decision()
    b = manager.fork(a)
    manager.append([b], 1)
    copy = manager.take_decision()
    assert len(copy.copy) == 1
    manager.complete(copy.ticket)
    lost = load.swap_in[0]
    assert sorted(manager.complete(load.ticket, [lost]).tolist()) == sorted(np.array([a, b]).tolist())
