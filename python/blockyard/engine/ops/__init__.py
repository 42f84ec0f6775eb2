"""The torch ops that move blocks: their arguments, and their implementation for each device.

    blockyard::swap_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()
    blockyard::copy_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()
    blockyard::move_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()
    blockyard::exchange_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()
    blockyard::gather_blocks(Tensor[] caches, Tensor(a!) rows, Tensor blocks) -> ()
    blockyard::scatter_blocks(Tensor rows, Tensor(a!)[] caches, Tensor blocks) -> ()

A list holds canonical views, as returned by `KVLayout.views`: uint8 `[blocks, bytes]`, rows contiguous. Tensor i of one
list corresponds to tensor i of the other. All arguments are checked before the first byte moves. Each op increments the
autograd version of what it writes, so that a backward pass that saved it fails. CPU tensors use
`blockyard.engine.ops.cpu`, CUDA tensors `blockyard.engine.ops.compiled` and `cuda/`, or `blockyard.engine.ops.fallback`
if that library cannot be loaded (`blockyard.engine.ops.library` says why).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from blockyard._core import Mapping, Pairs
from blockyard.engine.mapping import IdPairs
from blockyard.engine.ops import compiled, cpu, fallback
from blockyard.engine.ops.checks import CopyOps
from blockyard.engine.ops.library import op_library
from blockyard.errors import LayoutError, MappingError

__all__ = ["copy_blocks", "exchange_blocks", "gather_blocks", "move_blocks", "scatter_blocks", "swap_blocks"]


def swap_blocks(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Tensor | IdPairs) -> None:
    """Copy blocks from one set of cache views to another: device to host, host to device, or within one device.

    On CUDA the work is queued on the device's current stream; keep all tensors except `pairs` alive and unchanged until
    it is done.

    Args:
        src: views to read, uint8 `[blocks, bytes]`, CPU (pinned, to be fast) or CUDA, all on one device.
        dst: the same number of views to write, of the same widths, on one device; they share no memory with `src`.
        pairs: block ids `(from, to)`, int64 `[n, 2]`, CPU, or other ints, as for `Pairs`; `to` has no repeats.

    Raises:
        MappingError: the mapping is malformed, an id is out of range or a destination repeats; nothing was copied.
        LayoutError: the views do not fit one another; nothing was copied.

    Source: vLLM `csrc/cache_kernels.cu`, swap_blocks.
    """
    torch.ops.blockyard.swap_blocks(list(src), list(dst), _tensor(pairs))


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor | IdPairs) -> None:
    """Copy blocks within each of the cache views, as for copy-on-write.

    Args:
        caches: views, uint8 `[blocks, bytes]`, all on one device.
        pairs: block ids `(from, to)`, int64 `[n, 2]`, CPU, or other ints, as for `Pairs`; `to` has no repeats and
            shares no block with `from`.

    Raises:
        MappingError: the mapping is malformed, an id is out of range, a destination repeats, or a block is both
            read and written; nothing was copied.
        LayoutError: the views do not fit one another; nothing was copied.

    Source: vLLM `csrc/cache_kernels.cu`, copy_blocks.
    """
    torch.ops.blockyard.copy_blocks(list(caches), _tensor(pairs))


def move_blocks(caches: Sequence[Tensor], pairs: Tensor | IdPairs) -> None:
    """Move blocks within each of the cache views, as if all were read before any is written.

    Chains (a->b, b->c) and rings (a->b, b->a) are allowed; a block may move to several places, and a block that nothing
    moves into keeps its bytes.

    Args:
        caches: views, uint8 `[blocks, bytes]`, all on one device.
        pairs: block ids `(from, to)`, int64 `[n, 2]`, CPU, or other ints, as for `Pairs`; `to` has no repeats.

    Raises:
        MappingError: the mapping is malformed, an id is out of range or a destination repeats; nothing was moved.
        LayoutError: the views do not fit one another; nothing was moved.
    """
    torch.ops.blockyard.move_blocks(list(caches), _tensor(pairs))


def exchange_blocks(caches: Sequence[Tensor], pairs: Tensor | IdPairs) -> None:
    """Swap the two blocks of each pair, within each of the cache views.

    Args:
        caches: views, uint8 `[blocks, bytes]`, all on one device.
        pairs: block ids, int64 `[n, 2]`, CPU; no block may repeat, in either column. `(-1, -1)` is padding.

    Raises:
        MappingError: the mapping is malformed, an id is out of range or repeats; nothing was exchanged.
        LayoutError: the views do not fit one another; nothing was exchanged.

    Source: vllm-hpu-extension `defragmentation.py`, CacheSwapUtils.
    """
    torch.ops.blockyard.exchange_blocks(list(caches), _tensor(pairs))


def gather_blocks(caches: Sequence[Tensor], rows: Tensor, blocks: Tensor) -> None:
    """Copy blocks out of paged caches into rows, with all pieces of a block side by side.

    Args:
        caches: views to read, uint8 `[blocks, bytes]`, all on one device.
        rows: written, uint8 `[n, bytes_per_block]`, any device; `bytes_per_block` is the sum of the views' widths.
        blocks: the block for each row, int64 `[n]`, CPU; may repeat.

    Raises:
        MappingError: `blocks` is malformed, an id is out of range, or there is not one for each row; nothing was
            copied.
        LayoutError: views and rows do not fit one another; nothing was copied.
    """
    torch.ops.blockyard.gather_blocks(list(caches), rows, blocks)


def scatter_blocks(rows: Tensor, caches: Sequence[Tensor], blocks: Tensor) -> None:
    """Copy rows into blocks of paged caches: the inverse of `gather_blocks`.

    Args:
        rows: read, uint8 `[n, bytes_per_block]`, any device; `bytes_per_block` is the sum of the views' widths.
        caches: views to write, uint8 `[blocks, bytes]`, all on one device.
        blocks: the block for each row, int64 `[n]`, CPU, no repeats.

    Raises:
        MappingError: `blocks` is malformed, an id is out of range or repeats, or there is not one for each row;
            nothing was copied.
        LayoutError: views and rows do not fit one another; nothing was copied.
    """
    torch.ops.blockyard.scatter_blocks(rows, list(caches), blocks)


def has_kernels(device: torch.device) -> bool:
    """Return whether the ops of this module support a device's tensors."""
    return device.type in {"cpu", "cuda", "meta"}


