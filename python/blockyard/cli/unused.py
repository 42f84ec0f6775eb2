"""Refuses options that would have no effect beside the others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from blockyard.errors import InvalidArgumentError

__all__ = ["refuse_unused"]


def _has_times(options: argparse.Namespace) -> bool:
    return (options.step_time, options.fit, options.system) != (None, None, None)


_JOBS: Final = (("jobs",), lambda options: options.executor is not None, "with --executor")
_CONFIG: Final = (
    ("model_config",),
    lambda options: options.bytes_per_token is not None and options.system is None,
    "with --bytes-per-token",
)
_OF_TIMES: Final = (
    *("trace_events", "model_config", "sessions", "bytes_per_token", "block_size", "max_num_seqs"),
    *("preemption_modes", "prefix_caching", "host_bandwidth"),
)
_RULES: Final[dict[str, tuple[tuple[tuple[str, ...], Callable[[argparse.Namespace], bool], str], ...]]] = {
    "replay": (
        (_OF_TIMES, lambda options: not _has_times(options), "without --step-time, --fit or --system"),
        (("window",), _has_times, "with --step-time, --fit or --system"),
        _CONFIG,
        _JOBS,
    ),
    "plan": (_CONFIG, _JOBS),
    "simulate": ((("seeds",), lambda options: options.replay is not None, "with --replay"),),
    "demo": (
        (("trace_requests", "scale"), lambda options: options.trace is None, "without --trace"),
        (("requests",), lambda options: options.trace is not None, "with --trace"),
    ),
}
"""By command: options, when they have no effect, and how to say so."""


def refuse_unused(options: argparse.Namespace) -> None:
    """Refuse an option that has no effect in this call, unless its value is the default.

    Raises:
        InvalidArgumentError: there is one.
    """
    for names, is_unused, when in _RULES.get(options.command, ()):
        for name in names:
            default = options.default_of(name)
            if getattr(options, name) != default and is_unused(options):
                option = f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
                raise InvalidArgumentError(f"{option} is given {when}, has no effect there")
