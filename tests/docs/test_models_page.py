"""`docs/reference/models.md` lists the layouts that `ArenaLayout.from_config` reads.

python tests/docs/test_models_page.py prints the table.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "support"))  # as a script

from model_configs import TABLE  # noqa: E402

from blockyard.layout import ArenaLayout, LayerField  # noqa: E402

PAGE = HERE.parents[2] / "docs/reference/models.md"
PACKED = {"block_size": 128, "dtype": "fp8_ds_mla"}


def rows() -> Iterator[str]:
    """Yield the lines of the table: one for each cache group of each model."""
    yield "| model | cache group | layers | tensors of a layer, in a block | bytes of a block | page class |"
    yield "|---|---|---|---|---|---|"
    for name, (config, *_) in TABLE.items():
        layout = ArenaLayout.from_config(config, **(PACKED if "V4" in name else {}))
        lines = [_cells(layout, number) for number in range(len(layout.groups))]
        for at, cells in enumerate(dict.fromkeys(lines)):
            kind, *others = cells
            times = f"{lines.count(cells)} x " if lines.count(cells) > 1 else ""
            yield f"| {' | '.join([name if at == 0 else '', times + kind, *others])} |"


def _cells(layout: ArenaLayout, number: int) -> tuple[str, ...]:
    """Return what the table says of a cache group."""
    group, fields = layout.groups[number]
    of_layer: dict[int, list[LayerField]] = {}
    for field in fields:
        of_layer.setdefault(field.layer, []).append(field)
    kinds = dict.fromkeys(_tensors(layer, layout.tokens(number)) for layer in of_layer.values())
    kind = f"`{group.kind}{f'({group.window})' if group.window else ''}`"
    size = f"{layout.block_bytes[number]:,}"
    return kind, str(len(of_layer)), "; or ".join(kinds), size, str(layout.page_class(number))


def _tensors(fields: list[LayerField], tokens: int) -> str:
    """Return names and shapes, those of equal shape together."""
    shapes: dict[str, list[str]] = {}
    for field in fields:
        shapes.setdefault(f"{list(field.shape_in_block(tokens))} {field.dtype}", []).append(f"`{field.name}`")
    return ", ".join(f"{' and '.join(names)} {shape}" for shape, names in shapes.items())


def test_the_page_has_the_layout_of_each_model():
    found = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert found == list(rows())


if __name__ == "__main__":
    print("\n".join(rows()))
