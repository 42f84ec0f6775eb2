"""Reading traces: the formats, their limits, and what is said of a file that is neither."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.traces import TraceRequest, read_trace, reader
from blockyard.traces.formats import AZURE_HEADER


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mooncake(**fields: object) -> str:
    row: dict[str, object] = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps(row | fields) + "\n"


def test_mooncake_rows_are_read_with_arrivals_in_seconds(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(timestamp=1500) + "\n" + mooncake(timestamp=4250, hash_ids=[0, 7]))
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 700, 5, array("q", [0, 1]), 512.0)
    assert second == TraceRequest(2.75, 700, 5, array("q", [0, 7]), 512.0)


def test_hash_block_is_found_for_traces_that_leave_out_the_last_partial_block(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(input_length=1358, hash_ids=list(range(84))))
    assert read_trace(path)[0].hash_tokens == 16.0


@pytest.mark.parametrize(("hash_tokens", "fields"), [(16, {}), (None, {"block_size": 16})])
def test_ids_that_end_before_their_prompts_are_named_once(
    tmp_path: Path, hash_tokens: int | None, fields: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    whole, few = mooncake(input_length=47, **fields), mooncake(timestamp=1, **fields)
    path = write(tmp_path, whole + few * 2)
    assert len(read_trace(path, hash_tokens=hash_tokens)) == 3
    assert caplog.messages == [
        f"{path}, line 2: 2 hash ids of 16 tokens for 700 tokens: what ids do not cover is not shared; such lines: 2"
    ]
    caplog.clear()
    read_trace(write(tmp_path, whole), hash_tokens=hash_tokens)
    assert not caplog.messages


def test_azure_rows_keep_all_seven_digits_of_a_second(tmp_path: Path) -> None:
    rows = "2023-11-16 23:59:59.9999999,374,44\r\n2023-11-17 00:00:01.0000001,396,109\r\n"
    path = write(tmp_path, f"{AZURE_HEADER}\r\n{rows}")
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 374, 44)
    assert second == TraceRequest(1.0000002, 396, 109)


@pytest.mark.parametrize("suffix", ["", "Z", "+00:00", ".5", ".123456789"])
def test_azure_times_may_leave_out_the_fraction_and_name_utc(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"{AZURE_HEADER}\n2024-05-10 00:00:00{suffix},1,2\n")
    assert read_trace(path) == [TraceRequest(0.0, 1, 2)]


def test_format_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), name="trace.csv")
    assert list(read_trace(path)[0].hash_ids) == [0, 1]


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + AZURE_HEADER.encode() + b"\n2024-05-10 00:00:00,1,2\n")
    assert len(read_trace(path)) == 1


def test_requests_out_of_order_are_sorted_by_arrival(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mooncake(timestamp=900, input_length=9, hash_ids=[]) + mooncake(timestamp=400, input_length=4, hash_ids=[]),
    )
    assert [(row.arrival, row.input_tokens) for row in read_trace(path)] == [(0.0, 4), (0.5, 9)]


def test_limit_reads_no_further_than_it_must(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake() * 3 + "this line is damaged\n")
    assert len(read_trace(path, first=3)) == 3
    with pytest.raises(TraceError, match="line 4"):
        read_trace(path)


def test_limit_below_one_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="first is 0, must be at least 1"):
        read_trace(write(tmp_path, mooncake()), first=0)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "not a JSON object"),
        ("[1, 2]", "not a JSON object but"),
        ("[" * 100_000, "not a JSON object"),
        ('{"timestamp": 1}', "without input_length, output_length"),
        (mooncake(timestamp="soon"), "timestamp is 'soon'"),
        (mooncake(timestamp=-1), "timestamp is -1"),
        (mooncake(timestamp=float("nan")), "timestamp is nan"),
        (mooncake(timestamp=True), "timestamp is True"),
        (mooncake(timestamp=10**40), "timestamp is a number beyond 64 bits"),
        (mooncake(input_length=0), "input_length is 0"),
        (mooncake(input_length=2.5), "input_length is 2.5"),
        (mooncake(output_length=2**31), "output_length is 2147483648"),
        (mooncake(hash_ids=3), "hash_ids is 3"),
        (mooncake(hash_ids=[0, -1]), "hash_ids is"),
        (mooncake(hash_ids=["a"]), "hash_ids is"),
    ],
)
def test_malformed_mooncake_row_names_file_line_and_fault(tmp_path: Path, row: str, complaint: str) -> None:
    path = write(tmp_path, mooncake() + row)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("2024-05-10 00:00:00,1", "has 2 columns, not 3"),
        ("2024-05-10 00:00:00,1,2,3", "has 4 columns"),
        ("2024-05-10 00:00:00,1,two", "GeneratedTokens is 'two'"),
        ("2024-05-10 00:00:00,-1,2", "ContextTokens is '-1'"),
        ("2024-05-10 00:00:00,0,2", "ContextTokens is 0"),
        ("2024-05-10 00:00:00,999999999999,2", "ContextTokens is 999999999999"),
        ("yesterday,1,2", "TIMESTAMP is 'yesterday'"),
        ("2024-02-30 00:00:00,1,2", "TIMESTAMP is '2024-02-30 00:00:00'"),
    ],
)
def test_malformed_azure_row_names_file_line_and_fault(tmp_path: Path, row: str, complaint: str) -> None:
    path = write(tmp_path, f"{AZURE_HEADER}\n{row}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}, line 2: {complaint}" in str(caught.value)


def test_row_cut_off_at_the_end_of_the_file_raises(tmp_path: Path) -> None:
    path = write(tmp_path, (mooncake() + mooncake())[:-30])
    with pytest.raises(TraceError, match="line 2: not a JSON object"):
        read_trace(path)


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3\n", "PK\x03\x04", "TIMESTAMP,ContextTokens\n"])
def test_file_in_neither_format_is_refused_on_its_first_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="line 1: neither a JSON object"):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "\n\n", AZURE_HEADER])
def test_trace_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="holds no requests"):
        read_trace(write(tmp_path, text))


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: not UTF-8 text"):
        read_trace(write(tmp_path, mooncake().encode() + b"\xff\xfe\n"))


def test_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 100)
    with pytest.raises(TraceError, match="line 1: longer than 100 bytes"):
        read_trace(write(tmp_path, mooncake(padding="x" * 200)))


def test_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read trace .*absent\.jsonl: No such file"):
        read_trace(tmp_path / "absent.jsonl")


def test_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read trace .*: Is a directory"):
        read_trace(tmp_path)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = write(tmp_path_factory.getbasetemp(), data, name="fuzzed")
    try:
        rows = read_trace(path)
    except TraceError as error:
        complaint = str(error)
    else:
        complaint = str(path) if rows else ""
    assert str(path) in complaint


@pytest.mark.parametrize(
    ("name", "requests", "hash_tokens"),
    [
        ("synthetic_trace.jsonl", 3993, 512.0),
        ("lmcache_agent_miniswe.jsonl", 402, 16.0),
        ("AzureLLMInferenceTrace_conv.csv", 19366, 0.0),
    ],
)
def test_published_traces_are_read_whole(traces: Path, name: str, requests: int, hash_tokens: float) -> None:
    rows = read_trace(traces / name)
    assert len(rows) == requests
    assert {row.hash_tokens for row in rows} == {hash_tokens}
    assert [row.arrival for row in rows] == sorted(row.arrival for row in rows)


def test_first_requests_of_the_azure_trace(traces: Path) -> None:
    rows = read_trace(traces / "AzureLLMInferenceTrace_conv.csv", first=2)
    assert rows == [TraceRequest(0.0, 374, 44), TraceRequest(4.314579, 396, 109)]


@pytest.mark.parametrize("size", [1, 16, 24, 48, 100, 400, 528, 784, 1000, 1056])
@pytest.mark.parametrize("partial", [False, True])
def test_any_block_size_is_inferred_from_the_lengths(tmp_path: Path, size: int, partial: bool) -> None:
    lengths = [(20 + at * 7 % 10) * size + at * 13 % size for at in range(60)]
    counts = [-(-length // size) if partial else length // size for length in lengths]
    rows = [
        mooncake(input_length=length, hash_ids=list(range(count)))
        for length, count in zip(lengths, counts, strict=True)
    ]
    assert {row.hash_tokens for row in read_trace(write(tmp_path, "".join(rows)))} == {size}


def test_lines_that_fit_no_block_size_are_refused_unless_it_is_given(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(input_length=160, hash_ids=[1, 2]) + mooncake(input_length=160, hash_ids=[3] * 9))
    with pytest.raises(TraceError, match=r"line 2: 9 hash ids for 160 tokens: .*; give hash_tokens \(--hash-tokens\)"):
        read_trace(path)
    assert {row.hash_tokens for row in read_trace(path, hash_tokens=18)} == {18}
    with pytest.raises(TraceError, match="line 2: 9 hash ids of 32 tokens for 160 tokens"):
        read_trace(path, hash_tokens=32)
    with pytest.raises(InvalidArgumentError, match="hash_tokens is 0, must be at least 1"):
        read_trace(path, hash_tokens=0)


def test_a_line_with_too_few_ids_is_named(tmp_path: Path) -> None:
    rows = [mooncake(input_length=512 * count + 9, hash_ids=list(range(count))) for count in range(20, 60)]
    rows[30] = mooncake(input_length=512 * 50 + 9, hash_ids=[1, 2])
    with pytest.raises(TraceError, match=r"line 32: 2 hash ids for 25609 tokens: no number of tokens per id up to"):
        read_trace(write(tmp_path, "\n" + "".join(rows)))


def test_a_session_id_names_the_conversation_and_a_delay_follows_its_last_answer(tmp_path: Path) -> None:
    line = {"session_id": "a", "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
    lines = [line | {"timestamp": 5}, line | {"session_id": "b", "timestamp": 7}, line | {"delay": 3000}]
    rows = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines))))
    assert [(row.session, row.after, row.delay) for row in rows] == [(0, (), 0.0), (1, (), 0.0), (0, (0,), 3.0)]
    with pytest.raises(TraceError, match="line 1: without timestamp"):
        read_trace(write(tmp_path, json.dumps(line | {"delay": 3000})))
