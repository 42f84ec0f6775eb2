"""The demo's report: its verdict, its table, its JSON file, and what is shown without rich or a terminal."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace

import pytest
from demo_report import REPORT

from blockyard.tools.demo.report import (
    Damage,
    Difference,
    Report,
    Sabotage,
    print_report,
    rows,
)
from blockyard.types import StoreStats

WRONG = replace(REPORT, identical_requests=47, differences=[Difference("text-3", 1, 5, 17, 99)])


def printed(report: Report) -> str:
    stream = io.StringIO()
    print_report(report, stream)
    return stream.getvalue()


def test_identical_run_exits_0() -> None:
    assert REPORT.identical
    assert REPORT.exit_code == 0


def test_one_differing_request_exits_1() -> None:
    assert not WRONG.identical
    assert WRONG.exit_code == 1


def test_run_that_compared_nothing_is_not_identical() -> None:
    assert replace(REPORT, compared=0, identical_requests=0).exit_code == 1


def test_sabotage_that_found_nothing_to_drop_exits_2() -> None:
    assert replace(REPORT, sabotage=Sabotage("swap_in", 0, "")).exit_code == 2
    assert replace(WRONG, sabotage=Sabotage("swap_in", 9, "block 3 from slot 4")).exit_code == 1


def test_last_line_says_how_many_requests_came_out_identical() -> None:
    last = printed(REPORT).splitlines()[-1]
    assert last == "tokens identical to the unpaged Hugging Face model: 48/48"


def test_table_names_every_transfer_tier_and_preemption() -> None:
    text = printed(REPORT)
    for part in ("swap out, device to host", "swap out, host to external", "5 blocks, 5.0 MiB", "20 of 24 blocks"):
        assert part in text
    assert "swap store checksum failures" in text


def test_preemptions_are_worded_by_kind() -> None:
    assert dict(rows(REPORT))["preemptions"] == "swap to host 4, swap to external 3, recompute 2"


def test_differences_are_shown_before_the_verdict() -> None:
    lines = printed(WRONG).splitlines()
    assert lines[-2] == "text-3 sequence 1 differs at token 5: 17, unpaged 99"
    assert lines[-1].endswith("47/48")


def test_ties_are_counted_and_are_no_differences() -> None:
    tied = replace(REPORT, ties=1)
    assert printed(tied).endswith("Hugging Face model: 48/48 (ties in rounding: 1)\n")
    assert tied.exit_code == 0


def test_many_differences_are_cut_short() -> None:
    text = printed(replace(WRONG, differences=WRONG.differences * 9))
    assert text.count("differs at token") == 5
    assert "and 4 more sequences differ" in text


def test_corruptions_are_told_beside_what_was_damaged() -> None:
    counters = StoreStats(misses={"header_checksum": 1, "payload_checksum": 3})
    table = dict(rows(replace(REPORT, swap_store=counters, damage=Damage(20, 9, 4, 4), lost=2)))
    assert table["corruptions"] == "4 detected, 4 damaged blocks read of 9 stored"
    assert table["swap store misses"] == "header_checksum 1, payload_checksum 3"
    assert table["requests recomputed after a miss"] == "2"


def test_damage_that_was_read_and_not_detected_exits_1() -> None:
    assert replace(REPORT, damage=Damage(20, 9, 4, 4)).exit_code == 0
    assert replace(REPORT, damage=Damage(20, 9, 4, 3)).exit_code == 1


def test_damage_that_was_never_read_exits_2() -> None:
    unread = replace(REPORT, damage=Damage(20, 9, 0, 0))
    assert unread.exit_code == 2
    assert "nothing was tested" in printed(unread)


def test_sabotage_is_told() -> None:
    table = dict(rows(replace(REPORT, sabotage=Sabotage("copy", 0, ""))))
    assert table["dropped on purpose"] == "nothing: 0 blocks of kind copy were transferred in this run"


def test_blocks_are_summed_by_kind_and_tier() -> None:
    assert REPORT.blocks("swap_out") == 75
    assert REPORT.blocks("swap_out", "external") == 35
    assert REPORT.blocks("swap_out", "host") == 45
    assert REPORT.blocks("swap_in") == 0


def test_json_holds_every_attribute_and_the_verdict() -> None:
    loaded = json.loads(json.dumps(WRONG.as_dict()))
    assert set(loaded) == set(Report.__dataclass_fields__) | {"identical", "exit_code"}
    assert loaded["identical"] is False
    assert loaded["swap_store"]["checksum_failures"] == 0
    assert loaded["transfers"][0] == {
        "kind": "swap_out",
        "src": "device",
        "dst": "host",
        "blocks": 40,
        "bytes": 40 * 2**20,
    }
    assert loaded["differences"][0]["position"] == 5


class Terminal(io.StringIO):
    """Takes text, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_table_is_as_wide_as_the_terminal_and_plain_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    print_report(REPORT, terminal)
    assert max(map(len, terminal.getvalue().splitlines()[:-1])) <= 60
    lines = printed(REPORT).splitlines()
    assert lines[2].split("  ")[0] == "requests"
    assert all(line.isascii() for line in lines)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    without_rich = Terminal()
    print_report(REPORT, without_rich)
    assert without_rich.getvalue() == printed(REPORT)
