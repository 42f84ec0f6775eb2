"""`Report`: the results of a demo run, and the table that shows them.

On a terminal, rich draws the table if it is installed; otherwise the table is plain text.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TextIO

from blockyard.types import StoreStats

TIERS: Final[tuple[Literal["device", "host", "external"], ...]] = ("device", "host", "external")
SABOTAGE_KINDS = ("swap_in", "swap_out", "copy")
"""Kinds of transfers that can be dropped on purpose."""


@dataclass(frozen=True)
class TransferCount:
    """Blocks and bytes of one kind of transfer (`copy`, `swap_out` or `swap_in`) between two tiers."""

    kind: str
    src: str
    dst: str
    blocks: int
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The maximum number of blocks in use of a tier's `total` at the end of a scheduling step."""

    used: int
    total: int


@dataclass(frozen=True)
class Damage:
    """Blocks damaged on purpose.

    Attributes:
        asked: number of blocks to damage.
        stored: number of blocks damaged; fewer than asked if the run stored too few.
        read: number of damaged blocks that were read.
        detected: number of damaged blocks that the swap store rejected.
    """

    asked: int
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


@dataclass(frozen=True)
class Sabotage:
    """A transfer dropped on purpose.

    Attributes:
        kind: requested kind of transfer.
        seen: number of blocks of that kind in the whole run.
        dropped: description of the dropped transfer; empty if none was dropped.
    """

    kind: str
    seen: int
    dropped: str


@dataclass(frozen=True)
class Report:
    """One run of the demo.

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
        cached_prompt_tokens: tokens found in the prefix cache when requests were first admitted.
        steps: number of scheduler steps.
        seconds: wall time of the paged run.
        tokens_per_second: `output_tokens` divided by `seconds`.
        preemptions: number of preemptions by kind: `swap_host`, `swap_external`, `recompute`.
        lost: number of requests that were restarted because blocks were lost.
        transfers: blocks and bytes by kind and pair of tiers.
        peak: maximum number of blocks used, by tier.
        swap_store: counters of the swap store.
        damage: blocks damaged on purpose; None if not requested.
        sabotage: the transfer dropped on purpose; None if not requested.
        compared: number of requests compared with the unpaged model.
        identical_requests: number of requests whose tokens are all equal.
        differences: first difference of every sequence that differs.
        ties: number of tokens that differ only because of rounding, which counts as equal.
        prefix_store: counters of the prefix store; None if there is none.
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
    cached_prompt_tokens: int
    steps: int
    seconds: float
    tokens_per_second: float
    preemptions: dict[str, int]
    lost: int
    transfers: list[TransferCount]
    peak: dict[str, Peak]
    swap_store: StoreStats
    damage: Damage | None
    sabotage: Sabotage | None
    compared: int
    identical_requests: int
    differences: list[Difference]
    ties: int
    prefix_store: dict[str, Any] | None = None

    @property
    def identical(self) -> bool:
        """Whether all requests have the tokens of the unpaged run."""
        return self.compared > 0 and self.identical_requests == self.compared

    @property
    def exit_code(self) -> int:
        """0 for success; 1 if tokens differ or damage was not detected; 2 if a requested fault did not happen."""
        if not self.identical:
            return 1
        if self.damage is not None and self.damage.detected != self.damage.read:
            return 1
        nothing_dropped = self.sabotage is not None and not self.sabotage.dropped
        return 2 if nothing_dropped or (self.damage is not None and not self.damage.read) else 0

    def blocks(self, kind: str, tier: str | None = None) -> int:
        """Return the number of blocks of one kind of transfer.

        Args:
            kind: as in `TransferCount.kind`.
            tier: count only blocks from or to this tier; all if None.

        Returns:
            The number of blocks.
        """
        return sum(row.blocks for row in self.transfers if row.kind == kind and tier in (None, row.src, row.dst))

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes and the verdict for JSON; sizes in bytes, times in seconds."""
        found = asdict(self) | {"swap_store": self.swap_store.as_dict()}
        return found | {"identical": self.identical, "exit_code": self.exit_code}


