"""The machines as a user runs them; what they see is proved in `tests/property`."""

import io
import re
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
from hypothesis import find, seed, settings

from blockyard.scheduler import Request
from blockyard.testing import Config
from blockyard.testing.machines import manager_machine, prefix_machine, reference_tokens, scheduler_machine
from blockyard.testing.machines.scheduler import draw_token
from blockyard.testing.machines.strategies import VOCABULARY, configs, prompts, requests


@pytest.mark.parametrize("machine", [manager_machine(), scheduler_machine()], ids=["manager", "scheduler"])
def test_a_machine_runs_as_a_unittest_case(machine: type):
    case = machine.TestCase
    case.settings = settings(max_examples=3, stateful_step_count=10, deadline=None)
    outcome = unittest.TextTestRunner(stream=io.StringIO()).run(case("runTest"))
    assert outcome.wasSuccessful()
    assert outcome.testsRun == 1


def test_a_run_says_what_it_covered_and_most_requests_finish(capsys: pytest.CaptureFixture[str]):
    counts = []
    for machine in (scheduler_machine(), prefix_machine()):
        case = seed(0)(machine).TestCase
        case.settings = settings(max_examples=20, deadline=None, database=None)
        assert unittest.TextTestRunner(stream=io.StringIO()).run(case("runTest")).wasSuccessful()
        found = re.findall(r"([a-z_ ]+) ([\d,]+)", capsys.readouterr().out.partition("covered")[2])
        counts.append({name.strip(): int(count.replace(",", "")) for name, count in found})
    assert counts[0]["finished"] > counts[0]["requests"] // 2 > counts[0]["aborts"] > 0
    assert counts[1]["tokens hit"] > 0


def test_machines_of_two_factories_are_apart():
    one, other = manager_machine(), manager_machine(same_ids=False)
    assert (one.same_ids, other.same_ids) == (True, False)
    assert one.make_manager is not other.make_manager


def test_a_drawn_token_depends_on_every_token_before_it_and_on_the_sequence():
    kv = list(range(20))
    drawn = [draw_token(kv, 0), draw_token(kv, 1)]
    drawn += [draw_token([*kv[:i], 50, *kv[i + 1 :]], 0) for i in range(20)]
    assert len(set(drawn)) > 15
    assert draw_token(kv[::-1], 0) != drawn[0]


def test_the_reference_stops_at_a_stop_token():
    whole = reference_tokens(Request("a", [1, 2, 3], 6, n=2))
    assert [len(tokens) for tokens in whole] == [6, 6]
    stopped = reference_tokens(Request("a", [1, 2, 3], 6, n=2, stop_token_ids=frozenset({whole[0][2]})))
    assert stopped[0] == whole[0][: whole[0].index(whole[0][2]) + 1]


def test_strategies_reach_their_promised_cases():
    quick = settings(max_examples=2000, database=None)
    assert find(configs(), lambda c: c.host_blocks == 0 and c.external_blocks > 0, settings=quick).block_size >= 1
    assert find(requests(), lambda r: r.n == 3 and len(r.stop_token_ids) > 0, settings=quick).request_id
    assert max(find(prompts(max_size=5), lambda p: len(p) == 5, settings=quick)) < VOCABULARY
    assert find(configs(), lambda c: c.watermark > 0.1, settings=quick).arguments()["watermark"] == 0.2


def test_blocks_of_a_configuration_are_named_by_tier():
    assert Config(4, 3, 2, 1).blocks() == {"device": 3, "host": 2, "external": 1}


@pytest.mark.parametrize(
    ("module", "loads"),
    [("blockyard.testing", False), ("blockyard.testing.model", False), ("blockyard.testing.machines", True)],
)
def test_hypothesis_is_loaded_by_the_machines_alone_and_torch_by_nothing(module: str, loads: bool):
    code = f"import sys, {module}; print('hypothesis' in sys.modules, 'torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert finished.stdout.split() == [str(loads), "False"]


def test_the_example_runs(repo: Path):
    subprocess.run([sys.executable, repo / "examples" / "test_kit.py"], check=True, capture_output=True, timeout=300)
