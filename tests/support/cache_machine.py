"""Runs programs on caches, and compares every byte that a step's compute reads with a plain model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import moody_store
import numpy as np
from cache_rig import MANY, Extra, Rig, Tracked, simulated
from cache_world import FILES, SALTS, Interrupted, World
from interrupts import CountedInterrupt, SignalInterrupt
from late_store import MOODS
from memory_stores import tenant_of

from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    StoreError,
    UnknownSequenceError,
)
from blockyard.layout import ArenaLayout
from blockyard.traces.formats import Hint

WAYS = (
    ("swap_out", "host"),
    ("swap_out", "external"),
    ("swap_in", "device"),
    ("swap_in", "device"),
    ("swap_in", "host"),
)
HINTS: tuple[Hint | None, ...] = ("over", "tool_call", "turn", None, None, None)
GOALS = ("max_id", "free_tail", "dense", "contiguous")


class Op(NamedTuple):
    """One line of a program: four numbers that each operation interprets as it needs, and a seed."""

    name: str
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    seed: int = 0
    interrupt: int = -1  # place of an interrupt; -1 for none


def empty_extents(rig: Rig, op: Op) -> None:
    """Empty extents of some page classes for others, as many as can be."""
    wanted = [(op.a + at * op.d) % 7 if op.d % 3 == 0 else 0 for at in range(rig.manager.num_page_classes)]
    with suppress(InvalidArgumentError):
        # Nothing moves if not all of them can be emptied.
        for number in range(12, 0, -1):
            if rig.manager.defrag.run("extents", number, wanted=wanted, max_moves=op.c % 8):
                break


class Machine(World):
    """Runs operations one by one."""

    def run(self, op: Op) -> None:
        """Run one operation, and check the invariants."""
        self.random.seed(op.seed)
        self.clock.now += 0.003
        rig = self.rigs[op.seed % len(self.rigs)]
        self.interrupt = None
        if op.interrupt >= 0:
            self.error = MemoryError if op.seed & 1 else KeyboardInterrupt
            self.interrupt = CountedInterrupt(op.interrupt, FILES, self.error)
            if self.config.signals:
                self.error, self.interrupt = KeyboardInterrupt, SignalInterrupt(1e-6 * (op.interrupt + 1))
        if op.name not in self.without:
            with simulated(self.clock), suppress(Interrupted):
                getattr(self, "do_" + op.name)(rig, op)
        rig.manager.check()
        self.check_quotas()
        if op.name in {"step", "free", "drain"}:
            self.check_device_quotas(rig)

    def pick(self, rig: Rig, number: int) -> Tracked | None:
        return rig.sequences[number % len(rig.sequences)] if rig.sequences else None

    def on_device(self, rig: Rig, op: Op) -> list[Tracked]:
        """Pick sequences, mostly ones on the device."""
        if op.seed % 16 == 0:
            return rig.sequences
        return [s for s in rig.sequences if not s.lost and rig.manager.tier(s.handle) == "device"]

    def prompt(self, op: Op) -> tuple[list[int], bytes | None, tuple[Extra, ...]]:
        """Return a prompt, its salt and extras; prompts of a family share a prefix."""
        size = self.config.block_size
        length = 1 + op.a % (9 * size if op.a & 1024 else 4 * size)
        tokens = [100 * (op.b % 7 // 3) + i // 2 for i in range(length)]
        if op.b % 4 == 0:
            tokens[-1] = 90 + op.b % 5
        start = (0, length - 1, length + 1)[op.d // 512 % 3]  # some in the last, partial block, or in tokens to come
        extra = (start, 1 + op.d // 2048 % 6, (b"cat", b"dog")[op.c // 32 % 2])
        return tokens, SALTS[op.c % len(SALTS)], () if op.c // 8 % 4 else (extra,)

    @staticmethod
    def hashed(rig: Rig, prompt: list[int], salt: bytes | None, extras: tuple[Extra, ...]) -> Any:
        """Return the arguments of a call that takes a prompt."""
        if not extras:
            return (prompt,), {"salt": salt}
        return (rig.manager.prefix.hash(prompt, salt=salt, extras=extras),), {}

    def do_allocate(self, rig: Rig, op: Op) -> None:
        prompt, salt, extras = self.prompt(op)
        chunk = 1 + op.d // 8 % 4 if op.d % 8 == 0 else None
        if any(kind == "recurrent" for _, kind, _ in rig.groups) and len(prompt) > self.config.block_size:
            chunk = chunk or len(prompt)
        given, key = self.hashed(rig, prompt, salt, extras)
        fit = rig.manager.can_allocate(*given, **key, chunk_tokens=chunk)
        if op.b % 2:
            given, key = (prompt,), {"salt": salt, "extras": extras}
        made = self.attempt(rig, lambda: rig.manager.allocate(*given, **key, chunk_tokens=chunk))
        if made is None:
            assert not fit, f"can_allocate says {fit.status}, allocate {self.refused}"
            self.check_refusal(rig, prompt, salt, extras, chunk)
            return
        assert fit or chunk, f"can_allocate says no, with {fit.blocks} of {fit.free}, and allocate succeeds"
        length = rig.manager.num_tokens(made)
        sequence = Tracked(int(made), salt, self.seed_of(salt, rig), extras)
        sequence.add(prompt[:length])
        sequence.rest, sequence.noted = prompt[length:], length
        sequence.written = sequence.found = made.cached_tokens
        self.counts["hits"] += made.cached_tokens
        rig.prompts, rig.hits = rig.prompts + 1, rig.hits + made.cached_tokens
        rig.sequences.append(sequence)
        self.record_prompt(rig, sequence, prompt)

    def do_allocate_count(self, rig: Rig, op: Op) -> None:
        length = 1 + op.a % (5 * self.config.block_size)
        made = self.attempt(rig, lambda: rig.manager.allocate(counts=[length]))
        if made is not None:
            sequence = Tracked(int(made[0]), None, self.seed_of(None, rig))
            sequence.add(self.fresh(length))
            rig.sequences.append(sequence)

    def fresh(self, count: int) -> list[int]:
        self.unknown -= count
        return list(range(self.unknown, self.unknown + count))

    def do_append(self, rig: Rig, op: Op) -> None:
        batch = chosen(self.on_device(rig, op), op.a, 3)
        lookahead = op.d % 4 if op.d & 256 else 0
        if not batch:
            return
        if any(sequence.rest for sequence in batch):
            self.append_chunk(rig, next(sequence for sequence in batch if sequence.rest), op)
            return
        count = op.b % 4 + (op.b // 64 % 3 == 0)
        drafted = min(op.d // 512 % 4, max(count - 1, 0))
        handles = [sequence.handle for sequence in batch]
        named = op.c % 3 and count
        ids = [op.c // 8 % 3] * (count * len(batch)) if named else None
        ahead = {"lookahead": lookahead, "draft_tokens": drafted}
        fit = self.attempt(rig, lambda: rig.manager.can_append(handles, count, **ahead))
        slots = self.attempt(rig, lambda: rig.manager.append(handles, count, token_ids=ids, **ahead))
        if fit is not None:
            assert slots is not None or not fit, f"can_append says {fit.status}, append {self.refused}"
            assert slots is None or fit, f"can_append says {fit.status}, and append succeeds"
        if slots is None:
            return
        for sequence in batch:
            assert not sequence.lost, f"sequence {sequence.handle} was lost, and append is accepted"
            if named and sequence.noted == len(sequence.tokens):
                sequence.noted += count
            sequence.add([op.c // 8 % 3] * count if named else self.fresh(count))
            sequence.drafts, sequence.drafted = lookahead, drafted

    def append_chunk(self, rig: Rig, sequence: Tracked, op: Op) -> None:
        with suppress(BlockyardError):
            count = rig.manager.next_chunk(sequence.handle, 1 + op.b % 5)
            if not count:
                return
            if self.attempt(rig, lambda: rig.manager.append(sequence.handle, count)) is not None:
                sequence.add(sequence.rest[:count])
                sequence.noted += count
                sequence.drafted = 0
                del sequence.rest[:count]

    def do_note(self, rig: Rig, op: Op) -> None:
        """Pass the ids of tokens that were appended without ids, if they are next."""
        sequence = self.pick(rig, op.a)
        if sequence is None or sequence.rest:
            return
        # No other sequence has these tokens, so they keep their values.
        ids = [4_000_000 - token for token in takewhile(_is_unknown, sequence.tokens[sequence.noted :])][: 1 + op.b % 3]
        with suppress(BlockyardError):
            rig.manager.prefix.note_tokens(sequence.handle, ids, len(ids))
            sequence.tokens[sequence.noted : sequence.noted + len(ids)] = ids
            sequence.noted += len(ids)

    def do_fork(self, rig: Rig, op: Op) -> None:
        sequence = self.pick(rig, op.a)
        if sequence is None or sequence.rest or len(rig.sequences) > 24:
            return
        count = op.b % 3
        made = self.attempt(rig, lambda: rig.manager.fork(sequence.handle, count))
        if made is not None:
            assert not sequence.lost
            rig.sequences += [sequence.child(int(handle)) for handle in made]

    def do_swarm(self, rig: Rig, op: Op) -> None:
        """Let more sequences share blocks than a block can have leases, and move them off the device one by one."""
        sequence = self.pick(rig, op.a)
        if self.config.host < MANY or sequence is None or sequence.rest:
            return
        handles = self.attempt(rig, lambda: rig.manager.fork(sequence.handle, 33_000))
        if handles is None:
            return
        with suppress(BlockyardError):
            for handle in handles:
                rig.manager.swap_out(handle)
        if rig.manager.tier(handle) == rig.manager.tier(sequence.handle):  # it was rejected
            assert np.array_equal(rig.manager.block_table(handle), rig.manager.block_table(sequence.handle))
        rig.manager.check()
        rig.manager.free(handles)

    def do_fork_prefix(self, rig: Rig, op: Op) -> None:
        sequence = self.pick(rig, op.a)
        if sequence is None or sequence.rest:
            return
        size = self.config.block_size
        shared = op.b % 5 * size
        if self.config.slides:  # a child's window need not include tokens that its parent has not computed yet
            shared = min(shared, sequence.written // size * size)
        length = shared + op.c % 5
        made = self.attempt(rig, lambda: rig.manager.fork(sequence.handle, shared_tokens=shared, num_tokens=length))
        if made is not None:
            child = sequence.child(int(made), shared)
            child.add(self.fresh(length - shared))
            rig.sequences.append(child)

    def do_truncate(self, rig: Rig, op: Op) -> None:
        sequence = self.pick(rig, op.a)
        if sequence is None or sequence.rest:
            return
        length = max(0, len(sequence.tokens) - op.b % 7)
        if self.attempt(rig, lambda: rig.manager.truncate(sequence.handle, length) or True):
            sequence.cut(length)
            sequence.drafts = sequence.drafted = 0

    def do_free(self, rig: Rig, op: Op) -> None:
        self.free(rig, chosen(rig.sequences, op.a, 2), HINTS[op.b % len(HINTS)])

    def do_hint(self, rig: Rig, op: Op) -> None:
        prompt, salt, extras = self.prompt(op)
        given, key = self.hashed(rig, prompt, salt, extras)
        hint = HINTS[op.seed % 4]
        before = rig.manager.stats()
        if hint is None:
            with suppress(InvalidArgumentError):
                rig.manager.prefix.hint(*given, f"hint {op.a}", **key)
                raise AssertionError("an unknown hint is accepted")
            assert rig.manager.stats() == before
        else:
            cached = rig.manager.prefix.hint(*given, hint, **key)
            assert cached % self.config.block_size == 0
            assert cached <= len(prompt)
            assert rig.manager.stats().hinted_turns[hint] - before.hinted_turns[hint] in (0, 1)

    def do_stale(self, rig: Rig, op: Op) -> None:
        """Check that every call rejects a freed handle."""
        if not rig.freed:
            return
        handle = rig.freed[-1 - op.a % len(rig.freed)]
        calls: list[Callable[[int], Any]] = [
            rig.manager.append, rig.manager.free, rig.manager.tier, rig.manager.block_table, rig.manager.mark_computed,
            rig.manager.swap_out, rig.manager.swap_in, rig.manager.fork, lambda h: rig.manager.truncate(h, 0),
        ]  # fmt: skip
        try:
            calls[op.b % len(calls)](handle)
        except UnknownSequenceError:
            return
        raise AssertionError(f"handle {handle} was freed, and call {op.b % len(calls)} takes it")

    def do_swap(self, rig: Rig, op: Op) -> None:
        verb, to = WAYS[op.b % len(WAYS)]
        batch = rig.sequences
        if op.d % 8:  # those that can move so
            tier = "device" if verb == "swap_out" else "external" if to == "host" else ("host", "external")[op.c % 2]
            batch = [sequence for sequence in batch if rig.manager.tier(sequence.handle) == tier]
        batch = chosen(batch, op.a, 3)
        if not batch:
            return
        handles = [sequence.handle for sequence in batch]
        can: Any = rig.manager.can_swap_out if verb == "swap_out" else rig.manager.can_swap_in
        move: Any = rig.manager.swap_out if verb == "swap_out" else rig.manager.swap_in
        fit = self.attempt(rig, lambda: can(handles, to))
        done = self.attempt(rig, lambda: move(handles, to) or True)
        if fit is None:
            return
        assert done or not fit, f"can_{verb} says {fit.status}, {verb} {self.refused}"
        if to != "device":
            assert fit or not done, f"can_{verb} says {fit.status}, and {verb} to the {to} succeeds"
        elif done and fit:
            again = rig.manager.can_append(handles, 1)
            assert again, f"can_swap_in promised the next token room, can_append says {again.blocks} of {again.free}"

    def do_offload(self, rig: Rig, op: Op) -> None:
        if self.config.prefix == "host" and self.config.host:
            rig.manager.prefix.offload(1 + op.a % 6)
            if op.b % 2:
                rig.manager.prefix.expect(op.b % 12)

    def do_defragment(self, rig: Rig, op: Op) -> None:
        tables = self.tables(rig)
        empty_extents(rig, op)
        goal = GOALS[op.a % len(GOALS)]
        number = 1 + op.b % (4 if goal == "contiguous" else 12)
        cached: Any = ("move", "drop", "exchange")[op.d % 3]
        with suppress(InvalidArgumentError):
            rig.manager.defrag.run(goal, number, max_moves=op.c % 8, cached=cached)  # type: ignore[arg-type]
        assert tables == self.tables(rig), "a table changes before its moves have landed"

    def do_resize(self, rig: Rig, op: Op) -> None:
        least = self.config.device // 2
        blocks = least + op.a % (self.config.most - least + 1)
        layout, size = rig.cache.layout, {"blocks": blocks}
        if isinstance(layout, ArenaLayout) and len(layout.pages) > 1:
            size = {"device_bytes": (blocks + 8) * max(layout.block_bytes)}
        with suppress(InvalidArgumentError):
            self.risky(rig, lambda: rig.cache.resize(**size))

    def do_give_back(self, rig: Rig, op: Op) -> None:
        self.risky(rig, rig.cache.give_back)

    def do_mark(self, rig: Rig, op: Op) -> None:
        for sequence in chosen(rig.sequences, op.a, 3):
            self.mark(rig, sequence)

    def do_pin(self, rig: Rig, op: Op) -> None:
        if not self.config.prefix or self.config.slides:
            return
        sequence = self.pick(rig, op.a)
        if sequence is None:
            return
        made = self.attempt(rig, lambda: rig.manager.pins.pin(sequence.handle))
        if made is not None:
            table = rig.manager.block_table(sequence.handle).tolist()
            self.note_pin(rig, made, [table.index(block) for block in rig.manager.pins.blocks(made)], sequence.values)

    def do_pin_prompt(self, rig: Rig, op: Op) -> None:
        if not self.config.prefix or self.config.slides:
            return
        prompt, *key = self.prompt(op)
        given, salt = self.hashed(rig, prompt, *key)
        made = self.attempt(rig, lambda: rig.manager.pins.pin_prompt(*given, **salt))
        if made is not None:
            values = self.model(prompt, *key, rig).values
            self.note_pin(rig, made[0], range(made[1] // self.config.block_size), values)

    def do_unpin(self, rig: Rig, op: Op) -> None:
        if rig.pins:
            pin, _, _ = rig.pins.pop(op.a % len(rig.pins))
            rig.manager.pins.unpin(pin)

    def do_priority(self, rig: Rig, op: Op) -> None:
        batch = chosen(rig.sequences, op.a, 3)
        if batch and self.config.prefix:
            rig.manager.prefix.set_priority([sequence.handle for sequence in batch], op.b % 16)

    def do_quota(self, rig: Rig, op: Op) -> None:
        if self.config.prefix:
            manager, salt, blocks = rig.manager, SALTS[op.a % len(SALTS)], op.b % 8 if op.b % 3 else None
            if manager.num_page_classes == 1 or blocks is None:
                self.attempt(rig, lambda: manager.prefix.set_quota(salt, blocks))
            else:
                size = manager.pool().block_stride or manager.pool().block_bytes
                self.attempt(rig, lambda: manager.prefix.set_quota(salt, num_bytes=blocks * size))

    def do_reset(self, rig: Rig, op: Op) -> None:
        if self.config.prefix and not op.a % 4:
            rig.manager.prefix.reset()

    def do_load(self, rig: Rig, op: Op) -> None:
        if self.config.jobs:
            prompt, *key = self.prompt(op)
            given, salt = self.hashed(rig, prompt, *key)
            job = rig.manager.prefix.store_jobs.begin_load(*given, 1 + op.d % 6, **salt)
            rig.loads += [job] * bool(len(job))
            self.note_contents(rig, self.model(prompt, *key, rig), len(prompt))

    def do_end_load(self, rig: Rig, op: Op) -> None:
        if rig.loads:
            self.end_load(rig, rig.loads.pop(op.a % len(rig.loads)), op.b)

    def do_write(self, rig: Rig, op: Op) -> None:
        if self.config.jobs:
            job = rig.manager.prefix.store_jobs.begin_write(1 + op.a % 6)
            rig.writes += [job] * bool(len(job))

    def do_end_write(self, rig: Rig, op: Op) -> None:
        if rig.writes:
            self.end_write(rig, rig.writes.pop(op.a % len(rig.writes)), op.b)

    def do_prefetch(self, rig: Rig, op: Op) -> None:
        if rig.prefixes is None:
            return
        prompt, *key = self.prompt(op)
        prefixes = rig.prefixes
        for cut in range(0, 1 + op.d % 3 * 2, 2):  # several prompts that begin alike, at the same time
            given, salt = self.hashed(rig, prompt[: max(1, len(prompt) - cut)], *key)
            fetch = self.risky(rig, partial(prefixes.prefetch, *given, **salt))
            rig.fetches = [*rig.fetches, fetch][-6:]

    def do_store_poll(self, rig: Rig, op: Op) -> None:
        if rig.prefixes is not None:
            self.risky(rig, rig.prefixes.poll)

    def do_store_quota(self, rig: Rig, op: Op) -> None:
        if rig.prefixes is not None:
            size, prefixes, salt = rig.prefixes.store.bytes_per_block, rig.prefixes, SALTS[op.a % len(SALTS)]
            num_bytes = op.b % 12 * size + op.c % size if op.b % 3 else None
            with suppress(StoreError):
                self.risky(rig, lambda: prefixes.set_quota(salt, num_bytes))
                if self.config.threads:  # puts are in flight
                    return
                found = None if num_bytes is None else (len(self.medium.held(tenant_of(salt))), num_bytes // size)
                assert prefixes.quota(salt) == (found and (found[0] * size, found[1] * size))

    def do_forget(self, rig: Rig, op: Op) -> None:
        """Change the weights: blocks computed with the old ones must not be found."""
        often = self.config.threads  # the two caches briefly have different weights
        if rig.prefixes is None or (len(self.rigs) > 1 and not often) or (op.a % 4 and not often):
            return
        if op.b % 2 or often:
            self.free(rig, rig.sequences[:])
            self.drain(rig)
        prefixes, weights = rig.prefixes, self.weights + (op.b // 2 % 3 > 0)  # new ones, or those of another cache
        revision = f"{weights}" if self.config.threads else None
        with suppress(StoreError):
            try:
                has_forgotten = self.risky(rig, lambda: prefixes.forget(revision))
            except Interrupted:
                if not self.config.threads:
                    raise
                has_forgotten = prefixes.forget(revision)  # by then the store may already use these weights
            if has_forgotten:
                rig.weights = self.weights = weights if self.config.threads else self.weights + 1

    def do_mood(self, rig: Rig, op: Op) -> None:
        stores = rig.stores()
        if stores and self.config.faulty_stores:
            store = stores[op.a % len(stores)]
            moods = moody_store.MOODS if self.config.threads else MOODS
            mood = moods[op.b % len(moods)]
            if mood == "good":
                store.release()
            store.mood = mood

    def do_time(self, rig: Rig, op: Op) -> None:
        self.clock.now += (0.05, 0.3, 0.6, 11.0)[op.a % 4] if op.b % 16 else 700.0
        if self.config.threads:  # including the time of transfers in flight
            rig.disturbed = True

    def do_scrape(self, rig: Rig, op: Op) -> None:
        if rig.scrapes is not None:
            rig.scrapes.scrape()

    def do_restart(self, rig: Rig, op: Op) -> None:
        """End the process, or kill it while it writes; then let another one open the same prefix store."""
        is_writing = any(store.is_writing for store in rig.stores())
        if op.b % (2 if is_writing else 16):
            return
        if is_writing or op.a % 4 == 3:
            for store in rig.stores():
                store.kill()
        elif op.a % 4 == 0:
            self.settle(rig)
        rig.cache.close()
        self.rigs[self.rigs.index(rig)] = self._open()

    def do_step(self, rig: Rig, op: Op) -> None:
        prefetch = op.a % 8 == 0 and not self.config.slides
        self.step(
            rig,
            by_layer=op.b % 2 == 0,
            prefetch=prefetch,
            raises=op.c % 32 == 0 and "raise" not in self.without,
            marks=op.d % 4 == 0,
        )

    def do_poll(self, rig: Rig, op: Op) -> None:
        self.take(rig, self.risky(rig, rig.cache.poll))

    def do_drain(self, rig: Rig, op: Op) -> None:
        try:
            ended = self.risky(rig, rig.cache.drain)
        except Interrupted:
            ended = []
        self.take(rig, ended)
        self.drain(rig)


def chosen(sequences: list[Tracked], number: int, most: int) -> list[Tracked]:
    """Return some of them without repeats; often one."""
    count = (1 + number // 7 % most) * bool(sequences)
    return list(dict.fromkeys(sequences[(number + 3 * i) % len(sequences)] for i in range(count)))


def _is_unknown(token: int) -> bool:
    return token < 0
