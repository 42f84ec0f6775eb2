"""`Report`: the results of a demo run, and how they are printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, TextIO

from blockyard.scheduler import SchedulerStats
from blockyard.types import ManagerStats, StoreStats

__all__ = ["Damage", "Difference", "Report", "print_report", "rows"]

_SHOWN: Final = 5
"""Maximum number of differences that are printed."""


@dataclass(frozen=True)
class Damage:
    """How many blocks were damaged in the store, how many of these were read, and how many the store rejected."""

    stored: int
    read: int
    detected: int


@dataclass(frozen=True)
class Difference:
    """The first token of a sequence that the unpaged model does not choose.

    Attributes:
        request_id: id of the request.
        index: index of the sequence within the request.
        position: index of the generated token.
        got: token of the paged run; -1 if it ended earlier.
        wanted: token of the unpaged model; -1 if the paged run should have ended.
    """

    request_id: str
    index: int
    position: int
    got: int
    wanted: int

    def __str__(self) -> str:
        where = f"{self.request_id} sequence {self.index} differs at token {self.position}"
        return f"{where}: {self.got}, unpaged {self.wanted}"


@dataclass(frozen=True)
class Report:
    """One run of the demo, whose requests were all compared with the unpaged model.

    Attributes:
        version: Blockyard's version.
        model: description of the model.
        device: `cpu` or `cuda`.
        workload: description of where the requests came from.
        settings: options and pool sizes in effect.
        requests: number of requests served.
        sequences: number of sequences served; a request with n = 2 has two.
        prompt_tokens: number of prompt tokens, the sum over requests.
        output_tokens: number of generated tokens, the sum over sequences.
        seconds: wall time of the paged run.
        scheduler: counters of the scheduler.
        manager: counters of the block manager.
        bytes_per_block: size of a block: all layers, keys and values.
        swap_store: counters of the swap store.
        prefix_store: counters of the prefix store; None if there is none.
        damage: blocks damaged on purpose; None if not requested.
        differences: first difference of every sequence that differs.
        ties: number of tokens that differ only because of rounding, which counts as equal.
    """

    version: str
    model: str
    device: str
    workload: str
    settings: dict[str, int | float | str | None]
    requests: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    scheduler: SchedulerStats
    manager: ManagerStats
    bytes_per_block: int
    swap_store: StoreStats
    prefix_store: dict[str, Any] | None
    damage: Damage | None
    differences: list[Difference]
    ties: int

    @property
    def identical_requests(self) -> int:
        """Number of requests whose tokens are all equal."""
        return self.requests - len({difference.request_id for difference in self.differences})

    @property
    def exit_code(self) -> int:
        """0 for success; 1 if tokens differ or damage was not detected; 2 if no damaged block was read."""
        if self.differences or (self.damage is not None and self.damage.detected != self.damage.read):
            return 1
        return 0 if self.damage is None or self.damage.read else 2

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes and the verdict for JSON; sizes in bytes, times in seconds."""
        verdict = {"identical_requests": self.identical_requests, "identical": not self.differences}
        return asdict(self) | {"swap_store": self.swap_store.as_dict(), "exit_code": self.exit_code} | verdict


def rows(report: Report) -> list[tuple[str, str]]:
    """Return the report as `(label, figure)` rows; the last one gives the number of identical requests."""
    steps, blocks = report.scheduler, report.manager
    swaps = f"swap to host {steps.preempted_swap_host}, swap to external {steps.preempted_swap_external}"
    table = [
        ("model", f"{report.model}, {report.device}"),
        ("workload", report.workload),
        ("requests", f"{report.requests} ({report.sequences} sequences, {report.prompt_tokens} prompt tokens)"),
        ("tokens", f"{report.output_tokens} in {report.seconds:.1f} s and {steps.steps} steps"),
        ("tokens/s", f"{report.output_tokens / report.seconds:.0f}"),
        ("prefix cache", f"{steps.cached_tokens} tokens found"),
        ("preemptions", f"{swaps}, recompute {steps.preempted_recompute}"),
        ("copied on write", _size(blocks.copied_blocks, report)),
    ]
    for tier, count in blocks.swapped_out_blocks.items():
        table.append((f"swapped out to {tier}", _size(count, report)))
        table.append((f"swapped in from {tier}", _size(blocks.swapped_in_blocks[tier], report)))
    table += [
        (f"peak use, {tier}", f"{blocks.peak_blocks[tier]} of {of} blocks") for tier, of in blocks.num_blocks.items()
    ]
    table.append(("swap store checksum failures", str(report.swap_store.checksum_failures)))
    if (prefixes := report.prefix_store) is not None:
        table.append(("prefix store", f"{prefixes['hit_blocks']} blocks loaded, {prefixes['written_blocks']} written"))
    tied = f" (ties in rounding: {report.ties})" if report.ties else ""
    score = f"{report.identical_requests}/{report.requests}{tied}"
    return [*table, *_fault_rows(report), ("tokens identical to the unpaged Hugging Face model", score)]


def print_report(report: Report, stream: TextIO) -> None:
    """Print the table and, as the last line, the verdict.

    Raises:
        OSError: the stream cannot be written.
    """
    *table, (verdict, score) = rows(report)
    width = max(len(name) for name, _ in table)
    for name, figure in table:
        print(f"{name:<{width}}  {figure}", file=stream)
    for difference in report.differences[:_SHOWN]:
        print(difference, file=stream)
    if (more := len(report.differences) - _SHOWN) > 0:
        print(f"and {more} more sequences differ", file=stream)
    print(f"{verdict}: {score}", file=stream, flush=True)


def _fault_rows(report: Report) -> list[tuple[str, str]]:
    table = []
    if misses := report.swap_store.misses:
        table.append(("swap store misses", ", ".join(f"{name} {count}" for name, count in misses.items())))
    if report.scheduler.lost:
        table.append(("requests recomputed after a miss", str(report.scheduler.lost)))
    if (damage := report.damage) is not None:
        figures = f"{damage.detected} detected, {damage.read} damaged blocks read of {damage.stored} stored"
        table.append(("corruptions", figures if damage.read else f"{figures}: nothing was tested"))
    return table


def _size(blocks: int, report: Report) -> str:
    return f"{blocks} blocks, {blocks * report.bytes_per_block / 2**20:.1f} MiB"
