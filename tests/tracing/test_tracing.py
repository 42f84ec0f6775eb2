"""Spans of a cache: what each says, whose child it is, and that none is needed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from interrupts import CountedInterrupt
from memory_stores import KeyedStore
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from spans import Spans, attributes, recorded

from blockyard import KVCache, KVLayout, Request, Scheduler, __version__, tracing
from blockyard.errors import StoreError

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
SIZE = LAYOUT.bytes_per_block
PROMPT = list(range(1, 14))  # three blocks, and a token
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "tracing.md"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as found:
        yield found


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """A prefix store of the test's own."""
    return f"memory://{request.node.nodeid}?size=1MiB".replace("[", "-").replace("]", "")


def opened(store: Any = None, **options: Any) -> KVCache:
    options |= {"prefix_caching": True, "namespace": b"test"} if store is not None else {}
    return KVCache(LAYOUT, device_blocks=16, prefix_store=store, **options)


def prefetch(cache: KVCache, prompt: list[int]) -> int:
    assert cache.prefix_store is not None
    fetch = cache.prefix_store.prefetch(prompt)
    assert cache.prefix_store.wait(60, until=lambda: fetch.done)
    return fetch.tokens


def compute(cache: KVCache, prompt: list[int]) -> None:
    """Compute a prompt; its blocks go to the prefix store."""
    sequence = cache.manager.allocate(prompt)
    with cache.step():
        cache.manager.mark_computed([sequence])
    assert cache.prefix_store is None or cache.prefix_store.wait(60)


def test_a_prefetch_says_what_it_looked_for_and_what_it_found(spans: Spans, store: str):
    with opened(store) as cache:
        assert prefetch(cache, PROMPT) == 0
        compute(cache, PROMPT)
    with opened(store, host_blocks=8) as cache:
        assert prefetch(cache, [*PROMPT[:8], *range(50, 60)]) == 8
    spans.check()
    absent, found = spans.named("prefetch")
    assert attributes(absent) == {
        "prompt_tokens": 13,
        "missing_blocks": 3,
        "hit_tokens": 0,
        "hit_blocks": 0,
        "hit_bytes": 0,
        "miss_reason": "absent",
    }
    assert attributes(found) == {
        "prompt_tokens": 18,
        "missing_blocks": 4,
        "hit_tokens": 8,
        "hit_blocks": 2,
        "hit_bytes": 2 * SIZE,
        "tier": "host",
        "miss_reason": "absent",
    }
    assert spans.tree(found) == ("prefetch", ("store_read",), ("transfer",))
    read, copy = spans.named("store_read")[-1], spans.named("transfer")[-1]
    asked = attributes(read)["blocks"]
    assert asked in {2, 4}  # 2 if the store has said by then which blocks it has
    absent_too = {"miss_reason": "absent"} if asked == 4 else {}
    assert attributes(read) == {"blocks": asked, "bytes": asked * SIZE, "hit_blocks": 2, **absent_too}
    assert attributes(copy) == {"blocks": 2, "bytes": 2 * SIZE, "source": "staging", "target": "host"}
    assert found.start_time <= read.start_time < read.end_time <= copy.start_time < copy.end_time <= found.end_time
    scope = found.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("blockyard", __version__)


def test_a_prompt_that_lacks_no_block_has_no_span(spans: Spans, store: str):
    with opened(store) as cache:
        compute(cache, PROMPT)
        assert prefetch(cache, PROMPT) == 0
    assert not spans.named("prefetch")


def test_blocks_that_are_stored_are_in_a_span(spans: Spans, store: str):
    for _ in range(2):
        with opened(store) as cache:
            compute(cache, PROMPT)
    spans.check()
    first, second = spans.named("store")
    assert attributes(first) == {"tier": "device", "blocks": 3, "bytes": 3 * SIZE, "written_blocks": 3}
    assert attributes(second) == attributes(first)  # the store has them already
    assert len(spans.ended) == 2


def swap(store: str, tier: str) -> list[int]:
    """Swap a sequence of three blocks out and back in; gives the tickets of both."""
    with opened(host_blocks=8, swap_store=store) as cache:
        return swap_in(cache, tier)


def swap_in(cache: KVCache, tier: str) -> list[int]:
    tickets = []
    sequence = cache.manager.allocate(10)
    with cache.step():
        pass
    for call in (lambda: cache.manager.swap_out(sequence, to=tier), lambda: cache.manager.swap_in(sequence)):
        call()
        with cache.step() as step:
            tickets.append(step.decision.ticket)
        cache.drain()
    return tickets


@pytest.mark.parametrize("tier", ["host", "external"])
def test_a_swap_out_and_the_swap_in_back_have_spans_and_their_legs(spans: Spans, store: str, tier: str):
    tickets = swap(store, tier)
    spans.check()
    (swap_out,), (swap_in,) = spans.named("swap_out"), spans.named("swap_in")
    moved = {"blocks": 3, "bytes": 3 * SIZE, "lost_blocks": 0}
    assert attributes(swap_out) == moved | {"source": "device", "target": tier, "ticket": tickets[0]}
    assert attributes(swap_in) == moved | {"source": tier, "target": "device", "ticket": tickets[1]}
    legs = [(("transfer",), ("store_write",)), (("store_read",), ("transfer",))] if tier == "external" else [(), ()]
    assert spans.tree(swap_out) == ("swap_out", *legs[0])
    assert spans.tree(swap_in) == ("swap_in", *legs[1])


