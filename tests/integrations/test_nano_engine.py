"""The block manager of nano engines, in a small engine of either kind: every token as from the model without pages.

`NANO_VLLM_SOURCE` names a checkout of nano-vllm, of any time from June 2025 on: its own scheduler is run, too.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import Pairs, StepDecision
from blockyard.integrations.nano import BlockManager

SIZE, BLOCKS, HOST = 4, 16, 24
LAYERS, HEADS, DIM, VOCAB = 2, 2, 8, 31
SHAPE = (2, LAYERS, BLOCKS, SIZE, HEADS, DIM)


# ---- a model ----


class Model:
    """Attention over everything so far, in float64: pages and batches change no token."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        width = HEADS * DIM

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.embedding, self.places = normal(VOCAB, width), normal(256, width) / 2
        self.layers = [[normal(width, width) / math.sqrt(width) for _ in range(4)] for _ in range(LAYERS)]

    def next_token(self, tokens: list[int], first: int, attend: Callable[..., torch.Tensor]) -> int:
        """Compute `tokens`, which stand at `first` and after; `attend` knows what came before."""
        x = self.embedding[tokens] + self.places[first : first + len(tokens)]
        for layer, (query, key, value, out) in enumerate(self.layers):
            q, k, v = ((x @ weight).view(-1, HEADS, DIM) for weight in (query, key, value))
            x = torch.nn.functional.layer_norm(x + 4 * attend(layer, q, k, v).flatten(1) @ out, (HEADS * DIM,))
        return int((x[-1] @ self.embedding.T).argmax())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Queries of the last tokens over keys of all, `[tokens, HEADS, DIM]`."""
    scores = torch.einsum("qhd,khd->hqk", q, k)
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v)


MODEL = Model()
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def unpaged(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(MODEL.next_token(tokens, 0, lambda _layer, q, k, v: attention(q, k, v)))
    return tuple(tokens[len(prompt) :])


# ---- an engine of either kind ----


class Sequence:
    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.token_ids = list(prompt)
        self.num_prompt_tokens, self.max_tokens = len(prompt), max_tokens
        self.block_table: list[int] = []
        self.num_cached_tokens = self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return math.ceil(len(self) / SIZE)


def answer(seq: Sequence) -> tuple[int, ...]:
    return tuple(seq.token_ids[seq.num_prompt_tokens :])


class Engine:
    """Prefills while there are blocks, else decodes; who finds no block for his token sends the newest away."""

    seats = 4

    def __init__(self, manager: BlockManager, kv_cache: torch.Tensor) -> None:
        self.manager, self.kv_cache = manager, kv_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted = self.prefix_hits = 0

    def sequence(self, prompt: list[int], max_tokens: int) -> Sequence:
        return Sequence(prompt, max_tokens)

    def step(self) -> None:
        batch = self.prefill() or self.decode()
        for seq, token in [(seq, self.run(seq, *self.span(seq))) for seq in batch]:
            self.take(seq, token)

    def decode(self) -> list[Sequence]:
        batch, queue = [], deque(self.running)
        while queue:
            seq = queue.popleft()
            while not self.manager.can_append(seq) and queue:
                self.preempt(queue.pop())
            if not self.manager.can_append(seq):
                self.preempt(seq)
                continue
            self.manager.may_append(seq)
            seq.num_scheduled_tokens = 1
            batch.append(seq)
        return batch

    def preempt(self, seq: Sequence) -> None:
        self.preempted += 1
        self.manager.deallocate(seq)
        self.running.remove(seq)
        self.waiting.appendleft(seq)

    def run(self, seq: Sequence, first: int, last: int) -> int:
        slots = torch.tensor([seq.block_table[i // SIZE] * SIZE + i % SIZE for i in range(last)])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = (self.kv_cache[kv, layer].view(-1, HEADS, DIM) for kv in (0, 1))
            keys[slots[first:]], values[slots[first:]] = k, v
            return attention(q, keys[slots], values[slots])

        return MODEL.next_token(seq.token_ids[first:last], first, attend)

    def sampled(self, seq: Sequence, token: int) -> None:
        seq.token_ids.append(token)
        if len(answer(seq)) == seq.max_tokens:
            self.manager.deallocate(seq)
            self.running.remove(seq)

    def prefill(self) -> list[Sequence]:
        raise NotImplementedError

    def span(self, seq: Sequence) -> tuple[int, int]:
        raise NotImplementedError

    def take(self, seq: Sequence, token: int) -> None:
        raise NotImplementedError


class Older(Engine):
    """Whole prompts; `can_allocate` is true or false; what is computed is nobody's to say."""

    def prefill(self) -> list[Sequence]:
        batch: list[Sequence] = []
        while self.waiting and len(self.running) < self.seats and self.manager.can_allocate(self.waiting[0]):
            seq = self.waiting.popleft()
            self.manager.allocate(seq)
            self.prefix_hits += seq.num_cached_tokens // SIZE
            batch.append(seq)
            self.running.append(seq)
        return batch

    def span(self, seq: Sequence) -> tuple[int, int]:
        first = seq.num_cached_tokens if seq.num_scheduled_tokens == 0 else len(seq) - 1
        return first, len(seq)

    def take(self, seq: Sequence, token: int) -> None:
        self.sampled(seq, token)

    def preempt(self, seq: Sequence) -> None:
        seq.num_scheduled_tokens = 0
        super().preempt(seq)


