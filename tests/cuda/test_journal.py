"""Measured cases outlive the process that measured them."""

from pathlib import Path

import pytest

from blockyard.engine.cuda.journal import Journal


def test_an_error_is_measured_again_and_a_line_cut_off_is_none(tmp_path: Path):
    path, key = tmp_path / "deep" / "cases", {"device": "card"}

    def fail() -> dict[str, float]:
        raise ZeroDivisionError

    journal = Journal(path, key)
    journal.measure("one", lambda: {"batch": 1.5})
    with pytest.raises(ZeroDivisionError):
        journal.measure("two", fail)
    with path.open("a") as file:
        file.write('\n["three", {"ba')
    journal = Journal(path, key)
    assert journal.measure("one", fail) == {"batch": 1.5}
    assert journal.measure("two", lambda: {"batch": 2.5}) == {"batch": 2.5}
    assert journal.measure("three", dict) == {}
    assert Journal(path, key).measure("two", fail) == {"batch": 2.5}
    assert Journal(path, {"device": "other"}).measure("one", lambda: {"loop": 3.0}) == {"loop": 3.0}
    path.write_bytes(b"\xff")
    assert Journal(path, key).measure("one", lambda: {"loop": 4.0}) == {"loop": 4.0}
