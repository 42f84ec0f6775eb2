"""The command line: commands, options and the text of `--help`."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from blockyard import __version__
from blockyard.scheduler import PREEMPTION_MODES
from blockyard.tools.setup_checks import ENGINES
from blockyard.tools.store.contents import DIGITS
from blockyard.workers.extras import missing

__all__ = ["EXIT_CODES", "make_parser"]

EXIT_CODES: Final = """\
exit codes:
  0      all is well
  1      something is wrong: different tokens, damaged blocks, a failed check
  2      bad usage; one line explains it
  3      the output cannot be written: a full disk, a closed pipe
  4      an internal error; a traceback says where
  128+n  ended by signal n: 129 SIGHUP, 130 SIGINT (Ctrl-C), 143 SIGTERM
"""
_SHELLS: Final = ("bash", "zsh", "fish")
_AGES: Final = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
"""Seconds of each unit of an age."""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and which option may have been meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            (commands,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
            known = [name for action in _actions(commands.choices[found.command]) for name in action.option_strings]
            words = [word.partition("=")[0] for word in rest if word.startswith("--")]
            meant = ", ".join(name for word in words for name in difflib.get_close_matches(word, known, 1))
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f"; did you mean {meant}?" if meant else ""))
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows informative defaults only, and keeps the line breaks of examples and exit codes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False
        return action.help if says_nothing else super()._get_help_string(action)


class _PrintCompletion(argparse.Action):
    """Prints a script that makes a shell complete commands and options, and exits.

    shtab generates a static script, so Tab does not start Python; argcomplete would start it each time.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: argparse.Namespace, shell: object, _option: str | None = None
    ) -> None:
        try:
            import shtab  # noqa: PLC0415 (optional)
        except ModuleNotFoundError as error:
            parser.exit(2, f"{parser.prog}: error: {missing('--print-completion', error)}\n")
        for action in _actions(parser):
            if action.type is Path:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, str(shell)))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line; `command` is the name of a function in `commands`."""
    parser = _Parser(
        prog="blockyard",
        description="Tracks the blocks of a paged KV cache and moves them between device, host and storage.",
        epilog=_epilog("doctor --format json", "demo --help"),
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"blockyard {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=_SHELLS,
        default=argparse.SUPPRESS,
        help="print a script that completes commands and options in this shell",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    demo = _add_command(
        commands,
        "demo",
        "serve a workload that does not fit its KV cache, and compare every token with the unpaged model",
        "demo",
        "demo --device cuda --requests 200 --num-lookahead-tokens 4",
        'demo --prefix-store "file:///tmp/kv?size=64MiB"',
        "demo --corrupt 20 --output report.txt",
    )
    _add_workload_options(demo)
    _add_pool_options(demo)
    demo.add_argument("--corrupt", type=_count(1), default=0, metavar="N", help="damage N blocks stored in the file")
    doctor = _add_command(
        commands,
        "doctor",
        "check the installation; report what is missing or broken, and what to do",
        "doctor",
        "doctor --quiet && echo ready",
        'doctor --store "file://$PWD/other?size=1MiB"',
        "doctor --format json --output doctor.json",
        "doctor --engine vllm --config kv-transfer-config.json",
    )
    doctor.add_argument("--store", metavar="URL", help="check this store, too: its set-up, its room, one block's way")
    doctor.add_argument("--engine", choices=ENGINES, help="check this engine's version and /dev/shm, too")
    doctor.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="with --engine: check the JSON that it gets, such as vLLM's --kv-transfer-config, and the stores in it",
    )
    _add_command(
        commands,
        "calibrate",
        "measure the fastest copy strategies of each CUDA device, and save them for this user's later processes; an "
        "interrupted run is continued by the next one",
        "calibrate",
        "calibrate --format json --output calibration.json",
    )
    for add in (_add_simulate, _add_replay, _add_plan, _add_record, _add_store):
        add(commands)
    for command in commands.choices.values():
        _add_output_options(command)
        command.set_defaults(default_of=command.get_default)
    return parser


def _add_command(commands: Any, name: str, text: str, *examples: str) -> argparse.ArgumentParser:
    first, _, _ = text.partition(";")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=first,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_epilog(*examples),
        formatter_class=_Help,
    )
    return command


def _epilog(*examples: str) -> str:
    return "\n".join(["examples:", *(f"  blockyard {example}" for example in examples), "", EXIT_CODES])


def _add_output_options(command: argparse.ArgumentParser) -> None:
    """Add the options that every command has."""
    group = command.add_argument_group("output")
    group.add_argument("--format", choices=("text", "json"), default="text", help="text, or one JSON object")
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="write the report to this file, not to standard output"
    )
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="show no progress, and no text on standard output; errors, JSON and --output are still written",
    )


def _add_workload_options(demo: argparse.ArgumentParser) -> None:
    group = demo.add_argument_group("model and workload")
    group.add_argument(
        "--model",
        type=Path,
        default=Path("llama"),
        metavar="DIR",
        help="a local checkpoint, or a small random model: llama (default), gpt-oss or qwen3.5",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda if available")
    group.add_argument(
        "--tensor-parallel-size", type=_count(1), default=1, metavar="N", help="CPU processes that share the model"
    )
    group.add_argument("--requests", type=_count(1), default=48, metavar="N", help="number of requests")
    group.add_argument("--seed", type=_count(0), default=0, metavar="N", help="seed of texts, lengths and samplers")


def _add_pool_options(demo: argparse.ArgumentParser) -> None:
    group = demo.add_argument_group("blocks, tiers and scheduling")
    group.add_argument("--block-size", type=_count(1), default=16, metavar="N", help="tokens per block")
    group.add_argument(
        "--num-device-blocks", type=_count(1), metavar="N", help="device blocks (default: too few for the workload)"
    )
    group.add_argument(
        "--num-host-blocks", type=_count(0), metavar="N", help="host blocks; with 0, the device swaps to a file"
    )
    group.add_argument(
        "--prefix-store",
        nargs="?",
        const=f"file://{Path(tempfile.gettempdir()) / 'blockyard-demo-prefixes'}",
        metavar="URL",
        help="keep cached blocks for the next run in this store: redis://HOST or file:///DIR; without a URL, in a "
        "temporary folder",
    )
    group.add_argument(
        "--swap-store", metavar="URL", help="swap to this store: file:///DIR?size=2GiB (default: a temporary folder)"
    )
    group.add_argument("--preemption-mode", choices=PREEMPTION_MODES, default="auto", help="how to preempt a sequence")
    group.add_argument(
        "--num-lookahead-tokens", type=_count(0), default=0, metavar="N", help="draft tokens per sequence and step"
    )
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the blocks of prompts with a common beginning",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_count(1),
        default=8192,
        metavar="N",
        help="maximum number of tokens per step; longer prompts are computed in chunks",
    )
    group.add_argument(
        "--max-num-seqs", type=_count(1), default=64, metavar="N", help="maximum number of sequences per step"
    )


def _add_picture_options(command: argparse.ArgumentParser, *, html: bool = True) -> None:
    group = command.add_argument_group("pictures")
    if html:
        group.add_argument("--html", type=Path, metavar="FILE", help="draw the run in this file; it needs no network")
    group.add_argument(
        "--trace-events", type=Path, metavar="FILE", help="write Trace Event JSON of the run, for ui.perfetto.dev"
    )


def _add_simulate(commands: Any) -> None:
    command = _add_command(
        commands,
        "simulate",
        "run fleets of engines over one shared store in virtual time, with faults, and check each answer",
        "simulate",
        "simulate --engines 5 --seeds 10000 --faults crash,partition",
        "simulate --seed 7 --seeds 1 --trace-events seed-7.json",
    )
    command.add_argument(
        "--work",
        choices=("calls", "serving", "both"),
        default="both",
        help="what engines do: calls: random calls of the store; serving: serve prompts with a scheduler above the "
        "store, needs torch; both: two seeds of calls, then two of serving, and so on",
    )
    command.add_argument(
        "--store",
        choices=("object", "redis", "cluster", "both"),
        default="both",
        help="the shared store; cluster: of Redis nodes; both: an object store for even seeds, one "
        "Redis server for odd ones, and no cluster",
    )
    command.add_argument(
        "--model",
        choices=("full", "window", "states", "hybrid", "eagle", "mtp"),
        default="full",
        help="what engines serve: full attention, windows, states, a hybrid of the three, full attention and a "
        "drafter, or a drafter and states",
    )
    command.add_argument("--engines", type=_count(1), default=3, metavar="N", help="engines that share the store")
    command.add_argument("--seed", type=_count(0), default=0, metavar="N", help="first seed")
    command.add_argument("--seeds", type=_count(1), default=100, metavar="N", help="how many seeds to run")
    command.add_argument(
        "--seconds", type=_factor, default=4.0, metavar="X", help="virtual seconds of random work per seed"
    )
    command.add_argument(
        "--jobs", type=_count(1), metavar="N", help="processes (default: one per core); the results do not depend on it"
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--faults",
        default="all",
        metavar="KINDS",
        help="kinds of faults, separated by commas: all, none, or some of lossy, repeat, slow, straggle, "
        "partition, mute, garbled, page, crash, clock, forget, update, copy, gray, full, node_loss, record_loss, "
        "damage, torn, failover, server_clock; of a cluster also node_down, cut_off, move",
    )
    which.add_argument(
        "--replay",
        metavar="FAULTS",
        help="run one seed with exactly these faults, as a failure prints them: kind:engine:at:seconds, separated by "
        "commas; engines count from 0, and -1 is the server; or with none",
    )
    _add_picture_options(command, html=False)


def _add_replay(commands: Any) -> None:
    command = _add_command(
        commands,
        "replay",
        "run the prompts of traces through caches of many sizes and policies, and say how many tokens each finds",
        "replay trace.jsonl",
        "replay trace.jsonl --device-blocks 2%,10% --host-blocks 0,20%",
        "replay sessions.jsonl.gz --policies lru --format json",
        "replay trace.jsonl --step-time 0.01,4e-5,2e-5,9e-8",
    )
    command.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="traces: JSONL of Mooncake, Qwen-Bailian, kv-cache-tester or `blockyard record`; with --step-time or "
        "--fit also Azure's CSV and LLMServingSim's requests.jsonl; all may be compressed",
    )
    command.add_argument("--first", type=_count(1), metavar="N", help="requests of each trace to read (default: all)")
    device, host = command.add_mutually_exclusive_group(), command.add_mutually_exclusive_group()
    device.add_argument(
        "--device-blocks",
        default="1%,2%,5%,10%,20%,50%,100%",
        metavar="SIZES",
        help="sizes of the device pool in blocks of --block-size tokens, or percentages of the trace's distinct ones",
    )
    device.add_argument("--device-gib", type=_numbers, metavar="LIST", help="the same in GiB")
    host.add_argument("--host-blocks", default="0", metavar="SIZES", help="sizes of the host tier, in the same form")
    host.add_argument("--host-gib", type=_numbers, metavar="LIST", help="the same in GiB")
    command.add_argument(
        "--policies",
        default="lru,adaptive,optimal",
        metavar="NAMES",
        help="eviction policies: lru, adaptive; optimal knows the future, so no policy of a device pool does better",
    )
    command.add_argument(
        "--hints",
        action="store_true",
        help="tell the cache what the trace knows when an answer ends: a tool is called, the turn ends, or the agent "
        "is over; only traces of kv-cache-tester know it",
    )
    command.add_argument(
        "--window",
        type=_share,
        default=0.0,
        metavar="X",
        help="share of the requests, from the start of the trace, that fill the cache and are not counted",
    )
    _add_engine_options(command)
    _add_picture_options(command)


def _add_plan(commands: Any) -> None:
    command = _add_command(
        commands,
        "plan",
        "serve a trace with engines of different tiers and policies, and say which are worth their cost",
        "plan trace.jsonl --step-time 0.01,4e-5,2e-5,9e-8 --max-ttft 1",
        "plan trace.jsonl --step-time 0.01,4e-5,2e-5,9e-8 --engines 1,2,4",
    )
    command.add_argument("trace", type=Path, metavar="TRACE", help="a trace, as for `blockyard replay`")
    command.add_argument("--first", type=_count(1), metavar="N", help="requests of the trace to read (default: all)")
    sizes = command.add_mutually_exclusive_group()
    sizes.add_argument(
        "--device-blocks",
        type=_count(1),
        metavar="N",
        help="blocks of the cache on the devices of an engine, --block-size tokens each (default: what --memory-gib "
        "leaves, else 20000)",
    )
    sizes.add_argument("--device-gib", type=_factor, metavar="X", help="the same in GiB")
    command.add_argument(
        "--memory-gib", type=_factor, metavar="X", help="GiB of an accelerator: weights and cache must fit it"
    )
    command.add_argument(
        "--memory-utilization", type=_part, default=0.9, metavar="X", help="share of --memory-gib that they may take"
    )
    command.add_argument(
        "--weights-gib",
        type=_factor,
        metavar="X",
        help="GiB of all weights (default: from --model-config, unquantized)",
    )
    command.add_argument(
        "--engines",
        type=_counts,
        metavar="LIST",
        help="numbers of engines to try; requests are spread by prefix, and engines cost money all the time (default: "
        "one engine, whose pauses cost nothing)",
    )
    command.add_argument(
        "--arrival-seeds",
        type=_count(1),
        default=1,
        metavar="N",
        help="serve each choice with N draws of the arrivals, so that noise does not choose; 5 before you buy",
    )
    command.add_argument("--host-gib", type=_numbers, default="0,32,128", metavar="LIST", help="sizes of host memory")
    command.add_argument(
        "--store-gib",
        type=_numbers,
        metavar="LIST",
        help="sizes of each engine's own store (default: 0,1024; 0 for a model with windows or states)",
    )
    command.add_argument("--policies", default="adaptive", metavar="NAMES", help="eviction policies: lru, adaptive")
    command.add_argument(
        "--max-ttft",
        type=_factor,
        metavar="X",
        help="limit of the time to first token in seconds, for 90 %% of requests",
    )
    prices = command.add_argument_group("prices per hour, in any currency")
    prices.add_argument("--device-price", type=_factor, default=2.5, metavar="X", help="all accelerators of one engine")
    prices.add_argument(
        "--host-price", type=_price, default=0.005, metavar="X", help="a GiB of host memory; 0 for memory that you own"
    )
    prices.add_argument("--store-price", type=_price, default=0.0002, metavar="X", help="a GiB of the store")
    _add_engine_options(command)
    _add_picture_options(command)


def _add_engine_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `replay` and `plan`: where engines run, and what they are like."""
    command.add_argument("--jobs", type=_count(1), metavar="N", help="number of processes (default: one per core)")
    tokens = "tokens per step (default: as in the run of --fit, else 8192)"
    command.add_argument("--max-num-batched-tokens", type=_count(1), metavar="N", help=tokens)
    command.add_argument(
        "--hash-tokens",
        type=_count(1),
        metavar="N",
        help="tokens per hash id of the trace, if its lines do not say (default: inferred from their lengths)",
    )
    group = command.add_argument_group(
        "times",
        "With --step-time or --fit, whole engines with the real scheduler serve the trace in virtual time.",
    )
    step_time = group.add_mutually_exclusive_group()
    step_time.add_argument(
        "--step-time",
        type=_four,
        metavar="A,B,C,D",
        help="seconds per step: A, plus B per prompt token, C per decoding sequence, D per cached token that attention "
        "reads",
    )
    step_time.add_argument(
        "--fit", type=Path, metavar="FILE", help="fit these four numbers to a run of your engine: its requests.jsonl"
    )
    group.add_argument(
        "--fit-blocks",
        type=_count(1),
        metavar="N",
        help="blocks that the engine of --fit had: vLLM logs its KV cache's size in tokens; divide it by the block "
        "size (default: from the meta.json beside the file, as are its limits)",
    )
    group.add_argument(
        "--device-bandwidth",
        type=_factor,
        metavar="X",
        help="GB/s of an accelerator's memory; with --model-config, no step of --fit is faster than its reads",
    )
    ranks = "accelerators per engine (default: as in the run of --fit, else 1)"
    group.add_argument("--tensor-parallel-size", type=_count(1), metavar="N", help=ranks)
    dtypes = ("auto", "fp8", "fp8_ds_mla")
    group.add_argument("--kv-cache-dtype", choices=dtypes, default="auto", help="dtype of keys and values")
    group.add_argument("--model-config", type=Path, metavar="FILE", help="config.json of a Hugging Face model")
    group.add_argument("--block-size", type=_count(1), default=16, metavar="N", help="tokens per block of the engine")
    sequences = "sequences per step (default: as in the run of --fit, else 256)"
    group.add_argument("--max-num-seqs", type=_count(1), metavar="N", help=sequences)
    group.add_argument("--preemption-modes", default="auto", metavar="NAMES", help="swap, recompute, auto")
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the blocks of prompts with a common beginning",
    )
    group.add_argument(
        "--sessions",
        type=_count(1),
        metavar="N",
        help="conversations at a time (default: as they arrive; those of kv-cache-tester all start together)",
    )
    group.add_argument(
        "--bytes-per-token",
        type=_count(1),
        metavar="N",
        help="bytes of a token, all layers (default: from --model-config and the lengths of the requests, else 131072)",
    )
    group.add_argument(
        "--host-bandwidth", type=_factor, default=25.0, metavar="X", help="GB/s between device and host, per direction"
    )


