"""Budgets of differential privacy, against dp-accounting's own accountants; delta, and how often clients take part."""

from typing import Literal

import jax
import numpy as np
import optax
import pytest

from pfl_jax import InvalidInput, Settings, errors
from pfl_jax.engine.cohort import sample_cohort
from pfl_jax.methods import METHODS
from pfl_jax.primitives import LocalTraining
from pfl_jax.privacy import budgets, gaussian_epsilon, gaussian_noise, participations, sampled_epsilon

accounting = pytest.importorskip("dp_accounting")

RELATIONS = accounting.NeighboringRelation


@pytest.mark.parametrize(("noise", "uses", "delta"), [(30.0, 150, 1e-5), (5.0, 30, 1e-4), (1.5, 1, 1e-3)])
def test_gaussian_epsilon_is_that_of_the_accountants(noise, uses, delta):
    event = accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise), uses)
    exact = accounting.pld.PLDAccountant(RELATIONS.REPLACE_SPECIAL).compose(event).get_epsilon(delta)
    bound = accounting.rdp.RdpAccountant(neighboring_relation=RELATIONS.REPLACE_SPECIAL).compose(event)
    found = gaussian_epsilon(noise, uses, delta)
    assert found == pytest.approx(exact, rel=2e-3)
    assert found <= bound.get_epsilon(delta)


def test_noise_for_an_epsilon_is_its_inverse():
    for epsilon in (1.0, 4.0, 8.0):
        assert gaussian_epsilon(gaussian_noise(epsilon, 180, 1e-5), 180, 1e-5) == pytest.approx(epsilon, rel=1e-6)
    with pytest.raises(InvalidInput, match="epsilon must be positive, not 0"):
        gaussian_noise(0.0, 10, 1e-5)
    assert gaussian_epsilon(0.0, 3, 1e-5) == np.inf
    assert gaussian_epsilon(0.0, 0, 1e-5) == 0


def test_sampled_epsilon_halves_the_noise_of_dp_accountings_own_figure():
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=RELATIONS.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(1000, 10, accounting.GaussianDpEvent(1.5))
    own = accountant.compose(accounting.SelfComposedDpEvent(event, 50)).get_epsilon(1e-4)
    assert sampled_epsilon(3.0, 50, 10, 1000, 1e-4) == pytest.approx(own)
    # All clients in every round: a Gaussian mechanism of twice the sensitivity, at least what is exact.
    assert sampled_epsilon(4.0, 20, 10, 10, 1e-3) >= gaussian_epsilon(2.0, 20, 1e-3)


@pytest.mark.parametrize("full_last_round", [True, False])
def test_participations_are_those_of_the_run(full_last_round):
    settings = Settings(rounds=6, participation=0.4, full_last_round=full_last_round, straggler_fraction=0.2)
    counts, key, took_part = np.full(5, 7), jax.random.key(3), np.zeros(5, int)
    found = participations(settings, counts, key)
    for index in range(6):
        size = settings.cohort_size(5, index)
        cohort = sample_cohort(key, np.int32(index), jax.numpy.asarray(counts), size, settings)
        took_part[np.asarray(cohort.clients)] += 1
        assert found[index] == took_part.max()
    np.testing.assert_array_equal(participations(Settings(rounds=3), counts, key), [1, 2, 3])


EXAMPLE = {"dp_clip": 1.0, "dp_noise": 2.0}


def of(factory="fedavg", settings=Settings(rounds=4), counts=(30, 10), delta=None, **values):  # noqa: B008
    return budgets(factory, values, settings, np.array(counts), jax.random.key(0), delta)


def test_budgets_of_examples_and_of_clients():
    assert of() == []
    (example,) = of("fedrep", **EXAMPLE, epochs=2, head_epochs=3)
    np.testing.assert_array_equal(example.uses, [5, 10, 15, 20])
    assert (example.unit, example.delta) == ("example", pytest.approx(0.1 / 40))
    assert example.epsilon(2) == pytest.approx(gaussian_epsilon(2.0, 10, 0.0025))
    assert example.epsilon(0) == 0
    # Fine-tuning before use counts once, whenever that is.
    (tuned,) = of("fedbabu", **EXAMPLE, epochs=2, finetune_epochs=7)
    np.testing.assert_array_equal(tuned.uses, [9, 11, 13, 15])
    both = of("fedper", **EXAMPLE, client_clip=0.5, client_noise=1.0)
    assert [budget.unit for budget in both] == ["example", "client"]
    assert both[1].epsilon(4) == pytest.approx(gaussian_epsilon(1.0, 4, 0.05))
    record = both[1].record(3)
    assert record["epsilon"] == pytest.approx(gaussian_epsilon(1.0, 3, 0.05), rel=1e-5)
    assert (record["clip"], record["noise"], record["uncovered"]) == (0.5, 1.0, [])
    assert "no amplification" in str(both[0])
    assert "number of examples" in str(both[0])
    # Clipping without noise promises nothing.
    assert of(dp_clip=1.0)[0].epsilon(1) == np.inf


