"""How long the state machines run."""

import os

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def steps() -> int:
    """Steps of one machine: BLOCKYARD_STEPS, or 100,000 under a thorough profile, or few."""
    thorough = settings().max_examples >= 1000
    return int(os.environ.get("BLOCKYARD_STEPS") or (100_000 if thorough else 2_000))
