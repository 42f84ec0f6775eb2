"""Moves between tiers: sharing kept, leases held, losses reported; every move is carried out and read back."""

from functools import partial

import numpy as np
import pytest

from blockyard import AllocStatus, BlockManager, Pairs
from blockyard.errors import (
    InvalidArgumentError,
    MappingError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownTicketError,
)
from blockyard.testing import Config, SimulatedMemory

BLOCK = 4


class Engine:
    """A manager over simulated memory, one step after another."""

    def __init__(self, device: int = 16, host: int = 16, external: int = 16, watermark: float = 0.0) -> None:
        config = Config(BLOCK, device, host, external, watermark)
        self.manager = BlockManager(**config.arguments())
        self.memory = SimulatedMemory(config)
        self.tokens: dict[int, list[int]] = {}
        self.drawn = 0

    def draw(self, count: int) -> list[int]:
        self.drawn += count
        return list(range(self.drawn - count, self.drawn))

    def open(self, count: int) -> int:
        handle = int(self.manager.allocate(counts=[count])[0])
        self.tokens[handle] = self.draw(count)
        self.memory.write(self.manager.slot_mapping(handle, 0, count), self.tokens[handle])
        self.step()
        return handle

    def fork(self, parent: int, count: int = 1) -> list[int]:
        children = [int(handle) for handle in self.manager.fork(parent, count)]
        self.tokens.update({child: list(self.tokens[parent]) for child in children})
        return children

    def step(self) -> dict[str, list[list[int]]]:
        """Take the decision, carry it out, end its ticket; returns its pairs by kind."""
        decision = self.manager.take_decision()
        self.memory.execute(decision)
        self.manager.complete(decision.ticket)
        self.manager.check()
        return {kind: pairs.ids.tolist() for kind, pairs in decision.transfers()}

    def append(self, *handles: int) -> dict[str, list[list[int]]]:
        """Append a token to each, as a step."""
        slots = self.manager.append(list(handles))
        tokens = self.draw(len(handles))
        pairs = self.step()
        self.memory.write(slots, tokens)
        for handle, token in zip(handles, tokens, strict=True):
            self.tokens[handle].append(token)
        return pairs

    def verify(self) -> None:
        for handle, tokens in self.tokens.items():
            table, tier = self.manager.block_table(handle), self.manager.tier(handle)
            assert self.memory.read(table, len(tokens), tier) == tokens, f"{handle} in {tier} blocks {table}"


def refs_free(engine: Engine) -> tuple[int, ...]:
    return tuple(engine.manager.pool(tier).num_free for tier in ("device", "host", "external"))


# ---- sharing ----


def test_three_sequences_over_one_block_swap_out_one_block():
    engine = Engine()
    parent = engine.open(3)
    group = [parent, *engine.fork(parent, 2)]
    engine.manager.swap_out(group)
    assert engine.step() == {"swap_out": [[0, 0]]}
    assert refs_free(engine) == (16, 15, 16)
    engine.manager.swap_in(group)
    assert engine.step() == {"swap_in": [[0, 0]]}
    engine.append(*group)
    engine.verify()


def test_a_block_shared_with_a_sequence_that_stays_is_copied_once_and_shared_again():
    engine = Engine()
    stays = engine.open(2 * BLOCK)
    a, b = engine.fork(stays, 2)
    engine.manager.swap_out([a])
    assert engine.step() == {"swap_out": [[0, 0], [1, 1]]}
    engine.manager.swap_out([b])
    assert engine.step() == {}, "its bytes are on the host already"
    assert engine.manager.can_swap_in([a, b]).status == AllocStatus.OK
    engine.manager.swap_in([a, b])
    assert engine.step() == {}, "its bytes are still on the device"
    assert engine.manager.block_table(a).tolist() == engine.manager.block_table(stays).tolist()
    assert refs_free(engine) == (14, 16, 16)
    engine.append(a, b, stays)
    engine.verify()


def test_a_twin_is_forgotten_when_its_block_is_given_to_another():
    engine = Engine(device=3)
    stays = engine.open(BLOCK)
    (leaves,) = engine.fork(stays)
    engine.manager.swap_out([leaves])
    engine.step()
    engine.manager.free([stays])
    del engine.tokens[stays]
    other = engine.open(3 * BLOCK)
    engine.manager.swap_out([other])
    engine.step()
    engine.manager.swap_in([leaves])
    assert engine.step() == {"swap_in": [[0, 0]]}
    engine.verify()


