"""vLLM's scheduler, which counts the tokens of its steps, and a call by which another process asks for counts."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore


class CountingScheduler(Scheduler):
    computed = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = super().schedule(*args, **kwargs)
        self.computed += step.total_num_scheduled_tokens
        return step


def counts(core: Any) -> dict[str, Any]:
    """Return the tokens computed, the external store's counts, and whether transfers or the store have work to do."""
    connector = core.scheduler.connector
    tier = connector and getattr(connector.connector_scheduler.manager, "external", None)
    names = ("loaded", "missed", "written", "not_written")
    return {
        "computed": core.scheduler.computed,
        "external": {name: getattr(tier.counts, name) for name in names} if tier else {},
        "is_storing": tier is not None and tier.is_busy,
        "is_transferring": connector is not None and connector.has_pending_push_work(),
    }


EngineCore.counts = counts  # type: ignore[attr-defined] (`call_utility` calls methods by name)
