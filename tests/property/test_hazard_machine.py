"""Scheduler, manager, copy engine and executor over a simulated device at random, and known bugs planted in each."""

import random
from collections.abc import Callable, Iterable, Sequence

import noticing
import numpy as np
import pytest
from hazard_machine import HazardMachine, ResizingHazardMachine, overlapping
from hypothesis import seed, settings
from simulated_device import SimulatedStore, SimulatedStreams

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.engine.engine import CacheEngine, Kind
from blockyard.engine.mapping import Ids
from blockyard.engine.transfers import Transfer
from blockyard.executor import checked_store
from blockyard.executor.executor import StepDone, StepExecutor
from blockyard.executor.parts import Part
from blockyard.layout.kv import KVLayout
from blockyard.stores import ExternalStore
from blockyard.testing import Config
from blockyard.testing.faults import UnrulyStore
from blockyard.testing.machines import run_state_machine_as_test

STEP_COUNT = 30


def machine(base: type[HazardMachine] = HazardMachine, **members: object) -> type[HazardMachine]:
    made = {
        "make_scheduler": staticmethod(overlapping),
        "make_manager": staticmethod(lambda config: BlockManager(**config.arguments())),
    }
    made |= {name: staticmethod(value) for name, value in members.items()}
    return type("Machine", (base,), made)


