"""Methods without a server: graphs, and equations against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from deployed import log_probabilities
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same, row

from pfl_jax import Cohort, InvalidInput
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.dispfl import layer_densities
from pfl_jax.primitives import graph_links, is_connected, metropolis_weights, order_by_fingerprint, push_weights

KEY = jax.random.key(0)
LINE, CYCLE = "0-1 1-2", "0-1 1-2 2-0 0-2"
"""Links by number of three clients; the second ones in one direction, unequally many."""


def links_of(topology, present, num_clients=9, directed=False, key=KEY):
    """(links, place of each client among the present ones)."""
    present = np.array(present)
    identities = jax.random.bits(jax.random.key(7), (len(present), 2))
    cohort = Cohort(jnp.arange(len(present)), jnp.ones(len(present), jnp.int32), jnp.array(present), num_clients)
    links = graph_links(topology, key, identities, cohort, directed=directed)
    return np.asarray(links), np.argsort(order_by_fingerprint(identities, cohort.present))


def receivers(topology, r, m):
    """To which nodes node r of m sends."""
    if topology == "ring":
        return {(r + 1) % m} - {r}
    if topology == "full":
        return {*range(m)} - {r}
    if topology == "exponential":
        return {(r + 2**k) % m for k in range(10) if 2**k < m} - {r}
    height = max(h for h in range(1, m + 1) if m % h == 0 and h * h <= m)
    line, column = divmod(r, m // height)
    return {(line + 1) % height * (m // height) + column, line * (m // height) + (column + 1) % (m // height)} - {r}


@pytest.mark.parametrize("topology", ["ring", "torus", "exponential", "full"])
def test_graphs_with_a_name_are_those_of_the_present_clients(topology):
    for present in ([1], [1, 1], [1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1], 8 * [1], [0, *(12 * [1])]):
        links, place = links_of(topology, np.bool_(present), directed=True)
        nodes = [int(place[i]) for i in np.flatnonzero(present)]
        want = np.zeros_like(links)
        for j in np.flatnonzero(present):
            for i in np.flatnonzero(present):
                want[i, j] = place[i] in receivers(topology, int(place[j]), len(nodes))
        np.testing.assert_array_equal(links, want, err_msg=f"{present}")
        both, _ = links_of(topology, np.bool_(present))
        np.testing.assert_array_equal(both, want | want.T)
        assert is_connected(jnp.array(links), jnp.array(np.bool_(present)))


def test_random_graphs_have_their_share_of_links_and_another_one_in_each_round():
    present = np.ones(40, bool)
    drawn = [links_of("erdos_renyi:0.3", present, 40, key=jax.random.key(seed))[0] for seed in range(2)]
    for links in drawn:
        np.testing.assert_array_equal(links, links.T)
        assert not links.diagonal().any()
        assert links.sum() / (40 * 39) == pytest.approx(0.3, abs=0.06)
    assert (drawn[0] != drawn[1]).any()
    directed, _ = links_of("erdos_renyi:0.3", present, 40, directed=True)
    assert directed.sum() / (40 * 39) == pytest.approx(0.3, abs=0.06)
    assert (directed != directed.T).any()


def test_links_by_number_are_those_of_present_ends():
    links, _ = links_of("0-1 1-2 2-3", np.array([True, True, False, True]), 4)
    np.testing.assert_array_equal(links, [[0, 1, 0, 0], [1, 0, 0, 0], 4 * [0], 4 * [0]])
    assert not is_connected(jnp.array(links), jnp.array([True, True, False, True]))
    assert is_connected(jnp.array(links), jnp.array([True, True, False, False]))
    one_way, _ = links_of("0-1 1-2 2-0", np.ones(3, bool), 3, directed=True)
    np.testing.assert_array_equal(one_way, [[0, 0, 1], [1, 0, 0], [0, 1, 0]])
    # A way there, and none back.
    assert not is_connected(jnp.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], bool), jnp.ones(3, bool))


@pytest.mark.parametrize(
    ("topology", "directed", "error"),
    [
        ("0-1 2-3", False, "does not connect the 4 clients: it has 2 separate parts"),
        ("0-1 1-2 2-3", True, "does not connect the 4 clients: it has 4 separate parts"),
        ("0-1 1-4", False, "links client 4, and the 4 clients are 0 to 3"),
        ("rings", False, "ring"),
        ("erdos_renyi:0", False, "above 0"),
    ],
)
def test_a_graph_that_is_none_is_refused(topology, directed, error):
    with pytest.raises(InvalidInput, match=error):
        links_of(topology, np.ones(4, bool), 4, directed=directed)


def test_mixing_matrices():
    links, _ = links_of("erdos_renyi:0.3", np.ones(12, bool), 12)
    mixing = np.asarray(metropolis_weights(jnp.array(links)))
    np.testing.assert_allclose(mixing, mixing.T)
    np.testing.assert_allclose(mixing.sum(0), 1, rtol=1e-6)
    degrees = links.sum(1)
    for i, j in zip(*np.nonzero(links), strict=True):
        assert mixing[i, j] == pytest.approx(1 / (1 + max(degrees[i], degrees[j])))
    assert (mixing >= 0).all()
    links, _ = links_of("erdos_renyi:0.3", np.ones(12, bool), 12, directed=True)
    pushing = np.asarray(push_weights(jnp.array(links)))
    np.testing.assert_allclose(pushing.sum(0), 1, rtol=1e-6)
    np.testing.assert_array_equal(pushing > 0, links | np.eye(12, dtype=bool))


W = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
"""Metropolis weights of `LINE`."""
P = np.array([[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]])
"""Of `CYCLE`: client 0 sends to two others."""


def mixed(weights, ws):
    return [reference.mean(one, ws) for one in weights]


def assert_info(info, models, links):
    np.testing.assert_array_equal(info["links"], links)
    assert info["connected"] == 1
    flat = np.array([reference.flat(w) for w in models])
    want = np.sqrt(((flat - flat.mean(0)) ** 2).sum(1).mean())
    np.testing.assert_allclose(info["consensus"], want, rtol=1e-3)


def test_dsgd():
    ws = 3 * [reference.to_numpy(full.start_of("dsgd"))]
    for _ in range(2):
        trained = [full.train(w, x, y) for w, (x, y) in zip(ws, full.training_examples(), strict=True)]
        ws = mixed(W, trained)
    last = full.run("dsgd", topology=LINE)
    full.assert_models(last.state.clients.params, ws)
    full.assert_received(last, ws, trained)
    assert_info(last.info, ws, [1, 2, 1])


@pytest.mark.parametrize("bits", [16, 32])
def test_dfedavgm(bits):
    ws = 3 * [reference.to_numpy(full.start_of("dfedavgm"))]
    for _ in range(2):
        trained = [full.train(w, x, y) for w, (x, y) in zip(ws, full.training_examples(), strict=True)]
        if bits == 32:
            ws = mixed(W, trained)
        else:
            changes = [{name: z[name] - w[name] for name in w} for z, w in zip(trained, ws, strict=True)]
            ws = [{name: w[name] + c[name] for name in w} for w, c in zip(ws, mixed(W, changes), strict=True)]
    last = full.run("dfedavgm", topology=LINE, bits=bits)
    full.assert_models(last.state.clients.params, ws)
    assert_info(last.info, ws, [1, 2, 1])


def pushed(x, s, train):
    """(x, s) after local training, train(client, z), and a round on `CYCLE`."""
    for i in range(3):
        z = {name: value / s[i] for name, value in x[i].items()}
        new = train(i, z)
        x[i] = {name: x[i][name] + new[name] - z[name] for name in z}
    return mixed(P, x), P @ s


def test_osgp():
    examples, x, s = full.training_examples(), 3 * [reference.to_numpy(full.start_of("osgp"))], np.ones(3)
    for _ in range(3):
        x, s = pushed(x, s, lambda i, z: full.train(z, *examples[i]))
    last = full.run("osgp", rounds=3, topology=CYCLE)
    np.testing.assert_allclose(last.state.clients.pushed.weight, s, rtol=1e-5)
    assert np.ptp(s) > 0.1
    full.assert_models(last.state.clients.pushed.params, x)
    models = [{name: value / weight for name, value in one.items()} for one, weight in zip(x, s, strict=True)]
    full.assert_received(last, models)
    assert_info(last.info, models, [2, 1, 1])


def test_dfedpgp():
    examples, s = full.training_examples(), np.ones(3)
    start = reference.to_numpy(full.start_of("dfedpgp"))
    heads, x = 3 * [reference.part(start, "head")], 3 * [reference.part(start, "backbone")]

    def train(i, z):
        data, w = examples[i], z | heads[i]
        heads[i] = reference.part(full.fit(w, lambda w, now: reference.risk(w, *data), 2, "head"), "head")
        trained = full.fit(z | heads[i], lambda w, now: reference.risk(w, *data), full.EPOCHS, "backbone")
        return reference.part(trained, "backbone")

    for _ in range(2):
        x, s = pushed(x, s, train)
    last = full.run("dfedpgp", topology=CYCLE, head_epochs=2)
    full.assert_parts(last.state.clients.head, "head", heads)
    backbones = [{name: value / weight for name, value in one.items()} for one, weight in zip(x, s, strict=True)]
    full.assert_received(last, [z | head for z, head in zip(backbones, heads, strict=True)])
    assert_info(last.info, backbones, [2, 1, 1])


def smallest(values, count):
    """Positions of the `count` smallest, of an array as it is flattened."""
    return np.argsort(values, axis=None)[:count]


def test_dispfl():
    examples, start = full.training_examples(), full.start_of("dispfl", density=0.6)
    first = {name: value > 0 for name, value in reference.to_numpy({**start.mask}).items()}
    initial = reference.to_numpy(start.params)
    masks, ws = 3 * [first], 3 * [{name: np.where(first[name], initial[name], 0) for name in initial}]
    anneal, most = 0.4, 4
    for t in range(3):
        trained, under, masks = [], masks, []
        for i, (x, y) in enumerate(examples):

            def risk(w, now, mask=under[i], x=x, y=y):
                return reference.risk({name: w[name] * mask[name] for name in w}, x, y)

            trained.append(full.fit(ws[i], risk))
            slopes, mask = reference.cross_entropy_gradient(trained[i], x, y), {}
            for name, before in under[i].items():
                share = anneal / 2 * (1 + np.cos(np.pi * t / most))
                after, count = before.copy(), int(np.ceil(share * before.sum()))
                after.ravel()[smallest(np.where(before, abs(trained[i][name]), np.inf), count)] = False
                after.ravel()[smallest(np.where(after, np.inf, -abs(slopes[name])), count)] = True
                mask[name] = after
            masks.append(mask)
        ws = []
        for i, near in enumerate(([0, 1], [0, 1, 2], [1, 2])):
            sums = {name: sum(trained[j][name] for j in near) for name in first}
            owners = {name: sum(1.0 * under[j][name] for j in near) for name in first}
            ws.append({name: masks[i][name] * sums[name] / np.maximum(owners[name], 1) for name in first})
    last = full.run("dispfl", rounds=3, topology=LINE, density=0.6, anneal=anneal, anneal_rounds=most)
    for i in range(3):
        full.assert_model(row(last.state.clients.mask, i), masks[i])
    full.assert_models(last.state.clients.params, ws, rtol=5e-4, atol=5e-5)
    full.assert_received(last, ws, trained)
    assert_info(last.info, ws, [1, 2, 1])
    every = np.array([reference.flat(mask) for mask in masks])
    assert 0 < every.all(0).sum() < every.any(0).sum()
    np.testing.assert_allclose(last.info["overlap"], every.all(0).sum() / every.any(0).sum(), rtol=1e-5)


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9, 1.0])
def test_small_arrays_keep_more_entries(density):
    params = tiny_model().init(KEY)
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)])
    ratios = np.array([sum(leaf.shape) / leaf.size for leaf in jax.tree.leaves(params)])
    low, high = 0.0, 100.0
    for _ in range(100):
        epsilon = (low + high) / 2
        kept = sizes @ np.minimum(1, epsilon * ratios)
        low, high = (epsilon, high) if kept < density * sizes.sum() else (low, epsilon)
    np.testing.assert_allclose(layer_densities(params, density), np.minimum(1, high * ratios), rtol=1e-5)
    mask = full.start_of("dispfl", density=density).mask
    got = [int(leaf.sum()) for leaf in jax.tree.leaves(mask)]
    np.testing.assert_array_equal(got, np.floor(np.minimum(1, high * ratios) * sizes + 1e-3))


LIMITS = [
    ("dsgd", {}, "fedavg", {}),
    ("dfedavgm", {}, "fedavg", {}),
    ("osgp", {}, "fedavg", {}),
    ("dispfl", {"density": 1.0}, "fedavg", {}),
    ("dfedpgp", {"head_epochs": 2}, "fedrep", {"head_epochs": 2}),
]
"""As SAME in test_limits.py, on the full graph of clients with equal sizes."""


@pytest.mark.parametrize(("name", "limit", "other", "settings"), LIMITS, ids=lambda one: str(one))
def test_the_full_graph_is_a_server(name, limit, other, settings):
    data, last = tiny_federation((9, 9, 9)), []
    for method, options in ((name, {"topology": "full", **limit}), (other, settings)):
        arguments = HYPER_PARAMETERS | options
        state = last_round(METHODS[method], data, 5, 2, **arguments).state
        last.append(log_probabilities(make_method(method, tiny_model(), **arguments))(data, state))
    assert_same(*last)


@pytest.mark.parametrize("name", ["dsgd", "osgp"])
def test_clients_that_are_not_there_keep_their_models_and_weights(name):
    last = full.run(name, rounds=3, participation=2 / 3)
    assert len(last.cohort) == 2
    # Two clients are each other's only neighbors: they agree.
    assert last.info["consensus"] < 1e-6
    if name == "osgp":
        np.testing.assert_allclose(np.sum(last.state.clients.pushed.weight), 3, rtol=1e-6)
