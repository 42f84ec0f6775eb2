"""`ModelMemory`: the bytes that a model's layers cache, read from its Hugging Face configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from blockyard.errors import InvalidArgumentError

__all__ = ["LayerCache", "ModelMemory"]

LayerKind = Literal["full", "mla", "indexer", "window", "chunked", "recurrent", "conv", "compressor", "cross"]

_ITEM_SIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1}
_PACKED: Final = "fp8_ds_mla"
_DTYPES: Final = (*_ITEM_SIZES, _PACKED)
# A field whose name has one of these parts may change what is cached. It is refused unless the model's family is known:
# then it must have been read, or be listed here as one that changes nothing in this family.
_TELLING: Final = re.compile(
    r"window|sliding|chunk|layer_types|layers_block|block_types|block_configs|per_layer_config|lora_rank|latent|mamba|ssm"
    r"|lru|linear_|lightning|recurr|conv|state_size|compress|kv_shared|k_eq_v|swa_|cross_|index_|hybrid|attn_type"
    r"|attn_layer|full_attn|pattern|interval|no_rope"
)
_EVERYWHERE: Final = "chunk_size_feed_forward mlp_layer_types add_cross_attention cross_attention_hidden_size"
_FAMILIES: Final[dict[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "phi3", "starcoder2", "gpt_oss", "olmo3"), ""),
    **dict.fromkeys(("gemma2", "cohere2", "kimi_linear", "mimo_v2_flash", "minimax_text_01"), ""),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "sliding_window use_sliding_window max_window_layers"
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ""),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "q_lora_rank"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "conv_L_cache conv_bias conv_dim conv_dim_out conv_use_xavier_init"),
    "bamba": "mamba_chunk_size mamba_conv_bias mamba_expand mamba_proj_bias mamba_dt_rank",
    "deepseek_v32": "q_lora_rank index_n_heads index_topk",
    "deepseek_v4": "q_lora_rank o_lora_rank index_n_heads index_topk compress_rope_theta",
    "falcon_h1": "mamba_chunk_size mamba_conv_bias mamba_expand mamba_norm_before_gate mamba_proj_bias mamba_rms_norm "
    "mamba_use_mlp ssm_multipliers ssm_in_multiplier ssm_out_multiplier",
    "gemma3_text": "_sliding_window_pattern",
    "gemma3n_text": "hidden_size_per_layer_input activation_sparsity_pattern",
    "granitemoehybrid": "mamba_chunk_size mamba_conv_bias mamba_expand mamba_proj_bias",
    "jamba": "mamba_conv_bias mamba_dt_rank mamba_proj_bias use_mamba_kernels",
    "llama4_text": "no_rope_layer_interval",
    "mamba": "use_conv_bias",
    "mamba2": "chunk_size use_conv_bias",
    "minimax": "full_attn_alpha_factor full_attn_beta_factor linear_attn_beta_factor",
    "nemotron-nas": "",
    "nemotron_h": "chunk_size mamba_hidden_act mamba_proj_bias mtp_layers_block_type mtp_hybrid_override_pattern "
    "use_conv_bias use_mamba_kernels",
    "whisper": "",
}
# Families with a window and no list of layers: every layer has the window, or every n-th is full.
_ALL_WINDOWS: Final = ("mistral", "ministral", "mixtral", "phi3", "starcoder2")
_PERIODS: Final = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}


@dataclass(frozen=True)
class LayerCache:
    """What one layer caches of one sequence.

    Attributes:
        kind: which tokens it keeps.
        entry_bytes: bytes of one entry: a token's keys and values, or a state.
        entries: most entries of a sequence; None if they grow with its tokens.
        ratio: tokens per entry.
        heads: number of K heads, and of V heads; 0 if the entry is not keys and values of heads.
        head_size: elements of a head; 0 if those of keys and values differ.
        is_draft: whether it belongs to the model's MTP layers, which draft tokens.
        overlaps: whether it is a compressor that also reads the tokens of its last finished entry.
        layer: number of the layer in the model; MTP layers follow the others.
    """

    kind: LayerKind
    entry_bytes: int
    entries: int | None = None
    ratio: int = 1
    heads: int = 0
    head_size: int = 0
    is_draft: bool = False
    overlaps: bool = False
    layer: int = 0

    def bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` tokens; a state or an encoder's entries do not depend on them."""
        if self.kind in {"recurrent", "conv", "cross"}:
            return self.entry_bytes * (self.entries or 0)
        grown = tokens // self.ratio
        return self.entry_bytes * (grown if self.entries is None else min(grown, self.entries))


