"""vLLM engines of unequal tensor-parallel sizes read each other's chunks from a store, and no others do."""

import dataclasses
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_modules
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_heads import ORDERS, Heads
from vllm_sides import KEYS, Engine

from blockyard.errors import InvalidArgumentError

CANONICAL = {"canonical_layout": True}
SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module", params=vllm_modules.KINDS)
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with vllm_modules.loaded(request.param) as modules:
        yield modules


def engine(vllm: SimpleNamespace, root: Path, world: int, heads: Heads, **options: Any) -> Engine:
    store = {"prefix_store": f"file://{root}?size=8MiB&drop=on"}
    more = {"fields": CANONICAL, **CANONICAL, **store, **options}
    return Engine(vllm, root, world=world, heads=heads, **more)


def shared(vllm: SimpleNamespace, root: Path, sizes: list[int], heads: Heads, **options: Any) -> list[int]:
    """Have engines of these sizes compute one more chunk each; return how many chunks each found in the store."""
    found = []
    for place, world in enumerate(sizes):
        for group in range(heads.groups):
            keys = [key[:-4] + group.to_bytes(4, "big") for key in KEYS[: place + 1]]
            one = engine(vllm, root, world, heads, **options)
            found.append(one.found(keys[:place]))
            assert not found[-1] or one.load(keys[: found[-1]]), "a wrong byte"
            one.compute(keys[found[-1] :])
            rows = one.store._inner.submit_get(one.tier._digests(keys))
            entry = one.store._inner.wait(rows)
            assert entry.ok.all()
            if one.tier._rows._width == heads.block_bytes(1) * one.per_chunk:
                for key, row in zip(keys, entry.rows, strict=True):
                    assert row.tobytes() == heads.part(key, 0, 1, one.per_chunk).numpy().tobytes()
            one.close()
    return found


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=2, max_size=3),
    heads=st.builds(
        Heads,
        order=st.sampled_from(sorted(ORDERS)),
        layers=st.integers(1, 3),
        heads=st.sampled_from(SIZES),
        tokens=st.sampled_from([1, 4, 16]),
        row_bytes=st.sampled_from([8, 16, 128]),
        groups=st.integers(1, 2),
    ),
    per_chunk=st.integers(1, 3),
)
def test_engines_of_all_sizes_read_each_others_chunks(
    vllm: SimpleNamespace, sizes: list[int], heads: Heads, per_chunk: int
):
    with tempfile.TemporaryDirectory() as root:
        found = shared(vllm, Path(root), sizes, heads, blocks_per_chunk=per_chunk)
    assert found == [place for place in range(len(sizes)) for _ in range(heads.groups)]


def test_workers_with_equal_bytes_share_with_one_worker(vllm: SimpleNamespace, tmp_path: Path):
    latent = Heads(heads=1)
    one = engine(vllm, tmp_path, 1, latent)
    one.compute(KEYS[:3])
    one.close()
    four = engine(vllm, tmp_path, 4, latent, fields={**CANONICAL, "replicated_layout": True})
    assert four.found(KEYS[:3]) == 3
    assert four.load(KEYS[:3])
    four.close()


def test_chunks_of_another_size_order_or_block_are_not_found_without_a_mapping(
    vllm: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def found(world: int, heads: Heads, **more: Any) -> int:
        one = engine(vllm, tmp_path, world, heads, **more)
        number = one.found(KEYS[:2])
        assert not number or one.load(KEYS[:2])
        one.compute(KEYS[number:2])
        one.close()
        return number

    whole = Heads()
    assert [found(world, whole) for world in (2, 1, 4)] == [0, 2, 2]
    assert found(2, whole, canonical_layout=False, fields={}) == 0  # as before this option
    assert found(1, whole, canonical_layout=False, fields={}) == 0
    assert found(2, whole, canonical_layout=False, fields={}) == 2
    assert found(1, whole, fields={**CANONICAL, "kv_cache_layout": "LBNHC"}) == 0
    assert found(1, Heads(tokens=8)) == 0
    assert "canonical_layout" not in caplog.text
    partly = Heads(groups=2, unmapped=1)
    assert [found(world, partly) for world in (2, 2, 1, 1)] == [0, 2, 0, 2]
    reason = "canonical_layout: engines of other tensor-parallel sizes do not share the store: vLLM cannot tell which"
    assert f"{reason} bytes of layers.0.1 belong to which heads" in caplog.text


def test_blocks_that_cannot_be_cut_by_heads_are_refused_by_name(vllm: SimpleNamespace):
    cut = importlib.import_module("blockyard.integrations.vllm.identity").cut_by_heads
    base, names, heads = vllm.base, [("a", "b")], Heads()
    blocks = torch.zeros((2, heads.block_bytes(2)), dtype=torch.int8)
    size = heads.page_bytes(2)

    def refused(message: str, change: Callable[[Any], None], block_bytes: int = heads.block_bytes(2)) -> None:
        caches = heads.caches(base, blocks, 1, 2)
        assert cut(caches, names, heads.block_bytes(2)) == (size, 1)
        change(caches.group_data_refs[0])
        with pytest.raises(InvalidArgumentError, match=message):
            cut(caches, names, block_bytes)

    def mapped(ref: Any, **changes: Any) -> Any:
        return dataclasses.replace(ref, mapping=dataclasses.replace(ref.mapping, **changes))

    def replace(place: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda refs: refs.__setitem__(place, make(refs[place]))

    def run(*fields: int) -> Callable[[Any], Any]:
        return lambda ref: mapped(ref, runs=(base.CopyRun(*fields),))

    refused("blocks have 600 bytes, their layers 512", lambda refs: None, 600)
    refused("which bytes of b belong", replace(1, lambda ref: mapped(ref, parallelism_agnostic=False)))
    refused("a uses 250 bytes of 256", replace(0, lambda ref: dataclasses.replace(ref, page_size_bytes=250)))
    refused("the heads of b do not lie side by side", replace(1, run(0, 250, 256, 1, 256, 256)))
    refused("the heads of a do not lie side by side", replace(0, run(0, 64, 64, 4, 64, 64 * 3)))
    refused("the heads of a do not lie side by side", replace(0, run(0, 256, 128, 1, 128, 128)))
    refused("these layers share their heads in unequal ways: a, b", replace(1, run(0, 64, 64, 4, 64, 128)))
