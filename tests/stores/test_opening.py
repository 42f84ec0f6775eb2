"""Opening a store by URL: which URLs work, and the errors of all others."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, StoreURLError
from blockyard.stores import ExternalStore, open_store, opening
from blockyard.stores.opening import check_url


def test_the_url_chooses_the_store(tmp_path: Path):
    with open_store(f"file://{tmp_path}/swap?size=1MiB&threads=2", bytes_per_block=4096) as store:
        assert isinstance(store, SlabStore)
        assert isinstance(store, ExternalStore)
        assert store.num_slots == (2**20 - 4096) // 8192
        assert store.path.parent == tmp_path / "swap"


def test_slots_may_decide_the_size(tmp_path: Path):
    with open_store(f"file://{tmp_path}", bytes_per_block=100, num_slots=3) as store:
        assert (store.num_slots, store.bytes_per_block) == (3, 100)


def test_percent_signs_in_the_path_are_decoded(tmp_path: Path):
    with open_store(f"file://localhost{tmp_path}/a%20b?size=1MiB", bytes_per_block=100) as store:
        assert isinstance(store, SlabStore)
        assert store.path.parent.name == "a b"


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("/dir?size=1GiB", "no scheme"),
        ("", "no scheme"),
        ("nfs://server/dir?size=1GiB", "'nfs'"),
        ("file://server/dir?size=1GiB", "'server' is a host"),
        ("file://dir?size=1GiB", "'dir' is a host"),
        ("file:dir?size=1GiB", "'dir' must be the absolute path"),
        ("file://?size=1GiB", "'' must be the absolute path"),
        ("file:///a%00b?size=1GiB", r"'/a%00b' has the character '\x00'"),
        ("file:///a\tb?size=1GiB", r"has the character '\t'"),
        ("file:///dir?size=1GiB\n", r"has the character '\n'"),
        ("\x1ffile:///dir?size=1GiB", r"has the character '\x1f'"),
        ("file:///a%0Ab?size=1GiB", r"'/a%0Ab' has the character '\n'"),
        ("file:///dir?size=1GiB%0d", r"'size=1GiB%0d' has the character '\r'"),
        ("file:///a\x9bb?size=1GiB", r"has the character '\x9b'"),
        ("file:///a%ff?size=1GiB", "'/a%ff' is not UTF-8"),
        ("file:///dir?size=%e2%82", "'size=%e2%82' is not UTF-8"),
        ("file:///a\udcff?size=1GiB", r"has the character '\udcff'"),
        ("mine\t://dir", r"has the character '\t'"),
        ("file:///dir", "'/dir' needs ?size="),
        ("file:///dir?size", "'size' must be an option name=value"),
        ("file:///dir?size=", "'size=' must be an option name=value"),
        ("file:///dir?=3", "'=3' must be an option name=value"),
        ("file:///dir?size=1GiB&size=2GiB", "'size=2GiB' is given twice"),
        *(
            (f"file:///dir,{same}?size=1GiB", "names a directory twice")
            for same in ("/dir", "/dir/", "//dir", "/./dir")
        ),
        ("file:///dir?size=2XB", "'size=2XB' must be a size"),
        ("file:///dir?size=2G", "'size=2G' must be a size"),
        ("file:///dir?size=-1", "'size=-1' must be a size"),
        ("file:///dir?size=0", "'size=0' must be a size"),
        ("file:///dir?size=9999999TiB", "'size=9999999TiB' must be a size"),
        ("file:///dir?size=1GiB&threads=1", "'threads=1' must be 2 to 16"),
        ("file:///dir?size=1GiB&threads=17", "'threads=17' must be 2 to 16"),
        ("file:///dir?size=1GiB&threads=many", "'threads=many' must be 2 to 16"),
        ("file:///dir?size=1GiB&direct=maybe", "'direct=maybe' must be auto, on or off"),
        ("file:///dir?size=1GiB&memory=lots", "'memory=lots' must be a size"),
        ("file:///dir?size=1GiB&timeout_base=0", "'timeout_base=0' must be 1 to 86400 seconds"),
        ("file:///dir?size=1GiB&timeout_base=nan", "'timeout_base=nan' must be 1 to 86400 seconds"),
        ("file:///dir?sise=1GiB&size=1GiB", "'sise=1GiB' is not an option"),
        ("file:///dir?size=1GiB#***", "'#***' is not part"),
        ("file:///dir/{rank}?size=1GiB", "{rank} is for Generator only"),
        ("file://[/dir?size=1GiB", "the host is malformed"),
    ],
)
def test_a_malformed_url_is_refused_with_the_part_that_is_wrong(url: str, part: str):
    with pytest.raises(StoreURLError) as caught:
        open_store(url, bytes_per_block=4096)
    assert part in str(caught.value)
    assert repr(url) in str(caught.value)
    assert not Path("/dir").exists()


@pytest.mark.parametrize("host", ["a:70\u2a74", "[", "a]", "[::1"])
def test_a_malformed_host_shows_no_password(host: str):
    """Python's own message quotes all that stands before the path."""
    with pytest.raises(StoreURLError, match=r"'redis://\*\*\*@.*': the host is malformed") as caught:
        open_store(f"redis://me:hunter2@{host}/?size=1GiB", bytes_per_block=4096)
    assert "hunter2" not in str(caught.value)


