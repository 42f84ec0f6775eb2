"""Caches next to a plain model: compares every byte of a step, checks invariants, and checks for leaks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np
from cache_compute import Compute, cells_of
from cache_rig import LAYERS, Cells, Clock, Config, Extra, Rig, Tracked, simulated
from interrupts import CountedInterrupt, SignalInterrupt
from memory_stores import Quotas, tenant_of
from observed_cache import Recording

from blockyard._core import StoreJob
from blockyard.cache import CacheStep, StepEnd
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError, StoreError
from blockyard.events import export_keys
from blockyard.traces.formats import Hint

T = TypeVar("T")

FILES = (
    "blockyard/cache.py",
    "executor/executor.py",
    "executor/loop.py",
    "executor/parts.py",
    "engine/engine.py",
    "stores/checked_store.py",
    "prefix_store/loads.py",
    "prefix_store/store.py",
    "prefix_store/values.py",
    "prefix_store/writes.py",
    "engine/transfers.py",
    "scheduler/acceptance.py",
    "scheduler/admission.py",
    "scheduler/loading_ahead.py",
    "scheduler/loop.py",
    "scheduler/options.py",
    "scheduler/ranked_queue.py",
    "scheduler/request.py",
    "scheduler/rows.py",
    "scheduler/scheduler.py",
    "scheduler/step.py",
    "scheduler/stop_tokens.py",
    "scheduler/swapping.py",
    "threaded/batches.py",
    "threaded/epochs.py",
    "threaded/keyed_blocks.py",
    "threaded/known_keys.py",
    "threaded/storage.py",
    "threaded/store.py",
    "threaded/stored_values.py",
    "traces/recorder.py",
    "/threading.py",  # whose conditions are entered and left in Python
)
TIERS = ("device", "host", "external")
SALTS = (None, None, None, None, None, None, b"", b"a tenant")
CACHED = 1  # in `Pool.uses`


class Interrupted(Exception):  # noqa: N818
    """A call was interrupted on purpose."""


class World:
    """Caches next to a plain model.

    Args:
        config: sizes and options of the caches.
        without: operations to omit, for instance while a defect is open; `"raise"` for bodies that raise.
    """

    def __init__(self, config: Config, without: Iterable[str] = ()) -> None:
        self.config = config
        self.without = frozenset(without)
        self.random = Random(0)
        self.clock = Clock()
        self.medium = Quotas({})
        self.contents: defaultdict[int, dict[bytes, list[int]]] = defaultdict(dict)  # by weights and key
        self.owners: dict[bytes, tuple[bytes, bytes]] = {}  # tenant and parent, by key
        self.weights = 1
        self.unknown = 0
        self.now = 0
        self.interrupt: CountedInterrupt | SignalInterrupt | None = None
        self.unchecked: list[Compute] = []
        self.error: type[BaseException] = KeyboardInterrupt
        self.counts = {"hits": 0, "cells": 0, "lost": 0, "steps": 0, "interrupts": 0, "loads": 0}
        most = config.max_recorded
        self.recording = Recording(config.block_size, self.clock.monotonic, most) if most else None
        with simulated(self.clock):
            self.rigs = [self._open() for _ in range(config.caches)]

    def _open(self) -> Rig:
        return Rig(self.config, self.random, self.clock, self.medium, self.weights)

    def risky(self, rig: Rig, call: Callable[[], T]) -> T:
        """Make a call that may be interrupted. Raises Interrupted."""
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is None:
            return call()
        rig.disturbed = True
        try:
            with interrupt.armed():
                return call()
        except self.error as error:
            if not interrupt.where:
                raise
            self.counts["interrupts"] += 1
            raise Interrupted(interrupt.where) from error

    def attempt(self, rig: Rig, call: Callable[[], T]) -> T | None:
        """Make a call that the manager may reject; if it does, nothing may have changed."""
        before = self.digest(rig)
        try:
            return call()
        except (OutOfBlocksError, SequenceStateError, InvalidArgumentError) as error:
            after = self.digest(rig)
            assert before == after, f"a refused call changed something: {error}\n{before}\n{after}"
            self.refused = error
            return None

    def digest(self, rig: Rig) -> Any:
        stats = rig.manager.stats().as_dict()
        free = [rig.free_blocks(tier) for tier in TIERS]
        uses = rig.manager.pool("device").uses().tobytes()
        return stats, free, uses

    def check_refusal(
        self, rig: Rig, prompt: list[int], salt: bytes | None, extras: tuple[Extra, ...], chunk: int | None
    ) -> None:
        """Check that a prompt is rejected only if it does not fit: hits in use or leased take no free block."""
        if self.config.slides or chunk:
            return
        rig.follow()
        hashed = rig.manager.prefix.hash(prompt, salt=salt, extras=extras)
        size, hit = self.config.block_size, rig.manager.prefix.lookup(hashed)
        places = {key: block for (tier, block), key in rig.cached.items() if tier == "device"}
        keys = export_keys(prompt, block_size=size, salt=salt, extras=extras)[: hit.tokens // size]
        hits = [places[key] for key in keys if key in places]
        uses = rig.manager.pool("device").uses()
        wanted = -(-len(prompt) // size) - sum(uses[block] != CACHED for block in hits)
        free = rig.free_blocks("device")
        assert wanted > free, f"a prompt that takes {wanted} of {free} free blocks is refused: {self.refused}"

    def seed_of(self, salt: bytes | None, rig: Rig | None = None) -> int:
        return ((rig or self.rigs[0]).weights * 1_000 + (0 if salt is None else 1 + len(salt))) * 65_537

    def free(self, rig: Rig, batch: list[Tracked], hint: Hint | None = None) -> None:
        rig.manager.free([sequence.handle for sequence in batch], hint=hint)
        for sequence in batch:
            self.record_end(rig, sequence)
        rig.sequences = [sequence for sequence in rig.sequences if sequence not in batch]
        rig.freed += [sequence.handle for sequence in batch]

    def record_prompt(self, rig: Rig, sequence: Tracked, prompt: list[int]) -> None:
        """Record a prompt, like an engine without a `Scheduler`."""
        if (recording := self.recording) is not None:
            name, values = (rig, sequence.handle), self.model(prompt, sequence.salt, sequence.extras, rig).values
            request = recording.add(name, values)
            call = partial(recording.recorder.add, name, recording.keys_of(values), len(prompt))
            request.is_certain = self.tried(rig, call, again=recording.is_first(request))

    def record_end(self, rig: Rig, sequence: Tracked) -> None:
        """Record the end of a sequence, if its prompt was recorded."""
        name, recording = (rig, sequence.handle), self.recording
        if recording is not None and (request := recording.open.get(name)) is not None:
            whole = sequence.child(0)
            whole.add(sequence.rest)
            output = max(0, len(whole.values) - request.input_tokens)
            recording.finish(name, whole.values, range(output, output + 1))
            keys = recording.keys_of(whole.values[:-1])[request.prompt_blocks :]
            self.tried(rig, lambda: recording.recorder.finish(name, output, keys), again=True)

    def tried(self, rig: Rig, call: Callable[[], object], *, again: bool) -> bool:
        """Make a call; if it is interrupted, perhaps repeat it. Return whether it has returned."""
        try:
            self.risky(rig, call)
        except Interrupted:
            if not again and self.random.random() < 0.5:
                return False
            call()
        return True

    def tables(self, rig: Rig) -> list[list[int]]:
        found = []
        for sequence in rig.sequences:
            with suppress(SequenceStateError):  # it is in flight
                found += [rig.manager.block_table(sequence.handle, group).tolist() for group, _, _ in rig.groups]
        return found

    def mark(self, rig: Rig, sequence: Tracked) -> None:
        with suppress(SequenceStateError):
            rig.manager.mark_computed(sequence.handle, sequence.written)
            if self.config.prefix and not self.config.slides:
                self.note_contents(rig, sequence, min(sequence.written, sequence.noted))

    def note_contents(self, rig: Rig, sequence: Tracked, length: int) -> None:
        """Note the contents of a sequence's first blocks, by key."""
        size, parent = self.config.block_size, bytes(32)
        given = {"salt": sequence.salt, "extras": sequence.extras}
        for at, key in enumerate(export_keys(sequence.tokens[:length], block_size=size, **given)):
            self.contents[rig.weights][key] = sequence.values[at * size : (at + 1) * size]
            self.owners[key], parent = (tenant_of(sequence.salt), parent), key

    def model(
        self, tokens: list[int], salt: bytes | None, extras: tuple[Extra, ...], rig: Rig | None = None
    ) -> Tracked:
        """Return the values of a prompt if it were computed, by default by the only cache."""
        made = Tracked(0, salt, self.seed_of(salt, rig), extras)
        made.add(tokens)
        return made

    def note_pin(self, rig: Rig, pin: int, places: Sequence[int], values: list[int]) -> None:
        """Note the contents of pinned blocks, which are at some positions of a sequence."""
        blocks, size = rig.manager.pins.blocks(pin).astype(np.int64), self.config.block_size
        assert len(blocks) == len(places)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        at = (np.array(places, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        # The last block may hold more tokens than a truncated sequence has.
        known = at < len(values)
        rig.pins.append((pin, slots[known], np.array(values, np.int64)[at[known]]))

    def unpin(self, rig: Rig) -> None:
        while rig.pins:
            rig.manager.pins.unpin(rig.pins.pop()[0])

    def check_owners(self, job: StoreJob) -> None:
        """Check that a job names tenant and parent of each block, and has no block before its parent."""
        keys = [key.tobytes() for key in job.keys]
        for at, key in enumerate(keys):
            owner = job.tenants[at].tobytes(), job.parents[at].tobytes()
            assert owner == self.owners.get(key, owner), f"block {at} of {job} is another tenant's or another's child"
            assert owner[1] not in keys[at:], f"block {at} of {job} comes before its parent"

    def check_quotas(self) -> None:
        """Check that no tenant exceeds its quota in the store, and that each block belongs to its tenant."""
        with self.medium.lock:
            self._check_quotas()

    def check_device_quotas(self, rig: Rig) -> None:
        """Check that no tenant exceeds its quota on the device, once nothing holds what hangs on blocks with keys."""
        stats = rig.manager.stats()
        is_idle = not (stats.sequences or stats.leased_blocks["device"] or stats.pinned_blocks["device"])
        for salt in SALTS if is_idle else ():
            held, most = rig.manager.prefix.quota(salt) or (0, None)
            assert most is None or held <= most, f"{salt!r} has {held} of {most} on the device"

    def _check_quotas(self) -> None:
        for salt in SALTS:
            tenant = tenant_of(salt)
            held, found = self.medium.held(tenant), self.medium.quota(tenant)
            assert found is None or found[0] == len(held) <= found[1], f"{salt!r} has {found} in the store"
            for key, parent in held.items():
                assert self.owners.get(key, (tenant, parent)) == (tenant, parent), f"a block in the store is {salt!r}'s"

    def end_load(self, rig: Rig, job: StoreJob, lost: int = 1) -> None:
        """Finish a load: blocks that were ever computed arrive, except for some."""
        self.check_owners(job)
        contents = self.contents[rig.weights]
        landed = [key.tobytes() in contents and (lost + at) % 8 > 0 for at, key in enumerate(job.keys)]
        for key, block, has_landed in zip(job.keys, job.blocks, landed, strict=True):
            if has_landed:
                values = np.array(contents[key.tobytes()], np.int64)
                row = np.zeros((LAYERS, 2, len(values), self.config.head_size), np.int64)
                row[..., 0] = [cells_of(values, layer) for layer in range(LAYERS)]
                rig.cache.engine.write(job.tier, np.array([block]), row.reshape(1, -1).view(np.uint8))
        rig.manager.prefix.store_jobs.end_load(job.job, landed)

    def end_write(self, rig: Rig, job: StoreJob, lost: int = 0) -> None:
        """Check the blocks that were read and that the manager declares valid; the store keeps some of them."""
        self.check_owners(job)
        rows = rig.rows(job.tier, job.blocks)
        if rig.manager.prefix.store_jobs.end_write(job.job):
            contents = self.contents[rig.weights]
            known = [key.tobytes() in contents for key in job.keys]
            values = [value for key in job.keys for value in contents.get(key.tobytes(), ())]
            self.compare(rows[known], values, f"{job.tier} blocks {job.blocks.tolist()} that are written")
        if lost % 4:
            why = (None, "failed", "chain", "refused")[lost % 4]
            rig.manager.prefix.store_jobs.note_unwritten(job, [at % 3 != lost % 3 for at in range(len(job))], why)

    def step(
        self, rig: Rig, *, by_layer: bool = False, prefetch: bool = False, raises: bool = False, marks: bool = False
    ) -> None:
        self.counts["steps"] += 1
        try:
            step = self.risky(rig, lambda: rig.cache.step(by_layer=by_layer, prefetch=prefetch))
        except Interrupted:
            self.give_up_unwritten(rig)
            return
        assert step.decision.ticket not in rig.ended, "a ticket ended before its step"
        rig.open.add(step.decision.ticket)
        if raises:
            with suppress(ZeroDivisionError), step:
                raise ZeroDivisionError
            self.give_up_unwritten(rig)
            return
        self.note_lost(rig, step)
        compute = Compute(rig, step, self.counts)
        compute.launch(by_layer=by_layer)
        rig.streams.fence().synchronize()
        try:
            ended = self.risky(rig, step.finish)
        except Interrupted:
            ended = step.finish()
        self.note_lost(rig, step)
        self.take(rig, ended)
        self.check_late(compute)
        if marks:
            for sequence in rig.sequences:
                self.mark(rig, sequence)

    def check_late(self, *computed: Compute, late: int = 2) -> None:
        """Check what steps have read. On a CUDA device some may still be computing."""
        self.unchecked += computed
        while len(self.unchecked) > (late if self.config.real == "cuda" else 0):
            self.unchecked.pop(0).check()

    def give_up_unwritten(self, rig: Rig) -> None:
        """Free the sequences of a step that did not run: the manager assumes that their tokens were written."""
        self.free(rig, [sequence for sequence in rig.sequences if sequence.written < len(sequence.tokens)])

    def note_lost(self, rig: Rig, step: CacheStep) -> None:
        """Note the sequences that a step reports lost: in its transfers or in those of steps with open tickets."""
        named = {int(handle) for handle in step.lost}
        rig.named |= named
        for sequence in rig.sequences:
            sequence.lost = sequence.lost or sequence.handle in named

    def take(self, rig: Rig, ended: list[StepEnd]) -> None:
        for end in ended:
            assert end.ticket not in rig.ended, f"ticket {end.ticket} ends twice"
            rig.ended.add(end.ticket)
            rig.open.discard(end.ticket)
            lost = {int(handle) for handle in end.lost}
            rig.named -= lost
            if lost:
                harmless = all(store.harmless for store in rig.stores())
                assert rig.disturbed or not harmless, f"ticket {end.ticket} lost {lost}, and nothing has failed"
                self.counts["lost"] += len(lost)
            for sequence in rig.sequences:
                sequence.lost = sequence.lost or sequence.handle in lost

    def drain(self, rig: Rig) -> None:
        """End the step and all tickets, and check that each sequence is intact or was reported lost."""
        self.step(rig)
        self.check_late(late=0)
        for store in rig.stores():
            store.release()
        self.take(rig, rig.cache.drain())
        self.take(rig, rig.cache.poll())
        rig.named.difference_update(rig.freed)
        assert not rig.named, f"a step has named {rig.named} as lost, and no ticket's end has"
        assert not rig.open, f"tickets {rig.open} never end"
        for sequence in rig.sequences:
            self.check_loss(rig, sequence)
        if not self.config.slides:
            self.check_cached(rig)

    def check_loss(self, rig: Rig, sequence: Tracked) -> None:
        try:
            rig.manager.fork(sequence.handle, 0)
        except SequenceStateError as error:
            assert sequence.lost, f"sequence {sequence.handle} is lost, and nobody has named it: {error}"
        else:
            assert not sequence.lost, f"sequence {sequence.handle} was named as lost, and goes on"
            self.read_back(rig, sequence)

    def read_back(self, rig: Rig, sequence: Tracked) -> None:
        """Check a sequence's keys and values in its tier."""
        if self.config.slides or not sequence.written:
            return
        tier, size = rig.manager.tier(sequence.handle), self.config.block_size
        if tier == "external" and self.config.threads and rig.store is not None and not rig.store.harmless:
            return  # the storage may have lost it since
        table = rig.manager.block_table(sequence.handle).astype(np.int64)[: -(-sequence.written // size)]
        self.compare(rig.rows(tier, table), sequence.values[: sequence.written], f"{tier} blocks {table.tolist()}")

    def check_cached(self, rig: Rig) -> None:
        """Check that every findable block has the bytes of its key."""
        rig.follow()
        contents = self.contents[rig.weights]
        for tier in ("device", "host"):
            places = [(block, key) for (at, block), key in rig.cached.items() if at == tier and key in contents]
            if places:
                values = [value for _, key in places for value in contents[key]]
                blocks = np.array([block for block, _ in places], np.int64)
                self.compare(rig.rows(tier, blocks), values, f"cached {tier} blocks {blocks.tolist()}")

    def compare(self, rows: Cells, values: list[int], what: str) -> None:
        for layer in range(LAYERS):
            found = rows[:, layer].transpose(1, 0, 2).reshape(2, -1)[:, : len(values)]
            assert np.array_equal(found, cells_of(np.array(values, np.int64), layer)), f"{what} have other bytes"

    def settle(self, rig: Rig) -> None:
        """Free everything, and check that all blocks of all tiers are free."""
        self.interrupt = None
        self.drain(rig)
        self.free(rig, rig.sequences[:])
        while rig.loads:
            self.end_load(rig, rig.loads.pop())
        while rig.writes:
            self.end_write(rig, rig.writes.pop())
        self.unpin(rig)
        if rig.prefixes is not None:
            prefixes = rig.prefixes
            assert prefixes.wait(60.0), f"{prefixes} never ends its writes"
            assert prefixes.wait(60.0, until=lambda: not prefixes.num_open), f"{prefixes} never ends its prefetches"
            prefixes.poll()
            assert all(fetch.done for fetch in rig.fetches), "a prefetch is not done"
            loads = prefixes._loads
            left = (
                sum(loads._num_unplaced),
                len(loads._reading),
                loads._num_rows - sum(map(loads._rows_of, loads._reads)),
            )
            assert left == (0, 0, 0), f"blocks are being read, and nothing loads: {left}"
        self.drain(rig)
        manager = rig.manager
        self.check_device_quotas(rig)
        leased = manager.stats().leased_blocks
        assert not any(leased.values()), f"leases are left behind: {leased}"
        null = int(any(kind not in {"full_attention", "drafter"} for _, kind, _ in rig.groups))
        pools = {(tier, at): manager.pool(tier, at) for tier in TIERS for at in range(manager.num_page_classes)}
        free = {place: pool.num_free for place, pool in pools.items()}
        wanted = {place: max(0, pool.num_blocks - null * (pool.per_extent or 1)) for place, pool in pools.items()}
        assert free == wanted, f"blocks are left behind: {free} of {wanted} are free"
        progress = manager.defrag.progress()
        assert progress.done, f"the pool never shrinks: {progress}"
        if rig.cache.elastic is not None:
            rig.cache.give_back()
        executor = rig.cache.executor
        assert (executor.num_in_flight, executor.staged_bytes) == (0, 0), executor
        if rig.scrapes is not None:
            self.check_metrics(rig, rig.scrapes.scrape())
        if rig.prefixes is not None and len(self.rigs) == 1:
            assert rig.prefixes.wait(60.0), f"{rig.prefixes} never ends its writes"
            self.forget_at_last(rig)

    def forget_at_last(self, rig: Rig) -> None:
        """Call `forget` with a working store, which may have recovered only a moment ago."""
        prefixes, revision = rig.prefixes, f"{self.weights + 1}" if self.config.threads else None
        assert prefixes is not None
        for _ in range(100):
            with suppress(StoreError):
                assert prefixes.forget(revision), "forget refuses, and nothing is in use"
                self.weights += 1
                rig.weights = self.weights
                return
            self.clock.now += 1.0
            time.sleep(0.01)
        raise AssertionError("a store that works again never forgets")

    def check_metrics(self, rig: Rig, sums: dict[str, float]) -> None:
        """Check that the metrics of an idle cache match what was done with it."""
        assert (sums["sequences"], sums["open_tickets"]) == (0, 0)
        assert (sums["leased_blocks"], sums["pinned_blocks"]) == (0, 0)
        assert sums["used_blocks"] == 0, f"{sums['used_blocks']} blocks are in use"
        assert (sums["prompts_total"], sums["prefix_cache_hits_total"]) == (rig.prompts, rig.hits)

    def finish(self) -> None:
        """End the program."""
        with simulated(self.clock):
            for rig in self.rigs:
                self.settle(rig)
                rig.manager.check()
                rig.cache.close()
            if self.recording is not None:
                self.recording.check()

    def close(self) -> None:
        """Release everything, whatever its state."""
        with simulated(self.clock):
            for rig in self.rigs:
                with suppress(BaseException):
                    rig.cache.close()
        if self.recording is not None:
            self.recording.close()
