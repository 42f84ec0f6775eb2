"""The table of copy strategies: its file, its rules, and that the compiled library reads them alike."""

import ctypes
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import Mapping
from blockyard.engine.ops import compiled, strategy
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import (
    BATCH_PIECES,
    DIRECTIONS,
    NO_LIMIT,
    STRATEGIES,
    Rule,
    StrategyTable,
    read_table,
    table_path,
    use_rules,
)
from blockyard.errors import InvalidArgumentError, MappingError

TABLE = StrategyTable("NVIDIA H200", "13.0", (Rule("h2d", 8192, 1000, "kernel"), Rule("d2h", NO_LIMIT, 3, "loop")), 512)
CUDA = Path(__file__).resolve().parents[2] / "cuda"
SHIM = """
#include "strategy.h"
using namespace blockyard;
int blockyard::compute_capability(int32_t device) { return device == 10 ? 10 : 9; }
extern "C" void use(const int64_t* rules, int64_t count) {
    std::vector<StrategyRule> read;
    for (int64_t n = 0; n < count; ++n, rules += 5)
        read.push_back({static_cast<Direction>(rules[0]), rules[1], rules[2], static_cast<Strategy>(rules[3]),
                        static_cast<unsigned>(rules[4])});
    set_strategies(1, read);
}
extern "C" void set_max_pieces(int device, uint64_t max_pieces) { set_batch_pieces(device, max_pieces); }
extern "C" uint64_t pieces(int device) { return batch_pieces(device); }
extern "C" int64_t choose(int device, int64_t direction, int64_t bytes, int64_t count, bool rows) {
    const StrategyChoice found = choose_strategy(device, static_cast<Direction>(direction), bytes, count, rows);
    return static_cast<int64_t>(found.strategy) * 65536 + found.blocks;
}
"""


def test_the_first_rule_that_holds_decides():
    assert TABLE.rule("h2d", 8192, 1000).strategy == "kernel"
    assert TABLE.rule("h2d", 30_000, 1000).strategy == "batch"
    assert TABLE.rule("h2d", 8192, 1001, host_rows=True).strategy == "staged"
    assert TABLE.rule("d2h", 1 << 30, 2).strategy == "loop"
    assert TABLE.rule("d2h", 1 << 30, 4).strategy == "batch"


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_without_a_rule_many_pieces_are_staged_or_take_the_kernel(direction: str):
    none = StrategyTable("", "", ())
    staged, small, many = (512 << 10) - 1, (28 << 10) - 1, 32
    assert none.rule(direction, staged, many, host_rows=True).strategy == "staged"
    assert none.rule(direction, small, many).strategy == "kernel"
    for size, count in ((staged + 1, many), (small, many - 1), (1 << 20, 1)):
        assert none.rule(direction, size, count, host_rows=True).strategy == "batch"
    assert none.rule(direction, small + 1, many).strategy == "batch"


def test_a_rule_for_staging_holds_for_host_rows_alone():
    table = StrategyTable(
        "", "", (Rule("h2d", NO_LIMIT, NO_LIMIT, "staged"), Rule("h2d", NO_LIMIT, NO_LIMIT, "kernel", 3))
    )
    assert table.rule("h2d", 1 << 20, 1, host_rows=True).strategy == "staged"
    assert table.rule("h2d", 1 << 20, 1) == Rule("h2d", NO_LIMIT, NO_LIMIT, "kernel", 3)


def test_a_table_comes_back_from_its_file(tmp_path: Path):
    path = tmp_path / "deep" / "strategies.json"
    TABLE.save(path)
    assert read_table(path) == TABLE
    assert [file.name for file in path.parent.iterdir()] == ["strategies.json"]


def with_rule(direction: str, max_bytes: float, strategy: str) -> dict[str, object]:
    return {**GOOD, "rules": [{"direction": direction, "max_bytes": max_bytes, "max_count": 1, "strategy": strategy}]}


