"""The page on URLs lists every scheme and every option that the code takes, with its values and its default."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from blockyard.errors import StoreURLError
from blockyard.stores import StoreURL, opening
from blockyard.stores.object_store import _CONFIG
from blockyard.stores.redis.store import _SWAP_TTL
from blockyard.stores.url import parse_size

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "store-urls.md"
NO_DEFAULT = {"size", "ttl", "ca", "cert", "key", "password_file", "password_env", "device", "local"}
PLACES = {"file": "/dir", "local": "/dir", "unix": "/run/redis.sock"}


def sections() -> Iterator[tuple[list[str], str]]:
    """Yield the schemes in a heading, and what stands below it."""
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        if schemes := re.findall(r"`([a-z+0-9]+)`", heading):
            yield schemes, text


def listed(scheme: str) -> dict[str, tuple[str, str]]:
    """Return a scheme's options on the page: values and default by name."""
    (text,) = [text for schemes, text in sections() if scheme in schemes]
    found = {}
    row = r"^\| `(\w+)`(?: \(([^)]*)\))? \| ([^|]*) \| ([^|]*) \|"
    for name, only, values, default in re.findall(row, text, re.MULTILINE):
        is_tls, is_cluster = scheme.startswith(("rediss", "valkeys")), "+cluster" in scheme
        if {"": True, "TLS": is_tls, "single server": not is_cluster}[only]:
            assert name not in found, f"{name} is listed twice"
            found[name] = (values.strip(), default.strip())
    for names in re.findall(rf"^\| `{scheme}` \| ([^|]*) \|$", text, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), ("text", "obstore's"))
    return found


def taken(scheme: str, patch: pytest.MonkeyPatch) -> dict[str, tuple[str, Any]]:
    """Return the options that the code takes: description of valid values and default by name."""
    found: dict[str, tuple[str, Any]] = {}
    take = StoreURL.take

    def spy(parts: StoreURL, name: str, read: Any, default: Any, wanted: str) -> Any:
        found[name] = (wanted, default)
        return take(parts, name, read, default, wanted)

    with patch.context() as patched:
        patched.setattr(StoreURL, "take", spy)
        import_module(opening._BUILT_IN[scheme][0]).read_url(f"{scheme}://{PLACES.get(scheme, 'host')}")
    return found


def test_the_page_has_every_scheme_once():
    assert sorted(scheme for schemes, _ in sections() for scheme in schemes) == sorted(opening._BUILT_IN)


@pytest.mark.parametrize("scheme", sorted(opening._BUILT_IN))
def test_the_page_lists_what_the_code_takes(scheme: str, monkeypatch: pytest.MonkeyPatch):
    found, page = taken(scheme, monkeypatch), listed(scheme)
    assert set(page) == set(found)
    for name, (values, default) in page.items():
        wanted, ours = found[name]
        assert values == wanted.partition(",")[0] if values == "a size" else values == wanted, name
        if name in NO_DEFAULT or default == "obstore's":
            assert not ours, "it has no default"
        else:
            assert (parse_size(default) if values == "a size" else type(ours)(default)) == ours, name


@pytest.mark.parametrize("scheme", sorted(opening._BUILT_IN))
def test_a_refused_option_is_answered_with_those_on_the_page(scheme: str):
    with pytest.raises(StoreURLError, match="is not an option of this store; its options are") as caught:
        opening.check_url(f"{scheme}://{PLACES.get(scheme, 'host')}?nothing=1")
    named = set(re.findall(r"\w+", str(caught.value).partition("its options are")[2])) - {"and", "for"}
    assert set(listed(scheme)) <= named
    assert named <= {*listed(scheme), "rediss", "valkeys", "ca", "cert", "key", "db"}


def test_the_page_has_the_time_after_which_swapped_blocks_go():
    assert listed("redis")["ttl"][1] == f"none; swap space {_SWAP_TTL:.0f}"


def test_every_option_that_is_passed_on_belongs_to_a_scheme_of_the_page():
    assert set(_CONFIG) <= set(opening._BUILT_IN)
