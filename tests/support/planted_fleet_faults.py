"""Faults planted in the code of shared stores, each with the seeds within which a simulated fleet finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockyard.errors import StoreError
from blockyard.executor.loop import StepLoop
from blockyard.prefix_store import PrefixStore
from blockyard.prefix_store import loads as prefix_loads
from blockyard.prefix_store.loads import Loads
from blockyard.prefix_store.writes import Writes
from blockyard.scheduler.admission import Admission
from blockyard.stores import Completion, ThreadedStore, object_store
from blockyard.stores.redis import RedisStore, lists
from blockyard.stores.redis import store as redis_store
from blockyard.stores.threaded import epochs, keyed_blocks, known_keys, stored_values
from blockyard.stores.threaded.batches import Batches
from blockyard.stores.threaded.epochs import Epoch, SharedEpoch
from blockyard.stores.threaded.keyed_blocks import KeyedBlocks
from blockyard.stores.threaded.stored_values import StoredValues
from blockyard.tools.sim import FleetOptions
from blockyard.tools.sim.fleet.servers.redis_cluster import RedisClusterLink
from blockyard.tools.sim.fleet.servers.redis_server import RedisLink
from blockyard.tools.sim.fleet.texts import BLOCK_SIZE, Texts
from blockyard.tools.sim.fleet.upkeep import Upkeep

__all__ = ["PLANTED", "planted"]

Patch = Callable[[pytest.MonkeyPatch], None]


def _at_each_seed(patch: pytest.MonkeyPatch, begin: Callable[[Texts], None]) -> None:
    """Call `begin` with the texts of each fleet, so that a fault remembers nothing of another seed."""
    created = Texts.__post_init__

    def create(self: Texts) -> None:
        created(self)
        begin(self)

    patch.setattr(Texts, "__post_init__", create)


def _landing(patch: pytest.MonkeyPatch) -> None:
    put = KeyedBlocks._put_or_delete

    def land(self: Any, batch: Any, keys: list[bytes]) -> Any:
        batch.age = 1 << 60
        return put(self, batch, keys)

    patch.setattr(KeyedBlocks, "_put_or_delete", land)


def _clocks(patch: pytest.MonkeyPatch) -> None:
    times = list[int]()

    def begin(name: bytes, _stored: Any, *, joins: bool) -> Epoch:
        times.append(len(times) + 1)
        stamp = times[-1] * 7919 % 65537  # of clocks that disagree
        return Epoch(stamp.to_bytes(16, "big"), stamp.to_bytes(16, "big"), name)

    def go_on(self: Epoch, stored: Epoch | None) -> Epoch:
        return self if stored is None else max(self, stored, key=lambda epoch: epoch.weights)

    patch.setattr(Epoch, "begun", staticmethod(begin))
    patch.setattr(Epoch, "continued", go_on)
    _at_each_seed(patch, lambda _: times.clear())


def _behind(patch: pytest.MonkeyPatch) -> None:
    take = SharedEpoch._take

    def forget_it(self: Any, age: int, epoch: Any, asked_at: float) -> None:
        take(self, age, epoch, asked_at)
        self._is_behind = False

    patch.setattr(SharedEpoch, "_take", forget_it)


def _unconfirmed(patch: pytest.MonkeyPatch) -> None:
    begin = SharedEpoch.begin

    def pretend(self: Any) -> None:
        try:
            begin(self)
        except (StoreError, OSError):
            self._mine, self._is_due = Epoch(bytes(15) + b"1", bytes(15) + b"1", self._name), False

    patch.setattr(SharedEpoch, "begin", pretend)


def _delete_under_old_epoch(patch: pytest.MonkeyPatch) -> None:
    confirm = SharedEpoch.confirm
    patch.setattr(SharedEpoch, "confirm", lambda self, *, seconds=0.0: confirm(self, seconds=max(seconds, 1.0)))


def _all_stored(patch: pytest.MonkeyPatch) -> None:
    put_good = StoredValues.put

    def pretend(self: Any, names: Any, rows: Any, reasons: list[str], *more: Any) -> None:
        put_good(self, names, rows, reasons, *more)
        reasons[:] = [""] * len(reasons)

    patch.setattr(StoredValues, "put", pretend)


def _late_put_stored(patch: pytest.MonkeyPatch) -> None:
    """A put whose answer did not arrive in time is said to be stored."""
    give_up = ThreadedStore._give_up

    def pretend(self: Any, batch: Any, reason: str) -> None:
        give_up(self, batch, "" if (batch.kind, reason) == ("put", "timeout") else reason)

    patch.setattr(ThreadedStore, "_give_up", pretend)


def _third_overtakes(patch: pytest.MonkeyPatch) -> None:
    """The third batch of a key does not wait for the second, which still waits for the first."""

    add = Batches.add

    def overtake(self: Any, batch: Any) -> bool:
        last = self._last
        self._last = {name: earlier for name, earlier in last.items() if not earlier.before}
        is_first = add(self, batch)
        self._last = last | self._last
        return is_first

    patch.setattr(Batches, "add", overtake)


def _late_puts_ignored(patch: pytest.MonkeyPatch) -> None:
    """A deletion is confirmed though a put that was given up still runs, and stores the block again."""
    patch.setattr(Batches, "late_puts", lambda self: set())


def _deletes_at_first_sight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_keys.KnownKeys, "doubt", lambda self, key, seen: True)


def _pages_are_values(patch: pytest.MonkeyPatch) -> None:
    """Two equal answers that are no value of the store, such as an error page, prove damage."""
    patch.setattr(known_keys, "is_whole", lambda reason: True)


def _stays_hidden(patch: pytest.MonkeyPatch) -> None:
    """Seed 2404 of five engines over objects."""
    patch.setattr(known_keys.KnownKeys, "_ends_hiding", lambda *_: False)


def _damaged_records_count(patch: pytest.MonkeyPatch) -> None:
    """A batch whose record came damaged on its way has no blocks, although they are there."""
    fetch = KeyedBlocks._get

    def get(self: Any, batch: Any, keys: list[bytes]) -> Any:
        counts, looked = self.epochs.counts, [True]

        def look(epoch: Epoch, stored: Any) -> bool:
            looked.append(counts(epoch, stored))
            return looked[-1]

        self.epochs.counts = look
        try:
            rows, reasons = fetch(self, batch, keys)
        finally:
            del self.epochs.counts
        return (rows, reasons) if looked[-1] else (None, ["absent"] * len(keys))

    patch.setattr(KeyedBlocks, "_get", get)


def _known_after_forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_keys.KnownKeys, "clear", lambda self: self._until.clear())


def _no_order(patch: pytest.MonkeyPatch) -> None:
    add = Batches.add

    def start(self: Any, batch: Any) -> bool:
        self._last.clear()
        return add(self, batch)

    patch.setattr(Batches, "add", start)


def _leak(patch: pytest.MonkeyPatch) -> None:
    release = Batches.release

    def keep(self: Any, batch: Any) -> None:
        batch.num_bytes -= batch.kind == "put"
        release(self, batch)

    patch.setattr(Batches, "release", keep)


def _miscount(patch: pytest.MonkeyPatch) -> None:
    count = ThreadedStore._count_misses

    def twice(self: Any, batch: Any, reasons: list[str]) -> None:
        count(self, batch, reasons + [reason for reason in reasons if reason == "unavailable"])

    patch.setattr(ThreadedStore, "_count_misses", twice)


def _wrong_row(patch: pytest.MonkeyPatch) -> None:
    """Swap two blocks of one batch."""
    spread = keyed_blocks.spread_out

    def swap(rows: Any, where: Any, count: int) -> Any:
        return spread(rows, where, count)[::-1] if count > 1 else spread(rows, where, count)

    patch.setattr(keyed_blocks, "spread_out", swap)


def _no_key_check(patch: pytest.MonkeyPatch) -> None:
    check = stored_values.check_parts
    patch.setattr(stored_values, "check_parts", lambda *arguments: [""] * len(check(*arguments)))
    patch.setattr(StoredValues, "check", lambda self, values, keys: [""] * len(keys))


def _no_token(patch: pytest.MonkeyPatch) -> None:
    names = KeyedBlocks.names_of
    patch.setattr(KeyedBlocks, "names_of", lambda self, keys, epoch: names(self, keys, bytes(16)))


def _deletes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(object_store.ObjectStore, "delete", lambda self, keys: None)


def _forgets_alone(patch: pytest.MonkeyPatch) -> None:
    def replace(self: Any, stored: Any, epoch: Epoch) -> epochs.Record:
        return epochs.Record(epoch.record(), epoch)

    patch.setattr(epochs.EpochRecord, "replace", replace)


def _hangs_on_close(patch: pytest.MonkeyPatch) -> None:
    stop = ThreadedStore._stop

    def stay(self: Any) -> None:
        stop(self)
        self._num_threads += 1

    patch.setattr(ThreadedStore, "_stop", stay)


def _found_when_forgotten(patch: pytest.MonkeyPatch) -> None:
    known = SharedEpoch.known

    def any_epoch(self: Any) -> Epoch | None:
        return self._mine or known(self)

    patch.setattr(SharedEpoch, "known", any_epoch)
    patch.setattr(SharedEpoch, "counts", lambda self, epoch, stored: True)


def _unconditional(patch: pytest.MonkeyPatch) -> None:
    def put(self: Any, path: str, value: memoryview, meta: Any) -> None:
        self._ob.put(self._client, path, value, use_multipart=False)

    def replace(self: Any, key: Any, _old: Any, new: Any) -> Any:
        self._accepted([[b"SET", self._prefix + key.tobytes(), new.tobytes()]])
        return new

    patch.setattr(object_store.ObjectStore, "_put_on_condition", put)
    patch.setattr(RedisStore, "replace_epoch", replace)


def _script(name: str, old: bytes, new: bytes, *, of_quotas: bool = True) -> Patch:
    """Return a patch of one of the scripts of the Redis store."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = lists._scripts

        def made(*, has_quotas: bool) -> Any:
            scripts = make(has_quotas=has_quotas)
            script = getattr(scripts, name)
            assert old in script or (of_quotas and not has_quotas)
            return scripts._replace(**{name: script.replace(old, new)})

        patch.setattr(lists, "_scripts", made)

    return plant


