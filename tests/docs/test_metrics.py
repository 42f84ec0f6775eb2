"""docs/operate/metrics.md lists the metrics that a scrape finds, and they say what happened."""

import importlib
import json
import re
from collections.abc import Callable, Mapping
from math import inf, isnan
from pathlib import Path

import pytest
import vllm_modules
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blockyard import Arena, BlockManager, CacheGroup, KVCache, KVLayout
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.metrics import Collector
from blockyard.offload import OffloadManager
from blockyard.scheduler import Request, Scheduler
from blockyard.stores import StoreStats, open_store

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operate" / "metrics.md"
MONITORING = ROOT / "docs" / "monitoring"
TENANTS = {"alice": b"alice", "anonymous": None}
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def scrape(
    *sources: object, tenants: Mapping[str, bytes | None] | None = None, **labels: str
) -> dict[tuple[str, str], dict[str, float]]:
    """What Prometheus reads: a value by (metric, the labels but ours); a histogram's samples each by its own name."""
    registry = CollectorRegistry()
    registry.register(Collector(*sources, labels=labels, sample_rate=1.0, tenants=tenants))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert labels.items() <= sample.labels.items()
            rest = {name: value for name, value in sample.labels.items() if name not in labels}
            name = sample.name.removeprefix("blockyard_")
            assert name != sample.name
            assert (name, key(**rest)) not in found
            found[name, key(**rest)] = (rest, sample.value)
    return found


def key(**labels: str) -> str:
    """A series' labels, as `scrape` has them."""
    return str(sorted(labels.items()))


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
    found = scrape(cache, Scheduler(cache), OffloadManager(4), tenants=TENANTS, engine="0")
    assert named(found) == listed()
    assert {name: {value for (of, _), (_, value) in found.items() if of == name} - {0} for name in listed()} == {
        **{name: set() for name in listed()},
        "blocks": {8, cache.manager.pool("external").num_blocks},
        "offload_chunks": {4},
        "offload_free_chunks": {4},
        "store_up": {1},
        "tenant_quota_blocks": {inf},
        "prefix_store_tenant_quota_bytes": {inf},
    }


def test_bytes_are_counted_by_page_class_and_usage_is_of_bytes():
    groups = [CacheGroup.full_attention().with_blocks(bytes=64), CacheGroup.recurrent().with_blocks(bytes=960)]
    manager = BlockManager(block_size=4, groups=groups, arena=Arena(device_bytes=9600, extent_bytes=960), watermark=0)
    manager.allocate(20)
    found = scrape(manager)
    values: Callable[..., float] = lambda name, **labels: found[name, key(tier="device", **labels)][1]  # noqa: E731
    for name, counts in {"class_bytes": [960, 960], "used_bytes": [5 * 64, 960], "cached_bytes": [0, 0]}.items():
        assert [values(name, page_class=str(at)) for at in range(2)] == counts
    assert (values("bytes"), values("kv_cache_usage_perc")) == (9 * 960, (5 * 64 + 960) / (9 * 960))


def test_quotas_are_in_bytes_with_several_page_classes():
    groups = [CacheGroup.full_attention().with_blocks(bytes=64), CacheGroup.recurrent().with_blocks(bytes=960)]
    arena = Arena(device_bytes=9600, extent_bytes=960)
    manager = BlockManager(block_size=4, groups=groups, arena=arena, prefix_caching=True)
    manager.prefix.set_quota(TENANTS["alice"], num_bytes=2000)
    found = scrape(manager, tenants=TENANTS)
    assert found["tenant_quota_bytes", key(tenant="alice")][1] == 2000
    assert found["tenant_cached_bytes", key(tenant="alice")][1] == 0
    assert not {name for name, _ in found} & {"tenant_quota_blocks", "tenant_cached_blocks"}


