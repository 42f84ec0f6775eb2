"""`EngineRun`: the times of an engine's requests, recorded or predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, TraceError

__all__ = ["EngineLimits", "EngineRun", "ranks_of_run"]

_COUNTS: Final = ("input_toks", "output_toks")
_TIMES: Final = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine that decide which requests run in a step.

    Attributes:
        num_blocks: KV-cache blocks on the device.
        block_size: tokens of a block.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step.
        async_scheduling: whether each step is scheduled while the previous one is computed, as vLLM does by default.
            Then a request waits for up to one more step, and a freed seat stays empty for one step.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True

    @classmethod
    def of_run(cls, path: str | Path, *, num_blocks: int | None = None, **usual: int) -> EngineLimits:
        """Read the limits of a recorded run from the `meta.json` beside its `requests.jsonl`.

        Args:
            path: `requests.jsonl` of the run.
            num_blocks: number of blocks of the run; None for the file's.
            usual: limits by their names, for those that the file does not have.

        Raises:
            TraceError: `meta.json` cannot be read.
            InvalidArgumentError: the number of blocks is neither given nor in the file, or a limit is out of range.
        """
        meta = _read_meta(Path(path).parent / "meta.json")
        resolved = meta.get("resolved_config", {})
        parts = (meta.get("kv_cache", {}), meta.get("engine_kwargs", {}), resolved.get("scheduler_config", {}))
        known = usual | {key: value for part in parts for key, value in part.items() if value is not None}
        known["num_blocks"] = num_blocks or known.get("num_gpu_blocks")
        if known["num_blocks"] is None:
            raise InvalidArgumentError(
                f"{path} has no meta.json beside it with num_gpu_blocks: give the number of blocks that the run had"
            )
        limits = {one.name: known[one.name] for one in fields(cls) if one.name in known}
        for name, value in limits.items():
            if name != "async_scheduling":
                _check_count(path, name, value)
        return cls(**limits)


@dataclass(frozen=True, eq=False)
class EngineRun:
    """Lengths and times of requests, in order of arrival, in seconds. Each is an array `[requests]`.

    Attributes:
        input_tokens: prompt lengths.
        output_tokens: tokens generated.
        arrival: when the server received the request; on another clock than the rest.
        queued: when the scheduler received it.
        scheduled: when its first step was scheduled.
        first_token: when its first token was ready.
        last_token: when its last token was ready.
    """

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrival: NDArray[np.float64]
    queued: NDArray[np.float64] = field(repr=False)
    scheduled: NDArray[np.float64] = field(repr=False)
    first_token: NDArray[np.float64] = field(repr=False)
    last_token: NDArray[np.float64] = field(repr=False)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival)

    @classmethod
    def read(cls, path: str | Path) -> EngineRun:
        """Read the `requests.jsonl` of a run recorded by LLMServingSim's `bench`.

        Each line has `input_toks`, `output_toks`, `arrival_time`, `queued_ts`, `scheduled_ts`, `first_token_ts` and
        `last_token_ts`; vLLM reports the last four per request, in this order of time.

        Raises:
            TraceError: the file cannot be read or a line is malformed.
        """
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"cannot read run {path}: {getattr(error, 'strerror', None) or error}") from error
        rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise TraceError(f"{path}, line 1: the run holds no requests")
        rows.sort(key=lambda row: row[2])
        columns = np.array(rows, np.float64).T
        counts, times = columns[:2].astype(np.int64), columns[2:]
        return cls(counts[0], counts[1], times[0] - times[0, 0], *(times[1:] - times[1].min()))

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Seconds from queue to first token, `[requests]`."""
        return self.first_token - self.queued

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Mean seconds between two tokens, of the requests with at least two."""
        many = self.output_tokens > 1
        found: NDArray[np.float64] = (self.last_token - self.first_token)[many] / (self.output_tokens[many] - 1)
        return found

    @property
    def latency(self) -> NDArray[np.float64]:
        """Seconds from queue to last token, `[requests]`."""
        return self.last_token - self.queued

    def part(self, rows: slice) -> EngineRun:
        """Return the run of some of the requests."""
        return EngineRun(
            self.input_tokens[rows],
            self.output_tokens[rows],
            self.arrival[rows],
            self.queued[rows],
            self.scheduled[rows],
            self.first_token[rows],
            self.last_token[rows],
        )


def ranks_of_run(path: str | Path) -> int | None:
    """Return how many accelerators the engine of a recorded run had, from the `meta.json` beside it; None if not there.

    Args:
        path: `requests.jsonl` of the run.

    Raises:
        TraceError: `meta.json` cannot be read.
        InvalidArgumentError: the number is out of range.
    """
    found: int | None = _read_meta(Path(path).parent / "meta.json").get("engine_kwargs", {}).get("tensor_parallel_size")
    if found is not None:
        _check_count(path, "tensor_parallel_size", found)
    return found


def _check_count(path: str | Path, name: str, value: object) -> None:
    if not (type(value) is int and value > 0):
        raise InvalidArgumentError(f"{name} of {path} is {value!r}, must be a whole number of at least 1")


def check_limits(limits: EngineLimits) -> None:
    """Check the limits that the scheduler does not check.

    Raises:
        InvalidArgumentError: the cache is empty.
    """
    if limits.num_blocks < 1 or limits.block_size < 1:
        raise InvalidArgumentError(
            f"num_blocks is {limits.num_blocks}, block_size {limits.block_size}, each must be at least 1"
        )


def _read_meta(path: Path) -> dict[str, Any]:
    """Read a `meta.json`; empty if there is none."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    parts = ("kv_cache", "engine_kwargs", "resolved_config")
    if not isinstance(found, dict) or not all(isinstance(found.get(part, {}), dict) for part in parts):
        raise TraceError(f"{path}: not the description of a run")
    return found


def _row(path: str | Path, number: int, line: str) -> tuple[float, ...]:
    try:
        row = json.loads(line)
        missing = [name for name in (*_COUNTS, *_TIMES) if name not in row]
    except (ValueError, TypeError, RecursionError):
        raise TraceError(f"{path}, line {number}: not a JSON object") from None
    if missing:
        raise TraceError(f"{path}, line {number}: without {', '.join(missing)}")
    for name in _COUNTS:
        if type(row[name]) is not int or not 1 <= row[name] < 2**31:
            raise TraceError(f"{path}, line {number}: {name} is {row[name]!r}, not a number of tokens")
    for name in _TIMES:
        if type(row[name]) not in {int, float} or not abs(row[name]) < 2**53:
            raise TraceError(f"{path}, line {number}: {name} is {row[name]!r}, not seconds")
    for name, after in pairwise(_TIMES[1:]):  # the first is on another clock
        if row[after] < row[name]:
            raise TraceError(f"{path}, line {number}: {after} is {row[after]!r}, before {name}, {row[name]!r}")
    return tuple(row[name] for name in (*_COUNTS, *_TIMES))
