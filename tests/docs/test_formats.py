"""The page on formats has the versions that the code writes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = {
    "slab": ("rust/store/src/header.rs", r"const VERSION: u32 = (\d+);"),
    "value": ("python/blockyard/stores/value.py", r"b\"BLKYVALU\" \+ \((\d+)\)\.to_bytes"),
    "decision": ("rust/core/src/decision/envelope.rs", r"const DECISION_VERSION: u32 = (\d+);"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_page_has_the_version_that_is_written(name: str):
    path, pattern = WRITTEN[name]
    (version,) = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "operate" / "formats.md").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^\| {name}[^|]*\| (\d+) \|", page, re.MULTILINE)
    assert listed == version
