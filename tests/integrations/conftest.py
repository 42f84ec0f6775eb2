"""Fixtures of the engine adapters' tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_modules
from vllm_sides import Engine

from blockyard.integrations.sampling import SamplingParams


@pytest.fixture(params=vllm_modules.KINDS)
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with vllm_modules.loaded(request.param) as modules:
        yield modules


@pytest.fixture
def engine(vllm: SimpleNamespace, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(vllm, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def work():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(5, 26)) for _ in range(8)]
    params = [
        SamplingParams(max_tokens=int(rng.integers(10, 24)), temperature=0.8 * (i % 4 > 0), seed=i, n=1 + i % 3)
        for i in range(8)
    ]
    return prompts, params
