"""Raises `KeyboardInterrupt` where a real one may come: wherever the interpreter looks for signals."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

LOOKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}
"""Instructions after which CPython looks for signals."""
LOOKS |= {"CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD", "JUMP_ABSOLUTE"}  # the names in 3.10


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which an interrupt may come."""
    instructions = list(dis.get_instructions(code))
    return frozenset(after.offset for before, after in itertools.pairwise(instructions) if before.opname in LOOKS)


class Interrupt:
    """Counts places, and interrupts at one.

    Args:
        place: the number of the place, from 0; never if it is not reached.
        files: ends of the names of the files whose code is interrupted.
    """

    def __init__(self, place: int, files: tuple[str, ...]) -> None:
        self.place = place
        self.files = files
        self.seen = 0
        self.where = ""

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Interrupt code that runs inside."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _value: object) -> Any:
        if self.where or not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, _value: object) -> Any:
        if event == "opcode" and not self.where and frame.f_lasti in _places(frame.f_code):
            self.seen += 1
            if self.seen > self.place:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._step
