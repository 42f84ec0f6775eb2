"""The torch ops that move blocks: their schemas, and their implementations in torch.

    blockyard::swap_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()
    blockyard::copy_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()

A list holds canonical views, as `KVLayout.views` cuts them: uint8 `[blocks, bytes]`, rows contiguous. Tensor i of one
list goes with tensor i of the other. All are checked before the first byte moves. CUDA implementations are in `cuda/`;
where that library cannot be loaded, CUDA tensors go through torch calls (`blockyard.transfer.cuda` says why).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.errors import BlockyardError, LayoutError, MappingError
from blockyard.plan import Ids, check_pairs, merge_runs
from blockyard.transfer.cuda import op_library

# From this size on, torch's copy with all threads is faster; below it, waiting for the threads costs more.
_PARALLEL_BYTES = 1 << 20
# From this size on, one call per run costs less than passing its bytes through a buffer.
_CALL_BYTES = 8 << 10
# And so it does when there are few.
_FEW_RUNS = 4
# Scattered rows pass through a buffer that stays in the processor's cache.
_SCRATCH_BYTES = 256 << 10
# How much device memory the implementation without the op library takes at a time.
_FALLBACK_BYTES = 32 << 20

Bytes = NDArray[np.uint8]

_ERRORS: dict[str, type[BlockyardError]] = {"mapping": MappingError, "layout": LayoutError}


def swap_blocks(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy blocks from one set of cache views to another: device to host, host to device, or within one device.

    On CUDA the work is queued on the current stream of the device; the caller keeps all tensors but `pairs` alive
    and unchanged until it is done.

    Args:
        src: views to read, uint8 `[blocks, bytes]`, CPU (pinned, to be fast) or CUDA, all on one device.
        dst: as many views to write, of the same widths, on one device; none shares memory with those of `src`.
        pairs: block ids `(from, to)`, int64 `[n, 2]`, CPU; `to` has no repeats.

    Raises:
        MappingError: the mapping is malformed, an id is out of range or a destination repeats; nothing was copied.
        LayoutError: the views do not fit one another; nothing was copied.

    Source: vLLM `csrc/cache_kernels.cu`, swap_blocks.
    """
    try:
        torch.ops.blockyard.swap_blocks(list(src), list(dst), pairs)
    except RuntimeError as error:
        raise _named(error) from error


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy blocks within each of the cache views, as copy-on-write wants it.

    Args:
        caches: views, uint8 `[blocks, bytes]`, all on one device.
        pairs: block ids `(from, to)`, int64 `[n, 2]`, CPU; `to` has no repeats and shares no block with `from`.

    Raises:
        MappingError: the mapping is malformed, an id is out of range, a destination repeats, or a block is both
            read and written; nothing was copied.
        LayoutError: the views do not fit one another; nothing was copied.

    Source: vLLM `csrc/cache_kernels.cu`, copy_blocks.
    """
    try:
        torch.ops.blockyard.copy_blocks(list(caches), pairs)
    except RuntimeError as error:
        raise _named(error) from error


def _named(error: RuntimeError) -> Exception:
    """Turn an error of the compiled library into the class that its message names."""
    kind, _, message = str(error).partition("blockyard ")[2].partition(": ")
    return _ERRORS[kind](message) if kind in _ERRORS else error


# ---- checks ----


def _check_list(name: str, views: Sequence[Tensor]) -> None:
    if not views:
        raise LayoutError(f"{name} holds no tensors")
    first = views[0]
    for index, view in enumerate(views):
        if view.dtype != torch.uint8 or view.dim() != 2:
            raise LayoutError(f"{name}[{index}] is {view.dtype} {list(view.shape)}, wanted torch.uint8 [blocks, bytes]")
        blocks, width = view.shape
        row, column = view.stride()
        if (width > 1 and column != 1) or (blocks > 1 and row < width):
            raise LayoutError(f"{name}[{index}] has strides {[row, column]}, wanted contiguous rows of {width} bytes")
        if blocks != first.shape[0] or view.device != first.device:
            raise LayoutError(
                f"{name}[{index}] has {blocks} blocks on {view.device}, {name}[0] {first.shape[0]} on {first.device}"
            )


def _check_apart(name: str, views: Sequence[Tensor]) -> None:
    """Refuse views that share memory: they follow one another, or alternate within one distance of rows."""
    base = period = row_end = reach = last = 0
    for start, end, index in sorted((*_extent(view), index) for index, view in enumerate(views)):
        width, stride = views[index].shape[1], views[index].stride(0)
        if start >= reach:
            base, period, reach = start, stride, end
        elif stride != period or start < row_end or start + width > base + period:
            raise LayoutError(f"{name}[{last}] and {name}[{index}] share memory")
        row_end, reach, last = start + width, max(reach, end), index


def _extent(view: Tensor) -> tuple[int, int]:
    """Give the first address of a view and the first that it does not reach."""
    start = view.data_ptr()
    return start, start + (view.shape[0] - 1) * view.stride(0) + view.shape[1] if view.numel() else start


def _check_swap(src: Sequence[Tensor], dst: Sequence[Tensor]) -> None:
    if len(src) != len(dst):
        raise LayoutError(f"src holds {len(src)} tensors, dst {len(dst)}")
    _check_list("src", src)
    _check_list("dst", dst)
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
        if source.shape[1] != target.shape[1]:
            raise LayoutError(f"src[{index}] has rows of {source.shape[1]} bytes, dst[{index}] of {target.shape[1]}")
    _check_apart("dst", dst)
    shared = {view.untyped_storage().data_ptr() for view in src} & {view.untyped_storage().data_ptr() for view in dst}
    if shared:
        read = [_extent(view) for view in src]
        written = [_extent(view) for view in dst]
        if any(a < d and c < b for a, b in read for c, d in written):
            raise LayoutError("src and dst share memory: use copy_blocks within one cache")


def _check_ids(pairs: Tensor, src: Tensor, dst: Tensor, *, in_place: bool) -> Ids:
    if pairs.device.type != "cpu":
        raise MappingError(f"pairs are on {pairs.device}, wanted the CPU")
    return check_pairs(pairs.numpy(), src_blocks=src.shape[0], dst_blocks=dst.shape[0], in_place=in_place)


# ---- implementations on the CPU ----


def _swap_cpu(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    _check_swap(src, dst)
    _move(src, dst, _check_ids(pairs, src[0], dst[0], in_place=False))


def _copy_cpu(caches: list[Tensor], pairs: Tensor) -> None:
    _check_list("caches", caches)
    _check_apart("caches", caches)
    _move(caches, caches, _check_ids(pairs, caches[0], caches[0], in_place=True))


def _move(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids) -> None:
    if not len(pairs):
        return
    runs = merge_runs(pairs)
    for source, target in zip(src, dst, strict=True):
        run_bytes = source.shape[1] * len(pairs) // len(runs)
        if run_bytes >= _PARALLEL_BYTES:
            _move_long_runs(source, target, runs)
        elif run_bytes >= _CALL_BYTES or len(runs) <= _FEW_RUNS:
            _move_runs(source.numpy(), target.numpy(), runs)
        elif run_bytes:
            _move_scattered(source.numpy(), target.numpy(), pairs)


def _move_long_runs(source: Tensor, target: Tensor, runs: Ids) -> None:
    for first, to, length in runs.tolist():
        target.narrow(0, to, length).copy_(source.narrow(0, first, length))


def _move_runs(source: Bytes, target: Bytes, runs: Ids) -> None:
    for first, to, length in runs.tolist():
        target[to : to + length] = source[first : first + length]


def _move_scattered(source: Bytes, target: Bytes, pairs: Ids) -> None:
    # One item a row: numpy then takes and puts whole rows.
    width = source.shape[1]
    row = np.dtype((np.void, width))
    sources, targets = source.view(row)[:, 0], target.view(row)[:, 0]
    step = max(1, _SCRATCH_BYTES // width)
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        targets[part[:, 1]] = sources[part[:, 0]]


# ---- implementations on CUDA without the op library ----


def _swap_torch(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    _check_swap(src, dst)
    _move_torch(src, dst, _check_ids(pairs, src[0], dst[0], in_place=False))


def _copy_torch(caches: list[Tensor], pairs: Tensor) -> None:
    _check_list("caches", caches)
    _check_apart("caches", caches)
    _move_torch(caches, caches, _check_ids(pairs, caches[0], caches[0], in_place=True))


def _move_torch(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids) -> None:
    sources = torch.tensor(pairs[:, 0], device=src[0].device)
    targets = torch.tensor(pairs[:, 1], device=dst[0].device)
    for source, target in zip(src, dst, strict=True):
        step = max(1, _FALLBACK_BYTES // max(1, source.shape[1]))
        for chosen, to in zip(sources.split(step), targets.split(step), strict=True):
            target.index_copy_(0, to, source.index_select(0, chosen).to(target.device))


# ---- what torch.compile sees ----


def _swap_fake(src: list[Tensor], dst: list[Tensor], _pairs: Tensor) -> None:
    if len(src) != len(dst):
        raise LayoutError(f"src holds {len(src)} tensors, dst {len(dst)}")


def _copy_fake(_caches: list[Tensor], _pairs: Tensor) -> None:
    """Nothing comes out: the caches are changed in place."""


def _register() -> torch.library.Library:
    library = torch.library.Library("blockyard", "DEF")
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define("swap_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()", tags=tags)
    library.define("copy_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()", tags=tags)
    library.impl("swap_blocks", _swap_cpu, "CPU")
    library.impl("copy_blocks", _copy_cpu, "CPU")
    if not op_library().loaded:
        library.impl("swap_blocks", _swap_torch, "CUDA")
        library.impl("copy_blocks", _copy_torch, "CUDA")
    torch.library.register_fake("blockyard::swap_blocks", _swap_fake, lib=library)
    torch.library.register_fake("blockyard::copy_blocks", _copy_fake, lib=library)
    return library


# Kept for the life of the process: the ops go when it does.
_LIBRARY = _register()