def rows(report: Report) -> list[tuple[str, str]]:
    """Return the report as `(label, figure)` rows of the table.

    Args:
        report: the run.

    Returns:
        The rows; the last one gives the number of identical requests.
    """
    table = [
        ("model", f"{report.model}, {report.device}"),
        ("workload", report.workload),
        ("requests", f"{report.requests} ({report.sequences} sequences, {report.prompt_tokens} prompt tokens)"),
        ("tokens", f"{report.output_tokens} in {report.seconds:.1f} s and {report.steps} steps"),
        ("tokens/s", f"{report.tokens_per_second:.0f}"),
        ("prefix cache", f"{report.cached_prompt_tokens} tokens found"),
        ("preemptions", _join({name.replace("_", " to "): count for name, count in report.preemptions.items()})),
    ]
    table += [
        (f"{row.kind.replace('_', ' ')}, {row.src} to {row.dst}", f"{row.blocks} blocks, {_mebibytes(row.bytes)}")
        for row in report.transfers
    ]
    table += [
        (f"peak use, {tier}", f"{report.peak[tier].used} of {report.peak[tier].total} blocks")
        for tier in TIERS
        if tier in report.peak
    ]
    table.append(("swap store checksum failures", str(report.swap_store.checksum_failures)))
    if report.prefix_store is not None:
        of = report.prefix_store
        figures = f"{of['hit_blocks']} blocks loaded, {of['written_blocks']} written"
        table.append(("prefix store", figures))
    table += _fault_rows(report)
    table.append(("tokens identical to the unpaged Hugging Face model", _score(report)))
    return table


def print_report(report: Report, stream: TextIO) -> None:
    """Print the table and, as the last line, the verdict.

    Args:
        report: the run.
        stream: stream to write to.

    Raises:
        OSError: the stream cannot be written.
    """
    table = rows(report)
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(table[:-1], stream)
    else:
        width = max(len(name) for name, _ in table[:-1])
        for name, figure in table[:-1]:
            print(f"{name:<{width}}  {figure}", file=stream)
    for difference in report.differences[:5]:
        print(_describe(difference), file=stream)
    if len(report.differences) > 5:
        print(f"and {len(report.differences) - 5} more sequences differ", file=stream)
    name, figure = table[-1]
    print(f"{name}: {figure}", file=stream, flush=True)


def _fault_rows(report: Report) -> list[tuple[str, str]]:
    table = []
    if report.swap_store.misses:
        table.append(("swap store misses", _join(report.swap_store.misses)))
    if report.lost:
        table.append(("requests recomputed after a miss", str(report.lost)))
    if report.damage is not None:
        damage = report.damage
        figures = f"{damage.detected} detected, {damage.read} damaged blocks read of {damage.stored} stored"
        table.append(("corruptions", figures if damage.read else f"{figures}: nothing was tested"))
    if report.sabotage is not None:
        nothing = f"nothing: {report.sabotage.seen} blocks of kind {report.sabotage.kind} were transferred in this run"
        table.append(("dropped on purpose", report.sabotage.dropped or nothing))
    return table


def _print_rich(table: list[tuple[str, str]], stream: TextIO) -> None:
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415 - optional

    grid = Table(show_header=False)
    for name, figure in table:
        grid.add_row(name, figure)
    Console(file=stream).print(grid)


def _score(report: Report) -> str:
    tied = f" (ties in rounding: {report.ties})" if report.ties else ""
    return f"{report.identical_requests}/{report.compared}{tied}"


def _join(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _describe(difference: Difference) -> str:
    return (
        f"{difference.request_id} sequence {difference.index} differs at token {difference.position}: "
        f"{difference.got}, unpaged {difference.wanted}"
    )