def test_every_reason_of_the_file_store_has_a_series_from_the_start(cache: KVCache):
    reasons = re.findall(r'Self::\w+ => "(\w+)"', (ROOT / "rust/store/src/miss.rs").read_text(encoding="utf-8"))
    assert len(reasons) == 19
    found = scrape(cache)
    for name in ("store_misses_total", "prefix_store_misses_total"):
        assert {labels["reason"] for (of, _), (labels, _) in found.items() if of == name} >= set(reasons)


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
    values: Callable[..., float] = lambda name, **labels: found[name, key(**labels)][1]  # noqa: E731
    assert values("num_preemptions_total", mode="swap_host") == scheduler.stats().preempted_swap_host > 0
    assert values("swapped_out_blocks_total", tier="host") == stats.swapped_out_blocks["host"] > 0
    assert values("kv_cache_usage_perc", tier="device") == stats.used_blocks["device"] / 8
    assert values("prefix_cache_queries_total") == stats.hit_tokens + stats.missed_tokens == 24
    counted = cache.prefix_store.stats()
    assert values("prefix_store_load_seconds_count") == values("prefix_store_prefetches_total") == counted.prefetches
    assert values("prefix_store_load_seconds_sum") == pytest.approx(counted.load_seconds.sum)
    assert values("prefix_store_load_seconds_bucket", le="+Inf") == sum(counted.load_seconds.counts)
    for tier, direction in (("host", "write"), ("host", "read"), ("prefix", "write")):
        assert values("transfer_seconds_count", tier=tier, direction=direction) > 0
        assert 0 < values("transfer_seconds_sum", tier=tier, direction=direction) < 60
    assert values("prefix_store_misses_total", reason="absent") == counted.misses["absent"]
    # Blocks that the store had already count as written by the prefix store alone.
    assert 0 < values("store_written_blocks_total", store="prefix") <= counted.written_blocks
    assert values("scheduled_tokens_total") == scheduler.stats().tokens


def test_transfers_with_the_swap_store_are_timed(cache: KVCache):
    sequence = cache.manager.allocate(8)
    with cache.step():
        pass
    for move in (lambda: cache.manager.swap_out(sequence, to="external"), lambda: cache.manager.swap_in(sequence)):
        move()
        with cache.step():
            pass
        cache.drain()
    found = scrape(cache)
    for direction in ("read", "write"):
        labels = {"tier": "external", "direction": direction}
        assert found["transfer_seconds_count", key(**labels)][1] == 1
        assert found["transfer_seconds_bucket", key(**labels, le="+Inf")][1] == 1


def test_a_manager_or_a_store_alone_has_its_own(tmp_path: Path):
    manager = BlockManager(block_size=4, device_blocks=6)
    assert ("blocks", key(tier="device")) in scrape(manager)
    with open_store(f"file://{tmp_path}", bytes_per_block=64, num_slots=4) as store:
        assert ("store_errors_total", key(store=type(store).__name__)) in scrape(store)
        other = open_store(f"file://{tmp_path}", bytes_per_block=64, num_slots=4)
        with other, pytest.raises(InvalidArgumentError, match="two stores would have the label 'SlabStore'"):
            Collector(store, other)
    assert ("offload_chunks", key()) in scrape(OffloadManager(2))
    with pytest.raises(InvalidArgumentError, match=r"sample_rate is 1\.5, must be above 0 and at most 1"):
        Collector(manager, sample_rate=1.5)
    with pytest.raises(InvalidArgumentError, match="two sources have a manager each: give each"):
        Collector(manager, BlockManager(block_size=4, device_blocks=6))
    with pytest.raises(InvalidArgumentError, match="a source is 7, must be a KVCache"):
        Collector(7)  # type: ignore[arg-type]


def test_blocks_that_are_hit_and_evicted_leave_how_long_they_stayed():
    manager = BlockManager(block_size=4, device_blocks=4, prefix_caching=True)
    registry = CollectorRegistry()
    registry.register(Collector(manager, sample_rate=1.0))
    for prompt in ([1] * 9, [1] * 9, [2] * 13):
        sequence = manager.allocate(prompt)
        decision = manager.take_decision()
        manager.mark_computed([sequence])
        manager.complete(decision.ticket)
        manager.free([sequence])
    counts = [
        registry.get_sample_value(f"blockyard_kv_block_{name}_seconds_count", {"tier": "device"})
        for name in ("reuse_gap", "lifetime", "idle_before_evict")
    ]
    assert counts == [2, 2, 2]


