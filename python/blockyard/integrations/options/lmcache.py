"""Options of LMCache's `adapter_params`, read and checked. Works without LMCache, for `blockyard doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters.checkpoint import require_revision
from blockyard.stores.adapters.objects import check_place
from blockyard.stores.adapters.options import read_kv_dtype, read_size, read_text, refuse_unknown

__all__ = ["read_options"]

_OPTIONS: Final = ("kv_dtype", "root_dir", "url", "size", "part", "revision")
_UNSEEN: Final = "LMCache tells an adapter the model's name, not its weights and settings"


def read_options(given: Mapping[str, Any]) -> tuple[str, int, str]:
    """Read and check the options, before anything is created; return dtype, bytes of a part and revision.

    Raises:
        InvalidArgumentError: as for `BlockyardConnector`.
    """
    refuse_unknown("adapter_params", given, _OPTIONS)
    kv_dtype, root_dir, url, size, part, revision = map(given.get, _OPTIONS)
    dtype, revision = read_kv_dtype("kv_dtype", kv_dtype or ""), read_text("revision", revision)
    part_bytes = 1 << 20 if part is None else read_size("part", part)
    if not 1 << 12 <= part_bytes <= 1 << 26:
        raise InvalidArgumentError(f"part is {part!r}, must be 4KiB to 64MiB")
    check_place(root_dir, url, size)
    require_revision(revision, url or "", _UNSEEN)
    return dtype, part_bytes, revision
