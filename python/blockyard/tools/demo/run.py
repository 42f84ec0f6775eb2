"""The demo: serve a workload that does not fit its KV cache, and compare every token with the unpaged model.

The pools are so small that blocks are swapped to the host and to a file and back, and recomputed. Where possible,
bad options are rejected before torch is loaded.
"""

from __future__ import annotations

from blockyard.errors import InvalidArgumentError
from blockyard.stores.opening import check_url
from blockyard.tools.demo.options import OWN_MODELS, DemoOptions, is_own, pool_sizes, swap_folder, with_size
from blockyard.tools.demo.report import Report

__all__ = ["OWN_MODELS", "DemoOptions", "make_report", "pool_sizes", "swap_folder"]


def make_report(options: DemoOptions, *, quiet: bool = True) -> Report:
    """Serve the workload from paged tiers, and compare its tokens with the unpaged model.

    Args:
        options: options of the demo.
        quiet: whether to hide the progress.

    Raises:
        BlockyardError: the options cannot be satisfied; the message says which and why.
    """
    _check(options)
    from blockyard.tools.demo.serve import serve_and_compare  # noqa: PLC0415 (loads torch)

    return serve_and_compare(options, quiet=quiet)


def _check(options: DemoOptions) -> None:
    """Reject options that are invalid for any model."""
    if not is_own(options) and not (options.model / "config.json").is_file():
        names = ", ".join(OWN_MODELS)
        raise InvalidArgumentError(
            f"no model in {options.model}: there is no config.json; it is none of {names} either"
        )
    for url in (options.swap_store, options.prefix_store):
        if url is not None:
            check_url(with_size(url, options))