def _no_sweeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RedisStore, "_repair", lambda self, number, *, is_swept, has_quotas: None)


def _half_a_slot(patch: pytest.MonkeyPatch) -> None:
    """The client sends scripts to the node to which a slot is moving."""
    follow = RedisClusterLink._follow

    def follow_all(self: Any, one: Any, answer: Any, unit: Any) -> Any:
        return follow(self, one, answer, unit if unit[1:] else [[b""]])

    patch.setattr(RedisClusterLink, "_follow", follow_all)


def _absent_on_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    missed = redis_store._missed
    patch.setattr(redis_store, "_missed", lambda found, is_lost: missed(found, is_lost=False))


def _deleted_on_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    run = RedisStore._run
    patch.setattr(RedisStore, "_run", lambda self, commands: (run(self, commands)[0], None))


def _forgets_without_replicas(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RedisStore, "_keep_epoch", lambda self, epoch: True)


def _joins_without_replicas(patch: pytest.MonkeyPatch) -> None:
    keep = RedisStore._keep_epoch
    patch.setattr(RedisStore, "_keep_epoch", lambda self, epoch: not self._history or keep(self, epoch))


def _any_server_confirms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis_store, "_READ", redis_store._READ.replace(b"master_replid", b"none"))


def _reads_of_a_former_primary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RedisStore, "_reading", lambda self, key: [b"GET", self._prefix + key])
    patch.setattr(redis_store, "_READ", redis_store._READ.replace(b"'GETEX', KEYS[1], 'PERSIST'", b"'GET', KEYS[1]"))


