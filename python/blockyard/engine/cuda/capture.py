"""Calls that a graph capture of another thread would forbid."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

__all__ = ["relaxed_capture"]

_RELAXED: Final = 2


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread register, map and allocate memory while other threads capture graphs.

    A capture in the mode `global`, torch's default, forbids such calls to all threads: they return error 900, and the
    capture is lost. A thread that asks for the mode `relaxed` is exempt. It must not use the stream that is captured.
    """
    driver, mode = load_driver(), ctypes.c_int(_RELAXED)
    # The call leaves the former mode in its argument.
    exchanged = driver is not None and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if driver is not None and exchanged:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def load_driver() -> ctypes.CDLL | None:
    """Load the driver's library; None where there is none, so nobody captures either."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
