"""Which vLLM is installed, and whether the classes here fit its interfaces: it calls them experimental."""

from __future__ import annotations

import inspect
import logging
import sys
from importlib import import_module
from typing import Any, Final

__all__ = ["require_fields", "require_fit", "require_vllm"]

SUPPORTED: Final = ("0.32", "0.33")
_LOG = logging.getLogger(__name__)


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
    if version is not None and not version.startswith(tuple(f"{known}." for known in SUPPORTED)):
        _LOG.warning("vLLM is %s, Blockyard was tested with %s", version, " and ".join(SUPPORTED))


def require_fit(ours: type) -> None:
    """Check that vLLM can call a class of ours by the signatures of its own abstract class.

    Raises:
        ImportError: an abstract method is missing, or takes other arguments.
    """
    missing: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
    if missing:
        raise ImportError(f"{_which()} wants {ours.__name__} to have {', '.join(sorted(missing))}")
    for base in ours.__mro__:
        if not base.__module__.startswith("vllm."):
            continue
        for name, theirs in vars(base).items():
            method = getattr(ours, name, None)
            if inspect.isfunction(theirs) and inspect.isfunction(method) and method is not theirs:
                problem = _misfit(theirs, method)
                if problem:
                    raise ImportError(f"{_which()}: {base.__name__}.{name} {problem}")


def require_fields(theirs: type, *names: str) -> None:
    """Check that one of vLLM's records has the fields that are set or read here.

    Raises:
        ImportError: it lacks one.
    """
    missing = set(names) - set(inspect.signature(theirs).parameters)
    if missing:
        raise ImportError(f"{_which()}: {theirs.__name__} has no {', '.join(sorted(missing))}")


def _misfit(theirs: Any, ours: Any) -> str:
    """Why a call by one signature does not fit the other; empty if it does."""
    wanted = list(inspect.signature(theirs).parameters.values())
    found = inspect.signature(ours).parameters
    order = list(found)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values()):
        return ""
    for place, parameter in enumerate(wanted):
        if parameter.name not in found:
            return f"passes {parameter.name}, which Blockyard's does not take"
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and order.index(parameter.name) != place:
            return f"passes {parameter.name} as argument {place}, Blockyard takes it as {order.index(parameter.name)}"
    names = {parameter.name for parameter in wanted}
    for name, parameter in found.items():
        if name not in names and parameter.default is parameter.empty:
            return f"does not pass {name}, which Blockyard's needs"
    return ""


def _version() -> str | None:
    version = getattr(sys.modules["vllm"], "__version__", None)
    return version if isinstance(version, str) else None


def _which() -> str:
    return f"vLLM {_version() or 'of an unknown version'} (Blockyard supports {' and '.join(SUPPORTED)})"
