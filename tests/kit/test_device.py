"""The simulated device and store: legal orders only, many of them, and the same for the same seed."""

import numpy as np
import pytest
from simulated_device import SimulatedFaultError, SimulatedStore, SimulatedStreams

from blockyard.engine.streams import WorkerStreams
from blockyard.errors import InvalidArgumentError


def run(seed: int) -> list[str]:
    """Two pieces on each of three streams; the second load waits for the first store."""
    streams, log = SimulatedStreams(seed), []
    store = streams.launch("out", lambda: log.append("store 1"))
    streams.launch("in", lambda: log.append("load 1"))
    streams.launch("in", lambda: log.append("load 2"), [store])
    streams.launch("out", lambda: log.append("store 2"))
    streams.compute(lambda: log.append("compute 1"))
    streams.order_compute(store)
    streams.compute(lambda: log.append("compute 2"))
    streams.close()
    return log


def test_every_legal_order_comes_up_and_no_other():
    orders = {tuple(run(seed)) for seed in range(3000)}
    for order in orders:
        at = {name: place for place, name in enumerate(order)}
        assert all(at[f"{stream} 1"] < at[f"{stream} 2"] for stream in ("store", "load", "compute"))
        assert at["store 1"] < min(at["load 2"], at["compute 2"])
    # Of the 90 orders of three streams these are left by the two events.
    legal = sum(
        1 for order in all_orders() if order.index("s1") < order.index("l2") and order.index("s1") < order.index("c2")
    )
    assert len(orders) == legal


def all_orders() -> list[list[str]]:
    def extend(left: dict[str, int]) -> list[list[str]]:
        if not any(left.values()):
            return [[]]
        return [
            [f"{name}{3 - count}", *rest]
            for name, count in left.items()
            if count
            for rest in extend(left | {name: count - 1})
        ]

    return extend({"s": 2, "l": 2, "c": 2})


def test_the_same_seed_gives_the_same_order():
    assert [run(seed) for seed in range(20)] == [run(seed) for seed in range(20)]


def test_configured_transfers_fail_and_may_have_moved_their_bytes():
    streams, moved = SimulatedStreams(1, fail=0.5), []
    events = [streams.launch("in", lambda i=i: moved.append(i)) for i in range(200)]
    streams.close()
    failed = [i for i, event in enumerate(events) if isinstance(event.error, SimulatedFaultError)]
    assert streams.launched == 200
    assert streams.failed == len(failed)
    assert 60 < len(failed) < 140
    assert set(range(200)) - set(moved) < set(failed)
    assert set(failed) & set(moved)


def test_streams_that_can_never_go_on_are_noticed():
    streams, others = SimulatedStreams(0), SimulatedStreams(0)
    others.progress = lambda: None
    stuck = streams.launch("in", lambda: None, [others.fence()])
    with pytest.raises(AssertionError, match="stuck"):
        stuck.synchronize()


def test_events_of_other_kinds_of_streams_are_refused():
    with pytest.raises(InvalidArgumentError, match="1 events of 1 are of another device"):
        SimulatedStreams(0).launch("in", lambda: None, [WorkerStreams().fence()])


def test_a_wrong_test_on_the_compute_stream_is_not_swallowed():
    streams = SimulatedStreams(0)

    def wrong() -> None:
        raise KeyError("block 7")

    with pytest.raises(KeyError, match="block 7"):  # noqa: PT012 (it may run at once)
        streams.compute(wrong)
        streams.close()


class TestSimulatedStore:
    def test_operations_on_a_slot_keep_their_order_and_others_do_not(self):
        orders = set()
        for seed in range(50):
            store = SimulatedStore(4, 8, seed=seed)
            rows = np.arange(32, dtype=np.uint8).reshape(4, 8)
            first = store.submit_write(np.arange(4), rows)
            second = store.submit_read(np.array([2, 0]))
            third = store.submit_write(np.array([0]), rows[3:])
            finished: list[int] = []
            while len(finished) < 3:
                finished += store.poll()
            orders.add(tuple(finished))
            assert store.wait(second).rows.tolist() == rows[[2, 0]].tolist()
            assert store.wait(first).ok.all()
            assert store.wait(third).ok.all()
            assert store.wait(store.submit_read(np.array([0]))).rows.tolist() == rows[3:].tolist()
        assert len(orders) > 1

    def test_the_configured_failures_happen(self):
        store = SimulatedStore(100, 8, seed=3, fail=0.3)
        written = store.wait(store.submit_write(np.arange(100), np.ones((100, 8), np.uint8)))
        read = store.wait(store.submit_read(np.arange(100)))
        assert 10 < (~written.ok).sum() < 60
        assert not (read.ok & ~written.ok).any()
        assert (read.rows[read.ok] == 1).all()
        assert not read.rows[~read.ok].any()
