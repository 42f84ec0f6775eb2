"""Cache groups whose tensors differ: one row holds the bytes of all."""

import numpy as np
import pytest
import torch

from blockyard.errors import LayoutError
from blockyard.grouped import GroupedLayout
from blockyard.layout import KVLayout

FULL = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=3, head_size=8, dtype="float16")
STATE = KVLayout("blocks tokens dim", num_layers=1, block_size=4, num_kv_heads=1, head_size=5, dtype="float8_e4m3fn")
BOTH = GroupedLayout((("full", FULL), ("state", STATE)))


def tensors(blocks: int, state_blocks: int) -> dict[str, list[torch.Tensor]]:
    def one(layout: KVLayout, count: int) -> torch.Tensor:
        shape = layout.tensor_shape(count)
        memory = torch.randint(0, 256, (int(np.prod(shape)) * layout.itemsize,), dtype=torch.uint8)
        return memory.view(getattr(torch, layout.dtype)).view(shape)

    return {"full": [one(FULL, blocks) for _ in range(2)], "state": [one(STATE, state_blocks)]}


def test_a_row_holds_the_bytes_of_each_group_in_turn():
    drawn = tensors(3, 3)
    views = BOTH.views(drawn)
    expected = [*FULL.views(drawn["full"]), *STATE.views(drawn["state"])]
    assert all(torch.equal(one, other) for one, other in zip(views, expected, strict=True))
    assert [view.shape[1] for view in views] == BOTH.piece_sizes
    assert BOTH.bytes_per_block == FULL.bytes_per_block + STATE.bytes_per_block
    rows = torch.randint(0, 256, (3, BOTH.bytes_per_block), dtype=torch.uint8)
    assert torch.equal(torch.cat(BOTH.row_views(rows), 1), rows)


def test_groups_that_do_not_go_together_are_refused():
    with pytest.raises(LayoutError, match=r"different numbers of blocks: \{'full': 3, 'state': 4\}"):
        BOTH.views(tensors(3, 4))
    with pytest.raises(LayoutError, match="of the groups"):
        BOTH.views({"full": tensors(3, 3)["full"]})
    for groups in [(), (("full", FULL), ("full", STATE))]:
        with pytest.raises(LayoutError, match="wanted at least one, each once"):
            GroupedLayout(groups)
    with pytest.raises(LayoutError, match="wanted uint8"):
        BOTH.row_views(torch.zeros(3, 7, dtype=torch.uint8))


def test_fingerprints_tell_groups_apart():
    others = [(("full", FULL),), (("state", STATE), ("full", FULL)), (("full", FULL), ("other", STATE))]
    assert BOTH.fingerprint() not in {GroupedLayout(groups).fingerprint() for groups in others}