def _add_record(commands: Any) -> None:
    command = _add_command(
        commands,
        "record",
        "run a program and record the requests of its engines: times, lengths, and which prompts share a beginning, "
        "but no text; the exit code is the program's",
        "record traffic.jsonl.gz -- vllm serve MODEL --kv-transfer-config ...",
        "record traffic.jsonl -q -- python my_engine.py",
    )
    command.add_argument(
        "path",
        type=Path,
        metavar="TRACE",
        help="file to create, compressed if its name ends in .gz",
    )
    command.add_argument("program", nargs="+", metavar="PROGRAM", help="the program and its arguments, after --")


def _add_store(commands: Any) -> None:
    command = _add_command(
        commands,
        "store",
        "list what a store holds by namespace and tenant, or remove a part of it; engines may use the store meanwhile, "
        "except where blocks of a file are verified or removed",
        'store "file://$PWD/kv" ls',
        'store "file://$PWD/kv" stat --verify --format json',
        'store "file://$PWD/kv" rm --namespace model=tiny --older-than 7d',
        'store "file://$PWD/kv" rm --damaged --yes',
    )
    command.add_argument(
        "url", metavar="URL", help="the store, as engines name it: file:///DIR, redis://HOST, s3://..."
    )
    command.add_argument(
        "action",
        choices=("ls", "stat", "rm"),
        help="ls: one line for each namespace and tenant; stat: also the parts of each namespace, totals and damage; "
        "rm: what it would remove, or with --yes remove it",
    )
    chosen = command.add_argument_group("which blocks")
    chosen.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="TEXT",
        help="first digits of the namespace, or NAME=VALUE of one of its parts; repeat it to narrow the choice",
    )
    chosen.add_argument(
        "--tenant",
        type=_tenant,
        default="",
        metavar="DIGITS",
        help="first digits of the tenant: of the SHA-256 of its salt, in hexadecimal",
    )
    chosen.add_argument(
        "--older-than",
        type=_age,
        default=0.0,
        metavar="AGE",
        help="minimum age, such as 90s, 15min, 12h or 7d: since a block was written, or on Redis last used",
    )
    command.add_argument("--verify", action="store_true", help="with ls or stat, read and check each block of a file")
    command.add_argument(
        "--damaged", action="store_true", help="with rm, verify a file and remove damaged blocks alone"
    )
    command.add_argument("--all", action="store_true", help="with rm, remove all blocks")
    command.add_argument("--yes", action="store_true", help="with rm, remove the blocks, not only list them")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 (argparse has no other way to list them)
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _actions(command)


