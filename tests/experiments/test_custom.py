"""`python -m experiments.custom`: a user's own data from the file to the results, and the data's part in a run."""

import json
import shutil

import numpy as np
import pytest
from rich.console import Console
from safetensors import safe_open
from sklearn.datasets import load_wine

from experiments.cli.command import main, parse
from experiments.export import load_run
from experiments.export import main as export
from experiments.run import build, data
from experiments.spec.identity import relevant_options
from lab.results import distill
from pfl_jax import InvalidInput
from pfl_jax.data import Preparation, from_arrays
from pfl_jax.files import load_model

WINE = load_wine()
GROWER = np.array(["north", "river", "hill", "south"])[np.argsort(np.argsort(WINE.data[:, 0])) * 4 // 178]
NATURAL = ["--client-column", "grower", "--normalize"]
RUN = ["--method", "fedper", *NATURAL, "--epochs", "2", "--no-compilation-cache"]


@pytest.fixture
def wine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("my.npz", x=WINE.data, y=WINE.target_names[WINE.target], grower=GROWER)
    return tmp_path / "my.npz"


def read(folder, name):
    return json.loads((folder / name).read_text())


def change(path):
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["x"][0, 0] += 1
    np.savez(path, **arrays)


@pytest.mark.without_f1_auc
def test_natural_clients_from_the_file_to_the_results(wine, capsys, monkeypatch):
    assert main("custom", ["--data", "my.npz", *RUN, "--rounds", "8", "--devices", "1", "--out", "run"]) == 0
    config, summary = read(wine.parent / "run", "config.json"), read(wine.parent / "run", "summary.json")
    assert config["data"]["client_names"] == ["hill", "north", "river", "south"]
    assert config["data"]["class_names"] == ["class_0", "class_1", "class_2"]
    assert (config["options"]["num_clients"], config["options"]["partition"]) == (4, "natural")
    sizes = [int((name == GROWER).sum()) for name in config["data"]["client_names"]]
    together = np.add(config["train_examples"], config["test_examples"])
    np.testing.assert_array_equal(together, sizes)
    assert summary["received_accuracy"] > 85
    assert summary["data_source"] == f"my (npz: {config['options']['data_digest']})"
    assert "have training rows of one class only" not in capsys.readouterr().out

    # A committed file has no path of this machine.
    kept = distill(wine.parent / "run")
    assert kept["config"]["options"]["data"] == "my.npz"
    assert str(wine.parent) not in json.dumps(kept)

    # The run in a notebook, in another folder: what its clients deploy, on their own test rows.
    (wine.parent / "notebooks").mkdir()
    monkeypatch.chdir(wine.parent / "notebooks")
    run = load_run("../run")
    tests = [run.client_data(client) for client in range(4)]
    accuracies = [
        100 * (np.asarray(run.predict(client, test.x)).argmax(1) == test.y).mean() for client, test in enumerate(tests)
    ]
    np.testing.assert_allclose(accuracies, summary["received_per_client"], atol=1e-3)
    assert run.dataset.client_names == ("hill", "north", "river", "south")


def test_widths_of_the_mlp(wine):
    def widths(*words):
        experiment = build.build_experiment(
            parse("custom", ["--data", "my.npz", "--method", "fedavg", *words]), Console(quiet=True)
        )
        backbone = experiment.state_shapes().server["backbone"]
        return [backbone[name]["bias"].shape[0] for name in sorted(backbone)]

    assert widths() == [64, 32]
    assert widths("--hidden", "128", "16", "8") == [128, 16, 8]


def test_what_the_results_depend_on(wine):
    def relevant(*words, dataset="custom"):
        return relevant_options(parse(dataset, words))

    plain = relevant("--data", "my.npz")
    shutil.copy(wine, "copy.npz")
    assert relevant("--data", "copy.npz") == plain
    for words in (("--label", "z"), ("--normalize",), ("--test-fraction", "0.5"), ("--num-clients", "3")):
        assert relevant("--data", "my.npz", *words) != plain
    natural = relevant("--data", "my.npz", *NATURAL)
    assert "num_clients" not in natural
    assert "beta" not in natural
    assert not {"label", "normalize", "data_digest"} & set(relevant(dataset="digits"))
    change(wine)
    assert relevant("--data", "my.npz") != plain
    # A stored run is compared by the digest it has, without its file.
    wine.unlink()
    assert relevant("--data", "my.npz", "--data-digest", plain["data_digest"]) == plain


def test_the_data_say_how_many_clients_there_are(wine, capsys):
    classes = np.where(GROWER == "hill", 1, WINE.target)
    np.savez("my.npz", x=WINE.data.astype(np.uint8), y=classes, grower=GROWER)
    words = ["--data", "my.npz", "--client-column", "grower", "--train-size", "5"]
    request, dataset = data.load_data(parse("custom", words), Console())
    assert "1 of 4 clients have training rows of one class only" in capsys.readouterr().out
    assert request.data_digest == dataset.origin
    assert data.load_data(parse("custom", [*words, "--num-clients", "4"]), Console())[0].num_clients == 4
    # More than the preset's clients is no error before the data has said how many there are.
    with pytest.raises(InvalidInput, match="of 4 clients 1 to 3 can be held out, not 30"):
        build.build_experiment(parse("custom", [*words, "--held-out-clients", "30"]), Console())


def notes(capsys, *words):
    data.load_data(parse("custom", ["--data", "my.csv", *words]), Console(width=1000))
    return [line.removeprefix("Note: ") for line in capsys.readouterr().out.splitlines() if line.startswith("Note")]


def test_test_rows_that_are_training_rows_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = "{0},{1},{2}\n".format
    train = [row(number, number / 4, "ny"[number % 2]) for number in range(20)]
    (tmp_path / "my.csv").write_text("a,b,label\n" + "".join(train))
    # Three of them, one with another label, and one that shares a column.
    test = [train[3], row(8, 2, "n"), row(8, 2, "y"), row(9, 0, "y"), row(50, 0, "n")]
    (tmp_path / "test.csv").write_text("a,b,label\n" + "".join(test))
    for words in ([], ["--normalize"]):
        assert "3 of 5 test rows have the inputs of a training row." in notes(capsys, "--test-data", "test.csv", *words)
    assert not any("training row" in note for note in notes(capsys))


@pytest.mark.without_f1_auc
def test_a_table_as_people_have_it_from_the_file_to_the_exported_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        f"p{number},{'' if number % 7 == 0 else 20 + number % 50},{'fm'[number % 2]},2020-{1 + number % 12:02d}-01,"
        f"{'AB'[number // 60]},{['no', 'yes'][number % 2]}"
        for number in range(120)
    ]
    lines = ["id,age,sex,seen,site,label", *rows, "p120,1,f,2021-01-01,C,no"]
    (tmp_path / "my.csv").write_text("\n".join(lines) + "\n")
    words = ["--data", "my.csv", "--client-column", "site", "--drop", "id", "--time", "seen", "--impute", "median"]
    words += ["--encode", "one_hot", "--normalize", "--min-rows", "2", "--method", "fedavg", "--rounds", "2"]
    assert main("custom", [*words, "--no-compilation-cache", "--out", "run"]) == 0
    assert "Note: 1 of 3 clients have fewer than 2 rows, and are left out" in capsys.readouterr().out
    plain = relevant_options(parse("custom", words))
    for name, other in (("--inputs", "age,sex"), ("--impute", "mean"), ("--encode", "ordinal"), ("--min-rows", "3")):
        assert relevant_options(parse("custom", [*words, name, other])) != plain
    private = [*words, "--client-clip", "1", "--client-noise", "1"]
    (budget,) = build.build_experiment(parse("custom", private), Console()).privacy
    assert budget.uncovered == ("inputs: prepared from the rows of all clients (--normalize, --impute, --encode)",)
    assert export(["run", "--to", "model.safetensors"]) == 0
    with safe_open("model.safetensors", "np") as file:
        prepared = Preparation.from_json(file.metadata()["preparation"])
    dataset = load_run("run").dataset
    assert prepared == dataset.preparation
    assert [column.name for column in prepared.columns] == ["age", "sex"]
    new = {"sex": ["f"], "age": [None]}
    assert prepared(new).shape == (1, 3)
    np.testing.assert_array_equal(load_model("model.safetensors").inputs(new), prepared(new))


