"""FedPAC and its prototype variant against float64 computations written from the papers' equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, received, tiny_model
from scipy.optimize import nnls
from trees import assert_same

from pfl_jax.base import ClientData, Cohort, Mean
from pfl_jax.methods import make_method
from pfl_jax.methods.fedpac import FedPACMessage, FedPACServer, fedpac
from pfl_jax.methods.fedpac_proto import fedpac_proto, prototype_weights
from pfl_jax.primitives.feature_statistics import label_feature_statistics, second_moment
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.head_combination import (
    RIDGE,
    _drop_negligible,
    _weights_by_variances,
    head_weights,
)

pytestmark = pytest.mark.without_f1_auc

SGD = {"lr": 0.05, "head_lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}


# --- head weights ---------------------------------------------------------------------------------------------------


def groups_of_clients(clients, classes, sizes, seed=0, offset=0.0, features=16):
    """(mu, V, n) of clients that sample features of their group's dominant classes; `offset` is common to all."""
    generator = np.random.default_rng(seed)
    centers = np.abs(generator.normal(size=(classes, features))) + offset
    counts = generator.choice(sizes, clients)
    mu, variance = np.zeros((clients, classes, features)), np.zeros(clients)
    for client in range(clients):
        proportions = np.full(classes, 0.2 / classes)
        proportions[(np.arange(3 * classes // 10) + client % 5 * classes // 5) % classes] += 0.8 / (3 * classes // 10)
        labels = generator.choice(classes, counts[client], p=proportions / proportions.sum())
        samples = centers[labels] + 0.5 * generator.normal(size=(counts[client], features))
        np.add.at(mu[client], labels, samples / counts[client])
        variance[client] = np.mean(np.sum(samples**2, axis=1)) - np.sum(mu[client] ** 2)
    return mu, variance, counts


def reference_head_weights(mu, variance, counts):
    """Eq. 46 by nonnegative least squares in float64, row by row; test_simplex_qp.py says why that is exact."""
    rows = []
    for own in mu:
        differences = (own - mu).reshape(len(mu), -1)
        scale = np.sqrt(np.mean(variance / counts))
        system = np.vstack([differences.T / scale, np.diag(np.sqrt(variance / counts)) / scale, np.ones(len(mu))])
        target = np.append(np.zeros(len(system) - 1), 1.0)
        weights, _ = nnls(system, target)
        weights /= weights.sum()
        weights[weights < 1e-3] = 0
        rows.append(weights / weights.sum())
    return np.stack(rows)


def float32(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


@pytest.mark.parametrize("classes", [10, 62])
@pytest.mark.parametrize("solver", ["auto", "interior_point"])
def test_head_weights_agree_with_a_float64_solve(classes, solver):
    statistics = groups_of_clients(20, classes, [300, 600, 1200])
    got = np.asarray(head_weights(*float32(*statistics), solver=solver))
    np.testing.assert_allclose(got, reference_head_weights(*statistics), atol=2e-3)
    assert (got >= 0).all()
    assert ((got == 0) | (got > 1e-3 * (1 - 1e-6))).all()
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=3e-7)
    # The data say which clients belong together: those of one group hold most of the weight.
    same_group = np.arange(20)[:, None] % 5 == np.arange(20) % 5
    assert (got * same_group).sum(axis=1).min() > 0.5


@pytest.mark.slow
def test_head_weights_of_a_cohort_of_three_hundred_are_optimal():
    mu, variance, counts = float32(*groups_of_clients(300, 10, [300, 600, 1200]))
    # Before weights below 1e-3 are set to zero: of so many clients, these are a part that counts.
    solve = functools.partial(_weights_by_variances, solver="auto")
    solution = in_float64(solve)(mu, variance, counts)
    assert float(solution.gap.max()) < 1e-6
    weights, means = np.float64(solution.weights), np.float64(mu).reshape(300, -1)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    assert (weights >= 0).all()
    noise = np.float64(variance) / np.float64(counts)
    for own, row in zip(means, weights, strict=True):
        # Eq. 46 and half its gradient, written for one client; the gap bounds what any other weights could gain.
        differences = own - means
        gradient = row * noise + differences @ (row @ differences)
        objective = row @ gradient
        assert (objective - gradient.min()) / objective < 1e-3


def test_derivatives_of_head_weights():
    """By the differences of a float64 solve; weights that stay below the threshold have none."""
    mu, variance, counts = groups_of_clients(6, 10, [600])
    toward = np.random.default_rng(1).normal(size=(6, 6))

    def total(mu, variance):
        return jnp.sum(toward * head_weights(mu, variance, jnp.asarray(counts)))

    of_mu, of_variance = jax.jit(jax.grad(total, (0, 1)))(*float32(mu, variance))

    def difference(which, place, step):
        ends = []
        for sign in (1, -1):
            moved = [mu.copy(), variance.copy()]
            moved[which][place] += sign * step
            ends.append(np.sum(toward * reference_head_weights(*moved, counts)))
        return (ends[0] - ends[1]) / (2 * step)

    want = [difference(1, client, 1e-4) for client in range(6)]
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(of_variance, want, rtol=2e-3, atol=1e-5)
    for place in ((0, 1, 2), (3, 5, 0), (5, 0, 7)):
        np.testing.assert_allclose(of_mu[place], difference(0, place, 1e-6), rtol=2e-3, atol=1e-3)


def test_head_weights_survive_large_common_means():
    statistics = groups_of_clients(20, 10, [300, 600, 1200])
    mu, variance, counts = float32(*statistics)
    mu = mu + 16.0  # exactly representable beside mu up to 2^-19
    statistics = np.float64(mu), statistics[1], statistics[2]
    np.testing.assert_allclose(head_weights(mu, variance, counts), reference_head_weights(*statistics), atol=2e-3)


def test_head_weights_of_simple_cohorts():
    def weights(mu, variance, counts):
        return np.asarray(head_weights(*float32(mu, variance, counts), solver="interior_point"))

    np.testing.assert_array_equal(weights(np.ones((1, 2, 2)), [1.0], [5]), [[1]])
    # Equal clients share equally; equal distributions in proportion to n / V; no statistics at all, equally.
    same = np.ones((3, 2, 2))
    np.testing.assert_allclose(weights(same, [2.0] * 3, [50] * 3), np.full((3, 3), 1 / 3), atol=1e-5)
    np.testing.assert_allclose(weights(same, [2.0, 2.0, 1.0], [10, 30, 20]), [[0.125, 0.375, 0.5]] * 3, atol=1e-4)
    np.testing.assert_allclose(weights(0 * same, [0.0] * 3, [5] * 3), np.full((3, 3), 1 / 3), atol=1e-5)
    np.testing.assert_allclose(weights(0 * same, [0.0] * 3, [5, 0, 0])[0], [1, 0, 0], atol=1e-6)
    # Far from everyone else: its own head only. Without examples: weight for nobody.
    far = 1e3 * np.eye(4)[:3].reshape(3, 2, 2)
    np.testing.assert_allclose(weights(far, [1.0] * 3, [10] * 3), np.eye(3), atol=1e-5)
    empty = weights(same * [[[1]], [[1]], [[0]]], [1.0, 1.0, 0.0], [10, 10, 0])
    np.testing.assert_allclose(empty, [[0.5, 0.5, 0]] * 3, atol=1e-5)
    np.testing.assert_array_equal(empty[:, 2], 0)
    # Of so many that all weights are negligible, all stay.
    np.testing.assert_allclose(_drop_negligible(jnp.full((1, 2000), 5e-4)), 5e-4, rtol=1e-5)


def reference_weights_objective(mu, moments, counts, client, weights):
    """Eq. 33 and 35 with the empirical quantities of Eq. 37 to 39, class after class."""
    mean_eigenvalue = np.trace(moments[client]) / moments.shape[-1]
    inverse = np.linalg.inv(moments[client] + RIDGE * mean_eigenvalue * np.eye(moments.shape[-1]))
    objective = 0.0
    for j, weight in enumerate(weights):
        variance = np.trace(inverse @ moments[j]) - sum(row @ inverse @ row for row in mu[j])
        objective += weight**2 * variance / counts[j]
        for k, other in enumerate(weights):
            pairs = zip(mu[client] - mu[j], mu[client] - mu[k], strict=True)
            objective += weight * other * sum(one @ inverse @ two for one, two in pairs)
    return objective


def test_head_weights_with_the_empirical_covariance_of_each_client():
    generator = np.random.default_rng(0)
    counts = np.array([30, 12, 50, 3])  # the last one has fewer examples than features
    statistics = []
    for client, count in enumerate(counts):
        labels = generator.integers(0, 3, count)
        features = np.eye(3, 5)[labels] * (1 + (client == 2)) + generator.normal(size=(count, 5)) * [3, 1, 1, 0.3, 0]
        arrays = jnp.asarray(features, jnp.float32), jnp.asarray(labels), jnp.ones(count, bool)
        np.testing.assert_allclose(second_moment(*arrays[::2]), features.T @ features / count, rtol=1e-4, atol=1e-6)
        statistics.append((label_feature_statistics(*arrays, 3)[0], second_moment(*arrays[::2])))
    mu, moments = (np.stack(part) for part in zip(*statistics, strict=True))
    weights = np.float64(head_weights(jnp.asarray(mu), jnp.asarray(moments), jnp.asarray(counts)))
    mu, moments = np.float64(mu), np.float64(moments)
    for client, row in enumerate(weights):
        best = reference_weights_objective(mu, moments, counts, client, row)
        for other in np.eye(4):
            for step in (0.01, 0.1):
                moved = reference_weights_objective(mu, moments, counts, client, row + step * (other - row))
                assert moved >= best * (1 - 1e-4)
    identity = head_weights(jnp.asarray(mu, jnp.float32), jnp.full(4, 10.0), jnp.asarray(counts))
    assert np.abs(weights - identity).max() > 0.1


def test_padding_has_no_second_moment():
    features = jnp.array([[1.0, 2.0], [3.0, -1.0], [9.0, 9.0]])
    want = np.array([[5.0, -0.5], [-0.5, 2.5]])
    np.testing.assert_allclose(second_moment(features, jnp.array([True, True, False])), want, rtol=1e-6)


# --- one client's round ---------------------------------------------------------------------------------------------


def client(sizes=(5, 4, 3), pad=0, seed=0):
    """ClientData of the tiny model's shape with so many examples of each class."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(CLASSES), sizes))
    inputs = generator.normal(size=(len(labels) + pad, 6)) + np.pad(labels, (0, pad))[:, None]
    mask = jnp.arange(len(labels) + pad) < len(labels)
    return ClientData(jnp.float32(inputs).reshape(-1, 2, 3, 1), jnp.int32(np.pad(labels, (0, pad))), mask)


def real(data):
    """Its examples as float64 x and integer y."""
    return np.float64(data.x)[data.mask], np.asarray(data.y)[data.mask]


def class_means(features, labels):
    """Mean features [K, d] and number [K] of each class."""
    members = np.eye(CLASSES)[labels]
    counts = members.sum(axis=0)
    return members.T @ features / np.maximum(counts, 1)[:, None], counts


def reference_round(server, head, data, lam, head_epochs, epochs):
    """Eq. 15 to 17 and 44 with whole batches, gradients by hand: (model, message)."""
    x, y = real(data)
    w = reference.to_numpy({"backbone": server.backbone, "head": head})
    features = reference.features(w, x)
    means, counts = class_means(features, y)
    known = np.asarray(server.centroid_counts)[:, None] > 0
    targets = np.where(known, np.float64(server.centroids), means)[y]

    def gradient(w, part, strength):
        pull = reference.alignment_gradient(w, x, targets)
        slopes = reference.cross_entropy_gradient(w, x, y)
        return {n: g + strength * pull.get(n, 0.0) for n, g in slopes.items() if n.startswith(part)}

    sgd = {name: SGD[name] for name in ("momentum", "weight_decay")}
    w = reference.descend(w, lambda w: gradient(w, "head", 0), head_epochs, SGD["head_lr"], **sgd)
    w = reference.descend(w, lambda w: gradient(w, "backbone", lam if known.any() else 0), epochs, SGD["lr"], **sgd)
    backbone, head = ({name: w[f"{part}/{name}"] for name in ("kernel", "bias")} for part in ("backbone", "head"))
    mu = means * counts[:, None] / len(y)
    statistics = mu, np.mean(np.sum(features**2, axis=1)) - np.sum(mu**2)
    centroids = Mean(class_means(reference.features(w, x), y)[0], counts)
    return {"backbone": backbone, "head": head}, FedPACMessage(Mean(backbone, len(y)), head, centroids, statistics)


def assert_close(got, want):
    assert_same(got, want, rtol=2e-4, atol=2e-5)


def server_with(centroid_counts, seed=1):
    params = tiny_model().init(jax.random.key(seed))
    centroids = jnp.float32(np.random.default_rng(seed).normal(size=(CLASSES, FEATURES)))
    counts = jnp.float32(np.asarray(centroid_counts))
    return FedPACServer(params["backbone"], params["head"], centroids * (counts > 0)[:, None], counts)


@pytest.mark.parametrize(
    ("centroid_counts", "alignment", "sizes", "pad"),
    [
        ((0, 0, 0), True, (5, 4, 3), 0),
        ((7, 2, 0), True, (5, 4, 3), 4),
        ((7, 2, 5), False, (5, 4, 3), 0),
        ((3, 0, 0), True, (0, 6, 0), 0),
    ],
    ids=["first round", "a class without centroid", "no alignment", "a client that misses classes"],
)
def test_local_training_follows_the_equations(centroid_counts, alignment, sizes, pad):
    data, server = client(sizes, pad), server_with(centroid_counts)
    head = jax.tree.map(lambda leaf: leaf + 0.1, server.head)
    method = make_method(
        fedpac, tiny_model(), lam=0.7, alignment=alignment, batch_size=20, epochs=3, head_epochs=2, **SGD
    )
    result = jax.jit(method.local)(jax.random.key(0), server, head, data)
    model, message = reference_round(server, head, data, 0.7 if alignment else 0.0, head_epochs=2, epochs=3)
    assert_close(result.message, message)
    assert_close(result.client, model["head"])
    assert_close(result.personal, model)


def test_fedpac_and_fedpac_proto_train_alike():
    server, data = server_with((2, 2, 2)), client()
    methods = [make_method(factory, tiny_model(), batch_size=4, epochs=2, **SGD) for factory in (fedpac, fedpac_proto)]
    results = [jax.jit(method.local)(jax.random.key(3), server, server.head, data) for method in methods]
    jax.tree.map(np.testing.assert_array_equal, results[0].personal, results[1].personal)
    assert jax.tree.leaves(results[1].message.statistics) == []


# --- the server's round ---------------------------------------------------------------------------------------------


def random_messages(clients, class_counts, seed=0):
    """Messages with random models and statistics; class_counts [M, K]."""
    generator = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: jnp.float32(generator.normal(size=(clients, *leaf.shape))), tiny_model().init(jax.random.key(0))
    )
    counts = jnp.float32(np.asarray(class_counts))
    centroids = jnp.float32(generator.normal(size=(clients, CLASSES, FEATURES))) * (counts > 0)[..., None]
    mu = centroids * (counts / counts.sum(axis=1, keepdims=True))[..., None]
    statistics = (mu, jnp.float32(generator.uniform(1, 2, clients)))
    backbone = Mean(params["backbone"], jnp.sum(counts, axis=1))
    return FedPACMessage(backbone, params["head"], Mean(centroids, counts), statistics)


CLASS_COUNTS = [[4, 3, 0], [10, 0, 0], [1, 19, 0]]
COHORT = Cohort(jnp.array([2, 0, 5]), jnp.array([7, 10, 20]), jnp.ones(3, bool), 6)


def combined(weights, trees):
    return jax.tree.map(lambda leaf: np.einsum("ij,j...->i...", np.float64(weights), np.float64(leaf)), trees)


def test_the_empirical_covariance_is_sent_and_weights_the_heads():
    data, server = client(pad=2), server_with((0, 0, 0))
    method = make_method(fedpac, tiny_model(), covariance="empirical", batch_size=4, **SGD)
    message = jax.jit(method.local)(jax.random.key(3), server, server.head, data).message
    features = reference.features(reference.to_numpy(server), real(data)[0])
    assert_close(message.statistics[1], features.T @ features / len(features))
    messages = random_messages(3, CLASS_COUNTS)
    moments = jnp.eye(FEATURES) * jnp.arange(2.0, 5.0)[:, None, None]
    messages = messages._replace(statistics=(messages.statistics[0], moments))
    _, clients, info = method.aggregate(jax.random.key(0), server, messages.head, received(messages), COHORT)
    want = head_weights(*messages.statistics, COHORT.counts)
    np.testing.assert_allclose(info["head_weights"], want, rtol=1e-5)
    assert_close(clients, combined(want, messages.head))


@pytest.mark.parametrize("collaboration", [True, False])
def test_the_server_follows_the_equations(collaboration):
    server, messages = server_with((1, 0, 4)), random_messages(3, CLASS_COUNTS)
    method = fedpac(tiny_model(), collaboration=collaboration)
    new, clients, info = jax.jit(method.aggregate)(jax.random.key(0), server, messages.head, received(messages), COHORT)
    beta = np.array([7, 10, 20]) / 37
    assert_close(
        new.backbone, jax.tree.map(lambda leaf: np.tensordot(beta, np.float64(leaf), 1), messages.backbone.value)
    )
    assert_close(new.head, server.head)
    # Class 0: all three clients; class 1: the first and the last; class 2: nobody, so the old centroid stays.
    centroids = np.float64(messages.centroids.value)
    np.testing.assert_allclose(
        new.centroids[0], (4 * centroids[0, 0] + 10 * centroids[1, 0] + centroids[2, 0]) / 15, rtol=1e-5
    )
    np.testing.assert_allclose(new.centroids[1], (3 * centroids[0, 1] + 19 * centroids[2, 1]) / 22, rtol=1e-5)
    np.testing.assert_array_equal(new.centroids[2], server.centroids[2])
    np.testing.assert_array_equal(new.centroid_counts, [15, 22, 4])

    mu, variance = map(np.float64, messages.statistics)
    want = reference_head_weights(mu, variance, np.array([7, 10, 20])) if collaboration else np.eye(3)
    np.testing.assert_allclose(info["head_weights"], want, atol=2e-3)
    assert info["gap"].shape == (3,)
    assert float(info["gap"].max()) < 1e-6
    assert_close(clients, combined(info["head_weights"], messages.head))


def test_clients_start_from_the_servers_head_and_deploy_what_they_received():
    method = fedpac(tiny_model())
    server = method.init_server(jax.random.key(4))
    np.testing.assert_array_equal(server.centroid_counts, 0)
    head = method.init_client(jax.random.key(5), server, client())
    jax.tree.map(np.testing.assert_array_equal, head, server.head)
    head = jax.tree.map(lambda leaf: leaf + 1, head)
    personal = method.personalize(jax.random.key(6), server, head, client())
    jax.tree.map(np.testing.assert_array_equal, personal, {"backbone": server.backbone, "head": head})
    logits = reference.logits(reference.to_numpy(personal), real(client())[0])
    np.testing.assert_allclose(method.predict(personal, client().x), logits, rtol=1e-4, atol=1e-5)


# --- prototype weights ----------------------------------------------------------------------------------------------


def reference_prototype_weights(heads, centroids, counts, reduce):
    """Eq. 12 and 13 with rows that sum to one, one pair of clients after another."""
    clients = len(counts)
    losses = np.zeros((clients, clients))
    for i in range(clients):
        for j in range(clients):
            terms = []
            for k in np.flatnonzero(counts[j]):
                logits = centroids[j, k] @ heads["kernel"][i] + heads["bias"][i]
                terms.append(np.log(np.exp(logits).sum()) - logits[k])
            losses[i, j] = reduce(terms)
    weights = np.exp(-losses)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("reduction", "reduce"), [("mean", np.mean), ("sum", np.sum)])
def test_prototype_weights_are_a_softmax_over_the_other_clients_losses(reduction, reduce):
    messages = random_messages(3, CLASS_COUNTS)
    got = prototype_weights(tiny_model(), messages.head, *messages.centroids, reduction)
    heads = jax.tree.map(np.float64, messages.head)
    want = reference_prototype_weights(heads, np.float64(messages.centroids.value), np.asarray(CLASS_COUNTS), reduce)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    np.testing.assert_allclose(np.sum(got, axis=1), 1, atol=1e-6)


def test_prototype_weights_of_a_client_without_examples_are_zero():
    messages = random_messages(3, [[4, 3, 0], [0, 0, 0], [1, 19, 0]])
    got = prototype_weights(tiny_model(), messages.head, *messages.centroids)
    np.testing.assert_array_equal(got[:, 1], 0)
    np.testing.assert_allclose(np.sum(got, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_prototype_server_combines_heads_by_prototype_weights(reduction):
    server, messages = server_with((1, 0, 4)), random_messages(3, CLASS_COUNTS)._replace(statistics=())
    messages = messages._replace(centroids=tuple(messages.centroids))
    new, clients, info = fedpac_proto(tiny_model(), reduction=reduction).aggregate(
        jax.random.key(0), server, messages.head, received(messages), COHORT
    )
    want = prototype_weights(tiny_model(), messages.head, *messages.centroids, reduction)
    np.testing.assert_allclose(info["head_weights"], want, rtol=1e-6)
    assert_close(clients, combined(want, messages.head))
    np.testing.assert_array_equal(new.centroid_counts, [15, 22, 4])


def test_head_weights_take_memory_that_grows_with_the_square_of_the_cohort():
    clients = 64
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((clients, 2, 3), (clients,), (clients,))]
    program = jax.jit(functools.partial(head_weights, solver="interior_point")).lower(*shapes).compile()
    # M matrices [M, M] in float64 would be 2.1 MB.
    assert program.memory_analysis().temp_size_in_bytes < clients**3 * 8 / 2
