"""The lists of a Redis store's blocks. They are kept at the server, and change atomically with the blocks.

The server runs the scripts in this module one at a time, and they enforce all limits of the store. No client counts
blocks, and no client's clock matters.

| key, after the prefix of a segment | content |
|---|---|
| `order` | sorted set: names of blocks by their last use, numbered by the server |
| `sweep` | exists while unlisted blocks may be stored: the list was empty when a block arrived |
| `sweeper` | the sweep that is under way, and how many steps of it the server has carried out |
| `quotas`, `held` | hashes: the quota of each tenant, and the number of blocks it has |
| `owners` | hash: the tenant of a block, and the preceding block of its prompt |
| `kids` | hash: how many of a tenant's blocks follow a block, by tenant and block |
| `leaves:TENANT` | sorted set: the tenant's blocks that none of its blocks follows, by their last use |

One transaction stores a batch of blocks and runs the script `_SETTLE`, which lists them and drops excess blocks. A
client killed at any point leaves no unlisted block and no block beyond the limits.

A sweep lists the blocks that no list has, in steps. If the server loses a step (it fails over to a replica that is
behind, or evicts the list), it refuses the later ones, so `sweep` stays until another sweep has found every block.

A server has one segment. In a cluster, blocks are spread by name over `SEGMENTS` segments, each with its share of the
store's size. All keys of a segment share a hash slot.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["SEGMENTS", "Lists"]

SEGMENTS: Final = 64
_SPAN: Final = 4096  # use numbers reserved for one batch; its first block gets the highest, so it is evicted last
_AT_ONCE: Final = 1000  # blocks that one script drops or adopts
_SWEEP_SECONDS: Final = 60  # how long a sweeper that died keeps others from sweeping

_USE: Final = """
local order, prefix = KEYS[1], string.sub(KEYS[1], 1, -6)

local function newest(list) return tonumber(redis.call('ZREVRANGE', list, 0, 0, 'WITHSCORES')[2]) end
local function use_after(last) return (math.floor((last or 0) / SPAN) + 2) * SPAN end

local last = newest(order)
local use = use_after(last)
""".replace("SPAN", str(_SPAN))

_NOBODYS: Final = """
local function touch_leaves() end
local function disown() end
"""

_OWNERS: Final = """
local owners, kids, held, quotas = prefix .. 'owners', prefix .. 'kids', prefix .. 'held', prefix .. 'quotas'

local function leaves(tenant) return prefix .. 'leaves:' .. tenant end

if not last then  -- it may have been lost, and leaves keep the numbers of their uses
  local latest = 0
  for _, tenant in ipairs(redis.call('HKEYS', held)) do
    latest = math.max(latest, newest(leaves(tenant)) or 0)
  end
  use = use_after(latest)
end

local function touch_leaves(names)
  if redis.call('EXISTS', owners) == 0 then return end
  for i, owner in ipairs(redis.call('HMGET', owners, unpack(names))) do
    if owner then redis.call('ZADD', leaves(string.sub(owner, 1, 16)), 'XX', use - i, names[i]) end
  end
end

local function disown(name)
  local owner = redis.call('HGET', owners, name)
  if not owner then return end
  local tenant, parent = string.sub(owner, 1, 16), string.sub(owner, 17)
  redis.call('HDEL', owners, name)
  redis.call('ZREM', leaves(tenant), name)
  redis.call('HINCRBY', held, tenant, -1)
  if parent == '' or redis.call('HINCRBY', kids, owner, -1) > 0 then return end
  redis.call('HDEL', kids, owner)
  if string.sub(redis.call('HGET', owners, parent) or '', 1, 16) == tenant then
    redis.call('ZADD', leaves(tenant), redis.call('ZSCORE', order, parent) or 0, parent)
  end
end
"""

_DROPPING: Final = """
local has_dropped = false

local function drop(name)
  has_dropped = true
  redis.call('ZREM', order, name)
  redis.call('UNLINK', prefix .. name)
  disown(name)
end

local function drop_beyond(capacity)
  local extra = redis.call('ZCARD', order) - capacity
  while extra > 0 do
    local gone = redis.call('ZPOPMIN', order, math.min(extra, AT_ONCE))
    if #gone == 0 then return end
    for i = 1, #gone, 2 do drop(gone[i]) end
    extra = extra - #gone / 2
  end
