"""Tensors over foreign memory, through DLPack: the address is not accessed, so it may have no memory behind it yet."""

from __future__ import annotations

import atexit
import ctypes
from typing import Final

import torch
from torch import Tensor
from torch.utils import dlpack

from blockyard.errors import InvalidArgumentError

__all__ = ["tensor_at"]

# Constants of DLPack's header, version 0.8.
_DEVICES: Final = {"cpu": 1, "cuda": 2}
_UNSIGNED: Final = 1
_NAME: Final = b"dltensor"


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

# Objects that torch still refers to, by address: the struct, its shape, and the owner of the memory.
_alive: dict[int, tuple[_Managed, object, object]] = {}


def _forget(managed: ctypes._Pointer[_Managed]) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_gone = _Deleter(_forget)


@atexit.register
def _outlive() -> None:
    """Prevent tensors that outlive the interpreter from calling into it."""
    for managed, _, _ in list(_alive.values()):
        managed.deleter = _Deleter()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))


def tensor_at(address: int, size: int, *, device: torch.device, owner: object) -> Tensor:
    """Make a tensor over foreign memory.

    Args:
        address: address of the first byte; not accessed.
        size: size in bytes.
        device: where the address is valid.
        owner: kept alive as long as the tensor and all its views.

    Returns:
        uint8 `[size]` on `device`.

    Raises:
        InvalidArgumentError: the device is neither a CPU nor a CUDA device.
    """
    if device.type not in _DEVICES:
        raise InvalidArgumentError(f"device is {device}, must be cpu or cuda")
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _DLDevice(_DEVICES[device.type], device.index or 0)
    managed.tensor.ndim = 1
    managed.tensor.code, managed.tensor.bits, managed.tensor.lanes = _UNSIGNED, 8, 1
    managed.tensor.shape = shape
    managed.deleter = _gone
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    place = ctypes.addressof(managed)
    _alive[place] = (managed, shape, owner)
    try:
        tensor: Tensor = dlpack.from_dlpack(capsule(place, _NAME, None))
    except BaseException:
        _alive.pop(place, None)
        raise
    return tensor
