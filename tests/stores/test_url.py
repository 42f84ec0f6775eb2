"""URLs of stores: sizes, and options."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import StoreURLError
from blockyard.stores.url import StoreURL, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("2GiB", 2 << 30), ("2 GiB", 2 << 30), ("1.5KiB", 1536), ("3kB", 3000), ("4TB", 4 * 10**12)],
)
def test_sizes_are_read(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2G", "2gib", "1e9", "-1", "1.GiB", "2GiB ", "0x10", "\u0663"])
def test_invalid_sizes_are_refused(text: str):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "text", [str(2**62 + 1), "4194304.1TiB", "9" * 400 + ".5GiB", "9" * 5000, "4611686018427387905B"]
)
def test_more_bytes_than_2_to_the_62_are_refused_in_few_words(text: str):
    with pytest.raises(ValueError, match=r"is more than 2\*\*62 bytes") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 100


@given(st.integers(0, 2**62))
def test_any_number_of_bytes_is_a_size(count: int):
    assert parse_size(str(count)) == count
    assert parse_size(f"00{count >> 10}KiB") == count >> 10 << 10


@given(st.decimals(0, 2**22, places=9), st.sampled_from(["KiB", "MB", "GiB", "TiB"]))
def test_fractions_are_exact_to_the_byte(number: Decimal, unit: str):
    exact = Fraction(number) * parse_size(f"1{unit}")
    if exact <= 2**62:
        assert parse_size(f"{number:f}{unit}") == exact.__floor__()


def test_options_are_decoded_and_struck_off():
    url = StoreURL.parse("x://host/a?one=1&two=b%26c")
    assert (url.host, url.path) == ("host", "/a")
    assert url.take("two", str, "", "text") == "b&c"
    assert math.isclose(url.take("three", float, 3.5, "a number"), 3.5)
    with pytest.raises(StoreURLError, match="'one=1' is not an option"):
        url.finish("two, three")
