"""Layouts with several cache groups: layers whose tensors differ in shape or dtype."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from blockyard.errors import LayoutError
from blockyard.layout.kv import KVLayout, check_layout, check_views, cut_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupedLayout:
    """Cache groups whose tensors differ in shape or dtype but share block ids. A row holds each group's bytes in turn.

    Attributes:
        groups: name and layout of each group, in row order.

    Raises:
        LayoutError: there are no groups, or a name is repeated.

    Example:
        >>> from blockyard.layout import GroupedLayout, KVLayout
        >>> full = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> shape = {"num_layers": 4, "block_size": 16, "num_kv_heads": 1, "head_size": 64}
        >>> latent = KVLayout("blocks tokens dim", dtype="float32", **shape)
        >>> layout = GroupedLayout((("full", full), ("latent", latent)))
        >>> layout.bytes_per_block == full.bytes_per_block + latent.bytes_per_block
        True
    """

    groups: tuple[tuple[str, KVLayout], ...]

    def __post_init__(self) -> None:
        for _, layout in self.groups:
            check_layout(layout)
        names = [name for name, _ in self.groups]
        if not names or len(set(names)) < len(names):
            raise LayoutError(f"cache groups are {names}, must be at least one, without repeats")

    @property
    def piece_sizes(self) -> list[int]:
        """Width in bytes of every view that `views` returns, in the same order."""
        return [size for _, layout in self.groups for size in layout.piece_sizes]

    @property
    def bytes_per_block(self) -> int:
        """Size of one block over all groups, in bytes."""
        return sum(self.piece_sizes)

    @property
    def num_layers(self) -> int:
        """Total number of layers; numbering continues from one group to the next."""
        return sum(layout.num_layers for _, layout in self.groups)

    @property
    def view_layers(self) -> list[int]:
        """Layer of each view that `views` returns; the group's first layer if its views are not in layer order."""
        starts = accumulate((layout.num_layers for _, layout in self.groups), initial=0)
        pairs = zip(starts, self.groups, strict=False)
        return [first + layer for first, (_, layout) in pairs for layer in layout.view_layers]

    def tensor_shapes(self, num_blocks: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of every tensor, group by group."""
        return [shape for _, layout in self.groups for shape in layout.tensor_shapes(num_blocks)]

    def by_group(self, tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Split a list of tensors, ordered by group as in a copy engine, into one list per group.

        Raises:
            LayoutError: the number of tensors does not match the groups.
        """
        counts = {name: layout.num_tensors for name, layout in self.groups}
        if len(tensors) != sum(counts.values()):
            raise LayoutError(f"got {len(tensors)} tensors, the groups have {counts}")
        left = iter(tensors)
        return {name: list(islice(left, count)) for name, count in counts.items()}

    def views(self, tensors: Mapping[str, Sequence[Tensor]] | Sequence[Tensor]) -> list[Tensor]:
        """Cut the groups' tensors into canonical views.

        Args:
            tensors: tensors by group name, or one list ordered by group; all must have the same number of blocks.

        Returns:
            uint8 views `[blocks, bytes]` as from `KVLayout.views`, group by group.

        Raises:
            LayoutError: a group is missing or unknown, tensors do not match its layout, two of them share memory, or
                the numbers of blocks differ.
        """
        names = [name for name, _ in self.groups]
        if not isinstance(tensors, Mapping):
            tensors = self.by_group(tensors)
        if set(tensors) != set(names):
            raise LayoutError(f"tensors has the groups {sorted(tensors)}, the layout has {sorted(names)}")
        views = [view for name, layout in self.groups for view in layout.views(tensors[name])]
        if len({view.shape[0] for view in views}) > 1:
            blocks = {name: layout.num_blocks(tensors[name][0]) for name, layout in self.groups}
            raise LayoutError(f"the groups' tensors hold different numbers of blocks: {blocks}")
        check_views(views)
        return views

    def row_views(self, rows: Tensor) -> list[Tensor]:
        """Cut rows, uint8 `[blocks, bytes_per_block]`, into the same pieces. Raises LayoutError."""
        return cut_rows(rows, self.piece_sizes)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the groups' names and fingerprints, in hexadecimal."""
        described = json.dumps([[name, layout.fingerprint()] for name, layout in self.groups])
        return hashlib.sha256(described.encode("ascii")).hexdigest()
