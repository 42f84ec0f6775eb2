"""Mistakes of new users: each is refused with a message that says what to do."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from blockyard import BlockManager, KVCache, KVLayout, open_store
from blockyard.errors import InvalidArgumentError, LayoutError, OutOfBlocksError, StoreError, UnsupportedModelError
from blockyard.integrations.transformers import Generator
from blockyard.stores import ThreadedStore, register

SIZES: dict[str, Any] = {"num_layers": 2, "block_size": 4, "num_kv_heads": 1, "head_size": 8}
LAYOUT = KVLayout("kv_first", dtype="float32", **SIZES)


@pytest.mark.parametrize("dtype", [torch.float16, "fp16"])
def test_a_dtype_that_is_not_known_lists_the_names(dtype: Any):
    with pytest.raises(LayoutError) as error:
        KVLayout("kv_first", dtype=dtype, **SIZES)
    assert str(error.value) == (
        f"dtype is {dtype!r}, must be a name, or come with its itemsize: bfloat16, float16, float32, float64, "
        f"float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, int16, int32, int64, int8, uint8"
    )


def test_host_bytes_that_are_too_many_blocks_name_the_argument_that_was_given():
    with pytest.raises(InvalidArgumentError) as error:
        KVCache(LAYOUT, device_blocks=4, host_bytes="100TiB")
    assert str(error.value) == (
        "host_bytes is '100TiB', 214748364800 blocks of 512 bytes, must be at most 2147483647 blocks"
    )


def test_a_prefix_store_needs_prefix_caching():
    with pytest.raises(InvalidArgumentError) as error:
        KVCache(LAYOUT, device_blocks=4, prefix_store="memory://", namespace=b"model")
    assert str(error.value) == "prefix_store is given and prefix_caching is False, must be True"


def test_a_model_given_by_name_is_to_be_loaded():
    with pytest.raises(UnsupportedModelError) as error:
        Generator("gpt2")  # type: ignore[arg-type]
    assert str(error.value) == (
        "model is 'gpt2', must be a model that is loaded: AutoModelForCausalLM.from_pretrained('gpt2')"
    )


def test_a_store_that_forgets_its_base_class_is_told_so():
    class Forgetful(ThreadedStore):
        num_slots = 10

        def __init__(self, url: str, **options: Any) -> None:
            self.url = url

        def put(self, keys: Any, rows: Any) -> Any: ...
        def get(self, keys: Any, out: Any) -> Any: ...

    register("forgetful")(Forgetful)
    with pytest.raises(StoreError) as error:
        open_store("forgetful://here", bytes_per_block=512)
    assert str(error.value) == (
        "'forgetful://here': Forgetful has blocks of 0 bytes, must have 512: its __init__ must pass its arguments on "
        "to super().__init__"
    )


def test_a_token_id_that_is_none_is_shown_with_its_place():
    manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
    with pytest.raises(InvalidArgumentError) as error:
        manager.allocate([7, 9], [1, 2, -1, 3])
    assert str(error.value) == "prompts[1][2] is -1, must be in the range of uint32 token ids"
    sequence = manager.allocate([7, 9])
    with pytest.raises(InvalidArgumentError) as error:
        manager.append(sequence, token_ids=[-1])
    assert str(error.value) == "token_ids[0] is -1, must be in the range of uint32 token ids"


def test_blocks_that_there_will_never_be_are_said_to_be_so():
    manager = BlockManager(block_size=4, device_blocks=4)
    with pytest.raises(OutOfBlocksError) as error:
        manager.allocate(40)
    assert str(error.value) == "asked for 10 device blocks, 4 of 4 are free: it can never fit"
    manager.allocate(8)
    with pytest.raises(OutOfBlocksError) as error:
        manager.allocate(12)
    assert str(error.value) == "asked for 3 device blocks, 2 of 4 are free"


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("torch", "from blockyard import KVCache", 'blockyard.KVCache needs torch: pip install "blockyard[torch]"'),
        (
            "transformers",
            "import blockyard.integrations.transformers",
            'blockyard.integrations.transformers needs transformers: pip install "blockyard[demo]"',
        ),
        (
            "hypothesis",
            "import blockyard.testing.machines",
            'blockyard.testing.machines needs hypothesis: pip install "blockyard[testing]"',
        ),
        (
            "transformers",
            "import blockyard.cli; sys.exit(blockyard.cli.main(['demo']))",
            'blockyard: this command needs transformers: pip install "blockyard[demo]"',
        ),
    ],
)
def test_a_module_that_is_not_installed_is_named_with_its_extra(module: str, code: str, message: str):
    program = f"import sys; sys.modules[{module!r}] = None; {code}"
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert found.returncode != 0
    assert found.stderr.splitlines()[-1].removeprefix("ImportError: ") == message
