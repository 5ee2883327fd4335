"""CFL, FedNH and FedSAM, which recent papers compare with most: equations in float64 NumPy."""

import itertools

import full_batches as full
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from trees import row

from pfl_jax.methods.cfl import second_halves


def test_fedsam():
    rho, w = 0.3, reference.to_numpy(full.start_of("fedsam"))
    for _ in range(2):
        trained = []
        for x, y in full.training_examples():

            def gradient(w, x=x, y=y):
                slopes = reference.cross_entropy_gradient(w, x, y)
                length = rho / np.sqrt(sum((slope**2).sum() for slope in slopes.values()))
                return reference.cross_entropy_gradient({k: w[k] + length * slopes[k] for k in w}, x, y)

            trained.append(reference.descend(w, gradient, full.EPOCHS, **full.SGD))
        w = reference.mean(full.BETA, trained)
    last = full.run("fedsam", rho=rho)
    full.assert_model(last.state.server, w)
    full.assert_received(last, [w] * 3, trained)


def directions(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


@pytest.mark.parametrize("smoothing", [0.6, 0.0])
def test_fednh(smoothing):
    start = full.start_of("fednh", scale=5.0)
    prototypes = np.float64(start.prototypes)
    np.testing.assert_allclose(prototypes @ prototypes.T, np.eye(3), atol=1e-6)
    w = {f"backbone/{name}": np.float64(leaf) for name, leaf in start.trained.backbone.items()}
    w["scale"] = np.full(1, 5.0)
    for _ in range(2):
        trained, sums = [], np.zeros_like(prototypes)
        for x, y in full.training_examples():

            def loss(w, now, x=x, y=y, prototypes=prototypes):
                scores = w["scale"] * directions(reference.features(w, x)) @ prototypes.T
                return reference.cross_entropy(scores, y)

            trained.append(full.fit(w, loss))
            found = directions(reference.features(trained[-1], x))
            for k in set(y):
                sums[k] += np.sum(y == k) * directions(found[y == k].mean(0, keepdims=True))[0]
        w = reference.mean(full.BETA, trained)
        moved = directions(smoothing * prototypes + (1 - smoothing) * directions(sums))
        prototypes = np.where(np.any(sums != 0, axis=1, keepdims=True), moved, prototypes)
    server = full.run("fednh", smoothing=smoothing, scale=5.0).state.server
    np.testing.assert_allclose(server.prototypes, prototypes, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(server.trained.scale, w["scale"][0], rtol=1e-4)
    for name, leaf in server.trained.backbone.items():
        np.testing.assert_allclose(leaf, w[f"backbone/{name}"], rtol=1e-3, atol=1e-4)


def test_cfl():
    clients, w = full.training_examples(), reference.to_numpy(row(full.start_of("cfl").models, 0))
    clusters = [(w, [0, 1, 2])]
    for t in range(3):
        found = []
        for w, members in clusters:
            trained = {i: full.train(w, *clients[i]) for i in members}
            change = {i: reference.flat(trained[i]) - reference.flat(w) for i in members}
            parts = [members]
            if t == 1:
                # Of three clients, the one that is least like the other two leaves, or the first of all stays alone.
                def nearest(i, change=change):
                    cosines = [
                        change[i] @ change[j] / np.linalg.norm(change[i]) / np.linalg.norm(change[j])
                        for j in change
                        if j != i
                    ]
                    return max(cosines)

                alone = min(members, key=nearest)
                parts = sorted([[alone], [i for i in members if i != alone]])
            sizes = [full.BETA[part] for part in parts]
            found += [
                (reference.mean(size / size.sum(), [trained[i] for i in part]), part)
                for size, part in zip(sizes, parts, strict=True)
            ]
        clusters = found
    last = full.run("cfl", rounds=3, clusters=3, warmup_rounds=1, mean_norm=9.0, largest_norm=0.01)
    number = np.asarray(last.state.clients)
    assert int(last.state.server.used) == len(clusters) == 2
    for c, (w, members) in enumerate(clusters):
        assert np.flatnonzero(number == c).tolist() == members
        full.assert_model(row(last.state.server.models, c), w)
    # No cluster splits if the mean change is not small or no change is large.
    for threshold in ({"mean_norm": 0.01, "largest_norm": 0.01}, {"mean_norm": 9.0, "largest_norm": 9.0}):
        assert int(full.run("cfl", rounds=3, warmup_rounds=1, **threshold).state.server.used) == 1


@pytest.mark.parametrize("kind", ["single", "complete"])
def test_halves_of_clusters(kind):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        similarity = np.triu(rng.uniform(-1, 1, (9, 9)), 1)
        similarity = similarity + similarity.T + np.eye(9)
        # Two clusters, a pair, a single client, and one who is absent.
        cluster, present = np.array([0, 1, 0, 1, 0, 1, 0, 2, 2]), np.arange(9) != 4
        together = (cluster[:, None] == cluster) & present & present[:, None]
        second = np.asarray(second_halves(jnp.array(similarity), jnp.array(together), kind))
        for c in range(3):
            members = np.flatnonzero((cluster == c) & present)
            part = similarity[np.ix_(members, members)]
            if kind == "single":
                splits = [
                    np.array([False, *rest])
                    for rest in itertools.product([False, True], repeat=len(members) - 1)
                    if any(rest)
                ]
                want = min(splits, key=lambda other, part=part: part[~other][:, other].max())
            else:
                labels = fcluster(linkage(squareform(1 - part, checks=False), "complete"), 2, "maxclust")
                want = labels != labels[0]
            assert second[members].tolist() == want.tolist()
        assert not second[~present].any()
