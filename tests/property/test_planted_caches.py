"""Faults planted in the copy engine, the executor and the cache: random programs over whole caches notice each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from random import Random
from typing import Any

import pytest
from cache_rig import random_config
from random_cache_programs import failure, random_program

from blockyard import KVCache, StepDecision
from blockyard.engine.engine import CacheEngine, Kind
from blockyard.engine.mapping import Ids
from blockyard.engine.memory import Memory
from blockyard.engine.transfers import Transfer, Transfers
from blockyard.executor.executor import StepExecutor
from blockyard.executor.parts import Part
from blockyard.prefix_store.loads import Loads
from blockyard.scheduler.admission import Admission
from blockyard.scheduler.request import IdleSequences

PROGRAMS = 150
BEGIN, CUT, ORDER = Part.begin, StepExecutor._cut, Transfers.order_compute
ALLOCATE = Admission._allocate
END_STEPS, STAGING, SUBMIT = StepExecutor._end_steps, Memory.staging, CacheEngine.submit


def copies_do_not_wait(
    self: CacheEngine, kind: Kind, pairs: Ids, *, after: Sequence[Transfer] = (), **arguments: Any
) -> Transfer:
    return SUBMIT(self, kind, pairs, after=() if kind == "copy" else after, **arguments)


def ignores_after(self: StepExecutor, decision: StepDecision, *rest: Any, **arguments: Any) -> Any:
    return CUT(self, StepDecision(decision.ticket, decision.transfers()), *rest, **arguments)


def ends_when_begun(self: Part, *, kinds: Sequence[str]) -> None:
    BEGIN(self)
    if self.kind in kinds:
        self.end([], None)


def forgets_lost_moves(self: StepExecutor) -> None:
    END_STEPS(self)
    for ticket, done in self._done.items():
        self._done[ticket] = done._replace(lost=tuple(pairs for pairs in done.lost if pairs.src != pairs.dst))


def orders_the_layer_before(self: Transfers, transfer: Transfer, layer: int | None = None) -> None:
    ORDER(self, transfer, layer and max(0, layer - 1))


def one_buffer(self: Memory, num_rows: int) -> Any:
    self.kept = getattr(self, "kept", None)  # type: ignore[attr-defined]
    if self.kept is None:
        self.kept = STAGING(self, 1000)  # type: ignore[attr-defined]
    return self.kept[:num_rows]


def ignores_extras_after_full_blocks(self: Admission, batch: list[IdleSequences], left: int) -> Any:
    for idle in batch:
        size = self._manager.block_size
        full = len(idle.tokens[0]) // size * size
        idle.state.extras = tuple(extra for extra in idle.state.extras if extra[0] < full)
    return ALLOCATE(self, batch, left)


def gives_back_all_beyond_the_size(self: KVCache) -> None:
    blocks = self.manager.pool("device").num_blocks
    if self.elastic is not None and blocks < self.elastic.num_blocks:
        self.elastic.resize(blocks)


ARENA = {
    "classes": True,
    "groups": "full window",
    "prefix": "device",
    "host": 24,
    "external": 0,
    "store": "",
    "jobs": "",
}
SERVING = {"groups": "full", "prefix": "host", "scheduler": True, "interrupts": 0.0}
FAULTS: dict[str, tuple[type, str, Any, dict[str, Any]]] = {
    "copies do not wait": (CacheEngine, "submit", copies_do_not_wait, SERVING),
    "the order between tickets is ignored": (StepExecutor, "_cut", ignores_after, {"interrupts": 0.0}),
    "swaps end when they begin": (
        *(Part, "begin", partialmethod(ends_when_begun, kinds=("swap_in", "swap_out"))),
        {},
    ),
    "moves end when they begin": (Part, "begin", partialmethod(ends_when_begun, kinds=("move",)), {}),
    "lost moves are not reported": (StepExecutor, "_end_steps", forgets_lost_moves, {"fail": 0.1, "interrupts": 0.0}),
    "compute does not wait": (Transfers, "order_compute", lambda *_: None, {}),
    "compute waits for the layer before": (Transfers, "order_compute", orders_the_layer_before, {}),
    "one staging buffer": (Memory, "staging", one_buffer, {"external": 16, "staging": 2}),
    "a load ends before those that bring its blocks": (
        *(Loads, "_end", lambda self, load, miss="": self._finish(load, miss)),
        SERVING | {"store": "through", "jobs": ""},
    ),
    "extras behind full blocks are ignored": (Admission, "_allocate", ignores_extras_after_full_blocks, SERVING),
    "all copies are of the first page class": (
        *(CacheEngine, "of_class", lambda self, _page_class: self.memories[0]),
        ARENA,
    ),
    "blocks leave an extent when their moves begin": (
        *(Part, "begin", partialmethod(ends_when_begun, kinds=("move",))),
        ARENA | {"prefix": ""},
    ),
    "memory goes with the size": (KVCache, "give_back", gives_back_all_beyond_the_size, {}),
}
"""What is changed, and the caches where it shows in at least one of twenty random programs."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, value, options = FAULTS[fault]
    monkeypatch.setattr(owner, name, value)
    # Another kind of failure, such as one within the fault itself, does not count.
    configs = (replace(random_config(Random(seed)), **options) for seed in range(PROGRAMS))
    programs = (random_program(seed, 300, config) for seed, config in enumerate(configs))
    assert any(isinstance(failure(program), AssertionError) for program in programs)
