"""Models for the demo: where they run, which folders they come from, and what memory their caches need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blockyard.errors import InvalidArgumentError
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.models import choose_device, fitting_threads, load_model, name_of_weights
from blockyard.tools.demo.run import DemoOptions, make_report


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = demo_config(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2)
    demo_model(config).save_pretrained(folder)
    return folder


def test_device_is_cuda_where_there_is_one() -> None:
    assert choose_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("abacus", "device is 'abacus', must be cpu, cuda or auto"),
        ("meta", "device is 'meta', must be cpu, cuda or auto"),
        ("cuda:99", "device is 'cuda:99', this machine has"),
    ],
)
def test_device_that_is_not_there_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        choose_device(name)


def test_checkpoint_is_loaded_in_fp32(checkpoint: Path) -> None:
    model = load_model(checkpoint, "cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert model.config.num_hidden_layers == 2


def test_demo_serves_a_local_checkpoint(checkpoint: Path) -> None:
    options = DemoOptions(
        model=checkpoint,
        device="cpu",
        requests=4,
        prompt_tokens=(16, 48),
        output_tokens=(16, 32),
    )
    report = make_report(options)
    assert (report.identical_requests, report.model) == (4, "LlamaForCausalLM")


def test_folder_that_holds_no_known_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(InvalidArgumentError, match=r"cannot load a model from .*abacus") as caught:
        load_model(tmp_path, "cpu")
    assert "\n" not in str(caught.value)


def test_model_with_other_positions_has_another_name() -> None:
    names = set()
    for theta in (1e4, 1e4, 5e5):
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": theta}
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32, rope_parameters=rope))
        names.add(name_of_weights(model))
    assert len(names) == 2


def test_small_model_runs_on_one_thread_and_leaves_the_rest_as_it_was() -> None:
    before = torch.get_num_threads()
    with fitting_threads(demo_model(demo_config(num_layers=1, hidden_size=32))):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_pools_beyond_memory_are_refused_with_the_numbers() -> None:
    options = DemoOptions(device="cpu", requests=1, num_device_blocks=2_000_000_000, num_host_blocks=3)
    with pytest.raises(InvalidArgumentError, match=r"2000000000 device and 3 host blocks of 65536 bytes need \d+"):
        make_report(options)
