"""A store over `put` and `get` that block: order, deadlines, damage, memory, and how the interpreter ends beside it."""

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from forks import in_child
from memory_stores import PATIENCE, SIZE, KeyedStore, MemoryStore, get, names, put, rows
from numpy.typing import NDArray

from blockyard import KVCache, KVLayout
from blockyard.errors import ForkedError, InvalidArgumentError, StoreFullError, StoreURLError
from blockyard.stores import ExternalStore, ThreadedStore, open_store, opening, register
from blockyard.stores.threaded import known_keys
from blockyard.stores.threaded.batches import Batch
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite


class TestMemoryStore(StoreSuite):
    def open_store(self) -> ExternalStore:
        return MemoryStore(bytes_per_block=self.bytes_per_block)


class TestSlowMemoryStore(StoreSuite):
    """Calls end in another order than they began."""

    def open_store(self) -> ExternalStore:
        store = MemoryStore(bytes_per_block=self.bytes_per_block)
        random = np.random.default_rng(3)
        store.before = lambda name: time.sleep(float(random.random()) / 200)
        return store


class TestKeyedStoreAsSwapSpace(StoreSuite):
    def open_store(self) -> ExternalStore:
        return KeyedStore(bytes_per_block=self.bytes_per_block)


class TestKeyedStore(PrefixStoreSuite):
    num_slots = 32

    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.medium: dict[bytes, NDArray[np.uint8]] = {}

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        return KeyedStore(self.medium, bytes_per_block=self.bytes_per_block, namespace=namespace)


class TestSlowKeyedStore(TestKeyedStore):
    """Calls end in another order than they began."""

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        store = super().open_store(namespace)
        assert isinstance(store, KeyedStore)
        random = np.random.default_rng(3)
        store.before = lambda name: time.sleep(float(random.random()) / 200)
        return store


@pytest.fixture
def schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_registered", {})


def write(store: ExternalStore, slots: list[int], blocks: NDArray[np.uint8]) -> tuple[str, ...]:
    return store.wait(store.submit_write(np.array(slots), blocks)).reasons


def read(store: ExternalStore, slots: list[int]) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    found = store.wait(store.submit_read(np.array(slots)))
    assert not found.rows[~found.ok].any()
    return found.reasons, found.rows


def test_a_caller_that_polls_without_a_pause_lets_the_threads_run():
    interval = sys.getswitchinterval()
    with MemoryStore() as store:
        sys.setswitchinterval(600)  # until then no thread takes the interpreter's lock from another
        try:
            for _ in range(5):  # the first starts a thread, which waits for it
                ticket = store.submit_write(np.array([0]), rows(1))
                while store.poll() != [ticket]:
                    pass
                assert store.wait(ticket).reasons == ("",)
        finally:
            sys.setswitchinterval(interval)


