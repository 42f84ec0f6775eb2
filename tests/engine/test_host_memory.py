"""Memory straight from the system: what is touched is there, what is dropped is not, and what cannot be had is said."""

import errno
import gc
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockyard.engine import host_memory
from blockyard.engine.host_memory import HostMapping, node_of_device
from blockyard.errors import InvalidArgumentError, OutOfMemoryError

PAGE = mmap.PAGESIZE
SIZE = 8 << 20


def resident(address: int, num_bytes: int) -> int:
    """Bytes of a range that have memory behind them, as the system sees it."""
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(address // PAGE * 8)
        entries = pages.read(num_bytes // PAGE * 8)
    return PAGE * sum(entry >> 63 for entry in memoryview(entries).cast("Q"))


def test_memory_is_zero_and_starts_with_a_huge_page():
    mapping = HostMapping(SIZE + 5)
    assert mapping.tensor.shape == (SIZE + 5,)
    assert mapping.address == mapping.tensor.data_ptr()
    assert mapping.address % (2 << 20) == 0
    assert not mapping.tensor.any()


def test_touched_parts_take_memory_and_give_it_back():
    mapping = HostMapping(SIZE)
    assert resident(mapping.address, SIZE) == 0
    mapping.tensor[3] = 7
    if not mapping.populate(0, SIZE // 2):
        pytest.skip("this system cannot touch memory ahead")
    assert SIZE // 2 <= resident(mapping.address, SIZE) < SIZE
    # What was there before is left alone.
    assert int(mapping.tensor[3]) == 7
    mapping.populate(SIZE // 2, SIZE)
    address = mapping.address
    assert resident(address, SIZE) == SIZE
    del mapping
    assert resident(address, SIZE) == 0


def test_memory_lives_as_long_as_a_tensor_over_it():
    tensor = HostMapping(SIZE).tensor[5:]
    gc.collect()
    tensor.fill_(3)
    assert int(tensor.sum(dtype=torch.int64)) == 3 * (SIZE - 5)


def test_nothing_is_a_size():
    mapping = HostMapping(0)
    assert mapping.tensor.numel() == 0
    assert mapping.populate(0, 0) in {True, False}


def test_unavailable_memory_is_an_error_with_numbers():
    with pytest.raises(OutOfMemoryError, match=f"cannot allocate {1 << 60} bytes for host blocks") as caught:
        HostMapping(1 << 60)
    assert caught.value.wanted == 1 << 60
    with pytest.raises(InvalidArgumentError, match="num_bytes is -1"):
        HostMapping(-1)


def test_memory_that_runs_out_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch):
    mapping = HostMapping(SIZE)
    monkeypatch.setattr(mapping, "_advise", lambda *_: errno.ENOMEM)
    with pytest.raises(
        OutOfMemoryError, match=f"cannot allocate bytes 4096 to 8192 of {SIZE}: Cannot allocate"
    ) as caught:
        mapping.populate(4096, 8192)
    assert caught.value.wanted == SIZE
    monkeypatch.setattr(mapping, "_advise", lambda *_: errno.EINVAL)
    assert mapping.populate(4096, 8192) is False


def test_memory_comes_from_the_node_that_is_preferred(monkeypatch: pytest.MonkeyPatch):
    mapping = HostMapping(SIZE)
    if sys.platform != "linux" or not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("the system has no NUMA nodes")
    problem = mapping.prefer(0)
    if "not permitted" in problem:
        pytest.skip(problem)
    assert not problem
    mapping.populate(0, SIZE)
    line = next(
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if line.startswith(f"{mapping.address:x} ")
    )
    assert "prefer" in line
    assert "N0=" in line
    assert mapping.prefer(900).startswith("memory near NUMA node 900: ")
    monkeypatch.setattr(host_memory.platform, "machine", lambda: "pdp11")
    assert mapping.prefer(0) == "setting a NUMA policy is not supported on pdp11"


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0", 0), ("-1\n", None), ("?", None), (None, None)])
def test_the_node_of_a_device_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, node: int | None
):
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert node_of_device(torch.device("cuda:0"), tmp_path) == node
