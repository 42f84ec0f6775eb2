"""The `blockyard` command; `blockyard --help` lists what it does, `docs/reference/cli.md` describes its JSON.

`options` defines the command line and `commands` runs each command; this file handles output, errors and signals.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from blockyard import __version__
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    InvariantError,
    StoreError,
    StoreFullError,
    StoreURLError,
)
from blockyard.tools.cli import commands
from blockyard.tools.cli.options import make_parser
from blockyard.tools.cli.result import EXIT_BAD_USAGE, EXIT_WRONG, Result
from blockyard.tools.cli.unused import refuse_unused
from blockyard.workers.extras import missing

__all__ = ["main"]

EXIT_OUTPUT = 3
EXIT_FAULT = 4
EXIT_INTERRUPTED = 130
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a stream that cannot be written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` (0) and an unusable command line (2).
    """
    _replace_closed_streams()
    with contextlib.suppress(AttributeError):  # the caller may have replaced the stream
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # file names may be any bytes
    try:
        try:
            code = _run(arguments)
        finally:  # `--help` ends with an exception
            sys.stdout.flush()
    except OSError as error:
        _complain(f"cannot write standard output: {error.strerror or error}")
        code = EXIT_OUTPUT
    if code == EXIT_OUTPUT:
        _forget_output()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = make_parser().parse_args(arguments)
        refuse_unused(options)
        _check_files(options)
        with _orderly_end():
            result: Result = getattr(commands, options.command)(options)
        return _write(result, options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # Python would exit with 1, which means "something is wrong"
        if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
            raise
        if isinstance(error, BlockyardError) and not isinstance(error, InvariantError):
            _complain(str(error))
            is_broken = isinstance(error, StoreError) and not isinstance(error, StoreURLError | StoreFullError)
            return EXIT_WRONG if is_broken else EXIT_BAD_USAGE
        if isinstance(error, ModuleNotFoundError) and (found := missing("this command", error)) is not error:
            _complain(str(found))
            return EXIT_BAD_USAGE
        traceback.print_exc()
        return EXIT_FAULT


def _write(result: Result, options: argparse.Namespace) -> int:
    """Write the result to the files asked for; if a file cannot be written, to standard output.

    Returns:
        The exit code.
    """
    code, files = result.exit_code, dict(result.files)
    if options.output is not None:
        files[options.output] = partial(_save_report, result, options)
    saved = [_save(path, write) for path, write in files.items()]
    if not all(saved):
        code = EXIT_OUTPUT
    if (options.output is None or code == EXIT_OUTPUT) and (options.format == "json" or not options.quiet):
        _format(result, options, sys.stdout)
    if result.problem:
        _complain(result.problem)
    return code


def _save(path: Path, write: Callable[[Path], None]) -> bool:
    """Write a file completely or not at all. Report a failure and return False."""
    try:
        if (path.exists() and not path.is_file()) or not os.access(path.absolute().parent, os.W_OK):
            write(path)  # a pipe, a device, or a file in a read-only folder
            return True
        whole = path.resolve()
        part = whole.with_name(f".{whole.name}.{os.getpid()}")
        try:
            write(part)
            if whole.exists():
                shutil.copymode(whole, part)
            part.replace(whole)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        _complain(f"cannot write {path}: {error.strerror or error}")
        return False
    return True


def _save_report(result: Result, options: argparse.Namespace, path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        _format(result, options, file)


def _format(result: Result, options: argparse.Namespace, stream: TextIO) -> None:
    if options.format == "text":
        result.show(stream)
    else:
        head = {"command": options.command, "version": __version__, "exit_code": result.exit_code}
        stream.write(json.dumps(head | result.data, indent=2) + "\n")
    stream.flush()


def _check_files(options: argparse.Namespace) -> None:
    """Before the command runs, reject output files that cannot be written or that it also reads."""
    used: set[Path] = set()
    for name in ("traces", "trace", "path", "fit", "model_config", "config"):
        value = getattr(options, name, None)
        used |= {path.resolve() for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)}
    for name in ("output", "html", "trace_events"):
        if (path := getattr(options, name, None)) is None:
            continue
        _check_file(path)
        if path.is_file() or not path.exists():
            if path.resolve() in used:
                raise InvalidArgumentError(f"cannot write {path}: the command uses this file for something else")
            used.add(path.resolve())


def _check_file(path: Path) -> None:
    """Reject a file that cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InvalidArgumentError(f"cannot write {path}: {folder} is not a folder")
    if path.is_dir():
        raise InvalidArgumentError(f"cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidArgumentError(f"cannot write {path}: permission denied")


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"blockyard: {line}", file=sys.stderr)


def _replace_closed_streams() -> None:
    """Discard output to a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until exit)


def _forget_output() -> None:
    """Discard unwritten output; otherwise Python retries at exit and changes the exit code."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Remove temporary files even when SIGTERM or SIGHUP ends the program."""
    # Ignored signals stay ignored: `nohup` ignores SIGHUP.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def leave(number: int, _frame: FrameType | None) -> None:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise SystemExit(128 + number)

    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
