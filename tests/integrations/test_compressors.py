"""DeepSeek-V4's compressors: what a prompt that continues at a position needs of them, against transformers' caches.

A compressor makes one entry of `ratio` tokens. Until it has them all, it keeps their projections: the open group. So at
position p it needs the tokens from the last multiple of its ratio on, as chunked attention does, and nothing at a
multiple. With overlap (CSA) an entry also reads the group before its own: `ratio` tokens more.
"""

import copy
import functools
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import ROUTER, SHAPE, VOCABULARY
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from blockyard import Arena, BlockManager, CacheGroup
from blockyard.integrations.transformers.hybrid import _Blocks, _cache_name

RATIOS = {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}
WINDOW, TOKENS, LIMIT = 5, 34, 1e-6
STEPS = 9  # enough to close a group of either compressor, and to read its entry
HCA, CSA = range(2)


class Run(NamedTuple):
    """One sequence, token by token.

    Attributes:
        ids: its tokens, int64 `[1, tokens]`.
        logits: after each token, `[vocab]`.
        caches: before each token.
        rows: projections of each token, `(kv, gate)`, by layer and name of the compressor.
    """

    ids: Tensor
    logits: list[Tensor]
    caches: list[DynamicCache]
    rows: dict[tuple[int, str], list[tuple[Tensor, Tensor]]]


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def model() -> Any:
    torch.manual_seed(0)
    shape = {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "hc_mult": 2,
        "n_shared_experts": 1,
    }
    parts = {
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 3,
    }
    router = {name: count for name, count in ROUTER.items() if name not in {"n_group", "topk_group"}}
    kinds = {"layer_types": list(RATIOS), "compress_rates": RATIOS, "mlp_layer_types": ["moe", "moe"]}
    found = DeepseekV4ForCausalLM(DeepseekV4Config(**SHAPE | shape | parts | router | kinds, sliding_window=WINDOW))
    found.double().eval()
    found.set_experts_implementation("eager")
    return found


@pytest.fixture(scope="module")
def run() -> Run:
    rows: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    store = DeepseekV4HCACache.store_compression_weights

    def record(layer: Any, name: str, kv: Tensor, gate: Tensor) -> Any:
        rows[RATIOS_BY_RATE.index(layer.compress_rate), name].append((kv, gate))
        return store(layer, name, kv, gate)

    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found = Run(ids, [], [], rows)
    cache = DynamicCache(config=model().config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DeepseekV4HCACache, "store_compression_weights", record)
        for position in range(TOKENS):
            found.caches.append(copy.deepcopy(cache))
            found.logits.append(next_logits(cache, ids, position))
    return found


RATIOS_BY_RATE = list(RATIOS.values())


@torch.inference_mode()
def next_logits(cache: DynamicCache, ids: Tensor, position: int) -> Tensor:
    options = {_cache_name(model()): cache}
    logits: Tensor = model()(ids[:, position : position + 1], **options).logits[0, -1]
    return logits


def compressor(layer: int, name: str) -> Any:
    outer = model().model.layers[layer].self_attn.compressor
    return outer if name == "compressor" else outer.indexer


def needed(position: int, ratio: int) -> range:
    """The tokens that a group of chunks of `ratio` tokens keeps for the token at a position."""
    return range(_Blocks(CacheGroup.chunked_attention(ratio), (), (), 1)._first_in_blocks(position), position)


def rebuilt(run: Run, position: int, *, with_open: bool = True, with_overlap: bool = True) -> DynamicCache:
    """A cache of the window, the entries, and of the compressors only the projections of the tokens that they need."""
    cache = DynamicCache(config=model().config)
    for number, (layer, before) in enumerate(zip(cache.layers, run.caches[position].layers, strict=True)):
        ratio = layer.compress_rate
        layer.lazy_initialization(before.keys, before.keys)
        layer.keys = layer.values = before.keys
        assert layer.keys.shape[-2] == min(position, WINDOW - 1)
        layer.cumulative_length = position
        for name, entries in before.compressed_kv.items():
            assert entries.shape[1] == position // ratio
            layer.compressed_kv[name], layer.entry_count[name] = entries, position // ratio
            tokens = needed(position, ratio)
            if with_open and tokens:
                layer.buffer_kv[name], layer.buffer_gate[name] = joined(run.rows[number, name], tokens)
            if with_overlap and number == CSA and tokens.start:
                part = compressor(number, name)
                kv, gate = joined(run.rows[number, name], range(tokens.start - ratio, tokens.start))
                layer.overlap_kv[name] = kv[..., : part.head_dim]
                layer.overlap_gate[name] = (gate + part.position_bias)[..., : part.head_dim]
    return cache


