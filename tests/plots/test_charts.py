"""Charts as data: aligning, thinning, rounding, and pages that nothing can break out of."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.plots.align import aligned, averaged, thinned
from paceline.plots.chart import Axis, Chart, Series, rounded
from paceline.plots.document import Section, document
from paceline.plots.page import asset, script_json
from paceline.plots.svg import to_svg
from tests.page_data import page_data


def test_aligned_puts_curves_on_one_axis():
    xs, (one, two) = aligned(
        [(np.array([1.0, 3.0]), np.array([10.0, 30.0])), (np.array([2.0]), np.array([5.0]))]
    )
    assert xs.tolist() == [1, 2, 3] and rounded(one) == [10, None, 30] and rounded(two) == [None, 5, None]


@pytest.mark.parametrize("count", [10, 999, 1000, 1001, 54_321])
def test_thinned_keeps_ends_and_outliers(count):
    xs = np.arange(count, dtype=float)
    ys = np.sin(xs / 50)
    ys[count // 3], ys[count // 2] = 100.0, -100.0
    ys[1] = np.nan
    kept_xs, kept = thinned(xs, ys, 200)
    assert len(kept) <= max(200, 10) and kept.max() == 100 and kept.min() == -100
    assert kept_xs[0] == 0 and kept_xs[-1] == count - 1 and (np.diff(kept_xs) > 0).all()
    assert np.isfinite(kept).all() and (ys[kept_xs.astype(int)] == kept).all(), "no value is made up"


def test_averaged_keeps_the_sums_of_stacked_curves():
    columns = {"a": np.arange(1000.0), "b": np.full(1000, 3.0)}
    xs, means = averaged(np.arange(1000.0), columns, 10)
    assert len(xs) == 10 and means["b"].tolist() == [3.0] * 10
    assert means["a"].mean() == pytest.approx(columns["a"].mean())


def test_rounded_shortens_numbers_and_keeps_none():
    assert rounded([1 / 3, None, float("nan"), float("inf"), 12345678.9, -1e-12, 0]) == [
        0.333333, None, None, None, 12345700, -1e-12, 0,
    ]  # fmt: skip
    assert rounded([1.0, 2.0]) == [1, 2] and isinstance(rounded([1.0])[0], int) and rounded([]) == []
    assert rounded([3e300, 1e-300]) == [3e300, 1e-300]


def test_script_json_cannot_end_the_data_block():
    text = "</script><!--<script>&\u2028"
    shown = script_json({"text": text})
    assert not set(shown) & set("<>&") and json.loads(shown) == {"text": text}
    with pytest.raises(ValueError):
        script_json(float("nan"))


def test_document_has_its_charts_and_only_our_scripts():
    chart = Chart("c", "<b>t</b>", Axis("x", "s"), Axis("y"), [1, 2], [Series("<i>", [1.0, None])])
    empty = Chart("e", "e", Axis("x"), Axis("y"), [1], [Series("s", [None])])
    page = document("<u>title</u>", "sub", [Section("s", "S", charts=[chart, empty], text="<pre>")])
    (section,) = page_data(page)["sections"]
    assert [c["id"] for c in section["charts"]] == ["c"], "a chart without a value is left out"
    assert "<u>" not in page and "<b>t" not in page and "<i>" not in page
    assert page.count("<script>") == 3 and "script-src &#x27;sha256-" in page
    assert "connect-src &#x27;none&#x27;" in page, "it makes no requests"


def test_uplot_is_small_and_has_its_licence():
    assert len(asset("uPlot.iife.min.js")) < 100_000
    assert "MIT" in asset("uPlot.LICENSE") and "v1.6.32" in asset("uPlot.iife.min.js")[:100]


def test_to_svg_draws_every_curve():
    series = [Series("one", [1.0, 2.0, None, 3.0]), Series("<two>", [3.0, None, None, 1.0], line=False)]
    chart = Chart("c", "a < b", Axis("x", log=True), Axis("y", "s"), [1, 2, 3, 4], series, level=1.0)
    picture = to_svg(chart)
    ElementTree.fromstring(picture)
    assert picture.count("<polyline") == 1 and picture.count("<circle") == 2 and "a &lt; b" in picture
    assert len(re.search(r'points="([^"]*)"', picture)[1].split()) == 3 and "y (s)" in picture


def test_to_svg_stacks_bars():
    series = [Series("rollout", [2.0, 1.0]), Series("learn", [1.0, 1.0])]
    chart = Chart(
        "c", "t", Axis("setting"), Axis("time", "s"), [0, 1], series, stacked=True, names=["plain", "k"]
    )
    picture = to_svg(chart)
    ElementTree.fromstring(picture)
    widths = [float(w) for w in re.findall(r'<rect x="[^"]*" y="[^"]*" width="([^"]*)"', picture)]
    assert widths == pytest.approx([2 * widths[1], widths[1], widths[1], widths[1]], rel=0.01)
