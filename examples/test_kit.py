"""Property tests of your own scheduler with Blockyard's test kit.

Run it with `python examples/test_kit.py`, or let pytest or unittest collect the two `TestCase` classes.
"""

import unittest

from hypothesis import settings

from blockyard import BlockManager
from blockyard.scheduler import Scheduler, Step
from blockyard.testing import Config
from blockyard.testing.machines import manager_machine, scheduler_machine


class ShortStepScheduler(Scheduler):
    """Your scheduler: here, Blockyard's with a limit on steps, and a count of what it moved."""

    moved = 0

    def schedule(self) -> Step:
        """Decide one step."""
        step = super().schedule()
        self.moved += len(step.decision)
        return step


def make_manager(config: Config) -> BlockManager:
    """Your manager: anything that has the calls of `BlockManager`."""
    return BlockManager(**config.arguments())


def make_scheduler(manager: BlockManager, _: Config) -> ShortStepScheduler:
    """Your scheduler, over a manager of random size."""
    return ShortStepScheduler(manager, max_num_seqs=4, max_num_batched_tokens=32, preemption_mode="swap")


TestManager = manager_machine(make_manager).TestCase
TestScheduler = scheduler_machine(make_scheduler).TestCase
TestManager.settings = TestScheduler.settings = settings(max_examples=25, deadline=None)

if __name__ == "__main__":
    unittest.main()
