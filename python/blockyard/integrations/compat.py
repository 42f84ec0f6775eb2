"""Checks that an engine's interfaces, which change between versions, are those that our classes implement."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Final

__all__ = ["engine_log", "log_through", "require_bases", "require_fields", "require_fit", "warn_version"]

_OURS: Final = "blockyard"
"""The logger above all of ours but those of the adapters."""
_NAME: Final = "blockyard to its engine"


def engine_log(engine: str) -> logging.Logger:
    """Return our logger below an engine's own, `vllm.blockyard`: the engine's format, level and handlers apply."""
    return logging.getLogger(f"{engine.lower()}.blockyard")


class _Through(logging.Handler):
    """Passes lines to an engine's logger, and the handlers that it has by then."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self.name = _NAME
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.handle(record)


def log_through(engine: str) -> None:
    """Pass the lines of all our loggers, such as those of stores, to an engine's: most engines set up no others.

    The last engine counts. Handlers that the user gives to `blockyard` or below it get the lines, too.
    """
    ours = logging.getLogger(_OURS)
    for handler in [one for one in ours.handlers if one.name == _NAME]:  # of a module that was loaded again, too
        ours.removeHandler(handler)
    ours.addHandler(_Through(engine_log(engine)))
    ours.propagate = False  # the engine's logger passes the line on to the root, if it does so with its own


def warn_version(engine: str, version: str, *supported: str) -> None:
    """Log a warning if an engine's version is untested."""
    if not f"{version}.".startswith(tuple(f"{known}." for known in supported)):
        engine_log(engine).warning("%s is %s, Blockyard was tested with %s", engine, version, " and ".join(supported))


def require_fit(ours: type, theirs: type, which: str, *, constructor: bool = False) -> None:
    """Check that an engine can call our class by the signatures of its own class.

    Args:
        ours: our class.
        theirs: the engine's class.
        which: engine and version, for the message.
        constructor: whether the engine constructs the objects.

    Raises:
        ImportError: an abstract method is missing, or takes other arguments.
    """
    missing: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
    if missing:
        raise ImportError(f"{which} wants {ours.__name__} to have {', '.join(sorted(missing))}")
    for name, base in vars(theirs).items():
        method = getattr(ours, name, None)
        if not inspect.isfunction(base) or not inspect.isfunction(method) or method is base:
            continue
        problem = _misfit(base, method) if constructor or name != "__init__" else ""
        if problem:
            raise ImportError(f"{which}: {theirs.__name__}.{name} {problem}")


def require_bases(ours: type, package: str, which: str) -> None:
    """Check that an engine can construct and call our class by the signatures of its base classes from a package.

    Raises:
        ImportError: an abstract method is missing, or takes other arguments.
    """
    for base in ours.__mro__:
        if base.__module__.startswith(f"{package}."):
            require_fit(ours, base, which, constructor=True)


def require_fields(theirs: type, which: str, *names: str) -> None:
    """Check that an engine's record has the fields used here.

    Raises:
        ImportError: it lacks one.
    """
    missing = set(names) - set(inspect.signature(theirs).parameters)
    if missing:
        raise ImportError(f"{which}: {theirs.__name__} has no {', '.join(sorted(missing))}")


def _misfit(theirs: Callable[..., object], ours: Callable[..., object]) -> str:
    """Return why a call by one signature does not fit the other; empty if it does."""
    wanted = list(inspect.signature(theirs).parameters.values())
    found = inspect.signature(ours).parameters
    order = list(found)
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    for place, parameter in enumerate(wanted):
        if parameter.name not in found and takes_more:
            continue
        if parameter.name not in found:
            return f"passes {parameter.name}, which Blockyard's does not take"
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and order.index(parameter.name) != place:
            return f"passes {parameter.name} as argument {place}, Blockyard takes it as {order.index(parameter.name)}"
    names = {parameter.name for parameter in wanted}
    for name, parameter in found.items():
        variable = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        if name not in names and parameter.default is parameter.empty and not variable:
            return f"does not pass {name}, which Blockyard's needs"
    return ""
