"""A model of a Redis server, and of the client that `RedisStore` uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreError
from blockyard.stores.redis import RedisStore, read_url
from blockyard.stores.redis.lists import DROP, IS_ABOVE
from blockyard.stores.value import HEADER
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError
from blockyard.tools.sim.fleet.servers.link import DEADLINE, Link, SentRequest, Server, is_record, key_in
from blockyard.tools.sim.fleet.servers.redis_data import RedisData
from blockyard.tools.sim.loop import Loop

__all__ = ["RedisLink", "RedisServer", "Unit"]

Unit = list[list[bytes]]  # commands that run in one step
_WAIT_SECONDS: Final = 0.01


class RedisServer(Server):
    """The keys, and the server's faults.

    Attributes:
        nodes: the keys; a cluster has several nodes.
        clock_step: seconds by which the server's clock is ahead.
        may_miscount: keys were lost, so the lists may lack blocks.
        is_failing: whether a replica is taking a server's place; one at a time.

    Args:
        loop: provides time and randomness.
        watch: called with each value that is about to be stored.
        watch_deletion: called with each intact value that is about to be deleted; see `Spoiled`.
        capacity: maximum number of blocks.
        ttl: seconds after which it drops a block; 0 for never.
    """

    def __init__(
        self,
        loop: Loop,
        watch: Callable[[bytes], None],
        watch_deletion: Callable[[bytes, float], None],
        *,
        capacity: int,
        ttl: float = 0.0,
    ) -> None:
        super().__init__(loop, watch_deletion)
        self.nodes = [RedisData(self.time, watch)]
        self.clock_step = 0.0
        self.may_miscount = self.is_failing = False
        self.capacity, self.ttl = capacity, ttl

    @property
    def data(self) -> RedisData:
        """The keys of the first node."""
        return self.nodes[0]

    @property
    def is_full(self) -> bool:
        """Whether it refuses writes."""
        return self.data.is_full

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        for node in self.nodes:
            node.is_full = is_full

    def time(self) -> float:
        """Return the server's time."""
        return self.loop.now + self.clock_step

    def connect(self) -> RedisLink:
        """Return a link for one engine."""
        return RedisLink(self)

    def run(self, node: RedisData, unit: Unit) -> list[Any]:
        """Run commands on a node in one step. Returns the answers; a refused command's is a StoreError.

        Several commands are a transaction: if the first is refused for lack of memory, none runs.
        """
        self._note_values(node, unit[0])
        before = _held(node, unit[0])
        first = _try(node, unit[0])
        if isinstance(first, StoreError):
            return [first] * len(unit)
        answers = [first, *(_try(node, command) for command in unit[1:])]
        if unit[-1][0] == b"EVAL":
            self._check_bounds()
        if before is not None and first == 1 and before == _held(node, unit[0]):
            raise BrokenPromiseError("a call that sets a quota drops no block, and asks for another call")
        return answers

    def _note_values(self, node: RedisData, command: list[bytes]) -> None:
        """Record which values a command reads or deletes, not to make room. Neither shares a step with others."""
        if command[0] == b"GET":
            names = command[1:]
            act = self._spoiled.send
        elif command[0] == b"EVAL" and command[1].endswith(DROP.encode()):
            names = [command[3].removesuffix(b"order") + name for name in command[4:]]
            act = self._spoiled.delete
        else:
            return
        for name in names:
            if isinstance(value := node.values.get(name), bytes):
                act(name, value)

    def lose(self, share: float) -> None:
        """Lose keys, including lists, like a server that evicts on its own."""
        self.may_miscount = True
        for node in self.nodes:
            for name in [name for name in node.values if self.loop.random.random() < share]:
                node.drop(name)

    def _values(self) -> list[tuple[tuple[RedisData, bytes], bytes]]:
        return [
            ((node, name), value)
            for node in self.nodes
            for name, value in node.values.items()
            if isinstance(value, bytes)
        ]

    def _replace(self, place: tuple[RedisData, bytes], value: bytes | None) -> None:
        node, name = place
        if value is None:
            node.drop(name)
        else:
            node.values[name] = value

    def stop_replica(self) -> int:
        """Let the replica of a node fall behind from now on. Returns the node's number."""
        self.data.stop_replica()
        return 0

    def fail_over(self, number: int) -> None:  # noqa: ARG002 (a cluster has several nodes)
        """Switch to a node's replica: everything stored since `stop_replica` is lost."""
        self.data.fail_over(1 - self.data.server)

    def num_unlisted(self) -> int:
        """Return how many blocks are in no list."""
        values = {name: value for node in self.nodes for name, value in node.values.items()}
        return sum(name[-32:] not in values.get(name[:-32] + b"order", ()) for name in self._blocks())

    def capacity_of(self, prefix: bytes) -> int:  # noqa: ARG002 (a cluster has segments)
        """Return the maximum number of blocks with a prefix."""
        return self.capacity

    def _blocks(self) -> list[bytes]:
        values = self._values()
        return [name for (_, name), value in values if len(value) > HEADER and not is_record(value)]

    def _check_bounds(self) -> None:
        """Check that no more blocks are stored than the store's size and quotas allow.

        Raises:
            BrokenPromiseError: a limit is exceeded.
        """
        if self.may_miscount:
            return
        names = self._blocks()
        for prefix, count in Counter(name[:-32] for name in names).items():
            if count > self.capacity_of(prefix):
                raise BrokenPromiseError(f"the server has {count} blocks, the store's size is {self.capacity}")
        self._check_quotas({name[-32:] for name in names})

    def _check_quotas(self, blocks: set[bytes]) -> None:
        lists = {name.rpartition(b":")[2]: value for name, value in self.data.values.items() if isinstance(value, dict)}
        for tenant, most in lists.get(b"quotas", {}).items():
            held = sum(owner[:16] == tenant and name in blocks for name, owner in lists.get(b"owners", {}).items())
            if tenant and held > int(most):
                raise BrokenPromiseError(f"a tenant has {held} blocks, its quota is {int(most)}")


