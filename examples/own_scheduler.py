"""A scheduler of your own, with prefix caching and swap. Run it with `python examples/own_scheduler.py`.

First come, first served. When blocks run short, the newest sequence goes to the host until there is room again.
The "model" writes each token into its slot; at the end of a sequence every token is read back and compared.
"""

import random
from collections import deque

import torch

from blockyard import KVCache, KVLayout

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=1, dtype="float32")
LENGTH = 40  # tokens of a sequence when it ends


class MyScheduler:
    """Decides which sequences run: their handles are `running`, the newest last."""

    def __init__(self, manager, prompts):
        self.manager, self.waiting = manager, deque(prompts)
        self.running, self.swapped, self.tokens, self.swap_ins, self.hits = [], [], {}, 0, 0

    def schedule(self):
        """Return the tokens and the slots that this step computes."""
        manager, running = self.manager, self.running
        while not manager.can_append(running):
            self.swapped.append(running.pop())
            manager.swap_out(self.swapped[-1])
        tokens = [random.randrange(1000) for _ in running]
        slots = manager.append(running, token_ids=tokens).tolist()
        for sequence, token in zip(running, tokens, strict=True):
            self.tokens[sequence].append(token)
        while self.swapped and manager.can_swap_in(self.swapped[-1]):
            manager.swap_in(self.swapped[-1])
            running.append(self.swapped.pop())  # its blocks arrive in this step, it computes in the next
            self.swap_ins += 1
        while self.waiting and not self.swapped and manager.can_allocate(self.waiting[0]):
            prompt = self.waiting.popleft()
            running.append(manager.allocate(prompt))
            self.tokens[running[-1]] = list(prompt)
            cached = running[-1].cached_tokens  # these are in the cache and need no compute
            slots += manager.slot_mapping(running[-1], cached, len(prompt)).tolist()
            tokens += prompt[cached:]
            self.hits += cached
        return tokens, slots


prompts = [[7] * 9 + [random.randrange(1000) for _ in range(random.randrange(1, 20))] for _ in range(50)]
with KVCache(LAYOUT, device_blocks=32, host_blocks=256, prefix_caching=True) as cache:
    scheduler = MyScheduler(cache.manager, prompts)
    memory = cache.engine.tensors[1].view(2, -1)  # layer 1: keys and values by slot
    while scheduler.waiting or scheduler.running or scheduler.swapped:
        tokens, slots = scheduler.schedule()
        with cache.step():
            memory[:, slots] = torch.tensor(tokens, dtype=torch.float32)
        cache.manager.mark_computed(scheduler.running)  # other prompts may share the blocks that are full
        for sequence in [s for s in scheduler.running if len(scheduler.tokens[s]) == LENGTH]:
            found = memory[0, cache.manager.slot_mapping(sequence, 0, LENGTH)]
            assert found.tolist() == scheduler.tokens[sequence], "a token came back wrong"
            scheduler.running.remove(sequence)
            cache.manager.free(sequence)
    compared, swap_ins, hits = LENGTH * len(prompts), scheduler.swap_ins, scheduler.hits
    print(f"{len(prompts)} sequences, {swap_ins} swap ins, {hits} tokens cached, {compared} compared")
