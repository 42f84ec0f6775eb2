"""Progress of a command on standard error: a rich bar on a terminal, otherwise occasional plain lines."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

__all__ = ["Progress", "show_progress"]

FIRST_SECONDS: Final = 1.0
"""Minimum duration of work that prints plain lines."""
LINE_SECONDS: Final = 10.0
"""Interval between plain lines."""


class Progress(Protocol):
    """A view of work in progress."""

    def step(self, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` are finished."""


class _Silent:
    def step(self, done: int, total: int, note: str = "") -> None:
        pass


class _Lines:
    """Plain lines: the label once the work has run for a second, then its progress."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._next = time.monotonic() + LINE_SECONDS

    def begin(self) -> None:
        self._say(" ...")

    def step(self, done: int, total: int, note: str = "") -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + LINE_SECONDS
            self._say(f": {done} of {total}{f', {note}' if note else ''}")

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe: the work continues
            print(f"{self._label}{text}", file=sys.stderr, flush=True)


@contextmanager
def show_progress(label: str, *, quiet: bool) -> Iterator[Progress]:
    """Show progress on standard error within the context.

    Args:
        label: name of the work.
        quiet: whether to show nothing.

    Yields:
        The view to update. Until its first update it shows only that the work is running.
    """
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(label) as view:
            yield view
    else:
        lines = _Lines(label)
        timer = threading.Timer(FIRST_SECONDS, lines.begin)
        timer.daemon = True
        timer.start()
        try:
            yield lines
        finally:
            timer.cancel()


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich import progress as bars  # noqa: PLC0415 - optional
    from rich.console import Console  # noqa: PLC0415 - optional

    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=16),
        bars.TextColumn("{task.fields[count]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[note]}"),
    )
    # Only the report goes to standard output: rich must not redirect it to its console.
    with bars.Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(label, total=None, count="", note="")

        class Bar:
            def step(self, done: int, total: int, note: str = "") -> None:
                bar.update(task, completed=done, total=total, count=f"{done}/{total}", note=note)

        yield Bar()
