"""A cost model of copies on an H200: what `bench_transfer.py` is expected to find.

    python benches/gpu/copy_model.py

Prints the table of `docs/benchmarks/copies.md`, which names the source of each constant. Times are microseconds of the
device; the caller's own time is left out. Staged copies are walked part by part through the ring of `cuda/staged.cpp`.
"""

from itertools import pairwise

MIB = 1 << 20
# Bytes a microsecond: the link, and a kernel of 12 thread blocks between a slot and the device's views.
LINK, SCATTER = 55.3e3, 600e3
# A plain copy within the device, each byte counted once.
COPY = 2090e3
# Kernels: of few thread blocks over the link, and of all multiprocessors within the device.
KERNEL = {"h2d": 51.1e3, "d2h": 52.5e3, "d2d": 1900e3}
# From the first command of a copy to its first byte; of a kernel; from an event to work of another stream.
START, LAUNCH, EVENT = 8.0, 4.0, 2.0
# The host submits a piece of a batch in this time; a call's pieces move once it has returned.
GAP, MAX_PIECES = 0.45, 1024
SLOTS, SLOT, MIN_PART, LARGE_STAGED = 3, 16 * MIB, 2 * MIB, 512 << 10
ROW = MIB


def large(direction: str, num_bytes: float) -> float:
    """One plain copy."""
    return LAUNCH + num_bytes / COPY if direction == "d2d" else START + num_bytes / LINK


def batch(size: int, count: int) -> float:
    """Copy pieces in batched calls: the first call is waited for, then the slower of host and link."""
    first = min(count, MAX_PIECES) * GAP
    return START + max(first + count * size / LINK, count * GAP + size / LINK)


def kernel(direction: str, size: int, count: int) -> float:
    """Copy by one kernel; within the device it has all multiprocessors."""
    return LAUNCH + size * count / KERNEL[direction]


def parts(row: int, count: int) -> list[int]:
    """Rows of each part of a staged copy, as `rows_of_part` cuts them."""
    found, grown = [], MIN_PART
    while count:
        rows = min(count, max(MIN_PART // row, 1, min(max(grown // row, 1), count // 2)))
        found.append(rows)
        count, grown = count - rows, min(2 * grown, SLOT)
    return found


def staged(direction: str, size: int, count: int) -> float:
    """Copy rows of `ROW` bytes by way of slots: large copies on one stream, kernels on another."""
    row = max(ROW // size, 1) * size
    filled = emptied = 0.0
    free = [0.0] * SLOTS
    for number, rows in enumerate(parts(row, max(1, size * count // row))):
        dma = rows * (row / LINK + GAP)
        scatter = LAUNCH + rows * row / SCATTER
        fill, empty = (dma, scatter) if direction == "h2d" else (scatter, dma)
        filled = max(filled, free[number % SLOTS]) + fill
        emptied = max(emptied, filled + EVENT) + empty
        free[number % SLOTS] = emptied + EVENT
    return START + emptied + EVENT


def ours(direction: str, size: int, count: int) -> tuple[str, float]:
    """Give the strategy that is chosen without a table, and its time."""
    if direction == "d2d":
        return "kernel", kernel(direction, size, count)
    if size < LARGE_STAGED and count >= 32:
        return "staged", staged(direction, size, count)
    return "batch", batch(size, count)


def to_large(direction: str, size: int, count: int) -> float:
    """Give the predicted share of one large copy's rate."""
    return large(direction, size * count) / ours(direction, size, count)[1]


def crossing(direction: str, num_bytes: int = 64 * MIB) -> int:
    """Give the least piece, a power of two, from which on a batch is as fast as staging."""
    sizes = [1 << power for power in range(12, 21)]
    wins = [batch(size, num_bytes // size) <= staged(direction, size, num_bytes // size) * 1.03 for size in sizes]
    return next(size for (size, _), won in zip(pairwise([*sizes, 0]), wins, strict=True) if won)


def table() -> list[str]:
    """Give the lines of the table in the docs."""
    lines = ["| piece | copy | strategy | h2d | d2h | batch | kernel, h2d | kernel, d2h | d2d |", "|" + "---|" * 9]
    for size in (8 << 10, 64 << 10, 256 << 10, MIB):
        for total in (8 * MIB, 64 * MIB, 512 * MIB):
            count = total // size
            link = large("h2d", total)
            times = [ours("h2d", size, count)[1], ours("d2h", size, count)[1], batch(size, count)]
            times += [kernel(direction, size, count) for direction in ("h2d", "d2h")]
            shares = [*(link / time for time in times), to_large("d2d", size, count)]
            cells = [f"{size >> 10} KiB", f"{total >> 20} MiB", ours("h2d", size, count)[0]]
            lines.append("| " + " | ".join([*cells, *(f"{share:.2f}" for share in shares)]) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
    print(f"a batch is as fast as staging from {crossing('h2d') >> 10} KiB on")
