"""Measurements that outlive the process: a crash of the driver costs the case under way, not those before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

__all__ = ["Journal"]

Name = TypeVar("Name", bound=str)


class Journal:
    """Measured cases in a file of JSON lines: the key, then a line when a case begins and one when it ends.

    A case that began and never ended is not measured again: it would end the next process, too.

    Args:
        path: the file; its folder is made.
        key: what the measurements hold for. A file of another key is begun afresh.
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
        """Give what a case measured, in this process or an earlier one.

        Args:
            case: its name.
            work: measures it.

        Returns:
            The figures; none if an earlier process ended while it measured the case.
        """
        if case in self._cases:
            return cast("dict[Name, float]", self._cases[case])
        # No figures yet.
        self._write(case, {})
        try:
            figures = work()
        except BaseException:
            # An error is no crash: the next process tries again.
            self._write(case, None)
            raise
        self._write(case, figures)
        return figures

    def close(self) -> None:
        """Remove the file: everything was measured."""
        self._path.unlink(missing_ok=True)

    def _write(self, case: str, figures: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            # A line that a crash cut off stays a line of its own.
            file.write("\n" + json.dumps([case, figures]))

    def _read(self, key: Mapping[str, str]) -> bool:
        """Take over what an earlier process wrote; gives whether there is anything of this key."""
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
