"""Captures CUDA graphs so that a test that fails in one leaves nothing behind for the next."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is queued inside.

    The helper adds a node first: torch warns about an empty graph when the capture ends, and if warnings are
    errors, the capture's stream then stays current.
    """
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")  # in the graph's own memory
            yield graph
    finally:
        torch.cuda.set_stream(before)
