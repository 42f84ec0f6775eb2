"""`TraceRecorder`: what it writes, what it forgets, and that no failure of it reaches the engine."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import forks
import numpy as np
import pytest
from interrupts import CountedInterrupt

from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.traces import TraceRecorder, read_trace
from blockyard.traces import recorder as module
from blockyard.traces.recorder import record_from_environment

RECORD = """
import sys
from blockyard.traces import TraceRecorder
def record(recorder, count):
    for number in range(count):
        recorder.add(number, [f"{number} {place}" for place in range(20)], 80)
        recorder.finish(number, 3)
recorder = TraceRecorder(sys.argv[1], block_size=4)
"""


def ids_of(path: Path) -> list[list[int]]:
    return [list(request.hash_ids) for request in read_trace(path)]


def python(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RECORD + program, str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_line_has_mooncakes_fields_as_whole_numbers(tmp_path: Path, name: str):
    now = [5.0]
    path = tmp_path / name
    with TraceRecorder(path, block_size=4, clock=lambda: now[0]) as recorder:
        recorder.add("a", [b"x", b"y"], np.int64(9), session="me")
        now[0] += 0.2504
        recorder.add("b", [b"x", b"z"], 8)
        recorder.finish("b", np.int64(4), [b"w"])
        recorder.finish("a", 0)
    data = path.read_bytes()
    lines = (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0, 1], "block_size": 4, "session": 0},
        {"timestamp": 250, "input_length": 8, "output_length": 4, "hash_ids": [0, 2], "block_size": 4}
        | {"output_hash_ids": [3]},
    ]
    first, second = read_trace(path)
    assert (first.session, first.hash_tokens, second.session, list(second.output_hash_ids)) == (0, 4.0, None, [3])
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_are_in_order_of_arrival_whoever_ends_first(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=1) as recorder:
        for name in "abc":
            recorder.add(name, [], 1 + ord(name))
        for name in "cxab":  # nobody knows x
            recorder.finish(name, ord(name))
    assert [chr(row.output_tokens) for row in read_trace(path)] == ["a", "b", "c"]
    assert [row.input_tokens - row.output_tokens for row in read_trace(path)] == [1, 1, 1]


def test_a_writer_that_lacks_memory_as_it_stops_closes_its_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    closed: list[int] = []
    fails: list[type[Exception]] = [MemoryError, OSError]
    recorder = TraceRecorder(tmp_path / "trace.jsonl", block_size=1)
    file, close = recorder._file, os.close

    def fail(*_: object) -> None:
        if fails:
            raise fails.pop()

    def note(descriptor: int) -> None:
        closed.append(descriptor)
        if closed.count(descriptor) == 1:
            close(descriptor)

    monkeypatch.setattr(os, "close", note)
    monkeypatch.setattr(recorder, "_write", fail)
    monkeypatch.setattr(recorder, "_stop", fail)
    recorder.add("a", [], 1)
    recorder.close()
    assert not fails
    assert closed.count(file) == 1


def test_a_request_that_never_ends_holds_others_back_only_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_HELD_IDS", 1000)
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=1) as recorder:
        recorder.add("never", ["a"], 1)
        for number in range(100):
            recorder.add(number, ["a", number], 2)
            recorder.finish(number, 7)
        assert len(recorder._order) < 1000 / 34
        recorder.finish("never", 9)
        recorder.add("again", ["a"], 1)
        recorder.add("again", ["a", "b"], 2)  # in its place
    rows = read_trace(path)
    assert [row.output_tokens for row in rows] == [1, *[7] * 100, 1]
    assert list(rows[-1].hash_ids) == [0, 101]


def test_a_request_that_is_added_again_keeps_its_place(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=1) as recorder:
        recorder.add("a", ["x"], 1)
        recorder.add("b", ["x", "y"], 2)
        recorder.add("a", ["x", "z"], 2)
        assert recorder._held_ids == 2 * module._REQUEST_IDS + 4
        recorder.finish("b", 1)
        recorder.finish("a", 1, ["w"])
        assert recorder._held_ids == 0
    assert ids_of(path) == [[0, 2], [0, 1]]


def test_blocks_not_seen_for_long_count_as_new_and_recent_ones_keep_their_ids(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=1, max_blocks=20) as recorder:
        for number in range(100):
            recorder.add(number, ["shared", number], 2)
            recorder.finish(number, 1)
        recorder.add("old", [0], 1)
        recorder.add("recent", [99, 91], 2)
        assert len(recorder._blocks._recent) + len(recorder._blocks._older) <= 20
    *rows, old, recent = ids_of(path)
    assert rows == [[0, 1 + number] for number in range(100)]
    assert (old, recent) == ([101], [100, 92])


def test_a_full_disk_stops_the_recording_with_one_line_and_a_readable_file(tmp_path: Path):
    path = tmp_path / "trace.jsonl.gz"
    program = """
