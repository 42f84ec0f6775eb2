"""docs/metrics.md lists the metrics that a scrape finds, and they say what happened."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blockyard import BlockManager, KVCache, KVLayout
from blockyard.errors import InvalidArgumentError
from blockyard.metrics import Collector
from blockyard.scheduler import Request, Scheduler
from blockyard.stores import open_store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def scrape(*sources: object, **labels: str) -> dict[tuple[str, str], dict[str, float]]:
    """What Prometheus reads: a value by (metric, the labels but ours); a histogram's samples each by its own name."""
    registry = CollectorRegistry()
    registry.register(Collector(*sources, labels=labels))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert labels.items() <= sample.labels.items()
            rest = {name: value for name, value in sample.labels.items() if name not in labels}
            name = sample.name.removeprefix("blockyard_")
            assert name != sample.name
            assert (name, str(rest)) not in found
            found[name, str(rest)] = (rest, sample.value)
    return found


def listed() -> dict[str, set[str]]:
    """Each metric of the page's table with its labels."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {name: set(re.findall("`(.*?)`", row[1])) for row in rows for name in re.findall("`(.*?)`", row[0])}


def named(found: dict[tuple[str, str], object]) -> dict[str, set[str]]:
    """Each metric of a scrape with its labels; the samples of a histogram as one."""
    names: dict[str, set[str]] = {}
    for (name, _), (labels, _) in found.items():
        names.setdefault(re.sub("(_seconds)_(bucket|sum|count)$", r"\1", name), set()).update(labels)
    return names


@pytest.fixture
def cache(tmp_path: Path):
    options = {"device_blocks": 8, "host_blocks": 8, "prefix_caching": True, "namespace": b"test"}
    stores = {"swap_store": f"file://{tmp_path}/a?size=1MiB", "prefix_store": f"file://{tmp_path}/b?size=1MiB"}
    with KVCache(LAYOUT, **options, **stores) as opened:
        yield opened


def test_the_page_lists_every_metric_and_a_new_cache_has_them_all(cache: KVCache):
    found = scrape(cache, Scheduler(cache), engine="0")
    # A reason for misses of a store appears with the first miss.
    assert named(found) == {name: labels for name, labels in listed().items() if name != "store_misses_total"}
    sizes = {value for (name, _), (_, value) in found.items() if name == "blocks"}
    assert {value for (name, _), (_, value) in found.items() if name != "blocks"} == {0}
    assert sizes == {8, cache.manager.pool("external").num_blocks}


def test_a_scrape_says_what_happened(cache: KVCache):
    scheduler = Scheduler(cache, preemption_mode="swap")
    for name in range(3):
        scheduler.add(Request(str(name), [name + 1] * 8, 8))
    while scheduler.num_unfinished:
        with scheduler.step() as step:
            pass
        scheduler.update(step, [7] * step.num_draws)
    scheduler.drain()
    assert cache.prefix_store.wait(60)
    found, stats = scrape(cache, scheduler), cache.stats()
    values: Callable[..., float] = lambda name, **labels: found[name, str(labels)][1]  # noqa: E731
    assert values("num_preemptions_total", mode="swap_host") == scheduler.stats().preempted_swap_host > 0
    assert values("swapped_out_blocks_total", tier="host") == stats.swapped_out_blocks["host"] > 0
    assert values("kv_cache_usage_perc", tier="device") == stats.used_blocks["device"] / 8
    assert values("prefix_cache_queries_total") == stats.hit_tokens + stats.missed_tokens == 24
    counted = cache.prefix_store.stats()
    assert values("prefix_store_load_seconds_count") == values("prefix_store_prefetches_total") == counted.prefetches
    assert values("prefix_store_load_seconds_sum") == pytest.approx(counted.load_seconds_sum)
    assert values("prefix_store_load_seconds_bucket", le="+Inf") == sum(counted.load_seconds)
    assert values("prefix_store_misses_total", reason="absent") == counted.misses["absent"]
    # Blocks that the store had already count as written by the prefix store alone.
    assert 0 < values("store_written_blocks_total", store="prefix") <= counted.written_blocks
    assert values("scheduled_tokens_total") == scheduler.stats().tokens


def test_a_manager_or_a_store_alone_has_its_own(tmp_path: Path):
    manager = BlockManager(block_size=4, device_blocks=6)
    assert ("blocks", str({"tier": "device"})) in scrape(manager)
    with open_store(f"file://{tmp_path}", bytes_per_block=64, num_slots=4) as store:
        assert ("store_errors_total", str({"store": type(store).__name__})) in scrape(store)
    with pytest.raises(InvalidArgumentError, match="two sources have a manager each"):
        Collector(manager, BlockManager(block_size=4, device_blocks=6))
    with pytest.raises(InvalidArgumentError, match="a source is 7, must be a KVCache"):
        Collector(7)  # type: ignore[arg-type]


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((PAGE.parent / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"blockyard_(\w+)", expr)}
    assert len(asked) >= 12
    assert {name.removesuffix("_bucket") for name in names} <= set(listed())
    # What they are summed by or called are labels of theirs.
    labels = set().union(*listed().values())
    assert {label for expr in asked for label in re.findall(r"by \((\w+)\)", expr)} <= labels
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {label for legend in legends for label in re.findall(r"{{(\w+)}}", legend)} <= labels
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
