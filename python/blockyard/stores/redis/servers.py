"""The servers behind a Redis store: one, or a cluster. They run commands over connections that redis-py opens."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreError
from blockyard.stores.redis.resp import Answer, Command, ReplyError, exchange

if TYPE_CHECKING:
    from blockyard.stores.redis.store import RedisURL

__all__ = ["RedisCluster", "RedisServer"]

_CONNECT_SECONDS: Final = 2.0
_MOVED: Final = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN")
Takes: TypeAlias = Callable[[NDArray[np.uint8], int], bool]


class RedisServer:
    """One server."""

    def __init__(self, found: "RedisURL") -> None:
        redis, options = _redis(found)
        self._client = redis.Redis(**options)

    def run(self, commands: Sequence[Command], takes: Takes) -> list[Answer]:
        """Run commands. Returns an answer each; raises what the client raises."""
        return _run(self._client.connection_pool, commands, takes)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class RedisCluster:
    """A cluster: each command goes to the node that has its key."""

    def __init__(self, found: "RedisURL") -> None:
        redis, options = _redis(found)
        del options["db"]
        try:
            self._client: Any = redis.RedisCluster(**options)
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            raise StoreError(f"{found.parts.url!r}: {type(error).__name__}: {error}") from None
        self._one_refresh = threading.Lock()
        self._is_stale = False

    def run(self, commands: Sequence[Command], takes: Takes) -> list[Answer]:
        """Run commands. Returns an answer each; raises what the client raises."""
        answers = self._run_once(commands, takes)
        moved = [index for index, answer in enumerate(answers) if _has_moved(answer)]
        if moved:
            self._is_stale = True
            again = self._run_once([commands[index] for index in moved], takes)
            for index, answer in zip(moved, again, strict=True):
                answers[index] = answer
        return answers

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _run_once(self, commands: Sequence[Command], takes: Takes) -> list[Answer]:
        manager = self._client.nodes_manager
        with self._one_refresh:
            if self._is_stale:
                manager.initialize()
                self._is_stale = False
        nodes: dict[str, tuple[Any, list[int]]] = {}
        for index, command in enumerate(commands):
            node = manager.get_node_from_slot(self._client.keyslot(command.key))
            nodes.setdefault(node.name, (node, []))[1].append(index)
        answers: list[Answer] = [None] * len(commands)
        try:
            for node, indexes in nodes.values():
                pool = self._client.get_redis_connection(node).connection_pool
                found = _run(pool, [commands[index] for index in indexes], takes)
                for index, answer in zip(indexes, found, strict=True):
                    answers[index] = answer
        except Exception:
            self._is_stale = True  # another node may have taken its place
            raise
        return answers


def _has_moved(answer: Answer) -> bool:
    return isinstance(answer, ReplyError) and str(answer).startswith(_MOVED)


def _run(pool: Any, commands: Sequence[Command], takes: Takes) -> list[Answer]:
    connection = pool.get_connection()
    try:
        return exchange(connection._sock, commands, takes)  # noqa: SLF001 (redis-py has no other way to it)
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _redis(found: "RedisURL") -> tuple[Any, dict[str, Any]]:
    """Return the module redis, and the options of a client that retries nothing."""
    try:
        import redis  # noqa: PLC0415 (an extra)
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(f"{found.parts.url!r} needs redis-py ({error}): pip install 'blockyard[redis]'") from None
    timeouts = {"socket_timeout": found.deadline, "socket_connect_timeout": min(found.deadline, _CONNECT_SECONDS)}
    return redis, {**found.client, **timeouts, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
