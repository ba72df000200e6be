"""The picture of the layer's timings shows what was run, legibly, and nothing else."""

from itertools import combinations

import pytest

plot = pytest.importorskip("benchmarks.lib.plot", reason="draws with matplotlib")


def line(case: str, layer: str, ms: float, core: str = "fla") -> dict:
    return {
        "case": case, "core": core, "layer": layer, "saved": 100 * ms, "hidden": 8, "heads": [1, 2],
        "forward_backward": {"median": ms}, "environment": {"gpu": "none"},
    }  # fmt: skip


RECORDS = [
    line("long", "upstream", 20.0),
    line("long", "ours", 13.0),
    line("long", "ours-bf16", 13.1),
    line("short", "upstream", 0.2),
    line("short", "ours-bf16", 9.9),
    line("short", "ours-bf16", 0.1),  # measured again: the later line counts
    {"case": "long", "core": "fla", "floor": {"total": [12.0, 13.0]}},
]


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    return plot.draw(RECORDS, tmp_path_factory.mktemp("plot") / "layer.png")


def test_a_case_that_was_not_run_has_no_bar_and_no_figure(figure):
    for axis, unit in zip(figure.axes, (1, 100), strict=True):
        widths = [bar.get_width() / unit for bar in axis.patches]
        assert widths == pytest.approx([20.0, 13.0, 13.1, 0.2, 0.1])
    told = ",".join(t.get_text() for t in figure.axes[0].texts)
    assert told == " 20.0, 13.0, 13.1, 0.2, 0.1"


def test_no_label_lies_on_another(figure):
    for axis in figure.axes:
        labels = [*axis.texts, *axis.get_yticklabels()]
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_ours_beside_megatron_cores_is_a_share_of_it(tmp_path):
    rows = [
        plot.Beside("one", "long", (10.0, 20.0), (3000.0, 4000.0)),
        plot.Beside("one", "short", (0.5, 0.4), (1.0, 2.0)),
        plot.Beside("two", "long", (123.4, 1234.0), (9.0, 10.0)),
    ]
    (axis,) = plot.draw_beside(rows, tmp_path / "beside.png").axes
    widths = [bar.get_width() for bar in axis.patches]
    assert widths == pytest.approx([0.5, 0.75, 1.25, 0.5, 0.1, 0.9])
    texts = [text.get_text() for text in axis.texts]
    assert texts[:3] == ["one", "long", "10.0 of 20.0 ms, 3,000 of 4,000 MiB"]
    assert texts[3:5] == ["time 0.50", "memory 0.75"] and "123 of 1,234 ms" in texts[-3]
    assert axis.get_xlim()[1] > 1.25  # a bar that is longer than megatron-core's is seen whole
    boxes = [text.get_window_extent() for text in axis.texts]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
