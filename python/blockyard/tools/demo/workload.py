"""The demo's requests: source code and documentation of Python's standard library, one token per byte.

The same seed on the same Python installation gives the same requests.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.sampling import SamplingParams

__all__ = ["WorkItem", "read_text", "text_workload"]


@dataclass(frozen=True)
class WorkItem:
    """A request and everything that determines its tokens.

    Attributes:
        request_id: id that is unique within the workload.
        prompt: token ids, int64 `[tokens]`.
        sampling: number of sequences and tokens, and how they are sampled; no stop tokens.
    """

    request_id: str
    prompt: NDArray[np.int64]
    sampling: SamplingParams


def read_text(folder: Path | None = None) -> bytes:
    """Read the Python files of a folder, and the documentation in it, in the order of their names.

    Args:
        folder: folder to read; the running Python's standard library if None.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted([*folder.glob("*.py"), *folder.glob("pydoc_data/topics.py")])
    return b"".join(path.read_bytes() for path in paths)


def text_workload(
    text: bytes,
    requests: int,
    *,
    seed: int = 0,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
) -> list[WorkItem]:
    """Make requests that all arrive at once. Their prompts begin with a line of the text that the seed chooses.

    Args:
        text: cut into prompts.
        requests: number of requests, at least 1.
        seed: seed of texts, lengths and samplers.
        prompt_tokens: minimum and maximum length of a prompt.
        output_tokens: minimum and maximum number of tokens generated for one sequence.

    Returns:
        The requests, a mixture of greedy, sampled and forked ones.

    Raises:
        InvalidArgumentError: `requests` is less than 1, a range is empty, or the text is shorter than a prompt.
    """
    if requests < 1:
        raise InvalidArgumentError(f"requests is {requests}, must be at least 1")
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high:
            raise InvalidArgumentError(f"{name} goes from {low} to {high}, must be a range from 1")
    if len(text) < prompt_tokens[1]:
        raise InvalidArgumentError(f"text has {len(text)} bytes, must have {prompt_tokens[1]}: those of a prompt")
    tokens = np.frombuffer(text, np.uint8)
    starts = np.append(0, np.flatnonzero(tokens[: len(tokens) - prompt_tokens[1]] == ord("\n")) + 1)
    items = []
    for index in range(requests):
        rng = np.random.default_rng([seed, index])
        length = int(rng.integers(prompt_tokens[0], prompt_tokens[1] + 1))
        sampling = _sampling(index, int(rng.integers(output_tokens[0], output_tokens[1] + 1)), rng)
        start = int(rng.choice(starts))
        items.append(WorkItem(f"text-{index}", tokens[start : start + length].astype(np.int64), sampling))
    return items


def _sampling(index: int, max_tokens: int, rng: np.random.Generator) -> SamplingParams:
    """Vary the requests: every third one forks into two sampled sequences; every second of the others is sampled."""
    forked = index % 3 == 1
    temperature = 0.8 if forked or index % 2 else 0.0
    seed = int(rng.integers(0, 2**31))
    return SamplingParams(max_tokens=max_tokens, n=2 if forked else 1, temperature=temperature, seed=seed)
