"""Ties in rounding: two correct runs may choose different tokens. This module tells ties from wrong KV.

A batched and an unbatched run add the same numbers in different orders, so their logits differ in the last digits.
About once in a hundred thousand tokens of the demo's model (fp32), the two best tokens are closer than that. Neither
is wrong: the unpaged run continues from the paged run's token, and all later tokens must match again. Wrong KV moves
logits thousands of times further, so it never looks like a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from blockyard.integrations.sampling import sample
from blockyard.integrations.transformers.model import reference_generate
from blockyard.tools.demo.report import Difference
from blockyard.tools.demo.workload import WorkItem

# In standard deviations of the logits. Over 3,000 tokens of the demo's model (fp32, CPU), the runs' logits differed by
# at most 5.3e-5. Two logits may differ by twice that, and other machines round differently.
TIE = 2e-4
MAX_TIES = 4


def settle_ties(
    model: PreTrainedModel,
    item: WorkItem,
    index: int,
    got: Sequence[int],
    wanted: Sequence[int],
    *,
    tolerance: float = TIE,
) -> tuple[list[int], list[Difference]]:
    """Let the unpaged run continue from the paged run's token at each tie.

    Args:
        model: the unpaged model.
        item: request to which the tokens belong.
        index: index of the sequence within the request.
        got: tokens of the paged run.
        wanted: tokens of the unpaged run.
        tolerance: maximum difference of two tied tokens, in standard deviations of the logits.

    Returns:
        The unpaged run's tokens after the ties were resolved, and the ties. Remaining differences are not ties; a
        sequence with more than `MAX_TIES` ties stays different.
    """
    ours, theirs = list(got), list(wanted)
    ties: list[Difference] = []
    while len(ties) < MAX_TIES:
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None or not _is_tie(model, item, index, ours[: place + 1], tolerance):
            break
        ties.append(Difference(item.request_id, index, place, ours[place], theirs[place]))
        theirs = ours[: place + 1]
        left = item.sampling.max_tokens - len(theirs)
        if left:
            longer = np.concatenate([item.prompt, theirs])
            theirs += reference_generate(model, longer, replace(item.sampling, max_tokens=left), index)
    return theirs, ties


def _is_tie(model: PreTrainedModel, item: WorkItem, index: int, tokens: list[int], tolerance: float) -> bool:
    """Return whether the unpaged model would choose the last token if its logit were slightly higher."""
    before = np.concatenate([item.prompt, np.array(tokens[:-1], dtype=np.int64)])
    logits = _logits(model, before)
    logits[tokens[-1]] += tolerance * logits.std()
    return sample(logits, item.sampling, index, len(before)) == tokens[-1]


def _logits(model: PreTrainedModel, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    ids = torch.from_numpy(tokens)[None].to(model.device)
    with torch.inference_mode():
        last: NDArray[np.float64] = model(input_ids=ids, use_cache=False).logits[0, -1].double().cpu().numpy()
    return last
