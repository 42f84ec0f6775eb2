"""The namespace of a store: a digest of everything besides the key that determines the bytes of a block."""

import hashlib
from collections.abc import Mapping

from blockyard.errors import InvalidArgumentError
from blockyard.layout import GroupedLayout, KVLayout
from blockyard.layout.sizes import as_int

__all__ = ["store_namespace"]

_DOMAIN = b"BLKYSPACE1"


def store_namespace(
    *,
    model: str,
    revision: str,
    layout: KVLayout | GroupedLayout,
    adapter: str = "",
    rank: int = 0,
    world_size: int = 1,
    salt: bytes = b"",
    epoch: int = 0,
    more: Mapping[str, str] | None = None,
) -> bytes:
    """Return a digest of everything that determines the bytes of a block. Stores with the same namespace share blocks.

    A block is found only under the namespace it was stored under. So pass everything that changes the bytes that the
    model computes for the same tokens.

    Args:
        model: name or path of the model.
        revision: revision of the weights, including quantization; a commit or a checksum.
        layout: layout of the blocks; it covers dtype, block size, heads and layers.
        adapter: name and revision of an adapter that all blocks are computed with.
        rank: rank of this process among those that share the model, 0 to `world_size - 1`.
        world_size: number of processes that share the model.
        salt: salt of a tenant, to separate tenants completely.
        epoch: raise it to forget every block at once.
        more: anything else: RoPE overrides, scales of a quantized cache, the layer range of a pipeline stage.

    Returns:
        32 bytes for `open_store(namespace=)`: the SHA-256 of all fields by name, each with its length.

    Raises:
        InvalidArgumentError: `rank` or `epoch` is out of range, or `model` or `revision` is empty.

    Example:
        >>> from blockyard import KVLayout
        >>> from blockyard.stores import store_namespace
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float16")
        >>> one = store_namespace(model="tiny-llama", revision="5f0b02c", layout=layout)
        >>> one == store_namespace(model="tiny-llama", revision="5f0b02d", layout=layout)
        False
    """
    for name, value in (("model", model), ("revision", revision)):
        if not value:
            raise InvalidArgumentError(f"{name} is {value!r}, must not be empty")
    rank, world_size, epoch = as_int("rank", rank), as_int("world_size", world_size), as_int("epoch", epoch)
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank is {rank}, must be 0 to {world_size - 1} with world_size {world_size}")
    if epoch < 0:
        raise InvalidArgumentError(f"epoch is {epoch}, must be at least 0")
    fields: dict[str, object] = {
        "model": model,
        "revision": revision,
        "layout": layout.fingerprint(),
        "adapter": adapter,
        "rank": rank,
        "world_size": world_size,
        "salt": salt,
        "epoch": epoch,
    }
    fields |= {f"more.{name}": value for name, value in (more or {}).items()}
    digest = hashlib.sha256(_DOMAIN)
    for name, field in sorted(fields.items()):
        for part in (name, field):
            # A path may contain bytes that are not UTF-8.
            data = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
