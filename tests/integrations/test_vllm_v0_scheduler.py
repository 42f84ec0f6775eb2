"""vLLM 0.7.3's own scheduler runs on our block manager, unchanged, and decides as it does on its own.

What it decides is also run on simulated memory: no step reads a token's KV that is not there, or is another's.

`VLLM_V0_SOURCE` names the folder that holds `vllm/core/scheduler.py`, as unpacked from the source archive on PyPI.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import inspect
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blockyard.integrations import vllm_v0

SOURCE = os.environ.get("VLLM_V0_SOURCE", "")
pytestmark = pytest.mark.skipif(not SOURCE, reason="VLLM_V0_SOURCE does not name vLLM 0.7.3's source folder")

BLOCK = 4
OWN_MANAGER = (
    "core.evictor",
    "core.block.interfaces",
    "core.block.common",
    "core.block.naive_block",
    "core.block.prefix_caching_block",
    "core.block.cpu_gpu_block_allocator",
    "core.block.block_table",
    "core.block.utils",
    "core.block_manager",
)
# What V0 uses inside, under names without an underscore.
INTERNALS = {"refcounter", "free_block_id"}


class Anything(ModuleType):
    """A module that has every name, each an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return self.__dict__[name]


class Struct:
    """What vLLM uses of `msgspec.Struct`: a data class."""

    def __init_subclass__(cls, **_: object) -> None:
        dataclasses.dataclass(eq=False)(cls)


class ObjectCache:
    def __init__(self, builder: Callable[[], object]):
        self.get_object = builder

    def reset(self) -> None:
        pass


class Inputs:
    def __init__(self, inputs: dict[str, Any]):
        self.prompt_token_ids, self.prompt = inputs["prompt_token_ids"], None
        self.prompt_embeds = self.token_type_ids = self.mm_processor_kwargs = None
        self.multi_modal_data = self.multi_modal_placeholders = {}


class LoggerStub(logging.LoggerAdapter[logging.Logger]):
    def warning_once(self, *args: Any) -> None:
        self.warning(*args)


