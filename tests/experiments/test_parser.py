"""The command line of the commands of many runs: every mistake is one line."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.cli import parser
from experiments.show.tables import comma_separated, markdown, page
from pfl_jax.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Options:
    """A command line."""

    paper: str
    number: int = 1
    rounds: parser.Number = None
    method: parser.Names = ()
    out: parser.Folder = None
    again: parser.Switch = False


def parse(words, **options):
    return parser.parse(Options, "experiments.tables", "What it does.", words.split(), **options)


def test_options_and_words_for_the_runs():
    words = "--paper a --lr 0.1 --method b c --size-choices 3 4 --method d b --again --no-augment --out x --s=30"
    own, rest = parse(words, more=True)
    assert (own.paper, own.again, own.out, own.number) == ("a", True, Path("x"), 1)
    assert parser.flat(own.method) == ("b", "c", "d")
    assert rest == ("--lr", "0.1", "--size-choices", "3", "4", "--no-augment", "--s=30")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "missing: --paper; see --help"),
        ("--paper", "--paper needs a value; see --help"),
        ("--paper a --number two", "--number must be a whole number, not 'two'; see --help"),
        ("--paper a --rounds many", "--rounds must be a whole number, not 'many'; see --help"),
        ("--paper a --lr 0.1", "unrecognized arguments: --lr 0.1; see --help"),
    ],
)
def test_mistakes_are_one_line(words, message):
    with pytest.raises(InvalidInput) as error:
        parse(words)
    assert str(error.value) == message


def test_help_names_the_command_and_its_options(capsys):
    with pytest.raises(SystemExit) as ending:
        parse("--help")
    assert not ending.value.code
    text = capsys.readouterr().out
    assert all(word in text for word in ("python -m experiments.tables", "What it does.", "--paper", "--again"))


def test_tables_and_pages(tmp_path):
    assert markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    assert comma_separated([{"a": "x, y", "b": 1}]) == 'a,b\n"x, y",1\n'
    (tmp_path / "page.jinja").write_text("# {{ title }}\n\n\n\n{{ table(['n'], rows, None) }}\n{{ number(none) }}\n\n")
    text = page(tmp_path / "page.jinja", title="A & B", rows=[["1"]], none=None)
    assert text == "# A & B\n\n| n |\n| --- |\n| 1 |\n\n—\n"


def test_names_of_files_fit_on_the_file_systems(tmp_path):
    # Those that fit stay as they are.
    fitting = "digits lr=" + "0" * 245
    assert parser.slug(fitting) == fitting.replace(" ", "-")
    names = {parser.slug(f"{fitting}{end}") for end in ("1", "2", "1ü", "ü" * 300)}
    assert len(names) == 4
    for name in names:
        assert len(name.encode()) <= 255
        assert name.startswith("digits-lr=000")
        (tmp_path / name / "seed-0").mkdir(parents=True)
    assert parser.slug("é" * 300) == parser.slug("é" * 300)
    (tmp_path / parser.slug("é" * 300)).mkdir()
