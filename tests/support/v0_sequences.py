"""Sequences and groups like those of V0's scheduler, and a manager for them."""

import enum
from types import SimpleNamespace
from typing import Any

from blockyard.integrations.vllm_v0 import SelfAttnBlockSpaceManager

SIZE = 4
Status = enum.IntEnum("Status", ["WAITING", "RUNNING", "SWAPPED", "FINISHED"])


class Sequence:
    def __init__(self, seq_id: int, num_tokens: int, first: int = 0):
        self.seq_id, self.tokens, self.status = seq_id, list(range(first, first + num_tokens)), Status.WAITING
        self.computed: int | None = None
        self.data = SimpleNamespace(get_num_computed_tokens=self.num_computed)

    def num_computed(self) -> int:
        return len(self.tokens) if self.computed is None else self.computed

    def get_token_ids(self) -> list[int]:
        return self.tokens

    def extra_hash(self) -> int | None:
        return None

    def is_prefill(self) -> bool:
        return False


class Group:
    def __init__(self, *seqs: Sequence, encoder: Sequence | None = None):
        self.request_id, self.seqs, self.encoder = str(seqs[0].seq_id), list(seqs), encoder

    def get_seqs(self) -> list[Sequence]:
        return self.seqs

    def is_encoder_decoder(self) -> bool:
        return self.encoder is not None

    def get_encoder_seq(self) -> Sequence | None:
        return self.encoder

    def become(self, status: Status) -> "Group":
        for seq in self.seqs:
            seq.status = status
        return self


def new_manager(gpu: int = 16, cpu: int = 16, **options: Any) -> SelfAttnBlockSpaceManager:
    return SelfAttnBlockSpaceManager(SIZE, gpu, cpu, **{"watermark": 0.0, **options})


def running(manager: SelfAttnBlockSpaceManager, *seqs: Sequence) -> Group:
    group = Group(*seqs)
    manager.allocate(group)
    return group.become(Status.RUNNING)


def free(manager: SelfAttnBlockSpaceManager) -> tuple[int, int]:
    return manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
