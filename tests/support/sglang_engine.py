"""SGLang's own cache of prefixes over its own device pools, on a CPU, with an external linker below it.

A request goes through SGLang's match, load, insert and release as in its scheduler. Only the model is ours: the KV of
a token is a digest of all tokens up to it, and the answer is a digest of the whole prompt's KV, as read from the pools.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

PAGE, LAYERS, PAGES = 64, 3, 40
SECONDS = 60.0


def make_cache(kind: str) -> Any:
    """Return SGLang's cache of prefixes over the device pools of a model, and what it was made of.

    Args:
        kind: `index` for sparse attention with an index, `window` for windows of a page in five layers of six, `state`
            for recurrent states in three layers of four.
    """
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        HybridLinearKVPool,
        HybridReqToTokenPool,
        ReqToTokenPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    size: Any = {"size": PAGES * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu"}
    requests: Any = {"size": 4, "max_context_len": PAGES * PAGE, "device": "cpu", "enable_memory_saver": False}
    heads, off = {"head_num": 2, "head_dim": 32}, {"enable_memory_saver": False}
    rows, components, allocator = ReqToTokenPool(**requests), [ComponentType.FULL], PagedTokenToKVPoolAllocator
    more: dict[str, Any] = {}
    if kind == "index":
        widths = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "kv_cache_dim": 80, "index_head_dim": 128}
        pool = DSATokenToKVPool(**size, **widths, **off, layer_num=LAYERS)
    elif kind == "window":
        layers = {"swa_attention_layer_ids": [0, 2, 3, 4, 5], "full_attention_layer_ids": [1]}
        more = {"size_swa": PAGES * PAGE}
        pool = SWAKVPool(**size, **heads, **layers, **more)
        components, allocator = [*components, ComponentType.SWA], SWATokenToKVPoolAllocator
    else:
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=256, n_groups=1, num_heads=4, head_dim=64, state_size=32, conv_kernel=4
        )
        states: Any = {"mamba_size": 20, "mamba_spec_state_size": 4, "mamba_layer_ids": [0, 2, 3]}
        states |= {"enable_mamba_extra_buffer": True, "speculative_num_draft_tokens": 3}
        rows = HybridReqToTokenPool(**requests, **states, cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2, 3]))
        pool = HybridLinearKVPool(**size, **heads, **off, full_attention_layer_ids=[1], mamba_pool=rows.mamba_pool)
        components = [*components, ComponentType.MAMBA]
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator(**size, **more, kvcache=pool, need_sort=False),
        page_size=PAGE,
        tree_components=tuple(components),
        sliding_window_size=PAGE if kind == "window" else None,
        tree_core_backend="python",
        enable_mamba_extra_buffer=kind == "state",
    )
    return UnifiedRadixCache(params=params), params


def serve_arguments(**more: Any) -> Any:
    """Set the arguments of the server that SGLang's code finds."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs(model_path="dummy", page_size=PAGE, **more)
    arguments._mamba_cache_chunk_size = PAGE  # else from the model's configuration
    set_global_server_args_for_scheduler(arguments)
    return arguments


class Answer(NamedTuple):
    """What a request comes to."""

    token: str  # empty if SGLang aborts the request
    loaded: int  # pages from the store
    seconds: float  # of the scheduler's thread


class SGLangEngine:
    """One rank of SGLang with a model that has sparse attention: a main pool, and the small pool of its index.

    Args:
        backend: the linker's, as in `--unified-cache-external-linker-backend`; None for SGLang without one.
        config: the linker's configuration.
    """

    def __init__(self, backend: str | None = None, config: dict[str, Any] | None = None) -> None:
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

        serve_arguments()
        self.cache, params = make_cache("index")
        self.slots, self.rows = params.token_to_kv_pool_allocator, params.req_to_token_pool
        self.pool = self.slots.get_kvcache()
        self.asked = 0
        if backend is not None:
            linker = create_unified_cache_linker(
                SimpleNamespace(model_path="dummy", enable_linker_mla_dedup=False),
                params,
                backend=backend,
                config=config,
                components=set(self.cache.components),
            )
            self.cache.init_cache_linker(linker)

    def ask(self, prompt: Sequence[int], between: Callable[[], None] = lambda: None) -> Answer:
        """Serve a request for one token, with a call between its lookup and its load."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
        from sglang.srt.mem_cache.common import release_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.asked += 1
        began = time.monotonic()
        self.cache.check_hicache_events()
        request = Req(
            rid=f"request {self.asked}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        self.rows.alloc([request])
        request.init_next_round_input(self.cache)
        stall = time.monotonic()
        between()
        stall = time.monotonic() - stall
        known, loaded = request.prefix_len, 0
        request.lock = self.cache.lock(request.last_node)
        if request.host_hit_length:
            how = InitLoadBackParams(
                best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
            )
            loaded, request.last_node = self.cache.init_load_back(how)
            request.prefix_len += loaded
        request.extend_end = len(prompt)
        own = self.slots.alloc(-(-request.extend_len // PAGE) * PAGE)
        places = torch.cat([self.cache.prefix_device_indices(request), own])
        self.rows.write((request.kv.req_pool_idx, slice(0, len(places))), places)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = len(prompt)
        token = self._forward(prompt, places, request.prefix_len)
        if self.cache.finish_external_linker_loads([request]):
            token = ""
        request.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(request, self.cache, checkpoint=bool(token))
        seconds = time.monotonic() - began - stall
        assert known % PAGE == loaded % PAGE == 0
        return Answer(token, loaded // PAGE if token else 0, seconds)

    def _forward(self, prompt: Sequence[int], places: torch.Tensor, known: int) -> str:
        """Compute a prompt from token `known` on, layer by layer, once the layers before it have come."""
        index = self.cache.ready_to_load_host_cache() if self.cache.linker else -1
        counter = self.cache.linker.layer_done_counter if self.cache.linker else None
        if counter is not None:
            counter.set_consumer(index)
        found = hashlib.sha256()
        for layer in range(LAYERS):
            if counter is not None:
                counter.wait_until(layer)
            main, index_keys = self.pool.kv_buffer[layer], self.pool.index_k_with_scale_buffer[layer]
            for first in range(known - known % PAGE, len(prompt), PAGE):
                page = int(places[first]) // PAGE
                rows = main[page * PAGE : (page + 1) * PAGE].view(torch.uint8)
                for part in (rows, index_keys[page]):
                    seed = hashlib.sha256(repr((list(prompt[: first + PAGE]), layer, part.numel())).encode()).digest()
                    drawn = np.random.default_rng(np.frombuffer(seed, np.uint32)).bytes(part.numel())
                    part.view(-1)[:] = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)
            pages = places[::PAGE] // PAGE
            found.update(main.view(-1, PAGE, main.shape[-1])[pages].view(torch.uint8).numpy().tobytes())
            found.update(index_keys[pages].numpy().tobytes())
        return found.hexdigest()[:8]

    def settle(self) -> None:
        """Run steps without requests until nothing is being stored."""
        until = time.monotonic() + SECONDS
        while self.cache.linker and self.cache.linker.pending_offloads:
            self.cache.check_hicache_events()
            assert time.monotonic() < until, "pages are still being stored"
            time.sleep(0.005)

    def evict(self) -> None:
        """Take all pages from the device that are not in use."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=PAGES * PAGE))

    def close(self) -> None:
        if self.cache.linker:
            self.cache.linker.close()
