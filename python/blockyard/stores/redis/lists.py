"""The lists of a Redis store's blocks. They are kept at the server, and change atomically with the blocks.

The server runs the scripts in this module one at a time, and they enforce all limits of the store. No client counts
blocks, and no client's clock matters.

| key, after the prefix of a segment | content |
|---|---|
| `order` | sorted set: names of blocks by their last use, numbered by the server, plus `_INNER` if a block follows it |
| `parents`, `children` | hashes: the preceding block of a block, and how many blocks follow a block |
| `listed` | exists once a sweep has listed every block; a put that finds one of the above lost deletes it and them |
| `sweeper` | the sweep that is under way, and the server that carries it out |
| `quotas`, `held` | hashes: the quota of each tenant, and the number of blocks it has |
| `owners` | hash: the tenant of a block, and the preceding block of its prompt |
| `kids` | hash: how many of a tenant's blocks follow a block, by tenant and block |
| `leaves:TENANT` | sorted set: the tenant's blocks that none of its blocks follows, by their last use |

One transaction stores a batch of blocks and runs the script `_SETTLE`, which lists them and drops excess blocks: the
least recently used of those that no other block follows. So prompts lose their ends first, and a prompt that does not
fit keeps its beginning. A client killed at any point leaves no unlisted block and no block beyond the limits.

A sweep lists the blocks that no list has, in steps. The server refuses further steps once a replica has taken its place
or the list is gone, since earlier steps may be lost, deletions undone, and cursors of `SCAN` mean nothing to another
server. Then another sweep begins. `INFO` tells servers apart; if it is forbidden, a sweep does not notice a failover.

A server has one segment. In a cluster, blocks are spread by name over `SEGMENTS` segments, each with its share of the
store's size. All keys of a segment share a hash slot.
"""

from binascii import crc_hqx
from collections.abc import Generator
from typing import Any, Final, NamedTuple

__all__ = ["SEGMENTS", "Lists"]

SEGMENTS: Final = 64
_SPAN: Final = 4096  # use numbers reserved for one batch; its first block gets the highest, so it is evicted last
_INNER: Final = 1 << 52  # above all uses; a score can hold twice as much exactly
_AT_ONCE: Final = 1000  # blocks that one script drops or adopts
_SWEEP_SECONDS: Final = 60  # how long a sweeper that died keeps others from sweeping
_SCANNED: Final = 1000  # names per step of a sweep
_SLOTS: Final = 16_384  # hash slots of a cluster
_MAX_IN_SLOT: Final = 1 << 22

_USE: Final = """
local order, prefix = KEYS[1], string.sub(KEYS[1], 1, -6)

local function newest(list, below)
  return tonumber(redis.call('ZREVRANGEBYSCORE', list, below, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
end
local function use_after(last) return (math.floor((last or 0) / SPAN) + 2) * SPAN end

local last, inner = newest(order, '(INNER'), newest(order, '+inf')
if inner and inner >= INNER then last = math.max(last or 0, inner - INNER) end
local use = use_after(last)
""".replace("SPAN", str(_SPAN)).replace("INNER", str(_INNER))

_NOBODYS: Final = """
local function add_inner() end
local function note_children() end
local function touch_leaves() end
local function disown() end
local function is_list_lost() return false end
"""

_PARENTS: Final = """
local parents, children = prefix .. 'parents', prefix .. 'children'

local function use_of(name)
  local score = tonumber(redis.call('ZSCORE', order, name))
  return score and score % INNER
end

local function set_inner(name, amount)
  local found = use_of(name)
  if found then redis.call('ZADD', order, found + amount, name) end
end

local function note_children(name)
  if redis.call('HEXISTS', children, name) == 1 then set_inner(name, INNER) end
end

local function add_inner(uses, names)
  for i, count in ipairs(redis.call('HMGET', children, unpack(names))) do
    if count then uses[2 * i - 1] = uses[2 * i - 1] + INNER end
  end
end

-- Before the blocks are listed. A new block whose parent is not there counts as the least recently used.
local function follow(names, owners, uses)
  local known, scores = redis.call('HMGET', parents, unpack(names)), redis.call('ZMSCORE', order, unpack(names))
  local added, in_batch = {}, {}
  for i, name in ipairs(names) do
    local parent = string.sub(owners[i], 17)
    if parent ~= '' then
      local is_there = in_batch[parent] or redis.call('ZSCORE', order, parent)
      if not is_there and not scores[i] and not in_batch[name] then uses[2 * i - 1] = 0 end
      if not known[i] and not added[name] then
        added[name] = parent
        redis.call('HSET', parents, name, parent)
        if redis.call('HINCRBY', children, parent, 1) == 1 and not in_batch[parent] then set_inner(parent, INNER) end
      end
    end
    in_batch[name] = true
  end
end

local function unfollow(name)
  local parent = redis.call('HGET', parents, name)
  if not parent then return end
  redis.call('HDEL', parents, name)
  if redis.call('HINCRBY', children, parent, -1) > 0 then return end
  redis.call('HDEL', children, parent)
  set_inner(parent, 0)
end
""".replace("INNER", str(_INNER))

