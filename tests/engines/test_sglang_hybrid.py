"""SGLang's `HybridCacheController` over the pools of hybrid models, on a CPU, over our storage backend.

What needs a GPU is left out: the copies between device and host, and page-locked memory.
"""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engine import PAGE, make_cache, serve_arguments

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed; make test-sglang does"
    ),
]
COUNT, SECONDS = 6, 60
TOKENS = list(range(100, 100 + PAGE * COUNT))


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process is the whole group, and host memory is not page-locked."""
    from sglang.srt.mem_cache.pool_host import base, common, dsa, mamba
    from sglang.srt.runtime_context import get_parallel

    where = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
    ranks = dict.fromkeys(("attn_dcp_rank", "tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank"), 0)
    sizes = dict.fromkeys(("attn_dcp_size", "tp_size", "pp_size", "attn_tp_size"), 1)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for pool in (base.HostKVCache, dsa.DSAIndexerPoolHost, mamba.MambaPoolHost):
            patch.setattr(pool, "pin_memory", property(lambda _: False, lambda *_: None), raising=False)
        patch.setattr(common, "_cuda_host_register", lambda *_: None)
        for name, value in (ranks | sizes).items():
            stack.enter_context(get_parallel().override(**{name: value}))
        yield
    torch.distributed.destroy_process_group()


class Engine:
    """The host pools of a model and SGLang's controller, over one store."""

    def __init__(self, kind: str, place: dict[str, str], seed: int) -> None:
        options = {
            "backend_name": "blockyard",
            "module_path": "blockyard.integrations.sglang",
            "class_name": "BlockyardHiCache",
            "interface_v1": 1,
            "revision": "1",
            "prefetch_threshold": PAGE,
            **place,
        }
        arguments = serve_arguments(
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(options),
        )
        cache, params = make_cache(kind)
        cache.init_hicache(arguments, params)
        self.controller = cache.cache_controller
        self.pools = {str(entry.name): entry.host_pool for entry in self.controller.mem_pool_host.entries}
        random = torch.Generator().manual_seed(seed)
        for name, pool in self.pools.items():
            for index in range(0, pool.size, pool.page_size):
                page = torch.randint(0, 256, pool.get_dummy_flat_data_page().view(torch.uint8).shape, generator=random)
                pool.set_from_flat_data_page(index, page.to(torch.uint8).view(pool.get_dummy_flat_data_page().dtype))
            assert name

    def transfers(self, hashes: list[str]) -> list[Any]:
        """What SGLang moves beside the main pool: an index of each page, the last window, the last state."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        found = []
        for name, pool in self.pools.items():
            if name == "indexer":
                found.append(PoolTransfer(name=PoolName.INDEXER, indices_from_pool=PoolName.KV))
            elif name != "kv":
                (keys, places) = hashes[-1:], pool.alloc(pool.page_size)
                policy = PoolHitPolicy.TRAILING_PAGES
                found.append(PoolTransfer(PoolName(name), host_indices=places, keys=keys, hit_policy=policy))
        return found

    def pages(self, places: torch.Tensor, transfers: list[Any]) -> dict[str, list[torch.Tensor]]:
        found = {"kv": places} | {str(each.name): each.host_indices for each in transfers}
        return {
            name: [
                self.pools[name].get_data_page(int(at)).clone().view(torch.uint8)
                for at in where[:: self.pools[name].page_size]
            ]
            for name, where in found.items()
        }

    def store(self) -> dict[str, list[torch.Tensor]]:
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        hashes = list(get_storage_hash_str(TOKENS, None, page_size=PAGE))
        places, transfers = self.pools["kv"].alloc(len(TOKENS)), self.transfers(hashes)
        self.controller.write_storage(places, TOKENS, hash_value=hashes, extra_pools=transfers)
        done = self.controller.ack_backup_queue.get(timeout=SECONDS)
        assert done.completed_tokens == len(TOKENS)
        return self.pages(places, transfers)

    def load(self) -> dict[str, list[torch.Tensor]] | None:
        """Look a prompt up and prefetch all pools' pages, as the tree of prefixes does."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        transfers = self.transfers(list(get_storage_hash_str(TOKENS, None, page_size=PAGE)))
        operation = self.controller.prefetch(CacheRequestHandle("one", 0), TOKENS, extra_pools=transfers)
        found = self.controller.prefetch_hit_queue.get(timeout=SECONDS)
        if not found.storage_hit_count:
            return None
        assert found.storage_hit_count == len(TOKENS)
        operation.host_indices = self.pools["kv"].alloc(found.storage_hit_count)
        for transfer in transfers:
            if transfer.indices_from_pool is not None:
                transfer.host_indices, transfer.keys = operation.host_indices, found.hash_value
        self.controller.prefetch_buffer.put(operation)
        completed, hits, ended = 0, {}, False
        while not ended or len(hits) < len(self.pools) - ("indexer" in self.pools) - 1:
            ack = self.controller.ack_prefetch_queue.get(timeout=SECONDS)
            completed = max(completed, ack.completed_tokens or 0)
            hits.update(ack.pool_hits or {})
            ended |= bool(ack.completed_req)
        assert completed == len(TOKENS)
        return self.pages(operation.host_indices, transfers)

    def close(self) -> None:
        self.controller.detach_storage_backend()


def same(found: dict[str, list[torch.Tensor]] | None, wanted: dict[str, list[torch.Tensor]]) -> bool:
    return (
        found is not None
        and {name: len(pages) for name, pages in found.items()} == {name: len(pages) for name, pages in wanted.items()}
        and all(torch.equal(*both) for name in wanted for both in zip(found[name], wanted[name], strict=True))
    )


@pytest.mark.parametrize("place", ["root_dir", "url"])
@pytest.mark.parametrize("kind", ["index", "window", "state"])
def test_pages_of_each_pool_come_back_into_another_engine(tmp_path: Path, kind: str, place: str):
    where = {"root_dir": str(tmp_path), "size": "16MiB"}
    if place == "url":
        where = {"url": f"file://{tmp_path}/store?size=16MiB"}
    first = Engine(kind, where, seed=0)
    assert first.load() is None
    wanted = first.store()
    assert set(wanted) == {"kv", {"index": "indexer", "window": "swa", "state": "mamba"}[kind]}
    first.close()
    again = Engine(kind, where, seed=1)
    assert same(again.load(), wanted)
    again.close()
