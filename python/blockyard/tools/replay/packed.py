"""`PackedTrace`: the blocks of a trace's prompts as flat arrays, fast to replay and to send to other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest
from blockyard.traces.formats import Hint

__all__ = ["ANSWER_TOKEN", "NEVER", "OWN_TOKENS", "PackedTrace"]

NEVER: Final = np.iinfo(np.int64).max
"""Next use of a block that is never used again."""
OWN_TOKENS: Final = 2**31
"""Token ids from here on are unique to one prompt; those of named blocks are the blocks' numbers."""
ANSWER_TOKEN: Final = OWN_TOKENS - 1
"""Token id of answers that the trace does not name, and of no prompt."""


@dataclass(frozen=True, eq=False)
class PackedTrace:
    """The full blocks of every prompt and its answer. Blocks that end equal beginnings have the same number.

    Attributes:
        block_tokens: tokens per block.
        blocks: the full blocks of all requests, one request after the other, int64 `[n]`; from 0 to `num_distinct - 1`.
        starts: index in `blocks` of each request's first block, and the end of the last request, int64 `[r + 1]`.
        input_tokens: prompt lengths, int64 `[r]`.
        num_distinct: number of distinct blocks.
        answer_blocks: how many of each request's last blocks end in its answer, int64 `[r]`.
        output_tokens: answer lengths, int64 `[r]`.
        arrivals: when each request arrives, in seconds, float64 `[r]`.
        hints: what the engine knows of each conversation when its answer ends; see `TraceRequest.hint`.
    """

    block_tokens: int
    blocks: NDArray[np.int64]
    starts: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    num_distinct: int
    answer_blocks: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrivals: NDArray[np.float64]
    hints: tuple[Hint | None, ...]

    @classmethod
    def of(cls, requests: Sequence[TraceRequest]) -> PackedTrace:
        """Pack the requests of a trace: one block per hash id that covers a whole block.

        Answers are included where the prompt's ids reach its end.

        Raises:
            InvalidArgumentError: no request has hash ids, or ids cover different numbers of tokens, or not a whole
                number.
        """
        sizes = {request.hash_tokens for request in requests if len(request.hash_ids)}
        if not sizes:
            raise InvalidArgumentError("no request has hash ids, so shared prefixes are unknown")
        if len(sizes) != 1 or (size := sizes.pop()) != int(size):
            raise InvalidArgumentError(
                f"requests have hash ids of {sorted(sizes) or size} tokens, all ids must cover the same whole number"
            )
        block_tokens = int(size)
        input_tokens = np.array([request.input_tokens for request in requests], np.int64)
        whole = input_tokens // block_tokens
        counts = np.minimum([len(request.hash_ids) for request in requests], whole)
        answers = np.where(counts == whole, [len(request.output_hash_ids) for request in requests], 0)
        starts = np.zeros(len(requests) + 1, np.int64)
        np.cumsum(counts + answers, out=starts[1:])
        ids = np.zeros(int(starts[-1]), np.int64)
        for number, request in enumerate(requests):
            own = ids[starts[number] : starts[number + 1]]
            own[: counts[number]] = np.asarray(request.hash_ids, np.int64)[: counts[number]]
            own[counts[number] :] = np.asarray(request.output_hash_ids, np.int64)[: answers[number]]
        blocks, num_distinct = _number(ids, starts)
        output_tokens = np.array([request.output_tokens for request in requests], np.int64)
        arrivals = np.array([request.arrival for request in requests], np.float64)
        hints = tuple(request.hint for request in requests)
        answer_blocks = answers.astype(np.int64)
        return cls(
            block_tokens, blocks, starts, input_tokens, num_distinct, answer_blocks, output_tokens, arrivals, hints
        )

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.input_tokens)

    @property
    def num_blocks(self) -> NDArray[np.int64]:
        """Full blocks of each request with its answer, int64 `[r]`."""
        return np.diff(self.starts)

    @property
    def prompt_blocks(self) -> NDArray[np.int64]:
        """Full blocks of each prompt, int64 `[r]`."""
        return self.num_blocks - self.answer_blocks

    @property
    def has_tail(self) -> NDArray[np.bool_]:
        """Whether each prompt has more tokens than its full blocks, bool `[r]`."""
        return self.input_tokens > self.prompt_blocks * self.block_tokens

    @property
    def needed(self) -> NDArray[np.int64]:
        """Total blocks that each request needs, int64 `[r]`. The last token of its answer is not computed."""
        tokens = self.input_tokens + self.output_tokens - 1
        needed: NDArray[np.int64] = np.maximum(-(-tokens // self.block_tokens), self.num_blocks)
        return needed

    @property
    def hittable(self) -> NDArray[np.int64]:
        """Blocks of each prompt that can be hits, int64 `[r]`; its last token is always computed."""
        return np.maximum(self.prompt_blocks - ~self.has_tail, 0)

    def next_uses(self, served: NDArray[np.bool_]) -> NDArray[np.int64]:
        """For each of `blocks`, the next request that can find it cached, or `NEVER`, int64 `[n]`.

        Args:
            served: which requests are served, bool `[r]`.
        """
        owners = np.repeat(np.arange(len(self)), self.num_blocks)
        depths = np.arange(len(self.blocks)) - np.repeat(self.starts[:-1], self.num_blocks)
        order = np.argsort(self.blocks, kind="stable")
        findable = (depths < np.repeat(self.hittable * served, self.num_blocks))[order]
        last_of_block = np.append(np.diff(self.blocks[order]) != 0, True) if len(order) else np.zeros(0, bool)
        # For each use in `order`, the place of the next findable use; computed from the back.
        places = np.where(findable, np.arange(len(order)), len(order))
        after = np.append(np.minimum.accumulate(places[::-1])[::-1][1:], len(order)) if len(order) else places
        ends = np.nonzero(last_of_block)[0]
        end_of = ends[np.searchsorted(ends, np.arange(len(order)))]
        uses = np.full(len(order), NEVER)
        comes = after <= end_of
        uses[comes] = owners[order][after[comes]]
        result = np.empty_like(uses)
        result[order] = uses
        return result


def _number(ids: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Number the blocks: equal ids get one number only after equal ids. Returns the numbers, and how many there are."""
    distinct, dense = np.unique(ids, return_inverse=True)
    parents = np.append(np.int64(-1), dense[:-1]) if len(dense) else dense
    begins = starts[:-1][starts[:-1] < starts[1:]]
    parents[begins] = -1
    known = np.empty(len(distinct), np.int64)
    known[dense] = parents
    if np.array_equal(known[dense], parents):  # each id has one parent, as in Mooncake's traces
        return dense.astype(np.int64), len(distinct)
    numbers = np.empty(len(dense), np.int64)
    count = depth = 0
    running = np.nonzero(starts[:-1] < starts[1:])[0]
    before = np.zeros(len(running), np.int64)
    while len(running):
        places = starts[running] + depth
        pairs, found = np.unique(before * len(distinct) + dense[places], return_inverse=True)
        numbers[places] = count + found
        before = found.astype(np.int64)
        count += len(pairs)
        depth += 1
        left = starts[running] + depth < starts[running + 1]
        running, before = running[left], before[left]
    return numbers, count