def bind(src: Sequence[Tensor], dst: Sequence[Tensor] | None = None) -> Callable[[Mapping], None]:
    """Return a call that carries out mappings in views; CPU views are checked once, here.

    Args:
        src: views to read, as for `swap_blocks`.
        dst: views to write. None: `src` is changed in place, as by `copy_blocks`, `move_blocks` or `exchange_blocks`.

    Returns:
        A call that carries out a mapping in these views, by the mapping's rule.

    Raises:
        InvalidArgumentError: the views do not fit one another.
    """
    if all(view.device.type == "cpu" for view in (*src, *(dst or ()))):
        return cpu.Bound(src, dst)
    ops = _on_cuda()
    return partial(ops.within, src) if dst is None else partial(ops.between, src, dst)


def _on_cuda() -> CopyOps:
    return compiled.BY_LIBRARY if op_library().loaded else fallback.BY_TORCH


def _tensor(pairs: Tensor | IdPairs) -> Tensor:
    return pairs if isinstance(pairs, Tensor) else torch.from_numpy(Pairs("device", "device", pairs).ids)


# ---- what torch.compile sees ----


def _swap_fake(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    _refuse_mixed("pairs", pairs, src=src, dst=dst)
    if len(src) != len(dst):
        raise LayoutError(f"src holds {len(src)} tensors, dst {len(dst)}")
    _refuse_displaced("dst", dst)


def _in_place_fake(caches: list[Tensor], pairs: Tensor) -> None:
    """Return nothing: the caches are changed in place."""
    _refuse_mixed("pairs", pairs, caches=caches)
    _refuse_displaced("caches", caches)


def _gather_fake(caches: list[Tensor], rows: Tensor, blocks: Tensor) -> None:
    _refuse_mixed("blocks", blocks, caches=caches, rows=[rows])
    _check_width(rows, caches)


def _scatter_fake(rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
    _refuse_mixed("blocks", blocks, caches=caches, rows=[rows])
    _check_width(rows, caches)
    _refuse_displaced("caches", caches)


def _refuse_displaced(name: str, written: list[Tensor]) -> None:
    """Refuse views that come into compiled code and begin inside their storage.

    Inductor of torch 2.11 copies the second and later ones from the wrong place, and drops what the op writes to them.
    Such an input here has its own storage, which ends with it; views that compiled code cuts share their tensor's.
    """
    storages = Counter(view.untyped_storage()._cdata for view in written)  # noqa: SLF001 (torch's own modules use it)
    for index, view in enumerate(written):
        storage, start = view.untyped_storage(), view.storage_offset() * view.itemsize
        end = start + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True)) + 1
        alone = storages[storage._cdata] == 1  # noqa: SLF001
        if len(written) > 1 and start > 0 and alone and storage.nbytes() == end:
            raise LayoutError(
                f"{name}[{index}] begins {start} bytes into its storage, where torch.compile would lose what is "
                "written: pass the whole tensor and cut it in compiled code, or call the op outside of compiled code"
            )