def test_the_callers_span_is_the_parent(spans: Spans, store: str):
    tracer = spans.provider.get_tracer("engine")
    with opened(store) as cache:
        with tracer.start_as_current_span("request") as request:
            fetch = cache.prefix_store.prefetch(PROMPT) if cache.prefix_store else None
        with tracer.start_as_current_span("step"):
            assert fetch is not None
            assert cache.prefix_store is not None
            assert cache.prefix_store.wait(60, until=lambda: fetch.done)
        compute(cache, PROMPT)
    (found,) = spans.named("prefetch")
    assert found.parent == request.get_span_context()
    (stored,) = spans.named("store")
    assert stored.parent is None


def test_a_request_that_a_scheduler_is_given_is_traced_where_it_was_added(spans: Spans, store: str):
    tracer = spans.provider.get_tracer("server")
    added = []
    with opened(store) as cache:
        scheduler = Scheduler(cache)
        for name in "ab":

            def add(name: str = name) -> None:
                with tracer.start_as_current_span(name) as span:
                    added.append(span.get_span_context().span_id)
                    scheduler.add(Request(name, [ord(name)] * 9, 2))

            thread = threading.Thread(target=add)
            thread.start()
            thread.join()
        with tracer.start_as_current_span("engine"):
            while scheduler.num_unfinished:
                with scheduler.step() as step:
                    pass
                scheduler.update(step, [7] * step.num_draws)
    assert sorted(span.parent.span_id for span in spans.named("prefetch") if span.parent) == sorted(added)


