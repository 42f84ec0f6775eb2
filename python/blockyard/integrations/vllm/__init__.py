"""Blockyard in vLLM 0.32 and 0.33, unpatched: loaded by name from the configuration of its `OffloadingConnector`.

    {"spec_module_path": "blockyard.integrations.vllm", "spec_name": "BlockyardSpec", "host_bytes": "64GiB"}

Within vLLM's own `CPUOffloadingSpec`, `AdaptivePolicy` and `LRUPolicy` can be its `eviction_policy`. Within its
`TieringOffloadingSpec`, `BlockyardTier` can be one of the `secondary_tiers`. `docs/engines/vllm.md` describes each.

Importing this raises `ImportError` if vLLM is missing, or if its interfaces are not those of 0.32 and 0.33.
"""

import sys
from importlib import import_module
from typing import Any

from blockyard.integrations.compat import log_through, require_bases, require_fields, warn_version

SUPPORTED = ("0.32", "0.33")

try:
    for _module in ("base", "cpu.common", "cpu.policies.base", "tiering.base"):
        import_module(f"vllm.v1.kv_offload.{_module}")
except ImportError as error:
    raise ImportError(f"blockyard.integrations.vllm needs vLLM {' or '.join(SUPPORTED)}: {error}") from error

log_through("vLLM")
_version = getattr(sys.modules["vllm"], "__version__", None)
_WHICH = f"vLLM {_version or 'of an unknown version'} (Blockyard supports {' and '.join(SUPPORTED)})"
if isinstance(_version, str):
    warn_version("vLLM", _version, *SUPPORTED)

from vllm.v1.kv_offload.base import OffloadingEvent, PrepareStoreOutput, TransferResult  # noqa: E402 (checked above)
from vllm.v1.kv_offload.tiering.base import JobResult  # noqa: E402

from blockyard.integrations.vllm.manager import BlockyardManager  # noqa: E402
from blockyard.integrations.vllm.policy import AdaptivePolicy, LRUPolicy  # noqa: E402
from blockyard.integrations.vllm.spec import BlockyardSpec  # noqa: E402
from blockyard.integrations.vllm.tier import BlockyardTier  # noqa: E402
from blockyard.integrations.vllm.worker import BlockyardWorker  # noqa: E402

__all__ = [
    "AdaptivePolicy",
    "BlockyardKVConnector",
    "BlockyardManager",
    "BlockyardSpec",
    "BlockyardTier",
    "BlockyardWorker",
    "LRUPolicy",
]

for _class in (AdaptivePolicy, BlockyardManager, BlockyardSpec, BlockyardTier, BlockyardWorker, LRUPolicy):
    require_bases(_class, "vllm", _WHICH)
require_fields(OffloadingEvent, _WHICH, "keys", "medium", "removed")
require_fields(PrepareStoreOutput, _WHICH, "keys_to_store", "store_spec", "evicted_keys")
require_fields(TransferResult, _WHICH, "job_id", "success", "transfer_size", "transfer_time")
require_fields(JobResult, _WHICH, "job_id", "success", "successful_keys", "transfer_time", "transfer_bytes")


def __getattr__(name: str) -> Any:
    # It imports vLLM's connectors, which take long and which nothing else here needs.
    if name == "BlockyardKVConnector":
        from blockyard.integrations.vllm.exclusive_host.connector import BlockyardKVConnector  # noqa: PLC0415

        return BlockyardKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
