"""Configurations of engines, read for `blockyard doctor` as the engine and its adapter read them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import blockyard
from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.integrations.options import lmcache as lmcache_options
from blockyard.integrations.options import sglang as sglang_options
from blockyard.integrations.options import vllm as vllm_options
from blockyard.stores.adapters.objects import place_url
from blockyard.stores.adapters.options import nearest, read_choice, refuse_unknown
from blockyard.stores.url import meant, public_url
from blockyard.tools.store.report import size_text

__all__ = ["EngineConfig", "LMCacheConfig", "SGLangConfig", "VllmConfig"]

_VLLM: Final = "blockyard.integrations.vllm"
_SGLANG: Final = "blockyard.integrations.sglang"
_LMCACHE: Final = "blockyard.integrations.lmcache"
_ALIKE: Final = 0.8
"""Likeness from which on a name is a misspelt one of ours, whatever stands beside it."""
_SMALL_HOST: Final = 1 << 30
"""Bytes of a host tier below which GiB were probably meant."""
_LEAST_CHUNK: Final = 1000
"""Bytes of a host tier that hold no chunk of any model."""


class ClassPlace(NamedTuple):
    """Where a configuration names a class of ours, with its module.

    Attributes:
        name: option with the name of the class.
        path: option with its module.
        ours: the names of our classes.
        module: our module.
        builtin: names for which the engine reads no module.
    """

    name: str
    path: str
    ours: tuple[str, ...]
    module: str
    builtin: tuple[str, ...] = ()


_CONNECTOR: Final = ClassPlace("kv_connector", "kv_connector_module_path", ("BlockyardKVConnector",), _VLLM)
_SPEC: Final = ClassPlace(
    "spec_name", "spec_module_path", ("BlockyardSpec",), _VLLM, ("CPUOffloadingSpec", "TieringOffloadingSpec")
)
_POLICY: Final = ClassPlace(
    "eviction_policy", "cache_policy_module_path", ("LRUPolicy", "AdaptivePolicy"), _VLLM, ("lru", "arc")
)
_TIER: Final = ClassPlace("type", "module_path", ("BlockyardTier",), _VLLM, ("example", "fs", "p2p", "obj", "kvcr"))
_HICACHE: Final = ClassPlace("class_name", "module_path", ("BlockyardHiCache",), _SGLANG)
_LINKER: Final = ClassPlace("linker", "linker_module_path", ("BlockyardLinker",), f"{_SGLANG}.linker")
_ADAPTER: Final = ClassPlace("class_name", "module_path", ("BlockyardConnector",), _LMCACHE)
_HICACHES_OWN: Final[Mapping[str, tuple[type, ...]]] = {
    "prefetch_threshold": (int,),
    "prefetch_timeout_base": (int, float),
    "prefetch_timeout_per_ki_token": (int, float),
    "hicache_storage_pass_prefix_keys": (bool,),
    "tp_lcm_size": (int,),
}
"""Options that SGLang reads itself and does not pass on, with the types that it takes."""


class EngineConfig:
    """What an engine's configuration says of Blockyard.

    Attributes:
        ours: what it names of Blockyard, and its sizes.
        wrong: what keeps the engine from starting, or makes it use something else.
        unused: options without effect, each with its remedy.
        doubts: values that an engine takes, but that are probably meant otherwise.
        urls: the URLs of its stores, each with the bytes of the host tier above it; 0 if unknown.
        folders: those in a `root_dir`, whose parents the adapter creates.
        host_bytes: bytes of its host tiers.
        shared_bytes: those that its workers share in `/dev/shm`.
    """

    page = ""
    """The docs page with the options."""

    def __init__(self) -> None:
        self.ours: list[str] = []
        self.wrong: list[str] = []
        self.unused: list[str] = []
        self.doubts: list[str] = []
        self.urls: dict[str, int] = {}
        self.folders: list[str] = []
        self.host_bytes = self.shared_bytes = 0

    def _note(self, check: Callable[[dict[str, Any]], None], given: Mapping[str, Any]) -> None:
        """Call a check, and keep what it refuses; call it again without the options that it names, for other faults."""
        left, named = dict(given), set[str]()
        while (said := _refusal(check, left)) is not None:
            words = set(re.findall(r"\w+", said))
            if words & named:
                return  # it misses one of those
            self.wrong.append(said)
            named |= words & set(left)
            if not words & named:
                return
            left = {name: value for name, value in left.items() if name not in named}

    def _is_ours(self, place: ClassPlace, given: Mapping[str, Any]) -> bool:
        """Whether a configuration means a class of ours; what is wrong with its name or module is kept."""
        name, path = given.get(place.name), given.get(place.path)
        is_path = path is not None and ("blockyard" in str(path).lower() or _is_like(path, (place.module,)))
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
            self.wrong.append(f"{place.name} is {name!r:.100} without {place.path}, which must be {place.module!r}")
        elif path != place.module and not _has(path, name, place):
            self.wrong.append(
                f"{place.path} is {path!r:.100}{nearest(path, (place.module,))}, must be {place.module!r}"
            )
        return True

    def _use(self, url: str, root_dir: object, what: str = "a store,", above: int = 0) -> None:
        self.ours.append(f"{what} {public_url(url)}")
        self.urls[url] = above
        if root_dir is not None:
            self.folders.append(url)


class VllmConfig(EngineConfig):
    """What a `--kv-transfer-config` says of Blockyard.

    Args:
        config: the JSON.
    """

    page = "engines/vllm"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._uses_connector = False
        self._connector(config)
        if self._uses_connector and config.get("kv_load_failure_policy") is None:
            self.doubts.append(
                "kv_load_failure_policy is not given: vLLM then ends a request whose blocks cannot be loaded with an "
                'error; "recompute" computes them again'
            )

    def _connector(self, config: Mapping[str, Any]) -> None:
        self._note(_check_fields, config)
        extra = config.get("kv_connector_extra_config") or {}
        if not isinstance(extra, dict):
            return  # it is wrong, see `_check_fields`
        if config.get("kv_connector") == "MultiConnector":
            for child in extra.get("connectors") or ():
                self._connector(child)
        elif self._is_ours(_CONNECTOR, config):
            for name, ours in (("spec_name", "BlockyardSpec"), ("spec_module_path", _VLLM)):
                if extra.get(name, ours) != ours:
                    self.wrong.append(f"{name} is {extra[name]!r:.100}, but BlockyardKVConnector has {ours!r}")
            self._uses_connector = True
            self._note(self._read_ours, extra)
            if not self.wrong and (why := _why_all_blocks(extra)):
                self.doubts.append(f"with {why}, the host copies every computed block, as that of BlockyardSpec does")
        elif config.get("kv_connector") == "OffloadingConnector":
            self._note(self._read_ours if self._is_ours(_SPEC, extra) else self._read_theirs, extra)

    def _read_ours(self, extra: dict[str, Any]) -> None:
        options = vllm_options.check_options(extra)
        self.unused += options.unused
        self.ours.append(f"{size_text(options.host_bytes)} of host memory")
        self._doubt(options.host_bytes, extra, "host_bytes", "cpu_bytes_to_use")
        self.host_bytes += options.host_bytes
        if options.url is not None:
            self.urls[options.url] = options.host_bytes
            self.shared_bytes += options.host_bytes

    def _doubt(self, size: int, extra: dict[str, Any], *names: str) -> None:
        """Ask about a host tier that is smaller than any that pays."""
        name = next(name for name in names if extra.get(name) is not None)
        if size < _SMALL_HOST and (remedy := meant(extra[name])):
            where = self.wrong if size < _LEAST_CHUNK else self.doubts
            where.append(
                f"{name} is {extra[name]!r}, {size_text(size)}{remedy} If no chunk fits, the engine does not start"
            )

    def _read_theirs(self, extra: dict[str, Any]) -> None:
        """Read the options of a spec of vLLM, which may name a policy or tiers of ours."""
        spec = extra.get("spec_name", "CPUOffloadingSpec")
        if spec not in _SPEC.builtin:
            return  # somebody else's
        known = vllm_options.OPTIONS
        for name in extra:
            if name not in known[spec]:
                others = [other for other in _SPEC.builtin if name in known[other]]
                remedy = f" (needs 'spec_name': {others[0]!r})" if others else nearest(name, known[spec])
                self.unused.append(f"{name!r}{remedy}")
        is_named = self._is_ours(_POLICY, extra)
        if is_named:
            self.ours.append(f"eviction policy {extra.get('eviction_policy')}")
        given = vllm_options.whole(extra.get("cpu_bytes_to_use"))
        for tier in extra.get("secondary_tiers") or () if "secondary_tiers" in known[spec] else ():
            if isinstance(tier, dict) and self._is_ours(_TIER, tier):
                is_named = True
                self._note(partial(self._read_tier, max(0, given)), tier)
        if is_named:
            self._note(vllm_options.check_connectors, extra)
            self._note(_check_numbers, extra)
            if given > 0:
                self.host_bytes += given
                self._doubt(given, extra, "cpu_bytes_to_use")

    def _read_tier(self, above: int, tier: dict[str, Any]) -> None:
        url, _ = vllm_options.check_tier(**tier)
        self._use(url, tier.get("root_dir"), "a tier over", above)


class SGLangConfig(EngineConfig):
    """What a `--hicache-storage-backend-extra-config` or an external linker's configuration says of Blockyard.

    Args:
        config: the JSON.
    """

    page = "engines/sglang"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if any(name in config for name in ("linker", "linker_module_path", "linker_extra_config")):
            self._note(_check_linker, config)
            if self._is_ours(_LINKER, config):
                self._note(self._read_linker, config)
        elif self._is_ours(_HICACHE, config):
            self._note(self._read_hicache, config)

    def _read_linker(self, config: Mapping[str, Any]) -> None:
        found = sglang_options.read_linker(config.get("linker_extra_config") or {})
        self._use(place_url(found.root_dir, found.url, found.size, "doctor"), found.root_dir)

    def _read_hicache(self, config: Mapping[str, Any]) -> None:
        for name in sglang_options.SGLANGS_OWN:
            if name not in config:
                raise InvalidArgumentError(f"{name} is missing, which SGLang needs for a dynamic backend")
        for name, types in _HICACHES_OWN.items():
            value = config.get(name)
            if name in config and (not isinstance(value, types) or (bool not in types and isinstance(value, bool))):
                wanted = " or ".join(kind.__name__ for kind in types)
                raise InvalidArgumentError(f"{name} is {value!r:.100}, must be {wanted}")
        found = sglang_options.read_hicache(
            {name: value for name, value in config.items() if name not in _HICACHES_OWN}
        )
        self._use(place_url(found.root_dir, found.url, found.size, "doctor"), found.root_dir)


class LMCacheConfig(EngineConfig):
    """What an `--l2-adapter` says of Blockyard.

    Args:
        config: the JSON.
    """

    page = "engines/lmcache"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if self._is_ours(_ADAPTER, config):
            if config.get("type") != "native_plugin":
                self.wrong.append(f"type is {config.get('type')!r:.100}, must be 'native_plugin'")
            if "max_capacity_gb" in config and config.get("eviction"):
                self.doubts.append(
                    "with 'max_capacity_gb' and 'eviction', LMCache deletes chunks, too: leave both out, as the store "
                    "has its own limit, size, and evicts the least recently used chunks"
                )
            elif "max_capacity_gb" in config:
                self.unused.append("'max_capacity_gb' (leave it out: the store has its own limit, size)")
            self._note(self._read, config.get("adapter_params") or {})

    def _read(self, given: Mapping[str, Any]) -> None:
        lmcache_options.read_options(given)
        self._use(
            place_url(given.get("root_dir"), given.get("url"), given.get("size"), "lmcache"), given.get("root_dir")
        )


def _refusal(check: Callable[[dict[str, Any]], None], given: dict[str, Any]) -> str | None:
    """Return why a check refuses options; None if it takes them."""
    try:
        check(given)
    except BlockyardError as error:
        return str(error)
    return None


def _check_fields(config: Mapping[str, Any]) -> None:
    """Check the names and values that vLLM reads itself, as it does; without vLLM, names and role."""
    try:
        theirs = import_module("vllm.config").KVTransferConfig
    except ImportError:
        refuse_unknown("--kv-transfer-config", config, vllm_options.FIELDS)
        if config.get("kv_connector") is not None:
            read_choice("kv_role", config.get("kv_role") or "", vllm_options.ROLES, "")
            policy = config.get("kv_load_failure_policy")
            read_choice("kv_load_failure_policy", policy, vllm_options.LOAD_FAILURE_POLICIES, "")
        if not isinstance(config.get("kv_connector_extra_config") or {}, dict):
            raise InvalidArgumentError("kv_connector_extra_config is no object") from None
        return
    refuse_unknown("--kv-transfer-config", config, [field.name for field in dataclasses.fields(theirs)])
    try:
        theirs(**config)
    except (TypeError, ValueError) as error:
        details = error.errors() if hasattr(error, "errors") else ()  # pydantic's
        said = [": ".join([*map(str, detail["loc"]), detail["msg"]]) for detail in details]
        raise InvalidArgumentError("; ".join(said) or str(error)) from None


def _why_all_blocks(extra: Mapping[str, Any]) -> str:
    """Return the option with which the host of `BlockyardKVConnector` keeps what the device has, too; empty if none."""
    if extra.get("policy") is not None:
        return "'policy'"
    if extra.get("prefix_writes") == "second_use" and extra.get("prefix_store") is not None:
        return '"prefix_writes": "second_use"'
    return "'blocks_per_chunk' above 1" if vllm_options.whole(extra.get("blocks_per_chunk")) > 1 else ""


def _check_numbers(extra: Mapping[str, Any]) -> None:
    """Check the numbers of vLLM's own specs, which read no units."""
    wrong = []
    for name, least, default in (("cpu_bytes_to_use", 1, 0), ("store_threshold", 0, 0), ("max_tracker_size", 1, 1)):
        value = extra.get(name, default)
        try:
            is_right = not isinstance(value, bool) and int(value) >= least
        except (TypeError, ValueError, OverflowError):
            is_right = False
        if not is_right:
            wrong.append(f"{name} is {value!r:.100}, must be a whole number from {least}, without a unit")
    if wrong:
        raise InvalidArgumentError("; ".join(wrong))


def _check_linker(config: Mapping[str, Any]) -> None:
    refuse_unknown("the linker's configuration", config, ("linker", "linker_module_path", "linker_extra_config"))


def _is_like(name: object, ours: tuple[str, ...]) -> bool:
    by_lower = [known.lower() for known in ours]
    return bool(get_close_matches(str(name).lower(), by_lower, n=1, cutoff=_ALIKE))


def _has(path: object, name: object, place: ClassPlace) -> bool:
    """Whether a module of Blockyard's adapter has a class of ours; modules of others are not imported."""
    if name not in place.ours or not str(path).startswith(f"{place.module}."):
        return False
    try:
        return hasattr(import_module(str(path)), str(name))
    except ImportError:  # perhaps only the engine is missing
        file = Path(blockyard.__file__).parent.joinpath(*str(path).split(".")[1:])
        return file.with_suffix(".py").is_file() or file.is_dir()
