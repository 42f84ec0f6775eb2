"""Layouts: where the bytes of each block are in an engine's KV cache tensors. Works without torch."""

from blockyard.layout.arena import ArenaLayout, LayerField
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import BlockLayout, KVLayout, LayoutKind, probe_kind

__all__ = ["ArenaLayout", "BlockLayout", "GroupedLayout", "KVLayout", "LayerField", "LayoutKind", "probe_kind"]
