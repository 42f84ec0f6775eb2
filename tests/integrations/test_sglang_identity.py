"""Pages are found by servers that compute the same bytes, and by no others; over stand-ins or SGLang itself."""

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_drivers
import numpy as np
import pytest
from checkpoints import checkpoint, llama, snapshot
from engine_drivers import SGLang

from blockyard.errors import InvalidArgumentError

KEYS = [f"{n:064x}" for n in range(4)]
IS_HERE = importlib.util.find_spec("sglang") is not None


@pytest.fixture
def identify() -> Iterator[Callable[[Any], tuple[str, str]]]:
    with engine_drivers.sglang():
        yield importlib.import_module("blockyard.integrations.sglang.identity").identify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def server_args(folder: Path | str, hf: dict[str, Any] | None = None, **change: Any) -> Any:
    """The arguments of a server over a model in a folder, whose own configuration has some fields overridden."""
    override = json.dumps(hf or {})
    if IS_HERE:
        made = importlib.import_module("sglang.srt.server_args").ServerArgs
        return made(model_path=str(folder), device="cpu", json_model_override_args=override, **change)
    defaults = {
        "model_path": str(folder),
        "revision": None,
        "load_format": "auto",
        "download_dir": None,
        "device": "cpu",
        "speculative_draft_model_path": None,
        "quantization_param_path": None,
        "lora_paths": None,
    }
    config = SimpleNamespace(hf_config=llama(**(hf or {})), dtype=change.get("dtype"))
    return SimpleNamespace(**(defaults | change), _model_config=config)


CHANGES: dict[str, dict[str, Any]] = {
    "rope theta": {"hf": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}},
    "rope scaling": {"hf": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}},
    "rms eps": {"hf": {"rms_norm_eps": 1e-5}},
    "kv heads": {"hf": {"num_key_value_heads": 2}},
    "sliding window": {"hf": {"sliding_window": 512}},
    "quantization": {"quantization": "fp8"},
    "dtype": {"dtype": "bfloat16"},
    "kv dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "weight format": {"load_format": "bitsandbytes"},
    "model code": {"model_impl": "transformers"},
}
NO_CHANGES: dict[str, dict[str, Any]] = {
    "served name": {"served_model_name": "another"},
    "tokenizer": {"tokenizer_path": "another"},
    "memory": {"mem_fraction_static": 0.5},
    "seed": {"random_seed": 7},
    "port": {"port": 30001},
}


def test_each_setting_that_changes_bytes_has_an_identity_of_its_own(identify: Any, folder: Path, tmp_path: Path):
    scales = tmp_path / "scales.json"
    scales.write_text('{"k": 1.0}', encoding="utf-8")
    made = {name: identify(server_args(folder, **change)) for name, change in {"": {}, **CHANGES}.items()}
    made["another checkpoint"] = identify(server_args(checkpoint(tmp_path / "tuned", seed=1)))
    made["scales"] = identify(server_args(folder, quantization_param_path=str(scales)))
    scales.write_text('{"k": 2.0}', encoding="utf-8")
    made["other scales"] = identify(server_args(folder, quantization_param_path=str(scales)))
    checkpoint(folder, seed=2)
    made["other weights under the same path"] = identify(server_args(folder))
    assert {problem for _, problem in made.values()} == {""}
    digests = [digest for digest, _ in made.values()]
    assert {name for name, (digest, _) in made.items() if digests.count(digest) > 1} == set()


def test_settings_that_change_no_byte_share_an_identity(identify: Any, folder: Path, tmp_path: Path):
    wanted = identify(server_args(folder))
    made = {name: identify(server_args(folder, **change)) for name, change in NO_CHANGES.items()}
    made["copy"] = identify(server_args(Path(shutil.copytree(folder, tmp_path / "copy"))))
    assert {name for name, found in made.items() if found != wanted} == set()


def test_weights_that_cannot_be_named_are_a_problem(identify: Any, folder: Path, tmp_path: Path):
    problems = {
        "dummy": identify(server_args(folder, load_format="dummy"))[1],
        "lora": identify(server_args(folder, enable_lora=True))[1],
        "draft": identify(server_args(folder, speculative_draft_model_path=str(tmp_path / "draft")))[1],
        "none": identify(None)[1],
    }
    assert problems["dummy"] == "load_format is 'dummy', so the weights are not those of the model's files"
    assert problems["lora"] == "SGLang names a LoRA adapter by its name and path, not by its weights"
    assert problems["draft"].endswith("are in no folder and not in the hub's cache")
    assert problems["none"] == "SGLang does not show its arguments here"


def test_pages_are_found_under_any_served_name_and_with_no_other_theta(
    identify: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    storage = importlib.import_module("blockyard.integrations.sglang.storage")
    pages = np.full((len(KEYS), SGLang.page_bytes), 3, np.uint8)
    found = {}
    for name, change, served in (("", {}, "a"), ("same", {}, "b"), ("theta", CHANGES["rope theta"], "a")):
        args = server_args(folder, **change)
        monkeypatch.setattr(storage, "current_server_args", lambda args=args: args)
        engine = SGLang({"root_dir": str(tmp_path / "pages"), "size": "1MiB"}, revision="", model_name=served)
        found[name] = engine.leading(KEYS)
        engine.store(KEYS, pages)
        engine.close()
    assert found == {"": 0, "same": len(KEYS), "theta": 0}


def test_a_server_that_shows_nothing_wants_a_revision(identify: Any, tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match=r"revision is empty, .*but SGLang does not show its arguments here"):
        SGLang({"root_dir": str(tmp_path)}, revision="")
    SGLang({"url": "memory://identity?size=1MiB"}, revision="").close()


def test_a_model_of_the_hub_is_named_by_its_commit(identify: Any, tmp_path: Path):
    made = []
    for cache, commit in (("one", "a" * 40), ("two", "a" * 40), ("three", "b" * 40)):
        made.append(identify(server_args(snapshot(tmp_path / cache, commit=commit))))
    assert made[0] == made[1] != made[2]