def test_a_partly_filled_block_is_not_shared_with_a_sequence_that_writes_on():
    engine = Engine()
    stays = engine.open(BLOCK + 2)
    (leaves,) = engine.fork(stays)
    engine.manager.swap_out([leaves])
    assert engine.step() == {"swap_out": [[0, 0], [1, 1]]}
    assert engine.append(stays) == {}
    engine.manager.swap_in([leaves])
    assert engine.step() == {"swap_in": [[1, 2]]}, "the full block is shared again, the other has gone on"
    engine.append(leaves, stays)
    engine.verify()


@pytest.mark.parametrize("by_host", [False, True], ids=["from the device", "by way of the host"])
@pytest.mark.parametrize("to_host", [False, True], ids=["to the device", "to the host"])
def test_sequences_come_back_from_the_external_tier_with_their_tokens(by_host: bool, to_host: bool):
    engine = Engine()
    parent = engine.open(2 * BLOCK + 1)
    group = [parent, *engine.fork(parent, 1)]
    if by_host:
        engine.manager.swap_out(group)
        engine.step()
    engine.manager.swap_out(group, to="external")
    assert len(engine.step()["swap_out"]) == 3
    assert [engine.manager.tier(handle) for handle in group] == ["external", "external"]
    engine.verify()
    engine.manager.swap_in(group, to="host" if to_host else "device")
    assert len(engine.step()["swap_in"]) == 3
    if to_host:
        engine.manager.swap_in(group)
        engine.step()
    engine.append(*group)
    engine.verify()
    assert refs_free(engine)[1:] == (16, 16)


# ---- what is refused ----


def test_a_full_tier_refuses_the_whole_batch_with_the_numbers():
    engine = Engine(host=3, external=2)
    a, b = engine.open(2 * BLOCK), engine.open(2 * BLOCK)
    before = refs_free(engine)
    assert not engine.manager.can_swap_out([a, b])
    with pytest.raises(OutOfBlocksError, match="asked for 4 host blocks, 3 of 3 are free") as caught:
        engine.manager.swap_out([a, b])
    assert (caught.value.tier, caught.value.wanted, caught.value.free, caught.value.total) == ("host", 4, 3, 3)
    with pytest.raises(OutOfBlocksError, match="asked for 4 external blocks, 2 of 2 are free"):
        engine.manager.swap_out([a, b], to="external")
    assert refs_free(engine) == before
    engine.manager.check()


def test_swapping_in_keeps_the_watermark_and_counts_the_next_token():
    engine = Engine(device=5, watermark=0.2)
    a = engine.open(2 * BLOCK)
    engine.manager.swap_out([a])
    engine.step()
    assert engine.manager.can_swap_in([a]).status == AllocStatus.OK
    assert engine.manager.can_swap_in([a], lookahead=BLOCK).status == AllocStatus.OK
    assert engine.manager.can_swap_in([a], lookahead=2 * BLOCK).status == AllocStatus.NEVER
    engine.open(2 * BLOCK)
    assert engine.manager.can_swap_in([a]).status == AllocStatus.LATER


def test_a_returning_group_needs_one_copy_less_than_it_has_owners():
    engine = Engine(device=4)
    parent = engine.open(BLOCK + 2)
    group = [parent, *engine.fork(parent, 2)]
    engine.manager.swap_out(group)
    engine.step()
    assert engine.manager.can_swap_in(group).status == AllocStatus.OK
    engine.manager.swap_in(group)
    assert engine.append(*group) == {"swap_in": [[0, 0], [1, 1]], "copy": [[1, 2], [1, 3]]}
    engine.verify()


