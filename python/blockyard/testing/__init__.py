"""The test kit: property tests for your own scheduler or block manager, with the tools that test Blockyard's.

- `ReferenceManager`: a plain, slow model of `BlockManager`;
- `ReferencePrefixCache`, `EventReplay`: rules that every prefix cache and its events must obey, whatever it evicts;
- `SimulatedMemory`, `LateMemory`: three tiers of tokens in numpy arrays, to execute decisions on and read back from;
- `blockyard.testing.machines`: hypothesis state machines that drive a manager, its prefix cache or a scheduler
  (needs hypothesis);
- `blockyard.testing.machines.strategies`: hypothesis strategies for configurations and requests (needs hypothesis);
- `blockyard.testing.store_suite`, `blockyard.testing.faults`: tests and fault injection for external stores.

To test your own scheduler with pytest or unittest:

    from blockyard.testing.machines import scheduler_machine

    TestMyScheduler = scheduler_machine(
        make=lambda manager, config: MyScheduler(manager),
        add=lambda mine, request: mine.enqueue(request.request_id, request.prompt, request.max_tokens),
        step=lambda mine, simulation: mine.step(simulation.execute, simulation.forward),
    ).TestCase

Nothing here needs torch.

Example:
    >>> import numpy as np
    >>> from blockyard import BlockManager
    >>> from blockyard.testing import Config, SimulatedMemory
    >>> config = Config(block_size=4, device_blocks=8, host_blocks=8)
    >>> manager, memory = BlockManager(**config.arguments()), SimulatedMemory(config)
    >>> sequence = int(manager.allocate(counts=[6])[0])
    >>> memory.write(manager.slot_mapping(sequence, 0, 6), [11, 12, 13, 14, 15, 16])
    >>> _ = manager.complete(manager.take_decision().ticket)
    >>> manager.swap_out([sequence])
    >>> decision = manager.take_decision()
    >>> _ = memory.execute(decision)
    >>> _ = manager.complete(decision.ticket)
    >>> memory.read(manager.block_table(sequence), 6, tier=manager.tier(sequence))
    [11, 12, 13, 14, 15, 16]
"""

from blockyard.testing.interfaces import Config, ManagerLike, PrefixManagerLike, SchedulerLike
from blockyard.testing.memory import EMPTY, LOST, LateMemory, SimulatedMemory
from blockyard.testing.model import ReferenceManager
from blockyard.testing.prefix_model import EventReplay, ReferencePrefixCache

__all__ = [
    "EMPTY",
    "LOST",
    "Config",
    "EventReplay",
    "LateMemory",
    "ManagerLike",
    "PrefixManagerLike",
    "ReferenceManager",
    "ReferencePrefixCache",
    "SchedulerLike",
    "SimulatedMemory",
]