def test_classes_are_named_with_their_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    labels = ["1"] * 30 + ["no"] * 20 + ["yes"] * 12 + ["01", "1.0", "Yes"]
    rows = "".join(f"{number},{label}\n" for number, label in enumerate(labels))
    (tmp_path / "my.csv").write_text("a,label\n" + rows)
    assert notes(capsys) == [
        "rows of the 6 classes, the fewest first: 01 (1), 1.0 (1), Yes (1), yes (12), no (20), 1 (30).",
        "3 of 6 classes have one row only.",
    ]


def test_the_digest_of_a_partition_tells_which_rows_are_test_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(
        f"{one % 7},{one},{40 - one},{one % 20},{'AB'[one % 2]},{one // 10 % 2},{one // 20}\n" for one in range(40)
    )
    (tmp_path / "my.csv").write_text("a,first,last,late,site,label,sorted\n" + rows)
    words = ["--data", "my.csv", "--inputs", "a", "--method", "fedavg"]
    # In a file that is sorted by class, the test rows have the same labels however they are found.
    for own, times in ((["--client-column", "site"], ["first", "last"]), (["--label", "sorted"], ["late"])):
        found = {
            more: build.build_experiment(parse("custom", [*words, *own, *more]), Console()).partition_digest
            for more in ((), ("--normalize",), *(("--time", time) for time in times))
        }
        assert found[()] == found["--normalize",]
        assert len(set(found.values())) == 1 + len(times)


def test_the_border_of_normalized_images_is_black():
    x, y = np.random.default_rng(0).integers(100, 256, (40, 4, 4, 3)).astype(np.uint8), np.arange(40) % 2
    of_bytes, of_floats = (from_arrays(one, y, normalize=True) for one in (x, (x / 255).astype(np.float32)))
    black = build.augmentation(of_bytes).black
    assert max(black) < -3
    np.testing.assert_allclose(build.augmentation(of_floats).black, black, rtol=1e-4)
    assert build.augmentation(from_arrays((x / 255).astype(np.float32), y)).black == (0, 0, 0)


def test_notes_on_data(wine, capsys):
    classes = np.where(GROWER == "hill", 1, WINE.target)
    np.savez("my.npz", x=WINE.data.astype(np.uint8), y=classes, grower=GROWER)
    words = ["--data", "my.npz", "--client-column", "grower", "--train-size", "5"]
    request, dataset = build.load_data(parse("custom", words), Console())
    printed = capsys.readouterr().out
    assert "1 of 4 clients have training rows of one class only" in printed
    assert "bytes from 0 to 255" in printed
    assert "--train-size has no effect with --partition natural" in printed
    assert request.data_digest == dataset.origin
    assert build.load_data(parse("custom", [*words, "--num-clients", "4"]), Console())[0].num_clients == 4
    # More than the preset's clients is no error before the data has said how many there are.
    with pytest.raises(InvalidInput, match="of 4 clients 1 to 3 can be held out, not 30"):
        build.build_experiment(parse("custom", [*words, "--held-out-clients", "30"]), Console())
