"""Shared by the two SGLang integrations: which prefixes can be restored, a tensor's bytes, and a check of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log

__all__ = ["as_bytes", "is_page_by_page", "leading", "refuse_own_folders", "restorable_pages", "sizes_of_store"]

_LOG = engine_log("SGLang")
_TRAILING: Final = {"swa", "auxiliary_swa", "draft_swa", "mamba"}
_PAGES_PER_TRAILING: Final = 16
"""Pages of the main pool for one of a window or a state: a prompt may resume every 1,024 tokens, with pages of 64."""


def restorable_pages(transfers: Sequence[PoolTransfer], contains: Callable[[Any], list[bool]]) -> PoolTransferResult:
    """Return which prefixes all pools together can restore, by the policy of each.

    Args:
        transfers: the pools besides the main one.
        contains: returns which pages of the prompt a pool has, by pool name.
    """
    kv_pages = leading(contains(PoolName.KV))
    hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for transfer in transfers:
        # A second form of pages that exist anyway: never a condition, so not reported.
        if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not restorable:
            continue
        there = contains(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
            # The last missing page before each prefix's end; it must lie before the window.
            gaps = accumulate((-1 if found else page for page, found in enumerate(there[:kv_pages])), max)
            good = {pages for pages, gap in enumerate(gaps, 1) if gap < max(0, pages - window)}
        elif transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            good = set(range(1, min(kv_pages, leading(there)) + 1))
        else:
            _LOG.error("pool %s has the unknown hit policy %s", transfer.name, transfer.hit_policy)
            good = set()
        if good:
            hits[transfer.name] = max(good)
        restorable = [pages for pages in restorable if pages in good]
    return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)


def is_page_by_page(name: str) -> bool:
    """Return whether a pool has a page for each one of the main pool; of windows and states, there are far fewer."""
    return name not in _TRAILING and not name.endswith("_state")


def sizes_of_store(sizes: Mapping[str, int]) -> list[int]:
    """Return the lengths of a store's values, each as often as the store has it.

    Args:
        sizes: bytes of a value, by pool.
    """
    return [size for name, size in sizes.items() for _ in range(_PAGES_PER_TRAILING if is_page_by_page(name) else 1)]


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """View the bytes of a contiguous CPU tensor; other tensors are copied."""
    flat: NDArray[np.uint8] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def refuse_own_folders(root_dir: object, ranks: int, *, share_pages: bool) -> None:
    """Refuse `root_dir`, which gives each rank its own store, if several ranks share their pages.

    Raises:
        InvalidArgumentError: they do.
    """
    if root_dir is not None and share_pages and ranks > 1:
        raise InvalidArgumentError(
            f"root_dir is {root_dir!r}, but {ranks} ranks share the pages of this model: "
            "url must name a store that all can open, such as redis://"
        )


def leading(there: Sequence[bool]) -> int:
    """Return the number of leading true values."""
    return there.index(False) if False in there else len(there)
