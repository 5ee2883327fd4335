"""FedPAC and FedAS: their equations in float64 NumPy, and their limits."""

import itertools
import math

import chex
import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, received, tiny_federation, tiny_model
from reference import part
from scipy import special
from trees import assert_same

from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, fedpac, fedpac_proto, make_method
from pfl_jax.methods.fedas import _Synchronization
from pfl_jax.primitives import LocalTraining, head_weights, trace_weights

LAM, HEAD = 0.7, {"head_lr": 0.3, "head_epochs": 2}
CENTROIDS = np.random.default_rng(1).normal(size=(CLASSES, FEATURES))


def class_means(features, labels):
    """Mean features [K, d] and number [K] of each class."""
    members = np.eye(CLASSES)[labels]
    counts = members.sum(axis=0)
    return members.T @ features / np.maximum(counts, 1)[:, None], counts


def local(w, x, y, lam, centroids, known):
    """Eq. 15 and 16 from a received model: the trained one, and mean features of classes that the client may lack."""
    means, _ = class_means(reference.features(w, x), y)
    targets = np.where(known[:, None] > 0, centroids, means)[y]
    lam = lam if known.any() else 0.0
    w = full.fit(w, lambda w, now: reference.risk(w, x, y), HEAD["head_epochs"], "head", lr=HEAD["head_lr"])
    return full.fit(
        w, lambda w, now: reference.risk(w, x, y) + lam * reference.alignment(w, x, targets), name="backbone"
    )


def play(factory, weigh, known, alignment=True, **options):
    """Two rounds with these counts of classes before the first; weigh(received models, trained ones) gives alpha."""
    clients, w = full.training_examples(), reference.to_numpy(full.start_of(factory))
    heads, centroids, counts = [part(w, "head")] * len(clients), CENTROIDS, np.array(known)
    for _ in range(2):
        received = [{**w, **head} for head in heads]
        lam = LAM if alignment else 0.0
        trained = [local(v, x, y, lam, centroids, counts) for v, (x, y) in zip(received, clients, strict=True)]
        weights = weigh(received, trained)
        heads = [part(reference.mean(row, trained), "head") for row in weights]
        w = {**w, **part(reference.mean(full.BETA, trained), "backbone")}
        sent = [class_means(reference.features(v, x), y) for v, (x, y) in zip(trained, clients, strict=True)]
        counts = sum(number for _, number in sent)
        centroids = sum(mean * number[:, None] for mean, number in sent) / counts[:, None]
    start = {"centroids": jnp.float32(CENTROIDS), "centroid_counts": jnp.float32(np.array(known))}
    last = full.run(
        factory,
        change=lambda state: state._replace(server=state.server._replace(**start)),
        **{"lam": LAM, "alignment": alignment, **HEAD, **options},
    )
    close = {"rtol": 2e-3, "atol": 2e-4}
    np.testing.assert_allclose(last.info["head_weights"], weights, atol=2e-3)
    full.assert_model(last.state.server, w, **close)
    full.assert_parts(last.state.clients, "head", heads, **close)
    np.testing.assert_allclose(last.state.server.centroids, centroids, **close)
    np.testing.assert_array_equal(last.state.server.centroid_counts, counts)
    full.assert_received(last, [{**w, **head} for head in heads], trained, **close)
    return last


def by_variances(received, _):
    """Alpha of Eq. 44 and 46."""
    statistics = []
    for w, (x, y) in zip(received, full.training_examples(), strict=True):
        features = reference.features(w, x)
        means, counts = class_means(features, y)
        mu = means * counts[:, None] / len(y)
        statistics.append((mu, np.mean(np.sum(features**2, axis=1)) - np.sum(mu**2), features.T @ features / len(y)))
    mu, variance, moments = map(np.array, zip(*statistics, strict=True))
    return reference.head_weights(mu, variance, np.array(full.SIZES)), mu, moments


