"""A fleet of engines over one shared store: random work, random faults, and promises that are checked at every answer.

The store's code is real: batches, deadlines, breaker, known keys, epochs and their protocol. Time, threads, randomness,
network and server are simulated.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.stores.value import HEADER
from blockyard.tools.sim.fleet.engine import CLOCK_STEP, NEW_KEYS, NUM_KEYS, WEIGHTS, FleetEngine, SimulatedEngine
from blockyard.tools.sim.fleet.faults import (
    FAULTS,
    OF_CLUSTER,
    OF_OBJECTS,
    OF_REDIS,
    OF_SERVING,
    Fault,
    draw_faults,
)
from blockyard.tools.sim.fleet.log import BlockCounts, FleetLog
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError, Oracle
from blockyard.tools.sim.fleet.servers.link import Server, is_record, key_in
from blockyard.tools.sim.fleet.servers.object_server import CAPACITY, ObjectServer
from blockyard.tools.sim.fleet.servers.redis_cluster import NODES, SEGMENTS, RedisCluster
from blockyard.tools.sim.fleet.servers.redis_server import RedisServer
from blockyard.tools.sim.fleet.texts import MODELS, Texts
from blockyard.tools.sim.loop import Loop
from blockyard.tools.timeline import Timeline

__all__ = ["FleetOptions", "FleetReport", "digest_of", "simulate_fleet"]

STORES: Final = ("object", "redis", "cluster", "both")
WORK: Final = ("calls", "serving", "both")
_QUIET_SECONDS: Final = 12.0
_RECOVERY_SECONDS: Final = 60.0
_SWEEP_SECONDS: Final = 70.0  # how long a killed sweeper keeps others from sweeping
_CALL_SECONDS: Final = 15.0  # maximum duration of a blocking call of the store
_MAX_SECONDS: Final = 300.0  # how long after the work everything must have ended
_LEFT_OUT: Final = {"object": OF_REDIS, "redis": OF_CLUSTER | OF_OBJECTS, "cluster": OF_OBJECTS, "both": OF_CLUSTER}
_NEEDS: Final = {
    **dict.fromkeys(OF_REDIS, "the store 'redis' or 'cluster'"),
    **dict.fromkeys(OF_CLUSTER, "the store 'cluster'"),
    **dict.fromkeys(OF_OBJECTS, "the store 'object'"),
    **dict.fromkeys(OF_SERVING, "the work 'serving'"),
}
_OF_LINK: Final[dict[str, tuple[str, Any, Any]]] = {
    "lossy": ("loss", 1 / 3, 0.0),
    "repeat": ("repeats", 1.0, 0.0),
    "slow": ("slowness", 100.0, 1.0),
    "straggle": ("straggling", 0.2, 0.0),
    "partition": ("is_cut", True, False),
    "mute": ("is_mute", True, False),
    "garbled": ("garbling", 0.5, 0.0),
    "page": ("pages", 0.5, 0.0),
}


@dataclass(frozen=True)
class FleetOptions:
    """How to run a fleet.

    Attributes:
        engines: number of engines that share the store, 1 to 64.
        seconds: duration of the random work, in virtual time.
        num_faults: number of faults drawn for each seed.
        kinds: kinds of faults to draw, see `FAULTS`.
        work: what engines do: `"calls"` makes random calls of their stores; `"serving"` serves prompts with a
            scheduler, a block manager and a prefix store, and needs torch; `"both"` serves for half of the seeds.
        store: `"object"`, `"redis"`, `"cluster"`, or `"both"`: an object store with even seeds, one Redis server with
            odd ones.
        model: what serving engines serve: `"full"` attention, a `"window"` in each layer, `"states"` alone, a
            `"hybrid"` of the three, full attention and a drafter (`"eagle"`), or a drafter and states (`"mtp"`).
    """

    engines: int = 3
    seconds: float = 4.0
    num_faults: int = 4
    kinds: tuple[str, ...] = tuple(FAULTS)
    work: str = "both"
    store: str = "both"
    model: str = "full"

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= 64:
            raise InvalidArgumentError(f"engines is {self.engines}, must be 1 to 64")
        if not 0 < self.seconds <= 3600:
            raise InvalidArgumentError(f"seconds is {self.seconds}, must be over 0 and at most 3600")
        unknown = [kind for kind in self.kinds if kind not in FAULTS]
        if unknown:
            raise InvalidArgumentError(f"kinds has {unknown[0]!r}, must be some of {', '.join(FAULTS)}")
        if self.store not in STORES:
            raise InvalidArgumentError(f"store is {self.store!r}, must be one of {', '.join(STORES)}")
        if self.model not in MODELS:
            raise InvalidArgumentError(f"model is {self.model!r}, must be one of {', '.join(MODELS)}")
        if self.work not in WORK:
            raise InvalidArgumentError(f"work is {self.work!r}, must be one of {', '.join(WORK)}")
        idle = [kind for kind in self.kinds if kind in _left_out(self.store, self.work)]
        if idle and self.kinds != tuple(FAULTS):
            raise InvalidArgumentError(
                f"kinds has {idle[0]!r}, which needs {_NEEDS[idle[0]]}; store is {self.store!r}, work {self.work!r}"
            )

    def work_of(self, seed: int) -> str:
        """Return what the engines of a seed's fleet do."""
        return WORK[seed // 2 % 2] if self.work == "both" else self.work

    def store_of(self, seed: int) -> str:
        """Return the store of a seed's fleet."""
        return STORES[seed % 2] if self.store == "both" else self.store


def _left_out(store: str, work: str) -> frozenset[str]:
    """Return the kinds of faults that have no effect."""
    return _LEFT_OUT[store] | (OF_SERVING if work == "calls" else frozenset())


@dataclass
class FleetReport:
    """The result of one seed.

    Attributes:
        seed: seed of the run.
        faults: the faults that happened.
        broken: the promise that was broken, "" if none was.
        num_operations: number of calls by all engines.
        reasons: the reasons of all blocks read or written, "" for success.
        blocks: what the engines read and wrote.
        digest: digest of the log; equal runs have equal digests.
        log: a line for each call, answer and fault.
        timeline: what `log` says, as spans, marks and counters; see `FleetLog`.
    """

    seed: int
    faults: list[Fault]
    broken: str = ""
    num_operations: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    blocks: BlockCounts = field(default_factory=BlockCounts)
    digest: str = ""
    log: list[str] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)


