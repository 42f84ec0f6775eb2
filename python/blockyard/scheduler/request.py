"""Requests and their scheduler state: Python objects that only events touch, never a plain step."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from math import isnan
from operator import index, is_
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import HashedPrompt
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.layout.sizes import as_float, as_int

__all__ = ["Fetch", "Finished", "IdleSequences", "Rank", "Request", "RequestState", "SequenceStatus"]

Rank: TypeAlias = tuple[int, float, int]
"""Priority, arrival and number of a request; the lowest goes first."""

HINTS: Final = ("over", "tool_call", "turn")
NO_TOKEN = 0xFFFF_FFFF
"""The only uint32 that the prefix cache does not accept as a token id."""
PRIORITIES = 1 << 63
LORA_IDS = 1 << 64
LONGEST = (1 << 32) - 1
"""Maximum number of tokens of a sequence in a manager."""
STOP_TOKEN_LIMIT = 1 << 24
MAX_RETAIN = 86_400.0
NO_TOKENS: NDArray[np.uint32] = np.zeros(0, np.uint32)
NO_HANDLES: NDArray[np.uint64] = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its generation options.

    Args:
        request_id: the caller's name for the request.
        prompt: token ids, `[tokens]` integers from 0 to 4294967294, at least one.
        max_tokens: tokens to generate for each sequence, at least one.
        n: sequences to generate.
        priority: lower goes first.
        arrival: time in seconds; earlier goes first within a priority.
        stop_token_ids: a sequence ends with any of these.
        salt: isolates tenants in the prefix cache: prompts share blocks only with prompts of the same salt.
        lora_id: adapter of the request; 0 for none. Prompts share blocks only within an adapter. With a prefix store,
            every process must give an adapter the same number, such as 8 bytes of a digest of its weights.
        extras: other inputs that determine what the model computes, such as images: `(start, length, digest)` with the
            position of the first token, the number of tokens and bytes. They lie within the prompt and the `max_tokens`
            after it. Requests share a block only if the extras of its tokens and of all before them are equal.
        hint: what you know of the conversation when the request ends: `"over"`, `"tool_call"` or `"turn"`, see
            `BlockManager.free`; None if you do not know.
        retain: seconds for which the blocks of its sequences are evicted after all other cached blocks once they end.
            They make room for whatever needs it. Ends with the scheduler's next step after that time. Needs prefix
            caching.

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
    extras: Sequence[tuple[int, int, bytes]] = ()
    hint: Literal["over", "tool_call", "turn"] | None = None
    retain: float = 0.0

    def __post_init__(self) -> None:
        """Turn NumPy's numbers into Python's, whose sums do not overflow. `Scheduler.add` refuses all other values."""
        for name in ("max_tokens", "n", "priority", "lora_id", "retain"):
            if isinstance(value := getattr(self, name), np.number if name == "retain" else np.integer):
                object.__setattr__(self, name, value.item())


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request that has ended.

    Attributes:
        request: the request as it was added.
        token_ids: generated tokens of each of its `n` sequences, uint32 arrays.
        error: why it ended early, or None. The cause is a device that shrank and can no longer hold the request.
    """

    request: Request
    token_ids: tuple[NDArray[np.uint32], ...]
    error: OutOfBlocksError | None = None

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """`token_ids` as tuples of ints; built on each access."""
        return tuple(tuple(tokens.tolist()) for tokens in self.token_ids)


