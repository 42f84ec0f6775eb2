"""The pages of real commands in a browser: no text lies on another one, and no panel is empty."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser_page

from blockyard.tools.cli import main
from blockyard.tools.pictures import pareto_figure, write_html

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

STEP = "--step-time 0.01,4e-5,2e-5,9e-8 --block-size 16 --jobs 1"
COMMANDS = {
    "hits": "replay TRACE --jobs 1 --host-blocks 0,50%",
    "times": f"replay TRACE {STEP} --device-blocks 200,5% --host-blocks 0,400 --preemption-modes swap,recompute",
    "plan": f"plan TRACE {STEP} --engines 2 --device-blocks 300 --host-gib 0,0.5,1,2 --store-gib 0,4 "
    "--policies lru,adaptive --preemption-modes swap,recompute",
}
# Boxes of all texts that a figure shows; texts of the hover and of the buttons are none.
TEXTS = """figures.map((_, number) => [...document.querySelectorAll(
  `#figure-${number} :is(.legendtext, .xtitle, .ytitle, .xtick text, .ytick text, .textpoint text)`)]
  .filter((text) => text.textContent.trim()).map((text) => {
    const box = text.getBoundingClientRect();
    return [text.textContent, box.left, box.top, box.right, box.bottom];
  }))"""
EMPTY = """figures.flatMap((figure, number) => Object.keys(figure.layout).filter((name) => /^yaxis/.test(name)).filter(
  (name) => {
    const axis = name.replace("axis", "");
    return !figure.data.some((trace) => (trace.yaxis || "y") === axis && trace.x.length);
  }).map((name) => [number, name]))"""
INSIDE = """[...document.querySelectorAll(".plot-container")].every((figure) => {
  const outer = figure.getBoundingClientRect();
  return [...figure.querySelectorAll(".xtitle, .ytitle, .legendtext")].every((text) => {
    const box = text.getBoundingClientRect();
    return box.left >= outer.left - 1 && box.right <= outer.right + 1 && box.bottom <= outer.bottom + 1;
  });
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    trace, chance = folder / "trace.jsonl", random.Random(1)
    lines = []
    for at in range(60):
        ids = [1000 * (at % 7) + block for block in range(chance.randint(4, 12))] + [10**6 + at]
        row = {
            "timestamp": at * 400 + (60_000 if at > 40 else 0),
            "input_length": 16 * len(ids) + 3,
            "output_length": 60,
        }
        lines.append(json.dumps(row | {"hash_ids": ids, "block_size": 16}))
    trace.write_text("\n".join(lines), "utf-8")
    found = {}
    for name, command in COMMANDS.items():
        found[name] = folder / f"{name}.html"
        words = [str(trace) if word == "TRACE" else word for word in command.split()]
        assert main([*words, "--html", str(found[name]), "-q"]) == 0
    return found


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_text_lies_on_another_and_no_panel_is_empty(
    pages: dict[str, Path], name: str, width: int, tmp_path: Path
) -> None:
    with browser_page(pages[name], tmp_path / "profile", width=width) as browser:
        browser.screenshot(pages[name].with_suffix(f".{width}.png"))
        assert overlaps(browser) == []
        assert browser.evaluate(EMPTY) == []
        assert browser.evaluate(INSIDE)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        legends = browser.evaluate(
            "figures.map((_, n) => document.querySelectorAll(`#figure-${n} .legendtext`).length)"
        )
        assert max(legends) <= 24
        facts = browser.evaluate("[...document.querySelectorAll('td')].map((cell) => cell.textContent).join()")
        assert "StepTime(" not in facts


@pytest.mark.parametrize("width", [1280, 400])
def test_the_numbers_of_close_choices_do_not_lie_on_each_other(tmp_path: Path, width: int) -> None:
    pairs = ((12.62, 7.54), (12.63, 7.53), (12.68, 5.6), (13.57, 3.04), (13.58, 3.03), (15.08, 2.73), (15.09, 2.72))
    choices = {f"{number} GiB host, lru": pair for number, pair in enumerate(pairs)}
    figure = pareto_figure(choices, ("cost", "$/h"), ("TTFT", "s"), recommended="3 GiB host, lru")
    write_html(tmp_path / "page.html", "Plan", {"Cost": figure}, {})
    with browser_page(tmp_path / "page.html", tmp_path / "profile", width=width) as browser:
        assert overlaps(browser) == []


def overlaps(browser: Page) -> list[tuple[str, str]]:
    """Return the pairs of texts of a figure whose boxes share more than a pixel."""
    found = []
    for texts in browser.evaluate(TEXTS):
        for number, (text, left, top, right, bottom) in enumerate(texts):
            for other, left2, top2, right2, bottom2 in texts[:number]:
                if min(right, right2) - max(left, left2) > 1 and min(bottom, bottom2) - max(top, top2) > 1:
                    found.append((other, text))
    return found