def test_the_caller_of_a_batch_of_one_block_makes_at_most_fifty_python_calls():
    with KeyedStore() as store:
        store.event_fd()
        put(store, 1)  # starts a thread
        calls, keys, blocks = 0, names(1), rows(1)

        def note(_frame: object, event: str, _value: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        ticket = store.submit_put(keys, blocks)
        sys.setprofile(None)
        while not store._batches.news:
            time.sleep(0.001)
        sys.setprofile(note)
        done = store.poll(), store.wait(ticket)
        sys.setprofile(None)
        assert (done[0], done[1].reasons) == ([ticket], ("",))
        assert calls <= 50


# ---- what goes wrong is a miss ----


@pytest.mark.parametrize("name", ["put", "get"])
def test_an_exception_is_a_miss_and_the_store_works_on(name: str):
    with MemoryStore() as store:
        write(store, [0], rows(1))

        def fail(called: str) -> None:
            if called == name:
                raise ConnectionResetError("the peer\nis gone")

        store.before = fail
        reasons = write(store, [1, 2], rows(2)) if name == "put" else read(store, [0, 0])[0]
        assert reasons == ("error", "error")
        stats = store.stats()
        assert (stats.errors, stats.last_error) == (1, "ConnectionResetError: the peer is gone")
        assert stats.misses == {"error": 2}
        assert stats.pending_bytes == 0
        store.before = lambda called: None
        if name == "put":
            assert read(store, [1, 0])[0] == ("empty", "")
        else:
            assert np.array_equal(read(store, [0])[1], rows(1))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_call_that_ends_its_thread_is_a_miss_too(error: BaseException):
    with MemoryStore() as store:

        def fail(called: str) -> None:
            raise error

        store.before = fail
        assert write(store, [1], rows(1)) == ("error",)
        store.before = lambda called: None
        assert write(store, [1], rows(1)) == ("",)


@pytest.mark.parametrize("answer", [None, True, [1, 0], np.ones(3, bool), np.ones((2, 1), bool), np.ones(2)])
def test_a_wrong_answer_is_a_miss(answer: object):
    with MemoryStore() as store:
        store.put = lambda keys, rows: answer  # type: ignore[method-assign]
        assert write(store, [1, 2], rows(2)) == ("error", "error")
        assert "put returned" in store.stats().last_error
        assert read(store, [1])[0] == ("empty",)


def test_blocks_that_put_refuses_or_get_does_not_find_are_misses():
    with MemoryStore() as store:
        put = store.put
        store.put = lambda keys, rows: put(keys, rows) & (np.arange(len(keys)) != 1)  # type: ignore[method-assign]
        assert write(store, [4, 5, 6], rows(3)) == ("", "refused", "")
        del store.blocks[next(iter(store.blocks))]
        reasons, found = read(store, [4, 5, 6, 7])
        assert reasons == ("absent", "empty", "", "empty")
        assert np.array_equal(found[2], rows(3)[2])


def test_get_may_give_the_reasons_of_misses():
    with MemoryStore() as store:
        write(store, [4, 5], rows(2))
        get = store.get
        for answer, found in ((["error", ""], ("error", "")), (["", 1], ("error", "error"))):
            store.get = lambda keys, out, answer=answer: (get(keys, out), answer)[1]  # type: ignore[method-assign]
            assert read(store, [4, 5])[0] == found


def test_a_record_that_get_does_not_find_for_another_reason_than_its_absence_is_not_replaced():
    with KeyedStore() as store:
        put(store, 1)
        with KeyedStore(store.blocks) as other:
            other.get = lambda keys, out: ["error"] * len(keys)  # type: ignore[method-assign]
            assert put(other, 1) == ("error",)
            assert "get answers 'error' for the epoch's record" in other.stats().last_error
        assert get(store, 1) == ("",)


def test_a_block_that_comes_back_with_other_bytes_is_a_miss():
    with MemoryStore() as store:
        write(store, [4, 5], rows(2))
        next(iter(store.blocks.values()))[17] ^= 1
        assert read(store, [4, 5])[0] == ("payload_checksum", "")
        assert store.stats().checksum_failures == 1


def test_a_write_that_fails_leaves_a_miss_and_not_the_block_before():
    with MemoryStore() as store:
        write(store, [4], rows(1))
        store.before = lambda name: 1 / 0 if name == "put" else None
        assert write(store, [4], rows(1, 1)) == ("error",)
        assert read(store, [4])[0] == ("empty",)


# ---- calls that hang ----


def answered(store: ExternalStore, slots: list[int]) -> tuple[str, ...]:
    """Read, once the storage has answered again."""
    until = time.monotonic() + PATIENCE
    while "unavailable" in (reasons := read(store, slots)[0]) and time.monotonic() < until:
        time.sleep(0.01)
    return reasons


class Hanging(MemoryStore):
    """A store whose calls wait for `gate`, with what it was lent."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Semaphore(0)
        self.lent: list[NDArray[np.uint8]] = []
        for name, value in options.items():
            setattr(self, name, value)

    def hang(self, name: str) -> None:
        self.begun.release()
        assert self.gate.wait(PATIENCE)

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.lent.append(rows)
        return super().put(keys, rows)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self.lent.append(out)
        return super().get(keys, out)


def test_a_missed_deadline_is_a_miss_and_late_results_are_ignored():
    with Hanging() as store:
        store.before, store.timeout_base = store.hang, 0.05
        ticket = store.submit_write(np.array([1]), rows(1))
        assert store.begun.acquire(timeout=PATIENCE)
        until = time.monotonic() + PATIENCE
        while not (found := store.poll()) and time.monotonic() < until:
            time.sleep(0.001)
        assert found == [ticket]
        assert store.wait(ticket).reasons == ("timeout",)
        assert store.stats().pending_bytes == SIZE, "the call that hangs has the rows"
        store.before, store.timeout_base = lambda name: None, PATIENCE
        assert answered(store, [1]) == ("empty",)
        # The slot is used again; what the first call stores afterwards is found to be wrong.
        assert write(store, [1], rows(1, 1)) == ("",)
        store.gate.set()
        until = time.monotonic() + PATIENCE
        while store.stats().pending_bytes and time.monotonic() < until:
            time.sleep(0.001)
        reasons, found_rows = read(store, [1])
        assert reasons == ("payload_checksum",) or np.array_equal(found_rows, rows(1, 1))


def test_a_write_that_was_given_up_reads_as_a_miss_though_it_lands():
    with Hanging() as store:
        store.before = store.hang
        ticket = store.submit_write(np.array([1]), rows(1))
        assert store.begun.acquire(timeout=PATIENCE)
        assert store.wait(ticket, 0.0).reasons == ("timeout",)
        store.gate.set()
        until = time.monotonic() + PATIENCE
        while store.stats().pending_bytes and time.monotonic() < until:
            time.sleep(0.001)
        assert store.blocks
        assert read(store, [1])[0] == ("empty",)


@pytest.mark.parametrize(("interrupted", "reason"), [(False, "timeout"), (True, "error")])
def test_a_write_that_is_given_up_just_before_it_ends_reads_as_a_miss(interrupted: bool, reason: str):
    """Its call has returned, and its thread has not yet told."""
    with Hanging() as store:
        assert write(store, [1], rows(1, 1)) == ("",)
        carry_out = store._carry_out

        def hang_behind(batch: Batch) -> object:
            done = carry_out(batch)
            if batch.kind == "write":
                store.hang("")
            return done

        store._carry_out = hang_behind
        ticket = store.submit_write(np.array([1]), rows(1))
        assert store.begun.acquire(timeout=PATIENCE)
        if interrupted:
            with store._lock:
                store._recover([], KeyboardInterrupt())
        assert store.wait(ticket, 0.0).reasons == (reason,)
        store.gate.set()
        assert read(store, [1])[0] == ("empty",)


def test_rows_of_a_put_that_was_given_up_may_change_at_once():
    gate, begun = threading.Event(), threading.Event()
    with KeyedStore() as store:

        def hang(name: str) -> None:
            begun.set()
            assert gate.wait(PATIENCE)

        store.before = hang  # the put waits for the epoch, and has not looked at its rows
        given = rows(1)
        ticket = store.submit_put([bytes(32)], given)
        assert begun.wait(PATIENCE)
        assert store.wait(ticket, 0.0).reasons == ("timeout",)
        given[:] = 0
        gate.set()
        until = time.monotonic() + PATIENCE
        while store.stats().pending_bytes and time.monotonic() < until:
            time.sleep(0.001)
        with KeyedStore(store.blocks) as other:
            assert other.wait(other.submit_get([bytes(32)])).reasons == ("absent",)


def test_memory_of_a_call_that_hangs_is_not_used_again():
    with Hanging(threads=2) as store:
        write(store, [1], rows(1))
        store.before = store.hang
        late = store.submit_read(np.array([1]))
        assert store.begun.acquire(timeout=PATIENCE)
        given_up = store.wait(late, 0.0)
        assert given_up.reasons == ("timeout",)
        store.before = lambda name: None
        first = store.wait(store.submit_read(np.array([1])))
        lent = store.lent[1]
        assert not any(np.shares_memory(lent, array) for array in (given_up.rows, first.rows, *store.lent[2:]))
        store.gate.set()


def test_hanging_calls_occupy_their_threads_and_memory_is_bounded():
    with Hanging(threads=2, memory=5 * SIZE) as store:
        store.before = store.hang
        tickets = [store.submit_write(np.array([slot]), rows(1)) for slot in range(4)]
        assert all(store.begun.acquire(timeout=PATIENCE) for _ in range(2))
        assert not store.begun.acquire(blocking=False)
        assert write_of(store, [8, 9], 0.0) == ("timeout", "queue_full")
        assert [store.wait(ticket, 0.0).reasons for ticket in tickets] == [("timeout",)] * 4
        assert store.stats().pending_bytes == 2 * SIZE
        assert not store._batches.ready
        store.gate.set()


def write_of(store: ExternalStore, slots: list[int], timeout: float) -> tuple[str, ...]:
    return store.wait(store.submit_write(np.array(slots), rows(len(slots))), timeout).reasons


def test_no_two_calls_have_one_key_at_once():
    with MemoryStore() as store:
        active: set[bytes] = set()
        clashes = []
        put = store.put

        def watched(keys: NDArray[np.uint8], blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
            names = {key.tobytes() for key in keys}
            clashes.extend(active & names)
            active.update(names)
            time.sleep(0.001)
            active.difference_update(names)
            return put(keys, blocks)

        store.put = watched  # type: ignore[method-assign]
        tickets = [store.submit_write(np.arange(seed % 3, seed % 3 + 4), rows(4, seed)) for seed in range(40)]
        store.wait(tickets[30], 0.0)
        for ticket in tickets:
            if ticket != tickets[30]:
                assert store.wait(ticket).ok.all()
        assert not clashes


def test_a_waiting_batch_that_is_given_up_keeps_the_order_of_its_neighbours():
    with Hanging(threads=4) as store:
        store.before = store.hang
        first = store.submit_write(np.array([1]), rows(1))
        assert store.begun.acquire(timeout=PATIENCE)
        assert store.wait(store.submit_read(np.array([1])), 0.0).reasons == ("timeout",)
        last = store.submit_write(np.array([1]), rows(1, 1))
        assert not store.begun.acquire(timeout=0.05), "the second write begins after the first has ended"
        store.gate.set()
        assert store.wait(first).ok.all()
        assert store.wait(last).ok.all()
        assert np.array_equal(read(store, [1])[1], rows(1, 1))


@pytest.mark.parametrize("seed", range(5))
def test_a_read_has_the_bytes_of_the_last_write_submitted_before_it_or_is_a_miss(seed: int):
    random = np.random.default_rng(seed)
    chance = np.random.default_rng(seed + 100)
    lock = threading.Lock()

    def disturb(name: str) -> None:
        with lock:
            draw = float(chance.random())
        time.sleep(draw / 300)
        if draw < 0.1:
            raise OSError("now and then")

    with Hanging(threads=3, memory=40 * SIZE) as store:
        store.before = disturb
        last: dict[int, NDArray[np.uint8]] = {}
        tickets: list[tuple[int, list[NDArray[np.uint8] | None] | None]] = []
        hits = number = 0
        while number < 300 or hits <= 30:
            number += 1
            slots = random.permutation(6)[: random.integers(0, 5)]
            if random.random() < 0.5:
                blocks = rows(len(slots), number)
                tickets.append((store.submit_write(slots, blocks), None))
                last.update(zip(slots.tolist(), blocks, strict=True))
            else:
                tickets.append((store.submit_read(slots), [last.get(slot) for slot in slots.tolist()]))
            while tickets and (number >= 300 or random.random() < 0.6):
                ticket, expected = tickets.pop(int(random.integers(len(tickets))))
                found = store.wait(ticket, 0.0 if random.random() < 0.2 else None)
                for ok, row, block in zip(found.ok, found.rows, expected or (), strict=False):
                    hits += bool(ok)
                    assert np.array_equal(row, block if ok else np.zeros(SIZE)), "a wrong byte"
    stats = store.stats()
    assert stats.pending_bytes == 0
    assert stats.checksum_failures == 0 or "timeout" in stats.misses


def test_close_says_whether_a_call_was_left_behind():
    store = Hanging()
    store.before = store.hang
    running = store.submit_write(np.array([1]), rows(1))
    queued = store.submit_write(np.array([1]), rows(1))
    assert store.begun.acquire(timeout=PATIENCE)
    assert store.close(timeout=0.0) is False
    assert [store.wait(ticket).reasons for ticket in (running, queued)] == [("closed",)] * 2
    store.gate.set()
    assert store.close(timeout=PATIENCE) is True


# ---- keys ----


def test_keys_are_the_slots_own_and_no_other_stores():
    with MemoryStore() as first, MemoryStore() as second:
        for store in (first, second):
            write(store, [1, 2], rows(2))
            write(store, [2], rows(1))
            assert {len(key) for key in store.blocks} == {32}
            assert len(store.blocks) == 2
        assert not first.blocks.keys() & second.blocks.keys()


def test_a_read_that_fails_hides_its_key_until_it_is_put_again():
    with KeyedStore() as store:
        put(store, 2)
        store.before = lambda name: 1 / 0 if name == "get" else None
        assert get(store, 1) == ("error",)
        store.before = lambda name: None
        assert store.contains(names(2)).tolist() == [False, True]
        assert get(store, 2) == ("absent", "")
        put(store, 1)
        assert get(store, 2) == ("", "")


def test_a_put_that_lands_late_makes_no_hit_and_a_deletion_beside_it_says_so():
    with KeyedStore() as store:
        put(store, 1)
        gate, begun = threading.Event(), threading.Event()

        def hang(name: str) -> None:
            if name == "put":
                begun.set()
                assert gate.wait(PATIENCE)

        store.before = hang
        ticket = store.submit_put(names(1), rows(1))
        assert begun.wait(PATIENCE)
        assert store.wait(ticket, 0.0).reasons == ("timeout",)
        assert not store.contains(names(1)).any()
        assert store.wait(store.submit_delete(names(1))).reasons == ("lost",)
        gate.set()
        until = time.monotonic() + PATIENCE
        while store.stats().pending_bytes and time.monotonic() < until:
            time.sleep(0.001)
        assert get(store, 1) == ("absent",)
        assert store.wait(store.submit_delete(names(1))).ok.all()


def test_a_put_that_lands_while_a_deletion_runs_leaves_it_unconfirmed():
    """The put's call is over when the deletion's returns, and yet it stored the block behind the deletion."""
    with KeyedStore() as store:
        put(store, 1)
        gate, begun, deleted = threading.Event(), threading.Event(), store.delete

        def hang(name: str) -> None:
            if name == "put":
                begun.set()
                assert gate.wait(PATIENCE)

        def delete(keys: NDArray[np.uint8]) -> None:
            deleted(keys)
            gate.set()
            until = time.monotonic() + PATIENCE
            while store.stats().pending_bytes and time.monotonic() < until:
                time.sleep(0.001)

        store.before, store.delete = hang, delete  # type: ignore[method-assign]
        ticket = store.submit_put(names(1), rows(1))
        assert begun.wait(PATIENCE)
        assert store.wait(ticket, 0.0).reasons == ("timeout",)
        assert store.wait(store.submit_delete(names(1))).reasons == ("lost",)
        assert get(store, 1) == ("absent",), "an unconfirmed deletion hides its key"


def test_a_read_behind_a_put_behind_a_deletion_finds_the_block():
    """The read waits for the put when that ends: the put is not the key's last batch."""
    with KeyedStore() as store:
        put(store, 1)
        gate = threading.Event()
        store.before = lambda name: name != "delete" or gate.wait(PATIENCE)
        tickets = [store.submit_delete(names(1)), store.submit_put(names(1), rows(1)), store.submit_get(names(1))]
        gate.set()
        assert [store.wait(ticket).reasons for ticket in tickets] == [("",)] * 3
        assert get(store, 1) == ("",)


def test_a_key_may_be_read_behind_its_deletion_though_a_read_waited_for_that():
    medium: dict[bytes, NDArray[np.uint8]] = {}
    with KeyedStore(medium) as store, KeyedStore(medium) as other:
        put(store, 1)
        gate = threading.Event()
        store.before = lambda name: name != "delete" or gate.wait(PATIENCE)
        tickets = [store.submit_delete(names(1)), store.submit_get(names(1))]
        gate.set()
        assert [store.wait(ticket).reasons for ticket in tickets] == [("",), ("absent",)]
        put(other, 1)
        assert get(store, 1) == ("",)


def test_a_put_between_two_deletions_does_not_show_its_key():
    """The second deletion has been submitted when the put ends, and is not confirmed."""
    with KeyedStore() as store:
        put(store, 1)
        gate, failures = threading.Event(), iter((False, True))

        def fail_second(name: str) -> None:
            if name == "delete":
                assert gate.wait(PATIENCE)
                if next(failures):
                    raise OSError("the storage refuses")

        store.before = fail_second
        tickets = [
            store.submit_delete(names(1)),
            store.submit_put(names(1), rows(1)),
            store.submit_get(names(1)),
            store.submit_delete(names(1)),
            store.submit_get(names(1)),
        ]
        gate.set()
        found = [store.wait(ticket).reasons[0] for ticket in tickets]
        assert found == ["", "", "absent", "error", "absent"]
        assert get(store, 1) == ("absent",), "what was put before an unconfirmed deletion"


def test_a_put_that_has_begun_when_everything_is_forgotten_is_forgotten_too():
    with KeyedStore() as store:
        put(store, 1)
        gates = {"put": threading.Event(), "get": threading.Event()}
        begun = threading.Semaphore(0)
        for name in ("get", "put"):
            store._keyed_blocks.epochs._confirmed_at = 0.0 if name == "get" else time.monotonic()

            def hang(called: str, name: str = name) -> None:
                if called == name and not gates[name].is_set():
                    begun.release()
                    assert gates[name].wait(PATIENCE)

            store.before = hang
            ticket = store.submit_put(names(2)[1:], rows(2)[1:])
            assert begun.acquire(timeout=PATIENCE)
            threading.Timer(0.05, gates[name].set).start()
            store.forget()
            store.wait(ticket)
            assert set(get(store, 2)) <= {"absent", "forgotten"}


def test_an_epoch_that_cannot_be_read_is_an_error_and_no_hit():
    blocks: dict[bytes, NDArray[np.uint8]] = {}
    with KeyedStore(blocks) as store:
        put(store, 1)
    with KeyedStore(blocks) as store:
        store.before = lambda name: 1 / 0
        assert get(store, 1) == ("error",)
    epoch = next(name for name, row in blocks.items() if row.nbytes == 192)
    for change in (lambda: blocks[epoch].__setitem__(140, blocks[epoch][140] ^ 1), lambda: blocks.pop(epoch)):
        change()
        with KeyedStore(blocks) as store:
            assert get(store, 1) == ("absent",)


# ---- opening ----


def test_a_registered_class_is_opened_by_its_scheme(schemes: None):
    assert register("mine")(MemoryStore) is MemoryStore
    with open_store("mine://x?a=1", bytes_per_block=SIZE, num_slots=32, namespace=b"n" * 32) as store:
        assert isinstance(store, MemoryStore)
        assert (store.url, store.bytes_per_block, store.num_slots) == ("mine://x?a=1", SIZE, 32)
    with pytest.raises(StoreFullError, match="the store has 32 slots, must have at least 33"):
        open_store("mine://", bytes_per_block=SIZE, num_slots=33)
    with pytest.raises(StoreURLError, match="local, memory, mine, mooncake, redis"):
        open_store("mammary://", bytes_per_block=SIZE)


@pytest.mark.parametrize("scheme", ["", "File", "1a", "a b", "a:", "file"])
def test_a_malformed_or_taken_scheme_is_refused(scheme: str, schemes: None):
    with pytest.raises(InvalidArgumentError, match="scheme is "):
        register(scheme)(MemoryStore)


def test_a_class_that_is_defined_again_takes_its_scheme_and_another_does_not(schemes: None):
    def define() -> type[ThreadedStore]:
        class Again(MemoryStore):
            pass

        return Again

    register("again")(define())
    newest = register("again")(define())
    assert isinstance(open_store("again:", bytes_per_block=1), newest)
    with pytest.raises(InvalidArgumentError, match="which belongs to another store"):
        register("again")(MemoryStore)


def test_sequences_come_back_from_a_store_of_ones_own(schemes: None):
    layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    register("mine")(MemoryStore)
    with KVCache(layout, device_blocks=8, host_blocks=8, swap_store="mine://") as cache:
        sequence = cache.manager.allocate(13)
        with cache.step():
            cache.engine.tensors[0].copy_(cache.engine.tensors[0].normal_())
        before = cache.engine.read("device", cache.manager.block_table(sequence).astype(np.int64))
        for move, tier in ((cache.manager.swap_out, "external"), (cache.manager.swap_in, "device")):
            move(sequence, tier)
            with cache.step():
                pass
            assert not any(len(end.lost) for end in cache.drain())
        after = cache.engine.read("device", cache.manager.block_table(sequence).astype(np.int64))
        assert np.array_equal(before, after)


# ---- processes ----


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_store_in_a_fork_says_that_it_is_not_there_and_close_returns():
    with Hanging() as store:
        store.before = store.hang
        ticket = store.submit_write(np.array([1]), rows(1))
        assert store.begun.acquire(timeout=PATIENCE)

        def check() -> None:
            for call in (
                lambda: store.submit_write(np.array([1]), rows(1)),
                lambda: store.submit_read(np.array([1])),
                store.poll,
                store.stats,
                lambda: store.wait(ticket),
            ):
                with pytest.raises(ForkedError, match="a store was created by"):
                    call()
            assert store.close()

        with store._changed:
            in_child(check)
        store.gate.set()


def test_the_interpreter_ends_while_a_put_hangs(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys, threading, time
            import numpy as np
            import blockyard.workers.threads
            from blockyard.stores import ThreadedStore
            blockyard.workers.threads._PARTING_SECONDS = 0.5
            begun = threading.Event()
            class Store(ThreadedStore):
                num_slots = 4
                def put(self, keys, rows):
                    begun.set()
                    time.sleep(3600)
                def get(self, keys, out): ...
            store = Store("", bytes_per_block=4096, namespace=b"")
            for slot in (0, 0, 1):
                store.submit_write(np.array([slot]), np.zeros((1, 4096), np.uint8))
            begun.wait()
            sys.exit(3)
        """),
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_an_unused_store_has_no_threads():
    others = set(threading.enumerate())  # of earlier tests, which may be ending

    def own() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "blockyard-store" and thread not in others]

    with MemoryStore() as store:
        write(store, [1], rows(1))
        until = time.monotonic() + PATIENCE
        # A thread counts itself out before it ends.
        while (store._num_threads or own()) and time.monotonic() < until:
            time.sleep(0.001)
        assert not own()


def test_a_key_is_lacked_from_the_storages_answer_until_it_is_put(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known_keys, "ABSENT_SECONDS", 0.2)
    with KeyedStore() as store:
        assert store.lacks(names(2)).tolist() == [False, False], "nobody has asked the storage"
        assert get(store, 2) == ("absent", "absent")
        assert store.lacks(names(2)).tolist() == [True, True]
        assert put(store, 1) == ("",)
        assert store.lacks(names(2)).tolist() == [False, True]
        assert not store.wait(store.submit_delete(names(1))).reasons[0]
        assert store.lacks(names(2)).tolist() == [True, True]
        until = time.monotonic() + PATIENCE
        while store.lacks(names(2)).any():
            assert time.monotonic() < until, "another process may have put them"
            time.sleep(0.01)
    assert store.lacks(names(1)).tolist() == [True], "a closed store has nothing"


def test_a_plug_in_may_keep_its_blocks_under_usual_names():
    with KeyedStore() as store:
        for name in ("_keys", "_values", "_data", "_index", "_cache", "_client", "_pool", "_dict"):
            assert not hasattr(store, name)
            setattr(store, name, {})
        assert put(store, 3) == get(store, 3) == ("",) * 3
        store.forget()
        assert set(get(store, 3)) == {"absent"}
