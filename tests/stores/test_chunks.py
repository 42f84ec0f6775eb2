"""Chunks of an engine's host memory between a store and rows that are used again."""

from pathlib import Path

import numpy as np
import pytest

from blockyard._core import BoundViews, Completion
from blockyard.errors import InvalidArgumentError
from blockyard.stores import open_store
from blockyard.stores.adapters import chunks as module
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards, TokenOrder

WIDTHS = (8192, 8192)


def host(seed: int, count: int = 6) -> list[np.ndarray]:
    """The host memory of two workers."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (count, width), dtype=np.uint8) for width in WIDTHS]


def test_chunks_of_all_workers_come_back_and_no_other_chunk_changes():
    before, after = host(0), host(1)
    rows = ChunkRows(before).read(np.array([4, 0, 3], np.int32))
    expected = [part.copy() for part in after]
    for chunk, source in ((5, 4), (1, 3)):
        for part, given in zip(expected, before, strict=True):
            part[chunk] = given[source]
    to = ChunkRows(after)
    to.write(np.array([5, 1]), rows, np.array([0, 2]))
    to.write(np.array([], np.int64), rows, np.array([], np.int64))
    assert all(np.array_equal(*pair) for pair in zip(after, expected, strict=True))


def test_all_chunks_of_a_job_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    class Counted:
        def __init__(self, *views: list[np.ndarray]) -> None:
            self.views = BoundViews(*views)

        def run(self, mapping: object, *, num_threads: int) -> None:
            calls.append(len(mapping))  # type: ignore[arg-type]
            self.views.run(mapping, num_threads=num_threads)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "BoundViews", Counted)
    staged = ChunkRows(host(0))
    staged.write(np.arange(6), staged.read(np.arange(6)), np.arange(6))
    assert calls == [6, 6]


@pytest.mark.parametrize(("reason", "is_used_again"), [("", True), ("absent", True), ("timeout", False)])
def test_rows_are_used_again_unless_the_store_may_still_write_them(reason: str, is_used_again: bool):
    staged = ChunkRows(host(0))
    rows = staged.take(2)
    staged.give(rows, Completion(1, np.array([True, not reason]), rows, ["", reason]))
    assert np.shares_memory(staged.take(2), rows) == is_used_again


def test_a_file_store_reads_into_the_rows_in_place(tmp_path: Path):
    staged, keys = ChunkRows(host(0)), [bytes([number]) * 32 for number in range(6)]
    with open_store(f"file://{tmp_path}/one?size=1MiB", bytes_per_block=sum(WIDTHS), use="prefix") as store:
        given = staged.read(np.arange(6))
        assert store.wait(store.submit_put(keys, given)).ok.all()
        rows = staged.take(6)
        rows[:] = 0
        ticket = store.submit_get(keys, rows)
        while ticket not in store.poll():
            pass
        assert np.array_equal(rows, given), "the bytes are there before the batch is collected"
        assert store.wait(ticket).ok.all()


def test_rows_have_each_group_of_tokens_of_all_layers_side_by_side_with_the_heads_in_order():
    blocks, groups, layers, heads, runs, size = 2, 4, 3, 4, 5, 6
    # Of two workers, two heads each: within a page, a part with five runs of each group, and a part with one.
    shape = (6, blocks, layers, heads, groups, runs + 1, size)
    whole = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)

    def page(of_heads: np.ndarray) -> np.ndarray:
        """Return chunks with the groups' runs in turns, as a worker has them."""
        lead = (*of_heads.shape[:4], -1)
        turns = of_heads[:, :, :, :, :, :runs].swapaxes(4, 5).reshape(lead)
        return np.concatenate((turns, of_heads[:, :, :, :, :, runs].reshape(lead)), axis=4).reshape(6, -1)

    parts = [page(whole[:, :, :, first : first + 2]) for first in (0, 2)]
    order = TokenOrder(groups, layers, 2, ((runs, size), (1, size)))
    shards = HeadShards(2 * (runs + 1) * size, (0, 1), order)
    assert order.block_bytes == parts[0].shape[1] // blocks
    rows = ChunkRows(parts, shards).read(np.array([4, 0, 3]))
    wanted = whole.transpose(0, 1, 4, 2, 3, 5, 6).reshape(6, -1)
    assert np.array_equal(rows, wanted[[4, 0, 3]])
    after = [np.zeros_like(part) for part in parts]
    ChunkRows(after, shards).write(np.array([5, 1]), rows, np.array([0, 2]))
    for part, given in zip(after, parts, strict=True):
        assert np.array_equal(part[[5, 1]], given[[4, 3]])
        assert not part[[0, 2, 3, 4]].any()
    with pytest.raises(InvalidArgumentError, match="parts have 432 bytes, must be blocks of 864 bytes"):
        ChunkRows([part[:, :432] for part in parts], shards)
