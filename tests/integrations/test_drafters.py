"""DeepSeek-V3 with its MTP layer over blocks: each draft is that of transformers, wherever the entries come from.

transformers 5.24, in float64. The MTP layer computes the entry of a token from its hidden state and the token after it.
"""

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface import reference_generate
from tiny_models import VOCABULARY, tiny_model
from transformers import DynamicCache, cache_utils, modeling_layers

from blockyard import CacheGroup, KVCache, PrefixCaching, Request, Scheduler
from blockyard.engine.pages import field_tensors
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers import hybrid
from blockyard.layout import ArenaLayout
from blockyard.scheduler import Step

BLOCK, TOKENS = 4, 8
GROUPS = CacheGroup.full_attention(), CacheGroup.drafter()
RESUMED = range(BLOCK, 25, BLOCK)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(cache_utils, "MtpCache"), reason="this version of transformers has no MTP layers"),
]


@functools.cache
def models() -> tuple[Any, Any]:
    """The main model, and its MTP layer."""
    main = tiny_model("DeepSeek-V3")
    mtp = modeling_layers.MtpModel(main, main.config.num_mtp_layers).double().eval()
    for weights in mtp.layers.parameters():  # transformers leaves some uninitialized
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.3)
    mtp.set_experts_implementation("eager")
    return main, mtp


@functools.cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCABULARY, 28).tolist() for _ in RESUMED]


def draft(text: list[int], hidden: torch.Tensor, cache: Any) -> int:
    """Run the MTP layer over the last tokens of a text, as many as there are hidden states of the tokens before."""
    positions = torch.arange(len(text) - hidden.shape[1], len(text))[None]
    tokens = torch.tensor([text])[:, positions[0]]
    return int(models()[1](tokens, hidden, attention_mask=None, position_ids=positions, mtp_cache=cache)[0])


@torch.inference_mode()
def drafted_by_transformers(text: list[int]) -> int:
    """Return the draft after a text, without blocks and without any earlier step."""
    main, mtp = models()
    output = main(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False)
    return draft(text, output.hidden_states[-1], cache_utils.MtpCache(config=mtp.config))


