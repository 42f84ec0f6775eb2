"""`StoreURL`: the parts of a store's URL. Its messages show the wrong part, but no secret.

A message shows an option's value only if the option is known to hold no secret, or if the value is a number or a word
such as `on`. Everything else is `***`: no list of names could be complete.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import index
from typing import NoReturn, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from blockyard.errors import InvalidArgumentError, StoreFullError, StoreURLError

__all__ = [
    "MAX_BYTES",
    "StoreURL",
    "hide_secrets",
    "is_secret_name",
    "meant",
    "parse_size",
    "public_repr",
    "public_url",
    "rank_url",
    "read_bytes",
    "require_room",
    "require_text",
    "secrets_of",
    "sized_url",
]

MAX_BYTES = 1 << 62
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base, prefixes in (("iB", 1024, "KMGT"), ("B", 1000, "kMGT"))
    for power, prefix in enumerate(prefixes, 1)
}
_SHOWN = frozenset(
    (
        *("size", "threads", "memory", "direct", "timeout_base", "drop", "ttl", "db", "ca"),
        *("connections", "region", "default_region", "account_name", "protocol", "device", "local", "admin"),
    )
)
_URLS = frozenset(
    ("endpoint", "metadata", "metadata_endpoint", "sts_endpoint", "base_url", "authority_host", "msi_endpoint")
)
_PLAIN = re.compile(r"-?[0-9.]{1,20} ?[A-Za-z]{0,3}|on|off|auto|true|false", re.ASCII)
_SECRET_NAME = re.compile(
    r"secret|token|pass|pwd|credential|sas|^sig$|(?<!skip_)signature|key|private|auth(?!ority)|account$|^pin$",
    re.IGNORECASE,
)
_PLACES = {
    "password_file": re.compile(r"(?:/|%2F)[\w./%-]*", re.ASCII),
    "password_env": re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII),
}
"""Options that say where a secret is, and what such a place looks like: anything else may be the secret itself."""
_MASK = "***"

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
    given = re.search(r"[?&](size=[^&]*)", shown := public_url(url))
    if given:
        raise InvalidArgumentError(f"{shown!r} has {given[1]}, but {name} is {space}: give only one of them")
    return f"{url}{'&' if '?' in url else '?'}size={space}"


def rank_url(url: str, rank: int) -> str:
    """Return the URL of one rank, with its number in place of `{rank}`."""
    return url.replace("{rank}", str(rank))


def public_url(url: str) -> str:
    """Return a URL without secrets, for messages. Idempotent.

    Everything up to the last `@` may be a password, since `/`, `?` and `#` in one are easily left unescaped; only the
    path of a `file` or `local` URL may have an `@`.
    """
    start, user, rest = _parts(url)
    if "?" in user or "#" in user:  # then the rest may belong to the value of an option
        return f"{start}{_MASK}@{_MASK}"
    rest, hash_mark, fragment = rest.partition("#")
    place, mark, query = rest.partition("?")
    host, slash, path = place.partition("/")
    if start and not host.startswith("["):
        host = re.sub(r":(?![0-9]{0,5}$).*", f":{_MASK}", host, flags=re.DOTALL)  # perhaps a password without its `@`
    options = "&".join(map(_public_option, query.split("&")))
    user, end = f"{_MASK}@" if user else "", f"{hash_mark}{_MASK}" if fragment else ""
    return f"{start}{user}{host}{slash}{path}{mark}{options}{end}"


def _parts(url: str) -> tuple[str, str, str]:
    """Split a URL: its scheme with `://`, user name and password with `@`, and the rest."""
    found = re.match("[A-Za-z][A-Za-z0-9+.-]*://", url)
    start = found[0] if found else ""
    rest = url[len(start) :]
    if re.match("(file|local):/", url) and (not start or rest.startswith("/")):
        return start, "", rest
    user, at, rest = rest.rpartition("@")
    return start, user + at, rest


def _public_option(option: str) -> str:
    name, equals, value = option.partition("=")
    if name in _URLS:
        return f"{name}{equals}{public_url(value)}"
    is_shown = name in _SHOWN or _is_place(name, value) or (_PLAIN.fullmatch(value) and not is_secret_name(name))
    if is_shown or not option:
        return option
    return f"{name}={_MASK}" if equals and re.fullmatch(r"[\w.-]*", name) else _MASK


def _is_place(name: str, value: str) -> bool:
    return name in _PLACES and _PLACES[name].fullmatch(value) is not None


def is_secret_name(name: str) -> bool:
    """Return whether an option or variable of this name may hold a secret."""
    return _SECRET_NAME.search(name) is not None


def secrets_of(url: str) -> list[str]:
    """Return the secrets in a URL, as they are written and decoded: user name, password, and options named like one."""
    _, user, rest = _parts(url)
    found = [user[:-1], *user[:-1].split(":", 1)]
    for option in rest.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if is_secret_name(name) and not _is_place(name, value):
            found.append(value)
    return [text for text in dict.fromkeys([*found, *map(unquote, found)]) if text and text != _MASK]


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """Mask secrets in a text, however they are escaped, and the user name and password of every URL in it."""
    forms = {
        form for secret in secrets for form in (secret, " ".join(secret.split()), quote(secret), quote(secret, ""))
    }
    forms |= {json.dumps(form)[1:-1] for form in forms} | {repr(form)[1:-1] for form in forms}
    for form in sorted(filter(None, forms), key=len, reverse=True):  # one may be part of another
        text = text.replace(form, _MASK)
    return re.sub(r"(?<=://)[^/\s'\"]*@", f"{_MASK}@", text)


def public_repr(value: object) -> str:
    """Return the repr of an argument that may be a URL, shortened and without secrets, for messages."""
    if isinstance(value, bytes | Collection) and not isinstance(value, str):  # of URLs, perhaps
        return f"a {type(value).__name__}"
    shown = public_url(value) if isinstance(value, str) else value
    return f"{shown!r:.100}"


def require_text(url: str, part: str, name: str) -> None:
    """Reject control characters and lone surrogates: URL parsing drops them silently."""
    for character in part:
        if unicodedata.category(character) in {"Cc", "Cs"}:
            raise StoreURLError(
                f"{public_url(url)!r}: {name} has the character {character!r}, only printable ones are allowed"
            )


@dataclass
class StoreURL:
    """The parts of a store's URL. Every error shows the URL and its wrong part, but no secret.

    Attributes:
        url: the URL without secrets, for messages.
        host: host and port, or the bucket.
        path: the path, decoded.
        options: values by name, decoded; `take` removes one.
        secrets: what messages must not show.
    """

    url: str
    host: str = field(repr=False)
    path: str = field(repr=False)
    options: dict[str, str] = field(repr=False)
    secrets: list[str] = field(default_factory=list, repr=False)

    @classmethod
    def parse(cls, url: str) -> "StoreURL":
        """Split a URL. Options follow the question mark, as `name=value` joined by `&`.

        Raises:
            StoreURLError: an option is malformed or repeated, there is a fragment, or a password is not
                percent-encoded.
        """
        require_text(url, url, "it")
        parts = _split(url)
        if parts is None:
            raise StoreURLError(f"{public_url(url)!r}: the host is malformed")
        found = cls(public_url(url), parts.netloc.rpartition("@")[2], "", {}, secrets_of(url))
        if parts.netloc and "@" in url.partition(parts.netloc)[2]:
            found.reject("@", "is ambiguous: write / ? # @ in a password as %2F %3F %23 %40, and @ elsewhere as %40")
        found.path = found._decode(parts.path, parts.path)
        if parts.fragment:
            found.reject("#***", "is not part of a store's URL")
        for option in filter(None, parts.query.split("&")):
            name, equals, value = option.partition("=")
            if not equals or not name or not value:
                found.reject(option, "must be an option name=value")
            if name in found.options:
                found.reject(option, "is given twice")
            found.options[name] = found._decode(option, value)
        return found

    def _decode(self, shown: str, part: str) -> str:
        """Decode percent-encoding; the result must be UTF-8."""
        try:
            text = unquote(part, errors="strict")
        except UnicodeDecodeError:
            text = None
        if text is None:
            self.reject(shown, "is not UTF-8 after percent-decoding")
        require_text(self.url, text, repr(self._shown(shown)))
        return text

    def take(self, name: str, read: Callable[[str], Value], default: Value, wanted: str) -> Value:  # noqa: RET503
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
        with suppress(ValueError):  # its message quotes the value
            return read(text)
        self.reject(f"{name}={text}", f"must be {wanted}")

    def finish(self, known: str) -> None:
        """Reject options that no `take` has used.

        Raises:
            StoreURLError: an option is unknown; the message lists `known`.
        """
        for name, text in self.options.items():
            self.reject(f"{name}={text}", f"is not an option of this store; its options are {known}")

    def reject(self, part: str, why: str) -> NoReturn:
        """Raise an error about a part of the URL, which it shows as `url` does."""
        raise StoreURLError(f"{self.url!r}: {self._shown(part)!r} {why}")

    def _shown(self, part: str) -> str:
        """Return a part of the URL for a message: masked unless `url` shows it, too."""
        for text in (part, _public_option(part)):
            if text in self.url or text in unquote(self.url):
                return text
        return _MASK


def _split(url: str) -> SplitResult | None:
    """Split a URL; None if its host is malformed. Python's own error quotes it, password included."""
    try:
        return urlsplit(url)
    except ValueError:
        return None


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
        InvalidArgumentError: the value is not a size, or too small. For a small number, the message suggests GiB.
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
        raise InvalidArgumentError(f"{name} is {value}: {size} bytes hold no {what} of {holds} bytes{meant(value)}")
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
            what = "slot" if name == "size" else "block"
            why = f"{size} bytes hold no {what} of {bytes_per_block} bytes{meant(options[name])}"
            raise kind(f"{public_url(url)!r}: '{name}={options[name]}': {why}")


def meant(value: int | str) -> str:
    """Return a remedy for a size that is too small: `; did you mean "20GiB"?` for 20 or `"20MiB"`, or nothing."""
    match = re.fullmatch(r"0*([0-9]{1,3}(?:\.[0-9]{1,6})?) ?(?:[kKM]i?B|B)?", str(value), flags=re.ASCII)
    return f'; did you mean "{match[1]}GiB"?' if match and float(match[1]) else ""
