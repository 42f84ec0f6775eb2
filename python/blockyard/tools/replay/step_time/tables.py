"""`TableStepTime`: predicts vLLM's step times from measured operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.step_time.operators import KVCacheDtype, Operators
from blockyard.tools.replay.step_time.surface import Surface

__all__ = ["TableStepTime"]

_NEEDED: Final = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MAX_CONTEXT: Final = 131_072


class TableStepTime:
    """Predicts a step of vLLM on a GPU that `aiconfigurator-core` has measured.

    Requires `pip install "blockyard[tables]"`. A step's time is the sum of the matrix products, normalizations and
    all-reduces for all its tokens, of attention for the decoding rows and for each prompt chunk, and of logits and
    sampling. The constructor reads the tables; a call then takes microseconds. The object can be pickled.

    It assumes CUDA graphs, 16-bit activations, no pipeline or data parallelism, no speculative decoding, no adapters,
    and a CPU that prepares each step while the GPU computes the previous one.

    Args:
        config: the model's Hugging Face `config.json`: a path to it or to its folder, or its contents.
        system: name of the GPU, such as `"h100_sxm"`, `"h200_sxm"`, `"l40s"` or `"rtx_pro_6000_server"`.
        engine_version: version of vLLM, such as `"0.19.0"`, which selects the newest all-reduce table up to it; None
            for the newest table.
        tensor_parallel_size: GPUs that share each layer.
        enable_expert_parallel: whether the experts of a mixture-of-experts model are distributed over these GPUs.
        max_num_seqs: vLLM's limit of sequences in a step.
        max_num_batched_tokens: vLLM's limit of tokens in a step.
        kv_cache_dtype: `"auto"` for the model's own 16 bits, or `"fp8"`.
        greedy: whether all requests sample at temperature 0.

    Raises:
        InvalidArgumentError: a number is not positive, the config cannot be read or lacks a field, or the tables do not
            cover the system or the model.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        system: str,
        *,
        engine_version: str | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        kv_cache_dtype: KVCacheDtype = "auto",
        greedy: bool = False,
    ) -> None:
        for name, value in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}, must be at least 1")
        config = read_config(config)
        self._name = f"{config['architectures'][0]}, {system!r}, tensor_parallel_size={tensor_parallel_size}"
        gpus = f"{tensor_parallel_size} x {system}" if tensor_parallel_size > 1 else system
        self._text = f"operators of {config['architectures'][0]}, measured on {gpus}"
        operators = Operators(
            config,
            system,
            engine_version=engine_version,
            tensor_parallel_size=tensor_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            kv_cache_dtype=kv_cache_dtype,
            greedy=greedy,
        )
        tokens, rows = max_num_batched_tokens, max_num_seqs
        self._body = _each(operators.body, tokens)
        self._head = _each(operators.head, rows)
        contexts = _points(_MAX_CONTEXT)
        self._decode = Surface(operators.decode_attention, _points(rows), contexts)
        self._prefill = Surface(operators.prefill_attention, _points(tokens), [0, *contexts[6:]])
        self._mixed_token = operators.mixed_token()

    def __repr__(self) -> str:
        return f"TableStepTime({self._name})"

    def __str__(self) -> str:
        return self._text

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        """Return the seconds of one step; see `StepTime`."""
        rows = tokens = len(decode_context)
        total = 0.0
        for cached, computed in prefill:
            tokens += computed
            total += self._prefill(computed, cached)
        if rows:
            context = int(decode_context.sum())
            total += self._decode(rows, context / rows)
            if prefill:
                total += self._mixed_token * context
        return total + _at(self._body, tokens) + _at(self._head, rows + len(prefill))

    def decode_seconds(self, decode_context: NDArray[np.int64]) -> Iterator[float]:
        """Yield the seconds of steps of plain decoding; see `StepTime`."""
        rows, context = len(decode_context), int(decode_context.sum())
        body, head = _at(self._body, rows), _at(self._head, rows)
        while True:
            yield self._decode(rows, context / rows) + body + head
            context += rows


def read_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a Hugging Face `config.json`.

    Raises:
        InvalidArgumentError: it cannot be read or lacks a field.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgumentError(f"cannot read model config {path}: {reason}") from error
    lacking = _NEEDED if not isinstance(config, Mapping) else [name for name in _NEEDED if not config.get(name)]
    if lacking or not isinstance(config, Mapping):
        raise InvalidArgumentError(f"model config has no {', '.join(lacking)}, needs a Hugging Face config.json")
    return config


def _points(last: int) -> list[int]:
    """Return grid points from 1 to `last`: at least two, and eight per power of two from 8 on."""
    points = {1, 2, 4, last, last + 1} | {
        size * part // 8 for size in (2**power for power in range(3, last.bit_length())) for part in range(8, 16)
    }
    return sorted(point for point in points if point <= max(last, 2))


def _each(function: Callable[[int], float], last: int) -> list[float]:
    """Return a function's values from 0 to `last`, evaluated at every 8th up to 512, then at every 64th."""
    points = sorted({1, 2, 4, last, *range(8, min(last, 512), 8), *range(512, last, 64)})
    values = np.interp(np.arange(last + 1), points, [function(point) for point in points])
    values[0] = 0.0
    found: list[float] = values.tolist()
    return found


def _at(values: list[float], index: int) -> float:
    """Return the value at `index`; beyond the end, extrapolate in proportion."""
    return values[index] if index < len(values) else values[-1] * index / (len(values) - 1)
