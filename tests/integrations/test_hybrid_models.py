"""Models with windows, chunks, states and latents: each token is `generate`'s, wherever the cache comes from.

transformers 5.24. All models compute in float64, so no prompt is left out for two tokens that rounding could swap.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface import reference_generate
from numpy.typing import NDArray
from servers import serving_store
from tiny_models import LATENT, ROUTER, SHAPE, TINY_MODELS, VOCABULARY, WINDOW, tiny_model
from transformers import DynamicCache

from blockyard import PrefixCaching
from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers import hybrid
from blockyard.integrations.transformers.generator import Generator
from blockyard.layout import ArenaLayout

BLOCK = 4
Tokens = list[int]
GROUPS = {
    "Mistral": {"sliding_window"},
    "gpt-oss": {"sliding_window", "full_attention"},
    "Gemma 3": {"sliding_window", "full_attention"},
    "Llama 4": {"chunked_attention", "full_attention"},
    "Qwen3.5": {"recurrent", "full_attention"},
    "Jamba": {"recurrent", "full_attention"},
    "LFM2": {"recurrent", "full_attention"},
    "DeepSeek-V3": {"full_attention"},
    "Gemma 3n": {"sliding_window", "full_attention"},
    "Falcon-H1": {"recurrent", "full_attention"},
}

STATES = [name for name, kinds in GROUPS.items() if "recurrent" in kinds]
ONE_BY_ONE = [name for name in GROUPS if name != "Mistral"]  # sequences; Mistral's run in one batch

every_model = pytest.mark.parametrize("name", GROUPS)
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


@functools.cache
def work() -> tuple[list[NDArray[np.int64]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(12, 30)) for _ in range(4)]
    params = [
        SamplingParams(max_tokens=int(rng.integers(6, 11)), temperature=0.8 * (i % 3 > 0), seed=i, n=1 + i % 3)
        for i in range(4)
    ]
    return prompts, params


@functools.cache
def wanted(name: str) -> list[list[Tokens]]:
    """What `generate` makes of the work."""
    each = zip(*work(), strict=True)
    return [[reference_generate(model_of(name), prompt, p, index) for index in range(p.n)] for prompt, p in each]


def open_generator(name: str, **options: Any) -> Generator:
    return Generator(model_of(name), **{"block_size": BLOCK, "device_blocks": 96, "host_blocks": 0} | options)


def serve(generator: Generator, prompts: Sequence[Any], params: Any) -> list[list[Tokens]]:
    outputs = sorted(generator.generate(prompts, params), key=lambda output: output.index)
    return [list(output.sequences) for output in outputs]


@every_model
def test_layers_are_grouped_by_the_tokens_that_they_need(name: str):
    with open_generator(name) as generator:
        assert {group.kind for group in generator.model.groups} == GROUPS[name]


def test_every_tiny_model_is_tested():
    assert set(GROUPS) == set(TINY_MODELS)


def prompts_by_position() -> dict[int, list[int]]:
    rng = np.random.default_rng(7)
    return {position: rng.integers(0, VOCABULARY, 30).tolist() for position in range(BLOCK, 29, BLOCK)}


@functools.cache
def wanted_by_position(name: str) -> dict[int, Tokens]:
    greedy = SamplingParams(max_tokens=6)
    return {at: reference_generate(model_of(name), prompt, greedy) for at, prompt in prompts_by_position().items()}


def begin(generator: Generator) -> None:
    """Serve the first tokens of each prompt, up to the position where the prompt itself continues."""
    for position, prompt in prompts_by_position().items():
        serve(generator, [prompt[: position + 1]], SamplingParams(max_tokens=1))


def resume(generator: Generator) -> dict[int, Tokens]:
    """Serve each prompt, and check that it continues at its position."""
    found = {}
    for position, prompt in prompts_by_position().items():
        before = generator.scheduler.stats().cached_tokens
        ((found[position],),) = serve(generator, [prompt], SamplingParams(max_tokens=6))
        assert generator.scheduler.stats().cached_tokens - before == position
    generator.manager.check()
    return found


@every_model
def test_a_prompt_that_continues_at_any_position_has_the_tokens_of_generate(name: str):
    with open_generator(name, device_blocks=200) as generator:
        begin(generator)
        assert resume(generator) == wanted_by_position(name)


def own_blocks(name: str, tokens: int) -> int:
    """Bytes of some tokens in all groups of a model, if the blocks of each have their own size."""
    layout = hybrid.open_model(model_of(name), block_size=BLOCK, equal_blocks=False).layout
    sizes = layout.block_bytes if isinstance(layout, ArenaLayout) else (layout.bytes_per_block,)
    return tokens // BLOCK * sum(sizes)


@every_model
def test_with_blocks_of_their_own_size_a_prompt_continues_at_any_position(name: str):
    with open_generator(name, device_blocks=None, host_blocks=None, device_bytes=own_blocks(name, 600)) as generator:
        begin(generator)
        assert resume(generator) == wanted_by_position(name)


@every_model
def test_with_blocks_of_their_own_size_a_prompt_found_on_the_host_has_the_tokens_of_generate(name: str):
    sizes = {"device_blocks": None, "host_blocks": None, "device_bytes": own_blocks(name, 15 * BLOCK)}
    host = {"host_bytes": own_blocks(name, 160 * BLOCK), "prefix_caching": PrefixCaching(host=True)}
    with open_generator(name, **sizes, **host) as generator:
        begin(generator)
        assert resume(generator) == wanted_by_position(name)
        assert generator.cache.stats().swapped_in_blocks["host"] > 0


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_with_blocks_of_their_own_size_preempted_sequences_come_back_with_their_tokens(name: str):
    few = {"DeepSeek-V3": 13, "Jamba": 13, "LFM2": 24}.get(name, 20)
    sizes = {"device_blocks": None, "host_blocks": None, "device_bytes": own_blocks(name, few * BLOCK)}
    drafts = {"num_lookahead_tokens": 2, "draft": Guessing(wanted(name))}
    with open_generator(
        name, **sizes, **drafts, host_bytes=own_blocks(name, 40 * BLOCK), preemption_mode="swap"
    ) as generator:
        assert serve(generator, *work()) == wanted(name)
        assert generator.scheduler.stats().preempted_swap_host > 0
        assert generator.cache.stats().swapped_in_blocks["host"] > 0
        generator.manager.check()


def test_layers_that_differ_take_fewer_bytes_with_blocks_of_their_own_size():
    """Full attention and states of Qwen3.5: a prompt of the same tokens in less memory."""
    taken = []
    for sizes in ({"device_bytes": "4MiB"}, {"device_blocks": 200}):
        given = {"device_blocks": None, "host_blocks": None} if "device_bytes" in sizes else {}
        with open_generator("Qwen3.5", **given | sizes) as generator:
            fit = generator.manager.can_allocate(list(range(29)), chunk_tokens=16)
            per_block = 1 if generator.manager.num_page_classes > 1 else generator.model.layout.bytes_per_block
            taken.append(fit.bytes * per_block)
    assert taken[0] < 0.75 * taken[1]


@every_model
def test_a_prompt_found_on_the_host_has_the_tokens_of_generate(name: str):
    caching = PrefixCaching(host=True)
    with open_generator(name, device_blocks=30, host_blocks=160, prefix_caching=caching) as generator:
        begin(generator)
        assert resume(generator) == wanted_by_position(name)
        assert generator.cache.stats().swapped_in_blocks["host"] > 0


@pytest.fixture(scope="module")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """URLs of stores on a Valkey and an S3 server, which run until the last of these tests."""
    with ExitStack() as stack:
        yield functools.cache(lambda kind: stack.enter_context(serving_store(kind, tmp_path_factory.mktemp(kind))))


@pytest.mark.parametrize("own_size", [False, True], ids=["equal blocks", "blocks of their own size"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "file") for name in GROUPS), *((name, kind) for kind in ("valkey", "s3") for name in STATES)],
)
def test_a_prompt_found_in_a_store_after_a_restart_has_the_tokens_of_generate(
    name: str, kind: str, own_size: bool, store_of: Callable[[str], str], tmp_path: Path
):
    sizes: dict[str, Any] = {"device_blocks": 200, "host_blocks": 60}
    if own_size:
        memory = {"device_bytes": own_blocks(name, 600), "host_bytes": own_blocks(name, 120 * BLOCK)}
        sizes = {"device_blocks": None, "host_blocks": None, **memory}
    url = f"file://{tmp_path}?size=8MiB" if kind == "file" else store_of(kind)
    store = {"prefix_store": url, "namespace": f"{name}, {own_size}".encode(), "prefetch_timeout_base": 60.0}
    with open_generator(name, **sizes, **store) as generator:
        begin(generator)
    with open_generator(name, **sizes, **store) as generator:
        assert resume(generator) == wanted_by_position(name)
        assert generator.cache.prefix_store is not None
        assert generator.cache.prefix_store.stats().hit_blocks > 0
        generator.manager.check()


@every_model
@pytest.mark.parametrize("own", [False, True], ids=["equal blocks", "own blocks"])
@pytest.mark.parametrize("tier", ["host", "external"])
def test_preempted_sequences_come_back_with_their_tokens(name: str, tier: str, own: bool, tmp_path: Path):
    tiers: dict[str, Any] = {"host": {"host_blocks": 40}, "external": {"swap_store": f"file://{tmp_path}?size=4MiB"}}
    sizes: dict[str, Any] = {"device_blocks": few_blocks(name)}
    if own:
        sizes = {"device_blocks": None, "host_blocks": None, "device_bytes": own_blocks(name, own_tokens(name))}
        tiers["host"] = {"host_bytes": own_blocks(name, 2 * own_tokens(name))}
    with open_generator(name, **(sizes | {"preemption_mode": "swap"} | tiers[tier])) as generator:
        assert serve(generator, *work()) == wanted(name)
        stats = generator.scheduler.stats()
        if own and name == "Jamba":
            return  # its states fill the device, and requests that run need no more of them
        assert {"host": stats.preempted_swap_host, "external": stats.preempted_swap_external}[tier] > 0
        assert generator.cache.stats().swapped_in_blocks[tier] > 0
        generator.manager.check()


@every_model
def test_preempted_sequences_that_are_computed_again_have_their_tokens(name: str):
    with open_generator(name, device_blocks=few_blocks(name), preemption_mode="recompute") as generator:
        assert serve(generator, *work()) == wanted(name)
        assert generator.scheduler.stats().preempted_recompute > 0


def own_tokens(name: str) -> int:
    """Tokens of all groups that fit in the device, with blocks of their own size: some of the work."""
    return 15 * BLOCK if name == "Mistral" else 80


def few_blocks(name: str) -> int:
    """Blocks for some of the work, but not for all of it at once."""
    return {"Mistral": 15, "DeepSeek-V3": 20}.get(name, 38)


class Guessing:
    """Draft tokens of which the first few are right, as many as the length of the text says."""

    def __init__(self, outputs: list[list[Tokens]]) -> None:
        self.texts = [[*prompt, *tokens] for prompt, some in zip(work()[0], outputs, strict=True) for tokens in some]

    def __call__(self, token_ids: NDArray[np.uint32]) -> list[int]:
        known = token_ids.tolist()
        follows = next(text[len(known) :] for text in self.texts if text[: len(known)] == known)
        return [(token + (at >= len(known) % 5)) % VOCABULARY for at, token in enumerate(follows)]


@every_model
def test_rejected_draft_tokens_leave_no_trace(name: str):
    drafts = {"num_lookahead_tokens": 4, "draft": Guessing(wanted(name))}
    with open_generator(name, device_blocks=2 * few_blocks(name), **drafts) as generator:
        assert serve(generator, *work()) == wanted(name)
        stats = generator.scheduler.stats()
        assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
        generator.manager.check()


@every_model
def test_prompts_in_small_chunks_have_the_tokens_of_generate(name: str):
    with open_generator(name, max_num_batched_tokens=7) as generator:
        assert serve(generator, *work()) == wanted(name)


def lose_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take zeros for the first block that a group of attention layers needs."""
    first = hybrid._Blocks._first_in_blocks
    monkeypatch.setattr(hybrid._Blocks, "_first_in_blocks", lambda part, start: min(start, first(part, start) + BLOCK))


