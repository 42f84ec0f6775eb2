"""How much of the host's memory holds bytes, with rows of the widest cache group and with units of each group's own.

    ENGINES_PYTHON=PYTHON python benches/engines/bench_vllm_rows.py

PYTHON has vLLM, whose own planner makes the cache groups of each model's layers. A prompt on the host has all blocks of
full attention, of windows and states those that its end needs. Prints the tokens of such prompts that a GiB holds:
with rows as wide as the widest group's, with `BlockyardKVConnector`'s units, and if each block took its own bytes.
Asserts that units lose at most 2 %, and never hold less than rows.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ENGINES_PYTHON", "")
if __name__ == "__main__" and PYTHON and sys.executable != PYTHON:
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.execv(PYTHON, [PYTHON, *sys.argv])
if not PYTHON:
    sys.exit("nothing measured: ENGINES_PYTHON does not name a Python with vLLM; make bench-engines does")

import torch  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, VllmConfig  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

GIB, LENGTHS = 1 << 30, (4_096, 32_768, 131_072)
Layers = dict[str, Any]


def attention(count: int, heads: int, size: int, *, block: int = 16, window: int | None = None) -> Layers:
    """Return layers of full attention, or of a window, with bf16 keys and values."""
    fields: Any = {"block_size": block, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(**fields) if window is None else SlidingWindowSpec(**fields, sliding_window=window)
    return {f"{'full' if window is None else 'window'}.{layer}": spec for layer in range(count)}


def states(count: int, convolution: int, state: int, block: int, page: int) -> Layers:
    """Return layers of states: bf16 convolution and fp32 state, in the page of attention's block."""
    spec: Any = MambaSpec(
        block_size=block,
        shapes=((convolution,), (state,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
    )
    return {f"state.{layer}": spec for layer in range(count)}


def latent(count: int, name: str, ratio: int, content: int | None, size: int, dtype: torch.dtype) -> Layers:
    """Return layers of DeepSeek-V4's compressed attention, or of its indexer."""
    spec = MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=size,
        dtype=dtype,
        tokens_per_state=ratio,
        alignment=576,
        state_content_bytes=content,
    )
    return {f"{name}.{layer}": spec for layer in range(count)}


def latent_window(count: int, name: str, block: int, window: int, size: int, content: int | None = None) -> Layers:
    """Return layers of DeepSeek-V4's windows, or of its compressors' states."""
    spec = SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        head_size=size,
        dtype=torch.float32 if content is None else torch.uint8,
        sliding_window=window,
        alignment=576,
        state_content_bytes=content,
    )
    return {f"{name}.{layer}": spec for layer in range(count)}


def deepseek_v4() -> Layers:
    """Return the layers of DeepSeek-V4-Flash with fp8: 21 of ratio 4, 20 of ratio 128, and a window in all 43."""
    return (
        latent(21, "csa", 4, 584, 512, torch.uint8)
        | latent(20, "hca", 128, 584, 512, torch.uint8)
        | latent(21, "indexer", 4, None, 132, torch.uint8)
        | latent_window(43, "window", 64, 128, 512, 584)
        | latent_window(21, "csa state", 4, 8, 2048)
        | latent_window(21, "indexer state", 4, 8, 512)
        | latent_window(20, "hca state", 8, 128, 1024)
    )


MODELS: dict[str, tuple[Layers, str]] = {
    "gpt-oss-120b": (attention(18, 8, 64) | attention(18, 8, 64, window=128), "LBNHC"),
    "Gemma-3-27B": (attention(10, 16, 128) | attention(52, 16, 128, window=1024), "LBNHC"),
    "Qwen3.5-35B-A3B": (
        attention(10, 2, 256, block=1056) | states(30, 3 * 8192, 32 * 128 * 128, 1056, 1056 * 2048),
        "LBNHC",
    ),
    "DeepSeek-V4-Flash": (deepseek_v4(), "BLHNC"),
}


def blocks_at_rest(spec: Any, tokens: int) -> int:
    """Return how many blocks of a group a prompt on the host has."""
    first = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    if isinstance(first, MambaSpec):
        return 1
    if isinstance(first, SlidingWindowSpec):
        return -(-(first.sliding_window - 1) // first.block_size)
    return tokens // first.block_size


def main() -> None:
    """Print a row for each model."""
    units_of = import_module("blockyard.integrations.vllm.units").units_of
    print(
        f"{'':20}{'groups':>7}{'row':>12}{'unit':>10} units of a block        tokens/GiB, rows / units / exact at",
        *LENGTHS,
    )
    for name, (layers, layout) in MODELS.items():
        config = VllmConfig(cache_config=CacheConfig(), device_config=DeviceConfig("cpu"))
        config.cache_config.kv_cache_layout = layout
        caches = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, layers), 64 * GIB)
        row = caches.kv_cache_tensors[0].size // caches.num_blocks
        groups = caches.kv_cache_groups
        own = [sum(_page(group, layer) for layer in group.layer_names) for group in groups]
        units = units_of(caches, range(len(groups)), row)
        unit, counts = (row, [1] * len(groups)) if units is None else (units.unit_bytes, list(units.counts.values()))
        cells = []
        for tokens in LENGTHS:
            blocks = [blocks_at_rest(group.kv_cache_spec, tokens) for group in groups]
            exact = sum(count * size for count, size in zip(blocks, own, strict=True))
            in_units = sum(count * size * unit for count, size in zip(blocks, counts, strict=True))
            assert exact <= in_units <= min(sum(blocks) * row, exact * 1.02 + 1), (name, tokens, exact, in_units)
            cells.append(" / ".join(f"{tokens * GIB / size:,.0f}" for size in (sum(blocks) * row, in_units, exact)))
        print(f"{name:20}{len(groups):7}{row:12,}{unit:10,} {counts!s:24}", *cells, sep="  ")


def _page(group: Any, layer: str) -> int:
    spec = group.kv_cache_spec
    one = spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return int(one.page_size_bytes)


if __name__ == "__main__":
    main()
