"""Whole rounds of the simpler methods against float64 NumPy, with full batches so that no order is left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import received, tiny_federation, tiny_model
from rounds import first_state, last_round

from pfl_jax.data.federated import client_data
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.fedas import _Synchronization
from pfl_jax.primitives.fisher import trace_weights
from pfl_jax.primitives.local_training import LocalTraining

# One program for each kind of call; operation by operation, each shape would compile a dozen.
trace_weights = jax.jit(trace_weights, static_argnums=1)

pytestmark = pytest.mark.without_f1_auc

SIZES, EPOCHS = (9, 20, 14), 3
SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
BETA = np.array(SIZES) / sum(SIZES)


@pytest.fixture(scope="module")
def problem():
    """Data, the initial model as the engine draws it, and each client's examples."""
    data = tiny_federation(SIZES)
    start = reference.to_numpy(first_state(METHODS["fedavg"], data, 4).server)
    return data, start, [reference.examples(data, client) for client in range(len(SIZES))]


def run(name, data, rounds, **hyper_parameters):
    return last_round(METHODS[name], data, 4, rounds, batch_size=32, epochs=EPOCHS, **SGD, **hyper_parameters)


def train(w, x, y):
    return reference.descend(w, lambda w: reference.cross_entropy_gradient(w, x, y), EPOCHS, **SGD)


def assert_loss(scores, index, w, data):
    """A client's loss on its test examples is that of the model w."""
    np.testing.assert_allclose(scores["loss"][index], reference.loss(w, data, index), rtol=2e-4, atol=2e-5)


def assert_model(got, want):
    for name, value in reference.to_numpy(got).items():
        np.testing.assert_allclose(value, want[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_local(problem):
    data, w, clients = problem
    last = run("local", data, 2)
    for index, (x, y) in enumerate(clients):
        own = train(train(w, x, y), x, y)
        assert_model(jax.tree.map(lambda leaf, index=index: leaf[index], last.state.clients), own)
        assert_loss(last.received, index, own, data)
        assert_loss(last.trained, index, own, data)


def test_fedavg_and_its_fine_tuning(problem):
    data, w, clients = problem
    for _ in range(2):
        trained = [train(w, x, y) for x, y in clients]
        w = reference.mean(BETA, trained)
    last, tuned = run("fedavg", data, 2), run("fedavg_ft", data, 2, finetune_epochs=EPOCHS)
    assert_model(last.state.server, w)
    for index, (x, y) in enumerate(clients):
        assert_loss(last.trained, index, trained[index], data)
        assert_loss(last.received, index, w, data)
        assert_loss(tuned.received, index, train(w, x, y), data)


def test_fedper(problem):
    data, w, clients = problem
    heads = [{name: value for name, value in w.items() if name.startswith("head")}] * len(clients)
    for _ in range(2):
        trained = [train({**w, **head}, x, y) for head, (x, y) in zip(heads, clients, strict=True)]
        heads = [{name: value for name, value in t.items() if name.startswith("head")} for t in trained]
        w = {**reference.mean(BETA, trained), **{name: w[name] for name in heads[0]}}
    last = run("fedper", data, 2)
    assert_model(last.state.server, w)
    for index, head in enumerate(heads):
        np.testing.assert_allclose(last.state.clients["kernel"][index], head["head/kernel"], rtol=2e-4, atol=2e-5)
        assert_loss(last.received, index, {**w, **head}, data)


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
def test_fedas(problem, target, manner):
    data, start, clients = problem
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
            return train(received, x, y)
        targets = targets_of(own, x, y)

        def gradient(w):
            pull = reference.alignment_gradient(w, x, targets)
            return {n: g + lam * pull.get(n, 0.0) for n, g in reference.cross_entropy_gradient(w, x, y).items()}

        return reference.descend(received, gradient, EPOCHS, **SGD)

    for _ in range(3):
        trained = []
        for own, (x, y) in zip(previous, clients, strict=True):
            received = dict(w)
            if own is not None:
                received = {**align(w, own, x, y), **{n: v for n, v in own.items() if n.startswith("head")}}
            trained.append(fit(received, own, x, y))
        traces = np.array([reference.fisher_trace(t, x, y) for t, (x, y) in zip(trained, clients, strict=True)])
        weights = traces / traces.sum()
        backbone = reference.mean(weights, trained)
        w = {name: backbone[name] if name.startswith("backbone") else start[name] for name in w}
        previous = trained

    options = {"target": target, "manner": manner, "lam": lam, "align_lr": align_lr, "align_batch_size": 32}
    last = run("fedas", data, 3, **options)
    np.testing.assert_allclose(np.asarray(last.info["trace"]), traces, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(last.info["weights"]), weights, rtol=1e-3)
    assert_model(last.state.server, w)
    for index, (x, y) in enumerate(clients):
        head = {name: value for name, value in previous[index].items() if name.startswith("head")}
        deployed = {**align(w, previous[index], x, y), **head}
        assert_loss(last.received, index, deployed, data)
        assert_loss(last.trained, index, previous[index], data)


def test_fedas_leaves_out_classes_without_a_global_mean():
    """What nobody of the first cohort holds has no target in the second round: the others alone are aligned."""
    method = make_method("fedas", tiny_model(), target="global_class_mean", batch_size=32, epochs=EPOCHS, align_lr=0.5)
    server = method.init_server(jax.random.key(0))
    counts = jnp.array([3.0, 0.0, 0.0])
    server = server._replace(centroids=jnp.ones_like(server.centroids), centroid_counts=counts)
    data = client_data(tiny_federation(SIZES), 0, "train")
    client = method.init_client(jax.random.key(1), server, data)
    got = method.personalize(jax.random.key(2), server, client, data)
    x, y = np.float64(data.x)[data.mask], np.asarray(data.y)[data.mask]
    x = x[y == 0]
    want = reference.to_numpy({"backbone": server.backbone, "head": server.head})
    want = reference.descend(want, lambda w: reference.alignment_gradient(w, x, np.ones((len(x), 4))), 1, 0.5)
    assert 0 < len(x) < len(y)
    assert_model(got, want)


@pytest.mark.slow
def test_fisher_sum_is_mean_times_size(problem):
    data = problem[0]
    mean, total = (run("fedas", data, 1, reduction=reduction) for reduction in ("mean", "sum"))
    ratio = np.asarray(total.info["trace"]) / np.asarray(mean.info["trace"])
    np.testing.assert_allclose(ratio, SIZES, rtol=1e-4)


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
    with pytest.raises(ValueError, match="normalization"):
        trace_weights(traces, "max")


def test_the_mean_of_backbones_without_fisher_information_is_theirs():
    weighting = _Synchronization(tiny_model(), LocalTraining(), True, "proportional", "mean")
    parts = jax.vmap(lambda value: weighting.backbone_part(value, jnp.zeros(()), None))(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(received(parts).value, 2.0, rtol=1e-6)
