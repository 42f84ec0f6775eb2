"""Measured operators of `aiconfigurator-core`, and the parts of a vLLM step that its tables leave out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from blockyard.errors import InvalidArgumentError
from blockyard.workers import missing

try:
    import yaml
    from aiconfigurator_core.sdk.engine import EngineHandle
    from pyarrow import parquet
except ModuleNotFoundError as error:
    raise missing("TableStepTime", error) from None

__all__ = ["KVCacheDtype", "Operators"]

KVCacheDtype: TypeAlias = Literal["auto", "fp8"]

_QUERY_TILE: Final = 64
"""Query tokens that one thread block of FlashAttention 2 computes over a paged cache: `kBlockM` in vLLM's
flash_fwd_launch_template.h, `run_mha_fwd_splitkv_dispatch`."""

_TILE_PROMPT: Final = 8192
"""Prompt length at which that kernel's rate is read from the table: long enough to fill all its tiles."""

_GREEDY: Final = (10, 2)
"""Bytes per logit, and number of kernels, of vLLM's `Sampler` at temperature 0: to float32, argmax."""

_RANDOM: Final = (42, 6)
"""The same at other temperatures: to float32, divide by the temperature, softmax, exponential noise, divide, argmax."""

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


class Operators:
    """Seconds of the operators of one model on one kind of GPU.

    Args:
        config: a Hugging Face `config.json`, parsed.
        system: a system of `aiconfigurator-core`, such as `"h100_sxm"` or `"rtx_pro_6000_server"`.
        engine_version: version of vLLM, which selects the newest all-reduce table up to it; None for the newest table.
        tensor_parallel_size: GPUs that share each layer.
        enable_expert_parallel: whether they share the experts of a layer instead of splitting each.
        kv_cache_dtype: type of keys and values.
        greedy: whether tokens are sampled at temperature 0.

    Raises:
        InvalidArgumentError: the tables do not cover the system, the model or this parallelism.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        system: str,
        *,
        engine_version: str | None,
        tensor_parallel_size: int,
        enable_expert_parallel: bool,
        kv_cache_dtype: KVCacheDtype,
        greedy: bool,
    ) -> None:
        self._tables = Path(str(files("aiconfigurator_core"))) / "systems"
        spec = self._tables / f"{system}.yaml"
        if not spec.is_file():
            known = ", ".join(sorted(path.stem for path in (self._tables / "data").iterdir()))
            raise InvalidArgumentError(f"system is {system!r}, must be one of {known}")
        self._gpu = yaml.safe_load(spec.read_text("utf-8"))["gpu"]
        self._system, self._kv_cache_dtype = system, kv_cache_dtype
        self._sampler = _GREEDY if greedy else _RANDOM
        self._gpus = gpus = tensor_parallel_size
        self._hidden, self._layers = config["hidden_size"], config["num_hidden_layers"]
        self._vocabulary, heads = config["vocab_size"], config["num_attention_heads"]
        self._head_size = config.get("head_dim") or self._hidden // heads
        self._heads = heads // gpus
        self._kv_heads = max(1, config.get("num_key_value_heads", heads) // gpus)
        moe = any(config.get(name) for name in _EXPERTS)
        experts = gpus if enable_expert_parallel and moe else 1
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(config)), "utf-8")
            try:
                self._engine = EngineHandle.compile(
                    folder,
                    system,
                    "vllm",
                    tp_size=gpus,
                    moe_ep_size=experts,
                    moe_tp_size=gpus // experts if moe else 1,
                    kvcache_quant_mode="fp8" if kv_cache_dtype == "fp8" else None,
                )
            except (ValueError, KeyError, RuntimeError) as error:
                name = config.get("architectures", ["a model without architectures"])[0]
                raise InvalidArgumentError(f"the tables of {system} do not cover {name}: {error}") from error
        self._find_operators()
        self._reduce = self._read_all_reduce(engine_version) if gpus > 1 else None

    def _find_operators(self) -> None:
        """Find the positions of the operators in the engine's lists."""
        names = _names(lambda i: self._engine.evaluate_context_ops([i], batch_size=1, s=16, x=16))
        decode = _names(lambda i: self._engine.evaluate_generation_ops([i], batch_size=1, s=16))
        attention = [i for i, name in enumerate(names) if name == "context_attention"]
        if not attention or "generation_attention" not in decode:
            raise InvalidArgumentError("the model has another kind of attention than full attention over a KV cache")
        shared = [i for i, name in enumerate(names) if not re.search("attention|logits", name)]
        self._reduces = [i for i in shared if re.search("_ar(_|$)|dispatch", names[i])] if self._gpus > 1 else []
        self._body = [i for i in shared if i not in self._reduces]
        self._prefill = attention
        self._decode = [decode.index("generation_attention")]
        self._logits = [i for i, name in enumerate(decode) if "logits" in name]

    # ---- from the tables ----

    def body(self, tokens: int) -> float:
        """All work per token except attention: all layers, and the embedding."""
        engine = self._engine
        seconds = _seconds(engine.evaluate_context_ops(self._body, batch_size=1, s=tokens, x=tokens))
        # Rotary embedding of queries and keys, in place; keys and values copied into the cache.
        elements = 2 * (self._heads + self._kv_heads) + 4 * self._kv_heads
        seconds += self._memory(tokens * elements * self._head_size * 2 * self._layers, 2 * self._layers)
        if self._reduce is not None:
            return seconds + (2 * int(self._layers) + 1) * self._reduce(tokens * self._hidden)
        return seconds + _seconds(engine.evaluate_context_ops(self._reduces, batch_size=1, s=tokens, x=tokens))

    def head(self, rows: int) -> float:
        """Logits and sampling of `rows` tokens."""
        seconds = _seconds(self._engine.evaluate_generation_ops(self._logits, batch_size=rows, s=16))
        if self._reduce is not None:  # an all-gather moves half of what an all-reduce of the same size does
            seconds += self._reduce(rows * self._vocabulary) / 2
        num_bytes, kernels = self._sampler
        return seconds + self._memory(rows * self._vocabulary * num_bytes, kernels)

    def decode_attention(self, rows: int, context: int) -> float:
        """Attention of `rows` tokens, each over `context` cached tokens, in a step without prompts."""
        return _seconds(self._engine.evaluate_generation_ops(self._decode, batch_size=rows, s=max(1, context)))

    def prefill_attention(self, computed: int, cached: int) -> float:
        """Attention of a chunk of a prompt over itself and the `cached` tokens before it."""
        return _seconds(self._engine.evaluate_context_ops(self._prefill, batch_size=1, s=computed, prefix=cached))

    def mixed_token(self) -> float:
        """Extra seconds per token of context for a decoding row whose step also has prompts.

        FlashAttention 2 then computes a whole tile of queries for the row's single token, and does not share it between
        the heads of a group. Each thread block takes most of the shared memory, so nothing hides the time. With other
        kernels, or a separate call for the decoding rows, this is 0.
        """
        if not self._is_flash_attention_2():
            return 0.0
        tiles = _TILE_PROMPT // _QUERY_TILE
        return self.prefill_attention(_TILE_PROMPT, 0) / (_QUERY_TILE * tiles * (tiles + 1) / 2)

    def _is_flash_attention_2(self) -> bool:
        kinds = ("vllm_flash_attn", "vllm_flash_attn_fa2")
        kv_type = "fp8" if self._kv_cache_dtype == "fp8" else "bfloat16"
        for path in sorted(self._data().glob("attention/vllm/*/context_attention_perf.parquet"), reverse=True):
            table = parquet.read_table(path, columns=["kernel_source", "head_dim", "kv_cache_dtype", "num_heads"])
            rows = zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
            return any(
                kernel in kinds and (head, kv) == (self._head_size, kv_type) and heads == self._heads
                for kernel, head, kv, heads in rows
            )
        return False

    # ---- what the tables leave out ----

    def _memory(self, num_bytes: float, kernels: int) -> float:
        """Estimate kernels that only move memory, as `aiconfigurator-core` does: by a share of the bandwidth."""
        rate = self._gpu["mem_bw"] * self._gpu["mem_bw_empirical_scaling_factor"]
        return float(num_bytes / rate + kernels * self._gpu["mem_empirical_constant_latency"])

    def _read_all_reduce(self, engine_version: str | None) -> _AllReduce | None:
        found = {_version(path.parent.name): path for path in self._data().glob("comm/vllm/*/custom_allreduce_perf.*")}
        known = sorted(found)
        if not known:
            return None
        fitting = [version for version in known if engine_version is None or version <= _version(engine_version)]
        table = parquet.read_table(found[(fitting or known[:1])[-1]]).to_pylist()
        points = sorted(
            (row["message_size"], row["latency"])
            for row in table
            if row["num_gpus"] == self._gpus and str(row.get("backend", "graph")).endswith("graph")
        )
        return _AllReduce(points) if len(points) > 1 else None

    def _data(self) -> Path:
        return self._tables / "data" / self._system


class _AllReduce:
    """Seconds of an all-reduce of `elements` 16-bit numbers."""

    def __init__(self, points: list[tuple[int, float]]) -> None:
        self._sizes, latencies = np.array(points, float).T
        self._seconds = latencies / 1e3

    def __call__(self, elements: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if elements > sizes[-1]:
            return float(seconds[-1] * elements / sizes[-1])
        return float(np.interp(elements, sizes, seconds))


def _seconds(operators: list[tuple[str, float, float, str]]) -> float:
    return sum(operator[1] for operator in operators) / 1e3


def _names(evaluate: Any) -> list[str]:
    """Return the names of a list's operators. The list has no length, so read until it ends."""
    names: list[str] = []
    try:
        while True:
            names.append(evaluate(len(names))[0][0])
    except ValueError:
        return names


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
