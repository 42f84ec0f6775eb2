"""Requests in the scheduler: what the sequences of one can share when they are computed again."""

import pytest

from blockyard import SequenceStateError
from blockyard.request import Request, RequestGroup, TokenSequence, common_prefix


def group(*tokens: list[int], finished: tuple[int, ...] = ()) -> RequestGroup:
    sequences = [TokenSequence(i, list(each), 2) for i, each in enumerate(tokens)]
    for index in finished:
        sequences[index].finished = True
    return RequestGroup(Request("a", [1, 2], 9, n=len(tokens)), (0, 0.0, 1), sequences)


def shares(found: RequestGroup, block_size: int) -> list[tuple[int, int | None, int]]:
    found_shares = found.shares(block_size)
    return [(s.index, earlier.index if earlier else None, tokens) for s, earlier, tokens in found_shares]


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1)]
)
def test_the_common_prefix_ends_at_the_first_difference(a: list[int], b: list[int], length: int):
    assert common_prefix(a, b) == common_prefix(b, a) == length


def test_sequences_share_whole_blocks_with_the_earlier_one_that_agrees_longest():
    found = group([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 4, 9, 9, 8])
    assert shares(found, 2) == [(0, None, 0), (1, 0, 4), (2, 1, 6)]


def test_the_last_token_is_never_shared_for_its_logits_are_wanted():
    assert shares(group([1, 2, 3, 4], [1, 2, 3, 4]), 2) == [(0, None, 0), (1, 0, 2)]
    assert shares(group([1, 2], [1, 2]), 2) == [(0, None, 0), (1, None, 0)]


def test_finished_sequences_share_nothing_and_keep_their_output():
    found = group([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7], finished=(0,))
    assert shares(found, 2) == [(1, None, 0), (2, 1, 4)]
    assert [sequence.index for sequence in found.unfinished()] == [1, 2]
    assert found.outputs() == ((3, 4, 5), (3, 4, 6), (3, 4, 7))


def test_a_sequence_without_blocks_is_not_on_the_device():
    found = group([1, 2, 3])
    assert found.handles() == []
    with pytest.raises(SequenceStateError, match="sequence 0 has no blocks"):
        found.sequences[0].on_device()
    found.sequences[0].handle = 7
    assert (found.handles(), found.sequences[0].on_device()) == ([7], 7)
