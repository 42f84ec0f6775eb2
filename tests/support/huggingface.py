"""What Hugging Face's own `generate` says, with the draws of our sampler."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from blockyard.integrations.sampling import SamplingParams, sample


class _KeyedDraw(LogitsProcessor):
    """Masks every token except the one that the sampler draws."""

    def __init__(self, params: SamplingParams, sequence_index: int) -> None:
        self._params = params
        self._sequence_index = sequence_index

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Take ids `[1, tokens]` and scores `[1, vocab]`. Returns scores with one finite entry."""
        token = sample(scores[0].cpu().numpy(), self._params, self._sequence_index, input_ids.shape[1])
        forced = torch.full_like(scores, -torch.inf)
        forced[0, token] = 0.0
        return forced  # type: ignore[return-value]  # full_like is typed as a plain Tensor


def reference_generate(
    model: PreTrainedModel, prompt: Sequence[int] | NDArray[np.int64], params: SamplingParams, sequence_index: int = 0
) -> list[int]:
    """Generate one sequence with Hugging Face's own `generate` and its own cache: no paging, no batch.

    Args:
        model: a Hugging Face model, with any of their attention implementations.
        prompt: token ids, at least one.
        params: greedy is Hugging Face's greedy search; a sampled sequence takes the sampler's keyed draws.
        sequence_index: which of the request's `n` sequences.

    Returns:
        The generated token ids, including a final stop token.
    """
    ids = torch.as_tensor(np.asarray(prompt, dtype=np.int64), device=model.device)[None]
    config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=sorted(params.stops) or None,
        pad_token_id=0,
    )
    draws = [] if params.greedy else [_KeyedDraw(params, sequence_index)]
    with torch.inference_mode(), _as_trained(model):
        output = model.generate(  # type: ignore[operator]  # the mixin's method is not typed as one
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(draws),
        )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


@contextmanager
def _as_trained(model: PreTrainedModel) -> Iterator[None]:
    """Switches off dropout, and hides a checkpoint's generation defaults, which `generate` would apply."""
    kept, training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        model.generation_config = kept
        model.train(training)