end
""".replace("AT_ONCE", str(_AT_ONCE))

_DROPPING_OF: Final = """
local function drop_of(tenant, quota, most)
  local extra = math.min((tonumber(redis.call('HGET', held, tenant)) or 0) - quota, most)
  for _ = 1, extra do
    local leaf = redis.call('ZPOPMIN', leaves(tenant))[1]
    if not leaf then return end
    drop(leaf)
  end
end
"""

_OWNING: Final = """
local function own(name, score, tenant, parent)
  local quota = tonumber(redis.call('HGET', quotas, tenant))
  -- An earlier block of the batch may have evicted it.
  if not quota or not redis.call('ZSCORE', order, name) then return end
  if redis.call('HSETNX', owners, name, tenant .. parent) == 1 then
    redis.call('HINCRBY', held, tenant, 1)
    if parent ~= '' then
      if not redis.call('ZSCORE', order, parent) then score = 0 end
      redis.call('HINCRBY', kids, tenant .. parent, 1)
      redis.call('ZREM', leaves(tenant), parent)
    end
  elseif string.sub(redis.call('HGET', owners, name), 1, 16) ~= tenant then
    return
  end
  if redis.call('HEXISTS', kids, tenant .. name) == 0 then redis.call('ZADD', leaves(tenant), score, name) end
  drop_of(tenant, quota, 1)
  if tonumber(redis.call('HGET', held, tenant)) > quota then drop(name) end  -- the server has lost its leaves
end
"""

# ARGV: maximum number of blocks, number of names, the names, and their owners if they have any. Returns whether a sweep
# is due, whether quotas exist, and the indexes of the blocks that were not kept.
_SETTLE: Final = """
if not last then
  redis.call('SET', prefix .. 'sweep', 1)
  redis.call('DEL', prefix .. 'sweeper')  -- it may have listed blocks in the list that was lost
end
local count, uses, names = tonumber(ARGV[2]), {}, {}
for i = 1, count do
  names[i] = ARGV[2 + i]
  uses[2 * i - 1], uses[2 * i] = use - i, names[i]
end
redis.call('ZADD', order, unpack(uses))
touch_leaves(names)
for i = 1, #ARGV - 2 - count do
  local owner = ARGV[2 + count + i]
  own(ARGV[2 + i], use - i, string.sub(owner, 1, 16), string.sub(owner, 17))
end
drop_beyond(tonumber(ARGV[1]))
local answer = {0, 0}
if redis.call('EXISTS', prefix .. 'sweep', prefix .. 'quotas') > 0 then
  answer = {redis.call('EXISTS', prefix .. 'sweep'), redis.call('EXISTS', prefix .. 'quotas')}
