"""A `--kv-transfer-config` of vLLM, read for `blockyard doctor` as vLLM and its adapter read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters.options import nearest, refuse_unknown
from blockyard.tools.engine_config import EngineConfig, Place, gib

__all__ = ["OURS", "VllmConfig"]

OURS: Final = "blockyard.integrations.vllm"
_CONNECTOR: Final = Place("kv_connector", "kv_connector_module_path", ("BlockyardKVConnector",), OURS)
_SPEC: Final = Place(
    "spec_name", "spec_module_path", ("BlockyardSpec",), OURS, ("CPUOffloadingSpec", "TieringOffloadingSpec")
)
_POLICY: Final = Place(
    "eviction_policy", "cache_policy_module_path", ("LRUPolicy", "AdaptivePolicy"), OURS, ("lru", "arc")
)
_TIER: Final = Place("type", "module_path", ("BlockyardTier",), OURS, ("example", "fs", "p2p", "obj", "kvcr"))


class VllmConfig(EngineConfig):
    """What a `--kv-transfer-config` says of Blockyard.

    Args:
        config: the JSON.
    """

    page = "docs/engines/vllm.md"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._adapter = import_module(f"{OURS}.spec")
        self._connector(config)

    def _connector(self, config: Mapping[str, Any]) -> None:
        self._note(_check_fields, config)
        extra = config.get("kv_connector_extra_config") or {}
        if not isinstance(extra, dict):
            return  # it is wrong, see `_check_fields`
        if config.get("kv_connector") == "MultiConnector":
            for child in extra.get("connectors") or ():
                self._connector(child)
        elif self._is_ours(_CONNECTOR, config):
            for name, ours in (("spec_name", "BlockyardSpec"), ("spec_module_path", OURS)):
                if extra.get(name, ours) != ours:
                    self.wrong.append(f"{name} is {extra[name]!r:.100}, but BlockyardKVConnector has {ours!r}")
            self._note(self._read_ours, extra)
        elif config.get("kv_connector") == "OffloadingConnector":
            self._note(self._read_ours if self._is_ours(_SPEC, extra) else self._read_theirs, extra)

    def _read_ours(self, extra: dict[str, Any]) -> None:
        options = self._adapter.check_options(extra)
        self.unused += options.unused
        self.ours.append(f"{gib(options.host_bytes)} of host memory")
        if options.url is not None:
            self.urls.append(options.url)
            self.shared_bytes += options.host_bytes

    def _read_theirs(self, extra: dict[str, Any]) -> None:
        """Read the options of a spec of vLLM, which may name a policy or tiers of ours."""
        spec = extra.get("spec_name", "CPUOffloadingSpec")
        if spec not in _SPEC.builtin:
            return  # somebody else's
        known = self._adapter.OPTIONS
        for name in extra:
            if name not in known[spec]:
                others = [other for other in _SPEC.builtin if name in known[other]]
                remedy = f" (needs 'spec_name': {others[0]!r})" if others else nearest(name, known[spec])
                self.unused.append(f"{name!r}{remedy}")
        is_named = self._is_ours(_POLICY, extra)
        if is_named:
            self.ours.append(f"eviction policy {extra.get('eviction_policy')}")
        for tier in extra.get("secondary_tiers") or () if "secondary_tiers" in known[spec] else ():
            if isinstance(tier, dict) and self._is_ours(_TIER, tier):
                is_named = True
                self._note(self._read_tier, tier)
        if is_named:
            self._note(self._adapter.check_connectors, extra)
            self._note(_check_numbers, extra)

    def _read_tier(self, tier: dict[str, Any]) -> None:
        url, _ = import_module(f"{OURS}.tier").check_options(**tier)
        self._use(url, tier.get("root_dir"), "a tier over")


def _check_fields(config: Mapping[str, Any]) -> None:
    """Check the names and values that vLLM reads itself, as it does."""
    theirs = import_module("vllm.config").KVTransferConfig
    refuse_unknown("--kv-transfer-config", config, [field.name for field in dataclasses.fields(theirs)])
    try:
        theirs(**config)
    except (TypeError, ValueError) as error:
        details = error.errors() if hasattr(error, "errors") else ()  # pydantic's
        said = [": ".join([*map(str, detail["loc"]), detail["msg"]]) for detail in details]
        raise InvalidArgumentError("; ".join(said) or str(error)) from None


def _check_numbers(extra: Mapping[str, Any]) -> None:
    """Check the numbers of vLLM's own specs, which read no units."""
    for name, least, default in (("cpu_bytes_to_use", 1, 0), ("store_threshold", 0, 0), ("max_tracker_size", 1, 1)):
        value = extra.get(name, default)
        try:
            is_right = not isinstance(value, bool) and int(value) >= least
        except (TypeError, ValueError, OverflowError):
            is_right = False
        if not is_right:
            raise InvalidArgumentError(f"{name} is {value!r:.100}, must be a whole number from {least}, without a unit")
