"""A failover undoes deletions and `forget`, and a record is lost; the oracle allows what follows, and nothing more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blockyard.stores.threaded.runtime import use_runtime
from blockyard.stores.value import HEADER
from blockyard.tools.sim import FleetOptions, read_faults, simulate_fleet
from blockyard.tools.sim.fleet.engine import SimulatedEngine
from blockyard.tools.sim.fleet.log import FleetLog
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError, Oracle
from blockyard.tools.sim.fleet.servers.link import is_record
from blockyard.tools.sim.fleet.servers.redis_server import RedisServer
from blockyard.tools.sim.loop import Loop

KEY = 7


class Scene:
    """Engines over one Redis server, which fails over on request."""

    def __init__(self) -> None:
        self.loop, self.oracle = Loop(1), Oracle()
        self.server = RedisServer(self.loop, self._see, lambda value, damaged_at: None, capacity=100)
        self.began = 0.0
        self.engines = [
            SimulatedEngine(self.loop, self.server, self.oracle, number, FleetLog(self.loop, 3), (0.0, 0.0))
            for number in range(3)
        ]

    def play(self, act: Callable[[Scene], None]) -> None:
        self.loop.start("play", lambda: act(self))
        with use_runtime(self.loop):
            self.loop.run()

    def stop_replica(self) -> None:
        self.began = self.loop.now
        self.server.stop_replica()

    def fail_over(self) -> None:
        """Lose what the server was told since `stop_replica`."""
        self.loop.sleep(0.5)  # requests are under way for milliseconds
        self.server.fail_over(0)
        self.oracle.roll_back((self.server.record() or b"")[HEADER:], self.began, self.loop.now)
        self.loop.sleep(0.5)

    def put(self, number: int = 0) -> None:
        self.engines[number].put([KEY])
        self.engines[number].collect_all()
        self.loop.sleep(0.1)

    def get(self) -> None:
        """Read the block; the oracle judges what is found."""
        self.engines[0].get([KEY])
        self.engines[0].collect_all()
        self.loop.sleep(0.1)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _see(self, value: bytes) -> None:
        if is_record(value):
            there = self.server.record()
            self.oracle.see_record(value[HEADER:], self.loop.now, replaces=there and there[HEADER:])


def test_a_replica_may_have_a_damaged_record():
    faults = read_faults(",".join(f"damage:-1:{at}:1" for at in (0.5, 0.52, 0.54)) + ",failover:-1:0.56:0.5")
    for seed in range(20):
        assert not simulate_fleet(seed, FleetOptions(work="calls", store="redis", seconds=1.5), faults).broken


def test_a_deletion_whose_answer_comes_after_a_failover_may_be_undone():
    def act(scene: Scene) -> None:
        scene.put()
        scene.stop_replica()
        scene.engines[1].delete([KEY])
        scene.fail_over()
        scene.engines[1].collect_all()
        scene.loop.sleep(0.1)
        scene.get()
        assert scene.engines[0].reasons[""] == 2, "the block is there again"
        scene.close()

    Scene().play(act)


def test_a_deletion_that_was_submitted_after_a_failover_counts():
    def act(scene: Scene) -> None:
        scene.put()
        scene.stop_replica()
        scene.fail_over()
        values = dict(scene.server.data.values)
        scene.engines[1].delete([KEY])
        scene.engines[1].collect_all()
        scene.loop.sleep(0.1)
        scene.server.data.values = values
        scene.get()

    with pytest.raises(BrokenPromiseError, match="key 7: found a block whose deletion was confirmed"):
        Scene().play(act)


def test_an_engine_whose_weights_count_again_may_write_a_lost_record():
    def act(scene: Scene) -> None:
        scene.put(2)
        scene.put()
        assert scene.engines[1].forget("step-1")
        scene.get()
        assert scene.engines[0].was_told(scene.loop.now)
        scene.server.lose_record()
        scene.loop.sleep(1.0)
        scene.put(2)  # it has not heard of that
        scene.put()
        assert scene.engines[0].reasons == {"": 2, "forgotten": 1}
        assert not scene.engines[0].was_told(scene.loop.now)
        scene.close()

    Scene().play(act)


def test_a_read_that_waits_during_a_failover_may_find_what_was_forgotten_before():
    def act(scene: Scene) -> None:
        scene.put()
        scene.stop_replica()
        assert not scene.engines[1].forget(None), "the replica has not confirmed it"
        scene.engines[0].link._delay = lambda: 0.7  # type: ignore[method-assign]
        scene.engines[0].get([KEY])
        scene.fail_over()
        scene.engines[0].collect_all()
        scene.close()
        assert scene.engines[0].reasons == {"": 2}

    Scene().play(act)
