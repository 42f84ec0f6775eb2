"""Copies in plain torch calls: parts that fit the memory they may take (the bytes are compared in the ops' tests)."""

from unittest import mock

import numpy as np
import torch

from blockyard.transfer import fallback


def test_small_parts_add_up_to_the_whole():
    src, dst = torch.arange(60, dtype=torch.uint8).view(12, 5), torch.zeros((12, 5), dtype=torch.uint8)
    order = torch.from_numpy(np.random.default_rng(0).permutation(12))
    with mock.patch.object(fallback, "_PART_BYTES", 16):
        fallback.swap([src], [dst], torch.stack((order, torch.arange(12)), dim=1))
        assert torch.equal(dst, src[order])
        fallback.exchange([dst], torch.tensor([[0, 11], [-1, -1], [3, 4], [1, 7]]))
    expected = src[order]
    expected[[0, 11, 3, 4, 1, 7]] = expected[[11, 0, 4, 3, 7, 1]]
    assert torch.equal(dst, expected)


def test_rows_without_bytes_are_nothing_to_move():
    empty = torch.zeros((4, 0), dtype=torch.uint8)
    fallback.move([empty], torch.tensor([[0, 1]]))
    fallback.exchange([empty], torch.tensor([[0, 1]]))