def keep_late_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep for each token the state of the token before it."""
    write, names = hybrid._Blocks.write, ("conv_states", "recurrent_states")

    def states(cache: DynamicCache) -> list[tuple[dict[int, Any], int, Any]]:
        found = [getattr(layer, name) for layer in cache.layers for name in names if hasattr(layer, name)]
        return [(kept, at, kept[at]) for kept in found for at in kept if kept[at] is not None]

    def write_late(blocks: Any, cache: Any, slots: NDArray[Any], *, with_states: bool) -> None:
        now = [(kept, at, state.clone()) for kept, at, state in states(cache)]
        for kept, at, state in getattr(cache, "before", now):
            kept[at] = state
        write(blocks, cache, slots, with_states=with_states)
        for kept, at, state in now:
            kept[at] = state
        if blocks._kind == "recurrent":
            cache.before = now

    def token_by_token(_model: object, where: Any) -> Iterator[list[tuple[int, int]]]:
        for length, end in zip(where.lengths.tolist(), np.cumsum(where.lengths).tolist(), strict=True):
            yield [(at, at + 1) for at in range(end - length, end)]

    monkeypatch.setattr(hybrid._Blocks, "write", write_late)
    monkeypatch.setattr(hybrid.HybridModel, "_pieces", token_by_token)


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, lose_a_block) for name in ONE_BY_ONE), *((name, keep_late_states) for name in STATES)],
)
def test_a_lost_block_and_a_state_of_the_token_before_change_tokens(
    name: str, damage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    with open_generator(name, device_blocks=200) as generator:
        damage(monkeypatch)
        begin(generator)
        found = resume(generator)
    same = [at for at, tokens in found.items() if tokens == wanted_by_position(name)[at]]
    # One attention layer beside states has little to say about the few tokens of a block.
    assert len(same) <= (4 if damage is lose_a_block and name in STATES else 0), same


def test_the_layout_of_flat_batches_is_refused_for_them():
    with pytest.raises(InvalidArgumentError, match="kind is 'blocks_first', must be 'kv_first' for GptOssForCausalLM"):
        open_generator("gpt-oss", kind="blocks_first")


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("Rwkv", {}, "RwkvForCausalLM takes no cache"),
        ("DeepseekV32", LATENT | ROUTER | {"num_key_value_heads": 4}, "layers with a DynamicIndexedLayer"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic"),
    ],
)
def test_models_whose_cache_is_unknown_are_refused_by_name(family: str, options: dict[str, Any], reason: str):
    config = getattr(transformers, f"{family}Config")(**SHAPE | options)
    with pytest.raises(UnsupportedModelError, match=reason):
        hybrid.HybridModel(getattr(transformers, f"{family}ForCausalLM")(config), block_size=BLOCK)


def test_a_model_of_states_alone_is_refused_if_transformers_keeps_no_cache_of_it():
    config = transformers.Lfm2Config(**SHAPE, layer_types=["conv", "conv"])
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM does not run with a cache"):
        hybrid.HybridModel(transformers.Lfm2ForCausalLM(config), block_size=BLOCK)


def test_attention_in_both_directions_is_refused():
    model = transformers.BertLMHeadModel(transformers.BertConfig(**SHAPE))
    with pytest.raises(UnsupportedModelError, match="gives other logits when paged"):
        hybrid.HybridModel(model, block_size=BLOCK)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_model_whose_blocks_lack_what_it_reads_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hybrid._Blocks, "_first_in_blocks", lambda _part, start: start)
    with pytest.raises(UnsupportedModelError, match="gives other logits when paged"):
        hybrid.HybridModel(model_of(name), block_size=BLOCK)


def test_layers_that_ignore_their_state_in_chunks_continue_token_by_token():
    """Jamba's scan of several tokens starts from nothing; the gated delta rule starts from its state."""
    takes_chunks = {name: hybrid.HybridModel(model_of(name), block_size=BLOCK)._takes_chunks for name in STATES}
    assert takes_chunks == {"Qwen3.5": True, "Jamba": False, "LFM2": True, "Falcon-H1": True}


def test_blocks_of_equal_size_and_other_contents_are_not_found_in_a_store():
    other = tiny_model("gpt-oss")
    other.config.sliding_window = WINDOW + 1
    models = [hybrid.HybridModel(model, block_size=BLOCK) for model in (model_of("gpt-oss"), other)]
    assert len({model.layout.fingerprint() for model in models}) == 1
    assert len({model.namespace for model in models}) == 2
