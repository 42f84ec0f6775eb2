"""Options from an engine's configuration. A JSON value is used or refused by name; null counts as not given."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Final

from blockyard.errors import InvalidArgumentError
from blockyard.stores.url import MAX_BYTES, read_bytes

__all__ = [
    "nearest",
    "read_choice",
    "read_flag",
    "read_kv_dtype",
    "read_seconds",
    "read_size",
    "read_text",
    "refuse_unknown",
]

_KV_DTYPES: Final = (
    *("bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "fp8_inc", "fp8_ds_mla"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "mxfp8", "nvfp4", "nvfp4_4over6"),
    *("nvfp4_ds_mla", "fp4_e2m1", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc"),
    *("turboquant_3bit_nc", "ultraquant_4bit"),
)
"""torch's names, and those of `--kv-cache-dtype` in vLLM 0.32 and SGLang 0.5.23."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a remedy for a misspelt name: ` (did you mean 'x'?)`, or nothing."""
    by_lower = {str(word).lower(): word for word in known}
    found = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""


def refuse_unknown(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse options that do not exist.

    Args:
        where: what the engine calls the options, for the message.
        given: names of the options.
        known: names that exist.

    Raises:
        InvalidArgumentError: a name is unknown; the message has the nearest known one.
    """
    unknown = [f"{name!r}{nearest(name, known)}" for name in given if name not in known]
    if unknown:
        raise InvalidArgumentError(f"{where} has {', '.join(unknown)}, must be of {', '.join(known)}")


def read_text(name: str, value: object) -> str:
    """Read text, empty if not given. A number is refused, as JSON reads 1.10 as 1.1."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} is {value!r:.100}, must be text in quotes")
    return value


def read_choice(name: str, value: object, known: Collection[str], default: str) -> str:
    """Read one of several words."""
    if value is None:
        return default
    if not isinstance(value, str) or value not in known:
        raise InvalidArgumentError(
            f"{name} is {value!r:.100}{nearest(value, known)}, must be one of {', '.join(known)}"
        )
    return value


def read_kv_dtype(name: str, value: object) -> str:
    """Read the dtype of a KV cache. Under another spelling of it, engines would not find each other's blocks."""
    if value == "auto":
        raise InvalidArgumentError(f"{name} is 'auto', must be the dtype that auto stands for: the model's")
    return read_choice(name, value, _KV_DTYPES, "")


def read_flag(name: str, value: object, *, default: bool | None) -> bool:
    """Read true or false. Text such as `"false"` is refused: Python takes it for true. So is null without a default."""
    if value is None and default is not None:
        return default
    if not isinstance(value, bool | int) or value not in {0, 1}:
        raise InvalidArgumentError(f"{name} is {value!r:.100}, must be true or false (or 1 or 0), without quotes")
    return bool(value)


def read_seconds(name: str, value: object, default: float, *, most: float, above_zero: bool) -> float:
    """Read a number of seconds, from 0 or above 0 to `most`."""
    if value is None:
        return default
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    if not right or (above_zero and not value):
        least = "above 0, at most" if above_zero else "0 to"
        raise InvalidArgumentError(f"{name} is {value!r:.100}, must be seconds {least} {most:g}, without quotes")
    return float(value)  # type: ignore[arg-type]


def read_size(name: str, value: object, *, holds: int = 1, what: str = "block") -> int:
    """Read a number of bytes, see `read_bytes`. A float is rounded down: vLLM computes one from its option in GiB."""
    if isinstance(value, float) and 0 <= value <= MAX_BYTES:
        value = int(value)
    return read_bytes(name, value, holds=holds, what=what)  # type: ignore[arg-type]
