"""Request traces: Mooncake's JSONL and Azure's CSV, recognised by content.

A trace gives the arrival and length of each request, without text. Mooncake's also gives hash ids: each stands for the
next `hash_tokens` tokens of a prompt, so prompts with equal leading ids begin alike.

Only the standard library is used. Every line and every number is bounded before use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from blockyard.errors import InvalidArgumentError, TraceError

MAX_LINE_BYTES = 16 * 2**20
MAX_TOKENS = 2**31 - 1
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_HEADER = ",".join(AZURE_COLUMNS)
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")
_HASH_BLOCKS = tuple(2**n for n in range(3, 15))

# A request and its time on the trace's clock, in nanoseconds: seven digits of a second do not fit a float.
_Row = tuple[int, "TraceRequest"]


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds since the trace's first request.
        input_tokens: prompt length in tokens, at least 1.
        output_tokens: tokens generated, at least 1.
        hash_ids: ids of the prompt's blocks; two prompts with equal leading ids begin alike. Empty if unknown.
        hash_tokens: tokens that one hash id stands for; a fraction after scaling, 0 if there are no ids.
    """

    arrival: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: float = 0.0


def read_trace(path: str | Path, *, first: int | None = None) -> list[TraceRequest]:
    """Read a trace file, in order of arrival.

    Args:
        path: a Mooncake JSONL or an Azure CSV file; the content decides which.
        first: requests to read from the head of the file; all if None.

    Returns:
        The requests; arrivals start at 0 and never go back.

    Raises:
        TraceError: the file cannot be read, has neither format, or a line is malformed; the message names file, line
            and problem.
        InvalidArgumentError: `first` is less than 1.
    """
    if first is not None and first < 1:
        raise InvalidArgumentError(f"asked for the first {first} requests of a trace, at least 1 is needed")
    path = Path(path)
    try:
        with path.open("rb") as file:
            rows = list(islice(_parse(path, file), first))
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error
    if not rows:
        raise TraceError(f"{path}, line 1: the trace holds no requests")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    hash_tokens = _hash_block([request for _, request in rows])
    return [
        replace(request, arrival=(clock - start) / 1e9, hash_tokens=hash_tokens if request.hash_ids else 0.0)
        for clock, request in rows
    ]


def scale_lengths(requests: list[TraceRequest], scale: float) -> list[TraceRequest]:
    """Multiply all lengths by one factor, rounding up, so that no request vanishes.

    Args:
        requests: what `read_trace` returned.
        scale: factor for prompts, outputs and the tokens of one hash id, above 0.

    Returns:
        New requests; arrivals and hash ids are as before.

    Raises:
        InvalidArgumentError: `scale` is not a positive number, or makes a length larger than a trace may hold.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(f"lengths cannot be scaled by {scale}, a positive number is needed")
    longest = max((max(request.input_tokens, request.output_tokens) for request in requests), default=0)
    if longest * scale > MAX_TOKENS:
        raise InvalidArgumentError(f"a length of {longest} tokens times {scale} is more than {MAX_TOKENS}")
    return [
        replace(
            request,
            input_tokens=math.ceil(request.input_tokens * scale),
            output_tokens=math.ceil(request.output_tokens * scale),
            hash_tokens=request.hash_tokens * scale,
        )
        for request in requests
    ]


def _parse(path: Path, file: BinaryIO) -> Iterator[_Row]:
    """Yield the requests of an open file; the first line with text decides the format."""
    parse: Callable[[str], _Row] | None = None
    for number, text in _lines(path, file):
        try:
            if parse is None:
                parse = _parser_for(text)
                if parse is _azure_request:
                    continue
            yield parse(text)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
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


def _parser_for(text: str) -> Callable[[str], _Row]:
    """Choose the parser by the first line that has text."""
    if text.startswith("{"):
        return _mooncake_request
    if text == AZURE_HEADER:
        return _azure_request
    raise ValueError(f"neither a JSON object (Mooncake) nor the header {AZURE_HEADER!r} (Azure), but {_shorten(text)}")


def _mooncake_request(text: str) -> _Row:
    """Read one JSON object with `timestamp` in milliseconds, two lengths and, optionally, hash ids."""
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("not a JSON object: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {_shorten(text)}")
    missing = [name for name in ("timestamp", "input_length", "output_length") if name not in fields]
    if missing:
        raise ValueError(f"without {', '.join(missing)}")
    stamp = fields["timestamp"]
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 2**53:
        raise ValueError(f"timestamp is {_shorten(stamp)}, not milliseconds")
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(entry) is int and 0 <= entry < 2**63 for entry in ids):
        raise ValueError(f"hash_ids is {_shorten(ids)}, not a list of ids from 0")
    return round(stamp * 10**6), TraceRequest(
        arrival=0.0,
        input_tokens=_length("input_length", fields["input_length"]),
        output_tokens=_length("output_length", fields["output_length"]),
        hash_ids=tuple(ids),
    )


def _azure_request(text: str) -> _Row:
    """Read one row `TIMESTAMP,ContextTokens,GeneratedTokens`."""
    cells = text.split(",")
    if len(cells) != len(AZURE_COLUMNS):
        raise ValueError(f"has {len(cells)} columns, not {len(AZURE_COLUMNS)}")
    lengths = []
    for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        if not re.fullmatch(r"[0-9]{1,12}", cell):
            raise ValueError(f"{name} is {_shorten(cell)}, not a number of tokens")
        lengths.append(_length(name, int(cell)))
    return _azure_clock(cells[0]), TraceRequest(0.0, lengths[0], lengths[1])


def _azure_clock(cell: str) -> int:
    """Nanoseconds since 1970 of a UTC time whose fraction may have seven digits, which `datetime` cannot hold."""
    match = _AZURE_TIME.fullmatch(cell)
    if match is None:
        raise ValueError(f"TIMESTAMP is {_shorten(cell)}, not YYYY-MM-DD hh:mm:ss.fffffff")
    day, time, fraction = match.groups()
    try:
        whole = datetime.fromisoformat(f"{day} {time}") - datetime(1970, 1, 1)
    except ValueError as error:
        raise ValueError(f"TIMESTAMP is {_shorten(cell)}: {error}") from None
    return (whole.days * 86_400 + whole.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))


def _length(name: str, value: object) -> int:
    """Check one count of tokens."""
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {_shorten(value)}, not a number of tokens from 1 to {MAX_TOKENS}")
    return value


def _hash_block(requests: list[TraceRequest]) -> float:
    """Find the tokens of one hash id from the lengths, since no format gives it.

    Traces differ in whether a last, partial block has an id; the power of two that explains most requests wins.
    """
    counts = {
        size: sum(
            len(request.hash_ids) in (request.input_tokens // size, -(-request.input_tokens // size))
            for request in requests
            if request.hash_ids
        )
        for size in _HASH_BLOCKS
    }
    return float(max(counts, key=lambda size: (counts[size], size)))


def _shorten(value: object) -> str:
    """Show a value in a message, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**64:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
