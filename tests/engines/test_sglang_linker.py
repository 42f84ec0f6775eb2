"""Our `UnifiedCacheLinker`, made by SGLang's own factory over its own device pools, on a CPU.

It is driven as SGLang's `UnifiedCacheLinkerWrapper` drives it. The wrapper itself needs a server's scheduler.
"""

import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_drivers import FaultyStore

from blockyard.errors import InvalidArgumentError
from blockyard.stores import register

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed; make test-sglang does"
    ),
]
PAGE, LAYERS, SECONDS = 4, 3, 60
KEYS = [f"{n:064x}" for n in range(5)]
register("faulty")(FaultyStore)


class Engine:
    """A linker and the device pool that it serves."""

    def __init__(self, options: dict[str, Any], *, seed: int = 0, model: str = "model") -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

        self.pool = MHATokenToKVPool(64, PAGE, torch.bfloat16, 2, 8, LAYERS, "cpu", False, enable_alt_stream=False)
        random = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=random))
        params = SimpleNamespace(
            page_size=PAGE,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool),
            **dict.fromkeys(("attn_tp_cache_group", "tp_cache_group"), None),
            **dict.fromkeys(("pp_rank", "attn_cp_rank"), 0),
            **dict.fromkeys(("pp_size", "attn_cp_size"), 1),
            sidecar_draft_device_pools=(),
            mtp_draft_device_pools=(),
        )
        self.linker = create_unified_cache_linker(
            SimpleNamespace(model_path=model),
            params,
            backend="dynamic",
            config={
                "linker": "BlockyardLinker",
                "linker_module_path": "blockyard.integrations.sglang.linker",
                "linker_extra_config": {"lookup_seconds": 5, "revision": "1", **options},
            },
            components={ComponentType.FULL},
        )

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def transfers(self, keys: list[str], first_page: int | None = None) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        slots = None if first_page is None else torch.arange(first_page * PAGE, (first_page + len(keys)) * PAGE)
        return [PoolTransfer(name=PoolName.KV, keys=list(keys), device_indices=slots)]

    def pages(self, first: int, count: int) -> torch.Tensor:
        return torch.stack([buffer[first * PAGE : (first + count) * PAGE].clone() for buffer in self.buffers])

    def store(self, keys: list[str] = KEYS) -> torch.Tensor:
        """Offload pages 1 and following."""
        assert self.linker.offload(self.transfers(keys, 1))
        assert self.wait() is True
        return self.pages(1, len(keys))

    def wait(self) -> bool:
        until = threading.Event()
        while not self.linker.num_completed_offloads():
            until.wait(0.001)
        return bool(self.linker.pop_completed_offload())

    def load(self, keys: list[str] = KEYS, first: int = 7) -> torch.Tensor | None:
        """Look pages up and load what is found to page `first` and following, as for a request; None for a miss."""
        found = self.linker.lookup("one", self.transfers(keys))
        if not found:
            return None
        assert found == list(range(1, found[-1] + 1))
        assert self.linker.load("one", self.transfers(keys[: found[-1]], first))
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(LAYERS):
            self.linker.layer_done_counter.wait_until(layer)
        assert self.linker.finish_layer_wise_loading(index)
        return self.pages(first, found[-1])


@pytest.fixture
def engine() -> Iterator[Any]:
    made = []

    def make(*args: Any, **more: Any) -> Engine:
        made.append(Engine(*args, **more))
        return made[-1]

    FaultyStore.fault = ""
    FaultyStore.media.clear()
    FaultyStore.released.clear()
    yield make
    FaultyStore.released.set()
    for one in made:
        one.linker.close()


def test_the_options_of_the_guide_work(engine: Any, tmp_path: Path):
    text = (Path(__file__).resolve().parents[2] / "docs/engines/sglang.md").read_text(encoding="utf-8")
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[-1])
    one = engine({**shown["linker_extra_config"], "root_dir": str(tmp_path), "size": "1MiB"})
    assert shown["linker"] == type(one.linker).__name__
    assert shown["linker_module_path"] == type(one.linker).__module__


def test_pages_come_back_into_another_engine_and_no_other_slot_changes(engine: Any, tmp_path: Path):
    first = engine({"root_dir": str(tmp_path)})
    assert first.load() is None
    wanted = first.store()
    first.linker.close()
    again = engine({"root_dir": str(tmp_path)}, seed=1)
    before = again.pages(0, 17)
    found = again.load()
    assert found is not None
    assert torch.equal(found, wanted)
    after = again.pages(0, 17)
    after[:, 7 * PAGE : 12 * PAGE] = before[:, 7 * PAGE : 12 * PAGE]
    assert torch.equal(after, before)
    assert again.linker.start_layer_wise_loading() == -1
    again.linker.close()
    assert engine({"root_dir": str(tmp_path)}, model="other").load() is None


@pytest.mark.parametrize("fault", ["hangs", "raises", "damages", "swaps", "loses"])
def test_a_faulty_store_is_a_miss_before_anything_is_loaded(engine: Any, fault: str):
    one = engine({"url": "faulty://one"})
    wanted = one.store()
    FaultyStore.fault = fault
    before = one.pages(0, 17)
    assert one.load() is None
    if fault in {"hangs", "raises"}:
        assert one.linker.offload(one.transfers(["new"], 1))
        assert one.wait() is False
    assert torch.equal(one.pages(0, 17), before)
    FaultyStore.fault = ""
    FaultyStore.released.set()
    assert wanted is not None


