"""Chunks of a prompt that are put in within one step publish what one chunk of their length does."""

from hypothesis import given
from hypothesis import strategies as st
from prompts import allocate_prompts

from blockyard import BlockManager, CacheGroup

_groups = st.sampled_from(
    [
        [CacheGroup.recurrent()],
        [CacheGroup.full_attention(), CacheGroup.recurrent()],
        [CacheGroup.sliding_window(5), CacheGroup.recurrent()],
    ]
)
_steps = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


def _published(steps: list[list[int]], groups: list[CacheGroup], block_size: int, lookahead: int) -> list[int]:
    """How much of each prefix is found once the chunks of each step, put in by calls of their own, are computed."""
    manager = BlockManager(block_size=block_size, device_blocks=400, groups=groups, prefix_caching=True)
    prompt = list(range(sum(map(sum, steps))))
    (handle,), _ = allocate_prompts(manager, [prompt], chunk_tokens=steps[0][0])
    for i, chunks in enumerate(steps):
        begun = manager.num_tokens(int(handle)) if i == 0 else 0
        for chunk in [sum(chunks) - begun] if len(chunks) == 1 else [chunks[0] - begun, *chunks[1:]]:
            if chunk > 0:
                manager.append([handle], chunk, lookahead=lookahead)
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed([handle])
        manager.check()
    return [manager.prefix.lookup([*prompt[:end], 10**6]).tokens for end in range(len(prompt) + 1)]


@given(steps=_steps, groups=_groups, block_size=st.integers(1, 5), lookahead=st.sampled_from([0, 0, 4]))
def test_chunks_of_one_step_publish_what_one_call_would(
    steps: list[list[int]], groups: list[CacheGroup], block_size: int, lookahead: int
) -> None:
    whole = [[sum(chunks)] for chunks in steps]
    assert _published(steps, groups, block_size, lookahead) == _published(whole, groups, block_size, 0)
