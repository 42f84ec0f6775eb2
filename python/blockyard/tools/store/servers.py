"""The keys of a Redis or Valkey server, or of each node of a cluster."""

from __future__ import annotations

import re
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from blockyard._core import RedisClient
from blockyard.errors import StoreError
from blockyard.stores.namespace import TEXT_NAME
from blockyard.stores.redis.lists import Lists
from blockyard.stores.redis.url import RedisURL, read_url
from blockyard.stores.url import hide_secrets
from blockyard.tools.store.contents import DIGITS, Contents, StoredPage, read_text

__all__ = ["Servers", "open_url"]

_SLOTS: Final = 16384
_AT_ONCE: Final = 512
_PREFIX: Final = re.compile(rb"blockyard:(?:(swap:)?([0-9a-f]{16})|\{([0-9a-f]{16})\.[0-9a-f]{2}\}):")
_SWAP: Final = b"blockyard:swap:"
_NAME: Final = 32
_NODES: Final = b"return redis.call('CLUSTER', 'SLOTS')"
_SCAN: Final = b"return redis.call('SCAN', ARGV[1], 'MATCH', 'blockyard:*', 'COUNT', 1000)"
# ARGV: the prefix, the key of its tenants or nothing, and names of values below the prefix; KEYS[1] is in their slot.
# Returns for each its bytes, the seconds since its last use (-1 if the server does not keep them) and its tenant;
# nothing for the epoch's record, whose name is the key in its header. Nothing here counts as a use of a block.
_DESCRIBE: Final = b"""
local found, prefix, owners = {}, table.remove(ARGV, 1), table.remove(ARGV, 1)
for i, name in ipairs(ARGV) do
  local idle = redis.pcall('OBJECT', 'IDLETIME', prefix .. name)
  local size = redis.call('MEMORY', 'USAGE', prefix .. name)
  local is_record = size and size < 512 and redis.call('GETRANGE', prefix .. name, 64, 95) == name
  found[i] = false
  if size and not is_record then
    local owner = owners ~= '' and redis.call('HGET', owners, name) or ''
    found[i] = {size, type(idle) == 'number' and idle or -1, string.sub(owner, 1, 16)}
  end
end
return found
"""
_FACTS: Final = (
    *("redis_version", "valkey_version", "used_memory", "maxmemory", "maxmemory_policy"),
    *("mem_allocator", "total_system_memory"),
)


class _Place(NamedTuple):
    prefix: bytes
    name: bytes


