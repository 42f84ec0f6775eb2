"""A rank's share of a model for tensor parallelism, sharded by the plan that the model declares.

transformers shards a checkpoint while loading it, into DTensors of torch's default process group. Here the model is
already loaded and the default process group must not be touched, so the same plan is applied to plain tensors.
"""

# transformers leaves part of its methods without annotations.
# mypy: allow-untyped-calls

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.transformers.support import share_weights

__all__ = ["AllReduce", "RowParallelLinear", "connect", "require_divisible", "shard_model"]

AllReduce: TypeAlias = Callable[[Tensor], object]
"""Sums a tensor over all ranks, in place."""

# Layers at the edges of the model that the plan shards or gathers stay whole: no key or value depends on it.
_WHOLE: Final = frozenset({"colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"})


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are split among ranks, which sum their outputs.

    Args:
        weight: `[out_features, in_features / ranks]`.
        bias: `[out_features]`, added once, after the sum.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.all_reduce: AllReduce | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Compute `[..., out_features]` of this rank's `[..., in_features / ranks]`."""
        out = nn.functional.linear(features, self.weight)
        if self.all_reduce is not None:
            self.all_reduce(out)
        return out if self.bias is None else out + self.bias


def require_divisible(model: PreTrainedModel, size: int) -> None:
    """Check that the ranks can share the KV heads equally.

    Args:
        model: any model.
        size: number of ranks.

    Raises:
        InvalidArgumentError: `size` does not divide the number of KV heads.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if size < 1 or heads % size:
        raise InvalidArgumentError(f"tensor_parallel_size is {size}, must divide the {heads} KV heads of the model")


def shard_model(model: PreTrainedModel, rank: int, size: int) -> PreTrainedModel:
    """Copy a model's modules with a rank's share of the weights that its `tp_plan` shards; other weights are shared.

    Args:
        model: the whole model; not modified.
        rank: 0 to `size - 1`.
        size: number of ranks.

    Returns:
        The share. Call `connect` before running it.

    Raises:
        UnsupportedModelError: the model declares no plan, or one with layers that cannot be sharded here.

    Example:
        >>> from blockyard.tools.demo.demo_model import demo_model
        >>> share = shard_model(demo_model(), 0, 2)
        >>> tuple(share.model.layers[0].self_attn.k_proj.weight.shape)  # the whole has 128 rows
        (64, 256)
    """
    plan = dict(model.tp_plan or {})
    name = type(model).__name__
    if not {"colwise", "rowwise"} <= set(plan.values()):
        raise UnsupportedModelError(f"{name} declares no tp_plan with colwise and rowwise layers, which sharding needs")
    shared = share_weights(model)
    for path, module in list(shared.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None or style in _WHOLE:
            continue
        if style not in {"colwise", "rowwise"} or type(module) is not nn.Linear:
            raise UnsupportedModelError(f"{name} has {path}, a {type(module).__name__} with the plan {style!r}")
        features = module.out_features if style == "colwise" else module.in_features
        if features % size:
            raise UnsupportedModelError(f"{name} has {path} with {features} features, {size} ranks cannot share them")
        if style == "colwise":
            module.weight = _part(module.weight, 0, rank, size)
            module.bias = None if module.bias is None else _part(module.bias, 0, rank, size)
            module.out_features = features // size
        else:
            shared.set_submodule(path, RowParallelLinear(_part(module.weight, 1, rank, size), module.bias))
    return shared


def connect(model: PreTrainedModel, all_reduce: AllReduce) -> None:
    """Set the function that sums the outputs of a model's row-parallel layers.

    Args:
        model: from `shard_model`.
        all_reduce: the process group's function.
    """
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.all_reduce = all_reduce


def _part(weight: Tensor, dim: int, rank: int, size: int) -> nn.Parameter:
    share: Tensor = weight.detach().chunk(size, dim)[rank]
    return nn.Parameter(share.clone(memory_format=torch.contiguous_format), requires_grad=False)
