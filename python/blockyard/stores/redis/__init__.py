"""The Redis store: blocks on a Redis or Valkey server, for one process or shared between machines.

    redis://[[user]:password@]host[:port]?size=2GiB      rediss://host?size=2GiB&ca=/etc/ca.pem
    unix:///run/redis.sock?size=2GiB                     redis+cluster://host:6379?size=2GiB

`docs/reference/store-urls.md` lists the options, and how to set up the server. `valkey` in a scheme means the same as
`redis`.

User and password may be percent-encoded; no message shows them. The client is the crate `redis`, in `blockyard._core`.

- Swap space: keys of this store alone, deleted when it is closed, or after `ttl`.
- Prefix store: shared by every process with this namespace. A full store drops the least recently used blocks that no
  other follows, so prompts lose their ends first; in a cluster, each batch its last blocks first. The server itself
  counts, atomically with each put (`blockyard.stores.redis.lists`). A value is fully checked before it is a hit; one
  that two reads find damaged is deleted.
- A single server supports quotas for tenants; a cluster does not.
- A `forget` is confirmed once all connected replicas have it. A failover may undo puts and deletions.
- Redis 6.2 or newer, for `GETEX`: a server that may not write does not tell which blocks are valid, so all are misses.
- Cluster: name any of its nodes. Blocks are spread over 64 segments on all nodes, each with its share of `size`. A
  batch takes one round trip to each node. If a node fails, its blocks are misses, and are not stored, until it or
  another node serves their slots. The first batch to notice waits for a third of `timeout_base`.
  - While a slot moves to another node, its blocks are found, but puts and deletions of them may fail.
  - One node holds the record that shows whether another process called `forget`. While it is lost, every read is a
    miss.

All keys of a prefix store begin with `blockyard:` and 16 digits of the namespace; in a cluster, with `blockyard:{` and
the digits. Decision 0023 defines the format and explains the choice of client.
"""

from blockyard.stores.redis.store import RedisStore, open_redis
from blockyard.stores.redis.url import read_url

__all__ = ["RedisStore", "open_redis", "read_url"]
