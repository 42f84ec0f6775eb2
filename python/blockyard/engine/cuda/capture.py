"""Allows CUDA calls that another thread's graph capture would otherwise forbid."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

__all__ = ["relax_thread", "relaxed_capture"]

_RELAXED: Final = 2


def relax_thread() -> None:
    """Allow this thread to register memory, and to query and wait for events, while other threads capture graphs.

    A capture in mode `global`, torch's default, forbids such calls in all threads: they return error 900, and the
    capture is lost. A thread in mode `relaxed` is exempt, but must not touch what is being captured.
    """
    _exchange(ctypes.c_int(_RELAXED))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """A context with the effect of `relax_thread`."""
    mode = ctypes.c_int(_RELAXED)
    exchanged = _exchange(mode)
    try:
        yield
    finally:
        if exchanged:
            _exchange(mode)


def _exchange(mode: ctypes.c_int) -> bool:
    """Set this thread's capture mode, and store the previous one in `mode`. Returns whether it succeeded."""
    driver = load_driver()
    # The runtime's own call would create a context on the first device.
    return driver is not None and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0


@cache
def load_driver() -> ctypes.CDLL | None:
    """Load the driver's library; None without a driver, when there can be no captures either."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
