"""Writes a trace while an engine serves: times, lengths, and which prompts share a beginning. No text, no keys."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, count, starmap
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import CacheGroup, export_keys
from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.traces.formats import MAX_TOKENS
from blockyard.traces.groups import GROUPS_FIELD, group_fields
from blockyard.workers.ownership import Process
from blockyard.workers.threads import start_worker

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RECORD_VARIABLE", "TokenRecorder", "TraceRecorder", "numbered_path", "record_from_environment"]

RECORD_VARIABLE: Final = "BLOCKYARD_RECORD"
"""The environment variable that names the file to record to."""
_FLUSH_BYTES: Final = 256 << 10
_FLUSH_SECONDS: Final = 1.0
_QUEUE_BYTES: Final = 64 << 20
"""Maximum size of lines that are not written yet; beyond it, recording stops."""
_HELD_IDS: Final = 8 << 20
"""Maximum number of ids of requests that cannot be written because they, or an older request, are still running."""
_LINE_IDS: Final = 1 << 19
"""Maximum number of ids of a prompt or answer, so that lines stay within the reader's limit; the rest is omitted."""
_REQUEST_IDS: Final = 32
"""Number of ids that a request counts in addition to its own."""
_CLOSE_SECONDS: Final = 10.0
_MAX_FILES: Final = 1000
"""Maximum number of recordings with the same name in a folder."""
_log = logging.getLogger("blockyard.traces")


