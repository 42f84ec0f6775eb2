"""Managers of somebody else: what they lack of Blockyard's calls, and what stands for it under a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import CacheGroup
from blockyard.testing.interfaces import Config, TierName

__all__ = ["completed", "lacking"]

NEEDED: Final = ("block_size", "allocate", "append", "free", "block_table", "num_tokens")
"""What a manager under a scheduler must have."""


def lacking(manager: object, names: Iterable[str]) -> str:
    """Return which of the names a manager lacks, as text; empty if none."""
    return ", ".join(name for name in names if not name.startswith("_") and not hasattr(manager, name))


def completed(manager: Any, config: Config, live: Callable[[], Iterable[int]]) -> Any:
    """Return a manager with what the machine reads beside the calls of a scheduler.

    Args:
        manager: the manager under test.
        config: its sizes.
        live: returns the sequences that are not freed.

    Raises:
        AssertionError: it lacks a call without which no scheduler can run.
    """
    if missing := lacking(manager, NEEDED):
        raise AssertionError(f"{type(manager).__name__} lacks {missing}: a scheduler needs {', '.join(NEEDED)}")
    own = _answers(manager, config, live)
    answers = {name: value for name, value in own.items() if not _answers_like(getattr(manager, name, None), value)}
    return _Completed(manager, answers) if answers else manager


def _answers(manager: Any, config: Config, live: Callable[[], Iterable[int]]) -> dict[str, Any]:
    """Return the answers of a manager whose sequences are all on the device, without a prefix cache or decisions."""

    def pool(tier: TierName = "device", /) -> SimpleNamespace:
        blocks = config.device_blocks if tier == "device" else 0
        used = {int(block) for handle in live() for block in manager.block_table(handle)} if blocks else set()
        return SimpleNamespace(num_blocks=blocks, num_free=blocks - len(used), reserved=0)

    def slot_mapping(sequence: int, first: int, last: int, /) -> NDArray[np.int64]:
        size, table = manager.block_size, manager.block_table(sequence)
        return np.array([int(table[i // size]) * size + i % size for i in range(first, last)], np.int64)

    return {
        "pool": pool,
        "slot_mapping": slot_mapping,
        "stats": lambda: SimpleNamespace(sequences=len(list(live())), open_tickets=()),
        "tier": lambda _sequence: "device",
        "check": lambda: None,
        "groups": (CacheGroup.full_attention(),),
        "prefix": SimpleNamespace(enabled=False),
    }


def _answers_like(own: object, answer: object) -> bool:
    """Whether an attribute of a manager can be what the machine reads, and is not something else of that name."""
    if isinstance(answer, tuple):
        return isinstance(own, Iterable) and all(isinstance(group, CacheGroup) for group in own)
    return callable(own) if callable(answer) else hasattr(own, "enabled")


class _Completed:
    """A manager, and answers for what it lacks."""

    def __init__(self, inner: Any, answers: dict[str, Any]) -> None:
        self._inner, self._answers = inner, answers

    def __getattr__(self, name: str) -> Any:
        return self._answers[name] if name in self._answers else getattr(self._inner, name)