@pytest.mark.parametrize("covariance", ["identity", "empirical"])
def test_theorem_1(covariance):
    """Eq. 10: the expected test loss of a combined classifier is a bias, a variance and a constant.

    The expectation is over all samples that three clients may draw of four inputs and two labels. The weights of the
    library minimize this loss; with the identity as covariance (Eq. 43) where the features have it.
    """
    rng, sizes, labels = np.random.default_rng(3), (2, 3, 2), 2
    inputs = np.array([0.1, 0.2, 0.3, 0.4])
    features = rng.normal(size=(4, 2))
    features -= inputs @ features
    if covariance == "identity":
        features = features @ np.linalg.inv(np.linalg.cholesky((features.T * inputs) @ features)).T
    inverse = np.linalg.inv((features.T * inputs) @ features)
    # P_XY of each client with the same inputs (Assumption 1).
    joint = inputs[:, None] * rng.dirichlet(np.full(labels, 3.0), size=(3, 4))

    def distance(p, q):
        return np.sum((p - q) ** 2 / inputs[:, None], axis=(-2, -1))

    def model(g):
        return inputs[:, None] * (1 + features @ g) / labels

    def learned(p):
        """The classifier [d, K] that minimizes the distance to a distribution (Eq. 8), by least squares."""
        root = np.sqrt(inputs)[:, None]
        return np.linalg.lstsq(root * features / labels, (p - inputs[:, None] / labels) / root, rcond=None)[0]

    def samples(p, size):
        """All empirical distributions of a sample, and their probabilities."""
        cells = itertools.combinations_with_replacement(range(p.size), size)
        counts = np.array([np.bincount(of, minlength=p.size) for of in cells])
        weights = [math.factorial(size) * np.prod(p.ravel() ** n / special.factorial(n)) for n in counts]
        return counts.reshape(-1, *p.shape) / size, np.array(weights)

    drawn = [samples(p, size) for p, size in zip(joint, sizes, strict=True)]
    assert all(np.isclose(weights.sum(), 1) for _, weights in drawn)
    classifiers = [np.stack([learned(p) for p in found]) for found, _ in drawn]
    chances = np.einsum("a,b,c->abc", *[weights for _, weights in drawn])

    def expected(client, alpha):
        """Eq. 9."""
        first, second, third = (a * g for a, g in zip(alpha, classifiers, strict=True))
        combined = first[:, None, None] + second[:, None] + third
        return np.sum(chances * distance(joint[client], model(combined)))

    means = [np.tensordot(weights, g, 1) for (_, weights), g in zip(drawn, classifiers, strict=True)]
    mu = np.einsum("jxk,xd->jkd", joint, features)
    moments = np.einsum("jxk,xd,xe->jde", joint, features, features)
    variances = np.einsum("jde,de->j", moments, inverse) - np.einsum("jkd,de,jke->j", mu, inverse, mu)
    for client, alpha in itertools.product(range(3), rng.dirichlet(np.ones(3), 4)):
        bias = distance(model(means[client]), sum(a * model(g) for a, g in zip(alpha, means, strict=True)))
        constant = distance(joint[client], model(means[client]))
        variance = np.sum(alpha**2 * variances / sizes)
        assert min(bias, variance, constant) > 1e-4
        np.testing.assert_allclose(expected(client, alpha), bias + variance + constant, rtol=1e-10)

    spread = variances if covariance == "identity" else moments
    got = head_weights(jnp.float32(mu), jnp.float32(spread), jnp.float32(sizes))
    for client, row in enumerate(np.asarray(got)):
        single = [expected(client, alpha) for alpha in np.eye(3)]
        # On the simplex the loss is a quadratic form, whose entries its values between two corners give.
        form = np.diag(single)
        for j, k in itertools.permutations(range(3), 2):
            form[j, k] = 2 * expected(client, (np.eye(3)[j] + np.eye(3)[k]) / 2) - (single[j] + single[k]) / 2
        np.testing.assert_allclose(row, reference.minimizer_on_simplex(form), atol=2e-3)
        assert row.max() < 0.9


