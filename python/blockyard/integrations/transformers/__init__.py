"""Serves Hugging Face models from a paged KV cache in up to three tiers."""

from blockyard.workers.extras import missing

try:
    from blockyard.integrations.sampling import SamplingParams
    from blockyard.integrations.transformers.generator import Generator, Output
    from blockyard.integrations.transformers.model import PagedModel
except ModuleNotFoundError as error:
    raise missing("blockyard.integrations.transformers", error) from None

__all__ = ["Generator", "Output", "PagedModel", "SamplingParams"]
