"""A fleet: processes that share a store and are killed and restarted at random times, and the rules for all of them.

The processes (`shared_writer.py`) do random operations in two phases. During the storm they call `forget` constantly.
Then all wait for each other, load the last weights and continue without `forget`. These rules need all logs:

- *Forgotten blocks.* After a `forget` has returned in any process, no read that begins later finds a block from a
  process that had its weights before that call began. Calls that joined an epoch of the same revision forget nothing.
- *Kept blocks.* If nothing is evicted, each block whose put was confirmed under the last weights is found at the end.

Each process checks on its own that it finds no block of other weights, no wrong bytes and no block that it deleted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from shared_blocks import FINAL, STORM, WAITING, WIDTH, Board, Plan, key_of, name_of, read_log, row_of

from blockyard.stores import ExternalStore, open_store

__all__ = ["Fleet", "Report", "opened"]

_PROGRAM: Final = Path(__file__).with_name("shared_writer.py")
_STORM_PART: Final = 0.7  # of the operations


@dataclass
class Report:
    """Results of a run.

    Attributes:
        wrong: violations; empty for a correct store.
        seen: log entries by operation and reason.
        forgets: calls that began an epoch, and calls that joined one.
        kept: blocks that had to be found at the end.
    """

    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    forgets: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    operations: int = 0
    kills: int = 0
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        """Blocks found."""
        return self.seen["get ok"]

    def __str__(self) -> str:
        seen = ", ".join(f"{name} {count}" for name, count in sorted(self.seen.items()))
        forgets = ", ".join(f"{name} {count}" for name, count in sorted(self.forgets.items()))
        return (
            f"{self.operations} operations in {self.seconds:.1f} s, {self.kills} kills, forget: {forgets}; "
            f"{self.kept} blocks kept at the end; {seen}"
        )


@dataclass
class Fleet:
    """Processes over one store.

    Attributes:
        url: URL of the store.
        folder: an empty folder for board and logs.
        processes: number of processes.
        operations: operations per process.
        kills: total number of kills.
        num_slots: slots of the store.
        most: maximum blocks per batch.
        seed: seed of all random choices.
        fault: fault planted in all processes, see `planted_faults`.
        fails: how often a request to an object store fails transiently.
        at_once: whether they run at the same time; if not, one after the other, and the last two without `forget`.
        limit: timeout of the run, in seconds.
    """

    url: str
    folder: Path
    operations: int
    kills: int
    num_slots: int
    processes: int = 8
    most: int = 64
    seed: int = 0
    fault: str = ""
    fails: float = 0.0
    at_once: bool = True
    limit: float = 900.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.board = Board(self.folder / "board", self.processes)
        self.report = Report()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._lives: Counter[int] = Counter()
        total = self.processes * self.operations
        self._kills_at = sorted(self.random.randrange(total // 20, total) for _ in range(self.kills))

    def run(self) -> Report:
        """Let all processes do their operations. Returns what they did; `check` says whether it was right."""
        began = time.monotonic()
        with self._stopping_all():
            self._run_at_once(began) if self.at_once else self._run_in_turns(began)
        self.report.seconds = time.monotonic() - began
        self.report.operations = int(self.board.done.sum())
        return self.report

    def _run_at_once(self, began: float) -> None:
        for process in range(self.processes):
            self._start(process)
        while self._running:
            self._look_after(began)
            if self.board.phase == STORM and self.board.waits.all():
                self.board.phase = WAITING
                self.board.phase = FINAL

    def _run_in_turns(self, began: float) -> None:
        for process in range(self.processes):
            if process >= _STORM_PART * self.processes:
                self.board.phase = FINAL
            self._start(process)
            while self._running:
                self._look_after(began)

    def _look_after(self, began: float) -> None:
        """Note which processes have ended, and kill one if it is time."""
        time.sleep(0.005)
        assert time.monotonic() < began + self.limit, f"after {self.limit} s: {self.board.done.tolist()} operations"
        for process, running in list(self._running.items()):
            if running.poll() is None:
                continue
            del self._running[process]
            if running.returncode:
                self.report.wrong.append(f"process {process} ended with {running.returncode}: {self._errors(process)}")
        if self._kills_at and self.board.done.sum() >= self._kills_at[0]:
            victims = [process for process in self._running if not self.board.waits[process] or self.board.phase]
            if victims:
                del self._kills_at[0]
                self._kill(self.random.choice(victims))

    def _start(self, process: int) -> None:
        life = self._lives[process]
        self._lives[process] += 1
        plan = Plan(
            url=self.url,
            folder=str(self.folder),
            process=process,
            processes=self.processes,
            life=life,
            storm=int(_STORM_PART * self.operations) if self.at_once else self.operations,
            operations=self.operations,
            num_slots=self.num_slots,
            most=self.most,
            seed=self.seed * 100 + process,
            fails=self.fails,
        )
        with self._error_file(process).open("a") as errors:
            running = subprocess.Popen(
                [sys.executable, _PROGRAM],
                stdin=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "BLOCKYARD_PLANTED": self.fault},
            )
        assert running.stdin is not None
        running.stdin.write(json.dumps(asdict(plan)) + "\n")
        running.stdin.close()
        self._running[process] = running

    def _kill(self, process: int) -> None:
        victim = self._running.pop(process)
        victim.kill()
        victim.wait()
        self.report.kills += 1
        self._start(process)

    @contextmanager
    def _stopping_all(self) -> Iterator[None]:
        try:
            yield
        finally:
            for running in self._running.values():
                with suppress(ProcessLookupError):
                    running.kill()
                running.wait()

    def _error_file(self, process: int) -> Path:
        return self.folder / f"errors-{process}"

    def _errors(self, process: int) -> str:
        return self._error_file(process).read_text()[-2000:]

    # ---- rules for all processes ----

    def check(self, *, keeps_all: bool) -> Report:
        """Check the logs and, with `keeps_all`, that every block that must be found is found."""
        log = list(read_log(self.folder))
        for line in log:
            if line["event"] == "seen":
                self.report.seen.update(line["counts"])
            elif line["event"] == "wrong":
                self.report.wrong.append(str(line))
            elif line["event"] == "forget":
                self.report.forgets["began" if line["begins"] else "joined"] += 1
            elif line["event"] == "forget failed":
                self.report.forgets["failed"] += 1
        self._check_forgotten(log)
        if keeps_all:
            self._check_kept({key for line in log if line["event"] == "kept" for key in line["keys"]})
        return self.report

    def _check_forgotten(self, log: list[dict[str, Any]]) -> None:
        begun = sorted(
            (line["ended_at"], line["began_at"]) for line in log if line["event"] == "forget" and line["begins"]
        )
        hits = sorted((line["at"], line["oldest"], line["log"]) for line in log if line["event"] == "hits")
        ended, latest = 0, 0  # the latest beginning of a call that had ended
        for at, oldest, who in hits:
            while ended < len(begun) and begun[ended][0] < at:
                latest = max(latest, begun[ended][1])
                ended += 1
            if oldest < latest:
                self.report.wrong.append(
                    f"{who}: a read at {at} found a block of weights since {oldest}, a forget began at {latest}"
                )

    def _check_kept(self, keys: set[int]) -> None:
        self.report.kept = len(keys)
        with opened(self.url, self.num_slots, FINAL) as store:
            for key, data in zip(sorted(keys), _loaded(store, sorted(keys)), strict=True):
                if not data:
                    self.report.wrong.append(f"block {key} was put and is gone")
                elif row_of(data).packed() != data or row_of(data)[:2] != (key, FINAL):
                    self.report.wrong.append(f"block {key} has other bytes: {row_of(data)}")


def opened(url: str, num_slots: int, weights: int = 0) -> ExternalStore:
    """Open the store as its processes do."""
    options: Any = {"bytes_per_block": WIDTH, "num_slots": num_slots, "use": "prefix"}
    return open_store(url, revision=name_of(weights), **options)


def _loaded(store: ExternalStore, keys: list[int]) -> Iterator[bytes]:
    for start in range(0, len(keys), 64):
        part = keys[start : start + 64]
        done = store.wait(store.submit_get([key_of(key) for key in part]))
        rows: list[np.ndarray[Any, Any]] = list(done.rows)
        for ok, row in zip(done.ok.tolist(), rows, strict=True):
            yield row.tobytes() if ok else b""
