"""Attention over paged caches against plain attention, over random batches, tables and layouts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface

from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.transformers.attention import (
    ATTENTION_NAME,
    LayerCall,
    PagedStep,
    StepInput,
    paged_attention,
)
from blockyard.layout.kv import KVLayout

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 8, 2


def layout_of(kind="kv_first", block_size=4):
    return KVLayout(
        kind=kind, num_layers=LAYERS, block_size=block_size, num_kv_heads=KV_HEADS, head_size=WIDTH, dtype="float32"
    )


def plain(query, key, value, window):
    """Attention of the last tokens of one sequence over all of it: `[tokens, heads, width]`, as the formula has it."""
    groups = HEADS // KV_HEADS
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    first = key.shape[0] - query.shape[0]
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(first + 1)
    if window:
        hidden |= torch.ones(scores.shape[1:], dtype=torch.bool).tril(first - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def place(tables, spans, size):
    return np.concatenate(
        [
            table[np.arange(a, b) // size] * size + np.arange(a, b) % size
            for table, (a, b) in zip(tables, spans, strict=True)
        ]
    )


@given(
    kind=st.sampled_from(["kv_first", "blocks_first"]),
    size=st.sampled_from([1, 3, 4, 16]),
    spans=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 2, 7])), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 5, 12]),
    seed=st.integers(0, 2**31),
)
def test_every_sequence_attends_to_its_own_tokens(kind, size, spans, window, seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    spans = [(start, start + length) for start, length in spans]
    width = max(-(-end // size) for _, end in spans) + 1
    blocks = len(spans) * width + 2
    tables = rng.permutation(blocks)[: len(spans) * width].reshape(len(spans), width)
    layout = layout_of(kind, size)
    # Slots that nothing was written to must not matter.
    caches = [torch.full(layout.tensor_shape(blocks), 1e6) for _ in range(LAYERS)]
    tokens = [torch.randn(3, HEADS, end, WIDTH) for _, end in spans]

    for (start, _), table, (_, key, value) in zip(spans, tables, tokens, strict=True):
        halves = caches[1] if kind == "kv_first" else caches[1].transpose(0, 1)
        for position in range(start):
            halves[0, table[position // size], position % size] = key[:KV_HEADS, position]
            halves[1, table[position // size], position % size] = value[:KV_HEADS, position]
    starts, ends = np.array(spans).T
    step = PagedStep(layout, caches, StepInput(starts, ends - starts, tables, place(tables, spans, size)), window)
    query, key, value = (
        torch.cat([t[part, :, a:b] for t, (a, b) in zip(tokens, spans, strict=True)], dim=1) for part in range(3)
    )
    got = step.attend(LayerCall(1, query[None], key[None, :KV_HEADS], value[None, :KV_HEADS], 0.3, window))[0]
    wanted = torch.cat(
        [
            plain(t[0, :, a:b].transpose(0, 1), *(t[p, :KV_HEADS, :b].transpose(0, 1) for p in (1, 2)), window)
            for t, (a, b) in zip(tokens, spans, strict=True)
        ]
    )
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_only_the_mapped_slots_of_one_layer_are_written():
    layout = layout_of()
    caches = [torch.full(layout.tensor_shape(5), 7.0) for _ in range(LAYERS)]
    slots = np.array([17, 5])
    step = PagedStep(layout, caches, StepInput(np.array([1, 1]), np.array([1, 1]), np.array([[4], [1]]), slots))
    key, value = torch.randn(2, 1, KV_HEADS, 2, WIDTH)
    step.attend(LayerCall(1, torch.randn(1, HEADS, 2, WIDTH), key, value, 1.0, None))
    wanted = torch.full(layout.tensor_shape(5), 7.0)
    for token, slot in enumerate(slots):
        wanted[0, slot // 4, slot % 4] = key[0, :, token]
        wanted[1, slot // 4, slot % 4] = value[0, :, token]
    assert torch.equal(caches[1], wanted)
    assert torch.equal(caches[0], torch.full(layout.tensor_shape(5), 7.0))


@pytest.mark.parametrize(
    ("starts", "lengths", "tables", "slots", "shown"),
    [
        ([0], [1], [[9]], [0], "block ids go from 9 to 9, the cache has 5"),
        ([0], [1], [[-1]], [0], "block ids go from -1"),
        ([0], [1], [[0]], [20], "slot ids go from 20 to 20, the cache has 20"),
        ([0], [1], [[0]], [-1], "slot ids go from -1"),
        ([0], [1], [0], [0], r"shape \[1\] for 1 sequences"),
        ([0, 0], [1, 1], [[0]], [0, 1], r"shape \[1, 1\] for 2 sequences"),
        ([0], [2], [[0]], [0], r"shape \[1\] for 2 tokens"),
        ([3], [2], [[0]], [0, 1], "sees 2 blocks, its block table has 1"),
        ([0], [0], [[0]], [], "at least 1 token"),
        ([-1], [1], [[0]], [0], "start of at least 0"),
        ([], [], np.zeros((0, 1), int), [], "a step of 0 sequences"),
    ],
)
def test_a_step_that_does_not_fit_the_cache_is_refused(starts, lengths, tables, slots, shown):
    caches = [torch.zeros(layout_of().tensor_shape(5)) for _ in range(LAYERS)]
    where = StepInput(*(np.array(part, dtype=np.int64) for part in (starts, lengths, tables, slots)))
    with pytest.raises(InvalidArgumentError, match=shown):
        PagedStep(layout_of(), caches, where)


def test_padding_of_a_block_table_is_not_looked_at():
    caches = [torch.zeros(layout_of().tensor_shape(5)) for _ in range(LAYERS)]
    PagedStep(layout_of(), caches, StepInput(*(np.array(part) for part in ([0], [1], [[2, 99]], [8]))))


class Layer(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 30.0}, "soft-capping"),
        ({"s_aux": torch.zeros(1)}, "attention sinks"),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(options, reason):
    q = torch.zeros(1, 1, 1, 1)
    with pytest.raises(UnsupportedModelError, match=f"Layer uses {reason}"):
        paged_attention(Layer(), q, q, q, None, blockyard_step=object(), **options)


def test_a_layer_without_step_or_number_is_refused():
    q = torch.zeros(1, 1, 1, 1)
    with pytest.raises(UnsupportedModelError, match="without the step"):
        paged_attention(Layer(), q, q, q, None)
    with pytest.raises(UnsupportedModelError, match="no layer_idx"):
        paged_attention(torch.nn.Identity(), q, q, q, None, blockyard_step=object())


def test_transformers_knows_the_function():
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention


def test_a_layer_with_another_window_than_the_step_is_refused():
    step = PagedStep(layout_of(), *one_token(), window=4)
    query = torch.zeros(1, HEADS, 1, WIDTH)
    with pytest.raises(UnsupportedModelError, match="layer 0 has a window of None, the step was made for 4"):
        step.attend(LayerCall(0, query, query[:, :KV_HEADS], query[:, :KV_HEADS], 1.0, None))


def test_the_cache_of_a_layer_is_not_touched_before_it_was_waited_for():
    caches, where = one_token()
    seen = []
    step = PagedStep(layout_of(), caches, where, before_layer=lambda layer: seen.append((layer, bool(caches[1].any()))))
    query = torch.ones(1, HEADS, 1, WIDTH)
    step.attend(LayerCall(1, query, query[:, :KV_HEADS], query[:, :KV_HEADS], 1.0, None))
    assert seen == [(1, False)]
    assert caches[1].any()


def one_token():
    caches = [torch.zeros(layout_of().tensor_shape(3)) for _ in range(LAYERS)]
    return caches, StepInput(*(np.array(part) for part in ([0], [1], [[2]], [8])))
