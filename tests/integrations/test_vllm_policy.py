"""Our eviction policies as vLLM's CPU manager uses them, over its own abstract class (`VLLM_SOURCE`) or a stand-in."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from blockyard.errors import BlockyardError

KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(14)]
POLICIES = ["LRUPolicy", "AdaptivePolicy"]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, vllm: SimpleNamespace) -> Any:
    return getattr(vllm.ours, request.param)(cache_capacity=4)


def add(vllm: SimpleNamespace, policy: Any, key: bytes, chunk_id: int, *, ready: bool = True) -> Any:
    chunk = vllm.policies.ChunkStatus(chunk_id)
    if hasattr(vllm.base.OffloadingManager, "on_reset_flushed"):
        policy.insert(key, chunk, vllm.base.ReqContext(req_id="one"))
    else:
        policy.insert(key, chunk)
    if ready:
        chunk.ref_cnt = 0
        policy.mark_evictable(key)
    return chunk


def test_a_chunk_is_given_back_as_it_was_inserted(vllm: SimpleNamespace, policy: Any):
    assert isinstance(policy, vllm.policies.CachePolicy)
    chunk = add(vllm, policy, KEYS[0], 7)
    assert policy.get(KEYS[0]) is chunk
    assert policy.get(KEYS[1]) is None
    assert policy.evict(1, set()) == [(KEYS[0], chunk)]
    assert policy.get(KEYS[0]) is None


def test_eviction_is_all_or_nothing(vllm: SimpleNamespace, policy: Any):
    for n in range(4):
        add(vllm, policy, KEYS[n], n, ready=n < 3)
    assert policy.evict(4, set()) is None
    assert policy.evict(3, {KEYS[0]}) is None
    policy.mark_non_evictable(KEYS[1])
    assert policy.evict(2, {KEYS[0]}) is None
    assert policy.evict(0, set()) == []
    assert all(policy.get(KEYS[n]) is not None for n in range(4))
    assert [key for key, _ in policy.evict(1, {KEYS[0], KEYS[9]})] == [KEYS[2]]
    policy.mark_evictable(KEYS[1])
    assert sorted(key for key, _ in policy.evict(2, set())) == KEYS[:2]
    assert policy.evict(1, set()) is None


def test_a_removed_or_cleared_chunk_is_gone(vllm: SimpleNamespace, policy: Any):
    add(vllm, policy, KEYS[0], 0, ready=False)
    add(vllm, policy, KEYS[1], 1)
    add(vllm, policy, KEYS[2], 2)
    policy.mark_non_evictable(KEYS[2])
    for key in KEYS[:3]:
        policy.remove(key)
        assert policy.get(key) is None
        with pytest.raises(KeyError):
            policy.remove(key)
    for n in range(4):  # all places are free again
        add(vllm, policy, KEYS[n], n)
    with pytest.raises(BlockyardError, match="would exceed 4 chunks"):
        add(vllm, policy, KEYS[5], 5)
    policy.clear()
    assert policy.evict(1, set()) is None
    for n in range(4):
        add(vllm, policy, KEYS[n], n)
    assert len(policy.evict(4, set())) == 4


def test_least_recently_used_goes_first(vllm: SimpleNamespace):
    policy = vllm.ours.LRUPolicy(cache_capacity=8)
    for n in range(4):
        add(vllm, policy, KEYS[n], n)
    policy.touch([KEYS[0], KEYS[1], KEYS[9]], None)
    policy.mark_non_evictable(KEYS[2])
    assert [key for key, _ in policy.evict(1, set())] == [KEYS[3]]
    policy.mark_evictable(KEYS[2])
    assert [key for key, _ in policy.evict(3, set())] == [KEYS[1], KEYS[0], KEYS[2]]


def test_a_scan_does_not_drive_out_what_is_used_again(vllm: SimpleNamespace):
    """What the policies are for: 40 chunks pass that nobody asks for again, and the two that are asked for stay."""
    kept = {}
    for name in POLICIES:
        policy = getattr(vllm.ours, name)(cache_capacity=10)
        for n in range(10):
            add(vllm, policy, KEYS[n], n)
        for _ in range(3):
            policy.touch(KEYS[:2], None)
        for n in range(40):
            ((_, chunk),) = policy.evict(1, set())
            add(vllm, policy, b"scan %d" % n, chunk.chunk_id)
        kept[name] = sum(policy.get(key) is not None for key in KEYS[:2])
    assert kept["LRUPolicy"] == 0
    assert kept["AdaptivePolicy"] == 2


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_keep_to_the_contract(vllm: SimpleNamespace, policy: Any, seed: int):
    rng = random.Random(seed)
    chunks: dict[bytes, Any] = {}
    state: dict[bytes, str] = {}
    free = [3, 2, 1, 0]
    evicted = 0
    for _ in range(1500):
        key = rng.choice(KEYS)
        match rng.randrange(6), state.get(key):
            case 0, None if free:
                chunks[key], state[key] = add(vllm, policy, key, free.pop(), ready=False), "pending"
            case 1, "pending" | "pinned":
                policy.mark_evictable(key)
                state[key] = "idle"
            case 2, "idle":
                policy.mark_non_evictable(key)
                state[key] = "pinned"
            case 3, "pending":
                policy.remove(key)
                free.append(chunks.pop(key).chunk_id)
                del state[key]
            case 4, _:
                policy.touch(rng.sample(KEYS, 3), None)
            case 5, _:
                number, protected = rng.randint(1, 3), set(rng.sample(KEYS, 4))
                loose = [key for key, kind in state.items() if kind == "idle" and key not in protected]
                found = policy.evict(number, protected)
                assert (found is None) == (number > len(loose))
                for gone, chunk in found or ():
                    assert gone in loose
                    assert chunk is chunks.pop(gone)
                    free.append(chunk.chunk_id)
                    del state[gone]
                    evicted += 1
        assert all(policy.get(key) is chunks.get(key) for key in KEYS)
    assert evicted > 20
