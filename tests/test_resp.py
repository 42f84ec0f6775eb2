"""The exchange with a Redis server: what it sends, and that no answer, however wrong, costs more than an error."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard.stores.redis.resp import Command, ReplyError, exchange

GET = Command((b"GET", b"key"))


@contextmanager
def connected(answer: bytes) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket whose other end has answered, and says no more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        yield ours, theirs


def takes(row: NDArray[np.uint8], size: int) -> bool:
    return size == len(row)


def test_answers_of_each_kind():
    row, other = np.zeros(6, np.uint8), np.zeros(3, np.uint8)
    answer = (
        b"+OK\r\n-ERR no\r\n:-7\r\n$-1\r\n$6\r\nab\r\ncd\r\n$4\r\nlong\r\n$2\r\nhi\r\n*3\r\n$1\r\nx\r\n:2\r\n*0\r\n"
    )
    commands = [GET, GET, GET, GET, Command(GET.parts, row), Command(GET.parts, other), GET, GET]
    with connected(answer) as (ours, theirs):
        found = exchange(ours, commands, takes)
        assert theirs.recv(1000) == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n" * 8
    assert (found[0], str(found[1]), *found[2:]) == (b"OK", "ERR no", -7, None, 6, 4, b"hi", [b"x", 2, []])
    assert row.tobytes() == b"ab\r\ncd"
    assert not other.any(), "a value of another length is passed over"


@pytest.mark.parametrize("size", [4096, 4097, 3 << 20])
def test_commands_are_sent_whole(size: int):
    value = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.2)
        expected = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % size + value.tobytes() + b"\r\n"
        theirs.sendall(b"+OK\r\n" * 2)
        if size < 1 << 20:
            assert exchange(ours, [Command((b"SET", b"k", value.data))] * 2, takes) == [b"OK"] * 2
            ours.shutdown(socket.SHUT_WR)
            assert theirs.makefile("rb").read() == 2 * expected
        else:  # nobody reads
            with pytest.raises(TimeoutError):
                exchange(ours, [Command((b"SET", b"k", value.data))] * 2, takes)


def test_random_answers_raise_errors_only():
    """Twenty thousand answers: bytes at random, and good ones that were changed."""
    random = np.random.default_rng(0)
    good = b"$6\r\nabcdef\r\n*2\r\n$1\r\nx\r\n:2\r\n+OK\r\n"
    symbols = np.frombuffer(b"$*+-:0123456789\r\n\r\n\r\nab\xff", np.uint8)
    row = np.zeros(6, np.uint8)
    good_ones = 0

    class Canned:
        """A socket that has these bytes."""

        def __init__(self, data: bytes) -> None:
            self.data = data

        def sendmsg(self, pieces: list[memoryview]) -> int:
            return sum(map(len, pieces))

        def recv_into(self, view: memoryview) -> int:
            part, self.data = self.data[: min(len(view), 7)], self.data[min(len(view), 7) :]
            view[: len(part)] = part
            return len(part)

    for number in range(20_000):
        if number % 2:
            data = bytes(random.choice(symbols, random.integers(1, 40)))
        else:
            at = random.integers(len(good))
            data = good[:at] + bytes([random.integers(256)]) + good[at + 1 :]
        try:
            exchange(Canned(data), [Command(GET.parts, row), GET, GET], takes)
            good_ones += 1
        except (OSError, ReplyError):
            pass
    assert 0 < good_ones < 10_000


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"$5\r\nab",
        b"$3\r\nabcde",
        b"+" + b"x" * 70_000,
        b"!\r\n",
        b"$x\r\n",
        b"*9999999\r\n",
        b"*1\r\n" * 9,
        b"+1\r\n+2\r\n",
    ],
)
def test_a_wrong_answer_is_an_error(answer: bytes):
    with connected(answer) as (ours, _), pytest.raises((OSError, ReplyError)):
        exchange(ours, [GET], takes)


def test_a_value_that_claims_a_terabyte_takes_no_memory():
    with connected(b"$1099511627776\r\nabc") as (ours, _), pytest.raises(ConnectionResetError):
        exchange(ours, [GET], takes)


def test_tls_sockets_are_sent_to_piece_by_piece():
    assert hasattr(ssl.SSLSocket, "context"), "what tells them from plain ones"
    assert not hasattr(socket.socket, "context")
