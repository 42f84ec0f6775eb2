"""T5 over blocks: the entries of its decoder and of its encoder come back from host and store.

transformers 5.24, in float64.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import VOCABULARY
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

from blockyard import CacheGroup, KVCache
from blockyard.engine.pages import field_tensors
from blockyard.integrations.transformers import hybrid
from blockyard.layout import ArenaLayout, LayerField

BLOCK, LAYERS, HEADS, SIZE = 4, 2, 2, 8
READ, STEPS = 11, 10  # tokens of the encoder, and of the decoder before and after the swap
FIELDS = tuple(LayerField(at, name, (HEADS, SIZE), "float64") for at in range(LAYERS) for name in ("keys", "values"))
GROUPS = CacheGroup.full_attention(), CacheGroup.cross_attention()

pytestmark = pytest.mark.usefixtures("one_thread")


class Decoder:
    """A T5 model, and the tokens that it has written."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = {"d_model": 16, "d_kv": SIZE, "d_ff": 32, "num_layers": LAYERS, "num_heads": HEADS}
        config = T5Config(vocab_size=VOCABULARY, **shape, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
        self.model: Any = T5ForConditionalGeneration(config).double().eval()
        for weights in self.model.parameters():  # else one token follows another for ever
            torch.nn.init.normal_(weights, std=0.3)
        self.given = torch.randint(1, VOCABULARY, (1, READ))
        self.encoded, self.tokens = self.model.get_encoder()(self.given), [0]
        self.cache = self.empty()

    def empty(self) -> EncoderDecoderCache:
        return EncoderDecoderCache(*(DynamicCache(config=self.model.config) for _ in GROUPS))

    def parts(self) -> list[DynamicCache]:
        return [self.cache.self_attention_cache, self.cache.cross_attention_cache]

    @torch.inference_mode()
    def write(self, steps: int) -> None:
        options = {hybrid._cache_name(self.model): self.cache, "encoder_outputs": self.encoded, "use_cache": True}
        for _ in range(steps):
            output = self.model(decoder_input_ids=torch.tensor([self.tokens[-1:]]), **options)
            self.tokens.append(int(output.logits[0, -1].argmax()))


def swap(cache: KVCache, sequence: int, tier: str) -> None:
    """Bring a sequence to a tier and back, into blocks that hold nothing."""
    cache.manager.swap_out(sequence, to=tier)
    with cache.step():
        pass
    cache.drain()
    cache.engine.tensors[0].zero_()
    cache.manager.swap_in(sequence)
    with cache.step():
        pass
    cache.manager.check()


def slots_of(table: NDArray[Any], count: int) -> NDArray[Any]:
    places = np.arange(count)
    return table[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK


@pytest.mark.parametrize("tier", ["host", "external", "none"])
def test_preempted_sequences_come_back_with_the_tokens_of_the_encoder(tier: str, tmp_path: Path):
    decoder, arena = Decoder(), ArenaLayout(tuple((group, FIELDS) for group in GROUPS), BLOCK, equal_blocks=True)
    wanted = decoder.model.generate(decoder.given, max_new_tokens=2 * STEPS, do_sample=False)[0].tolist()
    decoder.write(STEPS)
    sizes: dict[str, Any] = {"device_blocks": 12, "host_blocks": 12, "swap_store": f"file://{tmp_path}?size=1MiB"}
    with KVCache(hybrid._in_one_tensor(arena), groups=GROUPS, **sizes) as cache:
        (sequence,) = cache.manager.allocate(counts=[STEPS], encoder_tokens=[READ])
        with cache.step():
            pass
        tensors = field_tensors(arena, [hybrid._rows(cache.engine.tensors[0], arena)])
        groups = list(zip(hybrid._blocks_of(arena, tensors), (STEPS, READ), strict=True))
        for group, (blocks, count) in enumerate(groups):
            table = cache.manager.block_table(sequence, group=group)
            blocks.write(decoder.parts()[group], slots_of(table, count), with_states=False)
        if tier == "none":  # a control
            cache.engine.tensors[0].zero_()
        else:
            swap(cache, sequence, tier)
        decoder.cache = decoder.empty()
        for group, (blocks, count) in enumerate(groups):
            blocks.read(decoder.parts()[group], cache.manager.block_table(sequence, group=group), count)
    decoder.cache.is_updated = dict.fromkeys(range(LAYERS), True)
    decoder.write(STEPS)
    assert (decoder.tokens == wanted) == (tier != "none")
