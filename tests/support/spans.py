"""The spans that a process has begun and ended, recorded with OpenTelemetry's SDK."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from blockyard import tracing


class Spans(SpanProcessor):
    """Counts spans as they begin, and keeps those that have ended.

    Args:
        provider: their source; if None, one that records all spans.

    Attributes:
        provider: as given.
        begun: number of spans begun.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self.provider = provider or TracerProvider(shutdown_on_exit=False)
        self.begun = 0
        self._kept = InMemorySpanExporter()
        self.provider.add_span_processor(self)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def on_start(self, span: ReadableSpan, parent_context: object = None) -> None:
        """Count one."""
        self.begun += 1

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        """Return the ended spans, in the order of their ends."""
        return self._kept.get_finished_spans()

    def named(self, *names: str) -> list[ReadableSpan]:
        """Return the ended spans with these names."""
        return [span for span in self.ended if span.name.removeprefix("blockyard.") in names]

    def sum(self, attribute: str, *names: str) -> int:
        """Return the sum of an attribute over all spans with these names; a missing attribute counts as 0."""
        return sum(attributes(span).get(attribute, 0) for span in self.named(*names))

    def tree(self, span: ReadableSpan) -> tuple[Any, ...]:
        """Return a span's name and the trees within it, in the order of their ends."""
        within = [other for other in self.ended if other.parent and other.parent.span_id == span.context.span_id]
        return (span.name.removeprefix("blockyard."), *map(self.tree, within))

    def check(self) -> None:
        """Check that every span ended exactly once, after the spans within it began."""
        ids = Counter(span.context.span_id for span in self.ended)
        assert len(ids) == self.begun, f"{self.begun} spans have begun, {len(ids)} ended"
        assert set(ids.values()) <= {1}, "a span has ended twice"
        by_id = {span.context.span_id: span for span in self.ended}
        for span in self.ended:
            assert span.start_time <= span.end_time
            if span.parent is not None and span.parent.span_id in by_id:
                assert by_id[span.parent.span_id].start_time <= span.start_time
                assert span.end_time <= by_id[span.parent.span_id].end_time
        ends: dict[int, int] = {}  # of each parent's latest leg
        for leg in sorted(self.named("store_read", "transfer", "store_write"), key=lambda span: span.start_time):
            assert leg.parent is not None
            if by_id[leg.parent.span_id].name == "blockyard.prefetch":
                continue  # one piece is copied while the next is read
            assert ends.get(leg.parent.span_id, 0) <= leg.start_time, f"{leg.name} overlaps the leg before it"
            ends[leg.parent.span_id] = leg.end_time


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return a span's attributes, without the prefix."""
    return {name.removeprefix("blockyard."): value for name, value in (span.attributes or {}).items()}


@contextmanager
def recorded(provider: TracerProvider | None = None) -> Iterator[Spans]:
    """Record spans of this process's caches within the context."""
    spans = Spans(provider)
    tracing.instrument(spans.provider)
    try:
        yield spans
    finally:
        tracing.uninstrument()
