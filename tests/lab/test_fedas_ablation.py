"""The FedAS study: records from runs, the page from records, and that nothing is run twice. No run is made here."""

import itertools
import json

import pytest

from experiments.lab.fedas_ablation import steps
from experiments.lab.fedas_ablation.steps import STEPS, AblationRun
from experiments.lab.pages import fedas
from experiments.run import committed
from pfl_jax import InvalidInput

RUN = AblationRun("fashion_mnist", 0.2, STEPS[0], 0)

RECEIVED = [[10.0, 20.0, 40.0], [20.0, 30.0, 60.0], [30.0, 60.0, 90.0]]
TRAINED = [[50.0, None, None], [50.0, 70.0, None], [80.0, 70.0, None]]
COHORTS = [[0], [1], [0]]
SIZES = [1, 2, 5]


def run_folder(folder, rounds=3):
    """Three rounds of three clients with 1, 2 and 5 test examples."""
    folder.mkdir(parents=True)
    config = {
        "options": {"rounds": rounds},
        "test_examples": SIZES,
        "data": {"description": "pictures"},
        "versions": {"pfl_jax": "abc", "jax": "1", "jaxlib": "1", "python": "3", "numpy": "2"},
        "method_version": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        {
            "round": number,
            "received_per_client": received,
            "trained_per_client": trained,
            "cohort": cohort,
            "seconds": 1,
        }
        for number, (received, trained, cohort) in enumerate(zip(RECEIVED, TRAINED, COHORTS, strict=True), start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_the_measures_by_hand(tmp_path):
    record = steps.from_run(RUN, run_folder(tmp_path / "run"))
    assert record["received"]["mean"] == pytest.approx([70 / 3, 110 / 3, 60], abs=1e-4)
    assert record["received"]["pooled"] == [(10 + 40 + 200) / 8, (20 + 60 + 300) / 8, (30 + 120 + 450) / 8]
    assert record["received_of_trained"]["mean"] == [10, 25, 45]
    assert record["received_of_trained"]["pooled"] == pytest.approx([10, 80 / 3, 50], abs=1e-4)
    assert record["trained"]["mean"] == [50, 60, 75]
    assert record["trained"]["pooled"] == pytest.approx([50, 190 / 3, 220 / 3], abs=1e-4)
    # Round 2: client 1 with its trained model, the others with what they received after round 1. What they had before
    # the first round is not known.
    assert record["before_aggregation"]["mean"] == pytest.approx(
        [None, (10 + 70 + 40) / 3, (80 + 30 + 60) / 3], abs=1e-4
    )
    assert record["before_aggregation"]["pooled"] == [None, (10 + 140 + 200) / 8, (80 + 60 + 300) / 8]
    assert record["clients_trained"] == [1, 2, 2]
    assert steps.value(record, "before_aggregation", "pooled", "best") == 55
    assert steps.value(record, "received", "mean", "last") == 60
    assert not any("per_client" in key for key in record)


def test_a_run_without_some_rounds_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="has not every round"):
        steps.from_run(RUN, run_folder(tmp_path / "run", rounds=4))


def test_a_record_of_other_options_or_another_version_does_not_count(tmp_path):
    file, record = tmp_path / "records.jsonl", steps.from_run(RUN, run_folder(tmp_path / "run"))
    committed.write(file, RUN.name, record)
    assert steps.read(RUN, file) == record
    assert steps.read(RUN._replace(seed=1), file) is None
    for name, other in (("command", f"{record['command']} --lr 1"), ("version", 2)):
        committed.write(file, RUN.name, record | {name: other})
        assert steps.read(RUN, file) is None


def made(run, value):
    """A record whose measures are constants apart from each other."""
    curves = {name: value + offset for name, offset in zip(steps.MEASURES, (0.0, 1.0, 2.0, -3.0), strict=True)}
    every = {name: {"mean": [height - 1, height], "pooled": [height, height - 0.5]} for name, height in curves.items()}
    return {"command": run.command, "version": 1, **every}


@pytest.fixture
def study(tmp_path):
    """Fashion-MNIST at participation 0.2: two seeds of all steps, whose steps rise by their number."""
    for seed in (0, 1):
        for number, step in enumerate(STEPS):
            run = AblationRun("fashion_mnist", 0.2, step, seed)
            committed.write(tmp_path / "records.jsonl", run.name, made(run, 60.0 + number * (seed + 1)))
    return fedas.load(tmp_path / "records.jsonl")


def test_the_steps_differ_in_one_choice():
    choices = [AblationRun("fashion_mnist", 1.0, step, 0).cell.request() for step in STEPS]
    differences = []
    for one, other in itertools.pairwise(choices[2:]):
        left, right = ({**vars(each.options), **each.hyper_parameters} for each in (one, other))
        differences.append({name for name in left if left[name] != right[name]})
    assert differences == [
        {"drop_last", "shuffle"},
        {"target", "align_loss"},
        {"reduction"},
        {"first_alignment"},
        # One client after another.
        {"procedure", "devices", "chunk"},
    ]
    assert [step.in_place for step in STEPS] == [False] * 7 + [True]