_OWNERS: Final = """
local owners, kids, held, quotas = prefix .. 'owners', prefix .. 'kids', prefix .. 'held', prefix .. 'quotas'

local function leaves(tenant) return prefix .. 'leaves:' .. tenant end

if not last then  -- it may have been lost, and leaves keep the numbers of their uses
  local latest = 0
  for _, tenant in ipairs(redis.call('HKEYS', held)) do
    latest = math.max(latest, newest(leaves(tenant), '+inf') or 0)
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
  unfollow(name)
  local owner = redis.call('HGET', owners, name)
  if not owner then return end
  local tenant, parent = string.sub(owner, 1, 16), string.sub(owner, 17)
  redis.call('HDEL', owners, name)
  redis.call('ZREM', leaves(tenant), name)
  redis.call('HINCRBY', held, tenant, -1)
  if parent == '' or redis.call('HINCRBY', kids, owner, -1) > 0 then return end
  redis.call('HDEL', kids, owner)
  if string.sub(redis.call('HGET', owners, parent) or '', 1, 16) == tenant then
    redis.call('ZADD', leaves(tenant), use_of(parent) or 0, parent)
  end
end

-- Without the lists that lower them again, counts would protect blocks, or fill quotas, forever.
local function is_list_lost()
  if redis.call('EXISTS', owners) == 0 then
    for _, tenant in ipairs(redis.call('HKEYS', held)) do redis.call('DEL', leaves(tenant)) end
    redis.call('DEL', held, kids)
  end
  local there = redis.call('EXISTS', parents, children)
  return there == 1 or (there == 0 and (inner or 0) >= INNER)
end
""".replace("INNER", str(_INNER))

_DROPPING: Final = """
local has_dropped = false

local function drop(name)
  has_dropped = true
  redis.call('UNLINK', prefix .. name)  -- first: it raises if the block has moved to another node, and stays listed
  redis.call('ZREM', order, name)
  disown(name)
end

-- The next puts go on: no call may keep the server from answering others for long.
local function drop_beyond(capacity, added)
  for _ = 1, math.min(redis.call('ZCARD', order) - capacity, added + AT_ONCE) do
    drop(redis.call('ZRANGE', order, 0, 0)[1])  -- the block before it may be the next
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
if is_list_lost() or not last then
  -- None of these says enough without the others. The sweeper may have filled the list that was lost.
  redis.call('UNLINK', order, prefix .. 'listed', prefix .. 'sweeper', prefix .. 'parents', prefix .. 'children')
end
local count, uses, names = tonumber(ARGV[2]), {}, {}
for i = 1, count do
  names[i] = ARGV[2 + i]
  uses[2 * i - 1], uses[2 * i] = use - i, names[i]
end
local whose = {unpack(ARGV, 3 + count)}
if #whose > 0 then follow(names, whose, uses) end
add_inner(uses, names)
redis.call('ZADD', order, unpack(uses))
touch_leaves(names)
for i, owner in ipairs(whose) do
  own(names[i], use_of(names[i]), string.sub(owner, 1, 16), string.sub(owner, 17))
end
drop_beyond(tonumber(ARGV[1]), count)
local function is_there(key)
  local found = redis.pcall('EXISTS', prefix .. key)
  return type(found) == 'number' and found or 1  -- while the slot moves, the other node may have it
end
local answer = {1 - is_there('listed'), is_there('quotas')}
for i = 1, has_dropped and count or 0 do
  if not redis.call('ZSCORE', order, ARGV[2 + i]) then answer[#answer + 1] = i - 1 end
end
return answer
"""

# ARGV: names of the blocks that are read. Marks those with a value as used, and drops the others, which the server has
# expired or evicted: they would fill the store.
_TOUCH: Final = """
local uses, names = {}, {}
for i = 1, #ARGV do
  local found = redis.pcall('EXISTS', prefix .. ARGV[i])
  if found == 0 then
    if redis.call('ZSCORE', order, ARGV[i]) then drop(ARGV[i]) end
  elseif found == 1 then
    names[#names + 1] = ARGV[i]
    uses[2 * #names - 1], uses[2 * #names] = use - i, ARGV[i]
  end
end
if #names == 0 then return end
add_inner(uses, names)
redis.call('ZADD', order, 'XX', unpack(uses))
touch_leaves(names)
"""

# Everything else that drops blocks does so to make room. A simulation tells the two apart by this.
DROP: Final = "for i = 1, #ARGV do drop(ARGV[i]) end"

