"""How much memory this process uses."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Return the resident set size of this process, in bytes."""
    status = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = next(line for line in status.splitlines() if line.startswith("Rss:"))
    return int(found.split()[1]) * 1024
