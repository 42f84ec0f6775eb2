"""Hints of an orchestrator for a request: the part of vLLM's `kv_hints` that concerns host memory.

    {"action_type": "blockyard.pin", "payload": {"seconds": 600}}     keep the request's chunks in host memory this long
    {"action_type": "blockyard.retain", "payload": {"seconds": 600}}    evict them after all others for this long
    {"action_type": "blockyard.wait", "payload": {"seconds": 0.5}}    wait at most this long for an external store
    {"action_type": "blockyard.conversation", "payload": {"hint": "over"}}    what is known of the conversation when the
        request ends: `"over"`, `"tool_call"` or `"turn"`, see `BlockManager.free`

vLLM's envelope, version 0.1, fixes how hints travel and not what an action means, so these names are our own. An action
whose name does not begin with `blockyard.` is for others and is ignored. What is refused is logged by name.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Any, Final, Literal, NamedTuple

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log
from blockyard.offload import OffloadManager
from blockyard.stores.adapters.options import nearest, read_choice, read_seconds
from blockyard.workers.interrupts import keep
from blockyard.workers.logs import RateLimit

__all__ = ["OUTCOMES", "Hints", "Pins", "read_hints"]

OUTCOMES: Final = ("accepted", "refused", "ignored")
"""What can become of an action."""
_LOG = engine_log("vLLM")
_limit = RateLimit()
_PROTOCOL: Final = "0.1"
_VERSIONS: Final = ("1", "1.0")
_OURS: Final = "blockyard."
_SECONDS: Final = ("pin", "retain", "wait")
_CONVERSATIONS: Final = ("over", "tool_call", "turn")
_MAX_SECONDS: Final = 86_400.0


class Hints(NamedTuple):
    """Seconds for three actions, the hint of the fourth, None if not requested; and what became of each action."""

    pin: float | None = None
    retain: float | None = None
    wait: float | None = None
    conversation: Literal["over", "tool_call", "turn"] | None = None
    outcomes: tuple[str, ...] = ()


def read_hints(context: Any) -> Hints:
    """Read the hints of a request; an action that is refused is logged, at most once a minute for each reason."""
    envelope = getattr(context, "kv_hints", None)
    if envelope is None:
        return Hints()
    known = context.get_state(Hints)
    if known is not None:
        return known  # type: ignore[no-any-return]
    found: dict[str, Any] = {}
    outcomes = [_read(action, envelope, found) for action in envelope.actions]
    hints = Hints(**found, outcomes=tuple(outcomes))
    context.set_state(hints)
    return hints


def _read(action: Any, envelope: Any, found: dict[str, Any]) -> str:
    """Read an action into `found`; return what became of it."""
    if not str(action.action_type).startswith(_OURS):
        return "ignored"
    name = action.action_type.removeprefix(_OURS)
    try:
        read_choice("protocol_version", envelope.protocol_version, (_PROTOCOL,), "")
        if name not in {*_SECONDS, "conversation"}:
            known = [f"{_OURS}{known}" for known in (*_SECONDS, "conversation")]
            raise InvalidArgumentError(f"no such action{nearest(action.action_type, known)}")
        read_choice("action_version", action.action_version, _VERSIONS, "")
        if name == "conversation":
            found[name] = read_choice("hint", action.payload.get("hint") or "", _CONVERSATIONS, "")
        else:
            seconds = action.payload.get("seconds")
            found[name] = read_seconds(
                "seconds", "" if seconds is None else seconds, 0.0, most=_MAX_SECONDS, above_zero=False
            )
    except InvalidArgumentError as error:
        if _limit.passes(str(error)):
            about = {"message_id": str(envelope.message_id), "action_id": str(action.action_id)}
            _LOG.warning("hint %s is refused: %s", action.action_type, error, extra=about)
        return "refused"
    return "accepted"


class Pins:
    """Keys that stay in host memory until a deadline, held as if by a load.

    Args:
        offload: which host chunks hold which keys.
        action: the hint that asks for it, `"pin"` or `"retain"`.
        share: maximum share of the chunks.
    """

    def __init__(self, offload: OffloadManager, action: Literal["pin", "retain"] = "pin", share: float = 0.5) -> None:
        self._offload, self._action, self._max_keys = offload, action, int(offload.num_chunks * share)
        self._until: dict[bytes, int] = {}
        # One entry per pinned key, with a time at or before its deadline: a renewed pin keeps its entry.
        self._order: list[tuple[int, bytes]] = []
        # What a call pins or releases, and whether it did: after an exception the next call records it.
        self._new: dict[bytes, int] = {}
        self._pinned: list[object] = []
        self._gone: list[bytes] = []
        self._ended: list[object] = []

    def add(self, keys: list[bytes], context: Any, now: int) -> None:
        """Hold the hits among a request's keys, if it asks for that; `now` in milliseconds."""
        seconds: float | None = getattr(read_hints(context), self._action)
        if not seconds:
            return
        self._settle()
        until = now + int(seconds * 1000)
        known = [key for key in keys if key in self._until]
        room = max(0, self._max_keys - len(self._until))
        new = [key for key in dict.fromkeys(keys) if key not in self._until]
        found = self._offload.lookup(new)
        new = [key for key, what in zip(new, found, strict=True) if what == "hit"][:room]
        self._new = dict.fromkeys(new, until)
        keep(self._pinned, self._offload.prepare_load, new)
        self._settle()
        for key in known:
            self._until[key] = max(until, self._until.get(key, 0))

    def __contains__(self, key: bytes) -> bool:
        return key in self._until

    def expire(self, now: int) -> None:
        """Release the keys whose deadline has passed."""
        self.release(len(self._order), now)

    def release(self, most: int, now: float = inf) -> int:
        """Release at most `most` keys with a deadline up to `now`, the first deadlines first; return how many."""
        self._settle()
        count = 0
        while count < most and self._order and self._order[0][0] <= now:
            at, key = self._order[0]
            until = self._until.get(key)
            if until is not None and until > at:  # it was renewed
                heapq.heapreplace(self._order, (until, key))
                continue
            if until is not None:
                self._let_go([key])
                count += 1
            heapq.heappop(self._order)
        return count

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
