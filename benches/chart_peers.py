"""Draws `docs/images/peers.svg` from the table of `docs/benchmarks/manager.md`.

python benches/chart_peers.py
"""

import math
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
CHART = DOCS / "images" / "peers.svg"
# Key of the table's row, and its label in the chart.
ROWS = {
    "decode_ns": "decode, a sequence and step",
    "prefix_20k_us": "prefix cache, a prompt of 2,048 tokens",
    "evict_1k_ns": "evict a block, 1,000 cached",
    "evict_100k_ns": "evict a block, 100,000 cached",
    "fork_1000_us": "fork a sequence of 1,000 blocks",
    "swap_ns": "swap a block, one direction",
    "defrag_256k_us": "defragment, a step of 256k blocks",
}
COLOURS = {
    "Blockyard": "#0072b2",
    "vLLM V0": "#e69f00",
    "vLLM V1": "#d55e00",
    "SGLang": "#009e73",
    "vllm-gaudi": "#56a0d3",
    "kvbm-logical": "#cc79a7",
}
LEFT, TOP, DECADE, STEP = 296, 64, 118, 46
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 11px; fill: #57606a }
  .panel { fill: #ffffff }
  .grid { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b1 } .panel { fill: #161b22 } .grid { stroke: #3a424c }
  }
"""


def figures() -> dict[str, dict[str, str]]:
    """Read the table: `3,820 (1,160x)`, a time and its multiple of Blockyard's, by row and system."""
    text = (DOCS / "benchmarks" / "manager.md").read_text(encoding="utf-8").split("## Peers in the same run")[1]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    head = lines[0]
    rows = ((cells[1].strip("`"), zip(head[2:], cells[2:], strict=True)) for cells in lines[2:])
    return {key: {system: cell for system, cell in cells if cell} for key, cells in rows}


def chart() -> str:
    """Return the chart as SVG: one row per workload, one dot per system, at its multiple of Blockyard's time."""
    measured = figures()
    width, height = LEFT + 5 * DECADE, TOP + STEP * len(ROWS) + 24
    bottom = TOP + STEP * len(ROWS) - 12
    described = "Time of each system as a multiple of Blockyard's"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{described}">',
        f"<style>{STYLE}</style>",
        f'<rect class="panel" width="{width}" height="{height}" rx="8"/>',
    ]
    for power in range(5):
        x = LEFT + power * DECADE
        parts.append(f'<line class="grid" x1="{x}" y1="{TOP - 14}" x2="{x}" y2="{bottom}"/>')
        label = "Blockyard" if power == 0 else f"{10**power:,} times"
        parts.append(f'<text class="small" x="{x}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    place = 16.0
    for system, colour in COLOURS.items():
        parts.append(f'<circle cx="{place + 5:.0f}" cy="24" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{place + 16:.0f}" y="28">{system}</text>')
        place += 44 + 8.2 * len(system)
    for number, (key, name) in enumerate(ROWS.items()):
        parts += row(TOP + STEP * number + 8, name, key, measured[key])
    return "\n".join([*parts, "</svg>", ""])


def row(y: int, name: str, key: str, cells: dict[str, str]) -> list[str]:
    """Draw one workload. Figures alternate above and below the line, because neighbours may be close."""
    unit = re.sub(r".*_", "", key)
    parts = [
        f'<text x="16" y="{y - 1}">{name}</text>',
        f'<text class="small" x="16" y="{y + 14}">Blockyard: {cells["Blockyard"]} {unit}</text>',
    ]
    multiples = {system: cell.partition("(")[2].rstrip(")") or "1x" for system, cell in cells.items()}
    times = {system: float(text.rstrip("x").replace(",", "")) for system, text in multiples.items()}
    ordered = sorted(times, key=lambda system: times[system])
    places = [LEFT + DECADE * math.log10(times[system]) for system in ordered]
    parts.append(f'<line class="grid" x1="{places[0]:.1f}" y1="{y}" x2="{places[-1]:.1f}" y2="{y}"/>')
    for rank, (system, x) in enumerate(zip(ordered, places, strict=True)):
        parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="{COLOURS[system]}"/>')
        if system != "Blockyard":
            at = y - 10 if rank % 2 else y + 19
            parts.append(f'<text class="small" x="{x:.1f}" y="{at}" text-anchor="middle">{multiples[system]}</text>')
    return parts


if __name__ == "__main__":
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(chart(), encoding="utf-8")