def _empty_for_missing(patch: pytest.MonkeyPatch) -> None:
    """Mooncake #3465."""
    wait = ThreadedStore.wait

    def fill(self: Any, ticket: int, timeout: float | None = None) -> Completion:
        done = wait(self, ticket, timeout)
        reasons = ["" if reason == "absent" else reason for reason in done.reasons]
        return Completion(done.ticket, done.ok | ([not reason for reason in reasons]), done.rows, reasons)

    patch.setattr(ThreadedStore, "wait", fill)


def _loaded_though_failed(patch: pytest.MonkeyPatch) -> None:
    """vLLM #49250: tokens count as computed although their blocks did not arrive."""
    end = Loads._end_job
    patch.setattr(Loads, "_end_job", lambda self, job, landed: end(self, job, [True] * len(job)))


def _freed_while_read(patch: pytest.MonkeyPatch) -> None:
    """Mooncake #4153: the lease of blocks that are being read ends too early."""
    advance = Writes.advance

    def early(self: Any) -> None:
        advance(self)
        if not isinstance(self._store_jobs, _EndsOnce):
            self._store_jobs = _EndsOnce(self._store_jobs)
        for write in self._reading:
            self._store_jobs.end_write(write.job.job)

    patch.setattr(Writes, "advance", early)


