"""Hypothesis strategies: small manager sizes, prompts and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from hypothesis import strategies as st

from blockyard.scheduler import Request
from blockyard.testing.interfaces import Config

__all__ = [
    "VOCABULARY",
    "FollowUp",
    "configs",
    "follow_up",
    "follow_ups",
    "prompts",
    "requests",
]

VOCABULARY = 97
"""Token ids are below this number."""
MAX_PROMPT = 24

How: TypeAlias = Literal["repeat", "extend", "branch", "join", "unlike"]
FollowUp: TypeAlias = tuple[int, How, int]
"""Which earlier request a prompt follows, how, and a number: of the tokens up to a branch, or of what is unlike."""

_BLOCK_SIZES = st.integers(1, 5)
_DEVICE_BLOCKS = st.integers(3, 24)
_OTHER_BLOCKS = st.integers(0, 16)
_WATERMARKS = st.sampled_from([0.0, 0.01, 0.1, 0.2])
_EXTRA = st.tuples(st.integers(-4, 3), st.integers(1, 4), st.sampled_from([b"cat", b"dog"]))
_EXTRAS: st.SearchStrategy[list[tuple[int, int, bytes]]] = st.lists(_EXTRA, max_size=2)
_SALTS = st.sampled_from([None, None, b"", b"tenant"])
_ADAPTERS = st.sampled_from([0, 0, 0, 7])


def configs(
    *,
    block_sizes: st.SearchStrategy[int] = _BLOCK_SIZES,
    device_blocks: st.SearchStrategy[int] = _DEVICE_BLOCKS,
    host_blocks: st.SearchStrategy[int] = _OTHER_BLOCKS,
    external_blocks: st.SearchStrategy[int] = _OTHER_BLOCKS,
    watermarks: st.SearchStrategy[float] = _WATERMARKS,
) -> st.SearchStrategy[Config]:
    """Make small manager sizes, so that every tier fills up.

    Args:
        block_sizes: strategy for the block size, 1 to 5 by default.
        device_blocks: strategy for the number of device blocks, 3 to 24 by default.
        host_blocks: strategy for the number of host blocks, 0 to 16 by default.
        external_blocks: strategy for the number of external slots, 0 to 16 by default.
        watermarks: strategy for the watermark, 0 to 0.2 by default.

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
    """Make prompts of 1 to `max_size` tokens.

    Args:
        max_size: maximum length of a prompt.

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
    """Make requests: some have several sequences, stop early, or have a salt, an adapter or extras.

    Args:
        request_ids: strategy for ids; a few names by default, so that some are reused.
        max_prompt: maximum length of a prompt.
        max_tokens: maximum length of an output.
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
        salt=_SALTS,
        lora_id=_ADAPTERS,
        extras=st.one_of(*[st.builds(list)] * 3, _EXTRAS),
    ).map(_with_extras_at_end)


def _with_extras_at_end(request: Request) -> Request:
    """Let the starts of a request's extras count from its prompt's end: most then lie in a partial block."""
    end = len(request.prompt)
    return with_extras_inside(
        replace(request, extras=[(max(0, end + at), n, image) for at, n, image in request.extras])
    )


def with_extras_inside(request: Request) -> Request:
    """Drop a request's extras beyond its end."""
    end = len(request.prompt) + request.max_tokens
    return replace(request, extras=[extra for extra in request.extras if extra[0] + extra[1] <= end])


def follow_ups() -> st.SearchStrategy[FollowUp | None]:
    """Make prompt prefixes: half of them repeat an earlier prompt, so that a prefix cache has hits."""
    hows: st.SearchStrategy[How] = st.sampled_from(["repeat", "repeat", "extend", "branch", "join", "unlike"])
    return st.none() | st.tuples(st.integers(0, 7), hows, st.integers(1, MAX_PROMPT))


def follow_up(request: Request, earlier: Sequence[tuple[Request, list[int]]], how: FollowUp | None) -> Request:
    """Make a request's prompt share a prefix with an earlier one.

    Args:
        request: request that provides the rest of the prompt.
        earlier: earlier requests, each with its prompt and outputs.
        how: value drawn from `follow_ups`.

    Returns:
        The same prompt again, or one that extends the earlier outputs, or goes on as another earlier request does, all
        with the earlier salt, adapter and extras; one that extends the outputs without one of these; or one that
        branches off. `request` if `how` is None.
    """
    if how is None or not earlier:
        return request
    pick, way, kept = how
    one, whole = earlier[-1 - pick % len(earlier)]
    own, other = list(request.prompt), earlier[-1 - (pick + 1) % len(earlier)][1]
    text = {
        "repeat": list(map(int, one.prompt)),
        "extend": [*whole, *own],
        "unlike": [*whole, *own],
        "branch": [*whole[:kept], *own],
        "join": [*whole[: 1 + kept % 4], *other[1 + kept % 4 :]],
    }[way]
    own_field = kept % 3 if way == "unlike" else None
    if way != "branch":
        request = replace(
            request,
            salt=request.salt if own_field == 0 else one.salt,
            lora_id=request.lora_id if own_field == 1 else one.lora_id,
            extras=request.extras if own_field == 2 else one.extras,
        )
    return with_extras_inside(replace(request, prompt=text[:MAX_PROMPT]))
