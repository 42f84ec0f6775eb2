"""`TraceRequest` and trace formats: each turns a line into requests, with times in nanoseconds of the trace's clock."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, TypeAlias

MAX_TOKENS = 2**31 - 1
Hint: TypeAlias = Literal["over", "tool_call", "turn"]
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_HEADER = ",".join(AZURE_COLUMNS)
BAILIAN_BLOCK_TOKENS = 16
MAX_SESSION_DEPTH = 8
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")

_HINTS: dict[object, Hint] = {"tool_use": "tool_call", "end_turn": "turn"}


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds since the trace's first request.
        input_tokens: prompt length in tokens, at least 1.
        output_tokens: tokens generated, at least 1.
        hash_ids: ids of the prompt's blocks; prompts with equal leading ids share their beginning. Empty if unknown.
        hash_tokens: tokens that one hash id covers; 0 if there are no ids.
        session: number of the conversation that the request belongs to; None if unknown.
        after: indices, in the trace, of the requests whose answers this one waits for. Then `arrival` is when it
            arrived in the recorded run.
        delay: seconds from the last of these answers to this request.
        output_hash_ids: ids of the full blocks after those of `hash_ids`, whose last tokens were generated. Empty if
            unknown: only a `TraceRecorder` writes them.
        hint: what the engine knew when the answer ended: `"tool_call"`, `"turn"` or `"over"`; None if unknown.
    """

    arrival: float
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()
    hash_tokens: float = 0.0
    session: int | None = None
    after: tuple[int, ...] = ()
    delay: float = 0.0
    output_hash_ids: Sequence[int] = ()
    hint: Hint | None = None


# A request and its time on the trace's clock, in nanoseconds: seven decimals of a second do not fit in a float.
Row = tuple[int, TraceRequest]
Parser = Callable[[str], Iterable[Row]]


def parser_for(text: str) -> tuple[Parser, bool]:
    """Choose the parser by the first line that has text; also says if that line is a header.

    Raises:
        ValueError: no format has such a first line.
    """
    if text == AZURE_HEADER:
        return _azure, True
    if not text.startswith("{"):
        raise ValueError(f"neither a JSON object nor Azure's header {AZURE_HEADER!r}, but {_shorten(text)}")
    fields = _json_object(text)
    if "requests" in fields:
        return _Sessions().read, False
    if "chat_id" in fields:
        return _Chats().read, False
    if "input_toks" in fields:
        return _serving_run, False
    return _Mooncake().read, False


class _Mooncake:
    """Lines with `timestamp` in milliseconds, two lengths and, optionally, hash ids and the name of a session.

    A session's later lines may have a `delay` in milliseconds after the previous answer instead of a timestamp.
    """

    def __init__(self) -> None:
        self._session_of: dict[int | str, int] = {}
        self._last_of: dict[int, tuple[int, int]] = {}  # index and time of each session's last line
        self._rows = 0

    def read(self, text: str) -> Iterable[Row]:
        fields = _json_object(text, "input_length", "output_length")
        key = "session" if fields.get("session") is not None else "session_id"
        name, session = fields.get(key), None
        if name is not None:
            if type(name) not in (int, str):
                raise ValueError(f"{key} is {_shorten(name)}, not a number or a name")
            session = self._session_of.setdefault(name, len(self._session_of))
        request, clock = _request(fields, session=session), 0
        last = None if session is None else self._last_of.get(session)
        if "timestamp" in fields:
            clock = round(_number(fields, "timestamp", "milliseconds") * 10**6)
        elif "delay" in fields and last is not None:
            delay = _number(fields, "delay", "milliseconds") / 1e3
            request, clock = replace(request, after=(last[0],), delay=delay), last[1] + round(delay * 10**9)
        else:
            raise ValueError("without timestamp")
        if session is not None:
            self._last_of[session] = self._rows, clock
        self._rows += 1
        return [(clock, request)]


def _request(fields: dict[str, Any], hash_tokens: float = 0.0, session: int | None = None) -> TraceRequest:
    """Parse the fields that Mooncake and similar formats share."""
    block_size = fields.get("block_size")
    return TraceRequest(
        arrival=0.0,
        input_tokens=_length("input_length", fields["input_length"]),
        output_tokens=_length("output_length", fields["output_length"]),
        hash_ids=_hash_ids("hash_ids", fields),
        hash_tokens=hash_tokens if block_size is None else float(_length("block_size", block_size)),
        session=session,
        output_hash_ids=_hash_ids("output_hash_ids", fields) or (),
    )


