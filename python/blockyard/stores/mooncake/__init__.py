"""The Mooncake store: blocks in the memory of a Mooncake cluster, through Mooncake's own client.

    mooncake://master:50051?size=64GiB        mooncake://master?size=64GiB&protocol=rdma&device=mlx5_0

`docs/reference/store-urls.md` lists the options. The store needs `pip install "blockyard[mooncake]"`, and Debian's
`libibverbs1` even without RDMA.

- Swap space: values of this store alone, removed when it is closed. Those of a killed process stay until evicted.
- Prefix store: shared by every process with this namespace. A block is stored only if it is absent. A value is fully
  checked before it is a hit; one that two reads find damaged is deleted.
- The master evicts; `size` limits what one process remembers of it. This process lends the cluster no memory.
- `forget` is atomic. Its record has two replicas and is never evicted.

A call of the client may block for 30 s, so at most `threads` of them can hang. Calling the client after its `close`, or
ending the process during a call, is a segmentation fault; `client.Client` prevents both.

Values are named `blockyard/`, 16 digits of the namespace, `/` and 64 digits.
"""

from blockyard.stores.mooncake.client import Client, connect_client
from blockyard.stores.mooncake.store import FOLDER, MooncakeStore, open_mooncake
from blockyard.stores.mooncake.url import MooncakeURL, read_url

__all__ = ["FOLDER", "Client", "MooncakeStore", "MooncakeURL", "connect_client", "open_mooncake", "read_url"]
