"""Names and kinds of the metrics that the manager reports to vLLM."""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

from blockyard.integrations.vllm.hints import OUTCOMES

__all__ = ["Metrics", "definitions", "hit_source"]

_HINTS: Final = (
    "Actions of requests' KV hints that were followed.",
    "Actions of KV hints for Blockyard that were refused; the log says why.",
    "Actions of KV hints that are not for Blockyard.",
)
_EXTERNAL: Final = (
    "Chunks that came from the external store to the host.",
    "Requested chunks that did not arrive: absent, damaged, refused or late.",
    "Chunks that were written to the external store.",
    "Chunks that were not written because the external store had them already.",
    "Chunks that were not written: evicted before their turn, or refused by the store.",
    "Damaged chunks that the external store returned; they were refused.",
)


class Metrics:
    """Metric names; those of vLLM's own CPU manager if the meaning is the same."""

    USAGE: Final[str] = CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC
    WRITE_USAGE: Final[str] = CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC
    READ_USAGE: Final[str] = CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC
    STORED: Final[str] = "blockyard:kv_offload_stored_perc"
    EVICTED: Final[str] = "blockyard:kv_offload_evicted_chunks"
    HINTS: Final = tuple(f"blockyard:kv_hints_{outcome}" for outcome in OUTCOMES)
    EXTERNAL: Final = tuple(
        f"blockyard:kv_offload_external_{what}_chunks"
        for what in ("loaded", "missed", "written", "present", "not_written", "damaged")
    )
    EXTERNAL_UP: Final[str] = "blockyard:kv_offload_external_up"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the Prometheus description of each metric."""
    return {
        Metrics.USAGE: OffloadingGaugeMetadata(documentation="Fraction of host chunks that transfers hold now."),
        Metrics.WRITE_USAGE: OffloadingGaugeMetadata(documentation="Fraction of host chunks that stores write now."),
        Metrics.READ_USAGE: OffloadingGaugeMetadata(documentation="Fraction of host chunks that loads read now."),
        Metrics.STORED: OffloadingGaugeMetadata(documentation="Fraction of host chunks that can be loaded."),
        Metrics.EXTERNAL_UP: OffloadingGaugeMetadata(documentation="1 while the external store answers and is used."),
        Metrics.EVICTED: OffloadingCounterMetadata(documentation="Host chunks that were evicted."),
        **{
            name: OffloadingCounterMetadata(documentation=text)
            for name, text in zip((*Metrics.HINTS, *Metrics.EXTERNAL), (*_HINTS, *_EXTERNAL), strict=True)
        },
    }


def hit_source(url: str | None) -> Any:
    """Return vLLM's label for tokens from a store, or from host memory if it is None; servers and buckets have none."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 (rarely called)

    if url is None or url.startswith("memory:"):
        return CacheHitSource.HOST
    return CacheHitSource.DISK if url.startswith(("file:", "local:")) else CacheHitSource.EXTERNAL_UNSPECIFIED