def test_a_sequence_in_the_wrong_tier_is_refused_by_name():
    engine = Engine()
    a = engine.open(3)
    for call in (engine.manager.swap_in, partial(engine.manager.swap_in, to="host")):
        with pytest.raises(SequenceStateError, match="is in the device tier"):
            call([a])
    engine.manager.swap_out([a])
    engine.step()
    for call in (engine.manager.append, engine.manager.swap_out, engine.manager.block_tables):
        with pytest.raises(SequenceStateError, match="is in the host tier, the call needs it in device"):
            call([a])
    with pytest.raises(SequenceStateError):
        engine.manager.fork(a, shared_tokens=0, num_tokens=3)
    assert (bool(engine.manager.can_swap_out([a])), engine.manager.can_swap_in([a]).status) == (False, AllocStatus.OK)
    engine.manager.check()


def test_a_step_moves_nothing_that_it_has_yet_to_write():
    engine = Engine()
    fresh = int(engine.manager.allocate(counts=[3])[0])
    assert not engine.manager.can_swap_out([fresh])
    with pytest.raises(SequenceStateError, match="yet to write"):
        engine.manager.swap_out([fresh])
    engine.step()
    engine.manager.swap_out([fresh])
    engine.manager.check()


def test_a_moving_sequence_is_not_moved_again_before_its_ticket_ends():
    engine = Engine()
    a = engine.open(3)
    engine.manager.swap_out([a])
    decision = engine.manager.take_decision()
    assert engine.manager.can_swap_in([a]).status == AllocStatus.LATER
    with pytest.raises(SequenceStateError, match=f"still moving .ticket {decision.ticket}"):
        engine.manager.swap_in([a])
    engine.manager.complete(decision.ticket)
    assert engine.manager.can_swap_in([a]).status == AllocStatus.OK


# ---- leases ----


def test_blocks_freed_under_a_transfer_stay_leased_until_it_ends():
    engine = Engine(device=4, host=4)
    a = engine.open(2 * BLOCK)
    engine.manager.swap_out([a])
    decision = engine.manager.take_decision()
    engine.manager.free([a])
    assert refs_free(engine) == (2, 2, 16)
    engine.manager.check()
    engine.manager.complete(decision.ticket)
    assert refs_free(engine) == (4, 4, 16)


def test_a_block_being_read_is_given_to_device_work_that_is_ordered_after_the_reader():
    engine = Engine(device=2, host=4)
    a = engine.open(2 * BLOCK)
    engine.manager.swap_out([a])
    out = engine.manager.take_decision()
    assert (engine.manager.pool("device").num_free, engine.manager.can_allocate(2 * BLOCK).status) == (
        0,
        AllocStatus.OK,
    )
    engine.manager.allocate(counts=[BLOCK])
    assert engine.manager.take_decision().after == (out.ticket,)
    engine.manager.complete(out.ticket)
    engine.manager.allocate(counts=[BLOCK])
    assert engine.manager.take_decision().after == ()
    engine.manager.check()


def test_a_block_being_read_is_given_to_a_swap_in_from_the_host_in_the_same_step_but_never_to_one_from_a_store():
    engine = Engine(device=2, host=4, external=4)
    a = engine.open(2 * BLOCK)
    engine.manager.swap_out([a], to="external")
    engine.step()
    b = engine.open(2 * BLOCK)
    engine.manager.swap_out([b])
    assert engine.manager.can_swap_in([a]).status != AllocStatus.OK
    with pytest.raises(OutOfBlocksError):
        engine.manager.swap_in([a])
    engine.step()
    engine.manager.swap_in([a])
    engine.step()
    engine.manager.swap_out([a], to="external")
    engine.manager.swap_in([b])
    decision = engine.manager.take_decision()
    assert decision.after == (decision.ticket,)
    assert [kind for kind, _ in decision.transfers()] == ["swap_out", "swap_in"]
    engine.memory.execute(decision)
    engine.manager.complete(decision.ticket)
    engine.verify()


def test_writing_in_place_waits_for_a_reader_of_the_block():
    engine = Engine()
    stays = engine.open(2)
    (leaves,) = engine.fork(stays)
    engine.manager.swap_out([leaves])
    out = engine.manager.take_decision()
    engine.manager.append([stays])
    assert engine.manager.take_decision().after == (out.ticket,)


# ---- losses ----


def loaded(engine: Engine, *handles: int) -> tuple[int, Pairs]:
    """Swap sequences out to the external tier and in again; returns the open ticket of the swap-in and its pairs."""
    engine.manager.swap_out(list(handles), to="external")
    engine.step()
    engine.manager.swap_in(list(handles))
    decision = engine.manager.take_decision()
    return decision.ticket, decision.swap_in[0]


