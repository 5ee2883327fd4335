"""The weights of stragglers: the method that measures them, and what the page makes of a record."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from experiments.lab.fedas_ablation.measured import fedas_measured
from experiments.lab.fedas_ablation.premise import Run
from experiments.lab.pages import premise
from experiments.run import committed
from pfl_jax import LocalTraining, Settings, methods, run
from pfl_jax.data import client_data
from pfl_jax.primitives import losses, squared_gradient_norms

DATA, TRAINING = tiny_federation(), LocalTraining(**HYPER_PARAMETERS)


def info_of(method):
    (result,) = run(method, DATA, Settings(rounds=1), jax.random.key(0))
    return result.info


def test_it_measures_what_fedas_weighs_by():
    printed = info_of(methods.fedas(tiny_model(), TRAINING))
    found = info_of(fedas_measured(tiny_model(), TRAINING))
    np.testing.assert_allclose(found["example"], printed["trace"], rtol=1e-5)
    np.testing.assert_allclose(found["weights"], printed["weights"], rtol=1e-5)
    released = info_of(methods.fedas(tiny_model(), TRAINING.replace(shuffle=False), reduction="batch_means"))
    found = info_of(fedas_measured(tiny_model(), TRAINING.replace(shuffle=False), weighed_by="batch_means"))
    np.testing.assert_allclose(found["batch_means"], released["trace"], rtol=1e-4)
    np.testing.assert_allclose(found["weights"], released["weights"], rtol=1e-4)
    by_size = info_of(fedas_measured(tiny_model(), TRAINING, weighed_by="size"))
    np.testing.assert_allclose(by_size["weights"], np.asarray(DATA.train_count) / 48, rtol=1e-6)


def test_labels_of_the_model_have_the_trace_of_its_probabilities():
    """At lr 0 all models are alike; over many equal examples the drawn labels have the model's frequencies."""
    data = DATA._replace(train_index=jnp.zeros((4, 4000), jnp.int32), train_count=jnp.full(4, 4000))
    method = fedas_measured(tiny_model(), TRAINING.replace(lr=0.0, epochs=1, batch_size=4000))
    (result,) = run(method, data, Settings(rounds=1), jax.random.key(0))

    one, model = client_data(data, 0, "train"), tiny_model()
    params = {"backbone": result.state.server.backbone, "head": result.state.server.head}
    one = jax.tree.map(lambda leaf: leaf[:1], one)
    shares = jax.nn.softmax(model.apply(params, one.x))[0]
    norms = [
        squared_gradient_norms(losses.negative_log_likelihood(model), params, one._replace(y=jnp.array([label])))[0]
        for label in range(3)
    ]
    np.testing.assert_allclose(result.info["model"], float(jnp.dot(shares, jnp.stack(norms))), rtol=0.1)


RECORD = {
    "round": [2, 4],
    "is_straggler": [False, True, False, True],
    "cohort": [[0, 2], [0, 1, 2, 3]],
    "weights": [[0.5, 0.5], [0.1, 0.2, 0.3, 0.4]],
    "example": [[8.0, 4.0], [1.0, 2.0, 3.0, 4.0]],
    "batch_means": [[1.0, 1.0], [4.0, 3.0, 2.0, 1.0]],
    "model": [[1.0, 3.0], [9.0, 1.0, 9.0, 1.0]],
    "received": [90.0, 50.0, 80.0, 40.0],
    "trained": [95.0, 60.0, 85.0, 50.0],
}


def test_the_page_compares_online_clients_with_stragglers():
    found = {Run("cifar10", "example"): RECORD, Run("cifar10", "size"): RECORD}
    values = premise.values(found)
    assert values["traces"][0] == [
        "cifar10",
        premise.WORDS["example"],
        "2",
        "3",
        "0.200",
        "0.300",
        "0 of 1",
        "reversed",
    ]
    assert [row[-2:] for row in values["traces"][1:]] == [["1 of 1", "holds"]] * 2
    assert values["accuracies"][1] == ["cifar10", "number of examples", "85.0", "45.0", "90.0", "55.0"]
    assert premise.by_group(RECORD, "example") == {"online": [6.0, 2.0], "straggler": [None, 3.0]}
    traces, ratios = premise.picture(found).panels
    assert [(one.label, one.x, one.y) for one in traces.series] == [
        *(("online", [2, 4], [6.0, 2.0]), ("straggler", [4], [3.0]))
    ]
    assert [one.y for one in ratios.series] == [[1.5], [pytest.approx(2 / 3)], [pytest.approx(1 / 9)]]


def test_the_part_of_the_page_is_there_once_there_are_runs(tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/fedas.md"
    page.write_text("before\n<!-- made: premise -->\n<!-- end of made -->\nafter\n")
    assert premise.made(tmp_path).texts == {page: page.read_text()}
    for weighed_by in ("example", "size"):
        committed.write(tmp_path / "results/premise.jsonl", f"cifar10-{weighed_by}", RECORD)
    texts, pictures = premise.made(tmp_path)
    assert texts[page].startswith("before\n<!-- made: premise -->\n## Do stragglers weigh less?\n")
    assert "| cifar10 | number of examples | 85.0 | 45.0 | 90.0 | 55.0 |" in texts[page]
    assert [path.name for path in pictures] == ["fedas-premise.svg"]
