"""Tensor parallelism for `Generator`: this process is rank 0, and starts a worker process for each other rank.

Each process holds its share of the heads: weights, blocks in all tiers, and its own swap store. The driver sends
each step's decision and input to the workers; only the sums of the row-parallel layers pass between the ranks.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from blockyard.cache import KVCache
from blockyard.errors import InvalidArgumentError, WorkerError
from blockyard.executor.executor import StepExecutor
from blockyard.executor.parallel import ParallelExecutor
from blockyard.executor.remote import ANSWER_SECONDS, RemoteExecutor, serve_executor
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.model import PagedModel
from blockyard.integrations.transformers.sharding import require_divisible, shard_model
from blockyard.layout.kv import LayoutKind
from blockyard.stores import ExternalStore
from blockyard.stores.url import rank_url

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheOptions", "RankGroup", "run_worker"]

_LOOPBACK: Final = "127.0.0.1"
# How long a worker may take to end by itself, and how long to look for the reason when the ranks lose each other.
_PARTING_SECONDS: Final = 10.0
_ONE_TOKEN: Final = np.zeros(1, np.int64)  # whose logits a worker computes; only rank 0 samples
_EXIT_SECONDS: Final = 2.0
EXIT_RANK_LOST: Final = 3
"""Exit code of a worker that has lost another rank."""


class CacheOptions(NamedTuple):
    """What all ranks' caches have in common.

    Attributes:
        device_blocks: blocks of the device.
        host_blocks: blocks of the host.
        pin_memory: see `KVCache`.
        swap_store: URL, with `{rank}` where ranks differ; None for none. With one rank, an open store.
        namespace: of the store, before the rank is added.
        max_staging: see `KVCache`.
    """

    device_blocks: int
    host_blocks: int
    pin_memory: bool | None
    swap_store: str | ExternalStore | None
    namespace: bytes
    max_staging: str

    def of_rank(self, rank: int, size: int) -> dict[str, Any]:
        """Give the arguments for one rank's `KVCache`. No two ranks share a namespace: their bytes differ."""
        return {
            **self._asdict(),
            "swap_store": rank_url(self.swap_store, rank) if isinstance(self.swap_store, str) else self.swap_store,
            "namespace": self.namespace if size == 1 else self.namespace + b" rank %d of %d" % (rank, size),
        }


class _Start(NamedTuple):
    """The first message to a worker; the bytes of its share of the model follow.

    Attributes:
        meeting: file by which the ranks find each other.
        rank: of the worker.
        size: number of ranks.
        threads: that torch may use for one operation.
        block_size: tokens in a block.
        kind: how the device's caches are laid out.
        timeout: seconds that a rank may wait for another.
    """

    meeting: str
    rank: int
    size: int
    threads: int
    block_size: int
    kind: LayoutKind
    timeout: float


