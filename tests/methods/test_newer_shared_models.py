"""Per-FedAvg, MOON, FedDyn and FedDBE: whole rounds against float64 NumPy, with full batches, and their limits."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import tiny_federation, tiny_model
from trees import assert_same

from pfl_jax import ClientData
from pfl_jax.data import client_data
from pfl_jax.methods import feddbe, feddyn, make_method, moon, per_fedavg
from pfl_jax.methods.moon import contrastive_loss
from pfl_jax.methods.per_fedavg import deal


def move(w, distance, direction):
    return {name: value + distance * direction[name] for name, value in w.items()}


@pytest.mark.parametrize("kind", [pytest.param("first_order", marks=pytest.mark.slow), "hessian_free"])
def test_per_fedavg(kind):
    clients = full.training_examples()
    inner_lr, delta, parts = 0.3, 0.02, {"first_order": 2, "hessian_free": 3}[kind]
    w = reference.to_numpy(full.start_of(per_fedavg))
    for _ in range(2):
        trained = []
        for x, y in clients:
            step = iter(range(3))

            def gradient(w, x=x, y=y, step=step):
                turn = next(step)

                def on(part, w):
                    rows = slice((part - turn) % parts, None, parts)
                    return reference.cross_entropy_gradient(w, x[rows], y[rows])

                meta = on(1, move(w, -inner_lr, on(0, w)))
                if kind == "first_order":
                    return meta
                ahead, behind = on(2, move(w, delta, meta)), on(2, move(w, -delta, meta))
                product = {name: (ahead[name] - behind[name]) / (2 * delta) for name in w}
                return move(meta, -inner_lr, product)

            trained.append(reference.descend(w, gradient, 3, **full.SGD))
        # Sizes do not matter.
        w = reference.mean(np.full(3, 1 / 3), trained)
    last = full.run(per_fedavg, inner_lr=inner_lr, delta=delta, meta_gradient=kind)
    full.assert_model(last.state.server, w)

    def adapted(models):
        pairs = zip(models, clients, strict=True)
        return [move(w, -inner_lr, reference.cross_entropy_gradient(w, x, y)) for w, (x, y) in pairs]

    full.assert_received(last, adapted([w] * 3), adapted(trained))


def test_per_fedavg_deals_rows_in_the_order_of_the_data():
    rows = jnp.array([7, 1, 4, 2, 0, 0])
    batch = ClientData(10.0 * rows, (rows + 20, rows), jnp.arange(6) < 4)
    for step, want in enumerate([[[10, 70], [20, 0], [40, 0]], [[40, 0], [10, 70], [20, 0]]]):
        dealt = deal(batch, 3, step)
        assert [one.x.tolist() for one in dealt] == want
        assert [one.y.tolist() for one in dealt] == [[x / 10 + 20 for x in one] for one in want]
        assert [one.mask.sum() for one in dealt] == [2 if 10 in one else 1 for one in want]
    # A part without an example has those of the first row.
    few = deal(batch._replace(mask=jnp.arange(6) < 2), 3, 2)
    assert [one.x[one.mask].tolist() for one in few] == [[70], [10], [10]]


def contrast(z, near, far, temperature):
    """MOON's term of features z for fixed z+ and z-."""

    def cosine(other):
        return (z * other).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(other, axis=1)

    return np.mean(np.log1p(np.exp((cosine(far) - cosine(near)) / temperature)))


def test_moon():
    clients = full.training_examples()
    mu, temperature = 2.0, 0.4
    w, previous = reference.to_numpy(full.start_of(moon)), [None] * len(clients)
    for _ in range(3):
        trained = []
        for (x, y), before in zip(clients, previous, strict=True):

            def loss(v, now, w=w, x=x, y=y, before=before):
                own = reference.cross_entropy(reference.logits(v, x), y)
                if before is None:
                    return own
                z, near, far = (reference.features(model, x) for model in (v, w, before))
                return own + mu * contrast(z, near, far, temperature)

            trained.append(full.fit(w, loss))
        w, previous = reference.mean(full.BETA, trained), trained
    last = full.run(moon, rounds=3, mu=mu, temperature=temperature)
    full.assert_model(last.state.server, w)
    full.assert_models(last.state.clients.params, previous)
    assert last.state.clients.trained.all()
    full.assert_received(last, [w] * 3)


