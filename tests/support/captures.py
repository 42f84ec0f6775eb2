"""Captures CUDA graphs so that a test that fails in one leaves nothing behind for the next."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is queued inside.

    A node of its own comes first: torch warns of an empty graph while it ends the capture, and where warnings are
    errors it then leaves the capture's stream current.
    """
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")  # in the graph's own memory
            yield graph
    finally:
        torch.cuda.set_stream(before)
