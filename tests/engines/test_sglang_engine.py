"""SGLang's HiCache controller with its own host pools and threads, on a CPU, over our storage backend.

What needs a GPU is left out: the copies between device and host. Bytes of the host pool are compared in their place.
"""

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed; make test-sglang does"
    ),
]
PAGE, PAGES, SECONDS = 4, 6, 60
WIDTHS = {
    **dict.fromkeys(("attn_dcp_rank", "tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank"), 0),
    **dict.fromkeys(("attn_dcp_size", "tp_size", "pp_size", "attn_tp_size"), 1),
}
TOKENS = list(range(100, 100 + PAGE * PAGES))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from sglang.srt.runtime_context import get_parallel

    where = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
    with ExitStack() as stack:
        for name, value in WIDTHS.items():
            stack.enter_context(get_parallel().override(**{name: value}))
        yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


class Engine:
    """A controller over a device pool and a host pool of its own, both on the CPU."""

    def __init__(self, group: Any, root: Path, *, layout: str, v1: bool, seed: int = 0) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        device = MHATokenToKVPool(64, PAGE, torch.bfloat16, 2, 8, 3, "cpu", False, enable_alt_stream=False)
        self.host = MHATokenToKVPoolHost(
            *(device._mha_buffer_info(), 2.0, 0, PAGE, layout),
            pin_memory=False,
            device_capacity_tokens=64,
            start_layer=0,
            end_layer=3,
        )
        self.host.kv_buffer.copy_(torch.randn(self.host.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
        options = {
            "backend_name": "blockyard",
            "module_path": "blockyard.integrations.sglang",
            "class_name": "BlockyardHiCache",
            "interface_v1": int(v1),
            "root_dir": str(root),
            "size": "4MiB",
            "revision": "1",
        }
        self.controller = HiCacheController(
            type("Allocator", (), {"get_kvcache": lambda self: device})(),
            *(self.host, PAGE, group, threading.Event()),
            io_backend="direct",
            storage_backend="dynamic",
            model_name="model",
            prefetch_threshold=PAGE,
            storage_backend_extra_config=options,
        )

    def pages(self, places: torch.Tensor) -> list[torch.Tensor]:
        return [self.host.get_data_page(int(place)).clone() for place in places[::PAGE]]

    def store(self) -> list[torch.Tensor]:
        """Write pages to the storage by the controller's thread."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        places = self.host.alloc(len(TOKENS))
        hashes = list(get_storage_hash_str(TOKENS, None, page_size=PAGE))
        self.controller.write_storage(places, TOKENS, hash_value=hashes)
        done = self.controller.ack_backup_queue.get(timeout=SECONDS)
        assert done.completed_tokens == len(TOKENS)
        return self.pages(places)

    def load(self) -> list[torch.Tensor]:
        """Look prompts up and prefetch what is found, as the tree of prefixes does; return the pages that came."""
        operation = self.controller.prefetch("one", TOKENS)
        found = self.controller.prefetch_hit_queue.get(timeout=SECONDS)
        assert found is operation
        if not found.storage_hit_count:
            return []
        operation.host_indices = self.host.alloc(found.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=SECONDS)
            completed = max(completed, ack.completed_tokens or 0)
            if ack.completed_req:
                return self.pages(operation.host_indices[:completed])

    def close(self) -> None:
        self.controller.detach_storage_backend()


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_into_another_engine(group: Any, tmp_path: Path, layout: str, v1: bool):
    first = Engine(group, tmp_path, layout=layout, v1=v1)
    assert first.load() == []
    wanted = first.store()
    assert same(first.load(), wanted)
    first.close()
    # Tensors and places in the pool are two ways to the same pages.
    again = Engine(group, tmp_path, layout=layout, v1=not v1, seed=1)
    assert same(again.load(), wanted)
    again.close()
    other = Engine(group, tmp_path, layout="page_first" if layout == "layer_first" else "layer_first", v1=v1)
    assert other.load() == []
    other.close()


def test_a_damaged_page_ends_the_prefix_and_nothing_else(group: Any, tmp_path: Path):
    first = Engine(group, tmp_path, layout="layer_first", v1=True)
    wanted = first.store()
    first.close()
    (slab,) = tmp_path.rglob("blockyard-prefix.slab")
    content = bytearray(slab.read_bytes())
    # The bytes of the third page, wherever its slot lies.
    place = content.index(bytes(wanted[2].view(torch.uint8).tolist()))
    content[place + 5] ^= 1
    slab.write_bytes(content)
    again = Engine(group, tmp_path, layout="layer_first", v1=True, seed=1)
    assert same(again.load(), wanted[:2])
    assert same(again.load(), wanted[:2])
    again.close()


@pytest.mark.parametrize("sabotage", ["no-op", "wrong page"])
def test_a_sabotaged_load_shows(group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: str):
    from blockyard.integrations.sglang.storage import _HostPages

    first = Engine(group, tmp_path, layout="layer_first", v1=True)
    wanted = first.store()
    first.close()
    known = _HostPages.write
    if sabotage == "no-op":
        monkeypatch.setattr(_HostPages, "write", lambda self, index, data: None)
    else:
        monkeypatch.setattr(_HostPages, "write", lambda self, index, data: known(self, index ^ PAGE, data))
    again = Engine(group, tmp_path, layout="layer_first", v1=True, seed=1)
    assert not same(again.load(), wanted)
    again.close()


def test_the_commands_of_the_guide_are_understood(tmp_path: Path):
    import argparse
    import re
    import shlex

    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
    from sglang.srt.server_args import ServerArgs

    text = (Path(__file__).resolve().parents[2] / "docs/engines/sglang.md").read_text(encoding="utf-8")
    (file, _, linker) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = []
    for command in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        words = shlex.split(command.replace("\\\n", "").replace("LINKER", shlex.quote(linker)))
        given.append(parser.parse_args(words[words.index("sglang.launch_server") + 1 :]))
    assert given[0].hicache_storage_backend == "dynamic"
    (tmp_path / "blockyard.json").write_text(file)
    where = given[0].hicache_storage_backend_extra_config.replace("@", f"@{tmp_path}/")
    options, *_ = HybridCacheController.parse_storage_backend_extra_config(where)
    assert options == json.loads(file)
    assert given[1].unified_cache_external_linker_backend == "dynamic"
    found = given[1].unified_cache_external_linker_config
    config = UnifiedCacheLinkerConfig.from_dict(json.loads(found) if isinstance(found, str) else found)
    assert config.linker == "BlockyardLinker"
