"""Compares what an operator sees of a program on caches, its recorded requests and metrics, with what happened."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

from blockyard.metrics import Collector, _Source
from blockyard.traces import TraceRecorder, read_trace

SECONDS = 0.0016
"""How far a recorded time may be from the true one: two roundings to milliseconds, and calls that take a little."""


@dataclass(eq=False)
class Recorded:
    """The expected recording of a request.

    Attributes:
        arrival: arrival time in seconds.
        keys: known keys of all full blocks of its prompt and answer; equal for equal blocks.
        prompt_blocks: number of the prompt's blocks among them.
        input_tokens: length of its prompt.
        output_tokens: lengths that its answer may have in the recording.
        is_certain: whether it must be recorded.
        was_cut: whether it may have ended earlier, in an abort that was interrupted.
    """

    arrival: float
    keys: list[Hashable]
    prompt_blocks: int
    input_tokens: int
    output_tokens: range = field(default=range(1, 2))
    is_certain: bool = True
    was_cut: bool = False


class Recording:
    """A recorder, and the expected contents of its file.

    Args:
        block_size: tokens per block.
        clock: returns the time in seconds.
        max_blocks: as for `TraceRecorder`.

    Attributes:
        recorder: the recorder.
        open: requests that have not ended, by name.
        requests: all of them.
    """

    def __init__(self, block_size: int, clock: Callable[[], float], max_blocks: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="recording-"))
        path = self.folder / ("trace.jsonl.gz" if max_blocks % 2 else "trace.jsonl")
        self.recorder = TraceRecorder(path, block_size=block_size, max_blocks=max_blocks, clock=clock)
        self._path, self._block_size, self._clock = path, block_size, clock
        self._forgets = max_blocks < 1 << 20
        self.open: dict[Hashable, Recorded] = {}
        self.requests: list[Recorded] = []

    def add(self, name: Hashable, values: list[int], *, is_certain: bool = True) -> Recorded:
        """Note the arrival of a request whose prompt has these values, each determined by all tokens up to it."""
        keys = self.keys_of(values)
        made = Recorded(self._clock(), keys, len(keys), len(values), is_certain=is_certain)
        self.requests.append(made)
        self.open[name] = made
        return made

    def finish(self, name: Hashable, values: list[int], output_tokens: range) -> None:
        """Note the end of a request whose prompt and answer have these values."""
        request = self.open.pop(name, None)
        if request is not None:
            request.output_tokens = range(
                1 if request.was_cut else max(1, output_tokens.start), max(2, output_tokens.stop)
            )
            request.keys[request.prompt_blocks :] = self.keys_of(values)[request.prompt_blocks :]

    def is_first(self, request: Recorded) -> bool:
        """Whether all times are relative to this request's."""
        return request is self.requests[0]

    def keys_of(self, values: list[int]) -> list[Hashable]:
        """The key of each full block: the value of its last token."""
        return list(values[self._block_size - 1 :: self._block_size])

    def check(self) -> None:
        """Close the recorder, and compare its file with what has happened."""
        assert self.recorder.is_recording, "recording has stopped"
        assert not self.recorder._open.keys() - self.open.keys(), "requests that have ended are kept open"
        self.recorder.close()
        if not self._path.stat().st_size:
            assert not any(request.is_certain for request in self.requests), "nothing is recorded"
            return
        rows, left = read_trace(self._path), iter(self.requests)
        start = self.requests[0].arrival
        numbers: dict[Hashable, int] = {}
        keys: dict[int, Hashable] = {}
        for row in rows:
            for request in left:
                if abs(request.arrival - start - row.arrival) < SECONDS:
                    break
                assert not request.is_certain, f"{request} is not recorded"
            else:
                raise AssertionError(f"{row} was never added")
            found = [*row.hash_ids, *row.output_hash_ids]
            assert row.input_tokens == request.input_tokens, f"{row} is not {request}"
            assert row.output_tokens in request.output_tokens, f"{row} has not the answer of {request}"
            assert len(row.hash_ids) == request.prompt_blocks, f"{row} has not the blocks of {request}"
            computed = (row.input_tokens + row.output_tokens - 1) // self._block_size
            assert len(found) in {request.prompt_blocks, computed}, f"{row} has not the blocks of its answer"
            for number, key in zip(found, request.keys, strict=False):
                assert keys.setdefault(number, key) == key, f"block {number} is two, one of them in {row}"
                assert self._forgets or numbers.setdefault(key, number) == number, f"{row} misses block {numbers[key]}"
        assert not any(request.is_certain for request in left), "the last requests are not recorded"

    def close(self) -> None:
        """Release everything."""
        self.recorder.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Scrapes:
    """The metrics of some objects, whose counters never decrease.

    Args:
        sources: of the `Collector`.
    """

    def __init__(self, *sources: _Source) -> None:
        self._collector = Collector(*sources, sample_rate=1.0, tenants={"a": b"a tenant", "none": None})
        self._before: dict[tuple[str, str], float] = {}

    def scrape(self) -> dict[str, float]:
        """Return the sums over all labels by name."""
        sums: dict[str, float] = defaultdict(float)
        seen = set()
        for family in self._collector.collect():
            for sample in family.samples:
                at = (sample.name, json.dumps(sample.labels, sort_keys=True))
                assert at not in seen, f"{at} occurs twice"
                seen.add(at)
                if family.type in {"counter", "histogram"}:
                    assert sample.value >= self._before.get(at, 0.0), f"{at} goes back to {sample.value}"
                    self._before[at] = sample.value
                sums[sample.name.removeprefix("blockyard_")] += sample.value
        return sums