@dataclass(frozen=True)
class ModelMemory:
    """The caches of all layers of a model. A layer that shares another one's cache has none; some have several.

    Attributes:
        layers: what each layer caches, in order.
        dtype: torch's name for the dtype of keys and values, or `"fp8_ds_mla"`.

    Example:
        >>> from blockyard.layout.model import ModelMemory
        >>> config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "sliding_window": 128}
        >>> config["model_type"] = "gpt_oss"
        >>> config["layer_types"] = ["full_attention", "sliding_attention"]
        >>> ModelMemory.from_config(config).bytes_by_kind(1000)
        {'full': 1024000, 'window': 131072}
    """

    layers: tuple[LayerCache, ...]
    dtype: str

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | str | Path | Any,
        *,
        dtype: str | None = None,
        state_dtype: str | None = None,
        mtp: bool = False,
    ) -> ModelMemory:
        """Read a model's layers from its configuration.

        Args:
            config: a Hugging Face configuration: a dictionary, the path of a `config.json` or its folder, or an object
                with `to_dict`.
            dtype: dtype of keys and values, such as `"fp8"`; None for the configuration's. `"fp8_ds_mla"` is
                DeepSeek's packed form of latent entries.
            state_dtype: dtype of recurrent states; None for the configuration's, or the layer kind's usual one.
            mtp: also read the model's MTP layers, which an engine runs to draft tokens.

        Raises:
            InvalidArgumentError: a field is missing, or one that changes the cache is unknown; the message names it.
                Or `mtp` is true, and the model has no MTP layers, or such with neither full attention nor a window.
        """
        given = read_config(config)
        fields = _Fields(given)
        fields.cache_dtype, fields.state_dtype = _cache_dtype(given, fields, dtype), state_dtype
        for name in (dtype, state_dtype):
            if name is not None and name not in _DTYPES:
                raise InvalidArgumentError(f"dtype is {name!r}, must be one of {', '.join(_DTYPES)}")
        names = _layer_names(fields)
        shared = fields.count("num_kv_shared_layers", 0)
        layers: list[LayerCache] = []
        for index, name in enumerate(names[: len(names) - shared] if shared else names):
            if name not in _LAYERS:
                raise InvalidArgumentError(f"config has a layer of type {name!r}, must be one of {', '.join(_LAYERS)}")
            layers += (replace(cache, layer=index) for cache in _LAYERS[name](fields.layer(index)))
        layers += _encoder_layers(fields, len(names))
        layers += _mtp_layers(fields, names) if mtp else []
        fields.refuse_unread()
        return cls(tuple(layers), "float8_e4m3fn" if fields.cache_dtype == "fp8" else fields.cache_dtype)

    def bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence of `tokens` tokens caches."""
        return sum(layer.bytes(tokens) for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes by which a long sequence's caches grow with each token."""
        return sum(layer.entry_bytes / layer.ratio for layer in self.layers if layer.entries is None)

    def bytes_by_kind(self, tokens: int) -> dict[LayerKind, int]:
        """Return the bytes that a sequence of `tokens` tokens caches, by kind of layer."""
        found: dict[LayerKind, int] = {}
        for layer in self.layers:
            found[layer.kind] = found.get(layer.kind, 0) + layer.bytes(tokens)
        return found