def test_fail_names_exactly_the_sequences_that_were_hit():
    engine = Engine()
    a, b, c = engine.open(BLOCK), engine.open(BLOCK), engine.open(BLOCK)
    (d,) = engine.fork(c)
    ticket, pairs = loaded(engine, a, b, c, d)
    hit = engine.manager.complete(ticket, [Pairs("external", "device", pairs.ids[[0, 2]])])
    assert sorted(hit.tolist()) == sorted([a, c, d])
    for handle in (a, c, d):
        store = partial(engine.manager.swap_out, to="external")
        for call in (engine.manager.append, engine.manager.swap_out, engine.manager.block_tables, store):
            with pytest.raises(SequenceStateError, match="can only be freed"):
                call([handle])
        with pytest.raises(SequenceStateError):
            engine.manager.fork(handle, 1)
    engine.manager.append([b])
    engine.manager.free([a, c, d])
    engine.manager.check()


def test_a_copy_made_from_what_did_not_land_is_lost_too():
    engine = Engine()
    a = engine.open(BLOCK + 2)
    (b,) = engine.fork(a)
    engine.manager.swap_out([a, b], to="external")
    engine.step()
    engine.manager.swap_in([a, b])
    engine.manager.append([a])
    decision = engine.manager.take_decision()
    assert len(decision.copy) == 1
    lost = Pairs("external", "device", decision.swap_in[0].ids[1:])
    assert sorted(engine.manager.complete(decision.ticket, [lost]).tolist()) == sorted([a, b])


def test_a_copy_of_what_did_not_land_is_lost_even_after_the_copy_has_ended():
    engine = Engine()
    a = engine.open(BLOCK + 2)
    engine.manager.swap_out([a], to="external")
    engine.step()
    engine.manager.swap_in([a])
    engine.manager.append([a])
    load = engine.manager.take_decision()
    (b,) = engine.fork(a)
    engine.manager.append([b])
    copy = engine.manager.take_decision()
    assert len(copy.copy) == 1
    engine.manager.complete(copy.ticket)
    lost = Pairs("external", "device", load.swap_in[0].ids[1:])
    assert sorted(engine.manager.complete(load.ticket, [lost]).tolist()) == sorted([a, b])


def test_a_lost_copy_is_not_shared_again():
    engine = Engine()
    stays = engine.open(BLOCK)
    a, b = engine.fork(stays, 2)
    engine.manager.swap_out([a], to="external")
    decision = engine.manager.take_decision()
    assert engine.manager.complete(decision.ticket, [decision.swap_out[0]]).tolist() == [a]
    engine.manager.swap_out([b], to="external")
    assert len(engine.step()["swap_out"]) == 1
    del engine.tokens[a]
    engine.verify()


def test_a_loss_that_is_not_in_the_ticket_is_refused():
    engine = Engine()
    a = engine.open(BLOCK)
    ticket, pairs = loaded(engine, a)
    strange = Pairs("external", "device", pairs.ids + np.array([0, 1]))
    with pytest.raises(MappingError, match=f"ticket {ticket} writes no block 1 in the device tier"):
        engine.manager.complete(ticket, [pairs, strange])
    engine.manager.check()
    engine.manager.complete(ticket)
    engine.manager.append([a])


def test_a_ticket_ends_once():
    engine = Engine()
    ticket = engine.manager.take_decision().ticket
    with pytest.raises(UnknownTicketError):
        engine.manager.complete(ticket + 1)
    engine.manager.complete(ticket)
    for call in (lambda: engine.manager.complete(ticket), lambda: engine.manager.complete(ticket, [])):
        with pytest.raises(UnknownTicketError, match=f"ticket {ticket} is not open"):
            call()


def test_pairs_of_a_wrong_shape_are_refused():
    for ids in (np.zeros((2, 3), np.int64), np.zeros(2, np.int64), np.zeros((2, 2)), np.array([[0, -1]])):
        with pytest.raises(MappingError):
            Pairs("host", "device", ids)
    with pytest.raises(InvalidArgumentError):
        Pairs("host", "gpu", np.zeros((1, 2), np.int64))
