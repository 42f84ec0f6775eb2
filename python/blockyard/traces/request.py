"""`TraceRequest`: arrival, lengths and prompt prefix of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockyard.errors import InvalidArgumentError

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds since the trace's first request.
        input_tokens: prompt length in tokens, at least 1.
        output_tokens: tokens generated, at least 1.
        hash_ids: ids of the prompt's blocks; prompts with equal leading ids share their beginning. Empty if unknown.
        hash_tokens: tokens that one hash id covers; a fraction after scaling, 0 if there are no ids.
        session: number of the conversation that the request belongs to; None if unknown.
        after: indices, in the trace, of the requests whose answers this one waits for. Then `arrival` is when it
            arrived in the recorded run.
        delay: seconds from the last of these answers to this request.
        output_hash_ids: ids of the full blocks after those of `hash_ids`, whose last tokens were generated. Empty if
            unknown: only a `TraceRecorder` writes them.
    """

    arrival: float
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()
    hash_tokens: float = 0.0
    session: int | None = None
    after: tuple[int, ...] = ()
    delay: float = 0.0
    output_hash_ids: Sequence[int] = ()


def scale_lengths(requests: list[TraceRequest], scale: float) -> list[TraceRequest]:
    """Multiply all lengths by a factor, rounding up, so that no length becomes 0.

    Args:
        requests: requests from `read_trace`.
        scale: factor for prompt lengths, output lengths and tokens per hash id, above 0.

    Returns:
        New requests with the same arrivals and hash ids.

    Raises:
        InvalidArgumentError: `scale` is not a positive number, or a scaled length exceeds a trace's limit.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(f"scale is {scale}, must be a positive number")
    longest = max((max(request.input_tokens, request.output_tokens) for request in requests), default=0)
    if longest * scale > MAX_TOKENS:
        raise InvalidArgumentError(f"a length of {longest} tokens times {scale} is more than {MAX_TOKENS}")
    return [
        replace(
            request,
            input_tokens=math.ceil(request.input_tokens * scale),
            output_tokens=math.ceil(request.output_tokens * scale),
            hash_tokens=request.hash_tokens * scale,
        )
        for request in requests
    ]
