"""A scheduler over simulated memory, with a model that needs neither torch nor weights."""

from blockyard import BlockManager, Pairs
from blockyard.scheduler import Finished, Request, Scheduler, Step
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines.scheduler import draw_tokens, reference_tokens

BLOCK = 4


def ran(step: Step) -> list[str]:
    """Return what runs in a step: `name` for a prompt or a part of it, and `name:index` for one token of a sequence."""
    names = []
    for row in range(step.rows):
        name, index = step.owner(row)
        names.append(f"{name}:{index}" if row < step.decodes else name)
    return names


class Engine:
    """A scheduler, its memory, and a model that draws each token from all tokens before it."""

    def __init__(
        self,
        device: int,
        host: int = 0,
        external: int = 0,
        *,
        watermark: float = 0.0,
        prefix_caching: bool = False,
        **options: object,
    ) -> None:
        config = Config(BLOCK, device, host, external, watermark)
        self.manager = BlockManager(**config.arguments(), prefix_caching=prefix_caching)
        self.scheduler = Scheduler(self.manager, **options)  # type: ignore[arg-type]
        self.memory = SimulatedMemory(config)
        self.requests: dict[str, Request] = {}
        self.done: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.refused: dict[str, Finished] = {}
        self.kinds: list[list[str]] = []

    def add(self, name: str, prompt: int, max_tokens: int, **fields: object) -> Request:
        request = Request(name, [(ord(name[0]) + i) % 97 for i in range(prompt)], max_tokens, **fields)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def finish(self, step: Step, lost: list[Pairs] | None = None) -> None:
        self.memory.execute(step.decision)
        for pairs in lost or []:
            self.memory.lose(pairs)
        self.scheduler.complete(step.decision.ticket, lost or [])
        for finished in self.scheduler.update(step, draw_tokens(step, self.memory, requests=self.requests)):
            if finished.error is None:
                self.done[finished.request.request_id] = finished.outputs
            else:
                self.refused[finished.request.request_id] = finished
        self.manager.check()

    def step(self) -> list[str]:
        """Run a step. Returns what ran, as `name` for a prompt and `name:index` for one token."""
        step = self.scheduler.schedule()
        self.kinds.append([kind for kind, _ in step.decision.transfers()])
        names = ran(step)
        self.finish(step)
        return names

    def run(self, *requests: Request) -> None:
        """Run to the end and compare every token."""
        for _ in range(500):
            if not self.scheduler.num_unfinished:
                break
            self.step()
        assert self.done == {request.request_id: reference_tokens(request) for request in requests}
        for tier in ("device", "host", "external"):
            assert self.manager.pool(tier).num_free == self.manager.pool(tier).num_blocks
        assert self.manager.stats().sequences == 0
