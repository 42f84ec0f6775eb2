"""What happened when in a run: spans, counters and marks, drawn by `blockyard.pictures` or shown by Perfetto."""

from blockyard.timeline.timeline import Counter, Mark, Span, Timeline

__all__ = ["Counter", "Mark", "Span", "Timeline"]
