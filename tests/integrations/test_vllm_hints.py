"""Hints of a request to `BlockyardSpec`'s manager: pins, over vLLM's own classes (`VLLM_SOURCE`) or stand-ins."""

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import vllm_modules
from vllm_sides import hint, hints

CHUNKS = 8
KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(24)]


@pytest.fixture
def manager(vllm: SimpleNamespace) -> Any:
    return vllm.ours.BlockyardSpec(vllm_modules.config(vllm, {"host_bytes": 64 * CHUNKS})).get_manager()


def context(vllm: SimpleNamespace, *, pin: float | None = None) -> Any:
    found = vllm.base.ReqContext(req_id="one")
    if pin is not None:
        found.kv_hints = hints(hint("blockyard.pin", {"seconds": pin}))
    return found


def hinted(vllm: SimpleNamespace, *actions: Any, version: str = "0.1") -> Any:
    found = vllm.base.ReqContext(req_id="one")
    found.kv_hints = hints(*actions, version=version)
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


RETAIN = hint("blockyard.retain", {"seconds": 600})


def test_what_is_retained_outlives_all_else_and_makes_room_when_nothing_else_can(vllm: SimpleNamespace, manager: Any):
    store(manager, KEYS[:3], hinted(vllm, RETAIN))
    fill(vllm, manager)
    assert manager._offload.lookup(KEYS[:3]) == ["hit"] * 3
    running = manager.prepare_store(KEYS[12 : 12 + CHUNKS], context(vllm))
    assert len(running.keys_to_store) == CHUNKS - 1  # one is here already
    manager.complete_store(running.keys_to_store, context(vllm))
    assert manager._offload.lookup(KEYS[:3]) == ["miss"] * 3
    manager._offload.check()


def test_of_what_is_retained_the_first_to_end_makes_room_first(vllm: SimpleNamespace, manager: Any):
    for number in range(CHUNKS):
        seconds = 100 + (number * 3) % CHUNKS
        store(manager, [KEYS[number]], hinted(vllm, hint("blockyard.retain", {"seconds": seconds})))
    store(manager, [KEYS[20], KEYS[21]], context(vllm))
    gone = {number for number in range(CHUNKS) if manager._offload.lookup([KEYS[number]]) == ["miss"]}
    assert gone == set(sorted(range(CHUNKS), key=lambda number: (number * 3) % CHUNKS)[:2])


def test_what_is_retained_ends_in_time_and_with_a_reset(vllm: SimpleNamespace, manager: Any):
    store(manager, KEYS[:3], hinted(vllm, RETAIN))
    manager._retained.expire(1 << 60)
    fill(vllm, manager)
    assert manager._offload.lookup(KEYS[:3]) == ["miss"] * 3
    store(manager, KEYS[:3], hinted(vllm, RETAIN))
    manager.reset_cache()
    assert not manager._retained._until
    assert manager._offload.num_free == CHUNKS


def test_pins_stay_where_what_is_retained_yields(vllm: SimpleNamespace, manager: Any):
    store(manager, KEYS[:3], context(vllm, pin=600))
    store(manager, KEYS[3:6], hinted(vllm, RETAIN))
    assert manager.prepare_store(KEYS[12:20], context(vllm)) is None
    prepared = manager.prepare_store(KEYS[12:17], context(vllm))
    manager.complete_store(prepared.keys_to_store, context(vllm))
    assert manager._offload.lookup(KEYS[:6]) == ["hit"] * 3 + ["miss"] * 3


@pytest.mark.parametrize(("ends", "fails"), [(True, False), (False, False), (True, True)])
def test_chunks_that_are_stored_after_a_requests_end_have_its_conversations_hint(
    vllm: SimpleNamespace, ends: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
):
    options = {"host_bytes": 64 * CHUNKS, "policy": "adaptive"}
    manager = vllm.ours.BlockyardSpec(vllm_modules.config(vllm, options)).get_manager()
    other, request = context(vllm), hinted(vllm, hint("blockyard.conversation", {"hint": "over" if ends else "turn"}))
    store(manager, KEYS[12:16], other)
    manager.on_request_finished(other)
    store(manager, KEYS[:2], request)
    last = [manager.prepare_store([key], request) for key in KEYS[2:4]]
    manager.on_request_finished(request)
    manager.complete_store(last[0].keys_to_store, request)
    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(manager, "_report", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError) if fails else nullcontext():
            manager.complete_store(last[1].keys_to_store, request)
    store(manager, KEYS[20:24], context(vllm))
    kept = KEYS[12:16] if ends else KEYS[:4]
    assert [key for key in KEYS[:16] if manager._offload.lookup([key]) == ["hit"]] == kept


@pytest.mark.parametrize(
    ("action", "version", "outcome", "said"),
    [
        (RETAIN, "0.1", "accepted", ""),
        (hint("blockyard.pin", {"seconds": 1}, "1"), "0.1", "accepted", ""),
        (hint("blockyard.conversation", {"hint": "over"}), "0.1", "accepted", ""),
        (hint("kv.fetch", {"source_control_endpoint": "x"}), "0.1", "ignored", ""),
        (hint("blockyard.retian", {"seconds": 1}), "0.1", "refused", "did you mean 'blockyard.retain'?"),
        (hint("blockyard.pin", {"seconds": 1}, "2.0"), "0.1", "refused", "action_version is '2.0'"),
        (hint("blockyard.pin", {"seconds": 1}), "0.2", "refused", "protocol_version is '0.2'"),
        (hint("blockyard.pin", {"seconds": -1}), "0.1", "refused", "seconds is -1"),
        (hint("blockyard.pin", {"seconds": "600"}), "0.1", "refused", "seconds is '600'"),
        (hint("blockyard.retain", {}), "0.1", "refused", "seconds is ''"),
        (hint("blockyard.conversation", {"hint": None}), "0.1", "refused", "hint is ''"),
        (hint("blockyard.conversation", {"hint": ["over"]}), "0.1", "refused", "must be one of over, tool_call, turn"),
    ],
)
def test_each_action_is_counted_once_and_what_is_refused_is_logged_by_name(
    vllm: SimpleNamespace,
    manager: Any,
    action: Any,
    version: str,
    outcome: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
):
    request = hinted(vllm, action, version=version)
    manager.on_new_request(request)
    manager.touch(KEYS[:2], request)
    manager.on_request_finished(request)
    assert dict(manager._hints) == {"accepted": 0, "refused": 0, "ignored": 0} | {outcome: 1}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (outcome == "refused")
    assert all(f"hint {action.action_type} is refused: " in line and said in line for line in lines)
    assert all((record.message_id, record.action_id) == ("9", "7") for record in caplog.records)


def test_a_reason_is_logged_once_a_minute(vllm: SimpleNamespace, manager: Any, caplog: pytest.LogCaptureFixture):
    for _ in range(5):
        manager.on_new_request(hinted(vllm, hint("blockyard.pinn", {})))
    assert manager._hints["refused"] == 5
    assert len(caplog.records) == 1
