"""Loading ahead: prompts of a queue keep what is loaded for them, and never hold up what runs."""

import gc
import weakref
from pathlib import Path

import pytest

from blockyard import BlockManager, CacheGroup, KVCache, KVLayout
from blockyard._core import HashedPrompt
from blockyard.scheduler import Request, Scheduler

BLOCK = 4
LAYOUT = KVLayout("kv_first", 1, BLOCK, num_kv_heads=1, head_size=1, dtype="int64")
PATIENCE = 30.0


def options_of(folder: Path, **sizes: int) -> dict[str, object]:
    store = {"prefix_store": f"local://{folder}?size=4MiB", "namespace": b"model"}
    return store | {"prefix_caching": True, "prefetch_timeout_base": PATIENCE, "watermark": 0.0} | sizes


def prompts_of(count: int, blocks: int) -> list[list[int]]:
    return [[1000 * number + at for at in range(blocks * BLOCK + 1)] for number in range(count)]


def fill(folder: Path, prompts: list[list[int]]) -> None:
    with KVCache(LAYOUT, **options_of(folder, device_blocks=sum(map(len, prompts)))) as cache:
        run(cache, prompts)
        assert cache.prefix_store.wait(PATIENCE)


def run(cache: KVCache, prompts: list[list[int]], **options) -> Scheduler:
    scheduler = Scheduler(cache, **options)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(f"{number}", prompt, max_tokens=BLOCK - 1))
    while scheduler.num_unfinished:
        with scheduler.step() as step:
            pass
        scheduler.update(step, [7] * step.num_draws)
        cache.manager.check()
    scheduler.drain()
    assert cache.manager.prefix.store_jobs.num_leases == 0
    return scheduler


@pytest.mark.parametrize("sizes", [(40, 0), (40, 16), (40, 200), (100, 0)], ids=str)
@pytest.mark.parametrize("overtakes", [0, 2])
def test_prompts_of_a_queue_do_not_evict_each_others_blocks(tmp_path: Path, sizes: tuple[int, int], overtakes: int):
    prompts = prompts_of(8, 12)
    fill(tmp_path, prompts)
    with KVCache(LAYOUT, **options_of(tmp_path, device_blocks=sizes[0], host_blocks=sizes[1])) as cache:
        scheduler = run(cache, prompts, max_overtakes=overtakes)
        found, loads = scheduler.stats().cached_tokens // BLOCK, cache.prefix_store
        assert (found, loads.store.stats().read_blocks) == (96, 96)
        assert not loads.stats().misses


