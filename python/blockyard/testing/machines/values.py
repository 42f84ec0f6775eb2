"""What a simulated model stores for each token, and the next token it draws from that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

from blockyard.testing.machines.strategies import VOCABULARY

__all__ = ["Key", "Keyed", "draw_token", "seen", "show_key", "token_of"]

TOKEN_BITS: Final = 32
"""A value has the token's id in its lower bits; those above stand for salt, adapter and extras."""


class Keyed(Protocol):
    """What keeps prompts with the same tokens apart in a prefix cache: a request has it, for instance."""

    @property
    def salt(self) -> bytes | None:
        """Salt of the tenant."""

    @property
    def lora_id(self) -> int:
        """Number of the adapter."""

    @property
    def extras(self) -> Sequence[tuple[int, int, bytes]]:
        """Start, length and digest of other inputs."""


class Key(NamedTuple):
    """The same of a sequence."""

    salt: bytes | None = None
    lora_id: int = 0
    extras: tuple[tuple[int, int, bytes], ...] = ()


def draw_token(kv: Sequence[int], index: int) -> int:
    """Draw the next token from all earlier values, so that any wrong value changes it.

    Args:
        kv: values at positions 0, 1, ...
        index: index of the sequence in its request.

    Returns:
        A token id below `VOCABULARY`.
    """
    state = index * 7919 + 13
    for value in kv:
        state = (state * 31 + value + 1) % 1_000_003
    return state % VOCABULARY


def seen(request: Keyed, tokens: Sequence[int], first: int = 0) -> list[int]:
    """Return the values of some tokens of a request. They depend on its salt, adapter, and the extras that cover them.

    A model does not know of salts. But the values of two tenants must stay apart, so here they differ.

    Args:
        request: the request.
        tokens: token ids.
        first: position of the first of them.
    """
    code = _code("salt", request.salt) if request.salt is not None else 0
    code += _code("adapter", request.lora_id) if request.lora_id else 0
    found = [int(token) + code for token in tokens]
    for start, length, digest in request.extras:
        for at in range(max(0, start - first), min(len(found), start + length - first)):
            found[at] += _code("extra", digest)
    return found


@cache
def _code(kind: str, value: bytes | int) -> int:
    digest = sha256(repr((kind, value)).encode()).digest()
    return (1 + int.from_bytes(digest[:3], "little")) << TOKEN_BITS


def token_of(value: int) -> int:
    """Return the token of a value; of a slot that was never written or was lost, the value."""
    return value % (1 << TOKEN_BITS) if value >= 0 else value


def show_key(key: Keyed) -> str:
    """Show what a key has, as arguments of a call; empty if it has nothing."""
    shown = {"salt": key.salt, "lora_id": key.lora_id, "extras": list(key.extras)}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value not in (None, 0, []))
