"""How many prompt tokens vLLM finds in device and host memory: with its own offloading, or with ours.

    make bench-engines [BENCH_JSON=FILE]
    ENGINES_PYTHON=PYTHON LMCACHE_PYTHON=OTHER python benches/engines/bench_vllm_hits.py [--workload agents]

PYTHON has vLLM, OTHER has LMCache (see `lmcache_host.py`; left out without it). vLLM's real scheduler, block pool and
connectors serve recorded and generated requests; only the model and the copies are left out: each step's tokens are
computed, and its transfers have ended, when the next one begins. Eight requests run at a time, those of a session one
after the other. Prompts have their recorded length, answers one token. A block stands for 256 tokens of a recorded
session, for 512 of Mooncake's trace, and for 64 of a document.

The device holds a share of all distinct blocks, the host as many blocks as the device, twice as many, and so on; all
systems have equally many. `optimum` is what one pool of both sizes finds if it knows all requests. `moved` is the
number of blocks copied to and from the host for each block that the host adds to what is found. `lazy` is
`SimpleCPUOffloadConnector` with `lazy_offload`, which stores what the device is about to drop, as `ours_exclusive`
does, our `BlockyardKVConnector`; the others store what is computed. With `--layers` the model has a window of four
blocks (`window`), of half a block (`gpt-oss`: 128 of a recorded session's tokens), or three groups of states beside
full attention. Blockyard's clock is the time at which the trace's last request arrived; `--hints` sends what an agent
trace knows when an answer ends. With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. It
asserts that each system but LMCache's, whose host may hold only what the device has, loads from it, and with `--check`
that the best of ours finds at least .99 of what each of vLLM's and of LMCache's finds, or .005 less, and with agents
1.05 of it over all three sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ENGINES_PYTHON", "")
if __name__ == "__main__" and PYTHON and sys.executable != PYTHON:
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONHASHSEED", "0")  # vLLM's choices depend on the order of sets
    os.execv(PYTHON, [PYTHON, *sys.argv])
if not PYTHON:
    sys.exit("nothing measured: ENGINES_PYTHON does not name a Python with vLLM; make bench-engines does")
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "benches" / "engines")]
LMCACHE_PYTHON = os.environ.get("LMCACHE_PYTHON", "")
if LMCACHE_PYTHON:  # vLLM's environment goes first: it lacks only a few of LMCache's packages
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path += [str(Path(LMCACHE_PYTHON).parent.parent / "lib" / version / "site-packages")]

import torch  # noqa: E402
from figures import keep  # noqa: E402
from systems import OURS_ON_THE_HOST, VLLM, System  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.kv_offload.base import TransferResult  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from workloads import SEATS, Ids, Served, agents, documents, mooncake, optimum, take_next  # noqa: E402

BLOCK, STEP_TOKENS, MAX_LEN = 16, 2_048, 1 << 20
WINDOWS = {"window": 4 * BLOCK, "gpt-oss": BLOCK // 2}
DEVICE_SHARE = 0.05
GOAL = 0.99
"""What ours finds, over what each of the others finds, ..."""
AGENTS_GOAL = 1.05
"""What ours finds with agent sessions, over all sizes of the host, over what each of the others finds."""
NOISE = 0.005
"""... but for this share of the tokens: vLLM's own figures change by more from run to run."""
SYSTEMS = {
    **VLLM,
    **{
        f"lmcache_{policy.lower()}{'_early' * early}": System(
            "LMCacheHost", {"policy": policy, "early": early}, "host_bytes"
        )
        for policy in ("LRU", "ARC")
        for early in (False, True)
    },
    **OURS_ON_THE_HOST,
}
WORKLOADS = {"agents": agents, "documents": documents, "mooncake": mooncake}


