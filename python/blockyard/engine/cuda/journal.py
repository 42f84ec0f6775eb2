"""Measurements that survive the process: a driver crash loses only the current case."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

__all__ = ["Journal"]

Name = TypeVar("Name", bound=str)


class Journal:
    """Measured cases in a file of JSON lines: the key, then a line when a case begins and one when it ends.

    A case that started but never ended is not measured again, as it would crash the next process, too.

    Args:
        path: the file; its folder is created.
        key: what the measurements apply to. A file with another key is overwritten.
    """

    def __init__(self, path: Path, key: Mapping[str, str]) -> None:
        self._path = path
        self._cases: dict[str, dict[str, float]] = {}
        if self._read(key):
            return
        self._cases.clear()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(key), encoding="utf-8")

    def measure(self, case: str, work: Callable[[], dict[Name, float]]) -> dict[Name, float]:
        """Return the figures of a case, measured in this process or an earlier one.

        Args:
            case: name of the case.
            work: measures the case.

        Returns:
            The figures; empty if an earlier process died while measuring the case.
        """
        if case in self._cases:
            return cast("dict[Name, float]", self._cases[case])
        # No figures yet.
        self._write(case, {})
        try:
            figures = work()
        except BaseException:
            # An error is not a crash: the next process tries again.
            self._write(case, None)
            raise
        self._write(case, figures)
        return figures

    def close(self) -> None:
        """Remove the file, since everything was measured."""
        self._path.unlink(missing_ok=True)

    def _write(self, case: str, figures: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            # Keep a line that a crash truncated separate.
            file.write("\n" + json.dumps([case, figures]))

    def _read(self, key: Mapping[str, str]) -> bool:
        """Read the file of an earlier process. Returns whether it exists and has this key."""
        try:
            first, *lines = self._path.read_text(encoding="utf-8").splitlines()
            if json.loads(first) != key:
                return False
        except (OSError, ValueError):
            return False
        for line in lines:
            try:
                case, figures = json.loads(line)
            except ValueError:
                continue
            self._cases[case] = figures
        self._cases = {case: figures for case, figures in self._cases.items() if figures is not None}
        return True
