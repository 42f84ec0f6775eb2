"""Room ahead: what prompts will take that start soon is copied to the host before they start."""

from __future__ import annotations

import numpy as np

from blockyard import BlockManager, PrefixCaching, Request, Scheduler
from blockyard.scheduler import Step

SIZE = 4
BLOCKS = 16


def new_scheduler(max_num_seqs: int = 1) -> Scheduler:
    caching = PrefixCaching(eviction="lru", host=True, host_copies_per_step=4 * BLOCKS)
    manager = BlockManager(block_size=SIZE, device_blocks=4 * BLOCKS, host_blocks=60 * BLOCKS, prefix_caching=caching)
    return Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=BLOCKS * SIZE)


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + BLOCKS * SIZE - 1))


def run(scheduler: Scheduler) -> list[Step]:
    """Serve a step at a time until nothing is left."""
    steps = []
    while scheduler.num_unfinished:
        steps.append(scheduler.schedule())
        scheduler.complete(steps[-1].decision.ticket)
        scheduler.update(steps[-1], np.zeros(steps[-1].num_draws, np.uint32))
        scheduler.manager.check()
    return steps


def test_no_step_reads_what_it_writes_over_if_the_prompts_wait_before() -> None:
    scheduler = new_scheduler()
    for number in range(12):
        scheduler.add(Request(str(number), prompt(number), max_tokens=3))
    steps = run(scheduler)
    assert sum(len(pairs) for step in steps for pairs in step.decision.swap_out) > 6 * BLOCKS
    assert [step for step in steps if step.decision.ticket in step.decision.after] == []
    assert scheduler.manager.stats().uncopied_blocks == 0


def test_what_a_prompt_will_hit_is_found_although_room_is_made_for_it() -> None:
    scheduler = new_scheduler()
    for number in (0, 1, 2, 3, 0):
        scheduler.add(Request(f"{number} {scheduler.num_unfinished}", prompt(number), max_tokens=3))
    run(scheduler)
    assert scheduler.manager.stats().hit_blocks == BLOCKS - 1


def test_a_prompt_far_from_its_start_has_no_room_made_for_it() -> None:
    scheduler = new_scheduler(max_num_seqs=2)
    for number in range(4):
        scheduler.add(Request(str(number), prompt(number), max_tokens=1))
    run(scheduler)
    empty = np.count_nonzero(scheduler.manager.pool().uses() == 0)
    scheduler.add(Request("long", prompt(5), max_tokens=100))
    scheduler.add(Request("longer", prompt(6), max_tokens=100))
    scheduler.add(Request("waits", prompt(7), max_tokens=1))
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, np.zeros(step.num_draws, np.uint32))
    assert np.count_nonzero(scheduler.manager.pool().uses() == 0) <= max(empty, 8)
