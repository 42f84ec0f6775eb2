"""Random programs over whole caches, with every byte that compute reads compared with a plain model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from cache_rig import Config, random_config
from hypothesis import settings
from random_cache_programs import Program, failure, on_device, random_program, shrink

LENGTH = 300
PARTS = 10  # a test may take ten minutes


@pytest.fixture(scope="module")
def programs() -> int:
    """How many to run: as many as have BLOCKYARD_OPERATIONS lines, or 1,000,000 under a thorough profile, or few."""
    thorough = settings().max_examples >= 1000
    return int(os.environ.get("BLOCKYARD_OPERATIONS") or (1_000_000 if thorough else 24_000)) // LENGTH


def no_byte_is_wrong(programs: Iterable[Program]) -> None:
    for program in programs:
        error = failure(program)
        if error is not None:
            small = shrink(program)
            raise AssertionError(f"a program fails, and so does\n{small}") from (failure(small) or error)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_features_work_together_no_byte_is_wrong_and_no_block_is_lost(programs: int, part: int):
    no_byte_is_wrong(random_program(seed, LENGTH) for seed in range(part, programs, PARTS))


@pytest.mark.parametrize("part", range(PARTS))
def test_points_on_the_host_and_in_stores_have_their_bytes(programs: int, part: int):
    """Of models with windows, states and drafters: whole, late, lost or partial, and after restarts."""
    configs = ((seed, config_with_points(seed)) for seed in range(part, programs, PARTS))
    no_byte_is_wrong(random_program(seed, LENGTH, config) for seed, config in configs)


def config_with_points(seed: int) -> Config:
    random = Random(seed)
    while True:
        config = random_config(random)
        if config.groups != "full" and config.store:
            return config


def test_after_real_signals_no_byte_is_wrong_and_nothing_is_stuck(programs: int):
    for seed in range(programs // 8):
        config = replace(random_config(Random(seed)), interrupts=0.5, signals=True)
        error = failure(on_device(random_program(seed, LENGTH, config), "cpu"))
        if error is not None:
            raise AssertionError(f"the program of seed {seed} fails") from error


@pytest.mark.parametrize("chunk", [0, 4096], ids=["simulated memory", "pages"])
def test_no_byte_is_wrong_on_the_threads_of_a_cpu(programs: int, chunk: int):
    """With pages, each block fills whole pages, and a cache that shrinks returns them."""
    for seed in range(programs // 8):
        error = failure(on_device(random_program(seed, LENGTH), "cpu", chunk))
        if error is not None:
            raise AssertionError(f"the program of seed {seed} fails") from error
