"""Serves a tiny seeded Llama with vLLM on a CPU, and prints tokens and counters as JSON; run by `test_vllm_engine.py`.

serve_vllm.py MODEL_FOLDER '{"extra": {...}, "sabotage": "", "rounds": 2, "faults": ["", "lose"]}'

With faults, each round begins with empty caches of device and host, and with an external store that fails in that way.
"""

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONHASHSEED": "0",
}


def model(folder: str) -> None:
    if os.path.exists(os.path.join(folder, "config.json")):  # noqa: PTH110, PTH118 (nothing else is imported yet)
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


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
        tier.BlockyardTier._get = lambda self, keys, chunks: tier._Outcome(keys, 1)
    elif what == "staging":
        external.np = SimpleNamespace(**vars(external.np) | {"copyto": lambda to, rows: None})


def failing() -> list[Any]:
    """Have the external store opened as one that can fail; it is in the list from then on."""
    from blockyard.integrations.vllm import spec
    from blockyard.testing.faults import FailingStore

    stores: list[Any] = []
    opened = spec.open_store

    def open_store(url: str, **options: Any) -> Any:
        stores.append(FailingStore(opened(url, **options), deadline=1.0))
        return stores[-1]

    spec.open_store = open_store
    return stores


def settled(llm: Any) -> dict[str, int]:
    """The external store's counts, once nothing is being written any more."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    tier = manager._external
    until = time.monotonic() + 30
    while tier._open and time.monotonic() < until:
        time.sleep(0.01)
    return {name: getattr(tier.counts, name) for name in ("loaded", "missed", "written", "not_written")}


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    model(folder)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    more, faults = {}, options.get("faults", [])
    stores = failing() if faults else []
    if options.get("extra"):
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=options["extra"]
        )
        sabotage(options.get("sabotage", ""))
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=20,
        enable_prefix_caching=True,
        max_num_seqs=8,
        disable_log_stats=False,
        **more,
    )
    sampling = SamplingParams(temperature=0, max_tokens=60, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(i * 7 + j * (i + 1)) % 500 for j in range(100)]} for i in range(6)]
    rounds, external = [], []
    for number in range(len(faults) or options.get("rounds", 2)):
        if faults:
            stores[0].fault = faults[number]
        began = time.monotonic()
        rounds.append(llm.generate(prompts, sampling, use_tqdm=False))
        if options.get("extra", {}).get("external"):
            counts = settled(llm)
            external.append({**counts, "seconds": time.monotonic() - began})
        if faults:
            assert llm.reset_prefix_cache(reset_connector=True)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds]
    cached = sum(output.num_cached_tokens or 0 for outputs in rounds for output in outputs)
    print("RESULT", json.dumps({"tokens": tokens, "cached": cached, "counters": counters, "external": external}))


if __name__ == "__main__":
    main()
