"""What the page on threads allows."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blockyard import KVCache, KVLayout
from blockyard.metrics import Collector
from blockyard.scheduler import Request, Scheduler

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


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
        thread.start()
        end, rounds = time.monotonic() + 1.0, 0
        while time.monotonic() < end:
            for name in "abc":
                scheduler.add(Request(f"{rounds}{name}", [rounds % 50 + 1] * 8, 8))
            while scheduler.num_unfinished:
                with scheduler.step() as step:
                    pass
                scheduler.update(step, [7] * step.num_draws)
            rounds += 1
        is_over.set()
        thread.join(60)
        assert scrapes
        assert pollers == {threading.current_thread()}
        cache.manager.check()
