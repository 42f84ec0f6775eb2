"""Hypothesis strategies: small manager sizes, prompts and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from hypothesis import strategies as st

from blockyard.scheduler import Request
from blockyard.testing.interfaces import Config

__all__ = ["VOCABULARY", "FollowUp", "configs", "follow_up", "follow_ups", "prompts", "requests"]

VOCABULARY = 97
"""Token ids are below this number."""
LONGEST_PROMPT = 24

FollowUp: TypeAlias = tuple[int, Literal["repeat", "extend", "branch"], int]
"""Which earlier request a prompt follows, how, and the number of tokens up to a branch."""

_BLOCK_SIZES = st.integers(1, 5)
_DEVICE_BLOCKS = st.integers(3, 24)
_OTHER_BLOCKS = st.integers(0, 16)
_WATERMARKS = st.sampled_from([0.0, 0.01, 0.1, 0.2])


def configs(
    *,
    block_sizes: st.SearchStrategy[int] = _BLOCK_SIZES,
    device_blocks: st.SearchStrategy[int] = _DEVICE_BLOCKS,
    host_blocks: st.SearchStrategy[int] = _OTHER_BLOCKS,
    external_blocks: st.SearchStrategy[int] = _OTHER_BLOCKS,
    watermarks: st.SearchStrategy[float] = _WATERMARKS,
) -> st.SearchStrategy[Config]:
    """Sizes of a manager: small, so that every tier fills up.

    Args:
        block_sizes: 1 to 5 if not given.
        device_blocks: 3 to 24 if not given.
        host_blocks: 0 to 16 if not given.
        external_blocks: 0 to 16 if not given.
        watermarks: 0 to 0.2 if not given.

    Returns:
        A strategy of configurations.
    """
    return st.builds(
        Config,
        block_size=block_sizes,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        external_blocks=external_blocks,
        watermark=watermarks,
    )


def prompts(*, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Prompts of 1 to `max_size` tokens.

    Args:
        max_size: length of the longest prompt.

    Returns:
        A strategy of lists of token ids.
    """
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=max_size)


def requests(
    request_ids: st.SearchStrategy[str] | None = None,
    *,
    max_prompt: int = 24,
    max_tokens: int = 16,
    max_n: int = 3,
    priorities: int = 2,
) -> st.SearchStrategy[Request]:
    """Requests, some with several sequences, some that stop early.

    Args:
        request_ids: a few names if not given, so that some are reused.
        max_prompt: length of the longest prompt.
        max_tokens: length of the longest output.
        max_n: maximum number of sequences per request.
        priorities: number of priorities.

    Returns:
        A strategy of requests.
    """
    return st.builds(
        Request,
        request_id=st.sampled_from("abcdefgh") if request_ids is None else request_ids,
        prompt=prompts(max_size=max_prompt),
        max_tokens=st.integers(1, max_tokens),
        n=st.integers(1, max_n),
        priority=st.integers(0, priorities - 1),
        arrival=st.sampled_from([0.0, 1.0]),
        stop_token_ids=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=3),
    )


def follow_ups() -> st.SearchStrategy[FollowUp | None]:
    """How a prompt starts: half of them like an earlier one, so that a prefix cache has hits."""
    hows: st.SearchStrategy[Literal["repeat", "extend", "branch"]] = st.sampled_from(["repeat", "extend", "branch"])
    return st.none() | st.tuples(st.integers(0, 7), hows, st.integers(1, LONGEST_PROMPT))


def follow_up(request: Request, earlier: Sequence[tuple[list[int], list[int]]], how: FollowUp | None) -> Request:
    """Make a request's prompt start like an earlier one.

    Args:
        request: provides the rest of the prompt.
        earlier: for each earlier request, its prompt, and its prompt with outputs.
        how: drawn from `follow_ups`.

    Returns:
        The same prompt again, a prompt that extends the earlier outputs, or one that branches off; None: `request`.
    """
    if how is None or not earlier:
        return request
    pick, way, kept = how
    prompt, whole = earlier[-1 - pick % len(earlier)]
    own = list(request.prompt)
    text = {"repeat": prompt, "extend": [*whole, *own], "branch": [*whole[:kept], *own]}[way]
    return replace(request, prompt=text[:LONGEST_PROMPT])
