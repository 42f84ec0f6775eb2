"""The copy engine's memory: shapes, views that belong together, and what does not fit."""

import numpy as np
import pytest
import torch

from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError, MappingError
from blockyard.layout import KINDS, KVLayout
from blockyard.transfer.caches import Caches, as_tensor


@pytest.fixture(params=KINDS)
def caches(request: pytest.FixtureRequest) -> Caches:
    layout = KVLayout(request.param, num_layers=2, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    return Caches(layout, num_device_blocks=5, num_host_blocks=3)


def test_views_of_both_tiers_and_of_rows_go_together(caches: Caches):
    width = caches.layout.bytes_per_block
    device, host = caches._views["device"], caches._views["host"]
    assert [view.shape[1] for view in device] == [view.shape[1] for view in host]
    assert sum(view.shape[1] for view in device) == width
    for tier, rows in (("device", torch.zeros((4, width), dtype=torch.uint8)), ("host", caches._staging(2))):
        cache, pieces = caches._between(tier, rows)
        assert [view.shape[1] for view in cache] == [view.shape[1] for view in pieces]
        assert {len(view) for view in pieces} == {len(rows)}


def test_traffic_adds_up_by_tiers(caches: Caches):
    plan = caches._join("device", "host", np.array([[0, 1], [4, 2]]))
    caches._count("device", "host", plan)
    caches._count("device", "host", plan)
    assert caches.counters == {("device", "host"): (4, 4 * caches.layout.bytes_per_block)}
    assert caches.bytes_moved == 4 * caches.layout.bytes_per_block


def test_what_does_not_fit_is_refused(caches: Caches):
    with pytest.raises(MappingError):
        caches._join("device", "host", np.array([[0, 3]]))
    with pytest.raises(LayoutError, match="wanted uint8"):
        caches._check_rows("host", np.array([0]), np.zeros((1, 1), np.uint8))
    with pytest.raises(InvalidArgumentError, match="'disk' is not one of device, host"):
        caches.num_blocks("disk")


def test_views_are_known_by_their_layer_where_tensors_follow_the_layers(caches: Caches):
    count = len(caches._views["device"])
    assert caches._places_by_layer() == [list(range(count // 2)), list(range(count // 2, count))]
    both = caches.device_caches[0]
    caches.device_caches = [both, both]
    assert caches._places_by_layer() == []
    caches.device_caches = [both]
    assert caches._places_by_layer() == []


def test_memory_that_was_let_go_is_used_no_more(caches: Caches):
    caches._release()
    assert caches.device_caches == []
    assert caches.host_cache.numel() == 0
    with pytest.raises(BlockyardError, match="closed"):
        caches.num_blocks("host")


def test_read_only_arrays_become_tensors_by_a_copy():
    array = np.arange(3)
    assert as_tensor(array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert as_tensor(array).data_ptr() != array.ctypes.data


def test_tensors_that_are_there_already_are_used_and_must_fit(caches: Caches):
    given = [tensor.clone() for tensor in caches.device_caches]
    again = Caches(caches.layout, num_device_blocks=5, num_host_blocks=3, device_caches=given)
    assert [tensor.data_ptr() for tensor in again.device_caches] == [tensor.data_ptr() for tensor in given]
    with pytest.raises(LayoutError, match="hold 5 blocks on cpu, wanted 4"):
        Caches(caches.layout, num_device_blocks=4, num_host_blocks=3, device_caches=given)
    with pytest.raises(LayoutError, match="1 tensors were given"):
        Caches(caches.layout, num_device_blocks=5, num_host_blocks=3, device_caches=given[:1])
