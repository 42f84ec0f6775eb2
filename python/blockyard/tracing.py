"""OpenTelemetry spans of prefetches, writes and swaps: `pip install "blockyard[otel]"`.

    from blockyard import tracing

    tracing.instrument()     # spans go to the application's tracer provider

`docs/operate/tracing.md` lists the spans and their attributes. The provider's sampler decides which ones are recorded.
A span begins when its work is submitted and ends when the caller takes the completion, in `poll` or at the end of a
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from blockyard._core import __version__
from blockyard.workers.extras import missing
from blockyard.workers.interrupts import keep

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context

__all__ = ["instrument", "uninstrument"]

Value: TypeAlias = str | int


class TraceSpan:
    """A span that is not recorded, nor are the spans within it. `NO_SPAN` is the only instance."""

    __slots__ = ()

    def begin(self, name: str, **attributes: Value) -> TraceSpan:  # noqa: ARG002 (nothing is recorded)
        """Begin a span within this one.

        Args:
            name: follows `blockyard.`.
            attributes: recorded under their names with the prefix `blockyard.`; those that are "" are left out.
        """
        return self

    def end(self, error: Exception | None = None, **attributes: Value) -> None:
        """End the span. Idempotent.

        Args:
            error: the error if the work failed.
            attributes: attributes that became known since `begin`, in the same form.
        """


NO_SPAN = TraceSpan()


class _Tracer:
    """Creates spans with an OpenTelemetry tracer."""

    def __init__(self, provider: trace.TracerProvider | None) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415 (optional)
        except ModuleNotFoundError as error:
            raise missing("blockyard.tracing", error) from None
        self.api = trace
        self._tracer = trace.get_tracer("blockyard", __version__, provider)

    def begin(self, name: str, context: Context | None, attributes: Mapping[str, Value]) -> TraceSpan:
        span = self._tracer.start_span(f"blockyard.{name}", context, attributes=_named(attributes))
        return _RecordedSpan(self, span) if span.is_recording() else NO_SPAN


class _RecordedSpan(TraceSpan):
    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: _Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def begin(self, name: str, **attributes: Value) -> TraceSpan:
        return self._tracer.begin(name, self._tracer.api.set_span_in_context(self._span), attributes)

    def end(self, error: Exception | None = None, **attributes: Value) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(_named(attributes))
        if error is not None:
            self._span.set_status(self._tracer.api.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()


_tracer: _Tracer | None = None


def begin(name: str, **attributes: Value) -> TraceSpan:
    """Begin a span within the caller's current one; see `TraceSpan.begin`."""
    tracer = _tracer  # once: another thread may call `uninstrument`
    return NO_SPAN if tracer is None else tracer.begin(name, None, attributes)


class Trace:
    """The span of a piece of work, and those of the legs within it. An interrupted call leaves none of them open."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[TraceSpan] = []  # the whole, then its running legs

    def begin(self, name: str, **attributes: Value) -> None:
        """Begin the span of the whole within the caller's current one; see `TraceSpan.begin`."""
        if _tracer is not None:
            keep(self._spans, partial(begin, name, **attributes))

    def begin_leg(self, name: str, **attributes: Value) -> TraceSpan:
        """Begin the span of a leg within the whole. Returns it, for `end_leg`."""
        return keep(self._spans, partial(self._spans[0].begin, name, **attributes)) if self._spans else NO_SPAN

    def end_leg(self, error: Exception | None = None, *, leg: TraceSpan | None = None, **attributes: Value) -> None:
        """End the span of one running leg, or of all; see `TraceSpan.end`. Idempotent."""
        for running in self._spans[1:]:
            if leg is None or running is leg:
                running.end(error, **attributes)
                self._spans.remove(running)

    def end(self, error: Exception | None = None, **attributes: Value) -> None:
        """End the spans of the running legs and of the whole. Idempotent."""
        self.end_leg(error)
        for span in self._spans:
            span.end(error, **attributes)


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Create spans from now on, for all caches of this process.

    The parent of a span is the caller's current span: for a prefetch, the span around `prefetch` or `Scheduler.add`;
    otherwise the span around the step or `poll` that begins the work.

    Args:
        tracer_provider: receives the spans; by default the provider that the application has set or will set.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    global _tracer  # noqa: PLW0603 (one per process, like the provider)
    _tracer = _Tracer(tracer_provider)


def uninstrument() -> None:
    """Stop creating spans; open spans still end."""
    global _tracer  # noqa: PLW0603
    _tracer = None


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"blockyard.{name}": value for name, value in attributes.items() if value != ""}
