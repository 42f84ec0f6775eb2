"""Requests, and what the scheduler keeps for each: Python objects that only events touch, never a plain step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, OutOfBlocksError

__all__ = ["Finished", "Parked", "Place", "Rank", "Request", "RequestState"]

Rank: TypeAlias = tuple[int, float, int]
"""Priority, arrival and number of a request; the lowest goes first."""
Place: TypeAlias = Literal["waiting", "swapped", "fetching", "running"]

NO_TOKEN = 0xFFFF_FFFF
"""The one uint32 that the prefix cache takes for no token id."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what is wanted of it.

    Args:
        request_id: the caller's name for it.
        prompt: token ids, `[tokens]` integers from 0 to 4294967294, at least one.
        max_tokens: tokens to generate for each sequence, at least one.
        n: sequences to generate.
        priority: lower goes first.
        arrival: seconds; earlier goes first within a priority.
        stop_token_ids: a sequence ends with any of these.
        salt: keeps tenants apart in the prefix cache: prompts share blocks only with prompts of the same salt.
        lora_id: adapter that the request runs with; 0 for none. Prompts share blocks only within an adapter.
    """

    request_id: str
    prompt: Sequence[int] | NDArray[np.integer]
    max_tokens: int
    n: int = 1
    priority: int = 0
    arrival: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    salt: bytes | None = None
    lora_id: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is done: the tokens generated for each of its `n` sequences.

    `error` says why it ended early, if it did: the device shrank and can no longer hold the request to its end.
    """

    request: Request
    outputs: tuple[tuple[int, ...], ...]
    error: OutOfBlocksError | None = None


class RequestState:
    """A request in the scheduler.

    Args:
        request: as the caller gave it.
        number: rises with each request that is added.

    Raises:
        InvalidArgumentError: the request is malformed.

    Attributes:
        prompt: token ids, uint32 `[tokens]`.
        rank: its place in every queue.
        alive: False once it is aborted, refused or done.
        lost: its sequences lost bytes and are to start again.
        left: sequences that have not ended.
        outputs: tokens of the sequences that have, uint32 arrays.
        seats: seats of its sequences that run.
        parked: its sequences that do not.
        error: why it was refused, once it was.
    """

    __slots__ = ("alive", "error", "left", "lost", "outputs", "parked", "prompt", "rank", "request", "seats")

    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.prompt = _token_ids(request)
        self.rank: Rank = (request.priority, request.arrival, number)
        self.alive = True
        self.lost = False
        self.left = request.n
        self.outputs: list[NDArray[np.uint32] | None] = [None] * request.n
        self.seats: set[int] = set()
        self.parked: list[Parked] = []
        self.error: OutOfBlocksError | None = None

    @property
    def limit(self) -> int:
        """Tokens of each sequence at its end, the prompt included."""
        return len(self.prompt) + self.request.max_tokens

    def blocks_to_end(self, block_size: int) -> int:
        """Most device blocks that the sequences that go on may need, with only the prompt's full blocks shared."""
        shared = (len(self.prompt) - 1) // block_size if self.left > 1 else 0
        return shared + self.left * (-(-self.limit // block_size) - shared)

    def shares_cache_with(self, other: RequestState) -> bool:
        """Whether both prompts may go into one call of `allocate_prompts`."""
        mine, theirs = self.request, other.request
        return mine.salt == theirs.salt and mine.lora_id == theirs.lora_id

    def finished(self) -> Finished:
        """Report the request with the tokens that it has."""
        outputs = tuple(() if tokens is None else tuple(tokens.tolist()) for tokens in self.outputs)
        return Finished(self.request, outputs, self.error)


class Parked:
    """Sequences of one request that do not run: one that waits without blocks, or those that were swapped out together.

    Attributes:
        state: the request.
        indices: which of its sequences.
        tokens: all tokens of each, prompt first, uint32 arrays.
        handles: their handles, uint64 `[n]`; empty while it waits.
        forks: sequences that will fork off at the end of the prompt.
        place: the queue it is in.
        rank: its place in that queue.
    """

    __slots__ = ("forks", "handles", "indices", "place", "rank", "state", "tokens")

    def __init__(
        self,
        state: RequestState,
        indices: list[int],
        tokens: list[NDArray[np.uint32]],
        handles: NDArray[np.uint64] | None = None,
        *,
        forks: int = 0,
    ) -> None:
        self.state = state
        self.indices = indices
        self.tokens = tokens
        self.handles = np.zeros(0, np.uint64) if handles is None else handles
        self.forks = forks
        self.place: Place = "waiting" if handles is None else "swapped"
        self.rank = state.rank


def _token_ids(request: Request) -> NDArray[np.uint32]:
    """Check a request and give its prompt as uint32."""
    if len(request.prompt) < 1 or request.max_tokens < 1 or request.n < 1:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has {len(request.prompt)} prompt tokens, max_tokens "
            f"{request.max_tokens}, n {request.n}; each must be at least 1"
        )
    tokens = np.asarray(request.prompt)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"the prompt of request {request.request_id!r} is {tokens.dtype} {list(tokens.shape)}, "
            f"must be integers [tokens]"
        )
    if tokens.min() < 0 or tokens.max() >= NO_TOKEN:
        raise InvalidArgumentError(
            f"the prompt of request {request.request_id!r} has token ids from {tokens.min()} to {tokens.max()}, "
            f"must be from 0 to {NO_TOKEN - 1}"
        )
    return np.ascontiguousarray(tokens, np.uint32)
