"""`Scheduler(cache)`: one loop over all tiers and a prefix store, and what it says to calls out of order."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from simulated_device import SimulatedStore

from blockyard import BlockManager, KVCache, KVLayout, StepDecision
from blockyard._core import HashedPrompt
from blockyard.errors import BlockyardError, InvalidArgumentError, InvariantError, StepOrderError
from blockyard.scheduler import Request, Scheduler, Step
from blockyard.tools.demo.executors import Wrapper

BLOCK, LAYERS = 4, 2
LAYOUT = KVLayout("kv_first", LAYERS, BLOCK, num_kv_heads=1, head_size=1, dtype="int64")


@pytest.fixture
def cache() -> Iterator[KVCache]:
    with KVCache(LAYOUT, device_blocks=12, host_blocks=8, watermark=0.0) as cache:
        yield cache


def compute(cache: KVCache, step: Step) -> list[int]:
    """Write each token into its slot and read all tokens of its row; the sum of these is the next one."""
    sums = [0] * step.rows
    for layer in range(LAYERS):
        step.wait_for_layer(layer)
        cells = cache.engine.tensors[layer].view(2, -1).numpy()
        cells[:, step.slot_mapping] = step.token_ids.astype(np.int64) + layer
        for row, end in enumerate((step.start + step.lengths).tolist()):
            at = np.arange(end)
            slots = step.block_tables[row, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
            tokens = step.all_token_ids(row)[:end].astype(np.int64) + layer
            if step.void is None or not step.void[row]:
                assert (cells[:, slots] == tokens).all(), f"row {row}, layer {layer}"
            sums[row] = int(tokens.sum())
    return [sums[draw.row] % 97 for draw in step.draws()]


def serve(cache: KVCache, requests: list[Request], **options) -> tuple[Scheduler, dict[str, list[list[int]]]]:
    scheduler, done = Scheduler(cache, **options), {}
    for request in requests:
        scheduler.add(request)
    while scheduler.num_unfinished:
        with scheduler.step(by_layer=True) as step:
            sampled = compute(cache, step)
        done |= {ended.request.request_id: list(map(list, ended.outputs)) for ended in scheduler.update(step, sampled)}
    scheduler.drain()
    assert cache.manager.stats().open_tickets == []
    cache.manager.check()
    return scheduler, done


def test_a_step_that_cannot_be_made_leaves_no_ticket_and_no_request_behind(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise MemoryError

    scheduler = Scheduler(cache)
    scheduler.add(Request("a", [1] * 7, max_tokens=3))
    with monkeypatch.context() as patched:
        patched.setattr(type(scheduler._builder), "build", fail)
        with pytest.raises(MemoryError):
            scheduler.step()
    scheduler.poll()
    assert cache.manager.num_open_tickets == 0
    while scheduler.num_unfinished:
        with scheduler.step() as step:
            sampled = compute(cache, step)
        scheduler.update(step, sampled)
    cache.manager.check()


def requests_of(count: int) -> list[Request]:
    return [Request(f"{number}", [number + 1] * 7, max_tokens=12, n=1 + number % 2) for number in range(count)]


@pytest.mark.parametrize("overlap_io", [None, False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_loop_serves_from_three_tiers_and_ends_every_ticket(tmp_path: Path, mode: str, overlap_io: bool | None):
    with KVCache(LAYOUT, device_blocks=200) as roomy:
        _, wanted = serve(roomy, requests_of(8))
    swap = {"host_blocks": 4, "swap_store": f"file://{tmp_path}?size=1MiB"}
    with KVCache(LAYOUT, device_blocks=12, watermark=0.0, prefix_caching=True, **swap) as cache:
        scheduler, found = serve(cache, requests_of(8), preemption_mode=mode, overlap_io=overlap_io)
        assert found == wanted
        stats = scheduler.stats()
        assert (stats.preempted_swap_host > 0, stats.preempted_swap_external > 0) == (mode == "swap", mode == "swap")


@pytest.mark.parametrize("full", [False, True])
def test_blocks_that_are_lost_cost_a_recompute_and_no_token(
    tmp_path: Path, full: bool, caplog: pytest.LogCaptureFixture
):
    with KVCache(LAYOUT, device_blocks=200) as roomy:
        _, wanted = serve(roomy, requests_of(8))
    options = {"swap_store": SimulatedStore(200, LAYOUT.bytes_per_block, seed=1, fail=0.3)}
    if full:  # what is on its way at once, and is said to be lost
        options = {"swap_store": f"file://{tmp_path}?size=1MiB", "max_staging": LAYOUT.bytes_per_block}
    with KVCache(LAYOUT, device_blocks=12, watermark=0.0, **options) as cache:
        scheduler, found = serve(cache, requests_of(8), preemption_mode="swap")
        assert scheduler.stats().lost > 0
        assert found == wanted
    said = [record.getMessage() for record in caplog.records if record.name == "blockyard.scheduler"]
    assert len(said) == full  # of one cause at most one a minute
    assert all(re.fullmatch("[0-9]+ blocks were lost in a transfer: .* bytes are staged, .*", line) for line in said)


def test_prompts_are_loaded_from_the_prefix_store_that_an_idle_engine_has_filled(tmp_path: Path):
    options = {
        "device_blocks": 16,
        "prefix_caching": True,
        "prefix_store": f"local://{tmp_path}?size=1MiB",
        "namespace": b"model",
        "prefetch_timeout_base": 30.0,
    }
    with KVCache(LAYOUT, **options) as cache:
        scheduler, wanted = serve(cache, requests_of(2))
        until = time.monotonic() + 300
        while cache.prefix_store.waiting_blocks:
            assert time.monotonic() < until
            scheduler.poll()
            time.sleep(0.01)
    with KVCache(LAYOUT, **options) as cache:
        scheduler, found = serve(cache, requests_of(2))
        assert scheduler.stats().cached_tokens >= 2 * BLOCK
        assert found == wanted


def test_a_request_waits_for_the_blocks_of_a_load_that_no_request_waits_for(tmp_path: Path):
    options = {"prefix_caching": True, "namespace": b"model", "prefetch_timeout_base": 30.0, "device_blocks": 4}
    options |= {"prefix_store": f"local://{tmp_path}?size=1MiB", "watermark": 0.0}
    prompt, gate = list(range(9)), threading.Event()
    with KVCache(LAYOUT, **options) as cache:
        serve(cache, [Request("a", prompt, max_tokens=1)])
    with KVCache(LAYOUT, **options) as cache:
        cache.engine.transfers.streams.launch("in", lambda: gate.wait(30))  # copies are slow
        cache.prefix_store.prefetch(prompt)
        until = time.monotonic() + 300
        while not cache.manager.stats().leased_blocks["device"] and time.monotonic() < until:
            cache.poll()
        assert cache.manager.stats().leased_blocks["device"]
        threading.Timer(0.2, gate.set).start()
        serve(cache, [Request("b", list(range(50, 62)), max_tokens=2)])


class EndsWithTheStep:
    """A prefetch that is under way when a step is decided, and done at its end."""

    def __init__(self, prompt: HashedPrompt) -> None:
        self.prompt, self.looks = prompt, 0

    @property
    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_steps_that_wait_for_loads_are_no_sign_that_nothing_can_be_done(tmp_path: Path):
    options = {"prefix_caching": True, "namespace": b"model", "prefix_store": f"local://{tmp_path}?size=1MiB"}
    with KVCache(LAYOUT, device_blocks=8, **options) as cache:
        scheduler = Scheduler(cache, prefetch=EndsWithTheStep)
        for number in range(6):
            scheduler.add(Request(f"{number}", [1, 2, 3], max_tokens=1))
            with scheduler.step() as step:
                assert not step.rows
            scheduler.update(step, [])
            scheduler.abort(f"{number}")


def test_calls_out_of_order_are_refused_at_once_and_say_what_to_call(cache: KVCache):
    scheduler = Scheduler(cache)
    scheduler.add(Request("a", [1, 2, 3], max_tokens=3))
    with pytest.raises(StepOrderError, match="schedule is for a Scheduler of a BlockManager; of a KVCache: step"):
        scheduler.schedule()
    with scheduler.step() as step:
        with pytest.raises(StepOrderError, match="ticket 1 is not over: leave its `with` block, then give its tokens"):
            scheduler.step()
        with pytest.raises(StepOrderError, match="ticket 1 is not over: call update after its block"):
            scheduler.update(step, [5])
    with pytest.raises(
        StepOrderError, match=r"ticket 1 was not given to update: call update\(step, sampled\), or give"
    ):
        scheduler.step()
    with pytest.raises(StepOrderError, match="ticket 1 is no context manager now"), step:
        pass
    scheduler.update(step, [5])
    with pytest.raises(StepOrderError, match="the step of ticket 1 is not in flight"):
        scheduler.update(step, [5])
    with scheduler.step() as step:
        pass
    scheduler.give_up()
    with scheduler.step() as step:
        assert step.token_ids.tolist() == [1, 2, 3, 5], "it starts again from its tokens"
    scheduler.update(step, [6])


def test_the_calls_of_cache_and_scheduler_do_not_mix(cache: KVCache):
    with Scheduler(cache).step():
        for call in (cache.step, cache.poll, cache.drain):
            with pytest.raises(
                StepOrderError, match=r"ticket 1 was not taken by KVCache.step: make a .* Scheduler\(cache"
            ):
                call()


def test_a_scheduler_of_a_manager_has_no_steps_of_its_own():
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=8))
    for call in (scheduler.step, scheduler.poll, scheduler.drain):
        with pytest.raises(StepOrderError, match="needs a Scheduler of a KVCache; of a manager: schedule, complete"):
            call()
    with pytest.raises(StepOrderError, match="ticket 1 is no context manager now: write `with"), scheduler.schedule():
        pass
    with pytest.raises(InvalidArgumentError, match="executor is given with a BlockManager, needs a KVCache"):
        Scheduler(scheduler.manager, executor=object())


def test_a_body_that_raises_gives_the_step_up(cache: KVCache):
    scheduler = Scheduler(cache)
    scheduler.add(Request("a", [1, 2, 3], max_tokens=2))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), scheduler.step() as step:
            _ = 1 // 0
    with scheduler.step():
        scheduler.give_up()
    with scheduler.step() as step:
        assert step.token_ids.tolist() == [1, 2, 3]
    scheduler.update(step, [4])
    assert cache.manager.stats().open_tickets == []


def test_requests_for_which_nothing_can_be_done_are_an_error_and_not_an_endless_loop(cache: KVCache):
    scheduler = Scheduler(cache)
    strangers = cache.manager.allocate(counts=[BLOCK] * 12)
    scheduler.add(Request("a", [1, 2, 3], max_tokens=2))
    for _ in range(3):
        with scheduler.step() as step:
            pass
        scheduler.update(step, [])
    with pytest.raises(InvariantError, match="1 requests wait, 0 of 12 device blocks are free"):
        scheduler.step()
    cache.manager.free(list(strangers))
    with scheduler.step() as step:
        assert step.rows == 1
    scheduler.update(step, [1])


def test_a_request_waits_for_blocks_that_a_reader_has_pinned():
    with KVCache(LAYOUT, device_blocks=8, watermark=0.0, prefix_caching=True) as cache:
        serve(cache, [Request("first", list(range(4 * BLOCK)), 2)])
        pin, pinned = cache.manager.pins.pin_prompt(list(range(4 * BLOCK + 1)))
        scheduler = Scheduler(cache)
        scheduler.add(Request("second", list(range(100, 100 + 5 * BLOCK)), 2))
        for _ in range(20):
            with scheduler.step() as step:
                assert step.rows == 0, f"{pinned // BLOCK} of 8 blocks are pinned, and 6 are needed"
            scheduler.update(step, [])
        cache.manager.pins.unpin(pin)
        with scheduler.step() as step:
            assert step.rows == 1


def test_the_device_gives_memory_back_in_steps():
    with KVCache(LAYOUT, device_blocks=4, max_device_blocks=64) as cache:
        cache.resize(64)
        scheduler = Scheduler(cache)
        cache.resize(4)
        with scheduler.step() as step:
            pass
        scheduler.update(step, [])
        assert cache.elastic is not None
        assert cache.elastic.num_blocks == 4


def test_a_request_that_comes_after_idle_steps_is_served(cache: KVCache):
    scheduler = Scheduler(cache)
    for _ in range(10):
        with scheduler.step() as step:
            pass
        scheduler.update(step, [])
    scheduler.add(Request("late", [1, 2, 3], 2))
    with scheduler.step() as step:
        assert step.rows == 1


class InterruptedExecutor(Wrapper):
    """A plug-in that is interrupted as a submission ends, where the test says so."""

    interrupts = False

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        super().submit(decision, by_layer=by_layer)
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("then", ["drain", "poll", "step"])
def test_two_interrupts_in_two_calls_leave_no_unknown_ticket(
    cache: KVCache, then: str, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(_ticket: int) -> None:
        raise KeyboardInterrupt

    scheduler = Scheduler(cache, executor=(executor := InterruptedExecutor(cache.executor)))
    scheduler.add(Request("a", [1] * 7, max_tokens=3))
    with monkeypatch.context() as patched:
        patched.setattr(scheduler._swapping, "end", interrupted)
        with pytest.raises(KeyboardInterrupt), scheduler.step():
            pass
    executor.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    if then != "step":
        getattr(scheduler, then)()
        assert cache.manager.num_open_tickets == 0
    while scheduler.num_unfinished:
        with scheduler.step() as step:
            sampled = compute(cache, step)
        scheduler.update(step, sampled)
    scheduler.drain()
    cache.manager.check()
    assert (cache.manager.num_open_tickets, cache.manager.stats().sequences) == (0, 0)


def test_a_scheduler_of_a_closed_cache_refuses_a_step(cache: KVCache):
    scheduler = Scheduler(cache)
    scheduler.add(Request("a", [1, 2, 3], max_tokens=2))
    cache.close()
    for _ in range(2):
        with pytest.raises(BlockyardError, match="the cache is closed"):
            scheduler.step()
    assert (scheduler.num_unfinished, cache.manager.stats().sequences) == (1, 0)
    scheduler.abort("a")
    cache.manager.check()
