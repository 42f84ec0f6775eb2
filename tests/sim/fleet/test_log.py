"""The timeline of a fleet has the calls, answers and faults of its run."""

from __future__ import annotations

from collections import Counter as Counts

from blockyard.tools.sim import FleetOptions, read_faults, simulate_fleet
from blockyard.tools.sim.fleet.log import FleetLog
from blockyard.tools.sim.loop import Loop
from blockyard.tools.timeline import Counter, Mark, Span

FAULTS = "partition:1:0.5:1,node_loss:-1:1:0.5,crash:2:1.5:0.25,gray:-1:2:0.75,clock:0:2.5:0.5"


def test_lines_and_timeline_say_the_same() -> None:
    loop = Loop(1)
    log = FleetLog(loop, 2)

    def happen() -> None:
        partition = log.begin_fault("partition", "engine 1")
        loop.sleep(0.25)
        log.add_batch("engine 0", "put", 0.125, ["", "timeout"])
        log.end_fault(log.begin_fault("damage", "server"))
        log.end_fault(partition)
        log.mark("engine 1", "forget")
        log.begin_fault("slow", "engine 0")
        loop.sleep(0.5)
        log.add_batch("engine 0", "delete", 0.5, ["absent"])
        log.add_request("engine 1", "1-7", 0.25, prompt=3, tokens=4)
        log.say("engine 1", "it ends")

    loop.start("all", happen)
    loop.run()
    log.end_faults()
    assert log.lines == [
        "   0.0000 engine 1 partition begins",
        "   0.2500 server damage begins",
        "   0.2500 engine 0 slow begins",
        "   0.7500 engine 1 it ends",
    ]
    assert log.timeline.spans == [
        Span("engine 0", "put", 0.125, 0.25, {"blocks": 2, "result": "ok 1, timeout 1"}),
        Span("faults", "partition", 0.0, 0.25, {"on": "engine 1"}),
        Span("engine 0", "delete", 0.5, 0.75, {"blocks": 1, "result": "absent 1"}),
        Span("engine 1", "request", 0.25, 0.75, {"request": "1-7", "prompt": 3, "tokens": 4}),
        Span("faults", "slow", 0.25, 0.75, {"on": "engine 0"}),
    ]
    assert log.timeline.marks == [Mark("faults", "damage", 0.25), Mark("engine 1", "forget", 0.25)]
    last = {counter.name: counter.value for counter in log.timeline.counters}
    assert last == {"stored": 1, "not stored": 1, "finished": 1}  # a panel without data is none
    assert Counter("writes (blocks)", "not stored", 0.25, 1) in log.timeline.counters


def test_a_run_is_on_its_timeline_whole() -> None:
    report = simulate_fleet(3, FleetOptions(work="calls"), read_faults(FAULTS))
    assert not report.broken
    found = report.timeline
    faults = {(span.name, span.args["on"]): span for span in found.spans if span.track == "faults"}
    for fault in report.faults:
        who = "server" if fault.engine < 0 else f"engine {fault.engine}"
        if fault.kind == "node_loss":
            assert Mark("faults", "node_loss", fault.at) in found.marks
        else:
            span = faults.pop((fault.kind, who))
            assert abs(span.start - fault.at) < 1e-3
            assert abs(span.end - span.start - fault.seconds) < 1e-3
    assert not faults
    reasons: Counts[str] = Counts()
    for span in found.spans:
        if span.track != "faults":
            for part in str(span.args["result"]).split(", "):
                reason, _, count = part.rpartition(" ")
                reasons[reason] += int(count)
    assert reasons == Counts({reason or "ok": count for reason, count in report.reasons.items()})
    last = {counter.name: counter.value for counter in found.counters}
    reads = sum(int(span.args["blocks"]) for span in found.spans if span.name == "get")
    assert last["hits"] + last["misses"] == reads
    assert last["hits"] > 0
    assert last["not stored"] > 0


def test_requests_of_serving_engines_are_spans() -> None:
    report = simulate_fleet(3, FleetOptions(work="serving"))
    found = report.timeline
    ended = [line for line in report.log if " took " in line]
    requests = [span for span in found.spans if span.name.startswith("request")]
    assert len(requests) == len(ended) > 5
    assert {span.track for span in requests} == {"engine 0", "engine 1", "engine 2"}
    assert all(int(span.args["prompt"]) > 0 and int(span.args["tokens"]) > 0 for span in requests)
    assert any(mark.name == "forget" for mark in found.marks)
