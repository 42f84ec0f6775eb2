"""Requests, and what the scheduler keeps for each: Python objects that only events touch, never a plain step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import HashedPrompt
from blockyard.errors import InvalidArgumentError, OutOfBlocksError

__all__ = ["Fetch", "Finished", "IdleSequences", "Place", "Rank", "Request", "RequestState"]

Rank: TypeAlias = tuple[int, float, int]
"""Priority, arrival and number of a request; the lowest goes first."""
Place: TypeAlias = Literal["waiting", "swapped", "returning", "running"]

NO_TOKEN = 0xFFFF_FFFF
"""The one uint32 that the prefix cache takes for no token id."""
PRIORITIES = 1 << 63
LARGEST_STOP = 1 << 24
NO_TOKENS: NDArray[np.uint32] = np.zeros(0, np.uint32)


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

    Example:
        >>> from blockyard import Request
        >>> request = Request("a", [1, 2, 3], max_tokens=64, stop_token_ids=frozenset({2}))
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


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request that is done.

    Attributes:
        request: as it was added.
        token_ids: what was generated for each of its `n` sequences, uint32 arrays.
        error: why it ended early, or None: the device shrank and can no longer hold the request to its end.
    """

    request: Request
    token_ids: tuple[NDArray[np.uint32], ...]
    error: OutOfBlocksError | None = None

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """`token_ids` as tuples of ints; made at each use."""
        return tuple(tuple(tokens.tolist()) for tokens in self.token_ids)


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
        limit: tokens of each sequence at its end, the prompt included.
        stops: tokens that end a sequence.
        places: of each sequence that has not ended its seat, or all of its tokens where it has none. Whoever moves a
            sequence changes its place in one assignment, after the tokens are there, so that an exception at any line
            loses no token.
        outputs: of each sequence what it has generated, once it has ended.
        seats: seats of its sequences that run.
        idle: its sequences that do not.
        error: why it was refused, once it was.
    """

    __slots__ = (
        "alive",
        "error",
        "idle",
        "limit",
        "lost",
        "outputs",
        "places",
        "prompt",
        "rank",
        "request",
        "seats",
        "stops",
    )

    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.prompt = _token_ids(request)
        self.rank = _rank(request, number)
        self.alive = True
        self.lost = False
        self.limit = len(self.prompt) + request.max_tokens
        self.stops = _stops(request)
        self.places: list[int | NDArray[np.uint32]] = [self.prompt] * request.n
        self.outputs: list[NDArray[np.uint32] | None] = [None] * request.n
        self.seats: set[int] = set()
        self.idle: list[IdleSequences] = []
        self.error: OutOfBlocksError | None = None

    @property
    def left(self) -> int:
        """Sequences that have not ended."""
        return sum(tokens is None for tokens in self.outputs)

    def generated(self, index: int) -> NDArray[np.uint32]:
        """Give what a sequence has generated; it has ended, or has no seat."""
        output, place = self.outputs[index], self.places[index]
        if output is not None:
            return output
        return NO_TOKENS if isinstance(place, int) else place[len(self.prompt) :]

    def start_over(self) -> list[IdleSequences]:
        """Give what waits if all sequences start again from their tokens; none has a seat.

        Those that have all of their tokens end.
        """
        self.lost = False
        self.seats, self.idle = set(), []
        waiting = []
        for sequence, tokens in enumerate(self.places):
            generated = self.generated(sequence)
            if len(generated) == self.request.max_tokens or not self.stops.isdisjoint(generated[-1:].tolist()):
                self.outputs[sequence] = generated
            elif self.outputs[sequence] is None and not isinstance(tokens, int):
                waiting.append(IdleSequences(self, [sequence], [tokens]))
        self.alive = self.error is None and bool(waiting)
        if self.alive and not any(len(self.generated(sequence)) for sequence in range(self.request.n)):
            waiting = [IdleSequences(self, [0], [self.prompt], forks=self.request.n - 1)]
        return waiting if self.alive else []

    def blocks_to_end(self, block_size: int) -> int:
        """Most device blocks that the sequences that go on may need, with only the prompt's full blocks shared."""
        left = self.left
        shared = (len(self.prompt) - 1) // block_size if left > 1 else 0
        return shared + left * (-(-self.limit // block_size) - shared)

    def finished(self) -> Finished:
        """Report the request with the tokens that it has."""
        return Finished(self.request, tuple(map(self.generated, range(self.request.n))), self.error)


Owner: TypeAlias = tuple[RequestState, int]
"""The request of a seat, and which of its sequences sits there."""


class Fetch(Protocol):
    """What `Scheduler(prefetch=...)` returns for a prompt, such as a `Prefetch`."""

    @property
    def done(self) -> bool:
        """Whether the prompt can be admitted. True some time, whatever becomes of the load; never waits."""


class IdleSequences:
    """Sequences of one request that do not run: one that waits without blocks, or those that were swapped out together.

    Attributes:
        state: the request.
        indices: which of its sequences.
        tokens: all tokens of each, prompt first, uint32 arrays.
        handles: their handles, uint64 `[n]`; empty while it waits.
        forks: sequences that will fork off at the end of the prompt.
        hashed: its tokens with their keys, once the prefix cache was asked for them.
        fetch: what loads its beginning from a prefix store, once that has begun.
        place: the queue it is in.
        rank: its place in that queue.
    """

    __slots__ = ("fetch", "forks", "handles", "hashed", "indices", "place", "rank", "state", "tokens")

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
        self.hashed: HashedPrompt | None = None
        self.fetch: Fetch | None = None
        self.place: Place = "waiting" if handles is None else "swapped"
        self.rank = state.rank
        for sequence, text in zip(indices, tokens, strict=True):
            state.places[sequence] = text


def _rank(request: Request, number: int) -> Rank:
    """Give a request's place in every queue; it must fit into a field of `SequenceRows`."""
    try:
        priority, arrival = index(request.priority), float(request.arrival)
    except (TypeError, ValueError, OverflowError):
        priority, arrival = PRIORITIES, 0.0
    if not -PRIORITIES <= priority < PRIORITIES:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has priority {request.priority!r}, arrival {request.arrival!r}; must be "
            f"an int of 64 bits and a number"
        )
    return priority, arrival, number


def _stops(request: Request) -> frozenset[int]:
    """Check a request's stop tokens."""
    stops = frozenset(request.stop_token_ids)
    if stops and (min(stops) < 0 or max(stops) >= LARGEST_STOP):
        raise InvalidArgumentError(
            f"stop_token_ids go from {min(stops)} to {max(stops)}, must be from 0 to {LARGEST_STOP - 1}"
        )
    return stops


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
    # A copy: the scheduler reads it until the request ends, and the caller may write to its array meanwhile.
    return np.array(tokens, np.uint32)
