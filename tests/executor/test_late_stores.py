"""No byte is computed with before it has arrived: every source of blocks, stores that are late or lose blocks."""

import contextlib
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch
from hazard_machine import model_cells
from simulated_device import SimulatedStore

from blockyard import KVCache, KVLayout, PrefixCaching
from blockyard.cache import CacheStep
from blockyard.demo.demo_model import demo_model
from blockyard.errors import OutOfBlocksError, SequenceStateError
from blockyard.integrations.transformers import Generator
from blockyard.scheduler import Request, Scheduler
from blockyard.stores import Completion, ExternalStore, open_store

LAYERS = 2
BLOCK = 2
LAYOUT = KVLayout("kv_first", LAYERS, BLOCK, num_kv_heads=1, head_size=1, dtype="int64")
SIZE = LAYOUT.bytes_per_block
STEPS = 60
LATE = range(11)


class PromptStore(SimulatedStore):
    """Storage that has its answers at the next poll."""

    def poll(self) -> list[int]:
        while self._step():
            pass
        return super().poll()


class LateStore(ExternalStore):
    """A store whose answers come some polls late, unless somebody waits for them; it loses a share of what it reads."""

    def __init__(self, inner: ExternalStore, late: int, *, lose: float = 0.0) -> None:
        self.inner, self.late, self.lose, self.random = inner, late, lose, Random(late)
        self.polls, self.waits = 0, 0
        self.due: dict[int, int] = {}
        self.ready: list[int] = []

    @property
    def num_slots(self) -> int:
        return self.inner.num_slots

    @property
    def bytes_per_block(self) -> int:
        return self.inner.bytes_per_block

    def submit_write(self, slots, rows):
        return self._note(self.inner.submit_write(slots, rows))

    def submit_read(self, slots, rows=None):
        return self._note(self.inner.submit_read(slots, rows))

    def submit_put(self, keys, rows):
        return self._note(self.inner.submit_put(keys, rows))

    def submit_get(self, keys, rows=None):
        return self._note(self.inner.submit_get(keys, rows))

    def contains(self, keys):
        return self.inner.contains(keys)

    def poll(self) -> list[int]:
        self.polls += 1
        self.ready += self.inner.poll()
        found = [ticket for ticket in self.ready if self.due[ticket] <= self.polls]
        self.ready = [ticket for ticket in self.ready if ticket not in found]
        return found

    def wait(self, ticket, timeout=None):
        self.waits += self.due[ticket] > self.polls
        answer = self.inner.wait(ticket, timeout)
        if not len(answer.rows) or not self.lose:
            return answer
        ok = answer.ok & [self.random.random() >= self.lose for _ in answer.ok]
        answer.rows[~ok] = 0xEE
        return Completion(ticket, ok, answer.rows, ["" if good else "absent" for good in ok])

    def stats(self):
        return self.inner.stats()

    def close(self, timeout: float = 5.0) -> bool:
        return self.inner.close(timeout)

    def _note(self, ticket: int) -> int:
        self.due[ticket] = self.polls + self.late
        return ticket


