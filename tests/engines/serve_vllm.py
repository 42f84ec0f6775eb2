"""Serves a tiny seeded Llama with vLLM on a CPU, and prints tokens and counters as JSON; run by `test_vllm_engine.py`.

serve_vllm.py MODEL_FOLDER '{"extra": {...}, "sabotage": "", "rounds": 2}'
"""

import json
import os
import sys
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
    from blockyard.integrations.vllm import tier, worker

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


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    model(folder)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    more = {}
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
    rounds = [llm.generate(prompts, sampling, use_tqdm=False) for _ in range(options.get("rounds", 2))]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds]
    cached = sum(output.num_cached_tokens or 0 for outputs in rounds for output in outputs)
    print("RESULT", json.dumps({"tokens": tokens, "cached": cached, "counters": counters}))


if __name__ == "__main__":
    main()
