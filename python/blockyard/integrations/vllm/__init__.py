"""Blockyard in vLLM 0.32 and 0.33, unpatched: loaded by name from the configuration of its `OffloadingConnector`.

    {"spec_module_path": "blockyard.integrations.vllm", "spec_name": "BlockyardSpec", "host_bytes": "64GiB"}

Within vLLM's own `CPUOffloadingSpec`, `AdaptivePolicy` and `LRUPolicy` can be its `eviction_policy`.
Within its `TieringOffloadingSpec`, `BlockyardTier` can be one of the `secondary_tiers`. `docs/vllm.md` shows each.

Importing this raises `ImportError` where vLLM is missing, or where its interfaces are not those of 0.32 and 0.33.
"""

from blockyard.integrations.vllm.compat import require_fields, require_fit, require_vllm

require_vllm()

from vllm.v1.kv_offload.base import OffloadingEvent, PrepareStoreOutput, TransferResult  # noqa: E402 (checked above)
from vllm.v1.kv_offload.tiering.base import JobResult  # noqa: E402

from blockyard.integrations.vllm.manager import BlockyardManager  # noqa: E402
from blockyard.integrations.vllm.policy import AdaptivePolicy, LRUPolicy  # noqa: E402
from blockyard.integrations.vllm.spec import BlockyardSpec  # noqa: E402
from blockyard.integrations.vllm.tier import BlockyardTier  # noqa: E402
from blockyard.integrations.vllm.worker import BlockyardWorker  # noqa: E402

__all__ = [
    "AdaptivePolicy",
    "BlockyardManager",
    "BlockyardSpec",
    "BlockyardTier",
    "BlockyardWorker",
    "LRUPolicy",
]

for _class in (AdaptivePolicy, BlockyardManager, BlockyardSpec, BlockyardTier, BlockyardWorker, LRUPolicy):
    require_fit(_class)
require_fields(OffloadingEvent, "keys", "medium", "removed")
require_fields(PrepareStoreOutput, "keys_to_store", "store_spec", "evicted_keys")
require_fields(TransferResult, "job_id", "success", "transfer_size", "transfer_time")
require_fields(JobResult, "job_id", "success", "successful_keys", "transfer_time", "transfer_bytes")
