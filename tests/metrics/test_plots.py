"""What the pictures show, read back from the figures."""

import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from metrics import bootstrap, build, by_group, classification, plots

from .evaluations import evaluation


def drawn(figure, tmp_path):
    """The axes of a figure that can be written."""
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "figure.png", dpi=40)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    return figure.axes[0]


def test_reliability_diagram(tmp_path):
    generator = np.random.default_rng(0)
    confidence, right = generator.random(200), generator.random(200) < 0.6
    bins = np.minimum(np.ceil(confidence * 5).astype(int) - 1, 4)
    sums = {name: np.zeros((200, 5)) for name in ("bin_labels", "bin_confidence", "bin_correct")}
    for name, values in zip(sums, (np.ones(200), confidence, right), strict=True):
        sums[name][np.arange(200), bins] = values
    axes = drawn(plots.reliability_diagram(sums), tmp_path)
    gaps = [abs((confidence - right)[bins == place].sum()) / 200 for place in range(5)]
    assert axes.get_title() == f"expected calibration error {sum(gaps):.3f}"
    x, y = axes.lines[1].get_data()
    assert y.tolist() == pytest.approx([right[bins == place].mean() for place in range(5)])
    assert "nan" in drawn(plots.reliability_diagram({name: np.zeros((0, 5)) for name in sums}), tmp_path).get_title()
    assert len(x) == 5


def test_group_bars_with_intervals(tmp_path):
    generator = np.random.default_rng(0)
    labels, ids = generator.integers(0, 2, (2, 60))
    groups = ["de", "en", "fr"] * 20
    metric = build(by_group(classification(2), groups), by_group(bootstrap(classification(2), n=100), groups))
    scores = metric(evaluation(ids, labels))
    axes = drawn(plots.group_bars(scores, "accuracy"), tmp_path)
    assert [bar.get_height() for bar in axes.patches] == [scores[f"accuracy/{name}"] for name in ("de", "en", "fr")]
    segments = axes.collections[0].get_segments()
    assert segments[1][:, 1].tolist() == pytest.approx([scores["accuracy_low/en"], scores["accuracy_high/en"]])
    drawn(plots.group_bars({"f1/x": 0.5}, "f1"), tmp_path)
    with pytest.raises(ValueError, match="must have the key 'f2' for at least one group"):
        plots.group_bars(scores, "f2")


def test_plots_do_not_touch_pyplot():
    def figures():
        return sys.modules["matplotlib.pyplot"].get_fignums() if "matplotlib.pyplot" in sys.modules else []

    before = figures()
    plots.group_bars({"f1/x": 0.5}, "f1")
    assert figures() == before


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'lossfns\[plots\]'"):
        plots.group_bars({"f1/x": 0.5}, "f1")