def simulate_fleet(
    seed: int, options: FleetOptions | None = None, faults: Sequence[Fault] | None = None
) -> FleetReport:
    """Run a fleet once.

    Args:
        seed: the same seed and options give the same run.
        options: None for the defaults.
        faults: used instead of the faults drawn for the seed.

    Returns:
        The report; `broken` says what went wrong.

    Raises:
        InvalidArgumentError: a fault is of an engine that the fleet does not have, or has no effect on its store.
    """
    options = options or FleetOptions()
    for fault in faults or ():
        if not -1 <= fault.engine < options.engines:
            raise InvalidArgumentError(
                f"faults has '{fault}', its engine must be from 0 to {options.engines - 1}, or -1 for the server"
            )
    left_out = _left_out(options.store_of(seed), options.work_of(seed))
    if idle := [fault for fault in faults or () if fault.kind in left_out]:
        raise InvalidArgumentError(
            f"faults has '{idle[0]}', which needs {_NEEDS[idle[0].kind]}; with seed {seed} the store is "
            f"{options.store_of(seed)!r}, work {options.work_of(seed)!r}"
        )
    if faults is None:
        kinds = tuple(kind for kind in options.kinds if kind not in left_out)
        faults = draw_faults(
            seed, kinds=kinds, engines=options.engines, count=options.num_faults, until=options.seconds
        )
    loop = Loop(seed)
    log = FleetLog(loop, options.engines)
    report = FleetReport(seed, list(faults), blocks=log.blocks, log=log.lines, timeline=log.timeline)
    with use_runtime(loop), _logged(report.log):
        _Fleet(loop, options, report, log).run()
    report.digest = digest_of(report.log)
    return report


