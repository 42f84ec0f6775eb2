"""How a store protects and transforms blocks: codecs encode them, MAC keys authenticate them."""

import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.layout.sizes import as_int, set_ints
from blockyard.stores.namespace import Namespace

__all__ = ["Codec", "MacKey", "guarded_namespace", "read_mac_key"]

MacKey: TypeAlias = bytes | Path
_SLACK: Final = 256


@dataclass(frozen=True)
class Codec:
    """How a store encodes blocks: compressed, encrypted or quantized.

    The checksum covers the output of `encode`, so `decode` never sees other bytes. An exception or a wrong length is a
    failed put or a miss, `"codec"`. Both functions run concurrently in the store's threads.

    Args:
        name: identifies format, version and key. It is part of the namespace: a block is found only with the codec that
            encoded it. Different codecs with the same name return wrong bytes.
        encode: takes a block, a memoryview of `bytes_per_block` bytes; returns at most `max_bytes` bytes.
        decode: takes the output of `encode`, and by name `max_length`, the bytes of a block; returns that many bytes.
            Without a MAC key, whoever can write to the storage can forge what it decodes: never produce more bytes.
        max_bytes: maximum bytes of an encoded block; None for the block's size plus 1/64 of it plus 256 bytes.

    Example:
        >>> import tempfile
        >>> import zlib
        >>> import numpy as np
        >>> from blockyard.stores import Codec, open_store
        >>> def decompress(encoded, max_length):
        ...     return zlib.decompressobj().decompress(encoded, max_length)
        >>> codec = Codec("zlib-6", zlib.compress, decompress)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     url = f"local://{folder}?size=1MiB"
        ...     with open_store(url, bytes_per_block=4096, use="prefix", codec=codec) as store:
        ...         written = store.wait(store.submit_put([bytes(32)], np.ones((1, 4096), np.uint8)))
        >>> written.ok.tolist()
        [True]
    """

    name: str
    encode: Callable[[memoryview], Any]
    decode: Callable[..., Any]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgumentError("name is '', must name the format of the encoded blocks")
        _check_decode(self.decode)
        set_ints(self, "max_bytes")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise InvalidArgumentError(f"max_bytes is {self.max_bytes}, must be at least 1")

    def bound(self, bytes_per_block: int) -> int:
        """Return the maximum bytes of an encoded block."""
        bytes_per_block = as_int("bytes_per_block", bytes_per_block)
        return self.max_bytes or bytes_per_block + bytes_per_block // 64 + _SLACK

    def encode_into(self, block: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """Encode a block into `out`, pad it with zeros, and return its encoded length.

        Raises:
            StoreError: the encoded block is empty, or longer than `out`.
        """
        encoded = np.frombuffer(self.encode(block.data), np.uint8)
        if not 0 < len(encoded) <= len(out):
            raise StoreError(f"codec {self.name!r} encoded a block as {len(encoded)} bytes, must be 1 to {len(out)}")
        out[: len(encoded)] = encoded
        out[len(encoded) :] = 0
        return len(encoded)

    def decode_into(self, encoded: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Decode a block into `out`.

        Raises:
            StoreError: the decoded block is not as long as `out`.
        """
        block = np.frombuffer(self.decode(encoded.data, max_length=len(out)), np.uint8)
        if len(block) != len(out):
            raise StoreError(f"codec {self.name!r} decoded a block of {len(block)} bytes, must be {len(out)}")
        out[:] = block


def _check_decode(decode: Callable[..., Any]) -> None:
    """Refuse a `decode` that takes no `max_length`: a forged block of a megabyte could become a gigabyte."""
    try:
        found = signature(decode)
    except ValueError:  # a built-in function without a signature
        return
    try:
        found.bind(b"", max_length=1)
    except TypeError:
        raise InvalidArgumentError(
            f"decode takes {found!s:.100}, must take (encoded, max_length) and return no more bytes"
        ) from None


def read_mac_key(key: MacKey) -> bytes:
    """Return a MAC key. If `key` is a path, read it from that file: 32 bytes, or 64 hexadecimal digits.

    Raises:
        InvalidArgumentError: the key does not have 32 bytes.
        StoreError: the file cannot be read, or users other than its owner can read or write it.
    """
    if isinstance(key, Path):
        path = key
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise StoreError(f"mac_key is in {str(path)!r}, which others can read or write: chmod 600")
            with path.open("rb") as file:
                data = file.read(80)
        except OSError as error:
            raise StoreError(f"mac_key cannot be read: {error}") from None
        try:
            key = data if len(data) == 32 else bytes.fromhex(data.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != 32:
            raise InvalidArgumentError(
                f"mac_key in {str(path)!r} has {len(data)} bytes, must have 32, or 64 hexadecimal digits"
            )
    if not isinstance(key, bytes) or len(key) != 32:
        shown = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
        raise InvalidArgumentError(f"mac_key is {shown}, must be 32 bytes or the path of a file with them")
    return key


def guarded_namespace(namespace: bytes, codec: Codec | None, mac_key: bytes | None) -> bytes:
    """Return the namespace of encoded or authenticated blocks: stores without the codec or key do not find them."""
    name = b"" if codec is None else codec.name.encode()
    key = b"" if mac_key is None else hashlib.sha256(b"BLKYMACKEY1" + mac_key).digest()
    digest = hashlib.sha256(
        b"BLKYGUARD1" + namespace.ljust(32, b"\0") + len(name).to_bytes(8, "little") + name + key
    ).digest()
    if not isinstance(namespace, Namespace):
        return digest
    return Namespace(digest, namespace.parts | {"codec": name.decode(), "mac_key": "yes" if key else ""})
