"""Random programs for the cache machine: made from a seed, replayed, and shrunk to a few operations when they fail."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

from cache_machine import Machine, Op
from cache_rig import MANY, Config, random_config
from scheduled_cache import ScheduledMachine

WEIGHTS = {
    "step": 30,
    "allocate": 14,
    "append": 14,
    "mark": 5,
    "free": 6,
    "hint": 2,
    "swap": 14,
    "fork": 3,
    "fork_prefix": 2,
    "truncate": 3,
    "allocate_count": 1,
    "poll": 4,
    "drain": 2,
    "offload": 2,
    "defragment": 3,
    "resize": 4,
    "give_back": 1,
    "pin": 2,
    "pin_prompt": 1,
    "unpin": 3,
    "priority": 1,
    "quota": 1,
    "reset": 1,
    "prefetch": 5,
    "store_poll": 4,
    "store_quota": 1,
    "forget": 1,
    "mood": 2,
    "time": 2,
    "restart": 4,
    "stale": 1,
    "note": 2,
    "load": 4,
    "end_load": 3,
    "write": 3,
    "end_write": 3,
    "scrape": 2,
}
SHARED = {
    "prefetch": 15,
    "store_poll": 8,
    "forget": 3,
    "restart": 12,
    "load": 0,
    "end_load": 0,
    "write": 0,
    "end_write": 0,
}
AT_RISK = {
    *("step", "poll", "drain", "resize", "give_back", "prefetch", "store_poll", "store_quota", "forget"),
    *("allocate", "append", "free"),
}


@dataclass(frozen=True)
class Program:
    """Operations on caches of some sizes."""

    config: Config
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        """Return Python source that creates the program."""
        chosen = {f.name: getattr(self.config, f.name) for f in fields(Config)}
        changed = {name: value for name, value in chosen.items() if value != getattr(Config(), name)}
        config = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        lines = [f"    Op({', '.join(repr(value) for value in op)})," for op in self.ops]
        return "\n".join(
            ["Program(", f"    Config({config}),", "    (", *(f"    {line}" for line in lines), "    ),", ")"]
        )


def place(random: Random) -> int:
    """Return a place for an interrupt: often early, sometimes after hundreds of places."""
    return int(math.exp(random.uniform(0.0, 6.5))) - 1


def config_with_groups(seed: int, *, stored: bool) -> Config:
    """Draw sizes of a model with windows, states or a drafter; `stored`: over a prefix store."""
    random = Random(seed)
    while True:
        config = random_config(random)
        if config.groups != "full" and (config.store or not stored):
            return config


def random_program(seed: int, length: int, config: Config | None = None) -> Program:
    """Make the program of a seed."""
    random = Random(seed)
    config = config or random_config(random)
    weights = WEIGHTS | (SHARED if config.threads else {})
    names = random.choices(list(weights), list(weights.values()), k=length)
    ops = []
    for name in names:
        numbers = [random.randrange(1 << 16) for _ in range(4)]
        interrupted = name in AT_RISK and random.random() < config.interrupts
        ops.append(Op(name, *numbers, random.randrange(1 << 30), place(random) if interrupted else -1))
    if config.host == MANY and not config.scheduler:
        ops[length // 2] = Op("swarm", seed)
    return Program(config, tuple(ops))


def on_device(program: Program, device: str, chunk: int = 0) -> Program:
    """Let a device's own streams run a program.

    Args:
        program: for simulated streams, some of whose transfers may fail.
        device: "cpu" or "cuda".
        chunk: bytes of a plane of a block, for elastic memory that returns blocks one by one; 0 for simulated memory.
    """
    config = replace(program.config, real=device, fail=0.0)
    if chunk:
        sizes = {"most": config.device + 8, "host": min(config.host, 24), "head_size": chunk // 8 // config.block_size}
        config = replace(config, **sizes)
    return replace(program, config=config)


def run(program: Program, without: Iterable[str] = ()) -> dict[str, int]:
    """Run a program. Return what it did; raise any failure, with the number of the operation."""
    machine = (ScheduledMachine if program.config.scheduler else Machine)(program.config, without)
    at = 0
    try:
        for at, op in enumerate(program.ops):  # noqa: B007
            machine.run(op)
        at = len(program.ops)
        machine.finish()
    except BaseException as error:
        error.args = (f"operation {at}, {program.ops[at].name if at < len(program.ops) else 'the end'}: {error}",)
        raise
    finally:
        machine.close()
    return machine.counts


def failure(program: Program, without: Iterable[str] = ()) -> BaseException | None:
    """Return the failure of a program, if any."""
    try:
        run(program, without)
    except KeyboardInterrupt as error:
        if not error.args:
            raise
        return error
    except BaseException as error:  # noqa: BLE001 (a panic is no Exception)
        return error
    return None


def kind_of(error: BaseException | None) -> str:
    """Return an error without the parts that differ between programs."""
    words = str(error).partition(": ")[2] if error else ""
    return f"{type(error).__name__} {re.sub(r'[0-9]+|: .*', '', words)}"


def shrink(program: Program, without: Iterable[str] = (), seconds: float = 30.0) -> Program:
    """Remove and simplify operations as long as the program fails in the same way."""
    until = time.monotonic() + seconds
    kind = kind_of(failure(program, without))

    def fails(ops: Sequence[Op]) -> bool:
        return time.monotonic() < until and kind_of(failure(replace(program, ops=tuple(ops)), without)) == kind

    ops = list(program.ops)
    size = max(1, len(ops) // 2)
    while size and time.monotonic() < until:
        at, dropped = 0, False
        while at < len(ops):
            shorter = ops[:at] + ops[at + size :]
            if fails(shorter):
                ops, dropped = shorter, True
            else:
                at += size
        if size > 1 or not dropped:
            size //= 2
    for at, op in enumerate(ops):
        for name in ("interrupt", "a", "b", "c", "d"):
            plainer = op._replace(**{name: -1 if name == "interrupt" else 0})
            if plainer != op and fails([*ops[:at], plainer, *ops[at + 1 :]]):
                op = ops[at] = plainer  # noqa: PLW2901
    return replace(program, ops=tuple(ops))
