"""The chart shows what the table says."""

import chart_peers


def test_the_chart_is_drawn_from_the_table_as_it_stands():
    drawn = chart_peers.chart()
    assert chart_peers.CHART.read_text(encoding="utf-8") == drawn, "run `python benches/chart_peers.py`"
    measured = chart_peers.figures()
    for key in chart_peers.ROWS:
        assert all(cell.partition("(")[2].rstrip(")") in drawn for cell in measured[key].values())