class Copies:
    """Ends each transfer at once. It stands for the worker of every system, whose copies no hit depends on."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.stored = self.loaded = 0

    def submit_store(self, job: int, _device: Any, host: Any) -> bool:
        """Count the stored chunks."""
        self.stored += len(host.block_ids)
        self.ended.append(job)
        return True

    def submit_load(self, job: int, host: Any, _device: Any) -> bool:
        """Count the loaded chunks."""
        self.loaded += len(host.block_ids)
        self.ended.append(job)
        return True

    def get_finished(self) -> list[Any]:
        """Return all transfers since the last call."""
        ended, self.ended = self.ended, []
        return [TransferResult(job, success=True, transfer_size=1, transfer_time=1e-6) for job in ended]

    def wait(self, _jobs: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Nothing is open."""


class LazyWorker:
    """The worker side of `SimpleCPUOffloadConnector` without its copies."""

    def __init__(self) -> None:
        self.worker = Copies()
        self._loaded: set[str] = set()
        self._stored: dict[int, int] = {}

    def handle_preemptions(self, _metadata: Any) -> None:
        """Nothing is under way."""

    def start_kv_transfers(self, metadata: Any) -> None:
        """End the step's loads."""
        self.worker.loaded += len(metadata.load_cpu_blocks)
        self._loaded.update(metadata.load_event_to_reqs.get(metadata.load_event) or ())

    def prepare_store_kv(self, metadata: Any) -> None:
        """End the step's stores."""
        self.worker.stored += len(metadata.store_cpu_blocks)
        if metadata.store_event >= 0:
            self._stored[metadata.store_event] = 1

    def get_finished(self, _ended: set[str]) -> tuple[None, set[str]]:
        """Return the requests whose loads have ended."""
        loaded, self._loaded = self._loaded, set()
        return None, loaded

    def build_connector_worker_meta(self) -> Any:
        """Return the stores that have ended."""
        stored, self._stored = self._stored, {}
        return SimpleCPUOffloadWorkerMetadata(completed_store_events=stored) if stored else None


def groups(layers: str) -> list[Any]:
    """Return the specs of a model's cache groups, whose blocks have equally many bytes."""
    heads = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(**heads)
    if layers == "full":
        return [full]
    if layers in WINDOWS:
        return [full, SlidingWindowSpec(**heads, sliding_window=WINDOWS[layers])]
    shape = (full.page_size_bytes // 4,)
    state = MambaSpec(block_size=BLOCK, shapes=(shape,), dtypes=(torch.float32,), mamba_cache_mode="align")
    return [full, state, state, state]


def start(model: Path, layers: str, blocks: int, system: System | None, host_blocks: int) -> tuple[Any, Any]:
    """Return vLLM's scheduler, and the worker side of its connector; None without one."""
    specs = groups(layers)
    page = specs[0].page_size_bytes
    transfer = None
    if system is not None:
        options = {**system.options, system.size: host_blocks * page}
        module = system.module
        if system.connector == "LMCacheHost":
            module, options["page_bytes"] = "lmcache_host", page
        transfer = KVTransferConfig(
            kv_connector=system.connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config=options,
        )
    cache = CacheConfig(
        block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align" if layers == "states" else "none"
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), tokenizer=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SEATS,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=MAX_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = blocks
    names = [f"layer.{group}" for group in range(len(specs))]
    tensors = [KVCacheTensor(page * blocks, [name], page * blocks, page) for name in names]  # all over the same bytes
    caches = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)],
    )
    scheduler = Scheduler(config, caches, StructuredOutputManager(config), block_size=BLOCK)
    worker: Any = None
    if system is not None and system.connector == "SimpleCPUOffloadConnector":
        worker = LazyWorker()
    elif system is not None and system.connector == "LMCacheHost":
        from lmcache_host import LMCacheWorker  # noqa: PLC0415 (only some environments have it)

        worker = LMCacheWorker(scheduler.connector.scheduler_adapter)
    elif system is not None:
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches).connector_worker
        worker.worker = Copies()
    return scheduler, worker


class Found(NamedTuple):
    """What a system found."""

    share: float
    """Of the prompts' tokens."""
    tokens: int
    steps: int
    stored: int
    loaded: int
    seconds: float

    def moved(self, alone: Found) -> float:
        """Return the blocks copied for each block that the host adds to what is found."""
        added = (self.share - alone.share) * self.tokens / BLOCK
        return (self.stored + self.loaded) / added if added > 0 else float("inf")


