"""Draft tokens from a sequence's own text."""

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.prompt_lookup import prompt_lookup


def look(tokens: list[int], count: int, **sizes: int) -> list[int]:
    return prompt_lookup(np.array(tokens, np.uint32), count, **sizes).tolist()


def test_what_followed_the_longest_ngram_is_drafted():
    assert look([2, 8, 1, 2, 9, 5, 1, 2], 3) == [9, 5, 1]
    assert look([2, 8, 1, 2, 9, 5, 1, 2], 3, max_ngram=1) == [8, 1, 2]


def test_a_text_that_repeats_itself_is_drafted_from_its_first_turn():
    assert look([1, 2, 3, 1, 2, 3, 1, 2, 3], 4) == [1, 2, 3, 1]
    assert look([4, 4], 5) == [4]


def test_a_text_without_a_repeat_has_no_draft():
    assert look([1, 2, 3], 4) == look([1], 4) == look([1, 2, 3, 1], 4, min_ngram=2) == []


def test_sizes_that_cannot_be_are_refused():
    for count, low, high in ((-1, 1, 3), (2, 0, 3), (2, 3, 2)):
        with pytest.raises(InvalidArgumentError, match=f"num_tokens is {count}, min_ngram {low}, max_ngram {high}"):
            look([1, 2, 1], count, min_ngram=low, max_ngram=high)