def _refuse_mixed(name: str, ids: Tensor, **lists: list[Tensor]) -> None:
    """Refuse a call with only some tensors on the meta device: even one dispatches here, where nothing is copied."""
    views = {f"{kind}[{index}]": view for kind, tensors in lists.items() for index, view in enumerate(tensors)}
    on_meta = [kind for kind, view in views.items() if view.device.type == "meta"]
    if on_meta and len(on_meta) < len(views):
        other = next(kind for kind in views if kind not in on_meta)
        raise LayoutError(f"{on_meta[0]} is on the meta device, {other} on {views[other].device}")
    if bool(on_meta) != (ids.device.type == "meta") and views:
        raise MappingError(f"{name} are on {ids.device}, {next(iter(views))} on {next(iter(views.values())).device}")


def _check_width(rows: Tensor, caches: list[Tensor]) -> None:
    if rows.dim() != 2 or any(view.dim() != 2 for view in caches):
        raise LayoutError(f"rows are {list(rows.shape)}, wanted [n, bytes], and caches [blocks, bytes]")
    width = sum(view.shape[1] for view in caches)
    if rows.shape[1] != width:
        raise LayoutError(f"rows have {rows.shape[1]} bytes, a block of all caches has {width}")


Implementation = Callable[..., None]

# Arguments, and the implementation without data.
OPS: Final[dict[str, tuple[str, Implementation]]] = {
    "swap_blocks": ("Tensor[] src, Tensor(a!)[] dst, Tensor pairs", _swap_fake),
    "copy_blocks": ("Tensor(a!)[] caches, Tensor pairs", _in_place_fake),
    "move_blocks": ("Tensor(a!)[] caches, Tensor pairs", _in_place_fake),
    "exchange_blocks": ("Tensor(a!)[] caches, Tensor pairs", _in_place_fake),
    "gather_blocks": ("Tensor[] caches, Tensor(a!) rows, Tensor blocks", _gather_fake),
    "scatter_blocks": ("Tensor rows, Tensor(a!)[] caches, Tensor blocks", _scatter_fake),
}


def _register() -> torch.library.Library:
    library = torch.library.Library("blockyard", "DEF")
    for name, (arguments, fake) in OPS.items():
        library.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, getattr(cpu.ON_CPU, name.removesuffix("_blocks")), "CPU")
        library.impl(name, getattr(_on_cuda(), name.removesuffix("_blocks")), "CUDA")
        torch.library.register_fake(f"blockyard::{name}", fake, lib=library)
    # Ops of the compiled library for checked mappings.
    library.define("run_swap(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()")
    library.define("run_steps(Tensor(a!)[] caches, Tensor steps, Tensor starts) -> ()")
    library.define("run_gather(Tensor[] caches, Tensor(a!) rows, Tensor pairs) -> ()")
    library.define("run_scatter(Tensor rows, Tensor(a!)[] caches, Tensor pairs) -> ()")
    library.define("set_strategies(int device, Tensor rules) -> ()")
    library.define("prepare(int device) -> ()")
    library.define("set_batch_pieces(int device, int max_pieces) -> ()")
    library.define("set_region(int address, int num_bytes, int chunk_bytes) -> ()")
    # The baseline of benchmarks: one cudaMemcpyAsync per piece. Only in the compiled library.
    library.define("bench_copy_loop(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()")
    return library


# Kept for the life of the process, as the ops are removed with it.
_LIBRARY = _register()
