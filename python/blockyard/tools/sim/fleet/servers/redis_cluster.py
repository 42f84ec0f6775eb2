"""A model of a Redis cluster, whose nodes fail and whose slots move, and of the client that `RedisStore` uses."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from blockyard.errors import StoreError
from blockyard.tools.sim.fleet.servers.link import DEADLINE, Link, SentRequest, SilentError, is_record
from blockyard.tools.sim.fleet.servers.redis_data import RedisData
from blockyard.tools.sim.fleet.servers.redis_server import RedisLink, RedisServer, Unit
from blockyard.tools.sim.loop import Loop

__all__ = ["NODES", "SEGMENTS", "RedisCluster", "RedisClusterLink"]

SEGMENTS: Final = 6  # fewer than a real store's 64, so that blocks share segments
NODES: Final = 3
_SLOTS: Final = 16_384
_NODE_SECONDS: Final = DEADLINE / 3  # as `RedisStore` asks its client
_SENDS: Final = 4  # constants of `rust/redis/src/cluster.rs`
_PAUSE: Final = 1.0
_NODE_TIMEOUT: Final = (0.1, 1.0)  # seconds until a node that is cut off notices, and the others count it as failed
_ELECTION: Final = (0.02, 0.3)  # seconds from then until a replica takes over
_SIDES: Final = ((True, True), (True, False), (False, True))
_LOOK_SECONDS: Final = 0.1


def slot_of(key: bytes) -> int:
    """Return the hash slot of a key."""
    tag = key.partition(b"{")[2].partition(b"}")[0] if b"{" in key else b""
    return crc_hqx(tag or key, 0) % _SLOTS


class _Redirect(NamedTuple):
    """A node's answer to a command whose key it does not have: `MOVED`, `ASK` or `TRYAGAIN`, and the other address."""

    kind: str
    address: int


class _Cut(NamedTuple):
    """A primary that is cut off from the other nodes, and from some engines.

    Attributes:
        node: its keys. It answers until a time, and then gives only values, or nothing.
        number: its number, which a replica takes over.
        slots: the nodes as it knows them.
        sides: whether each engine reaches it, and whether it reaches the other nodes.
    """

    node: RedisData
    number: int
    slots: _Slots
    until: float
    gives_values: bool
    sides: dict[Link, tuple[bool, bool]]

    def answers(self, unit: Unit, now: float) -> bool:
        """Return whether the node answers commands."""
        return now < self.until or (self.gives_values and unit[0][0] == b"GET")


class _Slots(NamedTuple):
    """Which node has which slot: the addresses of the nodes, and the nodes of the slots."""

    addresses: list[int]
    owners: dict[int, int]
    first: int

    def address_of(self, slot: int) -> int:
        return self.addresses[_owner(slot, self.owners, self.first)]


class _Node(RedisData):
    """The keys of a node. Its attribute `server` is its address.

    Attributes:
        is_asking: whether the running command follows `ASKING`.
    """

    def __init__(self, cluster: RedisCluster, address: int, watch: Callable[[bytes], None]) -> None:
        super().__init__(cluster.time, watch)
        self.server, self.is_asking = address, False
        self.num_failovers = address << 16
        self._of, self._is_in_script = cluster, False

    def run(self, command: list[bytes]) -> Any:
        """Run a command; see `RedisData.run`. A script may only access keys that are here."""
        if self._is_in_script and self._of.redirect(self, [command], is_asking=self.is_asking):
            raise StoreError("Script attempted to access a non local key in a cluster node")
        return super().run(command)

    def _eval(self, script: bytes, keys: list[bytes], words: list[bytes]) -> Any:
        self._is_in_script = True
        try:
            return super()._eval(script, keys, words)
        finally:
            self._is_in_script = False

    def _cluster(self, _what: bytes, slot: bytes, _most: bytes) -> list[bytes]:
        """Answer CLUSTER GETKEYSINSLOT."""
        return [name for name in self.values if slot_of(name) == int(slot)]


