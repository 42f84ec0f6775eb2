"""Counts the contents of a Redis server at one moment, repeatedly: values, lists and quotas, with a single script.

The server runs the script between two transactions, so its counts are a consistent snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import redis

from blockyard.stores import ExternalStore
from blockyard.stores.redis import RedisStore

__all__ = ["BoundsWatch", "Counted"]

_COUNT: Final = """
local pattern, length, record = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local values, orphans, stored, orders, quotas = 0, 0, {}, {}, {}
for _, name in ipairs(redis.call('KEYS', pattern)) do
  if #name == length and name ~= record then
    values, orphans, stored[name] = values + 1, orphans + 1, true
  elseif string.sub(name, -6) == ':order' then orders[#orders + 1] = name
  elseif string.sub(name, -7) == ':quotas' then quotas[#quotas + 1] = name end
end
local listed, bare, most = 0, 0, 0
for _, order in ipairs(orders) do
  local names = redis.call('ZRANGE', order, 0, -1)
  listed, most = listed + #names, math.max(most, #names)
  for _, name in ipairs(names) do
    if stored[string.sub(order, 1, -6) .. name] then orphans = orphans - 1 else bare = bare + 1 end
  end
end
local tenants = {}
for _, name in ipairs(quotas) do
  local prefix, owned = string.sub(name, 1, -7), {}
  local owners = redis.call('HGETALL', prefix .. 'owners')
  for i = 1, #owners, 2 do
    local tenant = string.sub(owners[i + 1], 1, 16)
    if stored[prefix .. owners[i]] then owned[tenant] = (owned[tenant] or 0) + 1 else bare = bare + 1 end
  end
  local most_of = redis.call('HGETALL', name)
  for i = 1, #most_of, 2 do
    local held = tonumber(redis.call('HGET', prefix .. 'held', most_of[i])) or 0
    tenants[#tenants + 1] = {most_of[i], tonumber(most_of[i + 1]), held, owned[most_of[i]] or 0}
  end
end
return {values, listed, bare, orphans, most, tenants}
"""


class Counted(NamedTuple):
    """The contents of all nodes at one moment.

    Attributes:
        values: number of blocks.
        listed: number of list entries.
        bare: number of list and owner entries without a block.
        orphans: number of blocks without an entry.
        most: number of entries in the longest list.
        tenants: name, quota, usage and number of blocks of each tenant with a quota.
    """

    values: int
    listed: int
    bare: int
    orphans: int
    most: int
    tenants: tuple[Any, ...] = ()


@dataclass
class BoundsWatch:
    """Counts the contents of a server or of a cluster's nodes, in a thread.

    Attributes:
        clients: clients of the nodes.
        store: store over the nodes, for the names of keys.
        most: maximum number of entries of a list.
        wrong: violations found.
        samples: number of samples.
        is_full: whether the store has been full.
        least: minimum number of entries since then.
    """

    clients: Sequence[redis.Redis]
    store: ExternalStore
    most: int
    wrong: list[str] = field(default_factory=list)
    samples: int = 0
    is_full: bool = False
    highest: int = 0
    least: int = 1 << 62

    def count(self) -> Counted:
        """Count each node, one after the other."""
        assert isinstance(self.store, RedisStore)
        prefix = self.store._lists[0].prefix
        record = self.store._prefix + self.store._keyed_blocks.record.key
        pattern = b"blockyard:" + (b"{*" if len(self.clients) > 1 else b"*")
        found: list[Any] = [client.eval(_COUNT, 0, pattern, len(prefix) + 32, record) for client in self.clients]
        sums = [sum(one[index] for one in found) for index in range(4)]
        tenants = [tuple(tenant) for one in found for tenant in one[5]]
        return Counted(*sums, max(one[4] for one in found), tuple(tenants))

    @contextmanager
    def watching(self, pause: float = 0.03) -> Iterator[None]:
        """Count continuously within the context; raise any error of counting."""
        is_over, errors = threading.Event(), list[Exception]()

        def watch() -> None:
            try:
                while not is_over.wait(pause):
                    try:
                        found = self.count()
                    except redis.ConnectionError:  # troubles cut connections, also one just opened
                        found = self.count()
                    self.check(found)
            except Exception as error:  # noqa: BLE001 (raised below)
                errors.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        if errors:
            raise errors[0]

    def check(self, found: Counted) -> None:
        """Compare the contents with their limits."""
        size = self.store.num_slots
        self.samples += 1
        self.is_full = self.is_full or found.listed == size
        self.highest = max(self.highest, found.values)
        if self.is_full:
            self.least = min(self.least, found.listed)
        rules = {
            "more than 1.05 of the size": found.values <= 1.05 * size,
            "more than the size, all listed": found.orphans or found.values <= size,
            "less than .9 of the size is listed": not self.is_full or found.listed >= 0.9 * size,
            "a list that is too long": found.most <= self.most,
            "entries without blocks": not found.bare,
        }
        rules |= {
            f"a quota of {quota}, {held} held, {blocks} blocks": max(held, blocks) <= quota and held == blocks
            for _, quota, held, blocks in found.tenants
        }
        self.wrong += [
            f"{what}: {found}, size {size}, {time.monotonic_ns()}" for what, good in rules.items() if not good
        ]
