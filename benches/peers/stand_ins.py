"""Modules that a peer imports and its block manager does not use: the peer runs without what they would need."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


class _Nothing(type):
    """Each attribute, item and call of the class below is the class itself; as a decorator it changes nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Nothing:
            return super().__call__(*args, **kwargs)
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


class Nothing(metaclass=_Nothing):
    """Whatever a peer takes from a module that is not there."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def stand_in(*names: str) -> None:
    """Import these modules, and all that are in them, as nothing."""
    sys.meta_path.insert(0, _Finder(names))


def bare(*packages: str) -> None:
    """Import these packages without running their `__init__`, which would import the whole engine."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"no package {name}")
        module = ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = module
