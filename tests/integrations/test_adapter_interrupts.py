"""An exception at any place of an engine adapter leaves no block lost, no transfer open, and no wrong byte."""

from __future__ import annotations

import hashlib
import select
from collections import Counter
from collections.abc import Callable
from typing import Any

import engine_drivers
import numpy as np
import pytest
import torch
from adapter_calls import ERRORS, Caller, every, settled, swept
from cache_program import no_descriptor_left, own_threads
from engine_drivers import FaultyStore
from interrupts import Interrupt

from blockyard.integrations.nano import BlockManager
from blockyard.stores import register

SIZE, BLOCKS = 4, 8
PATIENCE = 300.0

register("faulty")(FaultyStore)


# ---- nano engines ----


class Sequence:
    def __init__(self, prompt: list[int]) -> None:
        self.token_ids = list(prompt)
        self.block_table: list[int] = []
        self.num_cached_tokens = self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)


class NanoEngine(Caller):
    """Prompts that are computed, grow, leave, and come back from the host; all their bytes are checked in each step."""

    def __init__(self, interrupt: Interrupt) -> None:
        super().__init__(interrupt)
        self.kv_cache = torch.zeros(2, 1, BLOCKS, SIZE, 1, 1, dtype=torch.int64)
        self.blocks = BlockManager(BLOCKS, SIZE, kv_cache=self.kv_cache, host_blocks=BLOCKS, moves=4)
        self.running: list[Sequence] = []

    def run(self) -> None:
        first, second, third = ([base, *range(base, base + count)] for base, count in ((0, 8), (100, 8), (200, 9)))
        one, two = self.admit(first), self.admit(second)
        self.decode(7)
        self.leave(one)
        self.check()
        three = self.admit(third)  # evicts what the first has left
        self.decode(2)
        self.leave(two)
        self.leave(three)
        one = self.admit(first)
        assert one.num_cached_tokens or self.interrupt.where
        self.decode(1)
        self.call(self.blocks.defragment, "free_tail", 2)
        self.check()
        self.leave(one)
        self.end()

    def admit(self, prompt: list[int]) -> Sequence:
        seq = Sequence(prompt)
        self.compute(seq)
        self.running.append(seq)
        self.check()
        return seq

    def compute(self, seq: Sequence) -> None:
        ended = False
        while not ended:
            cached = self.call(self.blocks.can_allocate, seq)
            assert cached >= 0
            ended, _ = self.attempt(self.blocks.allocate, seq, int(cached))
        self.write(seq, seq.num_cached_tokens)
        seq.num_scheduled_tokens = len(seq) - seq.num_cached_tokens
        self.note(seq)

    def note(self, seq: Sequence) -> None:
        """End a step; a sequence that has lost its blocks in it is computed again in the next."""
        self.call(self.blocks.hash_blocks, seq)
        seq.num_cached_tokens += seq.num_scheduled_tokens

    def decode(self, steps: int) -> None:
        for step in range(steps):
            for seq in list(self.running):
                seq.token_ids.append(1000 + step)
                if not self.call(self.blocks.can_append, seq):
                    self.preempt(seq)
                    continue
                self.call(self.blocks.may_append, seq)
                self.write(seq, len(seq) - 1)
                seq.num_scheduled_tokens = 1
                self.note(seq)
            self.check()

    def preempt(self, seq: Sequence) -> None:
        assert self.interrupt.where
        self.call(self.blocks.deallocate, seq)
        self.compute(seq)

    def leave(self, seq: Sequence) -> None:
        self.call(self.blocks.deallocate, seq)
        assert (seq.block_table, seq.num_cached_tokens) == ([], 0)
        self.running.remove(seq)

    def write(self, seq: Sequence, first: int) -> None:
        self.check_tokens(seq, first)
        for place in range(first, len(seq)):
            self.slot(seq, place)[:] = content(seq.token_ids[: place + 1])

    def slot(self, seq: Sequence, place: int) -> torch.Tensor:
        return self.kv_cache[:, 0, seq.block_table[place // SIZE], place % SIZE, 0, 0]

    def check_tokens(self, seq: Sequence, count: int) -> None:
        for place in range(count):
            assert self.slot(seq, place)[1] == content(seq.token_ids[: place + 1]), "a wrong byte"

    def check(self) -> None:
        """As an engine before each step: who has no room is preempted; what the others have is right."""
        for seq in list(self.running):
            if not self.call(self.blocks.can_append, seq):
                self.preempt(seq)
        for seq in self.running:
            self.check_tokens(seq, len(seq))
        manager = self.blocks.manager
        manager.check()
        assert manager.stats().open_tickets == []
        assert manager.stats().sequences == len(self.running)
        assert manager.stats().pinned_blocks["device"] == 0

    def end(self) -> None:
        self.check()
        assert self.blocks.free_block_ids == list(range(BLOCKS))
        full = self.admit(list(range(300, 300 + SIZE * BLOCKS)))
        assert sorted(full.block_table) == list(range(BLOCKS))
        self.leave(full)
        self.check()
        assert self.blocks.manager.pool("device").num_free == BLOCKS
        assert self.blocks.manager.pool("host").num_free == BLOCKS


def content(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:7], "little")


@pytest.mark.parametrize("most", every(40))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_a_nano_block_manager_loses_no_block(error: type[BaseException], most: int):
    def run(interrupt: Interrupt) -> None:
        with interrupt.installed():
            NanoEngine(interrupt).run()

    assert swept(("integrations/nano.py",), run, error, most) > 60


def test_copies_that_an_interrupted_call_has_decided_are_made_before_blocks_change_hands():
    def run(interrupt: Interrupt) -> None:
        with interrupt.installed():
            NanoEngine(interrupt).run()

    survey = Interrupt(("integrations/nano.py",))
    run(survey)
    places = [(place, seen) for place, seen in survey.seen.items() if place.code.co_name == "_offload"]
    assert places
    for place, seen in places:
        for count in range(1, seen + 1):
            run(Interrupt(survey.files, KeyboardInterrupt, place, count))


# ---- engines that keep objects in a prefix store ----


class LMCacheEngine(Caller):
    """Operations of each kind; each that was begun ends once, and loads bring the right bytes or none."""

    keys = ("a", "b", "c")

    def __init__(self, interrupt: Interrupt, module: Any) -> None:
        super().__init__(interrupt)
        FaultyStore.media.clear()
        self.connector = module.BlockyardConnector(
            url="faulty://lmcache", kv_dtype="float16", part="4KiB", revision="a"
        )
        random = np.random.default_rng(0)
        self.data = [random.integers(0, 256, 9000, dtype=np.uint8) for _ in self.keys]
        self.begun: list[int] = []
        self.ended: Counter[int] = Counter()
        self.found: dict[int, list[bool]] = {}

    def run(self) -> None:
        submit = self.connector
        self.wait(self.begin(submit.submit_batch_set, self.keys, [memoryview(row) for row in self.data]))
        self.load()
        self.wait(self.begin(submit.submit_batch_delete, ["a"]))
        self.wait(self.begin(submit.submit_batch_exists, self.keys))
        whole = []
        for _ in range(3):
            stored = self.wait(self.begin(submit.submit_batch_set, self.keys, [memoryview(row) for row in self.data]))
            whole.append(all(stored + self.load()))
        assert any(whole[1:]), "what was not stored or found before is not now"
        store = submit._objects._store
        settled(lambda: not (store.stats().pending_bytes or store._batches.open), "the store keeps memory for a batch")
        last = [self.begin(submit.submit_batch_exists, self.keys) for _ in range(4)]
        self.call(submit.close)
        submit.close()
        self.drain()
        assert set(self.ended) >= {*self.begun, *last}
        assert len(self.ended) <= len(self.begun) + 1, "only one call was interrupted after it had begun"

    def begin(self, submit: Callable[..., int], *arguments: object) -> int:
        self.begun.append(self.call(submit, *arguments))
        return self.begun[-1]

    def wait(self, ticket: int) -> list[bool]:
        while ticket not in self.ended:
            assert select.select([self.connector.event_fd()], [], [], PATIENCE)[0], "nothing ended"
            self.drain()
        return self.found[ticket]

    def drain(self) -> None:
        for ticket, ok, error, found in self.call(self.connector.drain_completions):
            self.ended[ticket] += 1
            self.found[ticket] = found
            assert ok != bool(error)
            assert self.ended[ticket] == 1, "an operation has ended twice"

    def load(self) -> list[bool]:
        rows = np.full((len(self.keys), 9000), 7, np.uint8)
        found = self.wait(self.begin(self.connector.submit_batch_get, self.keys, [memoryview(row) for row in rows]))
        for ok, row, data in zip(found, rows, self.data, strict=True):
            assert not ok or np.array_equal(row, data), "a wrong byte"
        return found


@pytest.mark.parametrize("most", every(25))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_lmcaches_connector_ends_every_operation_once(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], most: int
):
    monkeypatch.setattr(FaultyStore, "fault", "")

    def run(interrupt: Interrupt) -> None:
        before = own_threads()
        with interrupt.installed():
            LMCacheEngine(interrupt, module).run()
        settled(lambda: not own_threads() - before, "a thread is left")

    with engine_drivers.lmcache() as module, no_descriptor_left():
        files = ("lmcache/connector.py", "stores/adapters/objects.py", "stores/adapters/jobs.py")
        assert swept(files, run, error, most) > 60
