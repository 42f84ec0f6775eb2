"""Compares the connector's keys of chunks with those of an engine whose blocks have a chunk's tokens.

Requests grow token by token, have an image, a LoRA adapter, a cache salt, or take back their last tokens.
"""

from types import SimpleNamespace
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from blockyard.integrations.vllm.sharing.chunk_keys import KeyedByChunk, chunk_hasher

BLOCK, CHUNK = 16, 64
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"cache_salt": "a"},
    "adapter": {"lora_request": LoRARequest("one", 1, "/path")},
    "image": {
        "mm_features": [
            MultiModalFeatureSpec(None, "image", f"image-{place}", PlaceholderRange(offset=place, length=30))
            for place in (10, 120, 150)
        ]
    },
}


def request(block: int, more: dict[str, Any]) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=[number * 7 % 50 for number in range(150)],
        sampling_params=SamplingParams(max_tokens=400),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block, sha256),
        **more,
    )


def check(state: KeyedByChunk, large: Request) -> None:
    state.update_offload_keys()
    for group, one in enumerate(state.group_states):
        assert one.offload_keys == [hashed + group.to_bytes(4, "big") for hashed in large.block_hashes]
        ends = [state.req_context.get_offload_key_position(key) for key in one.offload_keys]
        assert ends == [CHUNK * (place + 1) for place in range(len(ends))]


def main() -> None:
    init_none_hash(sha256)
    hasher = chunk_hasher(SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256")), CHUNK)
    groups = [
        SimpleNamespace(group_idx=group, hashes_per_chunk=CHUNK // BLOCK, tokens_per_chunk=CHUNK) for group in (0, 1)
    ]
    config: Any = SimpleNamespace(kv_group_configs=groups)
    seen = set()
    for more in KINDS.values():
        small, large = request(BLOCK, more), request(CHUNK, more)
        state = KeyedByChunk(config, small, ReqContext("a"), None, hasher=hasher)

        check(state, large)
        for token in range(120):
            small.append_output_token_ids(token)
            large.append_output_token_ids(token)
            check(state, large)
        seen.update(state.group_states[0].offload_keys)
        # As vLLM goes on with a session: its last tokens are discarded.
        for one, block in ((small, BLOCK), (large, CHUNK)):
            del one._all_token_ids[190:]
            del one.block_hashes[190 // block :]
            one.append_output_token_ids([400] * 100)
        check(state, large)
        assert len(state.group_states[0].offload_keys) == 4
    assert len(seen) == 4 * len(KINDS), "two kinds share a key"
    print(f"{len(KINDS)} kinds of requests: equal keys")


if __name__ == "__main__":
    main()
