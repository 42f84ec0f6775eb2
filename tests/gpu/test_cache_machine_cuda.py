"""Random programs over whole caches on a CUDA device, whose compute may still run when the next calls are made."""

from __future__ import annotations

import os

import pytest
from random_cache_programs import failure, on_device, random_program

LENGTH, PARTS = 300, 8
CHUNK = 2 << 20  # bytes that the driver maps at once


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("memory", ["simulated", "elastic"])
def test_no_byte_is_wrong_on_the_streams_of_a_device(part: int, memory: str):
    """With elastic memory, each block is mapped separately, and a cache that shrinks unmaps it."""
    programs = int(os.environ.get("BLOCKYARD_OPERATIONS") or 36_000) // LENGTH
    for seed in range(part, programs, PARTS):
        error = failure(on_device(random_program(seed, LENGTH), "cuda", CHUNK if memory == "elastic" else 0))
        if error is not None:
            raise AssertionError(f"the program of seed {seed} fails") from error
