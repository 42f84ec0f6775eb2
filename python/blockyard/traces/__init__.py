"""Request traces: when requests came, how long they were, and which prompts begin alike. No text.

`read_trace` recognises the format by content. Only the standard library is used; every line and number is bounded.
"""

from blockyard.traces.reader import read_trace
from blockyard.traces.request import TraceRequest, scale_lengths

__all__ = ["TraceRequest", "read_trace", "scale_lengths"]
