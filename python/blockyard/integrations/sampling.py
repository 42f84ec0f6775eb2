"""Sampling of the next token: greedy, or by a draw that depends only on (seed, sequence, position).

The draw adds Gumbel noise to the scaled logits and takes the largest (the Gumbel-max trick). The noise of one position
is one block of a counter-based generator, so neither the batch order nor earlier draws matter. Compared with inverting
the cumulative distribution, it also has fewer boundaries: logits that differ only by rounding, as they do between batch
sizes, almost never change the token. Works without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.layout.sizes import set_ints

SEED_LIMIT = 2**64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling options of one request.

    Attributes:
        max_tokens: maximum number of tokens to generate for each sequence, at least 1.
        temperature: 0 for greedy; otherwise logits are divided by it.
        top_k: draw among this many of the most likely tokens; 0 for all.
        top_p: draw among the smallest set of most likely tokens with this total probability, in (0, 1].
        seed: key for the draws, from 0 to 2^64 - 1.
        n: number of sequences to generate from the prompt, at least 1.
        eos_token_id: a token that ends a sequence (and stays in it); None for none.
        stop_token_ids: further tokens that end a sequence.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    n: int = 1
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        set_ints(self, "max_tokens", "top_k", "seed", "n", "eos_token_id")
        for name, minimum in (("max_tokens", 1), ("n", 1), ("top_k", 0)):
            if getattr(self, name) < minimum:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, must be at least {minimum}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgumentError(f"temperature is {self.temperature}, must be finite and at least 0")
        if not 0 < self.top_p <= 1:
            raise InvalidArgumentError(f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not 0 <= self.seed < SEED_LIMIT:
            raise InvalidArgumentError(f"seed is {self.seed}, must be from 0 to 2^64 - 1")
        for token in self.stops:
            if token < 0:
                raise InvalidArgumentError(f"a stop token is {token}, must be at least 0")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def stops(self) -> frozenset[int]:
        """All tokens that end a sequence."""
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        return frozenset((*self.stop_token_ids, *own))


def sample(logits: ArrayLike, params: SamplingParams, sequence_index: int, position: int) -> int:
    """Choose one token.

    Args:
        logits: scores of all tokens, any float dtype, `[vocab]`; minus infinity for disallowed tokens.
        params: sampling options.
        sequence_index: which of the request's `n` sequences, from 0.
        position: position of the new token: the length of the sequence so far, prompt included.

    Returns:
        The token id; the lowest on ties.

    Raises:
        InvalidArgumentError: the logits are empty, not one-dimensional, hold NaN, or allow no token.

    Source:
        Gumbel-max trick (Maddison, Tarlow, Minka: A* Sampling, 2014); Philox4x64-10 (Salmon et al.: Parallel Random
        Numbers: As Easy as 1, 2, 3, 2011).

    Example:
        >>> sample([0.5, 2.0, 1.0], SamplingParams(), sequence_index=0, position=7)
        1
    """
    scores = np.asarray(logits, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise InvalidArgumentError(f"logits have shape {list(scores.shape)}, must be [vocab]")
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):  # argmax finds NaN first, then plus infinity
        raise InvalidArgumentError(f"logits of {scores.size} tokens have {scores[best]} as their largest value")
    if params.greedy:
        return best
    # Shift the largest to 0, so that a tiny temperature cannot overflow.
    scores = (scores - scores[best]) / params.temperature
    noise = _gumbel(params.seed, sequence_index, position, scores.size)
    return int(np.argmax(_keep_likely(scores, params.top_k, params.top_p) + noise))


def uniforms(seed: int, sequence_index: int, position: int, count: int) -> NDArray[np.float64]:
    """Return numbers strictly between 0 and 1 that depend only on the arguments.

    Args:
        seed: from 0 to 2^64 - 1.
        sequence_index: from 0.
        position: from 0.
        count: how many; a longer result starts with the shorter one.

    Returns:
        float64 `[count]`, odd multiples of 2^-53.
    """
    # Set key and counter directly: numpy's seeding would hash them, and streams of one key must not overlap.
    key = np.array([seed, sequence_index], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    raw = np.asarray(generator.random_raw(count), dtype=np.uint64)
    numbers: NDArray[np.float64] = (raw >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53
    return numbers


def _gumbel(seed: int, sequence_index: int, position: int, count: int) -> NDArray[np.float64]:
    noise: NDArray[np.float64] = -np.log(-np.log(uniforms(seed, sequence_index, position, count)))
    return noise


def _keep_likely(scores: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.float64]:
    """Mask all but the `top_k` most likely tokens, then all but the likeliest that hold `top_p` of the rest.

    Ties with the last kept token are kept.
    """
    if 0 < top_k < scores.size:
        threshold = np.partition(scores, -top_k)[-top_k]
        scores = np.where(scores < threshold, -np.inf, scores)
    if top_p < 1.0:
        ordered = np.sort(scores)[::-1]
        weights = np.exp(ordered)
        before = np.cumsum(weights) - weights
        last = int(np.count_nonzero(before < top_p * weights.sum())) - 1
        scores = np.where(scores < ordered[last], -np.inf, scores)
    return scores
