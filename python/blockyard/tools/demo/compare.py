"""Compares the tokens of a paged run with the unpaged model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from blockyard.integrations.sampling import sample
from blockyard.progress import Progress
from blockyard.tools.demo.report import Difference
from blockyard.tools.demo.workload import WorkItem

__all__ = ["Outputs", "compare"]

Outputs: TypeAlias = dict[str, list[list[int]]]
"""Generated tokens by request id, one list per sequence."""
TIE: Final = 1e-3
"""Largest difference of two tied tokens, in standard deviations of the logits.

Paged and unpaged runs add the same numbers in different orders. Over 3,000 tokens of each of the demo's models (fp32,
CPU), their logits differed by at most 5.5e-5 (llama), 2.7e-4 (gpt-oss) and 3.7e-4 (qwen3.5); two logits may differ by
twice that, and other machines round differently.
"""


def compare(
    model: PreTrainedModel, items: Sequence[WorkItem], outputs: Outputs, view: Progress
) -> tuple[list[Difference], int]:
    """Compare each token with what the unpaged model chooses after the tokens before it.

    The model sees prompt and answer in one pass, without a cache. If every token is its own choice, the answer is what
    it generates alone.

    Args:
        model: the generator's model.
        items: the requests.
        outputs: tokens of the paged run.
        view: progress, updated after every request.

    Returns:
        The first difference of every sequence that differs, and the number of ties in rounding.
    """
    differences, ties = [], 0
    for done, item in enumerate(items, 1):
        for index, answer in enumerate(outputs[item.request_id]):
            tokens = answer + [-1] * (len(answer) < item.sampling.max_tokens)  # no token of a model is -1
            place, wanted, tied = _first_difference(_logits(model, item, tokens), item, index, tokens)
            ties += tied
            if wanted is not None:
                differences.append(Difference(item.request_id, index, place, tokens[place], wanted))
        view.step(done, len(items), "")
    return differences, ties


def _first_difference(
    logits: NDArray[np.float64], item: WorkItem, index: int, tokens: list[int]
) -> tuple[int, int | None, int]:
    """Return the place of the first wrong token and the right one, None if there is none; then the ties before it."""
    ties = 0
    for place, (scores, token) in enumerate(zip(logits, tokens, strict=True)):
        if place == item.sampling.max_tokens:
            return place, -1, ties
        position = len(item.prompt) + place
        wanted = sample(scores, item.sampling, index, position)
        if wanted == token:
            continue
        scores[token] += TIE * scores.std()
        if sample(scores, item.sampling, index, position) != token:
            return place, wanted, ties
        ties += 1
    return len(tokens), None, ties


def _logits(model: PreTrainedModel, item: WorkItem, tokens: list[int]) -> NDArray[np.float64]:
    """Return the unpaged model's logits of each token of an answer, `[tokens, vocab]`."""
    ids = torch.from_numpy(np.concatenate([item.prompt, tokens[:-1]]).astype(np.int64))[None].to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, -len(tokens) :]
    found: NDArray[np.float64] = logits.double().cpu().numpy()
    return found
