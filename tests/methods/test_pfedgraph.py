"""pFedGraph, FedCAC and FedTGP: their equations in float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, tiny_federation, tiny_model
from trees import row

from pfl_jax import Cohort
from pfl_jax.data import client_data
from pfl_jax.methods import pfedgraph
from pfl_jax.methods.fedcac import collaborators, critical_entries, overlaps
from pfl_jax.methods.fedproto import Prototypes
from pfl_jax.methods.fedtgp import adaptive_margin
from pfl_jax.methods.fedtgp import distances as fedtgp_distances
from pfl_jax.methods.pfedgraph import collaboration_graph, cosines

# One program for each kind of call; operation by operation, each shape would compile a dozen.
cosines = jax.jit(cosines)
collaboration_graph = jax.jit(collaboration_graph)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def trained(w, known, lam, x, y):
    """Local training with the similarity to `known`, if there is any."""

    def similarity(w):
        return reference.flat(known) @ reference.flat(w) / np.linalg.norm(reference.flat(w)) if known else 0.0

    return full.train(w, x, y, lambda w: -lam * similarity(w))


@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_pfedgraph(alpha):
    lam, clients, start = 0.3, full.training_examples(), reference.to_numpy(full.start_of("pfedgraph"))
    ws, references, graphs = [start] * len(clients), [{} for _ in clients], []
    for _ in range(2):
        new = [trained(w, known, lam, x, y) for w, known, (x, y) in zip(ws, references, clients, strict=True)]
        changes = [reference.flat(w) - reference.flat(start) for w in new]
        similarity = np.array([[cosine(a, b) for b in changes] for a in changes])
        similarity[similarity > 0.9] = 1.0
        graphs.append(np.array([reference.nearest_on_simplex(full.BETA + s / (2 * alpha)) for s in similarity]))
        ws = [reference.mean(weights, new) for weights in graphs[-1]]
        unit = [{name: value / np.linalg.norm(reference.flat(w)) for name, value in w.items()} for w in new]
        references = [reference.mean(weights, unit) for weights in graphs[-1]]
    # Some clients are left out under the weak prior only.
    assert (np.min(graphs[0]) == 0) == (alpha == 0.3)
    last = full.run("pfedgraph", prior=alpha, lam=lam)
    np.testing.assert_allclose(last.info["similarity"], similarity, rtol=1e-3)
    np.testing.assert_allclose(last.info["graph"], graphs[-1], rtol=2e-3, atol=1e-4)
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


# One program for each kind of call; operation by operation, each shape would compile a dozen.
overlaps = jax.jit(overlaps)
collaborators = jax.jit(collaborators)
critical_entries = jax.jit(critical_entries)


def critical(before, after, share):
    """The most sensitive entries of each array, by sorting."""
    chosen = {}
    for name, new in after.items():
        sensitivity = np.abs((new - before[name]) * new)
        count = int(share * sensitivity.size)
        chosen[name] = sensitivity >= np.sort(sensitivity, axis=None)[::-1][count - 1]
    return chosen


@pytest.mark.parametrize(
    ("rounds", "size"),
    [(4, 3), (4, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 3), (2, 3), (1, 2)))],
)
def test_fedcac(rounds, size):
    share, most, clients, numbers = 0.5, 3, full.training_examples(), range(3)
    settings = {"share": share, "collaboration_rounds": most, "participation": size / 3}
    mean = reference.to_numpy(full.start_of("fedcac").params)
    nothing = {name: np.zeros(value.shape, bool) for name, value in mean.items()}
    vs, masks = [mean] * 3, [nothing] * 3

    def model(i):
        return {name: np.where(masks[i][name], vs[i][name], mean[name]) for name in mean}

    for t in range(1, rounds + 1):
        last = full.run("fedcac", rounds=t, **settings)
        cohort = last.cohort.tolist()
        new = {i: full.train(model(i), *clients[i]) for i in cohort}
        chosen = {i: critical(model(i), new[i], share) for i in cohort}
        flat = {i: reference.flat(chosen[i]) for i in cohort}
        overlap = {(i, j): 1 - np.sum(flat[i] != flat[j]) / (2 * flat[i].sum()) for i in cohort for j in cohort}
        others = [o for (i, j), o in overlap.items() if i != j]
        threshold = np.mean(others) + t / most * (max(others) - np.mean(others))
        sizes = full.BETA[cohort]
        mean = reference.mean(sizes / sizes.sum(), [new[i] for i in cohort])
        for i in cohort:
            near = [j for j in cohort if j == i or overlap[i, j] >= threshold - 1e-9]
            vs[i], masks[i] = reference.mean([1 / len(near)] * len(near), [new[j] for j in near]), chosen[i]
    want = [[overlap[i, j] for j in cohort] for i in cohort]
    np.testing.assert_allclose(last.info["overlap"], want, rtol=1e-5)
    full.assert_model(last.state.server.params, mean, rtol=5e-4, atol=5e-5)
    for i in numbers:
        state = row(last.state.clients, i)
        full.assert_model(state.params, vs[i], rtol=5e-4, atol=5e-5)
        full.assert_model(state.critical, masks[i])
    full.assert_received(last, [model(i) for i in numbers])
    # Later than `most` rounds nobody collaborates; both of two clients have the largest overlap.
    assert (np.asarray(last.info["collaborators"]).sum() == 3) == (rounds > most and size == 3)


def test_critical_entries_are_those_that_moved():
    before, after = {"w": jnp.arange(8.0)}, {"w": jnp.arange(8.0) + jnp.array([9, 0, 0, 0.5, 0, 0, 0, 0.25])}
    np.testing.assert_array_equal(critical_entries(before, after, 0.25)["w"], [1, 0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(critical_entries(before, after, 0.5)["w"], [1, 0, 0, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(critical_entries(before, after, 0.0)["w"], np.zeros(8))
    np.testing.assert_array_equal(critical_entries(before, before, 0.25)["w"], np.ones(8))
    statistics = [{"batch_stats": {"norm": tree}, **tree} for tree in (before, after)]
    assert jax.tree.map(jnp.sum, critical_entries(*statistics, 0.25)) == {"batch_stats": {"norm": {"w": 0}}, "w": 2}


LAM, STEPS, SERVER_LR = 2.0, 4, 0.1


def prototypes_of(g):
    return np.maximum(g["e"] @ g["A"] + g["a"], 0) @ g["B"] + g["b"]


def distances(points, prototypes):
    return np.array([[np.linalg.norm(point - prototype) for prototype in prototypes] for point in points])


def largest_margin(rows, labels):
    """The largest distance of a class's mean prototype to the nearest other one."""
    means = [rows[labels == k].mean(0) for k in sorted(set(labels))]
    return max(min(np.linalg.norm(a - b) for b in means if b is not a) for a in means)