import itertools, resource, time
from blockyard.traces import recorder as module
module._FLUSH_BYTES = 4096
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
for part in itertools.count():
    record(recorder, 200 + part)
    time.sleep(0.02)
    if not recorder.is_recording:
        break
print(recorder.is_recording)
recorder.close()
"""
    ended = python(program, path)
    assert (ended.returncode, ended.stdout) == (0, "False\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"recording to {path} stopped after ")
    assert line.endswith("requests: File too large")
    assert 100 < len(read_trace(path)) < 30_000
    assert path.stat().st_size <= 30_000


def test_storage_that_takes_nothing_stops_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "_QUEUE_BYTES", 1000)
    monkeypatch.setattr(module, "_FLUSH_BYTES", 1 << 30)
    with TraceRecorder(tmp_path / "trace.jsonl", block_size=1) as recorder, caplog.at_level(logging.WARNING):
        for number in range(100):
            recorder.add(number, [number], 1)
            recorder.finish(number, 1)
        assert not recorder.is_recording
        assert not recorder._order
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("requests: its storage is too slow")


def test_a_program_that_forgets_to_close_loses_nothing(tmp_path: Path):
    path = tmp_path / "trace.jsonl.gz"
    ended = python("record(recorder, 50); recorder.add('open', ['x'], 5)", path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(read_trace(path)) == 51


def test_a_killed_process_leaves_what_ended_a_second_before(tmp_path: Path):
    path = tmp_path / "trace.jsonl.gz"
    command = [sys.executable, "-c", RECORD + "record(recorder, 50); print(flush=True); input()", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 60
        while not path.stat().st_size and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert len(read_trace(path)) == 50


def test_a_fork_records_nothing_and_spoils_nothing(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=1) as recorder:
        recorder.add("a", ["x"], 1)

        def child() -> None:
            assert not recorder.is_recording
            recorder.add("b", ["y"], 1)
            recorder.finish("a", 5)
            recorder._drop("a")
            recorder.close()

        with recorder._lock:
            forks.in_child(child)
        assert recorder.is_recording
        recorder.finish("a", 2)
    assert [(list(row.hash_ids), row.output_tokens) for row in read_trace(path)] == [([0], 2)]


def test_many_threads_may_use_one_recorder(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=1) as recorder:

        def serve(first: int) -> None:
            for number in range(first, first + 300):
                recorder.add(number, ["shared", number], 2)
                recorder.finish(number, 1 + number, [-number])

        threads = [threading.Thread(target=serve, args=(1000 * thread,)) for thread in range(1, 5)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    rows = read_trace(path)
    assert sorted(row.output_tokens - 1 for row in rows) == [
        1000 * thread + n for thread in range(1, 5) for n in range(300)
    ]
    assert len({number for row in rows for number in (*row.hash_ids, *row.output_hash_ids)}) == 1 + 1200 + 1200
    assert {row.hash_ids[0] for row in rows} == {0}


@pytest.mark.parametrize("is_made_again", [False, True])
def test_an_interrupt_at_any_place_loses_at_most_the_call_that_it_hits(tmp_path: Path, is_made_again: bool):
    for place in itertools.count():
        path = tmp_path / f"{place}.jsonl"
        interrupt = CountedInterrupt(place, (module.__file__, threading.__file__))
        with TraceRecorder(path, block_size=1) as recorder:
            calls = [
                partial(recorder.add, "a", ["x"], 1),
                partial(recorder.add, "b", ["x", "y"], 2),
                partial(recorder.finish, "a", 5, ["z"]),
                partial(recorder.finish, "b", 5),
                partial(recorder.add, "c", ["x", "y"], 9),
                partial(recorder.finish, "c", 5),
            ]
            for call in calls:
                try:
                    with interrupt.armed():
                        call()
                except KeyboardInterrupt:  # noqa: PERF203 (each is made again)
                    if is_made_again:
                        call()
            recorder.finish("b", 5)
            recorder.finish("c", 5)
            assert not recorder._open.keys() - {"a"}, interrupt.where
        rows = read_trace(path)
        found = [(row.input_tokens, row.output_tokens) for row in rows]
        if is_made_again:
            assert found == [(1, 5), (2, 5), (9, 5)], interrupt.where
        assert set(found) <= {(1, 1), (1, 5), (2, 5), (9, 5)}, interrupt.where
        assert len(found) >= 2, interrupt.where
        assert len({row.hash_ids[0] for row in rows}) == 1, interrupt.where
        if not interrupt.where:
            break
    assert place > 50


def test_after_close_nothing_is_recorded(tmp_path: Path):
    recorder = TraceRecorder(tmp_path / "trace.jsonl", block_size=1)
    recorder.add("a", [], 1)
    recorder.close()
    recorder.add("b", [], 1)
    recorder.finish("b", 1)
    recorder.close()
    assert len(read_trace(tmp_path / "trace.jsonl")) == 1


def test_wrong_arguments_are_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    for options in ({"block_size": 0}, {"block_size": True}, {"block_size": 4, "max_blocks": 1}):
        with pytest.raises(InvalidArgumentError, match=r"is (0|True|1), must be an int from"):
            TraceRecorder(path, **options)
    with TraceRecorder(path, block_size=4) as recorder:
        for keys, tokens in ((["x"], 3), ([], 0), ([], 2**31)):
            with pytest.raises(InvalidArgumentError, match="keys of full blocks only"):
                recorder.add("a", keys, tokens)
        with pytest.raises(TraceError, match=r"cannot record to .*File exists"):
            TraceRecorder(path, block_size=4)
    with pytest.raises(TraceError, match="No such file"):
        TraceRecorder(tmp_path / "missing" / "trace.jsonl", block_size=4)


def test_the_environment_names_a_file_for_each_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("BLOCKYARD_RECORD", raising=False)
    assert record_from_environment(4) is None
    monkeypatch.setenv("BLOCKYARD_RECORD", str(tmp_path / "a.jsonl.gz"))
    for _ in range(2):
        recorder = record_from_environment(4)
        assert recorder is not None
        recorder.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl.gz", "a-2.jsonl.gz"}
    monkeypatch.setenv("BLOCKYARD_RECORD", str(tmp_path / "missing" / "a.jsonl"))
    assert record_from_environment(4) is None
    assert "nothing is recorded: cannot record to" in caplog.text


def test_names_of_sessions_are_numbered(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 9, "output_length": 1}
    names = [{"session": "b1"}, {"session": 7}, {}, {"session": "b1"}]
    path.write_text("\n".join(json.dumps(line | name) for name in names))
    assert [row.session for row in read_trace(path)] == [0, 1, None, 0]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("session", [1], r"session is \[1\], not a number or a name"),
        ("output_hash_ids", [-1], r"output_hash_ids is \[-1\], not a"),
    ],
)
def test_a_malformed_field_of_ours_is_named(tmp_path: Path, field: str, value: object, problem: str):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0], field: value}
    path.write_text(json.dumps(line))
    with pytest.raises(TraceError, match=f"line 1: {problem}"):
        read_trace(path)
