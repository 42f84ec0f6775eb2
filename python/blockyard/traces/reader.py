"""Reads a trace file: detects its format, and sorts its requests by arrival."""

from __future__ import annotations

import gzip
import logging
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedIOBase
from itertools import islice
from pathlib import Path

from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.traces.formats import Row, TraceRequest, parser_for

_log = logging.getLogger("blockyard.traces")

MAX_LINE_BYTES = 16 * 2**20
_MAX_HASH_TOKENS = 2**14
"""Most tokens per hash id that are inferred; larger ones must be given."""


def read_trace(path: str | Path, *, first: int | None = None, hash_tokens: int | None = None) -> list[TraceRequest]:
    """Read a trace file; the requests are sorted by arrival.

    Formats: Mooncake's JSONL, which `TraceRecorder` also writes, Qwen-Bailian's JSONL, Azure's CSV, agent sessions of
    kv-cache-tester (one session per line) and `requests.jsonl` from runs of LLMServingSim. The format is detected from
    the content. Files may be compressed with gzip.

    Args:
        path: path of the trace file.
        first: number of requests to read from the start of the file; all if None.
        hash_tokens: tokens per hash id, for lines that do not say it; None to infer it from the lengths.

    Returns:
        The requests. Arrivals start at 0 and never decrease. All sessions of an agent trace start at 0.

    Raises:
        TraceError: the file cannot be read, its format is unknown, or a line is malformed; the message names file, line
            and problem.
        InvalidArgumentError: `first` or `hash_tokens` is less than 1.
    """
    for name, value in (("first", first), ("hash_tokens", hash_tokens)):
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} is {value}, must be at least 1")
    path = Path(path)
    numbered = list(islice(iter_trace(path), first))
    if not numbered:
        raise TraceError(f"{path}, line 1: the trace holds no requests")
    lines, rows = [line for line, _ in numbered], [row for _, row in numbered]
    return _in_order(path, rows, lines, hash_tokens)


def iter_trace(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the requests in the order of the file: line, time on the trace's clock in nanoseconds, and request.

    The first line that is not blank determines the format.

    Raises:
        TraceError: as for `read_trace`.
    """
    parse = None
    for number, text in open_trace(path):
        try:
            if parse is None:
                parse, has_header = parser_for(text)
                if has_header:
                    continue
            yield from ((number, row) for row in parse(text))
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None


def open_trace(path: Path) -> Iterator[tuple[int, str]]:
    """Yield `(line number, text)` of every line of a trace that is not blank.

    Raises:
        TraceError: the file cannot be read, or a line is too long or not text.
    """
    try:
        with path.open("rb") as file:
            compressed = file.peek(2)[:2] == b"\x1f\x8b"
            yield from _lines(path, gzip.GzipFile(fileobj=file) if compressed else file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read trace {path}: {reason}") from error


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


def _in_order(path: Path, rows: list[Row], lines: list[int], hash_tokens: int | None) -> list[TraceRequest]:
    """Sort requests by arrival and renumber `after`. Ties keep the order of the file."""
    order = sorted(range(len(rows)), key=lambda index: rows[index][0])
    place = {index: position for position, index in enumerate(order)}
    start = rows[order[0]][0]
    requests = [request for _, request in rows]
    size = float(hash_tokens or _infer_hash_tokens(path, requests, lines))
    found = [
        replace(
            request,
            arrival=(clock - start) / 1e9,
            hash_tokens=(request.hash_tokens or size) if request.hash_ids or request.output_hash_ids else 0.0,
            after=tuple(place[other] for other in request.after),
        )
        for clock, request in (rows[index] for index in order)
    ]
    _warn_of_few_ids(path, {lines[index]: request for index, request in zip(order, found, strict=True)})
    for index, request in zip(order, found, strict=True):
        if request.hash_ids and (len(request.hash_ids) - 1) * request.hash_tokens >= request.input_tokens:
            raise TraceError(
                f"{path}, line {lines[index]}: {len(request.hash_ids)} hash ids of {request.hash_tokens:g} tokens "
                f"for {request.input_tokens} tokens"
            )
    return found


def _warn_of_few_ids(path: Path, requests: dict[int, TraceRequest]) -> None:
    """Warn once if hash ids end before the last whole block of their prompts; `requests` are by line."""
    few = {
        line: one
        for line, one in requests.items()
        if one.hash_ids and len(one.hash_ids) < one.input_tokens // one.hash_tokens
    }
    if few:
        line = min(few)
        one = few[line]
        _log.warning(
            "%s, line %d: %d hash ids of %d tokens for %d tokens: what ids do not cover is not shared; such lines: %d",
            *(path, line, len(one.hash_ids), one.hash_tokens, one.input_tokens, len(few)),
        )


def _infer_hash_tokens(path: Path, requests: list[TraceRequest], lines: list[int]) -> int:
    """Infer the tokens per hash id from the lengths, for formats without this number; 0 if every request has it.

    In some traces a last, partial block has an id, in others it does not: all lines follow one of the two, or each line
    either. Of the numbers that fit every line, it is the roundest: the one with the most
    factors of two and five.

    Raises:
        TraceError: no number fits every line; the message names the first line that does not fit those before it.
    """
    places = [place for place, one in enumerate(requests) if one.hash_ids and not one.hash_tokens]
    shapes = [(requests[place].input_tokens, len(requests[place].hash_ids)) for place in places]
    if not shapes:
        return 0
    if sizes := _sizes_of(shapes):
        return max(sizes, key=lambda size: (_roundness(size), size))
    end = bisect_left(range(1, len(shapes) + 1), 1, key=lambda count: not _sizes_of(shapes[:count]))
    length, count = shapes[end]
    raise TraceError(
        f"{path}, line {lines[places[end]]}: {count} hash ids for {length} tokens: no number of tokens per id up to "
        f"{_MAX_HASH_TOKENS} fits this line and those before it; give hash_tokens (--hash-tokens)"
    )


def _sizes_of(shapes: list[tuple[int, int]]) -> list[int]:
    """Return the numbers of tokens per hash id that fit all lines, each with a length and a number of ids."""
    # With n ids: length // size == n for size in (length / (n + 1), length / n], and -(-length // size) == n for
    # size in [length / n, length / (n - 1)).
    whole = (max(length // (n + 1) + 1 for length, n in shapes), min(length // n for length, n in shapes))
    least = max(-(-length // n) for length, n in shapes)
    most = min((-(-length // (n - 1)) - 1 for length, n in shapes if n > 1), default=_MAX_HASH_TOKENS)
    for ranges in ([whole, (least, most)], [(whole[0], most)]):
        sizes = [size for low, high in ranges for size in range(low, min(high, _MAX_HASH_TOKENS) + 1)]
        if sizes:
            return sizes
    return []


def _roundness(size: int) -> int:
    """Return how often a number can be divided by two or five."""
    count = 0
    for factor in (2, 5):
        while size % factor == 0:
            size //= factor
            count += 1
    return count
