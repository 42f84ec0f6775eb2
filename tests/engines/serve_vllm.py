"""Serves a tiny seeded model with vLLM on a CPU, and prints tokens and counters as JSON; run by `vllm_engine.py`.

serve_vllm.py MODEL_FOLDER '{"extra": {...}, "sabotage": "", "rounds": 2, "faults": ["", "lose"]}'
serve_vllm.py MODEL_FOLDER '{"extra": {...}, "asked": true, "processes": true, "engine": {...}, "model": {...}}'

vLLM runs in this process, which faults and sabotage need; with processes, in those that it starts by default.
With faults, each round begins with empty caches of device and host, and with an external store that fails in that way.
When asked, it reads a round from each line of standard input, a JSON object such as {"prompts": 1, "clear": "host"},
and prints a result for each; with "sabotage" from that round on. "connector" has other arguments for vLLM's choice of
one; "engine" and "model" change its arguments and the configuration of the model, by default a Llama.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling takes longer than all rounds of a test.
    "TORCHDYNAMO_DISABLE": "1",
}
BLOCK = 32  # tokens


def model(folder: str, shape: dict[str, Any]) -> None:
    if os.path.exists(os.path.join(folder, "config.json")):  # noqa: PTH110, PTH118 (nothing else is imported yet)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    tiny = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    config = AutoConfig.for_model(**{"model_type": "llama", **tiny, **shape})
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)


def sabotage(what: str) -> None:
    """Break one thing on purpose: the tokens must show it."""
    from blockyard.integrations import vllm as ours
    from blockyard.integrations.vllm import external, tier, worker

    if what == "loads":
        bind = worker.BlockyardWorker.submit_load

        def submit_load(self: Any, *arguments: Any, **more: Any) -> bool:
            before = self._groups
            self._groups = [group._replace(load=lambda mapping: None) for group in before]
            try:
                return bind(self, *arguments, **more)
            finally:
                self._groups = before

        ours.BlockyardWorker.submit_load = submit_load
    elif what == "wrong chunks":
        plan = worker.BlockyardWorker._mappings
        worker.BlockyardWorker._mappings = lambda self, device, chunks, to: plan(
            self, device, (chunks + 1) % self._num_chunks if to == "small" else chunks, to
        )
    elif what == "promotions":

        def get(self: Any, keys: list[Any], chunks: Any) -> Iterator[Any]:
            yield 0.0  # a job goes on after that time
            return tier._Outcome(keys, 1, time.perf_counter())

        tier.BlockyardTier._get = get
    elif what == "token order":
        made = external.ChunkRows
        external.ChunkRows = lambda parts, shards: made(parts, shards._replace(tokens=None))
    elif what == "staging":
        external.ChunkRows.write = lambda self, chunks, rows, places: None


def loads_by_group() -> Counter[int]:
    """Count the blocks that the worker of this process loads from now on, by cache group."""
    from blockyard.integrations.vllm.worker import BlockyardWorker

    counted, plan = Counter[int](), BlockyardWorker._mappings

    def mappings(self: Any, device: Any, chunks: Any, to: str) -> Any:
        found = plan(self, device, chunks, to)
        counted.update({group: len(mapping) for group, mapping in found if to == "small"})
        return found

    BlockyardWorker._mappings = mappings
    return counted


def failing() -> list[Any]:
    """Have the external store opened as one that can fail; it is in the list from then on."""
    from blockyard.integrations.vllm import spec
    from blockyard.testing.faults import FailingStore

    stores: list[Any] = []
    opened = spec.open_store

    def open_store(url: str, **options: Any) -> Any:
        stores.append(FailingStore(opened(url, **options), timeout=1.0))
        return stores[-1]

    spec.open_store = open_store
    return stores


def counts(llm: Any) -> Any:
    """The engine's counts; see `counting_scheduler.py`."""
    client = llm.llm_engine.engine_core
    return client.call_utility("counts") if hasattr(client, "call_utility") else client.engine_core.counts()


