"""Raises an exception at any call of chosen files: right after it, or as a function begins.

A *place* is an instruction before which CPython looks for signals: after a call, as a function begins, and at a jump
back. `KeyboardInterrupt` comes in the main thread; any other exception comes in every thread.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

LOOKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}
"""Instructions after which CPython looks for signals."""
LOOKS |= {"CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD", "JUMP_ABSOLUTE"}  # the names in 3.10


_TESTS = str(Path(__file__).resolve().parents[1])
_CALLERS = {"<lambda>", "risky"}


class Place(NamedTuple):
    """An instruction, in the main thread or another one."""

    code: CodeType
    offset: int
    in_main: bool

    def __str__(self) -> str:
        line = next((line for start, end, line in self.code.co_lines() if start <= self.offset < end), None)
        return f"{self.code.co_filename.rpartition('/')[2]}:{line} {self.code.co_name}+{self.offset}"


_KNOWN: dict[int, tuple[CodeType, frozenset[int]]] = {}
"""What `_places` has found, by the id of a code: its hash takes longer. The code is kept, so the id stays its own."""


def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which an exception may come."""
    known = _KNOWN.get(id(code))
    if known is None:
        known = _KNOWN[id(code)] = (code, _find_places(code))
    return known[1]


def _find_places(code: CodeType) -> frozenset[int]:
    instructions = list(dis.get_instructions(code))
    handlers = getattr(dis, "_parse_exception_table", lambda code: [])(code)
    covers = lambda at: {entry.target for entry in handlers if entry.start <= at.offset < entry.end}  # noqa: E731
    return frozenset(
        after.offset
        for before, after in itertools.pairwise(instructions)
        # A signal that arrives while a block is left is handled by that block.
        if before.opname in LOOKS and after.opname != "POP_BLOCK" and covers(before) == covers(after)
    )


Places = Callable[[CodeType], frozenset[int]]
"""Offsets of a code's instructions before which an exception may come."""
At = Callable[[CodeType, int], None]
"""Is called before such an instruction, with its code and offset, and may raise there."""

if sys.version_info < (3, 12):

    @contextmanager
    def _watched(
        files: tuple[str, ...], places: Places, wants: Callable[[CodeType], bool], at: At, *, threads: bool
    ) -> Iterator[None]:
        """Call `at` at the places of wanted code: in this thread and, if `threads`, in those that start inside."""

        def enter(frame: FrameType, _event: str, _value: object) -> Any:
            code = frame.f_code
            if id(code) not in steps:
                steps[id(code)] = code, step_of(code) if code.co_filename.endswith(files) else None
            step = steps[id(code)][1]
            if step is None or not wants(code):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step_of(code: CodeType) -> Any:
            offsets = places(code)

            def step(frame: FrameType, event: str, _value: object) -> Any:
                if event == "opcode" and frame.f_lasti in offsets:
                    at(code, frame.f_lasti)
                return step

            return step

        steps: dict[int, tuple[CodeType, Any]] = {}
        before = sys.gettrace()
        if threads:
            threading.settrace(enter)
        sys.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]

else:
    # CPython 3.12 crashes if a trace function raises at an opcode, so its successor is used.
    _TOOL = 4
    _EVENTS = sys.monitoring.events

    @functools.cache
    def _instrument(files: tuple[str, ...], _modules: int) -> None:
        """Enable events in the files' functions from now on; without a callback they cost little."""
        if sys.monitoring.get_tool(_TOOL) is None:
            sys.monitoring.use_tool_id(_TOOL, "interrupts")
        gc.unfreeze()  # `get_objects` leaves out what is frozen
        codes = [found.__code__ for found in gc.get_objects() if type(found) is FunctionType]
        codes = [code for code in codes if code.co_filename.endswith(files)]
        for code in codes:
            sys.monitoring.set_local_events(_TOOL, code, _EVENTS.INSTRUCTION)
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]

    @contextmanager
    def _watched(
        files: tuple[str, ...], places: Places, wants: Callable[[CodeType], bool], at: At, *, threads: bool
    ) -> Iterator[None]:
        """Call `at` at the places of wanted code: in this thread or, if `threads`, in all."""
        mine = threading.get_ident()

        def step(code: CodeType, offset: int) -> None:
            if not (wants(code) and (threads or threading.get_ident() == mine) and code.co_filename.endswith(files)):
                return
            if offset in places(code):
                at(code, offset)

        _instrument(files, len(sys.modules))
        before = sys.monitoring.register_callback(_TOOL, _EVENTS.INSTRUCTION, step)
        try:
            yield
        finally:
            sys.monitoring.register_callback(_TOOL, _EVENTS.INSTRUCTION, before)


