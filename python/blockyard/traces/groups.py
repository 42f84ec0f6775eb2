"""The cache groups of the model whose requests a trace has: how a recording says them, and how to read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

from blockyard._core import CacheGroup
from blockyard.errors import BlockyardError, TraceError
from blockyard.traces.reader import open_trace

__all__ = ["GROUPS_FIELD", "group_fields", "read_groups"]

GROUPS_FIELD: Final = "cache_groups"
"""The field of a recording's first line that has the groups."""
_MOST_GROUPS: Final = 64


def group_fields(groups: Iterable[CacheGroup]) -> list[dict[str, Any]]:
    """Describe cache groups as JSON: of each the kind, and what it has of window, tokens and bytes of a block."""
    names = ("kind", "window", "block_tokens", "block_bytes")
    described = ({name: getattr(group, name) for name in names} for group in groups)
    return [{name: value for name, value in fields.items() if value is not None} for fields in described]


def read_groups(path: str | Path) -> tuple[CacheGroup, ...]:
    """Return the cache groups of the model that a trace was recorded from; empty if the trace does not say.

    Recordings of a `Scheduler` say it in their first line, unless the model has a single group that keeps all tokens.

    Args:
        path: path of the trace file.

    Raises:
        TraceError: the file cannot be read, or its groups are malformed.

    Example:
        >>> import tempfile
        >>> from blockyard import CacheGroup
        >>> from blockyard.traces import TraceRecorder, read_groups
        >>> path = tempfile.mkdtemp() + "/trace.jsonl"
        >>> groups = CacheGroup.full_attention(), CacheGroup.sliding_window(128)
        >>> with TraceRecorder(path, block_size=16, groups=groups) as recorder:
        ...     recorder.add("a", [], input_tokens=9)
        ...     recorder.finish("a", output_tokens=1)
        >>> read_groups(path) == groups
        True
    """
    path = Path(path)
    for number, text in islice(open_trace(path), 1):
        fields = _first_line(text).get(GROUPS_FIELD, [])
        try:
            if not isinstance(fields, list) or len(fields) > _MOST_GROUPS:
                raise ValueError(f"must be a list of at most {_MOST_GROUPS}")
            return tuple(_group(one) for one in fields)
        except (ValueError, TypeError, OverflowError, BlockyardError) as error:
            raise TraceError(f"{path}, line {number}: {GROUPS_FIELD}: {error}") from None
    return ()


def _first_line(text: str) -> dict[str, Any]:
    """Return the fields of a line; none if it is no JSON object, as in other formats."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _group(fields: Any) -> CacheGroup:
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r:.100} is not an object")
    makers: dict[Any, Any] = {
        "full_attention": CacheGroup.full_attention,
        "drafter": CacheGroup.drafter,
        "windowed_drafter": CacheGroup.windowed_drafter,
        "recurrent": CacheGroup.recurrent,
        "sliding_window": CacheGroup.sliding_window,
        "chunked_attention": CacheGroup.chunked_attention,
        "cross_attention": CacheGroup.cross_attention,
    }
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in makers:
        raise ValueError(f"kind is {kind!r:.100}, must be one of {', '.join(makers)}")
    window = [fields["window"]] if "window" in fields else []
    sizes = {name.removeprefix("block_"): fields.get(name) for name in ("block_tokens", "block_bytes")}
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"block_{name} is {size!r:.100}, must be at least 1")
    group: CacheGroup = makers[kind](*window)
    return group.with_blocks(**sizes)
