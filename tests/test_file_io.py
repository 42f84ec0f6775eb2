"""Threads and io_uring in the file store: what the URL asks for, what the system refuses, and what is calibrated."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blockyard import cli
from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, StoreURLError
from blockyard.stores import file, open_store

# Lets `io_uring_setup` (425) fail with an errno, as containers do, and uses a store.
REFUSING = """
import ctypes, struct, sys
import numpy as np
from blockyard._core import SlabStore
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000 | int(sys.argv[2])
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, 425), (RETURN, 0, 0, FAIL), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
with SlabStore(sys.argv[1], bytes_per_block=5000, num_slots=4, io="uring") as store:
    rows = np.full((2, 5000), 9, np.uint8)
    assert store.wait(store.submit_write(np.array([1, 2]), rows)).ok.all()
    assert (store.wait(store.submit_read(np.array([1, 2]))).rows == 9).all()
    print(store.io, store.notes, repr(store))
"""


@pytest.mark.skipif(platform.machine() not in {"x86_64", "aarch64"}, reason="another number of the call")
@pytest.mark.parametrize(("errno", "reason"), [(1, "Operation not permitted"), (38, "Function not implemented")])
def test_threads_run_where_the_system_refuses_io_uring(tmp_path: Path, errno: int, reason: str):
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, str(tmp_path), str(errno)], check=False, capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("no seccomp filters here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("threads (")
    assert f"threads: the system refuses io_uring ({reason}" in done.stdout
    assert done.stdout.rstrip().endswith("threads)")


def test_an_unknown_way_is_refused(tmp_path: Path):
    with pytest.raises(StoreURLError, match="'io=aio' must be auto, threads or uring"):
        open_store(f"file://{tmp_path}?size=1MiB&io=aio", bytes_per_block=4096)
    with pytest.raises(InvalidArgumentError, match="io is 'aio', must be 'threads' or 'uring'"):
        SlabStore(tmp_path, bytes_per_block=4096, num_slots=2, io="aio")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def io_of(folder: Path, io: str = "auto") -> str:
    with open_store(f"file://{folder}?size=1MiB&io={io}", bytes_per_block=4096) as store:
        assert isinstance(store, SlabStore)
        return store.io


def has_rings(folder: Path) -> bool:
    return io_of(folder, "uring") == "uring"


@pytest.mark.parametrize("faster", ["threads", "uring"])
def test_calibrating_a_directory_chooses_for_its_stores(
    cache: Path, tmp_path: Path, faster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder, measured = tmp_path / "disk", file._pass

    def timed(store: SlabStore, seed: int) -> float:
        measured(store, seed)
        return 1.0 if store.io == faster else 1.5

    if not has_rings(folder):
        faster = "threads"
    monkeypatch.setattr(file, "_pass", timed)
    assert io_of(folder) == "threads"
    assert cli.main(["calibrate", str(folder)]) == 0
    (saved,) = cache.iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{folder}: saved io={faster} to {saved}; file stores opened here use it unless their URL has io="
    )
    assert not list(folder.iterdir()), "the files that were measured go"
    assert io_of(folder) == faster
    assert io_of(tmp_path / "other") == "threads"
    assert io_of(folder, "threads") == "threads"


def test_a_calibration_of_another_kernel_or_a_damaged_one_does_not_count(cache: Path, tmp_path: Path):
    if not has_rings(tmp_path / "disk"):
        pytest.skip("no io_uring here")
    path = file._io_path(str(tmp_path / "disk"))
    cache.mkdir()
    good = {"version": 1, "kernel": os.uname().release, "io": "uring"}
    for found, io in (
        (good, "uring"),
        (good | {"kernel": "2.6.32"}, "threads"),
        (good | {"version": 2}, "threads"),
        (good | {"io": "aio"}, "threads"),
        ([1], "threads"),
    ):
        path.write_text(json.dumps(found))
        assert io_of(tmp_path / "disk") == io, found
    path.write_text("{")
    assert io_of(tmp_path / "disk") == "threads"


def test_a_directory_that_cannot_be_measured_is_an_error_and_keeps_nothing(cache: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not a directory"):
        file.calibrate_directory(str(tmp_path / "file"), print)
    assert not cache.exists()


def test_batches_of_many_sizes_come_back_by_both_ways(tmp_path: Path):
    random = np.random.default_rng(1)
    for io in ("threads", "uring"):
        with SlabStore(tmp_path, bytes_per_block=5000, num_slots=64, io=io) as store:
            for count in (1, 2, 7, 64):
                slots, rows = random.permutation(64)[:count], random.integers(0, 256, (count, 5000), dtype=np.uint8)
                written, read = store.submit_write(slots, rows), store.submit_read(slots)
                assert np.array_equal(store.wait(read).rows, rows)
                assert store.wait(written).ok.all()
