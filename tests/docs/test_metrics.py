"""The guide lists the metrics that caches, schedulers and generators return."""

import re
from itertools import product
from pathlib import Path

from blockyard import KVCache, KVLayout
from blockyard.demo.demo_model import demo_config, demo_model
from blockyard.integrations.transformers import Generator
from blockyard.scheduler import Scheduler

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
BY_PREFIX = ("prefix_store_misses_", "prefix_store_load_seconds_le_")


def listed() -> set[str]:
    section = GUIDE.read_text(encoding="utf-8").split("\n## Metrics\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for written in re.findall("`([^`]+)`", cell) for name in expanded(written)}


def expanded(written: str) -> set[str]:
    """Names that `{a,b}` stands for."""
    parts = [part.split(",") for part in re.split(r"[{}]", written)]
    return {"".join(chosen) for chosen in product(*parts)}


def names(metrics: dict[str, float]) -> set[str]:
    """Names of metrics; those that end in a reason or in seconds as the guide writes them."""
    found = {re.sub(f"^({'|'.join(BY_PREFIX)}).*", r"\1", name) for name in metrics}
    return {
        f"{name}REASON" if name == BY_PREFIX[0] else f"{name}SECONDS" if name in BY_PREFIX else name for name in found
    }


def test_the_guide_lists_every_metric_and_a_new_generator_has_them_all(tmp_path: Path):
    config = demo_config(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)
    store = f"file://{tmp_path}/prefixes?size=1MiB"
    with Generator(
        demo_model(config), block_size=4, device_blocks=8, host_blocks=8, prefix_store=store, namespace=b"test"
    ) as generator:
        found = generator.metrics()
    # A reason for misses appears with the first miss.
    assert names(found) == listed() - {"prefix_store_misses_REASON"}
    assert set(found.values()) == {0}


def test_what_a_cache_and_a_scheduler_have_in_common_has_one_name():
    with KVCache(LAYOUT, device_blocks=8, host_blocks=8) as cache:
        in_cache, in_scheduler = names(cache.metrics()), names(Scheduler(cache.manager).metrics())
    assert in_cache < in_scheduler <= listed()
    assert {name for name in in_scheduler - in_cache if not name.startswith("num_preemptions_")} == set()


def test_counters_of_preemptions_and_swaps_are_valid_names_for_an_exporter():
    counters = {name for name in listed() if name.startswith(("num_preemptions", "swapped_"))}
    assert len(counters) == 8
    assert all(re.fullmatch("[a-z_]+_total", name) for name in counters)
    assert {name for name in listed() if name.endswith("_usage_sys")} == {
        f"{tier}_cache_usage_sys" for tier in ("device", "host", "external")
    }
