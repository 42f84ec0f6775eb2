"""What a simulated model computes: numbers that identify the tokens, the weights and the step they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard import CacheGroup
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError

__all__ = ["BLOCK_SIZE", "CELL_BYTES", "GARBAGE", "MODELS", "Stamp", "Texts"]

BLOCK_SIZE: Final = 2  # tokens
CELL_BYTES: Final = 16  # a key and a value of one token
_MASK: Final = (1 << 62) - 1
_TOKENS: Final = 50
_FULL: Final = CacheGroup.full_attention()
MODELS: Final = {
    "full": (_FULL,),
    "window": (CacheGroup.sliding_window(5),),
    "states": (CacheGroup.recurrent(),),
    "hybrid": (_FULL, CacheGroup.sliding_window(5), CacheGroup.recurrent()),
    "eagle": (_FULL, CacheGroup.drafter()),
    "mtp": (CacheGroup.drafter(), CacheGroup.recurrent()),
}
"""Cache groups of the models that engines serve."""
GARBAGE: Final = -1
"""Key that no token has."""
_KINDS: Final = {"full_attention": 0, "drafter": 1, "sliding_window": 2, "recurrent": 4}  # in keys


class Stamp(NamedTuple):
    """One step of one engine.

    Attributes:
        engine: number of the engine, and of its life.
        weights: name of its weights.
        at: time of the step.
    """

    engine: tuple[int, int]
    weights: str
    at: float


class _Text(NamedTuple):
    weights: str
    salt: bytes | None
    tokens: tuple[int, ...]
    group: int


@dataclass
class Texts:
    """Everything that the engines have computed.

    A token's key is a digest of the weights, the salt, the cache group and all tokens up to it; with a drafter, also of
    the next one. Its value is the number of a stamp. A state fills its block with key and value of the last token that
    it has read.

    Attributes:
        groups: cache groups of the model.
        stamps: the stamps; a stamp's number is its index.
    """

    groups: Sequence[CacheGroup] = MODELS["full"]
    stamps: list[Stamp] = field(default_factory=list)
    _begun: dict[tuple[str, bytes | None, int], int] = field(default_factory=dict)
    _digests: dict[_Text, int] = field(default_factory=dict)
    _texts: dict[int, _Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._has_drafter = any(self.is_drafter(group) for group in range(len(self.groups)))

    def stamp(self, stamp: Stamp) -> int:
        """Return the number of a new stamp."""
        self.stamps.append(stamp)
        return len(self.stamps) - 1

    def digests(self, weights: str, salt: bytes | None, tokens: list[int], group: int = 0) -> list[int]:
        """Return a digest of the tokens up to each token, in a group."""
        found, digest = list[int](), self._begin(weights, salt, group)
        for end, token in enumerate(tokens, 1):
            text = _Text(weights, salt, tuple(tokens[:end]), group)
            known = self._digests.get(text)
            digest = (digest * 6364136223846793005 + token * 7919 + 12345) & _MASK if known is None else known
            self._digests[text], self._texts[digest] = digest, text
            found.append(digest)
        return found

    def _begin(self, weights: str, salt: bytes | None, group: int) -> int:
        """Return a number that no other weights, salt or group has."""
        text = (weights, salt, group)
        if text not in self._begun:
            number = sum((1 + salt[0] if salt else 1, *weights.encode(), group << 20))
            while number in self._begun.values():
                number += 1
            self._begun[text] = number
        return self._begun[text]

    def keys(self, weights: str, salt: bytes | None, tokens: list[int], group: int) -> list[int]:
        """Return the key of each token in a group. A drafter's last one waits for the next token."""
        digests = self.digests(weights, salt, tokens, group)
        return [*digests[1:], GARBAGE] if self.is_drafter(group) else digests

    def first_needed(self, group: int, position: int) -> int:
        """Return the first token that the token at a position attends to in a group."""
        return max(0, position + 1 - (self.groups[group].window or position + 1))

    def pinned(self, text: tuple[str, bytes | None, list[int]], num_tokens: int) -> list[int]:
        """Return the keys in the blocks that a pin of a text's first tokens holds, one group after the other."""
        found = list[int]()
        for group in range(len(self.groups)):
            needed = num_tokens - 1 if self.is_state(group) else self.first_needed(group, num_tokens)
            for end in range(needed // BLOCK_SIZE * BLOCK_SIZE, num_tokens, BLOCK_SIZE):
                found += self.block(text, group, end + BLOCK_SIZE)
        return found

    def is_state(self, group: int) -> bool:
        """Return whether a group keeps states."""
        return self.groups[group].kind == "recurrent"

    def is_drafter(self, group: int) -> bool:
        """Return whether a group is a drafter's."""
        return self.groups[group].kind == "drafter"

    def block(self, text: tuple[str, bytes | None, list[int]], group: int, end: int) -> list[int]:
        """Return the keys in the block of a group that ends with the first `end` tokens of a text."""
        weights, salt, tokens = text
        keys = self.keys(weights, salt, tokens[: end + self.is_drafter(group)], group)[:end]
        return keys[-1:] * BLOCK_SIZE if self.is_state(group) else keys[-BLOCK_SIZE:]

    @staticmethod
    def next_token(digest: int) -> int:
        """Return the token that the model samples after a token with this key."""
        return (digest >> 20) % _TOKENS

    def check_block(self, row: NDArray[np.uint8], key: bytes, weights: str) -> list[Stamp]:
        """Check a block of a store. Returns the stamp of each token.

        Args:
            row: the block's bytes.
            key: the key under which it is stored.
            weights: weights of the engine that stores or finds it.

        Raises:
            BrokenPromiseError: the block belongs to another key or to other weights.
        """
        keys, values = np.ascontiguousarray(row).view(np.int64).reshape(2, BLOCK_SIZE).tolist()
        text = self._texts.get(keys[-1])
        if text is None:
            raise BrokenPromiseError("a block has bytes that nobody computed")
        if text.weights != weights:
            raise BrokenPromiseError(f"an engine with weights {weights!r} has a block of {text.weights!r}")
        tokens = list(text.tokens)
        end = len(tokens) - self.is_drafter(text.group)
        is_key = end % BLOCK_SIZE == 0 and key in self._keys_in_stores(text, end)
        if not is_key or keys != self.block((weights, text.salt, tokens), text.group, end):
            raise BrokenPromiseError(f"a block of the tokens {tokens} is under another key, or incomplete")
        return [self.stamps[value] for value in values]

    def _keys_in_stores(self, text: _Text, end: int) -> list[bytes]:
        """Return the keys that the block of a text's first `end` tokens may have in a store; see `export_keys`.

        In a model with a drafter they also depend on the next token; only the drafter's own block tells which it is.
        See docs/decisions/0074 and 0092.
        """
        salt = bytes(32) if text.salt is None else hashlib.sha256(text.salt).digest()
        stream = b"BLKYKEYS" + _words(1, BLOCK_SIZE, 0, 0, 0, 0) + salt
        for at in range(0, end, BLOCK_SIZE):
            stream += _words(*text.tokens[at : at + BLOCK_SIZE]).ljust(64, b"\xff")
        group, marks = self.groups[text.group], [b""]
        if self._has_drafter or group != _FULL:
            mark = _words(0xFFFFFFFF, text.group, _KINDS[group.kind], group.window or 0)
            following = text.tokens[end:] or range(_TOKENS)
            marks = [mark + _words(token) for token in following] if self._has_drafter else [mark]
        return [hashlib.sha256(stream + mark.ljust(128, b"\xff") * bool(mark)).digest() for mark in marks]


def _words(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()
