"""The store of the guide passes the whole suite that the guide says it passes."""

import re
from pathlib import Path

import pytest

from blockyard.stores import opening
from blockyard.testing.store_suite import PrefixStoreSuite

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "custom_store.md"
TESTS = sorted(name for name in dir(PrefixStoreSuite) if name.startswith("test_"))


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> PrefixStoreSuite:
    monkeypatch.setattr(opening, "_registered", {})
    found = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    names: dict[str, type[PrefixStoreSuite]] = {}
    exec(found[1].partition("TestMyStore().")[0], names)
    return names["TestMyStore"]()


@pytest.mark.parametrize("name", TESTS)
def test_the_store_of_the_guide_passes(name: str, suite: PrefixStoreSuite):
    getattr(suite, name)()
