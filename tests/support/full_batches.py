"""Three tiny clients with full batches, so that no order is left: how methods run on them, and the same in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from problems import tiny_federation
from reference import log_softmax
from rounds import first_state, last_round
from trees import assert_flat, row

from pfl_jax import Settings, simulate
from pfl_jax.methods import METHODS

SIZES, EPOCHS = (9, 18, 14), 3
SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
BETA = np.array(SIZES) / sum(SIZES)


def cohorts(rounds, size):
    """Who of the clients takes part in each round of `run`, where it has so many of them."""
    data, settings = tiny_federation(SIZES), Settings(rounds=rounds)
    drawn = (
        simulate.sample_cohort(jax.random.key(4), jnp.int32(number), data.train_count, size, settings)
        for number in range(rounds)
    )
    return [cohort.clients.tolist() for cohort in drawn]


def run(method, rounds=2, sizes=SIZES, batch_size=32, **hyper_parameters):
    """The last round of a method, given by its name or its factory; `participation` is the share of each cohort."""
    arguments = {"epochs": EPOCHS, **SGD, "batch_size": batch_size, **hyper_parameters}
    return last_round(METHODS.get(method, method), tiny_federation(sizes), 4, rounds, **arguments)


def start_of(method, **hyper_parameters):
    """The server's state as the engine draws it in `run`."""
    return first_state(METHODS.get(method, method), tiny_federation(SIZES), 4, **hyper_parameters).server


@functools.cache
def training_examples():
    """Every client's x and y."""
    data = tiny_federation(SIZES)
    return [reference.examples(data, client) for client in range(len(SIZES))]


def train(w, x, y, more=lambda w: 0.0, steps=EPOCHS):
    """Full-batch SGD on the mean cross entropy plus more(w)."""
    return fit(w, lambda w, now: reference.risk(w, x, y) + more(w), steps)


def step(w, velocity, loss):
    """One step of full-batch SGD on loss(w), whose gradient is that of finite differences; moves `velocity`."""
    for name, slope in reference.numerical_gradient(loss, w).items():
        velocity[name] = SGD["momentum"] * velocity.get(name, 0.0) + slope + SGD["weight_decay"] * w[name]
    return {name: value - SGD["lr"] * velocity[name] for name, value in w.items()}


def fit(w, loss, steps=EPOCHS, name="", **sgd):
    """Full-batch SGD on loss(w, now), in which `now` is w without a gradient; of the entries whose names begin so."""

    def gradient(w):
        return reference.numerical_gradient(lambda moved: loss({**w, **moved}, w), reference.part(w, name))

    return reference.descend(w, gradient, steps, **SGD | sgd)


def losses(w, x, y):
    return -log_softmax(reference.logits(w, x))[np.arange(len(y)), y]


def unseen_examples(client):
    """A client's test examples."""
    return reference.examples(tiny_federation(SIZES), client, "test")


def assert_received(last, models, trained=(), rtol=3e-4, atol=3e-5):
    """What each client deploys, and what it has right after training if given, has the losses of these models."""
    data = tiny_federation(SIZES)
    for scores, ws in ((last.received, models), (last.trained, trained)):
        if len(ws):
            want = [reference.loss(w, data, client) for client, w in enumerate(ws)]
            np.testing.assert_allclose(scores["loss"], want, rtol=rtol, atol=atol)


def assert_model(got, want, rtol=3e-4, atol=3e-5):
    for name, value in reference.to_numpy(got).items():
        np.testing.assert_allclose(value, want[name], rtol=rtol, atol=atol, err_msg=name)


def assert_models(states, models, **tolerances):
    """Models of all clients, stacked along N."""
    for client, w in enumerate(models):
        assert_model(row(states, client), w, **tolerances)


def assert_parts(states, name, models, **tolerances):
    """One part of all clients' models, stacked along N: backbone or head."""
    for client, w in enumerate(models):
        want = reference.part(w, name)
        assert_flat({name: row(states, client)}, want, **{"rtol": 3e-4, "atol": 3e-5} | tolerances)
