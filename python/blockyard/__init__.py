"""Blockyard keeps the books of a paged KV cache and moves its blocks.

    ids -> pool -> table -> manager -> decision | plan -> transfer | tiers -> offload -> integrations -> cli
    ^------------------ Rust ------------------^ ^------------------------ Python ------------------------^
"""

from blockyard._core import __version__

__all__ = ["__version__"]
