"""A check in a forked child."""

import os
import threading
from collections.abc import Callable

PATIENCE = 300.0


def in_child(check: Callable[[], None]) -> None:
    """Run a check in a forked child, which must exit on its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said, code = "", 1
        try:
            check()
            code = 0
        except BaseException as error:  # noqa: BLE001 (the parent is told)
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(code)
    os.close(write)
    timer = threading.Timer(PATIENCE, os.kill, (pid, 9))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    with os.fdopen(read) as pipe:
        assert os.waitstatus_to_exitcode(status) == 0, pipe.read() or "the child hung"
