"""Figures: what they draw is the data, and plotly accepts each."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from plotly import graph_objects

from blockyard.errors import InvalidArgumentError
from blockyard.tools.pictures import Figure, cdf_figure, hit_rate_figure, pareto_figure, timeline_figure
from blockyard.tools.pictures.style import COLORS
from blockyard.tools.timeline import Counter, Mark, Span, Timeline


def traces(figure: Figure) -> dict[str, dict[str, Any]]:
    """Return what a figure draws, by name; plotly must know every property."""
    graph_objects.Figure(figure)
    found = {trace["name"]: trace for trace in figure["data"]}
    assert len(found) == len(figure["data"])
    return found


def test_hit_rates_are_drawn_in_percent_over_capacity() -> None:
    figure = hit_rate_figure({"lru": [(200, 0.5), (100, 0.25)], "arc": [(100, 0.3)]}, optimum=[(100, 0.75)])
    found = traces(figure)
    assert (found["lru"]["x"], found["lru"]["y"]) == ([100, 200], [25.0, 50.0])
    assert (found["arc"]["x"], found["arc"]["y"]) == ([100], [30.0])
    assert (found["optimum"]["x"], found["optimum"]["y"]) == ([100], [75.0])
    assert figure["layout"]["xaxis"]["title"]["text"] == "cache capacity (blocks)"
    assert figure["layout"]["yaxis"]["title"]["text"] == "hit rate (% of prompt tokens)"


def test_curves_differ_in_more_than_colour() -> None:
    found = hit_rate_figure({str(number): [(1, 0.5)] for number in range(6)})["data"]
    assert len({trace["line"]["color"] for trace in found}) == 6
    assert len({trace["line"]["dash"] for trace in found}) == 6
    assert len({trace["marker"]["symbol"] for trace in found}) == 6


def test_capacities_far_apart_get_a_logarithmic_axis() -> None:
    near, far = (hit_rate_figure({"lru": [(100, 0.1), (most, 0.2)]}) for most in (200, 5000))
    assert (near["layout"]["xaxis"]["type"], far["layout"]["xaxis"]["type"]) == ("linear", "log")
    assert near["layout"]["xaxis"]["tickformat"] == ",.12~r"  # without the 12, 1284736 reads 1,284,740


def test_a_small_sample_is_drawn_whole_with_its_percentiles() -> None:
    figure = cdf_figure({"swap": [0.3, 0.1, 0.2, 0.4], "none": []}, ("TTFT", "s"))
    (trace,) = figure["data"]
    assert trace["x"] == [0.1, 0.2, 0.3, 0.4]
    assert trace["y"] == [25.0, 50.0, 75.0, 100.0]
    assert trace["name"] == "swap: p50 0.2, p99 0.4 s"
    assert figure["layout"]["xaxis"]["title"]["text"] == "TTFT (s)"
    graph_objects.Figure(figure)


def test_a_large_sample_is_drawn_by_quantiles_that_are_in_it() -> None:
    sample = np.random.default_rng(0).lognormal(size=20_000)
    (trace,) = cdf_figure({"run": sample}, ("TPOT", "ms"))["data"]
    assert len(trace["x"]) == 1000
    assert trace["x"][-1] == sample.max()
    for value, percent in zip(trace["x"], trace["y"], strict=True):
        assert (sample <= value).mean() * 100 == pytest.approx(percent, abs=1e-9)


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_the_front_has_what_no_other_choice_beats(better: Any) -> None:
    chance = random.Random(better)
    choices = {str(number): (chance.randint(1, 30), chance.randint(1, 30)) for number in range(60)}
    sign = 1 if better == "lower" else -1
    wanted = {
        choices[name]
        for name, (x, y) in choices.items()
        if not any(
            a <= x and sign * b <= sign * y and (a, b) != (x, y) for other, (a, b) in choices.items() if other != name
        )
    }
    found = traces(pareto_figure(choices, ("cost", "$/h"), ("TTFT", "s"), better=better, recommended="7"))
    front = found["Pareto front"]
    assert set(zip(front["x"], front["y"], strict=True)) == wanted
    dominated = found.get("dominated", {"text": [], "x": [], "y": []})
    assert sorted(front["text"] + dominated["text"], key=int) == list(choices)
    assert [choices[name] for name in dominated["text"]] == list(zip(dominated["x"], dominated["y"], strict=True))
    assert found["recommended: 7"]["text"] == ["7"]
    labels = {name.split(": ")[1]: trace for name, trace in found.items() if name[0].isdigit()}
    assert list(labels) == front["text"]  # each has its number in the figure and its name in the legend
    assert [trace["text"] for trace in labels.values()] == [[str(number + 1)] for number in range(len(labels))]


def test_a_recommendation_must_be_a_choice() -> None:
    with pytest.raises(InvalidArgumentError, match="recommended is 'b', must be one of a"):
        pareto_figure({"a": (1, 1)}, ("cost", "$/h"), ("TTFT", "s"), recommended="b")


def test_a_timeline_has_a_panel_for_each_track_of_counters_and_one_for_spans() -> None:
    timeline = Timeline("step", ["faults"])
    for step, used in enumerate([0, 5, 3]):
        timeline.add(Counter("device (blocks)", "in use", step, used))
    timeline.add(Counter("host (blocks)", "in use here", 1, 2))
    timeline.add(Span("device to host", "swap_out", 1, 2, {"blocks": 4}))
    timeline.add(Span("device to host", "copy", 1, 4))
    timeline.add(Span("faults", "partition", 0, 3))
    timeline.add(Mark("faults", "damage", 2))
    figure = timeline_figure(timeline)
    found, layout = traces(figure), figure["layout"]
    # A counter keeps its value to the end.
    assert (found["in use"]["x"], found["in use"]["y"]) == ([0, 1, 2, 4], [0, 5, 3, 3])
    assert (found["in use here"]["x"], found["in use here"]["y"]) == ([1, 4], [2, 2])
    bar = found["swap_out"]
    assert (bar["base"], bar["x"], bar["y"]) == ([1], [1], [1])
    assert bar["hovertext"] == ["device to host: swap_out<br>step 1 to 2<br>blocks 4"]
    assert found["copy"]["y"] == [2]
    assert (found["damage"]["x"], found["damage"]["y"]) == ([2], [0])
    titles = [layout[f"yaxis{suffix}"].get("title", {}).get("text") for suffix in ("", "2", "3")]
    assert titles == ["device (blocks)", "host (blocks)", None]
    assert (layout["yaxis3"]["ticktext"], layout["yaxis3"]["tickvals"]) == (["faults", "device to host"], [0, 1.5])
    assert [(shade["x0"], shade["x1"]) for shade in layout["shapes"]] == [(0, 3)]
    assert layout["xaxis"]["title"]["text"] == "time (scheduler steps)"


def test_panels_of_a_timeline_do_not_overlap() -> None:
    timeline = Timeline()
    for number in range(5):
        timeline.add(Counter(f"track {number}", "value", 0, 1))
    timeline.add(Span("work", "run", 0, 1))
    layout = timeline_figure(timeline)["layout"]
    domains = [axis["domain"] for name, axis in layout.items() if name.startswith("yaxis")]
    assert len(domains) == 6
    assert all(0 <= low < high <= 1 for low, high in domains)
    assert all(above[0] > below[1] for above, below in pairwise(domains))


def test_a_timeline_without_events_or_with_one_is_a_figure() -> None:
    timeline = Timeline()
    assert traces(timeline_figure(timeline)) == {}
    timeline.add(Mark("faults", "damage", 1.0))
    assert list(traces(timeline_figure(timeline))) == ["damage"]


def test_a_long_line_keeps_its_extremes_and_a_long_track_its_number_of_spans() -> None:
    timeline, chance = Timeline(), random.Random(0)
    values = [chance.random() for _ in range(50_000)]
    values[31_234] = 99.0
    for time, value in enumerate(values):
        timeline.add(Counter("load", "value", time, value))
        timeline.add(Span("work", "odd" if time % 2 else "even", time, time + 0.5))
    found = traces(timeline_figure(timeline))
    line = found["value"]
    assert len(line["x"]) <= 2010
    assert (min(line["y"]), max(line["y"])) == (min(values), 99.0)
    assert all(line["y"][place] == values[int(time)] for place, time in enumerate(line["x"][:-1]))
    for name in ("odd", "even"):
        assert len(found[name]["x"]) <= 2100
        counts = [re.search(r"(\d+) spans", text) for text in found[name]["hovertext"]]
        assert sum(int(many[1]) if many else 1 for many in counts) == len(values) / 2


@pytest.mark.parametrize("names", [("decode", "swap_in"), ("swap_in", "prefill", "decode"), ("prefill and decode",)])
def test_a_kind_of_step_has_its_colour_on_every_page(names: tuple[str, ...]) -> None:
    timeline = Timeline()
    for at, name in enumerate(names):
        timeline.add(Span("steps", name, at, at + 1))
    colors = {bar["name"]: bar["marker"]["color"] for bar in timeline_figure(timeline)["data"]}
    kinds = ("decode", "prefill", "prefill and decode", "swap_out", "swap_in")
    assert colors == {name: COLORS[kinds.index(name)] for name in names}