@pytest.mark.parametrize(
    ("threshold", "inference"), [(100.0, "prototype"), pytest.param(0.3, "head", marks=pytest.mark.slow)]
)
def test_fedtgp(threshold, inference):
    settings = {"server_batch_size": 16, "server_epochs": STEPS, "inference": inference}
    start, clients = full.start_of("fedtgp", **settings), full.training_examples()
    generator = start.generator
    g = {
        "e": np.float64(generator.embeddings),
        "A": np.float64(generator.hidden["kernel"]),
        "a": np.float64(generator.hidden["bias"]),
        "B": np.float64(generator.output["kernel"]),
        "b": np.float64(generator.output["bias"]),
    }
    ws, prototypes = [reference.to_numpy(start.initial)] * len(clients), None
    for _ in range(2):
        rows, labels = [], []
        for client, (x, y) in enumerate(clients):

            def pull(w, x=x, y=y, known=prototypes):
                return 0.0 if known is None else LAM * reference.alignment(w, x, known[y])

            ws[client] = full.train(ws[client], x, y, pull)
            features = reference.features(ws[client], x)
            labels += sorted(set(y))
            rows += [features[y == k].mean(0) for k in sorted(set(y))]
        rows, labels = np.array(rows), np.array(labels)
        delta = min(largest_margin(rows, labels), threshold)
        # The margin is added to an example's distance to its own class.
        margins = delta * np.eye(CLASSES)[labels]

        def contrast(g, rows=rows, labels=labels, margins=margins):
            return reference.cross_entropy(-distances(rows, prototypes_of(g)) - margins, labels)

        g = full.fit(g, lambda g, now, of=contrast: of(g), STEPS, lr=SERVER_LR, momentum=0.0, weight_decay=0.0)
        prototypes = prototypes_of(g)
    last = full.run("fedtgp", lam=LAM, margin=threshold, server_lr=SERVER_LR, **settings)
    np.testing.assert_allclose(last.info["margin"], delta, rtol=1e-4)
    np.testing.assert_allclose(last.info["server_loss"], contrast(g), rtol=1e-3)
    np.testing.assert_allclose(last.state.server.prototypes, prototypes, rtol=1e-3, atol=1e-4)
    full.assert_models(last.state.clients, ws, rtol=5e-4, atol=5e-5)
    if inference == "head":
        full.assert_received(last, ws)
        return
    for client, w in enumerate(ws):
        x, y = full.unseen_examples(client)
        loss = reference.cross_entropy(-distances(reference.features(w, x), prototypes), y)
        np.testing.assert_allclose(last.received["loss"][client], loss, rtol=1e-3)


def test_the_margin_counts_only_classes_with_prototypes():
    centroids = jnp.zeros((2, CLASSES, FEATURES)).at[0, 1, 0].set(3.0).at[1, 1, 0].set(5.0).at[0, 2, 0].set(90.0)
    counts = jnp.array([[1.0, 7.0, 0.0], [2.0, 1.0, 0.0]])
    assert float(adaptive_margin(Prototypes(centroids, counts), 100.0)) == 4.0
    assert float(adaptive_margin(Prototypes(centroids, counts * jnp.array([1.0, 0.0, 0.0])), 7.0)) == 7.0
    assert float(adaptive_margin(Prototypes(centroids, 0 * counts), 7.0)) == 0.0
    # One client has the first class, the other one the second.
    assert float(adaptive_margin(Prototypes(centroids, jnp.eye(2, CLASSES)), 100.0)) == 5.0


def test_a_prototype_that_is_reached_has_no_gradient():
    gradient = jax.grad(lambda prototypes: fedtgp_distances(jnp.ones((1, 3)), prototypes).sum())(jnp.ones((1, 3)))
    np.testing.assert_array_equal(gradient, 0.0)