def digest_of(lines: Iterable[str]) -> str:
    """Return a digest of lines, 16 hexadecimal digits."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


class _StoreLines(logging.Handler):
    """Appends the log lines of stores to a list, and drops others, whose rate depends on the machine's clock."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("blockyard.stores"):
            self._lines.append(f"          {record.getMessage()}")


@contextmanager
def _logged(lines: list[str]) -> Iterator[None]:
    """Collect the log lines of a run."""
    logger, handler = logging.getLogger("blockyard"), _StoreLines(lines)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _Fleet:
    """One run."""

    def __init__(self, loop: Loop, options: FleetOptions, report: FleetReport, log: FleetLog) -> None:
        self.loop, self.options, self.report, self.log = loop, options, report, log
        self.oracle = Oracle()
        self.server: Server = ObjectServer(loop, self._see, self._see_deletion)
        self._has_tenants, self._texts = False, Texts(MODELS[options.model])
        if (store := options.store_of(report.seed)) != "object":
            self._has_tenants = store == "redis" and loop.random.random() < 0.3
            capacity, ttl = loop.random.choice(((CAPACITY, 0.0), (CAPACITY, 0.0), (NUM_KEYS, 0.0), (CAPACITY, 1.5)))
            self.server = (
                RedisServer(loop, self._see, self._see_deletion, capacity=capacity, ttl=ttl)
                if store == "redis"
                else RedisCluster(
                    loop, self._see, self._see_deletion, capacity=capacity * SEGMENTS, ttl=ttl
                )  # `capacity` in each
            )
            num_keys = NUM_KEYS + int(options.seconds * NEW_KEYS)  # used by all engines together
            self.oracle.may_evict = self._has_tenants or capacity < max(CAPACITY, num_keys) or ttl > 0
        self.engines: list[FleetEngine] = []
        self._has_ended = False
        self._records: set[bytes] = set()  # records that the server has stored; any other is damaged

    def run(self) -> None:
        """Run the fleet and fill in the report."""
        report = self.report
        try:
            self.loop.start("fleet", self._work)
            self.loop.start("watchdog", self._watch)
            self.loop.run()  # returns once no thread of a store is left
        except BlockyardError as error:  # a broken promise, or an error that no call may raise here
            report.broken = str(error)
            report.log.append(report.broken)
            self.log.mark("faults", "broken promise")
        self.log.end_faults()
        report.num_operations = sum(engine.num_operations for engine in self.engines)
        for engine in self.engines:
            report.reasons.update(engine.reasons)

    def _watch(self) -> None:
        """Detect calls and runs that never end."""
        while not self._has_ended:
            self.loop.sleep(_CALL_SECONDS / 2)
            late = [engine for engine in self.engines if (engine.called_at or inf) < self.loop.now - _CALL_SECONDS]
            if late:
                raise BrokenPromiseError(f"engine {late[0].number}: a call takes more than {_CALL_SECONDS:g} s")
            if self.loop.now > self.options.seconds + _MAX_SECONDS:
                raise BrokenPromiseError(f"the run has not ended {_MAX_SECONDS:g} s after the work")

    def _work(self) -> None:
        loop, options = self.loop, self.options
        # If engines forget often, little else can be checked.
        shares = loop.random.choice(((0.0, 0.0), (0.02, 0.005), (0.06, 0.04)))
        self.engines = [self._engine(number, shares) for number in range(options.engines)]
        tasks = [loop.start("engine", partial(engine.run, options.seconds)) for engine in self.engines]
        faults = [loop.start("fault", partial(self._suffer, fault)) for fault in self.report.faults]
        for task in (*tasks, *faults):
            task.join()
        for engine in self.engines:
            engine.collect_all()
        self._end_faults()
        for engine in self.engines:
            engine.read_again()
        self._recover()
        for engine in self.engines:
            engine.close()
        self._has_ended = True

    def _engine(self, number: int, shares: tuple[float, float]) -> FleetEngine:
        loop, server, oracle = self.loop, self.server, self.oracle
        log, tenants = self.log, self._has_tenants
        if self.options.work_of(self.report.seed) == "calls":
            return SimulatedEngine(loop, server, oracle, number, log, shares, has_tenants=tenants)
        serving = importlib.import_module("blockyard.tools.sim.fleet.serving")  # it needs torch
        made: FleetEngine = serving.ServingEngine(
            loop, server, oracle, self._texts, number, log, forgets=shares[1], has_tenants=tenants
        )
        return made

    def _see(self, value: bytes) -> None:
        """Check a value that is about to be stored, if it is the epoch's record."""
        if not is_record(value):
            return
        there = self.server.record()
        replaces = there[HEADER:] if there is not None and there in self._records else None
        self._records.add(value)
        link, sent_at = self.server.caller or (None, 0.0)
        writers = [engine for engine in self.engines if engine.link is link]
        if replaces is None and any(engine.was_told(sent_at) for engine in writers):
            raise BrokenPromiseError("an engine replaced the lost record, but knew that its weights were forgotten")
        self.oracle.see_record(value[HEADER:], self.loop.now, replaces=replaces)

    def _see_deletion(self, value: bytes, damaged_at: float) -> None:
        """Check a request that deletes an intact block; `damaged_at` is when the server last sent a damaged one."""
        _, sent_at = self.server.caller or (None, 0.0)
        self.oracle.check_deleted(int.from_bytes(key_in(value), "little"), sent_at, damaged_at)

    def _suffer(self, fault: Fault) -> None:
        """Begin a fault at its time, and end it."""
        self.loop.sleep(fault.at)
        engine = self.engines[fault.engine] if 0 <= fault.engine < len(self.engines) else None
        begun = self.log.begin_fault(fault.kind, _name_of(fault.engine))
        if fault.kind != "crash":
            self._afflict(fault, engine)
        elif engine is not None and not engine.link.is_dead:
            engine.crash()
            self.loop.sleep(fault.seconds)
            engine.restart()
            self.log.end_fault(begun)
            self.loop.start("engine", partial(engine.run, self.options.seconds)).join()
            return
        self.log.end_fault(begun)

    def _afflict(self, fault: Fault, engine: FleetEngine | None) -> None:
        """Let a fault other than a crash begin and end."""
        loop, server = self.loop, self.server
        if fault.kind in {"node_loss", "record_loss", "damage", "torn", "server_clock"}:
            self._spoil(fault.kind)
            return
        if fault.kind == "move" and isinstance(server, RedisCluster):
            server.move(fault.seconds)
            self._say("move ends", -1)
        elif fault.kind in {"failover", "cut_off"} and isinstance(server, RedisServer):
            self._replace(server, fault)
        elif fault.kind == "update":
            for each in self.engines:
                each.due.append(f"update at {fault.at:g}")
        elif fault.kind == "forget" and engine is not None:
            engine.due.append(loop.random.choice((None, *WEIGHTS)))
        elif fault.kind == "clock" and engine is not None:
            engine.turn_clock(CLOCK_STEP)
            loop.sleep(fault.seconds)
            engine.turn_clock(0.0)
        else:
            self._disturb(fault, engine)

    def _replace(self, server: RedisServer, fault: Fault) -> None:
        """Let a replica take a server's place; one at a time."""
        while server.is_failing:
            self.loop.sleep(0.1)
        server.is_failing = True
        if isinstance(server, RedisCluster) and fault.kind == "cut_off":
            self._cut_off(server, fault.seconds)
        else:
            self._fail_over(server, fault.seconds)
        server.is_failing = False
        self._say(f"{fault.kind} ends", -1)

    def _fail_over(self, server: RedisServer, seconds: float) -> None:
        """Let a server lose what it stores during the next seconds."""
        number, began = server.stop_replica(), self.loop.now
        self.loop.sleep(seconds)
        while isinstance(server, RedisCluster) and server.moving:
            self.loop.sleep(0.1)  # a key must not be on two nodes
        server.fail_over(number)
        self._roll_back(server, began)

    def _cut_off(self, server: RedisCluster, seconds: float) -> None:
        """Cut a primary off, and let it lose what it stores from then on if that lasts long enough."""
        while server.moving:
            self.loop.sleep(0.1)
        began, wait = self.loop.now, server.cut_off()
        self.loop.sleep(min(seconds, wait))
        if seconds > wait:
            server.take_over()
            self._say("cut_off: a replica takes over", -1)
            self._roll_back(server, began)
            self.loop.sleep(seconds - wait)
        server.join_again()

    def _roll_back(self, server: RedisServer, began: float) -> None:
        record = server.record()
        whole = record[HEADER:] if record is not None and record in self._records else None
        self.oracle.roll_back(whole, began, self.loop.now)

    def _disturb(self, fault: Fault, engine: FleetEngine | None) -> None:
        """Change one attribute for the duration of a fault."""
        target, name, value, usual = self._target(fault, engine)
        if target is None:
            return
        setattr(target, name, value)
        self.loop.sleep(fault.seconds)
        setattr(target, name, usual)  # even if another fault of this kind has begun in the meantime
        self._say(f"{fault.kind} ends", fault.engine)

    def _spoil(self, kind: str) -> None:
        """Lose or change stored data, or the server's clock."""
        server = self.server
        self.oracle.unsettle(-1, self.loop.now)
        if kind == "node_loss":
            server.lose(0.5)
        elif kind == "record_loss":
            server.lose_record()
        elif kind == "damage":
            server.damage()
        elif kind == "torn":
            server.tear()
        elif isinstance(server, RedisServer):
            server.clock_step += 3600.0

    def _target(self, fault: Fault, engine: FleetEngine | None) -> tuple[Any, str, Any, Any]:
        """Return the object and attribute that a fault changes, and the values with and without the fault."""
        if fault.kind == "gray":
            return self.server, "slowness", 300.0, 1.0
        if fault.kind == "full":
            return self.server, "is_full", True, False
        if fault.kind == "node_down":
            return self.server, "lost_node", self.loop.random.randrange(NODES), None
        if fault.kind == "copy":
            return getattr(engine, "streams", None), "loss", 0.5, 0.0
        if fault.kind not in _OF_LINK or engine is None:
            return None, "", None, None
        return engine.link, *_OF_LINK[fault.kind]

    def _end_faults(self) -> None:
        """End all faults, and wait until no engine expects failures any longer."""
        self.server.slowness, self.server.is_full = 1.0, False
        for engine in self.engines:
            engine.heal()
        self._say("all faults have ended", -1)
        self.loop.sleep(_QUIET_SECONDS)

    def _recover(self) -> None:
        """Check that every engine can forget, store and find blocks again."""
        until = self.loop.now + _RECOVERY_SECONDS
        for engine in self.engines:
            while not engine.forget("last"):
                self._require(until, f"engine {engine.number} cannot forget")
            while not engine.lift_quotas():
                self._require(until, f"engine {engine.number} cannot lift quotas")
        for engine in self.engines:
            while not engine.works():
                self._require(until, f"engine {engine.number} does not find what it has stored")
        while isinstance(self.server, RedisServer) and self.server.num_unlisted():
            self._require(until + _SWEEP_SECONDS, f"{self.server.num_unlisted()} blocks are in no list")
            self.engines[0].forget(None)  # new blocks ask for a sweep, in a cluster in other segments
            self.engines[0].works()

    def _require(self, until: float, what: str) -> None:
        if self.loop.now > until:
            raise BrokenPromiseError(f"{_RECOVERY_SECONDS:g} s after the last fault {what}")
        self.loop.sleep(0.5)

    def _say(self, text: str, engine: int) -> None:
        self.log.say(_name_of(engine), text)


def _name_of(engine: int) -> str:
    return "server" if engine < 0 else f"engine {engine}"