class TraceRecorder:
    """Records an engine's requests to a trace in Mooncake's format, for `read_trace` and other readers of that format.

    A line has `timestamp` (milliseconds since the first request), `input_length`, `output_length`, `hash_ids` (a number
    for each full block of the prompt), `block_size` and, if known, `output_hash_ids` (the blocks that the answer
    filled) and `session`; the first line has the model's `cache_groups`, if given. Blocks and sessions are numbered
    from 0 in order of first appearance, so tokens and keys cannot be recovered from a trace. Lengths and times are
    exact.

    Lines are in order of `add`. A request is written once it and all earlier requests have ended; a killed process
    loses the others, and up to a second of lines. Recording never blocks the engine: a background thread writes, and if
    the file cannot be written, or not fast enough, recording stops with one logged warning. Forks record nothing.
    Thread-safe.

    Args:
        path: path of the file, which must not exist; it is compressed with gzip if its name ends in `.gz`.
        block_size: number of tokens in a block, at least 1.
        max_blocks: number of distinct blocks to remember, about 150 bytes each. At least the more recent half keep
            their numbers and older ones count as new, so the trace shows all hits of caches with up to half as many
            blocks.
        clock: function that returns the time in seconds.
        groups: the model's cache groups, for a replay; a `Scheduler` gives its own.

    Raises:
        TraceError: the file exists or cannot be created.
        InvalidArgumentError: `block_size` or `max_blocks` is out of range, or `groups` has something else.

    Example:
        >>> import tempfile
        >>> from blockyard.allocators import chain_keys
        >>> from blockyard.traces import TraceRecorder, read_trace
        >>> path = tempfile.mkdtemp() + "/trace.jsonl.gz"
        >>> with TraceRecorder(path, block_size=4) as recorder:
        ...     for name, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [1, 2, 3, 4, 5, 6, 7, 8])):
        ...         recorder.add(name, chain_keys(prompt, block_size=4), len(prompt))
        ...         recorder.finish(name, output_tokens=3)
        >>> [list(request.hash_ids) for request in read_trace(path)]
        [[0], [0, 1]]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        block_size: int,
        max_blocks: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        groups: Sequence[CacheGroup] = (),
    ) -> None:
        for name, value, least in (("block_size", block_size, 1), ("max_blocks", max_blocks, 2)):
            is_int = hasattr(value, "__index__") and not isinstance(value, bool)
            if not (is_int and least <= value <= MAX_TOKENS):
                raise InvalidArgumentError(f"{name} is {value!r}, must be an int from {least} to {MAX_TOKENS}")
        block_size, max_blocks = int(block_size), int(max_blocks)
        for group in groups:
            if not isinstance(group, CacheGroup):
                raise InvalidArgumentError(f"groups has {group!r:.100}, must have instances of CacheGroup")
        self._groups = tuple(groups)
        self._path = Path(path)
        self._compresses = self._path.suffix == ".gz"
        self._block_size, self._clock = block_size, clock
        self._start: float | None = None
        self._blocks, self._sessions = _Numbers(max_blocks), _Numbers(max_blocks)
        self._order: deque[_RecordedRequest] = deque()  # not yet written, oldest first
        self._open: dict[Hashable, _RecordedRequest] = {}  # not ended yet
        self._held_ids = 0
        self._lines: list[bytes] = []
        self._queued_bytes = 0
        self._num_requests = 0
        # Enter the lock itself, not the condition: an interrupt within `Condition.__enter__` would leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._process = Process(f"recorder of {self._path}")
        self._is_recording, self._has_failed = True, False
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise TraceError(f"cannot record to {self._path}: {error.strerror or error}") from error
        try:
            self._writer = start_worker("blockyard-trace", self._write_lines, self._end)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self._block_size

    @property
    def is_recording(self) -> bool:
        """Whether requests are recorded: False after `close` or a failure, and in a fork."""
        return self._is_recording and self._process.is_current

    def add(
        self, request_id: Hashable, keys: Sequence[Hashable], input_tokens: int, *, session: Hashable | None = None
    ) -> None:
        """Record that a request has arrived.

        Args:
            request_id: the caller's name for it. If a request of that name has not ended, this replaces all of it
                except its time.
            keys: a key for each full block of the prompt, equal for equal blocks after equal beginnings: `chain_keys`,
                or the engine's own. Keys are neither kept nor written.
            input_tokens: length of the prompt, at least 1.
            session: the conversation that the request belongs to, if known.

        Raises:
            InvalidArgumentError: `input_tokens` is out of range, or less than the keys' blocks hold.
        """
        input_tokens = index(input_tokens)
        if not 1 <= input_tokens <= MAX_TOKENS or len(keys) > input_tokens // self._block_size:
            raise InvalidArgumentError(
                f"request {request_id!r} has input_tokens {input_tokens} and {len(keys)} keys of {self._block_size} "
                f"tokens, must have 1 to {MAX_TOKENS} tokens, and keys of full blocks only"
            )
        if not self.is_recording:
            return
        now = self._clock()
        with self._lock:
            if not self._is_recording:
                return
            start = self._start = now if self._start is None else self._start
            fields: dict[str, Any] = {
                "timestamp": max(0, round((now - start) * 1000)),
                "input_length": input_tokens,
                "output_length": 1,
                "hash_ids": self._blocks.of(keys[:_LINE_IDS]),
                "block_size": self._block_size,
            }
            self._held_ids += len(fields["hash_ids"])
            if session is not None:
                (fields["session"],) = self._sessions.of([session])
            request = self._open.get(request_id)
            if request is None or request.has_ended:
                self._open.pop(request_id, None)
                # One C call adds it to both, so an interrupt cannot come in between.
                self._order.extend(map(self._open.setdefault, (request_id,), (_RecordedRequest(request_id, fields),)))
                self._held_ids += _REQUEST_IDS
            else:
                self._held_ids -= len(request.fields["hash_ids"])
                request.fields |= fields | {"timestamp": request.fields["timestamp"]}
            self._release()

    def finish(self, request_id: Hashable, output_tokens: int, keys: Sequence[Hashable] = ()) -> None:
        """Record the end of a request that finished or was aborted; unknown ids are ignored.

        Args:
            request_id: as given to `add`.
            output_tokens: number of generated tokens; 0 counts as 1.
            keys: a key for each full block after those in `add`: blocks whose last token was generated.
        """
        if not self.is_recording:
            return
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return
            request.fields["output_length"] = min(max(1, index(output_tokens)), MAX_TOKENS)
            if len(keys):
                ids = request.fields["output_hash_ids"] = self._blocks.of(keys[:_LINE_IDS])
                self._held_ids += len(ids)
            request.has_ended = True
            del self._open[request_id]
            self._release()

    def _drop(self, request_id: Hashable) -> None:
        """Omit a request that has not ended."""
        if not self.is_recording:
            return
        with self._lock:
            request = self._open.pop(request_id, None)
            if request is not None and request in self._order:
                self._order.remove(request)
                self._held_ids -= _REQUEST_IDS + len(request.fields["hash_ids"])
            self._release()

    def _name_groups(self, groups: Sequence[CacheGroup]) -> None:
        """Note the cache groups of the engine, unless the recorder has some, or a line is written."""
        is_plain = len(groups) == 1 and groups[0].kind == "full_attention"
        with self._lock:
            if not self._groups and not is_plain:
                self._groups = tuple(groups)

    def close(self) -> None:
        """Write all requests and close the file. Requests that have not ended get an output length of 1. Idempotent."""
        if not self._process.is_current:
            return
        self._end()
        if self._writer is not threading.current_thread():
            self._writer.join(_CLOSE_SECONDS)  # do not wait forever for a hanging disk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TraceRecorder({str(self._path)!r}, is_recording={self.is_recording})"

    def _release(self, *, everything: bool = False) -> None:
        """Queue the lines of ended requests for the thread, in order. The lock is held."""
        while self._order and (everything or self._order[0].has_ended or self._held_ids > _HELD_IDS):
            request = self._order[0]
            fields = request.fields
            if not self._num_requests and self._groups:
                fields[GROUPS_FIELD] = group_fields(self._groups)
            line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
            # One C call moves it, so an interrupt cannot come in between.
            self._lines.extend(compress((line,), starmap(self._order.popleft, ((),))))
            self._held_ids -= _REQUEST_IDS + len(fields["hash_ids"]) + len(fields.get("output_hash_ids", ()))
            if not request.has_ended:
                self._open.pop(request.request_id, None)
            self._queued_bytes += len(line)
            self._num_requests += 1
        if self._queued_bytes >= _QUEUE_BYTES:
            self._stop("its storage is too slow")
        if self._queued_bytes >= _FLUSH_BYTES:
            self._changed.notify()

    def _end(self) -> None:
        """Make the thread write everything and end; does not wait."""
        with self._lock:
            if self._is_recording:
                self._release(everything=True)
            self._is_recording = False
            self._changed.notify()

    def _stop(self, cause: object) -> None:
        """Stop recording after a failure. The lock is held."""
        if not self._has_failed:
            _log.warning("recording to %s stopped after %d requests: %s", self._path, self._num_requests, cause)
        self._is_recording, self._has_failed = False, True
        self._lines, self._queued_bytes, self._held_ids = [], 0, 0
        self._order.clear()
        self._open.clear()
        self._blocks, self._sessions = _Numbers(2), _Numbers(2)

    def _write_lines(self) -> None:
        """Run the thread: write lines until the recorder is closed or the file cannot be written."""
        good = 0
        try:
            while True:
                with self._lock:
                    if self._is_recording and self._queued_bytes < _FLUSH_BYTES:
                        self._changed.wait(_FLUSH_SECONDS)
                    lines, self._lines, self._queued_bytes = self._lines, [], 0
                    is_last = not self._is_recording
                if lines:
                    good = self._write(b"".join(lines), good)
                if is_last:
                    return
        except (OSError, MemoryError) as error:
            with contextlib.suppress(OSError):  # leave no partial line or gzip member
                os.ftruncate(self._file, good)
            with self._lock:
                self._stop(getattr(error, "strerror", None) or error)
        finally:
            file, self._file = self._file, -1  # after a MemoryError this runs again, and the number may be another's
            with contextlib.suppress(OSError):
                os.close(file)

    def _write(self, text: bytes, start: int) -> int:
        """Append lines to the file; return its new length. They can be read even if nothing follows."""
        data = memoryview(gzip.compress(text, 6, mtime=0) if self._compresses else text)
        while data:
            written = os.write(self._file, data)
            data, start = data[written:], start + written
        return start


@dataclass(slots=True, eq=False)
class _RecordedRequest:
    """A request that has not been written yet."""

    request_id: Hashable
    fields: dict[str, Any]
    has_ended: bool = False


class TokenRecorder:
    """Records requests from their tokens; does nothing without a recorder.

    Args:
        recorder: the recorder; None means a recorder for `BLOCKYARD_RECORD`, if that is set.
        block_size: number of tokens in a block.
        groups: the cache groups, for a replay.

    Raises:
        InvalidArgumentError: the recorder has ended, or another block size.
    """

    def __init__(self, recorder: TraceRecorder | None, block_size: int, groups: Sequence[CacheGroup] = ()) -> None:
        if recorder is not None and not isinstance(recorder, TraceRecorder):
            raise InvalidArgumentError(f"recorder is {recorder!r:.100}, must be a TraceRecorder")
        if recorder is not None and not recorder.is_recording:
            raise InvalidArgumentError(f"recorder is {recorder!r:.200}, which has ended, must be recording")
        if recorder is not None and recorder.block_size != block_size:
            raise InvalidArgumentError(f"recorder has block_size {recorder.block_size}, must have {block_size}")
        self._recorder = record_from_environment(block_size) if recorder is None else recorder
        if self._recorder is not None:
            self._recorder._name_groups(groups)  # noqa: SLF001 (one file, one concept)
        self._block_size = block_size
        # For each open request: its prompt, and a function that returns the keys of such tokens.
        self._open: dict[str, tuple[NDArray[np.uint32], Callable[[NDArray[np.uint32]], list[bytes]]]] = {}

    def add(
        self,
        request_id: str,
        prompt: NDArray[np.uint32],
        key: tuple[bytes | None, int, Sequence[tuple[int, int, bytes]]],
    ) -> None:
        """Record that a request has arrived, with its salt, adapter and extras; see `Request`."""
        if self._recorder is None or not self._recorder.is_recording:
            return
        salt, lora_id, extras = key
        keys_of = partial(export_keys, block_size=self._block_size, salt=salt, lora_id=lora_id, extras=extras)
        self._recorder.add(request_id, keys_of(prompt), len(prompt))
        self._open[request_id] = prompt, keys_of

    def drop(self, request_id: str) -> None:
        """Leave out a request whose `add` was interrupted."""
        if self._recorder is not None:
            self._recorder._drop(request_id)  # noqa: SLF001 (one file, one concept)
        self._open.pop(request_id, None)

    def finish(self, request_id: str, generated: NDArray[np.uint32]) -> None:
        """Record that a request has ended; a second call has no effect."""
        known = self._open.get(request_id)
        if self._recorder is None or known is None:
            return
        prompt, keys_of = known
        # The last token was sampled but not computed: it is in no block.
        keys = keys_of(np.concatenate((prompt, generated[:-1])))[len(prompt) // self._block_size :]
        self._recorder.finish(request_id, len(generated), keys)
        self._open.pop(request_id, None)  # last, because an interrupted call is repeated


class _Numbers:
    """Numbers things from 0 in the order in which they first appear; remembers at least the last half of `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit // 2
        self._count = 0
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def of(self, things: Sequence[Hashable]) -> list[int]:
        """Return the number of each thing; things are known by their 64-bit hashes."""
        hashes = list(map(hash, things))
        found = list(map(self._recent.get, hashes))
        each = zip(hashes, found, strict=True)
        return [self._remember(known) if number is None else number for known, number in each]

    def _remember(self, known: int) -> int:
        number = self._recent.get(known)  # repeated within one call
        if number is not None:
            return number
        number = self._older.get(known)
        if number is None:
            number = self._count
            self._count += 1
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, {}
        self._recent[known] = number
        return number


def numbered_path(path: Path, number: int) -> Path:
    """Return the path for the engine of this number, from 1: `trace.jsonl.gz`, `trace-2.jsonl.gz` and so on."""
    stem, dot, rest = path.name.partition(".")
    return path if number == 1 else path.with_name(f"{stem}-{number}{dot}{rest}")


def record_from_environment(block_size: int, groups: Sequence[CacheGroup] = ()) -> TraceRecorder | None:
    """Record to the file that `BLOCKYARD_RECORD` names; None without that variable, or if it cannot be created.

    If the file exists, for instance because another engine records to it, a number is added to the name.
    """
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return None
    for number in count(1):
        try:
            return TraceRecorder(numbered_path(Path(path), number), block_size=block_size, groups=groups)
        except TraceError as error:  # noqa: PERF203 (engines that start together try the same names)
            if not isinstance(error.__cause__, FileExistsError) or number == _MAX_FILES:
                _log.warning("nothing is recorded: %s", error)
                break
    return None
