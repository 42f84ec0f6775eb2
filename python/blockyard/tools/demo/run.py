"""The demo: serve a workload that does not fit its KV cache, and compare every token with an unpaged run.

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
from blockyard.stores.base import StoreStats, check_url
from blockyard.stores.url import public_url, read_bytes, sized_url
from blockyard.tools.demo.pool import PoolReport
from blockyard.tools.demo.report import (
    Damage,
    Difference,
    Peak,
    Report,
    Sabotage,
    SwapStoreCounters,
    TransferCount,
)
from blockyard.tools.demo.workload import StandardText, WorkItem, text_workload, trace_workload
from blockyard.tools.timeline import Timeline
from blockyard.traces import read_trace, scale_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from blockyard.tools.demo.serve import Faults, Outputs, PagedRun

SPACE_OF_OWN_MODEL = "64MiB"
SPACE_OF_OTHER_MODELS = "1GiB"


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo; the names match the command line.

    Attributes:
        model: folder of a local checkpoint; a small random Llama if None.
        device: `cpu`, `cuda`, or `auto`.
        requests: number of requests with library text; not used with a trace.
        seed: seed of texts, lengths, samplers and damage.
        prompt_tokens: minimum and maximum length of prompts of library text.
        output_tokens: minimum and maximum number of tokens generated for one sequence of such a request.
        trace: file with lengths and arrivals; library text is used if None.
        trace_requests: number of rows to read from the trace.
        scale: factor applied to the trace's lengths.
            tensor_parallel_size: number of processes that share the model. The report shows the pools, stores and
            transfers of one rank.
        block_size: number of tokens in a block.
        num_device_blocks: number of device blocks; None means too few for the workload.
        num_host_blocks: number of host blocks; None means few, 0 means no host tier.
        swap_space: size of host memory as text, such as `4GiB`, instead of `num_host_blocks`.
        prefix_store: URL of a persistent store for cached blocks; None for none.
        prefix_store_space: size of the prefix store as text, such as `2GiB`, if the URL has none.
        swap_store: URL of the external tier; `{rank}` is replaced by the rank's number; a temporary folder if None.
        swap_store_space: size of the swap store as text, such as `2GiB`, if the URL has none.
        preemption_mode: `auto`, `swap` or `recompute`.
        num_lookahead_tokens: maximum number of draft tokens verified per sequence and step.
        prefix_caching: whether prompts share the blocks of earlier prompts with the same prefix.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step; longer prompts are computed in chunks.
        defrag: defragmentation goal of the device pool, `max_id` or `dense`; no defragmentation if None.
            shrink_to: number of device blocks in the second half of the run; the memory of the others is released. No
            change if None.
        corrupt: number of blocks to damage in the file.
        sabotage: kind of transfer of which one is dropped; none if None.
    """

    model: Path | None = None
    device: str = "auto"
    requests: int = 48
    seed: int = 0
    prompt_tokens: tuple[int, int] = (24, 160)
    output_tokens: tuple[int, int] = (48, 144)
    trace: Path | None = None
    trace_requests: int = 48
    scale: float = 1 / 16
    tensor_parallel_size: int = 1
    block_size: int = 16
    num_device_blocks: int | None = None
    num_host_blocks: int | None = None
    swap_space: str | None = None
    prefix_store: str | None = field(default=None, repr=False)
    prefix_store_space: str | None = None
    swap_store: str | None = field(default=None, repr=False)
    swap_store_space: str | None = None
    preemption_mode: PreemptionMode = "auto"
    num_lookahead_tokens: int = 0
    prefix_caching: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    defrag: str | None = None
    shrink_to: int | None = None
    corrupt: int = 0
    sabotage: str | None = None


