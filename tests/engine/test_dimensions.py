"""Names of dimensions: what they make of a tensor's shape and strides, and which kinds are refused."""

import pytest
import torch

from blockyard.errors import LayoutError
from blockyard.layout.dimensions import check_kind, orders_of, shorten, spell_out

SIZES = {"blocks": 5, "tokens": 4, "heads": 3, "dim": 16, "kv": 2, "layers": 2, "dim/x": 2, "x": 8}


def test_presets_stand_for_their_names():
    for preset in ("kv_first", "blocks_first", "rocm", "flat"):
        assert shorten(spell_out(preset)) == preset
    assert shorten("kv blocks*tokens dim") == "kv slots dim"
    assert spell_out("slots dim") == "slots dim"


def test_keys_and_values_have_an_order_each():
    keys, values = orders_of("rocm")
    assert keys.shape(SIZES) == (5, 3, 2, 4, 8)
    assert values.shape(SIZES) == (5, 3, 16, 4)
    assert keys.inner == ("heads", "dim/x", "tokens", "x")


@pytest.mark.parametrize("kind", ["flat", "heads*blocks tokens dim", "slots heads*dim", "kv layers slots dim"])
def test_sizes_and_strides_of_joined_names_are_those_of_the_tensor_unjoined(kind: str):
    (order,) = orders_of(kind)
    tensor = torch.zeros(order.shape(SIZES))
    assert order.num_blocks(tensor, SIZES) == 5
    unjoined = tensor.view([SIZES[name] for name in order.names])
    assert order.strides(tensor, {**SIZES, "blocks": 0}) == dict(zip(order.names, unjoined.stride(), strict=True))
    known = {name: SIZES[name] for name in ("tokens", "heads", "kv", "layers") if name in order.names}
    assert order.read(tuple(tensor.shape), known) == {name: SIZES[name] for name in order.names}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("planes", "neither one of kv_first, blocks_first, rocm, flat nor made of the names layers, kv, "),
        ("blocks*tokens*tokens dim", "without repeats"),
        ("blocks tokens heads*", "nor made of the names"),
        ("blocks tokens dim | blocks tokens dim | blocks tokens dim", "layers and kv are not allowed"),
        ("layers blocks tokens dim | layers blocks tokens dim", "layers and kv are not allowed"),
    ],
)
def test_other_kinds_are_refused(kind: str, message: str):
    with pytest.raises(LayoutError, match=message):
        check_kind(kind)