class CountedInterrupt:
    """Raises in this thread at the place of a given number.

    Args:
        place: the number, from 0; nothing is raised if it is not reached.
        files: suffixes of the names of the files whose code is interrupted.
        error: the exception to raise.
        again: if positive, raise it a second time, so many places later.

    Attributes:
        where: the place, once reached.
        passed: number of places reached before it.
        passes: the numbers of each instruction's places.
    """

    def __init__(
        self, place: int, files: tuple[str, ...], error: type[BaseException] = KeyboardInterrupt, again: int = 0
    ) -> None:
        self.where, self.passed = "", 0
        self._again = again
        self.passes: dict[tuple[int, int], list[int]] = {}
        self._place, self._files, self._error = place, files, error

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Interrupt code that runs inside."""
        if self.where and self._again <= 0:
            yield
            return
        with _watched(self._files, _places, lambda _: not self.where or self._again > 0, self._at, threads=False):
            yield

    def _at(self, code: CodeType, offset: int) -> None:
        if self.where:
            self._again -= 1
            if self._again == 0:
                if self._can_come(code):
                    raise self._error
                self._again = 1
        else:
            if self.passed == self._place and not self._can_come(code):
                self._place += 1
            if self.passed == self._place:
                self.where = str(Place(code, offset, in_main=True))
                raise self._error
            self.passes.setdefault((id(code), offset), []).append(self.passed)
            self.passed += 1

    def _can_come(self, code: CodeType) -> bool:
        """Whether the exception can come here. Python drops what a finalizer raises."""
        # Once a thread has been started, only a signal comes before `start` returns.
        is_started = code is threading.Thread.start.__code__ and self._error is not KeyboardInterrupt
        return not is_started and not _is_finalizing(sys._getframe())


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether a frame runs within a finalizer or a callback of the collector, whose exceptions Python drops."""
    while frame is not None:
        if frame.f_code.co_name in {"__del__", "gc_callback"}:
            return True
        frame = frame.f_back
    return False


class SignalInterrupt:
    """Raises `KeyboardInterrupt` by a real signal, some time after a call begins, wherever the library is then.

    Args:
        seconds: the time; nothing is raised if the call ends before, or while other code runs.

    Attributes:
        where: the place, once raised.
    """

    def __init__(self, seconds: float) -> None:
        self.where = ""
        self._seconds = seconds

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Interrupt code that runs inside."""
        before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        caller, called = frame, frame
        while caller is not None and not caller.f_code.co_filename.startswith(_TESTS):
            caller, called = caller.f_back, caller
        # A store or stream of the tests is not written to be interrupted, and a result on its way to the test is lost:
        # so it would be at the end of `armed`, after the call.
        is_ours = frame is not None and caller is not frame and not _is_finalizing(frame)
        is_ours = is_ours and called is not None and called.f_code.co_filename != contextlib.__file__
        # Before 3.13 `logging` takes its locks outside `try`: later all threads that log would wait for ever.
        is_ours = is_ours and frame is not None and frame.f_code.co_filename != logging.__file__
        if is_ours and caller is not None and caller.f_code.co_name in _CALLERS:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt


class Interrupt:
    """Counts the places that a program goes through, and raises at one.

    Args:
        files: suffixes of the names of the files whose code is interrupted.
        error: the exception to raise.
        place: where to raise it; None for nowhere.
        count: raise it at this pass of the place, from 1.
        again: if positive, raise it a second time, so many places later.
    """

    def __init__(
        self,
        files: tuple[str, ...],
        error: type[BaseException] = KeyboardInterrupt,
        place: Place | None = None,
        count: int = 1,
        again: int = 0,
    ) -> None:
        self.files, self.error, self.place, self.count, self.again = files, error, place, count, again
        self.seen: Counter[Place] = Counter()
        self.where = ""
        self._armed = False
        self._signals = issubclass(error, KeyboardInterrupt)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and those that start inside."""
        if sys.version_info >= (3, 12):
            _instrument.cache_clear()  # modules may have been reimported
        with _watched(self.files, _places, self._wants, self._at, threads=not self._signals):
            yield

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let code of the main thread that runs inside be interrupted; other threads always are."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def _wants(self, code: CodeType) -> bool:
        return self.again > 0 if self.where else self.place is None or self.place.code is code

    def _at(self, code: CodeType, offset: int) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and not self._armed:
            return
        if self.where:
            self.again -= in_main
            if self.again == 0 and in_main:
                raise self.error
            return
        place = Place(code, offset, in_main)
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.count:
            self.where = f"{self.error.__name__} at {place}, {self.count}"
            raise self.error


def sweep(
    files: tuple[str, ...],
    run: Callable[[Interrupt], None],
    error: type[BaseException],
    *,
    most: int,
    seed: int,
    twice: bool = False,
) -> tuple[int, int]:
    """Run a program repeatedly, with one exception at each place that it passes, at a random pass; or with two.

    Args:
        files: as for `Interrupt`.
        run: the program.
        error: the exception to raise.
        most: maximum number of randomly chosen places.
        seed: seed of the choice.
        twice: raise a second one soon after each.

    Returns:
        The number of places, and of exceptions raised.
    """
    # How often a program polls differs from run to run: the minimum of three runs is most likely to recur.
    surveys = [Interrupt(files, error) for _ in range(3)]
    for survey in surveys:
        run(survey)
    random = Random(seed)
    places = sorted(surveys[0].seen, key=str)
    raised = 0
    for place in random.sample(places, min(most, len(places))):
        times = max(1, min(survey.seen.get(place, 0) for survey in surveys))
        count = random.randint(1, times)
        interrupt = Interrupt(files, error, place, count, again=random.choice((1, 3, 10, 30)) if twice else 0)
        try:
            run(interrupt)
        except BaseException as failure:
            raise AssertionError(f"after {interrupt.where or 'nothing'}: {failure!r}") from failure
        raised += bool(interrupt.where)
    return len(places), raised
