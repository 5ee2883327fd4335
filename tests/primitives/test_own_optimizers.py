"""Optimizers of optax in local training: schedules, other steps for each layer, and what needs a learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import tiny_federation, tiny_model
from trees import assert_same

from pfl_jax import ClientData, InvalidInput
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS
from pfl_jax.primitives import LocalTraining, in_float64, masked_mean, supervised_loss

MODEL, KEY = tiny_model(), jax.random.key(0)
PARAMS = MODEL.init(jax.random.key(1))
DATA = client_data(tiny_federation(), 1, "train")
LOSS = supervised_loss(MODEL)
STEPS = {"batch_size": 8, "epochs": 2}


def fitted(**recipe):
    return jax.jit(lambda: LocalTraining(**STEPS | recipe).fit(KEY, PARAMS, DATA, LOSS))()


def test_an_optimizer_of_optax_has_rates_of_its_own():
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    assert_same(fitted(optimizer=optax.sgd(0.1, momentum=0.9)), fitted(lr=0.1, momentum=0.9, weight_decay=0.0))
    assert_same(fitted(optimizer=optax.adam(0.03)), fitted(optimizer="adam", lr=0.03, weight_decay=0.0))
    assert_same(fitted(optimizer=optax.sgd(0.1), clip_norm=0.01), fitted(lr=0.1, clip_norm=0.01, **plain))


def quadratic(params, batch, key):
    """Its gradient is 1 in each entry."""
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) + 0.0 * masked_mean(batch.x, batch.mask)


ONES = ClientData(jnp.ones(10), jnp.zeros(10), jnp.ones(10, bool))


def test_a_schedule_starts_again_in_every_round_and_phase():
    rates = np.float32([0.5, 0.25, 0.125, 0.0625])
    schedule = optax.join_schedules([optax.constant_schedule(rate) for rate in rates], [1, 2, 3])
    recipe = LocalTraining(optimizer=optax.sgd(schedule), batch_size=5, epochs=2)
    first = recipe.fit(KEY, jnp.zeros(2), ONES, quadratic)
    np.testing.assert_allclose(first, -rates.sum())
    np.testing.assert_allclose(recipe.fit(KEY, first, ONES, quadratic), -2 * rates.sum())


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)


def test_layers_with_steps_of_their_own():
    optimizer = optax.multi_transform({"backbone": optax.sgd(0.1), "head": optax.set_to_zero()}, labels)
    trained = LocalTraining(optimizer=optimizer, **STEPS).fit(KEY, PARAMS, DATA, LOSS)
    jax.tree.map(np.testing.assert_array_equal, trained["head"], PARAMS["head"])
    assert np.abs(trained["backbone"]["kernel"] - PARAMS["backbone"]["kernel"]).max() > 1e-3
    # Labels for a whole model do not fit the backbone that FedRep trains.
    fixed = optax.multi_transform({"backbone": optax.sgd(0.1), "head": optax.set_to_zero()}, labels(PARAMS))
    with pytest.raises(InvalidInput, match="labels and masks must be functions of the parameters"):
        LocalTraining(optimizer=fixed, **STEPS).fit(KEY, PARAMS["backbone"], DATA, LOSS)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.01), ("momentum", 0.5), ("weight_decay", 0.0)])
def test_a_number_without_effect_is_refused(name, value):
    with pytest.raises(InvalidInput, match=f"^{name} would have no effect beside an optimizer that has its own"):
        LocalTraining(optimizer=optax.adam(0.1), **{name: value})
    with pytest.raises(InvalidInput, match=f"^{name} would have no effect"):
        LocalTraining(optimizer=optax.adam(0.1)).replace(**{name: value})
    with pytest.raises(InvalidInput, match=f"^{name} would have no effect"):
        jax.jit(lambda value: LocalTraining(optimizer=optax.adam(0.1), **{name: value}).epochs)(value)


def test_a_phase_with_a_learning_rate_of_its_own_takes_steps_of_sgd():
    own = LocalTraining(optimizer=optax.adam(0.1), clip_norm=2.0)
    assert own.phase(0.3, epochs=1) == LocalTraining(lr=0.3, clip_norm=2.0, epochs=1)
    assert own.plain(0.3) == LocalTraining(lr=0.3, momentum=0.0, weight_decay=0.0, clip_norm=2.0)
    adam = LocalTraining(optimizer="adam", momentum=0.2)
    assert adam.phase(0.3) == adam.replace(lr=0.3)


NEED_LR = {"pfedme": "step of w_i needs lr", "qffl": "q-FedAvg needs lr"}
"""Methods in whose equations the learning rate of local training stands."""


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_with_it_or_says_why_not(name):
    recipe = LocalTraining(optimizer=optax.adam(0.01), **STEPS)
    if name in NEED_LR:
        with pytest.raises(InvalidInput, match=NEED_LR[name]):
            METHODS[name](MODEL, recipe)
        return
    method = METHODS[name](MODEL, recipe)

    def local(key):
        server = method.init_server(key)
        return method.local(key, server, method.init_client(key, server, DATA), DATA)

    jax.eval_shape(local, KEY)


def test_an_adaptive_share_of_apfl_needs_a_learning_rate():
    with pytest.raises(InvalidInput, match="adaptive alpha of apfl needs lr"):
        METHODS["apfl"](MODEL, LocalTraining(optimizer=optax.adam(0.01)), adaptive=True)


SCALE = 1e-9


def statistics(x, weights):
    """What JAX expands late: argmin, top_k, projections with derivative rules, factorizations. Near 1 in float64."""
    x = 1 + SCALE * x.astype(jnp.float64)
    largest, places = jax.lax.top_k(x, 2)
    point = optax.projections.projection_simplex(x)
    factor = jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(x.shape[0]))
    spread = (largest[0] - x[jnp.argmin(x)]) / SCALE
    parts = spread, (largest[1] - 1) / SCALE + places[0], weights @ (point - 1 / x.shape[0]) / SCALE, factor[0, 0]
    return jnp.stack(parts).astype(jnp.float32)


def by_hand(x, weights):
    x, weights = np.float64(x), np.float64(weights)
    ordered = np.sort(x)
    return [ordered[-1] - ordered[0], ordered[-2] + np.argmax(x), weights @ (x - x.mean()), np.sqrt(2)]


RNG = np.random.default_rng(0)
ROWS, WEIGHTS = RNG.normal(size=(4, 5)).astype(np.float32), RNG.normal(size=5).astype(np.float32)
WANTED = np.array([by_hand(row, WEIGHTS) for row in ROWS])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_transformations(one_by_one):
    compute = in_float64(statistics, one_by_one=one_by_one)

    def scanned(rows):
        return jax.lax.scan(lambda carry, row: (carry, compute(row, WEIGHTS)), 0, rows)[1]

    ways = {
        "eager": lambda rows: jnp.stack([compute(row, WEIGHTS) for row in rows]),
        "jit": jax.jit(lambda rows: jnp.stack([compute(row, WEIGHTS) for row in rows])),
        "vmap of jit": lambda rows: jax.vmap(jax.jit(compute), (0, None))(rows, WEIGHTS),
        "vmap of scan": lambda rows: jax.jit(jax.vmap(scanned))(rows[:, None])[:, 0],
        "vmap of vmap": lambda rows: jax.vmap(jax.vmap(compute, (0, None)), (0, None))(rows[None], WEIGHTS)[0],
    }
    for name, way in ways.items():
        got = way(jnp.asarray(ROWS))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, WANTED, rtol=1e-5, err_msg=name)
