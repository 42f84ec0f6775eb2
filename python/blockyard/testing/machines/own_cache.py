"""`OwnCacheMachine`: a block manager with its own calls and a prefix cache, over simulated memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from blockyard.testing.machines.own_manager import FULL, OwnManagerMachine, few, picks
from blockyard.testing.machines.record import show
from blockyard.testing.machines.values import Key, seen, token_of

__all__ = ["OwnCacheMachine"]

# Two runs of a token, and their lengths: blocks with the same tokens have other ones before them.
_prompts = st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 2), st.integers(0, 6))


class OwnCacheMachine(OwnManagerMachine):
    """`OwnManagerMachine` whose prompts begin alike: what was found in the cache is not written, and must be right."""

    @rule(freed=picks, forked=few, lengths=st.lists(_prompts, max_size=2), grown=picks)
    def step(self, freed: list[int], forked: list[int], lengths: Sequence[Any], grown: list[int]) -> None:
        """Run one step."""
        super().step(freed, forked, lengths, grown)

    def allocate(self, length: Any) -> list[tuple[int, int]]:
        """Open a sequence. Returns the slots and values of the tokens that were not found in the cache.

        Args:
            length: a drawn prompt, or a number of tokens that no other prompt has.
        """
        if isinstance(length, int):
            tokens = [3 + at for at in range(length)]
        else:
            first, count, then, more = length
            tokens = [first] * count + [then] * more
        handle = self.call("allocate", tokens, blocks=-(-len(tokens) // self.config.block_size))
        if handle is FULL:
            return []
        hit = int(self.call("cached", handle))
        if not 0 <= hit <= len(tokens):
            self.refuse(f"cached({show(handle)}) returned {hit}, the prompt has {len(tokens)} tokens")
        self.record.counts["tokens hit"] += hit
        self.sequences.append((handle, seen(Key(), tokens)))
        return self.written(len(self.sequences) - 1, len(tokens) - hit, None)

    def run(self, writes: Sequence[tuple[int, int]]) -> None:
        """Run the step, and say that its tokens are computed."""
        super().run(writes)
        for handle, _ in self.sequences if "mark_computed" in self.calls else ():
            self.call("mark_computed", handle)

    def next_value(self, values: list[int]) -> int:
        """Return the value of the token to append."""
        return seen(Key(), [len(values) % 3], len(values), values[-1])[0]

    def given(self, value: int) -> tuple[int, ...]:
        """Return the token, for `append`."""
        return (token_of(value),)

    def compared(self, found: int, wanted: int) -> str:
        """Describe a wrong value."""
        if token_of(found) == token_of(wanted):
            return f"reads token {token_of(wanted)}, which was computed after other tokens than those before it here"
        return super().compared(token_of(found), token_of(wanted))
