"""Floco: the projection onto the simplex, the points drawn, and whole rounds against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, tiny_federation, tiny_model

from pfl_jax import Cohort, Mean
from pfl_jax.data import client_data
from pfl_jax.methods import floco
from pfl_jax.methods.floco import SCALES, FlocoClient, FlocoMessage, Projection, anywhere, fit_projection, nearby, place
from pfl_jax.primitives import fingerprint, fingerprint_key

SIZE, RADIUS = 3, 0.2

# One program for each kind of call; operation by operation, each shape would compile a dozen.
fit_projection, place = jax.jit(fit_projection, static_argnums=2), jax.jit(place)


def fit(changes, size):
    """Points, center, components and scale by a singular value decomposition and a search over all scales."""
    center = changes.mean(0)
    _, lengths, components = np.linalg.svd(changes - center, full_matrices=False)
    components = components[:size] * (lengths[:size, None] > 1e-6 * lengths[0])
    components *= np.sign(components[np.arange(len(components)), np.abs(components).argmax(1)] + 1e-300)[:, None]
    components = np.concatenate([components, np.zeros((size - len(components), changes.shape[1]))])
    best = (np.inf, None, None)
    for scale in np.linspace(1e-4, 1, SCALES):
        points = np.array([reference.nearest_on_simplex(one / scale) for one in (changes - center) @ components.T])
        pairs = [(i, j) for j in range(len(points)) for i in range(j)]
        energy = sum(1 / max(np.sum((points[i] - points[j]) ** 2), 1e-8) for i, j in pairs)
        if energy < best[0]:
            best = energy, points, scale
    return best[1], center, components, best[2]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_projection(size):
    rng = np.random.default_rng(size)
    changes = rng.normal(size=(5, 7)) * np.array([0.5, 0.4, 0.1, 0.1, 0.05, 0.0, 0.2]) + 0.3
    present = np.array([True, True, False, True, True])
    found = fit_projection(jnp.float32(np.where(present[:, None], changes, 0)), jnp.array(present), size)
    points, center, components, scale = fit(changes[present], size)
    np.testing.assert_allclose(found.center, center, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.components, components, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-5)
    got = place(jnp.float32(changes[present]), found)
    np.testing.assert_allclose(got, points, rtol=1e-3, atol=1e-5)
    assert (np.ptp(points, axis=0) > 0.05).all()


@pytest.mark.slow
def test_two_equal_clients_do_not_decide_the_scale():
    # Wherever they stand it is the same point, so the others' distances decide.
    changes = np.random.default_rng(0).normal(size=(5, 7))
    changes[1] = changes[0]
    found, want = fit_projection(jnp.float32(changes), jnp.ones(5, bool), 2), fit(changes, 2)[3]
    np.testing.assert_allclose(found.scale, want, rtol=1e-5)
    assert want > 0.1


def test_equal_clients_stand_at_the_center():
    found = fit_projection(jnp.ones((3, 4)), jnp.ones(3, bool), 2)
    np.testing.assert_array_equal(found.components, 0)
    np.testing.assert_allclose(place(jnp.ones((3, 4)), found), 0.5)


def test_points_are_drawn_uniformly_and_within_the_radius():
    keys = jax.random.split(jax.random.key(0), 4000)
    everywhere = np.asarray(jax.jit(jax.vmap(lambda key: anywhere(key, SIZE)))(keys))
    np.testing.assert_allclose(everywhere.sum(1), 1, rtol=1e-5)
    # Every entry of a uniform point of the triangle is below 1/2 with probability 3/4.
    np.testing.assert_allclose((everywhere < 0.5).mean(0), 0.75, atol=0.03)
    center = jnp.array([0.7, 0.3, 0.0])
    distances = np.abs(jax.jit(jax.vmap(lambda key: nearby(key, center, RADIUS)))(keys) - center).sum(1)
    assert distances.max() <= RADIUS + 1e-6
    np.testing.assert_allclose([distances.mean(), (distances < RADIUS / 4).mean()], [RADIUS / 2, 0.25], atol=0.03)


def at(w, point):
    return {**w, "head/kernel": np.tensordot(point, w["ends"], axes=1)}


def trained(w, x, y, points):
    """SGD on a fixed sequence of points of the simplex."""
    velocity = {}
    for point in points:
        w = full.step(w, velocity, lambda w, point=point: reference.risk(at(w, point), x, y))
    return w


def draws(seed, round_index, client, place, placed):
    """The points that a client draws in a round."""
    data = client_data(tiny_federation(full.SIZES), client, "train")
    key = fingerprint_key(jax.random.fold_in(jax.random.key(seed), round_index), fingerprint(data))
    for step in range(full.EPOCHS):
        draw = jax.random.fold_in(key, step)
        yield np.float64(nearby(draw, jnp.float32(place), RADIUS) if placed else anywhere(draw, SIZE))


def test_floco():
    settings = {"endpoints": SIZE, "projection_round": 2, "radius": RADIUS}
    start, clients = full.start_of("floco", **settings), full.training_examples()
    head = {"kernel": start.heads["kernel"][0], "bias": start.heads["bias"]}
    w = reference.to_numpy({"backbone": start.backbone, "head": head})
    w["ends"] = np.float64(start.heads["kernel"])
    assert w["ends"].shape == (SIZE, 4, CLASSES)
    assert np.abs(w["ends"][0] - w["ends"][1]).max() > 0.1
    center = np.full(SIZE, 1 / SIZE)
    points, placed = [center] * 3, False
    for index in range(3):
        drawn = [draws(start.seed, index, client, points[client], placed) for client in range(3)]
        models = [trained(w, x, y, some) for some, (x, y) in zip(drawn, clients, strict=True)]
        if index == 1:
            changes = np.array([(model["ends"] - w["ends"]).ravel() for model in models])
            points, placed = fit(changes, SIZE)[0], True
        w = reference.mean(full.BETA, models)
    last = full.run("floco", rounds=3, **settings)
    got = last.state.server
    np.testing.assert_allclose(got.heads["kernel"], w["ends"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got.heads["bias"], w["head/bias"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got.backbone["kernel"], w["backbone/kernel"], rtol=1e-3, atol=1e-4)
    for found in (last.state.clients.point, last.info["points"]):
        np.testing.assert_allclose(found, points, rtol=1e-3, atol=1e-3)
    assert last.state.clients.placed.all()
    assert np.ptp(points, axis=0).max() > 0.3
    full.assert_received(last, [at(w, point) for point in points], rtol=2e-3, atol=1e-4)


def test_a_client_that_comes_later_is_projected_with_its_own_change():
    method, shape = floco(tiny_model(), endpoints=2, projection_round=1), (2, FEATURES, CLASSES)
    server = method.init_server(jax.random.key(0))
    width = server.projection.center.shape[0]
    known = Projection(jnp.zeros(width), jnp.eye(2, width), jnp.float32(0.5))
    server = server._replace(projection=known, rounds=jnp.int32(3))
    changes = jnp.zeros((3, width)).at[:, 0].set(jnp.array([0.2, 0.1, -0.4]))
    heads = {"kernel": server.heads["kernel"] + changes.reshape(3, *shape), "bias": jnp.zeros((3, CLASSES))}
    message = FlocoMessage(Mean(server.backbone, jnp.ones(())), heads)
    # The first has a point, the last is absent.
    clients = FlocoClient(jnp.full((3, 2), 0.5), jnp.array([True, False, False]))
    cohort = Cohort(jnp.arange(3), jnp.array([4, 5, 0]), jnp.array([True, True, False]), 3)
    server, clients, _ = jax.jit(method.aggregate)(jax.random.key(1), server, clients, message, cohort)
    np.testing.assert_allclose(clients.point, [[0.5, 0.5], [0.6, 0.4], [0.5, 0.5]], atol=1e-5)
    np.testing.assert_array_equal(clients.placed, [True, True, False])
    np.testing.assert_array_equal(server.projection.components, known.components)
