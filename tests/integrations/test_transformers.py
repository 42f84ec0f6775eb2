"""Models over a paged cache give the tokens of Hugging Face's own unpaged `generate`, however they are paged."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from huggingface import reference_generate

from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.integrations.sampling import SamplingParams, sample
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.model import PagedModel
from blockyard.tools.demo.demo_model import demo_config, demo_model

BLOCK = 4
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
GREEDY = SamplingParams(max_tokens=14)
SAMPLED = SamplingParams(max_tokens=14, temperature=0.9, seed=5)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama():
    return demo_model(demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2))


def family(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | FAMILIES[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


class Serving:
    """Sequences over hand-made block tables; what a scheduler and a manager do, without either."""

    def __init__(self, model, *, kind="kv_first", blocks=64, seed=0):
        self.paged = PagedModel(model, block_size=BLOCK, kind=kind)
        shape = self.paged.layout.tensor_shape(blocks)
        # Left-over values of former owners must not matter.
        self.caches = [torch.full(shape, 1e4) for _ in range(self.paged.layout.num_layers)]
        self.paged.bind(self.caches)
        self.free = list(np.random.default_rng(seed).permutation(blocks))
        self.sequences = []

    def add(self, prompt, params, index=0):
        self.sequences.append({"tokens": list(prompt), "table": [], "done": 0, "params": params, "index": index})
        self.sequences[-1]["prompt"] = len(prompt)
        return len(self.sequences) - 1

    def fork(self, parent, index):
        """Share all full blocks, and copy the one that both will write."""
        source = self.sequences[parent]
        child = {**source, "tokens": list(source["tokens"]), "table": list(source["table"]), "index": index}
        if source["done"] % BLOCK:
            child["table"][-1] = self.free.pop()
            for cache in self.caches:
                cache[:, child["table"][-1]] = cache[:, source["table"][-1]]
        self.sequences.append(child)
        return len(self.sequences) - 1

    def step(self, lengths):
        """Compute some next tokens of some sequences; `lengths` is {sequence: tokens}. Returns their logits."""
        tokens, starts, tables, slots = [], [], [], []
        for number, length in lengths.items():
            sequence = self.sequences[number]
            first, last = sequence["done"], sequence["done"] + length
            while len(sequence["table"]) * BLOCK < last:
                sequence["table"].append(self.free.pop())
            tokens += sequence["tokens"][first:last]
            starts.append(first)
            tables.append(sequence["table"])
            slots += [sequence["table"][p // BLOCK] * BLOCK + p % BLOCK for p in range(first, last)]
            sequence["done"] = last
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        where = StepInput(np.array(starts), np.array(list(lengths.values())), padded, np.array(slots))
        return self.paged.forward(np.array(tokens), where)

    def extend(self, numbers, logits):
        for number, row in zip(numbers, logits.numpy(), strict=True):
            sequence = self.sequences[number]
            sequence["tokens"].append(sample(row, sequence["params"], sequence["index"], len(sequence["tokens"])))

    def decode(self, numbers, steps):
        for _ in range(steps):
            self.extend(numbers, self.step(dict.fromkeys(numbers, 1)))

    def output(self, number):
        sequence = self.sequences[number]
        return sequence["tokens"][sequence["prompt"] :]


def prompts(count, vocab, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, rng.integers(3, 19)).tolist() for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_gives_the_tokens_of_the_unpaged_model(name, params):
    model = family(name)
    serving = Serving(model)
    numbers = [serving.add(prompt, params) for prompt in prompts(3, 64)]
    serving.extend(numbers, serving.step({n: len(serving.sequences[n]["tokens"]) for n in numbers}))
    serving.decode(numbers, 13)
    for number, prompt in zip(numbers, prompts(3, 64), strict=True):
        assert serving.output(number) == reference_generate(model, prompt, params)


@pytest.mark.parametrize("kind", ["kv_first", "blocks_first"])
def test_prefill_chunks_and_decodes_mix_in_one_step(llama, kind):
    early, late = prompts(2, 250, seed=1)
    serving = Serving(llama, kind=kind)
    first = serving.add(early, SAMPLED)
    serving.extend([first], serving.step({first: len(early)}))
    second = serving.add(late, GREEDY)
    for length in (3, 1, len(late) - 5):
        logits = serving.step({second: length, first: 1})
        serving.extend([first], logits[1:])
    serving.extend([second], serving.step({second: 1}))
    serving.decode([second, first], 10)
    serving.decode([second], 3)
    assert serving.output(first) == reference_generate(llama, early, SAMPLED)
    assert serving.output(second) == reference_generate(llama, late, GREEDY)


def test_forks_share_blocks_and_part_ways(llama):
    prompt = prompts(1, 250, seed=2)[0]
    serving = Serving(llama)
    parent = serving.add(prompt, SAMPLED)
    logits = serving.step({parent: len(prompt)})
    children = [serving.fork(parent, index) for index in (1, 2)]
    serving.extend([parent, *children], logits.repeat(3, 1))
    serving.decode([parent, *children], 13)
    outputs = [serving.output(number) for number in (parent, *children)]
    assert len({tuple(output) for output in outputs}) == 3
    assert outputs == [reference_generate(llama, prompt, SAMPLED, index) for index in range(3)]


def test_a_sequence_computed_again_goes_on_where_it_was(llama):
    prompt = prompts(1, 250, seed=3)[0]
    serving = Serving(llama)
    number = serving.add(prompt, SAMPLED)
    serving.extend([number], serving.step({number: len(prompt)}))
    serving.decode([number], 6)
    sequence = serving.sequences[number]
    sequence.update(table=[], done=0)
    serving.extend([number], serving.step({number: len(sequence["tokens"])}))
    serving.decode([number], 6)
    assert serving.output(number) == reference_generate(llama, prompt, SAMPLED)


def test_a_sequence_may_read_what_another_writes_in_the_same_step(llama):
    prompt = prompts(1, 250, seed=3)[0][:BLOCK] * 2
    serving = Serving(llama)
    writer, reader = serving.add(prompt, GREEDY), serving.add(prompt, GREEDY)
    table = [serving.free.pop(), serving.free.pop()]
    serving.sequences[writer]["table"] = list(table)
    serving.sequences[reader].update(table=[table[0], serving.free.pop()], done=BLOCK)
    logits = serving.step({writer: 2 * BLOCK, reader: BLOCK})
    serving.extend([writer, reader], logits)
    serving.decode([writer, reader], 13)
    assert serving.output(reader) == serving.output(writer) == reference_generate(llama, prompt, GREEDY)


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("place", range(5))
def test_a_planted_wrong_block_changes_the_tokens(llama, place, half):
    """The control: were blocks not read, this test would fail and all others here would mean nothing."""
    prompt = prompts(1, 250, seed=4)[0] + list(range(5 * BLOCK))
    serving = Serving(llama)
    serving.caches[0].zero_()
    number = serving.add(prompt, SAMPLED)
    serving.extend([number], serving.step({number: len(prompt)}))
    table = serving.sequences[number]["table"]
    for cache in serving.caches:
        cache[half, table[place]] = cache[half, table[(place + 1) % 5]]
    serving.decode([number], 13)
    assert serving.output(number) != reference_generate(llama, prompt, SAMPLED)


def test_a_wrong_entry_of_a_block_table_changes_the_tokens(llama):
    prompt = prompts(1, 250, seed=4)[0] + list(range(5 * BLOCK))
    serving = Serving(llama)
    number = serving.add(prompt, GREEDY)
    serving.extend([number], serving.step({number: len(prompt)}))
    table = serving.sequences[number]["table"]
    # Two blocks exchanged would not do: keys carry their positions, and attention asks for no order beside them.
    table[0] = table[1]
    serving.decode([number], 13)
    assert serving.output(number) != reference_generate(llama, prompt, GREEDY)


def test_the_model_given_stays_usable_and_two_can_be_served_at_once(llama):
    other = demo_model(llama.config, seed=9)
    prompt = prompts(1, 250)[0]
    before = reference_generate(llama, prompt, GREEDY)
    servings = [Serving(llama), Serving(other)]
    assert llama.config._attn_implementation == "sdpa"

    def serve(serving):
        number = serving.add(prompt, GREEDY)
        serving.extend([number], serving.step({number: len(prompt)}))
        serving.decode([number], 13)
        return serving.output(number)

    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(serve, servings))
    assert outputs == [before, reference_generate(other, prompt, GREEDY)]
    assert reference_generate(llama, prompt, GREEDY) == before


def test_the_reference_stops_at_a_stop_token_and_ignores_the_checkpoint_defaults(llama):
    prompt = prompts(1, 250)[0]
    free = reference_generate(llama, prompt, SAMPLED)
    stop = free[5]
    params = SamplingParams(max_tokens=14, temperature=0.9, seed=5, stop_token_ids=(stop,))
    assert reference_generate(llama, prompt, params) == free[: free.index(stop) + 1]
    kept = llama.generation_config
    llama.generation_config = transformers.GenerationConfig(eos_token_id=stop, repetition_penalty=5.0)
    try:
        assert reference_generate(llama, prompt, SAMPLED) == free
        assert llama.generation_config.eos_token_id == stop
    finally:
        llama.generation_config = kept


def test_caches_of_another_shape_are_refused(llama):
    paged = PagedModel(llama, block_size=BLOCK)
    with pytest.raises(InvalidArgumentError, match="call bind"):
        paged.forward(np.array([1]), StepInput(np.array([0]), np.array([1]), np.array([[0]]), np.array([0])))
    with pytest.raises(LayoutError):
        paged.bind([torch.zeros(paged.layout.tensor_shape(4))])
    with pytest.raises(LayoutError):
        paged.bind([torch.zeros(paged.layout.tensor_shape(4), dtype=torch.float64)] * 2)


@pytest.mark.parametrize(
    ("token", "start", "shown"),
    [
        (259, 0, "token ids go from 259 to 259, the vocabulary has 259"),
        (-1, 0, "token ids go from -1"),
        (1, 2**15, "position is 32768, the model has 32768 positions"),
    ],
)
def test_tokens_outside_the_model_are_refused(llama, token, start, shown):
    paged = PagedModel(llama, block_size=BLOCK)
    paged.bind([torch.zeros(paged.layout.tensor_shape(4)) for _ in range(2)])
    table = np.zeros((1, start // BLOCK + 1), dtype=np.int32)
    with pytest.raises(InvalidArgumentError, match=shown):
        paged.forward(np.array([token]), StepInput(np.array([start]), np.array([1]), table, np.array([0])))
