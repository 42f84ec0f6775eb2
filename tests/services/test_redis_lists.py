"""What a Redis server lists and drops, beside a plain model: random puts, reads, deletions, quotas and lost lists."""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from listed_blocks import ListedBlocks
from servers import SERVERS, Server, serving

from blockyard.stores.redis.lists import Lists

PREFIX = b"blockyard:0011223344556677:"
TENANTS = [bytes([number]) * 16 for number in range(3)]
DEPTH = 6


def name_of(tenant: bytes, path: tuple[int, ...]) -> bytes:
    return hashlib.sha256(tenant + bytes(path)).digest()


TENANT = st.sampled_from(TENANTS)
PATH = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)
BLOCKS = st.lists(st.tuples(TENANT, PATH), min_size=1, max_size=8, unique=True)


class ListsMachine(RuleBasedStateMachine):
    """The commands of `Lists` over a server that is empty at first."""

    client: "redis.Redis"

    @initialize(capacity=st.integers(1, 30), has_quotas=st.booleans())
    def start(self, capacity: int, has_quotas: bool):
        self.client.flushall()
        self.has_quotas = has_quotas
        self.lists = Lists(PREFIX, capacity, has_quotas=has_quotas)
        self.model = ListedBlocks(capacity)

    def run(self, *commands: list[bytes]) -> list[Any]:
        pipe = self.client.pipeline(transaction=True)
        for command in commands:
            pipe.execute_command(*command)
        return list(pipe.execute())

    def put(self, blocks: list[tuple[bytes, tuple[int, ...]]], *, owned: bool, whose: bytes | None = None) -> None:
        names = [name_of(*block) for block in blocks]
        owners = [(whose or tenant, name_of(tenant, path[:-1]) if len(path) > 1 else b"") for tenant, path in blocks]
        owned = owned and self.has_quotas
        settle = self.lists.settle(names, [tenant + parent for tenant, parent in owners] if owned else None)
        was_empty = not self.model.uses
        swept, quotas, *refused = self.run(*([b"SET", PREFIX + name, name] for name in names), settle)[-1]
        assert refused == self.model.settle(names, owners if owned else None)
        assert bool(quotas) == self.model.was_set
        assert swept or not was_empty, "a list that was empty may have been lost"

    @rule(tenant=TENANT, path=PATH, first=st.integers(0, DEPTH - 1), owned=st.booleans())
    def put_a_chain(self, tenant: bytes, path: tuple[int, ...], first: int, owned: bool):
        first = min(first, len(path) - 1)
        self.put([(tenant, path[: length + 1]) for length in range(first, len(path))], owned=owned)

    @rule(blocks=BLOCKS, owned=st.booleans(), whose=st.none() | TENANT)
    def put_any(self, blocks: list[tuple[bytes, tuple[int, ...]]], owned: bool, whose: bytes | None):
        self.put(blocks, owned=owned, whose=whose)

    @rule(blocks=BLOCKS)
    def read(self, blocks: list[tuple[bytes, tuple[int, ...]]]):
        names = [name_of(*block) for block in blocks]
        self.run(self.lists.touch(names))
        self.model.touch(names)

    @rule(blocks=BLOCKS)
    def delete(self, blocks: list[tuple[bytes, tuple[int, ...]]]):
        names = [name_of(*block) for block in blocks]
        self.run(self.lists.drop(names))
        for name in names:
            self.model.drop(name)

    @rule(tenant=TENANT, quota=st.none() | st.integers(0, 12))
    def set_quota(self, tenant: bytes, quota: int | None):
        if self.has_quotas:
            while self.run(self.lists.set_quota(tenant, quota))[0]:
                pass
            self.model.set_quota(tenant, quota)

    @rule(deleted=BLOCKS, lost=st.sampled_from((b"order", b"parents", b"children", b"parents children")))
    def lose_a_list_and_sweep(self, deleted: list[tuple[bytes, tuple[int, ...]]], lost: bytes):
        """As when the server drops a list for want of memory: blocks without an entry are found again.

        Some of them are deleted after the sweep has seen their names.
        """
        if self.model.owners or (lost != b"order" and not self.model.uses.keys() & set(self.model.parents.values())):
            return
        names = sorted(self.model.uses)
        self.client.delete(*(PREFIX + each for each in lost.split()))
        self.model.uses.clear()
        self.put([deleted[0]], owned=False)
        gone = [name_of(*block) for block in deleted[1:]]
        answers: list[Any] = []
        sweep = self.lists.sweep(bytes(16), b"")
        command = next(sweep)
        with suppress(StopIteration):
            while True:
                answers += self.run(command)
                if isinstance(answers[-1], list):
                    self.run(self.lists.drop(gone))
                command = sweep.send(answers[-1])
        self.model.adopt([name for name in names if name not in gone])
        assert answers[-1] == 1
        assert self.client.exists(PREFIX + b"listed")
        assert not self.client.exists(PREFIX + b"sweeper")

    @invariant()
    def server_and_model_agree(self):
        if not hasattr(self, "model"):
            return
        model, client = self.model, self.client
        assert client.zrange(PREFIX + b"order", 0, -1) == model.order()
        stored = {name[-32:] for name in client.scan_iter() if len(name) == len(PREFIX) + 32}
        assert stored == set(model.uses)
        assert len(stored) <= model.capacity
        owners = {name: (owner[:16], owner[16:]) for name, owner in client.hgetall(PREFIX + b"owners").items()}
        assert owners == model.owners
        kids: dict[bytes, int] = {}
        for tenant, parent in model.owners.values():
            if parent:
                kids[tenant + parent] = kids.get(tenant + parent, 0) + 1
        assert {name: int(count) for name, count in client.hgetall(PREFIX + b"kids").items()} == kids
        for tenant in TENANTS:
            held, most = self.run(*self.lists.quota(tenant))
            assert int(held or 0) == len(model.held(tenant))
            assert (None if most is None else int(most)) == model.quotas.get(tenant)
            assert int(held or 0) <= model.quotas.get(tenant, 1 << 30)
            assert client.zrange(PREFIX + b"leaves:" + tenant, 0, -1) == model.leaves(tenant)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(request.param, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_server_lists_and_drops_what_the_model_does(server: Server, examples: int):
    with redis.Redis(port=server.port) as client:
        machine = type("Machine", (ListsMachine,), {"client": client})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
        )