def make_report(options: DemoOptions, *, quiet: bool = True, timeline: Timeline | None = None) -> Report:
    """Run the workload paged and unpaged, and compare the tokens.

    Args:
        options: options of the demo.
        quiet: whether to hide the progress.
        timeline: receives the steps of the paged run if given.

    Returns:
        The report.

    Raises:
        BlockyardError: the options cannot be satisfied; the message says which and why.
    """
    _check(options)
    trace = None
    if options.trace is not None:
        trace = scale_lengths(read_trace(options.trace, first=options.trace_requests), options.scale)
    with show_progress("loading the model", quiet=quiet):
        # Torch is loaded here, after the options have been checked.
        from blockyard.tools.demo.models import choose_device, fitting_threads, load_encode, load_model  # noqa: PLC0415
        from blockyard.tools.demo.serve import Faults, reference  # noqa: PLC0415

        model = load_model(options.model, choose_device(options.device))
        text = StandardText(encode=load_encode(options.model))
    if trace is None:
        items = text_workload(
            options.requests,
            seed=options.seed,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            text=text,
        )
    else:
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        items = trace_workload(trace, seed=options.seed, max_model_len=limit, text=text)
    faults = Faults(corrupt=options.corrupt, sabotage=options.sabotage, seed=options.seed)
    with fitting_threads(model):
        served, pool = _serve(options, model, items, faults, quiet=quiet, timeline=timeline)
        with show_progress("unpaged run", quiet=quiet) as view:
            wanted, seconds = reference(model, items, view)
        wanted, ties = _settle(model, items, served.outputs, wanted)
    run = _Run(options, type(model).__name__, model.device.type, items, served, faults, pool)
    return _report(run, wanted, ties, seconds)


