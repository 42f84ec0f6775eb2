"""Keys of chunks that do not depend on the block size: vLLM's own hashes, but of whole chunks.

vLLM chains its hashes block by block, so engines with other blocks have no key in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import make_offload_key

__all__ = ["KeyedByChunk", "chunk_hasher"]


def chunk_hasher(vllm_config: Any, tokens: int) -> Callable[[Any], list[bytes]]:
    """Return vLLM's function for the hashes that a request lacks, as with blocks of these tokens."""
    hasher: Callable[[Any], list[bytes]] = get_request_block_hasher(
        tokens, get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    )
    return hasher


class _Chunked:
    """A request whose hashes are those of its chunks.

    Args:
        request: vLLM's.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@dataclass(slots=True)
class KeyedByChunk(RequestOffloadState):
    """What vLLM knows of a request, with keys made of its chunks.

    Args:
        hasher: see `chunk_hasher`.
    """

    hasher: Callable[[Any], list[bytes]] = field(kw_only=True)
    _chunked: Any = field(init=False, default=None)
    _ends: list[bytes] = field(init=False, default_factory=list)  # vLLM's hash of the block in which each chunk ends

    def update_offload_keys(self) -> None:
        """Make the keys of the chunks that are whole by now."""
        if self._chunked is None:
            self._chunked = _Chunked(self.req)
        blocks, hashes, ends = self.req.block_hashes, self._chunked.block_hashes, self._ends
        per_chunk = self.config.kv_group_configs[0].hashes_per_chunk
        # vLLM takes back the last tokens of a session that goes on. A hash covers all blocks before its own.
        while ends and blocks[len(ends) * per_chunk - 1 : len(ends) * per_chunk] != ends[-1:]:
            del ends[-1], hashes[-1]
        first = len(ends)
        ends += blocks[(first + 1) * per_chunk - 1 :: per_chunk]
        if len(ends) == first:
            return
        hashes += self.hasher(self._chunked)[: len(ends) - first]
        for group, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            state.offload_keys[first:] = keys = [make_offload_key(one, group.group_idx) for one in hashes[first:]]
            for place, key in enumerate(keys, first + 1):
                self.req_context.set_offload_key_position(key, place * group.tokens_per_chunk)
