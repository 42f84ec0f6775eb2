"""The demo's requests: decided by the seed alone, and real text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.tools.demo.workload import WorkItem, read_text, text_workload

TEXT = read_text()


def short(requests: int, seed: int = 0) -> list[WorkItem]:
    return text_workload(TEXT, requests, seed=seed, prompt_tokens=(32, 64), output_tokens=(3, 9))


def seen(items: list[WorkItem]) -> list[tuple[object, ...]]:
    return [(item.request_id, item.prompt.tolist(), item.sampling) for item in items]


def test_the_seed_alone_decides_the_requests() -> None:
    assert seen(short(12, seed=3)) == seen(short(12, seed=3))
    assert seen(short(12, seed=3)) != seen(short(12, seed=4))


def test_more_requests_leave_the_first_ones_as_they_were() -> None:
    assert seen(short(12)[:5]) == seen(short(5))


def test_prompts_are_lines_of_the_standard_library() -> None:
    for item in short(12):
        assert b"\n" + item.prompt.astype(np.uint8).tobytes() in TEXT
    assert b"class ArgumentParser" in TEXT


def test_lengths_and_tokens_stay_in_range() -> None:
    for item in text_workload(TEXT, 40, prompt_tokens=(5, 9), output_tokens=(2, 3)):
        assert 5 <= len(item.prompt) <= 9
        assert 2 <= item.sampling.max_tokens <= 3
        assert item.prompt.dtype == np.int64
        assert 0 <= item.prompt.min() <= item.prompt.max() < 256


def test_some_requests_are_greedy_some_sampled_some_forked() -> None:
    items = short(12)
    assert {(item.sampling.n, item.sampling.temperature > 0) for item in items} == {(1, False), (1, True), (2, True)}
    assert len({item.sampling.seed for item in items}) == 12


def test_text_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "pydoc_data").mkdir()
    for name in ("pydoc_data/topics.py", "b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text(name)
    assert read_text(tmp_path) == b"a.pyb.pypydoc_data/topics.py"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((TEXT, 0, (1, 4), (1, 4)), "requests is 0"),
        ((TEXT, 1, (0, 4), (1, 4)), "prompt_tokens goes from 0 to 4"),
        ((TEXT, 1, (1, 4), (5, 4)), "output_tokens goes from 5 to 4"),
        ((b"abc", 1, (1, 4), (1, 4)), "text has 3 bytes, must have 4"),
    ],
    ids=["requests", "prompts", "outputs", "text"],
)
def test_an_impossible_workload_raises(
    arguments: tuple[bytes, int, tuple[int, int], tuple[int, int]], complaint: str
) -> None:
    text, requests, prompt_tokens, output_tokens = arguments
    with pytest.raises(InvalidArgumentError, match=complaint):
        text_workload(text, requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