class _Fields:
    """A configuration that notes which fields are read."""

    cache_dtype: str
    state_dtype: str | None

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.all = config
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        found = self.all.get(name)
        return default if found is None else found

    def count(self, name: str, default: int | None = None) -> int:
        """Return a number; without a default it must be there."""
        found = self.get(name, default)
        if found is None:
            raise InvalidArgumentError(f"config has no {name}; is it a model's config.json?")
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise InvalidArgumentError(f"{name} of the config is {found!r:.80}, must be an int of at least 0")
        return found

    def first(self, *names: str, default: int | None = None) -> int:
        """Return the first of several spellings that the configuration has."""
        for name in names:
            if self.get(name) is not None:
                return self.count(name)
        if default is None:
            raise InvalidArgumentError(f"config has no {' or '.join(names)}; is it a model's config.json?")
        return default

    def layer(self, index: int) -> _Fields:
        """Return the fields of one layer."""
        own: dict[str, Any] = {}
        for key, fields in (self.get("per_layer_config") or {}).items():
            own |= dict(fields) if int(key) == index else {}
        blocks = self.get("block_configs")
        if blocks:
            own |= _block_config(blocks[index], self)
        if not own:
            return self
        found = _Fields({**self.all, **own})
        found.read, found.cache_dtype, found.state_dtype = self.read, self.cache_dtype, self.state_dtype
        return found

    def item(self) -> int:
        """Return the bytes of one element of keys and values."""
        if self.cache_dtype == _PACKED:
            raise InvalidArgumentError(f"dtype is {_PACKED!r}, which only layers with latent attention have")
        return _ITEM_SIZES[self.cache_dtype]

    def state_item(self, usual: str | None = None) -> int:
        """Return the bytes of one element of a recurrent state; by default that of the model."""
        name = self.state_dtype or self.get("mamba_ssm_cache_dtype") or self.get("mamba_ssm_dtype") or usual
        return size_of_dtype(str(name or _model_dtype(self)))

    def refuse_unread(self) -> None:
        family = str(self.all.get("model_type"))
        known = family in _FAMILIES
        harmless = {*_EVERYWHERE.split(), *_FAMILIES.get(family, "").split()}
        for name, value in self.all.items():
            if not value or name in harmless or not _TELLING.search(name):
                continue
            if not known:
                problem = f"config has {name} = {value!r:.40} and model_type {family!r}, whose layers are not known"
                raise InvalidArgumentError(f"{problem}; known are {', '.join(sorted(_FAMILIES))}")
            if name not in self.read:
                raise InvalidArgumentError(f"config has {name} = {value!r:.40}, which is not known for {family}")


