"""vLLM's own CPU offloading manager, and ours behind the same interface, from vLLM's sources alone.

Only its manager, policies and their records are run. Its logger and its connector's statistics, which need all of vLLM,
are stood in for.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

Call = Callable[[list[bytes]], object]
_PACKAGES = ("", ".v1", ".utils", ".v1.metrics", ".v1.kv_hints")
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


def load(source: Path) -> None:
    """Have vLLM's offloading modules imported from a folder that holds `vllm/v1/kv_offload`."""
    for package in _PACKAGES:
        module = sys.modules[f"vllm{package}"] = ModuleType(f"vllm{package}")
        module.__path__ = [str(source / "vllm" / Path(*package.split(".")))]
    sys.modules["vllm.v1.kv_hints"].KvHintsEnvelope = type("KvHintsEnvelope", (), {})  # type: ignore[attr-defined]
    _stand_in("vllm.logger", init_logger=logging.getLogger)
    parts = _CONNECTOR.split(".")
    for end in range(2, len(parts)):
        _stand_in(".".join(parts[:end]), __path__=[])
    _stand_in(_CONNECTOR, OffloadingConnectorStats=SimpleNamespace)


def managers(chunks: int) -> dict[str, Callable[[], Any]]:
    """Makers of what is compared, by name."""
    theirs = importlib.import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
    ours = importlib.import_module("blockyard.integrations.vllm").BlockyardManager
    return {
        "ours as vLLM calls it": lambda: ours(chunks),
        "vLLM lru": lambda: theirs(chunks, cache_policy="lru"),
        "vLLM arc": lambda: theirs(chunks, cache_policy="arc"),
    }


def calls(manager: Any) -> list[tuple[str, Call]]:
    """The calls of one manager, each over a batch of keys, as a scheduler makes them for one request."""
    context = importlib.import_module("vllm.v1.kv_offload.base").ReqContext(req_id="one")
    manager.on_new_request(context)
    return [
        ("prepare_store", lambda keys: manager.prepare_store(keys, context)),
        ("complete_store", lambda keys: manager.complete_store(keys, context)),
        ("lookup", lambda keys: [manager.lookup(key, context) for key in keys]),
        ("prepare_load", lambda keys: manager.prepare_load(keys, context)),
        ("complete_load", lambda keys: manager.complete_load(keys, context)),
        ("touch", lambda keys: manager.touch(keys, context)),
    ]


def _stand_in(name: str, **names: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(names)
