"""The demo's report: its verdict, its table and its JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from demo_report import REPORT

from blockyard.scheduler import SchedulerStats
from blockyard.tools.demo.report import Damage, Difference, Report, print_report, rows
from blockyard.types import StoreStats

WRONG = replace(REPORT, differences=[Difference("text-3", 1, 5, 17, 99)])


def printed(report: Report) -> str:
    stream = io.StringIO()
    print_report(report, stream)
    return stream.getvalue()


def test_the_last_line_says_how_many_requests_came_out_identical() -> None:
    assert REPORT.exit_code == 0
    assert printed(REPORT).splitlines()[-1] == "tokens identical to the unpaged Hugging Face model: 48/48"


def test_the_table_names_every_transfer_tier_and_preemption() -> None:
    table = dict(rows(REPORT))
    assert table["swapped out to host"] == "40 blocks, 40.0 MiB"
    assert table["swapped in from external"] == "30 blocks, 30.0 MiB"
    assert table["copied on write"] == "5 blocks, 5.0 MiB"
    assert table["peak use, device"] == "20 of 24 blocks"
    assert table["preemptions"] == "swap to host 4, swap to external 3, recompute 2"
    assert table["swap store checksum failures"] == "0"
    lines = printed(REPORT).splitlines()
    assert lines[2].split("  ")[0] == "requests"
    assert all(line.isascii() for line in lines)


def test_one_differing_request_exits_1_and_is_shown_before_the_verdict() -> None:
    assert WRONG.exit_code == 1
    lines = printed(WRONG).splitlines()
    assert lines[-2] == "text-3 sequence 1 differs at token 5: 17, unpaged 99"
    assert lines[-1].endswith("47/48")


def test_many_differences_are_cut_short() -> None:
    text = printed(replace(WRONG, differences=WRONG.differences * 9))
    assert text.count("differs at token") == 5
    assert "and 4 more sequences differ" in text


def test_ties_are_counted_and_are_no_differences() -> None:
    tied = replace(REPORT, ties=1)
    assert printed(tied).endswith("Hugging Face model: 48/48 (ties in rounding: 1)\n")
    assert tied.exit_code == 0


def test_a_prefix_store_has_its_row() -> None:
    assert "prefix store" not in dict(rows(REPORT))
    found = dict(rows(replace(REPORT, prefix_store={"hit_blocks": 12, "written_blocks": 34})))
    assert found["prefix store"] == "12 blocks loaded, 34 written"


def test_corruptions_are_told_beside_what_was_damaged() -> None:
    counters = StoreStats(misses={"header_checksum": 1, "payload_checksum": 3})
    report = replace(REPORT, swap_store=counters, damage=Damage(9, 4, 4), scheduler=SchedulerStats(lost=2))
    table = dict(rows(report))
    assert table["corruptions"] == "4 detected, 4 damaged blocks read of 9 stored"
    assert table["swap store misses"] == "header_checksum 1, payload_checksum 3"
    assert table["requests recomputed after a miss"] == "2"


def test_damage_that_was_read_and_not_detected_exits_1() -> None:
    assert replace(REPORT, damage=Damage(9, 4, 4)).exit_code == 0
    assert replace(REPORT, damage=Damage(9, 4, 3)).exit_code == 1


def test_damage_that_was_never_read_exits_2() -> None:
    unread = replace(REPORT, damage=Damage(9, 0, 0))
    assert unread.exit_code == 2
    assert "nothing was tested" in printed(unread)


def test_json_holds_every_attribute_and_the_verdict() -> None:
    loaded = json.loads(json.dumps(WRONG.as_dict()))
    assert set(loaded) == set(Report.__dataclass_fields__) | {"identical", "identical_requests", "exit_code"}
    assert (loaded["identical"], loaded["identical_requests"]) == (False, 47)
    assert loaded["swap_store"]["checksum_failures"] == 0
    assert loaded["manager"]["swapped_out_blocks"] == {"host": 40, "external": 35}
    assert loaded["scheduler"]["preempted_recompute"] == 2
    assert loaded["differences"][0]["position"] == 5
