"""Optimizers of the server: each rule against float64 NumPy, the plain method as a limit, and who takes them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from full_batches import BETA, assert_model, assert_received, run, start_of, train, training_examples
from message_shapes import message_shapes
from problems import tiny_model

from pfl_jax.base import Mean
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.factories import recipes_of
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fedbabu import fedbabu
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.wrappers.server_optimizer import ServerOptimizer, server_optimized

OWN_STEP = {"pfedme"}
"""Methods whose server only takes a mean of parameters too, but with a learning rate that is an option already."""


@pytest.mark.parametrize("factory", [fedavg, pytest.param(fedbabu, marks=pytest.mark.slow)])
def test_sgd_with_rate_one_is_the_plain_method_bit_for_bit(factory):
    plain, stepped = run(factory), run(factory, server_optimizer="sgd", server_lr=1.0)
    chex.assert_trees_all_equal(stepped.state.server.plain, plain.state.server)
    chex.assert_trees_all_equal(stepped.received["loss"], plain.received["loss"])
    # Without an optimizer nothing is wrapped.
    without = run(factory, server_optimizer=None)
    assert jax.tree.structure(without.state.server) == jax.tree.structure(plain.state.server)


def second_moment(rule, v, g):
    return {
        "adam": 0.99 * v + 0.01 * g**2,
        "yogi": v - 0.01 * g**2 * np.sign(v - g**2),
        "adagrad": v + g**2,
    }[rule]


LR, MOMENTUM, TAU = 0.3, 0.6, 0.02


def next_step(rule, m, v, g):
    """Moments after a gradient, and the change of the parameters."""
    m = MOMENTUM * m + (g if rule == "sgd" else (1 - MOMENTUM) * g)
    v = v if rule == "sgd" else second_moment(rule, v, g)
    return m, v, -LR * m / (1 if rule == "sgd" else np.sqrt(v) + TAU)


@pytest.mark.parametrize("rule", ["sgd", "adam", "yogi", "adagrad"])
def test_rules(rule):
    optimizer, params = ServerOptimizer(rule, LR, MOMENTUM, TAU).transformation(), jnp.zeros(3)
    state, m, v = optimizer.init(params), np.zeros(3), np.full(3, TAU**2)
    for scale in (1.0, 0.1, 3.0):
        g = scale * np.array([0.3, -0.01, 0.0])
        m, v, change = next_step(rule, m, v, g)
        update, state = optimizer.update(jnp.float32(g), state, params)
        np.testing.assert_allclose(update, change, rtol=1e-5, atol=1e-7)


def test_rounds_of_fedavg_with_an_adaptive_server():
    w = reference.to_numpy(start_of(fedavg))
    moments = {name: (np.zeros_like(value), np.full_like(value, TAU**2)) for name, value in w.items()}
    for _ in range(3):
        mean = reference.mean(BETA, [train(w, x, y) for x, y in training_examples()])
        for name in w:
            *moments[name], change = next_step("yogi", *moments[name], w[name] - mean[name])
            w[name] = w[name] + change
    options = {"server_optimizer": "yogi", "server_lr": LR, "server_momentum": MOMENTUM, "server_tau": TAU}
    last = run(fedavg, rounds=3, **options)
    assert_model(last.state.server.plain, w)
    assert_received(last, [w] * 3)


@pytest.mark.parametrize(
    ("rule", "lr", "momentum"), [("sgd", 1.0, 0.0), ("adam", 0.01, 0.9), ("yogi", 0.01, 0.9), ("adagrad", 0.01, 0.0)]
)
def test_usual_rates(rule, lr, momentum):
    usual, same = (ServerOptimizer(rule, *given).transformation() for given in ((None, None), (lr, momentum)))
    g, params = jnp.array([0.3, -0.1]), jnp.zeros(2)
    for _ in range(2):
        chex.assert_trees_all_equal(*(one.update(g, one.init(params), params)[0] for one in (usual, same)))


def test_the_methods_are_those_whose_server_only_takes_a_mean_of_parameters():
    params = jax.tree.structure(jax.eval_shape(tiny_model().init, jax.random.key(0)))
    found = set()
    for name in METHODS:
        server, _, message, _ = message_shapes(name)
        if jax.tree.structure(server) == params and isinstance(message, Mean):
            found.add(name)
    # What a new one is derived from may be `averaged`, or it has its own step, as above.
    assert found == {name for name in METHODS if make_method(name, tiny_model()).averaged} | OWN_STEP
    assert found == {name for name, factory in METHODS.items() if ServerOptimizer in recipes_of(factory)} | OWN_STEP


def with_its_own_step(model, training=LocalTraining(), *, server_lr: float = 0.5):
    return fedavg(model, training)


def of_other_models(model, training=LocalTraining()):
    return fedavg(model, training)._replace(predict=model.convolve)


@pytest.mark.parametrize("factory", [with_its_own_step, of_other_models, METHODS["pfedme"]])
def test_an_argument_of_its_own_comes_first(factory):
    assert ServerOptimizer not in recipes_of(factory)


@pytest.mark.parametrize("name", ["scaffold", "fedpac", "fedproto_g", "pfedhn", "fedgh", "fedfomo"])
def test_a_server_that_keeps_more_than_parameters_is_refused(name):
    with pytest.raises(InvalidInput, match="keeps the parameters of a model only"):
        server_optimized(make_method(name, tiny_model()), ServerOptimizer("adam"))
    # Nor is there a second optimizer on top of the first.
    once = server_optimized(make_method("fedavg", tiny_model()), ServerOptimizer("adam"))
    with pytest.raises(InvalidInput, match="keeps the parameters of a model only"):
        server_optimized(once, ServerOptimizer("adam"))