class Newer(Engine):
    """Prompts in chunks; `can_allocate` counts cached blocks; `hash_blocks` follows each step."""

    budget = 20

    def prefill(self) -> list[Sequence]:
        batch: list[Sequence] = []
        left = self.budget
        while self.waiting and left and len(self.running) < self.seats:
            seq = self.waiting[0]
            if not seq.block_table:
                cached = self.manager.can_allocate(seq)
                if cached == -1:
                    break
                self.manager.allocate(seq, cached)
                self.prefix_hits += cached
            seq.num_scheduled_tokens = min(left, len(seq) - seq.num_cached_tokens)
            left -= seq.num_scheduled_tokens
            batch.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens == len(seq):
                self.running.append(self.waiting.popleft())
        return batch

    def span(self, seq: Sequence) -> tuple[int, int]:
        return seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens

    def take(self, seq: Sequence, token: int) -> None:
        self.note(seq)
        seq.num_scheduled_tokens = 0
        if seq.num_cached_tokens == len(seq):
            self.sampled(seq, token)

    def note(self, seq: Sequence) -> None:
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens += seq.num_scheduled_tokens


class Reordered(Newer):
    """A fork that counts before it tells."""

    def note(self, seq: Sequence) -> None:
        seq.num_cached_tokens += seq.num_scheduled_tokens
        self.manager.hash_blocks(seq)


class Original(Engine):
    """nano-vllm's own scheduler, whose block manager was replaced by one assignment."""

    def __init__(self, manager: BlockManager, kv_cache: torch.Tensor) -> None:
        super().__init__(manager, kv_cache)
        self.module = sys.modules["nanovllm.engine.scheduler"]
        self.module.BlockManager = lambda *_sizes: manager  # type: ignore[attr-defined]
        self.module.Sequence.block_size = SIZE
        self.chunked = "is_prefill" in inspect.signature(self.module.Scheduler.postprocess).parameters
        budget = 20 if self.chunked else BLOCKS * SIZE
        sizes = {"num_kvcache_blocks": BLOCKS, "kvcache_block_size": SIZE, "max_num_batched_tokens": budget}
        self.scheduler = self.module.Scheduler(SimpleNamespace(max_num_seqs=self.seats, eos=-1, **sizes))
        self.waiting, self.running = self.scheduler.waiting, self.scheduler.running

    def sequence(self, prompt: list[int], max_tokens: int) -> Any:
        return self.module.Sequence(prompt, SimpleNamespace(temperature=1.0, max_tokens=max_tokens, ignore_eos=True))

    def step(self) -> None:
        batch, is_prefill = self.scheduler.schedule()
        tokens = []
        for seq in batch:
            first = seq.num_cached_tokens if is_prefill else len(seq) - 1
            last = first + seq.num_scheduled_tokens if is_prefill and self.chunked else len(seq)
            tokens.append(self.run(seq, first, last))
        self.scheduler.postprocess(batch, tokens, *([is_prefill] if self.chunked else []))