def pool_sizes(options: DemoOptions, items: Sequence[WorkItem]) -> tuple[int, int]:
    """Choose pools that are too small for the workload, unless the options give their sizes.

    The device holds a sixth of the blocks of all requests, but at least one and at most four times the largest request.
    The host holds less than half of the largest request, so that the next victim goes to the file; with a prefix
    store, which loads through the host, it is as large as the device.

    Args:
        options: block size and requested pool sizes.
        items: the workload.

    Returns:
        The numbers of device and host blocks.
    """
    filled = [_blocks_at_the_end(item, options.block_size) for item in items]
    largest = max(filled)
    device, host = options.num_device_blocks, options.num_host_blocks
    if device is None:
        device = max(largest + 2 + largest // 50, min(-(-sum(filled) // 6), 4 * largest))
    chosen = device if options.prefix_store is not None else max(2, largest * 2 // 5)
    return device, chosen if host is None else host


def compare(items: Sequence[WorkItem], outputs: Outputs, wanted: Outputs) -> tuple[int, list[Difference]]:
    """Compare two runs token by token.

    Args:
        items: the requests.
        outputs: tokens of the paged run.
        wanted: tokens of the unpaged run.

    Returns:
        The number of identical requests, and the first difference of every sequence that differs.
    """
    identical, differences = 0, []
    for item in items:
        got, right = outputs[item.request_id], wanted[item.request_id]
        identical += got == right
        for index, (ours, theirs) in enumerate(zip(got, right, strict=True)):
            if ours != theirs:
                length = max(len(ours), len(theirs))
                pairs = zip(_padded(ours, length), _padded(theirs, length), strict=True)
                where, (a, b) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
                differences.append(Difference(item.request_id, index, where, a, b))
    return identical, differences


def _check(options: DemoOptions) -> None:
    """Reject options that are invalid for any model."""
    if options.model is not None and not (options.model / "config.json").is_file():
        raise InvalidArgumentError(f"no model in {options.model}: there is no config.json")
    if options.tensor_parallel_size > 1:
        _check_ranks(options)
    _check_sizes(options)
    if options.prefix_store is not None:
        check_url(_prefix_url(options))
        if not options.prefix_caching:
            raise InvalidArgumentError(
                f"prefix_store is {public_url(options.prefix_store)!r}, which needs prefix caching"
            )
    if options.swap_store is not None:
        check_url(sized_url(options.swap_store, "swap_store_space", options.swap_store_space))


def _check_sizes(options: DemoOptions) -> None:
    """Check that sizes are valid and given only once."""
    for name in ("swap_space", "prefix_store_space", "swap_store_space"):
        if (space := getattr(options, name)) is not None:
            read_bytes(name, space, holds=1)
    if options.swap_space is not None and options.num_host_blocks is not None:
        raise InvalidArgumentError(
            f"swap_space is {options.swap_space} and num_host_blocks {options.num_host_blocks}, give one of them"
        )
    if options.prefix_store is None and options.prefix_store_space is not None:
        raise InvalidArgumentError(f"prefix_store_space is {options.prefix_store_space}, but prefix_store is None")


def _check_ranks(options: DemoOptions) -> None:
    """Reject options that need a single rank if there are several."""
    for name, value in (("prefix_store", options.prefix_store), ("shrink_to", options.shrink_to)):
        if value is not None:
            shown = public_url(value) if isinstance(value, str) else value
            raise InvalidArgumentError(
                f"{name} is {shown} and tensor_parallel_size {options.tensor_parallel_size}: it needs a single rank"
            )


def _prefix_url(options: DemoOptions) -> str:
    """Return the URL of the prefix store, with a size if it is a file."""
    url = options.prefix_store or ""
    if options.prefix_store_space is None and (not url.startswith("file:") or "size=" in url):
        return url
    default = SPACE_OF_OWN_MODEL if options.model is None else SPACE_OF_OTHER_MODELS
    return sized_url(url, "prefix_store_space", options.prefix_store_space or default)


@contextmanager
def _swap_store(options: DemoOptions) -> Iterator[str]:
    """Return the URL of the external store, with a size; remove its temporary folder at the end."""
    url, space = options.swap_store, options.swap_store_space
    default = SPACE_OF_OWN_MODEL if options.model is None else SPACE_OF_OTHER_MODELS
    if url is not None:
        sized = space is not None or "size=" in url or not url.startswith("file:")
        yield sized_url(url, "swap_store_space", space if sized else default)
        return
    folder = tempfile.mkdtemp(prefix="blockyard-demo-")
    try:
        yield sized_url(f"file://{folder}", "swap_store_space", space or default)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(
    options: DemoOptions,
    model: PreTrainedModel,
    items: Sequence[WorkItem],
    faults: Faults,
    *,
    quiet: bool,
    timeline: Timeline | None,
) -> tuple[PagedRun, PoolReport | None]:
    from blockyard.integrations.transformers.generator import Generator  # noqa: PLC0415 - loads torch
    from blockyard.tools.demo.history import StepHistory  # noqa: PLC0415 - loads torch
    from blockyard.tools.demo.models import bytes_per_block, name_of_weights, require_memory  # noqa: PLC0415 - loads torch
    from blockyard.tools.demo.serve import RunWatch, serve  # noqa: PLC0415 - loads torch
    from blockyard.tools.demo.shrink import PoolWatch, defragmentation  # noqa: PLC0415 - loads torch

    device_blocks, host_blocks = pool_sizes(options, items)
    if options.swap_space is not None:
        size = bytes_per_block(model, options.block_size)
        host_blocks = read_bytes("swap_space", options.swap_space, holds=size) // size
    _require_room(options, items)
    require_memory(model, options.block_size, device_blocks, host_blocks)
    watched = options.shrink_to is not None or options.defrag is not None
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
            prefix_store=_prefix_url(options) if options.prefix_store else None,
            namespace=name_of_weights(model) if options.prefix_store else b"",
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            defragment=defragmentation(options.defrag),
            elastic=options.shrink_to is not None,
            wrap_executor=faults.wrap,
        ) as generator,
        show_progress("paged run", quiet=quiet) as view,
    ):
        watches = list[RunWatch]()
        if timeline is not None:
            watches.append(StepHistory(generator, faults, timeline))
        if not watched:
            return serve(generator, items, faults, view, watches), None
        pool = PoolWatch(generator, goal=options.defrag, shrink_to=options.shrink_to)
        return serve(generator, items, faults, view, [pool, *watches]), pool.report()


def _require_room(options: DemoOptions, items: Sequence[WorkItem]) -> None:
    """Reject a shrink to fewer blocks than the largest request needs above the watermark of 1 %."""
    largest, blocks = max(_blocks_at_the_end(item, options.block_size) for item in items), options.shrink_to
    if blocks is not None and blocks < largest + blocks // 100:
        raise InvalidArgumentError(
            f"the device would shrink to {blocks} blocks, of which {blocks // 100} stay free, but "
            f"the largest request needs {largest}"
        )


