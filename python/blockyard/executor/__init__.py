"""The step executor: carries out decisions with a copy engine and an external store, on one rank or on all."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.executor.executor import Executor, StepDone, StepExecutor
    from blockyard.executor.parallel import ParallelExecutor
    from blockyard.executor.remote import RemoteExecutor, serve_executor

__all__ = ["Executor", "ParallelExecutor", "RemoteExecutor", "StepDone", "StepExecutor", "serve_executor"]

if not TYPE_CHECKING:
    # Loaded on first use: they need torch, and `checked_store` does not.
    _MODULES = {
        **dict.fromkeys(("Executor", "StepDone", "StepExecutor"), "executor"),
        "ParallelExecutor": "parallel",
        **dict.fromkeys(("RemoteExecutor", "serve_executor"), "remote"),
    }

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(import_module(f"blockyard.executor.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__all__)
