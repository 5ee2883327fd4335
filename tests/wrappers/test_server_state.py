"""Wrappers of the server: a state beside the method's own, an optimizer, other statistics than the mean."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from full_batches import BETA, SIZES, assert_model, assert_received, run, start_of, train, training_examples
from message_shapes import message_shapes
from pages import block, executed
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import InvalidInput, LocalResult, Mean
from pfl_jax.engine import simulate
from pfl_jax.messages import downloaded, join, split
from pfl_jax.methods import METHODS, fedavg, fedbabu, feddbe, fedpac, fedper, make_method, recipes_of
from pfl_jax.methods.fedpac import FedPACMessage
from pfl_jax.primitives import LocalTraining
from pfl_jax.wrappers import with_server_state
from pfl_jax.wrappers.client_privacy import ClientPrivacy
from pfl_jax.wrappers.server_mean import ServerMean, robust
from pfl_jax.wrappers.server_optimizer import ServerOptimizer, server_optimized

KEY = jax.random.key(0)

momentum_fedavg = executed(block("docs/your-model-and-method.md", "with_server_state"))["momentum_fedavg"]


def counting(method):
    return with_server_state(method, lambda server: jnp.zeros((), jnp.int32), lambda rounds, _, new: (new, rounds + 1))


def counted_momentum(model, training=LocalTraining()):
    return counting(momentum_fedavg(model, training))


def counted_fedper(model, training=LocalTraining()):
    return counting(fedper(model, training))


def test_momentum_is_that_of_the_servers_sgd():
    mine, built_in = run(momentum_fedavg, 3), run(fedavg, 3, server_optimizer="sgd", server_momentum=0.9)
    chex.assert_trees_all_close(mine.state.server.plain, built_in.state.server.plain, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(mine.received["loss"], built_in.received["loss"], rtol=1e-5)


def test_a_chain_keeps_every_state():
    once, twice = run(momentum_fedavg, 3), run(counted_momentum, 3)
    assert int(twice.state.server.extra) == 3
    chex.assert_trees_all_equal(twice.state.server.plain, once.state.server)


@pytest.mark.parametrize("factory", [fedpac, feddbe])
def test_clients_see_the_plain_server(factory):
    plain = factory(tiny_model(), LocalTraining())
    method, server = counting(plain), jax.eval_shape(plain.init_server, KEY)
    assert method.privacy == plain.privacy
    assert method.predict is plain.predict
    extended = jax.eval_shape(method.init_server, KEY)
    client = object()
    assert extended.plain == server
    assert downloaded(method, extended, client) == downloaded(plain, server, client)


def test_it_is_no_mean_of_parameters_any_more():
    assert fedavg(tiny_model()).server_is_mean
    assert not momentum_fedavg(tiny_model()).server_is_mean
    assert ClientPrivacy in recipes_of(momentum_fedavg)


@pytest.mark.parametrize(
    ("factory", "values"),
    [
        pytest.param(momentum_fedavg, {"compress": "sign"}, marks=pytest.mark.slow),
        (counted_fedper, {"client_clip": 0.5}),
        (counted_fedper, {"server_mean": "median"}),
    ],
)
def test_other_wrappers_go_around_it(factory, values):
    """The plain method with the same wrapper, as far as the server has it."""
    model, settings, data = tiny_model(), simulate.Settings(rounds=1), tiny_federation()
    inside = {momentum_fedavg: "fedavg", counted_fedper: "fedper"}[factory]
    states = []
    for name in (factory, inside):
        engine = simulate.build(make_method(name, model, **HYPER_PARAMETERS, **values), settings).jit()
        state = engine.init(data, KEY)
        states.append(engine.round(data, state, 4)[0])
    # Momentum is not seen in the first round.
    chex.assert_trees_all_close(states[0].server.plain, states[1].server, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(states[0].clients, states[1].clients, rtol=1e-5, atol=1e-6)


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
    return {"adam": 0.99 * v + 0.01 * g**2, "yogi": v - 0.01 * g**2 * np.sign(v - g**2), "adagrad": v + g**2}[rule]


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


@pytest.mark.parametrize(
    ("rule", "lr", "momentum"), [("sgd", 1.0, 0.0), ("adam", 0.01, 0.9), ("yogi", 0.01, 0.9), ("adagrad", 0.01, 0.0)]
)
def test_defaults_of_the_rules(rule, lr, momentum):
    found = []
    for recipe in (ServerOptimizer(rule), ServerOptimizer(rule, lr, momentum, 1e-3)):
        optimizer, state = recipe.transformation(), recipe.transformation().init(jnp.zeros(3))
        for scale in (1.0, 3.0):
            update, state = optimizer.update(scale * jnp.array([0.3, -0.01, 0.0]), state, jnp.zeros(3))
        found.append(update)
    np.testing.assert_array_equal(*found)


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


def test_the_methods_are_those_whose_server_only_takes_a_mean_of_parameters():
    params = jax.tree.structure(jax.eval_shape(tiny_model().init, jax.random.key(0)))
    found = set()
    for name in METHODS:
        server, _, message, _ = message_shapes(name)
        if jax.tree.structure(server) == params and isinstance(message, Mean):
            found.add(name)
    # What a new one is derived from may be `server_is_mean`, or it has its own step, as above.
    assert found == {name for name in METHODS if make_method(name, tiny_model()).server_is_mean} | OWN_STEP
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


MEDIAN = ServerMean("median")


def test_the_weighted_mean_is_the_method_itself():
    method = make_method("fedpac", tiny_model())
    assert robust(method, ServerMean("mean")) is method
    assert robust(method, ServerMean("trimmed:0")) is method
    assert robust(method, ServerMean()) is method


def test_rounds_of_fedavg_with_a_median():
    w = reference.to_numpy(start_of(fedavg))
    for _ in range(2):
        clients = [train(w, x, y) for x, y in training_examples()]
        for name in w:
            stacked = np.concatenate(
                [np.repeat(one[name][None], size, 0) for one, size in zip(clients, SIZES, strict=True)]
            )
            w[name] = np.median(stacked, axis=0)
    last = run(fedavg, server_mean="median")
    assert_model(last.state.server, w)
    assert_received(last, [w] * 3)
    # It is not the mean.
    mean = reference.mean(BETA, clients)
    assert max(np.abs(w[name] - mean[name]).max() for name in w) > 1e-2


def test_each_mean_of_a_message_has_its_own_statistic():
    """Such as FedPAC's backbones and class means, whose weights are those of the classes; heads stay single."""
    method, draw = make_method("fedpac", tiny_model()), np.random.default_rng(0)
    backbone, head, means = (draw.normal(size=shape).astype(np.float32) for shape in ((4, 3), (4, 2), (4, 2, 3)))
    sizes, counts = np.float32([9, 20, 14, 5]), np.float32([[3, 6], [20, 0], [7, 7], [2, 3]])
    head[2] = np.nan

    @jax.jit
    def received(present):
        messages = FedPACMessage(Mean({"w": backbone}, sizes), head, Mean(means, counts), ())
        sends = robust(method._replace(local=lambda *message: LocalResult((), FedPACMessage(*message), ())), MEDIAN)
        sees = robust(method._replace(aggregate=lambda *arguments: arguments[3]), MEDIAN)
        rows, sums = jax.vmap(lambda message, here: split(sends.local(*message).message, here))(messages, present)
        return sees.aggregate((), (), (), join(rows, sums), ())

    got, here = received(np.array([True, True, False, True])), [0, 1, 3]
    np.testing.assert_array_equal(got.centroids.weight, counts[here].sum(0))
    for k in range(2):
        want = np.median(np.repeat(means[here, k], counts[here, k].astype(int), axis=0), axis=0)
        np.testing.assert_allclose(got.centroids.value[k], want, rtol=1e-5)
    copies = np.repeat(backbone[here], sizes[here].astype(int), axis=0)
    np.testing.assert_allclose(got.backbone.value["w"], np.median(copies, axis=0), rtol=1e-5)
    assert float(got.backbone.weight) == 34
    np.testing.assert_array_equal(got.head, np.where(np.arange(4)[:, None] == 2, 0, head))