def _count(minimum: int) -> Callable[[str], int]:
    """Make an argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum} and {2**31 - 1}")
        return value

    return parse


def _four(text: str) -> tuple[float, ...]:
    """Parse four numbers, none below 0; an argparse type."""
    values = _numbers(text)
    if len(values) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not four non-negative numbers separated by commas")
    return values


def _numbers(text: str) -> tuple[float, ...]:
    """Parse non-negative numbers separated by commas; an argparse type."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of non-negative numbers separated by commas")
    return values


def _counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1 separated by commas; an argparse type."""
    return tuple(map(_count(1), text.split(",")))


def _price(text: str) -> float:
    """Parse a number of at least 0; an argparse type."""
    try:
        (value,) = _numbers(text)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not one non-negative number") from None
    return value


def _part(text: str) -> float:
    """Parse a share above 0, at most 1; an argparse type."""
    value = _factor(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value


def _share(text: str) -> float:
    """Parse a number from 0 to below 1; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1")
    return value


def _age(text: str) -> float:
    """Parse an age, such as 12h, to seconds; an argparse type."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        value = float(number) * _AGES[text[len(number) :]]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 90s, 15min, 12h or 7d")
    return value


def _tenant(text: str) -> str:
    """Parse the first digits of a tenant; an argparse type."""
    if re.fullmatch("[0-9a-fA-F]{0,64}", text):
        return text.lower()[:DIGITS]
    digits = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]
    raise argparse.ArgumentTypeError(f"{text!r} is not a digest: the tenant with this salt is {digits}")


def _factor(text: str) -> float:
    """Parse a factor above 0, such as 0.0625 or 1/16; an argparse type."""
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / (float(bottom) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor such as 0.0625 or 1/16") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value
