"""Tensor parallelism for `Generator`: this process is rank 0, and starts a worker process for each other rank.

Each process holds its share of the heads: weights, blocks in all tiers, and its own swap store. The driver sends each
step's decision and input to the workers; the ranks exchange only the sums of the row-parallel layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
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
from blockyard.stores.url import public_repr, rank_url
from blockyard.workers.ownership import Process

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheOptions", "RankGroup", "run_worker"]

_LOOPBACK: Final = "127.0.0.1"
# How long a worker may take to exit by itself, and how long to search for the cause when ranks lose each other.
_PARTING_SECONDS: Final = 10.0
_ONE_TOKEN: Final = np.zeros(1, np.int64)  # the only token whose logits a worker computes; only rank 0 samples
_EXIT_SECONDS: Final = 2.0
EXIT_RANK_LOST: Final = 3
"""Exit code of a worker that lost another rank."""


class CacheSizes(NamedTuple):
    """Sizes of a cache: in blocks, or in bytes; see `KVCache`."""

    device_blocks: int | None
    device_bytes: int | str | None
    host_blocks: int | None
    host_bytes: int | str | None


class CacheOptions(NamedTuple):
    """Options shared by all ranks' caches.

    Attributes:
        sizes: of device and host.
        pin_memory: see `KVCache`.
        swap_store: URL, with `{rank}` where ranks differ; None for none. With one rank, an open store.
        namespace: namespace of the store, without the rank.
        max_staging: see `KVCache`.
    """

    sizes: CacheSizes
    pin_memory: bool | None
    swap_store: str | ExternalStore | None
    namespace: bytes
    max_staging: str = "1GiB"

    def __repr__(self) -> str:
        return f"CacheOptions({self.sizes}, {public_repr(self.swap_store)})"

    def of_rank(self, rank: int, size: int) -> dict[str, Any]:
        """Return the arguments for one rank's `KVCache`. Ranks have separate namespaces, as their bytes differ."""
        return {
            **self.sizes._asdict(),
            "pin_memory": self.pin_memory,
            "max_staging": self.max_staging,
            "swap_store": rank_url(self.swap_store, rank) if isinstance(self.swap_store, str) else self.swap_store,
            "namespace": self.namespace if size == 1 else self.namespace + b" rank %d of %d" % (rank, size),
        }


class _Start(NamedTuple):
    """The first message to a worker, followed by the bytes of its share of the model.

    Attributes:
        meeting: rendezvous file of the ranks.
        rank: rank of the worker.
        size: number of ranks.
        threads: number of threads that torch may use per operation.
        block_size: tokens in a block.
        kind: layout of the device caches.
        timeout: seconds that a rank waits for another.
    """

    meeting: str
    rank: int
    size: int
    threads: int
    block_size: int
    kind: LayoutKind
    timeout: float


