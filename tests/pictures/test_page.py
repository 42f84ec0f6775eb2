"""The page: the same bytes each time, nothing from a network, and a browser that draws it without a complaint."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, browser_page

from blockyard.errors import InvalidArgumentError
from blockyard.tools.pictures import Figure, cdf_figure, hit_rate_figure, pareto_figure, timeline_figure, write_html
from blockyard.tools.timeline import Counter, Mark, Span, Timeline

TITLE = "Replay of <trace> & more"
FACTS = {"requests": 1000, "hits": "31 % </script><script>alert(1)</script>"}
# Of paper and ink, in light and in dark.
COLORS = [("rgb(255, 255, 255)", "rgb(27, 31, 35)"), ("rgb(22, 25, 29)", "rgb(230, 232, 234)")]
LOADS = {"src", "href", "data", "action", "poster", "srcset", "background"}


def sample_figures() -> dict[str, Figure]:
    chance, timeline = random.Random(0), Timeline()
    for step in range(50):
        timeline.add(Counter("device (blocks)", "in use", step, chance.randint(0, 9)))
        timeline.add(Span(f"engine {step % 2}", "get", step, step + chance.random() * 3, {"blocks": 2}))
    timeline.add(Span("faults", "partition", 10, 20))
    timeline.add(Mark("faults", "damage </script>", 30))
    return {
        "Hit rate": hit_rate_figure({"lru": [(100, 0.25), (9000, 0.5)]}, optimum=[(100, 0.3), (9000, 0.6)]),
        "TTFT": cdf_figure({"swap": [chance.random() for _ in range(500)]}, ("TTFT", "s")),
        "Cost": pareto_figure({"a": (1, 2), "b": (2, 1), "c": (3, 3)}, ("cost", "$/h"), ("TTFT", "s"), recommended="a"),
        "Run <1>": timeline_figure(timeline),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, TITLE, sample_figures(), FACTS)
    return path


class Reader(HTMLParser):
    """Collects text, and what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loads += [value or "" for name, value in attrs if name in LOADS]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_loads_nothing(page: Path) -> None:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.loads == ["data:,"]
    assert reader.scripts == 2  # no text of the data has made a third
    assert TITLE in reader.text
    assert FACTS["hits"] in reader.text
    style = page.read_text(encoding="utf-8").partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_has_the_figures(page: Path) -> None:
    text = page.read_text(encoding="utf-8").rpartition("const figures = ")[2]
    written = json.loads(text.partition(";\n")[0])
    assert written == json.loads(json.dumps(list(sample_figures().values())))


def test_numbers_of_numpy_are_written_and_those_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    sizes = np.array([100, 200])
    figure = hit_rate_figure({"lru": list(zip(sizes, np.array([0.25, 0.5], np.float32), strict=True))})
    write_html(tmp_path / "a.html", TITLE, {"Hit rate": figure}, {})
    assert '"x": [100, 200], "y": [25.0, 50.0]' in (tmp_path / "a.html").read_text(encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="the figure 'TTFT' has a number that is not finite"):
        write_html(tmp_path / "b.html", TITLE, {"TTFT": cdf_figure({"run": [1.0, float("nan")]}, ("TTFT", "s"))}, {})
    assert not (tmp_path / "b.html").exists()


def test_equal_arguments_give_equal_bytes_in_another_process(page: Path, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, test_page as t\n"
        "t.write_html(pathlib.Path(sys.argv[1]), t.TITLE, t.sample_figures(), t.FACTS)\n"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    again = tmp_path / "again.html"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", program, str(again)], check=True, env=environment)
    assert again.read_bytes() == page.read_bytes()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_every_figure_without_a_complaint_or_a_request(page: Path, tmp_path: Path, dark: bool) -> None:
    with browser_page(page, tmp_path / "profile", dark=dark) as browser:
        assert browser.problems == []
        assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
        figures = sample_figures()
        drawn = browser.evaluate(
            "figures.map((_, n) => document.querySelectorAll(`#figure-${n} .trace, #figure-${n} .bars .point`).length)"
        )
        assert all(count >= len(figure["data"]) for count, figure in zip(drawn, figures.values(), strict=True)), drawn
        titles = browser.evaluate("[...document.querySelectorAll('.xtitle')].map(title => title.textContent)")
        assert titles == [figure["layout"]["xaxis"]["title"]["text"] for figure in figures.values()]
        # The page does not scroll sideways, and its ink is not its paper.
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        paper, ink, axis = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
            " getComputedStyle(document.querySelector('.xtitle')).fill]"
        )
        assert (paper, ink) == COLORS[dark]
        assert axis == ink
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
        # The browser's console is watched: this is what a complaint looks like.
        browser.evaluate("console.error('seen')")
        browser.evaluate("fetch('http://localhost:9/x').catch(() => 0)")
        assert len(browser.problems) >= 2
