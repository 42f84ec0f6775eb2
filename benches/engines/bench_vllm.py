"""What our connector costs vLLM on a CPU, and what it saves: tokens a second, tokens computed again, first tokens.

    make bench-engines [BENCH_JSON=FILE]
    ENGINES_PYTHON=PYTHON python benches/engines/bench_vllm.py [--rounds 6] [--model small|tiny] [--only first-token]

PYTHON has vLLM. Three engines run side by side and take turns: vLLM alone, with `BlockyardSpec`, and with a file store
below that. Each runs in the processes that vLLM starts by default. The order changes from round to round, prompts are
new in each, and all engines get the same.

- decode: 6 requests of 256 + 128 tokens fit the device. The loss is against vLLM alone in the same round: the median.
- preemption: 16 such requests do not fit.
- first token: of a prompt of 1,920 tokens that was computed before, and is found on the device, on the host once the
  device has been cleared, and in the file once the host has been, too. Other prompts are served before and after it is
  cleared. The number of tokens found in each place is checked. In turns with these, a file store without an engine
  reads as many bytes: the file may cost half of the host's time more than that. `--only first-token` measures nothing
  else.

With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "tests" / "support")]

from bench_file_fio import aligned  # noqa: E402
from figures import keep  # noqa: E402
from vllm_engine import PYTHON, SPEC, Engine  # noqa: E402

from blockyard.stores import open_store  # noqa: E402

MODELS = {
    "tiny": {"max_position_embeddings": 4096},
    "small": {
        "max_position_embeddings": 4096,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
DEVICE = {"num_gpu_blocks_override": 80, "max_model_len": 2048, "max_num_seqs": 16}
DECODE: dict[str, Any] = {"requests": 6, "length": 256, "tokens": 128}
PREEMPTED: dict[str, Any] = {**DECODE, "requests": 16}
PROMPT: dict[str, Any] = {"requests": 1, "length": 1920, "tokens": 8}
OTHERS: dict[str, Any] = {"requests": 2, "length": 320, "tokens": 4}
ALONE = "alone"
Engines = dict[str, Engine]
Rounds = list[dict[str, Any]]


def in_turns(engines: Engines, rounds: int, numbers: Any, **asked: Any) -> Rounds:
    """Serve the same prompts with each engine, in another order in each round."""
    found = []
    names = list(engines)
    for turn in range(rounds):
        prompts = next(numbers)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        results = {name: engines[name].serve(prompts=prompts, **asked) for name in order}
        for result in results.values():
            assert result["tokens"] == results[ALONE]["tokens"], "other tokens than vLLM alone"
        found.append(results)
    return found


def median(rounds: Rounds, name: str, field: str) -> float:
    """The median of a figure of one engine."""
    return statistics.median(result[name][field] for result in rounds)


def loss(rounds: Rounds, name: str) -> float:
    """How much longer an engine takes than vLLM alone in the same round, in percent: the median."""
    return 100 * statistics.median(result[name]["seconds"] / result[ALONE]["seconds"] - 1 for result in rounds)


def throughput(title: str, rounds: Rounds, names: list[str], asked: dict[str, Any]) -> dict[str, float]:
    """Print a table of one workload, and return its figures."""
    tokens = asked["requests"] * asked["tokens"]
    print(f"\n{title}: {asked['requests']} requests of {asked['length']} + {asked['tokens']} tokens")
    print(f"{'':16}{'tokens/s':>10}{'least':>8}{'most':>8}{'computed':>10}{'preempted':>11}{'longer by %':>13}")
    figures = {}
    for name in names:
        rates = sorted(tokens / result[name]["seconds"] for result in rounds)
        first, last = (rounds[place][name]["counters"]["vllm:num_preemptions"] for place in (0, -1))
        preempted = (last - first) / max(1, len(rounds) - 1)
        print(
            f"{name:16}{statistics.median(rates):10.1f}{rates[0]:8.1f}{rates[-1]:8.1f}"
            f"{median(rounds, name, 'computed'):10.0f}{preempted:11.1f}{loss(rounds, name):13.2f}"
        )
        figures[f"vllm_{name}_{title}_tokens_per_second"] = statistics.median(rates)
        figures[f"vllm_{name}_{title}_computed_tokens"] = median(rounds, name, "computed")
        if name != ALONE:
            figures[f"vllm_{name}_{title}_loss_percent"] = loss(rounds, name)
            loaded = rounds[-1][name]["counters"]["vllm:kv_offload_load_bytes"]
            assert loaded > 0 or not preempted, f"{name}: preempted requests found nothing on the host"
    return figures


class Leg(NamedTuple):
    """One serving of the prompt: which engine, what is cleared before it, and how many tokens are found where."""

    title: str
    engine: str
    cleared: str = ""
    found: tuple[tuple[str, int], ...] = ()


LEGS = (
    Leg("computed", ALONE),
    Leg("computed, stored", "file"),
    # vLLM never takes a prompt's last block from the device, for it computes at least the last token.
    Leg("from the device", "file", found=(("device", 1888), ("host", 32))),
    Leg("from the host", "file", "device", found=(("host", 1920),)),
    Leg("from the file", "file", "host", found=(("store", 1920),)),
)


class Disk:
    """A file store that no engine uses, with as many bytes as the prompt has in chunks.

    Args:
        folder: of the store.
        shape: the model's.
    """

    def __init__(self, folder: Path, shape: dict[str, int]) -> None:
        heads = shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
        chunk = shape["num_hidden_layers"] * 2 * heads * 4 * 32  # K and V in float32, 32 tokens
        count = PROMPT["length"] // 32
        self.keys = [hashlib.sha256(bytes([number])).digest() for number in range(count)]
        self.rows = aligned(count, chunk)
        self.store = open_store(f"file://{folder}?size=256MiB", bytes_per_block=chunk, use="prefix")
        assert self.store.wait(self.store.submit_put(self.keys, self.rows)).ok.all()

    def read(self) -> float:
        """Return the milliseconds of a read of all bytes into warm rows."""
        began = time.perf_counter()
        assert self.store.wait(self.store.submit_get(self.keys, self.rows)).ok.all()
        return 1e3 * (time.perf_counter() - began)


def first_tokens(engines: Engines, rounds: int, numbers: Any, disk: Disk | None) -> dict[str, float]:
    """Print how long the first token of a prompt takes: computed, and from each tier that holds it."""
    taken: dict[str, list[float]] = {leg.title: [] for leg in LEGS}
    alone: list[float] = []
    for _ in range(rounds):
        prompts, tokens = next(numbers), []
        for leg in LEGS:
            engine = engines[leg.engine]
            if leg.cleared:
                engine.serve(**OTHERS, prompts=next(numbers), clear=leg.cleared)
                engine.serve(**OTHERS, prompts=next(numbers))
            result = engine.serve(**PROMPT, prompts=prompts)
            expected = dict.fromkeys(result["found"], 0) | dict(leg.found)
            assert result["found"] == expected, f"{leg.title}: tokens found are {result['found']}, must be {expected}"
            tokens.append(result["tokens"])
            taken[leg.title].append(1e3 * result["first_token"][0])
            if disk is not None:
                alone.append(disk.read())
        assert all(said == tokens[0] for said in tokens), "other tokens than vLLM alone"
    print(f"\nfirst token of a prompt of {PROMPT['length']} tokens, ms: median, least, most; tokens found")
    for leg in LEGS:
        times = taken[leg.title]
        print(
            f"{leg.title:20}{statistics.median(times):8.0f}{min(times):8.0f}{max(times):8.0f}"
            "   " + ", ".join(f"{found:,} {tier}" for tier, found in leg.found)
        )
    if disk is not None:
        host, file = (statistics.median(taken[title]) for title in ("from the host", "from the file"))
        most = 1.5 * host + statistics.median(alone)
        print(f"the bytes alone take {statistics.median(alone):.0f} ms, so the file may take {most:.0f} ms")
        assert file <= most, f"the first token from the file takes {file:.0f} ms"
    return {
        f"vllm_first_token_{title.replace(',', '').replace(' ', '_')}_ms": statistics.median(times)
        for title, times in taken.items()
    }


def main() -> None:
    """Start the engines, measure, print, and add to BENCH_JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--threads", type=int, default=1, help="of a model's operators")
    parser.add_argument("--only", choices=("first-token",), help="measure nothing but first tokens")
    options = parser.parse_args()
    if not PYTHON:
        print("nothing measured: ENGINES_PYTHON does not name a Python with vLLM; make bench-engines does")
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ours = {**SPEC, "host_bytes": "256MiB"}
        below = {
            "prefix_store": f"file://{folder / 'store'}?size=512MiB",
            "weights_fixed": True,
            "prefetch_timeout_base": 60,
        }
        engines = {}
        subjects = {ALONE: {}, "host": ours, "file": {**ours, **below}}
        if options.only:
            del subjects["host"]
        for subject, extra in subjects.items():
            engine = Engine(
                folder / "model",
                folder / f"{subject}.log",
                extra=extra,
                engine=DEVICE,
                model=MODELS[options.model],
                processes=True,
            )
            engines[subject] = stack.enter_context(closing(engine))
            engine.serve(prompts=0, **PREEMPTED | {"tokens": 4})  # warms up; the first also makes the model
        numbers = count(1)
        print(f"model {options.model}, {options.threads} thread, load {os.getloadavg()[0]:.1f}")
        figures = {}
        for title, asked in ({} if options.only else {"decode": DECODE, "preemption": PREEMPTED}).items():
            rounds = in_turns(engines, options.rounds, numbers, **asked)
            figures |= throughput(title, rounds, list(engines), asked)
        disk = Disk(folder / "disk", MODELS["small"]) if options.model == "small" else None
        figures |= first_tokens(engines, options.rounds, numbers, disk)
        print(f"load {os.getloadavg()[0]:.1f} at the end")
    keep(figures)


if __name__ == "__main__":
    main()
