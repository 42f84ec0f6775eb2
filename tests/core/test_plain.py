"""`plain_steps`: the same state as single steps, and what ends a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import BlockManager, CacheGroup, PrefixCaching
from blockyard._core import plain_steps
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, UnknownSequenceError

GROUPS = [None, [CacheGroup.full_attention(), CacheGroup.sliding_window(6)]]


def made(lengths: list[int], before: int, **options: Any) -> tuple[BlockManager, np.ndarray]:
    """Make a manager with blocks that no sequence uses, and sequences."""
    manager = BlockManager(block_size=4, watermark=0, **options)
    for number in range(before):
        gone = manager.allocate([number] * 9)
        manager.complete(manager.take_decision(now=0.0).ticket)
        manager.mark_computed(gone)
        manager.free(gone)
    # The last prompts are equal, and so are their answers at first.
    found = [manager.allocate([100 + min(number, 1)] * length) for number, length in enumerate(lengths)]
    manager.complete(manager.take_decision(now=0.5).ticket)
    handles = np.array([int(one) for one in found], np.uint64)
    manager.mark_computed(handles)
    return manager, handles


def state(manager: BlockManager, handles: np.ndarray) -> Any:
    manager.check()
    tables = [manager.block_tables(handles, group=group).tolist() for group in range(len(manager.groups))]
    return tables, [manager.pool(tier).free_ids().tolist() for tier in ("device", "host")], repr(manager.stats())


def one_by_one(manager: BlockManager, handles: np.ndarray, tokens: np.ndarray | None, times: list[float]) -> Any:
    peak = 0
    for step, now in enumerate(times):
        ids = None if tokens is None else tokens[step * len(handles) : (step + 1) * len(handles)]
        try:
            manager.append(handles, token_ids=ids)
        except OutOfBlocksError:
            return step, peak, None
        pool = manager.pool()
        peak = max(peak, pool.num_blocks - pool.num_free)
        decision = manager.take_decision(prefetch=True, now=now)
        if len(decision):
            return step, peak, decision
        manager.complete(decision.ticket)
        full = [handle for handle in handles.tolist() if manager.num_tokens(handle) % 4 == 0]
        if full:
            manager.mark_computed(full)
    return len(times), peak, None


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    steps=st.integers(0, 40),
    spare=st.integers(1, 40),
    before=st.integers(0, 12),
    host=st.sampled_from([None, 0, 16]),
    groups=st.sampled_from(GROUPS),
    token=st.integers(1, 3),
)
def test_many_steps_in_one_call_leave_what_as_many_calls_leave(
    lengths: list[int],
    steps: int,
    spare: int,
    before: int,
    host: int | None,
    groups: list[CacheGroup] | None,
    token: int,
):
    options: dict[str, Any] = {"device_blocks": 20 * (1 if groups is None else 2) + spare, "groups": groups}
    if host is not None:
        options |= {"host_blocks": host, "prefix_caching": PrefixCaching(host=host > 0)}
    tokens = None if host is None else (np.arange(steps * len(lengths), dtype=np.uint32) // (7 * len(lengths)) % token)
    times = [1.0 + step / 8 for step in range(steps)]
    (first, own), (second, other) = (made(lengths, before, **options) for _ in range(2))
    done, peak, decision = plain_steps(first, own, times, token_ids=tokens)
    wanted = one_by_one(second, other, tokens, times)
    assert (done, peak) == wanted[:2]
    assert (decision and decision.to_bytes()) == (wanted[2] and wanted[2].to_bytes())
    assert state(first, own) == state(second, other)
    if decision is not None:
        for manager in (first, second):
            manager.complete(decision.ticket)
        assert state(first, own) == state(second, other)


def test_a_call_ends_before_a_step_without_blocks_and_with_one_that_copies():
    manager, handles = made([4], 0, device_blocks=3)
    assert plain_steps(manager, handles, [1.0] * 20) == (8, 3, None)
    assert manager.num_tokens(int(handles[0])) == 12
    caching = {"host_blocks": 8, "prefix_caching": PrefixCaching(host=True)}
    manager, handles = made([4], 1, device_blocks=4, **caching)
    done, _, decision = plain_steps(manager, handles, [1.0] * 20, token_ids=[7] * 20)
    assert done < 20
    assert decision is not None
    assert (len(decision.swap_out), manager.stats().open_tickets) == (1, [decision.ticket])
    assert manager.num_tokens(int(handles[0])) == 4 + done + 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"times": [1.0, float("nan")]}, InvalidArgumentError, r"times\[1\] is nan, must be a finite number"),
        ({"times": [1.0, -1]}, InvalidArgumentError, r"times\[1\] is -1, must be a finite number"),
        ({"token_ids": [1, 2, 3]}, InvalidArgumentError, "length of token_ids is 3, must be 2, one for each sequence"),
        ({"token_ids": [1, 2**32 - 1]}, InvalidArgumentError, "4294967295"),
        ({"sequences": [1 << 40]}, UnknownSequenceError, "belongs to manager 0"),
    ],
)
def test_a_call_that_fails_changes_nothing(arguments: dict[str, Any], error: type[Exception], message: str):
    manager, handles = made([4], 0, device_blocks=8, prefix_caching=True)
    before = state(manager, handles)
    with pytest.raises(error, match=message):
        plain_steps(manager, **{"sequences": handles, "times": [1.0, 2.0], "token_ids": [1, 2]} | arguments)
    assert state(manager, handles) == before