class _Chats:
    """Qwen-Bailian's lines: like Mooncake's, but with `timestamp` in seconds and the chat that each turn continues."""

    def __init__(self) -> None:
        self._session_of: dict[int, int] = {}

    def read(self, text: str) -> Iterable[Row]:
        fields = _json_object(text, "chat_id", "timestamp", "input_length", "output_length")
        chat, parent = fields["chat_id"], fields.get("parent_chat_id", -1)
        for name, value in (("chat_id", chat), ("parent_chat_id", parent)):
            if type(value) is not int or not -1 <= value < 2**63:
                raise ValueError(f"{name} is {_shorten(value)}, not the number of a chat")
        session = self._session_of.get(parent, chat)
        self._session_of[chat] = session
        clock = round(_number(fields, "timestamp", "seconds") * 10**9)
        return [(clock, _request(fields, BAILIAN_BLOCK_TOKENS, session))]


def _serving_run(text: str) -> Iterable[Row]:
    """Parse one request of a measured run of LLMServingSim: lengths, and arrival in seconds."""
    fields = _json_object(text, "input_toks", "output_toks", "arrival_time")
    request = TraceRequest(
        arrival=0.0,
        input_tokens=_length("input_toks", fields["input_toks"]),
        output_tokens=_length("output_toks", fields["output_toks"]),
    )
    return [(round(_number(fields, "arrival_time", "seconds") * 10**9), request)]


def _azure(text: str) -> Iterable[Row]:
    """Parse one row `TIMESTAMP,ContextTokens,GeneratedTokens`."""
    cells = text.split(",")
    if len(cells) != len(AZURE_COLUMNS):
        raise ValueError(f"has {len(cells)} columns, not {len(AZURE_COLUMNS)}")
    lengths = []
    for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        if not re.fullmatch(r"[0-9]{1,12}", cell):
            raise ValueError(f"{name} is {_shorten(cell)}, not a number of tokens")
        lengths.append(_length(name, int(cell)))
    return [(_azure_clock(cells[0]), TraceRequest(0.0, lengths[0], lengths[1]))]


class _Sessions:
    """The agent sessions of kv-cache-tester, one per line, with think times, and sub-agents with the session's ids.

    A request waits for its agent's previous answer; a sub-agent's first request for the answer that started the
    sub-agent. A request after a sub-agent also waits for it, if it arrived after the sub-agent's recorded end.
    """

    def __init__(self) -> None:
        self._sessions = self._rows = 0
        self._next_id = 0

    def read(self, text: str) -> Iterator[Row]:
        fields = _json_object(text, "block_size", "requests")
        block_size = _length("block_size", fields["block_size"])
        session = _Session(self._sessions, self._rows, self._next_id, float(block_size))
        session.read_agent(fields["requests"], start=0.0, ended=0.0, after=(), depth=0)
        self._sessions += 1
        self._rows += len(session.rows)
        self._next_id = session.end_id
        return iter(session.rows)