class _GlooGroup:
    """The ranks' process group: gloo over the loopback device, separate from torch's default group."""

    def __init__(self, meeting: str, rank: int, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._process = Process("a group of ranks")
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
        with self._naming_losses():
            store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]  # torch exports it without saying so
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        _groups.add(self)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        self._process.check()
        if self._group is None:
            raise WorkerError("the ranks' connections are closed")
        with self._naming_losses():
            self._group.allreduce([tensor]).wait()

    def close(self) -> None:
        """Close the connections to the other ranks; ranks waiting for this one get an error."""
        self._group = None

    def disown(self) -> None:
        """Prevent a fork from ending the group: its end would wait for threads that a fork does not have."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    @contextmanager
    def _naming_losses(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _RankLostError(f"a rank has ended, or did not answer within {self._timeout:g} s: {error}") from error


class _RankLostError(WorkerError):
    """Another rank cannot be reached."""


class RankGroup:
    """The ranks of a tensor-parallel model; this process is rank 0.

    Args:
        model: the whole model, on the CPU.
        size: number of ranks, at least 2.
        block_size: tokens in a block.
        kind: layout of the device caches.

    Attributes:
        model: rank 0's `PagedModel`; `forward` of this class runs it together with the workers'.
        processes: the workers, rank 1 first.

    Raises:
        InvalidArgumentError: the KV heads cannot be shared by `size` ranks, or the model is not on the CPU.
        UnsupportedModelError: the model cannot be sharded, or its logits differ when it is.
        WorkerError: a worker failed or does not respond.
    """

    def __init__(self, model: PreTrainedModel, size: int, *, block_size: int, kind: LayoutKind) -> None:
        require_divisible(model, size)
        if model.device.type != "cpu":
            raise InvalidArgumentError(
                f"tensor_parallel_size is {size} and the model is on {model.device}, must be on the CPU"
            )
        share = shard_model(model, 0, size)  # raises before any process starts
        self._size = size
        self._timeout = ANSWER_SECONDS
        self._is_computing = False
        self._group: _GlooGroup | None = None
        self._folder: str | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._workers: list[RemoteExecutor] = []
        _groups.add(self)
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
                self._group = group = _GlooGroup(meeting, 0, size, self._timeout)
                self.model = PagedModel(
                    share, block_size=block_size, kind=kind, all_reduce=group.all_reduce, whole=model
                )
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"RankGroup({self._size} ranks, workers {[process.pid for process in self.processes]})"

    def open_caches(self, options: CacheOptions) -> int | None:
        """Create the workers' caches.

        Args:
            options: the same for all ranks.

        Returns:
            The minimum number of slots in any worker's swap store; None without one.
        """
        answers = [worker.begin("ask", options) for worker in self._workers]
        found = [answer() for answer in answers]
        return None if options.swap_store is None else min(found)

    def executor(self, own: StepExecutor) -> ParallelExecutor:
        """Combine rank 0's executor with those of the workers."""
        return ParallelExecutor([own, *self._workers])

    def forward(
        self,
        token_ids: NDArray[np.integer],
        where: StepInput,
        *,
        logits_indices: NDArray[np.integer] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute the tokens of the last submitted step on all ranks; see `PagedModel.forward`.

        Raises:
            WorkerError: a rank is lost, or an earlier call was interrupted, so that the ranks are out of sync.
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
        """Stop all workers, and kill those that do not exit by themselves. Idempotent."""
        for connection in self._connections:
            connection.close()
        if self._group is not None:
            self._group.close()
        deadline = time.monotonic() + _PARTING_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203 (each is handled separately)
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def disown(self) -> None:
        """Leave workers and folder of a fork's parent to the parent. If that closes its connections, workers notice."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.poll()  # notes that it is no child of this process
        self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        # A hanging worker must not block writers to it.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self._timeout), 0))
        with theirs:
            connection = Connection(ours.detach())
            self._connections.append(connection)
            command = [sys.executable, "-m", "blockyard.integrations.transformers.worker", str(theirs.fileno())]
            # Ctrl-C in the terminal reaches only the driver, which then stops its workers.
            self.processes.append(
                subprocess.Popen(  # noqa: S603 (a module of this package)
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
        self._workers.append(RemoteExecutor(connection, name=f"rank {rank}", timeout=self._timeout))

    def _send_share(self, rank: int, start: _Start, share: PreTrainedModel) -> Callable[[], Any]:
        """Send a worker its share of the model. Returns a call that waits until the worker has it."""
        buffer = io.BytesIO()
        torch.save(share, buffer)
        worker = self._workers[rank - 1]
        worker.tell(start)
        return worker.begin("ask", buffer.getvalue())

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Name the worker whose exit broke the ranks' communication."""
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


# What a fork must leave to its parent.
_groups: weakref.WeakSet[_GlooGroup | RankGroup] = weakref.WeakSet()


def _disown_groups() -> None:
    for group in _groups:
        group.disown()


os.register_at_fork(after_in_child=_disown_groups)


def run_worker(file: int) -> int:
    """Run a worker: receive a share of the model, then carry out decisions and compute steps until the driver closes.

    Args:
        file: descriptor of the socket to the driver.

    Returns:
        The exit code.
    """
    with Connection(file) as connection:
        try:
            _work(connection)
        except EOFError:  # the driver exited before the worker was ready
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
    group = _GlooGroup(start.meeting, start.rank, start.size, start.timeout)
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
