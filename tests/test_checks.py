"""What the ops refuse, with numbers, and that nothing has changed then: in Python and in the compiled library."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from blockyard.errors import LayoutError, MappingError
from blockyard.transfer import fallback, ops
from blockyard.transfer.cuda import op_library

Op = Callable[..., None]


def caches_of(width: int = 24, blocks: int = 6, count: int = 3) -> list[torch.Tensor]:
    random = np.random.default_rng(width + blocks)
    return [torch.from_numpy(random.integers(0, 256, (blocks, width), np.uint8)) for _ in range(count)]


def ids(*values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


CACHES = caches_of()
ROWS = torch.zeros((2, 72), dtype=torch.uint8)
TWO = ids(4, 1)
VIEWS_OF_ROWS = list(ROWS.split([24, 24, 24], dim=1))

REFUSED = {
    ("move", "a source out of range"): (CACHES, ids([6, 1]), MappingError, "entry 0: block 6 is to be read"),
    ("move", "a target out of range"): (CACHES, ids([1, 2], [1, -2]), MappingError, "entry 1: block -2 is to be writ"),
    ("move", "a repeated target"): (CACHES, ids([1, 2], [3, 2]), MappingError, "block 2 is written twice"),
    ("move", "triples"): (CACHES, ids([1, 2, 3]), MappingError, r"wanted int64 \[n, 2\]"),
    ("move", "one cache twice"): ([CACHES[0], CACHES[0]], ids([1, 2]), LayoutError, "share memory"),
    ("exchange", "out of range"): (CACHES, ids([-1, -1], [6, 1]), MappingError, "entry 1: block 6 is to be exchanged"),
    ("exchange", "half a padding"): (CACHES, ids([2, -1]), MappingError, "entry 0: block -1 is to be exchanged"),
    ("exchange", "one source twice"): (CACHES, ids([1, 2], [1, 3]), MappingError, "block 1 is exchanged twice"),
    ("exchange", "a source and a target"): (CACHES, ids([1, 2], [2, 3]), MappingError, "block 2 is exchanged twice"),
    ("exchange", "with itself"): (CACHES, ids([3, 3]), MappingError, "block 3 is exchanged twice"),
    ("exchange", "narrow ids"): (CACHES, ids([1, 2], dtype=torch.int32), MappingError, r"wanted int64 \[n, 2\]"),
    ("exchange", "no caches"): ([], ids([1, 2]), LayoutError, "caches holds no tensors"),
    ("gather", "out of range"): (CACHES, ROWS, ids(1, 6), MappingError, "entry 1: block 6 is to be read"),
    ("gather", "fewer blocks than rows"): (CACHES, ROWS, ids(1), MappingError, "1 blocks are named, there are 2 rows"),
    ("gather", "pairs"): (CACHES, ROWS, ids([1, 2]), MappingError, r"wanted int64 \[n\]"),
    ("gather", "narrow rows"): (CACHES, ROWS[:, :71], TWO, LayoutError, "rows have 71 bytes, a block of all caches ha"),
    ("gather", "floats"): (CACHES, ROWS.float(), TWO, LayoutError, r"rows\[0\] "),
    ("gather", "rows of the caches"): (VIEWS_OF_ROWS, ROWS, ids(0, 1), LayoutError, "caches and rows share memory"),
    ("scatter", "out of range"): (ROWS, CACHES, ids(6, 1), MappingError, "entry 0: block 6 is to be written"),
    ("scatter", "a repeated block"): (ROWS, CACHES, ids(1, 1), MappingError, "block 1 is written twice"),
    ("scatter", "more blocks than rows"): (ROWS, CACHES, ids(1, 2, 3), MappingError, "3 blocks are named, there are"),
    ("scatter", "wide rows"): (ROWS, CACHES[:2], TWO, LayoutError, "rows have 72 bytes, a block of all caches has 48"),
    ("scatter", "one cache twice"): (ROWS, [*CACHES[:2], CACHES[0]], TWO, LayoutError, "share memory"),
    ("scatter", "rows of the caches"): (ROWS, VIEWS_OF_ROWS, ids(0, 1), LayoutError, "rows and caches share memory"),
}


def compiled(name: str) -> Op:
    """Call the compiled library's implementation; what it refuses, it refuses before it looks for a device."""
    op = getattr(torch.ops.blockyard, f"{name}_blocks").default

    def call(*arguments: object) -> None:
        if not op_library().loaded:
            pytest.skip(op_library().explain())
        try:
            op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments)
        except RuntimeError as error:
            raise ops._named(error) from error

    return call


def tensors_of(arguments: list[object]) -> list[torch.Tensor]:
    return [tensor for entry in arguments for tensor in (entry if isinstance(entry, list) else [entry])]


@pytest.mark.parametrize("through", ["op", "torch calls", "compiled"])
@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_what_is_refused_changes_nothing(case: tuple[str, str], through: str):
    *arguments, error, message = REFUSED[case]
    name = case[0]
    op = {
        "op": getattr(ops, f"{name}_blocks"),
        "torch calls": getattr(fallback.BY_TORCH, name),
        "compiled": compiled(name),
    }
    kept = [tensor.clone() for tensor in tensors_of(arguments)]
    with pytest.raises(error, match=message):
        op[through](*arguments)
    assert all(torch.equal(now, before) for now, before in zip(tensors_of(arguments), kept, strict=True))


@pytest.mark.parametrize("name", ["move", "exchange"])
def test_the_compiled_library_refuses_caches_on_the_cpu(name: str):
    with pytest.raises(LayoutError, match="caches are not on a CUDA device"):
        compiled(name)(CACHES, ids([1, 2]))


def test_the_compiled_library_refuses_rows_and_caches_that_are_all_on_the_cpu():
    with pytest.raises(LayoutError, match="neither caches nor rows is on a CUDA device"):
        compiled("gather")(CACHES, ROWS, TWO)
    with pytest.raises(LayoutError, match="neither rows nor caches is on a CUDA device"):
        compiled("scatter")(ROWS, CACHES, TWO)


def test_wrong_widths_are_refused_without_bytes():
    with torch.device("meta"), pytest.raises(LayoutError, match="rows have 7 bytes, a block of all caches has 9"):
        torch.ops.blockyard.gather_blocks(
            [torch.empty((4, 9), dtype=torch.uint8)], torch.empty((2, 7), dtype=torch.uint8), torch.empty(2)
        )
