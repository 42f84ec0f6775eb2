"""The files that `--html` and `--trace-events` write."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blockyard.tools.timeline import Timeline

__all__ = ["files_of", "have_timeline", "require"]


def require(options: argparse.Namespace) -> None:
    """Check before the run that the figures can be drawn."""
    if options.html:
        importlib.import_module("blockyard.tools.pictures")  # it needs plotly


def have_timeline(options: argparse.Namespace) -> bool:
    """Whether a file shows the run's timeline."""
    return bool(options.html or options.trace_events)


def files_of(
    options: argparse.Namespace,
    title: str,
    timeline: Timeline | None,
    facts: Mapping[str, object],
    draw: Callable[[Any], Mapping[str, object]] = lambda _pictures: {},
) -> dict[Path, Callable[[Path], None]]:
    """Return the files to write.

    Args:
        options: the command's options.
        title: title of the page.
        timeline: timeline of the run; None if it has no times.
        facts: rows of the page's table.
        draw: makes the other figures; it is called with the module `blockyard.tools.pictures`.
    """
    files: dict[Path, Callable[[Path], None]] = {}
    if options.trace_events and timeline is not None:
        files[options.trace_events] = timeline.write_trace_events
    if options.html:
        pictures = importlib.import_module("blockyard.tools.pictures")
        figures = dict(draw(pictures))
        if timeline is not None:
            figures["Over time"] = pictures.timeline_figure(timeline)
        files[options.html] = partial(pictures.write_html, title=title, figures=figures, facts=facts)
    return files
