"""Federations whose clients have several networks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import CLASSES, HYPER_PARAMETERS, SHAPE, tiny_federation, tiny_model
from trees import distance

from pfl_jax import InvalidInput, Settings, files, frame, make_method, mixed, models, simulate, sweep
from pfl_jax.data import hold_out
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.engine.communication import traffic
from pfl_jax.networks import with_features
from pfl_jax.primitives.tree import choose

KEY = jax.random.key(0)
WIDTH = tiny_model().num_features
WIDER = models.mlp(SHAPE, CLASSES, hidden=(WIDTH + 1,))
SOME = [
    "fd",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("local", "lg_fedavg", "fedproto_g", "fedproto_l", "fedgh", "fedtgp")
    ),
]


@functools.cache
def networks():
    """Three networks with as many features; the second has another depth, the third another width below."""
    make = functools.partial(models.mlp, SHAPE, CLASSES)
    return tiny_model(), make(hidden=(5, WIDTH)), make(hidden=(6, WIDTH))


@functools.cache
def method(name="lg_fedavg", several=3, network=None):
    make = functools.partial(make_method, name, **HYPER_PARAMETERS)
    return mixed(make, networks()[:several], network)


def last(method, **options):
    settings = Settings(**{"rounds": 2, "participation": 0.75, "chunk": 1} | options.pop("settings", {}))
    (*_, result) = simulate.run(method, tiny_federation(), settings, KEY, **options)
    return result


@pytest.mark.parametrize("name", SOME)
def test_one_network_is_the_plain_method_bit_for_bit(name):
    plain, one = last(make_method(name, tiny_model(), **HYPER_PARAMETERS)), last(method(name, 1))
    state = one.state._replace(server=one.state.server[0], clients=one.state.clients[0])
    chex.assert_trees_all_equal((plain.received, plain.trained, plain.info), (one.received, one.trained, one.info))
    chex.assert_trees_all_equal(plain.state._replace(key=()), state._replace(key=()))


@pytest.mark.parametrize("name", ["fd", pytest.param("fedgh", marks=pytest.mark.slow)])
def test_clients_with_equal_networks_in_two_groups_are_those_of_one(name):
    make = functools.partial(make_method, name, **HYPER_PARAMETERS)
    plain, split = last(make(tiny_model())), last(mixed(make, [tiny_model()] * 2, [0, 1, 1, 0]))
    for group, own in enumerate(([0, 3], [1, 2])):
        rows = jax.tree.map(lambda leaf, own=own: leaf[jnp.array(own)], plain.state.clients)
        chex.assert_trees_all_close(split.state.clients[group], rows, atol=1e-6)
        chex.assert_trees_all_close(split.state.server[group], plain.state.server, atol=1e-6)
    chex.assert_trees_all_close(split.received, plain.received, atol=1e-5)


SECOND = [
    ("fml", {}),
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("fedkd", "fedmrl")),
    pytest.param("fedgen", {"shared": "head"}, marks=pytest.mark.slow),
]
"""Methods that share a second model, or a generator beside the head, and their options."""


@pytest.mark.parametrize(("name", "options"), SECOND)
def test_a_second_model_is_shared_by_clients_of_all_networks(name, options):
    make = functools.partial(make_method, name, **HYPER_PARAMETERS, **options)
    # Their own models may also differ in the number of features, if heads are not shared.
    other = networks()[1] if name == "fedgen" else WIDER
    several = mixed(make, [tiny_model(), other])
    result = last(several)
    sent = [one.download(server, ()) for one, server in zip(several.methods, result.state.server, strict=True)]
    chex.assert_trees_all_equal(*sent)
    start = simulate.build(several, Settings(rounds=2)).init(tiny_federation(), KEY).server[0]
    assert distance(several.methods[0].download(start, ()), sent[0]) > 1e-3
    assert np.isfinite(result.received["loss"]).all()


def test_a_network_of_its_own_for_the_shared_model():
    alone = make_method("fml", tiny_model()._replace(shared=WIDER), **HYPER_PARAMETERS)
    state = last(alone).state
    shapes = [jax.tree.map(jnp.shape, jax.eval_shape(one.init, KEY)) for one in (WIDER, tiny_model())]
    assert jax.tree.map(jnp.shape, alone.download(state.server, ())) == shapes[0]
    assert jax.tree.map(lambda leaf: leaf.shape[1:], state.clients) == shapes[1]


def test_results_do_not_depend_on_chunks_devices_or_where_states_are():
    several = method(several=2)
    want = last(several)
    for other in (last(several, settings={"chunk": None}, mesh=simulate.client_mesh()), last(several, state_on="host")):
        chex.assert_trees_all_close((other.received, other.trained), (want.received, want.trained), atol=1e-5)
        np.testing.assert_array_equal(other.cohort, want.cohort)


def state_of(state, several, client):
    network = several.networks(4)[client]
    row = np.flatnonzero(several.members(network, 4) == client)[0]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[row], state.clients[network])


def test_a_resumed_run_is_the_same_run(tmp_path):
    want, half = last(method(), settings={"rounds": 3}), last(method(), settings={"rounds": 2})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(half.state, {})
    found = checkpoints.newest(half.state)
    again = last(method(), settings={"rounds": 3}, state=found.state)
    chex.assert_trees_all_equal(again.state._replace(key=()), want.state._replace(key=()))
    chex.assert_trees_all_equal(again.received, want.received)


def test_sweeps_take_several_networks():
    def make(lr):
        return mixed(functools.partial(make_method, "lg_fedavg", **HYPER_PARAMETERS | {"lr": lr}), networks()[:2])

    keys = jnp.stack([KEY, KEY])
    settings = Settings(rounds=2, participation=0.75, chunk=1)
    *_, both = sweep.run(make, tiny_federation(), settings, keys, {"lr": jnp.array([0.1, 0.02])})
    *_, alone = simulate.run(make, tiny_federation(), settings, KEY, {"lr": 0.02})
    chex.assert_trees_all_close(jax.tree.map(lambda leaf: leaf[1], both.received), alone.received, atol=1e-5)
    with pytest.raises(InvalidInput, match="network has 3 entries, and this federation has 4 clients"):
        sweep.run(lambda: method(several=2, network=(0, 1, 0)), tiny_federation(), settings, keys)


def test_newcomers_are_dealt_a_network():
    data, newcomers = hold_out(tiny_federation(), 1)
    (result,) = simulate.run(method(several=2), data, Settings(rounds=1), KEY, newcomers=newcomers)
    assert np.isfinite(result.newcomers[0]["accuracy"]).all()


def test_each_clients_model_is_its_own():
    """Of two clients with one network, and in a place that is not the client's number divided by anything."""
    several = method(network=(0, 0, 1, 2))
    result = last(several)
    for client in range(4):
        params = files.client_params(several, tiny_federation(), result.state, client)
        network = several.networks(4)[client]
        head = result.state.server[network]["head"]
        chex.assert_trees_all_equal(params, {"backbone": state_of(result.state, several, client), "head": head})
    pytest.importorskip("pandas")
    assert set(frame([result])["client"]) == {0, 1, 2, 3}
    head = jax.eval_shape(tiny_model().init, KEY)["head"]
    assert traffic(method(), tiny_federation()).up == 4 * sum(leaf.size for leaf in jax.tree.leaves(head))