def read_config(config: Any) -> Mapping[str, Any]:
    """Read a configuration, or the part of one that describes the language model.

    Raises:
        InvalidArgumentError: it cannot be read, or is not a JSON object.
    """
    if isinstance(config, (str, Path)):
        path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        try:
            config = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"config {path} cannot be read: {error}") from None
    if callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"config is {config!r:.80}, must be a JSON object")
    for name in ("text_config", "thinker_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            top = {key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if config.get(key)}
            text = {key: value for key, value in config[name].items() if value is not None}
            return read_config({**top, **text})
    return config


def size_of_dtype(name: str) -> int:
    """Return the bytes of one element.

    Raises:
        InvalidArgumentError: the dtype is unknown.
    """
    name = name.removeprefix("torch.")
    if name not in _ITEM_SIZES:
        raise InvalidArgumentError(f"dtype is {name!r}, must be one of {', '.join(_DTYPES)}")
    return _ITEM_SIZES[name]


def _model_dtype(fields: _Fields) -> str:
    return str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def _cache_dtype(given: Mapping[str, Any], fields: _Fields, dtype: str | None) -> str:
    """The dtype of keys and values: as asked, or as a quantized checkpoint says, or the model's."""
    if dtype is not None:
        return dtype
    quantized = given.get("quantization_config") or {}
    scheme = quantized.get("kv_cache_scheme") or {}
    algorithm = quantized.get("kv_cache_quant_algo") or ("FP8" if scheme else None)
    if algorithm is None:
        size_of_dtype(name := _model_dtype(fields))
        return name
    if str(algorithm).upper() != "FP8" or scheme.get("num_bits", 8) != 8:
        raise InvalidArgumentError(f"quantization_config of the config has {algorithm!r} keys and values, must be FP8")
    return "fp8"


# The types of a model's layers, one name each. The first of these fields that a configuration has lists them.


def _layer_names(fields: _Fields) -> list[str]:
    count = fields.first("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_layers", default=0)
    for name, names_of in _LISTS.items():
        if (value := fields.get(name)) not in (None, []):
            names = [_ALIASES.get(one, one) for one in names_of(value, count, fields)]
            if count and len(names) < count:
                problem = f"{name} of the config lists {len(names)} layers, num_hidden_layers is {count}"
                raise InvalidArgumentError(problem)
            for other in _LISTS:
                fields.get(other)
            return names
    if not count:
        raise InvalidArgumentError("config has no num_hidden_layers; is it a model's config.json?")
    if fields.get("sliding_window") and (period := _PERIODS.get(str(fields.get("model_type")))):
        return _every(period, count, plain="full_attention", other="sliding_attention")
    return [_UNIFORM.get(str(fields.get("model_type")), _usual)(fields)] * count


def _usual(fields: _Fields) -> str:
    """The type of all layers of a configuration that lists none."""
    if fields.get("index_head_dim"):
        return "indexed_attention"
    window, family = fields.get("sliding_window"), str(fields.get("model_type"))
    if not window or not fields.get("use_sliding_window", True):
        return "full_attention"
    if family not in _ALL_WINDOWS:
        raise InvalidArgumentError(
            f"config has sliding_window = {window!r} and no layer_types, of model_type {family!r}"
        )
    return "sliding_attention"


def _every(value: Any, count: int, *, plain: str, other: str) -> list[str]:
    """Every `value`-th layer is `plain`."""
    if not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"distance of the config's full layers is {value!r:.40}, must be at least 1")
    return [other if (index + 1) % value else plain for index in range(count)]


def _marked(marks: Sequence[Any], *, one: str, zero: str) -> list[str]:
    return [one if mark else zero for mark in marks]


def _kimi(value: Mapping[str, Any], count: int, fields: _Fields) -> list[str]:
    full = set(value["full_attn_layers"])
    fields.all = {
        **fields.all,
        "linear_num_heads": value.get("num_heads"),
        "linear_head_dim": value.get("head_dim"),
        "linear_conv_kernel_dim": value.get("short_conv_kernel_size"),
    }
    return ["full_attention" if index + 1 in full else "linear_attention" for index in range(count)]


