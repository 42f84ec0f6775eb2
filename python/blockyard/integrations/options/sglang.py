"""Options of SGLang's configurations, read and checked. Works without SGLang, for `blockyard doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from blockyard.stores.adapters.objects import check_place
from blockyard.stores.adapters.options import (
    read_flag,
    read_kv_dtype,
    read_seconds,
    read_size,
    read_text,
    refuse_unknown,
)
from blockyard.stores.url import public_repr

__all__ = ["SGLANGS_OWN", "HiCacheOptions", "LinkerOptions", "read_hicache", "read_linker"]

_HICACHE: Final = ("root_dir", "url", "size", "revision", "kv_dtype", "interface_v1")
SGLANGS_OWN: Final = ("backend_name", "module_path", "class_name")
_LINKER: Final = ("root_dir", "url", "size", "revision", "staging", "lookup_seconds")


class HiCacheOptions(NamedTuple):
    """What an `extra_config` says; see `BlockyardHiCache`."""

    root_dir: Any
    url: Any
    size: Any
    revision: str
    kv_dtype: str

    def __repr__(self) -> str:
        return f"HiCacheOptions({public_repr(self.root_dir)}, {public_repr(self.url)})"


def read_hicache(extra_config: Mapping[str, Any]) -> HiCacheOptions:
    """Read and check the options, before anything is created.

    Raises:
        InvalidArgumentError: as for `BlockyardHiCache`.
    """
    given = {name: value for name, value in extra_config.items() if name not in SGLANGS_OWN}
    refuse_unknown("extra_config", given, _HICACHE)
    root_dir, url, size, revision, kv_dtype, interface = map(given.get, _HICACHE)
    check_place(root_dir, url, size)
    revision, kv_dtype = read_text("revision", revision), read_kv_dtype("kv_dtype", kv_dtype)
    read_flag("interface_v1", interface, default=False)  # SGLang reads "0" as true
    return HiCacheOptions(root_dir, url, size, revision, kv_dtype)


class LinkerOptions(NamedTuple):
    """What a `linker_extra_config` says; see `BlockyardLinker`."""

    root_dir: Any
    url: Any
    size: Any
    revision: str
    staging: int
    lookup_seconds: float

    def __repr__(self) -> str:
        return f"LinkerOptions({public_repr(self.root_dir)}, {public_repr(self.url)})"


def read_linker(given: Mapping[str, Any]) -> LinkerOptions:
    """Read and check the options, before anything is created.

    Raises:
        InvalidArgumentError: as for `BlockyardLinker`.
    """
    refuse_unknown("linker_extra_config", given, _LINKER)
    root_dir, url, size, revision, staging, seconds = map(given.get, _LINKER)
    check_place(root_dir, url, size)
    revision = read_text("revision", revision)
    staging = 1 << 30 if staging is None else read_size("staging", staging)
    seconds = read_seconds("lookup_seconds", seconds, 0.1, most=10, above_zero=False)
    return LinkerOptions(root_dir, url, size, revision, staging, seconds)
