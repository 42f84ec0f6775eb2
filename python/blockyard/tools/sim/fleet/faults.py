"""The faults of a simulated fleet. They are drawn from the seed in advance, so that any of them can be left out."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from blockyard.errors import InvalidArgumentError

__all__ = ["FAULTS", "OF_CLUSTER", "OF_OBJECTS", "OF_REDIS", "OF_SERVING", "Fault", "draw_faults", "read_faults"]

FAULTS: Final = {
    "lossy": "an engine loses a third of its requests and answers",
    "repeat": "an engine sends each request twice, like a client that retries",
    "slow": "an engine's link to the server is 100 times slower",
    "straggle": "a fifth of an engine's requests and answers take seconds",
    "partition": "an engine's requests do not reach the server, nor its answers the engine",
    "mute": "an engine's requests arrive, but all answers are lost",
    "garbled": "half of the values change on their way to an engine",
    "page": "half of an engine's requests are answered by a gateway, with a page of status 200",
    "crash": "an engine is killed; it restarts when the fault ends",
    "clock": "an engine's clock jumps ahead, and back when the fault ends",
    "forget": "an engine calls forget",
    "update": "all engines get the same new weights, and call forget for them",
    "copy": "half of an engine's copies fail: loads, stores and swaps",
    "gray": "the server answers all engines 300 times slower",
    "full": "the server refuses writes",
    "node_loss": "the server loses half of its data",
    "record_loss": "the server loses the epoch's record",
    "damage": "a byte of a stored value changes",
    "torn": "a stored value is cut short",
    "failover": "when the fault ends, the server's data is what it was when the fault began",
    "server_clock": "the server's clock jumps an hour ahead",
    "node_down": "a node of the cluster does not answer",
    "cut_off": "a primary of the cluster is cut off from the other nodes and some engines; a replica takes its place",
    "move": "slots of the cluster move to other nodes, key by key",
}
OF_CLUSTER: Final = frozenset({"node_down", "cut_off", "move"})
"""Kinds that only affect Redis clusters."""
OF_REDIS: Final = frozenset({"failover", "server_clock"}) | OF_CLUSTER
"""Kinds that only affect Redis servers and clusters."""
OF_OBJECTS: Final = frozenset({"page"})
"""Kinds that only affect object stores."""
OF_SERVING: Final = frozenset({"copy"})
"""Kinds that only affect engines that serve prompts."""
_ALL_ENGINES: Final = {"gray", "full", "node_loss", "record_loss", "damage", "torn", "update", *OF_REDIS}
_LASTS: Final = (0.05, 0.5, 0.5, 3.0, 3.0, 20.0)  # maximum durations to choose from, in seconds
_TOGETHER: Final = 0.4  # share of faults that begin when another one begins or ends


class Fault(NamedTuple):
    """A fault: its kind, engine (-1 for the server), start and duration in seconds."""

    kind: str
    engine: int
    at: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.engine}:{self.at:g}:{self.seconds:g}"


def draw_faults(seed: int, *, kinds: tuple[str, ...], engines: int, count: int, until: float) -> list[Fault]:
    """Return the faults of a seed, in order of time. Some coincide, since a single fault seldom breaks anything."""
    chance, found = random.Random(f"faults {seed}"), list[Fault]()
    for _ in range(count if kinds else 0):
        kind = chance.choice(kinds)
        at, seconds = round(chance.uniform(0, until), 3), round(chance.choice(_LASTS) * chance.random(), 3)
        if found and chance.random() < _TOGETHER:
            other = chance.choice(found)
            near = other.at + chance.choice((0.0, other.seconds)) + chance.uniform(-0.05, 0.05)
            at = round(min(max(near, 0.0), until), 3)
        engine = chance.randrange(engines)
        found.append(Fault(kind, -1 if kind in _ALL_ENGINES else engine, at, seconds))
    return sorted(found, key=lambda fault: fault.at)


def read_faults(text: str) -> list[Fault]:
    """Parse faults as they are printed: `kind:engine:at:seconds`, separated by commas, or `none`.

    Raises:
        InvalidArgumentError: the text is malformed, or names an unknown kind.
    """
    found = list[Fault]()
    for part in [] if text == "none" else text.split(","):
        kind, _, rest = part.partition(":")
        try:
            engine, at, seconds = rest.split(":")
            fault = Fault(kind, int(engine), float(at), float(seconds))
        except ValueError:
            raise InvalidArgumentError(f"faults has {part!r}, must be kind:engine:at:seconds") from None
        if kind not in FAULTS:
            raise InvalidArgumentError(f"faults has the kind {kind!r}, must be one of {', '.join(FAULTS)}")
        found.append(fault)
    return found