def joined(rows: list[tuple[Tensor, Tensor]], tokens: range) -> tuple[Tensor, Tensor]:
    kv, gate = zip(*(rows[token] for token in tokens), strict=True)
    return torch.cat(kv, dim=1), torch.cat(gate, dim=1)


def apart(run: Run, cache: DynamicCache, position: int) -> float:
    """Continue for some tokens; how far are their logits from the run's, in standard deviations?"""
    steps = range(position, position + STEPS)
    found = [(next_logits(cache, run.ids, at) - run.logits[at]).abs().max() for at in steps]
    return float(max(found) / run.logits[position].std())


@pytest.mark.parametrize("position", range(1, TOKENS - STEPS))
def test_a_prompt_continues_at_any_position_with_the_open_group_only(run: Run, position: int):
    assert apart(run, rebuilt(run, position), position) <= LIMIT


@pytest.mark.parametrize("position", range(1, TOKENS - STEPS))
def test_nothing_is_open_at_multiples_of_the_ratio(run: Run, position: int):
    for layer in run.caches[position].layers:
        for name, kept in layer.buffer_kv.items():
            assert kept.shape[1] == len(needed(position, layer.compress_rate)) == position % layer.compress_rate, name
    changes = apart(run, rebuilt(run, position, with_open=False), position) > LIMIT
    assert changes == (position % RATIOS_BY_RATE[HCA] != 0)  # a multiple of the other ratio


@pytest.mark.parametrize("position", range(RATIOS_BY_RATE[CSA], TOKENS - STEPS))
def test_the_group_before_is_needed_where_groups_overlap(run: Run, position: int):
    assert apart(run, rebuilt(run, position, with_overlap=False), position) > LIMIT


@pytest.mark.parametrize(("position", "tail"), [(16, 0), (20, 1), (24, 0), (28, 1)])
def test_a_resume_point_at_a_multiple_of_the_ratio_keeps_no_block_of_the_compressor(position: int, tail: int):
    groups = [CacheGroup.full_attention(), CacheGroup.chunked_attention(RATIOS_BY_RATE[HCA])]
    manager = BlockManager(block_size=4, device_blocks=64, groups=groups, prefix_caching=True, watermark=0.0)
    sequence = manager.allocate(list(range(position + 1)))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(sequence)
    manager.free(sequence)
    assert manager.prefix.lookup(list(range(position + 1))).tokens == position
    assert manager.stats().cached_blocks["device"] == position // 4 + tail


@pytest.mark.parametrize(("block_size", "position", "still_open"), [(256, 4096, 0), (64, 4096, 0), (64, 4160, 64)])
def test_a_resume_point_of_deepseek_v4_keeps_its_window_the_overlap_and_what_is_open(
    block_size: int, position: int, still_open: int
):
    """Bytes of DeepSeek-V4-Flash in FP8: entries, window, and the projections of CSA (ratio 4) and HCA (ratio 128)."""
    entries, window, csa, hca = 3915 * block_size, 1_609_920, 870_912, 656_640
    groups = [
        CacheGroup.full_attention().with_blocks(bytes=entries),
        CacheGroup.sliding_window(128).with_blocks(tokens=64, bytes=window),
        CacheGroup.sliding_window(2 * 4).with_blocks(tokens=4, bytes=csa),
        CacheGroup.chunked_attention(128).with_blocks(tokens=8, bytes=hca),
    ]
    arena = Arena(device_bytes=2 << 30)
    manager = BlockManager(block_size=block_size, groups=groups, arena=arena, prefix_caching=True, watermark=0.0)
    sequence = manager.allocate(list(range(position + 1)))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(sequence)
    manager.free(sequence)
    assert manager.prefix.lookup(list(range(position + 1))).tokens == position
    is_cached = [manager.pool(page_class=number).uses() == 1 for number in range(len(groups))]
    assert [int(cached.sum()) for cached in is_cached] == [position // block_size, 2, 2, still_open // 8]