class _Group:
    """The ranks' process group: gloo over the loopback device, apart from torch's default group."""

    def __init__(self, meeting: str, rank: int, size: int, timeout: float) -> None:
        self._timeout = timeout
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
        with self._naming_losses():
            store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]  # torch exports it without saying so
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a tensor of all ranks, in place."""
        if self._group is None:
            raise WorkerError("the ranks' connections are closed")
        with self._naming_losses():
            self._group.allreduce([tensor]).wait()

    def close(self) -> None:
        """Close the connections to the other ranks; one that waits for this rank gets an error."""
        self._group = None

    @contextmanager
    def _naming_losses(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _RankLostError(f"a rank has ended, or did not answer within {self._timeout:g} s: {error}") from error


class _RankLostError(WorkerError):
    """Another rank is not reached."""


class RankGroup:
    """The ranks of a tensor-parallel model, of which this process is rank 0.

    Args:
        model: the whole model, on the CPU.
        size: number of ranks, at least 2.
        block_size: tokens in a block.
        kind: how the device's caches are laid out.

    Attributes:
        model: rank 0's `PagedModel`; `forward` of this class runs it together with the workers'.
        processes: the workers, rank 1 first.

    Raises:
        InvalidArgumentError: the KV heads cannot be shared by `size` ranks, or the model is not on the CPU.
        UnsupportedModelError: the model cannot be cut, or gives other logits when it is.
        WorkerError: a worker has failed, or does not answer.
    """

    def __init__(self, model: PreTrainedModel, size: int, *, block_size: int, kind: LayoutKind) -> None:
        require_divisible(model, size)
        if model.device.type != "cpu":
            raise InvalidArgumentError(
                f"tensor_parallel_size is {size} and the model is on {model.device}, must be on the CPU"
            )
        share = shard_model(model, 0, size)  # refuses before any process starts
        self._size = size
        self._timeout = ANSWER_SECONDS
        self._is_computing = False
        self._group: _Group | None = None
        self._folder: str | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._workers: list[RemoteExecutor] = []
        try:
            self._folder = tempfile.mkdtemp(prefix="blockyard-ranks-")
            meeting = str(Path(self._folder) / "meeting")
            for rank in range(1, size):
                self._start(rank)
            threads = max(1, torch.get_num_threads() // size)
            starts = [_Start(meeting, rank, size, threads, block_size, kind, self._timeout) for rank in range(size)]
            taken = [self._send_share(rank, starts[rank], shard_model(model, rank, size)) for rank in range(1, size)]
            for answer in taken:
                answer()
            with self._explaining():
                self._group = group = _Group(meeting, 0, size, self._timeout)
                self.model = PagedModel(
                    share, block_size=block_size, kind=kind, all_reduce=group.all_reduce, whole=model
                )
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"RankGroup({self._size} ranks, workers {[process.pid for process in self.processes]})"

    def open_caches(self, options: CacheOptions) -> int | None:
        """Have the workers make their caches.

        Args:
            options: the same for all ranks.

        Returns:
            The fewest slots that a worker's swap store has; None without one.
        """
        answers = [worker.begin("ask", options) for worker in self._workers]
        found = [answer() for answer in answers]
        return None if options.swap_store is None else min(found)

    def executor(self, own: StepExecutor) -> ParallelExecutor:
        """Join rank 0's executor with those of the workers."""
        return ParallelExecutor([own, *self._workers])

    def forward(
        self,
        token_ids: NDArray[np.integer],
        where: StepInput,
        *,
        logits_indices: NDArray[np.integer] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute the tokens of the step whose decision was submitted last, on all ranks; see `PagedModel.forward`.

        Raises:
            WorkerError: a rank is lost, or an earlier call was interrupted: the ranks no longer compute the same.
        """
        if self._is_computing:
            raise WorkerError("a step was interrupted while the ranks computed it: make a new Generator")
        self._is_computing = True
        for worker in self._workers:
            worker.tell((token_ids, where))
        with self._explaining():
            logits = self.model.forward(token_ids, where, logits_indices=logits_indices, before_layer=before_layer)
        self._is_computing = False
        return logits

    def close(self) -> None:
        """End all workers; twice does nothing. One that does not end by itself is killed."""
        for connection in self._connections:
            connection.close()
        if self._group is not None:
            self._group.close()
        deadline = time.monotonic() + _PARTING_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203 (each has its own end)
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        # A worker that hangs must not hold up who writes to it.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self._timeout), 0))
        with theirs:
            connection = Connection(ours.detach())
            self._connections.append(connection)
            command = [sys.executable, "-m", "blockyard.integrations.transformers.worker", str(theirs.fileno())]
            # A Ctrl-C in the terminal reaches the driver alone, which then ends its workers.
            self.processes.append(
                subprocess.Popen(  # noqa: S603 (a module of this package)
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
        self._workers.append(RemoteExecutor(connection, name=f"rank {rank}", timeout=self._timeout))

    def _send_share(self, rank: int, start: _Start, share: PreTrainedModel) -> Callable[[], Any]:
        """Send a worker its share of the model; the result waits until the worker has it."""
        buffer = io.BytesIO()
        torch.save(share, buffer)
        worker = self._workers[rank - 1]
        worker.tell(start)
        return worker.begin("ask", buffer.getvalue())

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Name the worker whose end has stopped the ranks' communication."""
        try:
            yield
        except _RankLostError as error:
            deadline = time.monotonic() + _EXIT_SECONDS
            while time.monotonic() < deadline and all(process.poll() is None for process in self.processes):
                time.sleep(0.01)
            ended = [rank for rank, process in enumerate(self.processes, 1) if process.poll() is not None]
            # Workers that only lost another rank come last.
            for rank in sorted(ended, key=lambda rank: self.processes[rank - 1].returncode == EXIT_RANK_LOST):
                code, why = self.processes[rank - 1].returncode, f"rank {rank} has ended"
                try:
                    self._workers[rank - 1].poll()
                except WorkerError as reason:
                    why = str(reason)
                raise WorkerError(f"{why} (exit code {code})") from error
            raise WorkerError(str(error)) from error


def run_worker(file: int) -> int:
    """Be a worker: take a share of the model, then carry out decisions and compute steps until the driver closes.

    Args:
        file: descriptor of the socket to the driver.

    Returns:
        The exit code.
    """
    with Connection(file) as connection:
        try:
            _work(connection)
        except EOFError:  # the driver has ended before the worker was ready
            return 0
        except Exception as error:
            with contextlib.suppress(OSError):
                connection.send(("failed", f"{type(error).__name__}: {error}"))
            if isinstance(error, _RankLostError):
                return EXIT_RANK_LOST
            raise
    return 0


def _work(connection: Connection) -> None:
    (_, start), (_, saved) = connection.recv(), connection.recv()
    share = torch.load(io.BytesIO(saved), weights_only=False)
    del saved
    torch.set_num_threads(start.threads)
    connection.send(("result", None))
    group = _Group(start.meeting, start.rank, start.size, start.timeout)
    model = PagedModel(share, block_size=start.block_size, kind=start.kind, all_reduce=group.all_reduce)
    _, options = connection.recv()
    with KVCache(model.layout, **options.of_rank(start.rank, start.size)) as cache:
        model.bind(cache.engine.tensors)
        connection.send(("result", 0 if cache.swap_store is None else cache.swap_store.num_slots))

        def compute(step: tuple[NDArray[np.integer], StepInput], ticket: int) -> None:
            token_ids, where = step
            wait = partial(cache.executor.wait_for_layer, ticket)
            model.forward(token_ids, where, logits_indices=_ONE_TOKEN, before_layer=wait)

        serve_executor(connection, cache.executor, compute)