class Clock:
    """Stands for the module `time` where Blockyard follows conversations: it is when the last request arrived."""

    now = 0.0

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now


def envelope(hint: str | None) -> KvHintsEnvelope | None:
    """Return what tells vLLM's connector of a hint."""
    if hint is None:
        return None
    return KvHintsEnvelope("0.1", "", [KvHintAction("", "blockyard.conversation", "1.0", {"hint": hint})])


def serve(
    model: Path,
    layers: str,
    requests: Sequence[Served],
    blocks: int,
    system: System | None,
    host_blocks: int,
    *,
    hints: bool = False,
) -> Found:
    """Serve requests, eight at a time."""
    init_none_hash(sha256)
    import_module("blockyard.integrations.vllm.manager").__dict__["time"] = clock = Clock()
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler, worker = start(model, layers, blocks, system, host_blocks)
    waiting, running, begun = deque(requests), dict[str, tuple[Served, Any]](), time.perf_counter()
    total = computed = steps = number = 0
    while waiting or running:
        while len(running) < SEATS and (
            chosen := take_next(waiting, {served.session for served, _ in running.values()})
        ):
            tokens = _tokens(chosen.blocks)
            request = Request(
                request_id=str(number),
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
                pooling_params=None,
                block_hasher=hasher,
                kv_hints=envelope(chosen.hint) if hints else None,
            )
            clock.now = max(clock.now, chosen.arrival)
            number += 1
            total += len(tokens)
            running[request.request_id] = chosen, request
            scheduler.add_request(request)
        step = scheduler.schedule()
        steps += 1
        computed += step.total_num_scheduled_tokens
        scheduler.update_from_output(
            step, _output(step, {name: request for name, (_, request) in running.items()}, worker)
        )
        running = {name: served for name, served in running.items() if not served[1].is_finished()}
    copies = Copies() if worker is None else worker.worker
    return Found(1 - computed / total, total, steps, copies.stored, copies.loaded, time.perf_counter() - begun)


def _tokens(blocks: Ids) -> list[int]:
    """Return the tokens that stand for blocks, and one more, which is always computed."""
    filling = [0] * (BLOCK - 2)
    return [token for block in blocks for token in (block >> 20, block & 0xFFFFF, *filling)] + [1]


def _output(step: Any, requests: dict[str, Any], worker: Any) -> Any:
    """Return what vLLM's model runner would: a token for each request whose prompt is computed, and the transfers."""
    transfers = None
    if worker is not None:
        metadata = step.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.start_kv_transfers(metadata)
        worker.prepare_store_kv(metadata)
        sent, loaded = worker.get_finished(step.finished_req_ids)
        transfers = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=loaded,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
    names = list(step.num_scheduled_tokens)
    ended = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[7] if is_last else [] for is_last in ended],
        kv_connector_output=transfers,
    )