class Served:
    """Random programs over a `KVCache`, with a plain model that knows each sequence's tokens.

    The body of each step writes the new tokens and reads every token of every sequence that the manager shows, in each
    layer: keys and values must be those of the model.
    """

    def __init__(self, cache: KVCache, seed: int, *, prompts: bool = False) -> None:
        self.cache, self.manager, self.random, self.prompts = cache, cache.manager, Random(seed), prompts
        self.cells = [tensor.view(torch.int64).numpy().reshape(2, -1) for tensor in cache.engine.tensors]
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}  # tokens whose cells were written
        self.lost: set[int] = set()
        self.late: set[int] = set()  # open tickets of prefetches
        self.fetches: list[tuple[list[int], object]] = []
        self.compared, self.refused = 0, 0

    def run(self, *, steps: int = STEPS) -> None:
        calls = [self.admit, self.append, self.append, self.swap_out, self.swap_in, self.swap_in, self.fork, self.free]
        for _ in range(steps):
            for _ in range(self.random.randrange(5)):
                with contextlib.suppress(OutOfBlocksError, SequenceStateError):
                    self.random.choice(calls)()
            self.step(by_layer=self.random.random() < 0.5, prefetch=self.random.random() < 0.5)
            self.manager.check()
        self.note(self.cache.drain())

    def step(self, *, by_layer: bool = False, prefetch: bool = False) -> CacheStep:
        with self.cache.step(by_layer=by_layer, prefetch=prefetch) as step:
            if prefetch and step.decision.prefetch:
                self.late.add(step.decision.ticket)
            self.lost.update(step.lost.tolist())
            for layer in range(LAYERS):
                if by_layer:
                    step.wait_for_layer(layer)
                self.compute(layer)
        self.note(step.ended)
        computed = [handle for handle in self.texts if handle not in self.lost]
        self.computed.update((handle, len(self.texts[handle])) for handle in computed)
        if self.prompts and computed:
            self.manager.mark_computed(computed)
        gone = self.lost.intersection(self.texts)
        if gone:
            self.manager.free(sorted(gone))
            for handle in gone:
                del self.texts[handle]
        self.lost.clear()
        return step

    def note(self, ended) -> None:
        for end in ended:
            self.late.discard(end.ticket)
            self.lost.update(end.lost.tolist())

    def compute(self, layer: int) -> None:
        shown = {}
        for handle, tokens in self.texts.items():
            if handle in self.lost or self.manager.tier(handle) != "device":
                continue
            try:
                table = self.manager.block_table(handle)
            except SequenceStateError:
                assert self.late, "refused, and nothing is prefetched"
                assert self.computed[handle] == len(tokens), "new tokens, and no block table"
                self.refused += 1
                continue
            at = np.arange(len(tokens))
            shown[handle] = table[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
        cells = self.cells[layer]
        for handle, slots in shown.items():
            new = range(self.computed[handle], len(slots))
            cells[:, slots[new.start :]] = model_cells(self.texts[handle][new.start :], new, layer)
        for handle, slots in shown.items():
            right = model_cells(self.texts[handle], range(len(slots)), layer)
            wrong = np.flatnonzero((cells[:, slots] != right).any(axis=0)).tolist()
            assert not wrong, f"sequence {handle}: layer {layer} reads wrong keys or values at positions {wrong}"
            self.compared += len(slots)

    # ---- what a program does ----

    def pick(self) -> int:
        return self.random.choice([*self.texts]) if self.texts else 0

    def admit(self) -> None:
        length = self.random.randint(1, 9)
        tokens = [self.random.randrange(2)] * length if self.prompts else self.random.choices(range(50), k=length)
        store = self.cache.prefix_store
        if store is not None:
            self.fetches.append((tokens, store.prefetch(tokens)))
            waiting = [(tokens, fetch) for tokens, fetch in self.fetches if fetch.done]
            if not waiting:
                return
            self.fetches.remove(waiting[0])
            tokens = waiting[0][0]
        if self.prompts:
            sequence = self.manager.allocate(tokens)
            handle, cached = int(sequence), sequence.cached_tokens
        else:
            handle, cached = int(self.manager.allocate(len(tokens))), 0
        self.texts[handle], self.computed[handle] = list(tokens), cached

    def append(self) -> None:
        handle, tokens = self.pick(), [self.random.randrange(2) for _ in range(self.random.randint(1, 3))]
        if handle:
            self.manager.append(handle, len(tokens), token_ids=tokens if self.prompts else None)
            self.texts[handle] += tokens

    def fork(self) -> None:
        parent = self.pick()
        if parent and len(self.texts) < 12:
            (child,) = self.manager.fork(parent, 1).tolist()
            self.texts[child], self.computed[child] = list(self.texts[parent]), self.computed[parent]

    def swap_out(self) -> None:
        if self.texts:
            self.manager.swap_out(self.pick(), to=self.random.choice(["host", "external"]))

    def swap_in(self) -> None:
        away = [handle for handle in self.texts if self.manager.tier(handle) != "device"]
        if away:
            self.manager.swap_in(self.random.choice(away), to=self.random.choice(["device", "device", "host"]))
            if self.random.random() < 0.5:
                self.append()

    def free(self) -> None:
        handle = self.pick()
        if handle and self.random.random() < 0.5:
            self.manager.free(handle)
            del self.texts[handle]


def slots(late: int, seed: int, *, lose: float = 0.0) -> LateStore:
    return LateStore(PromptStore(24, SIZE, seed=seed), late, lose=lose)


@contextlib.contextmanager
def opened(late: int, seed: int, *, lose: float = 0.0, **options) -> Iterator[KVCache]:
    store = slots(late, seed, lose=lose)
    sizes = {"device_blocks": 24, "host_blocks": 16, "watermark": 0.0, "max_staging": 6 * SIZE}
    with KVCache(LAYOUT, swap_store=store, **(sizes | options)) as cache:
        yield cache


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("lose", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_steps_read_right_bytes_from_host_and_store(late: int, lose: float, seed: int):
    with opened(late, seed, lose=lose) as cache:
        served = Served(cache, seed)
        served.run()
        assert served.compared > 200


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("seed", range(3))
def test_steps_read_right_bytes_from_host_copies(late: int, seed: int):
    with opened(late, seed, lose=0.05 * seed, prefix_caching=PrefixCaching(host=True)) as cache:
        served = Served(cache, seed, prompts=True)
        for _ in range(4):
            served.run(steps=STEPS // 4)
            cache.manager.prefix.offload(8)
        assert served.compared > 200


@pytest.mark.parametrize("late", LATE)
def test_steps_read_right_bytes_from_a_prefix_store(late: int):
    prefixes = open_store(f"memory://late{late}?size=64KiB", bytes_per_block=SIZE, namespace=bytes(32), use="prefix")
    store = LateStore(prefixes, late, lose=0.1)
    options = {"prefix_caching": True, "prefix_store": store, "namespace": b"a model", "prefetch_timeout_base": 5}
    with opened(late, late, **options) as cache:
        served = Served(cache, late, prompts=True)
        for _ in range(4):
            served.run(steps=STEPS // 4)
            cache.prefix_store.wait(5)
        assert served.compared > 200


def test_prefetched_sequences_are_refused_until_their_ticket_has_ended():
    with opened(late=4, seed=0) as cache:
        manager = cache.manager
        served = Served(cache, seed=0)
        served.admit()
        (handle,) = served.texts
        served.step()
        manager.swap_out(handle, to="external")
        served.step()
        served.note(cache.drain())
        manager.swap_in(handle)
        waits = cache.swap_store.waits
        step = served.step(prefetch=True)
        ticket, length, blocks = step.decision.ticket, len(served.texts[handle]), -(-len(served.texts[handle]) // BLOCK)
        assert (step.ended, served.late) == ([], {ticket})
        message = rf"is still moving \(ticket {ticket}\), {blocks} of its blocks have not arrived"
        for call in (
            lambda: manager.append(handle),
            lambda: manager.can_append(handle),
            lambda: manager.block_table(handle),
            lambda: manager.block_tables([handle]),
            lambda: manager.slot_mapping(handle, 0, length),
            lambda: manager.fork(handle, shared_tokens=0, num_tokens=1),
            lambda: manager.swap_out(handle),
        ):
            with pytest.raises(SequenceStateError, match=message):
                call()
        assert cache.swap_store.waits == waits, "it waited for the store"
        until = time.monotonic() + 30
        while served.late:
            assert time.monotonic() < until
            served.step()
        served.append()
        served.step()
        assert served.refused > 0


@pytest.mark.parametrize("ask", ["append", "block_table", "block_tables", "slot_mapping", "fork"])
def test_a_prefetch_waits_for_what_its_own_step_computes_with(ask: str):
    with opened(late=10, seed=0) as cache:
        manager = cache.manager
        served = Served(cache, seed=0)
        served.admit()
        (handle,) = served.texts
        served.step()
        manager.swap_out(handle, to="external")
        served.step()
        served.note(cache.drain())
        manager.swap_in(handle)
        waits = cache.swap_store.waits
        if ask == "append":
            served.append()
        elif ask == "fork":
            manager.fork(handle, shared_tokens=0, num_tokens=1)
        elif ask == "slot_mapping":
            manager.slot_mapping(handle, 0, 1)
        else:
            getattr(manager, ask)(handle)
        step = served.step(prefetch=True)
        assert not step.decision.prefetch
        assert cache.swap_store.waits == waits + 1
        assert served.refused == 0


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_did_not_come_is_known_before_compute_and_refused(by_layer: bool):
    with opened(late=3, seed=0, lose=1.0) as cache:
        manager = cache.manager
        first, second = manager.allocate(5, 5)
        with cache.step():
            pass
        manager.swap_out([first, second], to="external")
        with cache.step():
            pass
        cache.drain()
        (child,) = manager.fork(first, 1).tolist()
        manager.swap_in([first, child])
        manager.append([first, child])
        resident = manager.allocate(3)
        with cache.step(by_layer=by_layer) as step:
            assert step.lost.tolist() == sorted([int(first), child])
            for call in (manager.append, manager.block_tables, manager.fork):
                with pytest.raises(SequenceStateError, match="lost"):
                    call(int(first))
            assert len(manager.block_tables([resident])) == 1
        (end,) = step.ended
        assert (end.ticket, end.lost.tolist()) == (step.decision.ticket, step.lost.tolist())
        manager.free([first, child])
        manager.check()


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("overlap_io", [False, True])
@pytest.mark.parametrize("lose", [0.0, 0.1])
@pytest.mark.filterwarnings("ignore:.* blocks did not land:RuntimeWarning")
def test_the_scheduler_reads_right_bytes_however_late_the_store_is(late: int, overlap_io: bool, lose: float):
    with opened(late, late, lose=lose, device_blocks=12, host_blocks=0, prefix_caching=late % 2 == 0) as cache:
        scheduler = Scheduler(cache, preemption_mode="swap", overlap_io=overlap_io, max_num_seqs=6)
        for number in range(6):
            scheduler.add(Request(f"request {number}", [number + 1] * 3, max_tokens=12))
        cells = [tensor.view(torch.int64).numpy().reshape(2, -1) for tensor in cache.engine.tensors]
        finished = []
        while scheduler.num_unfinished:
            with scheduler.step(by_layer=True) as step:
                starts, lengths = step.start.tolist(), step.lengths.tolist()
                each = zip(starts, lengths, strict=True)
                positions = [p for start, count in each for p in range(start, start + count)]
                read = []
                for layer in range(LAYERS):
                    step.wait_for_layer(layer)
                    cells[layer][:, step.slot_mapping] = model_cells(step.token_ids.tolist(), positions, layer)
                    ends = np.array(starts) + lengths
                    for table, end in zip(step.block_tables, ends.tolist(), strict=True):
                        at = np.arange(end)
                        read.append(cells[layer][:, table[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK])
            for index, found in enumerate(read):
                row, layer = index % step.rows, index // step.rows
                if step.void is None or not step.void[row]:
                    tokens = step.all_token_ids(row)[: found.shape[1]].tolist()
                    assert np.array_equal(found, model_cells(tokens, range(len(tokens)), layer))
            finished += scheduler.update(step, [draw.position % 50 for draw in step.draws()])
        assert len(finished) == 6
        assert scheduler.stats().resumed_swap_external > 0


@pytest.mark.parametrize("late", [5])
def test_a_generator_gives_the_same_tokens_however_late_the_store_is(late: int):
    model = demo_model()
    prompts = [[number + 1] * 6 for number in range(3)]
    options = {"block_size": 4, "host_blocks": 0, "prefix_caching": False, "preemption_mode": "swap"}
    with Generator(model, device_blocks=200, **options) as generator:
        wanted = {output.index: output.tokens for output in generator.generate(prompts, max_new_tokens=8)}
        size = generator.cache.layout.bytes_per_block
    store = LateStore(PromptStore(100, size, seed=late), late)
    with Generator(model, device_blocks=6, swap_store=store, **options) as generator:
        found = {output.index: output.tokens for output in generator.generate(prompts, max_new_tokens=8)}
        assert generator.scheduler.stats().resumed_swap_external > 0
    assert found == wanted
