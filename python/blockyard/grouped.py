"""Several cache groups in one row: layers whose tensors differ in shape or dtype."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.errors import LayoutError
from blockyard.layout import KVLayout, cut_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupedLayout:
    """Cache groups whose tensors differ in shape or dtype and share block ids: a row has the bytes of each in turn.

    Attributes:
        groups: name and layout of each, in the order of a row.

    Raises:
        LayoutError: there are none, or a name is there twice.
    """

    groups: tuple[tuple[str, KVLayout], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.groups]
        if not names or len(set(names)) < len(names):
            raise LayoutError(f"cache groups are {names}, wanted at least one, each once")

    @property
    def piece_sizes(self) -> list[int]:
        """Width in bytes of every view that `views` returns, in the same order."""
        return [size for _, layout in self.groups for size in layout.piece_sizes]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all groups."""
        return sum(self.piece_sizes)

    def views(self, tensors: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        """Cut the groups' tensors into canonical views.

        Args:
            tensors: those of each group by its name; all hold as many blocks.

        Returns:
            uint8 views `[blocks, bytes]`, as those of `KVLayout.views`, group after group.

        Raises:
            LayoutError: a group is missing or unknown, tensors do not have its layout, or the numbers of blocks differ.
        """
        names = [name for name, _ in self.groups]
        if set(tensors) != set(names):
            raise LayoutError(f"tensors are of the groups {sorted(tensors)}, the layout has {sorted(names)}")
        views = [view for name, layout in self.groups for view in layout.views(tensors[name])]
        if len({view.shape[0] for view in views}) > 1:
            blocks = {name: layout.num_blocks(tensors[name][0]) for name, layout in self.groups}
            raise LayoutError(f"the groups' tensors hold different numbers of blocks: {blocks}")
        return views

    def row_views(self, rows: Tensor) -> list[Tensor]:
        """Cut rows, uint8 `[blocks, bytes_per_block]`, into the same pieces. Raises LayoutError."""
        return cut_rows(rows, self.piece_sizes)

    def fingerprint(self) -> str:
        """Give the SHA-256, in hexadecimal, of the groups' names and fingerprints."""
        described = json.dumps([[name, layout.fingerprint()] for name, layout in self.groups])
        return hashlib.sha256(described.encode("ascii")).hexdigest()
