"""What keeps vLLM's host memory in the benchmarks of its hits."""

from __future__ import annotations

from typing import Any, NamedTuple

OURS = "blockyard.integrations.vllm"
SPEC = {"spec_name": "BlockyardSpec", "spec_module_path": OURS}


class System(NamedTuple):
    """A connector, its options without the host's size, and the option for that."""

    connector: str
    options: dict[str, Any]
    size: str

    @property
    def module(self) -> str | None:
        """Where the connector is, if not in vLLM."""
        return OURS if self.connector == "BlockyardKVConnector" else None


VLLM = {
    "vllm_lru": System("OffloadingConnector", {"spec_name": "CPUOffloadingSpec"}, "cpu_bytes_to_use"),
    "vllm_arc": System(
        "OffloadingConnector", {"spec_name": "CPUOffloadingSpec", "eviction_policy": "arc"}, "cpu_bytes_to_use"
    ),
    "vllm_lazy": System("SimpleCPUOffloadConnector", {"lazy_offload": True}, "cpu_bytes_to_use"),
}
OURS_ON_THE_HOST = {
    "ours_lru": System("OffloadingConnector", SPEC, "host_bytes"),
    "ours_adaptive": System("OffloadingConnector", {**SPEC, "policy": "adaptive"}, "host_bytes"),
    "ours_exclusive": System("BlockyardKVConnector", {}, "host_bytes"),
}
