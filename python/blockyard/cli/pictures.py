"""The files that `--html` and `--trace-events` ask for."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blockyard.timeline import Timeline

__all__ = ["files_of", "require"]


def require(options: argparse.Namespace) -> None:
    """Find out before the run whether the figures can be written."""
    if options.html:
        importlib.import_module("blockyard.pictures")  # it needs plotly


def files_of(
    options: argparse.Namespace,
    title: str,
    timeline: Timeline | None,
    facts: Mapping[str, object],
    draw: Callable[[Any], Mapping[str, object]] = lambda _pictures: {},
) -> dict[Path, Callable[[Path], None]]:
    """Return the files to write.

    Args:
        options: of the command.
        title: of the page.
        timeline: of the run; None if it has no times.
        facts: what the page says beside the figures.
        draw: makes figures other than the timeline, with the module `blockyard.pictures`.
    """
    files: dict[Path, Callable[[Path], None]] = {}
    if options.trace_events and timeline is not None:
        files[options.trace_events] = timeline.write_trace_events
    if options.html:
        pictures = importlib.import_module("blockyard.pictures")
        figures = dict(draw(pictures))
        if timeline is not None:
            figures["Over time"] = pictures.timeline_figure(timeline)
        files[options.html] = partial(pictures.write_html, title=title, figures=figures, facts=facts)
    return files
