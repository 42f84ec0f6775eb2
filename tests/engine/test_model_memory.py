"""What a model caches, read from its configuration: against sums by hand, and published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import (
    CHUNKED,
    FULL,
    GPT_OSS,
    LATENT,
    LINEAR,
    LLAMA,
    LONG,
    MIB,
    MIMO,
    NEMOTRON,
    SLIDING,
    TABLE,
    V4,
    V32,
    WHISPER,
    attention,
    gdn,
    mamba,
)

from blockyard import BlockManager, CacheGroup, KVCache, KVLayout
from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.layout import ArenaLayout
from blockyard.layout.model import ModelMemory


@pytest.mark.parametrize("name", TABLE)
def test_a_published_model_caches_what_its_planner_counts(name: str):
    config, growing, window, state = TABLE[name]
    memory = ModelMemory.from_config(config)
    kinds = memory.bytes_by_kind(LONG)
    fixed = kinds.get("window", 0) + kinds.get("chunked", 0) + kinds.get("compressor", 0)
    states = kinds.get("recurrent", 0) + kinds.get("conv", 0)
    assert round((memory.bytes(LONG) - memory.bytes(LONG - 1024)) / MIB, 1) == pytest.approx(growing, abs=0.051)
    assert fixed / MIB == pytest.approx(window, abs=0.051)
    assert states / MIB == pytest.approx(state, abs=0.051)


# Fields of config.json files in the wheel of aiconfigurator 0.6.0, and of class defaults in that of transformers 5.24.
REAL: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen2.5-7B, published": (
        {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"num_hidden_layers": 28, "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False},
        56.0,
        0.0,
    ),
    "Mixtral-8x7B, published": (
        {"model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 32, "sliding_window": None},
        128.0,
        0.0,
    ),
    "Mistral, class defaults": (attention(32, 8, 128, model_type="mistral", sliding_window=4096), 0.0, 512.0),
    "Gemma-2, no list": (attention(26, 4, 256, model_type="gemma2", sliding_window=4096), 52.0, 208.0),
}


@pytest.mark.parametrize("name", REAL)
def test_a_window_is_read_as_its_family_means_it(name: str):
    config, growing, window = REAL[name]
    memory = ModelMemory.from_config(config)
    assert (memory.bytes(LONG) - memory.bytes(LONG - 1024)) / MIB == growing
    assert memory.bytes_by_kind(LONG).get("window", 0) / MIB == window


SMALL = {"num_attention_heads": 4, "head_dim": 8}
MISTRAL, LLAMA4, GPT, BAMBA = (SMALL | {"model_type": one} for one in ("mistral", "llama4_text", "gpt_oss", "bamba"))
GEMMA, LFM = SMALL | {"model_type": "gemma3n_text"}, SMALL | {"model_type": "lfm2"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "full, heads not given": (
        SMALL | {"num_hidden_layers": 3, "num_key_value_heads": None},
        {"full": 3 * 100 * 4 * 8 * 2 * 2},
    ),
    "head size from hidden size": (
        {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32},
        {"full": 100 * 128},
    ),
    "window": (MISTRAL | {"num_hidden_layers": 2, "sliding_window": 30}, {"window": 2 * 30 * 128}),
    "window longer than the prompt": (MISTRAL | {"num_hidden_layers": 1, "sliding_window": 300}, {"window": 100 * 128}),
    "window off": (
        SMALL | {"model_type": "qwen2", "num_hidden_layers": 1, "sliding_window": 30, "use_sliding_window": False},
        {"full": 12800},
    ),
    "text config": ({"text_config": SMALL | {"num_hidden_layers": 1}, "dtype": "float32"}, {"full": 100 * 256}),
    "chunked": (LLAMA4 | {"layer_types": [CHUNKED], "attention_chunk_size": 64}, {"chunked": 64 * 128}),
    "fp8": (SMALL | {"num_hidden_layers": 1, "quantization_config": {"kv_cache_quant_algo": "FP8"}}, {"full": 6400}),
    "latent": (LATENT | {"num_hidden_layers": 2}, {"mla": 2 * 100 * 576 * 2}),
    "indexer": (V32 | {"num_hidden_layers": 1}, {"mla": 100 * 1152, "indexer": 100 * 132}),
    "shared": (GEMMA | {"num_hidden_layers": 3, "num_kv_shared_layers": 2}, {"full": 12800}),
    "gated delta net": (gdn(0, 1, 2, 32), {"recurrent": 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2}),
    "Mamba2": (
        BAMBA | mamba(4, 8, 16, 2) | {"layer_types": ["mamba"]},
        {"recurrent": 4 * 8 * 16 * 2 + 3 * (32 + 64) * 2},
    ),
    "conv": (LFM | {"layer_types": ["conv"], "conv_L_cache": 3, "hidden_size": 32}, {"conv": 32 * 2 * 2}),
    "cross": (
        WHISPER | {"decoder_layers": 1, "max_source_positions": 1500},
        {"full": 100 * 5120, "cross": 1500 * 5120},
    ),
    "heads by block": (
        {
            "model_type": "nemotron-nas",
            "num_attention_heads": 8,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "num_key_value_heads": None,
        }
        | {"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}]},
        {"full": 100 * 2 * 8 * 2 * 2},
    ),
    "heads by layer": (
        GPT | {"layer_types": [FULL, FULL], "per_layer_config": {"1": {"head_dim": 16}}},
        {"full": 100 * (128 + 256)},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_a_hundred_tokens_add_up_by_hand(name: str):
    config, sums = KINDS[name]
    assert ModelMemory.from_config(config).bytes_by_kind(100) == sums


def test_deepseek_v4_keeps_windows_compressed_entries_and_open_compressors():
    kinds = ModelMemory.from_config(V4, dtype="fp8_ds_mla").bytes_by_kind(4096)
    assert kinds["window"] == 43 * 128 * 584
    assert kinds["mla"] == 21 * 1024 * 584 + 20 * 32 * 584
    assert kinds["indexer"] == 21 * 1024 * 132
    assert kinds["compressor"] == 21 * 8 * (8192 + 2048) + 20 * 128 * 4096
    assert sum(kinds.values()) / MIB == pytest.approx(29.7, abs=0.06)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 3}, "config has no num_attention_heads"),
        ({"model_type": "x"}, "config has no num_hidden_layers"),
        (SMALL | {"num_hidden_layers": 3, "dtype": "int3"}, "dtype is 'int3'"),
        (SMALL | {"layer_types": ["psychic_attention"]}, "layer of type 'psychic_attention'"),
        (SMALL | {"num_hidden_layers": 2, "layer_types": [FULL]}, "layer_types of the config lists 1 layers"),
        (LLAMA | {"lru_width": 8}, "config has lru_width = 8, which is not known for llama"),
        (SMALL | {"num_hidden_layers": 2, "lru_width": 8}, "config has lru_width = 8 and model_type 'None'"),
        (LLAMA | {"model_type": "new", "layer_types": [FULL] * 32}, "config has layer_types = .* and model_type 'new'"),
        (LLAMA | {"sliding_window": 8}, "config has sliding_window = 8 and no layer_types, of model_type 'llama'"),
        (MIMO | {"swa_num_key_value_heads": None}, "config has no swa_num_key_value_heads"),
        (SMALL | {"num_hidden_layers": 2, "attention_k_eq_v": True}, "config has attention_k_eq_v = True"),
        (SMALL | {"layer_types": [LINEAR]}, "none of the fields that describe their state"),
        (SMALL | {"layer_types": [SLIDING]}, "config has no sliding_window"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 4}, "config has no qk_rope_head_dim"),
        (
            {name: LATENT[name] for name in LATENT if name != "kv_lora_rank"}
            | {"num_hidden_layers": 2, "q_lora_rank": 1536},
            "config has no kv_lora_rank",
        ),
        ([], "must be a JSON object"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_name(config: Any, message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        ModelMemory.from_config(config)


def test_a_config_is_read_from_a_file_its_folder_and_an_object(tmp_path: Path):
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return LLAMA

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    read = [ModelMemory.from_config(one) for one in (LLAMA, str(tmp_path), tmp_path / "config.json", Config())]
    assert all(memory == read[0] for memory in read)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        ModelMemory.from_config(tmp_path / "absent.json")


def test_a_layout_has_the_model_s_bytes_and_groups():
    layout = KVLayout.from_config(GPT_OSS)
    assert layout.num_layers == 18
    assert layout.bytes_per_block == 18 * 16 * 2048
    assert layout.cache_groups == (CacheGroup.full_attention(), CacheGroup.sliding_window(128))
    assert KVLayout.from_config(LLAMA).bytes_per_block == 32 * 16 * 4096
    latent = KVLayout.from_config(LATENT | {"num_hidden_layers": 61}, block_size=64)
    assert latent.bytes_per_block == 61 * 64 * 1152
    command_a = KVLayout.from_config(TABLE["Command-A"][0])
    assert command_a.num_layers == 16
    assert len(command_a.cache_groups) == 4


def test_a_cache_takes_the_groups_of_its_layout():
    layout = KVLayout.from_config(GPT | {"layer_types": [FULL, SLIDING], "sliding_window": 32})
    with KVCache(layout, device_blocks=40) as cache:
        sequence = cache.manager.allocate(100)
        assert len(cache.manager.block_table(sequence, group=1)) > 0
        assert cache.manager.append([sequence]).shape == (2, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3.5-35B-A3B", "caches 'recurrent' entries.*; other models have an ArenaLayout.from_config"),
        ("Gemma-3-27B", r"config has \[10, 52\] layers by kind"),
        ("MiMo-V2-Flash", "keys and values differ in size"),
        ("Llama-4-Scout", "caches 'chunked' entries"),
        ("DeepSeek-V3.2", "caches 'indexer' entries"),
    ],
)
def test_a_model_that_equal_blocks_cannot_hold_exactly_is_refused(name: str, message: str):
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_config(TABLE[name][0])


def test_the_groups_of_a_layout_fit_a_manager():
    layout = KVLayout.from_config(GPT_OSS)
    manager = BlockManager(block_size=layout.block_size, device_blocks=64, groups=layout.cache_groups)
    assert manager.append([manager.allocate(100)]).shape == (2, 1)


@pytest.mark.parametrize("groups", [(CacheGroup.full_attention(), CacheGroup.recurrent()), (CacheGroup.recurrent(),)])
def test_a_prefix_store_says_which_groups_need_a_host(groups: tuple[CacheGroup, ...]):
    options: dict[str, Any] = {"prefix_caching": True, "prefix_store": "memory://refused?size=64MiB", "namespace": b"n"}
    with pytest.raises(InvalidArgumentError, match="host blocks of the prefix cache is 0, must be at least 1"):
        KVCache(KVLayout.from_config(LLAMA), device_blocks=4, groups=groups, **options)
    with KVCache(KVLayout.from_config(LLAMA), device_blocks=4, host_blocks=8, groups=groups, **options) as cache:
        assert cache.prefix_store is not None


MTP = {
    "DeepSeek-V3": (LATENT | {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}, 62 * 1152),
    "DeepSeek-V3.2": (V32 | {"num_nextn_predict_layers": 1}, 62 * (1152 + 132)),
    "GLM-4.5": (
        attention(92, 8, 128, model_type="glm4_moe", num_nextn_predict_layers=1),
        93 * 8 * 128 * 2 * 2,
    ),
    "Qwen3.5": (gdn(10, 30, 2, 32) | {"mtp_num_hidden_layers": 1}, 11 * 2 * 256 * 2 * 2),
    "Nemotron-H": (
        NEMOTRON | {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"},
        6 * 8 * 128 * 2 * 2,
    ),
}


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_cache_like_the_models_full_layers(name: str):
    config, growing = MTP[name]
    with_drafter, without = ModelMemory.from_config(config, mtp=True), ModelMemory.from_config(config)
    assert with_drafter.bytes_per_token == growing
    assert [layer for layer in with_drafter.layers if not layer.is_draft] == list(without.layers)


def test_mtp_layers_share_the_group_of_full_attention_which_becomes_a_drafters():
    config, _ = MTP["DeepSeek-V3"]
    layout = KVLayout.from_config(config, mtp=True)
    assert (layout.num_layers, layout.cache_groups) == (62, (CacheGroup.drafter(),))
    assert KVLayout.from_config(config).cache_groups == (CacheGroup.full_attention(),)
    hybrid = ArenaLayout.from_config(MTP["Qwen3.5"][0], mtp=True)
    assert [group.kind for group in hybrid.cache_groups] == ["drafter", *["recurrent"] * 3]
    assert hybrid.block_bytes[0] == 16 * 11 * 2048
    manager = BlockManager(block_size=16, device_blocks=64, groups=layout.cache_groups, prefix_caching=True)
    for expected in (0, 32):
        sequence = manager.allocate(list(range(40)))
        assert sequence.cached_tokens == expected
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        manager.free(sequence)
    assert manager.prefix.lookup([*range(32), 7]).tokens == 16, "the drafter's last entry depends on the next token"


def test_mtp_layers_with_a_window_share_the_group_of_that_window_which_becomes_a_drafters():
    config = MIMO | {"num_nextn_predict_layers": 3}
    window = CacheGroup.sliding_window(MIMO["sliding_window"])
    drafter = CacheGroup.windowed_drafter(MIMO["sliding_window"])
    plain, drafted = ArenaLayout.from_config(MIMO), ArenaLayout.from_config(config, mtp=True)
    assert [group for group, _ in plain.groups] == [CacheGroup.full_attention(), window]
    assert [group for group, _ in drafted.groups] == [CacheGroup.full_attention(), drafter]
    layers = [layer for layer in ModelMemory.from_config(MIMO).layers if layer.kind == "window"]
    assert drafted.block_bytes[1] == plain.block_bytes[1] // len(layers) * (len(layers) + 3)
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "model_type": "gpt_oss"}
    small |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}
    small |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["sliding_attention"]}
    groups = KVLayout.from_config(small, mtp=True).cache_groups
    assert groups == (CacheGroup.full_attention(), *[CacheGroup.windowed_drafter(128)] * 2)


@pytest.mark.parametrize(
    ("name", "count"), [("Qwen3-Next-80B", 4), ("Qwen3.5-35B-A3B", 3), ("Jamba-1.5-mini", 1), ("Bamba-9B", 1)]
)
def test_large_states_are_in_several_groups_of_one_page_class_if_their_layers_can_be_shared_out(name: str, count: int):
    """A class's null block holds nothing, so it had better be small. Bamba has 29 layers with states."""
    memory = ModelMemory.from_config(TABLE[name][0])
    layout, wanted = ArenaLayout.from_config(memory), memory.bytes(1) - memory.bytes(0)
    states = [number for number, (group, _) in enumerate(layout.groups) if group.kind == "recurrent"]
    assert len(states) == count
    assert {layout.page_class(number) for number in states} == {1}
    assert [field.layer for number in states for field in layout.groups[number][1]] == sorted(
        {field.layer for number in states for field in layout.groups[number][1]}
    )
    assert sum(layout.block_bytes[number] for number in states) >= wanted > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "mtp is True, but config has no MTP layers: none of num_nextn_predict_layers"),
        (NEMOTRON | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "?"}, "an MTP layer of type '\\?'"),
        (NEMOTRON | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "E"}, "must have full attention"),
        (NEMOTRON | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M"}, "full attention or a window"),
    ],
)
def test_mtp_layers_that_no_group_describes_are_refused_by_name(config: dict[str, Any], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        ModelMemory.from_config(config, mtp=True)
