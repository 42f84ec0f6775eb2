"""A request and its sequences as the scheduler sees them: tokens, and the handles of those that have blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockyard.errors import OutOfBlocksError, SequenceStateError


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what is wanted of it.

    Args:
        request_id: the caller's name for it.
        prompt: token ids, at least one.
        max_tokens: tokens to generate for each sequence, at least one.
        n: sequences to generate.
        priority: lower goes first.
        arrival: seconds; earlier goes first within a priority.
        stop_token_ids: a sequence ends with any of these.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    n: int = 1
    priority: int = 0
    arrival: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is done: the tokens generated for each of its `n` sequences.

    `error` says why it ended early, if it did: the device shrank, and could not hold it to its end any more.
    """

    request: Request
    outputs: tuple[tuple[int, ...], ...]
    error: OutOfBlocksError | None = None


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence: its tokens, prompt first, of which the first `computed` have KV under `handle`."""

    index: int
    tokens: list[int]
    prompt_len: int
    handle: int | None = None
    computed: int = 0
    finished: bool = False

    def on_device(self) -> int:
        """The handle of a sequence that runs.

        Raises:
            SequenceStateError: it has no blocks.
        """
        if self.handle is None:
            raise SequenceStateError(f"sequence {self.index} has no blocks")
        return self.handle


class Share(NamedTuple):
    """How many of a sequence's first tokens it can share with an earlier one of its request."""

    sequence: TokenSequence
    earlier: TokenSequence | None
    tokens: int


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request in the scheduler's queues, which `key` orders; in none, if `error` says why it was refused."""

    request: Request
    key: tuple[int, float, int]
    sequences: list[TokenSequence]
    alive: bool = True
    error: OutOfBlocksError | None = None

    @property
    def seats(self) -> int:
        """Sequences that are to go on, those included that will fork off the prompt."""
        return self.request.n - sum(sequence.finished for sequence in self.sequences)

    def unfinished(self) -> list[TokenSequence]:
        """Sequences that are to go on."""
        return [sequence for sequence in self.sequences if not sequence.finished]

    def handles(self) -> list[int]:
        """Handles of the sequences that have blocks."""
        return [sequence.handle for sequence in self.sequences if sequence.handle is not None]

    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Tokens generated so far for each sequence."""
        begun = [tuple(sequence.tokens[sequence.prompt_len :]) for sequence in self.sequences]
        return (*begun, *[()] * (self.request.n - len(begun)))

    def blocks_to_end(self, block_size: int) -> int:
        """Most device blocks that the sequences that are to go on may need, sharing the prompt's full blocks alone."""
        prompt, seats = len(self.request.prompt), self.seats
        shared = (prompt - 1) // block_size if seats > 1 else 0
        return shared + seats * (-(-(prompt + self.request.max_tokens) // block_size) - shared)

    def shares(self, block_size: int) -> list[Share]:
        """For each sequence, an earlier one of the request and how many of its first tokens it can share.

        Whole blocks only, and never all tokens: the last one's logits are wanted.
        """
        shares: list[Share] = []
        for sequence in self.unfinished():
            best: tuple[TokenSequence | None, int] = (None, 0)
            for earlier in (share.sequence for share in shares):
                common = min(common_prefix(earlier.tokens, sequence.tokens), len(sequence.tokens) - 1)
                whole = common - common % block_size
                if whole > best[1]:
                    best = (earlier, whole)
            shares.append(Share(sequence, *best))
        return shares


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
