"""The Redis store: blocks on a Redis or Valkey server, for one process or shared between machines.

    redis://[[user]:password@]host[:port]?size=2GiB&ttl=3600&db=0&threads=4&memory=1GiB&timeout_base=2
    rediss://host?size=2GiB&ca=/etc/ca.pem&cert=/etc/cert.pem&key=/etc/key.pem
    unix:///run/redis.sock?size=2GiB           valkey:// and valkeys:// are aliases of redis:// and rediss://
    redis+cluster://host:6379?size=2GiB        rediss+cluster://host?size=2GiB&ca=/etc/ca.pem

| option | meaning | default |
|---|---|---|
| `size` | maximum bytes of blocks and headers under this namespace | enough for `num_slots` |
| `ttl` | seconds after which the server drops a block that was not put again; 0 for never | 0; swap 86400 |
| `db` | database number; a cluster has only 0 | 0 |
| `threads` | number of concurrent connections, 1 to 64 | 4 |
| `memory` | maximum bytes in flight and in uncollected results; blocks beyond it are misses, `queue_full` | 1GiB |
| `timeout_base` | timeout of an operation in seconds, plus one for every 16 MB in flight | 2 |
| `ca`, `cert`, `key` | PEM files for TLS: the server's CA; client certificate and key | the system's CAs; none |

User and password may be percent-encoded; no message shows them. The client is the crate `redis`, in `blockyard._core`.

- Swap space: keys of this store alone, deleted when it is closed, or after `ttl`.
- Prefix store: shared by every process with this namespace. A full store drops the least recently used blocks that no
  other follows, so prompts lose their ends first; in a cluster, each batch its last blocks first. The server itself
  counts, atomically with each put (`blockyard.stores.redis.lists`). A value is fully checked before it is a hit; a
  damaged one is deleted.
- A single server supports quotas for tenants; a cluster does not.
- Set the server's `maxmemory` to `size` plus about 550 bytes per block. Otherwise the server evicts keys itself,
  perhaps a list that this store needs to enforce its limits.
- Let the store's user run `INFO`. It shows a failover, after which the search for blocks without an entry starts again,
  and which replicas have a `forget`: it is confirmed once all connected ones do. If `min-replicas-to-write` is the
  number of replicas, no failover undoes a confirmed `forget`. A failover may undo puts and deletions.
- Redis 6.2 or newer, for `GETEX`: a server that may not write does not tell which blocks are valid, so all are misses.
- Cluster: name any of its nodes. Blocks are spread over 64 segments on all nodes, each with its share of `size`. A
  batch takes one round trip to each node. If a node fails, its blocks are misses, and are not stored, until it or
  another node serves their slots. The first batch to notice waits for a third of `timeout_base`. Configure the servers
  with `cluster-require-full-coverage no`: otherwise all of them refuse commands once one is lost.
  - While a slot moves to another node, its blocks are found, but puts and deletions of them may fail.
  - One node holds the record that shows whether another process called `forget`. While it is lost, every read is a
    miss.

All keys of a prefix store begin with `blockyard:` and 16 digits of the namespace; in a cluster, with `blockyard:{` and
the digits. Decision 0023 defines the format and explains the choice of client.
"""

from blockyard.stores.redis.store import RedisStore, open_redis
from blockyard.stores.redis.url import read_url

__all__ = ["RedisStore", "open_redis", "read_url"]