class RequestState:
    """A request in the scheduler.

    Args:
        request: the caller's request.
        number: sequence number, increasing with each added request.
        max_num_seqs: maximum of `request.n`.

    Raises:
        InvalidArgumentError: the request is malformed.

    Attributes:
        prompt: token ids, uint32 `[tokens]`.
        rank: its position in every queue.
        chunk: maximum tokens of its prompt that a step computes; set at admission if it makes a difference.
        admitted: whether its prompt was looked up in the prefix cache before; hits of a preempted request do not count.
        alive: False once it is aborted, refused or done.
        lost: its sequences lost bytes and must start again.
        limit: maximum length of each sequence in tokens, prompt included.
        extras: a copy of the request's.
        is_keyed: whether it has a salt, an adapter or extras.
        stops: tokens that end a sequence.
        places: for each unfinished sequence its seat, or all of its tokens if it has no seat. A sequence changes its
            place in one assignment, after the tokens are there, so an exception at any line loses no token.
        outputs: generated tokens of each sequence that has ended.
        seats: seats of its running sequences.
        idle: its other sequences.
        error: why it was refused, if it was.
        context: of the call that added it, the parent of the spans of its prefetches.
    """

    __slots__ = (
        "admitted",
        "alive",
        "chunk",
        "context",
        "error",
        "extras",
        "idle",
        "is_keyed",
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

    def __init__(self, request: Request, number: int, max_num_seqs: int) -> None:
        _check_fields(request, max_num_seqs)
        self.request = request
        self.prompt = _token_ids(request)
        self.rank = _rank(request, number)
        self.chunk = LONGEST
        self.admitted = False
        self.alive = True
        self.lost = False
        self.limit = len(self.prompt) + request.max_tokens
        if self.limit > LONGEST:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has {len(self.prompt)} prompt tokens and max_tokens "
                f"{request.max_tokens}, must be at most {LONGEST} together"
            )
        self.extras = _extras(request, self.limit)
        self.is_keyed = request.salt is not None or request.lora_id != 0 or len(self.extras) > 0
        self.stops = _stops(request)
        self.places: list[int | NDArray[np.uint32]] = [self.prompt] * request.n
        self.outputs: list[NDArray[np.uint32] | None] = [None] * request.n
        self.seats: set[int] = set()
        self.idle: list[IdleSequences] = []
        self.error: OutOfBlocksError | None = None
        self.context = copy_context()

    @property
    def left(self) -> int:
        """Number of sequences that have not ended."""
        return sum(map(is_, self.outputs, repeat(None)))

    def generated(self, index: int) -> NDArray[np.uint32]:
        """Return the generated tokens of a sequence that has ended or has no seat."""
        if (output := self.outputs[index]) is not None:
            return output
        place = self.places[index]
        return NO_TOKENS if isinstance(place, int) else place[len(self.prompt) :]

    def restart(self) -> list[IdleSequences]:
        """Return the waiting sequences if all start again from their tokens; none may have a seat.

        Sequences that already have all of their tokens end.
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

    def finished(self) -> Finished:
        """Return the request with its tokens so far."""
        return Finished(self.request, tuple(map(self.generated, range(self.request.n))), self.error)


Owner: TypeAlias = tuple[RequestState, int]
"""The request of a seat, and the index of its sequence in that seat."""


class Fetch(Protocol):
    """Returned by `Scheduler(prefetch=...)` for a prompt; for example a `Prefetch`."""

    @property
    def done(self) -> bool:
        """Whether the prompt can be admitted. Eventually true, even if the load fails; never waits."""


class SequenceStatus(Enum):
    """Status of idle sequences.

    Attributes:
        WAITING: without blocks, in the queue for admission.
        SWAPPED: with blocks on the host or in the external tier, in the queue of swapped sequences.
        RETURNING: their blocks are arriving from the external tier.
        RUNNING: taken from a queue, to run or because they were dropped.
    """

    WAITING = "waiting"
    SWAPPED = "swapped"
    RETURNING = "returning"
    RUNNING = "running"


class IdleSequences:
    """Idle sequences of one request: either one that waits without blocks, or several that were swapped out together.

    Attributes:
        state: the request.
        indices: indices of its sequences.
        tokens: all tokens of each sequence, prompt first, uint32 arrays.
        handles: their handles, uint64 `[n]`; empty for a waiting sequence.
        forks: sequences that will fork off at the end of the prompt.
        hashed: its tokens with their prefix-cache keys, once computed.
        blocks: device blocks that it takes, once looked up; see `RoomAhead`.
        fetch: the load of its beginning from a prefix store, once started.
        lease: number of the lease of its blocks, while it waits; see `LoadingAhead`.
        overtaken: requests behind it that started before it.
        status: whether they wait, are swapped out, or are returning.
        rank: their position in a queue.
    """

    __slots__ = (
        "blocks",
        "fetch",
        "forks",
        "handles",
        "hashed",
        "indices",
        "lease",
        "overtaken",
        "rank",
        "state",
        "status",
        "tokens",
    )

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
        self.handles = NO_HANDLES if handles is None else handles
        self.forks = forks
        self.blocks: int | None = None
        self.hashed: HashedPrompt | None = None
        self.fetch: Fetch | None = None
        self.lease: int | None = None
        self.overtaken = 0
        self.status = SequenceStatus.WAITING if handles is None else SequenceStatus.SWAPPED
        self.rank = state.rank
        for sequence, known in zip(indices, tokens, strict=True):
            state.places[sequence] = known

    def is_loading(self) -> bool:
        """Whether the load of the prompt's beginning is in flight; polls the prefix store."""
        return self.fetch is not None and not self.fetch.done