class _EndsOnce:
    """Store jobs of which each may be ended again, without effect."""

    def __init__(self, jobs: Any) -> None:
        self._jobs, self._ended = jobs, set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    def end_write(self, job: int) -> bool:
        if job in self._ended:
            return True
        self._ended.add(job)
        return bool(self._jobs.end_write(job))


def _failed_loads_stay_leased(patch: pytest.MonkeyPatch) -> None:
    """LMCache #2785."""
    end = Loads._end_job
    patch.setattr(Loads, "_end_job", lambda self, job, landed: end(self, job, landed) if any(landed) else 0)


def _failed_writes_stay_leased(patch: pytest.MonkeyPatch) -> None:
    hand_over = Writes._hand_over

    def leave(self: Any, write: Any) -> bool:
        return bool(write.transfer.done and write.transfer.error is not None) or hand_over(self, write)

    patch.setattr(Writes, "_hand_over", leave)


def _stale_hits_again_for_ever(patch: pytest.MonkeyPatch) -> None:
    """SGLang #31315: a block that the store reports but lacks is requested again and again."""
    end, note = Loads._end, known_keys.KnownKeys.note_ended

    def again(self: Any, load: Any, miss: str = "") -> bool:
        if load.miss == "absent" and not load.tokens:
            load.miss, load.until = "", 1e12
            return False
        return end(self, load, miss)

    def note_all_but(self: Any, key: bytes, reason: str, *, is_delete: bool) -> None:
        if reason != "absent":
            note(self, key, reason, is_delete=is_delete)

    patch.setattr(Loads, "_end", again)
    patch.setattr(known_keys.KnownKeys, "note_ended", note_all_but)


def _loads_count_twice(patch: pytest.MonkeyPatch) -> None:
    end = Loads._end_job
    patch.setattr(Loads, "_end_job", lambda self, job, landed: 2 * end(self, job, landed))


def _forgets_below_alone(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Any, revision: str | None = None) -> bool:
        self.store.forget(revision)
        return True

    patch.setattr(PrefixStore, "forget", forget)


def _no_salt(patch: pytest.MonkeyPatch) -> None:
    def hashed(self: Any, idle: Any) -> Any:
        idle.hashed = idle.hashed or self._manager.prefix.hash(idle.tokens[0])
        return idle.hashed

    patch.setattr(Admission, "_hashed", hashed)


def _no_transactions(patch: pytest.MonkeyPatch) -> None:
    request = RedisLink._request

    def one_by_one(self: Any, units: list[Any]) -> list[list[Any]]:
        answers = iter(request(self, [[command] for unit in units for command in unit]))
        return [[next(answers)[0] for _ in unit] for unit in units]

    patch.setattr(RedisLink, "_request", one_by_one)


def _failed_moves_land(patch: pytest.MonkeyPatch) -> None:
    end = StepLoop._end

    def pretend(self: Any, done: Any) -> None:
        end(self, done._replace(lost=tuple(pairs for pairs in done.lost if pairs.src != pairs.dst)))

    patch.setattr(StepLoop, "_end", pretend)


