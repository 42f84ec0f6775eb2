"""The demo's requests: decided by the seed alone, and real text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.tools.demo.workload import StandardText, WorkItem, text_workload


@pytest.fixture(scope="module")
def text() -> StandardText:
    return StandardText()


def short(requests: int, *, seed: int = 0, text: StandardText | None = None) -> list[WorkItem]:
    return text_workload(requests, seed=seed, prompt_tokens=(32, 64), output_tokens=(3, 9), text=text)


def same(one: list[WorkItem], other: list[WorkItem]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.prompt, b.prompt) and (a.request_id, a.sampling) == (b.request_id, b.sampling)
        for a, b in zip(one, other, strict=True)
    )


def test_same_seed_gives_the_same_requests(text: StandardText) -> None:
    assert same(short(12, seed=3, text=text), short(12, seed=3))


def test_other_seed_gives_other_requests(text: StandardText) -> None:
    assert not same(short(12, seed=3, text=text), short(12, seed=4, text=text))


def test_more_requests_leave_the_first_ones_as_they_were(text: StandardText) -> None:
    assert same(short(12, text=text)[:5], short(5, text=text))


def test_prompts_are_text_of_the_standard_library(text: StandardText) -> None:
    library = [path.read_bytes() for path in text.paths]
    for item in short(12, text=text):
        head = item.prompt[:32].astype(np.uint8).tobytes()
        assert any(head in file for file in library)


def test_text_holds_sources_and_documentation(text: StandardText) -> None:
    names = {path.name for path in text.paths}
    assert "argparse.py" in names
    assert Path(sysconfig.get_path("stdlib")) in {path.parent for path in text.paths}


def test_lengths_and_tokens_stay_in_range(text: StandardText) -> None:
    for item in text_workload(40, prompt_tokens=(5, 9), output_tokens=(2, 3), text=text):
        assert 5 <= len(item.prompt) <= 9
        assert 2 <= item.sampling.max_tokens <= 3
        assert item.prompt.dtype == np.int64
        assert 0 <= item.prompt.min() <= item.prompt.max() < 256


def test_some_requests_are_greedy_some_sampled_some_forked(text: StandardText) -> None:
    items = short(12, text=text)
    assert {(item.sampling.n, item.sampling.temperature > 0) for item in items} == {(1, False), (1, True), (2, True)}
    assert len({item.sampling.seed for item in items}) == 12


def test_text_runs_on_into_the_next_file(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes((name[0] * 63 + "\n").encode() * 64)
    small = StandardText(tmp_path)
    taken = small.take(np.random.default_rng(0), 10_000)
    assert len(taken) == 10_000
    assert set(taken.tolist()) == {ord("a"), ord("b"), ord("\n")}


def test_models_own_tokens_are_cut_to_the_length_asked_for() -> None:
    def pairs_of_bytes(text: NDArray[np.int64]) -> NDArray[np.int64]:
        return text[: len(text) // 16 * 16].reshape(-1, 16) @ np.arange(16)

    tokens = StandardText(encode=pairs_of_bytes).take(np.random.default_rng(5), 300)
    whole = StandardText().take(np.random.default_rng(5), 4800)
    assert np.array_equal(tokens, pairs_of_bytes(whole))


def test_folder_without_python_files_raises(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(InvalidArgumentError, match="no Python file of 4096 bytes or more"):
        StandardText(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0, (1, 4), (1, 4)), "requests is 0"),
        ((1, (0, 4), (1, 4)), "prompt_tokens goes from 0 to 4"),
        ((1, (1, 4), (5, 4)), "output_tokens goes from 5 to 4"),
    ],
)
def test_impossible_workload_raises(arguments: tuple[int, tuple[int, int], tuple[int, int]], complaint: str) -> None:
    requests, prompt_tokens, output_tokens = arguments
    with pytest.raises(InvalidArgumentError, match=complaint):
        text_workload(requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
