"""Agents whose blocks are pinned for a time after each turn, in virtual time: job times, compared with plain eviction.

    python benches/bench_retention.py [TRACE] [--first 700] [--ttl 0,5,30,120]

After each turn but the last, the prompt's blocks are pinned for `--ttl` seconds, as in Continuum (arXiv
2511.02230); 0 leaves them to the eviction policy. A job is a session: the sum of its requests' latencies, without the
time between turns. TRACE is kv-cache-tester's sessions: `claude_code.jsonl.gz` in the folder that BLOCKYARD_TRACES
names (../shared/traces). The figures are deterministic.
"""

from __future__ import annotations

import argparse
import heapq
import os
from pathlib import Path

import numpy as np

from blockyard.errors import BlockyardError, InvariantError
from blockyard.tools.replay import engine
from blockyard.tools.replay.engine import EngineOptions, Times
from blockyard.tools.replay.step_time import LinearStepTime
from blockyard.traces import TraceRequest, read_trace

STEP_TIME = LinearStepTime(fixed=0.01, prefill_token=4e-5, decode_row=2e-5, context_token=9e-8)
ENGINES = {  # device blocks, host blocks, sessions at a time
    (15_000, 0, 8),
    (30_000, 0, 8),
    (15_000, 40_000, 8),
    (30_000, 0, 16),
}


class Retaining(engine._Replay):  # noqa: SLF001 (what no engine offers)
    """A replay that pins the blocks that a session's next turn will hit."""

    def __init__(self, requests: list[TraceRequest], options: EngineOptions, ttl: float) -> None:
        super().__init__(requests, options, STEP_TIME, None)
        self._ttl = ttl
        self._pins: list[tuple[float, int]] = []
        self.refused = 0
        self._goes_on = {other for request in requests for other in request.after}
        self._tell, self._clients.answer = self._clients.answer, self._answer  # type: ignore[method-assign]

    def _answer(self, number: int, now: float) -> None:
        self._tell(number, now)
        if self._ttl and number in self._goes_on:
            try:
                row = self._requests[number]
                pin, _ = self._manager.pins.pin_prompt(self._text(number)[: row.input_tokens])
                heapq.heappush(self._pins, (now + self._ttl, pin))
            except BlockyardError:  # half of the device is already pinned
                self.refused += 1

    def _land(self) -> None:
        while self._pins and self._pins[0][0] <= self._time.now:
            self._manager.pins.unpin(heapq.heappop(self._pins)[1])
        super()._land()


def jobs(requests: list[TraceRequest], times: Times) -> float:
    """Return the mean total time of a session's requests, in seconds."""
    sessions = np.array([-1 if request.session is None else request.session for request in requests])
    latency = np.nan_to_num(times.last_token - times.arrival)
    return float(np.mean([latency[sessions == session].sum() for session in np.unique(sessions)]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces"))
    parser.add_argument("trace", nargs="?", type=Path, default=traces / "claude_code.jsonl.gz")
    parser.add_argument("--first", type=int, default=700)
    parser.add_argument("--ttl", default="0,5,30,120")
    arguments = parser.parse_args()
    if not arguments.trace.exists():
        print(f"no trace {arguments.trace}: nothing to measure")
        return
    requests = read_trace(arguments.trace, first=arguments.first)
    print(" device    host sessions   ttl     hits  TTFT, s    job, s  pins refused")
    for device, host, sessions in sorted(ENGINES):
        options = EngineOptions(device, host, max_concurrent_sessions=sessions)
        for ttl in map(float, arguments.ttl.split(",")):
            replay = Retaining(requests, options, ttl)
            head = f"{device:>7} {host:>7} {sessions:>8} {ttl:>5g}"
            try:
                times = replay.run()
            except InvariantError:
                print(f"{head}  stuck: what waits needs the blocks that are pinned")
                continue
            taken = f"{times.hit_rate:>8.2%} {times.ttft.mean():>8.3f} {jobs(requests, times):>9.1f}"
            print(f"{head} {taken} {replay.refused:>13}")


if __name__ == "__main__":
    main()
