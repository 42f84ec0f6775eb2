"""What a scheduler can be asked to do."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from blockyard._core import BlockManager
from blockyard.errors import InvalidArgumentError

__all__ = ["PREEMPTION_MODES", "PreemptionMode", "check_options"]

PreemptionMode: TypeAlias = Literal["auto", "swap", "recompute"]

PREEMPTION_MODES: Final = ("auto", "swap", "recompute")


def check_options(
    manager: BlockManager,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    preemption_mode: str,
    num_lookahead_tokens: int,
) -> None:
    """Check the options of a `Scheduler` over a manager.

    Raises:
        InvalidArgumentError: a limit is not positive, the mode is unknown, or the manager has several cache groups; or
            there are draft tokens and a recurrent state, which cannot be taken back.
    """
    if max_num_seqs < 1 or max_num_batched_tokens < 1:
        raise InvalidArgumentError(
            f"max_num_seqs is {max_num_seqs}, max_num_batched_tokens {max_num_batched_tokens}, must be at least 1"
        )
    if preemption_mode not in PREEMPTION_MODES:
        raise InvalidArgumentError(f"preemption_mode is {preemption_mode!r}, must be one of {PREEMPTION_MODES}")
    if (groups := len(manager.pool().groups)) != 1:
        raise InvalidArgumentError(f"the manager has {groups} cache groups, must have 1")
    if num_lookahead_tokens < 0:
        raise InvalidArgumentError(f"num_lookahead_tokens is {num_lookahead_tokens}, must be at least 0")
    if num_lookahead_tokens and (kind := manager.pool().groups[0].kind) == "recurrent":
        raise InvalidArgumentError(f"num_lookahead_tokens is {num_lookahead_tokens}, must be 0 for a {kind} group")
