"""What happened when in a run: spans, counters and marks, drawn by `blockyard.tools.pictures` or shown by Perfetto."""

from blockyard.tools.timeline.timeline import Counter, Mark, Span, Timeline

__all__ = ["Counter", "Mark", "Span", "Timeline"]
