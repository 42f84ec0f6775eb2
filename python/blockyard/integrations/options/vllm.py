"""Options of vLLM's configuration, read and checked. Works without vLLM, for `blockyard doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters.checkpoint import require_revision
from blockyard.stores.adapters.objects import check_place, place_url
from blockyard.stores.adapters.options import (
    nearest,
    read_choice,
    read_flag,
    read_seconds,
    read_size,
    read_text,
    refuse_unknown,
)
from blockyard.stores.url import public_repr

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = [
    "FIELDS",
    "LOAD_FAILURE_POLICIES",
    "OPTIONS",
    "POLICIES",
    "PREFIX_WRITES",
    "ROLES",
    "TIMEOUT_BASE_SECONDS",
    "CheckedOptions",
    "ExternalOptions",
    "check_connectors",
    "check_options",
    "check_tier",
    "read_external",
    "read_host_bytes",
    "unused_options",
    "whole",
]

FIELDS: Final = (
    *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config"),
    *("kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"),
)
"""Names in a `--kv-transfer-config` of vLLM 0.32 and 0.33."""
ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
LOAD_FAILURE_POLICIES: Final = ("recompute", "fail")
TIMEOUT_BASE_SECONDS: Final = 5.0
PREFIX_WRITES: Final = ("through", "second_use")
_OURS: Final = (
    "host_bytes",
    "cpu_bytes_to_use",
    "policy",
    "blocks_per_chunk",
    "prefix_store",
    "revision",
    "prefetch_timeout_base",
    "prefix_writes",
    "weights_fixed",
    "canonical_layout",
)
POLICIES: Final = ("lru", "adaptive", "priority")
_CONNECTORS: Final = ("spec_name", "spec_module_path", "block_size", "offload_prompt_only", "self_describing_kv_events")
"""Options that vLLM's connector uses with any spec."""
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockyardSpec": (*_OURS, *_CONNECTORS),
    "CPUOffloadingSpec": (
        *(*_CONNECTORS, "blocks_per_chunk", "canonical_layout", "cpu_bytes_to_use"),
        *("eviction_policy", "cache_policy_module_path", "store_threshold", "max_tracker_size"),
    ),
    "TieringOffloadingSpec": (
        *(*_CONNECTORS, "blocks_per_chunk", "canonical_layout", "cpu_bytes_to_use"),
        *("eviction_policy", "cache_policy_module_path", "secondary_tiers", "backpressure"),
    ),
}
"""Options that our spec and those of vLLM read."""
_INSTEAD: Final = {"eviction_policy": "policy", "secondary_tiers": "prefix_store", "num_cpu_blocks": "host_bytes"}
"""Options of vLLM's own specs, and ours for the same purpose."""
_TIERS: Final = ("type", "module_path", "root_dir", "size", "url", "revision", "backpressure")
_UNSEEN: Final = "vLLM tells a tier the model's name, not its weights and settings"


class ExternalOptions(NamedTuple):
    """Options of a store below the host, see `BlockyardSpec`."""

    url: str
    revision: str
    timeout_base: float
    weights_fixed: bool
    prefix_writes: str

    def __repr__(self) -> str:
        return f"ExternalOptions({public_repr(self.url)})"


class CheckedOptions(NamedTuple):
    """What a configuration says before the model is known.

    Attributes:
        host_bytes: host memory of all workers.
        url: URL of the prefix store, None for none.
        unused: options without effect, each with its remedy.
    """

    host_bytes: int
    url: str | None
    unused: list[str]

    def __repr__(self) -> str:
        return f"CheckedOptions({self.host_bytes}, {public_repr(self.url)}, {self.unused})"


def check_options(extra_config: Mapping[str, Any]) -> CheckedOptions:
    """Check the options of a spec without an engine.

    Raises:
        InvalidArgumentError: as for `BlockyardSpec`.
    """
    options = {name: value for name, value in extra_config.items() if value is not None}
    check_connectors(extra_config)
    unused = unused_options(options, None)
    read_choice("policy", options.get("policy"), POLICIES, "lru")
    external = read_external(options)
    return CheckedOptions(read_host_bytes(options, 1, unused), None if external is None else external.url, unused)


