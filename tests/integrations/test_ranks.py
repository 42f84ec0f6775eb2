"""A model over several processes: the unpaged model's tokens whatever one rank loses, and no rank left behind."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import in_child
from huggingface import reference_generate
from servers import serving

from blockyard.errors import ForkedError, InvalidArgumentError, WorkerError
from blockyard.integrations.transformers.generator import Generator
from blockyard.integrations.transformers.ranks import CacheOptions, CacheSizes
from blockyard.stores.url import rank_url
from blockyard.testing.faults import flip_bytes
from blockyard.tools.demo import models
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.executors import SteadyExecutor, Wrapper
from blockyard.tools.demo.run import DemoOptions, make_report

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    found = demo_model(demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2))
    found.generation_config.eos_token_id = [258, 7]  # the config has one
    return found


@pytest.fixture(scope="module")
def wanted(model, work):
    each = zip(*work, strict=True)
    return [[reference_generate(model, prompt, params, index) for index in range(params.n)] for prompt, params in each]


def generate(generator, work):
    """Serve prompts, and give their tokens in the order of the prompts."""
    outputs = sorted(generator.generate(*work), key=lambda output: output.index)
    return [list(output.sequences) for output in outputs]


class Damaging(Wrapper):
    """Flips a byte of every second block that rank 1 has stored, and counts the losses that are reported."""

    def __init__(self, inner, folder):
        super().__init__(SteadyExecutor(inner))
        self.store, self.folder = inner.executors[0].store, folder
        self.stored, self.kinds, self.lost_pairs, self.errors = {}, set(), 0, []

    def submit(self, decision, *, by_layer=False):
        self.kinds |= {(kind, pairs.src, pairs.dst) for kind, pairs in decision.transfers() if len(pairs)}
        stored = [pairs for pairs in decision.swap_out if pairs.dst == "external"]
        self.stored[decision.ticket] = [slot for pairs in stored for slot in pairs.ids[::2, 1].tolist()]
        super().submit(decision, by_layer=by_layer)

    def poll(self):
        return [self.damage(done) for done in super().poll()]

    def wait(self, ticket):
        return self.damage(super().wait(ticket))

    def damage(self, done):
        slots = self.stored.pop(done.ticket)
        (slab,) = self.folder.glob("*.slab")
        flip_bytes(slab, [self.store.slot_offset(slot) + 100 for slot in slots], masks=[1] * len(slots))
        self.lost_pairs += sum(len(pairs) for pairs in done.lost)
        return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("swap")
    for rank in range(2):
        (found / str(rank)).mkdir()
    return found


@pytest.fixture(scope="module")
def generator(model, folder):
    options = {"block_size": 4, "device_blocks": 40, "host_blocks": 12, "preemption_mode": "swap"}
    with Generator(
        model,
        swap_store=f"file://{folder}/{{rank}}?size=1MiB",
        tensor_parallel_size=2,
        wrap_executor=lambda inner: Damaging(inner, folder / "1"),
        **options,
    ) as found:
        yield found
    assert not list(folder.rglob("*.slab"))
    assert [process.returncode is None for process in found.ranks.processes] == [False]


def test_sequences_of_ranks_end_with_the_end_tokens_of_the_whole_model(generator):
    assert generator.model.eos_token_ids == (258, 7)


def test_blocks_that_only_rank_1_loses_cost_a_recompute_and_no_token(generator, work, wanted):
    assert generator.engine.layout.num_kv_heads == 1
    assert generate(generator, work) == wanted
    away = {("swap_out", "device", tier) for tier in ("host", "external")}
    back = {("swap_in", tier, "device") for tier in ("host", "external")}
    assert generator.executor.kinds == away | back | {("copy", "device", "device")}
    assert generator.executor.lost_pairs > 0
    assert generator.scheduler.stats().lost > 0
    assert generator.swap_store.stats().damaged_blocks == 0, "rank 0 has lost nothing itself"
    generator.manager.check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_leaves_the_ranks_to_its_parent(generator, work, wanted):
    def check():
        ranks = generator.ranks
        with pytest.raises(ForkedError, match="a group of ranks was created by"):
            ranks._group.all_reduce(torch.ones(1))
        with pytest.raises(ForkedError, match="the connection to rank 1 was created by"):
            ranks.forward(np.zeros(1, np.int64), None)
        assert all(process.returncode is not None for process in ranks.processes), "close waits for the workers"
        ranks.close()
        del ranks._group

    folder = generator.ranks._folder
    in_child(check)
    assert Path(folder).is_dir()
    assert generate(generator, work) == wanted


def test_a_step_that_is_interrupted_while_ranks_compute_ends_the_generator(generator, work, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(generator.generate(*work))
    with pytest.raises(WorkerError, match="a step was interrupted while the ranks computed it: make a new Generator"):
        list(generator.generate(*work))


def test_ranks_share_a_server_and_a_rank_that_dies_ends_the_driver_with_its_name(model, work, wanted, tmp_path):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("valkey-server", tmp_path))
        generator = stack.enter_context(
            Generator(
                model,
                block_size=4,
                device_blocks=40,
                host_blocks=0,
                swap_store=f"redis://127.0.0.1:{server.port}?size=1MiB",
                tensor_parallel_size=2,
                preemption_mode="swap",
            )
        )
        assert generate(generator, work) == wanted
        assert generator.scheduler.stats().resumed_swap_external > 0
        processes = generator.ranks.processes
        steps = iter(generator.generate(*work))
        next(steps)
        os.kill(processes[0].pid, 9)
        with pytest.raises(WorkerError, match=r"rank 1 has ended \(exit code -9\)"):
            list(steps)
        with pytest.raises(WorkerError):
            generator.step()
    assert [process.returncode for process in processes] == [-9]


def test_the_demo_compares_every_token_of_several_ranks(model, monkeypatch):
    monkeypatch.setattr(models, "demo_model", lambda *_, **__: model)
    report = make_report(
        DemoOptions(
            device="cpu",
            requests=4,
            prompt_tokens=(16, 48),
            output_tokens=(16, 32),
            num_device_blocks=14,
            num_host_blocks=4,
            tensor_parallel_size=2,
        )
    )
    assert report.identical_requests == report.requests == 4
    assert report.exit_code == 0
    assert report.scheduler.preempted_swap_host + report.scheduler.preempted_recompute > 0
    assert report.settings["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, must divide the 2 KV heads of the model"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, must divide"),
        (
            {"prefix_store": "redis://user:secret@host?size=1MiB"},
            r"prefix_store is 'redis://\*\*\*@host\?size=1MiB' and",
        ),
        ({"elastic": True}, "elastic is True and tensor_parallel_size 2: it needs a single rank"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_a_process_starts(model, options, message, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(InvalidArgumentError, match=message):
        Generator(model, device_blocks=8, host_blocks=0, **{"tensor_parallel_size": 2} | options)


def test_a_worker_that_cannot_start_is_an_error_and_none_is_left(model, tmp_path):
    with pytest.raises(WorkerError, match="rank 1 has failed: StoreError"):
        Generator(
            model,
            device_blocks=8,
            host_blocks=0,
            tensor_parallel_size=2,
            swap_store=f"file://{tmp_path}/{{rank}}/a?size=1MiB",
        )


def test_each_rank_has_a_namespace_and_a_url_of_its_own():
    options = CacheOptions(CacheSizes(8, None, 0, None), None, "file:///kv/{rank}?size=1MiB", b"model")
    each = [options.of_rank(rank, size) for size in (1, 2) for rank in range(size)]
    assert len({one["namespace"] for one in each}) == 3
    assert [one["swap_store"] for one in each] == [rank_url(options.swap_store, rank) for rank in (0, 0, 1)]
    assert each[2]["swap_store"] == "file:///kv/1?size=1MiB"