def budget(steps: int) -> settings:
    return settings(max_examples=max(1, steps // STEP_COUNT // 3), stateful_step_count=STEP_COUNT, deadline=None)


def test_every_byte_is_that_of_the_plain_model(steps: int):
    run_state_machine_as_test(machine(), settings=budget(steps))


class SecondsByCall:
    """Time that passes by being asked for: a batch that the store forgets is overdue after some hundred polls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_every_byte_is_that_of_the_plain_model_whatever_the_store_does(steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checked_store, "time", SecondsByCall())
    broken = []

    def unruly(slots: int, size: int, *, seed: int, fail: float) -> ExternalStore:
        broken.append(UnrulyStore(SimulatedStore(slots, size, seed=seed, fail=fail), seed=seed, share=0.3))
        return broken[-1]

    run_state_machine_as_test(machine(make_store=unruly), settings=budget(steps))
    assert sum(store.broken for store in broken) > 0


def test_every_byte_is_that_of_the_plain_model_while_the_device_changes_its_size(steps: int):
    run_state_machine_as_test(machine(ResizingHazardMachine), settings=budget(steps))


def assert_noticed(base: type[HazardMachine] = HazardMachine, max_examples: int = 500, **members: object) -> None:
    """The machine must read wrong bytes."""
    seeded = seed(1)(machine(base, **members))
    noticing.assert_noticed(
        seeded, step_count=STEP_COUNT, max_examples=max_examples, match="reads wrong keys or values"
    )


# ---- bugs that engines have had ----


class EndsWhenSubmitted(StepExecutor):
    """Says that bytes have landed as soon as they were sent."""

    def __init__(self, engine: CacheEngine, store: ExternalStore, **arguments: int) -> None:
        super().__init__(engine, store, **arguments)
        self.early: list[int] = []

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        super().submit(decision, by_layer=by_layer)
        self.early.append(decision.ticket)

    def poll(self) -> list[StepDone]:
        super().poll()
        early, self.early = self.early, []
        return [StepDone(ticket, (), ()) for ticket in early]

    def is_awaited(self, ticket: int) -> bool:
        return False


def test_publishing_before_the_bytes_have_landed_is_noticed():
    assert_noticed(make_executor=EndsWhenSubmitted)


class FreesUnderCopies:
    """A manager that gives the blocks of a freed sequence out again although a transfer still uses them."""

    def __init__(self, config: Config) -> None:
        self.manager = BlockManager(**config.arguments())
        self.open: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.manager, name)

    def take_decision(self, *, prefetch: bool = False) -> StepDecision:
        decision = self.manager.take_decision(prefetch=prefetch)
        self.open.append(decision.ticket)
        return decision

    def free(self, sequences: object) -> None:
        for ticket in self.open:
            self.manager.complete(ticket)
        self.open.clear()
        self.manager.free(sequences)

    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> object:
        if ticket not in self.open:
            return np.zeros(0, np.uint64)
        self.open.remove(ticket)
        return self.manager.complete(ticket, lost)


def test_freeing_blocks_under_a_copy_in_flight_is_noticed():
    assert_noticed(make_manager=FreesUnderCopies)


class LoadsDoNotWait(CacheEngine):
    """Loads into blocks that a store is still reading."""

    def submit(self, kind: Kind, pairs: Ids, *, after: Sequence[Transfer] = (), **arguments: object) -> Transfer:
        return super().submit(kind, pairs, after=() if kind == "swap_in" else after, **arguments)


@pytest.mark.slow  # a load seldom enters blocks that an earlier step's store still reads
def test_a_load_that_races_a_store_is_noticed():
    assert_noticed(make_engine=LoadsDoNotWait, max_examples=4000)


def test_memory_that_goes_with_the_size_and_not_with_the_last_block_in_use_is_noticed():
    assert_noticed(ResizingHazardMachine, needed=lambda manager: manager.pool("device").num_blocks)


# ---- other ways to be wrong ----


class IgnoresAfter(StepExecutor):
    def _cut(self, decision: StepDecision, *rest: object, **arguments: object) -> tuple[tuple[Part, ...], list[Part]]:
        return super()._cut(StepDecision(decision.ticket, decision.transfers()), *rest, **arguments)


def compute_does_not_wait(layout: KVLayout, **arguments: object) -> CacheEngine:
    made = CacheEngine(layout, **arguments)
    made.transfers.order_compute = lambda transfer, layer=None: None
    return made


def compute_waits_for_the_layer_before(layout: KVLayout, **arguments: object) -> CacheEngine:
    made = CacheEngine(layout, **arguments)
    order = made.transfers.order_compute
    made.transfers.order_compute = lambda transfer, layer=None: order(transfer, layer and max(0, layer - 1))
    return made


def one_staging_buffer(layout: KVLayout, **arguments: object) -> CacheEngine:
    made = CacheEngine(layout, **arguments)
    kept = made.memory.staging(1000)
    made.memory.staging = lambda num_rows: kept[:num_rows]
    return made


class CopiesDoNotWait(CacheEngine):
    def submit(self, kind: Kind, pairs: Ids, *, after: Sequence[Transfer] = (), **arguments: object) -> Transfer:
        return super().submit(kind, pairs, after=() if kind == "copy" else after, **arguments)


@pytest.mark.parametrize(
    "engine", [compute_does_not_wait, compute_waits_for_the_layer_before, one_staging_buffer, CopiesDoNotWait]
)
def test_an_engine_that_leaves_something_unordered_is_noticed(engine: Callable[..., CacheEngine]):
    assert_noticed(make_engine=engine)


def test_an_executor_that_ignores_the_order_between_tickets_is_noticed():
    assert_noticed(make_executor=IgnoresAfter)


# ---- moves in the mix ----

SPARE = 4
"""Blocks of the device that the manager do not know: the holes that blocks move to."""


class MovingManager:
    """A manager whose blocks change places on the device at random.

    A move is decided with a step, reads its source and writes a hole while the step is computed from the source, and
    takes effect when the ticket is completed. If the block is written meanwhile, it stays where it is.
    """

    def __init__(self, config: Config) -> None:
        self.manager = BlockManager(**config.arguments())
        self.random = random.Random(str(config))
        self.size = config.block_size
        self.place = np.arange(config.device_blocks)  # of each block of the manager
        self.holes = list(range(config.device_blocks, config.device_blocks + SPARE))
        self.resting: list[tuple[set[int], int]] = []  # holes that open tickets may still read
        self.moving: dict[int, dict[int, int]] = {}  # ticket -> block -> hole
        self.sent: dict[int, dict[tuple[str, str, int, int], list[int]]] = {}  # what pairs are in the manager
        self.busy: dict[int, set[int]] = {}  # ticket -> blocks
        self.written: set[int] = set()
        self.batch: list[int] = []
        self.moved = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.manager, name)

    # ---- what the engine sees ----

    def append(
        self,
        sequences: np.ndarray,
        num_tokens: np.ndarray | None = None,
        *,
        token_ids: None = None,
        block_tables: np.ndarray | None = None,
        out: np.ndarray,
    ) -> None:
        out[:] = self.slots(self.manager.append(sequences, num_tokens))
        self.batch = [] if block_tables is not None else self.batch
        if block_tables is not None:
            self.block_tables(sequences, out=block_tables)

    def slot_mapping(self, sequence: int, first: int, last: int, out: np.ndarray) -> None:
        out[:] = self.slots(self.manager.slot_mapping(sequence, first, last))

    def slots(self, slots: np.ndarray) -> np.ndarray:
        blocks = slots // self.size
        self.note_written(blocks.tolist())
        return self.place[blocks] * self.size + slots % self.size

    def note_written(self, blocks: Iterable[int]) -> None:
        self.written.update(blocks)

    def block_tables(self, sequences: np.ndarray, out: np.ndarray) -> None:
        self.batch += sequences.tolist()
        tables = self.manager.block_tables(sequences)
        out[: len(tables), : tables.shape[1]] = self.place[tables]

    def free(self, sequences: np.ndarray) -> None:
        self.manager.free(sequences)
        self.batch = [handle for handle in self.batch if handle not in set(sequences.tolist())]

    def take_decision(self, *, prefetch: bool = False) -> StepDecision:
        decision = self.manager.take_decision(prefetch=prefetch)
        transfers, names, busy = [], {}, set()
        for kind, pairs in decision.transfers():
            for side, tier in enumerate((pairs.src, pairs.dst)):
                if tier == "device":
                    busy.update(pairs.ids[:, side].tolist())
            if pairs.dst == "device":
                self.note_written(pairs.ids[:, 1].tolist())
            placed = self.placed(pairs)
            names |= {
                (pairs.src, pairs.dst, *new): old
                for new, old in zip(placed.ids.tolist(), pairs.ids.tolist(), strict=True)
            }
            transfers.append((kind, placed))
        self.sent[decision.ticket], self.busy[decision.ticket] = names, busy
        self.abandon()
        moves = self.choose(decision.ticket)
        if moves:
            transfers.append(("move", Pairs("device", "device", np.array(moves, dtype=np.int64))))
        self.written, self.batch = set(), []
        return StepDecision(decision.ticket, transfers, after=decision.after, prefetch=decision.prefetch)

    def placed(self, pairs: Pairs) -> Pairs:
        ids = pairs.ids.copy()
        for side, tier in enumerate((pairs.src, pairs.dst)):
            if tier == "device":
                ids[:, side] = self.place[ids[:, side]]
        return Pairs(pairs.src, pairs.dst, ids)

    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> object:
        names = self.sent[ticket]
        # A move is not in the manager, one that was abandoned neither.
        mine = [pairs for pairs in lost if (pairs.src, pairs.dst, *pairs.ids[0].tolist()) not in names]
        rest = [pairs for pairs in lost if pairs not in mine]
        self.end(ticket, {int(hole) for pairs in mine for hole in pairs.ids[:, 1]})
        known = [Pairs(p.src, p.dst, self.before(names, p)) for p in rest]
        return self.manager.complete(ticket, known)

    @staticmethod
    def before(names: dict[tuple[str, str, int, int], list[int]], pairs: Pairs) -> np.ndarray:
        """What pairs that were sent are in the manager."""
        return np.array([names[pairs.src, pairs.dst, first, second] for first, second in pairs.ids.tolist()], np.int64)

    # ---- moves ----

    def choose(self, ticket: int) -> list[tuple[int, int]]:
        """Blocks that this step reads and does not write, and holes for them."""
        taken = self.written.union(*self.busy.values(), *self.moving.values())
        here = [handle for handle in self.batch if self.manager.tier(handle) == "device"]
        tables = [self.manager.block_table(handle).tolist() for handle in here]
        free = sorted({block for table in tables for block in table} - taken)
        count = min(len(free), len(self.holes), self.random.choice((0, 0, 1, 1, 2, 3)))
        chosen = self.moving[ticket] = {
            block: self.holes.pop(self.random.randrange(len(self.holes))) for block in self.random.sample(free, count)
        }
        return [(int(self.place[block]), hole) for block, hole in chosen.items()]

    def abandon(self) -> None:
        """What is written meanwhile stays; its hole is free when the move has ended."""
        for ticket, chosen in self.moving.items():
            self.moving[ticket] = {b: hole for b, hole in chosen.items() if b not in self.written}
            stopped = {hole for block, hole in chosen.items() if block in self.written}
            self.resting += [({ticket}, hole) for hole in sorted(stopped)]

    def end(self, ticket: int, lost: set[int]) -> None:
        del self.busy[ticket], self.sent[ticket]
        open_tickets = set(self.busy)
        for block, hole in self.moving.pop(ticket).items():
            if hole in lost:
                self.holes.append(hole)
                continue
            self.resting.append((open_tickets.copy(), int(self.place[block])))
            self.place[block] = hole
            self.moved += 1
        for waits, _ in self.resting:
            waits.discard(ticket)
        self.holes += [hole for waits, hole in self.resting if not waits]
        self.resting = [(waits, hole) for waits, hole in self.resting if waits]


def roomy_engine(layout: KVLayout, *, device_blocks: int, **arguments: object) -> CacheEngine:
    return CacheEngine(layout, device_blocks=device_blocks + SPARE, **arguments)


def test_every_byte_is_that_of_the_plain_model_while_blocks_move(steps: int):
    moved: list[MovingManager] = []

    def new_manager(config: Config) -> MovingManager:
        moved.append(MovingManager(config))
        return moved[-1]

    run_state_machine_as_test(machine(make_manager=new_manager, make_engine=roomy_engine), settings=budget(steps))
    assert sum(made.moved for made in moved) > len(moved)


# ---- bugs in the manager ----


class RewritesTablesEarly(MovingManager):
    """The table names the hole before the bytes are there."""

    def choose(self, ticket: int) -> list[tuple[int, int]]:
        moves = super().choose(ticket)
        for block, hole in self.moving[ticket].items():
            self.place[block] = hole
        return moves


class WritesWhatMoves(MovingManager):
    """New tokens go to the source of a move, and the move takes effect all the same."""

    def note_written(self, blocks: Iterable[int]) -> None:
        return


class GivesSourcesOutEarly(MovingManager):
    """The source of a move is a hole for the next one, before the first has ended."""

    def choose(self, ticket: int) -> list[tuple[int, int]]:
        moves = super().choose(ticket)
        self.holes = sorted({*self.holes, *(source for source, _ in moves)})
        return moves

    def end(self, ticket: int, lost: set[int]) -> None:
        super().end(ticket, lost)
        self.holes = sorted(set(self.holes) - set(self.place.tolist()))


@pytest.mark.parametrize("manager", [RewritesTablesEarly, WritesWhatMoves, GivesSourcesOutEarly])
def test_managers_that_do_not_wait_for_a_move_are_noticed(manager: type[MovingManager]):
    assert_noticed(make_manager=manager, make_engine=roomy_engine)


# ---- a bug in the executor ----


class ForgetsLostMoves(StepExecutor):
    """Says that all moves have landed."""

    def __init__(self, engine: CacheEngine, store: ExternalStore, **arguments: int) -> None:
        super().__init__(engine, store, **arguments)
        self.moves: dict[int, list[list[int]]] = {}

    def submit(self, decision: StepDecision, **arguments: bool) -> None:
        self.moves[decision.ticket] = [ids for pairs in decision.move for ids in pairs.ids.tolist()]
        super().submit(decision, **arguments)

    def poll(self) -> list[StepDone]:
        return [done._replace(lost=tuple(self.others(done))) for done in super().poll()]

    def others(self, done: StepDone) -> list[Pairs]:
        return [pairs for pairs in done.lost if pairs.ids[0].tolist() not in self.moves[done.ticket]]


def test_a_lost_move_that_is_not_reported_is_noticed():
    # Few transfers are moves: many fail, so that a move does.
    assert_noticed(
        make_streams=lambda seed, **_: SimulatedStreams(seed, fail=0.2),
        make_manager=MovingManager,
        make_engine=roomy_engine,
        make_executor=ForgetsLostMoves,
    )


# ---- the manager's own moves ----


class Defragments:
    """A manager that decides moves of its own with most steps."""

    def __init__(self, config: Config) -> None:
        self.manager = BlockManager(**config.arguments())
        self.random = random.Random(str(config))
        self.moved = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.manager, name)

    def take_decision(self, *, prefetch: bool = False) -> StepDecision:
        goal = self.random.choice(("max_id", "free_tail", "dense", ""))
        blocks = self.manager.pool("device").num_blocks
        if goal:
            number = self.random.randrange(1, max(2, blocks // 2)) if goal != "dense" else 0
            self.manager.defrag.run(goal, number, max_moves=self.random.randrange(1, 5))
        decision = self.manager.take_decision(prefetch=prefetch)
        self.moved += sum(len(pairs) for pairs in decision.move)
        return decision


def test_every_byte_is_that_of_the_plain_model_while_the_manager_defragments(steps: int):
    made: list[Defragments] = []

    def new_manager(config: Config) -> Defragments:
        made.append(Defragments(config))
        return made[-1]

    run_state_machine_as_test(machine(make_manager=new_manager), settings=budget(steps))
    assert sum(manager.moved for manager in made) > len(made) // 3


class MovesEndEarly(StepExecutor):
    """Does not wait for moves before it says that a decision has been carried out."""

    def _begin(self, part: Part) -> None:
        super()._begin(part)
        if part.kind == "move":
            self._legs.end(part, [], None)


def test_a_table_that_is_rewritten_before_the_move_has_landed_is_noticed():
    assert_noticed(make_manager=Defragments, make_executor=MovesEndEarly)
