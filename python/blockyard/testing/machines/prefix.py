"""`PrefixMachine`: a manager with a prefix cache, next to a reference model and simulated memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from blockyard._core import BlockManager, HashedPrompt, Pairs, PrefixCaching, StepDecision
from blockyard.errors import BlockyardError, OutOfBlocksError, SequenceStateError
from blockyard.testing.interfaces import Config, PrefixManagerLike, TierName
from blockyard.testing.machines.partial import lacking
from blockyard.testing.machines.record import RecordingMachine
from blockyard.testing.machines.side_by_side import MAX_OPEN
from blockyard.testing.machines.strategies import configs
from blockyard.testing.memory import LOST, LateMemory
from blockyard.testing.prefix_model import EventReplay, Extra, ReferencePrefixCache

__all__ = ["PrefixMachine", "prefix_machine"]

TIERS: tuple[TierName, ...] = ("device", "host", "external")
WAYS = (("swap_out", "host"), ("swap_out", "external"), ("swap_in", "device"), ("swap_in", "host"))

_pick = st.integers(0, 63)
_picks = st.lists(_pick, min_size=1, max_size=4)
_salts = st.sampled_from([None, None, b"", b"tenant"])
_extra = st.tuples(st.integers(0, 24), st.integers(1, 6), st.sampled_from([b"cat", b"dog"]))
_extras: st.SearchStrategy[list[Extra]] = st.builds(list) | st.lists(_extra, min_size=1, max_size=2)
# Prompts of a family are prefixes of each other, except for their last token.
_prompt = st.tuples(st.integers(0, 20), st.integers(0, 1), st.integers(0, 2))
_prompts = st.lists(_prompt, min_size=1, max_size=3)
_losses: st.SearchStrategy[list[int]] = st.builds(list) | st.builds(list) | st.lists(_pick, min_size=1, max_size=2)


@dataclass(slots=True, eq=False)
class _PrefixSequence:
    """One sequence: its salt, extras and tokens, and the blocks that must be found while it holds them."""

    handle: int
    salt: bytes | None
    extras: list[Extra]
    tokens: list[int]  # those never given to the manager are negative and unique
    noted: int  # leading tokens that the manager knows, unless it no longer follows the sequence
    published: int = 0
    lost: bool = False

    def values(self) -> list[int]:
        """Return what a model writes for each token: it depends on the salt, and on all tokens and extras up to it."""
        state, values = hashlib.sha256(repr(self.salt).encode()), []
        for at, token in enumerate(self.tokens):
            state.update(repr(sorted(extra for extra in self.extras if extra[0] == at)).encode())
            state.update(token.to_bytes(8, "little", signed=True))
            values.append(int.from_bytes(state.digest()[:7], "little"))
        return values


class PrefixMachine(RecordingMachine):
    """Random engine steps with prompts that share prefixes.

    Hits must be tokens computed under the same salt and with the same extras, and read back correctly. Blocks that a
    sequence published must be found while it holds them. Counters, free blocks and events must agree. Tokens computed
    from garbage are garbage, so a block that is published too early reads back wrong. Transfers run as late as the
    decisions allow, and some fail.

    Attributes:
        make_manager: makes the manager under test, with the given event capacity; `prefix_machine` sets it.
        make_memory: makes the memory that decisions run on; override it to inject a fault.
    """

    make_manager: ClassVar[Callable[[Config, int], PrefixManagerLike]]
    make_memory: ClassVar[Callable[[Config], LateMemory]] = LateMemory

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[_PrefixSequence] = []
        self.running: dict[int, tuple[StepDecision, list[Pairs]]] = {}
        self.pending: dict[int, _PrefixSequence] = {}  # by slot of this step's tokens
        self.dirty: set[int] = set()  # handles whose tokens got slots in this step
        self.unknown = 0
        self.replay = EventReplay()

    @initialize(config=configs(device_blocks=st.integers(3, 16)), events=st.sampled_from([3, 10_000, 10_000]))
    def start(self, config: Config, events: int) -> None:
        """Create manager, model and memory."""
        self.record.config = config
        self.record.note(f"the manager keeps {events} events")
        made = type(self).make_manager(config, events)
        if missing := lacking(made, vars(PrefixManagerLike)):
            raise AssertionError(
                f"{type(made).__name__} lacks {missing}: a manager without them is tested under a scheduler, by "
                f"scheduler_machine(make, add=..., step=..., manager=...)"
            )
        self.manager = self.record.watch(made)
        self.model = ReferencePrefixCache(config.block_size)
        self.memory = type(self).make_memory(config)

    # ---- rules ----

    @rule(prompts=_prompts, salt=_salts, preempted=st.booleans(), extras=_extras)
    def allocate_prompts(
        self,
        prompts: list[tuple[int, int, int]],
        salt: bytes | None,
        *,
        preempted: bool = False,
        extras: Sequence[Extra] = (),
    ) -> None:
        """Admit prompts, all or none, and check their cached tokens; hits of preempted ones are not counted.

        All have the same extras, some beyond them.
        """
        extras = sorted(extras) if hasattr(self.manager.prefix, "hash") else []
        batch = [[family + i // 7 for i in range(length)] + [last] for length, family, last in prompts]
        cached = [self.lookup(prompt, salt, extras) for prompt in batch]
        cached_blocks = set(self.replay.blocks)
        try:
            if extras:
                hashed = [self.hashed(prompt, salt, extras) for prompt in batch]
                found = self.manager.allocate(*hashed, preempted=preempted)
            else:
                found = self.manager.allocate(*batch, salt=salt, preempted=preempted)
        except OutOfBlocksError as error:
            _same("free blocks", error.free <= self.manager.pool("device").num_blocks, expected=True)
            return
        sequences = found if isinstance(found, tuple) else (found,)
        for prompt, sequence, before in zip(batch, sequences, cached, strict=True):
            handle, hit = int(sequence), sequence.cached_tokens
            _at_most(
                f"cached tokens of a prompt of {len(prompt)} under salt {salt!r} with extras {extras}",
                before,
                self.model.most(prompt, salt=salt, extras=extras),
            )
            _same(f"hit tokens of sequence {handle}", hit, self.model.usable(before, len(prompt)))
            self.record.counts["tokens hit"] += hit
            if not preempted:
                self.model.count(prompt, hit)
            table = self.manager.block_table(handle)[: hit // self.model.block_size].tolist()
            if self.replay.complete and not set(table) <= cached_blocks:
                raise AssertionError(f"hit blocks {table}, the events say that {sorted(cached_blocks)} are cached")
            tracked = _PrefixSequence(handle, salt, list(extras), prompt, len(prompt), published=len(table))
            self.sequences.append(tracked)
            self.write(tracked, hit)

    @precondition(lambda self: self.sequences)
    @rule(
        picks=_picks,
        count=st.integers(0, 5),
        named=st.sampled_from(["now", "later", "never"]),
        token=st.integers(0, 2),
    )
    def append(self, picks: list[int], count: int, named: str, token: int) -> None:
        """Append tokens to a batch; give the manager their ids now, later by `note`, or never."""
        batch = self.chosen(picks)
        handles = [sequence.handle for sequence in batch]
        try:
            if named == "now":
                slots = self.manager.append(handles, count, token_ids=[token] * (count * len(batch)))
            else:
                slots = self.manager.append(handles, count)
        except BlockyardError:
            return
        for sequence, mine in zip(batch, slots.reshape(len(batch), count).tolist(), strict=True):
            if named == "now" and sequence.noted == len(sequence.tokens):
                sequence.noted += count
            sequence.tokens += [self.fresh() if named == "never" else token for _ in range(count)]
            self.pending.update(dict.fromkeys(mine, sequence))
            self.dirty.add(sequence.handle)

    @precondition(lambda self: self.sequences and hasattr(self.manager.prefix, "note_tokens"))
    @rule(picks=_picks, most=st.integers(1, 5))
    def note(self, picks: list[int], most: int) -> None:
        """Pass the ids of tokens that were appended without ids to the manager; too many ids must be refused."""
        batch = self.chosen(picks)
        unknown = [list(takewhile(lambda token: token >= 0, s.tokens[s.noted :]))[:most] for s in batch]
        handles, counts = [s.handle for s in batch], np.array([len(ids) for ids in unknown], np.uint32)
        self.manager.prefix.note_tokens(handles, [token for ids in unknown for token in ids], counts)
        for sequence, ids in zip(batch, unknown, strict=True):
            sequence.noted += len(ids)

    @precondition(lambda self: self.sequences)
    @rule(picks=_picks)
    def mark_computed(self, picks: list[int]) -> None:
        """Publish computed tokens; refused while a step has yet to write some of them."""
        batch = self.chosen(picks)
        refused = any(sequence.handle in self.dirty for sequence in batch)
        try:
            self.manager.mark_computed([sequence.handle for sequence in batch])
        except SequenceStateError:
            _same("refused", found=True, expected=refused)
            return
        _same("refused", found=False, expected=refused)
        for sequence in batch:
            self.model.publish(sequence.tokens[: sequence.noted], salt=sequence.salt, extras=sequence.extras)
            sequence.published = len(self.manager.prefix.common_blocks([sequence.handle]))
            if sequence.lost or self.manager.tier(sequence.handle) != "device":
                sequence.published = 0

    @rule(prompt=_prompt, salt=_salts, extras=_extras)
    def prefill(self, prompt: tuple[int, int, int], salt: bytes | None, extras: Sequence[Extra] = ()) -> None:
        """A rare scenario: a prompt is admitted, computed and published."""
        before = len(self.sequences)
        self.allocate_prompts([prompt], salt, extras=extras)
        self.step([])
        if len(self.sequences) > before:
            self.mark_computed([before])

    @precondition(lambda self: self.sequences)
    @rule(pick=_pick, count=st.integers(1, 2))
    def fork(self, pick: int, count: int) -> None:
        """Share all blocks of a sequence."""
        (parent,) = self.chosen([pick])
        try:
            handles = self.manager.fork(parent.handle, count)
        except SequenceStateError:
            _same("lost", parent.lost, expected=True)
            return
        for handle in handles.tolist():
            text = (parent.salt, parent.extras, list(parent.tokens))
            self.sequences.append(_PrefixSequence(handle, *text, parent.noted, parent.published))
            if parent.handle in self.dirty:
                self.dirty.add(handle)

    @precondition(lambda self: self.sequences)
    @rule(pick=_pick, dropped=st.integers(0, 6))
    def truncate(self, pick: int, dropped: int) -> None:
        """Truncate sequences."""
        (sequence,) = self.chosen([pick])
        length = max(0, len(sequence.tokens) - dropped)
        try:
            self.manager.truncate(sequence.handle, length)
        except SequenceStateError:
            _same("refused", sequence.lost or sequence.handle in self.dirty, expected=True)
            return
        sequence.tokens = sequence.tokens[:length]
        sequence.noted = min(sequence.noted, length)
        sequence.published = min(sequence.published, length // self.model.block_size)

    @precondition(lambda self: self.sequences)
    @rule(picks=_picks)
    def free(self, picks: list[int]) -> None:
        """Free sequences; tokens that only they would have read are not computed."""
        batch = self.chosen(picks)
        self.manager.free([sequence.handle for sequence in batch])
        self.sequences = [sequence for sequence in self.sequences if sequence not in batch]
        held = self.held("device")
        self.pending = {slot: s for slot, s in self.pending.items() if slot // self.model.block_size in held}

    @precondition(lambda self: self.sequences)
    @rule(picks=_picks, way=st.sampled_from(WAYS), settled=st.booleans())
    def move(self, picks: list[int], way: tuple[str, Any], settled: bool) -> None:  # noqa: FBT001 (drawn)
        """Move a batch between tiers, in the middle of a step or with nothing in flight."""
        if settled:
            self.rest()
        batch = self.chosen(picks)
        handles = [sequence.handle for sequence in batch]
        verb, to = way
        try:
            (self.manager.swap_out if verb == "swap_out" else self.manager.swap_in)(handles, to)
        except BlockyardError:
            return
        for sequence in batch:
            sequence.published = 0

    @rule(
        goal=st.sampled_from(["max_id", "free_tail", "dense", "contiguous"]),
        number=st.integers(1, 12),
        most=st.integers(0, 6),
        cached=st.sampled_from(["move", "drop", "exchange"]),
    )
    def defragment(
        self,
        goal: Literal["max_id", "free_tail", "dense", "contiguous"],
        number: int,
        most: int,
        cached: Literal["move", "drop", "exchange"],
    ) -> None:
        """Decide moves within the device, which take effect only when their ticket is completed."""
        free, tables = self.manager.pool("device").num_free, self.tables()
        report = self.manager.defrag.run(goal, number, max_moves=most, cached=cached)
        _at_most("moves", report.planned, most)
        _same("free device blocks", self.manager.pool("device").num_free, free - report.planned)
        _same("tables", self.tables(), tables)

    @rule(lost=_losses)
    def step(self, lost: list[int]) -> None:
        """Take the decision, begin its transfers, and compute the step's tokens."""
        self.record.next_step()
        for ticket in sorted(self.running)[: 1 - MAX_OPEN]:
            self.end(ticket)
        decision = self.manager.take_decision()
        size = self.model.block_size
        readers = [s for s in self.sequences if s.handle in self.dirty and self.manager.tier(s.handle) == "device"]
        needed = {int(block) for s in readers for block in self.manager.block_table(s.handle)}
        needed |= {slot // size for slot in self.pending}
        single = [Pairs(p.src, p.dst, ids[None]) for _, p in decision.transfers() for ids in p.ids]
        losses = [single[n % len(single)] for n in sorted({n % len(single) for n in lost})] if single else []
        self.running[decision.ticket] = (decision, losses)
        self.memory.submit(decision, needed, losses)
        for sequence in readers:
            self.compute(sequence)
        self.pending, self.dirty = {}, set()
        self.compare_free()

    @rule(pick=_pick)
    def end_ticket(self, pick: int) -> None:
        """End a ticket: complete it, or fail it if part of it was lost."""
        if self.running:
            self.end(sorted(self.running)[pick % len(self.running)])

    @rule()
    def rest(self) -> None:
        """End the step and all tickets."""
        self.step([])
        for ticket in sorted(self.running, reverse=True):
            self.end(ticket)

    @rule()
    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, if nothing is in use."""
        idle = self.manager.pool("device").num_free == self.manager.pool("device").num_blocks
        _same("reset", self.manager.prefix.reset(), idle)
        if idle:
            self.model.computed.clear()
            _same("cached blocks", self.manager.stats().cached_blocks["device"], 0)

    # ---- what must hold ----

    @invariant()
    def books_agree(self) -> None:
        """The manager is consistent, and its counters and events match its answers."""
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        stats = self.manager.stats()
        self.model.check(stats)
        self.replay.apply(self.manager.prefix.take_events())
        if self.replay.complete:
            _same("cached blocks", len(self.replay.blocks), stats.cached_blocks["device"])
        for s in self.sequences:
            _same(f"tokens of sequence {s.handle}", self.manager.num_tokens(s.handle), len(s.tokens))
            known = s.tokens[: s.published * self.model.block_size]
            if known and not s.lost:
                _at_most(
                    f"tokens of sequence {s.handle} published under salt {s.salt!r}",
                    len(known),
                    self.lookup([*known, 0], s.salt, s.extras),
                )

    def teardown(self) -> None:
        """End all transfers, read every token of every sequence, and free everything."""
        if self.failed or not hasattr(self, "manager"):
            return
        self.rest()
        self.books_agree()
        for sequence in self.sequences:
            if not sequence.lost:
                self.read_back(sequence)
        self.manager.free([sequence.handle for sequence in self.sequences])
        for tier in TIERS:
            _same(
                f"free {tier} blocks at the end", self.manager.pool(tier).num_free, self.manager.pool(tier).num_blocks
            )

    # ---- helpers ----

    def hashed(self, prompt: list[int], salt: bytes | None, extras: Sequence[Extra]) -> HashedPrompt:
        """Return a prompt with its salt and extras."""
        hashed: HashedPrompt = self.manager.prefix.hash(prompt, salt=salt, extras=extras)
        return hashed

    def lookup(self, prompt: list[int], salt: bytes | None, extras: Sequence[Extra]) -> int:
        """Return how many tokens at the start of a prompt are cached."""
        prefix = self.manager.prefix
        hit = prefix.lookup(self.hashed(prompt, salt, extras)) if extras else prefix.lookup(prompt, salt=salt)
        return int(hit.tokens)

    def tables(self) -> list[tuple[TierName, list[int]]]:
        """Return tier and block table of each sequence."""
        handles = [sequence.handle for sequence in self.sequences]
        return [(self.manager.tier(handle), self.manager.block_table(handle).tolist()) for handle in handles]

    def chosen(self, picks: Sequence[int]) -> list[_PrefixSequence]:
        """Return distinct live sequences for some numbers."""
        return [self.sequences[at] for at in dict.fromkeys(pick % len(self.sequences) for pick in picks)]

    def fresh(self) -> int:
        """Return a token that no other sequence has."""
        self.unknown -= 1
        return self.unknown

    def held(self, tier: TierName) -> set[int]:
        """Return the blocks named by tables."""
        there = [s for s in self.sequences if self.manager.tier(s.handle) == tier]
        return {int(block) for s in there for block in self.manager.block_table(s.handle)}

    def write(self, sequence: _PrefixSequence, first: int) -> None:
        """Record that this step computes the tokens of a sequence from `first` on."""
        slots = self.manager.slot_mapping(sequence.handle, first, len(sequence.tokens))
        self.pending.update(dict.fromkeys(slots.tolist(), sequence))
        self.dirty.add(sequence.handle)

    def compute(self, sequence: _PrefixSequence) -> None:
        """Write the tokens of a sequence that this step computes, each from the tokens before it."""
        size = self.model.block_size
        table = self.manager.block_table(sequence.handle).tolist()
        found, values = self.memory.read(table, len(sequence.tokens)), sequence.values()
        slots = [table[i // size] * size + i % size for i in range(len(values))]
        sound = True
        for slot, value, there in zip(slots, values, found, strict=True):
            if slot in self.pending:
                self.memory.write([slot], [value if sound else LOST])
                del self.pending[slot]
            else:
                sound = sound and value == there

    def compare_free(self) -> None:
        """Check that exactly the blocks that no table names and no transfer uses are free; moves hold no sources."""
        ticket = max(self.running)
        for tier in TIERS:
            used = self.held(tier)
            for decision, _ in self.running.values():
                for kind, pairs in decision.transfers():
                    for side, column in ((pairs.src, 0), (pairs.dst, 1)):
                        if side == tier and (kind, column) != ("move", 0):
                            used |= set(pairs.ids[:, column].tolist())
            _same(
                f"free {tier} blocks after the decision of ticket {ticket}",
                self.manager.pool(tier).num_free,
                self.manager.pool(tier).num_blocks - len(used),
            )

    def end(self, ticket: int) -> None:
        """Finish a ticket's transfers and end it in the manager."""
        self.memory.finish(ticket)
        _, lost = self.running.pop(ticket)
        hit = set(self.manager.complete(ticket, lost).tolist())
        for sequence in self.sequences:
            sequence.lost = sequence.lost or sequence.handle in hit

    def read_back(self, sequence: _PrefixSequence) -> None:
        """Check that every token of a sequence is where its table says."""
        table, tier = self.manager.block_table(sequence.handle), self.manager.tier(sequence.handle)
        found = self.memory.read(table, len(sequence.tokens), tier)
        _same(
            f"sequence {sequence.handle}: tokens read through {tier} blocks {table.tolist()}", found, sequence.values()
        )


def prefix_machine(
    factory: Callable[[Config, int], PrefixManagerLike] | None = None,
) -> type[PrefixMachine]:
    """Make a state machine for a manager with a prefix cache.

    Args:
        factory: makes the manager under test from its sizes and event capacity; defaults to Blockyard's.

    Returns:
        A state machine; its `TestCase` runs under pytest and unittest.

    Example:
        >>> from hypothesis import settings
        >>> from blockyard import BlockManager, PrefixCaching
        >>> from blockyard.testing.machines import prefix_machine, run_state_machine_as_test
        >>> def make(config, events):
        ...     caching = PrefixCaching(max_events=events, eviction="lru")
        ...     return BlockManager(**config.arguments(), prefix_caching=caching)
        >>> machine = prefix_machine(make)
        >>> run_state_machine_as_test(machine, settings=settings(max_examples=2, deadline=None, database=None))
    """
    made = factory or _made
    return type("PrefixMachineOf", (PrefixMachine,), {"make_manager": staticmethod(made)})


def _made(config: Config, events: int) -> BlockManager:
    return BlockManager(**config.arguments(), prefix_caching=PrefixCaching(max_events=events))


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{what}: found {found}, expected {expected}")


def _at_most(what: str, found: int, most: int) -> None:
    if found > most:
        raise AssertionError(f"{what}: found {found}, at most {most}")