def stubs() -> dict[str, ModuleType]:
    names = "config lora lora.request prompt_adapter prompt_adapter.request inputs multimodal pooling_params"
    modules: dict[str, ModuleType] = {f"vllm.{name}": Anything(f"vllm.{name}") for name in names.split()}
    for name in ("vllm", "vllm.core", "vllm.core.block", "vllm.sampling_params", "torch"):
        modules[name] = Anything(name)
    modules["vllm.inputs"].SingletonInputsAdapter = Inputs
    modules["vllm.platforms"] = Anything("vllm.platforms")
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_hpu=lambda: False)
    modules["vllm.logger"] = Anything("vllm.logger")
    modules["vllm.logger"].init_logger = lambda name: LoggerStub(logging.getLogger(name), {})
    modules["msgspec"] = Anything("msgspec")
    modules["msgspec"].Struct, modules["msgspec"].field = Struct, dataclasses.field
    utils = modules["vllm.utils"] = Anything("vllm.utils")
    utils.Device = enum.Enum("Device", ["GPU", "CPU"])
    utils.PyObjectCache = ObjectCache
    utils.cdiv = lambda a, b: -(-a // b)
    utils.chunk_list = lambda items, size: [items[i : i + size] for i in range(0, len(items), size)]
    utils.STR_NOT_IMPL_ENC_DEC_SWA = utils.STR_NOT_IMPL_ENC_DEC_PREFIX_CACHE = ""
    return modules


@contextlib.contextmanager
def swapped(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def load(name: str, modules: dict[str, ModuleType]) -> ModuleType:
    path = Path(SOURCE, "vllm", *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"vllm.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    modules[f"vllm.{name}"] = sys.modules[f"vllm.{name}"] = module
    spec.loader.exec_module(module)
    return module


class Memory:
    """The bytes of both devices: in each slot, the tokens up to the one whose KV it holds."""

    def __init__(self) -> None:
        self.gpu: dict[tuple[int, int], tuple[int, ...]] = {}
        self.cpu: dict[tuple[int, int], tuple[int, ...]] = {}

    @staticmethod
    def copy(pairs: list[tuple[int, int]], src: dict[Any, Any], dst: dict[Any, Any]) -> None:
        rows = [(to, offset, src.get((block, offset), ())) for block, to in pairs for offset in range(BLOCK)]
        dst.update({(to, offset): row for to, offset, row in rows})

    def run(self, metadata: list[Any], out: Any) -> None:
        """Do a step as V0's worker does: swaps, copies, then the tokens, of which computed blocks are skipped."""
        self.copy(out.blocks_to_swap_in, self.cpu, self.gpu)
        self.copy(out.blocks_to_swap_out, self.gpu, self.cpu)
        self.copy(out.blocks_to_copy, self.gpu, self.gpu)
        reads: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        for item in metadata:
            for seq_id, table in item.block_tables.items():
                data = item.seq_data[seq_id]
                tokens, computed = data.get_token_ids(), data.get_num_computed_tokens()
                end = computed + item.token_chunk_size
                cached = len(item.computed_block_nums or []) * BLOCK if item.is_prompt else 0
                for i in range(end):
                    slot, row = (table[i // BLOCK], i % BLOCK), tuple(tokens[: i + 1])
                    if i >= max(computed, min(cached, end - 1)):
                        self.gpu[slot] = row
                    reads.append((slot, row))
        assert all(self.gpu.get(slot) == row for slot, row in reads)


def interfaces_with(num_external_blocks: int) -> Any:
    """Ours, with external blocks that the scheduler does not ask for."""
    if not num_external_blocks:
        return vllm_v0
    make = functools.partial(vllm_v0.SelfAttnBlockSpaceManager, num_external_blocks=num_external_blocks)
    manager = SimpleNamespace(get_block_space_manager_class=lambda version: make)
    return SimpleNamespace(AllocStatus=vllm_v0.AllocStatus, BlockSpaceManager=manager)


class Engine:
    """vLLM's scheduler over one of the two managers, with a model that samples what the position says."""

    def __init__(self, own: bool, **options: Any):
        self.modules = stubs()
        names = ["sequence", "core.interfaces", *OWN_MANAGER] if own else ["sequence"]
        if not own:
            self.modules["vllm.core.interfaces"] = interfaces_with(options.pop("external", 0))
        for name in OWN_MANAGER:
            self.modules.setdefault(f"vllm.{name}", ModuleType(f"vllm.{name}"))
        with swapped(self.modules):
            for name in names:
                load(name, self.modules)
            self.scheduler_module = load("core.scheduler", self.modules)
            self.sequence = self.modules["vllm.sequence"]
            self.scheduler = self._scheduler(**options)
        self.memory = Memory() if not own and "window" not in options else None
        self.groups: dict[str, Any] = {}
        self.ids = 0

    def _scheduler(
        self,
        gpu: int = 24,
        cpu: int = 24,
        caching: bool = False,
        window: int | None = None,
        chunked: bool = False,
        lookahead: int = 0,
    ) -> Any:
        config = SimpleNamespace(
            runner_type="generate", chunked_prefill_enabled=chunked, delay_factor=0.0, is_multi_step=False,
            long_prefill_token_threshold=0, max_long_partial_prefills=1, max_model_len=256,
            max_num_batched_tokens=256 if not chunked else 16, max_num_partial_prefills=1, max_num_seqs=64,
            num_lookahead_slots=lookahead, num_scheduler_steps=1, policy="fcfs",
            preemption_mode="swap" if cpu else None, send_delta_data=False,
        )  # fmt: skip
        cache = SimpleNamespace(
            block_size=BLOCK, num_gpu_blocks=gpu, num_cpu_blocks=cpu, sliding_window=window,
            enable_prefix_caching=caching, is_attention_free=False,
        )  # fmt: skip
        return self.scheduler_module.Scheduler(config, cache, None)

    def add(self, request_id: str, prompt: list[int], n: int, length: int) -> None:
        self.ids += 1
        group = self.sequence.SequenceGroup(
            request_id,
            [self.sequence.Sequence(self.ids, {"prompt_token_ids": prompt}, BLOCK)],
            arrival_time=float(self.ids),
            sampling_params=SimpleNamespace(n=n),
        )
        self.groups[request_id] = (group, n, length)
        self.scheduler.add_seq_group(group)

    def _fork(self, group: Any) -> None:
        self.ids += 1
        child = group.seqs[0].fork(self.ids)
        group.seqs.append(child)
        group.seqs_dict[self.ids], group.is_single_seq = child, False
        self.scheduler.fork_seq(group.seqs[0], child)

    def step(self, seed: int) -> dict[str, Any]:
        with swapped(self.modules):
            metadata, out, _ = self.scheduler.schedule()
        if self.memory is not None:
            self.memory.run(metadata, out)
        status = self.sequence.SequenceStatus
        for scheduled in out.scheduled_seq_groups:
            group, n, length = self.groups[scheduled.seq_group.request_id]
            group.update_num_computed_tokens(scheduled.token_chunk_size)
            if group.is_prefill():
                continue
            while len(group.seqs) < n:
                self._fork(group)
            for k, seq in enumerate(group.get_seqs(status.RUNNING)):
                token = random.Random(f"{seed} {seq.get_len()} {k}").randrange(50)
                seq.append_token_id(token, {token: SimpleNamespace(logprob=0.0)})
                if seq.get_output_len() >= length + k:
                    seq.status = status.FINISHED_STOPPED
                    self.scheduler.free_seq(seq)
        self.scheduler.free_finished_seq_groups()
        return {
            "tables": {item.request_id: dict(item.block_tables) for item in metadata},
            "computed": {item.request_id: list(item.computed_block_nums or []) for item in metadata},
            "chunks": [(item.seq_group.request_id, item.token_chunk_size) for item in out.scheduled_seq_groups],
            "in": out.blocks_to_swap_in,
            "out": out.blocks_to_swap_out,
            "copy": out.blocks_to_copy,
            "preempted": out.preempted,
            "free": (
                self.scheduler.block_manager.get_num_free_gpu_blocks(),
                self.scheduler.block_manager.get_num_free_cpu_blocks(),
            ),
        }


def workload(seed: int, n: int) -> list[tuple[int, str, list[int], int, int]]:
    """Step, request, prompt, sequences and length of some requests; half of them begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(50) for _ in range(24)]
    requests = []
    for i in range(12):
        prompt = (shared[: rng.randrange(25)] if i % 2 else []) + [
            rng.randrange(50) for _ in range(rng.randrange(1, 20))
        ]
        requests.append((rng.randrange(20), f"r{i}", prompt, rng.choice([1, n]), rng.randrange(1, 20)))
    return sorted(requests)


def run(engine: Engine, seed: int, n: int) -> list[dict[str, Any]]:
    requests, decisions = workload(seed, n), []
    # A swapped prefill of several chunks never comes back in V0's scheduler, whosever the manager.
    for step in range(150):
        for at, *request in requests:
            if at == step:
                engine.add(*request)
        decisions.append(engine.step(seed))
        if step > 20 and not engine.scheduler.has_unfinished_seqs():
            break
    return decisions


SETTINGS = {
    "plain": {},
    "no host blocks": {"cpu": 0},
    "prefix caching": {"caching": True},
    "prefix caching, few blocks": {"caching": True, "gpu": 16, "cpu": 32},
    "sliding window": {"window": 8, "cpu": 0, "gpu": 64},
    "chunked prefill": {"chunked": True},
    "lookahead": {"lookahead": 3},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(8))
def test_the_scheduler_decides_the_same_on_our_manager_as_on_its_own(setting: str, seed: int):
    ours, theirs = (run(Engine(own, **SETTINGS[setting]), seed, 1) for own in (False, True))
    for mine, other in zip(ours, theirs, strict=True):
        # V0 goes on counting hits that were evicted while the request waited.
        stale = other["computed"]
        assert all(stale[name][: len(blocks)] == blocks for name, blocks in mine["computed"].items())
        assert mine == {**other, "computed": mine["computed"]}


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_groups_of_several_sequences_run_to_their_end(caching: bool, seed: int):
    engine = Engine(False, caching=caching, gpu=32, cpu=32)
    decisions = run(engine, seed, 3)
    assert not engine.scheduler.has_unfinished_seqs()
    assert decisions[-1]["free"] == (32, 32)


@pytest.mark.parametrize("options", [{}, {"gpu": 16, "cpu": 32}, {"cpu": 0}])
@pytest.mark.parametrize("seed", range(16))
def test_a_chunked_prefill_never_lets_others_read_what_is_not_computed(options: dict[str, Any], seed: int):
    # Unlike V0's own manager, which lets them: so the two are not compared.
    engine = Engine(False, caching=True, chunked=True, **options)
    run(engine, seed, 1)
    assert engine.scheduler.block_manager.get_prefix_cache_hit_rate(vllm_v0.Device.GPU) > 0


@pytest.mark.parametrize("caching", [False, True])
def test_groups_go_to_external_blocks_and_back_by_the_schedulers_own_calls(caching: bool):
    out, back, cpu = set(), set(), 4
    for seed in range(8):
        engine = Engine(False, caching=caching, gpu=16, cpu=cpu, external=64)
        decisions = run(engine, seed, 1)
        assert not engine.scheduler.has_unfinished_seqs()
        manager = engine.scheduler.block_manager
        assert (*decisions[-1]["free"], manager.get_num_free_external_blocks()) == (16, cpu, 64)
        out |= {target >= cpu for decision in decisions for _, target in decision["out"]}
        back |= {source >= cpu for decision in decisions for source, _ in decision["in"]}
    assert out == back == {False, True}


def methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public methods of V0's classes that we have too, each with its class's name."""
    for name in ("core.interfaces", *OWN_MANAGER):
        tree = ast.parse(Path(SOURCE, "vllm", *name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        for kind in tree.body:
            for node in kind.body if isinstance(kind, ast.ClassDef) and kind.name in vllm_v0.__all__ else ():
                public = isinstance(node, ast.FunctionDef) and (node.name == "__init__" or node.name[0] != "_")
                if isinstance(node, ast.FunctionDef) and public and node.name not in INTERNALS:
                    yield kind.name, node


def takes_the_same(ours: Callable[..., object], node: ast.FunctionDef) -> bool:
    names = [argument.arg for argument in node.args.args if argument.arg not in {"self", "cls"}]
    defaults = {argument.arg for argument in node.args.args[len(node.args.args) - len(node.args.defaults) :]}
    own = [item for item in inspect.signature(ours).parameters.values() if item.name not in {"self", "cls"}]
    if any(item.kind is item.VAR_KEYWORD for item in own):
        return True  # an abstract method, whose implementation is looked at
    optional = {item.name for item in own if item.default is not item.empty}
    extra = {item.name for item in own[len(names) :]}
    return [item.name for item in own[: len(names)]] == names and defaults | extra <= optional


def test_every_method_takes_what_v0s_takes():
    different, checked = [], 0
    for class_name, node in methods():
        kind = getattr(vllm_v0, class_name)
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        if marks & {"property", "setter"}:
            # A null block passes on what it is asked for.
            known = kind is vllm_v0.NullBlock or hasattr(kind, node.name) or node.name in kind.__annotations__
        else:
            ours = kind if node.name == "__init__" else getattr(kind, node.name, None)
            known = ours is not None and takes_the_same(ours, node)
        checked += 1
        if not known:
            different.append(f"{class_name}.{node.name}")
    assert not different
    assert checked > 150