GOOD = {"version": 6, "device": "d", "torch_cuda": "13.0", "rules": [], "batch_pieces": 512}
BROKEN = {
    "another version": {**GOOD, "version": 4},
    "less than no pieces in a batch": {**GOOD, "batch_pieces": -1},
    "a batch too long for drivers": {**GOOD, "batch_pieces": 2049},
    "a batch of words": {**GOOD, "batch_pieces": "512"},
    "no rules": {key: value for key, value in GOOD.items() if key != "rules"},
    "an unknown strategy": with_rule("h2d", 1, "magic"),
    "a direction of another version": with_rule("d2d", 1, "kernel"),
    "an unknown direction": with_rule("up", 1, "loop"),
    "a fraction": with_rule("h2d", 1.5, "loop"),
    "a huge number": with_rule("h2d", 2**70, "loop"),
    "no thread blocks": {**GOOD, "rules": [{**with_rule("h2d", 1, "loop")["rules"][0], "thread_blocks": 0}]},
    "a missing field": {**GOOD, "rules": [{"direction": "h2d"}]},
    "a list": [],
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_table_is_as_none(tmp_path: Path, case: str):
    path = tmp_path / "strategies.json"
    path.write_text(json.dumps(GOOD))
    assert read_table(path) is not None
    path.write_text(json.dumps(BROKEN[case]))
    assert read_table(path) is None
    path.write_bytes(b"\xff{")
    assert read_table(path) is None
    assert read_table(tmp_path / "absent") is None


def test_the_file_is_named_by_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path))
    assert table_path("NVIDIA H200 (80/GB)") == tmp_path / "copy-strategy-nvidia-h200-80-gb.json"
    monkeypatch.delenv("BLOCKYARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert table_path("A").parent == tmp_path / "blockyard"


def test_a_cached_table_is_used_with_its_cuda_release_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    for release, used in (("0.0", None), (str(torch.version.cuda), TABLE.rules)):
        StrategyTable("card", release, TABLE.rules).save(table_path("card"))
        strategy.use_cached.cache_clear()
        table = strategy.use_cached(0)
        assert (table.rules if table else None) == used
    strategy.use_cached.cache_clear()
    table_path("card").unlink()
    with strategy.force_strategy(0, "loop"):
        assert strategy.use_cached(0) is None
    strategy.use_cached.cache_clear()


@pytest.mark.parametrize("to_host", [False, True])
def test_a_table_is_looked_up_for_copies_either_way(monkeypatch: pytest.MonkeyPatch, to_host: bool):
    asked: list[int] = []
    monkeypatch.setattr(compiled, "use_cached", asked.append)
    monkeypatch.setattr(compiled, "_run", lambda *_: None)
    sides = [[SimpleNamespace(is_cuda=False)], [SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=4))]]
    mapping = Mapping([[0, 0]], src_blocks=1, dst_blocks=1, rule="swap")
    compiled.BY_LIBRARY.copy_between(*(reversed(sides) if to_host else sides), mapping)
    assert asked == [4]


def test_rules_of_an_unknown_strategy_are_refused():
    with pytest.raises(InvalidArgumentError, match="magic"):
        use_rules(0, (Rule("h2d", 1, 1, "magic"),))
    with pytest.raises(InvalidArgumentError, match="thread_blocks must be 1 to 65535"):
        use_rules(0, (Rule("h2d", 1, 1, "kernel", 0),))
    with pytest.raises(InvalidArgumentError, match="directions h2d, d2h and strategies batch, loop, kernel, staged"):
        use_rules(0, (Rule("d2d", 1, 1, "kernel"),))


def test_a_strategy_is_forced_each_way_with_its_thread_blocks(monkeypatch: pytest.MonkeyPatch):
    used: list[tuple[Rule, ...]] = []
    monkeypatch.setattr(strategy, "use_cached", lambda index: TABLE)
    monkeypatch.setattr(strategy, "use_rules", lambda index, rules: used.append(rules))
    for name, blocks in (("staged", 12), ("kernel", 3), ("batch", 1)):
        with strategy.force_strategy(0, name):
            assert used[-1] == tuple(Rule(direction, NO_LIMIT, NO_LIMIT, name, blocks) for direction in DIRECTIONS)
        assert used[-1] == TABLE.rules


