"""Fleets in virtual time: one seed is one run, no seed breaks a promise, and planted faults are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from planted_fleet_faults import PLANTED, planted

from blockyard.errors import InvalidArgumentError
from blockyard.tools.cli import main
from blockyard.tools.sim import FAULTS, Fault, FleetOptions, read_faults, run_campaign, simulate_fleet
from blockyard.tools.sim.fleet.campaign import shrink
from blockyard.tools.sim.fleet.faults import OF_CLUSTER, draw_faults
from blockyard.tools.sim.fleet.log import BlockCounts, FleetLog
from blockyard.tools.sim.fleet.serving import ServingEngine
from blockyard.tools.sim.loop import Loop

SEEDS = 30
HYBRIDS = ("window", "states", "hybrid", "eagle", "mtp")


def test_no_seed_breaks_a_promise():
    found = run_campaign(range(SEEDS), FleetOptions())
    assert found.failure is None, found.replay_command()
    assert found.num_seeds == SEEDS
    assert set(found.faults) == set(FAULTS) - OF_CLUSTER, "every kind happens"
    assert found.reasons[""] > found.num_operations / 2, "most blocks come and go"
    assert {"absent", "error", "forgotten", "unavailable", "refused"} <= set(found.reasons)


def test_no_seed_over_a_cluster_breaks_a_promise():
    options = FleetOptions(work="calls", store="cluster", kinds=("move", "node_down", "cut_off", "failover", "crash"))
    found = run_campaign(range(8), options)
    assert found.failure is None, found.replay_command()
    assert set(found.faults) > OF_CLUSTER


@pytest.mark.parametrize("model", HYBRIDS)
def test_no_seed_breaks_a_promise_to_a_hybrid_model(model: str):
    for store, count in (("both", 4), ("cluster", 1)):
        found = run_campaign(range(count), FleetOptions(work="serving", store=store, model=model))
        assert found.failure is None, found.replay_command()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 200))  # a test may take ten minutes
@pytest.mark.parametrize("model", HYBRIDS)
@pytest.mark.parametrize("store", ["both", "cluster"])
def test_no_seed_of_many_breaks_a_promise_to_a_hybrid_model(first: int, model: str, store: str):
    options = FleetOptions(work="serving", store=store, model=model)
    found = run_campaign(range(first, first + 200), options, jobs=len(os.sched_getaffinity(0)))
    assert found.failure is None, found.replay_command()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
@pytest.mark.parametrize("engines", [2, 3, 5])
@pytest.mark.parametrize("store", ["both", "cluster"])
def test_no_seed_of_many_breaks_a_promise(first: int, engines: int, store: str):
    cores = len(os.sched_getaffinity(0))
    found = run_campaign(range(first, first + 1000), FleetOptions(engines=engines, store=store), jobs=cores)
    assert found.failure is None, found.replay_command()


def test_a_seed_is_one_run_in_any_process():
    code = "from blockyard.tools.sim import simulate_fleet\nfor seed in range(4): print(simulate_fleet(seed).digest)"
    env = {"PYTHONHASHSEED": "1"}  # this process has a random one
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == (digests := [simulate_fleet(seed).digest for seed in range(4)])
    assert len(set(digests)) == 4


def test_a_long_run_uses_more_keys_than_redis_holds():
    assert not simulate_fleet(7, FleetOptions(work="calls", store="redis", seconds=8.0), []).broken


def test_an_engine_killed_while_it_ends_its_requests_leaves_its_forget_to_its_next_life():
    faults = "server_clock:-1:2.219:10.886,partition:0:2.339:0.148,crash:0:2.744:0.034,lossy:2:4:2.067"
    assert not simulate_fleet(1045, FleetOptions(work="serving", store="redis"), read_faults(faults)).broken


def test_an_engine_killed_while_it_forgets_serves_no_further_step():
    faults = "crash:0:1.754:0.132,node_loss:-1:1.767:2.124,lossy:1:2.417:0.127,damage:-1:2.5:0.374"
    options = FleetOptions(work="serving", store="redis", engines=2)
    assert not simulate_fleet(225, options, read_faults(faults)).broken


def test_an_engine_may_be_killed_while_it_probes_a_lost_node():
    faults = "partition:2:0.16:2.124,lossy:2:1.723:10.869,partition:1:3.494:0.039,crash:2:3.664:2.027"
    assert not simulate_fleet(721, FleetOptions(work="calls", store="cluster"), read_faults(faults)).broken


def test_an_engine_may_join_the_epoch_that_its_refused_forget_was_to_end():
    faults = "full:-1:1.231:2.522,failover:-1:2.276:0.267,clock:0:2.497:2.366,full:-1:3.274:2.35"
    assert not simulate_fleet(839, FleetOptions(work="serving", store="redis"), read_faults(faults)).broken


def test_a_server_that_has_lost_what_follows_what_has_room_for_new_blocks():
    faults = "crash:0:0.38:2.933,full:-1:1.663:16.401,repeat:0:2.438:2.534,node_loss:-1:2.474:0.021"
    options = FleetOptions(work="serving", store="redis", engines=2)
    assert not simulate_fleet(155, options, read_faults(faults)).broken


def test_blocks_that_a_killed_sweep_has_left_are_listed_when_others_are_stored():
    faults = "node_loss:-1:1.331:1.557,partition:1:1.891:8.439,update:-1:2.19:5.883,damage:-1:3.077:0.003"
    options = FleetOptions(work="serving", store="redis", engines=2)
    assert not simulate_fleet(124, options, read_faults(faults)).broken


def test_weights_of_equal_letters_compute_other_blocks():
    faults = "repeat:0:1.093:0.01,update:-1:1.094:0.476,full:-1:2.944:0.01,update:-1:3.245:2.843"
    options = FleetOptions(work="serving", store="object", model="window")
    assert not simulate_fleet(54, options, read_faults(faults)).broken


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    seeds, options = planted(name, monkeypatch)
    assert any(simulate_fleet(seed, options).broken for seed in seeds), f"not found in {len(seeds)} seeds"


@pytest.mark.parametrize("name", [name for name in PLANTED if "clock" in name or "another" in name])
def test_a_planted_fault_remembers_nothing_of_the_seeds_before(name: str, monkeypatch: pytest.MonkeyPatch):
    _, options = planted(name, monkeypatch)
    first, _, again = (simulate_fleet(seed, options).digest for seed in (1, 0, 1))
    assert first == again


def test_a_failure_shrinks_to_the_faults_that_matter_and_repeats(monkeypatch: pytest.MonkeyPatch):
    planted("damage is not looked for", monkeypatch)
    options = FleetOptions(num_faults=8, work="calls")
    for seed in range(100):  # of some, each fault decides who comes when
        report = simulate_fleet(seed, options)
        if report.broken and len((shortest := shrink(report, options)).faults) < len(report.faults):
            break
    else:
        pytest.fail("no list of faults became shorter")
    assert shortest.broken
    again = simulate_fleet(report.seed, options, read_faults(",".join(map(str, shortest.faults))))
    assert again.digest == shortest.digest
    for place in range(len(shortest.faults)):
        fewer = shortest.faults[:place] + shortest.faults[place + 1 :]
        assert not simulate_fleet(report.seed, options, fewer).broken


def test_faults_are_read_as_they_are_printed():
    faults = draw_faults(3, kinds=tuple(FAULTS), engines=4, count=200, until=5.0)
    assert read_faults(",".join(map(str, faults))) == faults
    assert {fault.kind for fault in faults} == set(FAULTS)
    assert read_faults("none") == []
    assert read_faults("crash:1:0.5:2") == [Fault("crash", 1, 0.5, 2.0)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: read_faults("crash:1:2"), "faults has 'crash:1:2', must be kind:engine:at:seconds"),
        (lambda: read_faults("flood:1:2:3"), "faults has the kind 'flood', must be one of lossy"),
        (
            lambda: simulate_fleet(0, FleetOptions(work="calls"), read_faults("crash:1:0.5:2,crash:3:1:0.5")),
            "faults has 'crash:3:1:0.5', its engine must be from 0 to 2, or -1 for the server",
        ),
        (lambda: simulate_fleet(0, FleetOptions(engines=1), [Fault("gray", -2, 0.5, 2.0)]), "has 'gray:-2:0.5:2', its"),
        (lambda: FleetOptions(engines=0), "engines is 0, must be 1 to 64"),
        (lambda: FleetOptions(seconds=0.0), "seconds is 0.0, must be over 0"),
        (lambda: FleetOptions(model="moe"), "model is 'moe', must be one of full, window, states, hybrid, eagle, mtp"),
        (lambda: FleetOptions(kinds=("crash", "flood")), "kinds has 'flood', must be some of lossy"),
        (lambda: FleetOptions(kinds=("crash", "move")), "has 'move', which needs the store 'cluster'; store is 'both'"),
        (lambda: FleetOptions(kinds=("failover",), store="object"), "which needs the store 'redis' or 'cluster'"),
        (lambda: FleetOptions(kinds=("page",), store="cluster"), "which needs the store 'object'; store is 'cluster'"),
        (lambda: FleetOptions(kinds=("copy",), work="calls"), "has 'copy', which needs the work 'serving'"),
        (
            lambda: simulate_fleet(0, None, [Fault("move", -1, 0.5, 2.0)]),
            "has 'move:-1:0.5:2', which needs the store 'cluster'; with seed 0 the store is 'object', work 'calls'",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(make: Callable[[], object], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_what_a_store_lost_is_counted_apart_from_what_it_never_had():
    log = FleetLog(Loop(0), 1)
    log.count("put", ["a", "b", "c"], ["", "", "timeout"])
    log.count("get", ["a", "b", "c"], ["", "absent", "absent"])
    log.count("delete", ["a"], [""])
    log.count("get", ["a", "b"], ["absent", "damaged"])
    assert log.blocks == BlockCounts(read=5, found=1, computed_again=2, written=3, stored=2)


@pytest.mark.parametrize("work", ["calls", "serving"])
def test_a_campaign_says_what_its_stores_were_worth(work: str):
    found = run_campaign(range(4), FleetOptions(work=work, kinds=("node_loss", "crash"), seconds=2.0))
    counts = found.as_dict()["counts"]
    assert 0 < counts["found"]["sum"] < counts["read"]["sum"]
    assert counts["stored"]["sum"] <= counts["written"]["sum"]
    assert counts["computed_again"]["sum"] > 0
    low, high = counts["read"]["by_seed"]
    assert 0 < low < high < counts["read"]["sum"]
    assert found.show_blocks().startswith(f"read: {counts['found']['sum']} of {counts['read']['sum']} blocks found (")


def test_the_command_writes_the_same_bytes_for_the_same_seed_in_any_process(tmp_path: Path):
    one, two = (tmp_path / name for name in ("one.json", "two.json"))
    arguments = ["simulate", "-q", "--seeds", "3", "--seed", "7", "--format", "json", "--output"]
    subprocess.run([sys.executable, "-m", "blockyard", *arguments, str(one)], check=True)
    assert main([*arguments, str(two)]) == 0
    assert one.read_bytes() == two.read_bytes()
    found = json.loads(one.read_text())
    assert found["num_seeds"] == 3
    assert found["failure"] is None


def test_the_number_of_processes_changes_no_result():
    one, two = (run_campaign(range(20), FleetOptions(seconds=1.0), jobs=jobs) for jobs in (1, 2))
    assert one.as_dict() == two.as_dict()
    assert one.num_seeds == 20


def test_the_command_runs_exactly_the_faults_that_it_is_given(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "-q", "--seed", "3", "--replay", "crash:0:1:0.3,full:-1:2:0.5", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_seeds"] == 1
    assert {kind: count for kind, count in found["faults"].items() if count} == {"crash": 1, "full": 1}
    assert main(["simulate", "--faults", "flood"]) == 2


def test_the_step_in_which_an_engine_is_killed_is_not_checked_with_the_weights_of_its_next_life():
    engine, life = object.__new__(ServingEngine), mock.MagicMock()
    life.scheduler.num_unfinished, life.link.is_dead = 1, True
    with (
        mock.patch.object(ServingEngine, "_compute", return_value=([], [])),
        mock.patch.object(ServingEngine, "_check", side_effect=AssertionError),
    ):
        engine._step(life)
