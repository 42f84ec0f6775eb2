"""`can_allocate` says OK exactly when the prompt then runs alone, over cache groups of all kinds.

The tests run a prompt in a pool with room for anything. Its peak is the smallest pool that it needs. `make test-all`
draws 10,000 mixes of groups, sizes, chunks and pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from blockyard import BlockManager, CacheGroup
from blockyard.errors import OutOfBlocksError

_MIXES = 10_000 if settings().max_examples >= 1000 else 200
_ROOMY = 1 << 16

_kinds = st.one_of(
    st.just(CacheGroup.full_attention()),
    st.just(CacheGroup.drafter()),
    st.builds(CacheGroup.windowed_drafter, st.integers(1, 20)),
    st.just(CacheGroup.recurrent()),
    st.integers(1, 300).map(CacheGroup.sliding_window),
    st.integers(1, 100).map(CacheGroup.chunked_attention),
)


@dataclass
class Mix:
    """A manager's groups, and a prompt."""

    groups: list[CacheGroup]
    block_size: int
    caching: bool
    prompt: int
    chunk: int | None
    answer: int
    drafts: int = 0

    def manager(self, blocks: int) -> BlockManager:
        """Return a manager with so many free blocks."""
        # Windows and states need one block more: the null block.
        blocks += any(group.kind not in {"full_attention", "drafter"} for group in self.groups)
        return BlockManager(
            block_size=self.block_size,
            device_blocks=blocks,
            watermark=0.0,
            groups=self.groups,
            prefix_caching=self.caching,
        )

    @property
    def has_points(self) -> bool:
        """Whether states are kept at resume points: without room for these, the prompt may run without points."""
        return self.caching and any(group.kind == "recurrent" for group in self.groups)

    def tokens(self, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 1 << 20, self.prompt).astype(np.uint32)

    def runs(self, manager: BlockManager, tokens: np.ndarray, answer: int) -> bool:
        """Run a prompt in chunks, and an answer token by token, each with draft tokens that are rejected.

        Returns:
            Whether there were enough blocks.
        """
        handle: int | None = None
        try:
            sequence = manager.allocate(tokens, chunk_tokens=self.chunk)
            handle = int(sequence)
            _step(manager, handle)
            while self.chunk and (length := manager.next_chunk(handle, self.chunk)):
                manager.append([handle], length)
                _step(manager, handle)
            for token in range(answer):
                count = 1 + self.drafts
                manager.append([handle], count, token_ids=[token] * count, draft_tokens=self.drafts)
                manager.complete(manager.take_decision().ticket)
                manager.truncate(handle, self.prompt + token + 1)
                manager.mark_computed([handle])
        except OutOfBlocksError:
            return False
        finally:
            if handle is not None:
                manager.free([handle])
            manager.check()
        return True

    def peak(self, answer: int) -> int:
        """Return the largest number of blocks that the prompt and the answer use at once."""
        manager = self.manager(_ROOMY)
        assert self.runs(manager, self.tokens(), answer)
        return manager.stats().peak_blocks["device"]


def _step(manager: BlockManager, handle: int) -> None:
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed([handle])


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    groups = draw(st.lists(_kinds, min_size=1, max_size=9))
    block_size = draw(st.sampled_from([1, 2, 3, 16, 32]))
    prompt = draw(st.one_of(st.integers(1, 40), st.integers(1, 600)))
    chunk = draw(st.one_of(st.none(), st.integers(1, 700)))
    caching = draw(st.booleans())
    if caching and prompt > block_size and any(group.kind == "recurrent" for group in groups):
        chunk = chunk or prompt  # where states are kept, a prompt is not allocated whole
    return Mix(groups, block_size, caching, prompt, chunk, draw(st.integers(1, 40)))


