"""The demo's models: where they run, and which folders they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters.checkpoint import describe_config
from blockyard.tools.demo.demo_model import DEMO_CONFIGS, demo_model

__all__ = ["choose_device", "fitting_threads", "load_model", "name_of_weights"]

MAX_PARAMETERS_FOR_ONE_THREAD = 10_000_000


def choose_device(name: str) -> str:
    """Return torch's name of the device to run on.

    Args:
        name: `cpu`, `cuda`, `cuda:1` and so on, or `auto`: cuda if available.

    Raises:
        InvalidArgumentError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {name!r}, must be cpu, cuda or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(f"device is {name!r}, this machine has {torch.cuda.device_count()} CUDA devices")
    return str(device)


def load_model(model: Path, device: str) -> PreTrainedModel:
    """Load a local checkpoint, or build one of the demo's own models.

    Args:
        model: name of one of `DEMO_CONFIGS`, or the folder of a checkpoint in the format of `save_pretrained`.
        device: device of the model.

    Returns:
        The model in fp32, the dtype in which paged and unpaged runs agree token by token.

    Raises:
        InvalidArgumentError: the folder holds no model that transformers can load.
    """
    if (name := str(model)) in DEMO_CONFIGS:
        return demo_model(DEMO_CONFIGS[name](), device=device)
    try:
        found = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot load a model from {model}: {str(error).splitlines()[0]}") from error
    found.eval()
    found.to(device)  # type: ignore[arg-type]  # the decorated method is typed without its first argument
    loaded: PreTrainedModel = found
    return loaded


def name_of_weights(model: PreTrainedModel) -> bytes:
    """Return a name for a model, its configuration and its weights, which is the namespace of a prefix store."""
    described = json.dumps(describe_config(model.config), sort_keys=True)
    digest = hashlib.sha256(f"{type(model).__name__} {described}".encode())
    for name, weights in sorted(model.state_dict().items()):
        digest.update(f"{name} {weights.dtype} {list(weights.shape)}".encode())
        digest.update(weights.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.digest()


@contextmanager
def fitting_threads(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, run a small model on one CPU thread.

    Its matrices are too small to benefit from several threads, and on a busy machine these wait for one another.
    """
    threads = torch.get_num_threads()
    small = sum(weight.numel() for weight in model.parameters()) <= MAX_PARAMETERS_FOR_ONE_THREAD
    try:
        if small and model.device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
