"""Cache groups whose tensors differ: one row holds the bytes of all."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from simulated_device import SimulatedStreams

from blockyard import AllocStatus, BlockManager, CacheGroup
from blockyard.engine.engine import CacheEngine
from blockyard.errors import LayoutError
from blockyard.executor.executor import StepExecutor
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KVLayout

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
    with pytest.raises(LayoutError, match="has the groups"):
        BOTH.views({"full": tensors(3, 3)["full"]})
    for groups in [(), (("full", FULL), ("full", STATE))]:
        with pytest.raises(LayoutError, match="must be at least one, without repeats"):
            GroupedLayout(groups)
    with pytest.raises(LayoutError, match="wanted uint8"):
        BOTH.row_views(torch.zeros(3, 7, dtype=torch.uint8))


def test_fingerprints_tell_groups_apart():
    others = [(("full", FULL),), (("state", STATE), ("full", FULL)), (("full", FULL), ("other", STATE))]
    assert BOTH.fingerprint() not in {GroupedLayout(groups).fingerprint() for groups in others}


def test_tensors_may_stand_in_one_list_group_after_group():
    drawn = tensors(3, 3)
    flat = [*drawn["full"], *drawn["state"]]
    assert all(one is other for one, other in zip(BOTH.by_group(flat)["full"], drawn["full"], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(BOTH.views(flat), BOTH.views(drawn), strict=True))
    assert BOTH.tensor_shapes(3) == [(tuple(tensor.shape), str(tensor.dtype)[6:]) for tensor in flat]
    assert BOTH.num_layers == 3
    assert BOTH.view_layers == [0, 0, 1, 1, 2]
    with pytest.raises(LayoutError, match=r"got 2 tensors, the groups have \{'full': 2, 'state': 1\}"):
        BOTH.by_group(flat[:2])


# ---- with a manager of groups, end to end ----

SIZE = 4
GROUPS = [CacheGroup.full_attention(), CacheGroup.sliding_window(6)]
LAYERS = GroupedLayout(
    (
        ("full", KVLayout("kv_first", 2, SIZE, num_kv_heads=1, head_size=1, dtype="int64")),
        ("window", KVLayout("blocks tokens dim", 1, SIZE, num_kv_heads=1, head_size=3, dtype="int32")),
    )
)


class Served:
    """Sequences of a manager of groups over the groups' own tensors: a token's cells say whose it is and where."""

    def __init__(self, seed: int, *, by_layer: bool) -> None:
        self.manager = BlockManager(block_size=SIZE, device_blocks=24, host_blocks=20, watermark=0.0, groups=GROUPS)
        streams = SimulatedStreams(seed) if seed % 2 else None
        self.engine = CacheEngine(LAYERS, device_blocks=24, host_blocks=20, streams=streams)
        self.executor = StepExecutor(self.engine)
        self.names: dict[int, list[int]] = {}  # sequence -> whose tokens it has
        self.by_layer = by_layer
        self.moved = 0

    def cells(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Group, layer, and the cells of every slot `[tokens, ...]`."""
        tensors = LAYERS.by_group(self.engine.tensors)
        for group, (name, _) in enumerate(LAYERS.groups):
            for tensor in tensors[name]:
                cells = tensor.numpy()
                flat = cells.reshape(2, -1) if group == 0 else cells.reshape(-1, 3).T
                yield group, len(tensors[name]), flat

    def write(self, sequence: int, first: int) -> None:
        last = self.manager.num_tokens(sequence)
        for group, _, cells in self.cells():
            slots = self.manager.slot_mapping(sequence, first, last, group=group)
            tokens = np.array(self.names[sequence][first:last])
            cells[:, slots[slots >= SIZE]] = tokens[slots >= SIZE] * 8 + group

    def step(self) -> None:
        decision = self.manager.take_decision()
        self.executor.submit(decision, by_layer=self.by_layer)
        for layer in range(LAYERS.num_layers if self.by_layer else 0):
            self.executor.wait_for_layer(decision.ticket, layer)
        assert self.executor.wait(decision.ticket).lost == ()
        self.moved += len(decision)
        self.manager.complete(decision.ticket)
        self.manager.check()

    def check(self) -> None:
        for sequence, tokens in self.names.items():
            if self.manager.tier(sequence) != "device":
                continue
            for group, _, cells in self.cells():
                table = self.manager.block_table(sequence, group)
                at = np.arange(len(tokens))
                at = at[table[at // SIZE] > 0]
                slots = table[at // SIZE].astype(np.int64) * SIZE + at % SIZE
                assert (cells[:, slots] == np.array(tokens)[at] * 8 + group).all()

    def turn(self, random: np.random.Generator) -> None:
        sequence = int(random.choice(list(self.names)))
        if self.manager.tier(sequence) == "host":
            if self.manager.can_swap_in([sequence]).status == AllocStatus.OK:
                self.manager.swap_in([sequence])
        elif random.random() < 0.3 and self.manager.can_swap_out([sequence]):
            self.manager.swap_out([sequence])
        elif random.random() < 0.2 and len(self.names) < 5:
            child = self.manager.fork(sequence)
            self.names[int(child)] = list(self.names[sequence])
        elif self.manager.can_append([sequence]):
            self.manager.append([sequence])
            self.names[sequence].append(int(random.integers(1_000_000)))
            self.step()
            self.write(sequence, len(self.names[sequence]) - 1)
            return
        self.step()


@pytest.mark.parametrize("seed", range(6))
def test_each_groups_cells_follow_their_sequences_through_swaps_and_copies(seed: int):
    random = np.random.default_rng(seed)
    served = Served(seed, by_layer=seed % 3 == 0)
    for length in (11, 6):
        (sequence,) = served.manager.allocate(counts=[length])
        served.names[int(sequence)] = random.integers(1_000_000, size=length).tolist()
        served.step()
        served.write(int(sequence), 0)
    for _ in range(80):
        served.turn(random)
        served.check()
    assert served.moved > 30
    served.engine.close()
