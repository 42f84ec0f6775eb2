"""Copies in plain torch calls: parts that fit the memory they may take (the bytes are compared in the ops' tests)."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

from blockyard.engine.ops import fallback
from blockyard.errors import CaptureError


def test_small_parts_add_up_to_the_whole():
    src, dst = torch.arange(60, dtype=torch.uint8).view(12, 5), torch.zeros((12, 5), dtype=torch.uint8)
    order = torch.from_numpy(np.random.default_rng(0).permutation(12))
    with mock.patch.object(fallback, "_PART_BYTES", 16):
        fallback.BY_TORCH.swap([src], [dst], torch.stack((order, torch.arange(12)), dim=1))
        assert torch.equal(dst, src[order])
        fallback.BY_TORCH.exchange([dst], torch.tensor([[0, 11], [-1, -1], [3, 4], [1, 7]]))
    expected = src[order]
    expected[[0, 11, 3, 4, 1, 7]] = expected[[11, 0, 4, 3, 7, 1]]
    assert torch.equal(dst, expected)


def test_rows_without_bytes_are_nothing_to_move():
    empty = torch.zeros((4, 0), dtype=torch.uint8)
    fallback.BY_TORCH.move([empty], torch.tensor([[0, 1]]))
    fallback.BY_TORCH.exchange([empty], torch.tensor([[0, 1]]))


def test_a_graph_cannot_hold_a_mapping_that_is_copied_to_the_device(monkeypatch: pytest.MonkeyPatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    cache = torch.zeros((4, 8), dtype=torch.uint8)
    fallback.BY_TORCH.copy([cache], torch.tensor([[0, 1]]))
    on_device = cache.as_subclass(OnDevice)
    for op in (fallback.BY_TORCH.copy, fallback.BY_TORCH.move, fallback.BY_TORCH.exchange):
        with pytest.raises(CaptureError, match="without the op library"):
            op([on_device], torch.tensor([[0, 1]]))
