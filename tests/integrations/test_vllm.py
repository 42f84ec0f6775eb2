"""`BlockyardSpec`, manager and worker, over vLLM's own abstract classes (`VLLM_SOURCE`) or stand-ins of them."""

import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_modules
from checkpoints import checkpoint, vllm_config

from blockyard.errors import BlockyardError, CaptureError, InvalidArgumentError

KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(12)]


@pytest.fixture
def context(vllm: SimpleNamespace) -> Any:
    return vllm.base.ReqContext(req_id="one")


def spec_of(vllm: SimpleNamespace, options: dict[str, Any], **fields: Any) -> Any:
    return vllm.ours.BlockyardSpec(vllm_modules.config(vllm, options, **fields))


def manager_of(vllm: SimpleNamespace, chunks: int, **options: Any) -> Any:
    return spec_of(vllm, {"host_bytes": 64 * chunks, **options}).get_manager()


def store(manager: Any, context: Any, keys: list[bytes], *, success: bool = True) -> Any:
    prepared = manager.prepare_store(keys, context)
    manager.complete_store(prepared.keys_to_store, context, success)
    return prepared


def lookups(manager: Any, context: Any, keys: list[bytes] = KEYS) -> str:
    return " ".join(manager.lookup(key, context).name for key in keys)


# ---- the spec ----


def test_a_misspelt_option_is_named_in_the_log(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture):
    options = {"host_bytes": 640, "prefix_stroe": "redis://", "spec_name": "BlockyardSpec", "others": 2}
    with caplog.at_level("WARNING"):
        spec_of(vllm, options).get_manager()
    assert [record.getMessage() for record in caplog.records] == [
        "kv_connector_extra_config has options without effect: 'prefix_stroe' (did you mean 'prefix_store'?), 'others'"
    ]


def test_import_without_vllm_says_what_is_needed():
    code = "import sys; sys.modules['vllm'] = None; import blockyard.integrations.vllm"
    finished = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ImportError: blockyard.integrations.vllm needs vLLM 0.32 or 0.33" in finished.stderr


@pytest.mark.parametrize("kind", vllm_modules.KINDS)
def test_another_signature_is_refused_by_name(kind: str):
    with vllm_modules.loaded(kind) as vllm:
        base = vllm.base
    changed = ModuleType("vllm.v1.kv_offload.base")
    changed.__dict__.update({name: value for name, value in vars(base).items() if not name.startswith("__")})

    class OffloadingManager(base.OffloadingManager):  # type: ignore[misc]
        def prepare_store(self, keys, req_context, priority): ...

    OffloadingManager.__module__ = "vllm.v1.kv_offload.base"
    changed.OffloadingManager = OffloadingManager  # type: ignore[attr-defined]
    with (
        pytest.raises(ImportError, match=r"prepare_store passes priority, which Blockyard's does not take"),
        vllm_modules.loaded(kind, base=changed),
    ):
        pass


