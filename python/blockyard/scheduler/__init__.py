"""The reference continuous-batching scheduler, over a `KVCache` or a `BlockManager` alone.

    scheduler = Scheduler(cache)
    scheduler.add(Request("a", prompt, max_tokens=64))
    while scheduler.num_unfinished:
        with scheduler.step() as step:             # blocks move between tiers during compute
            sampled = model(step)                  # one token for each of step.draws()
        for finished in scheduler.update(step, sampled):
            ...

Over a manager, the caller carries out each step's decision:

    step = scheduler.schedule()
    lost = executor.execute(step.decision)
    scheduler.complete(step.decision.ticket, lost)
    finished = scheduler.update(step, model(step))

`Step` documents the arrays that a model runner reads.
"""

from blockyard.scheduler.options import PREEMPTION_MODES, DefragPolicy, Goal, PreemptionCosts, PreemptionMode
from blockyard.scheduler.request import Finished, Request
from blockyard.scheduler.scheduler import Scheduler
from blockyard.scheduler.step import Draw, SchedulerStats, Step

__all__ = [
    "PREEMPTION_MODES",
    "DefragPolicy",
    "Draw",
    "Finished",
    "Goal",
    "PreemptionCosts",
    "PreemptionMode",
    "Request",
    "Scheduler",
    "SchedulerStats",
    "Step",
]
