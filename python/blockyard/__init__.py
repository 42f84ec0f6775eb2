"""Blockyard tracks and moves the blocks of a paged KV cache for LLM engines.

`BlockManager` decides which sequences can run and which blocks to copy or move. `CacheEngine` and `StepExecutor`
execute its decisions between device, host and external storage. `KVCache` creates all of them from one set of sizes.

    scheduler -> BlockManager -> StepDecision -> StepExecutor -> CacheEngine (device, host), store (external)

`import blockyard` loads neither torch nor CUDA. Errors are in `blockyard.errors`, result types in `blockyard.types`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from blockyard._core import (
    AllocStatus,
    Arena,
    BlockManager,
    CacheGroup,
    Pairs,
    PrefixCaching,
    StepDecision,
    __version__,
)
from blockyard.errors import BlockyardError

if TYPE_CHECKING:
    from blockyard.cache import KVCache
    from blockyard.engine import CacheEngine
    from blockyard.executor import StepExecutor
    from blockyard.layout import KVLayout
    from blockyard.scheduler import Request, Scheduler
    from blockyard.stores import open_store

__all__ = [
    "AllocStatus",
    "Arena",
    "BlockManager",
    "BlockyardError",
    "CacheEngine",
    "CacheGroup",
    "KVCache",
    "KVLayout",
    "Pairs",
    "PrefixCaching",
    "Request",
    "Scheduler",
    "StepDecision",
    "StepExecutor",
    "__version__",
    "open_store",
]

if not TYPE_CHECKING:
    # Loaded on first use: some need torch, and all of them import this package.
    _MODULES = {
        "CacheEngine": "blockyard.engine",
        "KVCache": "blockyard.cache",
        "KVLayout": "blockyard.layout",
        "Request": "blockyard.scheduler",
        "Scheduler": "blockyard.scheduler",
        "StepExecutor": "blockyard.executor",
        "open_store": "blockyard.stores",
    }

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            try:
                return getattr(import_module(_MODULES[name]), name)
            except ModuleNotFoundError as error:
                raise import_module("blockyard.workers.extras").missing(f"blockyard.{name}", error) from None
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__all__)
