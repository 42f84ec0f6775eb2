"""Builds `python/blockyard/_ops.so` from `cuda/`, with a record of its targets in `_ops.json`.

`_ops.json` is always written. Without an op library it contains the reason, for `blockyard doctor`.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import TypedDict

from blockyard_build.settings import BuildError, Settings, read_settings
from blockyard_build.toolchain import TORCH_TARGET, MissingError, Toolchain, find_toolchain

SOURCES = Path("cuda")
LIBRARY = Path("python/blockyard/_ops.so")
MANIFEST = Path("python/blockyard/_ops.json")


class Manifest(TypedDict):
    """Contents of `_ops.json`. If the library was built, `reason` is empty and the rest is filled in."""

    built: bool
    reason: str
    torch: str
    torch_target: str
    cuda: str
    archs: list[str]
    compiler: str
    key: str


def build_op_library(root: Path, environ: Mapping[str, str]) -> Manifest:
    """Build the op library in place, or record why not.

    Args:
        root: root of the source tree; `cuda/` is read, `python/blockyard/` is written.
        environ: `os.environ` or a stand-in.

    Returns:
        The manifest that was written.

    Raises:
        BuildError: a setting is invalid, a compiler failed, or the required library cannot be built.
    """
    settings = read_settings(environ)
    try:
        if settings.mode == "off":
            raise MissingError("switched off at build time with BLOCKYARD_CUDA=off")
        manifest = _build(root, settings, find_toolchain(environ))
    except MissingError as missing:
        if settings.mode == "require":
            raise BuildError(f"BLOCKYARD_CUDA=require, but there is {missing}") from missing
        _say(f"building without the op library: {missing}")
        manifest = _without(str(missing))
        # The library of an earlier build would be packed silently.
        (root / LIBRARY).unlink(missing_ok=True)
    _write_if_changed(root / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def compile_commands(root: Path, settings: Settings, tools: Toolchain, scratch: Path) -> list[list[str]]:
    """Return the commands that compile each source and link the library.

    Args:
        root: root of the source tree.
        settings: the user's settings.
        tools: compilers and headers.
        scratch: folder for object files and the linked library, `_ops.so`.

    Returns:
        One command line per source, and a last one that links the objects.
    """
    commands = []
    objects = []
    for source in _sources(root):
        target = scratch / f"{source.name}.o"
        objects.append(str(target))
        compiler = _nvcc(settings, tools) if source.suffix == ".cu" else _gxx(tools)
        commands.append([*compiler, "-c", str(source), "-o", str(target)])
    commands.append(_link(tools, objects, scratch / LIBRARY.name))
    return commands


def _nvcc(settings: Settings, tools: Toolchain) -> list[str]:
    nvcc = str(tools.cuda_home / "bin" / "nvcc")
    host = ["-ccbin", tools.gxx, "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    return [nvcc, "-O3", "-std=c++17", *host, *settings.gencode()]


def _gxx(tools: Toolchain) -> list[str]:
    target = f"0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000"
    includes = ["-isystem", str(tools.torch_home / "include"), "-isystem", str(tools.cuda_home / "include")]
    flags = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    return [tools.gxx, *flags, "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={target}", *includes]


def _link(tools: Toolchain, objects: list[str], library: Path) -> list[str]:
    # libstdc++ stays shared: torch's exceptions cross the boundary, and with a second copy they abort.
    torch = [f"-L{tools.torch_home / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    cuda = [f"-L{tools.cuda_libs}", "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,ALL"]
    return [tools.gxx, "-shared", "-o", str(library), *objects, *torch, *cuda]


def _build(root: Path, settings: Settings, tools: Toolchain) -> Manifest:
    if not _sources(root):
        raise MissingError(f"no source under {SOURCES}/ at build time")
    manifest = Manifest(
        built=True,
        reason="",
        torch=tools.torch_version,
        torch_target=".".join(map(str, TORCH_TARGET)),
        cuda=tools.cuda_version,
        archs=[*(f"sm_{arch}" for arch in settings.archs), f"compute_{settings.archs[0]}"],
        compiler=f"{Path(tools.gxx).name} {tools.gxx_version}",
        key=_key(root, settings, tools),
    )
    if _is_current(root, manifest["key"]):
        return manifest
    # Inside the package folder, so that the finished library moves into place in one step.
    with tempfile.TemporaryDirectory(dir=(root / LIBRARY).parent, prefix=".ops-") as name:
        *compiling, linking = compile_commands(root, settings, tools, Path(name))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, compiling, repeat(root)))
        _run(linking, root)
        # A build interrupted here must not leave a record of another library.
        (root / MANIFEST).unlink(missing_ok=True)
        (Path(name) / LIBRARY.name).replace(root / LIBRARY)
    return manifest


def _key(root: Path, settings: Settings, tools: Toolchain) -> str:
    """Return a digest of everything that determines the library's bytes: sources, command lines, compiler versions."""
    digest = hashlib.sha256(repr(tools).encode())
    for command in compile_commands(root, settings, tools, Path("scratch")):
        digest.update(shlex.join(command).encode() + b"\0")
    for source in sorted((root / SOURCES).iterdir()):
        digest.update(f"{source.name}\0{source.stat().st_size}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _is_current(root: Path, key: str) -> bool:
    try:
        written = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (root / LIBRARY).is_file() and isinstance(written, dict) and written.get("key") == key


def _sources(root: Path) -> list[Path]:
    """List the sources, relative to the tree: commands run there, so the library contains no path."""
    folder = root / SOURCES
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [SOURCES / name for name in names if name.endswith((".cu", ".cpp"))]


def _without(reason: str) -> Manifest:
    return Manifest(built=False, reason=reason, torch="", torch_target="", cuda="", archs=[], compiler="", key="")


def _run(command: list[str], root: Path) -> None:
    _say(shlex.join(command))
    finished = subprocess.run(command, cwd=root, check=False)
    if finished.returncode:
        raise BuildError(
            f"the op library does not compile (exit status {finished.returncode}): {shlex.join(command)}\n"
            "BLOCKYARD_CUDA=off builds without it, BLOCKYARD_CUDA_ARCHS names other architectures"
        )


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _say(line: str) -> None:
    print(f"blockyard: {line}", file=sys.stderr, flush=True)
