"""What is made of a method by functools.partial or by a function of the user's has all that the method has."""

import functools
import sys

import jax
import numpy as np
import pytest
from pages import block, executed
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from experiments.cli.command import main, parse
from experiments.spec.hyper_parameters import unread_by_method
from pfl_jax import InvalidInput, LocalTraining, Settings, methods, simulate
from pfl_jax.base import Privacy
from pfl_jax.methods import make_method, recipes_of
from pfl_jax.methods.factories import hyper_parameters
from pfl_jax.privacy import budgets
from pfl_jax.wrappers.client_privacy import ClientPrivacy

KEY, RECIPE = jax.random.key(0), LocalTraining()


def logged(model, training=RECIPE):
    base = methods.fedavg(model, training)

    def aggregate(key, server, clients, messages, cohort):
        server, clients, _ = base.aggregate(key, server, clients, messages, cohort)
        return server, clients, {"mine": cohort.counts}

    return base._replace(aggregate=aggregate)


def trained_twice(model, training=RECIPE):
    base = methods.fedavg(model, training)

    def local(key, server, client, data):
        return base.local(key, base.local(key, server, client, data).personal, client, data)

    return base._replace(local=local)


def trained_twice_and_said(model, training=RECIPE):
    method = trained_twice(model, training)
    return method._replace(local=method.local, privacy=Privacy(2 * training.epochs, clients=()))


def test_a_method_that_wraps_fedas_can_have_its_recipe():
    factory = executed(block("docs/your-model-and-method.md", "def mild_fedas("))["mild_fedas"]
    values = hyper_parameters(factory)
    assert (values["lr"], values["batch_size"]) == (0.005, 16)
    assert make_method(factory, tiny_model()).work.batch_size == 16


def test_a_method_that_wraps_fedas_without_its_recipe_is_told_with_what_it_trains():
    def bare(model, training=LocalTraining()):
        return methods.fedas(model, training)

    model = tiny_model()
    for make in (bare, functools.partial(make_method, bare), lambda model: methods.fedas(model, LocalTraining())):
        with pytest.warns(UserWarning, match=r"lr 0.01, .*batch_size 50, as .* not with its defaults lr 0.005, .* 16"):
            assert make(model).work.batch_size == 50
    # No warning where somebody said something, or where the method has no recipe of its own.
    make_method(bare, model, lr=0.01)
    bare(model, LocalTraining(batch_size=50, lr=0.01))
    methods.fedas(model)
    methods.fedavg(model, LocalTraining())


DERIVED = [functools.partial(methods.fedavg), functools.partial(methods.fedavg, training=LocalTraining()), logged]

PRIVATE = {"dp_clip": 0.5, "dp_noise": 0.1, "client_clip": 0.5, "client_noise": 0.1}
WRAPPED = {"server_optimizer": "adam", **PRIVATE}
IDS = ["partial", "partial_with_a_recipe", "function"]


@functools.cache
def program(factory):
    """A round with all wrappers, as text: nothing need be compiled to see that two programs are the same."""
    method, data = make_method(factory, tiny_model(), **HYPER_PARAMETERS, **WRAPPED), tiny_federation()
    engine = simulate.build(method, Settings(rounds=1))
    state = jax.eval_shape(engine.init, data, KEY)
    return str(jax.make_jaxpr(lambda data, state: engine.round(data, state, 4)[0])(data, state))


@pytest.mark.parametrize("factory", DERIVED, ids=IDS)
def test_it_takes_the_wrappers_of_what_it_is_made_of(factory):
    assert hyper_parameters(factory).keys() == hyper_parameters(methods.fedavg).keys()
    assert program(factory) == program(methods.fedavg)
    with pytest.raises(InvalidInput, match="lr must not be negative"):
        make_method(factory, tiny_model(), lr=-1.0)


def budgets_of(factory, **values):
    found = budgets(factory, values, Settings(rounds=3), np.full(4, 20), KEY, delta=0.01)
    return [(one.unit, one.clip, one.noise, one.uncovered, None if one.uses is None else [*one.uses]) for one in found]


@pytest.mark.parametrize("factory", DERIVED, ids=IDS)
def test_its_budget_is_that_of_the_method(factory):
    pytest.importorskip("dp_accounting")
    values = {"epochs": 2, **PRIVATE}
    found = budgets_of(factory, **values)
    assert found == budgets_of(methods.fedavg, **values)
    assert [uses for *_, uses in found] == [[2, 4, 6], [1, 2, 3]]


def test_other_local_training_has_no_budget_unless_it_says_so():
    pytest.importorskip("dp_accounting")
    values = {"epochs": 2, "dp_clip": 1.0, "dp_noise": 1.0}
    ((*_, uncovered, uses),) = budgets_of(trained_twice, **values)
    assert (uncovered, uses) == (("whatever the method computes from the examples outside of LocalTraining.fit",), None)
    assert ClientPrivacy not in recipes_of(trained_twice)
    with pytest.raises(InvalidInput, match="trained_twice has no hyper-parameter client_clip"):
        make_method(trained_twice, tiny_model(), client_clip=1.0)
    ((*_, uncovered, uses),) = budgets_of(trained_twice_and_said, **values)
    assert (uncovered, uses) == ((), [4, 8, 12])
    assert ClientPrivacy in recipes_of(trained_twice_and_said)


def test_a_partial_in_a_file_has_help_ranges_and_conditions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    of_fedprox, of_fedpac = "partial(methods.fedprox, mu=0.3)", "partial(methods.fedpac, alignment=False)"
    imports = "from functools import partial\nfrom pfl_jax import methods\n"
    (tmp_path / "mine.py").write_text(f"{imports}prox, aligned = {of_fedprox}, {of_fedpac}\n")
    with pytest.raises(InvalidInput, match="--mu must not be negative"):
        parse("digits", ["--method", "mine.py:prox", "--mu", "-1"])
    request = parse("digits", ["--method", "mine.py:aligned", "--lam", "2"])
    assert unread_by_method("mine.py:aligned", request.hyper_parameters)["lam"] == "with --no-alignment"
    with pytest.raises(SystemExit):
        main("digits", ["--method", "mine.py:prox", "--help"])
    assert "FedProx: FedAvg with a proximal term" in capsys.readouterr().out


def test_every_door_takes_the_recipe_its_fields_or_both():
    model, recipe = tiny_model(), LocalTraining(lr=0.3, batch_size=7)
    made = [
        methods.fedavg(model, recipe),
        methods.fedavg(model, lr=0.3, batch_size=7),
        methods.fedavg(model, LocalTraining(lr=0.3), batch_size=7),
        make_method("fedavg", model, lr=0.3, batch_size=7),
        make_method("fedavg", model, recipe),
        make_method("fedavg", model, training=LocalTraining(lr=0.9, batch_size=7), lr=0.3),
        methods.fedavg(model, lr=lambda index: 0.2 + 0.1 * index, batch_size=7)(1),
        make_method("fedavg", model, lr=lambda index: 0.2 + 0.1 * index, batch_size=7)(1),
    ]
    assert {method.work.batch_size for method in made} == {7}
    first, *others = (
        next(simulate.run(method, tiny_federation(), Settings(rounds=1), KEY)).trained["loss"] for method in made
    )
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-6)