def test_the_capacity_is_the_bytes_over_those_of_a_chunk(vllm: SimpleNamespace):
    assert spec_of(vllm, {"cpu_bytes_to_use": 1000}).num_chunks == 15
    assert spec_of(vllm, {"host_bytes": "1KiB", "blocks_per_chunk": 4}).num_chunks == 4
    assert spec_of(vllm, {"host_bytes": 1024}, world_size=2).num_chunks == 8
    assert spec_of(vllm, {"host_bytes": 1024.0}).get_manager().num_chunks == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither is given, must be exactly one of host_bytes and cpu_bytes_to_use"),
        ({"host_bytes": 640, "cpu_bytes_to_use": 640}, "host_bytes and cpu_bytes_to_use is given, must be exactly one"),
        ({"host_bytes": 63}, "host_bytes is 63: 63 bytes hold no chunk of 64 bytes; did you mean"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"host_bytes": True}, "host_bytes is True"),
        ({"host_bytes": "64G"}, "host_bytes: '64G' is not a size"),
        ({"host_bytes": 640, "prefix_store": 7}, "prefix_store is 7, must be a URL"),
        (
            {"host_bytes": 640, "prefix_store": "file:///x", "prefetch_timeout_base": 0},
            "prefetch_timeout_base is 0, must be seconds",
        ),
        (
            {"host_bytes": 640, "prefix_store": "file:///x", "weights_fixed": 2},
            "weights_fixed is 2, must be true",
        ),
    ],
)
def test_an_option_out_of_range_is_refused(vllm: SimpleNamespace, options: dict[str, Any], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        spec_of(vllm, options)


def test_an_unknown_policy_is_refused(vllm: SimpleNamespace):
    with pytest.raises(InvalidArgumentError, match="policy is 'best'"):
        manager_of(vllm, 4, policy="best")


def test_the_labels_are_those_that_the_manager_fills(vllm: SimpleNamespace):
    spec = spec_of(vllm, {"host_bytes": 640, "policy": "adaptive"})
    (info,) = spec.get_manager().config_info()
    assert tuple(info) == type(spec).config_info_keys({})
    assert info["blockyard_num_chunks"] == 10
    assert info["blockyard_policy"] == "adaptive"
    assert spec.get_manager() is spec.get_manager()


def documented() -> list[dict[str, Any]]:
    text = (Path(__file__).parents[2] / "docs" / "engines" / "vllm.md").read_text(encoding="utf-8")
    return [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def test_each_configuration_of_the_guide_makes_what_it_names(vllm: SimpleNamespace, tmp_path: Path):
    made = set()
    for transfer in documented():
        extra = transfer["kv_connector_extra_config"]
        if transfer["kv_connector"] == "BlockyardKVConnector":  # tests/engines loads it, in vLLM
            assert extra.keys() <= {"host_bytes", "prefix_store", "canonical_layout"}
        if "prefix_store" in extra:
            extra |= {"prefix_store": f"file://{tmp_path}/store?size=8MiB", "host_bytes": "16MiB"}
            spec = vllm.ours.BlockyardSpec(vllm_modules.config(vllm, extra, engine_id=str(tmp_path)))
            vllm.current.current = vllm_config(checkpoint(tmp_path / "model"))
            base, blocks = vllm.base, torch.zeros((16, 64), dtype=torch.int8)
            caches = base.CanonicalKVCaches(
                [base.CanonicalKVCacheTensor(blocks, 64)], [[base.CanonicalKVCacheRef(0, 64)]]
            )
            worker = spec.get_worker(caches)
            assert spec.get_manager().num_chunks == 262144
            spec.get_manager().shutdown()
            worker.shutdown()
            made.add("store")
        elif extra.get("spec_module_path") == vllm.ours.__name__:
            block_bytes = 16 * 2 * 32 * 8 * 128 * 2
            spec = getattr(vllm.ours, extra["spec_name"])(vllm_modules.config(vllm, extra, block_bytes=block_bytes))
            assert spec.get_manager().num_chunks == 8192
            made.add("spec")
        if extra.get("cache_policy_module_path") == vllm.ours.__name__:
            getattr(vllm.ours, extra["eviction_policy"])(cache_capacity=10)
            made.add("policy")
        for options in extra.get("secondary_tiers", []):
            tier = getattr(vllm.ours, options.pop("type"))
            assert options.pop("module_path") == vllm.ours.__name__
            more = options | {"root_dir": str(tmp_path), "size": "1MiB"}
            spec = SimpleNamespace(config=vllm_modules.config(vllm, {}))
            tier(spec, memoryview(np.zeros((2, 4096), np.int8)), "BlockyardTier", **more).shutdown()
            made.add("tier")
    assert made == {"spec", "store", "policy", "tier"}


# ---- the manager ----


def test_a_key_is_pending_then_a_hit(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 4)
    assert manager.on_new_request(context) == vllm.base.RequestOffloadingContext()
    prepared = manager.prepare_store(KEYS[:2], context)
    assert (prepared.keys_to_store, prepared.evicted_keys) == (KEYS[:2], [])
    assert lookups(manager, context, KEYS[:3]) == "HIT_PENDING HIT_PENDING MISS"
    assert manager.prepare_store(KEYS[:2], context).keys_to_store == []
    manager.complete_store(KEYS[:2], context)
    assert lookups(manager, context, KEYS[:3]) == "HIT HIT MISS"
    assert manager.get_load_source(KEYS[0], context).name == "HOST"
    load = manager.prepare_load(KEYS[1::-1], context)
    assert load.block_ids.tolist() == prepared.store_spec.block_ids.tolist()[::-1]
    assert isinstance(load, vllm.common.CPULoadStoreSpec)


def test_a_refusal_changes_nothing(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    store(manager, context, KEYS[:3])
    manager.prepare_load(KEYS[:1], context)
    list(manager.take_events())
    before = lookups(manager, context)
    assert manager.prepare_store(KEYS[3:6], context) is None
    assert manager.prepare_store([KEYS[1], *KEYS[3:5]], context) is None
    assert lookups(manager, context) == before
    assert not list(manager.take_events())
    assert sorted(manager.prepare_store(KEYS[3:5], context).evicted_keys) == KEYS[1:3]


def test_loads_hold_their_chunks_as_often_as_they_were_prepared(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 2)
    store(manager, context, KEYS[:2])
    for _ in range(2):
        manager.prepare_load(KEYS[:2], context)
    manager.complete_load(KEYS[:2], context)
    assert manager.prepare_store(KEYS[2:3], context) is None
    manager.complete_load(KEYS[:1], context)
    assert manager.prepare_store(KEYS[2:3], context).evicted_keys == KEYS[:1]
    with pytest.raises(InvalidArgumentError, match="not being loaded"):
        manager.complete_load([KEYS[1], KEYS[0]], context)
    manager.complete_load(KEYS[1:2], context)  # the refused call has not ended it


def test_a_failed_store_frees_its_chunk(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 1)
    store(manager, context, KEYS[:1], success=False)
    assert lookups(manager, context, KEYS[:1]) == "MISS"
    events = [(event.keys, event.removed) for event in manager.take_events()]
    assert events == ([(KEYS[:1], True)] if hasattr(vllm.base.OffloadingManager, "on_reset_flushed") else [])
    assert store(manager, context, KEYS[1:2]).evicted_keys == []
    assert lookups(manager, context, KEYS[:2]) == "MISS HIT"


def test_evicted_keys_are_misses_unless_a_load_holds_them(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    store(manager, context, KEYS[:3])
    manager.prepare_load(KEYS[1:2], context)
    assert list(manager.idle(KEYS[:3])) == [KEYS[0], KEYS[2]]
    assert (manager.num_empty, manager.num_free) == (0, 2)
    manager.evict([KEYS[0], KEYS[5]])
    assert manager.find_all(KEYS[:3]) == ["miss", "hit", "hit"]
    assert (manager.num_empty, manager.num_free) == (1, 2)
    assert [event.keys for event in manager.take_events() if event.removed] == [KEYS[:1]]


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_exclusive_host_evicts_copies_then_what_was_never_found_again(vllm: SimpleNamespace, chunks: int):
    module = import_module(f"{vllm.ours.__name__}.exclusive_host.order")
    order = module.HostOrder(num_chunks=5 * chunks, num_keys=10, chunks_of=lambda key: chunks)
    order.find(KEYS[:6])
    order.hold(KEYS[:8])
    assert list(order) == [*KEYS[:2], *KEYS[6:8], *KEYS[2:6]]  # those found again have four fifths
    order.copy(KEYS[4:6])
    assert list(order) == [*KEYS[4:6], *KEYS[6:8], *KEYS[:4]]
    order.hold([KEYS[5], KEYS[6]])  # the device has dropped the first
    assert list(order) == [KEYS[4], KEYS[0], KEYS[7], KEYS[6], *KEYS[1:4], KEYS[5]]
    order.drop(KEYS[7])
    order.find(KEYS)  # the first ten of them are remembered, so that no key outlives those before it
    order.hold([KEYS[11], KEYS[0]])
    assert list(order) == [KEYS[4], KEYS[1], KEYS[6], KEYS[11], KEYS[2], KEYS[3], KEYS[5], KEYS[0]]
    order.clear()
    assert not list(order)


def test_of_windows_and_states_a_host_keeps_what_ends_where_a_request_may_go_on(vllm: SimpleNamespace):
    def group(number: int, tokens: int, window: int | None, **more: Any) -> SimpleNamespace:
        size = {"sliding_window_size_in_chunks": window, "load_window_size_in_chunks": lambda end: window}
        flags = {"is_eagle_group": False, "requires_cow_source": False}
        return SimpleNamespace(**{"group_idx": number, "tokens_per_block": tokens, **flags, **size, **more})

    def states_of(request: str) -> list[SimpleNamespace]:
        lengths = {0: 12, 1: 6, 2: 12}
        keys = {
            g: [f"{request}{place}".encode() + g.to_bytes(4, "big") for place in range(n)] for g, n in lengths.items()
        }
        return [SimpleNamespace(offload_keys=keys[number]) for number in lengths]

    points_of = import_module(f"{vllm.ours.__name__}.exclusive_host.points").Points
    points = points_of([group(0, 4, None), group(1, 8, 1, requires_cow_source=True), group(2, 4, 2)], most=6)
    states = states_of("a")
    full, state, window = (each.offload_keys for each in states)
    assert points.windows == [1, 2]
    assert points.add(states, 27) == 24  # where blocks of all groups end
    useful, others = points.sort(full + state + window)
    assert useful == [*full, state[2], *window[4:6]]
    assert others == [*state[:2], *state[3:], *window[:4], *window[6:]]
    assert points.states(others) == [*state[:2], *state[3:]]
    assert points.needed(states, 8, 24) == [*full[2:6], state[2], *window[4:6]]
    assert points.needed(states, 20, 24) == [full[5], state[2], window[5]]
    other = states_of("b")
    points.add(other, 16)
    points.add(other, 32)  # six keys are remembered
    assert points.sort(state + window) == ([], state + window)
    assert len(points.sort(other[1].offload_keys + other[2].offload_keys)[0]) == 6
    points.keep([*full[:2], state[0]])  # where one goes on
    assert points.sort(state)[0] == [state[0]]
    points.clear()
    assert points.sort(other[1].offload_keys)[0] == []
    drafter = points_of([group(0, 4, None, is_eagle_group=True), group(2, 4, 2, is_eagle_group=True)], most=6)
    assert drafter.needed([states[0], states[2]], 8, 24) == [*full[2:7], *window[4:7]]  # one block further
    assert points_of([group(1, 8, None)], most=6).sort(state) == (state, [])


def test_a_key_elsewhere_is_a_hit_while_it_can_be_brought(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    store(manager, context, KEYS[:1])
    manager.is_elsewhere = KEYS[1:2].__contains__
    assert lookups(manager, context, KEYS[:3]) == "HIT HIT MISS"
    assert manager.find_all(KEYS[:3]) == ["hit", "miss", "miss"]
    manager.is_elsewhere = None
    assert lookups(manager, context, KEYS[:3]) == "HIT MISS MISS"


def test_a_store_that_some_worker_could_not_copy_fails(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    manager.prepare_store(KEYS[:2], context)
    manager.spoil([KEYS[0], KEYS[2]])  # only what is being stored can fail
    manager.complete_store(KEYS[:2], context)
    assert lookups(manager, context, KEYS[:2]) == "MISS MISS"
    store(manager, context, KEYS[:3])
    assert lookups(manager, context, KEYS[:3]) == "HIT HIT HIT"
    manager.prepare_store(KEYS[3:4], context)
    manager.spoil(KEYS[3:4])
    manager.reset_cache()
    manager.on_reset_flushed()
    store(manager, context, KEYS[3:4])
    assert lookups(manager, context, KEYS[3:4]) == "HIT"


def test_events_say_what_was_stored_and_removed(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 2)
    store(manager, context, KEYS[:2])
    store(manager, context, KEYS[2:3])
    events = [(event.keys, event.removed, event.medium.name) for event in manager.take_events()]
    assert events == [(KEYS[:2], False, "CPU"), ([KEYS[1]], True, "CPU"), (KEYS[2:3], False, "CPU")]
    assert not list(manager.take_events())
    silent = spec_of(vllm, {"host_bytes": 640}, enable_kv_cache_events=False).get_manager()
    store(silent, context, KEYS[:5])
    assert not list(silent.take_events())


def test_the_event_of_a_failed_store_is_dropped_once_the_key_is_stored_again(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 2)
    store(manager, context, KEYS[:1], success=False)
    store(manager, context, KEYS[:1])
    assert [(event.keys, event.removed) for event in manager.take_events()] == [(KEYS[:1], False)]


def test_a_touched_key_is_evicted_later(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    store(manager, context, KEYS[2::-1])
    manager.touch(KEYS[1:3], context)
    assert store(manager, context, KEYS[3:5]).evicted_keys == [KEYS[0], KEYS[2]]


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_requests_chunks_age_as_one_chain_when_it_finishes(vllm: SimpleNamespace, policy: str):
    manager = manager_of(vllm, 6, policy=policy)
    one, other = vllm.base.ReqContext("one"), vllm.base.ReqContext("other")
    for context in (one, other):
        for place, key in enumerate(KEYS[:4]):
            context.set_offload_key_position(key, 16 * place)
    store(manager, one, KEYS[:3])
    store(manager, other, KEYS[4:6])
    manager.on_request_finished(other)
    manager.prepare_store(KEYS[3:4], one)
    manager.on_request_finished(one)
    manager.complete_store(KEYS[3:4], one)
    gone = [store(manager, vllm.base.ReqContext("new"), [key]).evicted_keys for key in KEYS[6:12]]
    assert gone == [[key] for key in (*KEYS[5:3:-1], *KEYS[3::-1])]


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_a_request_finds_on_the_device_outlives_what_comes_after_it(vllm: SimpleNamespace, policy: str):
    manager = manager_of(vllm, 7, policy=policy)
    windows = [key[:-1] + b"\1" for key in KEYS]
    first, again = vllm.base.ReqContext("first"), vllm.base.ReqContext("again")
    for context in (first, again):
        for keys in (KEYS[:4], windows[:4]):  # also of blocks that are in no window, which are not stored
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, 16 * place)
    store(manager, first, [*KEYS[:2], windows[1]])
    manager.on_request_finished(first)
    other = vllm.base.ReqContext("other")
    store(manager, other, KEYS[6:7])
    manager.on_request_finished(other)
    store(manager, again, [*KEYS[2:4], windows[3]])  # the device had the others
    manager.on_request_finished(again)
    gone = [store(manager, vllm.base.ReqContext("new"), [key]).evicted_keys for key in KEYS[7:11]]
    assert gone[0] == [KEYS[6]]
    assert sorted(gone[1] + gone[2]) == sorted([KEYS[3], windows[3]])  # a full block and a window's, which end together
    assert gone[3] == [KEYS[2]]


def test_after_a_reset_chunks_of_transfers_are_kept_until_they_are_flushed(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    store(manager, context, KEYS[:2])
    busy = set(manager.prepare_load(KEYS[:1], context).block_ids) | set(
        manager.prepare_store(KEYS[2:3], context).store_spec.block_ids
    )
    manager.reset_cache()
    assert lookups(manager, context, KEYS[:3]) == "MISS MISS MISS"
    if hasattr(vllm.base.OffloadingManager, "on_reset_flushed"):
        assert manager.prepare_store(KEYS[:2], context) is None
        assert busy.isdisjoint(store(manager, context, KEYS[1:2]).store_spec.block_ids.tolist())
        manager.prepare_load(KEYS[1:2], context)
        manager.on_reset_flushed()
        assert manager.prepare_store(KEYS[:3], context).keys_to_store == [KEYS[0], KEYS[2]]
        manager.complete_load(KEYS[1:2], context)
    else:
        # vLLM 0.32 waits for them before the next transfer, and says no more.
        assert sorted(manager.prepare_store(KEYS[:3], context).store_spec.block_ids) == [0, 1, 2]
    manager.complete_load(KEYS[:1], context)  # late, and of no effect
    with pytest.raises(InvalidArgumentError, match="not being loaded"):
        manager.complete_load(KEYS[4:5], context)


def test_loads_from_before_and_after_a_reset_end_apart(vllm: SimpleNamespace, context: Any):
    manager = manager_of(vllm, 3)
    store(manager, context, KEYS[:1])
    manager.prepare_load(KEYS[:1], context)
    manager.reset_cache()
    store(manager, context, KEYS[:1])
    manager.prepare_load(KEYS[:1], context)
    assert manager.prepare_store(KEYS[1:4], context) is None
    manager.complete_load(KEYS[:1], context)
    manager.complete_load(KEYS[:1], context)
    assert manager.prepare_store(KEYS[1:4], context).keys_to_store == KEYS[1:4]


def test_a_store_that_never_ends_is_a_miss_after_its_deadline(
    vllm: SimpleNamespace, context: Any, monkeypatch: pytest.MonkeyPatch
):
    manager = manager_of(vllm, 2)
    manager.prepare_store(KEYS[:1], context)
    end = vllm.base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
    manager.on_schedule_end(end)
    assert lookups(manager, context, KEYS[:1]) == "HIT_PENDING"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    manager.on_schedule_end(end)
    assert lookups(manager, context, KEYS[:1]) == "MISS"
    assert manager.prepare_store(KEYS[:2], context).keys_to_store == KEYS[1:2]
    manager.complete_store(KEYS[:1], context)
    assert manager.prepare_store(KEYS[:1], context).keys_to_store == KEYS[:1]


@pytest.mark.parametrize("seed", range(3))
def test_no_chunk_is_read_and_written_at_a_time(vllm: SimpleNamespace, context: Any, seed: int):
    """Random calls as vLLM makes them: what a load is given holds the key's bytes until the load has ended."""
    rng, manager = random.Random(seed), manager_of(vllm, 5, policy=["lru", "adaptive", "priority"][seed])
    holds: dict[int, bytes] = {}
    stores: list[Any] = []
    loads: list[tuple[list[bytes], list[int]]] = []
    counts: Counter[str] = Counter()
    for _ in range(600):
        keys = rng.sample(KEYS, rng.randint(1, 3))
        match rng.randrange(4):
            case 0:
                prepared = manager.prepare_store(keys, context)
                counts["refused" if prepared is None else "stored"] += 1
                if prepared is not None:
                    chunks = prepared.store_spec.block_ids.tolist()
                    assert not {chunk for _, held in loads for chunk in held} & set(chunks)
                    assert not {chunk for other in stores for chunk in other.store_spec.block_ids} & set(chunks)
                    stores.append(prepared)
            case 1 if stores:
                done, success = stores.pop(rng.randrange(len(stores))), rng.random() < 0.8
                holds.update(zip(done.store_spec.block_ids.tolist(), done.keys_to_store, strict=True))
                manager.complete_store(done.keys_to_store, context, success)
            case 2 if all(manager.lookup(key, context).name == "HIT" for key in keys):
                chunks = manager.prepare_load(keys, context).block_ids.tolist()
                assert [holds[chunk] for chunk in chunks] == keys
                counts["loaded"] += 1
                loads.append((keys, chunks))
            case 3 if loads:
                keys, chunks = loads.pop(rng.randrange(len(loads)))
                assert [holds[chunk] for chunk in chunks] == keys
                manager.complete_load(keys, context)
    assert min(counts["stored"], counts["loaded"], counts["refused"]) > 5


# ---- the worker ----

PAGES = (48, 16)
BLOCKS = 24


def caches_of(vllm: SimpleNamespace, groups: list[list[tuple[int, int]]], *, packed: bool = False) -> Any:
    """Two tensors of random bytes, or one tensor with rows that lie apart; groups name tensors and bytes of a page."""
    generator = torch.Generator().manual_seed(1)

    def random_bytes(width: int) -> torch.Tensor:
        return torch.randint(-128, 128, (BLOCKS, width), dtype=torch.int8, generator=generator)

    whole = random_bytes(sum(PAGES))
    starts = [0, PAGES[0]]
    places = zip(starts, PAGES, strict=True)
    tensors = [whole[:, start : start + page] if packed else random_bytes(page) for start, page in places]
    base = vllm.base
    return base.CanonicalKVCaches(
        tensors=[base.CanonicalKVCacheTensor(tensor=t, page_size_bytes=t.shape[1]) for t in tensors],
        group_data_refs=[
            [base.CanonicalKVCacheRef(tensor_idx=t, page_size_bytes=page) for t, page in refs] for refs in groups
        ],
    )


def finish(worker: Any, job_id: int) -> Any:
    worker.wait({job_id})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    return result


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_come_back_from_any_part_of_any_chunks(vllm: SimpleNamespace, packed: bool):
    caches = caches_of(vllm, [[(0, 48), (1, 16)]], packed=packed)
    worker = vllm.ours.BlockyardWorker(caches, blocks_per_chunk=4, num_chunks=5)
    chunks, ids = vllm.common.CPULoadStoreSpec, vllm.base.GPULoadStoreSpec
    tensors = [cache.tensor for cache in caches.tensors]
    stored = [tensor.clone() for tensor in tensors]
    blocks = list(range(12))
    worker.submit_store(1, ids(blocks, group_sizes=[12], block_indices=[0]), chunks([4, 0, 2]))
    assert finish(worker, 1).transfer_size == 12 * 64
    # Every span of the 12 blocks, also one that begins and ends inside one chunk, into blocks that lie elsewhere.
    for job, (first, end) in enumerate(itertools.combinations(range(13), 2), 2):
        for tensor in tensors:
            tensor.zero_()
        used = [4, 0, 2][first // 4 : (end - 1) // 4 + 1]
        worker.submit_load(job, chunks(used), ids([12 + n for n in range(end - first)], [end - first], [first]))
        assert finish(worker, job).transfer_size == (end - first) * 64
        for tensor, before in zip(tensors, stored, strict=True):
            wanted = torch.zeros_like(tensor)
            wanted[12 : 12 + end - first] = before[first:end]
            assert torch.equal(tensor, wanted)
    worker.shutdown()


def test_a_store_of_a_part_leaves_the_rest_of_its_chunk(vllm: SimpleNamespace):
    caches = caches_of(vllm, [[(0, 48), (1, 16)]])
    worker = vllm.ours.BlockyardWorker(caches, blocks_per_chunk=4, num_chunks=2)
    chunks, ids = vllm.common.CPULoadStoreSpec, vllm.base.GPULoadStoreSpec
    worker.submit_store(1, ids([0, 1, 2, 3], [4], [0]), chunks([1]))
    worker.submit_store(2, ids([10, 11], [2], [5]), chunks([1]))
    worker.wait({1, 2})
    worker.submit_load(3, chunks([1]), ids([20, 21, 22, 23], [4], [8]))
    worker.wait({3})
    tensor = caches.tensors[0].tensor
    assert torch.equal(tensor[20:24], tensor[[0, 10, 11, 3]])
    worker.shutdown()


def test_groups_have_chunks_of_their_own_and_padding_is_not_copied(vllm: SimpleNamespace):
    caches = caches_of(vllm, [[(0, 48), (1, 10)], [], [(0, 40)]])
    worker = vllm.ours.BlockyardWorker(caches, blocks_per_chunk=2, num_chunks=6)
    chunks, ids = vllm.common.CPULoadStoreSpec, vllm.base.GPULoadStoreSpec
    worker.submit_store(1, ids([3, 5, 7, 9, 11], [3, 0, 2], [1, 0, 4]), chunks([5, 1, 3]))
    assert finish(worker, 1).transfer_size == 3 * 58 + 2 * 40
    before = [cache.tensor.clone() for cache in caches.tensors]
    worker.submit_load(2, chunks([1, 3]), ids([20, 22, 23], [2, 0, 1], [2, 0, 5]))
    finish(worker, 2)
    wanted = [tensor.clone() for tensor in before]
    wanted[0][20], wanted[0][22] = before[0][5], before[0][7]
    wanted[0][23, :40] = before[0][11, :40]
    wanted[1][[20, 22], :10] = before[1][[5, 7], :10]
    assert all(torch.equal(cache.tensor, tensor) for cache, tensor in zip(caches.tensors, wanted, strict=True))
    worker.shutdown()


def one_group(vllm: SimpleNamespace, per_chunk: int = 2, chunks: int = 3) -> Any:
    return vllm.ours.BlockyardWorker(caches_of(vllm, [[(0, 48)]]), blocks_per_chunk=per_chunk, num_chunks=chunks)


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "chunks", "message"),
    [
        ([1, 2], [2], [0], [0, 1], "2 host chunks are given, the groups use 2 and 1"),
        ([1, 2, 3], [3], [0], [0], "device blocks|blocks"),
        ([1, 2], [2], [1], [0], "device blocks|blocks"),
        ([1, 2], [1, 1], [0, 0], [0, 1], "group_sizes has 2 groups"),
        ([1, 24], [2], [0], [0], "24"),
        ([1, 2], [2], [0], [3], "6"),
        ([-1, 2], [2], [0], [1], "-1"),
        ([1, 2, 3, 4], [4], [0], [1, 1], "twice|repeat"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_copied(
    vllm: SimpleNamespace, blocks: list[int], sizes: list[int], indices: list[int], chunks: list[int], message: str
):
    worker = one_group(vllm)
    gpu = vllm.base.GPULoadStoreSpec.__new__(vllm.base.GPULoadStoreSpec)
    gpu.block_ids, gpu.group_sizes, gpu.block_indices = torch.tensor(blocks).numpy(), sizes, indices
    with pytest.raises(BlockyardError, match=message):
        worker.submit_store(1, gpu, vllm.common.CPULoadStoreSpec(chunks))
    assert not worker.get_finished()
    worker.shutdown()


@pytest.mark.parametrize("call", ["submit_store", "submit_load", "get_finished", "wait", "shutdown"])
def test_a_worker_refuses_every_call_inside_a_graph_capture_and_goes_on(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, call: str
):
    worker = one_group(vllm)
    blocks, chunks = vllm.base.GPULoadStoreSpec([1, 2], [2], [0]), vllm.common.CPULoadStoreSpec([0])
    arguments = {"submit_store": (2, blocks, chunks), "submit_load": (2, chunks, blocks), "wait": ({1},)}
    worker.submit_store(1, blocks, chunks)
    with monkeypatch.context() as capture:
        capture.setattr(worker._streams, "capturing", lambda: True)
        for touching in ("launch", "fence", "close"):
            capture.setattr(worker._streams, touching, lambda *_: pytest.fail("a stream was touched"))
        with pytest.raises(CaptureError, match="before or after the capture"):
            getattr(worker, call)(*arguments.get(call, ()))
    assert finish(worker, 1).success
    worker.submit_store(2, blocks, chunks)
    assert finish(worker, 2).success
    worker.shutdown()


def test_a_job_is_reported_once_and_ids_may_be_used_again(vllm: SimpleNamespace):
    worker = one_group(vllm)
    gpu, chunks = vllm.base.GPULoadStoreSpec([1, 2], [2], [0]), vllm.common.CPULoadStoreSpec([0])
    for _ in range(2):
        assert worker.submit_store(7, gpu, chunks)
        with pytest.raises(InvalidArgumentError, match="job_id is 7"):
            worker.submit_load(7, chunks, gpu)
        result = finish(worker, 7)
        assert result.transfer_time >= 0
        assert not worker.get_finished()
    worker.wait({7, 8})
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(BlockyardError):
        worker.submit_store(9, gpu, chunks)


def test_loads_go_before_stores_and_expedited_loads_first(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    worker = one_group(vllm)
    chunks, ids = vllm.common.CPULoadStoreSpec, vllm.base.GPULoadStoreSpec
    order: list[int] = []
    begun, hold, run = threading.Event(), threading.Event(), worker._run
    jobs: dict[int, Any] = {}

    def note(job: Any, copies: Any, **marks: bool) -> None:
        run(job, copies, **marks)
        begun.set()
        assert hold.wait(300)
        order.append(next(job_id for job_id, known in jobs.items() if known is job))

    monkeypatch.setattr(worker, "_run", note)
    monkeypatch.setattr(worker, "_jobs", jobs)
    submit: list[Callable[[int], Any]] = [
        lambda job: worker.submit_store(job, ids([1, 2], [2], [0]), chunks([0])),
        lambda job: worker.submit_store(job, ids([3, 4], [2], [0]), chunks([1])),
        lambda job: worker.submit_load(job, chunks([2]), ids([5, 6], [2], [0])),
        lambda job: worker.submit_load(job, chunks([2]), ids([7, 8], [2], [0]), expedited=True),
    ]
    for job_id, call in enumerate(submit):
        call(job_id)
        assert begun.wait(300)
    hold.set()
    worker.wait({0, 1, 2, 3})
    assert order == [0, 3, 2, 1]
    assert [result.job_id for result in worker.get_finished()] == [0, 1, 2, 3]
    worker.shutdown()


def test_a_load_waits_for_the_stores_that_read_the_blocks_it_writes_to(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    worker = one_group(vllm)
    chunks, ids = vllm.common.CPULoadStoreSpec, vllm.base.GPULoadStoreSpec
    order: list[int] = []
    begun, hold, run = threading.Event(), threading.Event(), worker._run

    def note(job: Any, copies: Any, **marks: bool) -> None:
        run(job, copies, **marks)
        begun.set()
        assert hold.wait(300)
        order.append(next(job_id for job_id, known in worker._jobs.items() if known is job))

    monkeypatch.setattr(worker, "_run", note)
    worker.submit_store(0, ids([5, 6], [2], [0]), chunks([0]))
    assert begun.wait(300)
    worker.submit_store(1, ids([1, 2], [2], [0]), chunks([1]))
    worker.submit_load(2, chunks([2]), ids([2, 3], [2], [0]))
    worker.submit_load(3, chunks([2]), ids([7, 8], [2], [0]), expedited=True)
    hold.set()
    worker.wait({0, 1, 2, 3})
    assert order == [0, 3, 1, 2]
    worker.shutdown()


def test_spec_manager_and_worker_bring_a_request_back(vllm: SimpleNamespace, context: Any):
    spec = spec_of(vllm, {"host_bytes": 4 * 2 * 64, "blocks_per_chunk": 2})
    caches = caches_of(vllm, [[(0, 48), (1, 16)]])
    manager, worker = spec.get_manager(), spec.get_worker(caches)
    assert spec.get_worker(caches) is worker
    prepared = manager.prepare_store(KEYS[:3], context)
    gpu = vllm.base.GPULoadStoreSpec
    worker.submit_store(1, gpu([2, 4, 6, 8, 10, 12], [6], [0]), prepared.store_spec)
    finish(worker, 1)
    manager.complete_store(KEYS[:3], context)
    before = caches.tensors[0].tensor[[6, 8, 10]].clone()
    caches.tensors[0].tensor.zero_()
    worker.submit_load(2, manager.prepare_load(KEYS[1:3], context), gpu([20, 21, 22], [3], [2]), expedited=True)
    finish(worker, 2)
    manager.complete_load(KEYS[1:3], context)
    assert torch.equal(caches.tensors[0].tensor[20:23], before)
    worker.shutdown()
    manager.shutdown()


def test_evictions_beside_a_report_are_in_the_next_one(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """The external store's thread evicts, whatever vLLM's does."""

    class Stats(Counter[str]):
        def set_gauge(self, name: str, value: float) -> None: ...

        def increase_counter(self, name: str, count: int) -> None:
            self[name] += count

    class Offload(SimpleNamespace):
        num_evicted = property(lambda self: next(self.evicted))

    metrics = SimpleNamespace(OffloadingConnectorStats=Stats)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics", metrics)
    manager, evicted = manager_of(vllm, 2), itertools.count(5)
    manager._offload = Offload(num_chunks=2, num_free=1, num_storing=0, num_stored=1, evicted=evicted)
    reported = sum(sum(manager.get_stats().values()) for _ in range(3))
    assert reported == next(evicted) - 1
