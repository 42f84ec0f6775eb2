"""`Result`: the outcome of a command."""

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
    """The outcome of a command.

    Attributes:
        data: data for JSON.
        show: writes the result as text.
        exit_code: exit code of the command.
        problem: line for standard error if the command could not do its work.
        files: files to write besides the report, each with the function that writes it.
    """

    data: dict[str, Any]
    show: Callable[[TextIO], None]
    exit_code: int = EXIT_OK
    problem: str = ""
    files: Mapping[Path, Callable[[Path], None]] = field(default_factory=dict)
