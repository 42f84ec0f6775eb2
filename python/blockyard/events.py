"""Events of the prefix cache, and the keys that identify blocks across processes."""

from blockyard._core import EventBatch, export_keys

__all__ = ["EventBatch", "export_keys"]
