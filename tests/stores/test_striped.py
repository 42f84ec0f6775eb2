"""The file store over several disks: each loses its own blocks only."""

import logging
import select
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_calls import ERRORS, Caller, every, settled, swept
from forks import in_child
from interrupts import Interrupt
from memory_stores import KeyedStore

from blockyard.errors import ForkedError, MappingError, StoreError, StoreURLError, UnknownTicketError
from blockyard.stores import Completion, ExternalStore, StoreStats, open_store
from blockyard.stores.striped import StripedStore
from blockyard.testing.faults import flip_bytes
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite

WIDTH = 5000


def url(folder: Path, count: int = 3) -> str:
    return "file://" + ",".join(str(folder / str(disk)) for disk in range(count))


class TestSwap(StoreSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_store(self) -> ExternalStore:
        return open_store(url(self.folder, 2), bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)


class TestPrefix(PrefixStoreSuite):
    num_slots = 48

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
        options = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots, "namespace": namespace}
        return open_store(url(self.folder), use="prefix", **options)  # type: ignore[arg-type]


def keys(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (count, WIDTH), dtype=np.uint8)


def prefix_store(folder: Path) -> ExternalStore:
    return open_store(url(folder), bytes_per_block=WIDTH, num_slots=60, use="prefix")


def test_the_descriptor_tells_of_every_batch_that_ends(tmp_path: Path):
    """Also of those whose keys are all on a disk that could not be opened: these end at once."""
    (tmp_path / "1").write_text("no folder")
    with prefix_store(tmp_path) as store:
        names = keys(30)
        for at in range(0, 30, 2):
            before = store.submit_get(names[at : at + 1]) if at % 4 else None
            descriptor = store.event_fd()
            tickets = {store.submit_get(names[at + 1 : at + 2])} | ({before} if before is not None else set())
            while tickets:
                assert select.select([descriptor], [], [], 20)[0], tickets
                ended = store.poll()
                assert set(ended) <= tickets
                for ticket in ended:
                    assert store.wait(ticket).reasons in {("io",), ("absent",)}
                    tickets.remove(ticket)
            assert not select.select([descriptor], [], [], 0)[0]
        store.wait(store.submit_get(names))
        assert store.poll() == [], "a ticket that has been collected is not reported"
        assert store.lacks(names).all()
        stored = store.wait(store.submit_put(names, rows(30))).ok
        assert store.lacks(names).tolist() == (~stored).tolist()


def test_slots_and_bytes_are_spread_over_the_disks(tmp_path: Path):
    with open_store(url(tmp_path) + "?size=3MiB", bytes_per_block=WIDTH) as store:
        assert store.num_slots % 3 == 0
        slots = np.arange(store.num_slots)
        assert store.wait(store.submit_write(slots, rows(len(slots)))).ok.all()
        assert np.array_equal(store.wait(store.submit_read(slots[::-1])).rows, rows(len(slots))[::-1])
        files = list(tmp_path.glob("*/*.slab"))
        assert len(files) == 3
        assert sum(path.stat().st_size for path in files) <= 3 << 20
        with pytest.raises(MappingError, match="must be 0 to"):
            store.submit_read(np.array([store.num_slots]))
    assert not list(tmp_path.glob("*/*.slab"))


def test_a_disk_that_is_damaged_loses_its_keys_only(tmp_path: Path):
    with prefix_store(tmp_path) as store:
        assert store.wait(store.submit_put(keys(30), rows(30))).ok.all()
        assert store.contains(keys(30)).all()
        slab = tmp_path / "1" / "blockyard-prefix.slab"
        places = list(range(4096 + 100, slab.stat().st_size, 4096))
        flip_bytes(slab, places, masks=[1] * len(places))
        read = store.wait(store.submit_get(keys(30)))
        assert 3 < np.count_nonzero(~read.ok) < 20
        assert np.array_equal(read.rows[read.ok], rows(30)[read.ok])
        assert np.array_equal(store.contains(keys(30)), read.ok)
        lost = ~read.ok
        assert store.wait(store.submit_put(keys(30)[lost], rows(30)[lost])).ok.all(), "and takes them again"


