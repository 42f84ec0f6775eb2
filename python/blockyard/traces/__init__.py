"""Request traces: when requests arrived, how long they were, and which prompts share a beginning. No text.

`read_trace` detects the format from the content and uses only the standard library; every line and number is bounded.
`TraceRecorder` writes a trace while an engine serves.
"""

from blockyard.traces.formats import TraceRequest
from blockyard.traces.groups import read_groups
from blockyard.traces.reader import read_trace
from blockyard.traces.recorder import TraceRecorder

__all__ = ["TraceRecorder", "TraceRequest", "read_groups", "read_trace"]
