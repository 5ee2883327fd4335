"""Every method with every task: it runs, or says in one line why it has no meaning."""

import re

import jax
import numpy as np
import pytest
from method_tables import refusal
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import InvalidInput, Settings, simulate, tasks
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, fedas, make_method
from pfl_jax.primitives import deployed_loss, fisher_trace, negative_log_likelihood
from pfl_jax.testing import Subject, conformance

OTHERS = {name: task for name, task in tasks.TASKS.items() if name != "classification"}

KINDS = ("fedavg", "fedper", "ditto", "scaffold", "apfl", "fedas")
"""A shared model, a personal head, a personal model, corrections of gradients, a mixture, and weights by the server."""

FAST = {("fedper", "next_symbol")}
"""What runs by default: compiling takes nearly all of the time."""


@pytest.fixture(
    params=[
        pytest.param((name, task), marks=[] if (name, task) in FAST else pytest.mark.slow, id=f"{name}-{task}")
        for name in KINDS
        for task in OTHERS
    ],
    scope="module",
)
def subject(request):
    name, task = request.param
    return Subject(METHODS[name], task=OTHERS[task])


ANY_TASK = [name for name in conformance.CHECKS if name not in ("absent", "vmap", "devices", "test_set")]
"""Checks that see a task; the others compile programs of their own."""


@pytest.mark.parametrize("check", ANY_TASK)
def test_a_method_conforms_with_any_task(subject, check):
    conformance.CHECKS[check](subject)


TRACED = ("fedala", "moon", "fedcp", "hypcluster")
"""What is traced by default: methods with losses of their own."""


@pytest.mark.parametrize("task", OTHERS)
@pytest.mark.parametrize(
    "name", [name if name in TRACED else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_method_runs_or_is_refused(name, task):
    if why := refusal(name, OTHERS[task]):
        assert re.fullmatch(rf"{name} is for .*{task}.*", why)
        return
    data, method = tiny_federation(task=OTHERS[task]), make_method(name, tiny_model(OTHERS[task]), **HYPER_PARAMETERS)
    engine = simulate.build(method, Settings(rounds=1))

    def rounds(data, key):
        state, outcome = engine.round(data, engine.init(data, key), 3)
        return state, outcome, engine.evaluate(data, state)

    state, _, scores = jax.eval_shape(rounds, data, jax.random.key(0))
    assert scores.by_name.keys() == {one.name for one in OTHERS[task].scores} == state.trained.by_name.keys()


def test_choices_without_a_meaning_are_refused():
    for values in ({"target": "class_mean"}, {"target": "global_class_mean"}, {"align_loss": "class_sum"}):
        with pytest.raises(InvalidInput, match="choose example and mean"):
            fedas(tiny_model(tasks.REGRESSION), **values)
        fedas(tiny_model(tasks.REGRESSION), alignment=False, **values)


@pytest.mark.parametrize("task", [pytest.param("regression", marks=pytest.mark.slow), "next_symbol"])
def test_the_trace_of_fedas_is_that_of_the_likelihood(task):
    """Which is neither the squared error nor the mean over symbols, the losses."""
    model, data = tiny_model(OTHERS[task]), tiny_federation(task=OTHERS[task])
    (result,) = simulate.run(METHODS["fedas"](model), data, Settings(rounds=1), jax.random.key(0))
    params = {"backbone": result.state.clients.backbone, "head": result.state.clients.head}
    losses, traces = (negative_log_likelihood(model), deployed_loss(model)), jax.jit(fisher_trace, static_argnums=0)
    for client, trace in enumerate(result.info["trace"]):
        own = jax.tree.map(lambda leaf, client=client: leaf[client], params)
        examples = client_data(data, client, "train")
        want, other = (traces(loss, own, examples) for loss in losses)
        np.testing.assert_allclose(trace, want, rtol=1e-4)
        assert abs(want / other - 1) > 0.1


def test_flipped_labels_are_for_classes():
    model, data = tiny_model(tasks.REGRESSION), tiny_federation(task=tasks.REGRESSION)
    settings = Settings(rounds=1, attack="labels", attackers=0.5)
    with pytest.raises(InvalidInput, match="attack labels is for classification, and the model's task is regression"):
        next(simulate.run(METHODS["fedavg"](model), data, settings, jax.random.key(0)))


def test_a_state_is_of_its_task():
    data, key = tiny_federation(task=tasks.MULTI_LABEL), jax.random.key(0)
    with_loss = tasks.MULTI_LABEL._replace(scores=tasks.MULTI_LABEL.scores[2:])
    first, other = (
        METHODS["fedavg"](tiny_model(tasks.MULTI_LABEL)._replace(task=task)) for task in (tasks.MULTI_LABEL, with_loss)
    )
    state = simulate.build(first, Settings(rounds=1)).init(data, key)
    with pytest.raises(InvalidInput, match=r"trained.*auc.*here nothing"):
        next(simulate.run(other, data, Settings(rounds=1), key, state=state))
