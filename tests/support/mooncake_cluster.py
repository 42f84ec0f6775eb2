"""A Mooncake cluster on this machine: a master and the processes that hold its memory, all from Mooncake's wheel."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

from servers import free_ports

PATIENCE = 60.0


class Cluster:
    """A master, and processes that hold the values."""

    def __init__(self, folder: Path, stack: ExitStack, holders: int = 2, size: str = "128MB") -> None:
        self._folder, self._stack, self._holders, self._size = folder, stack, holders, size
        self.port, self.admin = free_ports(2)
        self.start()

    def start(self) -> None:
        """Start all processes, with the same ports as before."""
        self.master = self.start_master()
        self.holders = [self._start_holder(self._size) for _ in range(self._holders)]
        until(lambda: len(self.ask("get_all_segments").split()) == self._holders)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?size=1GiB&admin={self.admin}"

    def start_master(self) -> "subprocess.Popen[bytes]":
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.admin}", "--rpc_thread_num=4"]
        hosts = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        process = self._start("mooncake_master", *ports, *hosts, "--client_ttl=3", "--default_kv_lease_ttl=500")
        until(lambda: "ok" in self.ask("health"))
        return process

    def ask(self, what: str) -> str:
        try:
            with urlopen(f"http://127.0.0.1:{self.admin}/{what}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def _start_holder(self, size: str) -> "subprocess.Popen[bytes]":
        options = ["--host=127.0.0.1", f"--port={free_ports(1)[0]}", f"--global_segment_size={size}"]
        master = ["--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{self.port}"]
        return self._start("mooncake_client", *options, *master)

    def _start(self, name: str, *options: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([name, *options], stdout=log, stderr=log, cwd=self._folder)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.05)


@contextmanager
def stopped(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
