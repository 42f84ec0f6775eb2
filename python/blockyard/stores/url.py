"""`StoreURL`: the parts of a store's URL. Its messages show the wrong part, but no password."""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from blockyard.errors import InvalidArgumentError, StoreFullError, StoreURLError

__all__ = [
    "MAX_BYTES",
    "StoreURL",
    "parse_size",
    "public_url",
    "rank_url",
    "read_bytes",
    "require_room",
    "require_text",
    "sized_url",
]

MAX_BYTES = 1 << 62
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base, prefixes in (("iB", 1024, "KMGT"), ("B", 1000, "kMGT"))
    for power, prefix in enumerate(prefixes, 1)
}

Value = TypeVar("Value")


def sized_url(url: str, name: str, space: int | str | None) -> str:
    """Add a size to a URL.

    Args:
        url: URL of a store.
        name: name of the argument with the size.
        space: the size; None adds nothing.

    Raises:
        InvalidArgumentError: the URL already has a size; the message shows both.
    """
    if space is None:
        return url
    given = re.search(r"[?&](size=[^&]*)", url)
    if given:
        raise InvalidArgumentError(f"{public_url(url)!r} has {given[1]}, but {name} is {space}: give only one of them")
    return f"{url}{'&' if '?' in url else '?'}size={space}"


def rank_url(url: str, rank: int) -> str:
    """Return the URL of one rank, with its number in place of `{rank}`."""
    return url.replace("{rank}", str(rank))


def public_url(url: str) -> str:
    """Return a URL without user name and password, for messages."""
    return re.sub(r"(?<=://)(?!/).*@", "***@", url, flags=re.DOTALL)


def require_text(url: str, part: str, name: str) -> None:
    """Reject control characters and lone surrogates: URL parsing drops them silently."""
    for character in part:
        if unicodedata.category(character) in {"Cc", "Cs"}:
            raise StoreURLError(
                f"{public_url(url)!r}: {name} has the character {character!r}, only printable ones are allowed"
            )


@dataclass
class StoreURL:
    """The parts of a store's URL. Every error shows the URL and its wrong part."""

    url: str
    host: str
    path: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> "StoreURL":
        """Split a URL. Options follow the question mark, as `name=value` joined by `&`.

        Raises:
            StoreURLError: an option is malformed or repeated, or there is a fragment.
        """
        require_text(url, url, "it")
        try:
            parts = urlsplit(url)
        except ValueError:  # its message may quote a password
            raise StoreURLError(f"{public_url(url)!r}: the host is malformed") from None
        found = cls(public_url(url), public_url(f"://{parts.netloc}")[3:], _decoded(url, parts.path), {})
        if parts.fragment:
            found.reject(f"#{parts.fragment}", "is not part of a store's URL")
        for option in filter(None, parts.query.split("&")):
            name, equals, value = option.partition("=")
            if not equals or not name or not value:
                found.reject(option, "must be an option name=value")
            if name in found.options:
                found.reject(option, "is given twice")
            found.options[name] = _decoded(url, value)
        return found

    def take(self, name: str, read: Callable[[str], Value], default: Value, wanted: str) -> Value:
        """Parse an option and mark it as known.

        Args:
            name: name of the option.
            read: converts the text to a value, or raises ValueError.
            default: value if the option is missing.
            wanted: description of valid values, for the message.

        Raises:
            StoreURLError: the option's value is invalid.
        """
        text = self.options.pop(name, None)
        if text is None:
            return default
        try:
            return read(text)
        except ValueError:
            self.reject(f"{name}={text}", f"must be {wanted}")

    def finish(self, known: str) -> None:
        """Reject options that no `take` has used.

        Raises:
            StoreURLError: an option is unknown; the message lists `known`.
        """
        for name, text in self.options.items():
            self.reject(f"{name}={text}", f"is not an option of this store; its options are {known}")

    def reject(self, part: str, why: str) -> NoReturn:
        """Raise an error about a part of the URL."""
        raise StoreURLError(f"{self.url!r}: {part!r} {why}")


def _decoded(url: str, part: str) -> str:
    """Decode percent-encoding; the result must be UTF-8."""
    try:
        text = unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise StoreURLError(f"{public_url(url)!r}: {part!r} is not UTF-8 after percent-decoding") from None
    require_text(url, text, repr(part))
    return text


def parse_size(text: str) -> int:
    """Parse a size, such as `2GiB`, `1.5 TiB`, `500MB` or plain bytes; rounds down to whole bytes.

    Raises:
        ValueError: the text is not a size, its unit is ambiguous (`2G`), or it is more than 2**62 bytes.
    """
    match = re.fullmatch(r"0*([0-9]+)(?:\.([0-9]+))? ?([A-Za-z]*)", text, flags=re.ASCII)
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    if not match or match[3] not in _UNITS:
        raise ValueError(f"{shown} is not a size; write for example 2GiB, 500MB or plain bytes")
    whole, fraction, unit = match[1], (match[2] or "")[:40], _UNITS[match[3]]
    size = MAX_BYTES + 1 if len(whole) > 19 else int(whole + fraction) * unit // 10 ** len(fraction)
    if size > MAX_BYTES:
        raise ValueError(f"{shown} is more than 2**62 bytes")
    return size


def read_bytes(name: str, value: int | str, *, holds: int, what: str = "block") -> int:
    """Parse an argument that is a number of bytes.

    Args:
        name: name of the argument.
        value: an int, or text for `parse_size`.
        holds: bytes of one item; at least one must fit.
        what: name of the item.

    Raises:
        InvalidArgumentError: the value is not a size, or too small. For a small bare number, the message suggests GiB.
    """
    try:
        size = parse_size(value) if isinstance(value, str) else index(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None
    except TypeError:
        size = -1
    if isinstance(value, bool) or not 0 <= size <= MAX_BYTES:
        raise InvalidArgumentError(f'{name} is {value!r}, must be 0 to 2**62 bytes, or text such as "64GiB"')
    if size < holds:
        raise InvalidArgumentError(f"{name} is {value}: {_too_small(size, holds, what)}")
    return size


def require_room(url: str, bytes_per_block: int) -> None:
    """Reject a URL whose `size` or `memory` is less than one block. The store checks everything else.

    Raises:
        StoreFullError: `size` is less than one block.
        StoreURLError: `memory` is less than one block.
    """
    options = StoreURL.parse(url).options
    for name, kind in (("size", StoreFullError), ("memory", StoreURLError)):
        try:
            size = parse_size(options.get(name, "0"))
        except ValueError:
            continue
        if 0 < size < bytes_per_block:
            why = _too_small(size, bytes_per_block, "slot" if name == "size" else "block")
            raise kind(f"{public_url(url)!r}: '{name}={options[name]}': {why}")


def _too_small(size: int, holds: int, what: str) -> str:
    """Return a message for a size that is too small. Every unit is at least 1 kB, so a number below has no unit."""
    return f"{size} bytes hold no {what} of {holds} bytes" + (f'; did you mean "{size}GiB"?' if 0 < size < 1000 else "")
