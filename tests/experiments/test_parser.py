"""The parser of all commands: every mistake is one line, every option is in one group of the help."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from experiments.cli import parser
from experiments.cli.command import main
from experiments.cli.parser import MAX_COLUMNS
from experiments.folder.run_folder import slug
from experiments.show.tables import Table, markdown, page
from experiments.spec.hyper_parameters import entries, method_options
from experiments.spec.option_notes import Argument, flag
from experiments.spec.options import GROUPS, Options, names_of
from experiments.spec.spec import SELECTION
from pfl_jax.validation import Count


@dataclass(frozen=True, kw_only=True)
class Words:
    """A command line."""

    paper: str
    """Which paper, in
    two lines of 100 %."""
    number: int | Literal["auto"] = 1
    rounds: Count | None = None
    sizes: tuple[int, ...] | None = None
    method: parser.Names = ()
    out: parser.Folder = None
    again: bool = False
    shuffle: bool = True
    words: parser.Hidden[tuple[str, ...]] = ()
    runs: Annotated[tuple[Path, ...], Argument("positional", "RUN")] = ()


def parse(words, **options):
    return parser.parse(Words, "experiments.tables", "What it does.", words.split(), **options)


def test_options_and_words_for_the_runs():
    words = "a/b --paper=a --lr -0.1 --size_choices 3 4 --method d b --again --no-augment --out x --s=30 --method b c"
    own, rest = parse(words, more=True)
    assert (own.paper, own.again, own.out, own.number, own.runs) == ("a", True, Path("x"), 1, (Path("a/b"),))
    assert own.method == ("d", "b", "c")
    assert rest == ("--lr", "-0.1", "--size_choices", "3", "4", "--no-augment", "--s=30")
    # The last one counts, and words with underscores are the same.
    own, _ = parse("--paper a --sizes 1 2 --sizes 3 --no_shuffle --number=auto --rounds None")
    assert (own.sizes, own.shuffle, own.number, own.rounds, own.runs) == ((3,), False, "auto", None, ())
    assert parse("--paper a --sizes None")[0].sizes is None


def test_docstrings_have_the_texts():
    def factory():
        """First line.

        Args:
            one: its text
                goes on: here.
            two, three (int): both.

        Returns:
            four: no argument.
        """

    assert parser.summary(factory) == "First line."
    assert entries(factory, "Args") == {"one": "its text goes on: here.", "two": "both.", "three": "both."}
    assert parser.field_texts(Words) == {"paper": "Which paper, in two lines of 100 %."}
    assert parser.summary(lambda: None) == ""


def test_tables_and_pages(tmp_path):
    assert markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    # A bar or a line break in a name ends no cell.
    assert markdown(["a|b"], [["`x|y`\nz"]]) == "| a\\|b |\n| --- |\n| `x\\|y` z |\n"
    assert Table("", ["a", "b"], [["x, y", 1]]).text(".csv") == 'a,b\n"x, y",1\n'
    (tmp_path / "page.jinja").write_text("# {{ title }}\n\n\n\n{{ table(['n'], rows, None) }}\n{{ number(none) }}\n\n")
    text = page(tmp_path / "page.jinja", title="A & B", rows=[["1"]], none=None)
    assert text == "# A & B\n\n| n |\n| --- |\n| 1 |\n\n—\n"


def test_names_of_files_fit_on_the_file_systems(tmp_path):
    # Those that fit stay as they are.
    fitting = "digits lr=" + "0" * 245
    assert slug(fitting) == fitting.replace(" ", "-")
    names = {slug(f"{fitting}{end}") for end in ("1", "2", "1ü", "ü" * 300)}
    assert len(names) == 4
    for name in names:
        assert len(name.encode()) <= 255
        assert name.startswith("digits-lr=000")
        (tmp_path / name / "seed-0").mkdir(parents=True)
    assert slug("é" * 300) == slug("é" * 300)
    (tmp_path / slug("é" * 300)).mkdir()


@pytest.mark.parametrize("method", ["local", "fedpac", "fedavg_ft", "pfedhn"])
def test_help_shows_the_methods_own_options_first_and_then_groups(capsys, monkeypatch, method):
    columns = {"local": "80", "fedpac": "200"}.get(method, "100")
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ending:
        main("cifar10", ["--method", method, "--preset", "fedas", "--participation", "0.4", "--help"])
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= min(int(columns), MAX_COLUMNS)
    assert "settings of the fedas preset" in " ".join(text.split())
    assert re.findall(r"^(\w+) options:$", text, re.MULTILINE) == [method, *GROUPS]
    # The defaults are the preset's.
    assert re.search(r"--rounds INT\s+Communication rounds\. \(default: 40\)", text)
    # Every option once, in the order of the groups.
    shown = re.findall(r"^  (--[a-z][a-z0-9-]*)", text, re.MULTILINE)
    shared = [*SELECTION, *(name for group in GROUPS.values() for name in names_of(group))]
    every = {field.name for field in dataclasses.fields(Options)} | method_options(method).keys()
    own = [name for name in method_options(method) if name not in shared]
    assert shown == [flag(name) for name in [*own, *shared] if name in every]
