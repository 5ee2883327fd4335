"""FedAS: whole rounds against float64 NumPy, with full batches, its limit, and whom it aligns."""

import chex
import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import received, tiny_federation, tiny_model
from trees import assert_same

from pfl_jax.data.federated import client_data
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.fedas import _Synchronization
from pfl_jax.primitives.fisher import trace_weights
from pfl_jax.primitives.local_training import LocalTraining

# One program for each kind of call; operation by operation, each shape would compile a dozen.
trace_weights = jax.jit(trace_weights, static_argnums=1)


@pytest.mark.parametrize(
    ("target", "manner"),
    [
        ("example", "parallel"),
        ("class_mean", "serial"),
        ("global_class_mean", "serial"),
        *(
            pytest.param(*choices, marks=pytest.mark.slow)
            for choices in (("example", "serial"), ("class_mean", "parallel"), ("global_class_mean", "parallel"))
        ),
    ],
)
def test_fedas(target, manner):
    start, clients = reference.to_numpy(full.start_of(METHODS["fedavg"])), full.training_examples()
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

        def pull(w):
            return {name: lam * slope for name, slope in reference.alignment_gradient(w, x, targets).items()}

        return full.train(received, x, y, more=pull)

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
    last = full.run(METHODS["fedas"], rounds=3, **options)
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
    got = method.personalize(jax.random.key(2), server, client, data)
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
    fedas = full.run(METHODS["fedas"], alignment=False, synchronization=False)
    fedper = full.run(METHODS["fedper"])
    assert_same(fedas.state.server._asdict(), {**fedper.state.server, "centroids": (), "centroid_counts": ()})
    assert_same(fedas.state.clients.head, fedper.state.clients)
    assert_same(fedas.received["loss"], fedper.received["loss"])


@pytest.mark.parametrize("name", ["fedas", "fedas_cd2"])
def test_the_alignment_compares_embeddings_of_the_original_examples(name):
    data = client_data(tiny_federation(), 1, "train")

    def aligned(augment):
        method = METHODS[name](tiny_model(), LocalTraining(augment=augment), align_lr=0.5)
        first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
        client = method.init_client(jax.random.key(2), first, data)._replace(trained=jnp.ones((), bool))
        return jax.jit(method.personalize)(jax.random.key(3), later, client, data)

    chex.assert_trees_all_equal(aligned(lambda key, x: 2 * x + 1), aligned(None))
