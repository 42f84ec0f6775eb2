"""`blockyard.integrations.vllm` over vLLM's offloading interfaces, or over stand-ins where vLLM is missing.

`VLLM_SOURCE` names folders that hold `vllm/v1/kv_offload/base.py`, as unpacked from wheels of vLLM 0.32 and 0.33, with
`:` between them. The rest of vLLM is not imported.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import vllm_stand_in

SOURCES = [source for source in os.environ.get("VLLM_SOURCE", "").split(":") if source]
KINDS = ["stand-in 0.32", "stand-in 0.33", *SOURCES]
OURS = "blockyard.integrations.vllm"
FROM_SOURCE = ("", ".v1", ".utils", ".v1.metrics", ".v1.kv_hints")


@contextlib.contextmanager
def loaded(kind: str, **change: ModuleType) -> Iterator[SimpleNamespace]:
    """Import our module over one kind of vLLM, and unload both afterwards.

    Args:
        kind: one of `KINDS`.
        change: modules to put in place of vLLM's, by the last part of their names.
    """
    before = dict(sys.modules)
    forget()
    try:
        modules = vllm_stand_in.modules(kind.split()[1]) if kind.startswith("stand-in") else from_source(Path(kind))
        modules["vllm.config"] = configuration = vllm_stand_in.current_configuration()
        for name, module in change.items():
            modules[f"vllm.v1.kv_offload.{name}"] = module
        sys.modules.update(modules)
        ours = importlib.import_module(OURS)
        yield SimpleNamespace(
            ours=ours,
            current=configuration,
            base=sys.modules["vllm.v1.kv_offload.base"],
            config=sys.modules["vllm.v1.kv_offload.config"],
            common=sys.modules["vllm.v1.kv_offload.cpu.common"],
            policies=sys.modules["vllm.v1.kv_offload.cpu.policies.base"],
            tiering=sys.modules["vllm.v1.kv_offload.tiering.base"],
        )
    finally:
        forget()
        sys.modules.update({name: before[name] for name in before if name not in sys.modules})


def forget() -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith(("vllm.", OURS))]:
        if name != f"{OURS}_v0" and not name.startswith(f"{OURS}_v0."):
            del sys.modules[name]


def from_source(source: Path) -> dict[str, ModuleType]:
    modules = {}
    for package in FROM_SOURCE:
        module = modules[f"vllm{package}"] = ModuleType(f"vllm{package}")
        module.__path__ = [str(source / "vllm" / Path(*package.split(".")))]
    modules["vllm.v1.kv_hints"].KvHintsEnvelope = type("KvHintsEnvelope", (), {})  # type: ignore[attr-defined]
    return modules


def config(vllm: SimpleNamespace, options: dict[str, Any], *, block_bytes: int = 64, **fields: Any) -> Any:
    """Return a spec's configuration with one group, overridden by `fields`."""
    part = vllm.config
    per_chunk = int(options.get("blocks_per_chunk", 1))
    values = {
        "groups": (part.OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0),),
        "worker_kv_bytes_per_block": block_bytes,
        "enable_kv_cache_events": True,
        "extra_config": options,
        "engine_id": "engine",
        "model": part.OffloadingModelConfig(name="model", dtype="float16"),
        "cache": part.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=per_chunk),
        "parallel": part.OffloadingParallelConfig(
            rank=0,
            world_size=fields.pop("world_size", 1),
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    }
    return part.OffloadingConfig(**(values | fields))
