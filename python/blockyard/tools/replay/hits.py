"""Counts the hits of a cache of one size and policy: sends one request at a time through a real `BlockManager`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard import AllocStatus, Arena, BlockManager, CacheGroup, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.optimal import optimal_hits
from blockyard.tools.replay.packed import ANSWER_TOKEN, OWN_TOKENS, PackedTrace
from blockyard.types import HashedPrompt
from blockyard.types import Sequence as BlockSequence

__all__ = [
    "MAX_OPEN_TICKETS",
    "OPTIMAL",
    "POLICIES",
    "ClassMemory",
    "Hits",
    "HybridMemory",
    "class_memory",
    "replay_hits",
]

POLICIES: Final = ("lru", "adaptive")
OPTIMAL: Final = "optimal"
MAX_OPEN_TICKETS: Final = 1 << 20
"""A replay ends each ticket when its copies land in virtual time: behind a slow link, hundreds of steps later."""
_MAX_TOKENS: Final = 16
"""Longest blocks that are replayed with all their tokens, and so with the engine's keys: they take one hash."""
_FEW_TOKENS: Final = 2
"""Tokens of a longer block in the manager: enough to tell a part of a block from the whole."""


@dataclass(frozen=True)
class HybridMemory:
    """How a hybrid model uses a cache's memory: its groups share it, as far as each needs.

    Attributes:
        groups: cache groups; keys stand for a block of the trace. With bytes of their blocks, see
            `ArenaLayout.cache_groups`, they share an arena; without, all blocks are equal.
        block_bytes: bytes of a block in the size of a cache; 0 if all blocks are equal.

    Raises:
        InvalidArgumentError: only one of both has bytes.
    """

    groups: tuple[CacheGroup, ...]
    block_bytes: int

    def __post_init__(self) -> None:
        sizes = [group.block_bytes for group in self.groups]
        if not sizes or (None in sizes) == bool(self.block_bytes):
            raise InvalidArgumentError(
                f"block_bytes is {self.block_bytes} with groups of {sizes} bytes, must be 0 without, else positive"
            )

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], block_size: int, lengths: Iterable[int]) -> HybridMemory:
        """Size a cache in blocks of the mean bytes that requests of such lengths take.

        Args:
            groups: cache groups.
            block_size: tokens that a key stands for.
            lengths: tokens of requests.
        """
        if any(group.block_bytes is None for group in groups):
            return cls(tuple(groups), 0)
        total = num_tokens = 0
        for tokens in lengths:
            num_tokens += tokens
            for group in groups:
                blocks = group.peak_blocks(tokens, block_size=block_size, chunk_tokens=1)
                total += blocks * (group.block_bytes or 0)
        return cls(tuple(groups), max(1, -(-total * block_size // max(num_tokens, 1))))

    def manager(
        self, block_size: int, device_blocks: int, host_blocks: int, watermark: float, caching: PrefixCaching | None
    ) -> BlockManager | None:
        """Return a manager of caches of such sizes; None if the device holds too few blocks for any request."""
        size = self.block_bytes
        tiers: dict[str, Any] = {"device_blocks": device_blocks, "host_blocks": host_blocks}
        if size:
            tiers = {"arena": Arena(device_bytes=device_blocks * size, host_bytes=host_blocks * size)}
        try:
            return BlockManager(
                block_size=block_size,
                groups=self.groups,
                watermark=watermark,
                prefix_caching=caching or False,
                max_open_tickets=MAX_OPEN_TICKETS,
                **tiers,
            )
        except InvalidArgumentError as error:
            if device_blocks < 1 or not str(error).startswith("device_blocks is "):
                raise
            return None  # a class has no block, or only the null block


@dataclass(frozen=True)
class ClassMemory:
    """The memory of one page class.

    Attributes:
        kinds: kinds of the cache groups whose blocks it has.
        block_bytes: bytes of a block; 1 if they are not known: the other sizes then count blocks.
        device: bytes of device blocks that are cached or in use.
        host: bytes of such host blocks.
    """

    kinds: tuple[str, ...]
    block_bytes: int
    device: int
    host: int

    def of_blocks(self, size: int) -> ClassMemory:
        """Return the same with `size` bytes per block, if they are not known."""
        if self.block_bytes != 1:
            return self
        return replace(self, block_bytes=size, device=self.device * size, host=self.host * size)


def class_memory(manager: BlockManager) -> tuple[ClassMemory, ...]:
    """Return what the blocks of each page class take at the moment."""
    found, kinds_of_all = [], {group.kind for group in manager.groups}
    nulls = int(not kinds_of_all <= {"full_attention", "drafter"})  # of the first class: it has the null block of all
    for number in range(manager.num_page_classes):
        device, host = manager.pool("device", number), manager.pool("host", number)
        size = device.block_bytes
        kinds = dict.fromkeys(group.kind for group in manager.groups if (group.block_bytes or 1) == size)
        held = [int(np.count_nonzero(pool.uses())) * size for pool in (device, host)]
        found.append(ClassMemory(tuple(kinds), size, held[0] - nulls * size * (number == 0), held[1]))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Hits:
    """The hits of a cache of one size and policy.

    Attributes:
        policy: the eviction policy.
        device_blocks: size of the pool.
        host_blocks: size of the host tier.
        device: number of blocks that each request found on the device, int64 `[r]`.
        host: number of blocks that each request found on the host, int64 `[r]`.
        too_long: number of requests that need more blocks than the pool has; they are left out.
        classes: memory of each page class at the end; empty with `"optimal"`.
    """

    policy: str
    device_blocks: int
    host_blocks: int
    device: NDArray[np.int64]
    host: NDArray[np.int64]
    too_long: int
    classes: tuple[ClassMemory, ...] = ()


def replay_hits(
    trace: PackedTrace,
    policy: str,
    device_blocks: int,
    *,
    host_blocks: int = 0,
    max_num_batched_tokens: int = 8192,
    hybrid: HybridMemory | None = None,
) -> Hits:
    """Send every request through a pool. Each is looked up, computed and freed before the next one comes.

    Each takes no time, and ends with the trace's hint. Blocks that the device evicts move to the host, if there is one.
    An answer takes blocks, too; a later prompt finds them if the trace identifies them, as recordings do. In a hybrid
    model a prompt finds blocks up to a resume point only.

    `replay_times` finds the same blocks if requests come one at a time, no copy takes time, its `block_size` is the
    trace's, and its watermark is 0. It differs a little with a host, as it decides up to 64 steps of decoding at once,
    and if a block has more than 16 tokens, as `"adaptive"` then follows another sample of blocks.

    Args:
        trace: the requests.
        policy: `"lru"`, `"adaptive"`, or `"optimal"`, which knows the future and has no host tier.
        device_blocks: size of the pool, at least 1.
        host_blocks: size of the host tier.
        max_num_batched_tokens: maximum number of tokens in a step, at least 1; longer prompts are computed in chunks.
        hybrid: of a model with windows or states; None for one that keeps all tokens.

    Raises:
        InvalidArgumentError: the policy is unknown, a size is out of range, `"optimal"` has a host tier or a hybrid
            model, or the manager has no host tier for the model's groups.
    """
    if policy not in (*POLICIES, OPTIMAL):
        raise InvalidArgumentError(f"policy is {policy!r}, must be one of {', '.join((*POLICIES, OPTIMAL))}")
    if device_blocks < 1 or host_blocks < 0:
        raise InvalidArgumentError(
            f"device_blocks is {device_blocks}, host_blocks {host_blocks}, must be at least 1 and 0"
        )
    if max_num_batched_tokens < 1:
        raise InvalidArgumentError(f"max_num_batched_tokens is {max_num_batched_tokens}, must be at least 1")
    if policy == OPTIMAL and (host_blocks or hybrid):
        what = f"host_blocks is {host_blocks}, must be 0" if host_blocks else "hybrid is given, must be None"
        raise InvalidArgumentError(f"{what} with policy 'optimal'")
    if policy == OPTIMAL:
        none, too_long = np.zeros(len(trace), np.int64), int((trace.needed > device_blocks).sum())
        return Hits(policy, device_blocks, 0, optimal_hits(trace, device_blocks), none, too_long)
    manager = _manager(trace, policy, device_blocks, host_blocks, hybrid)
    if manager is None:
        none = np.zeros(len(trace), np.int64)
        return Hits(policy, device_blocks, host_blocks, none, none, len(trace))
    server = _RequestServer(trace, manager, max_num_batched_tokens, policy, is_hybrid=hybrid is not None)
    device, host, too_long = server.serve_all()
    return Hits(policy, device_blocks, host_blocks, device, host, too_long, class_memory(manager))


def _manager(
    trace: PackedTrace, policy: str, device_blocks: int, host_blocks: int, hybrid: HybridMemory | None
) -> BlockManager | None:
    caching = PrefixCaching(eviction=policy, host=host_blocks > 0)
    if hybrid is None:
        return BlockManager(
            block_size=trace.block_tokens if trace.block_tokens <= _MAX_TOKENS else _FEW_TOKENS,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            watermark=0.0,
            prefix_caching=caching,
        )
    return hybrid.manager(trace.block_tokens, device_blocks, host_blocks, 0.0, caching)


class _RequestServer:
    """Serves requests one at a time, in the steps of an engine."""

    def __init__(self, trace: PackedTrace, manager: BlockManager, budget: int, policy: str, *, is_hybrid: bool) -> None:
        self._manager, self._trace, self._is_hybrid = manager, trace, is_hybrid
        self._size, self._block_tokens = manager.block_size, trace.block_tokens
        self._with_host = bool(manager.pool("host").num_blocks)
        # What stays cached depends on what one step evicts, except in a device pool that evicts by LRU. There one step
        # computes all. A step of decoding takes at most one block. In a hybrid model a chunk ends at a resume point.
        self._by_block = self._with_host or policy != "lru" or is_hybrid
        self._now = 0.0
        self._budget = budget if self._by_block else OWN_TOKENS

    def serve_all(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Serve all requests that fit.

        Returns:
            The blocks that each one finds on the device, and on the host alone; how many requests are too long.
        """
        trace, manager, size = self._trace, self._manager, self._size
        parts, starts = _parts(trace)
        named = np.maximum(trace.input_tokens, trace.num_blocks * trace.block_tokens)
        ends = np.maximum(trace.input_tokens + trace.output_tokens - 1, named)
        prompt_ends, named_ends, text_ends = (self._all_scaled(each) for each in (trace.input_tokens, named, ends))
        inputs, ends = trace.input_tokens.tolist(), ends.tolist()
        found, host, arrivals = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64), trace.arrivals.tolist()
        fits = (trace.needed <= manager.pool().num_blocks).tolist()
        chunk, too_long = self._scaled(self._budget), 0
        for number in range(len(trace)):
            text = np.repeat(parts[starts[number] : starts[number + 1]], size)
            if named_ends[number] < len(text):
                text[named_ends[number] :] = ANSWER_TOKEN
            if not (self._fits(text, prompt_ends[number], text_ends[number]) if self._is_hybrid else fits[number]):
                too_long += 1
                continue
            self._now = arrivals[number]
            prompt: NDArray[np.uint32] | HashedPrompt = text[: prompt_ends[number]]
            if self._with_host:
                prompt = manager.prefix.hash(text[: prompt_ends[number]])
                host[number] = manager.prefix.lookup(prompt).host_blocks
            sequence = manager.allocate(prompt, chunk_tokens=chunk)
            self._compute(sequence)
            found[number] = hits = sequence.cached_tokens // size
            done = hits * self._block_tokens + self._budget
            if self._is_hybrid:
                self._prefill_to_points(sequence)
            elif done < inputs[number]:
                self._prefill(sequence, done, inputs[number])
            if inputs[number] < ends[number]:
                self._decode(sequence, inputs[number], ends[number], text)
            manager.free(sequence, hint=trace.hints[number])
        return found - host, host, too_long

    def _fits(self, text: NDArray[np.uint32], prompt_end: int, end: int) -> bool:
        """Whether the device holds a request of a hybrid model with its answer."""
        prompt, answer = text[:prompt_end], end - prompt_end
        fit = self._manager.can_allocate(prompt, chunk_tokens=self._budget, max_tokens=answer)
        return fit.status != AllocStatus.NEVER

    def _prefill(self, sequence: BlockSequence, done: int, end: int) -> None:
        """Compute the rest of a prompt in chunks."""
        while done < end:
            upto = min(end, done + self._budget)
            if more := self._scaled(upto) - self._scaled(done):
                self._manager.append(sequence, more)
                self._compute(sequence)
            done = upto

    def _prefill_to_points(self, sequence: BlockSequence) -> None:
        """Compute the rest of a prompt in chunks that end at resume points."""
        while count := self._manager.next_chunk(sequence, self._budget):
            self._manager.append(sequence, count)
            self._compute(sequence)

    def _decode(self, sequence: BlockSequence, done: int, end: int, text: NDArray[np.uint32]) -> None:
        while done < end:
            upto = min(end, (done // self._block_tokens + 1) * self._block_tokens) if self._by_block else end
            begin, stop = self._scaled(done), self._scaled(upto)
            if begin < stop:
                self._manager.append(sequence, stop - begin, token_ids=text[begin:stop])
            if begin < stop or self._with_host:
                self._compute(sequence, upto - done)
            done = upto

    def _compute(self, sequence: BlockSequence, steps: int = 1) -> None:
        """Take the decisions of some steps, until one moves no block, and publish the blocks that they fill."""
        manager = self._manager
        for _ in range(steps if self._with_host else 1):
            decision = manager.take_decision(now=self._now)
            manager.complete(decision.ticket)
            if not decision:
                break
        manager.mark_computed(sequence)

    def _scaled(self, tokens: int) -> int:
        """Convert tokens of the trace to those of the manager; a part of a block stays a part."""
        blocks, rest = divmod(tokens, self._block_tokens)
        return blocks * self._size + min(rest, self._size - 1)

    def _all_scaled(self, tokens: NDArray[np.int64]) -> list[int]:
        blocks, rest = np.divmod(tokens, self._block_tokens)
        scaled: list[int] = (blocks * self._size + np.minimum(rest, self._size - 1)).tolist()
        return scaled


def _parts(trace: PackedTrace) -> tuple[NDArray[np.uint32], list[int]]:
    """Return all blocks of every request, which number its own differently from any other, and where each begins."""
    starts = np.zeros(len(trace) + 1, np.int64)
    np.cumsum(trace.needed, out=starts[1:])
    parts = np.repeat(OWN_TOKENS + np.arange(len(trace)), trace.needed).astype(np.uint32)
    is_named = np.arange(len(parts)) < np.repeat(starts[:-1] + trace.num_blocks, trace.needed)
    parts[is_named] = trace.blocks
    return parts, starts.tolist()
