"""The engine's asynchronous calls on a CUDA device: stores behind compute, compute behind loads, layer by layer."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from blockyard.engine.engine import CacheEngine
from blockyard.layout.kv import KINDS, KVLayout

BLOCKS = 48
LAYERS = 4
PAUSE = 100_000_000  # cycles


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[CacheEngine]:
    layout = KVLayout(request.param, LAYERS, block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    with CacheEngine(layout, device_blocks=BLOCKS, host_blocks=BLOCKS, device="cuda") as made:
        yield made


def some_rows(engine: CacheEngine, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, engine.layout.bytes_per_block), np.uint8)


def pairs(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.column_stack((sources, targets)).astype(np.int64)


EVERYTHING = np.arange(BLOCKS)


def test_a_store_waits_for_compute_that_was_queued_before(engine: CacheEngine):
    engine.run("swap_out", pairs(EVERYTHING, EVERYTHING))  # loading the kernels may take longer than the pause
    torch.cuda._sleep(PAUSE)
    for tensor in engine.tensors:
        tensor.view(torch.uint8).fill_(5)
    ticket = engine.submit("swap_out", pairs(EVERYTHING, EVERYTHING))
    assert not ticket.done
    assert ticket.wait().error is None
    assert bool((engine.memory.host_rows == 5).all())


def test_compute_goes_on_while_a_store_drains_and_does_not_change_what_is_stored(engine: CacheEngine):
    rows = some_rows(engine, BLOCKS)
    engine.write("device", EVERYTHING, rows)
    ticket = engine.submit("swap_out", pairs(EVERYTHING, EVERYTHING[::-1]))
    ticket.order_compute()
    for tensor in engine.tensors:
        tensor.zero_()
    ticket.wait()
    np.testing.assert_array_equal(engine.read("host", EVERYTHING[::-1].copy()), rows)


def test_compute_waits_for_each_layer_of_a_load(engine: CacheEngine):
    rows = some_rows(engine, BLOCKS)
    engine.write("host", EVERYTHING, rows)
    torch.cuda._sleep(PAUSE)
    ticket = engine.submit("swap_in", pairs(EVERYTHING, EVERYTHING), by_layer=True)
    seen = []
    for layer, tensor in enumerate(engine.tensors):
        ticket.order_compute(layer)
        seen.append(tensor.clone())
    ticket.wait()
    for copied, tensor in zip(seen, engine.tensors, strict=True):
        assert torch.equal(copied.view(torch.uint8), tensor.view(torch.uint8))
    np.testing.assert_array_equal(engine.read("device", EVERYTHING), rows)


def test_a_load_into_blocks_that_a_store_reads_comes_after_it(engine: CacheEngine):
    device, host = some_rows(engine, BLOCKS), some_rows(engine, BLOCKS, seed=1)
    half = BLOCKS // 2
    engine.write("device", EVERYTHING, device)
    engine.write("host", EVERYTHING, host)
    torch.cuda._sleep(PAUSE)
    store = engine.submit("swap_out", pairs(EVERYTHING[:half], EVERYTHING[:half]))
    load = engine.submit("swap_in", pairs(EVERYTHING[half:], EVERYTHING[:half]), after=[store])
    copied = engine.submit("copy", pairs(EVERYTHING[:half], EVERYTHING[half:]), after=[load])
    assert copied.wait().error is None
    np.testing.assert_array_equal(engine.read("host", EVERYTHING), np.concatenate((device[:half], host[half:])))
    np.testing.assert_array_equal(engine.read("device", EVERYTHING), np.tile(host[half:], (2, 1)))


def test_mappings_and_rows_may_be_changed_when_their_call_or_their_ticket_has_ended(engine: CacheEngine):
    rows = some_rows(engine, BLOCKS)
    engine.write("device", EVERYTHING, rows)
    torch.cuda._sleep(PAUSE)
    mapping = pairs(EVERYTHING[:1], EVERYTHING[:1])
    tickets = []
    for block in range(BLOCKS):
        mapping[:] = block, BLOCKS - 1 - block
        tickets.append(engine.submit("swap_out", mapping))
    assert all(ticket.wait().error is None for ticket in tickets)
    np.testing.assert_array_equal(engine.read("host", EVERYTHING[::-1].copy()), rows)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_rows_come_and_go_by_ticket(engine: CacheEngine, tier: str):
    rows = some_rows(engine, BLOCKS)
    written = engine.submit_write(tier, EVERYTHING, rows)
    read = engine.submit_read(tier, EVERYTHING, after=[written])
    np.testing.assert_array_equal(read.wait().rows, rows)


def test_synchronous_calls_come_after_open_transfers(engine: CacheEngine):
    rows = some_rows(engine, BLOCKS)
    engine.write("host", EVERYTHING, rows)
    torch.cuda._sleep(PAUSE)
    engine.submit("swap_in", pairs(EVERYTHING, EVERYTHING))
    np.testing.assert_array_equal(engine.read("device", EVERYTHING), rows)
    torch.cuda._sleep(PAUSE)
    engine.submit("swap_out", pairs(EVERYTHING, EVERYTHING[::-1]))
    np.testing.assert_array_equal(engine.read("host", EVERYTHING[::-1].copy()), rows)
