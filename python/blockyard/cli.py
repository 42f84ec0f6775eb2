"""The `blockyard` command: `demo` runs the whole path, `doctor` describes this installation.

`calibrate` measures the fastest copy strategies of each CUDA device and keeps them.
`inspect` and `fsck` look at the file of a store.

The exit codes are in `EXIT_CODES` and in `blockyard --help`. Torch is imported only after the arguments are parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from blockyard import __version__
from blockyard._core import SlabReport, check_slab, inspect_slab
from blockyard.demo.pool import GOALS
from blockyard.demo.report import SABOTAGE_KINDS
from blockyard.errors import BlockyardError
from blockyard.scheduler import PREEMPTION_MODES
from blockyard.workers import missing

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a stream that cannot be written."""

EXIT_OK = 0
EXIT_NOT_IDENTICAL = 1
EXIT_DAMAGED = 1
EXIT_BAD_INPUT = 2
EXIT_OUTPUT = 3
EXIT_FAULT = 4
EXIT_INTERRUPTED = 130
EXIT_CODES = """\
exit codes:
  0      success
  1      tokens differ from those of the unpaged run; or `fsck` found damaged blocks
  2      bad input; one line says what
  3      the output cannot be written: a full disk, a closed pipe
  4      any other error; a traceback says where
  128+n  ended by signal n: 129 SIGHUP, 130 SIGINT (Ctrl-C), 143 SIGTERM
"""

_UNITS = "in GiB, or with a unit, such as 64MiB"
_MOST_SHOWN = 20
"""Damaged slots that are listed."""


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
    try:
        try:
            code = _run(arguments)
        finally:  # `--help` ends by an exception
            sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"blockyard: cannot write standard output: {error.strerror or error}", file=sys.stderr)
        code = EXIT_OUTPUT
    if code == EXIT_OUTPUT:
        _forget_output()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except BlockyardError as error:
        print(f"blockyard: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # Python would exit with 1, which means that tokens differ
        if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
            raise
        if isinstance(error, ModuleNotFoundError) and (found := missing("this command", error)) is not error:
            print(f"blockyard: {found}", file=sys.stderr)
            return EXIT_BAD_INPUT
        traceback.print_exc()
        return EXIT_FAULT


def _replace_closed_streams() -> None:
    """Discard what goes to a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (until the end)


def _forget_output() -> None:
    """Drop what could not be written; else Python tries again at exit and changes the exit code."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _DemoHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that say something, and keeps the layout of the exit codes."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False
        return action.help if says_nothing else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blockyard",
        description="Tracks the blocks of a paged KV cache and moves them between device, host and storage.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"blockyard {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="serve a workload that does not fit its KV cache and compare every token with an unpaged run",
        epilog=EXIT_CODES,
        formatter_class=_DemoHelp,
    )
    _add_workload_options(demo)
    _add_pool_options(demo)
    _add_fault_options(demo)
    demo.set_defaults(command=_demo)
    doctor = commands.add_parser("doctor", help="show what is installed, and why something is missing")
    doctor.set_defaults(command=_doctor)
    calibrate = commands.add_parser(
        "calibrate",
        help="measure the fastest copies of each CUDA device once, and save them",
        description="Measure the fastest copy strategies of each CUDA device, save them in a file and print the file's "
        "name. Processes of this user that start from then on use them.",
    )
    calibrate.set_defaults(command=_calibrate)
    look = commands.add_parser("inspect", help="show what the file of a store holds; the store may be in use")
    look.add_argument("path", type=Path, help="the directory of a prefix store, or a file *.slab")
    look.set_defaults(command=_inspect)
    fsck = commands.add_parser(
        "fsck", help="read every block of a store's file, which is not in use, and name the damaged"
    )
    fsck.add_argument("path", type=Path, help="the directory of a prefix store, or a file *.slab")
    fsck.add_argument("--repair", action="store_true", help="wipe the slots of damaged blocks")
    fsck.set_defaults(command=_fsck)
    return parser


def _add_workload_options(demo: argparse.ArgumentParser) -> None:
    group = demo.add_argument_group("model and workload")
    group.add_argument(
        "--model", type=Path, metavar="DIR", help="a local checkpoint; a small random Llama if not given"
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda if there is one")
    group.add_argument(
        "--tensor-parallel-size",
        type=_count(1),
        default=1,
        metavar="N",
        help="processes that share the model, on a CPU",
    )
    group.add_argument("--requests", type=_count(1), default=48, metavar="N", help="requests of library text")
    group.add_argument("--seed", type=_count(0), default=0, metavar="N", help="seed of texts, lengths and samplers")
    group.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake JSONL or Azure CSV: lengths and arrivals")
    group.add_argument("--trace-requests", type=_count(1), default=48, metavar="N", help="rows of the trace to read")
    group.add_argument("--scale", type=_factor, default=1 / 16, metavar="X", help="factor on the trace's lengths")


def _add_pool_options(demo: argparse.ArgumentParser) -> None:
    group = demo.add_argument_group("blocks, tiers and scheduling")
    group.add_argument("--block-size", type=_count(1), default=16, metavar="N", help="tokens in a block")
    group.add_argument("--num-device-blocks", type=_count(1), metavar="N", help="default: too few for the workload")
    group.add_argument("--num-host-blocks", type=_count(0), metavar="N", help="0: swap from device to file")
    group.add_argument("--swap-space", type=_space, metavar="GIB", help=f"or host memory for swapping; {_UNITS}")
    group.add_argument(
        "--prefix-store",
        nargs="?",
        const=f"file://{Path(tempfile.gettempdir()) / 'blockyard-demo-prefixes'}",
        metavar="URL",
        help="store that keeps cached blocks for the next run: redis://HOST, or file:///DIR, a temporary folder "
        "if no URL is given",
    )
    group.add_argument("--prefix-store-space", type=_space, metavar="GIB", help=f"that store's size; {_UNITS}")
    group.add_argument("--swap-store", metavar="URL", help="file:///DIR?size=2GiB; default: a temporary folder")
    group.add_argument("--swap-store-space", type=_space, metavar="GIB", help=f"that store's size; {_UNITS}")
    group.add_argument("--preemption-mode", choices=PREEMPTION_MODES, default="auto", help="what to do with a victim")
    group.add_argument(
        "--num-lookahead-tokens", type=_count(0), default=0, metavar="N", help="draft tokens of a sequence in a step"
    )
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let prompts share the blocks of earlier prompts with the same beginning",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_count(1),
        default=8192,
        metavar="N",
        help="tokens of a step beyond which prompts are computed in chunks",
    )
    group.add_argument("--max-num-seqs", type=_count(1), default=64, metavar="N", help="most sequences in one step")
    group.add_argument("--defrag", choices=tuple(GOALS), help="move blocks off the tail, or as low as can be")
    group.add_argument(
        "--shrink-to",
        type=_count(1),
        metavar="N",
        help="device blocks from half-way on; the memory of the others is released",
    )


def _add_fault_options(demo: argparse.ArgumentParser) -> None:
    group = demo.add_argument_group("faults and output")
    faults = group.add_mutually_exclusive_group()
    faults.add_argument("--corrupt", type=_count(1), default=0, metavar="N", help="damage N blocks stored in the file")
    faults.add_argument(
        "--sabotage",
        choices=SABOTAGE_KINDS,
        help="silently drop one transfer of this kind; with a prefix cache, nothing may read it back (exit code 0)",
    )
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all figures to this file; - for standard output, where nothing else goes then: the report goes to "
        "standard error",
    )
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print errors only, neither progress nor report; the exit code has the result, and --json is written",
    )


