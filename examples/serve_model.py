"""Serve a Hugging Face model from device, host and disk: python examples/serve_model.py [MODEL [PROMPT ...]]."""

import sys
import tempfile

from transformers import AutoModelForCausalLM

from blockyard.integrations.transformers import Generator
from blockyard.sim.demo_model import demo_model

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]) if sys.argv[1:] else demo_model()
prompts = sys.argv[2:] or [[72, 101, 108, 108, 111], [87, 111, 114, 108, 100]]
with (
    tempfile.TemporaryDirectory() as folder,
    Generator(model, device_blocks=8, host_blocks=8, external=f"file://{folder}?size=64MiB") as generator,
):
    for output in generator.generate(prompts, max_new_tokens=32):
        sys.stdout.write(f"{output.index}: {output.text if sys.argv[2:] else output.tokens}\n")
