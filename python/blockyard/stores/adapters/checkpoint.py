"""What an engine computes its KV cache with: the model's configuration and weights, as fields of a store's namespace.

Both are equal in all processes and on all machines, wherever the checkpoint lies. Weights are not read in full. A
checkpoint in the hub's cache is named by its commit. Other files are named by size, header and a few KiB of each
tensor, because all fine-tunes of a model have the same headers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from blockyard.errors import InvalidArgumentError

__all__ = ["canonical", "describe_config", "name_weights", "require_revision"]

_WITHOUT_EFFECT: Final = frozenset(
    {
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "use_cache", "return_dict"),
        *("output_hidden_states", "output_attentions", "torchscript", "id2label", "label2id", "problem_type"),
        *("_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    }
)
"""Fields of a Hugging Face configuration that change no byte of the KV cache."""
_WEIGHTS: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}
_CODE: Final = {".json", ".py"}
_NO_WEIGHTS: Final = re.compile(
    r"config\.json|generation_config\.json|.*token.*\.json|vocab\.json|chat_template\.json|tekken\.json"
)
"""Files that change no byte of the KV cache, or that the engine's configuration has read."""
_SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 8192
"""Samples of a whole checkpoint: a model with fewer tensors has one of each."""
_MAX_HEADER: Final = 100_000_000
_OTHER_HEADER: Final = 65536


def require_revision(revision: str, url: str, problem: str) -> None:
    """Reject a shared store if nothing names the weights of its blocks.

    Args:
        revision: the adapter's option of this name.
        url: URL of the store; empty for a folder.
        problem: what the adapter cannot see, as a clause; empty if it sees everything.

    Raises:
        InvalidArgumentError: `revision` is empty and the store is shared.
    """
    if problem and not revision and not url.startswith("memory:"):
        raise InvalidArgumentError(
            f"revision is empty, and other processes read the store, but {problem}. Write for example "
            '"revision": "llama-3-8b 5f0b02c", and change it when weights, adapters, RoPE settings or quantization do'
        )


def canonical(value: Any, skip: AbstractSet[str] = frozenset()) -> Any:
    """Return a value as JSON can hold it, equal in all processes for equal settings.

    Args:
        value: settings of any type. Objects count by type and attributes.
        skip: names of fields to leave out, at any depth.
    """
    if isinstance(value, Mapping):
        return {str(name): canonical(part, skip) for name, part in value.items() if str(name) not in skip}
    if isinstance(value, AbstractSet):
        return sorted((canonical(part, skip) for part in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [canonical(part, skip) for part in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return canonical(_attributes(value), skip)


def _attributes(value: Any) -> Any:
    """Return what distinguishes an object from others of its kind: attributes, a name or a text."""
    if isinstance(value, Enum):
        return value.name
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(getattr(value, "to_dict", None)):
        return dict(value.to_dict())
    if is_dataclass(value):
        return {part.name: getattr(value, part.name) for part in fields(value)}
    text = str(value)
    if re.search(r" at 0x[0-9a-f]+", text):  # the default text of an object is its address
        return {"": type(value).__qualname__, **getattr(value, "__dict__", {})}
    return text


def describe_config(config: Any) -> Any:
    """Return a model's configuration without the fields that change no byte of the KV cache, as JSON can hold it."""
    return canonical(config, _WITHOUT_EFFECT)


def name_weights(model: str, *, revision: str | None = None, cache_dir: str | None = None) -> str:
    """Name the weights of a model: by their commit if the hub's cache has them, else by a digest of their files.

    Args:
        model: a folder, a file, or a repository of the hub that has been downloaded.
        revision: branch, tag or commit in the repository.
        cache_dir: the hub's cache, if it is not the default.

    Returns:
        The name; empty if there are no weights.
    """
    path: Path | None = Path(model)
    with suppress(OSError):
        if path is not None and not path.exists():
            path = _snapshot(model, revision, cache_dir)
        if path is not None:
            files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
            weights = [one for one in files if one.suffix in _WEIGHTS]
            return (_commit(path, weights) or _digest(files, weights)) if weights else ""
    return ""


def _snapshot(repository: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Return the folder of a downloaded repository, without asking the hub."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (engines have it)
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    except ImportError:
        return None
    for file in ("config.json", "params.json"):
        with suppress(HFValidationError):
            found = try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    return None


def _commit(path: Path, weights: list[Path]) -> str:
    """Return the commit of a snapshot in the hub's cache; empty if it is none, or if its files were replaced."""
    is_snapshot = path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name)
    blobs = path.parent.parent / "blobs"
    is_whole = all(file.is_symlink() and file.resolve().parent == blobs.resolve() for file in weights)
    return f"commit {path.name}" if is_snapshot and is_whole else ""


def _digest(files: list[Path], weights: list[Path]) -> str:
    digest = hashlib.sha256()
    per_file = max(16, _SAMPLES // len(weights))
    for file in files:
        if file in weights:
            parts = _samples(file, per_file)
        elif file.suffix in _CODE and not _NO_WEIGHTS.fullmatch(file.name):
            parts = iter([file.read_bytes()])
        else:
            continue
        for part in (file.name.encode(errors="surrogateescape"), *parts):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"files {digest.hexdigest()}"


def _samples(path: Path, count: int) -> Iterator[bytes]:
    """Yield a file's size and header, and at most `count` samples of its bytes."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        yield size.to_bytes(8, "little")
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        is_safetensors = path.suffix == ".safetensors" and 0 < length <= min(_MAX_HEADER, size - 8)
        header = os.pread(file, 8 + length if is_safetensors else _OTHER_HEADER, 0)
        yield header
        places = _tensors(header, count) if is_safetensors else []
        step = max(_SAMPLE_BYTES, size // count)
        for first, last in places or ((at, size) for at in range(0, size, step)):
            middle = first + max(0, last - first - _SAMPLE_BYTES) // 2 if places else first
            yield os.pread(file, min(_SAMPLE_BYTES, last - middle), middle)
    finally:
        os.close(file)


def _tensors(header: bytes, count: int) -> list[tuple[int, int]]:
    """Return where tensors of a safetensors file lie: of all, or of `count` that their names choose."""
    try:
        tensors = json.loads(header[8:])
        tensors.pop("__metadata__", None)
        chosen = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())[:count]
        spans = [tensors[name]["data_offsets"] for name in chosen]
        return sorted((len(header) + int(first), len(header) + int(last)) for first, last in spans)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # not safetensors, whatever its name says
