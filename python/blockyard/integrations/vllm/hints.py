"""Hints of an orchestrator for a request: the part of vLLM's `kv_hints` that concerns host memory.

    {"action_type": "blockyard.pin", "payload": {"seconds": 600}}     keep the request's chunks in host memory this long
    {"action_type": "blockyard.wait", "payload": {"seconds": 0.5}}    wait at most this long for an external store
    {"action_type": "blockyard.conversation", "payload": {"hint": "over"}}    what is known of the conversation when the
        request ends: `"over"`, `"tool_call"` or `"turn"`, see `BlockManager.free`

Other actions are ignored.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, Literal, NamedTuple

from blockyard.integrations.compat import engine_log
from blockyard.offload import OffloadManager
from blockyard.workers import keep

__all__ = ["Hints", "Pins", "read_hints"]

_LOG = engine_log("vLLM")
_PIN: Final = "blockyard.pin"
_WAIT: Final = "blockyard.wait"
_CONVERSATION: Final = "blockyard.conversation"
_CONVERSATIONS: Final = ("over", "tool_call", "turn")
_MAX_SECONDS: Final = 86_400.0
_SHARE: Final = 2  # at most one chunk in 2 is pinned


class Hints(NamedTuple):
    """Seconds for the first actions, and the hint of the last; None if not requested."""

    pin: float | None = None
    wait: float | None = None
    conversation: Literal["over", "tool_call", "turn"] | None = None


def read_hints(context: Any) -> Hints:
    """Read the hints of a request; a malformed hint is logged and ignored."""
    envelope = getattr(context, "kv_hints", None)
    if envelope is None:
        return Hints()
    known = context.get_state(Hints)
    if known is not None:
        return known  # type: ignore[no-any-return]
    found: dict[str, Any] = {}
    for action in envelope.actions:
        if action.action_type == _CONVERSATION:
            hint = action.payload.get("hint")
            if isinstance(hint, str) and hint in _CONVERSATIONS:
                found["conversation"] = hint
            else:
                _LOG.warning("%s has hint %r, must be one of %s", _CONVERSATION, hint, ", ".join(_CONVERSATIONS))
            continue
        if action.action_type not in {_PIN, _WAIT}:
            continue
        seconds = action.payload.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _MAX_SECONDS:
            _LOG.warning("%s has seconds %r, must be 0 to %d", action.action_type, seconds, _MAX_SECONDS)
            continue
        found["pin" if action.action_type == _PIN else "wait"] = float(seconds)
    hints = Hints(**found)
    context.set_state(hints)
    return hints


class Pins:
    """Keys that stay in host memory until a deadline, held as if by a load.

    Args:
        offload: which host chunks hold which keys.
    """

    def __init__(self, offload: OffloadManager) -> None:
        self._offload = offload
        self._until: dict[bytes, int] = {}
        # One entry per pinned key, with a time at or before its deadline: a renewed pin keeps its entry.
        self._order: list[tuple[int, bytes]] = []
        # What a call pins or releases, and whether it did: after an exception the next call records it.
        self._new: dict[bytes, int] = {}
        self._pinned: list[object] = []
        self._gone: list[bytes] = []
        self._ended: list[object] = []

    def add(self, keys: list[bytes], context: Any, now: int) -> None:
        """Pin the hits among a request's keys, if it asks for that; `now` in milliseconds."""
        seconds = read_hints(context).pin
        if not seconds:
            return
        self._settle()
        until = now + int(seconds * 1000)
        known = [key for key in keys if key in self._until]
        room = max(0, self._offload.num_chunks // _SHARE - len(self._until))
        new = [key for key in dict.fromkeys(keys) if key not in self._until]
        found = self._offload.lookup(new)
        new = [key for key, what in zip(new, found, strict=True) if what == "hit"][:room]
        self._new = dict.fromkeys(new, until)
        keep(self._pinned, self._offload.prepare_load, new)
        self._settle()
        for key in known:
            self._until[key] = max(until, self._until.get(key, 0))

    def has(self, key: bytes) -> bool:
        """Whether a key is pinned."""
        return key in self._until

    def expire(self, now: int) -> None:
        """Release the keys whose deadline has passed."""
        self._settle()
        while self._order and self._order[0][0] <= now:
            key = self._order[0][1]
            until = self._until.get(key)
            if until is not None and until > now:
                heapq.heapreplace(self._order, (until, key))
                continue
            if until is not None:
                self._let_go([key])
            heapq.heappop(self._order)

    def clear(self) -> None:
        """Release all keys."""
        self._settle()
        self._let_go(list(self._until))
        self._order.clear()

    def _let_go(self, keys: list[bytes]) -> None:
        self._gone = keys
        keep(self._ended, self._offload.complete_load, keys)
        self._settle()

    def _settle(self) -> None:
        """Record what the last call pinned and released."""
        if self._pinned:
            for key, until in self._new.items():
                heapq.heappush(self._order, (until, key))
            self._until.update(self._new)
            del self._pinned[:]
        if self._ended:
            for key in self._gone:
                self._until.pop(key, None)
            del self._ended[:]