def _demo(options: argparse.Namespace) -> int:
    from blockyard.demo.run import DemoOptions, run_demo  # noqa: PLC0415 - torch is not loaded for bad arguments

    fields = {name: value for name, value in vars(options).items() if name not in ("command", "quiet")}
    with _orderly_end():
        return run_demo(DemoOptions(**fields), live=sys.stderr.isatty(), quiet=options.quiet)


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """On SIGTERM or SIGHUP, still remove the files that the program made."""
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


def _doctor(_options: argparse.Namespace) -> int:
    from blockyard.doctor import run_doctor  # noqa: PLC0415 - it looks for torch

    return run_doctor()


def _calibrate(_options: argparse.Namespace) -> int:
    from blockyard.engine.cuda.calibrate import run_calibrate  # noqa: PLC0415 - it imports torch

    return run_calibrate()


def _inspect(options: argparse.Namespace) -> int:
    _show(inspect_slab(options.path))
    return EXIT_OK


def _fsck(options: argparse.Namespace) -> int:
    report = check_slab(options.path, repair=options.repair)
    _show(report)
    if options.repair and report.damaged:
        print(f"wiped      {report.wiped} slots")
    return EXIT_DAMAGED if report.damaged else EXIT_OK


def _show(report: SlabReport) -> None:
    print(f"slab       {report.path}")
    print(f"slots      {report.num_slots} of {report.bytes_per_block} bytes, {report.empty} empty")
    for namespace, count in report.blocks.items():
        print(f"blocks     {count} of namespace {namespace}")
    print(f"forgotten  {report.forgotten}")
    print(f"replaced   {report.replaced}")
    print(f"damaged    {len(report.damaged)}")
    for slot, reason in report.damaged[:_MOST_SHOWN]:
        print(f"           slot {slot}: {reason}")
    if len(report.damaged) > _MOST_SHOWN:
        print(f"           and {len(report.damaged) - _MOST_SHOWN} more")


def _count(least: int) -> Callable[[str], int]:
    """An argparse type: an integer from `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {2**31 - 1}")
        return value

    return parse


def _space(text: str) -> str:
    """An argparse type: a size, in GiB where it has no unit, as operators know it from `--swap-space`."""
    return f"{text}GiB" if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text, flags=re.ASCII) else text


def _factor(text: str) -> float:
    """An argparse type: a factor above 0, as 0.0625 or 1/16."""
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / (float(bottom) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor such as 0.0625 or 1/16") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