def _settle(
    model: PreTrainedModel, items: Sequence[WorkItem], outputs: Outputs, wanted: Outputs
) -> tuple[Outputs, list[Difference]]:
    """Return the unpaged run's tokens, with ties in rounding resolved like the paged run, and these ties."""
    from blockyard.tools.demo.ties import settle_ties  # noqa: PLC0415 - loads torch

    settled, ties = dict(wanted), []
    for item in items:
        pairs = list(zip(outputs[item.request_id], wanted[item.request_id], strict=True))
        if all(ours == theirs for ours, theirs in pairs):
            continue
        answers = [settle_ties(model, item, index, *pair) for index, pair in enumerate(pairs)]
        settled[item.request_id] = [tokens for tokens, _ in answers]
        ties += [tie for _, found in answers for tie in found]
    return settled, ties


@dataclass(frozen=True)
class _Run:
    """The data of the report."""

    options: DemoOptions
    model: str
    device: str
    items: Sequence[WorkItem]
    served: PagedRun
    faults: Faults
    pool: PoolReport | None


def _report(run: _Run, wanted: Outputs, ties: list[Difference], reference_seconds: float) -> Report:
    options, items, served = run.options, run.items, run.served
    identical, differences = compare(items, served.outputs, wanted)
    stats = served.stats
    tokens = sum(len(sequence) for sequences in served.outputs.values() for sequence in sequences)
    peaks = {"device": stats.peak_device_blocks, "host": stats.peak_host_blocks, "external": stats.peak_external_blocks}
    return Report(
        version=__version__,
        model=run.model,
        device=run.device,
        workload=_describe(options, len(items)),
        settings=_settings(options, served),
        requests=len(items),
        sequences=sum(item.sampling.n for item in items),
        prompt_tokens=sum(len(item.prompt) for item in items),
        output_tokens=tokens,
        steps=stats.steps,
        cached_prompt_tokens=stats.cached_tokens,
        seconds=served.seconds,
        tokens_per_second=tokens / served.seconds,
        reference_seconds=reference_seconds,
        preemptions={
            "swap_host": stats.preempted_swap_host,
            "swap_external": stats.preempted_swap_external,
            "recompute": stats.preempted_recompute,
        },
        lost=stats.lost,
        transfers=[
            TransferCount(kind, src, dst, count, count * served.bytes_per_block)
            for (kind, src, dst), count in sorted(served.blocks.items())
        ],
        peak={name: Peak(used, served.totals[name]) for name, used in peaks.items()},
        swap_store=_counters(served.swap_store),
        prefix_store=served.prefix_store,
        damage=_damage(run.faults, served.swap_store.damaged_blocks),
        sabotage=_sabotage(run.faults),
        compared=len(items),
        identical_requests=identical,
        differences=differences,
        ties=ties,
        pool=run.pool,
    )


def _counters(stats: StoreStats) -> SwapStoreCounters:
    return SwapStoreCounters(
        written_blocks=stats.written_blocks,
        written_bytes=stats.written_bytes,
        read_blocks=stats.read_blocks,
        read_bytes=stats.read_bytes,
        checksum_failures=stats.checksum_failures,
        damaged_blocks=stats.damaged_blocks,
        misses=dict(stats.misses),
        errors=stats.errors,
    )


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


def _describe(options: DemoOptions, requests: int) -> str:
    if options.trace is None:
        return f"text of Python's standard library, seed {options.seed}"
    return f"first {requests} requests of {options.trace.name}, lengths times {options.scale:g}, seed {options.seed}"


def _blocks_at_the_end(item: WorkItem, block_size: int) -> int:
    """Return a request's blocks at its end: full prompt blocks once, the rest for every sequence."""
    n = item.sampling.n
    shared = (len(item.prompt) - 1) // block_size if n > 1 else 0
    longest = -(-(len(item.prompt) + item.sampling.max_tokens) // block_size)
    return shared + n * (longest - shared)


def _padded(tokens: list[int], length: int) -> list[int]:
    """Pad with -1, which is never a token."""
    return tokens + [-1] * (length - len(tokens))
