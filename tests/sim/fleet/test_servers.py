"""The modelled Redis server answers as a real one does."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from servers import serving

from blockyard.errors import StoreError
from blockyard.stores.redis.lists import Lists
from blockyard.tools.sim.fleet.servers.redis_data import RedisData


def test_the_model_answers_as_a_real_server(tmp_path: Path):
    chance, data = random.Random(1), RedisData(lambda: 0.0, lambda value: None)
    lists = Lists(b"blockyard:test:", 12, has_quotas=True)
    tenants = [bytes([number]) * 16 for number in range(2)]
    with serving("valkey-server", tmp_path) as server, redis.Redis(port=server.port) as client:
        for _ in range(300):
            names = [bytes([chance.randrange(24)]) * 32 for _ in range(chance.randint(1, 4))]
            names = list(dict.fromkeys(names))
            owners = [chance.choice(tenants) + chance.choice((b"", bytes([name[0] ^ 1]) * 32)) for name in names]
            command = chance.choice(
                [
                    lists.settle(names, owners),
                    lists.settle(names),
                    lists.touch(names),
                    lists.drop(names),
                    lists.set_quota(chance.choice(tenants), chance.choice((None, 0, 2, 5))),
                    [b"UNLINK", chance.choice((b"blockyard:test:order", b"blockyard:test:leaves:" + tenants[0]))],
                    [b"GETEX", lists.prefix + chance.choice(names), b"PERSIST"],
                    *lists.quota(chance.choice(tenants)),
                    *([b"SET", lists.prefix + name, b"value"] for name in names),
                ]
            )
            if chance.random() < 0.2:
                data.is_full = not data.is_full
                client.config_set("maxmemory", int(data.is_full))
            assert _tried(data.run, command) == _plain(_tried(client.execute_command, *command)), command
            if not data.is_full and chance.random() < 0.1:
                assert _sweep(lists, data.run) == _sweep(lists, client.execute_command)
        assert set(data.values) == set(client.scan_iter())


def _sweep(lists: Lists, run: Callable[..., Any]) -> Any:
    """Run a sweep. Returns all keys that it found, and all other answers."""
    sweep, keys, answers = lists.sweep(bytes(16), b""), set[bytes](), set[Any]()
    command = next(sweep)
    with suppress(StopIteration):
        while True:
            answer = run(command) if run.__self__.__class__ is RedisData else run(*command)
            if isinstance(answer, list):
                keys.update(answer[1])
            else:
                answers.add(_plain(answer))
            command = sweep.send(answer)
    return keys, answers


def _tried(run: Callable[..., Any], *command: Any) -> Any:
    """Return the answer to a command, or that it was refused."""
    try:
        return run(*command)
    except (StoreError, redis.ResponseError):
        return "refused"


def _plain(answer: object) -> object:
    return b"OK" if answer is True else answer