@pytest.mark.parametrize(
    ("device", "rules", "message"),
    [
        (-1, [[0, 1, 1, 1, 1]], "device -1"),
        (64, [[0, 1, 1, 1, 1]], "device 64"),
        (0, [[0, 1, 1, 5, 1]], "strategy 5, there are 4"),
        (0, [[2, 1, 1, 1, 1]], "direction 2, there are 2"),
        (0, [[0, 1, 1, 3, 0]], "0 thread blocks, must be 1 to 65535"),
    ],
)
def test_the_library_refuses_what_it_does_not_know(device: int, rules: list[list[int]], message: str):
    if not op_library().loaded:
        pytest.skip(op_library().explain())
    with pytest.raises(MappingError, match=message):
        compiled._run(torch.ops.blockyard.set_strategies, device, torch.tensor(rules))
    with pytest.raises(MappingError, match="rules are not int64"):
        compiled._run(torch.ops.blockyard.set_strategies, 0, torch.zeros(4, dtype=torch.int64))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("strategies")
    (folder / "shim.cpp").write_text(SHIM)
    sources = [str(folder / "shim.cpp"), str(CUDA / "strategy.cpp"), "-o", str(folder / "shim.so")]
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{CUDA}", *sources], check=True)
    library = ctypes.CDLL(str(folder / "shim.so"))
    library.choose.restype = ctypes.c_int64
    library.choose.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_bool]
    return library


def test_batches_are_bounded_unless_calibration_says_otherwise(shim: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    shim.pieces.restype = ctypes.c_uint64
    shim.set_max_pieces.argtypes = [ctypes.c_int, ctypes.c_uint64]
    assert [shim.pieces(device) for device in (-1, 2, 64)] == [BATCH_PIECES] * 3
    shim.set_max_pieces(2, 512)
    assert [shim.pieces(device) for device in (1, 2)] == [BATCH_PIECES, 512]
    # Peers' crashes: compute capability 10.0 and above has none until a calibration survived them.
    assert shim.pieces(10) == 0
    shim.set_max_pieces(10, 512)
    assert shim.pieces(10) == 512
    shim.set_max_pieces(10, 0)
    assert shim.pieces(10) == 0
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    monkeypatch.setattr(strategy, "read_table", lambda _: StrategyTable("card", str(torch.version.cuda), (), 2048))
    monkeypatch.setattr(strategy, "use_batch_pieces", lambda *called: used.append(called))
    strategy.use_cached.cache_clear()
    strategy.use_cached(3)
    strategy.use_cached.cache_clear()
    assert used == [(3, 2048)]


@pytest.mark.parametrize("numbers", [(-1, 512), (64, 512), (0, -1)])
def test_the_library_refuses_batches_of_less_than_nothing_and_unknown_devices(numbers: tuple[int, int]):
    if not op_library().loaded:
        pytest.skip(op_library().explain())
    with pytest.raises(MappingError, match=r"device -1|device 64|at most -1 pieces, must be at least 0"):
        compiled._run(torch.ops.blockyard.set_batch_pieces, *numbers)


SMALL = st.integers(0, 6) | st.sampled_from([31, 32, (28 << 10) - 1, 28 << 10, (512 << 10) - 1, 512 << 10])
RULES = st.builds(Rule, st.sampled_from(DIRECTIONS), SMALL, SMALL, st.sampled_from([*STRATEGIES]), st.integers(1, 99))


@given(st.lists(RULES, max_size=5), st.sampled_from(DIRECTIONS), SMALL, SMALL, st.booleans())
def test_the_library_chooses_as_the_table_does(
    shim: ctypes.CDLL, rules: list[Rule], direction: str, num_bytes: int, count: int, host_rows: bool
):
    place = DIRECTIONS.index(direction)
    numbers = [
        n
        for r in rules
        for n in (DIRECTIONS.index(r.direction), r.max_bytes, r.max_count, STRATEGIES[r.strategy], r.thread_blocks)
    ]
    shim.use((ctypes.c_int64 * max(1, len(numbers)))(*numbers), ctypes.c_int64(len(rules)))
    for device, table in ((1, StrategyTable("", "", tuple(rules))), (64, StrategyTable("", "", ()))):
        wanted = table.rule(direction, num_bytes, count, host_rows=host_rows)
        chosen = shim.choose(device, place, num_bytes, count, host_rows)
        assert divmod(chosen, 65536) == (STRATEGIES[wanted.strategy], wanted.thread_blocks)
