"""Compares the rows that engines of several tensor-parallel sizes write to a store, cut by vLLM's own mappings.

For each layout in which vLLM certifies a layer, engines of 1, 2, 4 and 8 ranks hold the same keys and values.
"""

from itertools import product

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from blockyard.integrations.vllm.identity import cut_by_heads
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards

BLOCKS, TOKENS, SIZE, LAYERS = 3, 16, 8, 2
# Logical axes: blocks, K and V, tokens, heads, elements.
LAYOUTS = {
    "packed HND": ((0, 3, 2, 1, 4), (0, 1, 2, 3)),
    "packed NHD": ((0, 2, 3, 1, 4), (0, 2, 1, 3)),
    "split HND": ((0, 1, 3, 2, 4), (0, 1, 3, 2, 4)),
    "split NHD": ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)),
}


def cache(whole: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a layer's tensor as an attention backend sees it, of `[blocks, 2, tokens, heads, elements]`."""
    order, shape = LAYOUTS[layout]
    laid = whole.permute(*order).contiguous()
    if layout.startswith("packed"):
        laid = laid.reshape(*laid.shape[:3], -1)
    return laid.permute(*shape)  # to `[blocks, heads, tokens, ...]` or `[blocks, 2, tokens, heads, ...]`


def rows(kind: type, layout: str, heads: int, ranks: int, wholes: list[torch.Tensor]) -> np.ndarray:
    """Return the rows that an engine writes."""
    parts, cuts = [], []
    for rank in range(ranks):
        each = max(1, heads // ranks)
        first = rank * each if heads >= ranks else rank * heads // ranks
        mine = [cache(whole[:, :, :, first : first + each], layout) for whole in wholes]
        more = {"sliding_window": 32} if kind is SlidingWindowSpec else {}
        spec = kind(block_size=TOKENS, num_kv_heads=each, head_size=SIZE, dtype=torch.float16, **more)
        context = canonical_mapping._RankContext(ranks, 1, 1, 1, heads, rank)
        page = spec.page_size_bytes
        pages = [
            torch.empty(0, dtype=torch.int8).set_(one.untyped_storage(), 0, (BLOCKS, page), (page, 1)) for one in mine
        ]
        mappings = [canonical_mapping._layer_mapping(spec, one, BLOCKS, context) for one in mine]
        assert all(mappings), (layout, heads, ranks)
        refs = [CanonicalKVCacheRef(index, page, mapping) for index, mapping in enumerate(mappings)]
        tensors = [CanonicalKVCacheTensor(one, page) for one in pages]
        names = [[f"layers.{index}" for index in range(LAYERS)]]
        cuts.append(cut_by_heads(CanonicalKVCaches(tensors, [refs]), names, LAYERS * page))
        parts.append(torch.cat(pages, dim=1).numpy().view(np.uint8))
    shards = HeadShards(cuts[0][0], tuple(shard for _, shard in cuts))
    return ChunkRows(parts, shards).read(np.arange(BLOCKS))


def main() -> None:
    random = torch.Generator().manual_seed(1)
    layouts = engines = 0
    for kind, layout, heads in product((FullAttentionSpec, SlidingWindowSpec), LAYOUTS, (1, 2, 4, 8, 16, 32)):
        wholes = [torch.randn((BLOCKS, 2, TOKENS, heads, SIZE), generator=random).half() for _ in range(LAYERS)]
        alone = rows(kind, layout, heads, 1, wholes)
        for ranks in (1, 2, 4, 8):
            assert np.array_equal(rows(kind, layout, heads, ranks, wholes), alone), (kind, layout, heads, ranks)
            engines += 1
        layouts += 1
    print(f"{layouts} layouts, {engines} engines: equal rows")


if __name__ == "__main__":
    main()
