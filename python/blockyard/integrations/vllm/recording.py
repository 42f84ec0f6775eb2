"""Records vLLM's requests to a trace, by the keys of their chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from blockyard.integrations.compat import engine_log
from blockyard.traces.recorder import TraceRecorder

__all__ = ["ChunkRecorder"]

_LOG = engine_log("vLLM")
_FIRST_GROUP: Final = bytes(4)
"""How the keys of vLLM's first cache group end."""


class ChunkRecorder:
    """Records each request with the chunks of the first cache group that vLLM lists in its context.

    When a request is first scheduled, these are its prompt's chunks; when it ends, also those that the answer filled.
    vLLM does not pass on lengths in tokens, so recorded lengths are whole chunks, and at least one token.

    Args:
        recorder: a recorder whose blocks are chunks.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._new: dict[str, ReqContext] = {}  # not scheduled yet
        self._prompt_chunks: dict[str, int] = {}

    def add(self, context: ReqContext) -> None:
        """Record that a request has arrived."""
        if not self._recorder.is_recording:
            return
        if not hasattr(context, "_offload_key_positions"):
            _LOG.warning("requests are not recorded: this version of vLLM does not list their chunks")
            self._recorder.close()
            return
        self._new[context.req_id] = context
        self._recorder.add(context.req_id, [], 1)

    def begin(self, request_ids: Iterable[str]) -> None:
        """Record the prompts of requests that are scheduled for the first time."""
        for request_id in request_ids:
            context = self._new.pop(request_id, None)
            keys = [] if context is None else self._keys(context)
            if keys:
                self._prompt_chunks[request_id] = len(keys)
                self._recorder.add(request_id, keys, len(keys) * self._recorder.block_size)

    def finish(self, context: ReqContext) -> None:
        """Record that a request has ended."""
        is_new = self._new.pop(context.req_id, None) is not None
        chunks = self._prompt_chunks.pop(context.req_id, 0)
        keys = [] if is_new or not self._recorder.is_recording else self._keys(context)[chunks:]
        self._recorder.finish(context.req_id, len(keys) * self._recorder.block_size, keys)

    def close(self) -> None:
        """Write the remaining requests."""
        self._recorder.close()

    def _keys(self, context: Any) -> list[OffloadKey]:
        """Return the keys of a request's chunks, first to last."""
        keys: list[OffloadKey] = []
        for key, end in context._offload_key_positions.items():  # noqa: SLF001 (vLLM has no other list of them)
            # Ends within a chunk are those of partial chunks.
            if key.endswith(_FIRST_GROUP) and end == (len(keys) + 1) * self._recorder.block_size:
                keys.append(key)
        return keys