@pytest.mark.parametrize("sizes", [(26, 0), (26, 26), (26, 10), (26, 100)], ids=str)
def test_a_prompt_that_fills_the_device_is_read_once(tmp_path: Path, sizes: tuple[int, int]):
    (prompt,) = prompts_of(1, 25)
    fill(tmp_path, [prompt])
    with KVCache(LAYOUT, **options_of(tmp_path, device_blocks=sizes[0], host_blocks=sizes[1])) as cache:
        fetch = cache.prefix_store.prefetch(prompt)
        assert cache.prefix_store.wait(PATIENCE, until=lambda: fetch.done)
        assert (fetch.tokens // BLOCK, cache.prefix_store.store.stats().read_blocks) == (25, 25)


class Store:
    """Loads the beginnings of prompts into a manager by hand, when told to, and counts who asks."""

    def __init__(self, manager: BlockManager) -> None:
        self.jobs, self.asked, self.is_slow = manager.prefix.store_jobs, list[int](), False

    def __call__(self, prompt: HashedPrompt) -> "Fetched":
        self.asked.append(len(prompt))
        fetch = Fetched(self, prompt)
        fetch.land()
        return fetch


class Fetched:
    def __init__(self, store: Store, prompt: HashedPrompt) -> None:
        self.store, self.prompt, self.is_loaded = store, prompt, False

    def land(self) -> None:
        if not self.store.is_slow and not self.is_loaded:
            job = self.store.jobs.begin_load(self.prompt, 100)
            if len(job):
                self.store.jobs.end_load(job.job, [True] * len(job))
            self.is_loaded = True

    @property
    def done(self) -> bool:
        self.land()
        return self.is_loaded


def over_manager(blocks: int, **options) -> tuple[BlockManager, Store, Scheduler]:
    manager = BlockManager(block_size=BLOCK, device_blocks=blocks, prefix_caching=True, watermark=0.0)
    store = Store(manager)
    return manager, store, Scheduler(manager, prefetch=store, **options)


def step(scheduler: Scheduler) -> None:
    now = scheduler.schedule()
    scheduler.complete(now.decision.ticket)
    scheduler.update(now, [7] * now.num_draws)
    scheduler.manager.check()


def test_a_lease_ends_before_a_running_sequence_is_preempted_and_the_prompt_asks_again():
    manager, store, scheduler = over_manager(12, max_num_seqs=1)
    scheduler.add(Request("runs", [1] * 17, max_tokens=24))
    step(scheduler)
    scheduler.add(Request("waits", list(range(100, 113)), max_tokens=1))
    step(scheduler)
    assert (store.asked, store.jobs.num_leases, store.jobs.num_leased) == ([17, 13], 1, 3)
    while store.jobs.num_leases:
        step(scheduler)
    assert (manager.pool().num_free, scheduler.num_running) == (2, 1)
    while scheduler.num_unfinished:
        step(scheduler)
    stats = scheduler.stats()
    assert (stats.preempted_recompute, store.asked) == (0, [17, 13, 13])
    assert stats.cached_tokens == 16 + 12
    assert store.jobs.num_leases == 0
    assert manager.pool().num_free == 12


def test_an_aborted_request_gives_its_lease_back_loaded_or_loading():
    manager, store, scheduler = over_manager(24, max_num_seqs=1)
    scheduler.add(Request("runs", [1] * 5, max_tokens=9))
    step(scheduler)
    for is_slow in (False, True):
        store.is_slow = is_slow
        scheduler.add(Request("waits", list(range(100, 113)), max_tokens=1))
        step(scheduler)
        assert (store.jobs.num_leases, scheduler.num_loading) == (1, int(is_slow))
        scheduler.abort("waits")
        assert (store.jobs.num_leases, store.jobs.num_promised, scheduler.num_loading) == (0, 0, 0)
        manager.check()


def test_the_last_prompt_gives_its_lease_up_for_an_earlier_one_and_for_one_that_comes_first():
    manager, store, scheduler = over_manager(32, max_num_seqs=1)
    scheduler.add(Request("runs", [1] * 5, max_tokens=9, priority=-1))
    step(scheduler)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        scheduler.add(Request(name, list(range(first, first + 21)), max_tokens=1))
    step(scheduler)
    assert (store.jobs.num_leases, store.jobs.num_leased) == (3, 15), "half of 30"
    scheduler.add(Request("first", list(range(400, 421)), max_tokens=1, priority=-1))
    step(scheduler)
    assert (store.jobs.num_leases, store.jobs.num_leased) == (3, 15)
    hits = [manager.prefix.lookup(list(range(first, first + 21))).tokens for first in (400, 100, 200)]
    assert hits == [20, 20, 20]
    while scheduler.num_unfinished:
        step(scheduler)
    assert scheduler.stats().cached_tokens == 4 + 4 * 20
    assert store.jobs.num_leases == 0


def test_a_prompt_whose_part_in_a_step_lacks_more_than_leases_hold_ends_none_of_them():
    asked = list[int]()

    class Nothing:
        done = True

    def prefetch(prompt: HashedPrompt) -> Nothing:
        asked.append(len(prompt))
        return Nothing()

    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(BLOCK)]
    manager = BlockManager(block_size=BLOCK, device_blocks=10, watermark=0.0, groups=groups, prefix_caching=True)
    scheduler = Scheduler(manager, prefetch=prefetch, max_num_batched_tokens=8)
    for name, prompt, max_tokens in (("runs", [1], 3), ("waits", [*range(100, 117)], 1), ("behind", [*range(5)], 1)):
        scheduler.add(Request(name, prompt, max_tokens))
    waits = manager.prefix.hash([*range(100, 117)])
    assert [manager.can_allocate(waits, chunk_tokens=tokens).blocks for tokens in (8, 7)] == [7, 8]
    for _ in range(3):  # the others have 7 tokens a step and 7 blocks beside the one that runs
        step(scheduler)
        assert scheduler.num_unfinished >= 2
        assert manager.prefix.store_jobs.num_leases == 2
    while scheduler.num_unfinished:
        step(scheduler)
    assert asked == [1, 17, 5]


def test_no_more_is_loaded_ahead_than_half_of_what_is_free_and_all_of_it_is_used():
    _, store, scheduler = over_manager(40, max_num_seqs=2)
    for number in range(20):
        scheduler.add(Request(f"{number}", list(range(100 * number, 100 * number + 25)), max_tokens=5))
    while scheduler.num_unfinished:
        step(scheduler)
        assert store.jobs.num_leased + store.jobs.num_promised <= 20
    assert (scheduler.stats().cached_tokens, len(store.asked)) == (20 * 24, 20)


def test_others_do_not_take_the_room_of_a_prompt_that_loads():
    _, store, scheduler = over_manager(16)
    store.is_slow = True
    scheduler.add(Request("loads", list(range(100, 141)), max_tokens=1))
    step(scheduler)
    assert (scheduler.num_loading, store.jobs.num_promised) == (1, 10)
    scheduler.add(Request("other", [1, 2, 3], max_tokens=1))
    scheduler.add(Request("large", list(range(200, 229)), max_tokens=1))
    step(scheduler)
    assert scheduler.num_unfinished == 2, "the small one has run, the large one would take the room"
    store.is_slow = False
    while scheduler.num_unfinished:
        step(scheduler)
    assert scheduler.stats().cached_tokens == 40 + 28


def test_after_a_reset_waiting_prompts_ask_again():
    manager, store, scheduler = over_manager(24, max_num_seqs=1)
    scheduler.add(Request("waits", list(range(100, 113)), max_tokens=1))
    store.is_slow = True
    step(scheduler)
    store.is_slow = False
    assert manager.prefix.reset()
    assert store.jobs.num_leases == 0
    while scheduler.num_unfinished:
        step(scheduler)
    assert (store.asked, scheduler.stats().cached_tokens) == ([13, 13], 12)


def test_a_new_scheduler_ends_the_leases_of_one_that_was_dropped():
    manager, store, scheduler = over_manager(24)
    store.is_slow = True
    scheduler.add(Request("waits", list(range(100, 113)), max_tokens=1))
    step(scheduler)
    assert store.jobs.num_leases == 1
    number = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert number() is None
    Scheduler(manager)
    assert store.jobs.num_leases == 0
