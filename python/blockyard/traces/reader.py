"""Reads a trace file: detects its format, and sorts its requests by arrival."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedIOBase
from itertools import islice
from pathlib import Path

from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.traces.formats import Row, parser_for
from blockyard.traces.request import TraceRequest

MAX_LINE_BYTES = 16 * 2**20
_HASH_BLOCKS = tuple(2**n for n in range(3, 15))


def read_trace(path: str | Path, *, first: int | None = None) -> list[TraceRequest]:
    """Read a trace file; the requests are sorted by arrival.

    Formats: Mooncake's JSONL, which `TraceRecorder` also writes, Qwen-Bailian's JSONL, Azure's CSV, agent sessions of
    kv-cache-tester (one session per line) and `requests.jsonl` from runs of LLMServingSim. The format is detected from
    the content. Files may be compressed with gzip.

    Args:
        path: path of the trace file.
        first: number of requests to read from the start of the file; all if None.

    Returns:
        The requests. Arrivals start at 0 and never decrease. All sessions of an agent trace start at 0.

    Raises:
        TraceError: the file cannot be read, its format is unknown, or a line is malformed; the message names file, line
            and problem.
        InvalidArgumentError: `first` is less than 1.
    """
    if first is not None and first < 1:
        raise InvalidArgumentError(f"first is {first}, must be at least 1")
    path = Path(path)
    rows = list(islice(iter_trace(path), first))
    if not rows:
        raise TraceError(f"{path}, line 1: the trace holds no requests")
    return _in_order(rows)


def iter_trace(path: Path) -> Iterator[Row]:
    """Yield the requests in the order of the file, each with its time on the trace's clock in nanoseconds.

    Raises:
        TraceError: as for `read_trace`.
    """
    try:
        with path.open("rb") as file:
            compressed = file.peek(2)[:2] == b"\x1f\x8b"
            yield from _parse(path, gzip.GzipFile(fileobj=file) if compressed else file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read trace {path}: {reason}") from error


def _parse(path: Path, file: BufferedIOBase) -> Iterator[Row]:
    """Yield the requests of an open file; the first line that is not blank determines the format."""
    parse = None
    for number, text in _lines(path, file):
        try:
            if parse is None:
                parse, has_header = parser_for(text)
                if has_header:
                    continue
            yield from parse(text)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None


def _lines(path: Path, file: BufferedIOBase) -> Iterator[tuple[int, str]]:
    """Yield `(line number, text)` of every line that is not blank."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}, line {number}: not UTF-8 text (byte {error.start} of the line)") from None
        if text:
            yield number, text


def _in_order(rows: list[Row]) -> list[TraceRequest]:
    """Sort requests by arrival and renumber `after`. Ties keep the order of the file."""
    order = sorted(range(len(rows)), key=lambda index: rows[index][0])
    place = {index: position for position, index in enumerate(order)}
    start = rows[order[0]][0]
    guessed = _hash_block([request for _, request in rows])
    return [
        replace(
            request,
            arrival=(clock - start) / 1e9,
            hash_tokens=(request.hash_tokens or guessed) if request.hash_ids or request.output_hash_ids else 0.0,
            after=tuple(place[other] for other in request.after),
        )
        for clock, request in (rows[index] for index in order)
    ]


def _hash_block(requests: list[TraceRequest]) -> float:
    """Infer the number of tokens per hash id from the lengths, for formats without this number.

    In some traces a last, partial block has an id, in others it does not. The result is the power of two that matches
    the most requests.
    """
    unknown = [request for request in requests if request.hash_ids and not request.hash_tokens]
    counts = {
        size: sum(
            len(request.hash_ids) in (request.input_tokens // size, -(-request.input_tokens // size))
            for request in unknown
        )
        for size in _HASH_BLOCKS
    }
    return float(max(counts, key=lambda size: (counts[size], size)))
