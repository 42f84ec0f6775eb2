"""`RedisURL`: a parsed URL of the Redis store. `blockyard.stores.redis` describes the options."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from blockyard.stores.threaded.remote import SIZE, count, positive, seconds
from blockyard.stores.url import StoreURL

__all__ = ["RedisURL", "read_url"]


class RedisURL(NamedTuple):
    """A parsed URL of the Redis store."""

    parts: StoreURL
    client: dict[str, Any]  # options for `RedisClient`
    size: int | None
    ttl: float | None
    threads: int
    memory: int
    timeout_base: float

    def __repr__(self) -> str:
        return f"RedisURL({self.parts.url!r})"


def read_url(url: str) -> RedisURL:
    """Parse a URL with the scheme `redis`, `rediss`, `valkey`, `valkeys` or `unix`; opens at most a file of a password.

    Raises:
        StoreURLError: the URL is malformed, or its password cannot be read; the message shows the wrong part, but no
            password.
    """
    parts = StoreURL.parse(url)
    split = urlsplit(url)
    transport, _, cluster = split.scheme.replace("valkey", "redis", 1).partition("+")
    client: dict[str, Any] = {
        "cluster": bool(cluster),
        "username": unquote(split.username) if split.username else None,
        "password": _password(parts, split.password),
        "db": 0 if cluster else parts.take("db", count(0, 1 << 31), 0, "0 or more"),
    }
    if transport == "unix":
        if split.hostname or not parts.path.startswith("/"):
            parts.reject(split.hostname or parts.path, "must be the absolute path of a socket: unix:///run/redis.sock")
        client |= {"transport": "unix", "host": parts.path}
    else:
        if not split.hostname:
            parts.reject(parts.host, "must name a host: redis://host:6379")
        if parts.path not in {"", "/"}:
            parts.reject(parts.path, "is not part of the URL; write ?db=1 for a database")
        port = None
        with suppress(ValueError):  # its message quotes the port, which may be part of a password
            port = split.port or 6379
        if port is None:
            parts.reject(parts.host, "has an invalid port")
        client |= {"host": split.hostname, "port": port}
    if transport == "rediss":
        files = {name: parts.take(name, str, None, "a path") for name in ("ca", "cert", "key")}
        client |= {"transport": "tls", **files}
    found = RedisURL(
        parts,
        client,
        size=parts.take("size", positive, 0, SIZE) or None,
        ttl=parts.take("ttl", seconds(0, 1e9), None, "0 to 1e9 seconds"),
        threads=parts.take("threads", count(1, 64), 4, "1 to 64"),
        memory=parts.take("memory", positive, 1 << 30, SIZE),
        timeout_base=parts.take("timeout_base", seconds(0.05, 86_400), 2.0, "0.05 to 86400 seconds"),
    )
    parts.finish(
        "size, ttl, db, threads, memory, timeout_base, password_file, password_env and, for rediss and valkeys, ca, "
        "cert, key"
    )
    return found


def _password(parts: StoreURL, written: str | None) -> str | None:
    """Return the password, which the URL has or names; messages about the store do not show it."""
    file = parts.take("password_file", str, None, "a path")
    name = parts.take("password_env", str, None, "a variable's name")
    if file is None and name is None:
        return unquote(written) if written else None
    option = f"password_file={file}" if file is not None else f"password_env={name}"
    if written or (file is not None and name is not None):
        parts.reject(option, "is given beside another password")
    password, why = "", ""
    if file is not None:
        try:
            password = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, ValueError) as error:
            why = f"cannot be read ({error.strerror if isinstance(error, OSError) else 'it is not UTF-8'})"
    else:
        password = os.environ.get(name or "", "")
        why = "" if password else "is not set in the environment, or is empty"
    if not password:
        parts.reject(option, why or "is empty")
    parts.secrets.append(password)
    return password
