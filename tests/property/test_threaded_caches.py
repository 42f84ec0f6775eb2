"""Random programs over caches whose stores are real, with threads: two caches over one storage, each with its weights.

The storage is slow, fails, loses, damages and hangs. `forget` in one cache takes the other's blocks away, until that
has the new weights too. No byte of other weights may be read.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest
from cache_rig import Config, random_config
from random_cache_programs import failure, random_program, run

from blockyard.stores.threaded.keyed_blocks import KeyedBlocks

LENGTH = 300
PROGRAMS = int(os.environ.get("BLOCKYARD_OPERATIONS") or 12_000) // LENGTH


def config_of(seed: int) -> Config:
    """Draw caches that all have a prefix store."""
    random = Random(seed)
    config = random_config(random)
    return replace(
        config,
        groups="full",
        prefix=random.choice(("device", "host")),
        store=random.choice(("through", "through", "back", "second_use")),
        jobs="",
        caches=1 if config.scheduler else random.choice((1, 2, 2)),
        host=min(config.host, 24),
        external=random.choice((0, 4, 12)),
        threads=True,
        faulty_stores=random.random() < 0.6,
        interrupts=random.choice((0.0, 0.0, 0.2)),
    )


@pytest.mark.parametrize("part", range(2))
def test_no_byte_is_wrong_whatever_real_stores_do(part: int):
    for seed in range(part, PROGRAMS, 2):
        try:
            run(random_program(seed, LENGTH, config_of(seed)))
        except BaseException as error:  # noqa: PERF203 (which seed it was)
            raise AssertionError(f"the program of seed {seed} fails: {error}") from error


def test_blocks_of_other_weights_are_noticed(monkeypatch: pytest.MonkeyPatch):
    names_of = KeyedBlocks.names_of
    monkeypatch.setattr(KeyedBlocks, "names_of", lambda self, keys, _: names_of(self, keys, b""))
    programs = (random_program(seed, LENGTH, config_of(seed)) for seed in range(5, 45))
    assert any(isinstance(failure(program), AssertionError) for program in programs)
