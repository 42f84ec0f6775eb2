"""The demo's requests: real text that every machine has.

The text is the source code and documentation of Python's standard library, one token per byte unless a model has a
tokenizer. The same seed on the same Python installation gives the same requests, whatever the order of files on disk.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.sampling import SamplingParams

MIN_FILE_BYTES = 4096

Encode = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""A function from text, an array of bytes, to a model's tokens."""


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


class StandardText:
    """Text of Python's standard library as tokens.

    Args:
        folder: folder to search for Python files; the running Python's standard library if None.
        encode: a model's tokenizer; one token per byte if None.

    Raises:
        InvalidArgumentError: the folder has no Python file of at least `MIN_FILE_BYTES` bytes.
    """

    def __init__(self, folder: Path | None = None, *, encode: Encode | None = None) -> None:
        self._encode = encode
        self.folder = folder or Path(sysconfig.get_path("stdlib"))
        topics = self.folder / "pydoc_data" / "topics.py"
        large = [path for path in self.folder.glob("*.py") if path.stat().st_size >= MIN_FILE_BYTES]
        self.paths = sorted(large) + ([topics] if topics.is_file() else [])
        if not self.paths:
            raise InvalidArgumentError(f"no Python file of {MIN_FILE_BYTES} bytes or more in {self.folder}")
        self._bytes: dict[int, NDArray[np.int64]] = {}

    def take(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Cut `count` tokens out of the text, starting at a line that `rng` chooses.

        Args:
            rng: chooses file and line; a quarter of the draws use the documentation if it is installed.
            count: number of tokens.

        Returns:
            Token ids, int64 `[count]`; at the end of a file, the next file follows.
        """
        last = len(self.paths) - 1
        index = last if rng.random() < 0.25 else int(rng.integers(0, last + 1))
        starts = np.flatnonzero(self._read(index) == ord("\n"))
        start = int(rng.choice(starts)) + 1 if len(starts) else 0
        if self._encode is None:
            return self._cut(index, start, count)
        size, tokens = 4 * count, np.zeros(0, dtype=np.int64)
        while len(tokens) < count:
            size *= 2
            tokens = self._encode(self._cut(index, start, size))
        return tokens[:count]

    def _cut(self, index: int, start: int, size: int) -> NDArray[np.int64]:
        """Take `size` bytes from a file, beginning at `start`, and from the files after it."""
        parts = [self._read(index)[start : start + size]]
        taken = len(parts[0])
        while taken < size:
            index = (index + 1) % len(self.paths)
            parts.append(self._read(index)[: size - taken])
            taken += len(parts[-1])
        return np.concatenate(parts)

    def _read(self, index: int) -> NDArray[np.int64]:
        if index not in self._bytes:
            self._bytes[index] = np.frombuffer(self.paths[index].read_bytes(), dtype=np.uint8).astype(np.int64)
        return self._bytes[index]


def text_workload(
    requests: int,
    *,
    seed: int = 0,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    text: StandardText | None = None,
) -> list[WorkItem]:
    """Make requests with text prompts that all arrive at once.

    Args:
        requests: number of requests, at least 1.
        seed: seed of texts, lengths and samplers.
        prompt_tokens: minimum and maximum length of a prompt.
        output_tokens: minimum and maximum number of tokens generated for one sequence.
        text: source of the prompts; the standard library if None.

    Returns:
        The requests, a mixture of greedy, sampled and forked ones.

    Raises:
        InvalidArgumentError: `requests` is less than 1, or a range is empty.
    """
    if requests < 1:
        raise InvalidArgumentError(f"requests is {requests}, must be at least 1")
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high:
            raise InvalidArgumentError(f"{name} goes from {low} to {high}, must be a range from 1")
    text = text or StandardText()
    items = []
    for index in range(requests):
        rng = np.random.default_rng([seed, index])
        length = int(rng.integers(prompt_tokens[0], prompt_tokens[1] + 1))
        sampling = _sampling(index, int(rng.integers(output_tokens[0], output_tokens[1] + 1)), rng)
        items.append(WorkItem(f"text-{index}", text.take(rng, length), sampling))
    return items


def _sampling(index: int, max_tokens: int, rng: np.random.Generator) -> SamplingParams:
    """Vary the requests: every third one forks into two sampled sequences; every second of the others is sampled."""
    forked = index % 3 == 1
    temperature = 0.8 if forked or index % 2 else 0.0
    seed = int(rng.integers(0, 2**31))
    return SamplingParams(max_tokens=max_tokens, n=2 if forked else 1, temperature=temperature, seed=seed)
