"""The demo's options, and the pools and stores that follow from them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blockyard.scheduler import PreemptionMode
from blockyard.stores.url import sized_url
from blockyard.tools.demo.workload import WorkItem

__all__ = ["OWN_MODELS", "DemoOptions", "is_own", "pool_sizes", "swap_folder", "with_size"]

SPACE_OF_OWN_MODEL = "64MiB"
SPACE_OF_OTHER_MODELS = "1GiB"
OWN_MODELS = ("llama", "gpt-oss", "qwen3.5")
"""Names of the small random models; any other is the folder of a checkpoint."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo, as `blockyard demo --help` describes them.

    In `swap_store`, `{rank}` is replaced by the rank's number. With a `tensor_parallel_size`, the report shows the
    pools, stores and transfers of one rank.
    """

    model: Path = Path(OWN_MODELS[0])
    device: str = "auto"
    requests: int = 48
    seed: int = 0
    prompt_tokens: tuple[int, int] = (24, 160)
    output_tokens: tuple[int, int] = (48, 144)
    tensor_parallel_size: int = 1
    block_size: int = 16
    num_device_blocks: int | None = None
    num_host_blocks: int | None = None
    prefix_store: str | None = field(default=None, repr=False)
    swap_store: str | None = field(default=None, repr=False)
    preemption_mode: PreemptionMode = "auto"
    num_lookahead_tokens: int = 0
    prefix_caching: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    corrupt: int = 0


def pool_sizes(options: DemoOptions, items: Sequence[WorkItem], groups: int = 1) -> tuple[int, int]:
    """Choose pools that are too small for the workload, unless the options give their sizes.

    The device holds a sixth of the blocks of all requests, but at least one and at most four times the largest request.
    Of groups that leave blocks behind only the largest request's count, in case a step computes it whole.
    The host holds less than half of the largest request, so that the next victim goes to the file; with a prefix
    store, which loads through the host, it is as large as the device.

    Args:
        options: block size and requested pool sizes.
        items: the workload.
        groups: number of the model's cache groups.

    Returns:
        The numbers of device and host blocks.
    """
    filled = [_blocks_at_the_end(item, options.block_size) for item in items]
    largest = max(filled)
    device, host = options.num_device_blocks, options.num_host_blocks
    if device is None:
        device = max(groups * largest + 2 + largest // 50, min(-(-sum(filled) // 6), 4 * largest))
    chosen = device if options.prefix_store is not None else max(2, largest * 2 // 5)
    return device, chosen if host is None else host


def is_own(options: DemoOptions) -> bool:
    """Whether the model is one of the small random ones."""
    return str(options.model) in OWN_MODELS


def with_size(url: str, options: DemoOptions) -> str:
    """Return a store's URL, with a size if it is a file."""
    if not url.startswith("file:") or "size=" in url:
        return url
    return sized_url(url, "size", SPACE_OF_OWN_MODEL if is_own(options) else SPACE_OF_OTHER_MODELS)


@contextmanager
def swap_folder(options: DemoOptions) -> Iterator[str]:
    """Return the URL of the external store, with a size; remove its temporary folder at the end."""
    if options.swap_store is not None:
        yield with_size(options.swap_store, options)
        return
    with tempfile.TemporaryDirectory(prefix="blockyard-demo-", ignore_cleanup_errors=True) as folder:
        yield with_size(f"file://{folder}", options)


def _blocks_at_the_end(item: WorkItem, block_size: int) -> int:
    """Return a request's blocks at its end: full prompt blocks once, the rest for every sequence."""
    n = item.sampling.n
    shared = (len(item.prompt) - 1) // block_size if n > 1 else 0
    longest = -(-(len(item.prompt) + item.sampling.max_tokens) // block_size)
    return shared + n * (longest - shared)
