"""Tensors over memory that somebody else owns."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from blockyard.engine.elastic import dlpack
from blockyard.engine.elastic.dlpack import tensor_at
from blockyard.errors import InvalidArgumentError

CPU = torch.device("cpu")


class Owner:
    def __init__(self, size: int) -> None:
        self.bytes = np.arange(size, dtype=np.uint8)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data


def test_the_tensor_shares_the_owners_memory():
    owner = Owner(24)
    tensor = tensor_at(owner.address, 24, device=CPU, owner=owner)
    assert (tensor.dtype, tuple(tensor.shape), tensor.data_ptr()) == (torch.uint8, (24,), owner.address)
    tensor.view(torch.int32)[1] = -1
    assert owner.bytes.tolist()[:9] == [0, 1, 2, 3, 255, 255, 255, 255, 8]


def test_the_owner_lives_as_long_as_the_last_view():
    owner = Owner(24)
    gone = weakref.ref(owner)
    view = tensor_at(owner.address, 24, device=CPU, owner=owner).view(2, 12)[1]
    del owner
    gc.collect()
    assert gone() is not None
    assert view.tolist() == list(range(12, 24))
    del view
    gc.collect()
    assert gone() is None
    assert not dlpack._alive


def test_a_device_that_no_address_here_is_on_is_refused():
    with pytest.raises(InvalidArgumentError, match="device is meta"):
        tensor_at(1 << 20, 24, device=torch.device("meta"), owner=None)


def test_a_tensor_may_outlast_the_interpreter():
    program = (
        "import numpy, sys, torch\n"
        "from blockyard.engine.elastic.dlpack import tensor_at\n"
        "owner = numpy.zeros(8, dtype=numpy.uint8)\n"
        "torch.kept = tensor_at(owner.ctypes.data, 8, device=torch.device('cpu'), owner=owner)\n"
        "sys.kept = torch.kept\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0
