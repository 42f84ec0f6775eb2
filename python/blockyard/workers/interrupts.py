"""Calls whose results survive an interrupt such as Ctrl-C, and processes that leave Ctrl-C to their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat, starmap
from operator import itemgetter
from types import FrameType
from typing import TypeVar

__all__ = ["as_error", "interrupts_blocked", "keep", "let_go", "open_event"]

S = TypeVar("S")
T = TypeVar("T")


def keep(into: list[T], call: Callable[..., T], *arguments: object) -> T:
    """Make a call and append its result to a list.

    Both happen in C, so if `call` is C code too, no `KeyboardInterrupt` can come between them.

    Returns:
        The result of the call.
    """
    into.extend(starmap(call, (arguments,)))
    return into[-1]


def let_go(held: list[T], call: Callable[[S], object], argument: S) -> None:
    """Take each item from a list, and make a call for it, which ends what the item stands for.

    Both happen in C, so if `call` is C code too, no `KeyboardInterrupt` can come between them.
    """
    taken = zip(map(held.pop, [-1] * len(held)), repeat(argument))
    deque(map(call, map(itemgetter(1), taken)), maxlen=0)


def open_event(owner: object) -> int:
    """Open an event descriptor that is closed when its owner is collected, even if an exception ends this call."""
    opened: list[int] = []
    # Not at exit: threads still use it then, and its number could already belong to another file.
    weakref.finalize(owner, _close, opened).atexit = False
    return keep(opened, os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def as_error(error: BaseException) -> Exception:
    """Return an exception of a call into another package; its panic in Rust, a BaseException, as a RuntimeError.

    Raises:
        BaseException: anything else, such as KeyboardInterrupt, is raised again.
    """
    if isinstance(error, Exception):
        return error
    if type(error).__name__ == "PanicException":
        return RuntimeError(f"panic: {error}")
    raise error


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C while processes start: they inherit this, and their parent alone acts on it.

    In this process, one that comes meanwhile is handled at the end of the context.
    """
    from multiprocessing import resource_tracker  # noqa: PLC0415 (only who starts processes needs it)

    resource_tracker.ensure_running()  # its start unblocks the signal
    handler = signal.getsignal(signal.SIGINT)
    is_handled = callable(handler) and threading.current_thread() is threading.main_thread()
    caught: list[tuple[int, FrameType | None]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if is_handled:  # another thread may still receive the signal, which Python then handles in this one
            signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_handled:
            signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        handler(*caught[0])