def settled(llm: Any) -> Any:
    """The engine's counts, once nothing is being stored or written any more."""
    steps_alone = hasattr(llm.llm_engine.engine_core, "call_utility")
    until = time.monotonic() + 300
    while True:
        now = counts(llm)
        if not now["is_storing"] and not (steps_alone and now["is_transferring"]):
            return now
        assert time.monotonic() < until, now
        time.sleep(0.01)


def engine(folder: str, options: dict[str, Any]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(options.get("processes", False)))
    from vllm import LLM
    from vllm.config import KVTransferConfig

    more = {}
    if options.get("extra"):
        connector = options.get("connector", {"kv_connector": "OffloadingConnector"})
        more["kv_transfer_config"] = KVTransferConfig(
            kv_role="kv_both", kv_connector_extra_config=options["extra"], **connector
        )
        sabotage(options.get("sabotage", ""))
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": True,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "scheduler_cls": "counting_scheduler.CountingScheduler",
    }
    return LLM(model=folder, **{**arguments, **more, **options.get("engine", {})})


def rounds(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each round is to do."""
    if options.get("asked"):
        yield from map(json.loads, sys.stdin)
    elif options.get("faults"):
        yield from ({"fault": fault, "clear": "host"} for fault in options["faults"])
    else:
        yield from [{}] * options.get("rounds", 2)


def serve(llm: Any, options: dict[str, Any], asked: dict[str, Any], loads: Counter[int]) -> dict[str, Any]:
    """Serve one round; then empty the caches of the device, or those of the host too, if that is asked."""
    from vllm import SamplingParams

    sabotage(asked.get("sabotage", ""))
    loads.clear()
    sampling = SamplingParams(temperature=0, max_tokens=asked.get("tokens", 60), detokenize=False, ignore_eos=True)
    shift = 11 * asked.get("prompts", 0)
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * (i + 1) + shift) % 500 for j in range(asked.get("length", 100))]}
        for i in range(asked.get("requests", 6))
    ]
    before, then = counters(llm), counts(llm)
    began = time.monotonic()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    now, after = settled(llm), counters(llm)

    def grown(name: str) -> int:
        return int(after[name] - before[name])

    found = {
        "seconds": seconds,
        "computed": now["computed"] - then["computed"],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": sum(output.num_cached_tokens or 0 for output in outputs),
        "first_token": [output.metrics.first_token_latency for output in outputs],
        "found": {"device": grown("vllm:prefix_cache_hits")},
        "loads": dict(loads),
    }
    if options.get("extra"):
        per_chunk = BLOCK * options["extra"].get("blocks_per_chunk", 1)
        stored = per_chunk * (now["external"].get("loaded", 0) - then["external"].get("loaded", 0))
        found["found"] |= {"host": grown("vllm:external_prefix_cache_hits") - stored, "store": stored}
    if now["external"]:
        found["external"] = {**now["external"], "seconds": time.monotonic() - began}
    if asked.get("clear"):
        assert llm.reset_prefix_cache(reset_connector=asked["clear"] == "host")
    return found


def counters(llm: Any) -> dict[str, float]:
    """The engine's counters and gauges; those with a source by both names."""
    return {
        " ".join([metric.name, *filter(None, [metric.labels.get("source")])]): metric.value
        for metric in llm.get_metrics()
        if hasattr(metric, "value")
    }


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    model(folder, options.get("model", {}))
    stores = failing() if options.get("faults") else []
    loads = loads_by_group() if options.get("extra") else Counter()
    llm = engine(folder, options)
    found = []
    for asked in rounds(options):
        if stores:
            stores[0].fault = asked["fault"]
        found.append(serve(llm, options, asked, loads))
        if options.get("asked"):
            print("RESULT", json.dumps({**found.pop(), "counters": counters(llm)}), flush=True)
    if not options.get("asked"):
        result = {
            "tokens": [one["tokens"] for one in found],
            "cached": sum(one["cached"] for one in found),
            "counters": counters(llm),
            "external": [one["external"] for one in found if "external" in one],
        }
        print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
