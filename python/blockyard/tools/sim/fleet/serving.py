"""`ServingEngine`: one engine of a fleet that serves prompts with a real scheduler, block manager and prefix store.

Its copies run in virtual time, and its model writes the keys and values of `Texts`. Everything that a step reads is
compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard import BlockManager, CacheGroup, KVLayout, PrefixCaching, Request, Scheduler
from blockyard._core import StepOwner
from blockyard.engine import CacheEngine
from blockyard.executor import Executor, StepExecutor
from blockyard.executor.loop import StepLoop
from blockyard.prefix_store import PrefixStore
from blockyard.scheduler import Finished, Step
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.tools.sim.fleet.engine import WEIGHTS, FleetEngine
from blockyard.tools.sim.fleet.log import FleetLog
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError, Oracle
from blockyard.tools.sim.fleet.servers.link import Link, Server
from blockyard.tools.sim.fleet.streams import SimulatedStreams
from blockyard.tools.sim.fleet.texts import BLOCK_SIZE, CELL_BYTES, MODELS, Stamp, Texts
from blockyard.tools.sim.fleet.upkeep import DEVICE_BLOCKS, MAX_DEVICE_BLOCKS, MAX_PINNED, Upkeep, draw_defragmentation
from blockyard.tools.sim.fleet.watched_store import WatchedStore
from blockyard.tools.sim.loop import Loop

__all__ = ["ServingEngine"]

_HOST_BLOCKS: Final = 4
# On the host, for each cache group, and for each that keeps every block: half of them must hold a point of four blocks.
_POINT_BLOCKS: Final = (6, 8)
_WHOLE: Final = frozenset(("full_attention", "drafter"))  # groups that keep every block
_MAX_OPEN: Final = 4  # requests
_STEP_SECONDS: Final = 0.03
_PATIENCE: Final = 12.0  # seconds within which a request must end, whatever fails
_MAX_READS: Final = 8  # reads of one key per request
_SALTS: Final = (None, b"a tenant")
_LAYOUT: Final = KVLayout("kv_first", 1, BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="int64")


class _RowRead(NamedTuple):
    """What a row reads of one cache group.

    Attributes:
        row: the row.
        first: position of the first token.
        right: the expected keys.
        keys: the keys.
        values: the values.
    """

    row: int
    first: int
    right: list[int]
    keys: list[int]
    values: list[int]


class _Life:
    """The parts of an engine from its start until it is killed or closed; its scheduler's `Cache`."""

    def __init__(
        self,
        loop: Loop,
        link: Link,
        make_store: Callable[[Link], WatchedStore],
        writes: str,
        say: Callable[[str], None],
        groups: Sequence[CacheGroup],
    ) -> None:
        self.link = link
        self.streams = SimulatedStreams(loop)
        self.store = make_store(link)
        num_whole = sum(group.kind in _WHOLE for group in groups)
        point_blocks = max(_POINT_BLOCKS[0] * len(groups), _POINT_BLOCKS[1] * num_whole)
        host_blocks = _HOST_BLOCKS if groups == MODELS["full"] else point_blocks
        self.engine = CacheEngine(
            _LAYOUT, device_blocks=MAX_DEVICE_BLOCKS * len(groups), host_blocks=host_blocks, streams=self.streams
        )
        self.executor = StepExecutor(self.engine)
        self.manager = BlockManager(
            block_size=BLOCK_SIZE,
            device_blocks=DEVICE_BLOCKS * len(groups),
            host_blocks=host_blocks,
            groups=groups,
            prefix_caching=PrefixCaching(host=True, max_pinned=MAX_PINNED),
        )
        self.has_null = num_whole < len(groups)
        self._steps = StepOwner(self.manager, instead="the scheduler's step")
        self.prefix_store = PrefixStore(self.manager, self.engine, self.store, writes=writes)
        defragment = draw_defragmentation(loop.random)
        tensor = self.engine.tensors[0].view(torch.int64).numpy()
        self.cells: NDArray[np.int64] = tensor.reshape(2, -1)
        self.upkeep = Upkeep(self.manager, self.cells, loop.random, say)  # the scheduler calls `give_back` at once
        self.scheduler = Scheduler(self, max_num_seqs=3, max_num_batched_tokens=8, defragment=defragment)
        self.requests: dict[str, float] = {}  # arrival times of the open requests
        self.num_in_row = 0  # requests since none was open
        self.begun: set[int] = set()  # sequences that have had a step
        self.forgot_at = 0.0  # when it last called `forget` to begin an epoch; one that it joins may have older blocks
        self.confirmed_at = 0.0  # the same, of the calls that the store confirmed

    def _step_loop(self, executor: Executor | None) -> StepLoop:
        return StepLoop(self.manager, self._steps, self.executor if executor is None else executor, self.prefix_store)

    def give_back(self) -> None:
        """Release the memory that a smaller pool no longer uses."""
        self.upkeep.give_back()


