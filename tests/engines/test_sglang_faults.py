"""What a failed Mooncake cluster does to SGLang: Blockyard's linker beside SGLang's own, in SGLang's prefix cache.

`make test-sglang` runs this; with `-s` it prints the table of `docs/engines/sglang.md`.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mooncake_cluster import Cluster
from sglang_engine import PAGE, Answer, SGLangEngine
from typing_extensions import Self

from blockyard.errors import StoreError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("sglang", "mooncake"))),
        reason="SGLang or Mooncake is not installed; make test-sglang does",
    ),
]
PATIENCE, PAUSE = 20.0, 2.0
OLD, NEW, OLDER = ([*range(first, first + 4 * PAGE + 7)] for first in (1000, 5000, 9000))
OURS, THEIRS = "Blockyard", "SGLang's own"


def make_engine(name: str, cluster: Cluster) -> SGLangEngine:
    if name == THEIRS:
        options: dict[str, Any] = {"master_server_address": f"127.0.0.1:{cluster.port}", "protocol": "tcp"}
        options |= {"metadata_server": "P2PHANDSHAKE", "global_segment_size": 0, "local_hostname": "127.0.0.1"}
        return SGLangEngine("mooncake", options)
    url = f"mooncake://127.0.0.1:{cluster.port}?size=1GiB&admin={cluster.admin}"
    options = {"linker": "BlockyardLinker", "linker_module_path": "blockyard.integrations.sglang.linker"}
    return SGLangEngine("dynamic", {**options, "linker_extra_config": {"url": url, "revision": "1"}})


class Fault:
    """A fault of a cluster, for as long as the context lasts; after `PATIENCE` it ends by itself."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.ended = cluster, threading.Event()

    def begin(self) -> None:
        pass

    def between(self) -> None:
        """Happens between a request's lookup and its load."""

    def end(self) -> None:
        pass

    def __enter__(self) -> Self:
        self.begin()
        self._timer = threading.Timer(PATIENCE, self._end)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self.end()

    def signal(self, number: int, *, holders: bool) -> None:
        for process in self.cluster.holders if holders else [self.cluster.master]:
            process.send_signal(number)

    def values(self) -> Iterator[tuple[Any, list[str]]]:
        """A client of Mooncake, and the names of the stored pages."""
        from blockyard.stores.mooncake import connect_client, read_url

        client = connect_client(read_url(self.cluster.url))
        rows = {name: client.read([name], 1 << 20)[0] for name in self.cluster.ask("get_all_keys").split()}
        yield client, [name for name, row in rows.items() if not isinstance(row, int) and len(row) >= PAGE * 132]
        client.close()


class HoldersHang(Fault):
    def begin(self) -> None:
        self.signal(signal.SIGSTOP, holders=True)

    def end(self) -> None:
        self.signal(signal.SIGCONT, holders=True)


class HoldersPause(HoldersHang):
    def begin(self) -> None:
        super().begin()
        threading.Timer(PAUSE, self._end).start()


class MasterHangs(Fault):
    def begin(self) -> None:
        self.signal(signal.SIGSTOP, holders=False)

    def end(self) -> None:
        self.signal(signal.SIGCONT, holders=False)


