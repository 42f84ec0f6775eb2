"""Hints of a request to `BlockyardSpec`'s manager: pins, over vLLM's own classes (`VLLM_SOURCE`) or stand-ins."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_modules

CHUNKS = 8
KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(24)]


@pytest.fixture(params=vllm_modules.KINDS)
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with vllm_modules.loaded(request.param) as modules:
        yield modules


@pytest.fixture
def manager(vllm: SimpleNamespace) -> Any:
    return vllm.ours.BlockyardSpec(vllm_modules.config(vllm, {"host_bytes": 64 * CHUNKS})).get_manager()


def context(vllm: SimpleNamespace, *, pin: float | None = None) -> Any:
    found = vllm.base.ReqContext(req_id="one")
    if pin is not None:
        action = SimpleNamespace(action_type="blockyard.pin", payload={"seconds": pin})
        found.kv_hints = SimpleNamespace(actions=[action])
    return found


def store(manager: Any, keys: list[bytes], request: Any) -> None:
    """Name a request's chunks, and store those that are missing, as vLLM does."""
    prepared = manager.prepare_store(keys, request)
    manager.complete_store(prepared.keys_to_store, request)


def fill(vllm: SimpleNamespace, manager: Any) -> None:
    """Store other chunks until all that can be evicted is."""
    for key in KEYS[12:]:
        store(manager, [key], context(vllm))


@pytest.mark.parametrize("call", ["new", "stored by another", "loaded", "refused", "touched"])
def test_a_pin_keeps_a_requests_chunks_whoever_stored_them(vllm: SimpleNamespace, manager: Any, call: str):
    pinned = context(vllm, pin=600)
    if call != "new":
        store(manager, KEYS[:3], context(vllm))
    if call in {"new", "stored by another"}:
        store(manager, KEYS[:3], pinned)
    elif call == "loaded":
        manager.prepare_load(KEYS[:3], pinned)
        manager.complete_load(KEYS[:3], pinned)
    elif call == "refused":
        assert manager.prepare_store([*KEYS[:3], *KEYS[12:]], pinned) is None
    else:
        manager.touch(KEYS[:3], pinned)
    fill(vllm, manager)
    assert manager._offload.lookup(KEYS[:3]) == ["hit"] * 3
    manager._pins.expire(1 << 60)
    fill(vllm, manager)
    assert manager._offload.lookup(KEYS[:3]) == ["miss"] * 3
    manager._offload.check()


def test_vllm_is_asked_to_name_the_chunks_that_it_found_on_the_device_for_a_pin_alone(
    vllm: SimpleNamespace, manager: Any
):
    policy = vllm.base.OffloadPolicy
    assert manager.on_new_request(context(vllm)).policy == policy.CHUNK_LEVEL
    assert manager.on_new_request(context(vllm, pin=0)).policy == policy.CHUNK_LEVEL
    assert manager.on_new_request(context(vllm, pin=1)).policy == policy.REQUEST_LEVEL


def test_misses_use_up_no_room_for_pins(vllm: SimpleNamespace, manager: Any):
    store(manager, KEYS[4:8], context(vllm))
    manager.touch(KEYS[:8], context(vllm, pin=600))
    assert sorted(manager._pins._until) == KEYS[4:8]


def test_a_pin_that_is_renewed_takes_no_more_memory_and_ends_with_the_last_request(vllm: SimpleNamespace, manager: Any):
    """Random pins and times beside a dictionary of ends: one entry of the heap for each pinned key, always."""
    rng, pins, ends, now = random.Random(3), manager._pins, {}, 0
    store(manager, KEYS[:CHUNKS], context(vllm))
    for _ in range(2000):
        now += rng.randrange(400)
        pins.expire(now)
        ends = {key: end for key, end in ends.items() if end > now}
        keys, seconds = rng.sample(KEYS[:CHUNKS], 2), rng.randrange(1, 4)
        pins.add(keys, context(vllm, pin=seconds), now)
        for key in keys:
            if key in ends or len(ends) < CHUNKS // 2:
                ends[key] = max(now + 1000 * seconds, ends.get(key, 0))
        assert pins._until == ends
        assert len(pins._order) == len(ends)
    pins.expire(1 << 60)
    assert not pins._order
    assert manager._offload.num_free == CHUNKS
