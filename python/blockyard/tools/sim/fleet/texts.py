"""What a simulated model computes: numbers that identify the tokens, the weights and the step they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import export_keys
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError

__all__ = ["BLOCK_SIZE", "CELL_BYTES", "Stamp", "Texts"]

BLOCK_SIZE: Final = 2  # tokens
CELL_BYTES: Final = 16  # a key and a value of one token
_MASK: Final = (1 << 62) - 1
_TOKENS: Final = 50


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


@dataclass
class Texts:
    """Everything that the engines have computed.

    A token's key is a digest of the weights, the salt and all tokens up to it. Its value is the number of a stamp.

    Attributes:
        stamps: the stamps; a stamp's number is its index.
    """

    stamps: list[Stamp] = field(default_factory=list)
    _digests: dict[_Text, int] = field(default_factory=dict)
    _texts: dict[int, _Text] = field(default_factory=dict)

    def stamp(self, stamp: Stamp) -> int:
        """Return the number of a new stamp."""
        self.stamps.append(stamp)
        return len(self.stamps) - 1

    def digests(self, weights: str, salt: bytes | None, tokens: list[int]) -> list[int]:
        """Return the key of each token."""
        found, digest = list[int](), sum((1 + salt[0] if salt else 1, *weights.encode()))
        for end, token in enumerate(tokens, 1):
            text = _Text(weights, salt, tuple(tokens[:end]))
            known = self._digests.get(text)
            digest = (digest * 6364136223846793005 + token * 7919 + 12345) & _MASK if known is None else known
            self._digests[text], self._texts[digest] = digest, text
            found.append(digest)
        return found

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
        is_key = len(tokens) % BLOCK_SIZE == 0 and key == export_keys(tokens, block_size=BLOCK_SIZE, salt=text.salt)[-1]
        if not is_key or keys != self.digests(weights, text.salt, tokens)[-BLOCK_SIZE:]:
            raise BrokenPromiseError(f"a block of the tokens {tokens} is under another key, or incomplete")
        return [self.stamps[value] for value in values]
