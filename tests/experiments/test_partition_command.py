"""`python -m experiments.partition` and `--partition FILE`: a run takes exactly the rows of the file."""

import json

import numpy as np
import pytest
from rich.console import Console
from trees import assert_same

from experiments.cli.command import main, parse
from experiments.folder.load import inspect
from experiments.partition import main as partition
from experiments.partition import picture
from experiments.run import build
from experiments.spec.identity import relevant_options
from pfl_jax.data import load, partition_files
from pfl_jax.errors import InvalidInput

DIRICHLET = ["--partition", "dirichlet", "--beta", "0.3", "--num-clients", "6", "--seed", "5"]
RUN = ["--method", "local", "--rounds", "1", "--no-compilation-cache", "--devices", "1"]


@pytest.fixture
def file(tmp_path, monkeypatch, capsys):
    """The file parts.json of six clients in the current folder."""
    monkeypatch.chdir(tmp_path)
    assert partition(["--dataset", "digits", *DIRICHLET, "--to", "parts.json"]) == 0
    assert capsys.readouterr().out == "6 clients of digits (scikit-learn digits) in parts.json\n"
    return tmp_path / "parts.json"


def federation(dataset, words):
    data = build.build_experiment(parse(dataset, words), Console(quiet=True)).data
    # A partition's file does not name the clients.
    return data._replace(client_names=data._field_defaults["client_names"])


@pytest.mark.parametrize("more", [[], ["--val-fraction", "0.2"], ["--shift", "labels"]])
def test_a_run_takes_the_rows_of_the_file(file, more):
    assert_same(
        federation("digits", ["--partition", "parts.json", "--seed", "5", *more]),
        federation("digits", [*DIRICHLET, *more]),
    )


def test_the_file_is_part_of_the_run(file, tmp_path, monkeypatch, capsys):
    words = ["--partition", "parts.json", *RUN]
    assert main("digits", [*words, "--checkpoint-every", "1", "--out", "run"]) == 0
    assert "6 clients with" in (out := capsys.readouterr().out)
    assert "parts.json" in out
    # The same from another folder; the number of clients and the options of partitions are not asked about.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    same = ["--partition", "../parts.json", "--num-clients", "6", "--beta", "7", *RUN]
    assert inspect(parse("digits", same), tmp_path / "run") == "finished"
    assert not relevant_options(parse("digits", same)).keys() & {"num_clients", "beta", "train_size", "s"}
    # Another text is another run.
    content = json.loads(file.read_text())
    content["clients"][0]["train"].pop()
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=r"made with another text of parts\.json"):
        inspect(parse("digits", [*same, "--s", "3"]), tmp_path / "run")
    assert main("digits", ["--resume", "../run", "--rounds", "2"]) == 2
    assert "its --partition: restore that text" in capsys.readouterr().err


def test_a_command_line_knows_the_clients_of_its_file(file):
    assert parse("digits", ["--partition", str(file)]).num_clients == 6
    with pytest.raises(InvalidInput, match=r"parts\.json has 6 clients, leave it out"):
        parse("digits", ["--partition", "parts.json", "--num-clients", "5"])


def test_your_own_data_with_clients_may_have_a_file_too(file, tmp_path):
    """The file has the clients' own rows, or fewer of them, whose column is no input."""
    np.savez("my.npz", x=np.arange(24.0).reshape(12, 2), y=[0, 1] * 6, hospital=[0] * 6 + [1] * 6)
    own = ["--data", "my.npz", "--client-column", "hospital"]
    assert partition(["--dataset", "custom", *own, "--to", "own.json"]) == 0
    assert_same(federation("custom", [*own, "--partition", "own.json"]), federation("custom", own))
    assert parse("custom", [*own, "--partition", "own.json"]).num_clients == 2
    assert main("custom", [*own, "--partition", "parts.json"]) == 2


def test_the_picture_shows_classes_by_clients(file):
    digits = load("digits")
    parts = partition_files.load(file, digits)
    ((_, _, frame, _),) = picture(digits, parts, "parts").panels
    assert frame.shape == (10, 6)
    assert frame.sum().tolist() == [len(rows) for rows in parts.train]
    assert frame.loc[frame.index[3], 2] == (digits.train_y[parts.train[2]] == 3).sum()
    assert partition(["--partition", "parts.json", "--picture", "parts.png"]) == 0
    assert file.with_name("parts.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_exchanged(file):
    assert partition(["--partition", "parts.json", "--npz", "rows.npz", "--leaf", "leaf"]) == 0
    clients = ["--client-column", "client"]
    of_npz, of_leaf = (federation("custom", ["--data", name, *clients]) for name in ("rows.npz", "leaf"))
    assert_same(of_npz, of_leaf)
    own = federation("digits", ["--partition", "parts.json"])
    np.testing.assert_array_equal(of_npz.train_count, own.train_count)
    # A custom's client column is its own: the same partition once more.
    assert partition(["--dataset", "custom", "--data", "leaf", *clients, "--to", "leaf.json"]) == 0
    assert_same(federation("custom", ["--data", "leaf", *clients, "--partition", "leaf.json"]), of_leaf)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--to", "new.json", "--dataset", "emnist", "--source", "embedded", "--partition", "parts.json"],
            "divides digits",
        ),
        (["--flower", "new"], "pip install datasets"),
    ],
)
def test_what_cannot_be_written_is_one_line(words, message, file, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    before = file.read_bytes()
    assert partition(words) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert sorted(path.name for path in file.parent.iterdir()) == ["parts.json"]
    assert file.read_bytes() == before


def test_a_draw_that_had_to_be_completed_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--partition", "dirichlet", "--beta", "0.5", "--num-clients", "200", "--min-size", "1"]
    assert partition([*options, "--to", "many.json"]) == 0
    out, err = capsys.readouterr()
    assert "none of 20 Dirichlet draws" in out + err
    assert "UserWarning" not in out + err
