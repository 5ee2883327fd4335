"""Drawing: what stands where in a picture, and its files."""

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from experiments.show.pictures import Bars, Heat, Lines, Picture, Series, apart, as_svg, draw, over_seeds, save


def everything():
    series = [Series(f"method {i}", [1, 2, 3], [i, i + 1, None], is_main=i == 9) for i in range(10)]
    return Picture(
        "A title on cifar100 (embedded digit pairs)",
        "A caption.",
        [
            Lines("lines", "round", "accuracy in %", series),
            Lines("at ticks", "size", "points", [Series("x", [8, 64], [1, -1], [0, -2], [2, 0])], (8, 64), True),
            Bars("bars", "client", "weight", ["on", "off"], [["0"], ["1", "2"]], [[0.5], [0.2, 0.3]], 0.4, "equal"),
            Heat("heat", "j", "i", np.eye(5), [2, 3]),
            Heat("totals", "j", "i", 3 * np.eye(2), rows=("a", "b"), columns=("c", "d"), totals=(3, 12)),
        ],
        2,
    )


def test_over_seeds():
    series = over_seeds("a", [1, 2], [[1.0, 5.0], [3.0, 4.0]], is_main=True)
    assert series == Series("a", [1, 2], [2.0, 4.5], [1.0, 4.0], [3.0, 5.0], True)
    assert over_seeds("a", [1], [[7.0]]) == Series("a", [1], [7.0])


def test_pictures_are_saved_whole_and_alike(tmp_path):
    paths = [tmp_path / "figure.png", tmp_path / "figure.svg"]
    save(everything(), *paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    words = " ".join(ElementTree.parse(paths[1]).getroot().itertext())
    assert all(text in words for text in ("A title on cifar100 (embedded digit pairs)", "A caption.", "method 9"))
    assert everything().digest() in words
    before = [path.read_bytes() for path in paths]
    save(everything(), *paths)
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 2


def test_lines_differ_without_colors_and_have_their_names_beside_them():
    axes = draw(everything()).axes[0]
    looks = [str(line._unscaled_dash_pattern) for line in axes.get_lines()]  # pyright: ignore
    assert len(looks) == 10
    assert all(one != other for one, other in itertools.combinations(looks, 2))
    assert axes.get_lines()[-1].get_color() == "black"
    names = {text.get_text(): text for text in axes.texts}
    assert list(names) == [f"method {i}" for i in range(10)]
    heights = [text.get_position()[1] for text in names.values()]
    assert heights == sorted(heights)
    # The last point that there is.
    assert [text.xy for text in names.values()] == [(2, i + 1) for i in range(10)]
    assert [text.get_color() for text in names.values()] == [line.get_color() for line in axes.get_lines()]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([1.0, 0.0], [0.95, 0.05]),
        ([0.52, 0.1, 0.5], [0.56, 0.1, 0.46]),
    ],
)
def test_names_stand_apart_and_near_their_lines(wanted, found):
    np.testing.assert_allclose(apart(wanted, [0.1] * len(wanted)), found)


def test_names_without_room_overlap_nowhere():
    centers = apart([0.9] * 4, [0.5] * 4)
    np.testing.assert_allclose(centers, [0.25, 0.75, 1.25, 1.75])


def test_bars_lines_and_matrices_stand_where_they_belong():
    figure = draw(everything())
    _, ticks, bars, heat, other = figure.axes[:5]
    assert [label.get_text() for label in ticks.get_xticklabels()] == ["8", "64"]
    assert ticks.get_lines()[0].get_xdata().tolist() == [0, 1]
    assert ticks.get_lines()[1].get_ydata() == [0, 0]
    assert [patch.get_height() for patch in bars.patches] == [0.5, 0.2, 0.3]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["0", "1", "2"]
    assert {text.get_text() for text in bars.texts} == {"on", "off", "equal"}
    np.testing.assert_array_equal(heat.images[0].get_array(), np.eye(5))
    # One scale of grays for all of them.
    assert {(image.norm.vmin, image.norm.vmax) for axes in (heat, other) for image in axes.images} == {(0, 3)}
    assert [patch.get_height() for patch in other.child_axes[0].patches] == [3, 12]


def test_a_mark_has_the_color_of_its_line_and_the_axis_its_least():
    line = Series("a", [1, 2], [60, 80]).with_mark(2, 90)
    axes = draw(Picture("", "", [Lines("", "round", "%", [Series("none", [], []), line], least=50)])).axes[0]
    _, drawn, mark = axes.get_lines()
    assert (mark.get_xdata(), mark.get_ydata(), mark.get_color()) == ([2], [90], drawn.get_color())
    assert axes.get_ylim()[0] == 50
    # One without points keeps its color, and has no name.
    assert drawn.get_color() != axes.get_lines()[0].get_color()
    assert [text.get_text() for text in axes.texts] == ["a"]


def test_a_panel_of_a_page_has_no_title_of_its_own():
    text = as_svg(everything().panels[0])
    assert "accuracy in %" in text
    assert "lines" not in "".join(ElementTree.fromstring(text).itertext()).split()