end
for i = 1, has_dropped and count or 0 do
  if not redis.call('ZSCORE', order, ARGV[2 + i]) then answer[#answer + 1] = i - 1 end
end
return answer
"""

# ARGV: names of the blocks that are read.
_TOUCH: Final = """
local uses = {}
for i = 1, #ARGV do uses[2 * i - 1], uses[2 * i] = use - i, ARGV[i] end
redis.call('ZADD', order, 'XX', unpack(uses))
touch_leaves(ARGV)
"""

_DROP: Final = "for i = 1, #ARGV do drop(ARGV[i]) end"

# ARGV: the sweep's progress. Returns 0 if the server has lost a step. An empty list may have lost some, too.
_ON_SWEEP: Final = """
if not last or redis.call('GET', prefix .. 'sweeper') ~= ARGV[1] then return 0 end
"""

# ARGV: the sweep's progress before and after, maximum number of blocks, and names of stored blocks that it found.
# Unlisted ones will be evicted first.
_ADOPT: Final = """
redis.call('SET', prefix .. 'sweeper', ARGV[2], 'EX', SECONDS)
for i = 4, #ARGV do
  if redis.call('EXISTS', prefix .. ARGV[i]) == 1 then redis.call('ZADD', order, 'NX', 0, ARGV[i]) end
end
drop_beyond(tonumber(ARGV[3]))
return 1
""".replace("SECONDS", str(_SWEEP_SECONDS))

_END_SWEEP: Final = """
redis.call('DEL', prefix .. 'sweep', prefix .. 'sweeper')
return 1
"""

# ARGV: a tenant, and its quota or an empty string. Returns whether the tenant still exceeds its quota.
_SET_QUOTA: Final = """
local quota = tonumber(ARGV[2])
redis.call('HSET', quotas, '', 1)  -- if the hash is gone, the server has lost it
if not quota then
  redis.call('HDEL', quotas, ARGV[1])
  return 0
end
redis.call('HSET', quotas, ARGV[1], quota)
drop_of(ARGV[1], quota, AT_ONCE)
if not has_dropped and (tonumber(redis.call('HGET', held, ARGV[1])) or 0) > quota then
  -- The server has lost its leaves: all its blocks may go, in any order.
  local all, count = redis.call('HGETALL', owners), 0
  for i = 1, #all, 2 do
    if string.sub(all[i + 1], 1, 16) == ARGV[1] then
      count = count + 1
      redis.call('ZADD', leaves(ARGV[1]), 0, all[i])
    end
  end
  redis.call('HSET', held, ARGV[1], count)
end
return (tonumber(redis.call('HGET', held, ARGV[1])) or 0) > quota and 1 or 0
""".replace("AT_ONCE", str(_AT_ONCE))


class _Scripts(NamedTuple):
    settle: bytes
    touch: bytes
    drop: bytes
    adopt: bytes
    end_sweep: bytes
    set_quota: bytes


def _scripts(*, has_quotas: bool) -> _Scripts:
    """Return the scripts of a segment. Each call sends its script, so those without quotas are short."""
    whose = _OWNERS if has_quotas else _NOBODYS
    dropping = _USE + whose + _DROPPING + (_DROPPING_OF if has_quotas else "")
    scripts = (
        dropping + (_OWNING if has_quotas else "") + _SETTLE,
        _USE + whose + _TOUCH,
        dropping + _DROP,
        dropping + _ON_SWEEP + _ADOPT,
        _USE + _ON_SWEEP + _END_SWEEP,
        dropping + _SET_QUOTA if has_quotas else "",
    )
    return _Scripts(*(script.encode() for script in scripts))


class Lists:
    """Builds the commands that change the lists of one segment.

    Args:
        prefix: prefix of the segment's keys.
        capacity: maximum number of blocks.
        has_quotas: whether blocks have tenants.
    """

    def __init__(self, prefix: bytes, capacity: int, *, has_quotas: bool) -> None:
        self.prefix = prefix
        self._order = prefix + b"order"
        self._capacity = b"%d" % capacity
        self._scripts = _scripts(has_quotas=has_quotas)

    def settle(self, names: list[bytes], owners: list[bytes] | None = None) -> list[bytes]:
        """List the blocks that the same transaction stores, and drop excess blocks."""
        return self._run(self._scripts.settle, self._capacity, b"%d" % len(names), *names, *(owners or ()))

    def touch(self, names: list[bytes]) -> list[bytes]:
        """Mark blocks as used."""
        return self._run(self._scripts.touch, *names)

    def drop(self, names: list[bytes]) -> list[bytes]:
        """Delete blocks."""
        return self._run(self._scripts.drop, *names)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> list[bytes]:
        """Set the quota of a tenant, named by 16 bytes."""
        return self._run(self._scripts.set_quota, tenant, b"" if num_blocks is None else b"%d" % num_blocks)

    def quota(self, tenant: bytes) -> list[list[bytes]]:
        """Read how many blocks a tenant has, and its quota."""
        return [[b"HGET", self.prefix + key, tenant] for key in (b"held", b"quotas")]

    def begin_sweep(self, token: bytes) -> list[bytes]:
        """Begin a sweep, unless another is under way. The token is unique."""
        return [b"SET", self.prefix + b"sweeper", _progress(token, 0), b"NX", b"EX", b"%d" % _SWEEP_SECONDS]

    def adopt(self, token: bytes, step: int, names: Iterable[bytes]) -> list[bytes]:
        """List stored blocks that are not listed yet; the first step is 0. Answers 0 if earlier steps were lost."""
        before, after = _progress(token, step), _progress(token, step + 1)
        return self._run(self._scripts.adopt, before, after, self._capacity, *names)

    def end_sweep(self, token: bytes, steps: int) -> list[bytes]:
        """Record that every block is listed, unless the server has lost some of the steps."""
        return self._run(self._scripts.end_sweep, _progress(token, steps))

    def _run(self, script: bytes, *words: bytes) -> list[bytes]:
        return [b"EVAL", script, b"1", self._order, *words]


def _progress(token: bytes, steps: int) -> bytes:
    """Return what the server has of a sweep after some of its steps."""
    return b"%b:%d" % (token, steps)
