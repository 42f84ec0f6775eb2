"""The namespace of a store: every field counts, and none can pass for another."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard import KVLayout
from blockyard.errors import InvalidArgumentError
from blockyard.stores import store_namespace

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float16")
BASE: dict[str, Any] = {"model": "m", "revision": "r", "layout": LAYOUT, "world_size": 2}


def test_a_namespace_is_32_bytes_and_the_same_in_every_process():
    expected = "0c696a2d1b1ee966ece33744a5f06388b8a062a4629d5de51c30e279d3e1c0b3"
    assert store_namespace(**BASE).hex() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"revision": "s"},
        {"layout": replace(LAYOUT, dtype="bfloat16")},
        {"layout": replace(LAYOUT, block_size=32)},
        {"layout": replace(LAYOUT, kind="blocks_first")},
        {"adapter": "a"},
        {"rank": 1},
        {"world_size": 4},
        {"salt": b"tenant"},
        {"epoch": 1},
        {"more": {"rope": "2.0"}},
        {"more": {"model": "n"}},
    ],
)
def test_each_field_counts(change: dict[str, Any]):
    assert store_namespace(**(BASE | change)) != store_namespace(**BASE)


@given(st.text(min_size=1), st.text(min_size=1), st.text(), st.text(), st.dictionaries(st.text(), st.text()))
def test_fields_cannot_be_shifted_into_each_other(
    model: str, revision: str, adapter: str, salt: str, more: dict[str, str]
):
    found = store_namespace(
        model=model, revision=revision, layout=LAYOUT, adapter=adapter, salt=salt.encode(), more=more
    )
    for shifted in (
        {"model": model + revision[:1], "revision": revision[1:] or "x", "adapter": adapter, "salt": salt.encode()},
        {"model": model, "revision": revision + adapter, "adapter": "", "salt": salt.encode()},
        {"model": model, "revision": revision, "adapter": adapter + salt, "salt": b""},
    ):
        same = (shifted["model"], shifted["revision"], shifted["adapter"], shifted["salt"])
        if same != (model, revision, adapter, salt.encode()):
            assert store_namespace(layout=LAYOUT, more=more, **shifted) != found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model is '', must not be empty"),
        ({"revision": ""}, "revision is '', must not be empty"),
        ({"rank": 2}, "rank is 2, must be 0 to 1"),
        ({"rank": -1}, "rank is -1, must be 0 to 1"),
        ({"epoch": -1}, "epoch is -1, must be at least 0"),
    ],
)
def test_fields_out_of_range_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        store_namespace(**(BASE | change))