def test_a_disk_that_cannot_be_opened_is_left_out_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with prefix_store(tmp_path) as store:
        assert store.wait(store.submit_put(keys(30), rows(30))).ok.all()
    slab = tmp_path / "2" / "blockyard-prefix.slab"
    slab.chmod(0o644)  # refused: others can read it
    with caplog.at_level(logging.WARNING), prefix_store(tmp_path) as store:
        assert f"{tmp_path}/2" in caplog.text
        held = store.contains(keys(30))
        read = store.wait(store.submit_get(keys(30)))
        assert np.array_equal(read.ok, held)
        assert 0 < held.sum() < 30
        assert {reason for reason in read.reasons if reason} == {"io"}
        assert store.stats().misses["io"] == np.count_nonzero(~held)
        assert store.stats().is_down
        only_lost = store.submit_get(keys(30)[~held])
        assert store.poll() == [only_lost]
        assert not store.wait(only_lost).ok.any()
        with pytest.raises(StoreError, match="could not be opened"):
            store.forget()
    slab.chmod(0o600)
    with prefix_store(tmp_path) as store:
        assert not store.contains(keys(30)[held]).any(), "forgotten"
        assert not store.stats().is_down
        assert store.contains(keys(30)[~held]).all(), "as the error said"


def test_swap_space_needs_every_disk(tmp_path: Path):
    (tmp_path / "1").write_text("no directory")
    with pytest.raises(StoreError, match="is not a directory"):
        open_store(url(tmp_path), bytes_per_block=WIDTH, num_slots=9)
    assert not list(tmp_path.glob("*/*.slab"))


def test_one_descriptor_tells_of_all_disks(tmp_path: Path):
    with open_store(url(tmp_path), bytes_per_block=WIDTH, num_slots=9) as store:
        store.poll()
        event = store.event_fd()
        assert event == store.event_fd()
        while store.poll():
            pass
        ticket = store.submit_write(np.array([2]), rows(1))
        found: list[int] = []
        while not found:
            assert select.select([event], [], [], 60)[0]
            found = store.poll()
        assert found == [ticket]
        assert store.wait(ticket).ok.all()


def test_a_directory_named_twice_is_refused(tmp_path: Path):
    with pytest.raises(StoreURLError, match="names a directory twice"):
        open_store(f"file://{tmp_path},{tmp_path}", bytes_per_block=WIDTH, num_slots=9)


def test_a_comma_alone_is_part_of_a_name(tmp_path: Path):
    with open_store(f"file://{tmp_path}/a,b", bytes_per_block=WIDTH, num_slots=9) as store:
        assert not isinstance(store, StripedStore)
        assert (tmp_path / "a,b").is_dir()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_takes_no_news_from_its_parent_and_close_returns(tmp_path: Path):
    (tmp_path / "1").write_text("no folder")
    with prefix_store(tmp_path) as store:
        assert isinstance(store, StripedStore)
        names = keys(30)
        lost = names[store._disks(names) == 1]
        assert store.event_fd() >= 0
        assert not store.poll()

        def check() -> None:
            put = lambda: store.submit_put(lost, rows(len(lost)))  # noqa: E731
            for call in (put, lambda: store.wait(1), store.event_fd, store.poll):
                with pytest.raises(ForkedError, match="a store was created by process"):
                    call()
            assert store.close()

        with store._lock:
            in_child(check)
        assert not select.select([store.event_fd()], [], [], 0)[0]
        assert store.wait(store.submit_put(names, rows(30))).ok.sum() == 30 - len(lost)


