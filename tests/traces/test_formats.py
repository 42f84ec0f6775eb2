"""The formats: agent sessions with think times and sub-agents, chats, measured runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from blockyard.errors import TraceError
from blockyard.traces import TraceRequest, read_trace


def write(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def session(*requests: dict[str, object]) -> dict[str, object]:
    return {"block_size": 64, "requests": list(requests)}


def turn(t: float, blocks: list[list[int]], api_time: float = 5.0, **fields: object) -> dict[str, object]:
    return {"t": t, "in": 200, "out": 10, "api_time": api_time, "blocks": blocks, **fields}


def test_turns_of_a_session_wait_for_the_answer_before(tmp_path: Path):
    first, second = read_trace(write(tmp_path, session(turn(0, [[1, 3]]), turn(19, [[1, 2], [9, 2]]))))
    assert (first.after, first.delay, list(first.hash_ids), first.hash_tokens) == ((), 0.0, [1, 2, 3], 64.0)
    assert (second.after, second.delay, list(second.hash_ids)) == ((0,), 14.0, [1, 2, 9, 10])


def test_sessions_share_no_ids_and_are_ordered_by_time(tmp_path: Path):
    path = write(
        tmp_path, session(turn(0, [[1, 2]]), turn(30, [[1, 3]])), session(turn(0, [[1, 2]]), turn(10, [[1, 2]]))
    )
    rows = read_trace(path)
    assert [row.session for row in rows] == [0, 1, 1, 0]
    assert [row.after for row in rows] == [(), (), (1,), (0,)]
    assert not set(rows[0].hash_ids) & set(rows[1].hash_ids)
    assert [row.arrival for row in rows] == [0.0, 0.0, 10.0, 30.0]


def test_a_sub_agent_starts_after_its_parents_answer_and_the_next_turn_waits_for_it(tmp_path: Path):
    agent = {"t": 6.0, "duration_ms": 20_000, "requests": [turn(0, [[50, 1]], 2.0), turn(4, [[50, 2]], 3.0)]}
    parent, *children, last = read_trace(write(tmp_path, session(turn(0, [[1, 1]]), agent, turn(27, [[1, 2]]))))
    assert [child.after for child in children] == [(0,), (1,)]
    assert children[0].delay == pytest.approx(1.0)
    assert children[1].delay == pytest.approx(2.0)
    assert last.after == (0, 2)
    assert last.delay == pytest.approx(1.0)
    assert parent.after == ()


def test_a_turn_does_not_wait_for_a_sub_agent_that_ended_later(tmp_path: Path):
    agent = {"t": 6.0, "duration_ms": 60_000, "requests": [turn(0, [[50, 1]])]}
    rows = read_trace(write(tmp_path, session(turn(0, [[1, 1]]), agent, turn(27, [[1, 2]]))))
    assert [row.after for row in rows] == [(), (0,), (0,)]


def test_chats_have_seconds_and_blocks_of_16_tokens(tmp_path: Path):
    line = {"chat_id": 5, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 33, "output_length": 4, "turn": 1}
    rows = read_trace(
        write(tmp_path, {**line, "hash_ids": [7, 8]}, {**line, "chat_id": 6, "parent_chat_id": 5, "timestamp": 4.0})
    )
    assert [(row.arrival, row.session, list(row.hash_ids), row.hash_tokens) for row in rows] == [
        (0.0, 5, [7, 8], 16.0),
        (1.5, 5, [], 0.0),
    ]


def test_measured_runs_have_lengths_and_arrivals(tmp_path: Path):
    line = {"request_id": "a", "input_toks": 40, "output_toks": 3, "arrival_time": 177.25}
    assert read_trace(write(tmp_path, line, {**line, "arrival_time": 177.5})) == [
        TraceRequest(0.0, 40, 3),
        TraceRequest(0.25, 40, 3),
    ]


def test_a_line_can_say_how_many_tokens_a_block_has(tmp_path: Path):
    line = {"timestamp": 0, "input_length": 33, "output_length": 4, "hash_ids": [1, 2], "block_size": 11}
    assert read_trace(write(tmp_path, line))[0].hash_tokens == 11.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (session({"in": 3}), "a request is {'in': 3}, not an object with t"),
        (session(turn(-1, [])), "t is -1, not seconds"),
        (session(turn(0, [[1]])), r"blocks has \[1\], not \[first id, count\]"),
        (session(turn(0, [[-1, 5]])), r"blocks has \[-1, 5\], not a non-negative id and a count"),
        (session(turn(0, [[1, 2**40]])), r"blocks has \[1, 1099511627776\], not a non-negative id and a count"),
        (session({"t": 0, "duration_ms": "long", "requests": []}), "duration_ms is 'long', not milliseconds"),
        (session({"t": 0, "in": "4", "blocks": []}), "in is '4', not a number of tokens"),
        (session({"t": 0, "in": 4, "out": -1, "blocks": []}), "out is -1, not a number of tokens"),
        (session({"t": 0, "in": 4, "blocks": 7}), r"blocks is 7, not a list of \[first id, count\]"),
        (session({"t": 0, "in": 4, "blocks": None}), r"blocks is None, not a list of \[first id, count\]"),
        ({"block_size": 0, "requests": []}, "block_size is 0"),
        ({"block_size": 64, "requests": 3}, "requests is 3, not a list"),
        ({"chat_id": "x", "timestamp": 0, "input_length": 1, "output_length": 1}, "chat_id is 'x'"),
        ({"input_toks": 3}, "without output_toks, arrival_time"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: dict[str, object], message: str):
    with pytest.raises(TraceError, match=f"line 1: {message}"):
        read_trace(write(tmp_path, line))


def test_sessions_nested_too_deeply_are_refused(tmp_path: Path):
    nested: dict[str, object] = turn(0, [])
    for _ in range(20):
        nested = {"t": 0, "requests": [nested]}
    with pytest.raises(TraceError, match="a list of at most 8 levels"):
        read_trace(write(tmp_path, session(nested)))


def test_a_broken_archive_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "broken.gz"
    path.write_bytes(gzip.compress(b'{"timestamp": 0}' * 100)[:-12])
    with pytest.raises(TraceError, match=r"cannot read trace .*broken\.gz"):
        read_trace(path)
