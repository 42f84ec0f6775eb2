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
from checkpoints import checkpoint, vllm_config
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_heads import ORDERS, Heads
from vllm_sides import KEYS, Engine

from blockyard.errors import InvalidArgumentError

CANONICAL = {"canonical_layout": True}
SIZES = (1, 2, 4, 8)
CHUNK = 64  # tokens
WRONG = {
    "nothing": "layers.0.0 has bytes of no token",
    "one byte": "layers.0.0 has bytes of several tokens",
    "two blocks": "layers.0.0 writes to blocks of other tokens",
    "neighbours": "layers.0.0 writes tokens in a way that depends on others",
    "places": "layers.0.0 writes tokens in another order elsewhere in a block",
    "heads": "the heads of layers.0.0 do not lie side by side",
    "backwards": "the tokens of layers.0.0 do not lie in a plain order",
    "an error": "layers.0.0 cannot write to blocks of its own: no",
}
"""Ways to write tokens, see `Heads`, that exclude other block sizes, and what the log says."""


@pytest.fixture(scope="module", params=vllm_modules.KINDS)
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with vllm_modules.loaded(request.param) as modules:
        yield modules


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


def engine(vllm: SimpleNamespace, root: Path, world: int, heads: Heads, **options: Any) -> Engine:
    store = {"prefix_store": f"file://{root}?size=8MiB&drop=on"}
    more = {"fields": CANONICAL, **CANONICAL, **store, **options}
    return Engine(vllm, root, world=world, heads=heads, **more)


def showing(model: Path) -> Any:
    """The configuration of an engine whose layers can be tried."""
    return vllm_config(model, {"model_config.dtype": torch.float16})


def shared(vllm: SimpleNamespace, root: Path, sizes: list[tuple[int, int]], heads: Heads, model: Path) -> list[int]:
    """Have engines of these sizes compute one more chunk each; return how many chunks each found in the store."""
    found, canonical = [], dataclasses.replace(heads, tokens=16)
    for place, (world, blocks) in enumerate(sizes):
        own = dataclasses.replace(heads, tokens=CHUNK // blocks)
        for group in range(heads.groups):
            keys = [key[:-4] + group.to_bytes(4, "big") for key in KEYS[: place + 1]]
            options = {"blocks_per_chunk": blocks, "keys_chunks": True, "current": showing(model)}
            one = engine(vllm, root, world, own, **options)
            found.append(one.found(keys[:place]))
            assert not found[-1] or one.load(keys[: found[-1]]), "a wrong byte"
            one.compute(keys[found[-1] :])
            rows = one.store._inner.submit_get(one.tier._digests(keys))
            entry = one.store._inner.wait(rows)
            assert entry.ok.all()
            for key, row in zip(keys, entry.rows, strict=True):
                assert row.tobytes() == canonical.part(key, 0, 1, CHUNK // 16).numpy().tobytes()
            one.close()
    return found


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from((1, 2, 4))), min_size=2, max_size=3),
    heads=st.builds(
        Heads,
        order=st.sampled_from(sorted(ORDERS)),
        layers=st.integers(1, 3),
        heads=st.sampled_from(SIZES),
        row_bytes=st.sampled_from([8, 16, 128]),
        groups=st.integers(1, 2),
    ),
)
def test_engines_of_all_sizes_read_each_others_chunks(
    vllm: SimpleNamespace, model: Path, sizes: list[tuple[int, int]], heads: Heads
):
    """Sizes are tensor-parallel sizes, and the number of blocks in a chunk."""
    with tempfile.TemporaryDirectory() as root:
        found = shared(vllm, Path(root), sizes, heads, model)
    assert found == [place for place in range(len(sizes)) for _ in range(heads.groups)]


def test_chunks_of_another_order_or_key_are_not_found(
    vllm: SimpleNamespace, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def found(tokens: int, *, keys_chunks: bool = True, root: Path = tmp_path, **more: str) -> int:
        options = {"blocks_per_chunk": CHUNK // tokens, "keys_chunks": keys_chunks, "current": showing(model)}
        one = engine(vllm, root, 1, Heads(tokens=tokens, **more), **options)
        number = one.found(KEYS[:2])
        assert not number or one.load(KEYS[:2])
        one.compute(KEYS[number:2])
        one.close()
        return number

    assert [found(16), found(32), found(64)] == [0, 2, 2]
    assert found(64, keys_chunks=False) == 2  # vLLM's own keys are those of chunks
    assert [found(32, keys_chunks=False) for _ in range(2)] == [0, 2]  # they are of blocks, in a chain of other links
    assert [found(tokens, order="packed NHD") for tokens in (32, 16)] == [0, 2]
    assert [found(tokens, writes="elements turned") for tokens in (64, 16)] == [0, 2]
    assert not caplog.records
    for writes, reason in WRONG.items():
        caplog.clear()
        root = tmp_path / writes
        assert [found(tokens, writes=writes, root=root) for tokens in (64, 32, 64)] == [0, 0, 2]
        assert f"engines of other block sizes do not share the store: {reason}" in caplog.text


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
    assert "other tensor-parallel sizes do not share" not in caplog.text
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