def test_a_thread_that_collects_a_ticket_too_late_leaves_the_callers_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another thread has collected the ticket, and its caller uses the rows for something else."""
    with open_store(url(tmp_path, 2), bytes_per_block=WIDTH, num_slots=4) as store:
        store.wait(store.submit_write(np.arange(4), rows(4)))
        out = np.zeros((4, WIDTH), np.uint8)
        ticket = store.submit_read(np.arange(4), out)
        first, *_ = store._open  # type: ignore[attr-defined]
        wait = first.wait

        def late(number: int, timeout: float | None) -> Completion:
            monkeypatch.undo()
            done = wait(number, timeout)
            store._batches[ticket].shares[0].done.append(done)  # type: ignore[attr-defined]
            assert store.wait(ticket).ok.all()  # the other thread's
            assert (out == rows(4)).all()
            out[:] = 7
            return done

        monkeypatch.setattr(type(first), "wait", lambda _, number, timeout: late(number, timeout))
        with pytest.raises(UnknownTicketError):
            store.wait(ticket)
        assert (out == 7).all()


def test_the_last_error_is_of_the_disk_that_fails_now(monkeypatch: pytest.MonkeyPatch):
    parts = [KeyedStore(bytes_per_block=WIDTH) for _ in range(2)]
    with StripedStore(parts, is_keyed=True) as store:
        for in_a_row, found in ((0, "an old one; new"), (1, "new")):
            last = (
                StoreStats(errors=1, last_error="an old one"),
                StoreStats(errors_in_a_row=in_a_row, last_error="new"),
            )
            for part, stats in zip(parts, last, strict=True):
                monkeypatch.setattr(part, "stats", lambda stats=stats: stats)
            assert store.stats().last_error == found


@pytest.mark.parametrize("error", [StoreError, KeyboardInterrupt])
def test_a_batch_that_one_disk_refuses_is_let_go_by_the_others(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> int:
        raise error

    parts = [KeyedStore(bytes_per_block=WIDTH) for _ in range(3)]
    with StripedStore([*parts, None], is_keyed=True) as store:
        with monkeypatch.context() as patched:
            patched.setattr(parts[2], "submit_get", refuse)
            with pytest.raises(error):
                store.submit_get(keys(40))
        assert [part._batches.open for part in parts] == [{}, {}, {}]
        assert store.stats().misses.get("io", 0) == 0, "nothing was submitted"
        assert store.poll() == []
        assert store.wait(store.submit_put(keys(30), rows(30))).ok.sum() > 15


class Disks(Caller):
    """Batches of each kind over three disks, one call interrupted; each ends, and nothing is kept for it."""

    def __init__(self, interrupt: Interrupt, folder: Path) -> None:
        super().__init__(interrupt)
        (folder / "disk").mkdir(parents=True)
        (folder / "disk" / "1").write_text("no folder")
        self.store = prefix_store(folder / "disk")
        self.descriptor = self.store.event_fd()

    def run(self) -> None:
        for _ in range(2):
            self.end(self.store.submit_put, keys(20), rows(20))
            self.end(self.store.submit_get, keys(20), rows(20))
            self.end(self.store.submit_delete, keys(20)[:6])
        self.end(self.store.submit_get, np.zeros((1, 32), np.uint8))
        settled(self.is_clean, "the store keeps something of a batch")
        assert not select.select([self.descriptor], [], [], 0)[0]
        self.call(self.store.close)
        self.store.close()

    def end(self, submit: Callable[..., int], *arguments: Any) -> None:
        ticket = self.call(submit, *arguments)
        reported: list[int] = []
        while ticket not in reported:
            assert select.select([self.descriptor], [], [], 10)[0], self.interrupt.where
            reported = self.call(self.store.poll)
            for other in set(reported) - {ticket}:  # of an interrupted call
                self.store.wait(other)
        with suppress(UnknownTicketError):
            done = self.call(self.store.wait, ticket)
            # A batch whose submission was interrupted is cut short; then its blocks may come back after a deletion.
            assert set(done.reasons) <= {"", "absent", "io"} | ({"lost"} if self.interrupt.where else set())
            if done.rows.size:
                assert np.array_equal(done.rows[done.ok], rows(20)[: len(done.ok)][done.ok])
            return
        assert self.interrupt.where, "collected by another"

    def is_clean(self) -> bool:
        for ticket in self.store.poll():
            self.store.wait(ticket)
        return not (self.store.stats().pending_bytes or self.store._batches or self.store._owner)  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", every(50))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_ends_every_batch_and_keeps_nothing(
    tmp_path: Path, error: type[BaseException], most: int
):
    numbers = count()

    def run(interrupt: Interrupt) -> None:
        disks = Disks(interrupt, tmp_path / str(next(numbers)))
        with interrupt.installed():
            disks.run()

    assert swept(("stores/striped.py",), run, error, most) > 60
