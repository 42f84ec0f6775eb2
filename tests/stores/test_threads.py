"""Many threads on one store: every batch is answered once, to one thread, with its own blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from many_threads import PATIENCE, hammer
from memory_stores import KeyedStore, MemoryStore

from blockyard.errors import StoreError, UnknownTicketError
from blockyard.stores import ExternalStore, open_store
from blockyard.stores.redis.store import RedisStore
from blockyard.stores.redis.url import read_url
from blockyard.stores.threaded.epochs import Epoch

WIDTH, SLOTS, PAGE = 4096, 16, 4096
THREADS = 6


def of_file(folder: Path, use: str) -> ExternalStore:
    return open_store(f"file://{folder}/a?size=1MiB", bytes_per_block=WIDTH, use=use)


def of_disks(folder: Path, use: str) -> ExternalStore:
    (folder / "b").mkdir()
    return open_store(f"file://{folder}/a,{folder}/b?size=1MiB", bytes_per_block=WIDTH, use=use)


def of_guarded_file(folder: Path, use: str) -> ExternalStore:
    return open_store(f"file://{folder}/a?size=1MiB", bytes_per_block=WIDTH, use=use, mac_key=bytes(32))


def of_memory(folder: Path, use: str) -> ExternalStore:
    return (MemoryStore if use == "swap" else KeyedStore)(bytes_per_block=WIDTH)


@pytest.fixture(params=["swap", "prefix"])
def use(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[of_file, of_disks, of_guarded_file, of_memory])
def store(request: pytest.FixtureRequest, tmp_path: Path, use: str) -> Iterator[ExternalStore]:
    (tmp_path / "a").mkdir()
    with request.param(tmp_path, use) as store:
        yield store


def pages(count: int, seed: int) -> np.ndarray:
    """Blocks on whole pages, which a file store reads and writes in place."""
    memory = np.zeros(count * WIDTH + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    rows = memory[start : start + count * WIDTH].reshape(count, WIDTH)
    rows[:] = seed % 251
    return rows


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_threads_read_what_they_wrote(store: ExternalStore, use: str):
    def user(slot: int) -> Callable[[], None]:
        seeds = iter(range(1 << 30))

        def once() -> None:
            # Equal keys mean equal bytes.
            rows, out = pages(1, next(seeds) if use == "swap" else slot), pages(1, 0)
            if use == "swap":
                written = store.submit_write(np.array([slot]), rows)
                read = store.wait(store.submit_read(np.array([slot]), out))
            else:
                written = store.submit_put([key(slot)], rows)
                read = store.wait(store.submit_get([key(slot)], out))
                store.contains([key(slot), key(99)])
                store.lacks([key(slot), key(99)])
            assert store.wait(written).ok.all()
            assert read.ok.all(), read.reasons
            assert np.array_equal(read.rows, rows)

        return once

    def watch() -> None:
        store.poll()
        assert store.stats().errors == 0

    hammer(*map(user, range(THREADS)), watch)
    assert store.stats().pending_bytes == 0


def test_a_thread_that_polls_may_collect_what_another_submits(store: ExternalStore, use: str):
    """The rows that the submitter gave have the blocks, even if the ticket ends before its submission returns."""
    if use == "swap":
        store.wait(store.submit_write(np.arange(4), pages(4, 5)))
        submit = partial(store.submit_read, np.arange(4))
    else:
        store.wait(store.submit_put([key(number) for number in range(4)], pages(4, 5)))
        submit = partial(store.submit_get, [key(number) for number in range(4)])
    places: dict[int, int] = {}
    collected: dict[int, int] = {}
    expected, room = pages(4, 5), threading.Semaphore(8)

    def submits() -> None:
        if room.acquire(timeout=0.1):
            rows = pages(4, 0)
            places[submit(rows)] = rows.ctypes.data

    def collects() -> None:
        for ticket in store.poll():
            done = store.wait(ticket)
            assert done.ok.all(), done.reasons
            assert np.array_equal(done.rows, expected)
            collected[ticket] = done.rows.ctypes.data
            room.release()

    hammer(submits, collects)
    while len(collected) < len(places):
        collects()
    assert collected == places


def test_a_ticket_is_collected_by_one_of_the_threads_that_wait_for_it(store: ExternalStore, use: str):
    gate, tickets, answers = threading.Barrier(3, timeout=PATIENCE), [0], []

    def waits() -> None:
        for _ in range(20):
            gate.wait()
            with suppress(UnknownTicketError):
                answers.append(store.wait(tickets[0]))
            gate.wait()

    def submits() -> None:
        for number in range(20):
            put = store.submit_write if use == "swap" else store.submit_put
            tickets[0] = put(np.array([1]) if use == "swap" else [key(1)], pages(1, number))
            gate.wait()
            gate.wait()

    hammer(submits, waits, waits, seconds=0.0)
    assert [answer.ok.all() for answer in answers] == [True] * 20


def test_a_store_that_one_thread_closes_refuses_the_others(store: ExternalStore, use: str):
    names = np.array([1]) if use == "swap" else [key(1)]
    submit = store.submit_write if use == "swap" else store.submit_put
    begun = threading.Barrier(THREADS + 1, timeout=PATIENCE)

    def uses() -> None:
        begun.wait()
        ended = set()
        with pytest.raises(StoreError, match="closed"):  # noqa: PT012 (any round may be the last)
            for seed in range(1 << 30):
                ended.update(store.wait(submit(names, pages(1, seed))).reasons)
        assert ended <= {"", "closed", "error"}

    def closes() -> None:
        begun.wait()
        assert store.close()

    hammer(*[uses] * THREADS, closes, seconds=0.0)


def test_threads_that_forget_leave_no_block_of_before():
    """What was put before a call of `forget` is not found after it, whatever other threads do."""
    with KeyedStore(bytes_per_block=WIDTH) as store:

        def forgets(mine: bytes) -> None:
            store.wait(store.submit_put([mine], pages(1, 1)))
            store.forget()
            assert not store.wait(store.submit_get([mine])).ok.any()

        def uses() -> None:
            store.wait(store.submit_put([key(1)], pages(1, 2)))
            read = store.wait(store.submit_get([key(1)]))
            assert not read.ok.any() or read.rows[0, 0] == 2

        hammer(partial(forgets, key(2)), partial(forgets, key(3)), uses, uses)


def test_a_lookup_that_a_forget_overtakes_says_nothing_of_its_keys(monkeypatch: pytest.MonkeyPatch):
    with KeyedStore(bytes_per_block=WIDTH) as store:
        store.wait(store.submit_put([key(1)], pages(1, 1)))
        store._keyed_blocks.known.clear()  # another process put it
        confirm = store._keyed_blocks.epochs.confirm

        def overtaken(seconds: float) -> Epoch:
            epoch = confirm(seconds=seconds)
            monkeypatch.undo()
            store.forget()
            return epoch

        monkeypatch.setattr(store._keyed_blocks.epochs, "confirm", overtaken)
        assert not store.contains([key(1)]).any()
        until = time.monotonic() + PATIENCE
        while store._batches.lookup is not None:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert not store.contains([key(1)]).any()


def of_redis(client: object = None) -> RedisStore:
    options = {"bytes_per_block": WIDTH, "namespace": bytes(32), "use": "prefix", "num_slots": 2}
    return RedisStore(read_url("redis://localhost"), connect=lambda **options: client, **options)


@pytest.mark.parametrize("fault", ["lost", "error", "no thread"])
def test_quotas_that_are_lost_while_they_are_set_again_are_set_once_more(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The server restarts after the first of them or does not answer, or no thread can set them."""

    class Client:
        quotas: ClassVar[dict[bytes, bytes]] = {}
        is_ill = False

        def run(self, commands: list[list[bytes]]) -> tuple[list[int], None]:
            for *_, tenant, quota in commands:
                self.quotas[tenant] = quota
            if self.is_ill:
                self.is_ill = False
                if fault == "error":
                    raise StoreError("no answer")
                self.quotas.clear()
                notice()
            return [0] * len(commands), None

    def notice() -> None:
        """As a put does."""
        store._repair(0, is_swept=True, has_quotas=bool(client.quotas))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = Client()
    store = of_redis(client)
    for number in range(3):
        store.set_quota(key(number), number)
    quotas = dict(client.quotas)
    client.quotas.clear()
    client.is_ill = fault != "no thread"
    with monkeypatch.context() as patch:
        if fault == "no thread":
            patch.setattr(threading.Thread, "start", refuse)
        notice()
    until = time.monotonic() + PATIENCE
    while client.quotas != quotas:
        assert time.monotonic() < until
        time.sleep(0.01)
        notice()
