"""Memory that was registered or mapped chunk by chunk, as the op library knows it."""

from __future__ import annotations

import torch

from blockyard.engine.ops.library import op_library


def declare_region(address: int, num_bytes: int, chunk_bytes: int) -> None:
    """Tell the op library where registrations or mappings end, so that no copy has to ask the driver.

    A piece of a batched copy must not leave its registration or mapping. The library asks the driver about memory that
    nobody has declared.

    Args:
        address: of the first byte; replaces what was declared to start there.
        num_bytes: 0 takes it back.
        chunk_bytes: bytes of each registration or mapping; the last one may be shorter. 0: memory of the device whose
            mappings nobody knows, and that stays as it is until it is taken back; the driver is asked once for each.
    """
    if op_library().loaded:
        torch.ops.blockyard.set_region(address, num_bytes, chunk_bytes)