def test_a_damaged_page_ends_the_prefix(engine: Any, tmp_path: Path):
    first = engine({"root_dir": str(tmp_path)})
    wanted = first.store()
    first.linker.close()
    (slab,) = tmp_path.rglob("blockyard-prefix.slab")
    content = bytearray(slab.read_bytes())
    part = bytes(first.buffers[0][3 * PAGE : 4 * PAGE].view(torch.uint8).flatten().tolist())
    content[content.index(part) + 3] ^= 1
    slab.write_bytes(content)
    again = engine({"root_dir": str(tmp_path)}, seed=1)
    found = again.load()
    assert found is not None
    assert torch.equal(found, wanted[:, : 2 * PAGE])


def test_a_lookup_waits_no_longer_than_it_may_and_a_load_without_one_is_refused(engine: Any):
    one = engine({"url": "faulty://one", "lookup_seconds": 0})
    one.store()
    FaultyStore.fault = "hangs"
    assert one.linker.lookup("one", one.transfers(KEYS)) == []
    assert not one.linker.load("one", one.transfers(KEYS, 7))
    assert not one.linker.cancel_queued_load("one")
    for number in range(40):
        assert one.linker.lookup(f"gone {number}", one.transfers(KEYS)) == []
    assert len(one.linker._reading) <= 16
    FaultyStore.released.set()
    FaultyStore.fault = ""


def test_pools_that_share_slots_are_one_value_and_a_main_pool_needs_none_of_its_own(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As of DeepSeek V4: compressed keys for the main pool's slots; for the windows', a window and its state."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup

    from blockyard.integrations.sglang import linker

    kinds = {"deepseek_v4_c4": ("kv", 96), "deepseek_v4_c128": ("kv", 8), "swa": ("swa", 200), "c4_state": ("swa", 24)}
    names = {"c4_state": PoolName.DEEPSEEK_V4_C4_STATE}
    made: list[dict[str, list[torch.Tensor]]] = []

    def pools(params: Any, components: Any) -> DevicePoolGroup:
        random = torch.Generator().manual_seed(len(made))
        memory = {
            kind: [torch.randint(0, 256, (16, width), generator=random).to(torch.uint8) for _ in range(LAYERS)]
            for kind, (_, width) in kinds.items()
        }
        made.append(memory)
        entries = [
            DevicePoolEntry(
                name=names.get(kind) or PoolName(kind),
                indices_from_pool=PoolName(kinds[kind][0]),
                device_pool=None,
                components=[buffers],
                layer_mapping={layer: layer for layer in range(LAYERS)},
                page_size=PAGE,
                rows_are_pages=True,
            )
            for kind, buffers in memory.items()
        ]
        return DevicePoolGroup(entries, LAYERS, PAGE, rank_replicated=True)

    def transfers(keys: list[str], first: int, window: int, first_window: int) -> list[Any]:
        places = [
            torch.arange(start * PAGE, (start + count) * PAGE)
            for start, count in ((first, len(keys)), (first_window, window))
        ]
        return [
            PoolTransfer(PoolName.KV, device_indices=places[0], keys=list(keys)),
            PoolTransfer(
                *(PoolName.SWA, None, places[1], list(keys[-window:])), hit_policy=PoolHitPolicy.TRAILING_PAGES
            ),
        ]

    monkeypatch.setattr(linker, "_device_pools", pools)
    first, again = engine({"root_dir": str(tmp_path)}), None
    assert first.linker.offload(transfers(KEYS, 1, 2, 9))
    assert first.wait() is True
    assert first.linker._objects.stats().cached_blocks == len(KEYS) + 2, "one value for each page and window"
    first.linker.close()
    again = engine({"root_dir": str(tmp_path)}, seed=1)
    for keys, found in ((KEYS, [5]), (KEYS[:4], []), (KEYS[:3], [])):
        assert again.linker.lookup(f"a {len(keys)}", transfers(keys, 1, 2, 1)) == found
    before = {kind: torch.stack(buffers) for kind, buffers in made[1].items()}
    assert again.linker.load("a 5", transfers(KEYS, 7, 2, 3))
    index = again.linker.start_layer_wise_loading()
    assert again.linker.finish_layer_wise_loading(index)
    for kind, (source, _) in kinds.items():
        to, at, count = (7, 1, 5) if source == "kv" else (3, 9, 2)
        before[kind][:, to : to + count] = torch.stack(made[0][kind])[:, at : at + count]
        assert torch.equal(torch.stack(made[1][kind]), before[kind]), kind


@pytest.mark.parametrize("sabotage", ["no-op", "wrong pages"])
def test_a_sabotaged_load_shows(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: str):
    from blockyard.integrations.sglang import linker

    one = engine({"root_dir": str(tmp_path)})
    wanted = one.store()
    known = linker._copy_layer
    if sabotage == "no-op":
        monkeypatch.setattr(linker, "_copy_layer", lambda pool, layer, rows, data: None)
    else:
        monkeypatch.setattr(linker, "_copy_layer", lambda pool, layer, rows, data: known(pool, layer, rows, data[::-1]))
    found = one.load()
    assert found is not None
    assert not torch.equal(found, wanted)


@pytest.mark.parametrize("options", [{}, {"url": "faulty://one", "staging": "2G"}, {"url": "faulty://one", "sise": 3}])
def test_wrong_options_are_refused(engine: Any, options: dict[str, Any]):
    with pytest.raises(InvalidArgumentError, match=r"url is None|staging: '2G'|has 'sise'"):
        engine(options)
