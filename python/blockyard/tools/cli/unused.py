"""Refuses options that would have no effect beside the others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from blockyard.errors import InvalidArgumentError

__all__ = ["refuse_unused"]


def _has_times(options: argparse.Namespace) -> bool:
    return (options.step_time, options.fit) != (None, None)


def _no_size(options: argparse.Namespace) -> bool:
    return getattr(options, "memory_gib", None) is None


_CONFIG: Final = (
    ("model_config",),
    lambda options: options.bytes_per_token is not None,
    "with --bytes-per-token",
)
_OF_FIT: Final = (("fit_blocks", "device_bandwidth"), lambda options: options.fit is None, "without --fit")
_OF_BOTH: Final = (
    ("tensor_parallel_size",),
    lambda options: options.tensor_parallel_size != 1 and options.device_bandwidth is None and _no_size(options),
    "without --device-bandwidth, or --memory-gib of blockyard plan",
)
_OF_CONFIG: Final = (
    ("kv_cache_dtype",),
    lambda options: options.model_config is None or options.bytes_per_token is not None,
    "without --model-config",
)
_OF_TIMES: Final = (
    *("trace_events", "sessions", "max_num_seqs"),
    *("preemption_modes", "prefix_caching", "host_bandwidth"),
)
_OF_HARDWARE: Final = (_OF_FIT, _OF_BOTH, _OF_CONFIG)
_RULES: Final[dict[str, tuple[tuple[tuple[str, ...], Callable[[argparse.Namespace], bool], str], ...]]] = {
    "replay": (
        (_OF_TIMES, lambda options: not _has_times(options), "without --step-time or --fit"),
        (("window",), _has_times, "with --step-time or --fit"),
        _CONFIG,
        *_OF_HARDWARE,
    ),
    "plan": (
        _CONFIG,
        _OF_FIT,
        (("memory_utilization", "weights_gib"), lambda options: options.memory_gib is None, "without --memory-gib"),
        (("store_gib", "policies"), lambda options: not options.prefix_caching, "with --no-prefix-caching"),
    ),
    "doctor": ((("config",), lambda options: options.engine is None, "without --engine"),),
    "store": (
        (("damaged", "all", "yes"), lambda options: options.action != "rm", "with ls and stat"),
        (("verify",), lambda options: options.action == "rm", "with rm"),
        (("namespace", "tenant", "older_than", "all"), lambda options: options.damaged, "with --damaged"),
        (("all",), lambda options: bool(options.namespace or options.tenant or options.older_than), "with a choice"),
    ),
    "simulate": (
        (("seeds",), lambda options: options.replay is not None, "with --replay"),
        (("model",), lambda options: options.work == "calls", "with --work calls"),
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
                raise InvalidArgumentError(f"{option} has no effect {when}")
