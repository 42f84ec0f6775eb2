"""Memory of a CPU that goes back to the system."""

import gc
import mmap
import weakref

import pytest
import torch
from resident import resident_bytes

from blockyard.engine.elastic.host import HostMemory
from blockyard.errors import InvalidArgumentError, OutOfMemoryError

PAGE = mmap.PAGESIZE
# Far above what the interpreter takes or frees of its own accord between two looks.
MANY = 32 << 20
SLACK = 2 << 20


def test_what_is_released_leaves_the_resident_set_and_reads_as_zeros():
    memory = HostMemory([2 * MANY])
    before = resident_bytes()
    memory.tensor.fill_(7)
    assert abs(resident_bytes() - before - 2 * MANY) < SLACK
    memory.release(MANY // PAGE, 2 * MANY // PAGE)
    assert abs(resident_bytes() - before - MANY) < SLACK
    assert memory.tensor[:MANY].min() == memory.tensor[:MANY].max() == 7
    assert not memory.tensor[MANY:].any()


def test_each_tensor_begins_with_a_chunk():
    memory = HostMemory([PAGE + 1, 2 * PAGE, PAGE], chunk_bytes=4 * PAGE)
    assert memory.chunk == 4 * PAGE
    assert memory.tensor.shape == (12 * PAGE,)
    assert memory.tensor.data_ptr() % PAGE == 0


@pytest.mark.parametrize("chunk", [0, -PAGE, PAGE // 2, PAGE + 1])
def test_a_chunk_that_is_not_of_pages_is_refused(chunk: int):
    with pytest.raises(InvalidArgumentError, match=f"chunk_bytes is {chunk}, must be a multiple of {PAGE}"):
        HostMemory([PAGE], chunk_bytes=chunk)


def test_more_addresses_than_there_are_are_refused():
    with pytest.raises(OutOfMemoryError, match=r"cannot reserve \d+ bytes of addresses") as caught:
        HostMemory([1 << 60])
    assert caught.value.wanted == 1 << 60


def test_the_mapping_lasts_as_long_as_a_tensor_over_it():
    memory = HostMemory([PAGE, PAGE])
    view, mapping = memory.tensor[PAGE:].view(torch.float32), weakref.ref(memory._map)
    view.fill_(2.5)
    del memory
    gc.collect()
    assert mapping() is not None
    assert view.eq(2.5).all()
    del view
    gc.collect()
    assert mapping() is None
