"""`blockyard record`: runs a program whose engines record their requests, and sums up what they recorded."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from types import FrameType
from typing import TextIO

from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.tools.cli.result import Result
from blockyard.traces.reader import iter_trace
from blockyard.traces.recorder import RECORD_VARIABLE, numbered_path

__all__ = ["record"]


def record(options: argparse.Namespace) -> Result:
    """Run a program, and sum up what its engines recorded."""
    code, found, problem = run_recorded(options.path, options.program), {}, ""
    for path in recordings(options.path):
        try:
            found[path] = read_contents(path)
        except TraceError as error:  # noqa: PERF203 (one file per engine)
            problem = str(error)
    if not any(contents.requests for contents in found.values()):
        problem = problem or f"{options.path} has no requests: does {options.program[0]} use Blockyard?"

    def show(stream: TextIO) -> None:
        for path, contents in found.items():
            share = contents.repeated_blocks / max(1, contents.blocks)
            print(
                f"{path}: {contents.requests} requests in {contents.seconds:.1f} s, {contents.input_tokens} prompt "
                f"tokens, {contents.output_tokens} generated; {share:.1%} of the prompts' blocks were seen before",
                file=stream,
            )

    data = [{"path": str(path), **asdict(contents)} for path, contents in found.items()]
    return Result({"recordings": data}, show, code, problem)


def run_recorded(path: Path, program: Sequence[str]) -> int:
    """Run a program to its end, with the environment variable that makes its engines record to `path`.

    SIGTERM and SIGHUP are passed on to it. A terminal sends Ctrl-C to the program as well.

    Returns:
        Its exit code as a shell reports it: 128 + n after signal n.

    Raises:
        InvalidArgumentError: the file exists, its folder is missing, or the program cannot be started.
    """
    if path.exists():
        raise InvalidArgumentError(f"cannot record to {path}: it exists")
    if not path.absolute().parent.is_dir():
        raise InvalidArgumentError(f"cannot record to {path}: {path.absolute().parent} is not a folder")
    relay = _Relay()
    with relay.installed():
        try:
            variables = os.environ | {RECORD_VARIABLE: str(path.absolute())}
            process = subprocess.Popen(program, env=variables)  # noqa: S603 (the user's program)
        except OSError as error:
            raise InvalidArgumentError(f"cannot run {program[0]}: {error.strerror or error}") from error
        relay.start(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


def recordings(path: Path) -> list[Path]:
    """Return the files of all engines that recorded to `path`."""
    return list(takewhile(Path.exists, (numbered_path(path, number) for number in count(1))))


@dataclass(frozen=True)
class TraceContents:
    """Totals of a trace.

    Attributes:
        requests: number of requests.
        seconds: time from the first request to the last.
        input_tokens: number of tokens in all prompts.
        output_tokens: number of generated tokens.
        blocks: number of full blocks in all prompts.
        repeated_blocks: number of blocks seen in an earlier request, which an unlimited cache would hit.
    """

    requests: int = 0
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    repeated_blocks: int = 0


def read_contents(path: Path) -> TraceContents:
    """Sum up a recording; one without requests has zeros.

    Raises:
        TraceError: the file cannot be read, or a line is malformed.
    """
    seen: set[int] = set()
    requests = inputs = outputs = blocks = repeated = 0
    first: int | None = None
    last = 0
    for _, (clock, request) in iter_trace(path):
        first = clock if first is None else min(first, clock)
        last = max(last, clock)
        requests += 1
        inputs += request.input_tokens
        outputs += request.output_tokens
        blocks += len(request.hash_ids)
        repeated += sum(map(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids, request.output_hash_ids)
    return TraceContents(requests, (last - (first or 0)) / 1e9, inputs, outputs, blocks, repeated)


class _Relay:
    """Passes signals on to the program instead of ending first; also those that arrive before the program runs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []

    def start(self, process: subprocess.Popen[bytes]) -> None:
        """Pass earlier and later signals on to this process."""
        self._process = process
        self._send()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals within the context."""
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _is_handled(number)]
        before = [signal.signal(number, self._handle) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:  # the terminal sends that one to the program as well
            self._waiting.append(number)
            self._send()

    def _send(self) -> None:
        while self._process is not None and self._waiting:
            self._process.send_signal(self._waiting.pop(0))


def _is_handled(number: int) -> bool:
    """Return False for ignored signals: `nohup` ignores SIGHUP."""
    return signal.getsignal(number) is not signal.SIG_IGN
