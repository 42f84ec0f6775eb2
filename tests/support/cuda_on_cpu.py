"""A CUDA device simulated in CPU memory, so that whole scripts run: tensors know their device."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from blockyard.engine import host_pool

__all__ = ["CudaOnCpu", "patch_cuda"]


class CudaOnCpu(TorchFunctionMode):
    """Puts tensors that are requested on a CUDA device on the CPU, and remembers them as the device's."""

    def __init__(self) -> None:
        super().__init__()
        # Keep them alive, so that no other memory gets their address.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.is_cuda.__get__:
            return self._is_on_device(args[0])
        if function is torch.Tensor.cuda:
            return self._moved(args[0])
        if function in {torch.Tensor.cpu, torch.Tensor.pin_memory}:
            return args[0].clone()
        kwargs.pop("pin_memory", None)
        on_device = str(kwargs.get("device", "")).startswith("cuda")
        if on_device:
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        like_device = function in {torch.zeros_like, torch.empty_like} and self._is_on_device(args[0])
        return self._moved(found) if on_device or like_device else found

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() in self._storages

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            moved = tensor.clone()
            self._storages[moved.untyped_storage().data_ptr()] = moved.untyped_storage()
        return moved


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at) + 1e-6


def patch_cuda(monkeypatch: pytest.MonkeyPatch) -> CudaOnCpu:
    """Make `torch.cuda` a device that runs everything immediately; return the mode to run scripts in."""
    only = _Stream()
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    functions = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "stand-in",
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132),
        "device": lambda *_: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: only,
        "default_stream": lambda *_: only,
        "cudart": lambda: runtime,
        "graph": lambda *_, **__: nullcontext(),
        "_sleep": lambda _: None,
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": SimpleNamespace,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    monkeypatch.setattr(host_pool, "node_of_device", lambda _: None)
    monkeypatch.setattr(torch.ops.blockyard, "bench_copy_loop", torch.ops.blockyard.swap_blocks)
    return CudaOnCpu()