class Server:
    """Serves prompts, and checks each draft and each token.

    Args:
        groups: those of the main model and of the MTP layer.
        options: of the `KVCache`.
    """

    def __init__(self, groups: Any = GROUPS, **options: Any) -> None:
        ((_, fields),) = hybrid._layer_groups(models()[0])
        own = [replace(field, layer=2) for field in fields if field.layer == 1]
        arena = ArenaLayout(((groups[0], fields), (groups[1], tuple(own))), BLOCK, equal_blocks=True)
        self.cache = KVCache(hybrid._in_one_tensor(arena), groups=groups, **{"prefix_caching": True} | options)
        tensors = field_tensors(arena, [hybrid._rows(self.cache.engine.tensors[0], arena)])
        self.main, self.own = hybrid._blocks_of(arena, tensors)
        mode: Any = "swap" if {"host_blocks", "swap_store"} & set(options) else "recompute"
        self.scheduler = Scheduler(self.cache, num_lookahead_tokens=1, max_num_batched_tokens=25, preemption_mode=mode)
        self.drafts: dict[str, int] = {}

    def serve(self, *given: list[int]) -> None:
        wanted = [reference_generate(models()[0], prompt, SamplingParams(max_tokens=TOKENS)) for prompt in given]
        for number, prompt in enumerate(given):
            self.scheduler.add(Request(str(number), prompt, TOKENS))
        while self.scheduler.num_unfinished:
            with self.scheduler.step() as step:
                known = [self.drafts[step.owner(row)[0]] for row in range(step.decodes)]
                # A draft of random weights is hardly ever right: some are replaced by the right token.
                for row in range(step.decodes):
                    name, at = int(step.owner(row)[0]), len(step.all_token_ids(row))
                    if at % 3 and at < len(given[name]) + TOKENS:
                        known[row] = wanted[name][at - len(given[name])]
                step.set_draft_token_ids([[token][: step.lengths[row] - 1] for row, token in enumerate(known)])
                sampled = self.compute(step)
            for done in self.scheduler.update(step, sampled):
                assert list(done.outputs[0]) == wanted[int(done.request.request_id)]
            self.cache.manager.check()

    @torch.inference_mode()
    def compute(self, step: Step) -> list[int]:
        found = np.zeros(len(step.token_ids), np.int64)
        for row in range(step.rows):
            first, last = step.query_start_loc[row : row + 2].tolist()
            tokens, start = step.token_ids[first:last].tolist(), int(step.start[row])
            cache = DynamicCache(config=models()[0].config)
            if start:
                self.main.read(cache, step.block_tables[0, row], start)
            places = torch.arange(start, start + len(tokens))[None]
            options = {"position_ids": places, "use_cache": True, "output_hidden_states": True}
            options[hybrid._cache_name(models()[0])] = cache
            output = models()[0](torch.tensor([tokens]), **options)
            self.main.write(cache, step.slot_mapping[0, first:last], with_states=False)
            found[first:last] = said = output.logits[0].argmax(-1).numpy()
            right = 1 + int(np.cumprod(said[:-1] == tokens[1:]).sum()) if row < step.decodes else len(tokens)
            text = step.all_token_ids(row).tolist()
            text = [
                *text[:start],
                *tokens[:right],
                int(said[right - 1]) if row < step.samples else text[last - first + start],
            ]
            self.draft(step, row, text, output.hidden_states[-1][:, :right])
        return found[step.logits_indices].tolist()

    def draft(self, step: Step, row: int, text: list[int], hidden: torch.Tensor) -> None:
        """Compute the entries of the last tokens but one, and the draft after the last."""
        first, start = int(step.query_start_loc[row]), int(step.start[row])
        cache = cache_utils.MtpCache(config=models()[1].config)
        layers: Any = SimpleNamespace(layers=[None, None, *cache.layers])
        if start:
            self.own.read(layers, step.block_tables[1, row], start)
        self.drafts[step.owner(row)[0]] = found = draft(text, hidden, cache)
        self.own.write(layers, step.slot_mapping[1, first : first + hidden.shape[1]], with_states=False)
        assert found == drafted_by_transformers(text), f"another draft after {len(text)} tokens"

    def begin(self) -> None:
        """Serve the beginnings of prompts, and prompts that part from them after a whole block."""
        for position, prompt in zip(RESUMED, prompts(), strict=True):
            self.serve(prompt[: position + 1])
            self.serve([*prompt[:position], (prompt[position] + 1) % VOCABULARY])

    def resume(self) -> None:
        """Serve each prompt, and check that it continues at its position."""
        for position, prompt in zip(RESUMED, prompts(), strict=True):
            before = self.scheduler.stats().cached_tokens
            self.serve(prompt)
            assert self.scheduler.stats().cached_tokens - before == position


def test_a_prompt_that_continues_at_any_position_has_the_drafts_of_transformers():
    server = Server(device_blocks=300)
    with server.cache:
        server.begin()
        server.resume()


def test_rejected_draft_tokens_leave_no_trace():
    server = Server(device_blocks=300)
    with server.cache:
        server.serve(*prompts())
        stats = server.scheduler.stats()
        assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens


def test_a_prompt_found_on_the_host_has_the_drafts_of_transformers():
    server = Server(device_blocks=30, host_blocks=200, prefix_caching=PrefixCaching(host=True))
    with server.cache:
        server.begin()
        server.resume()
        assert server.cache.stats().swapped_in_blocks["host"] > 0


def test_a_prompt_found_in_a_store_after_a_restart_has_the_drafts_of_transformers(tmp_path: Path):
    options = {"prefix_store": f"file://{tmp_path}?size=8MiB", "namespace": b"mtp", "prefetch_timeout_base": 60.0}
    for act in (Server.begin, Server.resume):
        server = Server(device_blocks=300, host_blocks=60, **options)
        with server.cache:
            act(server)
    assert server.cache.prefix_store is not None
    assert server.cache.prefix_store.stats().hit_blocks > 0


@pytest.mark.parametrize("tier", ["host", "external"])
def test_preempted_sequences_come_back_with_their_drafts(tier: str, tmp_path: Path):
    tiers = {"host": {"host_blocks": 60}, "external": {"swap_store": f"file://{tmp_path}?size=4MiB"}}
    server = Server(device_blocks=22, prefix_caching=False, **tiers[tier])
    with server.cache:
        server.serve(*(prompt[:12] for prompt in prompts()))
        assert server.cache.stats().swapped_in_blocks[tier] > 0


def test_without_the_next_token_in_its_keys_a_drafters_block_gives_other_drafts():
    server = Server((GROUPS[0], GROUPS[0]), device_blocks=300)
    with server.cache, pytest.raises(AssertionError, match="another draft after"):
        server.begin()