def write_model(folder: Path) -> Path:
    """Write the configuration of a small model."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    more = {"vocab_size": 128, "max_position_embeddings": MAX_LEN, "torch_dtype": "float32"}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1, **sizes, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    """Serve each workload with each system, print what they find, and add to BENCH_JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", choices=WORKLOADS, action="append", help="several times for several; default: all"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[1, 2, 4], help="blocks of the host over the device's"
    )
    parser.add_argument("--requests", type=int, default=800, help="of each workload")
    parser.add_argument("--layers", choices=("full", *WINDOWS, "states"), default="full", help="see `groups`")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="only these; with `--layers` none of LMCache's")
    parser.add_argument("--part", type=int, choices=(0, 1), help="only this half of the recorded requests")
    parser.add_argument("--hints", action="store_true", help="send what an agent trace knows of the ends of answers")
    parser.add_argument("--check", action="store_true", help="stop with an error if a goal is missed")
    options = parser.parse_args()
    measured = [
        system for system in SYSTEMS if "lmcache" not in system or (LMCACHE_PYTHON and options.layers == "full")
    ]
    systems = options.systems or measured
    if not set(systems) <= set(measured):
        parser.error(f"LMCache needs LMCACHE_PYTHON and --layers full, which is {options.layers}")
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name))
        for workload in options.workload or WORKLOADS:
            requests = WORKLOADS[workload](options.requests, options.part)
            distinct, longest = len({b for r in requests for b in r.blocks}), max(len(r.blocks) for r in requests)
            blocks = max(round(distinct * DEVICE_SHARE), longest + 2 * SEATS)
            if window := WINDOWS.get(options.layers):  # vLLM stands still if two long loads and a step have no room
                blocks += longest + (STEP_TOKENS + window) // BLOCK + 1
            alone = serve(model, options.layers, requests, blocks, None, 0)
            print(f"\n{workload}: {len(requests)} requests, {distinct} blocks, {blocks} on the device")
            print(f"{'':24}{'found':>8}{'on host':>9}{'stored':>9}{'loaded':>9}{'moved':>8}{'steps':>8}{'seconds':>9}")
            print(f"{'vLLM alone':24}{alone.share:8.3f}{'':35}{alone.steps:8}{alone.seconds:9.1f}", flush=True)
            for ratio in options.ratios:
                if options.layers == "full":
                    best = optimum(requests, blocks + round(blocks * ratio), BLOCK)
                    figures[f"hits_{workload}_{ratio:g}x_optimum"] = best
                    print(f"{f'host {ratio:g} x, optimum':24}{best:8.3f}{best - alone.share:9.3f}", flush=True)
                for system in systems:
                    what = SYSTEMS[system]
                    host = round(blocks * ratio)
                    found = serve(model, options.layers, requests, blocks, what, host, hints=options.hints)
                    print(
                        f"{f'host {ratio:g} x, {system}':24}{found.share:8.3f}{found.share - alone.share:9.3f}"
                        f"{found.stored:9}{found.loaded:9}{found.moved(alone):8.2f}{found.steps:8}{found.seconds:9.1f}",
                        flush=True,
                    )
                    figures[f"hits_{workload}_{ratio:g}x_{system}"] = found.share
                    assert found.loaded or "lmcache" in system, f"{system} has loaded nothing"
    keep(figures)
    if systems != measured:
        return
    others = {f"{cell}_{system}": cell for cell in _cells(figures) for system in _others(measured)}
    missed = [name for name, cell in others.items() if figures[name] * GOAL - NOISE > _ours(figures, cell)]
    if set(options.ratios) >= {1, 2, 4}:
        missed += _behind_with_agents(figures, measured)
    if options.check and missed:
        sys.exit(f"bench_vllm_hits: ours finds less than {GOAL} of {', '.join(missed)}")


def _cells(figures: dict[str, float]) -> list[str]:
    """Return the names of workloads and sizes, which the figures' names begin with."""
    return [name.removesuffix("_ours_lru") for name in figures if name.endswith("_ours_lru")]


def _others(systems: Sequence[str]) -> list[str]:
    return [system for system in systems if not system.startswith("ours")]


def _ours(figures: dict[str, float], cell: str) -> float:
    """Return what the best of ours finds in a cell."""
    return max(figures[f"{cell}_{system}"] for system in SYSTEMS if system.startswith("ours"))


def _behind_with_agents(figures: dict[str, float], systems: Sequence[str]) -> list[str]:
    """Return the other systems of whose sum over the hosts' sizes ours is not the goal's multiple."""
    cells = [cell for cell in _cells(figures) if cell.startswith("hits_agents")]
    sums = {system: sum(figures[f"{cell}_{system}"] for cell in cells) for system in systems}
    best = max(found for system, found in sums.items() if system.startswith("ours"))
    behind = [system for system in _others(systems) if sums[system] * AGENTS_GOAL > best]
    return [f"agents, all sizes, {system}" for system in behind]


if __name__ == "__main__":
    main()