class _Session:
    """The rows of one session, and their block ids.

    Args:
        number: the session's number.
        first_row: index of its first row in the trace.
        first_id: lowest block id of the session; lower ids belong to other sessions.
        hash_tokens: number of tokens in a block.
    """

    def __init__(self, number: int, first_row: int, first_id: int, hash_tokens: float) -> None:
        self._number, self._first_row, self._first_id, self._hash_tokens = number, first_row, first_id, hash_tokens
        self.rows: list[Row] = []
        self.end_id = first_id

    def read_agent(
        self, requests: object, *, start: float, ended: float, after: tuple[int, ...], depth: int
    ) -> tuple[int, ...]:
        """Read the requests of one agent, whose clock starts at `start`; return the requests whose answers end it.

        The answers `after`, which its first request waits for, arrived at `ended`.
        """
        if not isinstance(requests, list) or depth > MAX_SESSION_DEPTH:
            raise ValueError(f"requests is {_shorten(requests)}, not a list of at most {MAX_SESSION_DEPTH} levels")
        last, final = start, _last_request(requests)
        sub_agents: list[tuple[float, tuple[int, ...]]] = []
        for fields in requests:
            if not isinstance(fields, dict) or "t" not in fields:
                raise ValueError(f"a request is {_shorten(fields)}, not an object with t")
            now = start + _number(fields, "t", "seconds")
            if "requests" in fields:
                parts = self.read_agent(fields["requests"], start=now, ended=ended, after=after, depth=depth + 1)
                duration = _number(fields, "duration_ms", "milliseconds") if "duration_ms" in fields else 0
                sub_agents.append((now + duration / 1e3, parts))
                continue
            now = max(now, last)
            done = [agent for agent in sub_agents if agent[0] <= now]
            sub_agents = [agent for agent in sub_agents if agent[0] > now]
            waits = (*after, *(part for _, parts in done for part in parts))
            ended = max([ended, *(end for end, _ in done)])
            index = self._first_row + len(self.rows)
            request = self._request(fields, waits, max(now - ended, 0.0) if waits else 0.0)
            self.rows.append((round(now * 1e9), replace(request, hint="over") if fields is final else request))
            after, last = (index,), now
            ended = now + _number(fields, "api_time", "seconds") if "api_time" in fields else now
        return (*after, *(part for _, parts in sub_agents for part in parts))

    def _request(self, fields: dict[str, Any], after: tuple[int, ...], delay: float) -> TraceRequest:
        ids, blocks = array("q"), fields.get("blocks", [])
        if not isinstance(blocks, list):
            raise ValueError(f"blocks is {_shorten(blocks)}, not a list of [first id, count] pairs")
        for block in blocks:
            if not (isinstance(block, list) and len(block) == 2 and all(type(part) is int for part in block)):
                raise ValueError(f"blocks has {_shorten(block)}, not [first id, count]")
            first, count = block
            if not (0 <= first < 2**40 and count >= 0 and len(ids) + count <= MAX_TOKENS // self._hash_tokens):
                raise ValueError(f"blocks has {_shorten(block)}, not a non-negative id and a count")
            ids.extend(range(self._first_id + first, self._first_id + first + count))
            self.end_id = max(self.end_id, self._first_id + first + count)
        return TraceRequest(
            arrival=0.0,
            input_tokens=_session_length("in", fields),
            output_tokens=_session_length("out", fields),
            hash_ids=ids,
            hash_tokens=self._hash_tokens,
            session=self._number,
            after=after,
            delay=delay,
            hint=_HINTS.get(fields.get("stop")) if isinstance(fields.get("stop"), str) else None,
        )


def _last_request(fields: list[Any]) -> object:
    """Return an agent's last request, after which its conversation is over; None if it has none."""
    own = (entry for entry in reversed(fields) if isinstance(entry, dict) and "requests" not in entry)
    return next(own, None)


def _json_object(text: str, *needed: str) -> dict[str, Any]:
    """Parse one JSON object that has the fields `needed`."""
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("not a JSON object: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {_shorten(text)}")
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"without {', '.join(missing)}")
    return fields


def _number(fields: dict[str, Any], name: str, unit: str) -> float:
    """Check and return a time."""
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise ValueError(f"{name} is {_shorten(value)}, not {unit}")
    return value


def _hash_ids(name: str, fields: dict[str, Any]) -> array[int]:
    ids = fields.get(name, [])
    if not isinstance(ids, list) or not all(type(entry) is int and 0 <= entry < 2**63 for entry in ids):
        raise ValueError(f"{name} is {_shorten(ids)}, not a list of non-negative ids")
    return array("q", ids)


def _azure_clock(cell: str) -> int:
    """Return the nanoseconds since 1970 of a UTC time with up to nine decimals; `datetime` has only six."""
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
    """Check and return a number of tokens."""
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {_shorten(value)}, not a number of tokens from 1 to {MAX_TOKENS}")
    return value


def _session_length(name: str, fields: dict[str, Any]) -> int:
    """Check and return a number of tokens in a session, which may be 0 or missing."""
    value = fields.get(name, 0)
    return _length(name, 1 if value == 0 else value)


def _shorten(value: object) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**64:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
