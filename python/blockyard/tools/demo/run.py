"""The demo: serve a workload that does not fit its KV cache, and compare every token with the unpaged model.

The pools are so small that blocks are swapped to the host and to a file and back, and recomputed. Where possible,
bad options are rejected before torch is loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard import __version__
from blockyard.errors import InvalidArgumentError
from blockyard.progress import show_progress
from blockyard.scheduler import PreemptionMode
from blockyard.stores.base import check_url
from blockyard.stores.url import public_url, sized_url
from blockyard.tools.demo.report import TIERS, Damage, Peak, Report, Sabotage, TransferCount
from blockyard.tools.demo.workload import StandardText, WorkItem, text_workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from blockyard.tools.demo.serve import Faults, PagedRun

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
    sabotage: str | None = None


def make_report(options: DemoOptions, *, quiet: bool = True) -> Report:
    """Serve the workload from paged tiers, and compare its tokens with the unpaged model.

    Args:
        options: options of the demo.
        quiet: whether to hide the progress.

    Raises:
        BlockyardError: the options cannot be satisfied; the message says which and why.
    """
    _check(options)
    with show_progress("loading the model", quiet=quiet):
        # Torch is loaded here, after the options have been checked.
        from blockyard.tools.demo.models import choose_device, fitting_threads, load_encode, load_model  # noqa: PLC0415
        from blockyard.tools.demo.serve import Faults, compare  # noqa: PLC0415

        model = load_model(options.model, choose_device(options.device))
        text = StandardText(encode=load_encode(options.model))
    items = text_workload(
        options.requests,
        seed=options.seed,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        text=text,
    )
    faults = Faults(corrupt=options.corrupt, sabotage=options.sabotage, seed=options.seed)
    with fitting_threads(model):
        served = _serve(options, model, items, faults, quiet=quiet)
        with show_progress("comparing with the unpaged model", quiet=quiet) as view:
            differences, ties = compare(model, items, served.outputs, view)
    stats = served.stats
    tokens = sum(len(sequence) for sequences in served.outputs.values() for sequence in sequences)
    return Report(
        version=__version__,
        model=type(model).__name__,
        device=model.device.type,
        workload=f"text of Python's standard library, seed {options.seed}",
        settings=_settings(options, served),
        requests=len(items),
        sequences=sum(item.sampling.n for item in items),
        prompt_tokens=sum(len(item.prompt) for item in items),
        output_tokens=tokens,
        steps=stats.steps,
        cached_prompt_tokens=stats.cached_tokens,
        seconds=served.seconds,
        tokens_per_second=tokens / served.seconds,
        preemptions={kind: getattr(stats, f"preempted_{kind}") for kind in ("swap_host", "swap_external", "recompute")},
        lost=stats.lost,
        transfers=[
            TransferCount(kind, src, dst, count, count * served.bytes_per_block)
            for (kind, src, dst), count in sorted(served.blocks.items())
        ],
        peak={tier: Peak(getattr(stats, f"peak_{tier}_blocks"), served.totals[tier]) for tier in TIERS},
        swap_store=served.swap_store,
        prefix_store=served.prefix_store,
        damage=_damage(faults, served.swap_store.damaged_blocks),
        sabotage=_sabotage(faults),
        compared=len(items),
        identical_requests=len(items) - len({difference.request_id for difference in differences}),
        differences=differences,
        ties=ties,
    )


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


def _check(options: DemoOptions) -> None:
    """Reject options that are invalid for any model."""
    if not _is_own(options) and not (options.model / "config.json").is_file():
        names = ", ".join(OWN_MODELS)
        raise InvalidArgumentError(
            f"no model in {options.model}: there is no config.json; it is none of {names} either"
        )
    if options.swap_store is not None:
        check_url(options.swap_store)
    if options.prefix_store is None:
        return
    check_url(_with_size(options.prefix_store, options))
    shown = public_url(options.prefix_store)
    if not options.prefix_caching:
        raise InvalidArgumentError(f"prefix_store is {shown!r}, which needs prefix caching")
    if options.tensor_parallel_size > 1:
        raise InvalidArgumentError(
            f"prefix_store is {shown} and tensor_parallel_size {options.tensor_parallel_size}: it needs a single rank"
        )


def _is_own(options: DemoOptions) -> bool:
    return str(options.model) in OWN_MODELS


def _with_size(url: str, options: DemoOptions) -> str:
    """Return a store's URL, with a size if it is a file."""
    if not url.startswith("file:") or "size=" in url:
        return url
    return sized_url(url, "size", SPACE_OF_OWN_MODEL if _is_own(options) else SPACE_OF_OTHER_MODELS)


@contextmanager
def _swap_store(options: DemoOptions) -> Iterator[str]:
    """Return the URL of the external store, with a size; remove its temporary folder at the end."""
    if options.swap_store is not None:
        yield _with_size(options.swap_store, options)
        return
    folder = tempfile.mkdtemp(prefix="blockyard-demo-")
    try:
        yield _with_size(f"file://{folder}", options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(
    options: DemoOptions, model: PreTrainedModel, items: Sequence[WorkItem], faults: Faults, *, quiet: bool
) -> PagedRun:
    from blockyard.integrations.transformers.generator import Generator  # noqa: PLC0415 - loads torch
    from blockyard.integrations.transformers.hybrid import open_model  # noqa: PLC0415 - loads torch
    from blockyard.tools.demo.models import name_of_weights, require_memory  # noqa: PLC0415 - loads torch
    from blockyard.tools.demo.serve import serve  # noqa: PLC0415 - loads torch

    opened = open_model(model, block_size=options.block_size)
    device_blocks, host_blocks = pool_sizes(options, items, max(1, len(opened.groups)))
    require_memory(opened, device_blocks, host_blocks)
    with (
        _swap_store(options) as url,
        Generator(
            model,
            block_size=options.block_size,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            swap_store=url,
            tensor_parallel_size=options.tensor_parallel_size,
            preemption_mode=options.preemption_mode,
            num_lookahead_tokens=options.num_lookahead_tokens,
            prefix_caching=options.prefix_caching,
            prefix_store=_with_size(options.prefix_store, options) if options.prefix_store else None,
            namespace=name_of_weights(model) if options.prefix_store else b"",
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            wrap_executor=faults.wrap,
        ) as generator,
        show_progress("paged run", quiet=quiet) as view,
    ):
        return serve(generator, items, faults, view)


def _damage(faults: Faults, detected: int) -> Damage | None:
    if faults.corrupting is None:
        return None
    return Damage(faults.corrupt, faults.corrupting.stored, faults.corrupting.read, detected)


def _sabotage(faults: Faults) -> Sabotage | None:
    if faults.sabotaged is None:
        return None
    return Sabotage(faults.sabotaged.kind, faults.sabotaged.seen, faults.sabotaged.dropped)


def _settings(options: DemoOptions, served: PagedRun) -> dict[str, int | float | str | None]:
    given = {
        name: value if isinstance(value, int | float | None) else str(value) for name, value in asdict(options).items()
    }
    for name in ("prefix_store", "swap_store"):
        if given[name] is not None:
            given[name] = public_url(str(given[name]))
    return given | {f"num_{tier}_blocks": count for tier, count in served.totals.items()}


def _blocks_at_the_end(item: WorkItem, block_size: int) -> int:
    """Return a request's blocks at its end: full prompt blocks once, the rest for every sequence."""
    n = item.sampling.n
    shared = (len(item.prompt) - 1) // block_size if n > 1 else 0
    longest = -(-(len(item.prompt) + item.sampling.max_tokens) // block_size)
    return shared + n * (longest - shared)
