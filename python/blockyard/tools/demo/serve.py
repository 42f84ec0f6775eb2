"""The demo's paged run and its report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from blockyard import __version__
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.generator import Generator
from blockyard.integrations.transformers.hybrid import open_model
from blockyard.integrations.transformers.sizing import available_memory
from blockyard.progress import Progress, show_progress
from blockyard.stores.url import public_url
from blockyard.tools.demo.compare import Outputs, compare
from blockyard.tools.demo.executors import CorruptingExecutor, SteadyExecutor
from blockyard.tools.demo.models import choose_device, fitting_threads, load_model, name_of_weights
from blockyard.tools.demo.options import DemoOptions, pool_sizes, swap_folder, with_size
from blockyard.tools.demo.report import Damage, Report
from blockyard.tools.demo.workload import WorkItem, read_text, text_workload
from blockyard.types import StoreStats

__all__ = ["serve", "serve_and_compare"]


def serve_and_compare(options: DemoOptions, *, quiet: bool) -> Report:
    """Serve the workload, and compare its tokens; see `make_report`."""
    with show_progress("loading the model", quiet=quiet):
        model = load_model(options.model, choose_device(options.device))
    lengths = {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    items = text_workload(read_text(), options.requests, seed=options.seed, **lengths)
    with fitting_threads(model):
        with _open(options, model, items) as generator, show_progress("paged run", quiet=quiet) as view:
            started = time.perf_counter()
            outputs = serve(generator, items, view)
            found = _counters(generator) | {"seconds": time.perf_counter() - started}
        with show_progress("comparing with the unpaged model", quiet=quiet) as view:
            differences, ties = compare(model, items, outputs, view)
    sizes = {f"num_{tier}_blocks": count for tier, count in found["manager"].num_blocks.items()}
    return Report(
        version=__version__,
        model=type(model).__name__,
        device=model.device.type,
        workload=f"text of Python's standard library, seed {options.seed}",
        settings=_settings(options) | sizes,
        requests=len(items),
        sequences=sum(item.sampling.n for item in items),
        prompt_tokens=sum(len(item.prompt) for item in items),
        output_tokens=sum(len(sequence) for sequences in outputs.values() for sequence in sequences),
        differences=differences,
        ties=ties,
        **found,
    )


@contextmanager
def _open(options: DemoOptions, model: PreTrainedModel, items: Sequence[WorkItem]) -> Iterator[Generator]:
    """Open the model's cache."""
    opened = open_model(model, block_size=options.block_size)
    device_blocks, host_blocks = pool_sizes(options, items, max(1, len(opened.groups)))
    size, room = opened.layout.bytes_per_block, available_memory()
    # The kernel would grant more and kill the process on first use; CUDA refuses it.
    if (wanted := (host_blocks + device_blocks * (model.device.type == "cpu")) * size) > room:
        raise InvalidArgumentError(
            f"{device_blocks} device and {host_blocks} host blocks of {size} bytes need {wanted} bytes of main memory, "
            f"{room} are available"
        )
    with (
        swap_folder(options) as url,
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
            prefix_store=with_size(options.prefix_store, options) if options.prefix_store else None,
            namespace=name_of_weights(model) if options.prefix_store else b"",
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            wrap_executor=partial(CorruptingExecutor, count=options.corrupt) if options.corrupt else SteadyExecutor,
        ) as generator,
    ):
        yield generator


def serve(generator: Generator, items: Sequence[WorkItem], view: Progress) -> Outputs:
    """Serve requests that arrive at once.

    Args:
        generator: serves them.
        items: the requests.
        view: progress, updated after every step.

    Raises:
        OutOfBlocksError: a request does not fit on the device, even alone.
    """
    outputs: Outputs = {}
    scheduler, pools = generator.scheduler, [generator.manager.pool(tier) for tier in ("device", "host", "external")]
    for item in items:
        generator.add(item.request_id, item.prompt, item.sampling)
    while generator.num_unfinished:
        for done in generator.step():
            if done.error is not None:
                raise done.error
            outputs[done.request.request_id] = [list(tokens) for tokens in done.outputs]
        used = "+".join(str(pool.num_blocks - pool.num_free) for pool in pools)
        note = f"{scheduler.num_running} running, {scheduler.num_swapped} swapped, blocks {used}"
        view.step(len(outputs), len(items), note)
    if (prefixes := generator.cache.prefix_store) is not None:
        prefixes.wait(10)
    return outputs


def _counters(generator: Generator) -> dict[str, Any]:
    """Return what a run has counted, as fields of its report."""
    store, prefixes, executor = generator.swap_store, generator.cache.prefix_store, generator.executor
    swaps = StoreStats() if store is None else store.stats()
    damage = None
    if isinstance(executor, CorruptingExecutor):
        damage = Damage(executor.stored, executor.read, swaps.damaged_blocks)
    return {
        "scheduler": generator.scheduler.stats(),
        "manager": generator.manager.stats(),
        "bytes_per_block": generator.engine.layout.bytes_per_block,
        "swap_store": swaps,
        "prefix_store": None if prefixes is None else asdict(prefixes.stats()),
        "damage": damage,
    }


def _settings(options: DemoOptions) -> dict[str, int | float | str | None]:
    """Return the options for JSON, and store URLs without secrets."""
    given = {
        name: value if isinstance(value, int | float | None) else str(value) for name, value in asdict(options).items()
    }
    for name in ("prefix_store", "swap_store"):
        if given[name] is not None:
            given[name] = public_url(str(given[name]))
    return given
