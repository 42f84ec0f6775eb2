"""Whether an engine's interfaces are those that a class here was written for: they change between versions."""

from __future__ import annotations

import inspect
import logging

__all__ = ["require_fit", "warn_version"]

_LOG = logging.getLogger(__name__)


def warn_version(engine: str, version: str, supported: str) -> None:
    """Log a warning if an engine's version was never tested."""
    if not f"{version}.".startswith(f"{supported}."):
        _LOG.warning("%s is %s, Blockyard was tested with %s", engine, version, supported)


def require_fit(ours: type, theirs: type, which: str) -> None:
    """Check that an engine can call a class of ours by the signatures of its own base class.

    Raises:
        ImportError: an abstract method is missing, or takes other arguments.
    """
    missing: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
    if missing:
        raise ImportError(f"{which} wants {ours.__name__} to have {', '.join(sorted(missing))}")
    for name, base in vars(theirs).items():
        method = getattr(ours, name, None)
        if not inspect.isfunction(base) or not inspect.isfunction(method) or method is base or name == "__init__":
            continue
        wanted, found = list(inspect.signature(base).parameters), list(inspect.signature(method).parameters)
        if found[: len(wanted)] != wanted:
            raise ImportError(
                f"{which}: {theirs.__name__}.{name} takes {', '.join(wanted)}, Blockyard's {', '.join(found)}"
            )