def test_secret_cohorts_count_where_they_help():
    many = Settings(rounds=20, participation=0.02)
    (budget,) = of(settings=many, counts=np.full(500, 5), client_clip=1.0, client_noise=4.0)
    assert budget.epsilon(20) == pytest.approx(sampled_epsilon(4.0, 20, 10, 500, 0.1 / 500))
    assert budget.epsilon(20) < gaussian_epsilon(4.0, int(budget.uses[-1]), 0.1 / 500)
    assert "10 of 500 clients without replacement" in budget.sampling(20)
    # Examples stay with their client, whose rounds are known to it.
    (example,) = of(settings=many, counts=np.full(500, 5), **EXAMPLE)
    assert example.cohort is None
    (stragglers,) = of(
        settings=Settings(rounds=20, participation=0.02, straggler_fraction=0.5),
        counts=np.full(500, 5),
        client_clip=1.0,
        client_noise=4.0,
    )
    assert "no amplification" in stragglers.sampling(20)


def test_delta():
    assert of(**EXAMPLE, delta=1 / 40)[0].delta == 1 / 40
    with pytest.raises(InvalidInput, match=r"delta must be at most 1 / 40 = 0.025 for 40 training examples, not 0.03"):
        of(**EXAMPLE, delta=0.03)
    with pytest.raises(InvalidInput, match=r"delta must be at most 1 / 2 = 0.5 for 2 clients, not 0.6"):
        of(client_clip=1.0, client_noise=1.0, delta=0.6)
    with pytest.raises(InvalidInput, match="delta must be above 0 and below 1, not 0"):
        of(**EXAMPLE, delta=0.0)


@pytest.mark.parametrize(
    ("values", "uses"),
    [
        ({"local_steps": 3}, [3, 6]),
        ({"optimizer": optax.adam(1e-3), "epochs": 2}, [2, 4]),
        ({"optimizer": optax.adam(1e-3), "local_steps": 4}, [4, 8]),
        ({"lr": lambda index: 0.1 / (1 + index), "epochs": 2}, [2, 4]),
    ],
    ids=["steps", "optimizer", "both", "schedule"],
)
def test_given_values_take_the_place_of_defaults_that_they_exclude(values, uses):
    example, client = of("fedper", Settings(rounds=2), **EXAMPLE, client_clip=1.0, client_noise=1.0, **values)
    np.testing.assert_array_equal(example.uses, uses)
    np.testing.assert_array_equal(client.uses, [1, 2])
    assert example.unknown == client.unknown == ""


def of_networks(model, training=LocalTraining(), *, depth: int = 1):
    return METHODS["fedavg"](model.with_depth(depth), training)


def keeps_to_itself(model, training=LocalTraining(), *, secret: Literal["nothing", "all", "clients"] = "nothing"):
    method = METHODS["fedavg"](model, training)
    said = {"nothing": method.privacy, "all": None, "clients": method.privacy._replace(clients=None)}
    return method._replace(privacy=said[secret])


def test_a_clip_without_a_budget_is_an_unknown_budget():
    (example,) = of(of_networks, **EXAMPLE)
    assert np.isnan(example.epsilon(2))
    told = (
        "epsilon is unknown: the method cannot be made for a linear model, to ask how it uses the data ('Model' object"
    )
    assert str(example).startswith(f"differential privacy of every example: {told}")
    assert example.spent(2).startswith(told)
    assert example.record(2)["sampling"] == example.spent(2).removeprefix("epsilon is ")
    # Whether a method says it may depend on its options.
    example, client = of(keeps_to_itself, **EXAMPLE, client_clip=1.0, client_noise=1.0, secret="all")
    assert (example.unit, client.unit, client.clip, client.noise) == ("example", "client", 1.0, 1.0)
    unknown = "epsilon is unknown: the method does not say how it uses the data"
    assert example.spent(1) == client.spent(1) == unknown
    example, client = of(keeps_to_itself, **EXAMPLE, client_clip=1.0, client_noise=1.0, secret="clients")
    assert (example.unknown, client.spent(1)) == ("", unknown)


def own_clip(model, training=LocalTraining(), *, client_clip=3.0):
    return METHODS["fedavg"](model, training)


def test_a_clip_of_an_own_method_promises_nothing():
    assert of(own_clip, client_clip=1.0) == []


def test_without_dp_accounting(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(errors.importlib, "import_module", missing)
    assert of() == []
    with pytest.raises(InvalidInput, match="needs Google's dp-accounting: pip install dp-accounting"):
        of(**EXAMPLE)