# ARGV: the token of a sweep, 16 bytes. `run_id` differs from that of a replica which answers in the server's place, and
# `master_replid` changes with each failover, also back to a former server.
_SWEEPER: Final = """
local function id(section, field)
  local info = redis.pcall('INFO', section)
  return type(info) == 'string' and string.match(info, field .. ':(%x+)') or ''
end
local server = id('server', 'run_id') .. id('replication', 'master_replid')
local sweeper = ARGV[1] .. server
"""

# Returns None if another sweep is under way here.
_BEGIN_SWEEP: Final = """
local other = redis.call('GET', prefix .. 'sweeper')
if other and string.sub(other, #ARGV[1] + 1) == server then return end
return redis.call('SET', prefix .. 'sweeper', sweeper, 'EX', SECONDS)
""".replace("SECONDS", str(_SWEEP_SECONDS))

# Returns None if the sweep is no longer under way here. An empty list may have been lost.
_ON_SWEEP: Final = """
if not last or redis.call('GET', prefix .. 'sweeper') ~= sweeper then return end
"""

# ARGV: the token, and a cursor or nothing and a slot. Returns the next cursor, and keys.
_SCAN: Final = """
if ARGV[3] then return {'0', redis.call('CLUSTER', 'GETKEYSINSLOT', ARGV[3], MAX_IN_SLOT)} end
return redis.call('SCAN', ARGV[2], 'MATCH', prefix .. '*', 'COUNT', SCANNED)
""".replace("MAX_IN_SLOT", str(_MAX_IN_SLOT)).replace("SCANNED", str(_SCANNED))

# ARGV: the token, maximum number of blocks, and names of stored blocks that the sweep found. Unlisted ones will be
# evicted first.
_ADOPT: Final = """
redis.call('EXPIRE', prefix .. 'sweeper', SECONDS)
for i = 3, #ARGV do
  if redis.call('EXISTS', prefix .. ARGV[i]) == 1 then redis.call('ZADD', order, 'NX', 0, ARGV[i]) end
  note_children(ARGV[i])
end
drop_beyond(tonumber(ARGV[2]), #ARGV)
return 1
""".replace("SECONDS", str(_SWEEP_SECONDS))

_END_SWEEP: Final = """
redis.call('DEL', prefix .. 'sweeper')
redis.call('SET', prefix .. 'listed', 1)
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
""".replace("AT_ONCE", str(_AT_ONCE))

# A simulation checks by this that no call makes no progress.
IS_ABOVE: Final = "return (tonumber(redis.call('HGET', held, ARGV[1])) or 0) > quota and 1 or 0"


class _Scripts(NamedTuple):
    settle: bytes
    touch: bytes
    drop: bytes
    begin_sweep: bytes
    scan: bytes
    adopt: bytes
    end_sweep: bytes
    set_quota: bytes


def _scripts(*, has_quotas: bool) -> _Scripts:
    """Return the scripts of a segment. Each call sends its script, so those without quotas are short."""
    whose = _PARENTS + _OWNERS if has_quotas else _NOBODYS
    dropping = _USE + whose + _DROPPING + (_DROPPING_OF if has_quotas else "")
    scripts = (
        dropping + (_OWNING if has_quotas else "") + _SETTLE,
        dropping + _TOUCH,
        dropping + DROP,
        _USE + _SWEEPER + _BEGIN_SWEEP,
        _USE + _SWEEPER + _ON_SWEEP + _SCAN,
        dropping + _SWEEPER + _ON_SWEEP + _ADOPT,
        _USE + _SWEEPER + _ON_SWEEP + _END_SWEEP,
        dropping + _SET_QUOTA + IS_ABOVE if has_quotas else "",
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

    def sweep(self, token: bytes, record: bytes) -> Generator[list[bytes], Any, None]:
        """Yield the commands of a sweep, one after the other; send each its answer.

        Does nothing if another sweep is under way. If the server may have lost a step, a later put requests another.

        Args:
            token: unique, 16 bytes.
            record: the key of the epoch's record, which is not a block.
        """
        if (yield self._run(self._scripts.begin_sweep, token)) is None:
            return
        where, length = self._where(), len(self.prefix) + 32
        while True:
            page = yield self._run(self._scripts.scan, token, *where)
            if page is None:
                return
            names = [key[-32:] for key in page[1] if len(key) == length and key != record]
            for start in range(0, len(names) or 1, _SCANNED):  # a step without names, too, keeps others from sweeping
                found = names[start : start + _SCANNED]
                if (yield self._run(self._scripts.adopt, token, self._capacity, *found)) is None:
                    return
            if page[0] == b"0":
                break
            where = [page[0]]
        yield self._run(self._scripts.end_sweep, token)

    def _where(self) -> list[bytes]:
        """Return where a sweep begins: at a cursor, or in the segment's slot."""
        tag = self.prefix.partition(b"{")[2].partition(b"}")[0]
        return [b"", b"%d" % (crc_hqx(tag, 0) % _SLOTS)] if tag else [b"0"]

    def _run(self, script: bytes, *words: bytes) -> list[bytes]:
        return [b"EVAL", script, b"1", self._order, *words]
