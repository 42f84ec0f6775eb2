"""Calls made by several threads at once. With the interpreter's lock, threads switch as often as possible."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 1.0
PATIENCE = 60.0  # a deadlock, not a slow machine


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def hammer(*work: Callable[[], object], seconds: float = SECONDS) -> None:
    """Repeat each call in a separate thread until time is up. Fails if one raises or never ends."""
    end = time.monotonic() + seconds
    done: list[bool] = []

    def run(once: Callable[[], object]) -> None:
        once()
        while time.monotonic() < end:
            once()
        done.append(True)

    threads = [threading.Thread(target=run, args=(once,), daemon=True) for once in work]
    with frequent_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread waits for ever"
    # pytest reports a thread's exception as a warning, which fails the test.
    assert len(done) == len(work)
