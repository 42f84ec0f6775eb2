"""What keeps a manager and the model together, call by call; the machines built on it are run in `tests/property`."""

import pytest

from blockyard import BlockManager
from blockyard.errors import OutOfBlocksError
from blockyard.testing import Config, LateMemory, ReferenceManager
from blockyard.testing.interfaces import ManagerLike
from blockyard.testing.machines.side_by_side import SideBySide, Tracked, same


def pair(blocks: int = 4, *, model_blocks: int = 4) -> SideBySide:
    both, config = SideBySide(), Config(4, blocks)
    both.manager = BlockManager(**config.arguments())
    both.model = ReferenceManager(**Config(4, model_blocks).arguments())
    both.memory = LateMemory(config)
    return both


def test_calls_that_agree_give_both_answers():
    real, model = pair().both(lambda m: m.allocate(counts=[5]), lambda m: m.allocate(counts=[5]))
    assert real is not None
    assert model is not None
    assert (len(real), len(model)) == (1, 1)


def test_a_call_that_both_refuse_alike_is_not_a_failure():
    assert pair().both(lambda m: m.allocate(counts=[99]), lambda m: m.allocate(counts=[99])) == (None, None)


def test_answers_and_errors_that_differ_are_failures():
    with pytest.raises(AssertionError, match="answer: found 4, expected 5"):
        pair(model_blocks=5).agree(lambda m: m.pool().num_free, lambda m: m.pool().num_free)
    with pytest.raises(AssertionError, match="the manager: OutOfBlocksError"):
        pair(model_blocks=5).both(lambda m: m.allocate(counts=[20]), lambda m: m.allocate(counts=[20]))
    with pytest.raises(AssertionError, match="tier, wanted, free, total"):
        pair(model_blocks=5).both(lambda m: m.allocate(counts=[40]), lambda m: m.allocate(counts=[40]))

    def wrong_kind(manager: ManagerLike) -> None:
        raise OutOfBlocksError("none left", "device", 1, 0, 4)

    with pytest.raises(AssertionError, match="the manager: OutOfBlocksError"):
        pair().do(wrong_kind, lambda m: m.free([12345]))


def test_numbers_pick_live_sequences_and_seldom_a_freed_one():
    both = pair()
    both.sequences, both.freed = [Tracked(1, 1), Tracked(2, 2)], [Tracked(3, 3)]
    assert [sequence.real for sequence in both.chosen([0, 1, 2, 62, 63])] == [1, 2, 1, 3, 3]
    both.sequences = []
    assert [sequence.real for sequence in both.chosen([0])] == [3]
    assert SideBySide().one(0) is None


def test_values_are_compared_where_that_is_wanted():
    same("ids", 1, 2, when=False)
    with pytest.raises(AssertionError, match="ids: found 1, expected 2"):
        same("ids", 1, 2)