@settings(max_examples=_MIXES)
@given(mix=mixes(), over=st.integers(-3, 3))
def test_ok_means_that_the_prompt_runs_alone_to_its_last_token(mix: Mix, over: int):
    peak = mix.peak(answer=0)
    free = max(1, peak + over)
    manager = mix.manager(free)
    fit = manager.can_allocate(mix.tokens(), chunk_tokens=mix.chunk)
    note(f"the prompt needs {peak} blocks of {free}: {fit}")
    assert fit or not manager.can_allocate(mix.prompt, chunk_tokens=mix.chunk), "its length alone would fit"
    assert bool(fit) == mix.runs(manager, mix.tokens(), answer=0) == (free >= peak or (mix.has_points and bool(fit)))


# Chunks of 3 tokens lie in two blocks around token 16 and 32, not around 48.
@example(mix=Mix([CacheGroup.chunked_attention(3)], 16, caching=False, prompt=12, chunk=None, answer=40), over=-1)
@settings(max_examples=_MIXES)
@given(mix=mixes(), over=st.integers(-3, 3))
def test_with_max_tokens_ok_means_that_the_answer_runs_to_its_end_too(mix: Mix, over: int):
    peak = mix.peak(mix.answer)
    free = max(1, peak + over)
    manager = mix.manager(free)
    fit = manager.can_allocate(mix.tokens(), chunk_tokens=mix.chunk, max_tokens=mix.answer)
    note(f"prompt and answer need {peak} blocks of {free}: {fit}")
    needed = free >= peak or (mix.has_points and bool(fit))
    assert bool(fit) == mix.runs(manager, mix.tokens(), mix.answer) == needed


@settings(max_examples=_MIXES)
@given(mix=mixes(), drafts=st.integers(1, 6), over=st.integers(-3, 60))
def test_with_lookahead_ok_means_that_the_draft_tokens_of_each_token_fit_too(mix: Mix, drafts: int, over: int):
    mix.drafts = drafts
    peak = mix.peak(mix.answer)
    free = max(1, peak + over)
    manager = mix.manager(free)
    fit = manager.can_allocate(mix.tokens(), chunk_tokens=mix.chunk, max_tokens=mix.answer, lookahead=drafts)
    note(f"prompt, answer and {drafts} drafts need {peak} blocks of {free}: {fit}")
    runs = mix.runs(manager, mix.tokens(), mix.answer)
    # A point's blocks that a step leaves do not give way to its draft states: it may need that many more at once.
    assert runs if free >= peak + (len(mix.groups) if mix.has_points else 0) else mix.has_points or not runs
    assert runs or not fit
    # The last chunk of the prompt counts with lookahead, too.
    assert fit or free < peak + drafts * len(mix.groups)


@settings(max_examples=_MIXES)
@given(mix=mixes(), over=st.integers(0, 60), shared=st.integers(0, 600), others=st.integers(1, 4))
def test_cached_blocks_count_as_free_blocks(mix: Mix, over: int, shared: int, others: int):
    """Other prompts, which share a beginning with this one, are cached: they never stand in its way."""
    peak = mix.peak(answer=0)
    manager, tokens = mix.manager(peak + over), mix.tokens()
    for seed in range(1, 1 + others):
        mix.runs(manager, np.append(tokens[:shared], mix.tokens(seed)[shared:]).astype(np.uint32), mix.answer)
    fit = manager.can_allocate(tokens, chunk_tokens=mix.chunk)
    note(f"the prompt alone needs {peak} blocks of {peak + over}: {fit}")
    assert bool(fit) == mix.runs(manager, tokens, answer=0)


def test_the_longest_prompt_that_fits_is_not_refused():
    """The whole prompt of 131,072 tokens would need two blocks for 16 of its tokens; its chunks need half of that."""
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(128)]
    mix = Mix(groups, 16, caching=True, prompt=131_072, chunk=2_048, answer=1)
    peak = mix.peak(answer=0)
    for blocks in (peak, peak - 1):
        manager = mix.manager(blocks)
        assert bool(manager.can_allocate(mix.tokens(), chunk_tokens=mix.chunk)) == (blocks == peak)
        assert mix.runs(manager, mix.tokens(), answer=0) == (blocks == peak)
