"""Layouts: where the bytes of each block are in an engine's KV cache tensors. Works without torch."""

from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import BlockLayout, KVLayout, LayoutKind, probe_kind

__all__ = ["BlockLayout", "GroupedLayout", "KVLayout", "LayoutKind", "probe_kind"]