class RedisCluster(RedisServer):
    """The nodes, and which slots each has. Keys of a slot that moves are on two nodes.

    Attributes:
        owners: nodes of the slots that have moved, by slot.
        moving: the nodes to which slots are moving, by slot.
        lost_node: number of the node that does not answer; None if all do.

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
        super().__init__(loop, watch, watch_deletion, capacity=capacity, ttl=ttl)
        self._watch = watch
        needs_replica = loop.random.random() < 0.5
        self.nodes: list[RedisData] = [_Node(self, address, watch) for address in range(NODES)]
        self.owners: dict[int, int] = {}
        self.moving: dict[int, int] = {}
        self.lost_node: int | None = None
        self._first = loop.random.randrange(NODES)
        for node in self.nodes:
            node.needs_replica = needs_replica
        self._num_addresses = NODES
        self._cut: _Cut | None = None
        self._replica_node = _Node(self, -1, watch)  # answers under addresses of former primaries; it has no keys

    def connect(self) -> RedisClusterLink:
        """Return a link for one engine."""
        return RedisClusterLink(self)

    def capacity_of(self, prefix: bytes) -> int:
        """Return the maximum number of blocks in a segment, by its prefix."""
        number = int(prefix.partition(b".")[2].partition(b"}")[0], 16)
        return self.capacity // SEGMENTS + (number < self.capacity % SEGMENTS)

    def owner(self, slot: int) -> int:
        """Return the number of the node that has a slot."""
        return _owner(slot, self.owners, self._first)

    def slots(self, node: RedisData) -> _Slots:
        """Return a node's answer to CLUSTER SLOTS."""
        if self._cut is not None and node is self._cut.node:
            return self._cut.slots
        return _Slots([node.server for node in self.nodes], dict(self.owners), self._first)

    def ask(self, address: int, act: Callable[[RedisData], Any]) -> Any:
        """Let the node with an address act, unless it is lost.

        Raises:
            StoreError: the connection is refused.
            SilentError: the node does not answer.
        """
        cut = self._cut
        if cut is not None and self.caller is not None:
            sides = cut.sides.setdefault(self.caller[0], self.loop.random.choice(_SIDES))
            if not sides[address != cut.node.server]:
                raise SilentError
            if address == cut.node.server:
                return act(cut.node)
        number = next((number for number, node in enumerate(self.nodes) if node.server == address), None)
        if number is None or number == self.lost_node:
            if self.loop.random.random() < 0.5:
                raise StoreError("connection refused")
            if number is not None:
                raise SilentError
        return act(self._replica_node if number is None else self.nodes[number])

    def run_unit(self, unit: Unit, node: RedisData, *, is_asking: bool) -> list[Any] | _Redirect:
        """Run a unit on a node, or return where it belongs."""
        cut = self._cut
        if cut is not None and node is cut.node and not cut.answers(unit, self.loop.now):
            return _Redirect("CLUSTERDOWN", node.server)
        found = self.redirect(node, unit, is_asking=is_asking)
        if found is None and isinstance(node, _Node):
            node.is_asking = is_asking
        return found or self.run(node, unit)

    def redirect(self, node: RedisData, unit: Unit, *, is_asking: bool) -> _Redirect | None:
        """Return where commands belong, None if to this node."""
        for keys in filter(None, map(_keys_of, unit)):
            slot = slot_of(keys[0])
            owner, target = self._primary(self.owner(slot), node), self.moving.get(slot)
            num_missing = sum(key not in node.values for key in keys)
            is_split = num_missing > 0 and len(keys) > 1
            if node is owner:
                if target is not None and num_missing:
                    kind = "TRYAGAIN" if is_split and num_missing < len(keys) else "ASK"
                    return _Redirect(kind, self.nodes[target].server)
            elif not is_asking or target is None or self.nodes[target] is not node:
                return _Redirect("MOVED", owner.server)
            elif is_split:
                return _Redirect("TRYAGAIN", node.server)
        return None

    def _primary(self, number: int, asked: RedisData) -> RedisData:
        """Return the node with a number, as `asked` knows it."""
        cut = self._cut
        return asked if cut is not None and asked is cut.node and number == cut.number else self.nodes[number]

    def move(self, seconds: float) -> None:
        """Move some slots to other nodes during the next seconds, key by key."""
        while self._cut is not None:
            self.loop.sleep(_LOOK_SECONDS)  # nodes that do not reach each other move nothing
        chance = self.loop.random
        used = sorted({slot_of(name) for node in self.nodes for name in node.values} - {*self.moving})
        slots = chance.sample(used, min(len(used), chance.randint(1, 3)))
        for slot in slots:
            if slot not in self.moving:
                self._move_one(slot, seconds / len(slots))

    def _move_one(self, slot: int, seconds: float) -> None:
        source = self.nodes[self.owner(slot)]
        target = (self.owner(slot) + self.loop.random.randint(1, NODES - 1)) % NODES
        self.moving[slot] = target
        count = 1 + sum(slot_of(name) == slot for name in source.values)
        while names := [name for name in source.values if slot_of(name) == slot]:
            self.loop.sleep(seconds / count)
            name = self.loop.random.choice(names)
            if name in source.values:
                if name in source.expires:
                    self.nodes[target].expires[name] = source.expires.pop(name)
                self.nodes[target].values[name] = source.values.pop(name)
        self.loop.sleep(seconds / count)
        self.owners[slot] = target
        del self.moving[slot]

    def stop_replica(self) -> int:
        """Let the replica of a node fall behind from now on. Returns the node's number."""
        number = self.loop.random.randrange(NODES)
        self.nodes[number].stop_replica()
        return number

    def fail_over(self, number: int) -> None:
        """Switch to a node's replica, at another address: everything stored since `stop_replica` is lost."""
        node = self.nodes[number]
        node.fail_over(self._next_address())
        for name in [name for name in node.values if self.owner(slot_of(name)) != number]:
            node.drop(name)

    def _next_address(self) -> int:
        self._num_addresses += 1
        return self._num_addresses - 1

    def cut_off(self) -> float:
        """Cut a primary off, often the one with the record. Returns the seconds until a replica may take over."""
        chance, number = self.loop.random, self.loop.random.randrange(NODES)
        if chance.random() < 0.5:
            records = [each for each, node in enumerate(self.nodes) if any(map(is_record, node.values.values()))]
            number = records[0] if records else number
        node, seconds = self.nodes[number], chance.uniform(*_NODE_TIMEOUT)
        node.stop_replica()
        until, gives_values = self.loop.now + seconds, chance.random() < 0.5
        self._cut = cut = _Cut(node, number, self.slots(node), until, gives_values, {})
        if node.needs_replica:
            self.loop.call_later(chance.uniform(0, seconds), lambda: self._lose_replica(cut))
        return seconds + chance.uniform(*_ELECTION)

    def _lose_replica(self, cut: _Cut) -> None:
        if self._cut is cut:
            cut.node.has_replica = False

    def take_over(self) -> None:
        """Let its replica take the place of the primary that is cut off."""
        if (cut := self._cut) is not None:
            node = self.nodes[cut.number] = _Node(self, -1, self._watch)
            cut.node.fail_over(self._next_address(), node)
            node.is_full, node.has_replica, node.needs_replica = cut.node.is_full, False, cut.node.needs_replica

    def join_again(self) -> None:
        """Connect the primary that was cut off: as a replica, if another one has taken its place."""
        if (cut := self._cut) is not None:
            cut.node.go_on_with_replica()
            self.nodes[cut.number].has_replica, self._cut = True, None