@pytest.mark.parametrize(
    ("name", "several", "network", "options", "words"),
    [
        ("fedavg", networks(), None, {}, "needs equal parameters: client 1's network sends"),
        (
            *("lg_fedavg", [tiny_model(), WIDER], None, {}),
            f"client 1's network gives {WIDTH + 1} features, the others {WIDTH}: features={WIDTH}",
        ),
        ("local", networks(), [0, 1, 2], {}, "network has 3 entries, and this federation has 4 clients"),
        ("local", networks(), [0, 1, 0, 1], {}, "no client has network 2 of 3"),
        ("local", networks(), None, {"state_on": "disk"}, "for one process, with state_on device or host"),
        ("local", networks(), [0, 1, 2, 3], {}, "positions of 3 networks, from 0"),
        ("local", [tiny_model(), models.mlp(SHAPE, CLASSES + 1)], None, {}, "have the same outputs"),
        ("feddbe", networks(), None, {}, "asks all clients before the first round"),
    ],
)
def test_refusals(name, several, network, options, words):
    with pytest.raises(InvalidInput, match=words.replace("(", r"\(")):
        last(mixed(functools.partial(make_method, name), several, network), **options)


def test_methods_whose_server_works_with_the_cohorts_states_are_refused():
    plain = make_method("local", tiny_model())

    def make(model):
        def aggregate(key, server, clients, messages, cohort):
            return server, choose(cohort.present, clients, clients), {}

        return make_method("local", model)._replace(aggregate=aggregate, privacy=plain.privacy)

    with pytest.raises(InvalidInput, match="needs the states of all clients of a round"):
        last(mixed(make, networks()))


def test_a_network_with_another_number_of_features_gets_a_layer():
    wide = with_features(tiny_model(), 2 * WIDTH)
    assert wide.num_features == 2 * WIDTH
    params, x = wide.init(KEY), jnp.ones((3, *SHAPE))
    assert wide.features(params["backbone"], x).shape == (3, 2 * WIDTH)
    assert wide.apply(params, x).shape == (3, CLASSES)
    make = functools.partial(make_method, "fedproto_g", **HYPER_PARAMETERS)
    with_layer = mixed(make, networks()[:2], features=7)
    assert last(with_layer).state.server[1].prototypes.centroids.shape == (CLASSES, 7)