class ServingEngine(FleetEngine):
    """Serves random prompts until its time is up.

    Args:
        loop: as for `FleetEngine`, like those not listed here.
        texts: what the models of all engines compute.
        forgets: how often it calls `forget`.
    """

    def __init__(
        self,
        loop: Loop,
        server: Server,
        oracle: Oracle,
        texts: Texts,
        number: int,
        log: FleetLog,
        *,
        forgets: float,
        has_tenants: bool,
    ) -> None:
        self._writes = loop.random.choice(("through", "through", "back", "second_use"))
        super().__init__(loop, server, oracle, number, log, has_tenants=has_tenants)
        self._texts, self._forgets = texts, forgets
        self._lives = 0
        self.life = self._begin()

    @property
    def link(self) -> Link:  # type: ignore[override]
        """The link to the server."""
        return self.life.link

    @property
    def streams(self) -> SimulatedStreams:
        """The streams of its copies."""
        return self.life.streams

    def _begin(self) -> _Life:
        self._lives += 1
        self.due.append(self.weights)  # tells the store which weights this process computes with
        with use_runtime(self.runtime):
            return _Life(self.loop, self.server.connect(), self._open, self._writes, self._say, self._texts.groups)

    def _open(self, link: Link) -> WatchedStore:
        store = link.open(self.weights, BLOCK_SIZE * CELL_BYTES)
        return WatchedStore(store, self.loop, self.oracle, self._texts, self.weights, self._log)

    def run(self, until: float) -> None:
        """Serve until a time, then finish the open requests."""
        chance, life = self.loop.random, self.life
        while self.loop.now < until and not life.link.is_dead:
            if self.due:
                self._forget_due(life)
            elif (chance.random() < self._forgets or life.store.is_forgotten) and chance.random() < 0.2:
                self.due.append(chance.choice((None, *WEIGHTS)))
            if len(life.requests) < _MAX_OPEN and chance.random() < 0.3:
                self._add(life, self._prompt(), chance.randint(1, 4))
            if self._has_tenants and chance.random() < 0.02:
                self._set_quota(life, chance.choice((None, 0, 2, 4)))
            life.upkeep.act(self._prompt_with_keys)
            self._step(life)
        self._be_idle(life)

    def crash(self) -> None:
        """Die at once. Requests already sent still arrive."""
        life = self.life
        life.link.is_dead = True
        self.loop.start("killed", lambda: life.store.close(0.0))

    def restart(self) -> None:
        """Restart with empty memory and the same weights."""
        self.reasons += self.life.store.reasons
        self.life = self._begin()

    def heal(self) -> None:
        """End all faults of its link and its copies."""
        super().heal()
        self.streams.loss = 0.0

    def collect_all(self) -> None:
        """Serve the open requests."""
        self._be_idle(self.life)

    def forget(self, revision: str | None) -> bool:
        """Forget all blocks. Returns whether the store confirmed it."""
        self._be_idle(self.life)
        return self._forget(self.life, revision)

    def lift_quotas(self) -> bool:
        """Remove all quotas. Returns whether the store confirmed it."""
        return not self._has_tenants or self._set_quota(self.life, None)

    def works(self) -> bool:
        """Serve a prompt; return whether its blocks then come from the store."""
        life, prompt = self.life, list(range(1, 4 * BLOCK_SIZE + 2))
        for _ in range(2):  # "second_use" stores blocks on their second use
            self._add(life, prompt, 1)
            self._be_idle(life)
        fetch = None
        if life.manager.prefix.reset():
            fetch = life.prefix_store.prefetch(prompt)
            life.prefix_store.wait(5.0, until=lambda: fetch.done)
        self._say(f"{0 if fetch is None else fetch.tokens} tokens came from the store")
        return self._writes == "back" or (fetch is not None and fetch.tokens == 4 * BLOCK_SIZE)

    def close(self) -> None:
        """Close the store, and check that nothing is still in use."""
        life = self.life
        self._be_idle(life)
        self._check_idle(life)
        stats = life.store.stats()
        if stats.pending_bytes:
            raise BrokenPromiseError(f"engine {self.number}: {stats.pending_bytes} bytes are in flight, no batch is")
        self.reasons += life.store.reasons
        if not life.prefix_store.close(60.0):
            raise BrokenPromiseError(f"engine {self.number}: calls go on a minute after the last deadline")
        life.executor.close()
        life.engine.close()

    # ---- its work ----

    def _prompt(self) -> list[int]:
        """Return a prompt: the beginning of a text that all engines use now, and some random tokens."""
        chance = self.loop.random
        text = int(self.loop.now) + chance.randrange(2)
        shared = [(7 * text + place) % 50 for place in range(chance.randint(1, 10))]
        return shared + [chance.randrange(50) for _ in range(chance.randint(0, 3))]

    def _prompt_with_keys(self) -> tuple[list[int], bytes | None, Callable[[int], list[int]]]:
        prompt, salt = self._prompt(), self._salt()
        return prompt, salt, partial(self._texts.pinned, (self.weights, salt, prompt))

    def _salt(self) -> bytes | None:
        return self.loop.random.choice(_SALTS) if self._has_tenants else None

    def _add(self, life: _Life, prompt: list[int], max_tokens: int) -> None:
        self.num_operations += 1
        name = f"{self.number}-{self.num_operations}"
        salt = self._salt()
        life.scheduler.add(Request(name, prompt, max_tokens, salt=salt))
        life.requests[name] = self.loop.now
        life.num_in_row += 1
        self._say(f"request {name}: {prompt}, {max_tokens} tokens")

    def _step(self, life: _Life) -> None:
        """Serve one step, unless the engine was killed."""
        scheduler, was_killed = life.scheduler, life.link.is_dead
        if was_killed:
            return
        if scheduler.num_unfinished:
            with scheduler.step() as step:
                read, sampled = self._compute(life, step)
                life.upkeep.check_pins()
            if life.link.is_dead:  # killed meanwhile: the next life may have other weights by now
                return
            self._check(step, read)
            for finished in scheduler.update(step, sampled):
                self._end(life, finished)
        else:
            scheduler.poll()
        if life.store.broken is not None and not life.link.is_dead:
            raise life.store.broken
        self.loop.sleep(_STEP_SECONDS)
        oldest = min(life.requests.values(), default=inf)
        if self.loop.now > oldest + _PATIENCE and not life.link.is_dead:
            raise BrokenPromiseError(f"engine {self.number}: the request added at {oldest:.3f} s has not ended")
        if max(life.store.reads.values(), default=0) > _MAX_READS * (1 + life.num_in_row):
            raise BrokenPromiseError(f"engine {self.number}: reads a block again and again")
        if not life.requests:
            life.store.reads.clear()
            life.num_in_row = 0

    def _compute(self, life: _Life, step: Step) -> tuple[list[_RowRead], list[int]]:
        """Write the new tokens of all rows, and the new states.

        Returns:
            What each row reads of each group; then the sampled tokens.
        """
        texts, count, begins = self._texts, len(self._texts.groups), step.query_start_loc.tolist()
        stamp = texts.stamp(Stamp((self.number, self._lives), self.weights, self.loop.now))
        tables = step.block_tables.reshape(count, step.rows, step.block_tables.shape[-1])
        slots = step.slot_mapping.reshape(count, begins[-1])
        starts, ends = step.start.tolist(), (step.start + step.lengths).tolist()
        of_rows = [self._keys(step, row, end) for row, end in enumerate(ends)]
        parts = [(row, group) for row in range(step.rows) for group in range(count)]
        states = [part for part in parts if texts.is_state(part[1])]
        read = [
            _read(life, row, (start - 1) // BLOCK_SIZE * BLOCK_SIZE, right * BLOCK_SIZE, tables[group, row])
            for row, group in states
            if (start := starts[row])
            for right in [of_rows[row][group][start - 1 : start]]
        ]
        for row, group in parts:
            at, keys = slots[group, begins[row] : begins[row + 1]], of_rows[row][group][starts[row] :]
            if texts.is_state(group):
                at, keys = at[-1] // BLOCK_SIZE * BLOCK_SIZE + np.arange(BLOCK_SIZE), keys[-1:]
            life.cells[0, at], life.cells[1, at] = keys, stamp
            before = starts[row] - 1
            # The drafter's entry before the tokens of this step was found, or waited for the first of them.
            if texts.is_drafter(group) and before >= 0 and (row < step.decodes or step.handles[row] in life.begun):
                place = tables[group, row, before // BLOCK_SIZE] * BLOCK_SIZE + before % BLOCK_SIZE
                life.cells[0, place], life.cells[1, place] = of_rows[row][group][before], stamp
        life.begun.update(step.handles.tolist())
        for row, group in parts:
            if not texts.is_state(group):
                first, end = texts.first_needed(group, starts[row]), ends[row] - texts.is_drafter(group)
                read.append(_read(life, row, first, of_rows[row][group][first:end], tables[group, row]))
        draws = [self._draw(step, draw.row, draw.position) for draw in step.draws()]
        return read, draws

    def _keys(self, step: Step, row: int, end: int) -> list[list[int]]:
        """Return the keys of a row's tokens in each group."""
        tokens, salt = step.all_token_ids(row)[:end].tolist(), self._salt_of(step, row)
        return [self._texts.keys(self.weights, salt, tokens, group) for group in range(len(self._texts.groups))]

    def _draw(self, step: Step, row: int, position: int) -> int:
        """Return the token that the model samples for a row's position."""
        tokens = step.all_token_ids(row)[:position].tolist()
        return self._texts.next_token(self._texts.digests(self.weights, self._salt_of(step, row), tokens)[-1])

    def _salt_of(self, step: Step, row: int) -> bytes | None:
        owner = step.owners[int(step.seats[row])]
        return None if owner is None else owner[0].request.salt

    def _check(self, step: Step, read: list[_RowRead]) -> None:
        """Check what each row has read, except rows whose blocks are known to be lost."""
        for row, first, right, keys, values in read:
            if step.void is not None and step.void[row]:
                continue
            who = f"engine {self.number}: request {step.owner(row)[0]}"
            if keys != right:
                wrong = next(at for at, key in enumerate(keys) if key != right[at])
                raise BrokenPromiseError(f"{who} reads another token than its own at position {first + wrong}")
            for value in values:
                stamp = self._texts.stamps[value]
                is_own = stamp.engine == (self.number, self._lives)
                if stamp.weights != self.weights or (is_own and stamp.at < self.life.forgot_at):
                    raise BrokenPromiseError(f"{who} reads a forgotten block, computed at {stamp.at:.3f} s")

    def _end(self, life: _Life, finished: Finished) -> None:
        request, outputs = finished.request, finished.outputs[0]
        began = life.requests.pop(request.request_id)
        tokens, prompt = [*map(int, request.prompt), *outputs], len(request.prompt)
        digests = self._texts.digests(self.weights, request.salt, tokens)
        if finished.error is not None or len(outputs) != request.max_tokens:
            raise BrokenPromiseError(f"engine {self.number}: request {request.request_id} ended early")
        if list(outputs) != [self._texts.next_token(digest) for digest in digests[prompt - 1 : -1]]:
            raise BrokenPromiseError(f"engine {self.number}: request {request.request_id} has other tokens")
        self._say(f"request {request.request_id} took {self.loop.now - began:.3f} s")
        lengths = {"prompt": prompt, "tokens": request.max_tokens}
        self._log.add_request(self._who, request.request_id, began, **lengths)

    def _be_idle(self, life: _Life) -> None:
        """Serve until no request is open and nothing is in flight."""
        until = self.loop.now + 2 * _PATIENCE
        life.upkeep.unpin_all()
        while not life.link.is_dead:
            self._step(life)
            if not life.requests:
                life.scheduler.drain()
                # It offers blocks to a store that failed, too. With "back", blocks that are not due yet stay queued.
                is_written = life.prefix_store.wait(0.0)
                is_written = is_written and (self._writes == "back" or not life.prefix_store.waiting_blocks)
                if is_written and not life.prefix_store.num_open:
                    return
            if self.loop.now > until:
                raise BrokenPromiseError(f"engine {self.number}: blocks wait for the store, but it accepts none")

    def _check_idle(self, life: _Life) -> None:
        """Check that no block is leased or leaked, and that the counters add up."""
        life.scheduler.drain()
        stats, watched = life.prefix_store.stats(), life.store
        if not life.manager.prefix.reset() or life.manager.stats().open_tickets:
            raise BrokenPromiseError(f"engine {self.number}: blocks are in use, but no request is open")
        for tier in ("device", "host"):
            pool = life.manager.pool(tier)
            if pool.num_free != pool.num_blocks - life.has_null:
                raise BrokenPromiseError(
                    f"engine {self.number}: {pool.num_free} of {pool.num_blocks} {tier} blocks are free, none is in use"
                )
        if stats.hit_blocks > watched.hits or watched.stored > stats.written_blocks:
            raise BrokenPromiseError(
                f"engine {self.number}: counts {stats.hit_blocks} blocks loaded and {stats.written_blocks} written, "
                f"the store gave {watched.hits} and took {watched.stored}"
            )

    def _forget_due(self, life: _Life) -> None:
        """Call `forget` for a due revision, once idle; if it is killed first, its next life does."""
        self._be_idle(life)
        if not life.link.is_dead:
            revision = self.due.pop(0)
            if not self._forget(life, revision) and self.loop.random.random() < 0.5:
                self.due.append(revision)

    def _forget(self, life: _Life, revision: str | None) -> bool:
        if life.link.is_dead:
            return True
        if revision is not None:
            self.weights = revision
        life.store.is_forgotten, life.store.weights = False, self.weights
        forgot_at = self.loop.now if revision is None else life.confirmed_at
        life.forgot_at = max(life.forgot_at, forgot_at)

        def forget() -> None:
            if not life.prefix_store.forget(revision):
                raise BrokenPromiseError(f"engine {self.number}: cannot forget, though it is idle")

        said = self._call_forget(revision, forget)
        if said == "ok":
            life.forgot_at = life.confirmed_at = forgot_at
        return self._note_call("forget", f"forget {revision!r}", said)

    def _set_quota(self, life: _Life, num_blocks: int | None) -> bool:
        size = None if num_blocks is None else num_blocks * BLOCK_SIZE * CELL_BYTES

        def set_all() -> None:
            for salt in _SALTS:
                life.prefix_store.set_quota(salt, size)

        return self._note_call("quota", f"quotas of {num_blocks} blocks", self._call(set_all))


def _read(life: _Life, row: int, first: int, right: list[int], table: NDArray[np.int32]) -> _RowRead:
    at = np.arange(first, first + len(right))
    keys, values = life.cells[:, table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE].tolist()
    return _RowRead(row, first, right, keys, values)
