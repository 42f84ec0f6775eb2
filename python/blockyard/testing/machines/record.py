"""The failure report of a machine: one sentence, then the last steps, call by call."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import unittest
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from blockyard._core import BlockManager, Defrag, Pairs, Prefix, Sequence, StepDecision
from blockyard.testing.interfaces import Config

__all__ = ["CallRecord", "RecordingMachine", "named", "show"]

STEPS: Final = 10
"""Number of steps that a failure shows."""
MAX_SHOWN: Final = 12
"""Maximum number of list elements that are shown."""
CALLS: Final = frozenset(
    (
        *("allocate", "fork", "free", "append", "truncate", "mark_computed", "swap_out", "swap_in", "take_decision"),
        *("complete", "fail", "lose", "resize", "run", "note_tokens", "reset"),
    )
)
"""Calls that change a manager; of other calls only errors are recorded."""
FOLLOWED: Final = frozenset(("hash",))
"""Other calls whose results are followed."""


@dataclass(slots=True)
class _Steps:
    """A step, or several in a row that did nothing."""

    first: int
    last: int
    lines: list[str] = field(default_factory=list)
    is_idle: bool = True

    def __str__(self) -> str:
        name = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}: nothing ran"
        return f"  {name}" + "".join(f"\n    {line}" for line in self.lines)


class CallRecord:
    """Records the calls of each step; `watch` wraps a manager to record its calls.

    Attributes:
        step: number of the current step.
        config: sizes of the manager, once there is one.
        counts: what was covered, by name: for managers the number of calls.
    """

    def __init__(self) -> None:
        self.step = 0
        self.config: Config | None = None
        self.counts: Counter[str] = Counter()
        self._steps: deque[_Steps] = deque([_Steps(0, 0)], maxlen=STEPS)
        self._refused: tuple[BaseException, str, dict[str, Any]] | None = None

    def next_step(self) -> None:
        """Begin a step."""
        self.step += 1
        self.counts["steps"] += 1
        steps = self._steps
        if len(steps) > 1 and steps[-1].is_idle and steps[-2].is_idle:
            last = steps.pop().last
            steps[-1].last, steps[-1].lines = last, []
        steps.append(_Steps(self.step, self.step))

    def note(self, line: str) -> None:
        """Add a line to the current step."""
        self._steps[-1].lines.append(line)
        self._steps[-1].is_idle = False

    def idle(self) -> None:
        """Mark the current step as one that did nothing; a failure shows several in a row as one, without calls."""
        self._steps[-1].is_idle = True

    def watch(self, manager: Any) -> Any:
        """Wrap a manager to record the calls that change it; everything else passes through."""
        return _RecordedManager(manager, self)

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a manager call and record it."""
        if name not in CALLS and name not in FOLLOWED:
            return self.query(name, function, args, options)
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        options = {key: list(value) if isinstance(value, Iterator) else value for key, value in options.items()}
        arguments = named(name, args, options)
        text = show_call(name, arguments)
        try:
            self.before(name, arguments, text)
        except AssertionError:
            self.note(text)
            raise
        result = self.query(name, function, args, options)
        if name in CALLS:
            self.counts[name] += 1
            self.note(text if result is None else f"{text} -> {show(result)}")
        self.after(name, arguments, result)
        return result

    def query(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a manager call; record it only if it raises."""
        try:
            return function(*args, **options)
        except Exception as error:
            arguments = named(name, args, options)
            text = f"{show_call(name, arguments)} raised {type(error).__name__}"
            self.note(text)
            self._refused = (error, f"step {self.step}: {text}: {error}", arguments)
            raise

    def before(self, name: str, arguments: dict[str, Any], text: str) -> None:
        """Check a call before it is made; `text` shows it."""

    def after(self, name: str, arguments: dict[str, Any], result: Any) -> None:
        """Process a call after it was made."""

    def sentence(self, error: BaseException) -> str:
        """Describe an error in one line, with the manager call that raised it, if one did."""
        if self._refused is not None and self._refused[0] is error:
            return self._refused[1]
        text = " ".join(str(error).split())
        return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"

    def headline(self, sentence: str) -> str:
        """Return the first line of a failure: the sentence, and the sizes of the manager."""
        return sentence if self.config is None else f"{sentence} [{self.config}]"

    def timeline(self) -> str:
        """Return the last steps, one call per line."""
        count = sum(steps.last - steps.first + 1 for steps in self._steps)
        title = f"The last {count} of {self.step + 1} steps (step 0 is the start):"
        return "\n".join([title, *map(str, self._steps)])


class _RecordedManager:
    """A manager, or one of its facets, whose mutating calls go to a `CallRecord`."""

    def __init__(self, inner: Any, record: CallRecord) -> None:
        self._inner, self._record = inner, record

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return self._inner.__class__  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name in ("prefix", "defrag"):
            return _RecordedManager(value, self._record)
        if not callable(value) or name == "pool":
            return value
        return lambda *args, **options: self._record.call(name, value, args, options)


@cache
def _parameters(name: str) -> tuple[tuple[str, ...], str | None] | None:
    """Return the names of a call's positional parameters and of its `*args`; None if unknown."""
    for facet in (BlockManager, Prefix, Defrag):
        try:
            parameters = inspect.signature(getattr(facet, name)).parameters.values()
        except (AttributeError, ValueError):
            continue
        rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        names = (p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        return tuple(name for name in names if name != "self"), rest
    return None


def named(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a manager call by name."""
    names, rest = _parameters(name) or (tuple(f"argument {i}" for i in range(len(args))), None)
    bound = dict(zip(names, args, strict=False))
    if rest is not None and len(args) > len(names):
        bound[rest] = args[len(names) :]
    return bound | options


def show_call(name: str, arguments: dict[str, Any]) -> str:
    """Format a call with its arguments by name."""
    return f"{name}({', '.join(f'{key}={show(value)}' for key, value in arguments.items())})"


def show(value: Any) -> str:
    """Format an argument or result briefly."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, int | str | bool | None):
        return repr(value)
    if isinstance(value, list | tuple):
        numbers = len(value) > 0 and type(value[0]) is int
        shown = ", ".join(map(str if numbers else show, value[:MAX_SHOWN]))
        return f"[{shown}, ... {len(value)} in all]" if len(value) > MAX_SHOWN else f"[{shown}]"
    if isinstance(value, StepDecision):
        transfers = [f"{kind} {show(pairs)}" for kind, pairs in value.transfers()]
        after = f" after tickets {show(value.after)}" if value.after else ""
        return f"ticket {value.ticket}{after}: {'; '.join(transfers) or 'no transfers'}"
    if isinstance(value, Pairs):
        return ", ".join(f"{value.src} {a} -> {value.dst} {b}" for a, b in value.ids.tolist())
    if isinstance(value, Sequence):
        return str(int(value)) + (f" ({value.cached_tokens} tokens cached)" if value.cached_tokens else "")
    return repr(value)


_BLOB: Final = re.compile(r"reproduce_failure\(.*\)")


class _TestCaseOf:
    """The `TestCase` of a machine."""

    def __get__(self, instance: object, machine: type[RecordingMachine]) -> type[unittest.TestCase]:
        return _test_case(machine)


@cache
def _test_case(machine: type[RecordingMachine]) -> type[unittest.TestCase]:
    class MachineTestCase(unittest.TestCase):
        # A failure shows within a second; finding its shortest example may take minutes.
        shrink = False
        settings = hypothesis.settings(
            deadline=None,
            suppress_health_check=list(HealthCheck),
            stateful_step_count=machine.step_count,
        )

        def runTest(self) -> None:  # noqa: N802 (unittest's name)
            __tracebackhide__ = True
            failure = None
            machine.begin()
            left_out = () if self.shrink else (Phase.shrink, Phase.explain)
            phases = [phase for phase in self.settings.phases if phase not in left_out]
            used = hypothesis.settings(self.settings, phases=phases, report_multiple_bugs=False, print_blob=True)
            try:
                run_state_machine_as_test(machine, settings=used)
            except Exception as error:  # noqa: BLE001 (anything the object under test raises is a failure)
                failure = _failure(machine, error, calls=self.shrink)
            if failure is None:
                print(f"{machine.__name__} covered {machine.covered()}")
                failure = machine.judge()
            if failure is not None:
                raise failure from None

    case: Any = MachineTestCase
    case.machine = machine
    run: Any = MachineTestCase.runTest
    run.is_hypothesis_test = True
    run._hypothesis_state_machine_class = machine  # noqa: SLF001 (hypothesis' own mark)
    MachineTestCase.__name__ = f"{machine.__name__}.TestCase"
    MachineTestCase.__qualname__ = f"{machine.__qualname__}.TestCase"
    return MachineTestCase


def _failure(machine: type[RecordingMachine], error: Exception, *, calls: bool) -> Exception:
    """Build an error from the sentence, the last steps, and where it was raised."""
    record = machine.last
    if record is None or isinstance(error, hypothesis.errors.HypothesisException):
        return error
    notes: list[str] = getattr(error, "__notes__", [])
    blobs = [note for note in notes if "@reproduce_failure(" in note]
    lines = [record.headline(record.sentence(error)), "", record.timeline()]
    # Where a rule says in its own words what the code under test raised, the lines are in the cause.
    if frames := list(_own_frames(error)) or list(_own_frames(error.__cause__)):
        lines += ["", "Raised at:", *frames]
    if calls:
        lines += ["", *(note for note in notes if note not in blobs)]
    for call in [_BLOB.search(blob) for blob in blobs[:1]]:
        if call is not None:
            lines += [
                "",
                "Replay: add this line below the one that makes this test, with its name in place of `TestX`:",
            ]
            lines += [f"import hypothesis; hypothesis.{call[0]}(TestX.machine)"]
    return AssertionError("\n".join(lines))


def _own_frames(error: BaseException | None) -> Iterable[str]:
    """Yield the lines of the code under test in the error's traceback."""
    apart = (Path(hypothesis.__file__).parent, Path(__file__).parents[1])
    for frame in traceback.extract_tb(error.__traceback__ if error is not None else None):
        if not any(folder in Path(frame.filename).parents for folder in apart):
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


class RecordingMachine(RuleBasedStateMachine):
    """A machine that records its steps, and whose `TestCase` starts a failure with one sentence.

    Attributes:
        record: calls of the last steps.
        last: record of the last example.
        totals: what all examples of a run covered, by name.
        step_count: default number of rules in an example.
    """

    last: ClassVar[CallRecord | None] = None
    totals: ClassVar[Counter[str]] = Counter()
    make_record: ClassVar[Callable[[], CallRecord]] = CallRecord
    step_count: ClassVar[int] = 50
    TestCase = cast("Any", _TestCaseOf())

    def __init__(self) -> None:
        super().__init__()
        self.record = type(self).make_record()
        type(self).last = self.record
        type(self).totals["examples"] += 1
        self.record.counts = type(self).totals
        self._outer = sys.exc_info()[1]

    @classmethod
    def begin(cls) -> None:
        """Begin a run."""
        cls.totals = Counter()

    @classmethod
    def covered(cls) -> str:
        """Return how often the run did what."""
        return ", ".join(f"{name} {count:,}" for name, count in cls.totals.items())

    @classmethod
    def judge(cls) -> AssertionError | None:
        """Check at the end of a run what only all of its examples show. Returns the failure, if any."""
        return None

    @property
    def failed(self) -> bool:
        """In `teardown`: whether a rule has raised. Final checks would only hide that error."""
        return sys.exc_info()[1] is not self._outer
