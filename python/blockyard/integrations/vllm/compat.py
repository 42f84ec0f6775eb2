"""Which vLLM is installed, and whether the classes here fit its interfaces: it calls them experimental."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Final

from blockyard.integrations import fit

__all__ = ["require_fields", "require_fit", "require_vllm"]

SUPPORTED: Final = ("0.32", "0.33")


def require_vllm() -> None:
    """Check that vLLM can be imported, and log a warning if its version was never tested.

    Raises:
        ImportError: vLLM is not installed, or has no such offloading interfaces.
    """
    try:
        for module in ("base", "cpu.common", "cpu.policies.base", "tiering.base"):
            import_module(f"vllm.v1.kv_offload.{module}")
    except ImportError as error:
        raise ImportError(f"blockyard.integrations.vllm needs vLLM {' or '.join(SUPPORTED)}: {error}") from error
    version = _version()
    if version is not None:
        fit.warn_version("vLLM", version, *SUPPORTED)


def require_fit(ours: type) -> None:
    """Check that vLLM can make and call a class of ours by the signatures of its own abstract classes.

    Raises:
        ImportError: an abstract method is missing, or takes other arguments.
    """
    for base in ours.__mro__:
        if base.__module__.startswith("vllm."):
            fit.require_fit(ours, base, _which(), constructor=True)


def require_fields(theirs: type, *names: str) -> None:
    """Check that one of vLLM's records has the fields that are set or read here.

    Raises:
        ImportError: it lacks one.
    """
    missing = set(names) - set(inspect.signature(theirs).parameters)
    if missing:
        raise ImportError(f"{_which()}: {theirs.__name__} has no {', '.join(sorted(missing))}")


def _version() -> str | None:
    version = getattr(sys.modules["vllm"], "__version__", None)
    return version if isinstance(version, str) else None


def _which() -> str:
    return f"vLLM {_version() or 'of an unknown version'} (Blockyard supports {' and '.join(SUPPORTED)})"
