"""Pages of docs/ with tables that are made from the committed results."""

import pytest

from experiments.lab.pages import privacy, robustness
from experiments.lab.pages.marks import MARKS, figure_file, replaced
from experiments.run.committed import Library
from experiments.show.pictures import Lines

PAGES = {privacy: 1, robustness: 3}
"""Module -> tables of its page."""


@pytest.mark.parametrize("module", PAGES)
def test_the_page_has_the_committed_results(module):
    page = module.PAGE.read_text()
    # Otherwise run the module.
    assert replaced(page, module.measured(Library())) == page
    shown = module.drawn(Library())
    assert shown.digest() in figure_file(module.PAGE).read_text()
    assert all(isinstance(panel, Lines) for panel in shown.panels)
    assert shown.caption.endswith("; no point: not finished.")


@pytest.mark.parametrize("module", PAGES)
def test_the_command_says_whether_the_page_is_up_to_date(module, monkeypatch, tmp_path, capsys):
    page = tmp_path / module.PAGE.name
    page.write_text("".join(["before\n", *MARKS, "after\n"]))
    monkeypatch.setattr(module, "PAGE", page)
    assert module.main(["--check"]) == 2
    assert f"{page.name} or its figure is not what results/ gives" in capsys.readouterr().err
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    for marks in ("", MARKS[0], MARKS[1]):
        page.with_name("marks").write_text(marks)
        monkeypatch.setattr(module, "PAGE", page.with_name("marks"))
        assert module.main([]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "error: marks has no lines <!-- measured --> and <!-- end of measured -->"
    monkeypatch.setattr(module, "PAGE", page)
    drawing = figure_file(page)
    drawing.write_text(drawing.read_text().replace(module.drawn(Library()).digest(), "of other numbers"))
    assert module.main(["--check"]) == 2
    assert page.read_text().count("| `fedavg` |") == PAGES[module]
