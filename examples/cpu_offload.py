"""CPU offload below a block manager of your own. Run it with `python examples/cpu_offload.py [blocks a chunk] [seed]`.

A chunk's key is a hash of all tokens up to its end. After each prompt all bytes of the device are compared.
"""

import random
import sys
from hashlib import sha256
from itertools import takewhile

import numpy as np
import torch

from blockyard import KVLayout
from blockyard.engine import CacheEngine, unequal_pairs
from blockyard.offload import OffloadManager

K, SEED = map(int, sys.argv[1:] + ["4", "0"][len(sys.argv) - 1 :])
SIZE, BLOCKS, CHUNKS, SHARED = 16, 24, 20, 3  # SHARED: blocks that every prompt begins with; they stay on the device
LAYOUT = KVLayout("kv_first", num_layers=2, block_size=SIZE, num_kv_heads=1, head_size=1, dtype="float32")
engine = CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=CHUNKS * K)
offload, free, expected = OffloadManager(CHUNKS), list(range(SHARED, BLOCKS)), torch.zeros(2, BLOCKS * SIZE)


def serve(prompt):
    """Load what the host has of a prompt, compute the rest, store the full blocks; return how many were loaded."""
    device = np.array([*range(SHARED), *(free.pop() for _ in range(SHARED, -(-len(prompt) // SIZE)))])
    names = [sha256(np.array(prompt[:end]).tobytes()).digest() for end in range(SIZE, len(prompt) + 1, SIZE)]
    hits = [n for n, state in enumerate(offload.lookup(names), 1) if state == "hit"]
    ends = list(takewhile(hits.__contains__, range(K, len(names) + 1, K)))  # of whole chunks, in blocks
    ends += [n for n in hits if n // K == len(ends) and n % K][-1:]  # and of one that is stored in part
    found = max(SHARED, min(ends[-1] if ends else 0, (len(prompt) - 1) // SIZE))  # the last token is always computed
    if found > SHARED:
        keys = [names[end - 1] for end in ends[SHARED // K : -(-found // K)]]
        part = {"first": SHARED % K, "last": (found - 1) % K + 1}  # parts of the first chunk and of the last one
        pairs = unequal_pairs(device[SHARED:found], offload.prepare_load(keys), per_block=K, to="small", **part)
        engine.submit("swap_in", pairs).wait()
        offload.complete_load(keys)
    slots = (device[:, None] * SIZE + np.arange(SIZE)).ravel()[: len(prompt)]
    expected[:, slots] = torch.tensor(prompt, dtype=torch.float32)
    for layer in engine.tensors:
        layer.view(2, -1)[:, slots[found * SIZE :]] = expected[:, slots[found * SIZE :]]
    store = offload.prepare_store([names[end - 1] for end in [*range(K, len(names), K), len(names)]])
    for key, chunk in zip(store.keys, store.chunks, strict=True):
        blocks = device[names.index(key) // K * K : names.index(key) + 1]
        pairs = unequal_pairs(blocks, chunk[None], per_block=K, first=0, last=len(blocks), to="large")
        engine.submit("swap_out", pairs).wait()
    offload.complete_store(store.keys)
    free.extend(device[SHARED:].tolist())
    return found - SHARED


rng, chats, loaded = random.Random(SEED), [[0] * SHARED * SIZE] * 4, []
for turn, n in enumerate(rng.choices(range(4), k=40)):  # each turn adds to one of the chats, or begins it again
    more = rng.choices(range(1000), k=rng.randint(1, 60))
    chats[n] = (chats[n] if len(chats[n]) < 240 else chats[n][: SHARED * SIZE]) + more
    loaded.append(serve(chats[n]))
    assert all(torch.equal(layer.view(2, -1), expected) for layer in engine.tensors), f"wrong bytes in turn {turn}"
print(f"{sum(loaded)} blocks loaded, {offload.num_evicted} chunks evicted, all bytes compared {len(loaded)} times")
