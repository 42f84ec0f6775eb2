"""Configurations of engines, read for `blockyard doctor` as the engine and its adapter read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final, NamedTuple

from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.stores.adapters.objects import place_url
from blockyard.stores.adapters.options import nearest, refuse_unknown
from blockyard.stores.url import public_url

__all__ = ["EngineConfig", "LMCacheConfig", "Place", "SGLangConfig", "gib"]

_SGLANG: Final = "blockyard.integrations.sglang"
_LMCACHE: Final = "blockyard.integrations.lmcache"
_ALIKE: Final = 0.8
"""Likeness from which on a name is a misspelt one of ours, whatever stands beside it."""


class Place(NamedTuple):
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


_HICACHE: Final = Place("class_name", "module_path", ("BlockyardHiCache",), _SGLANG)
_LINKER: Final = Place("linker", "linker_module_path", ("BlockyardLinker",), f"{_SGLANG}.linker")
_ADAPTER: Final = Place("class_name", "module_path", ("BlockyardConnector",), _LMCACHE)
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
        urls: the URLs of its stores.
        folders: those in a `root_dir`, whose parents the adapter creates.
        shared_bytes: bytes that its workers share in `/dev/shm`.
    """

    page = ""
    """Where the options are described."""

    def __init__(self) -> None:
        self.ours: list[str] = []
        self.wrong: list[str] = []
        self.unused: list[str] = []
        self.urls: list[str] = []
        self.folders: list[str] = []
        self.shared_bytes = 0

    def _note(self, check: Callable[[dict[str, Any]], None], given: Any) -> None:
        """Call a check, and keep what it refuses."""
        try:
            check(given)
        except BlockyardError as error:
            self.wrong.append(str(error))

    def _is_ours(self, place: Place, given: Mapping[str, Any]) -> bool:
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

    def _use(self, url: str, root_dir: object, what: str = "a store,") -> None:
        self.ours.append(f"{what} {public_url(url)}")
        self.urls.append(url)
        if root_dir is not None:
            self.folders.append(url)


class SGLangConfig(EngineConfig):
    """What a `--hicache-storage-backend-extra-config` or an external linker's configuration says of Blockyard.

    Args:
        config: the JSON.
    """

    page = "docs/engines/sglang.md"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if any(name in config for name in ("linker", "linker_module_path", "linker_extra_config")):
            self._note(_check_linker, config)
            if self._is_ours(_LINKER, config):
                self._note(self._read_linker, config)
        elif self._is_ours(_HICACHE, config):
            self._note(self._read_hicache, config)

    def _read_linker(self, config: Mapping[str, Any]) -> None:
        found = import_module(f"{_SGLANG}.linker").read_options(config.get("linker_extra_config") or {})
        self._use(place_url(found.root_dir, found.url, found.size, "doctor"), found.root_dir)

    def _read_hicache(self, config: Mapping[str, Any]) -> None:
        storage = import_module(f"{_SGLANG}.storage")
        for name in storage.SGLANGS_OWN:
            if name not in config:
                raise InvalidArgumentError(f"{name} is missing, which SGLang needs for a dynamic backend")
        for name, types in _HICACHES_OWN.items():
            value = config.get(name)
            if name in config and (not isinstance(value, types) or (bool not in types and isinstance(value, bool))):
                wanted = " or ".join(kind.__name__ for kind in types)
                raise InvalidArgumentError(f"{name} is {value!r:.100}, must be {wanted}")
        found = storage.read_options({name: value for name, value in config.items() if name not in _HICACHES_OWN})
        self._use(place_url(found.root_dir, found.url, found.size, "doctor"), found.root_dir)


class LMCacheConfig(EngineConfig):
    """What an `--l2-adapter` says of Blockyard.

    Args:
        config: the JSON.
    """

    page = "docs/engines/lmcache.md"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if self._is_ours(_ADAPTER, config):
            if config.get("type") != "native_plugin":
                self.wrong.append(f"type is {config.get('type')!r:.100}, must be 'native_plugin'")
            if "max_capacity_gb" in config:
                self.unused.append("'max_capacity_gb' (leave it out: the store has its own limit, size)")
            self._note(self._read, config.get("adapter_params") or {})

    def _read(self, given: Mapping[str, Any]) -> None:
        import_module(f"{_LMCACHE}.connector").read_options(given)
        self._use(
            place_url(given.get("root_dir"), given.get("url"), given.get("size"), "lmcache"), given.get("root_dir")
        )


def _check_linker(config: Mapping[str, Any]) -> None:
    refuse_unknown("the linker's configuration", config, ("linker", "linker_module_path", "linker_extra_config"))


def _is_like(name: object, ours: tuple[str, ...]) -> bool:
    by_lower = [known.lower() for known in ours]
    return bool(get_close_matches(str(name).lower(), by_lower, n=1, cutoff=_ALIKE))


def _has(path: object, name: object, place: Place) -> bool:
    """Whether a module of Blockyard's adapter has a class of ours; modules of others are not imported."""
    if name not in place.ours or not str(path).startswith(f"{place.module}."):
        return False
    try:
        return hasattr(import_module(str(path)), str(name))
    except ImportError:
        return False


def gib(count: int) -> str:
    """Return a number of bytes in GiB, with three digits."""
    return f"{count / (1 << 30):.3g} GiB"
