"""Declares memory that was registered or mapped chunk by chunk to the op library."""

from __future__ import annotations

import torch

from blockyard.engine.ops.library import op_library


def declare_region(address: int, num_bytes: int, chunk_bytes: int) -> None:
    """Declare where registrations or mappings end, so that copies need not ask the driver.

    A piece of a batched copy must not cross the end of its registration or mapping. The library asks the driver about
    undeclared memory.

    Args:
        address: address of the first byte; replaces an earlier declaration that starts there.
        num_bytes: size; 0 removes the declaration.
        chunk_bytes: bytes per registration or mapping; the last may be shorter. 0: device memory with unknown mappings
            that do not change until removed; the driver is asked once for each.
    """
    if op_library().loaded:
        torch.ops.blockyard.set_region(address, num_bytes, chunk_bytes)
