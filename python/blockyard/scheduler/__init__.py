"""The reference continuous-batching scheduler over a `BlockManager`.

    scheduler = Scheduler(manager)
    scheduler.add(Request("a", prompt, max_tokens=64))
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        lost = executor.execute(step.decision)     # move blocks between tiers
        scheduler.settle(step, lost)               # end the step's ticket
        sampled = model(step)                      # one token for each of step.draws()
        for finished in scheduler.update(step, sampled):
            ...

`Step` documents the arrays that a model runner reads.
"""

from blockyard.scheduler.defrag_policy import DefragPolicy, Goal
from blockyard.scheduler.request import Finished, Request
from blockyard.scheduler.scheduler import PREEMPTION_MODES, PreemptionMode, Scheduler
from blockyard.scheduler.step import Draw, SchedulerStats, Step

__all__ = [
    "PREEMPTION_MODES",
    "DefragPolicy",
    "Draw",
    "Finished",
    "Goal",
    "PreemptionMode",
    "Request",
    "Scheduler",
    "SchedulerStats",
    "Step",
]