def _block_config(block: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:
    """A layer of Nemotron (DeciLM): heads given as query heads per KV head."""
    attention = block.get("attention") or {}
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return {}
    heads = attention.get("num_key_value_heads")
    per_group = attention.get("n_heads_in_group")
    if heads is None and per_group:
        heads = fields.count("num_attention_heads") // per_group
    if heads is None:
        raise InvalidArgumentError("block_configs of the config has an attention without n_heads_in_group")
    window = attention.get("window_length")
    return {"num_key_value_heads": heads} | ({"sliding_window": window} if window else {})


def _block_name(block: Mapping[str, Any]) -> str:
    attention = block.get("attention") or {}
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return "none"
    if attention.get("sparsify") or attention.get("unshifted_sink"):
        raise InvalidArgumentError("block_configs of the config has a sparse attention, which is not known")
    return "sliding_attention" if attention.get("window_length") else "full_attention"


_LETTERS: Final[dict[str, str]] = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
_Names = Callable[[Any, int, _Fields], Sequence[str]]
_LISTS: Final[dict[str, _Names]] = {
    "layer_types": lambda value, _, __: value,
    "layers_block_type": lambda value, _, __: value,
    "hybrid_override_pattern": lambda value, _, __: [_LETTERS.get(letter, letter) for letter in value],
    "hybrid_layer_pattern": lambda value, _, __: _marked(value, one="sliding_attention", zero="full_attention"),
    "attn_type_list": lambda value, _, __: _marked(value, one="full_attention", zero="linear_attention"),
    "linear_attn_config": _kimi,
    "block_configs": lambda value, _, __: [_block_name(block) for block in value],
    "full_attn_idxs": lambda value, count, _: ["full_attention" if at in value else "conv" for at in range(count)],
    "attn_layer_indices": lambda value, count, _: [
        "full_attention" if at in value else "linear_attention" for at in range(count)
    ],
    "attn_layer_period": lambda value, count, fields: [
        "full_attention" if at % value == fields.count("attn_layer_offset") else "linear_attention"
        for at in range(count)
    ],
    "sliding_window_pattern": lambda value, count, _: _every(
        value, count, plain="full_attention", other="sliding_attention"
    ),
    "full_attention_interval": lambda value, count, _: _every(
        value, count, plain="full_attention", other="linear_attention"
    ),
    "no_rope_layers": lambda value, _, __: _marked(value, one="chunked_attention", zero="full_attention"),
    "cross_attention_layers": lambda value, count, _: [
        "cross_attention" if at in value else "full_attention" for at in range(count)
    ],
}
_ALIASES: Final = {"attention": "full_attention", "mamba": "linear_attention", "mamba2": "linear_attention"}
_UNIFORM: Final[dict[str, Callable[[_Fields], str]]] = {
    "falcon_h1": lambda _: "attention_and_mamba",
    "mamba": lambda _: "linear_attention",
    "mamba2": lambda _: "linear_attention",
}


# What a layer of each type caches.


def _heads(fields: _Fields, kind: LayerKind, entries: int | None = None, prefix: str = "") -> list[LayerCache]:
    """A layer with a token's keys and values in heads."""
    heads = fields.first("num_attention_heads", "decoder_attention_heads", "num_heads")
    kv_heads = fields.first(f"{prefix}num_key_value_heads", "num_key_value_heads", default=heads)
    if fields.get("multi_query") is True:
        kv_heads = 1 if fields.get("num_kv_heads") is None else fields.count("num_kv_heads")
    size = fields.first(f"{prefix}head_dim", "head_dim", "d_kv", default=0)
    size = size or fields.first("hidden_size", "d_model") // max(heads, 1)
    values = fields.first(f"{prefix}v_head_dim", "v_head_dim", default=size)
    entry = kv_heads * (size + values) * fields.item()
    return [LayerCache(kind, entry, entries, heads=kv_heads, head_size=size if size == values else 0)]


def _full(fields: _Fields) -> list[LayerCache]:
    # A latent model's configuration without its rank would be read as one of 41 times the bytes.
    is_cut_short = fields.get("q_lora_rank") and "kv_lora_rank" not in fields.all
    if fields.get("kv_lora_rank") or is_cut_short:
        return [LayerCache("mla", _latent(fields))]
    return _heads(fields, "full")


def _latent(fields: _Fields) -> int:
    """Bytes of a token in latent attention: one vector for keys and values, and the part with rotary positions."""
    rank, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    fields.get("v_head_dim")
    if fields.cache_dtype == _PACKED:
        return rank + 4 * (rank // 128) + 2 * rotary
    return (rank + rotary) * fields.item()


def _indexed(fields: _Fields) -> list[LayerCache]:
    return [LayerCache("mla", _latent(fields)), LayerCache("indexer", _index_key(fields))]


def _index_key(fields: _Fields) -> int:
    """Bytes of an indexer's key: FP8, and a float32 scale for every 128 elements."""
    size = fields.count("index_head_dim")
    return size + 4 * -(-size // 128)


def _window(fields: _Fields) -> list[LayerCache]:
    window = fields.first("sliding_window", "sliding_window_size", "attention_window_size")
    fields.get("sliding_window_size")
    if fields.get("model_type") == "mimo_v2_flash":
        fields.count("swa_num_key_value_heads")
        fields.get("swa_num_attention_heads")
    return _heads(fields, "window", window, "swa_")


def _chunked(fields: _Fields) -> list[LayerCache]:
    return _heads(fields, "chunked", fields.count("attention_chunk_size"))


def _linear(fields: _Fields) -> list[LayerCache]:
    """The state of one recurrent layer: which kind follows from the fields that describe it."""
    for names, state_of in _STATES:
        if all(fields.get(name) is not None for name in names):
            state, conv, usual = state_of(fields)
            width = (fields.first("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1) if conv else 0
            size = state * fields.state_item(usual) + conv * width * size_of_dtype(_model_dtype(fields))
            return [LayerCache("recurrent", size, 1)]
    known = "; ".join(" and ".join(names) for names, _ in _STATES)
    raise InvalidArgumentError(f"config has recurrent layers and none of the fields that describe their state: {known}")


def _gated_delta(fields: _Fields) -> tuple[int, int, str | None]:
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key, value = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    return values * key * value, 2 * keys * key + values * value, "float32"


def _kimi_delta(fields: _Fields) -> tuple[int, int, str | None]:
    heads, size = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    return heads * size * size, 3 * heads * size, "float32"


def _mamba2(fields: _Fields) -> tuple[int, int, str | None]:
    heads = fields.first("mamba_n_heads", "mamba_num_heads", "num_heads")
    width = heads * fields.first("mamba_d_head", "mamba_head_dim", "head_dim")
    state = fields.first("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.first("mamba_n_groups", "n_groups")
    fields.get("mamba_d_ssm")
    return width * state, width + 2 * groups * state, None


def _mamba1(fields: _Fields) -> tuple[int, int, str | None]:
    width = fields.first("mamba_expand", "expand") * fields.count("hidden_size")
    return width * fields.first("mamba_d_state", "state_size"), width, "float32"


def _lightning(fields: _Fields) -> tuple[int, int, str | None]:
    heads = fields.count("num_attention_heads")
    size = fields.first("head_dim", default=0) or fields.count("hidden_size") // max(heads, 1)
    return heads * size * size, 0, "float32"


_State = Callable[[_Fields], tuple[int, int, str | None]]
# Fields that tell a kind; and its elements of state, its channels of convolution and its usual dtype of states.
_STATES: Final[tuple[tuple[tuple[str, ...], _State], ...]] = (
    (("linear_num_value_heads",), _gated_delta),
    (("linear_num_heads",), _kimi_delta),
    (("mamba_n_heads",), _mamba2),
    (("mamba_num_heads",), _mamba2),
    (("state_size", "n_groups"), _mamba2),
    (("mamba_d_state",), _mamba1),
    (("state_size",), _mamba1),
    (("linear_attn_alpha_factor",), _lightning),
    (("attn_type_list",), _lightning),
)


def _conv(fields: _Fields) -> list[LayerCache]:
    width = fields.count("conv_L_cache") - 1
    return [LayerCache("conv", fields.count("hidden_size") * width * size_of_dtype(_model_dtype(fields)), 1)]


def _compressed(fields: _Fields, name: str, *, overlap: bool) -> list[LayerCache]:
    """DeepSeek-V4: a window, an entry for every `ratio` tokens, and the compressor's open entries in float32."""
    rates = fields.get("compress_rates") or {}
    if name not in rates:
        raise InvalidArgumentError(f"compress_rates of the config has no {name}")
    ratio, size, copies = int(rates[name]), fields.count("head_dim"), 2 if overlap else 1
    found = [
        *_plain_latent(fields),
        LayerCache("mla", _plain_latent(fields)[0].entry_bytes, ratio=ratio),
    ]
    if overlap:
        found.append(LayerCache("indexer", _index_key(fields), ratio=ratio))
        size += fields.count("index_head_dim")
    return [*found, LayerCache("compressor", 2 * copies * size * 4, copies * ratio, overlaps=overlap)]


def _plain_latent(fields: _Fields) -> list[LayerCache]:
    """The window of DeepSeek-V4: one vector that is keys and values."""
    size, rotary = fields.count("head_dim"), fields.count("qk_rope_head_dim")
    # Packed: FP8, a scale for every 64 elements padded to 8 bytes, and rotary elements in bfloat16.
    entry = size - rotary + 8 + 2 * rotary if fields.cache_dtype == _PACKED else size * fields.item()
    return [LayerCache("window", entry, fields.count("sliding_window"))]


def _cross(fields: _Fields, tokens: int | None = None) -> list[LayerCache]:
    tokens = fields.count("max_source_positions") if tokens is None else tokens
    return _heads(fields, "cross", tokens)


def _encoder_layers(fields: _Fields, count: int) -> list[LayerCache]:
    """The cross attention of every decoder layer of an encoder-decoder, over the longest input of the encoder."""
    if not fields.get("is_encoder_decoder"):
        return []
    tokens = fields.first("max_source_positions", "max_position_embeddings", "n_positions")
    return [replace(cache, layer=index) for index in range(count) for cache in _cross(fields, tokens)]


def _mtp_layers(fields: _Fields, names: Sequence[str]) -> list[LayerCache]:
    """The layers that draft tokens: of the type of the model's last full layer, or window, if none is given."""
    count = fields.first(*_MTP_COUNTS, default=0)
    if not count:
        raise InvalidArgumentError(f"mtp is True, but config has no MTP layers: none of {', '.join(_MTP_COUNTS)}")
    pattern = fields.get("mtp_layers_block_type") or fields.get("mtp_hybrid_override_pattern") or ()
    types = [_ALIASES.get(one, one) for one in (_LETTERS.get(one, one) for one in pattern)]
    has_window = fields.get("model_type") in _MTP_WINDOWS
    usual = {"sliding_attention"} if has_window else {"full_attention", "indexed_attention"}
    types = types or [name for name in names if name in usual][-1:]
    if unknown := [name for name in types if name not in _LAYERS]:
        known = ", ".join(_LAYERS)
        raise InvalidArgumentError(f"config has an MTP layer of type {unknown[0]!r}, must be one of {known}")
    found = [
        replace(cache, is_draft=True, layer=len(names) + at)
        for at, name in enumerate(types * count)
        for cache in _LAYERS[name](fields)
    ]
    kinds = {cache.kind for cache in found}
    if not kinds or not kinds <= {"full", "mla", "indexer", "window"}:
        raise InvalidArgumentError(f"config has MTP layers of types {types}, must have full attention or a window")
    return found


_MTP_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_MTP_WINDOWS: Final = ("mimo_v2_flash",)

_LAYERS: Final[dict[str, Callable[[_Fields], list[LayerCache]]]] = {
    "full_attention": _full,
    "indexed_attention": _indexed,
    "sliding_attention": lambda fields: _plain_latent(fields) if fields.get("compress_rates") else _window(fields),
    "chunked_attention": _chunked,
    "linear_attention": _linear,
    "attention_and_mamba": lambda fields: [*_full(fields), *_linear(fields)],
    "conv": _conv,
    "compressed_sparse_attention": lambda fields: _compressed(fields, "compressed_sparse_attention", overlap=True),
    "heavily_compressed_attention": lambda fields: _compressed(fields, "heavily_compressed_attention", overlap=False),
    "cross_attention": _cross,
    "moe": lambda _: [],
    "mlp": lambda _: [],
    "none": lambda _: [],
}
