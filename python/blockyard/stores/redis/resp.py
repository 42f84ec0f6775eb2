"""One exchange with a Redis server: commands go out as they lie in memory, values come in where they belong.

The client library opens the connection, logs in and knows the cluster. It joins commands and copies answers, though,
and of values of 64 KiB and more the copies cost more than the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Answer", "Command", "ReplyError", "exchange"]

_LINE: Final = 512  # bytes to look for the end of a line in; most of a value must not come this way
_LONGEST_LINE: Final = 1 << 16
_LONGEST_TEXT: Final = 4096  # of an answer that has no row
_LONGEST_ARRAY: Final = 2048
_SCRATCH: Final = 1 << 16
_DEEPEST: Final = 4
_PIECES: Final = 512  # sent by one call
_SMALL: Final = 4096  # arguments up to here are joined

Answer: TypeAlias = "int | bytes | ReplyError | list[Answer] | None"


class ReplyError(Exception):
    """What a server answered to a command that it refused, or an answer that is none."""


class Command(NamedTuple):
    """A command, and the row that its answer belongs in."""

    parts: tuple[bytes | memoryview, ...]  # name, key, arguments
    row: NDArray[np.uint8] | None = None

    @property
    def key(self) -> bytes:
        """Key that decides the cluster's node."""
        return bytes(self.parts[1])


def exchange(sock: Any, commands: Sequence[Command], takes: Callable[[NDArray[np.uint8], int], bool]) -> list[Answer]:
    """Send commands and take their answers; after an exception the connection is of no use.

    Args:
        sock: a connected socket, plain or TLS, with a timeout.
        commands: they are sent together.
        takes: whether a value of so many bytes belongs in a row; one that does not is passed over.

    Returns:
        An answer each; for a value that was asked for with a row its length.

    Raises:
        OSError: the connection failed or timed out.
        ReplyError: what came is no answer.
    """
    _send(sock, commands)
    reader = _Reader(sock, takes)
    answers = [reader.answer(command.row) for command in commands]
    reader.finish()
    return answers


def _send(sock: Any, commands: Sequence[Command]) -> None:
    pieces: list[memoryview] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command.parts)
        for part in command.parts:
            small += b"$%d\r\n" % len(part)
            if len(part) <= _SMALL:
                small += part
            else:
                pieces += [memoryview(small), memoryview(part)]
                small = bytearray()
            small += b"\r\n"
    pieces.append(memoryview(small))
    if not hasattr(sock, "context"):  # TLS has no call for several pieces
        for start in range(0, len(pieces), _PIECES):
            _send_pieces(sock, pieces[start : start + _PIECES])
        return
    for piece in pieces:
        sock.sendall(piece)


def _send_pieces(sock: Any, pieces: list[memoryview]) -> None:
    while pieces:
        sent = sock.sendmsg(pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][sent:]


class _Reader:
    """Reads answers; whatever the server sends, it takes no more memory than the rows and a few lines."""

    def __init__(self, sock: Any, takes: Callable[[NDArray[np.uint8], int], bool]) -> None:
        self._sock, self._takes = sock, takes
        self._buffer = bytearray(_LINE)
        self._start = self._end = 0

    def answer(self, row: NDArray[np.uint8] | None, depth: int = 0) -> Answer:
        """Read an answer; a value goes to its row."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        try:
            number = int(rest)
        except ValueError:
            raise ReplyError(f"the answer begins with {line[:40]!r}") from None
        if kind == b":":
            return number
        if kind == b"$":
            return self._value(number, row)
        if kind == b"*" and depth < _DEEPEST and number <= _LONGEST_ARRAY:
            return [self.answer(None, depth + 1) for _ in range(number)] if number >= 0 else None
        raise ReplyError(f"the answer begins with {line[:40]!r}")

    def finish(self) -> None:
        """Make sure that nothing more has come."""
        if self._start != self._end:
            raise ReplyError("there are more answers than commands")

    def _value(self, size: int, row: NDArray[np.uint8] | None) -> Answer:
        if size < 0:
            return None
        answer: Answer = size
        if row is not None and self._takes(row, size):
            self._read(row.data[:size])
        elif row is None and size <= _LONGEST_TEXT:
            text = bytearray(size)
            self._read(memoryview(text))
            answer = bytes(text)
        else:
            scratch = memoryview(bytearray(min(size, _SCRATCH)))
            left = size
            while left:
                self._read(scratch[:left])
                left -= min(left, len(scratch))
        end = bytearray(2)
        self._read(memoryview(end))
        if end != b"\r\n":
            raise ReplyError("a value has another length than it says")
        return answer

    def _read(self, view: memoryview) -> None:
        have = min(len(view), self._end - self._start)
        view[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        while have < len(view):
            count = self._sock.recv_into(view[have:])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            have += count

    def _line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
                self._start, self._end = 0, self._end - self._start
            if self._end == len(self._buffer):
                if len(self._buffer) >= _LONGEST_LINE:
                    raise ReplyError("the answer has no end of line")
                self._buffer += bytes(len(self._buffer))
            with memoryview(self._buffer) as view:
                count = self._sock.recv_into(view[self._end :])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            self._end += count
        line = bytes(self._buffer[self._start : at])
        self._start = at + 2
        return line
