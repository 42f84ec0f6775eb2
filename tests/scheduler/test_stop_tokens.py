"""The set of tokens that end some request, beside the requests themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockyard.scheduler.stop_tokens import StopTokens

TOKENS = st.frozensets(st.integers(0, 9), max_size=3)


@given(st.lists(TOKENS | st.none(), max_size=30))
def test_tokens_are_found_as_long_as_a_request_stops_at_them(steps: list[frozenset[int] | None]):
    """None takes the oldest request away."""
    stops, requests = StopTokens(), []
    everything = np.arange(12, dtype=np.uint32)
    for wanted in steps:
        if wanted is not None:
            stops.add(wanted)
            requests.append(wanted)
        elif requests:
            stops.remove(requests.pop(0))
        live = frozenset().union(*requests)
        assert bool(stops) == bool(live)
        assert stops.among(everything).tolist() == sorted(live)
