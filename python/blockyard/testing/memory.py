"""Memory that holds tokens instead of keys and values, so that a wrong transfer shows as a wrong token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, MappingError
from blockyard.layout.sizes import as_int
from blockyard.testing.interfaces import Config, TierName

__all__ = ["EMPTY", "LOST", "LateMemory", "SimulatedMemory"]

EMPTY: Final = -1
"""Content of a slot that was never written."""
LOST: Final = -2
"""Content of a slot after a failed transfer."""


class SimulatedMemory:
    """Three tiers of token blocks, with a copy engine that runs each decision immediately.

    Override `store`, `write` or `read` to plant a fault.

    Args:
        config: tier sizes.

    Attributes:
        tiers: int64 `[blocks, block_size]` for each tier.
    """

    def __init__(self, config: Config) -> None:
        self.block_size = config.block_size
        self.tiers: dict[TierName, NDArray[np.int64]] = {
            tier: np.full((blocks, config.block_size), EMPTY, dtype=np.int64)
            for tier, blocks in config.blocks().items()
        }

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Execute a decision in order. Returns the lost pairs: none.

        Raises:
            MappingError: an id is out of range, or a destination repeated.
        """
        for kind, pairs in decision.transfers():
            self.transfer(kind, pairs)
        return []

    def transfer(self, kind: str, pairs: Pairs) -> None:
        """Copy blocks.

        Raises:
            MappingError: an id is out of range, or a destination repeated.
        """
        self.refuse(pairs)
        self.store(kind, pairs, self.tiers[pairs.src][pairs.ids[:, 0]])

    def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:  # noqa: ARG002 (for subclasses)
        """Write the rows that a transfer read to their destinations. Every transfer ends here.

        Args:
            kind: kind of the transfer.
            pairs: block pairs of the transfer.
            rows: the tokens read, int64 `[len(pairs), block_size]`.
        """
        self.tiers[pairs.dst][pairs.ids[:, 1]] = rows

    def refuse(self, pairs: Pairs) -> None:
        """Reject a mapping that no copy engine would accept.

        Raises:
            MappingError: an id is out of range, or a destination repeated.
        """
        for tier, ids in ((pairs.src, pairs.ids[:, 0]), (pairs.dst, pairs.ids[:, 1])):
            if ids.size and not 0 <= ids.min() <= ids.max() < len(self.tiers[tier]):
                raise MappingError(f"block ids {ids.min()} to {ids.max()}, the {tier} tier has {len(self.tiers[tier])}")
        if len(set(pairs.ids[:, 1].tolist())) < len(pairs):
            raise MappingError(f"a destination is repeated among {pairs.ids[:, 1].tolist()}")

    def lose(self, pairs: Pairs) -> None:
        """Overwrite the destinations, as a transfer that fails halfway does."""
        self.refuse(pairs)
        self.tiers[pairs.dst][pairs.ids[:, 1]] = LOST

    def write(self, slots: NDArray[np.int64] | Sequence[int], tokens: NDArray[np.int64] | Sequence[int]) -> None:
        """Write tokens to device slots, as a model writes the keys and values of new tokens.

        Args:
            slots: slot of each token, `block * block_size + offset`, int64 `[tokens]`.
            tokens: tokens to write, int64 `[tokens]`.

        Raises:
            MappingError: a slot is out of range, or there is not one per token.
        """
        where, values = np.asarray(slots, dtype=np.int64), np.asarray(tokens)
        device = self.tiers["device"]
        if where.ndim != 1 or values.ndim != 1:
            raise MappingError(f"slots have shape {where.shape}, tokens {values.shape}, must be [tokens]")
        if len(where) != len(tokens) or (where.size and not 0 <= where.min() <= where.max() < device.size):
            raise MappingError(f"slots {where.tolist()} for {len(tokens)} tokens, the device has {device.size}")
        device.reshape(-1)[where] = values

    def read(self, block_table: NDArray[np.int32] | Sequence[int], n: int, tier: TierName = "device") -> list[int]:
        """Return the first `n` tokens of a block table.

        Args:
            block_table: block ids, `[blocks]`; entries beyond `n` tokens are ignored.
            n: number of tokens.
            tier: tier of the blocks.

        Raises:
            InvalidArgumentError: there is no such tier.
            MappingError: the table is too short, not `[blocks]`, or names a block that does not exist.
        """
        if tier not in self.tiers:
            raise InvalidArgumentError(f"tier is {tier!r}, must be one of {tuple(self.tiers)}")
        table, n = np.asarray(block_table, dtype=np.int64), as_int("n", n)
        if table.ndim != 1:
            raise MappingError(f"block_table has shape {table.shape}, must be [blocks]")
        blocks, memory = table[: -(-n // self.block_size)], self.tiers[tier]
        if len(blocks) * self.block_size < n or not all(0 <= block < len(memory) for block in blocks):
            raise MappingError(f"{n} tokens in blocks {blocks.tolist()}, the {tier} tier has {len(memory)}")
        return [int(token) for token in memory[blocks].reshape(-1)[:n]]


@dataclass(slots=True)
class _LateTransfer:
    kind: str
    pairs: Pairs  # single blocks
    row: NDArray[np.int64] | None = None
    landed: bool = False


class LateMemory(SimulatedMemory):
    """Memory whose transfers run as late as the decision allows: unordered ones land when their ticket ends.

    Thus a block that is reused too early is overwritten before it is read, and a block that is read too early is still
    empty.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._running: dict[int, list[_LateTransfer]] = {}

    def submit(self, decision: StepDecision, needed: Collection[int] = (), lost: Sequence[Pairs] = ()) -> None:
        """Begin a decision. Copies, loads into `needed`, and reads that this step's writes depend on run now.

        Args:
            decision: the step's decision.
            needed: device blocks that the step reads or writes.
            lost: pairs to lose.

        Raises:
            MappingError: an id is out of range, or a destination repeated.
        """
        gone = {(pairs.dst, int(to)) for pairs in lost for to in pairs.ids[:, 1]}
        copies = [pairs for kind, pairs in decision.transfers() if kind == "copy"]
        now = {int(block) for pairs in copies for block in pairs.ids[:, 0]} | set(needed)
        transfers = []
        for kind, pairs in decision.transfers():
            self.refuse(pairs)
            if kind != "copy":
                transfers += [_LateTransfer(kind, Pairs(pairs.src, pairs.dst, ids[None])) for ids in pairs.ids]
        self._running[decision.ticket] = transfers
        for ticket in decision.after:
            self._drain(ticket)
        for transfer in transfers:
            target = int(transfer.pairs.ids[0, 1])
            if (transfer.pairs.dst, target) in gone:
                transfer.row = np.full(self.block_size, LOST, dtype=np.int64)
            if transfer.pairs.dst == "device" and target in now:
                self._land(transfer)
        for pairs in copies:
            self.transfer("copy", pairs)
            for ids in pairs.ids:
                if (pairs.dst, int(ids[1])) in gone:
                    self.lose(Pairs(pairs.src, pairs.dst, ids[None]))

    def finish(self, ticket: int) -> None:
        """Run the rest of a decision; the caller then completes its ticket."""
        transfers = self._running.pop(ticket)
        for transfer in transfers:
            self._read(transfer)
        for transfer in transfers:
            self._land(transfer)

    def abandon(self, ticket: int) -> None:
        """Abandon a decision and fill its destinations with garbage; the caller then fails its ticket."""
        for transfer in self._running.pop(ticket):
            self.lose(transfer.pairs)

    def _drain(self, ticket: int) -> None:
        for transfer in self._running.get(ticket, ()):  # its ticket may already have ended
            if transfer.pairs.src == "device":
                self._read(transfer)

    def _read(self, transfer: _LateTransfer) -> None:
        if transfer.row is None:
            pairs = transfer.pairs
            transfer.row = self.tiers[pairs.src][int(pairs.ids[0, 0])].copy()

    def _land(self, transfer: _LateTransfer) -> None:
        self._read(transfer)
        if not transfer.landed and transfer.row is not None:
            self.store(transfer.kind, transfer.pairs, transfer.row[None])
            transfer.landed = True
