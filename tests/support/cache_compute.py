"""The compute of one step, as by a model with cache groups; its keys and values identify their tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from cache_rig import LAYERS, Cells, Rig, Tracked

from blockyard.cache import CacheStep
from blockyard.errors import SequenceStateError


class Compute:
    """One step's compute: writes keys and values of new tokens, and reads everything that these attend to.

    Every sequence on the device takes part, even without new tokens: the next step may compute with any of them.
    """

    def __init__(self, rig: Rig, step: CacheStep, counts: dict[str, int]) -> None:
        self.rig, self.step, self.counts = rig, step, counts
        loads = [pairs for kind, pairs in step.decision.transfers() if kind == "swap_in"]
        counts["loads"] += sum(len(pairs) for pairs in loads)
        self.readers = [sequence for sequence in rig.sequences if self.takes_part(sequence)]
        self.firsts = [sequence.written for sequence in self.readers]
        self.slots: list[Cells] = []
        self.expected: list[Cells] = []
        self.owners: list[tuple[int, int]] = []
        self.write_slots: list[Cells] = []
        self.write_values: list[list[int]] = []
        self.early_slots: list[int] = []
        self.early_values: list[int] = []
        self.early_owners: list[Tracked] = []
        for index, (sequence, first) in enumerate(zip(self.readers, self.firsts, strict=True)):
            for number, kind, window in rig.groups:
                self.plan(index, sequence, first, number, kind, window)
            sequence.written, sequence.found = len(sequence.tokens), 0
        self.pins = list(rig.pins)
        self.found: list[Any] = []

    def takes_part(self, sequence: Tracked) -> bool:
        if sequence.lost or self.rig.manager.tier(sequence.handle) != "device":
            return False
        try:
            self.rig.manager.block_tables(sequence.handle)
        except SequenceStateError:  # it is on its way
            return False
        return True

    def plan(self, index: int, sequence: Tracked, first: int, group: int, kind: str, window: int | None) -> None:
        end, size, of = len(sequence.tokens), self.rig.config.tokens(group), partial(self.rig.slots, group)
        table = self.rig.manager.block_table(sequence.handle, group).astype(np.int64)
        if kind == "recurrent":
            if first:
                self.early_slots.append(int(of(table[(first - 1) // size] * size)))
                self.early_values.append(sequence.values[first - 1])
                self.early_owners.append(sequence)
            if first < end:
                kept = max(first, end - 1 - sequence.drafted)
                slots = self.rig.manager.slot_mapping(sequence.handle, kept, end, group=group) // size * size
                assert slots.all(), "a state would be written to the null block"
                assert len(set(slots.tolist())) == len(slots), "the states after two draft tokens have one block"
                self.write_slots.append(of(slots))
                self.write_values.append(sequence.values[kept:])
            return
        entries, is_drafter = sequence.entries(kind), kind.endswith("drafter")
        if first < end:
            at = np.arange(first - (is_drafter and first > 0 and first != sequence.found), end)
            slots = table[at // size] * size + at % size
            assert window is None or (slots >= size).all(), "a token would be written to the null block"
            self.write_slots.append(of(slots))
            self.write_values.append(entries[at[0] : end])
        begin = 0 if window is None else max(0, first + (not is_drafter) - window)
        at = np.arange(begin, max(begin, end - is_drafter))  # the next step writes a drafter's last entry
        self.slots.append(of(table[at // size] * size + at % size))
        self.expected.append(np.array(entries[begin : begin + len(at)], np.int64))
        self.owners.append((index, begin))
        if sequence.drafts:
            at = np.arange(end, min(end + sequence.drafts, len(table) * size))
            self.write_slots.append(of(table[at // size] * size + at % size))
            self.write_values.append([7] * len(at))

    def launch(self, *, by_layer: bool) -> None:
        for layer in range(LAYERS):
            if by_layer:
                self.step.wait_for_layer(layer)
            self.rig.streams.compute(lambda layer=layer: self.run(layer))  # type: ignore[misc]

    def run(self, layer: int) -> None:
        cells = self.rig.cells[layer]
        early = cells[:, self.early_slots].copy() if self.early_slots else None
        if self.write_slots:
            values = np.concatenate([np.asarray(values, np.int64) for values in self.write_values])
            cells[:, np.concatenate(self.write_slots)] = cells_of(values, layer)
        read = cells[:, np.concatenate(self.slots)] if self.slots else None
        pinned = [cells[:, slots] for _, slots, _ in self.pins]
        self.found.append((layer, early, read, pinned))

    def check(self) -> None:
        """Check that everything read is correct, except for sequences that were reported lost."""
        for layer, early, read, pinned in self.found:
            if early is not None:
                wrong = (np.asarray(early) != cells_of(np.array(self.early_values), layer)).any(axis=0)
                for at in np.flatnonzero(wrong):
                    sequence = self.early_owners[at]
                    assert sequence.lost, f"sequence {sequence.handle}: layer {layer} reads a wrong state"
            if read is not None:
                expected = cells_of(np.concatenate(self.expected), layer)
                self.counts["cells"] += expected.shape[1]
                if not np.array_equal(read, expected):
                    self.blame(layer, (np.asarray(read) != expected).any(axis=0))
            for (pin, _, values), found in zip(self.pins, pinned, strict=True):
                assert np.array_equal(found, cells_of(values, layer)), f"layer {layer}: wrong bytes under pin {pin}"

    def blame(self, layer: int, wrong: np.ndarray) -> None:
        ends = np.cumsum([len(slots) for slots in self.slots])
        for at in np.flatnonzero(wrong):
            part = int(np.searchsorted(ends, at, side="right"))
            index, begin = self.owners[part]
            sequence = self.readers[index]
            if sequence.lost:
                continue
            position = begin + int(at) - (int(ends[part - 1]) if part else 0)
            first, end = self.firsts[index], len(sequence.values)
            raise AssertionError(
                f"sequence {sequence.handle} of {end} tokens, computed from {first}: layer {layer} reads wrong bytes "
                f"at position {position}, block {int(self.slots[part][position - begin]) // self.rig.config.block_size}"
            )


def cells_of(values: Cells, layer: int) -> Cells:
    """Key and value of tokens, int64 `[2, tokens]`."""
    both = values * 64 + layer * 2
    return np.stack((both + 1, both + 2))
