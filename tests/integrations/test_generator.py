"""The whole path in small: requests in, tokens out, equal to the unpaged model's whatever is moved on the way."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface import reference_generate
from transformers import MistralConfig, MistralForCausalLM

from blockyard import BlockManager, CacheGroup, Pairs
from blockyard._core import StepOwner
from blockyard.errors import InvalidArgumentError, InvariantError, OutOfBlocksError, StoreURLError
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.generator import Generator
from blockyard.scheduler import Scheduler
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.executors import SteadyExecutor, Wrapper

TRANSFERS = {
    *(("swap_out", "device", tier) for tier in ("host", "external")),
    *(("swap_in", tier, "device") for tier in ("host", "external")),
    ("copy", "device", "device"),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return demo_model(demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2))


@pytest.fixture(scope="module")
def wanted(model, work):
    each = zip(*work, strict=True)
    return [[reference_generate(model, prompt, params, index) for index in range(params.n)] for prompt, params in each]


def open_generator(model, tmp_path, **options):
    small = {"block_size": 4, "device_blocks": 40, "host_blocks": 6}
    tier = {"swap_store": f"file://{tmp_path}/swap?size=1MiB"}
    return Generator(model, **small | tier | options)


def generate(generator, prompts, params):
    """Serve prompts, and give their tokens in the order of the prompts."""
    outputs = sorted(generator.generate(prompts, params), key=lambda output: output.index)
    return [list(output.sequences) for output in outputs]


class Watching(Wrapper):
    """Notes which transfers were carried out: kind and tiers."""

    def __init__(self, inner):
        super().__init__(inner)
        self.transfers = set()

    def submit(self, decision, *, by_layer=False):
        self.transfers |= {(kind, pairs.src, pairs.dst) for kind, pairs in decision.transfers()}
        super().submit(decision, by_layer=by_layer)


@pytest.mark.parametrize("layout", ["kv_first", "blocks_first"])
def test_tokens_are_the_unpaged_ones_though_all_kinds_of_transfer_happen(model, work, wanted, tmp_path, layout):
    with open_generator(model, tmp_path, wrap_executor=Watching, kind=layout, preemption_mode="swap") as generator:
        assert generate(generator, *work) == wanted
        assert generator.executor.transfers == TRANSFERS
        generator.manager.check()
        assert generator.manager.pool("device").num_free == 40
        assert generator.manager.pool("external").num_free == generator.swap_store.num_slots


@pytest.fixture(scope="module")
def windowed():
    """A model whose tokens see 9 tokens, and what it says of the work without paging."""
    torch.manual_seed(3)
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None}
    return MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=9))


@pytest.mark.parametrize("host", [0, 6])
def test_a_sliding_window_keeps_no_more_blocks_than_it_needs_and_its_tokens(windowed, work, tmp_path, host):
    prompts, params = work
    alone = zip(prompts, params, strict=True)
    wanted = [[reference_generate(windowed, p, s, index) for index in range(s.n)] for p, s in alone]
    with open_generator(windowed, tmp_path, host_blocks=host, preemption_mode="swap") as generator:
        assert generate(generator, prompts, params) == wanted
        assert generator.scheduler.stats().preempted_swap_host + generator.scheduler.stats().preempted_swap_external > 0
        generator.manager.check()
        assert generator.manager.pool("device").num_free == 39, "all but the null block"


def test_a_window_that_gives_blocks_back_too_early_changes_tokens(windowed, work, tmp_path):
    prompts, params = work
    greedy = replace(params[0], n=1, max_tokens=40)
    wanted = reference_generate(windowed, prompts[0], greedy)
    with open_generator(windowed, tmp_path) as generator:
        generator.manager = generator.cache.manager = BlockManager(
            block_size=4, device_blocks=40, host_blocks=6, groups=[CacheGroup.sliding_window(3)]
        )
        generator.cache._steps = StepOwner(generator.manager, instead="the test")
        generator.scheduler = Scheduler(generator.cache)
        assert generate(generator, [prompts[0]], [greedy]) != [[wanted]]


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("host", [0, 40])
def test_every_way_of_preemption_gives_the_same_tokens(model, work, wanted, tmp_path, mode, host):
    options = {"host_blocks": host, "preemption_mode": mode, "wrap_executor": SteadyExecutor}
    with open_generator(model, tmp_path, **options) as generator:
        assert generate(generator, *work) == wanted
        stats = generator.scheduler.stats()
        assert (stats.preempted_recompute > 0) == (mode != "swap")
        assert (stats.preempted_swap_host > 0) == (mode != "recompute" and host > 0)
        assert (stats.preempted_swap_external > 0) == (mode != "recompute" and host == 0)
        moved = generator.cache.stats()
        for tier, preempted in (("host", stats.preempted_swap_host), ("external", stats.preempted_swap_external)):
            assert (moved.swapped_out_blocks[tier] > 0) == (preempted > 0)
            assert (moved.swapped_in_blocks[tier] > 0) == (preempted > 0)


class Guessing:
    """Draft tokens of which the first few are right, as many as the length of the text says."""

    def __init__(self, prompts, outputs):
        self.texts = [[*prompt, *tokens] for prompt, some in zip(prompts, outputs, strict=True) for tokens in some]

    def __call__(self, token_ids):
        known = token_ids.tolist()
        follows = next(text[len(known) :] for text in self.texts if text[: len(known)] == known)
        return [(token + (at >= len(known) % 5)) % 256 for at, token in enumerate(follows)]


def assert_drafts_were_used(stats):
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    assert stats.spec_decode_num_drafts > 0


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("host", [0, 40])
def test_draft_tokens_change_no_token_whatever_the_preemption(model, work, wanted, tmp_path, mode, host):
    options = {"host_blocks": host, "preemption_mode": mode, "wrap_executor": SteadyExecutor}
    drafts = {"num_lookahead_tokens": 4, "draft": Guessing(work[0], wanted)}
    with open_generator(model, tmp_path, **options, **drafts) as generator:
        assert generate(generator, *work) == wanted
        stats = generator.scheduler.stats()
        assert (stats.preempted_recompute > 0) or mode == "swap"
        assert (stats.preempted_swap_host > 0) == (mode != "recompute" and host > 0)
        assert (stats.preempted_swap_external > 0) == (mode != "recompute" and host == 0)
        assert_drafts_were_used(stats)
        generator.manager.check()
        assert generator.manager.pool("device").num_free == 40


def test_draft_tokens_change_no_token_of_a_sliding_window(windowed, work, tmp_path):
    prompts, params = work
    each = zip(prompts, params, strict=True)
    outputs = [[reference_generate(windowed, p, s, index) for index in range(s.n)] for p, s in each]
    drafts = {"num_lookahead_tokens": 6, "draft": Guessing(prompts, outputs)}
    with open_generator(windowed, tmp_path, preemption_mode="swap", **drafts) as generator:
        assert generate(generator, prompts, params) == outputs
        assert_drafts_were_used(generator.scheduler.stats())


def test_draft_tokens_change_no_token_of_chunked_prompts_with_a_prefix_store(model, work, wanted, tmp_path):
    options = {
        "max_num_batched_tokens": 16,
        "prefix_store": f"file://{tmp_path}/prefixes?size=1MiB",
        "namespace": b"model",
    }
    drafts = {"num_lookahead_tokens": 3, "draft": Guessing(work[0], wanted), "prefetch_timeout_base": 60.0}
    for turn in range(2):
        with open_generator(model, tmp_path, **options, **drafts) as generator:
            assert generate(generator, *work) == wanted
            assert_drafts_were_used(generator.scheduler.stats())
            assert turn == 0 or generator.cache.prefix_store.stats().hit_blocks > 0  # the pool may lose them again


def test_a_text_that_repeats_itself_is_drafted_from_its_prompt(model):
    prompt, greedy = [7, 1, 2, 3] * 5, SamplingParams(max_tokens=40)
    wanted = reference_generate(model, prompt, greedy)
    with Generator(model, block_size=4, device_blocks=40, host_blocks=0, num_lookahead_tokens=4) as generator:
        assert generate(generator, [prompt], [greedy]) == [[wanted]]
        stats = generator.scheduler.stats()
        assert stats.spec_decode_num_draft_tokens > 0
        assert stats.steps == 40 - stats.spec_decode_num_accepted_tokens


def test_a_drafter_that_raises_or_drafts_no_token_ids_costs_no_token(model, work, wanted):
    prompts, params = work
    guesses = iter([RuntimeError("no draft"), [-1]])

    def draft(token_ids):
        guess = next(guesses, ())
        if isinstance(guess, RuntimeError):
            raise guess
        return guess

    options = {"block_size": 4, "device_blocks": 40, "host_blocks": 6}
    with Generator(model, num_lookahead_tokens=4, draft=draft, **options) as generator:
        generator.add("a", prompts[0], params[0])
        generator.step()
        with pytest.raises(RuntimeError, match="no draft"):
            generator.step()
        generator.step()
        with pytest.raises(InvalidArgumentError, match="draft_token_ids go from -1 to -1"):
            generator.step()
        finished = []
        while not finished:
            finished = generator.step()
        assert list(map(list, finished[0].outputs)) == wanted[0]


@pytest.mark.parametrize("host", [0, 6])
@pytest.mark.parametrize("seed", range(3))
def test_transfers_that_end_late_cost_no_token(model, work, wanted, tmp_path, host, seed):
    class Late(Wrapper):
        """Tells of the end of a transfer some steps later, unless it is waited for."""

        def __init__(self, inner):
            super().__init__(inner)
            self.random, self.open, self.ended, self.late = np.random.default_rng(seed), [], {}, 0

        def submit(self, decision, *, by_layer=False):
            super().submit(decision, by_layer=by_layer)
            self.open.append(decision.ticket)

        def poll(self):
            self.ended |= {ticket: super(Late, self).wait(ticket) for ticket in self.open}
            self.open.clear()
            told = [ticket for ticket in self.ended if self.random.random() < 0.3]
            self.late += len(self.ended) - len(told)
            return [self.ended.pop(ticket) for ticket in told]

        def wait(self, ticket):
            if ticket in self.ended:
                return self.ended.pop(ticket)
            self.open.remove(ticket)
            return super().wait(ticket)

    options = {"host_blocks": host, "preemption_mode": "swap", "wrap_executor": Late}
    with open_generator(model, tmp_path, **options) as generator:
        assert generate(generator, *work) == wanted
        assert generator.executor.late > 0
        assert generator.scheduler.stats().preempted_swap_external > 0
        generator.manager.check()


def test_without_host_and_tier_everything_is_computed_again(model, work, wanted):
    with Generator(model, block_size=4, device_blocks=40, host_blocks=0, preemption_mode="swap") as generator:
        assert generator.swap_store is None
        assert generate(generator, *work) == wanted
        assert generator.scheduler.stats().preempted_recompute > 0


class Losing(Wrapper):
    """Carries out everything, and says of one block in three from the external tier that it did not land."""

    def __init__(self, inner):
        super().__init__(inner)
        self.losses, self.back = 0, {}

    def submit(self, decision, *, by_layer=False):
        self.back[decision.ticket] = [pairs for pairs in decision.swap_in if pairs.src == "external"]
        super().submit(decision, by_layer=by_layer)

    def poll(self):
        return [self.lose(done) for done in super().poll()]

    def wait(self, ticket):
        return self.lose(super().wait(ticket))

    def lose(self, done):
        lost = [Pairs(pairs.src, pairs.dst, pairs.ids[::3].copy()) for pairs in self.back.pop(done.ticket)]
        for pairs in lost:
            self._inner.engine.write("device", pairs.ids[:, 1].copy(), self.noise(len(pairs)))
        self.losses += sum(len(pairs) for pairs in lost)
        return done._replace(lost=(*done.lost, *lost))

    def noise(self, rows):
        size = self._inner.engine.layout.bytes_per_block
        return np.random.default_rng(0).integers(0, 256, (rows, size)).astype(np.uint8)


def test_lost_blocks_cost_a_recompute_and_no_token(model, work, wanted, tmp_path):
    options = {"host_blocks": 0, "preemption_mode": "swap", "wrap_executor": Losing}
    with open_generator(model, tmp_path, **options) as generator:
        assert generate(generator, *work) == wanted
        assert generator.executor.losses > 0
        assert generator.scheduler.stats().lost > 0
        generator.manager.check()


class Scrambling(Losing):
    """Writes other bytes over every block that came back from host or tier, and says nothing."""

    def submit(self, decision, *, by_layer=False):
        super().submit(decision, by_layer=by_layer)
        self.scramble(pairs for pairs in decision.swap_in if pairs.src == "host")

    def lose(self, done):
        self.scramble(self.back.pop(done.ticket))
        return done

    def scramble(self, back):
        for pairs in back:
            rows = self._inner.engine.read("device", pairs.ids[:, 1].copy())
            self._inner.engine.write("device", pairs.ids[:, 1].copy(), np.roll(rows, 64, axis=1))


def test_wrong_bytes_change_tokens(model, work, wanted, tmp_path):
    with open_generator(model, tmp_path, preemption_mode="swap", wrap_executor=Scrambling) as generator:
        assert generate(generator, *work) != wanted


def test_requests_may_come_go_and_stop_early(model, work, wanted, tmp_path):
    prompts, params = work
    stop = wanted[4][0][3]
    ended = SamplingParams(max_tokens=20, temperature=params[4].temperature, seed=4, n=1, eos_token_id=stop)
    seen = []
    with open_generator(model, tmp_path, on_step=lambda step, done: seen.extend(done)) as generator:
        generator.add("first", prompts[1], params[1])
        generator.add("dropped", prompts[2], params[2])
        for _ in range(3):
            generator.step()
        generator.abort("dropped")
        generator.add("dropped", prompts[4], ended)
        while generator.num_unfinished:
            generator.step()
        generator.drain()
        assert generator.manager.pool("device").num_free == 40
    outputs = {done.request.request_id: [list(tokens) for tokens in done.outputs] for done in seen}
    assert outputs["first"] == wanted[1]
    assert outputs["dropped"] == [wanted[4][0][: wanted[4][0].index(stop) + 1]]


@pytest.mark.parametrize(
    ("prompts", "params", "error", "shown"),
    [
        ([[1], []], SamplingParams(), InvalidArgumentError, r"'generate-1' has shape \[0\]"),
        ([[1], [1.5]], SamplingParams(), InvalidArgumentError, "of 'generate-1' are float64, must be integers"),
        ([[1], ["a"]], SamplingParams(), InvalidArgumentError, "of 'generate-1' are <U1, must be integers"),
        ([[1], [True]], SamplingParams(), InvalidArgumentError, "of 'generate-1' are bool, must be integers"),
        ([[1], None], SamplingParams(), InvalidArgumentError, r"'generate-1' has shape \[\]"),
        ([[1], [-1]], SamplingParams(), InvalidArgumentError, "of 'generate-1' go from -1 to -1, must be from 0"),
        ("text", SamplingParams(), InvalidArgumentError, "prompts is 'text', must be a list of prompts"),
        ([[1], [259]], SamplingParams(), InvalidArgumentError, "tokens from 259 to 259, the vocabulary has 259"),
        (
            [[1], [1]],
            [SamplingParams()],
            InvalidArgumentError,
            "params has 1 entries, must have one for each of 2 prompts",
        ),
        ([[1]], SamplingParams(max_tokens=40_000), InvalidArgumentError, "1 .* 40000 tokens, the model has 32768"),
        ([[1], [1] * 200], SamplingParams(), OutOfBlocksError, "needs up to 54 device blocks"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_none_is_left(model, tmp_path, prompts, params, error, shown):
    with open_generator(model, tmp_path) as generator:
        with pytest.raises(error, match=shown):
            generate(generator, prompts, params)
        assert generator.num_unfinished == 0
        generator.manager.check()
        assert len(generate(generator, [[1]], SamplingParams(max_tokens=2))[0][0]) == 2


def test_an_error_on_the_way_leaves_no_request_behind(model, work, tmp_path):
    class Failing(Watching):
        def submit(self, decision, *, by_layer=False):
            super().submit(decision, by_layer=by_layer)
            if decision.transfers() and decision.transfers()[0][0] != "copy":
                raise OSError("a device went away")

    with open_generator(model, tmp_path, wrap_executor=Failing) as generator:
        with pytest.raises(OSError, match="a device went away"):
            generate(generator, *work)
        assert generator.num_unfinished == 0
        generator.drain()
        generator.manager.check()
        assert [generator.manager.pool(tier).num_free for tier in ("device", "host")] == [40, 6]


def test_a_step_that_fails_costs_no_token(model, work, wanted, tmp_path, monkeypatch):
    with open_generator(model, tmp_path, preemption_mode="swap") as generator:
        forward, calls = generator.model.forward, []

        def failing(*arguments, **options):
            calls.append(1)
            if len(calls) % 7 == 3:
                raise OSError("a kernel failed")
            return forward(*arguments, **options)

        monkeypatch.setattr(generator.model, "forward", failing)
        done = {}
        for index, (prompt, params) in enumerate(zip(*work, strict=True)):
            generator.add(str(index), prompt, params)
        while generator.num_unfinished:
            with contextlib.suppress(OSError):
                done |= {each.request.request_id: each.outputs for each in generator.step()}
        generator.drain()
        generator.manager.check()
        assert len(calls) > 7
    assert [[list(tokens) for tokens in done[str(index)]] for index in range(8)] == wanted


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_prompts_in_chunks_give_the_unpaged_tokens(model, work, wanted, tmp_path, prefix_caching):
    options = {"max_num_batched_tokens": 7, "prefix_caching": prefix_caching, "device_blocks": 240}
    with open_generator(model, tmp_path, **options) as generator:
        assert [generate(generator, *work) for _ in range(2)] == [wanted, wanted]
        assert (generator.scheduler.stats().cached_tokens > 0) == prefix_caching


@pytest.mark.gpu
def test_tokens_on_a_cuda_device_are_the_unpaged_ones(work, tmp_path):
    config = demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)
    model = demo_model(config, device="cuda", dtype=torch.float64)
    with open_generator(model, tmp_path, preemption_mode="swap", wrap_executor=Watching) as generator:
        outputs = generate(generator, *work)
        assert generator.executor.transfers == TRANSFERS
    each = zip(*work, strict=True)
    assert outputs == [[reference_generate(model, prompt, p, index) for index in range(p.n)] for prompt, p in each]


def test_tokens_are_the_unpaged_ones_while_the_device_shrinks_and_grows(model, work, wanted, tmp_path):
    with open_generator(model, tmp_path, elastic=True, wrap_executor=SteadyExecutor) as generator:
        elastic, sizes = generator.cache.elastic, iter([30, 24, 33, 25, 40, 26])
        extents = []

        def resize(step, finished):
            extents.append(elastic.num_blocks)
            if len(extents) % 4 == 0:
                generator.resize_device(next(sizes, 40))
            generator.manager.check()

        generator._on_step = resize
        assert generate(generator, *work) == wanted
        assert min(extents) < 30
        generator.resize_device(20)
        assert generator.cache.give_back().blocks == elastic.num_blocks == 20
        assert generator.cache.give_back() is None
        with pytest.raises(InvalidArgumentError, match="blocks is 41, must be 1 to 40, the blocks of the tensors"):
            generator.resize_device(41)


def test_without_elastic_caches_only_the_manager_shrinks(model, work, wanted, tmp_path):
    with open_generator(model, tmp_path) as generator:
        assert generator.resize_device(24).done
        assert generate(generator, *work) == wanted
        assert generator.cache.give_back() is None


def test_what_a_smaller_device_cannot_hold_ends_with_the_numbers_and_the_others_go_on(model, work, wanted, tmp_path):
    done = {}
    with open_generator(model, tmp_path) as generator:
        for index, (prompt, params) in enumerate(zip(*work, strict=True)):
            generator.add(str(index), prompt, params)
        for count in range(1000):
            if not generator.num_unfinished:
                break
            done |= {finished.request.request_id: finished for finished in generator.step()}
            if count == 2:
                generator.resize_device(16)
        generator.drain()
        assert generator.manager.pool("device").num_free == 16
    refused = {name for name, finished in done.items() if finished.error is not None}
    assert 0 < len(refused) < len(done) == 8
    for name, finished in done.items():
        for tokens, right in zip(finished.outputs, wanted[int(name)], strict=True):
            assert list(tokens) == (right[: len(tokens)] if name in refused else right)
        assert finished.error is None or finished.error.wanted > finished.error.free == 16


def test_generate_raises_for_a_request_that_no_longer_fits_and_leaves_none(model, work, tmp_path):
    with open_generator(model, tmp_path) as generator:
        generator._on_step = lambda step, finished: generator.resize_device(8)
        with pytest.raises(OutOfBlocksError, match="device blocks and 0 kept free, there are 8"):
            generate(generator, *work)
        assert generator.num_unfinished == 0
        generator.drain()
        assert generator.manager.pool("device").num_free == 8


def test_waiting_for_ever_is_an_error(model, tmp_path):
    with open_generator(model, tmp_path) as generator:
        held = generator.manager.allocate(counts=[39 * 4])
        with pytest.raises(InvariantError, match="1 requests wait, 1 of 40 device blocks are free"):
            generate(generator, [[1, 2, 3, 4, 5]], SamplingParams())
        generator.manager.free(held)
        assert generate(generator, [[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3))


def test_what_was_opened_is_closed_when_the_start_fails(model, tmp_path):
    with pytest.raises(InvalidArgumentError, match="preemption_mode is 'never'"):
        open_generator(model, tmp_path, preemption_mode="never")
    assert not list((tmp_path / "swap").iterdir())
    with pytest.raises(StoreURLError, match="size=lots"):
        open_generator(model, tmp_path, swap_store=f"file://{tmp_path}/swap?size=lots")


class ByteTokenizer:
    """Text as its bytes, as the demo's model reads it."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def test_text_goes_in_and_out_where_there_is_a_tokenizer(model, tmp_path):
    with open_generator(model, tmp_path) as generator:
        with pytest.raises(InvalidArgumentError, match="tokenizer is None, and there is none for the model ''"):
            list(generator.generate(["a text"], max_new_tokens=2))
        assert generator.num_unfinished == 0
        output = next(generator.generate([[1, 2]], max_new_tokens=2))
        assert len(output.tokens) == 2
        with pytest.raises(InvalidArgumentError, match="the prompts were token ids"):
            output.text  # noqa: B018
    with Generator(model, ByteTokenizer(), block_size=4, device_blocks=40, host_blocks=0) as generator:
        outputs = {output.index: output for output in generator.generate(["one", "two"], max_new_tokens=3)}
        assert {index: output.text for index, output in outputs.items()} == {
            index: bytes(output.tokens).decode(errors="replace") for index, output in outputs.items()
        }


@pytest.mark.parametrize("is_list", [False, True])
def test_sequences_end_with_the_models_end_token_unless_params_say_otherwise(model, tmp_path, monkeypatch, is_list):
    with open_generator(model, tmp_path) as generator:
        tokens = next(generator.generate([[1, 2]], SamplingParams(max_tokens=8))).tokens
    end = next(index for index in range(1, 8) if tokens[index] not in tokens[:index])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [tokens[end]] if is_list else tokens[end])
    with open_generator(model, tmp_path) as generator:
        assert next(generator.generate([[1, 2]], max_new_tokens=8)).tokens == tokens[: end + 1]
        assert next(generator.generate([[1, 2]], SamplingParams(max_tokens=8))).tokens == tokens


def test_a_caller_that_stops_early_aborts_the_rest(model, tmp_path):
    with open_generator(model, tmp_path) as generator:
        for _ in generator.generate([[1, 2], [3, 4, 5]], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=30)]):
            break
        assert generator.num_unfinished == 0
        generator.drain()
        generator.manager.check()
        with pytest.raises(InvalidArgumentError, match="max_new_tokens is 3, but params have max_tokens"):
            next(generator.generate([[1]], SamplingParams(), max_new_tokens=3))