def test_the_sampler_decides(store: str):
    provider = TracerProvider(ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("engine")
    with recorded(provider) as spans, opened(store) as cache:
        assert tracing.begin("prefetch") is tracing.NO_SPAN
        compute(cache, PROMPT)
        assert not spans.begun
        with tracer.start_as_current_span("sampled"):
            prefetch(cache, [5] * 9)
        names = [span.name for span in spans.ended]
        assert names[-1] == "blockyard.prefetch"
        assert {"blockyard.store_read"} >= set(names[:-1]), "a store that knows better is not read"


def test_without_a_provider_nothing_is_begun(store: str):
    tracing.instrument()
    try:
        assert tracing.begin("prefetch") is tracing.NO_SPAN
        with opened(store) as cache:
            compute(cache, PROMPT)
    finally:
        tracing.uninstrument()


def test_without_opentelemetry_caches_work_and_instrument_names_the_extra(store: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r'blockyard.tracing needs opentelemetry: pip install "blockyard\[otel\]"'):
        tracing.instrument()
    with opened(store) as cache:
        compute(cache, PROMPT)
        assert cache.prefix_store is not None
        assert cache.prefix_store.stats().written_blocks == 3


class Failing(KeyedStore):
    """A store of which a call fails."""

    fails = ""

    def submit_get(self, *arguments: Any) -> int:
        self.fail("get")
        return super().submit_get(*arguments)

    def submit_put(self, *arguments: Any) -> int:
        self.fail("put")
        return super().submit_put(*arguments)

    def fail(self, call: str) -> None:
        if self.fails == call:
            raise StoreError("the plug-in is broken")


def failing(medium: dict[bytes, Any], fails: str) -> Failing:
    store = Failing(medium, bytes_per_block=SIZE)
    store.fails = fails
    return store


def test_a_store_that_fails_is_a_reason(spans: Spans):
    medium: dict[bytes, Any] = {}
    with opened(failing(medium, "put")) as cache:
        compute(cache, PROMPT)
    with opened(failing(medium, "")) as cache:
        compute(cache, PROMPT)
    with opened(failing(medium, "get")) as cache:
        prefetch(cache, PROMPT)
    spans.check()
    refused, stored = map(attributes, spans.named("store"))
    assert (refused["written_blocks"], refused["miss_reason"]) == (0, "error")
    assert (stored["written_blocks"], stored.get("miss_reason")) == (3, None)
    (missed,) = map(attributes, spans.named("prefetch"))
    assert (missed["hit_blocks"], missed["miss_reason"]) == (0, "error")


def test_a_copy_that_fails_is_an_error_of_its_spans(spans: Spans, store: str, monkeypatch: pytest.MonkeyPatch):
    with opened(host_blocks=8, swap_store=store) as cache:
        sequence = cache.manager.allocate(10)
        with cache.step():
            pass
        cache.manager.swap_out(sequence, to="external")
        launch = cache.engine.streams.launch

        def raising(stream: Any, work: Any, waits: Any = ()) -> Any:
            def fail() -> None:
                raise RuntimeError("the device is lost")

            return launch(stream, fail, waits)

        monkeypatch.setattr(cache.engine.streams, "launch", raising)
        with cache.step():
            pass
        cache.drain()
    spans.check()
    (swap,), (copy,) = spans.named("swap_out"), spans.named("transfer")
    for span in (swap, copy):
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.status.description == "RuntimeError: the device is lost"
    assert attributes(swap)["lost_blocks"] == 3


def test_closing_a_cache_ends_the_spans_of_running_work(spans: Spans, store: str):
    medium: dict[bytes, Any] = {}
    goes_on = threading.Event()
    hanging = failing(medium, "")
    hanging.before = lambda name: goes_on.wait(60) if name in {"put", "get"} else None
    close = hanging.close
    hanging.close = lambda timeout=5.0: close(min(timeout, 0.2))  # type: ignore[method-assign]
    try:
        cache = opened(hanging, host_blocks=8, swap_store=store, prefetch_timeout_base=60.0)
        assert cache.prefix_store is not None
        sequence = cache.manager.allocate(PROMPT)
        with cache.step():
            cache.manager.mark_computed([sequence])
        cache.prefix_store.prefetch([7] * 9)
        cache.manager.swap_out(sequence, to="external")
        cache.executor.submit(cache._steps.take_decision())  # a step that an exception ended here
        cache.prefix_store.close(0.2)
        cache.close()
    finally:
        goes_on.set()
    spans.check()
    ends = {span.name: attributes(span).get("miss_reason") for span in spans.ended}
    assert ends["blockyard.prefetch"] == ends["blockyard.store"] == ends["blockyard.swap_out"] == "closed"


WORKING = ("executor/executor.py", "executor/parts.py", "prefix_store/loads.py", "prefix_store/writes.py")


def interrupted(place: int, medium: dict[bytes, Any], *, swaps: bool) -> CountedInterrupt:
    """Interrupt a cache at a place, and check its spans."""
    interrupt = CountedInterrupt(place, WORKING)
    kept = KeyedStore(dict(medium), bytes_per_block=SIZE)
    with (
        recorded() as spans,
        opened(kept, host_blocks=8, swap_store="memory://interrupted?size=1MiB") as cache,
        suppress(KeyboardInterrupt),
        interrupt.armed(),
    ):
        if swaps:
            swap_in(cache, "external")
        else:
            prefetch(cache, PROMPT)
            compute(cache, PROMPT)
    try:
        spans.check()
    except AssertionError as failure:
        raise AssertionError(f"interrupted at {interrupt.where}: {failure}") from failure
    return interrupt


@pytest.mark.parametrize("each_pass", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a pass", "each pass"])
@pytest.mark.parametrize("swaps", [False, True], ids=["prefix store", "swaps"])
def test_an_interrupt_at_any_place_leaves_no_span_open(swaps: bool, each_pass: bool):
    medium: dict[bytes, Any] = {}
    with opened(KeyedStore(medium, bytes_per_block=SIZE)) as cache:
        compute(cache, PROMPT[:9])
    passes = interrupted(sys.maxsize, medium, swaps=swaps).passes.values()
    assert len(passes) > 100
    if each_pass:
        assert next(place for place in count() if not interrupted(place, medium, swaps=swaps).where) > 100
    else:  # each instruction once, the first at its first pass, the second at its second
        reached = [interrupted(each[at % len(each)], medium, swaps=swaps).where for at, each in enumerate(passes)]
        assert sum(map(bool, reached)) > 100


def test_the_page_lists_every_span_and_attribute(spans: Spans, store: str):
    for options in ({}, {"host_blocks": 8}):
        with opened(store, **options) as cache:
            prefetch(cache, PROMPT)
            compute(cache, [*PROMPT[:8], *range(50, 60)])
    for tier in ("host", "external"):
        swap(f"memory://page-{tier}?size=1MiB", tier)
    rows = [line.split("|")[1:] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = lambda cell: re.findall("`([a-z_]+)`", cell)  # noqa: E731
    listed = {span: (set(named(row[1])), set(named(row[3]))) for row in rows for span in named(row[0])}
    by_id = {span.context.span_id: span.name.removeprefix("blockyard.") for span in spans.ended}
    for span in spans.ended:
        within, said = listed[span.name.removeprefix("blockyard.")]
        assert set(attributes(span)) <= said, span.name
        assert {by_id[span.parent.span_id]} <= within if span.parent else not within, span.name
    assert set(by_id.values()) == listed.keys() - {"copy", "move", "exchange"}


def test_a_span_that_has_begun_ends_after_uninstrument(spans: Spans, store: str):
    with opened(store) as cache:
        assert cache.prefix_store is not None
        fetch = cache.prefix_store.prefetch(PROMPT)
        tracing.uninstrument()
        assert cache.prefix_store.wait(60, until=lambda: fetch.done)
        compute(cache, PROMPT)
    spans.check()
    # The store may answer before or after `uninstrument`.
    assert [span.name for span in spans.ended] in (
        ["blockyard.store_read", "blockyard.prefetch"],
        ["blockyard.prefetch"],
    )