ENGINES = [Older, Newer, Reordered]
SOURCE = os.environ.get("NANO_VLLM_SOURCE", "")
Request = tuple[list[int], int]


def kv_tensor() -> torch.Tensor:
    """Slots never written hold what no sum survives."""
    return torch.full(SHAPE, math.nan, dtype=torch.float64)


def serve(engine: Engine, requests: list[Request], *, every: int = 2) -> list[tuple[int, ...]]:
    """Serve requests, one more every so many steps."""
    sequences = [engine.sequence(*request) for request in requests]
    for at in range(2000):
        if at // every < len(sequences) and at % every == 0:
            engine.waiting.append(sequences[at // every])
        if not engine.waiting and not engine.running:
            if at // every >= len(sequences):
                break
            continue
        engine.step()
        check(engine)
    assert all(len(answer(seq)) == seq.max_tokens for seq in sequences), "a request starves"
    return [answer(seq) for seq in sequences]


def check(engine: Engine) -> None:
    manager = engine.manager
    manager.manager.check()
    for entry in manager._running.values():
        assert entry.sequence.block_table == manager.manager.block_table(entry.handle).tolist()
    holders = [seq for seq in [*engine.running, *engine.waiting] if seq.block_table]
    assert {block for seq in holders for block in seq.block_table} == manager.used_block_ids
    assert len(manager.free_block_ids) == manager.manager.pool().num_free == BLOCKS - len(manager.used_block_ids)
    assert manager.manager.stats().sequences == len(holders)


def wanted(requests: list[Request]) -> list[tuple[int, ...]]:
    return [unpaged(tuple(prompt), count) for prompt, count in requests]


def families(random: np.random.Generator, count: int) -> list[Request]:
    """Prompts of 9 to 40 tokens, of four families that begin alike."""
    stems = random.integers(0, VOCAB, (4, 24)).tolist()
    requests = []
    for _ in range(count):
        stem = stems[random.integers(4)][: random.integers(8, 25)]
        requests.append(
            (stem + random.integers(0, VOCAB, random.integers(1, 17)).tolist(), int(random.integers(1, 14)))
        )
    return requests


REQUESTS = families(np.random.default_rng(11), 40)


def engine_of(kind: type[Engine], *, host: int = HOST, moves: int = 4, attached: bool = True) -> Engine:
    kv_cache = kv_tensor()
    manager = BlockManager(BLOCKS, SIZE)
    if attached:
        manager.attach(kv_cache, host_blocks=host, moves=moves)
    return kind(manager, kv_cache)


# ---- every token ----


@pytest.mark.parametrize("kind", ENGINES)
def test_tokens_are_those_of_the_unpaged_model_without_an_engine(kind: type[Engine]):
    engine = engine_of(kind, attached=False)
    assert serve(engine, REQUESTS) == wanted(REQUESTS)
    stats = engine.manager.stats()
    assert engine.preempted > 0
    assert engine.prefix_hits == stats.hit_blocks > 0
    assert (stats.swapped_out_blocks["host"], stats.loaded_blocks, stats.moved_blocks) == (0, 0, 0)


@pytest.mark.parametrize("kind", ENGINES)
def test_tokens_are_those_of_the_unpaged_model_with_copies_on_the_host_and_moves(kind: type[Engine]):
    alone, engine = engine_of(kind, attached=False), engine_of(kind)
    assert serve(engine, REQUESTS) == wanted(REQUESTS)
    stats = engine.manager.stats()
    assert engine.preempted > 0
    assert stats.swapped_out_blocks["host"] > 0
    assert stats.loaded_blocks > 0
    assert stats.moved_blocks > 0
    serve(alone, REQUESTS)
    assert engine.prefix_hits > alone.prefix_hits, "what was evicted is found again"


@pytest.mark.skipif(not SOURCE, reason="NANO_VLLM_SOURCE does not name a checkout of nano-vllm")
@pytest.mark.parametrize("attached", [True, False])
def test_tokens_are_those_of_the_unpaged_model_under_nano_vllms_own_scheduler(
    monkeypatch: pytest.MonkeyPatch, attached: bool
):
    packages = {"nanovllm": ".", "nanovllm.engine": "engine"}
    names = [*packages, "nanovllm.config", "nanovllm.engine.block_manager", "nanovllm.engine.scheduler"]
    for name in [*names, "nanovllm.engine.sequence", "nanovllm.sampling_params"]:
        module = ModuleType(name)
        if name in packages:
            module.__path__ = [str(Path(SOURCE) / "nanovllm" / packages[name])]
        module.Config = module.BlockManager = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sampling_params", "engine.sequence", "engine.scheduler"):
        del sys.modules[f"nanovllm.{name}"]
        importlib.import_module(f"nanovllm.{name}")
    engine = engine_of(Original, attached=attached)
    assert serve(engine, REQUESTS) == wanted(REQUESTS)
    stats = engine.manager.stats()
    assert stats.hit_blocks > 0
    assert all(count > 0 for count in (stats.loaded_blocks, stats.moved_blocks)) is attached


def row(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[:, :, block].contiguous().view(torch.uint8).flatten()


class Breaking:
    """Carries out decisions, less one transfer of a kind, or with one landed wrong."""

    def __init__(self, engine: Engine, kind: str, *, how: str) -> None:
        self.engine, self.kind, self.how = engine, kind, how
        self.inner: Any = engine.manager.executor
        self.broken = 0

    def execute(self, decision: StepDecision) -> list[Pairs]:
        transfers = []
        spoilt: list[int] = []
        for kind, pairs in decision.transfers():
            ids = pairs.ids
            places = [i for i, pair in enumerate(ids.tolist()) if kind == self.kind and self.changes(*pair)]
            if places and not self.broken:
                self.broken += 1
                spoilt = [int(ids[places[0], 1])]
                if self.how == "skip":
                    ids, spoilt = np.delete(ids, places[0], axis=0), []
            transfers.append((kind, Pairs(pairs.src, pairs.dst, np.ascontiguousarray(ids))))
        lost = self.inner.execute(StepDecision(decision.ticket, transfers, after=decision.after))
        for block in spoilt:
            self.engine.kv_cache[:, :, block] *= -1
        return list(lost)

    def changes(self, source: int, target: int) -> bool:
        """Whether a transfer brings other bytes than are there already: only then it can be missed."""
        kv_cache = self.engine.kv_cache
        brought = self.inner.memory.host_rows[source] if self.kind == "swap_in" else row(kv_cache, source)
        return not torch.equal(brought, row(kv_cache, target))


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("how", ["skip", "corrupt"])
@pytest.mark.parametrize("transfer", ["swap_in", "move"])
def test_one_load_or_move_that_goes_wrong_is_noticed(kind: type[Engine], transfer: str, how: str):
    engine = engine_of(kind)
    breaking = Breaking(engine, transfer, how=how)
    engine.manager.executor = breaking
    assert serve(engine, REQUESTS) != wanted(REQUESTS)
    assert breaking.broken == 1


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    stems = draw(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=30), min_size=1, max_size=3))
    request = st.tuples(
        st.sampled_from(stems), st.integers(1, 30), st.lists(st.integers(0, 3), min_size=1, max_size=12)
    )
    drawn = draw(st.lists(st.tuples(request, st.integers(1, 16)), min_size=1, max_size=12))
    return [(stem[:cut] + tail, count) for (stem, cut, tail), count in drawn]


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from(ENGINES), st.integers(0, 20), st.integers(0, 5), st.integers(1, 5), st.booleans())
def test_prompts_that_begin_alike_get_the_tokens_they_would_get_alone(
    requests: list[Request], kind: type[Engine], host: int, moves: int, every: int, attached: bool
):
    engine = engine_of(kind, host=host, moves=moves, attached=attached)
    assert serve(engine, requests, every=every) == wanted(requests)
    assert engine.manager.used_block_ids == set()
