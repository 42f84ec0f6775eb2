"""Figures of runs, and a self-contained HTML page that shows them; needs plotly.

Functions create figures from plain data, and `write_html` writes them to a page. A figure is a plotly figure as a dict:
`plotly.graph_objects.Figure(figure)` shows it in a notebook.

    figures = {
        "Hit rate": hit_rate_figure({"lru": [(1000, 0.31), (2000, 0.44)]}, optimum=[(1000, 0.42), (2000, 0.55)]),
        "Time to first token": cdf_figure({"swap": [0.11, 0.12], "recompute": [0.19, 0.2]}, ("TTFT", "s")),
        "Cost": pareto_figure({"4 GiB host": (1.2, 0.5), "8 GiB host": (1.4, 0.2)}, ("cost", "$/h"), ("TTFT", "s")),
        "Run": timeline_figure(timeline),
    }
    write_html(Path("report.html"), "replay of trace.jsonl", figures, {"requests": "1000"})
"""

from blockyard.tools.pictures.charts import cdf_figure, hit_rate_figure, pareto_figure
from blockyard.tools.pictures.page import write_html
from blockyard.tools.pictures.style import Axis, Figure
from blockyard.tools.pictures.timeline import timeline_figure

__all__ = ["Axis", "Figure", "cdf_figure", "hit_rate_figure", "pareto_figure", "timeline_figure", "write_html"]
