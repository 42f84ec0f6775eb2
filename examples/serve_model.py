"""Serve a Hugging Face model from device, host and disk: python examples/serve_model.py MODEL PROMPT [PROMPT ...]."""

import sys
import tempfile

from transformers import AutoModelForCausalLM

from blockyard.integrations.transformers import Generator

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    disk = f"file://{folder}?size=64MiB"
    with Generator(model, device_blocks=16, host_blocks=8, swap_store=disk) as generator:
        for output in generator.generate(sys.argv[2:], max_new_tokens=32):
            sys.stdout.write(f"{output.index}: {output.text}\n")
