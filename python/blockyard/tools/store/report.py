"""Sums up what a store holds, and shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TextIO

import numpy as np

from blockyard.tools.store.contents import Contents, DamagedBlock, Selection

__all__ = ["StoreReport", "StoredGroup", "show", "size_text", "survey"]

_MAX_SHOWN: Final = 20
"""Maximum number of damaged blocks listed as text."""
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass
class StoredGroup:
    """The chosen blocks of one namespace and tenant.

    Attributes:
        namespace: first digits of the namespace.
        tenant: first digits of the tenant; empty for none.
        parts: parts of the namespace.
        blocks: number of blocks.
        bytes: their bytes in the storage.
        youngest_seconds: age of the youngest block; None if unknown.
        oldest_seconds: age of the oldest.
    """

    namespace: str
    tenant: str
    parts: dict[str, str]
    blocks: int = 0
    bytes: int = 0
    youngest_seconds: float | None = None
    oldest_seconds: float | None = None

    def add(self, sizes: Any, ages: Any) -> None:
        """Count some blocks."""
        self.blocks += len(sizes)
        self.bytes += int(sizes.sum())
        known = ages[~np.isnan(ages)].tolist()
        if known:
            self.youngest_seconds = min(known + [self.youngest_seconds] * (self.youngest_seconds is not None))
            self.oldest_seconds = max(known + [self.oldest_seconds] * (self.oldest_seconds is not None))


@dataclass
class StoreReport:
    """What a store holds of a selection.

    Attributes:
        groups: the blocks by namespace and tenant, most bytes first.
        facts: more about the storage.
        damaged: damaged blocks, whatever was selected.
        places: where the chosen blocks are, if they were to be kept.
    """

    groups: list[StoredGroup] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    damaged: list[DamagedBlock] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Number of chosen blocks."""
        return sum(group.blocks for group in self.groups)

    @property
    def bytes(self) -> int:
        """Their bytes in the storage."""
        return sum(group.bytes for group in self.groups)


def survey(
    contents: Contents, chosen: Selection, *, keep_places: bool = False, step: Callable[[int], None] = lambda _: None
) -> StoreReport:
    """Read what a store holds.

    Args:
        contents: the store.
        chosen: which blocks to count.
        keep_places: whether to remember where they are, which takes memory for each.
        step: called with the number of blocks that were read.
    """
    found, groups, parts, seen = StoreReport(), dict[tuple[str, str], StoredGroup](), dict[str, dict[str, str]](), 0
    for page in contents.pages():
        step(seen := seen + len(page.places))
        if page.namespace not in parts:
            parts[page.namespace] = contents.parts(page.namespace)
        own = parts[page.namespace]
        if not chosen.takes(page.namespace, own):
            continue
        taken = chosen.choose(page, own)
        for tenant in dict.fromkeys(taken.tenants):
            at = np.array([name == tenant for name in taken.tenants], np.bool_)
            group = groups.setdefault((page.namespace, tenant), StoredGroup(page.namespace, tenant, own))
            group.add(taken.sizes[at], taken.ages[at])
        if keep_places:
            found.places += taken.places
    found.groups = sorted(groups.values(), key=lambda group: -group.bytes)
    found.facts, found.damaged = contents.facts, contents.damaged
    return found


def show(found: StoreReport, action: str, stream: TextIO) -> None:
    """Write a report as text."""
    say = partial(print, file=stream)
    rows = [("NAMESPACE", "TENANT", "BLOCKS", "SIZE", "AGE", ""), *map(_row, found.groups)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, group in zip(rows, (None, *found.groups), strict=True):
        if found.groups:
            say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if action == "stat" and group is not None:
            for name, value in group.parts.items():
                say(f"    {name}: {value}")
    if action == "stat" or not (found.groups or found.damaged):
        say(f"{found.blocks} blocks, {size_text(found.bytes)}")
    if action == "stat":
        for name, value in found.facts.items():
            say(f"{name}: {value}")
    for block in found.damaged[:_MAX_SHOWN]:
        say(f"damaged: {block.what}: {block.reason}")
    if len(found.damaged) > _MAX_SHOWN:
        say(f"damaged: {len(found.damaged) - _MAX_SHOWN} more")


def _row(group: StoredGroup) -> tuple[str, ...]:
    names = [group.parts[name] for name in ("model", "name", "revision", "rank", "engine") if name in group.parts]
    ages = dict.fromkeys(_age(age) for age in (group.youngest_seconds, group.oldest_seconds) if age is not None)
    return (
        group.namespace,
        group.tenant or "-",
        str(group.blocks),
        size_text(group.bytes),
        " to ".join(ages) or "-",
        ", ".join(names),
    )


def _age(seconds: float) -> str:
    length, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{seconds / length:.0f} {unit}"


def size_text(count: float) -> str:
    """Return a number of bytes with three digits, in the largest unit of which there is one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" and count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB" if count < 1000 else f"{count:.0f} TiB"