@pytest.mark.parametrize("known", [pytest.param((0, 0, 0), marks=pytest.mark.slow), (7, 2, 0)])
def test_fedpac(known):
    last = play(fedpac, lambda *models: by_variances(*models)[0], known)
    assert last.info["gap"].shape == (3,)
    assert 0 < float(last.info["gap"].max()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("option", ["alignment", "collaboration"])
def test_fedpac_without(option):
    weigh = (lambda *models: by_variances(*models)[0]) if option == "alignment" else (lambda *models: np.eye(3))
    play(fedpac, weigh, (7, 2, 5), **{option: False})


def test_fedpac_with_empirical_covariances():
    """Eq. 33, 35 and 37 to 39: a client's own covariance, with a thousandth of its mean eigenvalue on the diagonal."""

    def weigh(*models):
        _, mu, moments = by_variances(*models)
        rows = []
        for own_mu, own in zip(mu, moments, strict=True):
            inverse = np.linalg.inv(own + 1e-3 * np.trace(own) / len(own) * np.eye(len(own)))
            inner = np.einsum("jkd,de,lke->jl", own_mu - mu, inverse, own_mu - mu)
            variance = np.einsum("jde,ed->j", moments, inverse) - np.einsum("jkd,de,jke->j", mu, inverse, mu)
            row = reference.minimizer_on_simplex(inner + np.diag(variance / full.SIZES))
            row[row < 1e-3] = 0
            rows.append(row / row.sum())
        return np.stack(rows)

    play(fedpac, weigh, (0, 0, 0), covariance="empirical")


@pytest.mark.parametrize(
    ("reduction", "reduce"), [("mean", np.mean), pytest.param("sum", np.sum, marks=pytest.mark.slow)]
)
def test_fedpac_proto(reduction, reduce):
    """Eq. 12 and 13 with rows that sum to one, one pair of clients after another."""

    def weigh(_, trained):
        losses = np.zeros((3, 3))
        for j, (x, y) in enumerate(full.training_examples()):
            means, _ = class_means(reference.features(trained[j], x), y)
            for i, w in enumerate(trained):
                scores = reference.log_softmax(means @ w["head/kernel"] + w["head/bias"])
                losses[i, j] = reduce([-scores[k, k] for k in sorted(set(y))])
        return np.exp(-losses) / np.exp(-losses).sum(axis=1, keepdims=True)

    last = play(fedpac_proto, weigh, (0, 0, 0), reduction=reduction)
    assert set(last.info) == {"head_weights"}


# One program for each kind of call; operation by operation, each shape would compile a dozen.
trace_weights = jax.jit(trace_weights, static_argnums=1)


@pytest.mark.parametrize(
    ("target", "manner"),
    [
        pytest.param(target, manner, marks=() if (target, manner) == ("class_mean", "serial") else pytest.mark.slow)
        for target in ("example", "class_mean", "global_class_mean")
        for manner in ("serial", "parallel")
    ],
)
def test_fedas(target, manner):
    start, clients = reference.to_numpy(full.start_of("fedavg")), full.training_examples()
    w, previous, align_lr, lam = start, [None] * len(clients), 0.5, 0.7

    def targets_of(own, x, y):
        if target == "example":
            return reference.features(own, x)
        # `previous` is everybody's model after the last round.
        models, owners = ([own], [(x, y)]) if target == "class_mean" else (previous, clients)
        embeddings = np.concatenate([reference.features(m, x) for m, (x, _) in zip(models, owners, strict=True)])
        labels = np.concatenate([y for _, y in owners])
        return np.stack([embeddings[labels == label].mean(0) for label in y])

    def align(received, own, x, y):
        targets = targets_of(own, x, y)
        if manner == "parallel":
            return received
        return reference.descend(received, lambda w: reference.alignment_gradient(w, x, targets), 1, align_lr)

    def fit(received, own, x, y):
        if own is None or manner == "serial":
            return full.train(received, x, y)
        targets = targets_of(own, x, y)
        return full.train(received, x, y, lambda w: lam * reference.alignment(w, x, targets))

    for _ in range(3):
        trained = []
        for own, (x, y) in zip(previous, clients, strict=True):
            received = dict(w)
            if own is not None:
                received = {**align(w, own, x, y), **reference.part(own, "head")}
            trained.append(fit(received, own, x, y))
        traces = np.array([reference.fisher_trace(t, x, y) for t, (x, y) in zip(trained, clients, strict=True)])
        weights = traces / traces.sum()
        backbone = reference.mean(weights, trained)
        w = {name: backbone[name] if name.startswith("backbone") else start[name] for name in w}
        previous = trained

    options = {"target": target, "manner": manner, "lam": lam, "align_lr": align_lr, "align_batch_size": 32}
    last = full.run("fedas", rounds=3, **options)
    np.testing.assert_allclose(np.asarray(last.info["trace"]), traces, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(last.info["weights"]), weights, rtol=1e-3)
    full.assert_model(last.state.server, w)
    heads = [reference.part(own, "head") for own in previous]
    deployed = [{**align(w, own, x, y), **head} for own, head, (x, y) in zip(previous, heads, clients, strict=True)]
    full.assert_received(last, deployed, trained=previous)


def test_fedas_leaves_out_classes_without_a_global_mean():
    """What nobody of the first cohort holds has no target in the second round: the others alone are aligned."""
    method = make_method("fedas", tiny_model(), target="global_class_mean", batch_size=32, align_lr=0.5)
    server = method.init_server(jax.random.key(0))
    counts = jnp.array([3.0, 0.0, 0.0])
    server = server._replace(centroids=jnp.ones_like(server.centroids), centroid_counts=counts)
    data = client_data(tiny_federation(full.SIZES), 0, "train")
    client = method.init_client(jax.random.key(1), server, data)
    got = jax.jit(method.personalize)(jax.random.key(2), server, client, data)
    x, y = np.float64(data.x)[data.mask], np.asarray(data.y)[data.mask]
    x = x[y == 0]
    want = reference.to_numpy({"backbone": server.backbone, "head": server.head})
    want = reference.descend(want, lambda w: reference.alignment_gradient(w, x, np.ones((len(x), 4))), 1, 0.5)
    assert 0 < len(x) < len(y)
    full.assert_model(got, want)


def test_trace_weights():
    traces = jnp.array([1.0, 3.0, 4.0])
    np.testing.assert_allclose(trace_weights(traces), [1 / 8, 3 / 8, 4 / 8], rtol=1e-6)
    np.testing.assert_allclose(trace_weights(traces, "min_max"), [0, 2 / 5, 3 / 5], rtol=1e-6)
    e = np.exp([1.0, 3.0, 4.0])
    np.testing.assert_allclose(trace_weights(traces, "softmax"), e / e.sum(), rtol=1e-6)
    for normalization in ("proportional", "min_max", "softmax"):
        np.testing.assert_allclose(trace_weights(jnp.full(4, 2.0), normalization), [0.25] * 4, rtol=1e-6)
        assert np.isfinite(trace_weights(jnp.array([0.0, 1e30, 1e-30]), normalization)).all()
        np.testing.assert_allclose(trace_weights(jnp.zeros(5), normalization), [0.2] * 5, rtol=1e-6)
        # An absent client's row is zero, whatever the others have.
        present, among = jnp.array([True, False, True, True]), jnp.array([1.0, 0.0, 3.0, 4.0])
        here = trace_weights(among, normalization, present)
        np.testing.assert_allclose(here[present], trace_weights(traces, normalization), rtol=1e-6)
        assert here[1] == 0


def test_the_mean_of_backbones_without_fisher_information_is_theirs():
    weighting = _Synchronization(tiny_model(), LocalTraining(), True, "proportional", "mean")
    parts = jax.vmap(lambda value: weighting.backbone_part(value, jnp.zeros(()), None))(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(received(parts).value, 2.0, rtol=1e-6)


def test_fedas_without_both_parts_is_fedper():
    # FedAS splits its key between alignment and training: with full batches, order is all that keys decide.
    fedas = full.run("fedas", alignment=False, synchronization=False)
    fedper = full.run("fedper")
    assert_same(fedas.state.server._asdict(), {**fedper.state.server, "centroids": (), "centroid_counts": ()})
    assert_same(fedas.state.clients.head, fedper.state.clients)
    assert_same(fedas.received["loss"], fedper.received["loss"])
    np.testing.assert_allclose(fedas.info["weights"], full.BETA, rtol=1e-6)
    np.testing.assert_array_equal(fedas.info["trace"], 0)


@pytest.mark.parametrize("name", ["fedas", pytest.param("fedas_cd2", marks=pytest.mark.slow)])
def test_the_alignment_compares_embeddings_of_the_original_examples(name):
    data = client_data(tiny_federation(), 1, "train")

    def aligned(augment):
        method = METHODS[name](tiny_model(), LocalTraining(lr=0.01, augment=augment), align_lr=0.5)
        first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
        client = method.init_client(jax.random.key(2), first, data)._replace(trained=jnp.ones((), bool))
        return jax.jit(method.personalize)(jax.random.key(3), later, client, data)

    chex.assert_trees_all_equal(aligned(lambda key, x: 2 * x + 1), aligned(None))
