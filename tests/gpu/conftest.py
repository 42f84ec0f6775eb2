"""What every test on a CUDA device must leave as it was."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def current_stream() -> Iterator[None]:
    """Fail the test that leaves another stream current, and not those after it."""
    before = torch.cuda.current_stream()
    yield
    after = torch.cuda.current_stream()
    torch.cuda.set_stream(before)
    assert after == before
