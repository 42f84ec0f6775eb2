"""What the tests of engines share."""

from pathlib import Path
from typing import Any

import pytest
from vllm_engine import serve


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="session")
def alone(folder: Path) -> Any:
    """What vLLM says without us."""
    found = serve(folder)
    assert found["counters"]["vllm:num_preemptions"] > 0
    return found
