"""Hypothesis state machines that drive a manager or scheduler, yours or Blockyard's, and read back every token.

    from blockyard.testing.machines import manager_machine, prefix_machine, scheduler_machine

    TestMyManager = manager_machine(lambda config: MyManager(**config.arguments())).TestCase
    TestMyCache = prefix_machine(lambda config, events: MyManager(**config.arguments(), events=events)).TestCase
    TestMyScheduler = scheduler_machine(
        make=lambda manager, config: MyScheduler(manager),
        add=lambda mine, request: mine.enqueue(request.request_id, request.prompt, request.max_tokens),
        step=lambda mine, simulation: mine.step(simulation.execute, simulation.forward),
    ).TestCase

A failure report starts with one sentence, then the last ten steps. `TestMyManager.settings =
settings(TestMyManager.settings, max_examples=500)` runs longer; `TestMyManager.shrink = True` also spends minutes
searching for the shortest example.
"""

from blockyard.workers.extras import missing

try:
    from hypothesis.stateful import run_state_machine_as_test
except ModuleNotFoundError as error:
    raise missing("blockyard.testing.machines", error) from None

from blockyard.testing.machines.manager import ManagerMachine, manager_machine
from blockyard.testing.machines.own_scheduler import scheduler_machine
from blockyard.testing.machines.prefix import PrefixMachine, prefix_machine
from blockyard.testing.machines.scheduler import SchedulerMachine, reference_tokens
from blockyard.testing.machines.simulation import Simulation

__all__ = [
    "ManagerMachine",
    "PrefixMachine",
    "SchedulerMachine",
    "Simulation",
    "manager_machine",
    "prefix_machine",
    "reference_tokens",
    "run_state_machine_as_test",
    "scheduler_machine",
]
