"""A configuration of vLLM, read for `blockyard doctor` as vLLM and its adapter read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final, NamedTuple

from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.stores.adapters.options import nearest, refuse_unknown
from blockyard.stores.url import public_url

__all__ = ["OURS", "VllmConfig", "gib"]

OURS: Final = "blockyard.integrations.vllm"
_ALIKE: Final = 0.8
"""Likeness from which on a name is a misspelt one of ours, whatever stands beside it."""


class _Place(NamedTuple):
    """Where a configuration names a class of ours, with its module.

    Attributes:
        name: option with the name of the class.
        path: option with its module.
        ours: the names of our classes.
        builtin: names for which vLLM reads no module.
    """

    name: str
    path: str
    ours: tuple[str, ...]
    builtin: tuple[str, ...]


_CONNECTOR: Final = _Place("kv_connector", "kv_connector_module_path", ("BlockyardKVConnector",), ())
_SPEC: Final = _Place(
    "spec_name", "spec_module_path", ("BlockyardSpec",), ("CPUOffloadingSpec", "TieringOffloadingSpec")
)
_POLICY: Final = _Place("eviction_policy", "cache_policy_module_path", ("LRUPolicy", "AdaptivePolicy"), ("lru", "arc"))
_TIER: Final = _Place("type", "module_path", ("BlockyardTier",), ("example", "fs", "p2p", "obj", "kvcr"))


class VllmConfig:
    """What a `--kv-transfer-config` says of Blockyard.

    Args:
        config: the JSON.

    Attributes:
        ours: what it names of Blockyard, and its sizes.
        wrong: what keeps vLLM from starting, or makes it use something else.
        unused: options without effect, each with its remedy.
        urls: the URLs of its stores.
        shared_bytes: bytes that its workers share in `/dev/shm`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.ours: list[str] = []
        self.wrong: list[str] = []
        self.unused: list[str] = []
        self.urls: list[str] = []
        self.shared_bytes = 0
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

    def _note(self, check: Callable[[dict[str, Any]], None], given: Any) -> None:
        """Call a check, and keep what it refuses."""
        try:
            check(given)
        except BlockyardError as error:
            self.wrong.append(str(error))

    def _is_ours(self, place: _Place, given: Mapping[str, Any]) -> bool:
        """Whether a configuration means a class of ours; what is wrong with its name or module is kept."""
        name, path = given.get(place.name), given.get(place.path)
        is_path = path is not None and ("blockyard" in str(path).lower() or _is_like(path, (OURS,)))
        if name in place.builtin or (name is None and place.builtin):
            if is_path:
                self.unused.append(f"{place.path!r} (needs {place.name!r}: {' or '.join(map(repr, place.ours))})")
            return False
        is_name = "blockyard" in str(name).lower() or (path is None and _is_like(name, place.ours))
        if not is_path and not is_name:
            return False
        if name not in place.ours:
            must = " or ".join(map(repr, place.ours))
            self.wrong.append(f"{place.name} is {name!r:.100}{nearest(name, place.ours)}, must be {must}")
        if path is None:
            self.wrong.append(f"{place.name} is {name!r:.100} without {place.path}, which must be {OURS!r}")
        elif path != OURS and not _has(path, name):
            self.wrong.append(f"{place.path} is {path!r:.100}{nearest(path, (OURS,))}, must be {OURS!r}")
        return True

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
        self.ours.append(f"a tier over {public_url(url)}")
        self.urls.append(url)


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


def _is_like(name: object, ours: tuple[str, ...]) -> bool:
    by_lower = [known.lower() for known in ours]
    return bool(get_close_matches(str(name).lower(), by_lower, n=1, cutoff=_ALIKE))


def _has(path: object, name: object) -> bool:
    """Whether a module of Blockyard has a class; modules of others are not imported."""
    if not str(path).startswith(f"{OURS}."):
        return False
    try:
        return hasattr(import_module(str(path)), str(name))
    except ImportError:
        return False


def gib(count: int) -> str:
    """Return a number of bytes in GiB, with three digits."""
    return f"{count / (1 << 30):.3g} GiB"
