"""`KVCache`: one set of sizes, steps that own their tickets, three tiers read back byte for byte."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_stores import MemoryStore

from blockyard import CacheGroup, KVCache, KVLayout, PrefixCaching, Request, Scheduler
from blockyard.cache import Health
from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError, MappingError, StepOrderError
from blockyard.layout import GroupedLayout
from blockyard.stores import StoreStats, open_store

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
SIZE = LAYOUT.bytes_per_block


COUNTS = ["device_blocks", "max_device_blocks", "host_blocks", "external_blocks"]


def url(folder: Path, blocks: int = 16) -> str:
    return f"file://{folder}?size={blocks * (SIZE + 4096) + 65536}"


def fill(cache: KVCache, blocks: np.ndarray, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, 256, (len(blocks), SIZE)).astype(np.uint8)
    cache.engine.write("device", blocks.astype(np.int64), rows)
    return rows


def held(cache: KVCache, sequence: object) -> np.ndarray:
    return cache.engine.read("device", cache.manager.block_table(sequence).astype(np.int64))


def test_sizes_are_given_once(tmp_path: Path):
    with KVCache(LAYOUT, device_blocks=6, host_bytes=3 * SIZE + 1, swap_store=url(tmp_path)) as cache:
        pools = [cache.manager.pool(tier).num_blocks for tier in ("device", "host", "external")]
        assert pools[:2] == [6, 3]
        assert pools[2] == cache.swap_store.num_slots > 0
        assert [cache.engine.num_blocks(tier) for tier in ("device", "host")] == [6, 3]
        assert cache.manager.block_size == 4
        assert cache.swap_store.bytes_per_block == SIZE


def test_sizes_may_be_numpy_integers():
    store: Any = {"swap_store": "memory://numpy-sizes", "swap_store_bytes": np.int64(1 << 20)}
    with KVCache(LAYOUT, device_blocks=np.int64(6), host_bytes=np.int64(3 * SIZE), **store) as cache:
        assert [cache.manager.pool(tier).num_blocks for tier in ("device", "host")] == [6, 3]
        cache.resize(np.int32(5))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match=r"^blocks is 5\.5, must be an int$"):
            cache.resize(5.5)  # type: ignore[arg-type]
        assert cache.manager.pool("device").num_blocks == 5


def test_metrics_count_swaps_and_usage_by_tier():
    with KVCache(LAYOUT, device_blocks=8, host_blocks=4, swap_store="memory://cache-metrics?size=64KiB") as cache:
        sequences = cache.manager.allocate(counts=[8, 12])
        with cache.step():
            pass
        cache.manager.swap_out(sequences[:1])
        cache.manager.swap_out(sequences[1:], to="external")
        with cache.step():
            pass
        cache.drain()
        assert cache.stats().swapped_out_blocks == {"host": 2, "external": 3}
        assert cache.stats().used_blocks == {"device": 0, "host": 2, "external": 3}
        cache.manager.swap_in(sequences[:1])
        cache.manager.swap_in(sequences[1:])
        with cache.step():
            pass
        assert cache.stats().swapped_in_blocks == {"host": 2, "external": 3}
        assert cache.stats().used_blocks["device"] == 5


def test_tensors_give_the_number_of_blocks():
    tensors = [torch.zeros(shape, dtype=torch.float32) for shape, _ in LAYOUT.tensor_shapes(9)]
    with KVCache(LAYOUT, tensors=tensors) as cache:
        assert cache.manager.pool().num_blocks == 9
        assert cache.engine.tensors[0].data_ptr() == tensors[0].data_ptr()


def test_a_grouped_layout_has_one_block_size():
    grouped = GroupedLayout((("a", LAYOUT), ("b", LAYOUT)))
    with KVCache(grouped, device_blocks=4) as cache:
        assert cache.manager.block_size == 4
        assert cache.layout.bytes_per_block == 2 * SIZE
    for sizes in ((16, 8), (8, 16)):
        parts = [(f"{size}", replace(LAYOUT, block_size=size)) for size in sizes]
        for groups in (None, [CacheGroup.full_attention()] * 2):
            with pytest.raises(LayoutError, match=r"block_size of the layout's groups is \{'.*\}, must be the same"):
                KVCache(GroupedLayout(tuple(parts)), device_blocks=4, groups=groups)


def test_a_recurrent_group_has_states_of_any_size_and_the_others_give_the_block_size():
    state = KVLayout("blocks tokens dim", num_layers=1, block_size=1, num_kv_heads=1, head_size=24, dtype="float16")
    groups = [CacheGroup.recurrent(), CacheGroup.full_attention()]
    with KVCache(GroupedLayout((("state", state), ("full", LAYOUT))), device_blocks=8, groups=groups) as cache:
        assert cache.manager.block_size == LAYOUT.block_size
        sequence = cache.manager.allocate(10)
        slots = cache.manager.slot_mapping(sequence, 0, 10, group=1)
        assert slots.max() < cache.engine.tensors[-1].shape[1] * LAYOUT.block_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "device_blocks is None"),
        ({"device_blocks": 4, "host_blocks": 1, "host_bytes": 1000}, "host_blocks is 1 and host_bytes 1000"),
        ({"device_blocks": 4, "host_bytes": SIZE - 1}, f"{SIZE - 1} bytes hold no block of {SIZE} bytes"),
        ({"device_blocks": 4, "host_bytes": 40}, f"host_bytes is 40: 40 bytes hold no block of {SIZE} bytes; did you "),
        ({"device_blocks": 4, "host_bytes": "40"}, r'did you mean "40GiB"\?'),
        ({"device_blocks": 4, "host_bytes": 0}, f"0 bytes hold no block of {SIZE} bytes$"),
        ({"device_blocks": 4, "host_bytes": True}, "host_bytes is True, must be 0 to"),
        ({"device_blocks": 4, "host_bytes": "1 parsec"}, "host_bytes: '1 parsec' is not a size"),
        ({"device_blocks": 4, "host_blocks": -1}, "host_blocks is -1"),
        ({"device_blocks": 4, "max_staging": 0}, "max_staging is 0"),
        ({"device_blocks": 4, "external_blocks": -1}, "external_blocks is -1, must be at least 0"),
        ({"device_blocks": 4, "max_staging": 40, "swap_store": "memory://a?size=1MiB"}, 'max_staging is 40.*"40GiB"'),
        (
            {"device_blocks": 4, "swap_store": "memory://a", "swap_store_bytes": 40},
            "store_bytes is 40.*did you mean",
        ),
        ({"device_blocks": 4, "swap_store_bytes": "1TiB"}, "swap_store_bytes is 1TiB, but swap_store is not a URL"),
        (
            {"device_blocks": 4, "swap_store": "memory://a?size=1MiB", "swap_store_bytes": "2MiB"},
            r"'memory://a\?size=1MiB' has size=1MiB, but swap_store_bytes is 2MiB: give only one of them",
        ),
        (
            {"device_blocks": 4, "prefix_store": "memory://a?timeout_base=9&size=1MiB", "prefix_store_bytes": "2MiB"},
            "has size=1MiB, but prefix_store_bytes is 2MiB",
        ),
        ({"max_device_blocks": 4}, "max_device_blocks needs device_blocks"),
        ({"device_blocks": 4, "max_device_blocks": 2}, "^max_device_blocks is 2, must be at least 4 blocks, those of"),
        ({"device_blocks": 4, "max_device_bytes": SIZE}, f"^max_device_bytes is {SIZE}, must be at least 4 blocks, th"),
        (
            {"device_blocks": 0, "max_device_blocks": 2},
            "^max_device_blocks is 2, must be None for a device of 0 blocks",
        ),
        *(({"device_blocks": 4, name: 2.0}, f"^{name} is 2.0, must be an int$") for name in COUNTS),
        ({"device_blocks": 4, "host_bytes": 4096.0}, "^host_bytes is 4096.0, must be 0 to"),
        ({"device_blocks": 4, "namespace": "llama"}, "^namespace is 'llama', must be bytes$"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options: dict[str, object], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        KVCache(LAYOUT, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "used"), [(None, 8), (5, 5), (9, 8), (0, 0)])
def test_slots_of_the_store_are_used_as_far_as_is_said(tmp_path: Path, wanted: int | None, used: int):
    store = open_store(url(tmp_path), bytes_per_block=SIZE, num_slots=8)
    with KVCache(LAYOUT, device_blocks=4, swap_store=store, external_blocks=wanted) as cache:
        assert cache.manager.pool("external").num_blocks == used


def test_a_stores_size_can_stand_beside_its_url():
    options: Any = {"device_blocks": 4, "prefix_caching": True, "namespace": b"test"}
    options |= {"swap_store": "memory://swap?timeout_base=9", "swap_store_bytes": "1MiB"}
    options |= {"prefix_store": "memory://kept", "prefix_store_bytes": 1 << 20}
    with KVCache(LAYOUT, **options) as beside:
        assert beside.swap_store is not None
        assert beside.prefix_store is not None
        with KVCache(LAYOUT, device_blocks=4, swap_store="memory://other?size=1MiB") as inside:
            assert inside.swap_store is not None
            assert beside.swap_store.num_slots == inside.swap_store.num_slots == beside.prefix_store.store.num_slots


def test_opened_parts_are_closed_when_a_later_part_is_refused_and_given_ones_stay_open(tmp_path: Path):
    swap, kept = (open_store(f"{url(tmp_path)}", bytes_per_block=SIZE, use=use) for use in ("swap", "prefix"))
    options: Any = {"device_blocks": 4, "prefix_caching": True, "namespace": b"n"}
    refused = {"watermark": 7.0}, {"prefix_writes": "often"}, {"prefix_store": "file:///"}, {"layout": None}
    for wrong in refused:
        given = {"layout": LAYOUT, "swap_store": swap, "prefix_store": kept} | options | wrong
        with pytest.raises(BlockyardError) as caught:
            KVCache(**given)
        assert not swap.is_closed
        assert not kept.is_closed
        assert caught.value.__traceback__ is not None, "the failed call's frames are alive, but not its claims"
    with pytest.raises(InvalidArgumentError, match="watermark"):
        KVCache(LAYOUT, swap_store=f"{url(tmp_path)}", watermark=7.0, **options)
    assert len(list(tmp_path.rglob("blockyard-swap-*"))) == 1, "the refused cache closed the store that it opened"
    with KVCache(LAYOUT, swap_store=swap, prefix_store=kept, **options):
        pass
    assert swap.is_closed
    assert kept.is_closed
    message = f"swap_store has blocks of {2 * SIZE} bytes, must have {SIZE}"
    other = open_store(url(tmp_path), bytes_per_block=2 * SIZE)
    with other, pytest.raises(InvalidArgumentError, match=message):
        KVCache(LAYOUT, device_blocks=4, swap_store=other)
    with pytest.raises(LayoutError):
        KVCache(LAYOUT, tensors=[torch.zeros(3)])


@pytest.mark.parametrize("to", ["host", "external"])
def test_a_sequence_comes_back_byte_for_byte(tmp_path: Path, to: str):
    with KVCache(LAYOUT, device_blocks=6, host_blocks=6, swap_store=url(tmp_path)) as cache:
        sequence = cache.manager.allocate(10)
        with cache.step():
            rows = fill(cache, cache.manager.block_table(sequence), seed=1)
        cache.manager.swap_out(sequence, to)
        with cache.step() as step:
            pass
        ended = step.ended + cache.drain()
        assert [(end.ticket, end.lost.tolist(), end.errors) for end in ended] == [(step.decision.ticket, [], ())]
        assert cache.manager.tier(sequence) == to
        others = cache.manager.allocate(counts=[20])
        with cache.step():
            fill(cache, cache.manager.block_table(int(others[0])), seed=2)
        cache.manager.free(others)
        cache.manager.swap_in(sequence)
        with cache.step(by_layer=True) as step:
            if to == "host":
                step.wait_for_layer(0)
                step.wait_for_layer(1)
        cache.drain()
        np.testing.assert_array_equal(held(cache, sequence), rows)
        cache.manager.check()


def test_a_step_that_loads_from_the_host_is_waited_for():
    with KVCache(LAYOUT, device_blocks=4, host_blocks=4) as cache:
        sequence = cache.manager.allocate(4)
        with cache.step():
            pass
        cache.manager.swap_out(sequence)
        cache.step()
        cache.drain()
        cache.manager.swap_in(sequence)
        with cache.step() as step:
            pass
        assert [end.ticket for end in step.ended] == [step.decision.ticket]
        assert cache.manager.stats().open_tickets == []


def test_an_error_in_the_body_is_not_hidden_and_the_ticket_ends_later():
    with KVCache(LAYOUT, device_blocks=4, host_blocks=4) as cache:
        sequence = cache.manager.allocate(4)
        with cache.step():
            pass
        cache.manager.swap_out(sequence)
        with pytest.raises(ZeroDivisionError), cache.step() as step:
            1 / 0  # noqa: B018
        assert step.ended == []
        assert [end.ticket for end in cache.drain()] == [step.decision.ticket]
        assert cache.manager.tier(sequence) == "host"


@pytest.mark.parametrize("call", ["take_decision", "complete", "fail", "lose"])
def test_only_the_cache_ends_the_steps_of_its_manager_since_only_it_moves_the_bytes(call: str):
    with KVCache(LAYOUT, device_blocks=4, host_blocks=4) as cache:
        manager, sequence = cache.manager, cache.manager.allocate(8)
        with cache.step():
            rows = fill(cache, manager.block_table(sequence), seed=1)
        manager.swap_out(sequence)
        step = cache.step()
        arguments = {"take_decision": (), "complete": (1,), "fail": (1,), "lose": (step.decision.ticket, [])}[call]
        before = manager.stats()
        with pytest.raises(
            StepOrderError, match=rf"^{call} was called .* call KVCache.step, or step of Scheduler\(cac"
        ):
            getattr(manager, call)(*arguments)
        assert manager.stats() == before
        step.finish()
        cache.drain()
        manager.swap_in(sequence)
        with cache.step():
            np.testing.assert_array_equal(held(cache, sequence), rows)


def test_a_scheduler_over_a_cache_s_manager_is_refused_at_its_first_step():
    with KVCache(LAYOUT, device_blocks=4) as cache:
        scheduler = Scheduler(cache.manager)
        scheduler.add(Request("a", [1, 2], 1))
        with pytest.raises(StepOrderError, match=r"step of Scheduler\(cache\)"):
            scheduler.schedule()
        scheduler.give_up()
        assert (cache.manager.stats().sequences, cache.manager.pool().num_free) == (0, 4)


def test_several_steps_can_be_open_at_once():
    with KVCache(LAYOUT, device_blocks=8, host_blocks=8) as cache:
        first, second = cache.manager.allocate(4, 4)
        cache.step().finish()
        cache.manager.swap_out(first)
        one = cache.step()
        cache.manager.swap_out(second)
        two = cache.step()
        ended = two.finish() + one.finish() + cache.drain()
        assert sorted(end.ticket for end in ended) == [one.decision.ticket, two.decision.ticket]
        cache.manager.check()


def test_a_decision_that_cannot_be_carried_out_fails_its_ticket(tmp_path: Path):
    with KVCache(LAYOUT, device_blocks=4, swap_store=url(tmp_path)) as cache:
        sequence = cache.manager.allocate(4)
        cache.step().finish()
        cache._loop.executor = type(cache.executor)(cache.engine)  # without the store
        cache.manager.swap_out(sequence, "external")
        with pytest.raises(MappingError):
            cache.step()
        assert cache.manager.stats().open_tickets == []
        cache.manager.free(sequence)
        cache.manager.check()


def test_blocks_that_are_lost_are_named(tmp_path: Path):
    with KVCache(LAYOUT, device_blocks=4, swap_store=url(tmp_path)) as cache:
        sequence = cache.manager.allocate(4)
        cache.step().finish()
        cache.manager.swap_out(sequence, "external")
        cache.step().finish()
        cache.drain()
        path = cache.swap_store.path
        path.write_bytes(bytes(path.stat().st_size))
        cache.manager.swap_in(sequence)
        with cache.step() as step:
            pass
        ended = step.ended + cache.drain()
        assert [end.lost.tolist() for end in ended] == [[int(sequence)]]
        cache.manager.free(sequence)
        cache.manager.check()


def test_a_device_shrinks_and_grows_with_its_memory():
    with KVCache(LAYOUT, device_blocks=64, max_device_blocks=128) as cache:
        assert cache.elastic.num_blocks == 64
        sequence = cache.manager.allocate(4 * 60)
        cache.step().finish()
        assert cache.resize(16).extent == 60
        cache.manager.free(sequence)
        cache.step().finish()
        assert cache.manager.defrag.progress().done
        assert cache.elastic.num_blocks == 16
        assert cache.resize(128).blocks == cache.elastic.num_blocks == 128
        assert cache.manager.allocate(4 * 100)
        with pytest.raises(InvalidArgumentError, match="blocks is 129, must be 1 to 128"):
            cache.resize(129)
        cache.manager.check()


def test_blocks_of_another_namespace_are_misses(tmp_path: Path):
    options = {"device_blocks": 4, "swap_store": url(tmp_path)}
    with KVCache(LAYOUT, namespace=b"one", **options) as cache:
        own = cache.swap_store
        own.wait(own.submit_write(np.array([0]), np.ones((1, SIZE), np.uint8)))
        assert own.wait(own.submit_read(np.array([0]))).ok.all()
    with KVCache(LAYOUT, namespace=b"other", **options) as cache:
        assert not cache.swap_store.wait(cache.swap_store.submit_read(np.array([0]))).ok.any()


def test_the_prefix_cache_is_an_option():
    with KVCache(LAYOUT, device_blocks=8, prefix_caching=PrefixCaching(max_events=4)) as cache:
        first = cache.manager.allocate(list(range(9)))
        cache.step().finish()
        cache.manager.mark_computed(first)
        assert cache.manager.allocate(list(range(9))).cached_tokens == 8
        assert cache.stats().hit_blocks == 2
        assert len(cache.manager.prefix.take_events()) == 2
    assert "2 sequences" in repr(cache)


class Failing(MemoryStore):
    """A swap store whose storage fails, or whose counters do."""

    def stats(self) -> StoreStats:
        self.before("stats")
        return super().stats()


def failing_cache() -> tuple[KVCache, Failing]:
    store = Failing(bytes_per_block=SIZE)
    return KVCache(LAYOUT, device_blocks=8, swap_store=store), store


def swap_out(cache: KVCache) -> None:
    sequence = cache.manager.allocate(8)
    with cache.step():
        pass
    cache.manager.swap_out(sequence, to="external")
    with cache.step():
        pass
    cache.drain()


def test_a_store_that_fails_is_a_reason_and_leaves_the_cache_ok():
    cache, store = failing_cache()

    def fail(call: str) -> None:
        if call == "put":
            raise OSError(f"no route for {call}")

    with cache:
        assert cache.health() == Health(ok=True)
        store.before = fail
        swap_out(cache)
        reason = "swap store: 1 errors in a row, the last: OSError: no route for put"
        assert cache.health() == Health(ok=True, reasons=(reason,))
        store.before = lambda call: None
        swap_out(cache)
        assert cache.health() == Health(ok=True)


def test_a_store_that_hangs_is_a_reason_and_the_call_does_not_wait():
    cache, store = failing_cache()
    gate = threading.Event()
    with cache:
        calls: list[str] = []
        store.before, store.timeout_base = lambda call: calls.append(call) or call == "stats" or gate.wait(), 0.5
        swap_out(cache)
        del calls[:]
        assert cache.health() == Health(ok=True, reasons=("swap store: it does not answer, its blocks are misses",))
        assert set(calls) <= {"stats"}
        gate.set()


def test_a_store_that_cannot_say_how_it_is_makes_no_probe_fail():
    cache, store = failing_cache()
    with cache:

        def fail(call: str) -> None:
            raise ZeroDivisionError(f"in {call}")

        store.before = fail
        health = cache.health()
        store.before = lambda call: None
    assert health == Health(ok=True, reasons=("swap store: stats() raised ZeroDivisionError: in stats",))


def test_repeatedly_failing_steps_are_unhealthy(monkeypatch: pytest.MonkeyPatch):
    with KVCache(LAYOUT, device_blocks=8, host_blocks=4) as cache:

        def fail() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        sequences = [cache.manager.allocate(4) for _ in range(3)]
        cache.step().finish()
        with monkeypatch.context() as broken:
            broken.setattr(cache.engine, "fence", fail)
            seen = []
            for sequence in sequences[:2]:
                cache.manager.swap_out(sequence)
                with pytest.raises(RuntimeError, match="CUDA error"):
                    cache.step()
                seen.append(cache.health().ok)
        assert seen == [True, False]
        assert cache.health().reasons == ("steps fail: their transfers cannot be started",)
        cache.manager.swap_out(sequences[2])
        with cache.step():
            pass
        assert cache.health() == Health(ok=True)
    assert cache.health() == Health(ok=False, reasons=("the cache is closed",))


@pytest.mark.parametrize("moves", [False, True])
def test_a_closed_cache_refuses_a_step_and_changes_nothing(moves: bool):
    cache = KVCache(LAYOUT, device_blocks=4, host_blocks=4)
    sequence = cache.manager.allocate(8)
    with cache.step():
        pass
    if moves:
        cache.manager.swap_out(sequence)
    cache.close()
    for _ in range(2):
        with pytest.raises(BlockyardError, match="the cache is closed"):
            cache.step()
    assert cache.manager.stats().open_tickets == cache.poll() == []
    assert cache.manager.tier(sequence) == ("host" if moves else "device")
    cache.manager.check()


def test_a_swap_store_belongs_to_one_cache(tmp_path: Path):
    store = open_store(url(tmp_path), bytes_per_block=SIZE)
    with KVCache(LAYOUT, device_blocks=4, swap_store=store) as cache:
        with pytest.raises(InvalidArgumentError, match=r"^swap_store is .* which another cache"):
            KVCache(LAYOUT, device_blocks=4, swap_store=store)
        sequence = cache.manager.allocate(8)  # the store still works
        with cache.step():
            pass
        rows = fill(cache, cache.manager.block_table(sequence), seed=1)
        for move in (lambda: cache.manager.swap_out(sequence, to="external"), lambda: cache.manager.swap_in(sequence)):
            move()
            with cache.step():
                pass
            assert not any(len(end.lost) for end in cache.drain())
        assert np.array_equal(held(cache, sequence), rows)
