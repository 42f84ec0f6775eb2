"""How long sampled blocks stay in the prefix cache."""

from __future__ import annotations

import time

import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError

PAUSE = 0.02


def run(manager: BlockManager, tokens: list[int]) -> int:
    """Admit, compute and free a prompt; returns how many tokens were cached."""
    handles, cached = allocate_prompts(manager, [tokens])
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(handles)
    manager.free(handles)
    manager.check()
    return int(cached[0])


def test_times_are_those_of_the_calls_also_after_a_pause() -> None:
    manager = make_manager(block_size=4, device_blocks=4, watermark=0.0)
    manager.prefix.sample_residency(1.0)
    assert run(manager, [1] * 9) == 0
    time.sleep(PAUSE)
    assert run(manager, [1] * 9) == 8
    time.sleep(PAUSE)
    run(manager, [2] * 16)
    found = manager.prefix.residency()["device"]
    assert [sum(counts) for counts, _ in (found.lifetime, found.idle_before_evict, found.reuse_gap)] == [2, 2, 2]
    assert found.lifetime[1] >= 4 * PAUSE
    assert found.lifetime[1] >= found.idle_before_evict[1] >= 2 * PAUSE
    assert found.reuse_gap[1] >= 2 * PAUSE
    assert len(found.lifetime[0]) == len(found.bounds) + 1


def test_copies_on_the_host_are_measured_too() -> None:
    manager = make_manager(block_size=4, device_blocks=4, host_blocks=2, watermark=0.0, host=True)
    manager.prefix.sample_residency(1.0)
    for token in range(1, 6):
        run(manager, [token] * 16)
        manager.prefix.offload(4)
        manager.complete(manager.take_decision().ticket)
    found = manager.prefix.residency()
    assert sum(found["host"].lifetime[0]) == manager.stats().evicted_blocks["host"] > 0
    assert sum(found["device"].lifetime[0]) == manager.stats().evicted_blocks["device"] > 0


def test_a_host_that_caches_nothing_is_left_out() -> None:
    manager = make_manager(block_size=4, device_blocks=4, host_blocks=2, watermark=0.0)
    assert list(manager.prefix.residency()) == ["device"]
    manager.prefix.sample_residency(1.0)
    assert list(manager.prefix.residency()) == ["device"]


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    manager = make_manager(block_size=4, device_blocks=4, watermark=0.0)
    for token in range(1, 6):
        run(manager, [token] * 16)
    assert manager.stats().evicted_blocks["device"] > 0
    assert {sum(found.lifetime[0]) for found in manager.prefix.residency().values()} == {0}


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.01, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    manager = make_manager(block_size=4, device_blocks=4)
    with pytest.raises(InvalidArgumentError, match=f"sample_rate is {rate:g}".replace("nan", "NaN")):
        manager.prefix.sample_residency(rate)
