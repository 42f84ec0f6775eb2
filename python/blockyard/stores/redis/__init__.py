"""The Redis store: blocks on a Redis or Valkey server, for one process or shared by machines.

    redis://[[user]:password@]host[:port]?size=2GiB&ttl=3600&db=0&threads=4&memory=1GiB&timeout_base=2
    rediss://host?size=2GiB&ca=/etc/ca.pem&cert=/etc/cert.pem&key=/etc/key.pem
    unix:///run/redis.sock?size=2GiB           valkey:// and valkeys:// are other names of redis:// and rediss://
    redis+cluster://host:6379?size=2GiB        rediss+cluster://host?size=2GiB&ca=/etc/ca.pem

| option | meaning | default |
|---|---|---|
| `size` | most bytes of blocks and headers under this namespace | what `num_slots` need |
| `ttl` | seconds after which the server drops a block that was not put again; 0 for never | 0; swap 86400 |
| `db` | number of the database; a cluster has one | 0 |
| `threads` | connections that work at once, 1 to 64 | 4 |
| `memory` | most bytes in flight and in results not collected; what is beyond is a miss, `queue_full` | 1GiB |
| `timeout_base` | seconds an operation is given, plus one for every 16 MB under way | 2 |
| `ca`, `cert`, `key` | PEM files for TLS: authorities of the server's certificate; our own | the system's; none |

Percent signs decode user and password, which no message shows. The client is the crate `redis`, in `blockyard._core`.

- Swap space: keys of this store alone, which are deleted when it is closed, or after `ttl`.
- Prefix store: shared by every process with this namespace. A full one drops the least recently used blocks: the server
  counts, in one step with each put (`blockyard.stores.redis.lists`). A value is checked whole before it is a hit; a
  damaged one is deleted.
- Quotas of tenants are kept by a server, not by a cluster.
- Give the server's `maxmemory` room for `size` and some 300 bytes a block: what the server drops by itself may be a
  list that keeps a bound.
- Cluster: name any of its nodes. Blocks are spread over 64 segments on all nodes, each with its part of `size`; a batch
  is a round trip to each node. Blocks of a node that fails are misses, and are not stored, until it or another serves
  their slots. The first batch to notice waits for a third of `timeout_base`. Give the servers
  `cluster-require-full-coverage no`: else all refuse once one is lost.
  - While the node is lost that says whether another process called `forget`, there are only misses.

All keys of a prefix store begin with `blockyard:` and 16 digits of the namespace, in a cluster `blockyard:{` and the
digits. Decision 0023 has the format and the choice of client.
"""

from blockyard.stores.redis.store import RedisStore, open_redis
from blockyard.stores.redis.url import read_url

__all__ = ["RedisStore", "open_redis", "read_url"]