def test_memory_below_one_block_is_refused(tmp_path: Path):
    with pytest.raises(StoreURLError, match="memory is 4096, must be between one slot of 8192 bytes"):
        open_store(f"file://{tmp_path}/swap?size=1MiB&memory=4KiB", bytes_per_block=4096)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("bytes_per_block", "num_slots"), [(0, None), (-1, None), (4096, 0), (4096, -5)])
def test_sizes_below_one_are_refused(tmp_path: Path, bytes_per_block: int, num_slots: int | None):
    with pytest.raises(InvalidArgumentError, match="must be at least 1"):
        open_store(f"file://{tmp_path}?size=1MiB", bytes_per_block=bytes_per_block, num_slots=num_slots)


@pytest.mark.parametrize("name", ["bytes_per_block", "num_slots"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_size_that_is_no_int_is_refused(tmp_path: Path, scheme: str, name: str):
    where = f"{tmp_path}" if scheme == "file" else "no-ints"
    options: dict[str, Any] = {"bytes_per_block": 4096, name: 128.0}
    with pytest.raises(InvalidArgumentError, match=f"^{name} is 128.0, must be an int$"):
        open_store(f"{scheme}://{where}?size=1MiB", **options)


def test_a_namespace_has_32_bytes(tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="must be 32 bytes"):
        open_store(f"file://{tmp_path}?size=1MiB", bytes_per_block=1, namespace="x" * 32)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="31 bytes"):
        open_store(f"file://{tmp_path}?size=1MiB", bytes_per_block=1, namespace=bytes(31))


def test_a_scheme_can_be_registered_by_entry_point(monkeypatch: pytest.MonkeyPatch):
    plug_in = EntryPoint("mine", "tests_plug_in:open_mine", opening.ENTRY_POINTS)
    monkeypatch.setattr(opening, "entry_points", lambda group: EntryPoints([plug_in]))
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda url, **options: (self.value, url, options))
    found = open_store("mine://x", bytes_per_block=7)
    expected = {"bytes_per_block": 7, "num_slots": None, "namespace": bytes(32)}
    assert found == ("tests_plug_in:open_mine", "mine://x", expected)
    with pytest.raises(StoreURLError, match=r"known are .*file.*, mine"):
        open_store("other://x", bytes_per_block=7)


@given(st.text())
def test_no_text_raises_anything_but_a_tier_error(text: str):
    for url in (text, f"file:///nowhere/at/all?{text}"):
        with pytest.raises(StoreError):
            open_store(url, bytes_per_block=4096)


@given(st.text(), st.text())
def test_a_url_is_refused_by_how_it_is_written_before_it_is_opened(path: str, query: str):
    url = f"file:///nowhere/at/{path}?{query}"
    try:
        check_url(url)
    except StoreURLError:
        with pytest.raises(StoreURLError):
            open_store(url, bytes_per_block=4096)
    else:
        with pytest.raises(StoreError):
            open_store(url, bytes_per_block=4096)
