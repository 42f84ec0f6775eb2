"""Host memory directly from the system: with huge pages advised, near a NUMA node, touched in parts."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from blockyard.errors import InvalidArgumentError, OutOfMemoryError

# Size of transparent huge pages; the mapping starts at a multiple of it.
_HUGE_PAGE: Final = 2 << 20
# From Linux 5.14; Python has no constant for it.
_POPULATE_WRITE: Final = 23
# Linux, on every architecture that CUDA has; the mmap module has `MAP_NORESERVE` from Python 3.13 on.
_MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class HostMapping:
    """Zeroed memory; it lives as long as any tensor over it.

    Args:
        num_bytes: size in bytes.
        file: descriptor of a file to share with other processes; anonymous memory if None.
        offset: offset in the file, a multiple of the page size.

    Attributes:
        tensor: the whole memory, uint8 `[num_bytes]`.
        address: address of the first byte, a multiple of 2 MiB; for a file, a multiple of the page size.

    Raises:
        OutOfMemoryError: the system has too little memory.
    """

    def __init__(self, num_bytes: int, *, file: int | None = None, offset: int = 0) -> None:
        if num_bytes < 0:
            raise InvalidArgumentError(f"num_bytes is {num_bytes}, must be at least 0")
        self.num_bytes = num_bytes
        try:
            if file is None:
                # Empty mappings are refused, and huge pages need private memory.
                self._memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                self._memory = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, offset=offset)
        except (OSError, OverflowError, ValueError) as error:
            message = f"cannot allocate {num_bytes} bytes for host blocks: {error}"
            raise OutOfMemoryError(message, num_bytes) from error
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_PAGE if file is None else 0
        self.tensor: Tensor = whole[start : start + num_bytes]
        self.address = whole.data_ptr() + start
        # Kernels without them refuse, which only affects speed.
        self._advise(mmap.MADV_HUGEPAGE, 0, num_bytes)

    def prefer(self, node: int) -> str:
        """Prefer one NUMA node for memory touched from now on.

        Args:
            node: the node's number.

        Returns:
            Why this failed; empty on success.
        """
        call = _MBIND.get(platform.machine())
        if call is None:
            return f"setting a NUMA policy is not supported on {platform.machine()}"
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        words = (ctypes.c_ulong * (node // bits + 1))()
        words[node // bits] = 1 << node % bits
        size = ctypes.c_ulong(self._whole_pages(self.num_bytes))
        address, max_node = ctypes.c_void_p(self.address), ctypes.c_ulong(bits * len(words) + 1)
        if _LIBC.syscall(call, address, size, _MPOL_PREFERRED, words, max_node, 0) == 0:
            return ""
        return f"memory near NUMA node {node}: {os.strerror(ctypes.get_errno())}"

    def populate(self, first: int, end: int) -> bool:
        """Touch a range without changing it, so that later accesses are fast. Releases the GIL.

        Args:
            first: first byte, a multiple of the page size.
            end: one past the last byte.

        Returns:
            Whether the system supports this (Linux 5.14 or newer); if not, memory is touched when it is used.

        Raises:
            OutOfMemoryError: there is no memory left.
        """
        problem = self._advise(_POPULATE_WRITE, first, end)
        if problem in {errno.ENOMEM, errno.EFAULT}:
            raise OutOfMemoryError(
                f"cannot allocate bytes {first} to {end} of {self.num_bytes}: {os.strerror(problem)}",
                self.num_bytes,
            )
        return not problem

    def inherit(self, *, forks: bool) -> None:
        """Set whether forks of this process get a copy of the memory, which is the default.

        A fork copies all page-locked memory at once, while the device may be writing to it.
        """
        self._advise(mmap.MADV_DOFORK if forks else mmap.MADV_DONTFORK, 0, self.num_bytes)

    def hold_addresses(self) -> None:
        """Keep the addresses reserved in a fork that has not inherited the memory.

        Otherwise they could be reused, and this object would unmap them at its end.
        """
        address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self._whole_pages(self.num_bytes))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | MAP_NORESERVE
        # No access: a read must not see zeros instead of the blocks.
        _LIBC.mmap(address, size, 0, flags, -1, ctypes.c_long(0))

    def _advise(self, advice: int, first: int, end: int) -> int:
        """Return the error number; 0 for success."""
        address, size = ctypes.c_void_p(self.address + first), ctypes.c_size_t(self._whole_pages(end - first))
        return ctypes.get_errno() if _LIBC.madvise(address, size, advice) else 0

    @staticmethod
    def _whole_pages(num_bytes: int) -> int:
        """Round up to whole pages; there is room after the last byte."""
        return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def node_of_device(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node that a CUDA device is attached to.

    Args:
        device: the device.
        devices: the system's folder of device descriptions.

    Returns:
        The node; None if the machine has only one, or it is unknown.
    """
    found = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(found, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    name = f"{domain:04x}:{bus:02x}:{number:02x}.0"
    try:
        node = int((devices / name / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
