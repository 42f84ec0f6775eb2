"""`OwnManagerMachine`: a block manager with its own calls and exceptions, over simulated memory.

`OwnCacheMachine` is for one with a prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from blockyard._core import Pairs
from blockyard.errors import MappingError
from blockyard.testing.interfaces import Config
from blockyard.testing.machines.record import RecordingMachine, show
from blockyard.testing.machines.values import Key, seen, token_of
from blockyard.testing.machines.watch import common
from blockyard.testing.memory import SimulatedMemory

__all__ = ["OwnCacheMachine", "OwnManagerMachine"]

FULL: Final = object()
"""What `OwnManagerMachine.call` returns if the manager has too few free blocks."""

KEPT: Final = 8
"""Number of freed sequences whose tokens new prompts repeat."""
JUDGED: Final = 100
"""Number of due tokens from which a run is judged by how many of them hit: at least half."""

_picks = st.lists(st.integers(0, 63), max_size=4)
_few = st.lists(st.integers(0, 63), max_size=1)
# Two runs of a token, and their lengths: blocks with the same tokens have other ones before them. The picks are earlier
# sequences whose tokens replace these runs: those of the first one but the last few, then those of the second one.
_prompts = st.tuples(
    st.integers(0, 2), st.integers(1, 6), st.integers(0, 2), st.integers(0, 6), st.lists(st.integers(0, 63), max_size=2)
)


class OwnManagerMachine(RecordingMachine):
    """Random steps on a manager whose calls the caller names; made by `manager_machine`.

    A step frees, forks, opens and grows sequences, and may free one of these. It executes the copies, writes the new
    tokens to the slots that the block tables name, and reads every token of every sequence back. A call may raise
    `full` only if the free blocks do not suffice, and must then change no block table.

    Attributes:
        make_manager: makes the manager under test.
        make_memory: makes the memory that copies run on; override it to inject a fault.
        calls: the manager's calls by name: `allocate`, `free`, `block_table`, and those it has of `append`, `fork` and
            `copies`.
        full: what the manager raises when it has too few free blocks.
    """

    make_manager: ClassVar[Callable[[Config], Any]]
    make_memory: ClassVar[Callable[[Config], SimulatedMemory]] = SimulatedMemory
    calls: ClassVar[dict[str, Callable[..., Any]]]
    full: ClassVar[tuple[type[BaseException], ...]]
    gets: ClassVar[dict[str, str]] = {
        "allocate": "the manager and the number of tokens; the token ids if `cached` is given",
        "append": "the manager and the sequence; and the token id if `cached` is given",
        "copies": "the manager",
    }

    @initialize(block_size=st.integers(1, 4), device_blocks=st.integers(2, 12))
    def start(self, block_size: int, device_blocks: int) -> None:
        """Create manager and memory."""
        self.config = self.record.config = Config(block_size, device_blocks)
        self.manager = type(self).make_manager(self.config)
        self.memory = type(self).make_memory(self.config)
        self.sequences: list[tuple[Any, list[int]]] = []  # handles with the tokens that must be read back
        self.next_token = 0
        self.replaced: dict[int, int] = {}  # for blocks that have come in place of a shared one in this step: that one
        self.copied: list[tuple[int, int]] = []  # the copies of this step

    @rule(freed=_picks, forked=_few, lengths=st.lists(st.integers(1, 10), max_size=2), grown=_picks, dropped=_few)
    def step(
        self, freed: list[int], forked: list[int], lengths: Sequence[Any], grown: list[int], dropped: Sequence[int] = ()
    ) -> None:
        """Run one step; those `dropped` are freed after they have grown, before the copies are executed."""
        self.record.next_step()
        self.replaced.clear()
        for pick in freed:
            if self.sequences:
                self.free(pick % len(self.sequences))
        for pick in forked if "fork" in self.calls else ():
            self.fork(pick)
        writes = [written for length in lengths[:1] for written in self.allocate(length)]
        for at in dict.fromkeys(pick % len(self.sequences) for pick in grown if self.sequences):
            writes += self.append(at) if "append" in self.calls else []
        for pick in dropped:
            if self.sequences:
                writes = self.drop(pick % len(self.sequences), writes)
        writes += [written for length in lengths[1:] for written in self.allocate(length)]
        self.run(writes)

    @precondition(lambda self: self.sequences and "append" in self.calls)
    @rule(count=st.integers(1, 6), picks=st.lists(st.integers(0, 63), min_size=1, max_size=4), forked=_few)
    def decode(self, count: int, picks: list[int], forked: list[int]) -> None:
        """Run some steps that only append, after a fork to both of its sequences."""
        parents = [pick % len(self.sequences) for pick in forked]
        grown = [*parents, *[-1 for _ in forked], *picks]
        for number in range(count):
            self.step(freed=[], forked=[] if number else parents, lengths=[], grown=grown)

    def teardown(self) -> None:
        """Free everything; then all blocks fit into one sequence again."""
        if self.failed or not hasattr(self, "manager"):
            return
        self.record.next_step()
        while self.sequences:
            self.free(0)
        self.allocate(self.config.device_blocks * self.config.block_size)
        while self.sequences:
            self.free(0)

    # ---- calls ----

    def free(self, at: int) -> None:
        """Free a sequence."""
        handle, _ = self.sequences.pop(at)
        self.call("free", handle)

    def drop(self, at: int, writes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Free a sequence in the middle of a step. Returns the writes that are left."""
        self.free(at)
        used = {block for table in self.tables() for block in table}
        return [(slot, token) for slot, token in writes if slot // self.config.block_size in used]

    def fork(self, pick: int) -> None:
        """Open a sequence that shares all blocks of another."""
        if self.sequences:
            handle, tokens = self.sequences[pick % len(self.sequences)]
            child = self.call("fork", handle, blocks=int(len(tokens) % self.config.block_size > 0))
            if child is not FULL:
                self.sequences.append((child, list(tokens)))

    def allocate(self, length: Any) -> list[tuple[int, int]]:
        """Open a sequence. Returns its slots and tokens."""
        handle = self.call("allocate", length, blocks=-(-length // self.config.block_size))
        if handle is FULL:
            return []
        self.sequences.append((handle, self.fresh(length)))
        return self.written(len(self.sequences) - 1, length, None)

    def append(self, at: int) -> list[tuple[int, int]]:
        """Append a token to a sequence. Returns its slot and the token."""
        handle, tokens = self.sequences[at]
        last = len(tokens) // self.config.block_size
        starts = len(tokens) % self.config.block_size == 0
        others = {block for i, (other, _) in enumerate(self.sequences) if i != at for block in self.table(other)}
        needed = int(starts or self.table(handle)[last] in others)
        before, value = self.table(handle), self.next_value(at)
        slot = self.call("append", handle, *self.given(value), blocks=needed)
        if slot is FULL:
            return []
        for old, new in zip(before, self.table(handle), strict=False):
            if old != new:
                self.replaced[new] = old
        tokens.append(value)
        return self.written(at, 1, slot)

    def written(self, at: int, count: int, told: Any) -> list[tuple[int, int]]:
        """Return slots and tokens of the last tokens of a sequence; `told` is the slot that `append` returned."""
        handle, tokens = self.sequences[at]
        size, table = self.config.block_size, self.table(handle)
        if len(table) * size < len(tokens):
            self.refuse(f"block_table(sequence={handle!r}) is {show(table)}, {len(tokens)} tokens need more blocks")
        places = [table[i // size] * size + i % size for i in range(len(tokens) - count, len(tokens))]
        if told is not None and np.atleast_1d(told).tolist() != places:
            self.refuse(f"append(sequence={handle!r}) returned slot {show(told)}, its block table names {places[0]}")
        return list(zip(places, tokens[len(tokens) - count :], strict=True))

    def run(self, writes: Sequence[tuple[int, int]]) -> None:
        """Execute the copies, write the tokens, and read every sequence back."""
        try:
            if "copies" in self.calls:
                self.copied = self.copies()
                for pair in self.copied:
                    self.memory.transfer("copy", Pairs("device", "device", np.array([pair])))
                self.record.counts["copies"] += len(self.copied)
            self.memory.write([slot for slot, _ in writes], [token for _, token in writes])
            for handle, tokens in self.sequences:
                table = self.table(handle)
                found = self.memory.read(table, len(tokens))
                if found != tokens:
                    at = next(i for i, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b)
                    self.refuse(
                        f"sequence {handle!r}: position {at} (block {table[at // self.config.block_size]} of "
                        f"{show(table)}) {self.compared(found[at], tokens[at])}"
                        f"{self.sharers(table, at)}{self.missing(table, at)}"
                    )
        except MappingError as error:
            self.refuse(str(error))

    def copies(self) -> list[tuple[int, int]]:
        """Return the copies on write since the last call."""
        given = self.call("copies")
        try:
            ids = [(int(src), int(dst)) for src, dst in given]
        except (TypeError, ValueError):
            self.refuse(f"copies() returned {show(given)}, must be pairs of block ids (from, to)")
        if ids:
            self.record.note(f"copies() -> {show(ids)}")
        return ids

    def missing(self, table: list[int], at: int) -> str:
        """Describe the copy on write of this step that the block of a position is part of, if any."""
        block = table[at // self.config.block_size]
        found = [(old, new) for new, old in self.replaced.items() if block in (old, new)]
        if not found:
            return ""
        old, new = found[-1]
        wanted = "" if (old, new) in self.copied else f" without ({old}, {new})"
        returned = f"copies() returned {self.copied}{wanted}" if "copies" in self.calls else "`copies` is not given"
        return f"; append put block {new} in place of block {old} in step {self.record.step}, and {returned}"

    def sharers(self, table: list[int], at: int) -> str:
        """Name the sequences that use the block of a position."""
        block = table[at // self.config.block_size]
        users = [repr(handle) for handle, _ in self.sequences for other in self.table(handle) if other == block]
        return f"; block {block} is in the tables of sequences {', '.join(users)}" if len(users) > 1 else ""

    # ---- helpers ----

    def call(self, name: str, *args: Any, blocks: int = 0) -> Any:
        """Call the manager, which may be full if it needs `blocks`."""
        shown = ", ".join(show(arg) for arg in args)
        before = self.tables()
        free = self.config.device_blocks - len({block for table in before for block in table})
        try:
            result = self.calls[name](self.manager, *args)
        except self.full as error:
            text = f"{name}({shown}) raised {type(error).__name__}"
            if blocks <= free:
                self.refuse(f"{text} ({error}); it needs {blocks} blocks, {free} are in no block table")
            self.record.note(text)
            self.record.counts["refusals"] += 1
            if self.tables() != before:
                self.refuse(f"{text} and changed block tables: {show(before)} became {show(self.tables())}")
            return FULL
        except Exception as error:
            self.record.note(f"{name}({shown}) raised {type(error).__name__}")
            text = f"step {self.record.step}: {name}({shown}) raised {type(error).__name__}: {error}"
            raise AssertionError(text + self.hint(name, error, lacks=blocks > free)) from error
        self.record.counts[name] += name != "copies"
        if name != "copies":
            self.record.note(f"{name}({shown})" + ("" if result is None else f" -> {show(result)}"))
        if result is None and name in ("allocate", "fork"):
            self.refuse(f"{name}({shown}) returned None, must return the new sequence")
        return result

    def hint(self, name: str, error: Exception, *, lacks: bool) -> str:
        """Return what a call gets or should have raised, where its exception may come from that."""
        if isinstance(error, TypeError):
            return f"; `{name}=` gets {self.gets.get(name, 'the manager and the sequence')}"
        kinds = " or ".join(kind.__name__ for kind in self.full)
        return f"; when blocks run out it must raise {kinds}, see `full`" if lacks else ""

    def tables(self) -> list[list[int]]:
        """Return the block tables of all sequences."""
        return [self.table(handle) for handle, _ in self.sequences]

    def table(self, handle: Any) -> list[int]:
        """Return the block table of a sequence."""
        try:
            given: Iterable[Any] = self.calls["block_table"](self.manager, handle)
            return [int(block) for block in given]
        except Exception as error:
            text = f"block_table({show(handle)}) raised {type(error).__name__}"
            self.record.note(text)
            raise AssertionError(f"step {self.record.step}: {text}: {error}") from error

    def next_value(self, at: int) -> int:  # noqa: ARG002 (for a cache)
        """Return what is stored for the token to append to a sequence."""
        return self.fresh(1)[0]

    def given(self, value: int) -> tuple[int, ...]:  # noqa: ARG002 (for a cache)
        """Return what `append` is given beside the sequence."""
        return ()

    def compared(self, found: int, wanted: int) -> str:
        """Describe a wrong value."""
        return f"reads token {found}, wanted {wanted}"

    def fresh(self, count: int) -> list[int]:
        """Return tokens that no other position holds."""
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def refuse(self, text: str) -> NoReturn:
        """Fail the example."""
        raise AssertionError(f"step {self.record.step}: {text}")


class OwnCacheMachine(OwnManagerMachine):
    """`OwnManagerMachine` whose prompts begin alike: what was found in the cache is not written, and must be right.

    Attributes:
        last_missed: the last prompt that should have hit more, and the steps up to it.
    """

    last_missed: ClassVar[tuple[str, str] | None] = None

    @initialize(block_size=st.integers(1, 4), device_blocks=st.integers(2, 24))
    def start(self, block_size: int, device_blocks: int) -> None:
        """Create manager and memory."""
        super().start(block_size, device_blocks)
        self.closed: list[list[int]] = []  # what the last sequences that were freed held

    @rule(freed=_picks, forked=_few, lengths=st.lists(_prompts, max_size=2), grown=_picks, dropped=_few)
    def step(
        self, freed: list[int], forked: list[int], lengths: Sequence[Any], grown: list[int], dropped: Sequence[int] = ()
    ) -> None:
        """Run one step."""
        super().step(freed, forked, lengths, grown, dropped)

    def free(self, at: int) -> None:
        """Free a sequence, and remember its tokens."""
        self.closed = [*self.closed[1 - KEPT :], self.sequences[at][1]]
        super().free(at)

    def drop(self, at: int, writes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Free a sequence in the middle of a step. A manager that publishes by itself has told others of its blocks."""
        blocks = self.table(self.sequences[at][0])
        if "mark_computed" not in self.calls and any(slot // self.config.block_size in blocks for slot, _ in writes):
            return writes
        return super().drop(at, writes)

    def allocate(self, length: Any) -> list[tuple[int, int]]:
        """Open a sequence. Returns the slots and values of the tokens that were not found in the cache.

        Args:
            length: a drawn prompt, or a number of tokens that no other prompt has.
        """
        tokens = [3 + at for at in range(length)] if isinstance(length, int) else self.prompt(*length)
        due = self.due(seen(Key(), tokens))
        handle = self.call("allocate", tokens, blocks=-(-len(tokens) // self.config.block_size))
        if handle is FULL:
            return []
        hit = int(self.call("cached", handle))
        if due:
            self.judged(tokens, due, hit)
        if not 0 <= hit <= len(tokens):
            self.refuse(f"cached({show(handle)}) returned {hit}, the prompt has {len(tokens)} tokens")
        values, table, size = seen(Key(), tokens), self.table(handle), self.config.block_size
        users = {block: other for other, _ in self.sequences for block in self.table(other)}
        own = table[-(-hit // size) :] if hit < len(tokens) - 1 else []  # a last token may be computed again
        for block in own:
            if block in users:
                self.refuse(
                    f"cached({show(handle)}) returned {hit}, so the step writes to block {block} of {show(table)}, "
                    f"which is in the table of sequence {show(users[block])}, too: either cached left out a hit, or a "
                    f"block in use was given out"
                )
        self.record.counts["tokens hit"] += hit
        self.sequences.append((handle, values))
        return self.written(len(self.sequences) - 1, len(tokens) - hit, None)

    def due(self, values: list[int]) -> int:
        """Return how many tokens of a prompt the blocks hold that a freed sequence has computed.

        They are full blocks before the last token.
        """
        size, computed = self.config.block_size, self.memory.tiers["device"]
        best = max((common(values[:-1], text) for text in self.closed), default=0)
        ends = range(size, best + 1, size)
        return size * sum(1 for _ in takewhile(lambda end: (computed == values[end - size : end]).all(1).any(), ends))

    def judged(self, tokens: list[int], due: int, hit: int) -> None:
        """Count what of a due prompt was found."""
        self.record.counts["tokens due"] += due
        self.record.counts["due hit"] += min(due, hit)
        if hit < due:
            sentence = (
                f"step {self.record.step}: allocate({show(tokens)}) hit {hit} tokens, blocks hold the first {due} of a "
                f"sequence that was freed"
            )
            self.missed = (self.record.headline(sentence), self.record.timeline())

    def teardown(self) -> None:
        """Free everything, and keep the last prompt that should have hit more."""
        super().teardown()
        if hasattr(self, "missed"):
            type(self).last_missed = self.missed

    @classmethod
    def begin(cls) -> None:
        """Begin a run."""
        super().begin()
        cls.last_missed = None

    @classmethod
    def covered(cls) -> str:
        """Return how often the run did what, and whether its hits can be judged."""
        due, said = cls.totals["tokens due"], super().covered()
        return said if due >= JUDGED else f"{said}\nhits: not judged ({due} tokens due, {JUDGED} needed)"

    @classmethod
    def judge(cls) -> AssertionError | None:
        """A prefix cache must have hits."""
        due, hit = cls.totals["tokens due"], cls.totals["due hit"]
        if due < JUDGED or hit * 2 >= due or cls.last_missed is None:
            return None
        sentence, steps = cls.last_missed
        return AssertionError(
            f"allocate has hit {hit} of {due} tokens of prompts that freed sequences had computed, and blocks still "
            f"held\n{sentence}\n\n{steps}"
        )

    def prompt(self, first: int, count: int, then: int, more: int, likes: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt; see `_prompts`."""
        texts = [values for _, values in self.sequences] + self.closed
        like = [[token_of(value) for value in texts[pick % len(texts)]] for pick in likes if texts]
        begin = like[0][: max(1, len(like[0]) + 1 - count)] if like else [first] * count
        rest = like[1][len(begin) :] if len(like) > 1 else []
        return begin + (rest[:more] or [then] * more)

    def run(self, writes: Sequence[tuple[int, int]]) -> None:
        """Run the step, and say that its tokens are computed."""
        super().run(writes)
        for handle, _ in self.sequences if "mark_computed" in self.calls else ():
            self.call("mark_computed", handle)

    def next_value(self, at: int) -> int:
        """Return the value of the token to append. Most forks of a sequence differ in it."""
        _, values = self.sequences[at]
        return seen(Key(), [(len(values) + at) % 3], len(values), values[-1])[0]

    def given(self, value: int) -> tuple[int, ...]:
        """Return the token, for `append`."""
        return (token_of(value),)

    def compared(self, found: int, wanted: int) -> str:
        """Describe a wrong value."""
        if token_of(found) == token_of(wanted):
            return f"reads token {token_of(wanted)}, which was computed after other tokens than those before it here"
        return super().compared(token_of(found), token_of(wanted))
