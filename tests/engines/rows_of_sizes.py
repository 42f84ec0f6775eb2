"""Compares the rows that engines of several tensor-parallel and block sizes write to a store, cut by vLLM's mappings.

For each layout in which vLLM certifies a layer, engines of 1, 2 and 8 ranks with blocks of 16 (on a CPU 32), 64 and 128
tokens hold the same keys and values, chunks of 128 tokens. Those of CPUs are written by vLLM's own attention backend.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from blockyard.integrations.vllm.identity import cut_by_heads
from blockyard.integrations.vllm.sharing.token_order import find_order
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards

CHUNKS, TOKENS, SIZE, LAYERS = 2, 128, 32, 2
DTYPE = {"CPU vec": torch.float32, "CPU vec16": torch.float32, "CPU amx": torch.bfloat16}
# Axes in memory, of: blocks, K and V, tokens, heads, elements.
LAYOUTS = {
    "packed HND": (0, 3, 2, 1, 4),
    "packed NHD": (0, 2, 3, 1, 4),
    "split HND": (0, 1, 3, 2, 4),
    "split NHD": (0, 1, 2, 3, 4),
    **dict.fromkeys(DTYPE, (0, 3, 2, 1, 4)),
}
KINDS = {FullAttentionSpec: {}, SlidingWindowSpec: {"sliding_window": 32}}


class Writer:
    """Writes keys and values to a cache in one of the layouts."""

    def __init__(self, layout: str) -> None:
        self.layout, self.attn_type, self.kv_cache_dtype = layout, "decoder", "auto"

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        if self.layout in DTYPE:
            CPUAttentionBackendImpl.do_kv_cache_update(self, layer, key, value, cache, slots)
            return
        tokens = cache.shape[2]
        halves = cache.unbind(1) if self.layout.startswith("split") else cache.transpose(1, 2).split(SIZE, dim=-1)
        for half, given in zip(halves, (key, value), strict=True):
            half[slots // tokens, slots % tokens] = given


def layer_of(layout: str, heads: int, tokens: int) -> Any:
    """Return a layer with a cache of zeros, as an attention backend sees it."""
    sizes = (CHUNKS * TOKENS // tokens, 2, tokens, heads, SIZE)
    axes = LAYOUTS[layout]
    laid = torch.zeros([sizes[axis] for axis in axes], dtype=DTYPE.get(layout, torch.float16))
    if layout.startswith("split"):
        cache = laid.permute([axes.index(axis) for axis in range(5)])
    else:
        laid = laid.flatten(3)
        cache = laid if axes[1] == 3 else laid.transpose(1, 2)
    more = {"isa": layout.removeprefix("CPU "), "_k_scale_float": 1.0, "_v_scale_float": 1.0}
    sizes_of_heads = {"num_kv_heads": heads, "head_size": SIZE, "head_size_v": SIZE}
    return SimpleNamespace(kv_cache=cache, impl=Writer(layout), **sizes_of_heads, **more)


def rows(kind: type, layout: str, heads: int, ranks: int, tokens: int, wholes: list[Any]) -> tuple[np.ndarray, bytes]:
    """Return the rows that an engine writes, and the digest of its order."""
    parts, cuts, digests = [], [], set()
    names = [[f"layers.{index}" for index in range(LAYERS)]]
    blocks = CHUNKS * TOKENS // tokens
    for rank in range(ranks):
        each = max(1, heads // ranks)
        first = rank * each if heads >= ranks else rank * heads // ranks
        layers = {name: layer_of(layout, each, tokens) for name in names[0]}
        dtype = next(iter(layers.values())).kv_cache.dtype
        for layer, (keys, values) in zip(layers.values(), wholes, strict=True):
            mine = (whole[:, first : first + each].to(dtype) for whole in (keys, values))
            layer.impl.do_kv_cache_update(layer, *mine, layer.kv_cache, torch.arange(CHUNKS * TOKENS))
        spec = kind(block_size=tokens, num_kv_heads=each, head_size=SIZE, dtype=dtype, **KINDS[kind])
        context = canonical_mapping._RankContext(ranks, 1, 1, 1, heads, rank)
        page = spec.page_size_bytes
        caches = [layer.kv_cache for layer in layers.values()]
        pages = [
            torch.empty(0, dtype=torch.int8).set_(one.untyped_storage(), 0, (blocks, page), (page, 1)) for one in caches
        ]
        mappings = [canonical_mapping._layer_mapping(spec, one, blocks, context) for one in caches]
        assert all(mappings), (layout, heads, ranks)
        refs = [CanonicalKVCacheRef(index, page, mapping) for index, mapping in enumerate(mappings)]
        kv_caches = CanonicalKVCaches([CanonicalKVCacheTensor(one, page) for one in pages], [refs])
        piece, shard = cut_by_heads(kv_caches, names, LAYERS * page)
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=dtype),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        )
        found = find_order(config, kv_caches, names, tokens, piece)
        cuts.append((found.piece_bytes, shard, found.order))
        digests.add(found.digest)
        parts.append(torch.cat(pages, dim=1).numpy().view(np.uint8).reshape(CHUNKS, -1))
    shards = HeadShards(cuts[0][0], tuple(shard for _, shard, _ in cuts), cuts[0][2])
    (digest,) = digests
    return ChunkRows(parts, shards).read(np.arange(CHUNKS)), digest


def main() -> None:
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    layouts = engines = 0
    digests: dict[bytes, set[str]] = {}  # layouts of several heads
    for kind, layout, heads in product(KINDS, LAYOUTS, (1, 2, 8, 32)):
        shape = (CHUNKS * TOKENS, heads, SIZE)
        wholes = [[torch.randn(shape, generator=random).half() for _ in "kv"] for _ in range(LAYERS)]
        least = 16 if layout in ("packed HND", "packed NHD", "split HND", "split NHD", "CPU vec16") else 32
        alone, digest = rows(kind, layout, heads, 1, least, wholes)
        if heads > 1:
            digests.setdefault(digest, set()).add(layout)
        for ranks, tokens in product((1, 2, 8), (least, 64, 128)):
            found = rows(kind, layout, heads, ranks, tokens, wholes)
            assert np.array_equal(found[0], alone), (kind, layout, heads, ranks, tokens)
            assert found[1] == digest, (kind, layout, heads, ranks, tokens)
            engines += 1
        layouts += 1
    assert sorted(map(len, digests.values())) == [1] * 5 + [2], digests  # only two instruction sets share an order
    print(f"{layouts} layouts, {engines} engines: equal rows")


if __name__ == "__main__":
    main()
