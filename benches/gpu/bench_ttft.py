"""Time to the first token of a prompt that was computed before, by where its blocks are.

    python benches/gpu/bench_ttft.py [--tokens 2048 8192] [--folder /tmp] [--require] [--json FILE]

A Llama of the shape of Llama-3.1-8B in bf16, with random weights and few token ids, serves one prompt at a time through
`Generator`. A prompt is computed, then found on the device, then, once other prompts have taken its blocks there, in
the host cache. Last, a second generator finds it in a file store that the first has written. A time lasts from
`generate` to the first token on the host, in milliseconds; medians. Each hit's token is compared with the first hit's.
Without a CUDA device it says so; that is an error with --require. `--device cpu --layers 2 --hidden 256 --tokens 512`
runs a small one anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from blockyard.integrations.transformers import Generator
from blockyard.tools.demo.demo_model import demo_config

BLOCK, HEAD, GROUP = 16, 128, 4
# Prompts that fit on the device and on the host, since a step copies at most an eighth of either to the host before it
# evicts them; and those that it evicts.
HELD, TAKEN = 9, 4


class Served:
    """A generator whose device and host hold nine prompts each, and the tokens that it has answered.

    Args:
        model: what it serves.
        tokens: length of a prompt.
        url: the file store.
        answers: tokens by prompt.
    """

    def __init__(self, model: LlamaForCausalLM, tokens: int, url: str, answers: dict[bytes, int]) -> None:
        blocks = tokens // BLOCK
        options = {"device_blocks": HELD * blocks, "host_blocks": HELD * blocks, "prefix_store": url}
        self.generator = Generator(model, **options, block_size=BLOCK, namespace=b"ttft", prefetch_timeout_base=60.0)
        self.answers = answers

    def first_token(self, prompt: list[int], *, cached: bool) -> float:
        """Serve a prompt, and return the milliseconds until its first token."""
        before = self.generator.scheduler.stats().cached_tokens
        began = time.perf_counter()
        (output,) = self.generator.generate([prompt], max_new_tokens=1)
        took = time.perf_counter() - began
        found = self.generator.scheduler.stats().cached_tokens - before
        if found != (len(prompt) - BLOCK if cached else 0):
            raise SystemExit(f"{found} tokens of {len(prompt)} were found")
        token = int(output.tokens[0])
        # A prompt computed as a whole rounds otherwise than its last block alone.
        if cached and self.answers.setdefault(bytes(prompt), token) != token:
            raise SystemExit("a prompt has another token than with its blocks on the device")
        return took * 1e3


def measure(model: LlamaForCausalLM, tokens: int, folder: str) -> dict[str, float]:
    """Serve prompts of one length from everywhere."""
    random = np.random.default_rng(tokens)
    prompts = [random.integers(0, 256, tokens).tolist() for _ in range(HELD + TAKEN)]
    answers: dict[bytes, int] = {}
    times: dict[str, list[float]] = {"computed": [], "device": []}
    with tempfile.TemporaryDirectory(dir=folder) as slab:
        layout = model.config
        token_bytes = 4 * layout.num_hidden_layers * layout.num_key_value_heads * HEAD
        url = f"file://{slab}?size={2 * len(prompts) * tokens * token_bytes}"
        first = Served(model, tokens, url, answers)
        with first.generator:
            for prompt in prompts:
                times["computed"].append(first.first_token(prompt, cached=False))
                times["device"].append(first.first_token(prompt, cached=True))
            times["host"] = [first.first_token(prompt, cached=True) for prompt in prompts[:TAKEN]]
        second = Served(model, tokens, url, answers)
        with second.generator:
            times["file"] = [second.first_token(prompt, cached=True) for prompt in prompts[:TAKEN]]
    # The first of each kind warms up.
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="prompt lengths")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file store is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--require", action="store_true", help="fail where there is no CUDA device")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        raise SystemExit(options.require)
    heads = options.hidden // HEAD
    shape = {"num_layers": options.layers, "hidden_size": options.hidden, "intermediate_size": options.hidden * 7 // 2}
    config = demo_config(**shape, num_heads=heads, num_kv_heads=max(1, heads // GROUP), max_position_embeddings=65536)
    config.initializer_range = 0.02
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(config).eval()
    figures = {}
    for tokens in options.tokens:
        found = measure(model, tokens, options.folder)
        figures |= {f"ttft_{name}_{tokens}_ms": took for name, took in found.items()}
        print(f"tokens={tokens} " + " ".join(f"{name}_ms={took:.1f}" for name, took in found.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