def test_a_store_that_returns_damage_or_does_not_answer_shows(cache: KVCache, monkeypatch: pytest.MonkeyPatch):
    cache.manager.prefix.set_quota(b"alice", 3)
    cache.prefix_store.set_quota(b"alice", "16KiB")
    found = scrape(cache, tenants=TENANTS)
    assert found["tenant_quota_blocks", key(tenant="alice")][1] == 3
    assert found["prefix_store_tenant_quota_bytes", key(tenant="alice")][1] == 16 << 10
    misses = {"payload_checksum": 2, "queue_full": 3, "of a plug-in": 4}

    is_down, asked = False, 0

    class Failing:
        keeps_quotas = True

        @staticmethod
        def stats() -> StoreStats:
            return StoreStats(is_down=is_down, misses=misses)

        @staticmethod
        def quota(tenant: bytes) -> None:
            nonlocal asked
            asked += 1
            raise StoreError(f"no answer for {tenant!r}")

    with monkeypatch.context() as patch:
        patch.setattr(cache.prefix_store, "store", Failing())
        found = scrape(cache, tenants=TENANTS)
        is_down = True
        down = scrape(cache, tenants=TENANTS)
    assert found["store_damaged_blocks_total", key(store="prefix")][1] == 2
    for reason, count in misses.items():
        assert found["store_misses_total", key(store="prefix", reason=reason)][1] == count
    assert isnan(found["prefix_store_tenant_quota_bytes", key(tenant="alice")][1])
    assert isnan(down["prefix_store_tenant_quota_bytes", key(tenant="alice")][1])
    assert [of["store_up", key(store="prefix")][1] for of in (found, down)] == [1, 0]
    assert asked == 2, "a store that is down is not asked"


def test_a_store_that_only_fails_since_the_last_scrape_is_down(cache: KVCache, monkeypatch: pytest.MonkeyPatch):
    """As when nothing listens on the port: each call fails at once, which the breaker does not count as no answer."""
    scrapes = iter([(0, 0), (9, 9), (12, 12), (12, 12), (13, 1), (13, 0), (14, 0)])

    class Failing:
        @staticmethod
        def stats() -> StoreStats:
            errors, in_a_row = next(scrapes)
            return StoreStats(errors=errors, errors_in_a_row=in_a_row)

    registry = CollectorRegistry()
    with monkeypatch.context() as patch:
        patch.setattr(cache.prefix_store, "store", Failing())
        registry.register(Collector(cache))
    found = [registry.get_sample_value("blockyard_store_up", {"store": "prefix"}) for _ in range(7)]
    assert found == [1, 0, 0, 1, 0, 1, 1], "an error that is followed by none says nothing of the present"


def test_the_alerts_ask_for_metrics_that_there_are():
    text = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
    ours, _, vllms = text.partition("- name: blockyard-vllm\n")
    assert 5 <= ours.count("- alert: ") <= 8
    assert set(re.findall(r"blockyard_(\w+)", ours)) <= set(listed())
    page = (ROOT / "docs" / "engines" / "vllm.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\b(?:blockyard|vllm):\w+", vllms))
    assert len(names) == 11
    assert all(f"`{name.removesuffix('_total')}`" in page for name in names if "_written_" not in name)
    with vllm_modules.loaded("stand-in 0.33"):
        kinds = importlib.import_module(f"{vllm_modules.OURS}.metrics").definitions()
        for name in (name for name in names if name.startswith("blockyard:")):
            assert name.endswith("_total") == ("Counter" in type(kinds[name.removesuffix("_total")]).__name__)


def test_each_alert_has_a_remedy():
    text = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "tutorials" / "operate.md").read_text(encoding="utf-8")
    assert set(re.findall(r"- alert: (\w+)", text)) == set(re.findall(r"`(Blockyard[A-Z]\w+)`", page))


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"blockyard_(\w+)", expr)}
    assert len(asked) >= 12
    assert {name.removesuffix("_bucket") for name in names} <= set(listed())
    # What they are summed by or called are labels of theirs.
    labels = set().union(*listed().values())
    summed_by = {by for expr in asked for by in re.findall(r"by \(([\w, ]+)\)", expr)}
    assert {label for by in summed_by for label in by.split(", ")} <= labels
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {label for legend in legends for label in re.findall(r"{{(\w+)}}", legend)} <= labels
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
