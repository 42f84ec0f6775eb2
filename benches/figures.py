"""Stores the benchmarks' figures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from blockyard._core import build_profile

if build_profile != "release":
    sys.exit("the extension is a debug build, whose figures mean nothing: run `make release` first, or `make bench`")


def keep(figures: Mapping[str, float]) -> None:
    """Add figures to the flat JSON object in the file that BENCH_JSON names, if it names one."""
    if path := os.environ.get("BENCH_JSON"):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | dict(figures), indent=2) + "\n")
