"""A stand-in for a device that our ops have no kernel for: PyTorch's PrivateUse1, its few ops over memory of the CPU.

It is registered for the whole process, so a check that needs it runs in a separate process: see `own_process`.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from typing_extensions import Self

NAME = "own_device"
# The device's ops; PyTorch's dispatcher rejects all others. An op whose name ends with _ changes its first argument.
OPS = ("view", "as_strided", "slice.Tensor", "select.int", "index_select", "index_copy_", "cat", "flip")


class OwnTensor(torch.Tensor):
    """A tensor of the device; `memory` has its bytes."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> Self:
        made = torch._C._acc.create_empty_tensor(memory.shape, memory.dtype)
        made.__class__ = cls
        made.memory = memory
        return made


PATIENCE = 300.0


@contextmanager
def own_process() -> Iterator[Callable[..., None]]:
    """Return an executor for another process. It is not forked, because locks held by threads would stay locked."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda check, *args: pool.submit(check, *args).result(PATIENCE)


@functools.cache
def register() -> list[str]:
    """Register the device with PyTorch. Returns a growing list of the ops that it runs."""
    _setup_privateuseone_for_python_backend(NAME)
    ran: list[str] = []
    for name in OPS:
        torch.library.impl(f"aten::{name}", "privateuseone")(_over_memory(name, ran))
    torch.library.impl("aten::empty_strided", "privateuseone")(_empty)
    torch.library.impl("aten::empty.memory_format", "privateuseone")(_empty)
    torch.library.impl("aten::_copy_from", "privateuseone")(_copy)
    return ran


def _over_memory(name: str, ran: list[str]) -> Any:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def run(*args: Any, **options: Any) -> torch.Tensor:
        ran.append(base)
        result = op(*map(_memory, args), **options)
        return args[0] if base.endswith("_") else OwnTensor(result)

    return run


def _memory(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_memory(item) for item in value]
    return value.memory if isinstance(value, OwnTensor) else value


def _empty(size: list[int], stride: list[int] | None = None, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    if stride is None:
        return OwnTensor(torch.empty(size, dtype=dtype))
    return OwnTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _memory(target).copy_(_memory(source))
    return target
