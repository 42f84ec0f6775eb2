"""The timeline of a fleet has the calls, answers and faults of its run."""

from __future__ import annotations

from collections import Counter as Counts

from blockyard.sim import FleetOptions, FleetReport, fleet_timeline, read_faults, simulate_fleet
from blockyard.timeline import Counter, Mark, Span

FAULTS = "partition:1:0.5:1,node_loss:-1:1:0.5,crash:2:1.5:0.25,gray:-1:2:0.75,clock:0:2.5:0.5"
LOG = """\
   0.1000 engine 0 put [1, 2] is 0
   0.1500 engine 0 get [1] is 1
          a line of a store
   0.2000 engine 1 partition begins
   0.2500 engine 0 1: absent
   0.3000 engine 0 0: ok,timeout
   0.3500 server damage begins
   0.4000 engine 1 partition ends
   0.5000 engine 0 crash begins
   0.6000 engine 1 forget 'step-1': ok
   0.6500 engine 1 quota b'a' 4: ok
   0.7000 engine 1 get [3, 4] is 0
key 3: absent, though put 1 was confirmed
"""


def test_each_line_of_a_log_becomes_what_it_says() -> None:
    faults = read_faults("partition:1:0.2:0.2,damage:-1:0.35:1,crash:0:0.5:0.05")
    broken = "key 3: absent, though put 1 was confirmed"
    found = fleet_timeline(FleetReport(7, faults, broken=broken, log=LOG.splitlines()))
    assert found.tracks == ["faults", "engine 0", "engine 1"]
    assert found.spans == [
        Span("engine 0", "get", 0.15, 0.25, {"blocks": 1, "result": "absent 1"}),
        Span("engine 0", "put", 0.1, 0.3, {"blocks": 2, "result": "ok 1, timeout 1"}),
        Span("faults", "partition", 0.2, 0.4, {"on": "engine 1"}),
        Span("faults", "crash", 0.5, 0.55, {"on": "engine 0"}),
    ]
    assert found.marks == [
        Mark("engine 1", "forget", 0.6),
        Mark("engine 1", "quota", 0.65),
        Mark("faults", "damage", 0.35),
        Mark("faults", "broken promise", 0.7),
    ]
    last = {counter.name: counter.value for counter in found.counters}
    assert last == {"hits": 0, "misses": 1, "stored": 1, "not stored": 1}
    assert Counter("writes (blocks)", "not stored", 0.3, 1) in found.counters


def test_a_run_is_on_its_timeline_whole() -> None:
    report = simulate_fleet(3, FleetOptions(work="calls"), read_faults(FAULTS))
    assert not report.broken
    found = fleet_timeline(report)
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
    found = fleet_timeline(report)
    ended = [line for line in report.log if " took " in line]
    requests = [span for span in found.spans if span.name.startswith("request")]
    assert len(requests) == len(ended) > 5
    assert {span.track for span in requests} == {"engine 0", "engine 1", "engine 2"}
    assert all(int(span.args["prompt"]) > 0 and int(span.args["tokens"]) > 0 for span in requests)
    assert any(mark.name == "forget" for mark in found.marks)
