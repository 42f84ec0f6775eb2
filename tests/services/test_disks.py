"""The file store on full, frozen and buffered disks, which are mounted for the test; skipped where that needs root."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard._core import SlabStore
from blockyard.errors import StoreError, StoreFullError
from blockyard.stores.file import open_file

WIDTH = 5000


def blocks(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), dtype=np.uint8)


def write(store: SlabStore, slots: list[int]) -> None:
    assert store.wait(store.submit_write(np.array(slots), blocks(len(slots)))).ok.all()


def reasons(store: SlabStore, slots: list[int]) -> tuple[str, ...]:
    return store.wait(store.submit_read(np.array(slots))).reasons


def mount(folder: Path, *arguments: str | Path) -> None:
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", *arguments, folder], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_an_error_with_the_numbers_and_leaves_nothing(disk: Path):
    mount(disk, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    with pytest.raises(StoreFullError, match=rf"asked for 8384512 bytes in {disk}/swap, 4194304 are available"):
        open_file(f"file://{disk}/swap?size=8MiB", bytes_per_block=4096)
    assert not list(disk.iterdir())


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(65536))


def test_a_preallocated_slab_has_its_room_on_a_disk_that_fills_up(disk: Path):
    mount(disk, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    with SlabStore(disk, bytes_per_block=WIDTH, num_slots=100) as store:
        with pytest.raises(OSError, match="No space"):
            fill(disk)
        write(store, list(range(100)))
        assert set(reasons(store, list(range(100)))) == {""}


def test_a_file_system_without_direct_io_is_reported_or_refused(disk: Path):
    mount(disk, "-t", "ramfs", "ramfs")
    with SlabStore(disk, bytes_per_block=WIDTH, num_slots=4) as store:
        write(store, [0])
        assert reasons(store, [0]) == ("",)
        assert not store.direct
        assert [note.split(":")[0] for note in store.notes] == ["not preallocated", "buffered"]
    with pytest.raises(StoreError, match=r"direct=on, but .* refuses direct I/O"):
        SlabStore(disk, bytes_per_block=WIDTH, num_slots=4, direct="on")
    assert not list(disk.iterdir())


@pytest.fixture
def frozen(tmp_path: Path, disk: Path, request: pytest.FixtureRequest) -> Iterator[SlabStore]:
    """A store whose disk has stopped answering writes; its timeout is a second if the test asks for no other."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if not (shutil.which("mkfs.ext4") and shutil.which("fsfreeze")):
        pytest.skip("freezing a disk needs mkfs.ext4 and fsfreeze")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mount(disk, "-o", "loop", image)
    base = getattr(request, "param", 1.0)
    store = SlabStore(disk, bytes_per_block=WIDTH, num_slots=16, timeout_base=base, threads=2)
    write(store, [0, 1])
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)
    try:
        yield store
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
        store.close()


def test_a_frozen_disk_costs_a_deadline_and_is_left_behind_on_closing(frozen: SlabStore, disk: Path):
    started = time.monotonic()
    done = frozen.wait(frozen.submit_write(np.arange(4), blocks(4)))
    assert done.reasons == ("timeout",) * 4
    assert time.monotonic() - started > 0.9
    assert not frozen.close(timeout=0.2)
    subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
    while list(disk.glob("*.slab")):
        time.sleep(0.01)
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)


def test_a_write_given_up_reads_as_a_miss_after_the_thaw(frozen: SlabStore, disk: Path):
    ticket = frozen.submit_write(np.array([0]), blocks(1, 3))
    assert frozen.wait(ticket, timeout=0.1).reasons == ("timeout",)
    read = frozen.submit_read(np.array([0, 1]))
    subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
    assert frozen.wait(read).reasons == ("lost", "")
    write(frozen, [0])
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)


@pytest.mark.parametrize("frozen", [3600.0], indirect=True)
def test_an_interrupt_reaches_a_waiting_call(frozen: SlabStore):
    ticket = frozen.submit_write(np.array([0]), blocks(1))
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        frozen.wait(ticket)
    assert frozen.wait(ticket, timeout=0.1).reasons == ("timeout",)
