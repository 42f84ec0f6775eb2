"""Blockyard's allocator behind transformers' continuous batching: the same tokens, hits, forks and preemptions."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import continuous_batching
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from blockyard.allocators import chain_keys
from blockyard.errors import UnsupportedModelError
from blockyard.integrations.transformers import continuous
from blockyard.integrations.transformers.continuous import blockyard_allocator

PAGE, NEW = 8, 24
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=512,
        initializer_range=0.2,  # attention that a missing token changes
    )
    made = LlamaForCausalLM(config).eval()
    made.set_attn_implementation("sdpa")
    return made


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The pools that caches make meanwhile; each recounts its state at the end."""
    made: list[Any] = []
    known = continuous._SectorPool.set_blocks_per_sector

    def note(self: Any, index: int, count: int) -> None:
        made.append(self)
        known(self, index, count)

    monkeypatch.setattr(continuous._SectorPool, "set_blocks_per_sector", note)
    yield made
    for pool in made:
        pool.blocks.check()


def prompts() -> list[list[int]]:
    """Five prompts that share their first 40 tokens, and one that shares them exactly."""
    seed = torch.Generator().manual_seed(1)
    common = torch.randint(1, 128, (40,), generator=seed).tolist()
    return [common + torch.randint(1, 128, (count,), generator=seed).tolist() for count in (3, 9, 0, 17, 30, 41)]


def generate(model: Any, *, num_blocks: int = 40, copies: int = 1) -> list[list[int]]:
    # One candidate: the most likely token. Greedy search refuses copies.
    config = GenerationConfig(
        max_new_tokens=NEW, do_sample=True, top_k=1, eos_token_id=-1, pad_token_id=0, num_return_sequences=copies
    )
    paged = ContinuousBatchingConfig(page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=64)
    options = {"generation_config": config, "continuous_batching_config": paged, "progress_bar": False}
    out = model.generate_batch(prompts(), **options)
    assert all(output.error is None for output in out.values())
    return [out[name].generated_tokens for name in sorted(out)]


@pytest.mark.parametrize(
    ("num_blocks", "copies"),
    [
        pytest.param(80, 1, id="room", marks=pytest.mark.slow),
        pytest.param(24, 1, id="preemption"),
        pytest.param(80, 3, id="forks"),
    ],
)
def test_tokens_are_those_of_transformers_alone(
    model: Any, pools: list[Any], monkeypatch: pytest.MonkeyPatch, num_blocks: int, copies: int
):
    calls: Counter[str] = Counter()
    for name in ("free_blocks", "fork_blocks"):
        known = getattr(continuous._Allocator, name)

        def count(self: Any, *args: Any, known: Any = known, name: str = name) -> Any:
            calls[name if name == "fork_blocks" or args[1] else "finished"] += 1
            return known(self, *args)

        monkeypatch.setattr(continuous._Allocator, name, count)
    alone = generate(model, num_blocks=num_blocks, copies=copies)
    assert len(alone) == len(prompts()) * copies
    with blockyard_allocator():
        assert generate(model, num_blocks=num_blocks, copies=copies) == alone
    assert (calls["free_blocks"] > 0) == (num_blocks == 24), "requests were preempted"
    assert (calls["fork_blocks"] > 0) == (copies > 1)
    (pool,) = pools
    asked, found = pool.blocks.lookups
    assert 0 < found <= asked
    assert pool.blocks.num_free == pool.blocks.num_blocks


def test_what_prompts_share_is_still_cached_after_memory_was_short(model: Any, pools: list[Any]):
    with blockyard_allocator():
        generate(model, num_blocks=24)
    shared = chain_keys(prompts()[2], block_size=PAGE)
    assert len(pools[0].blocks.find(shared)) == len(shared) == 5


@pytest.mark.parametrize("sabotage", ["wrong blocks", pytest.param("no copies", marks=pytest.mark.slow)])
def test_sabotage_shows_in_the_tokens(model: Any, monkeypatch: pytest.MonkeyPatch, sabotage: str):
    copies = 3 if sabotage == "no copies" else 1
    alone = generate(model, num_blocks=80, copies=copies)
    if sabotage == "wrong blocks":
        # Blocks at one depth have one key, whatever their tokens are.
        known = continuous.chain_keys

        def keys(tokens: list[int], *, block_size: int, parent: bytes | None = None) -> list[bytes]:
            return known([0] * len(tokens), block_size=block_size, parent=parent)

        monkeypatch.setattr(continuous, "chain_keys", keys)
    else:
        monkeypatch.setattr(continuous._Allocator, "copy_blocks", lambda self, src, dst: None)
    with blockyard_allocator():
        assert generate(model, num_blocks=80, copies=copies) != alone


def test_the_hooks_are_put_back_and_others_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    cache = continuous_batching.cache
    before = dict(cache.ATTN_TYPE_TO_ALLOCATOR), cache.CachePool
    with blockyard_allocator():
        assert (dict(cache.ATTN_TYPE_TO_ALLOCATOR), cache.CachePool) != before
    assert (dict(cache.ATTN_TYPE_TO_ALLOCATOR), cache.CachePool) == before
    monkeypatch.setitem(cache.ATTN_TYPE_TO_ALLOCATOR, "full_attention", object)
    with pytest.raises(ImportError, match="another has replaced them"), blockyard_allocator():
        pass
    assert cache.ATTN_TYPE_TO_ALLOCATOR["full_attention"] is object


def test_a_hybrid_model_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="2 types of attention"):
        continuous._SectorPool(8, 2)
