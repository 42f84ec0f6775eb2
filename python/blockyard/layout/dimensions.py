"""Names of a cache tensor's dimensions: parses the kind of a layout and derives shapes and strides from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Final

from blockyard.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Order", "check_kind", "orders_of", "shorten", "spell_out"]

_PRESETS: Final[dict[str, str]] = {
    "kv_first": "kv blocks tokens heads dim",
    "blocks_first": "blocks kv tokens heads dim",
    "rocm": "blocks heads dim/x tokens x | blocks heads dim tokens",
    "flat": "kv blocks tokens*heads*dim",
}
_NAMES = ("layers", "kv", "blocks", "tokens", "heads", "dim", "dim/x", "x")
# The elements of a head are one dimension or two.
_ELEMENTS = (["dim"], ["dim/x", "x"])


@dataclass(frozen=True)
class Order:
    """The dimensions of a tensor, outermost first, each a tuple of names: `("tokens", "heads")` joins two of them."""

    dimensions: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, outermost first."""
        return tuple(name for dimension in self.dimensions for name in dimension)

    @property
    def inner(self) -> tuple[str, ...]:
        """Names after the block dimension."""
        return self.names[self.names.index("blocks") + 1 :]

    @property
    def before(self) -> tuple[str, ...]:
        """Names before the block dimension."""
        return self.names[: self.names.index("blocks")]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(prod(sizes[name] for name in dimension) for dimension in self.dimensions)

    def num_blocks(self, tensor: Tensor, sizes: Mapping[str, int]) -> int:
        """Return the number of blocks in a tensor."""
        at, dimension = next((at, names) for at, names in enumerate(self.dimensions) if "blocks" in names)
        return int(tensor.shape[at]) // prod(sizes[name] for name in dimension if name != "blocks")

    def strides(self, tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, int]:
        """Strides by name, in elements."""
        found, sizes = {}, {**sizes, "blocks": self.num_blocks(tensor, sizes)}
        for dimension, stride in zip(self.dimensions, tensor.stride(), strict=True):
            for at, name in enumerate(dimension):
                found[name] = stride * prod(sizes[inner] for inner in dimension[at + 1 :])
        return found

    def read(self, shape: tuple[int, ...], known: dict[str, int]) -> dict[str, int]:
        """Return the size of each name in a tensor's shape; without a `heads` dimension there is one head."""
        sizes = dict(known)
        for size, dimension in sorted(zip(shape, self.dimensions, strict=True), key=lambda pair: len(pair[1])):
            missing = [name for name in dimension if name not in sizes]
            if "heads" in missing and len(missing) > 1:
                missing.remove("heads")
                sizes["heads"] = 1
            if len(missing) > 1:
                raise LayoutError(
                    f"{'*'.join(dimension)!r} does not determine the number of slots per block: pass block_size"
                )
            if dimension == ("tokens",) and sizes.get("tokens", size) != size:
                raise LayoutError(f"block_size is {sizes['tokens']}, tensor 0 has {size} tokens in a block")
            # A mismatch is reported later, when shapes are compared.
            sizes |= dict.fromkeys(missing, size // prod(sizes[name] for name in dimension if name in sizes))
        return sizes


def spell_out(kind: str) -> str:
    """Expand a preset to its dimension names."""
    return _PRESETS.get(kind, kind)


def shorten(kind: str) -> str:
    """Return the preset for these names, or the names themselves with `blocks*tokens` shortened to `slots`."""
    found = kind.replace("blocks*tokens", "slots")
    return next((preset for preset, names in _PRESETS.items() if names == found), found)


@cache
def orders_of(kind: str) -> tuple[Order, ...]:
    """Return the dimension order of a layer's tensors: one for all, or one for keys and one for values."""
    parts = spell_out(kind).replace("slots", "blocks*tokens").split("|")
    return tuple(Order(tuple(tuple(word.split("*")) for word in part.split())) for part in parts)


def check_kind(kind: str) -> None:
    """Check that a kind has the dimensions that a layout needs. Raises LayoutError."""
    orders = orders_of(kind)
    if not all(set(order.names) <= set(_NAMES) for order in orders):
        presets, words = ", ".join(_PRESETS), ", ".join((*_NAMES, "slots"))
        raise LayoutError(f"layout kind {kind!r} is neither one of {presets} nor made of the names {words}")
    for order in orders:
        names = order.names
        elements = [name for name in names if name in {"dim", "dim/x", "x"}]
        unique = len(set(names)) == len(names)
        if not unique or not {"blocks", "tokens"} <= set(names) or sorted(elements) not in _ELEMENTS:
            raise LayoutError(f"layout kind {kind!r} needs dim, and blocks and tokens or slots, without repeats")
        if names[-1] == "blocks":
            raise LayoutError(f"layout kind {kind!r}: blocks must not be the innermost dimension")
    joins = any({"kv", "layers"} & set(order.names) for order in orders)
    if len(orders) > 2 or (len(orders) == 2 and joins):
        raise LayoutError(f"layout kind {kind!r}: with a | between keys and values, layers and kv are not allowed")
