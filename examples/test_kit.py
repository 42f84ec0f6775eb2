"""Property tests of your own scheduler and manager with Blockyard's test kit.

Run it with `python examples/test_kit.py`, or let pytest or unittest collect the two `TestCase` classes. The kit makes
managers of random size, sends random requests, and reads every token back through the block tables.
"""

import unittest
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.testing.machines import manager_machine, scheduler_machine
from blockyard.types import Sequence


@dataclass
class Job:
    """A request and its tokens, the prompt first."""

    name: str
    tokens: list[int]
    prompt: int
    end: int
    sequence: Sequence | int = -1


class MyScheduler:
    """Your scheduler: first come, first served. The newest job makes room: it is swapped out or starts again."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.waiting = manager, deque[Job]()
        self.running, self.swapped = list[Job](), list[Job]()

    def enqueue(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Take a request."""
        self.waiting.append(Job(name, list(prompt), len(prompt), len(prompt) + max_tokens))

    def step(
        self, execute: Callable[[StepDecision], list[Pairs]], forward: Callable[..., list[int]]
    ) -> dict[str, list[int]]:
        """Run one step; returns what has finished."""
        manager, running = self.manager, self.running
        while running and not manager.can_append([job.sequence for job in running]):
            self.preempt(running.pop())
        slots = manager.append([job.sequence for job in running]).tolist()
        batch = [(job, job.tokens[-1:]) for job in running]
        arriving = []
        while self.swapped and manager.can_swap_in(self.swapped[-1].sequence):
            arriving.append(self.swapped.pop())  # its blocks arrive in this step, it computes in the next
            manager.swap_in(arriving[-1].sequence)
        while self.waiting and not self.swapped and manager.can_allocate(len(self.waiting[0].tokens)):
            job = self.waiting.popleft()
            job.sequence = manager.allocate(len(job.tokens))
            slots += manager.slot_mapping(job.sequence, 0, len(job.tokens)).tolist()
            batch.append((job, job.tokens))
        decision = manager.take_decision()
        lost = manager.complete(decision.ticket, execute(decision)).tolist()
        for jobs in (self.swapped, arriving):
            for job in [job for job in jobs if job.sequence in lost]:  # a transfer failed: start again
                jobs.remove(job)
                self.restart(job)
        sampled = forward(
            [token for _, new in batch for token in new],
            slots,
            [manager.block_table(job.sequence) for job, _ in batch],
            [len(new) for _, new in batch],
            [len(job.tokens) for job, _ in batch],
        )
        for (job, _), token in zip(batch, sampled, strict=True):
            job.tokens = [*job.tokens, token]
        done = [job for job, _ in batch if len(job.tokens) == job.end]
        for job in done:
            manager.free(job.sequence)
        self.running = [job for job, _ in batch if job not in done] + arriving
        return {job.name: job.tokens[job.prompt :] for job in done}

    def preempt(self, job: Job) -> None:
        """Swap a job out, or start it again later."""
        if self.manager.can_swap_out(job.sequence):
            self.manager.swap_out(job.sequence)
            self.swapped.append(job)
        else:
            self.restart(job)

    def restart(self, job: Job) -> None:
        """Free a job's blocks and compute all its tokens again later."""
        self.manager.free(job.sequence)
        self.waiting.appendleft(job)


TestManager = manager_machine(lambda config: BlockManager(**config.arguments())).TestCase
TestScheduler = scheduler_machine(
    lambda manager, _: MyScheduler(manager),
    add=lambda scheduler, request: scheduler.enqueue(request.request_id, request.prompt, request.max_tokens),
    step=lambda scheduler, simulation: scheduler.step(simulation.execute, simulation.forward),
).TestCase
TestManager.settings = TestScheduler.settings = settings(TestScheduler.settings, max_examples=25)

if __name__ == "__main__":
    unittest.main()
