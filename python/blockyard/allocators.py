"""The blocks of one tier alone, given out and taken back by reference, for engines that keep their own block tables."""

from blockyard._core import BlockAllocator, NaiveAllocator, PrefixCachingAllocator, chain_keys

__all__ = ["BlockAllocator", "NaiveAllocator", "PrefixCachingAllocator", "chain_keys"]
