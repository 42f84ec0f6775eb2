"""An exception at any place of a generator loses no request, no block and no token; so with Gaudi's swaps."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_calls import ERRORS, PATIENCE, Caller, every, swept
from huggingface import reference_generate
from interrupts import Interrupt

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.gaudi import CacheSwapUtils
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.generator import Generator
from blockyard.tools.demo.demo_model import demo_config, demo_model

PROMPTS = [list(range(first, first + 9)) for first in (1, 40, 80)]
PARAMS = [SamplingParams(max_tokens=6, n=count) for count in (1, 2, 1)]
BLOCKS = {"device": 13, "host": 6}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return demo_model(demo_config(num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1))


@pytest.fixture(scope="module")
def wanted(model: torch.nn.Module) -> list[list[list[int]]]:
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [[reference_generate(model, prompt, each, index) for index in range(each.n)] for prompt, each in pairs]


class GeneratorProgram(Caller):
    """Requests that are served to their ends, aborted, and served again; every token is checked."""

    def __init__(self, interrupt: Interrupt, model: torch.nn.Module, wanted: list[list[list[int]]], root: Path) -> None:
        super().__init__(interrupt)
        self.wanted = wanted
        self.generator = Generator(
            model,
            block_size=4,
            device_blocks=BLOCKS["device"],
            host_blocks=BLOCKS["host"],
            swap_store=f"file://{root}?size=1MiB",
            preemption_mode="swap",
        )
        self.finished: dict[str, list[list[int]]] = {}

    def run(self) -> None:
        for _ in range(2):
            self.generate()
        self.serve()
        self.end()
        self.call(self.generator.close)
        self.generator.close()

    def generate(self) -> None:
        outputs = self.call(lambda: list(self.generator.generate(PROMPTS, PARAMS)))
        assert sorted(output.index for output in outputs) == [0, 1, 2]
        for output in outputs:
            assert list(output.sequences) == self.wanted[output.index], "wrong tokens"

    def serve(self) -> None:
        """Drive it step by step; one request is aborted on the way."""
        for index in (0, 1, 2):
            self.call(self.generator.add, f"{index}", PROMPTS[index], PARAMS[index])
        self.step()
        ended, _ = self.attempt(self.generator.abort, "1")
        if not ended:
            try:
                self.generator.abort("1")
            except InvalidArgumentError as error:  # it was interrupted after it had aborted
                assert "not in the scheduler" in str(error)
        until = time.monotonic() + PATIENCE
        while len(self.finished) < 2:
            assert time.monotonic() < until, "a request never ends"
            self.step()
        assert self.finished == {"0": self.wanted[0], "2": self.wanted[2]}

    def step(self) -> None:
        for done in self.call(self.generator.step):
            name = done.request.request_id
            assert done.error is None
            assert name not in self.finished, "a request has finished twice"
            self.finished[name] = [list(tokens) for tokens in done.outputs]

    def end(self) -> None:
        """Nothing is under way, and every block can be had."""
        self.call(self.generator.drain)
        generator, manager = self.generator, self.generator.manager
        assert (generator.num_unfinished, generator._params) == (0, {})
        assert manager.stats().open_tickets == []
        assert manager.stats().sequences == 0
        manager.check()
        for tier, blocks in BLOCKS.items():
            assert manager.pool(tier).num_free == blocks, tier
        longest = 4 * BLOCKS["device"] - 1
        (output,) = generator.generate([list(range(longest))], SamplingParams(max_tokens=1))
        assert len(output.tokens) == 1


@pytest.mark.parametrize("most", every(15))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_a_generator_loses_no_request(
    tmp_path: Path, model: torch.nn.Module, wanted: list[list[list[int]]], error: type[BaseException], most: int
):
    numbers = iter(range(1 << 30))

    def run(interrupt: Interrupt) -> None:
        program = GeneratorProgram(interrupt, model, wanted, tmp_path / str(next(numbers)))
        with interrupt.installed():
            try:
                program.run()
            finally:
                program.generator.close()

    assert swept(("transformers/generator.py", "scheduler/loop.py"), run, error, most) > 60


class SwapProgram(Caller):
    """Exchanges that have been made as a whole or not at all."""

    def run(self) -> None:
        before = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6 * 4, 8), dtype=np.uint8))
        caches = [(before.clone(), before.clone()) for _ in range(2)]
        utils = self.call(CacheSwapUtils, caches, 4)
        for pairs, call in (
            ([(0, 5), (1, 3)], lambda: utils.swap([(0, 5), (1, 3)], 4)),
            ([(2, 0), (4, 1)], lambda: utils(torch.tensor([2, 4]), torch.tensor([0, 1]), [*caches[0], *caches[1]])),
        ):
            wanted = before.clone()
            for one, other in (*pairs, *((other, one) for one, other in pairs)):
                wanted[4 * one : 4 * one + 4] = before[4 * other : 4 * other + 4]
            ended, _ = self.attempt(call)
            found = [torch.equal(tensor, wanted) for cache in caches for tensor in cache]
            assert all(found) or (not ended and not any(found))
            if not all(found):
                call()
            before = wanted
            assert all(torch.equal(tensor, wanted) for cache in caches for tensor in cache)


@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_a_swap_exchanges_all_blocks_or_none(error: type[BaseException]):
    def run(interrupt: Interrupt) -> None:
        with interrupt.installed():
            SwapProgram(interrupt).run()

    assert swept(("integrations/gaudi/swap.py",), run, error, 1 << 30) > 4
