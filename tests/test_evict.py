from __future__ import annotations

import numpy as np
import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, UnknownSequenceError

SIZE = 4
POLICIES = ("lru", "s3fifo", "adaptive", "priority")


def manager(device: int = 8, **policies: str) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, watermark=0.0, **policies)


def prompt(first: int, blocks: int) -> list[int]:
    return [first + i // SIZE for i in range(blocks * SIZE)]


def run(books: BlockManager, tokens: list[int], priority: int = 0) -> int:
    """Admit a prompt, compute and free it; how many of its tokens were cached."""
    handles, cached = allocate_prompts(books, [tokens])
    books.complete(books.take_decision().ticket)
    books.mark_computed(handles)
    books.prefix.set_priority(handles, priority)
    books.free(handles)
    books.check()
    return int(cached[0])


def step(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)
    books.check()


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_chain_is_evicted_from_its_end(eviction: str) -> None:
    books = manager(eviction=eviction)
    run(books, prompt(0, 8))
    for lost in range(1, 8):
        books.free(books.allocate(counts=np.array([SIZE * lost], dtype=np.uint32)))
        step(books)
        assert books.prefix.lookup([*prompt(0, 8), 99]).tokens == (8 - lost) * SIZE
        assert len(books.pool().free_ids()) == lost


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_cached_block_can_be_had(eviction: str) -> None:
    books = manager(device=16, eviction=eviction)
    for i in range(6):
        for _ in range(i):
            run(books, prompt(100 * i, 2), priority=15)
    assert books.pool().num_free == 16
    books.free(books.allocate(counts=[16 * SIZE]))
    step(books)
    assert books.stats().cached_blocks["device"] == 0


def test_the_least_recently_used_chain_goes_first() -> None:
    books = manager(eviction="lru")
    for first in (0, 100, 200, 300, 0):
        run(books, prompt(first, 2))
    run(books, prompt(400, 2))
    assert [books.prefix.lookup([*prompt(first, 2), 9]).tokens for first in (0, 100, 200)] == [8, 0, 8]


@pytest.mark.parametrize("eviction", ["s3fifo", "adaptive"])
def test_what_was_hit_outlives_a_flood_of_what_is_not(eviction: str) -> None:
    books = manager(device=32, eviction=eviction)
    for _ in range(4):
        run(books, prompt(0, 4))
    for i in range(1, 20):
        run(books, prompt(100 * i, 4))
    assert books.prefix.lookup([*prompt(0, 4), 9]).tokens == 16


def test_adaptive_learns_at_which_depth_prompts_part() -> None:
    def hits(eviction: str) -> float:
        books = manager(device=64, eviction=eviction)
        rng = np.random.default_rng(1)
        for i, family in enumerate(rng.integers(0, 10, 600).tolist()):
            run(books, [*prompt(1000 * family, 4), *prompt(10**6 + 100 * i, 4)])
        return books.stats().hit_rate

    assert hits("adaptive") > hits("lru") + 0.05


def test_a_priority_delays_eviction_and_decays() -> None:
    books = manager(eviction="priority")
    run(books, prompt(0, 3), priority=3)
    turnovers = 0.0
    while books.prefix.lookup([*prompt(0, 3), 9]).tokens == 12:
        run(books, prompt(100 + round(turnovers * 100), 2))
        turnovers += 2 / 8
        assert turnovers < 6, "a retained block goes like any other in the end"
    assert turnovers >= 3


def test_a_priority_out_of_range_is_refused() -> None:
    books = manager(eviction="priority")
    handles, _ = allocate_prompts(books, [[1, 2]])
    for priority in (16, 256):
        with pytest.raises(InvalidArgumentError, match=f"priority is {priority}, must be 0 to 15"):
            books.prefix.set_priority(handles, priority)
    with pytest.raises(UnknownSequenceError):
        books.prefix.set_priority([7], 1)


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(
        InvalidArgumentError, match='eviction is "fifo", must be one of lru, s3fifo, adaptive, priority'
    ):
        manager(eviction="fifo")
    with pytest.raises(InvalidArgumentError, match='reuse_order is "", must be one of lowest, fifo, lru'):
        manager(reuse_order="")


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("order", ["lowest", "fifo", "lru"])
def test_a_snapshot_keeps_both_orders(eviction: str, order: str) -> None:
    books = manager(device=16, eviction=eviction, reuse_order=order)
    for first in (0, 100, 0, 200):
        run(books, prompt(first, 4), priority=first // 100)
    books.free(books.allocate(counts=[12 * SIZE]))
    step(books)
    again = BlockManager.restore(books.snapshot())
    assert again.pool().free_ids().tolist() == books.pool().free_ids().tolist()
    assert again.snapshot() == books.snapshot()
    for one in (books, again):
        one.allocate(counts=[14 * SIZE])
    lost = [[one.prefix.lookup([*prompt(first, 4), 9]).tokens for first in (0, 100, 200)] for one in (books, again)]
    assert lost[0] == lost[1]
