"""The namespace of a store: a digest of everything besides the key that determines the bytes of a block.

A `Namespace` also has the parts that it is a digest of, as text. Prefix stores keep this text beside the blocks, and
`blockyard store` shows it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from blockyard.errors import InvalidArgumentError
from blockyard.layout import ArenaLayout, GroupedLayout, KVLayout
from blockyard.layout.sizes import as_int

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TEXT_NAME", "Namespace", "describe_layout", "parts_of", "store_namespace", "text_of"]

_DOMAIN = b"BLKYSPACE1"
TEXT_NAME: Final = "about.json"
"""Name of the text beside a namespace's blocks."""
_MAX_PART: Final = 240
_MAX_TEXT: Final = 8192


class Namespace(bytes):
    """A namespace with its parts.

    Args:
        digest: 32 bytes.
        parts: what it is a digest of, by name. Values other than text become JSON, and long ones are cut. Empty ones
            are left out.

    Attributes:
        parts: the parts as text.
    """

    parts: dict[str, str]

    def __new__(cls, digest: bytes, parts: Mapping[str, Any]) -> "Self":
        """Attach the parts to a digest."""
        made = super().__new__(cls, digest)
        made.parts = {name: _shown(value) for name, value in parts.items() if value not in (None, "", b"", [], {})}
        return made

    def __getnewargs__(self) -> tuple[bytes, dict[str, str]]:  # type: ignore[override]
        """Return the arguments of a copy, for pickle."""
        return bytes(self), self.parts


def parts_of(namespace: bytes) -> dict[str, str]:
    """Return the parts of a namespace; a short plain name is its own only part, other bytes have none."""
    if isinstance(namespace, Namespace):
        return namespace.parts
    text = namespace.decode(errors="replace")
    return {"name": text} if len(text) <= _MAX_PART and text.isprintable() and "\ufffd" not in text else {}


def text_of(namespace: bytes) -> bytes | None:
    """Return the text that a prefix store keeps beside the blocks; None for a namespace without parts."""
    if not isinstance(namespace, Namespace):
        return None
    text = json.dumps({"namespace": namespace.hex(), "parts": namespace.parts}, indent=1).encode()
    return text if len(text) <= _MAX_TEXT else None


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MAX_PART else f"{text[:_MAX_PART]}..."


def describe_layout(layout: KVLayout | GroupedLayout | ArenaLayout) -> str:
    """Return a layout as short text."""
    if isinstance(layout, ArenaLayout):
        sizes = ", ".join(str(group.block_bytes) for group in layout.cache_groups)
        return f"an arena of blocks of {layout.block_size} tokens, {sizes} bytes by group"
    parts = layout.groups if isinstance(layout, GroupedLayout) else (("", layout),)
    return "; ".join(f"{name} {_describe_group(part)}".strip() for name, part in parts)


def _describe_group(layout: KVLayout) -> str:
    return (
        f"{layout.num_layers} layers of {layout.num_kv_heads} heads x {layout.head_size} {layout.dtype}, "
        f"{layout.block_size} tokens, {layout.kind}"
    )


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
        32 bytes for `open_store(namespace=)`: the SHA-256 of all fields by name, each with its length. A prefix store
        keeps the fields as text, too, with a digest in place of the salt; see `blockyard store --help`.

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
    shown = {
        "layout": describe_layout(layout),
        "rank": f"{rank} of {world_size}" if world_size > 1 else "",
        "world_size": "",
        "salt": hashlib.sha256(salt).hexdigest()[:16] if salt else "",
        "epoch": epoch or "",
    }
    return Namespace(_digest(fields), fields | shown)


def _digest(fields: Mapping[str, object]) -> bytes:
    digest = hashlib.sha256(_DOMAIN)
    for name, field in sorted(fields.items()):
        for part in (name, field):
            # A path may contain bytes that are not UTF-8.
            data = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
