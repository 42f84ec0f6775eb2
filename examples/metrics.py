"""A small engine that exports its metrics: `python examples/metrics.py 600` serves them for 600 seconds on port 9400.

The requests of ten users come at random, and each user's prompts begin alike. The "model" only sleeps.
`docs/operate/metrics.md` lists the metrics, `docs/monitoring/` has a dashboard.
"""

import random
import sys
import tempfile
import time
from urllib.request import urlopen

from prometheus_client import REGISTRY, start_http_server

from blockyard import KVCache, KVLayout, Request, Scheduler
from blockyard.metrics import Collector

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=16, dtype="float16")
SECONDS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 9400
SYSTEM_PROMPTS = [[user] * 256 for user in range(10)]


def new_request(number):
    """A request of a user; the first users ask most."""
    user = min(int(random.expovariate(0.4)), 9)
    prompt = SYSTEM_PROMPTS[user] + [random.randrange(1000) for _ in range(random.randrange(16, 128))]
    return Request(str(number), prompt, max_tokens=random.randrange(20, 60), salt=b"user %d" % user)


with tempfile.TemporaryDirectory() as folder:
    stores = {"swap_store": f"file://{folder}/swap?size=8MiB", "prefix_store": f"file://{folder}/prefix?size=32MiB"}
    options = {"device_blocks": 160, "host_blocks": 96, "prefix_caching": True, "namespace": b"metrics example"}
    with KVCache(LAYOUT, **stores, **options) as cache:
        scheduler = Scheduler(cache, preemption_mode="swap")
        cache.manager.prefix.set_quota(b"user 0", 64)
        cache.prefix_store.set_quota(b"user 0", "8MiB")
        # A pool this small has too few blocks for the usual sample of one in a hundred.
        REGISTRY.register(Collector(cache, scheduler, sample_rate=1.0, tenants={"user 0": b"user 0"}))
        server, _ = start_http_server(PORT)
        url = f"http://localhost:{server.server_port}/metrics"
        number, end = 0, time.monotonic() + SECONDS
        while time.monotonic() < end:
            while scheduler.num_unfinished < 12 and random.random() < 0.3:
                scheduler.add(new_request(number))
                number += 1
            with scheduler.step() as step:
                time.sleep(0.01)  # the model computes
            scheduler.update(step, [random.randrange(1000) for _ in range(step.num_draws)])
        lines = [line for line in urlopen(url).read().decode().splitlines() if line.startswith("blockyard_")]
        print(f"{number} requests, {len(lines)} series at {url}")
