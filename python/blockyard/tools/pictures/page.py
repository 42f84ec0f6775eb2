"""`write_html`: figures and facts in one self-contained file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from string import Template
from typing import Final

from blockyard.errors import InvalidArgumentError
from blockyard.tools.pictures.style import Figure
from blockyard.workers.extras import missing

try:
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as error:
    raise missing("blockyard.tools.pictures", error) from None

__all__ = ["write_html"]

_HEIGHT: Final = 420
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
# The policy makes the browser block any network request.
_PAGE: Final = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { --ink: #1b1f23; --paper: #ffffff; --line: #d0d7de; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16191d; --line: #3d444d; } }
body { margin: 0 auto; padding: 24px; max-width: 1200px; font: 16px/1.5 $font; color: var(--ink); \
background: var(--paper); }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.5em 0 0; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 2px 24px 2px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; white-space: nowrap; } td { overflow-wrap: anywhere; }
section { break-inside: avoid; }
@media print { body { padding: 0; } .modebar { display: none; } }
</style>
</head>
<body>
<h1>$title</h1>
<table>
$facts
</table>
<noscript>The figures need JavaScript.</noscript>
$sections
<script>
$plotly
</script>
<script>
const figures = $figures;
const dark = matchMedia("(prefers-color-scheme: dark)");
const axis = (line) => (
  {gridcolor: line, linecolor: line, zerolinecolor: line, minor: {gridcolor: line}, automargin: true});
const base = (ink, line) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, family: $json_font, size: 13},
  margin: {l: 90, r: 20, t: 36, b: 60}, hoverlabel: {align: "left"},
  modebar: {bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink},
  xaxis: {...axis(line), ticklabelstandoff: 6}, yaxis: axis(line),
});
// On a narrow page, long names of the legend and the axis are broken into lines.
const broken = (text) => text && innerWidth < 600 ? text.replace(/(.{20,}?) /g, "$$1<br>") : text;
const titled = ({xaxis, ...rest}) =>
  ({...rest, xaxis: {...xaxis, ...(xaxis?.title && {title: {text: broken(xaxis.title.text)}})}});
const draw = (isDark) => {
  const template = {layout: isDark ? base("#e6e8ea", "#3d444d") : base("#1b1f23", "#d0d7de")};
  const options = {displaylogo: false, responsive: true, plotlyServerURL: ""};
  return Promise.all(figures.map((figure, number) => {
    const data = figure.data.map((trace) => ({...trace, name: broken(trace.name)}));
    return Plotly.react("figure-" + number, data, {...titled(figure.layout), template}, options);
  }));
};
draw(dark.matches).then(() => { document.body.dataset.drawn = figures.length; });
dark.addEventListener("change", () => draw(dark.matches));
addEventListener("beforeprint", () => draw(false));
addEventListener("afterprint", () => draw(dark.matches));
</script>
</body>
</html>
""")


def write_html(path: Path, title: str, figures: Mapping[str, Figure], facts: Mapping[str, object]) -> None:
    """Write a self-contained HTML file: it opens without a network, in light or dark mode, and can be printed.

    The file is 5 MB large, mostly plotly.js.

    Args:
        path: path of the file. The same arguments give the same bytes.
        title: title of the page.
        figures: figures by heading.
        facts: numbers and settings of the run for the table at the top, by name.

    Raises:
        InvalidArgumentError: a figure has a number that is not finite.
        OSError: the file cannot be written.
    """
    rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(fact))}</td></tr>" for name, fact in facts.items()]
    sections = [
        f"<section><h2>{html.escape(heading)}</h2>"
        f'<div id="figure-{number}" role="img" aria-label="{html.escape(heading)}" '
        f'style="height: {figure["layout"].get("height", _HEIGHT):g}px"></div></section>'
        for number, (heading, figure) in enumerate(figures.items())
    ]
    page = _PAGE.substitute(
        title=html.escape(title),
        font=_FONT,
        json_font=json.dumps(_FONT),
        facts="\n".join(rows),
        sections="\n".join(sections),
        plotly=get_plotlyjs(),
        figures="[" + ",\n".join(map(_figure, figures, figures.values())) + "]",
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _figure(heading: str, figure: Figure) -> str:
    """Return JSON in which no text can end the script element."""
    try:
        text = json.dumps(figure, allow_nan=False, default=methodcaller("tolist"))  # for numpy numbers
    except ValueError:
        raise InvalidArgumentError(f"the figure {heading!r} has a number that is not finite") from None
    return text.replace("<", "\\u003c")
