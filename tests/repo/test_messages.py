"""Mistakes of new users: each is refused with a message that says what to do."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from blockyard import BlockManager, CacheEngine, KVCache, KVLayout, Pairs, StepDecision, StepExecutor, open_store
from blockyard.errors import (
    InvalidArgumentError,
    LayoutError,
    MappingError,
    OutOfBlocksError,
    StoreError,
    StoreFullError,
    UnsupportedModelError,
)
from blockyard.integrations.transformers import Generator
from blockyard.stores import ThreadedStore, register
from blockyard.stores.url import read_bytes

SIZES: dict[str, Any] = {"num_layers": 2, "block_size": 4, "num_kv_heads": 1, "head_size": 8}
LAYOUT = KVLayout("kv_first", dtype="float32", **SIZES)


@pytest.mark.parametrize("dtype", [torch.float16, "fp16"])
def test_a_dtype_that_is_not_known_lists_the_names(dtype: Any):
    with pytest.raises(LayoutError) as error:
        KVLayout("kv_first", dtype=dtype, **SIZES)
    assert str(error.value) == (
        f"dtype is {dtype!r}, must be one of bfloat16, float16, float32, float64, "
        f"float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, int16, int32, int64, int8, uint8, "
        f"or be given with its itemsize"
    )


def test_host_bytes_that_are_too_many_blocks_name_the_argument_that_was_given():
    with pytest.raises(InvalidArgumentError) as error:
        KVCache(LAYOUT, device_blocks=4, host_bytes="100TiB")
    assert str(error.value) == (
        "host_bytes is '100TiB', 214748364800 blocks of 512 bytes, must be at most 2147483647 blocks"
    )


@pytest.mark.parametrize(("given", "meant"), [("20MiB", "20"), (20, "20"), ("0.5 kB", "0.5"), ("5000", ""), ("0", "")])
def test_a_size_that_holds_no_chunk_asks_whether_gib_were_meant(given: Any, meant: str):
    with pytest.raises(InvalidArgumentError) as error:
        read_bytes("host_bytes", given, holds=1 << 30, what="chunk")
    assert str(error.value).endswith(f'bytes; did you mean "{meant}GiB"?' if meant else "chunk of 1073741824 bytes")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"salt": "tenant"}, "salt is 'tenant', must be bytes, or one for each prompt"),
        ({"lora_id": "x"}, "lora_id is 'x', must be an int, or one for each prompt"),
        ({"extras": [("a", 1, b"x")]}, "extras[0][0] is 'a', must be an int, 0 to 4294967295"),
    ],
)
def test_what_a_key_depends_on_is_refused_with_the_type_that_it_needs(wrong: dict[str, Any], message: str):
    manager = BlockManager(block_size=4, device_blocks=8, prefix_caching=True)
    with pytest.raises(InvalidArgumentError) as error:
        manager.allocate([1, 2, 3, 4, 5], **wrong)
    assert str(error.value) == message
    assert manager.pool("device").num_free == 8
    manager.check()


def test_a_goal_that_there_is_not_lists_the_names():
    manager = BlockManager(block_size=4, device_blocks=8)
    with pytest.raises(InvalidArgumentError) as error:
        manager.defrag.run("compact", 3)
    assert str(error.value) == 'goal is "compact", must be "max_id", "free_tail", "dense" or "contiguous"'


def test_a_prefix_store_needs_prefix_caching():
    with pytest.raises(InvalidArgumentError) as error:
        KVCache(LAYOUT, device_blocks=4, prefix_store="memory://", namespace=b"model")
    assert str(error.value) == "prefix_store is given and prefix_caching is False, must be True"


def test_a_model_given_by_name_is_to_be_loaded():
    with pytest.raises(UnsupportedModelError) as error:
        Generator("gpt2")  # type: ignore[arg-type]
    assert str(error.value) == ("model is 'gpt2', must be a loaded model: AutoModelForCausalLM.from_pretrained('gpt2')")


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


def test_a_list_of_token_ids_is_one_prompt_and_a_list_of_prompts_says_how_to_give_them():
    manager = BlockManager(block_size=4, device_blocks=64)
    assert manager.num_tokens(manager.allocate([40, 40])) == 2
    assert [manager.num_tokens(sequence) for sequence in manager.allocate(40, 40)] == [40, 40]
    assert "`allocate([40, 40])` opens one sequence" in (manager.allocate.__doc__ or "")
    with pytest.raises(InvalidArgumentError) as error:
        manager.allocate([[1, 2], [3]])  # type: ignore[list-item]
    assert str(error.value) == (
        "prompts[0] is a list of lists, pass each prompt as a separate argument: allocate([1, 2], [3])"
    )
    with pytest.raises(TypeError, match="cannot unpack non-iterable"):
        _first, _second = manager.allocate([40, 40])  # type: ignore[misc]


def test_a_store_whose_size_holds_no_slot_says_how_much_it_needs(tmp_path: Path):
    with pytest.raises(StoreFullError) as error:
        open_store(f"file://{tmp_path}?size=1KiB", bytes_per_block=512)
    assert str(error.value) == "size is 1024 bytes, must be at least 12288: one slot of 8192 and a superblock of 4096"
    with pytest.raises(StoreFullError) as error:
        open_store(f"local://{tmp_path}?size=520", bytes_per_block=512)
    assert str(error.value) == (
        f"'local://{tmp_path}?size=520': size holds 0 blocks of 640 bytes, must hold at least 1"
    )


def test_a_store_without_slots_is_no_external_tier():
    class Empty(ThreadedStore):
        num_slots = 0

        def put(self, keys: Any, rows: Any) -> Any: ...
        def get(self, keys: Any, out: Any) -> Any: ...

    store = Empty("empty://", bytes_per_block=LAYOUT.bytes_per_block, namespace=bytes(32))
    with store, pytest.raises(InvalidArgumentError) as error:
        KVCache(LAYOUT, device_blocks=4, swap_store=store)
    assert str(error.value) == "swap_store has 0 slots, must have at least 1"


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are"),
        (["AWS_ACCESS_KEY_ID"], "AWS_SECRET_ACCESS_KEY is"),
        (["AWS_SECRET_ACCESS_KEY"], "AWS_ACCESS_KEY_ID is"),
    ],
)
def test_an_s3_store_without_credentials_is_not_opened_and_names_them(
    given: list[str], missing: str, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in given:
        monkeypatch.setenv(name, "example")
    nowhere = "http://127.0.0.1:1"
    url = f"s3://bucket?size=1MiB&timeout_base=0.1&endpoint={nowhere}&metadata_endpoint={nowhere}"
    with pytest.raises(StoreError) as error:
        open_store(url, bytes_per_block=512)
    assert str(error.value).startswith(f"{url!r}: ")
    assert str(error.value).endswith(
        f"; {missing} not set: set both, give the machine a role, or add skip_signature=true to the URL for a public "
        "bucket"
    )
    with pytest.raises(StoreError) as error:
        open_store(f"{url}&skip_signature=true", bytes_per_block=512)
    assert "not set" not in str(error.value)


ENGINE_OF_4 = {
    "a swap out from beyond the device": (
        [("swap_out", "device", "host", (10, 0))],
        (
            "entry 0: block 10 cannot be read, there are 4 blocks; the engine has device_blocks=4, give its manager "
            "the same"
        ),
    ),
    "a swap out beyond the host": (
        [("swap_out", "device", "host", (0, 5))],
        (
            "entry 0: block 5 cannot be written, there are 2 blocks; the engine has host_blocks=2, give its manager "
            "the same"
        ),
    ),
    "a copy beyond the device": (
        [("copy", "device", "device", (0, 9))],
        (
            "entry 0: block 9 cannot be written, there are 4 blocks; the engine has device_blocks=4, give its manager "
            "the same"
        ),
    ),
    "a swap-in beyond the host": (
        [("swap_in", "external", "host", (0, 9))],
        "1 pairs of kind 'swap_in' name host block 9, the engine has host_blocks=2, give its manager the same",
    ),
    "a swap-out beyond the store": (
        [("swap_out", "device", "external", (0, 3))],
        "1 pairs of kind 'swap_out' name external block 3, the store has external_blocks=3, give its manager the same",
    ),
}


@pytest.mark.parametrize(("transfers", "message"), ENGINE_OF_4.values(), ids=list(ENGINE_OF_4))
def test_a_manager_that_is_larger_than_the_engine_names_the_tier_and_both_numbers(
    transfers: list[tuple[str, str, str, tuple[int, int]]], message: str, tmp_path: Path
):
    engine = CacheEngine(LAYOUT, device_blocks=4, host_blocks=2)
    store = open_store(f"file://{tmp_path}", bytes_per_block=LAYOUT.bytes_per_block, num_slots=3)
    executor = StepExecutor(engine, store)
    decision = StepDecision(1, [(kind, Pairs(src, dst, [pair])) for kind, src, dst, pair in transfers])
    with pytest.raises(MappingError) as error:
        executor.submit(decision)
    assert str(error.value) == message
    store.close()


def test_tensors_of_another_number_of_blocks_name_both_numbers():
    tensors = [torch.zeros(LAYOUT.tensor_shape(4)) for _ in range(2)]
    with pytest.raises(LayoutError) as error:
        KVCache(LAYOUT, tensors=tensors, device_blocks=8)
    assert str(error.value) == "device_blocks is 8, must be 4, the blocks of the tensors"