def check_connectors(options: Mapping[str, Any], config: OffloadingConfig | None = None) -> None:
    """Refuse what vLLM's connector reads as something else: its `int(2.5)` is 2, its `bool("false")` is True.

    Args:
        options: of any spec.
        config: what vLLM has read; None before the engine starts.

    Raises:
        InvalidArgumentError: an option has another value than vLLM uses, or would be refused by vLLM.
    """
    for name in ("offload_prompt_only", "self_describing_kv_events", "canonical_layout"):
        read_flag(name, options.get(name, False), default=None)
    sizes = {name: options[name] for name in ("blocks_per_chunk", "block_size") if options.get(name) is not None}
    if len(sizes) == 2:
        raise InvalidArgumentError("blocks_per_chunk and block_size are given, must be at most one of them")
    for name, value in sizes.items():
        number = whole(value)
        if config is None:
            is_used, why = number > 0, "must be a whole number above 0"
        else:
            tokens = config.groups[0].tokens_per_block if config.groups else 0
            used = config.cache.blocks_per_chunk * (tokens if name == "block_size" else 1)
            is_used, why = number == used, f"but vLLM uses {used}: write a whole number"
        if not is_used:
            raise InvalidArgumentError(f"{name} is {value!r:.100}, {why}")


def whole(value: object) -> int:
    """Return a whole number, also from text as vLLM reads it; -1 for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
        return int(number) if number.is_integer() and not isinstance(value, bool) else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def unused_options(options: Mapping[str, Any], config: OffloadingConfig | None) -> list[str]:
    """Return the options that have no effect, each with its remedy or reason."""
    return [f"{name!r}{why}" for name in options if (why := _why_unused(name, options, config)) is not None]


def _why_unused(name: str, options: Mapping[str, Any], config: OffloadingConfig | None) -> str | None:
    if name in _INSTEAD:
        return f" (use {_INSTEAD[name]!r})"
    if (
        name in {"revision", "prefetch_timeout_base", "prefix_writes", "weights_fixed", "canonical_layout"}
        and "prefix_store" not in options
    ):
        return " (needs 'prefix_store')"
    if config is not None and name == "prefix_store" and not config.worker_kv_bytes_per_block:
        return " (the model has no blocks)"
    if config is not None and name == "self_describing_kv_events" and not config.enable_kv_cache_events:
        return " (KV cache events are off)"
    known = OPTIONS["BlockyardSpec"]
    return None if name in known else nearest(name, known)


def read_external(options: Mapping[str, Any]) -> ExternalOptions | None:
    """Read the options of the external store; None if there is none."""
    url = options.get("prefix_store")
    if url is not None and (not isinstance(url, str) or not url):
        raise InvalidArgumentError(f"prefix_store is {public_repr(url)}, must be a URL: file:///dir?size=500GiB")
    revision = read_text("revision", options.get("revision"))
    base = read_seconds(
        "prefetch_timeout_base",
        options.get("prefetch_timeout_base"),
        TIMEOUT_BASE_SECONDS,
        most=3600,
        above_zero=True,
    )
    fixed = read_flag("weights_fixed", options.get("weights_fixed"), default=False)
    writes = read_choice("prefix_writes", options.get("prefix_writes"), PREFIX_WRITES, PREFIX_WRITES[0])
    return None if url is None else ExternalOptions(url, revision, base, fixed, writes)


def read_host_bytes(options: Mapping[str, Any], bytes_per_chunk: int, unused: list[str]) -> int:
    """Read the size of the host tier: at least one chunk."""
    given = [name for name in ("host_bytes", "cpu_bytes_to_use") if name in options]
    if len(given) != 1:
        found = " and ".join(given) or "neither"
        rest = f"; without effect: {', '.join(unused)}" if unused else ""
        raise InvalidArgumentError(f"{found} is given, must be exactly one of host_bytes and cpu_bytes_to_use{rest}")
    return read_size(given[0], options[given[0]], holds=max(1, bytes_per_chunk), what="chunk")


def check_tier(
    *,
    root_dir: str | None = None,
    size: int | str | None = None,
    url: str | None = None,
    revision: str | None = None,
    **unknown: object,
) -> tuple[str, str]:
    """Check the options of a tier; return the URL of its store, and the revision. Creates nothing.

    Raises:
        InvalidArgumentError: as for `BlockyardTier`.
    """
    refuse_unknown("secondary_tiers", unknown, _TIERS)
    check_place(root_dir, url, size)
    revision = read_text("revision", revision)
    require_revision(revision, url or "", _UNSEEN)
    return place_url(root_dir, url, size), revision
