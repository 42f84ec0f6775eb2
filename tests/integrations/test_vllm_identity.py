"""Chunks of `BlockyardSpec` are found by engines that compute the same bytes, and by no others."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_modules
from checkpoints import checkpoint, llama, snapshot, vllm_config, with_backend
from vllm_sides import KEYS, Engine

from blockyard.errors import InvalidArgumentError

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "factor": 2.0,
}
DRAFT = {"method": "eagle", "num_speculative_tokens": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


@pytest.fixture
def engine(vllm: SimpleNamespace, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(current: Any, **options: Any) -> Engine:
        for one in made:
            one.close()
        made[:] = [Engine(vllm, tmp_path / "store", current=current, **options)]
        return made[0]

    yield make
    for one in made:
        one.close()


def namespace(vllm: SimpleNamespace, current: Any, **options: Any) -> bytes:
    """The namespace of an engine's store, which is in memory."""
    made = Engine(vllm, Path(), current=current, prefix_store="memory://identity?size=1MiB", **options)
    made.close()
    return bytes(made.tier._store._inner.namespace)


def part(vllm: SimpleNamespace, which: str, **change: Any) -> dict[str, Any]:
    """Fields of the spec's configuration, with some of one part changed."""
    config = vllm_modules.config(vllm, {})
    found = getattr(config, which)
    return {"fields": {which: type(found)(**(vars(found) | change))}}


def drafting(folder: Path) -> dict[str, Any]:
    draft = vllm_config(folder).model_config
    return {"speculative_config": SimpleNamespace(**DRAFT, draft_model_config=draft)}


CHANGES: dict[str, dict[str, Any]] = {
    "rope theta": {"hf.rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "rope scaling": {"hf.rope_parameters": YARN},
    "rms eps": {"hf.rms_norm_eps": 1e-5},
    "heads": {"hf.num_attention_heads": 8},
    "kv heads": {"hf.num_key_value_heads": 2},
    "sliding window": {"hf.sliding_window": 512},
    "no sliding window": {"model_config.disable_sliding_window": True},
    "quantization": {"model_config.quantization": "fp8"},
    "quantization of the checkpoint": {"hf.quantization_config": {"quant_method": "awq", "bits": 4}},
    "dtype": {"model_config.dtype": "torch.bfloat16"},
    "kv dtype": {"cache_config.cache_dtype": "fp8_e4m3"},
    "attention": {"attention_config.use_prefill_query_quantization": True},
    "attention backend": with_backend("FlashInfer"),
    "device": {"device_config.device_type": "cpu"},
    "interleaving": {"parallel_config.dcp_kv_cache_interleave_size": 8},
    "weight format": {"load_config.load_format": "bitsandbytes"},
    "a setting that a later version adds": {"model_config.attention_is_upside_down": True},
}
NO_CHANGES: dict[str, dict[str, Any]] = {
    "path": {"hf._name_or_path": "/elsewhere"},
    "transformers": {"hf.transformers_version": "9.9"},
    "use_cache": {"hf.use_cache": False},
    "served name": {"model_config.served_model_name": "another"},
    "tokenizer": {"model_config.tokenizer": "another"},
    "seed": {"model_config.seed": 7},
    "length": {"model_config.max_model_len": 1024},
    "eager": {"model_config.enforce_eager": True},
    "memory": {"cache_config.gpu_memory_utilization": 0.5, "cache_config.num_gpu_blocks": 900},
}


def test_each_setting_that_changes_bytes_has_a_namespace_of_its_own(
    vllm: SimpleNamespace, folder: Path, tmp_path: Path
):
    tuned = checkpoint(tmp_path / "tuned", seed=1)
    parallel = {name: part(vllm, "parallel", **{name: 2}) for name in ("tp_size", "pp_size", "dcp_size")}
    made = {
        "": namespace(vllm, vllm_config(folder)),
        **{name: namespace(vllm, vllm_config(folder, change)) for name, change in CHANGES.items()},
        **{name: namespace(vllm, vllm_config(folder), **fields) for name, fields in parallel.items()},
        "two workers": namespace(vllm, vllm_config(folder), world=2),
        "spec's dtype": namespace(vllm, vllm_config(folder), **part(vllm, "model", dtype="fp8")),
        "chunk": namespace(vllm, vllm_config(folder), blocks_per_chunk=2),
        "revision": namespace(vllm, vllm_config(folder), revision="b"),
        "another checkpoint": namespace(vllm, vllm_config(tuned)),
        "a draft": namespace(vllm, vllm_config(folder, drafting(folder))),
        "another draft": namespace(vllm, vllm_config(folder, drafting(tuned))),
    }
    assert {name for name, found in made.items() if list(made.values()).count(found) > 1} == set()


def test_settings_that_change_no_byte_share_a_namespace(vllm: SimpleNamespace, folder: Path, tmp_path: Path):
    wanted = namespace(vllm, vllm_config(folder))
    made = {name: namespace(vllm, vllm_config(folder, change)) for name, change in NO_CHANGES.items()}
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copied / "generation_config.json").write_text("{}", encoding="utf-8")
    (copied / "README.md").write_text("a copy", encoding="utf-8")
    made["copy"] = namespace(vllm, vllm_config(copied), **part(vllm, "model", name=str(copied)))
    assert {name for name, found in made.items() if found != wanted} == set()


