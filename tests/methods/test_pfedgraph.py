"""pFedGraph: its limits, the projection, and its rounds against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import tiny_federation, tiny_model

from pfl_jax.base import Cohort
from pfl_jax.data.federated import client_data
from pfl_jax.methods.pfedgraph import collaboration_graph, cosines, pfedgraph

# One program for each kind of call; operation by operation, each shape would compile a dozen.
cosines = jax.jit(cosines)
collaboration_graph = jax.jit(collaboration_graph)


def flat(w):
    return np.concatenate([np.ravel(w[name]) for name in sorted(w)])


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def trained(w, known, lam, x, y):
    """Local training with the similarity to `known`, if there is any."""

    def more(w):
        r, v, length = flat(known), flat(w), np.linalg.norm(flat(w))
        return {name: -lam * (known[name] / length - (r @ v) * value / length**3) for name, value in w.items()}

    return full.train(w, x, y, more=more) if known else full.train(w, x, y)


@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_pfedgraph(alpha):
    lam, clients, start = 0.3, full.training_examples(), reference.to_numpy(full.start_of(pfedgraph))
    ws, references, graphs = [start] * len(clients), [{} for _ in clients], []
    for _ in range(2):
        new = [trained(w, known, lam, x, y) for w, known, (x, y) in zip(ws, references, clients, strict=True)]
        changes = [flat(w) - flat(start) for w in new]
        similarity = np.array([[cosine(a, b) for b in changes] for a in changes])
        similarity[similarity > 0.9] = 1.0
        graphs.append(np.array([reference.nearest_on_simplex(full.BETA + s / (2 * alpha)) for s in similarity]))
        ws = [reference.mean(weights, new) for weights in graphs[-1]]
        unit = [{name: value / np.linalg.norm(flat(w)) for name, value in w.items()} for w in new]
        references = [reference.mean(weights, unit) for weights in graphs[-1]]
    # Some clients are left out under the weak prior only.
    assert (np.min(graphs[0]) == 0) == (alpha == 0.3)
    last = full.run(pfedgraph, prior=alpha, lam=lam)
    order = np.ix_(np.argsort(last.cohort), np.argsort(last.cohort))
    np.testing.assert_allclose(np.asarray(last.info["similarity"])[order], similarity, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(last.info["graph"])[order], graphs[-1], rtol=2e-3, atol=1e-4)
    full.assert_models(last.state.clients.params, ws, rtol=1e-3, atol=1e-4)
    full.assert_models(last.state.clients.reference, references, rtol=1e-3, atol=1e-4)
    full.assert_received(last, ws, rtol=1e-3, atol=1e-4)


def test_absent_clients_and_changes_of_zero_have_no_weight():
    trees = {"a": jnp.array([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]]), "b": jnp.array([[0.0], [0.0], [2.0]])}
    similarity = cosines(trees)
    np.testing.assert_allclose(similarity[0], [1.0, 0.0, 0.5**0.5], rtol=1e-6)
    np.testing.assert_array_equal(similarity[1], 0.0)
    graph = np.asarray(collaboration_graph(similarity, jnp.array([5, 0, 5]), 1.0))
    np.testing.assert_array_equal(graph[:, 1], 0.0)
    np.testing.assert_allclose(graph.sum(1), 1.0, rtol=1e-6)
    # Not even one that is more similar than those that are present.
    graph = np.asarray(collaboration_graph(jnp.array([[1.0, 1.0, 0.0]]), jnp.array([5, 0, 1]), 1.0))
    np.testing.assert_array_equal(graph[:, 1], 0.0)


@pytest.mark.slow
def test_similar_changes_count_as_equal():
    method = pfedgraph(tiny_model())
    server = method.init_server(jax.random.key(0))
    models = jax.tree.map(lambda leaf: jnp.stack([leaf + 1] * 3), server)
    models["head"]["kernel"] += jnp.array([1.0, 2.0, -2.0])[:, None, None]
    data = client_data(tiny_federation(full.SIZES), 0, "train")
    one = method.init_client(jax.random.key(1), server, data)
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), one)
    cohort = Cohort(jnp.arange(3), jnp.array([4, 5, 6]), jnp.ones(3, bool), 3)
    _, _, info = jax.jit(method.aggregate)(jax.random.key(2), server, clients, models, cohort)
    raw = np.asarray(cosines(jax.tree.map(jnp.subtract, models, server)))
    assert 0.9 < raw[0, 1] < 0.999
    assert raw[0, 2] < 0.9
    np.testing.assert_allclose(info["similarity"][0], [1.0, 1.0, raw[0, 2]], rtol=1e-5)