class Damaged(Fault):
    def begin(self) -> None:
        for client, names in self.values():
            for name in names:
                (row,) = client.read([name], 1 << 20)
                row[len(row) // 2] ^= 1
                assert client.write("batch_upsert_from", [name], [row.data]) == [0]


class LostBetween(Fault):
    def between(self) -> None:
        if not self.ended.is_set():
            for client, names in self.values():
                assert not any(client.call("batch_remove", names, True))
            self.ended.set()


class Dead(Fault):
    def begin(self) -> None:
        for process in (self.cluster.master, *self.cluster.holders):
            process.kill()
            process.wait()

    def end(self) -> None:
        self.cluster.start()


FAULTS = {
    "the holders hang": HoldersHang,
    f"the holders pause for {PAUSE:.0f} s": HoldersPause,
    "the master hangs": MasterHangs,
    "the values are damaged": Damaged,
    "the keys are lost between lookup and load": LostBetween,
    "all processes die, others start": Dead,
}


WHAT_THEIRS_COMES_TO = {
    "the values are damaged": (1, 2, 0),
    "the keys are lost between lookup and load": (2, 0, 1),
}
"""Tokens that are right, wrong and missing with SGLang's own linker, where no deadline of its client decides."""


class Outcome(NamedTuple):
    """What became of the requests under a fault, and of those after it."""

    right: int
    wrong: int
    aborted: int
    longest: float
    in_time: bool  # no step waited until the fault ended
    recovery: float | None  # seconds until pages are loaded again; None: not within `PATIENCE`

    def __str__(self) -> str:
        parts = {"right": self.right, "wrong": self.wrong, "aborted": self.aborted}
        tokens = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
        recovery = "never" if self.recovery is None else f"{self.recovery:.1f} s"
        return f"{tokens} | {self.longest:.1f} s{'' if self.in_time else '*'} | {recovery}"


def run_fault(name: str, kind: type[Fault], folder: Path, right: Callable[[list[int], Answer], bool]) -> Outcome:
    with ExitStack() as stack:
        cluster = Cluster(folder, stack)
        engine = make_engine(name, cluster)

        def forget() -> None:
            engine.settle()
            engine.evict()

        def healthy() -> bool:
            forget()
            answer = engine.ask(OLD)
            return answer.loaded == 4 and right(OLD, answer)

        for prompt in (OLDER, OLD):
            engine.ask(prompt)
        assert healthy(), "pages come back before the fault"
        forget()
        answers = []
        with kind(cluster) as fault:
            in_time = True
            for prompt in (OLD, NEW, OLDER):
                answers.append((prompt, engine.ask(prompt, fault.between)))
                in_time &= not fault.ended.is_set() or kind in (LostBetween, HoldersPause)
        seconds = [answer.seconds for _, answer in answers]
        good = [right(prompt, answer) for prompt, answer in answers]
        aborted = sum(not answer.token for _, answer in answers)
        began = time.monotonic()
        while not (is_back := healthy()) and time.monotonic() < began + PATIENCE:
            time.sleep(0.1)
        recovery = time.monotonic() - began if is_back else None
        assert engine.ask(NEW).token, "the engine lives"
        engine.close()
        return Outcome(sum(good), len(good) - sum(good) - aborted, aborted, max(seconds), in_time, recovery)


@pytest.fixture(scope="module")
def right() -> Callable[[list[int], Answer], bool]:
    alone = SGLangEngine()
    tokens = {tuple(prompt): alone.ask(prompt).token for prompt in (OLD, NEW, OLDER)}
    return lambda prompt, answer: answer.token == tokens[tuple(prompt)]


@pytest.fixture(autouse=True, scope="module")
def _wheel() -> Iterator[None]:
    """Mooncake's programs lie beside the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_store_never_hurts_sglang(tmp_path: Path, right: Any, fault: str):
    rows = {}
    for name in (OURS, THEIRS):
        (folder := tmp_path / name[:4]).mkdir()
        rows[name] = run_fault(name, FAULTS[fault], folder, right)
    print(f"| {fault} | {rows[OURS]} | {rows[THEIRS]} |")
    ours = rows[OURS]
    assert (ours.right, ours.wrong, ours.aborted) == (3, 0, 0)
    assert ours.in_time
    assert ours.recovery is not None
    if fault in WHAT_THEIRS_COMES_TO:
        assert rows[THEIRS][:3] == WHAT_THEIRS_COMES_TO[fault], "the page says so"


def test_a_store_that_is_absent_at_the_start_is_named(tmp_path: Path):
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
    began = time.monotonic()
    with pytest.raises(StoreError, match=f"127.0.0.1:{cluster.port}"):
        make_engine(OURS, cluster)
    ours = time.monotonic() - began
    program = f"""
from mooncake.store import MooncakeDistributedStore as Store
print(Store().setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", "127.0.0.1:{cluster.port}"))
"""
    try:
        done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE, capture_output=True, check=False)
        theirs = f"code {done.stdout.decode().strip()} after {time.monotonic() - began - ours:.1f} s"
    except subprocess.TimeoutExpired:
        theirs = f"still trying after {PATIENCE:.0f} s"
    print(f"| absent at the start | refused after {ours:.1f} s | | | {theirs} | | |")