def test_the_length_counts_where_it_decides_how_positions_are_scaled(vllm: SimpleNamespace, folder: Path):
    made = {
        namespace(vllm, vllm_config(folder, {"hf.rope_parameters": LONG, "model_config.max_model_len": length}))
        for length in (1024, 4096)
    }
    assert len(made) == 2


def test_another_theta_finds_nothing_and_the_same_one_all(engine: Callable[..., Engine], folder: Path):
    engine(vllm_config(folder)).compute(KEYS[:6])
    assert engine(vllm_config(folder, CHANGES["rope theta"])).found(KEYS[:6]) == 0
    again = engine(vllm_config(folder))
    assert again.found(KEYS[:6]) == 6
    assert again.load(KEYS[:6])


def test_a_copy_of_the_model_finds_all_and_other_weights_in_its_place_nothing(
    engine: Callable[..., Engine], folder: Path, tmp_path: Path
):
    engine(vllm_config(folder)).compute(KEYS[:6])
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert engine(vllm_config(copied)).found(KEYS[:6]) == 6
    checkpoint(folder, seed=1)
    assert engine(vllm_config(folder)).found(KEYS[:6]) == 0


def test_a_model_of_the_hub_is_named_by_its_commit(vllm: SimpleNamespace, tmp_path: Path):
    made = []
    for cache, commit in (("one", "a" * 40), ("two", "a" * 40), ("three", "b" * 40)):
        snapshot(tmp_path / cache, commit=commit)
        made.append(namespace(vllm, vllm_config("an/llm", {"load_config.download_dir": str(tmp_path / cache)})))
    assert made[0] == made[1] != made[2]


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "dummy": ({"load_config.load_format": "dummy"}, "load_format is 'dummy', so the weights are not those of"),
    "streamed": ({"model_config.model_weights": "s3://bucket"}, "the weights of '.*' are in no folder"),
    "not there": ({"model_config.model": "an/llm"}, "the weights of 'an/llm' are in no folder and not in the hub's"),
    "adapters": ({"lora_config": SimpleNamespace()}, "vLLM names a LoRA adapter by its name and path"),
    "a draft that is not there": (
        {"speculative_config": SimpleNamespace(**DRAFT, draft_model_config=vllm_config("a/draft").model_config)},
        "the weights of 'a/draft' are in no folder",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_worker_that_cannot_name_its_weights_wants_a_revision(
    vllm: SimpleNamespace, folder: Path, tmp_path: Path, problem: str
):
    change, message = PROBLEMS[problem]
    current = vllm_config(folder, {"load_config.download_dir": str(tmp_path / "cache")} | change)
    with pytest.raises(
        InvalidArgumentError, match=f"revision is empty, and other processes read the store, but {message}"
    ):
        Engine(vllm, tmp_path / "store", current=current)
    made = [Engine(vllm, tmp_path / "store", current=current, revision="a").close()]
    assert made == [None]


def test_a_scheduler_whose_workers_say_nothing_wants_a_revision(vllm: SimpleNamespace, tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="but vLLM does not show its model's configuration here"):
        Engine(vllm, tmp_path / "store", revision="")
    extra = {"host_bytes": 4096, "prefix_store": f"file://{tmp_path}/store?size=1MiB"}
    spec = vllm.ours.BlockyardSpec(vllm_modules.config(vllm, extra, engine_id=str(tmp_path)))
    with pytest.raises(InvalidArgumentError, match="but the workers do not say what they compute with"):
        spec.get_manager()


def test_a_store_in_memory_needs_no_revision(vllm: SimpleNamespace):
    assert namespace(vllm, None, revision="") != namespace(vllm, None, revision="a")


def test_an_own_configuration_of_a_model_has_a_namespace_in_each_process(vllm: SimpleNamespace, folder: Path):
    class Scaling:
        def __init__(self, factor: int) -> None:
            self.factor = factor

    def made(factor: int) -> bytes:
        config = llama()
        config.scaling = Scaling(factor)
        current = vllm_config(folder)
        current.model_config.hf_config = config
        return namespace(vllm, current)

    assert made(1) == made(1) != made(2)