def _given_back_in_use(patch: pytest.MonkeyPatch) -> None:
    def early(self: Any) -> None:
        self._cells[:, self._manager.pool().num_blocks * BLOCK_SIZE :] = -1

    patch.setattr(Upkeep, "give_back", early)


def _exchanging_states(patch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that replaces each state by the one before it. A state fills its block: all keys are equal."""
    last = list[Any]()
    _at_each_seed(patch, lambda _: last.clear())

    def exchange(rows: Any) -> None:
        for row in rows:
            keys = row.view(np.int64)[:BLOCK_SIZE]
            if keys[0] == keys[-1]:
                state = row.copy()
                row[:] = last.pop() if last else state
                last.append(state)

    return exchange


def _before_other_tokens(patch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that gives drafters' blocks the last entry that their tokens had before another next token."""
    known, last = list[Texts](), dict[int, int]()

    def begin(texts: Texts) -> None:
        known[:] = [texts]
        last.clear()

    def exchange(rows: Any) -> None:
        for row in rows:
            keys = row.view(np.int64)[:BLOCK_SIZE]
            first, end = keys.tolist()
            text = known[0]._texts.get(end)
            if text is not None and known[0].is_drafter(text.group):
                keys[-1], last[first] = last.get(first, end), end

    _at_each_seed(patch, begin)
    return exchange


Exchange = Callable[[pytest.MonkeyPatch], Callable[[Any], None]]


def _found(exchange: Exchange) -> Patch:
    """Return a patch of what a store gives."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wait, change = ThreadedStore.wait, exchange(patch)

        def give(self: Any, ticket: int, timeout: float | None = None) -> Completion:
            done = wait(self, ticket, timeout)
            change(done.rows)
            return done

        patch.setattr(ThreadedStore, "wait", give)

    return plant


def _loaded(exchange: Exchange) -> Patch:
    """Return a patch of what a load writes."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        rows_of, change = prefix_loads._rows_of, exchange(patch)

        def give(job: Any, keys: Any, rows: Any) -> Any:
            found = rows_of(job, keys, rows)
            change(found[1])
            return found

        patch.setattr(prefix_loads, "_rows_of", give)

    return plant


_SERVING: dict[str, tuple[int, Patch]] = {
    "an empty block is given for one that is missing": (20, _empty_for_missing),
    "blocks count as loaded whose copy failed": (80, _loaded_though_failed),
    "blocks are reused while a write reads them": (20, _freed_while_read),
    "blocks of a failed load stay leased": (80, _failed_loads_stay_leased),
    "blocks of a failed write stay leased": (40, _failed_writes_stay_leased),
    "a stale hit is read again for ever": (20, _stale_hits_again_for_ever),
    "blocks that were loaded count twice": (20, _loads_count_twice),
    "forget leaves what the engine has cached": (20, _forgets_below_alone),
    "prompts are hashed without their salt": (20, _no_salt),
    "a failed move counts as landed": (40, _failed_moves_land),
    "memory is given back while blocks use it": (40, _given_back_in_use),
    "a state of another position is found": (20, _found(_exchanging_states)),
    "a state of another position is loaded": (20, _loaded(_exchanging_states)),
    "a drafter's block is found before another token": (40, _found(_before_other_tokens)),
    "a drafter's block is loaded before another token": (160, _loaded(_before_other_tokens)),
}
_REDIS: dict[str, tuple[int, Patch]] = {
    "a full server drops nothing": (40, _script("settle", b"drop_beyond(tonumber(ARGV[1]), count)", b"")),
    "a put does not look at quotas": (40, _script("settle", b"drop_of(tenant, quota, 1)", b"if true then return end")),
    "a quota waits for blocks that the server has lost": (
        20,
        _script("set_quota", b"not has_dropped and", b"false and"),
    ),
    "blocks in no list stay": (80, _no_sweeps),
    "a put is no transaction": (40, _no_transactions),
}
_CLUSTER: dict[str, tuple[int, Patch]] = {
    "a block leaves its list before it is deleted": (
        40,
        _script(
            "drop",
            b"redis.call('UNLINK', prefix .. name)",
            b"redis.call('ZREM', order, name) redis.call('UNLINK', prefix .. name)",
            of_quotas=False,
        ),
    ),
    "a script runs where half of its keys are": (40, _half_a_slot),
    "blocks on a lost node are absent": (40, _absent_on_lost_nodes),
    "a deletion is confirmed without a lost node": (40, _deleted_on_lost_nodes),
    "forget does not wait for replicas": (40, _forgets_without_replicas),
    "a forget that joins an epoch does not wait for replicas": (200, _joins_without_replicas),
    "a server that takes over confirms a forget": (200, _any_server_confirms),
    "a server that may not write tells the epoch": (200, _reads_of_a_former_primary),
}
_FAULTS: dict[str, tuple[int, Patch]] = {
    "the record replaced whatever is there": (40, _unconditional),
    "a put has the epoch that counts when it lands": (200, _landing),
    "the latest clock's epoch counts": (20, _clocks),
    "a process that was told forgets it": (40, _behind),
    "forget does not wait for the storage": (100, _unconfirmed),
    "forget joins the epoch of any name": (
        20,
        lambda patch: patch.setattr(
            Epoch, "begun", staticmethod(lambda name, stored, *, joins: stored or Epoch(name[:16], name[16:], name))
        ),
    ),
    "forget tells nobody": (20, _forgets_alone),
    "reads do not look at the record": (20, _found_when_forgotten),
    "names do not depend on the epoch": (20, _no_token),
    "a deletion uses an epoch of a second ago": (120, _delete_under_old_epoch),
    "a deletion deletes nothing": (40, _deletes_nothing),
    "damage is not looked for": (100, _no_key_check),
    "a refused put is said to be stored": (20, _all_stored),
    "a put whose answer came too late is said to be stored": (120, _late_put_stored),
    "batches of one key run in any order": (150, _no_order),
    "the third batch of a key overtakes the second": (60, _third_overtakes),
    "known keys survive forget": (20, _known_after_forget),
    "a deletion does not look for late puts": (300, _late_puts_ignored),
    "a put does not show the key that a deletion has hidden": (200, _stays_hidden),
    "a block that came damaged is deleted at once": (20, _deletes_at_first_sight),
    "a page that came twice is a damaged block": (100, _pages_are_values),
    "a record that came damaged counts as lost": (40, _damaged_records_count),
    "rows of a batch change places": (20, _wrong_row),
    "memory of a put is not given back": (20, _leak),
    "a miss is counted twice": (20, _miscount),
    "storage that was down is never asked again": (
        20,
        lambda patch: patch.setattr(Batches, "is_probe_due", lambda self, now: False),
    ),
    "a key that failed is never read again": (100, lambda patch: patch.setattr(known_keys, "FAILED_SECONDS", 1e9)),
    "close waits for a thread that is gone": (20, _hangs_on_close),
}
_LONG: dict[str, Any] = {"store": "object", "seconds": 12.0}
# Fleets that find these faults sooner than fleets with all kinds of failures.
_FLEETS: dict[str, dict[str, Any]] = {
    "a state of another position is found": {"model": "hybrid"},
    "a state of another position is loaded": {"model": "states"},
    "a drafter's block is found before another token": {"model": "eagle"},
    "a drafter's block is loaded before another token": {"model": "mtp"},
    "the record replaced whatever is there": {"kinds": ("update", "slow", "gray")},
    "a deletion uses an epoch of a second ago": {"kinds": ("record_loss", "forget"), "store": "object"},
    "a refused put is said to be stored": {"kinds": ("full",)},
    "a put whose answer came too late is said to be stored": {"kinds": ("partition",), "num_faults": 8, "seconds": 8.0},
    "the third batch of a key overtakes the second": {"kinds": ("slow",)},
    # A put is late after 3 s, and a deletion begins half a second later; a key is read again after 2 s.
    "a deletion does not look for late puts": {"kinds": ("straggle",), "num_faults": 8, **_LONG},
    "a put does not show the key that a deletion has hidden": {"kinds": ("slow",)},
    "a block that came damaged is deleted at once": {"kinds": ("garbled",)},
    "a page that came twice is a damaged block": {"kinds": ("page",), "num_faults": 12, **_LONG},
    "a record that came damaged counts as lost": {"kinds": ("garbled",)},
    "batches of one key run in any order": {"kinds": ("slow", "repeat"), "store": "object"},
    "a key that failed is never read again": {"kinds": ("partition", "lossy")},
    "a quota waits for blocks that the server has lost": {"kinds": ("node_loss",), "num_faults": 16, "seconds": 8.0},
    "a process that was told forgets it": {"kinds": ("record_loss", "update", "forget")},
    "a failed move counts as landed": {"kinds": ("copy",)},
    "a block leaves its list before it is deleted": {"kinds": ("move",), "num_faults": 12},
    "a script runs where half of its keys are": {"kinds": ("move",), "num_faults": 12},
    "blocks on a lost node are absent": {"kinds": ("node_down",)},
    "a deletion is confirmed without a lost node": {"kinds": ("node_down",)},
    "forget does not wait for replicas": {"kinds": ("cut_off", "forget")},
    "a forget that joins an epoch does not wait for replicas": {"kinds": ("cut_off", "update")},
    "a server that takes over confirms a forget": {"kinds": ("cut_off", "failover", "forget")},
    "a server that may not write tells the epoch": {"kinds": ("cut_off", "forget"), "engines": 5, "num_faults": 6},
    # Without failures, only another engine's command between two commands of the put reveals it.
    "a put is no transaction": {"kinds": ()},
}
# The lowest seed that finds a fault, if not 0: tried first.
_FOUND_BY = {
    "a put does not show the key that a deletion has hidden": 131,
    "a page that came twice is a damaged block": 6,
    "a deletion does not look for late puts": 217,
    "a put whose answer came too late is said to be stored": 93,
    "the record replaced whatever is there": 15,
    "a put has the epoch that counts when it lands": 5,
    "a process that was told forgets it": 4,
    "forget does not wait for the storage": 20,
    "a deletion uses an epoch of a second ago": 10,
    "damage is not looked for": 8,
    "a refused put is said to be stored": 4,
    "a miss is counted twice": 1,
    "storage that was down is never asked again": 1,
    "a key that failed is never read again": 42,
    "a full server drops nothing": 2,
    "a put does not look at quotas": 3,
    "a quota waits for blocks that the server has lost": 1,
    "blocks in no list stay": 1,
    "a block leaves its list before it is deleted": 16,
    "a script runs where half of its keys are": 4,
    "blocks on a lost node are absent": 6,
    "a deletion is confirmed without a lost node": 15,
    "forget does not wait for replicas": 33,
    "a server that takes over confirms a forget": 188,
    "a server that may not write tells the epoch": 31,
    "a put is no transaction": 12,
    "prompts are hashed without their salt": 1,
    "memory is given back while blocks use it": 3,
    "blocks count as loaded whose copy failed": 58,
    "blocks of a failed load stay leased": 58,
    "blocks are reused while a write reads them": 4,
    "a failed move counts as landed": 1,
    "a drafter's block is found before another token": 21,
    "a drafter's block is loaded before another token": 120,
}
_ALL = (
    *((name, *fault, "calls", "both") for name, fault in _FAULTS.items()),
    *((name, *fault, "calls", "redis") for name, fault in _REDIS.items()),
    *((name, *fault, "calls", "cluster") for name, fault in _CLUSTER.items()),
    *((name, *fault, "serving", "both") for name, fault in _SERVING.items()),
)
PLANTED = tuple(name for name, *_ in _ALL)


def planted(name: str, patch: pytest.MonkeyPatch) -> tuple[list[int], FleetOptions]:
    """Plant a fault. Return seeds, likely ones first, of which one must find it, and the fleets that find it."""
    _, most, plant, work, store = next(fault for fault in _ALL if fault[0] == name)
    plant(patch)
    seeds = sorted(range(most), key=lambda seed: seed != _FOUND_BY.get(name, 0))
    return seeds, FleetOptions(**{"work": work, "store": store, **_FLEETS.get(name, {})})
