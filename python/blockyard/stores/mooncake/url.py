"""`MooncakeURL`: a parsed URL of the Mooncake store. `docs/reference/store-urls.md` describes the options."""

from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from blockyard.stores.threaded.remote import SIZE, count, positive, seconds
from blockyard.stores.url import StoreURL

__all__ = ["MooncakeURL", "read_url"]

_PORT: Final = 50051


class MooncakeURL(NamedTuple):
    """A parsed URL of the Mooncake store."""

    parts: StoreURL
    host: str
    port: int
    size: int | None
    protocol: str
    device: str
    metadata: str
    local: str
    admin: int
    threads: int
    memory: int
    timeout_base: float

    def __repr__(self) -> str:
        return f"MooncakeURL({self.parts.url!r})"


def read_url(url: str) -> MooncakeURL:
    """Parse a URL with the scheme `mooncake`; opens nothing.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part.
    """
    parts, split = StoreURL.parse(url), urlsplit(url)
    if "@" in split.netloc:
        parts.reject("***@", "is a credential, and Mooncake has none")
    if not split.hostname:
        parts.reject(parts.host, f"must name the master: mooncake://host:{_PORT}")
    if parts.path not in {"", "/"}:
        parts.reject(parts.path, "is not part of the URL")
    port = None
    with suppress(ValueError):
        port = split.port or _PORT
    if port is None:
        parts.reject(parts.host, "has an invalid port")
    found = MooncakeURL(
        parts,
        split.hostname,
        port,
        size=parts.take("size", positive, 0, SIZE) or None,
        protocol=parts.take("protocol", _protocol, "tcp", "tcp or rdma"),
        device=parts.take("device", str, "", "names of RDMA devices"),
        metadata=parts.take("metadata", str, "P2PHANDSHAKE", "a URL or P2PHANDSHAKE"),
        local=parts.take("local", str, "", "an address of this machine"),
        admin=parts.take("admin", count(1, 65_535), 9003, "1 to 65535"),
        threads=parts.take("threads", count(2, 64), 4, "2 to 64"),
        memory=parts.take("memory", positive, 1 << 30, SIZE),
        timeout_base=parts.take("timeout_base", seconds(0.05, 86_400), 2.0, "0.05 to 86400 seconds"),
    )
    if found.device and found.protocol != "rdma":
        parts.reject(f"device={found.device}", "has no effect without protocol=rdma")
    parts.finish("size, protocol, device, metadata, local, admin, threads, memory and timeout_base")
    return found


def _protocol(text: str) -> str:
    if text not in {"tcp", "rdma"}:
        raise ValueError(text)
    return text