def test_moons_term_ignores_padding_and_features_of_zero():
    z = jnp.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    near, far = jnp.array([[3.0, 4.0], [1.0, 1.0], [9.0, 9.0]]), jnp.array([[-3.0, -4.0], [1.0, 0.0], [0.0, 9.0]])
    mask = jnp.array([True, True, False])
    value, gradient = jax.value_and_grad(contrastive_loss)(z, near, far, mask, 0.5)
    # Cosines 1 and -1 in the first row, 0 and 0 in the second.
    np.testing.assert_allclose(value, (np.log1p(np.exp(-4)) + np.log(2)) / 2, rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert not gradient[2].any()


def test_feddyn():
    clients = full.training_examples()
    lam = 0.3
    w = reference.to_numpy(full.start_of(feddyn).params)
    zero = {name: np.zeros_like(value) for name, value in w.items()}
    linear, drift = [zero] * len(clients), zero
    for _ in range(3):
        trained = [
            full.train(w, x, y, more=lambda v, r=r, w=w: {name: lam * (r[name] + v[name] - w[name]) for name in v})
            for (x, y), r in zip(clients, linear, strict=True)
        ]
        linear = [{name: r[name] + v[name] - w[name] for name in w} for r, v in zip(linear, trained, strict=True)]
        mean = reference.mean(np.full(3, 1 / 3), trained)
        drift = {name: drift[name] + mean[name] - w[name] for name in w}
        w = {name: mean[name] + drift[name] for name in w}
    last = full.run(feddyn, rounds=3, lam=lam)
    full.assert_model(last.state.server.params, w)
    full.assert_model(last.state.server.drift, drift)
    full.assert_models(last.state.clients.drift, linear)
    full.assert_received(last, [w] * 3)


def test_feddbe():
    clients = full.training_examples()
    kappa, mean_rate = 5.0, 0.4
    w = reference.to_numpy(full.start_of(feddbe).params)
    consensus = np.zeros(4)
    for beta, (x, y) in zip(full.BETA, clients, strict=True):
        # Before the first round: plain training, in which the mean follows the features.
        mean = np.zeros(4)
        for steps in range(3):
            mean = (1 - mean_rate) * mean + mean_rate * reference.features(full.train(w, x, y, steps=steps), x).mean(0)
        consensus = consensus + beta * mean
    biases = [np.zeros(4)] * 3
    for _ in range(2):
        trained = []
        for client, (x, y) in enumerate(clients):
            means = [np.zeros(4)]

            def moved(v, x=x, means=means):
                return (1 - mean_rate) * means[-1] + mean_rate * reference.features(v, x).mean(0)

            def loss(v, x=x, y=y, moved=moved):
                scores = (reference.features(v, x) + v["bias"]) @ v["head/kernel"] + v["head/bias"]
                return reference.cross_entropy(scores, y) + kappa / 2 * np.mean((moved(v) - consensus) ** 2)

            v, velocity = {**w, "bias": biases[client]}, {}
            for _ in range(full.EPOCHS):
                now = moved(v)
                v = full.step(v, velocity, loss)
                means.append(now)
            trained.append(v)
        biases = [v.pop("bias") for v in trained]
        w = reference.mean(full.BETA, trained)
    last = full.run(feddbe, kappa=kappa, mean_rate=mean_rate)
    np.testing.assert_allclose(last.state.server.consensus, consensus, rtol=2e-4, atol=2e-5)
    full.assert_model(last.state.server.params, w)
    np.testing.assert_allclose(last.state.clients, biases, rtol=2e-4, atol=2e-5)
    for client, bias in enumerate(biases):
        x, y = full.unseen_examples(client)
        scores = (reference.features(w, x) + bias) @ w["head/kernel"] + w["head/bias"]
        np.testing.assert_allclose(last.received["loss"][client], reference.cross_entropy(scores, y), rtol=2e-4)


def test_moon_has_no_term_without_a_previous_model():
    # A model that has moved since the client's first one: features of that one would be seen.
    data, key = client_data(tiny_federation(full.SIZES), 1, "train"), jax.random.key(3)
    method, plain = (make_method(name, tiny_model(), epochs=full.EPOCHS, **full.SGD) for name in ("moon", "fedavg"))
    first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
    client, local = method.init_client(key, first, data), jax.jit(method.local)
    want = jax.jit(plain.local)(key, later, (), data).personal
    assert_same(local(key, later, client, data).personal, want)
    moved = local(key, later, client._replace(trained=jnp.ones((), bool)), data).personal
    assert float(jnp.abs(moved["backbone"]["kernel"] - want["backbone"]["kernel"]).max()) > 1e-3