class Servers(Contents):
    """The keys that stores have written to a server or cluster.

    Args:
        found: the URL.
    """

    def __init__(self, found: RedisURL) -> None:
        super().__init__()
        self._url = found
        self._is_cluster = bool(found.client["cluster"])
        try:
            timeout = found.timeout_base
            self._client = RedisClient(**found.client, timeout=timeout, connect_timeout=min(2.0, timeout))
        except StoreError as error:
            self._fail(str(error))

    def pages(self) -> Iterator[StoredPage]:
        """Yield the blocks of one node after another."""
        for tag in self._tags():
            cursor = b"0"
            while True:
                ((cursor, keys),) = self._run([b"EVAL", _SCAN, b"1", tag, cursor])
                for prefix, names in _by_prefix(keys, is_cluster=self._is_cluster).items():
                    for start in range(0, len(names), _AT_ONCE):
                        yield self._describe(prefix, names[start : start + _AT_ONCE])
                if cursor == b"0":
                    break
        self.facts |= self.info()

    def parts(self, namespace: str) -> dict[str, str]:
        """Read the text beside the blocks of a prefix store."""
        digits = namespace.encode()
        prefix = b"blockyard:{%b.00}:" % digits if self._is_cluster else b"blockyard:%b:" % digits
        return read_text(self._run([b"GET", prefix + TEXT_NAME.encode()])[0])

    def remove(self, places: list[Any]) -> int:
        """Remove values, and their entries in the lists of their store."""
        by_prefix = defaultdict(list)
        for place in places:
            by_prefix[place.prefix].append(place.name)
        for prefix, names in by_prefix.items():
            lists = Lists(prefix, 1, has_quotas=not self._is_cluster)
            for start in range(0, len(names), _AT_ONCE):
                part = names[start : start + _AT_ONCE]
                is_swap = prefix.startswith(_SWAP)
                self._run(*([b"UNLINK", prefix + name] for name in part) if is_swap else (lists.drop(part),))
        return len(places)

    def _describe(self, prefix: bytes, names: list[bytes]) -> StoredPage:
        owners = b"" if self._is_cluster or prefix.startswith(_SWAP) else prefix + b"owners"
        parts = [[name] for name in names] if self._is_cluster and b"{" not in prefix else [names]
        commands = [[b"EVAL", _DESCRIBE, b"1", prefix + part[0], prefix, owners, *part] for part in parts]
        answers = [answer for found in self._run(*commands) for answer in found]
        known = [(_Place(prefix, name), *answer) for name, answer in zip(names, answers, strict=True) if answer]
        places, sizes, ages, tenants = zip(*known, strict=True) if known else ((), (), (), ())
        seconds = np.array(ages, np.float64)
        seconds[seconds < 0] = np.nan
        shown = [tenant.hex()[:DIGITS] for tenant in tenants]
        return StoredPage(_namespace_of(prefix), list(places), np.array(sizes, np.int64), seconds, shown)

    def _tags(self) -> Iterator[bytes]:
        """Yield a key for each node."""
        if not self._is_cluster:
            yield b"blockyard:"
            return
        wanted = {}
        for first, _last, primary, *_replicas in self._run([b"EVAL", _NODES, b"1", b"blockyard:"])[0]:
            wanted[tuple(primary[:2])] = first
        for slot in wanted.values():
            number = next(number for number in count() if crc_hqx(b"%d" % number, 0) % _SLOTS == slot)
            yield b"blockyard:{%d}" % number

    def info(self) -> dict[str, Any]:
        """Return what the server says about itself; a cluster's nodes differ."""
        if self._is_cluster:
            return {}
        lines = [line.partition(":") for section in (b"server", b"memory") for line in self._section(section)]
        found = {name: value for name, _, value in lines if name in _FACTS}
        return {name: int(value) if value.isdecimal() else value for name, value in found.items()}

    def _section(self, section: bytes) -> list[str]:
        return bytes(self._run([b"INFO", section])[0]).decode(errors="replace").splitlines()

    def _run(self, *commands: list[bytes]) -> list[Any]:
        """Return the answers to commands; raise if a server refuses one or does not answer."""
        try:
            answers, why = self._client.run(commands)
        except StoreError as error:
            self._fail(str(error))
        refused = [str(answer) for answer in answers if isinstance(answer, StoreError)]
        if refused or why is not None:
            self._fail(why or refused[0])
        return answers

    def _fail(self, why: str) -> NoReturn:
        raise StoreError(f"{self._url.parts.url!r}: {hide_secrets(why, self._url.parts.secrets)}") from None


def open_url(url: str, *, payloads: bool) -> Servers:  # noqa: ARG001 (only slabs have it)
    """Look into a server."""
    return Servers(read_url(url))


def _by_prefix(keys: Iterable[bytes], *, is_cluster: bool) -> dict[bytes, list[bytes]]:
    """Return the names of values by their prefix; other keys are left out, and the epoch's record on a cluster."""
    found = defaultdict(list)
    for key in keys:
        match = _PREFIX.match(key)
        if match and len(key) == match.end() + _NAME and not (is_cluster and match[2] and not match[1]):
            found[match[0]].append(key[match.end() :])
    return found


def _namespace_of(prefix: bytes) -> str:
    match = _PREFIX.match(prefix)
    swap, digits, of_segment = match.groups() if match else (None, None, None)
    text = (digits or of_segment or b"").decode()
    return f"swap {text}" if swap else text
