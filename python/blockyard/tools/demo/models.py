"""The demo's models, their device, and a check that memory can hold their caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.model import ServedModel
from blockyard.integrations.transformers.sizing import available_memory
from blockyard.stores.adapters.checkpoint import describe_config
from blockyard.tools.demo.demo_model import DEMO_CONFIGS, demo_model
from blockyard.tools.demo.workload import Encode

MAX_PARAMETERS_FOR_ONE_THREAD = 10_000_000


def choose_device(name: str) -> str:
    """Return the device to run on.

    Args:
        name: `cpu`, `cuda`, `cuda:1` and so on, or `auto`: cuda if available.

    Returns:
        Torch's name of the device.

    Raises:
        InvalidArgumentError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidArgumentError(f"device is {name!r}, must be cpu, cuda or auto") from None
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

    Args:
        model: the model to run.
    """
    threads = torch.get_num_threads()
    small = sum(weight.numel() for weight in model.parameters()) <= MAX_PARAMETERS_FOR_ONE_THREAD
    try:
        if small and model.device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def load_encode(folder: Path) -> Encode | None:
    """Load a checkpoint's tokenizer.

    Args:
        folder: folder of the checkpoint, or the name of one of the demo's models.

    Returns:
        The encoder; None without a tokenizer, for one token per byte.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot load the tokenizer in {folder}: {str(error).splitlines()[0]}") from error

    def encode(text: NDArray[np.int64]) -> NDArray[np.int64]:
        words = text.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        return np.asarray(tokenizer.encode(words, add_special_tokens=False), dtype=np.int64)

    return encode


def require_memory(model: ServedModel, num_device_blocks: int, num_host_blocks: int) -> None:
    """Reject pools that do not fit in memory: the kernel would grant them and kill the process on first use.

    Args:
        model: the model to run.
        num_device_blocks: number of device blocks.
        num_host_blocks: number of host blocks.

    Raises:
        InvalidArgumentError: the host or the device has too little memory; the message has the numbers.
    """
    size = model.layout.bytes_per_block
    wanted = {"device": num_device_blocks * size, "host": num_host_blocks * size}
    room = {"host": available_memory()}
    if model.device.type == "cuda":
        room["device"] = torch.cuda.mem_get_info(model.device)[0]
    else:
        wanted = {"host": sum(wanted.values())}
    for tier, memory in room.items():
        if wanted[tier] > memory:
            raise InvalidArgumentError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks of {size} bytes need "
                f"{wanted[tier]} bytes of {tier} memory, {memory} are available"
            )