def _check_fields(request: Request, max_num_seqs: int) -> None:
    """Raise now what would raise in the middle of every later step."""
    for name in ("max_tokens", "n", "lora_id"):
        if type(value := getattr(request, name)) is not int:
            as_int(f"request {request.request_id!r}: {name}", value)
    if not 0 <= request.lora_id < LORA_IDS:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has lora_id {request.lora_id}, must be 0 to {LORA_IDS - 1}"
        )
    if request.salt is not None and not isinstance(request.salt, bytes | bytearray):
        raise InvalidArgumentError(f"request {request.request_id!r} has salt {request.salt!r}, must be bytes or None")
    if request.hint is not None and not (isinstance(request.hint, str) and request.hint in HINTS):
        raise InvalidArgumentError(
            f"request {request.request_id!r} has hint {request.hint!r:.60}, must be None or one of {', '.join(HINTS)}"
        )
    if not 0 <= as_float(f"request {request.request_id!r}: retain", request.retain) <= MAX_RETAIN:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has retain {request.retain}, must be seconds from 0 to {MAX_RETAIN:g}"
        )
    if request.retain and request.hint == "over":
        raise InvalidArgumentError(
            f"request {request.request_id!r} has retain {request.retain} and hint 'over', must have one of them"
        )
    if request.n > max_num_seqs:
        raise InvalidArgumentError(
            f"request {request.request_id!r} wants {request.n} sequences, max_num_seqs is {max_num_seqs}"
        )


def _extras(request: Request, limit: int) -> tuple[tuple[int, int, bytes], ...]:
    """Check and copy a request's extras."""
    if isinstance(request.extras, tuple) and not request.extras:
        return ()
    if not isinstance(request.extras, list | tuple):
        raise InvalidArgumentError(
            f"request {request.request_id!r} has extras {request.extras!r:.100}, must be a list of "
            f"(start, length, digest)"
        )
    found = []
    for at, extra in enumerate(request.extras):
        what = f"request {request.request_id!r}: extras[{at}]"
        if not isinstance(extra, tuple | list) or len(extra) != 3 or not isinstance(extra[2], bytes | bytearray):
            raise InvalidArgumentError(
                f"{what} is {extra!r:.100}, must be (start, length, digest) with bytes as digest"
            )
        start, length = as_int(f"{what}[0]", extra[0]), as_int(f"{what}[1]", extra[1])
        if start < 0 or length < 1 or start + length > limit:
            raise InvalidArgumentError(
                f"{what} covers {length} tokens from {start} on, must cover at least 1 and end at {limit} or before: "
                f"prompt and max_tokens"
            )
        found.append((start, length, bytes(extra[2])))
    return tuple(found)


def _rank(request: Request, number: int) -> Rank:
    """Return a request's rank, after checking that it fits the fields of `SequenceRows`."""
    try:
        priority, arrival = index(request.priority), float(request.arrival)
    except (TypeError, ValueError, OverflowError):
        priority, arrival = PRIORITIES, 0.0
    if not -PRIORITIES <= priority < PRIORITIES or isnan(arrival):  # no order has a NaN
        raise InvalidArgumentError(
            f"request {request.request_id!r} has priority {request.priority!r}, arrival {request.arrival!r}; must be "
            f"an int of 64 bits and a number"
        )
    return priority, arrival, number


def _stops(request: Request) -> frozenset[int]:
    """Check and return a request's stop tokens."""
    try:
        stops = frozenset(map(index, request.stop_token_ids))
    except TypeError:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has stop_token_ids {request.stop_token_ids!r:.100}, must be a set of ints"
        ) from None
    if stops and (min(stops) < 0 or max(stops) >= STOP_TOKEN_LIMIT):
        raise InvalidArgumentError(
            f"stop_token_ids go from {min(stops)} to {max(stops)}, must be from 0 to {STOP_TOKEN_LIMIT - 1}"
        )
    return stops


def _token_ids(request: Request) -> NDArray[np.uint32]:
    """Check a request and return its prompt as uint32."""
    try:
        tokens = np.asarray(request.prompt)
    except ValueError as error:  # lists of unequal lengths
        raise InvalidArgumentError(f"the prompt of request {request.request_id!r}: {error}") from None
    if (tokens.ndim and not len(tokens)) or request.max_tokens < 1 or request.n < 1:
        raise InvalidArgumentError(
            f"request {request.request_id!r} has {tokens.size} prompt tokens, max_tokens "
            f"{request.max_tokens}, n {request.n}; each must be at least 1"
        )
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"the prompt of request {request.request_id!r} is {tokens.dtype} {list(tokens.shape)}, "
            f"must be integers [tokens]"
        )
    if (tokens.dtype.kind == "i" and tokens.min() < 0) or tokens.max() >= NO_TOKEN:
        raise InvalidArgumentError(
            f"the prompt of request {request.request_id!r} has token ids from {tokens.min()} to {tokens.max()}, "
            f"must be from 0 to {NO_TOKEN - 1}"
        )
    # Copied: the scheduler reads it until the request ends, while the caller may write to its own array.
    return np.array(tokens, np.uint32)
