"""`DueHits`: follows which new prompts should hit the prefix cache, and which do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from blockyard.scheduler import Request
from blockyard.testing.machines.record import show
from blockyard.testing.machines.values import Key, seen

if TYPE_CHECKING:
    from blockyard.testing.machines.watch import SequenceWatch

__all__ = ["DueHits"]

KEPT = 16
"""Number of finished requests that new prompts are compared with."""


class DueHits:
    """Follows which prompts should hit when they are first allocated.

    These begin with a block that a finished request has computed under the same key, and that the device still holds:
    no sequence has got it since for other tokens.

    Attributes:
        missed: the last due prompt without a hit, in words, and the steps up to it.
    """

    def __init__(self, watch: SequenceWatch) -> None:
        self.missed: tuple[str, str] | None = None
        self._watch = watch
        self._new: dict[str, Request] = {}
        self._finished: list[Request] = []
        self._prompts: list[tuple[Request, str] | None] = []  # of the current call, with why each should hit

    def add(self, request: Request) -> None:
        """Follow a new request."""
        self._new[request.request_id] = request

    def end(self, request: Request, *, finished: bool = True) -> None:
        """Take a finished request into account; drop an aborted one."""
        self._new.pop(request.request_id, None)
        if finished:
            self._finished = [*self._finished[1 - KEPT :], request]

    def before(self, texts: Sequence[Sequence[int | None]], keys: Sequence[Key]) -> None:
        """Find the prompts that should hit among those to be allocated."""
        self._prompts = []
        if self._watch.manager.prefix.enabled:
            found = [self._request_of(text, key) for text, key in zip(texts, keys, strict=True)]
            self._prompts = [None if request is None else (request, self._why(request)) for request in found]

    def after(self, handles: Sequence[int], hits: Sequence[int]) -> None:
        """Count the hits of the prompts that were allocated."""
        prompts, self._prompts = self._prompts, []
        for prompt, handle, hit in zip(prompts, handles, hits, strict=False):
            if prompt is None:
                continue
            request, why = prompt
            self._new.pop(request.request_id, None)
            if why:
                self._watch.counts["hits due"] += 1
                self._watch.counts["due hit"] += hit > 0
            if why and not hit:
                sentence = f"step {self._watch.step}: allocate hit nothing for sequence {handle}: {why}"
                self.missed = (self._watch.headline(sentence), self._watch.timeline())

    def _request_of(self, text: Sequence[int | None], key: Key) -> Request | None:
        """Return the new request that a prompt, its first part, or its length belongs to."""
        for name, request in self._new.items():
            prompt = list(request.prompt)
            if None in text:
                same = len(text) == len(prompt)
            else:
                same = self._watch.keys[name] == key and prompt[: len(text)] == list(text)
            if same and (len(text) == len(prompt) or len(text) > self._watch.memory.block_size):
                return request
        return None

    def _why(self, request: Request) -> str:
        """Return why a request should hit, in words; empty if it need not."""
        size, key = self._watch.memory.block_size, self._watch.keys[request.request_id]
        first = list(request.prompt[:-1])[:size]
        for earlier in self._finished if len(first) == size else ():
            if list(earlier.prompt[:size]) == first and self._watch.keys[earlier.request_id] == key:
                blocks = self._blocks_with(first, key)
                if blocks:
                    return (
                        f"its request {request.request_id!r} begins with the tokens {show(first)} of the finished "
                        f"request {earlier.request_id!r}, and block {blocks[0]} holds them"
                    )
        return ""

    def _blocks_with(self, first: list[int], key: Key) -> list[int]:
        """Return the blocks that hold the first tokens of a prompt, and are in no sequence for other tokens."""
        watch, size = self._watch, len(first)
        values = np.array(seen(key, first))
        found: list[int] = np.flatnonzero((watch.memory.tiers["device"] == values).all(1)).tolist()
        if found:
            for handle in watch.live():
                blocks, followed = watch.blocks(handle), watch.sequences[handle]
                same = followed.key == key and followed.tokens[:size] == first
                if watch.manager.tier(handle) == "device":
                    found = [block for block in found if block not in blocks[int(same) :]]
        return found