class _Todo(NamedTuple):
    """A unit to send, by number, and where to if not to the node of its slot."""

    unit: int
    address: int | None = None
    is_asking: bool = False


class RedisClusterLink(RedisLink):
    """The link from one engine to the nodes; it does what `rust/redis/src/cluster.rs` does.

    A lost node fails only its own units, and is not asked again until it has answered a probe.
    """

    scheme = "redis+cluster"
    options: Mapping[str, int] = {"segments": SEGMENTS}

    def __init__(self, server: RedisCluster) -> None:
        super().__init__(server)
        self.cluster = server
        self._slots: _Slots | None = None
        self._is_current = False
        self._lost: dict[int, float] = {}  # when to probe each lost node, by address

    def _request(self, units: list[Unit]) -> tuple[list[list[Any]], str | None]:
        self._probe()
        until, why = self.cluster.loop.now + _NODE_SECONDS, ""
        answers: list[list[Any]] = [[None] * len(unit) for unit in units]
        todo = [_Todo(number) for number in range(len(units))]
        for _ in range(_SENDS):
            parts = _sorted_by_node(todo, units, self._learn(until))
            why = next((f"node {address} is lost" for address in parts if address in self._lost), why)
            sent = {
                address: self._send_to(address, part, units)
                for address, part in parts.items()
                if address not in self._lost
            }
            todo = []
            for address, request in sent.items():
                for one, answer in zip(parts[address], self._wait(address, request, until) or (), strict=False):
                    if not isinstance(answer, _Redirect):
                        answers[one.unit] = answer
                    elif answer.kind == "CLUSTERDOWN":
                        self._is_current, why = False, answer.kind
                    elif again := self._follow(one, answer, units[one.unit]):
                        todo.append(again)
                    else:
                        answers[one.unit] = [StoreError(answer.kind)] * len(units[one.unit])
                why = f"node {address} is lost" if address in self._lost else why
            if not todo:
                break
        if todo:
            why = "slots move too often"
        if why and self._slots and {*self._slots.addresses} <= {*self._lost}:
            raise StoreError(why)
        return answers, why or None

    def _follow(self, one: _Todo, answer: _Redirect, unit: Unit) -> _Todo | None:
        """Return where to send a unit again; None if it is not sent again."""
        needs_all_keys = len(unit) > 1 or unit[0][0] == b"EVAL"
        if answer.kind == "TRYAGAIN" or (answer.kind == "ASK" and needs_all_keys):
            return None
        self._is_current &= answer.kind == "ASK"
        return _Todo(one.unit, answer.address, answer.kind == "ASK")

    def _send_to(self, address: int, part: Sequence[_Todo], units: list[Unit]) -> SentRequest:
        run = self.cluster.run_unit
        acts = [partial(run, units[one.unit], is_asking=one.is_asking) for one in part]
        return self.send(tuple(partial(self.cluster.ask, address, act) for act in acts))

    def _wait(self, address: int, request: SentRequest, until: float) -> list[Any] | None:
        """Wait for a node. Returns its answers; None if it is lost."""
        try:
            return self.receive(request, max(until - self.cluster.loop.now, _NODE_SECONDS / 4))
        except StoreError:
            if self.is_dead:
                raise
            self._lost[address] = self.cluster.loop.now + _PAUSE
            self._is_current = False
            return None

    def _learn(self, until: float) -> _Slots:
        """Ask a node for the slots, if they may have changed."""
        if self._is_current and self._slots is not None:
            return self._slots
        self._is_current = True
        addresses = sorted({0, *(self._slots.addresses if self._slots else ())} - {*self._lost})
        for address in self.cluster.loop.random.sample(addresses, len(addresses)):
            request = self.send((partial(self.cluster.ask, address, self.cluster.slots),))
            if found := self._wait(address, request, until):
                slots: _Slots = found[0]
                self._slots = slots
                self._lost = {lost: at for lost, at in self._lost.items() if lost in {0, *slots.addresses}}
                return slots
        self._is_current = False
        if self._slots is None:
            raise StoreError("no node of the cluster answers")
        return self._slots

    def _probe(self) -> None:
        """Ask lost nodes again, so that no call waits for them."""
        loop = self.cluster.loop
        for address in [address for address, at in self._lost.items() if at <= loop.now]:
            self._lost[address] = loop.now + _PAUSE + _NODE_SECONDS
            loop.start("probe", partial(self._probe_one, address))

    def _probe_one(self, address: int) -> None:
        if not self.is_dead:
            request = self.send((partial(self.cluster.ask, address, lambda _: "PONG"),))
            with suppress(StoreError):  # the engine is killed meanwhile
                if self._wait(address, request, 0.0):
                    self._lost.pop(address, None)


def _owner(slot: int, owners: dict[int, int], first: int) -> int:
    """Return the number of the node that has a slot; `first` is that of slot 0."""
    return owners.get(slot, (slot + first) % NODES)


def _sorted_by_node(todo: list[_Todo], units: list[Unit], slots: _Slots) -> dict[int, list[_Todo]]:
    parts: dict[int, list[_Todo]] = {}
    for one in todo:
        address = slots.address_of(_slot_of(units, one.unit)) if one.address is None else one.address
        parts.setdefault(address, []).append(one)
    return parts


def _slot_of(units: list[Unit], number: int) -> int:
    """Return the slot of a unit; WAIT goes with the unit after it."""
    return slot_of(_keys_of(units[number + (units[number][0][0] == b"WAIT")][0])[0])


def _keys_of(command: list[bytes]) -> list[bytes]:
    """Return the keys of a command."""
    if command[0] in {b"CLUSTER", b"INFO", b"SCAN", b"WAIT"}:
        return []
    if command[0] == b"EVAL":
        return command[3 : 3 + int(command[2])]
    return command[1:] if command[0] in {b"EXISTS", b"DEL", b"UNLINK"} else command[1:2]
