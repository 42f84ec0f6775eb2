"""What a simulated model stores for each token, and the next token it draws from that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

from blockyard.testing.machines.strategies import VOCABULARY

__all__ = ["Key", "Keyed", "draw_token", "seen", "show_key", "token_of"]

TOKEN_BITS: Final = 32
"""A value has the token's id in its lower bits; those above depend on the salt, adapter, extras and earlier tokens."""
_DIGESTS: Final = (1 << 31) - 1  # number of different upper bits; a prime


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


def seen(
    request: Keyed, tokens: Sequence[int], first: int = 0, before: int = 0, *, window: int | None = None
) -> list[int]:
    """Return the values of some tokens of a request.

    Each depends on all tokens up to it, as keys and values do, and on the request's salt, adapter, and the extras that
    cover them. A model does not know of salts. But the values of two tenants must stay apart, so here they differ.

    Args:
        request: the request.
        tokens: token ids.
        first: position of the first of them.
        before: value of the token before the first.
        window: window of the model. A value does not depend on earlier tokens then, which may be gone.
    """
    code = _code("salt", request.salt) if request.salt is not None else 0
    code += _code("adapter", request.lora_id) if request.lora_id else 0
    found: list[int] = []
    for at, token in enumerate(map(int, tokens), first):
        covers = [_code("extra", digest) for start, length, digest in request.extras if start <= at < start + length]
        earlier = 0 if window else before >> TOKEN_BITS
        state = (earlier * 1_000_003 + token + code + sum(covers) + 1) % _DIGESTS
        before = (state << TOKEN_BITS) + token
        found.append(before)
    return found


@cache
def _code(kind: str, value: bytes | int) -> int:
    return int.from_bytes(sha256(repr((kind, value)).encode()).digest()[:4], "little")


def token_of(value: int) -> int:
    """Return the token of a value; of a slot that was never written or was lost, the value."""
    return value % (1 << TOKEN_BITS) if value >= 0 else value


def show_key(key: Keyed) -> str:
    """Show what a key has, as arguments of a call; empty if it has nothing."""
    shown = {"salt": key.salt, "lora_id": key.lora_id, "extras": list(key.extras)}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value not in (None, 0, []))
