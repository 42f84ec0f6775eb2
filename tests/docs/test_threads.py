"""What the page on threads allows."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from many_threads import frequent_switches, hammer
from prometheus_client import CollectorRegistry, generate_latest

from blockyard import KVCache, KVLayout, tracing
from blockyard.metrics import Collector
from blockyard.scheduler import Request, Scheduler

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def serve(cache: KVCache, scheduler: Scheduler, first: int) -> None:
    """Serve a few requests to their ends."""
    for name in "abc":
        scheduler.add(Request(f"{first}{name}", [first % 50 + 1] * 8, 8))
    while scheduler.num_unfinished:
        with scheduler.step() as step:
            pass
        scheduler.update(step, [7] * step.num_draws)
    assert cache.health().ok


def test_another_thread_may_scrape_while_a_scheduler_runs(tmp_path: Path):
    stores = {"swap_store": f"file://{tmp_path}/a?size=1MiB", "prefix_store": f"file://{tmp_path}/b?size=1MiB"}
    with KVCache(LAYOUT, device_blocks=8, host_blocks=8, prefix_caching=True, namespace=b"test", **stores) as cache:
        scheduler, registry = Scheduler(cache, preemption_mode="swap"), CollectorRegistry()
        registry.register(Collector(cache, scheduler))
        is_over, scrapes, pollers = threading.Event(), [], set()
        poll = cache.engine.poll
        # All calls of the engine come from its one thread: a scrape only reads.
        cache.engine.poll = lambda: pollers.add(threading.current_thread()) or poll()

        def scrape() -> None:
            while not is_over.is_set():
                scrapes.append(len(generate_latest(registry)))

        # What it raises, pytest reports as a warning, which fails the test.
        thread = threading.Thread(target=scrape, daemon=True)
        with frequent_switches():
            thread.start()
            end, rounds = time.monotonic() + 1.0, 0
            while time.monotonic() < end:
                serve(cache, scheduler, rounds)
                rounds += 1
            is_over.set()
            thread.join(60)
        assert scrapes
        assert pollers == {threading.current_thread()}
        cache.manager.check()


def test_another_thread_may_read_the_counters_while_misses_get_new_reasons(tmp_path: Path):
    options = {"device_blocks": 8, "prefix_caching": True, "namespace": b"test"}
    with KVCache(LAYOUT, prefix_store=f"file://{tmp_path}?size=1MiB", **options) as cache:
        stats = cache.prefix_store._stats

        def miss() -> None:
            for number in range(100):
                stats.misses[str(number)] += 1
            stats.misses.clear()

        hammer(miss, cache.prefix_store.stats)


def test_each_cache_has_its_own_thread(tmp_path: Path):
    """Caches of one process share no state: they open, resize, serve and close at the same time."""

    def engine(number: int) -> Callable[[], None]:
        folder = tmp_path / str(number)
        folder.mkdir()

        def once() -> None:
            options = {"device_blocks": 8, "max_device_blocks": 16, "host_blocks": 8, "prefix_caching": True}
            store = f"file://{folder}?size=1MiB"
            with KVCache(LAYOUT, **options, namespace=b"test", prefix_store=store) as cache:
                scheduler = Scheduler(cache, preemption_mode="swap")
                for round_number, blocks in enumerate((8, 16, 6)):
                    cache.resize(blocks)
                    serve(cache, scheduler, round_number)
                cache.manager.check()

        return once

    hammer(*map(engine, range(4)))


def test_any_thread_may_ask_a_cache_for_its_health(tmp_path: Path):
    with KVCache(LAYOUT, device_blocks=8, swap_store=f"file://{tmp_path}?size=1MiB") as cache:
        scheduler = Scheduler(cache)
        rounds = iter(range(1 << 30))
        hammer(lambda: serve(cache, scheduler, next(rounds)), cache.health, cache.health, cache.stats)
        closing = threading.Thread(target=cache.close)
        closing.start()
        while cache.health().ok:
            pass
        closing.join(60)
        assert cache.health().reasons == ("the cache is closed",)


def test_another_thread_may_turn_tracing_on_and_off():
    def switch() -> None:
        tracing.instrument()
        tracing.uninstrument()

    hammer(switch, *[lambda: tracing.begin("swap", blocks=1).begin("copy").end()] * 3)
    tracing.uninstrument()