class RedisLink(Link):
    """The link from one engine to the server; it replaces `RedisClient`.

    A request is a pipeline of units. Other engines' commands may run between two units, and only part of a killed
    engine's last request may arrive.

    Attributes:
        scheme: scheme of the store's URL.
        options: more options of the store.
    """

    scheme = "redis"
    options: Mapping[str, int] = {}

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server, DEADLINE, StoreError)
        self.server = server

    def open(self, revision: str, bytes_per_block: int) -> RedisStore:
        """Open a store on the server."""
        return RedisStore(
            read_url(f"{self.scheme}://server?size=1MiB&timeout_base={DEADLINE}&ttl={self.server.ttl}"),
            bytes_per_block=bytes_per_block,
            num_slots=self.server.capacity,
            namespace=bytes(32),
            use="prefix",
            revision=revision,
            connect=lambda **_: self,
            **self.options,
        )

    def put(
        self,
        names: Sequence[bytes],
        rows: NDArray[np.uint8],
        *,
        ttl_ms: int | None = None,
        lengths: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        last: Sequence[list[bytes]] | None = None,
    ) -> tuple[NDArray[np.bool_], list[Any], str | None]:
        """Store values; see `RedisClient.put`."""
        if lengths is not None or sizes is None or last is None:
            raise NotImplementedError
        ttl = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
        sets = [[b"SET", name, row.tobytes(), *ttl] for name, row in zip(names, rows, strict=True)]
        ends = list(accumulate(sizes))
        units = [[*sets[end - size : end], command] for size, end, command in zip(sizes, ends, last, strict=True)]
        try:
            done, why = self._request(units)
        except StoreError:
            self.given_up.update(key_in(row.data) for row in rows)
            raise
        if why is not None:
            self.given_up.update(key_in(row.data) for row in rows)
        stored = [answer == b"OK" for answers in done for answer in answers[:-1]]
        return np.array(stored, np.bool_), [answers[-1] for answers in done], why

    def get(
        self,
        names: Sequence[bytes],
        out: NDArray[np.uint8],
        *,
        varies: bool = False,
        head_bytes: int = 0,
        first: Sequence[list[bytes]] | None = None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8], list[Any], str | None]:
        """Read values; see `RedisClient.get`."""
        if varies:
            raise NotImplementedError
        asked = list(first or ())
        answers, why = self.run(asked + [[b"GET", name] for name in names])
        heads, found = np.zeros((len(names), head_bytes), np.uint8), np.zeros(len(names), np.bool_)
        for index, value in enumerate(answers[len(asked) :]):
            if isinstance(value, StoreError):
                raise value
            found[index] = value is not None
            if value is not None and len(value) == head_bytes + out.shape[1]:
                heads[index] = np.frombuffer(value[:head_bytes], np.uint8)
                out[index] = np.frombuffer(value[head_bytes:], np.uint8)
        return found, heads, answers[: len(asked)], why

    def run(self, commands: Sequence[list[bytes]]) -> tuple[list[Any], str | None]:
        """Run commands; see `RedisClient.run`."""
        done, why = self._request([[command] for command in commands])
        if any(command[0] == b"WAIT" for command in commands):
            self.server.loop.sleep(_WAIT_SECONDS)
        return [answer for (answer,) in done], why

    def receive(self, request: SentRequest, seconds: float) -> list[Any]:
        """Wait for a request's answers."""
        answers = super().receive(request, seconds)
        return self._carried(answers) if self.garbling else answers

    def _carried(self, answer: Any) -> Any:
        if type(answer) is list:
            return [self._carried(each) for each in answer]
        return self.carried(answer) if isinstance(answer, bytes) else answer

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def _request(self, units: list[Unit]) -> tuple[list[list[Any]], str | None]:
        """Run units. Returns their answers, and why some have none."""
        return self.call(*(partial(self.server.run, self.server.data, unit) for unit in units)), None


def _held(node: RedisData, command: list[bytes]) -> list[dict[bytes, Any]] | None:
    """Return what a command that sets a quota goes by: the numbers of blocks, and the tenant's last ones."""
    if command[0] != b"EVAL" or not command[1].endswith(IS_ABOVE.encode()):
        return None
    prefix, tenant = command[3].removesuffix(b"order"), command[4]
    return [dict(node.values.get(prefix + name) or {}) for name in (b"held", b"leaves:" + tenant)]


def _try(node: RedisData, command: list[bytes]) -> Any:
    try:
        return node.run(command)
    except StoreError as error:
        return error
