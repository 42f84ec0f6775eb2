"""What a command of the command line comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

__all__ = ["EXIT_BAD_USAGE", "EXIT_OK", "EXIT_WRONG", "Result"]

EXIT_OK: Final = 0
EXIT_WRONG: Final = 1
EXIT_BAD_USAGE: Final = 2


@dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        data: for JSON.
        show: writes it as text.
        exit_code: of the command.
        problem: a line for standard error, if the command could not do what was asked.
        files: that it writes beside the report, each with what writes it.
    """

    data: dict[str, Any]
    show: Callable[[TextIO], None]
    exit_code: int = EXIT_OK
    problem: str = ""
    files: Mapping[Path, Callable[[Path], None]] = field(default_factory=dict)
