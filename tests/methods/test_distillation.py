"""Methods whose clients learn from outputs of other models: whole rounds against float64 NumPy, with full batches."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, received, tiny_federation, tiny_method, tiny_model
from trees import assert_flat, assert_same, flatten, row

from pfl_jax import InvalidInput, Settings, simulate
from pfl_jax.base import Cohort
from pfl_jax.data import client_data
from pfl_jax.engine.asynchronous import Timetable
from pfl_jax.methods import fedgen, fedmrl
from pfl_jax.methods.fedkd import low_rank
from pfl_jax.primitives.fingerprints import fingerprint, fingerprint_key


def probabilities(w, x, temperature=1.0):
    return np.exp(reference.log_softmax(reference.logits(w, x) / temperature))


def learned(w, x, targets):
    """Mean cross entropy with probabilities as targets."""
    return -np.mean(np.sum(targets * reference.log_softmax(reference.logits(w, x)), axis=1))


def divergence(w, x, teacher):
    """Mean KL(teacher's probabilities || those of w)."""
    p = probabilities(teacher, x)
    return np.mean(np.sum(p * (np.log(p) - reference.log_softmax(reference.logits(w, x))), axis=1))


def test_late_outputs_of_fd_count_as_they_are():
    """A client takes its own outputs out of the sum: it must know with which weight they are in it."""
    late = Timetable(np.array([[0, 1, 2]] * 3), np.array([[0, 0, 0], [0, 1, 0], [1, 0, 2]]), np.arange(3))
    settings, data = Settings(rounds=3, timetable=late), tiny_federation(full.SIZES)
    *_, last = simulate.run(tiny_method("fd"), data, settings, jax.random.key(4))
    server, clients = last.state.server.plain, last.state.clients
    np.testing.assert_array_equal(server.holders, np.sum(clients.held, axis=0))
    total = np.sum(np.asarray(clients.held)[..., None] * clients.outputs, axis=0)
    np.testing.assert_allclose(server.outputs * server.holders[:, None], total, rtol=1e-5, atol=1e-6)


def test_fd():
    """Two of three clients in each round: the teachers of a client are the others of the last cohort."""
    clients, lam = full.training_examples(), 0.7
    start = reference.to_numpy(full.start_of("fd").params)
    models, sent, cohorts = [start] * 3, {}, full.cohorts(5, 2)
    # Somebody comes back after a round without.
    assert any({*cohorts[i]} & {*cohorts[i + 2]} - {*cohorts[i + 1]} for i in range(3))
    for cohort in cohorts:
        new = {}
        for client in cohort:
            x, y = clients[client]
            others = [p for other, p in sent.items() if other != client]
            teacher = {k: np.mean([p[k] for p in others if k in p], axis=0) for k in set().union(*others)}
            known = np.isin(y, list(teacher))
            targets = np.stack([teacher.get(k, np.zeros(CLASSES)) for k in y])

            def loss(w, now, x=x, y=y, known=known, targets=targets):
                return reference.risk(w, x, y) + lam * learned(w, x, np.where(known[:, None], targets, 0))

            models[client] = full.fit(models[client], loss)
            new[client] = {k: probabilities(models[client], x[y == k]).mean(0) for k in set(y)}
        sent = new
    last = full.run("fd", rounds=5, lam=lam, participation=0.67)
    full.assert_models(last.state.clients.params, models, rtol=1e-3, atol=1e-4)
    full.assert_received(last, models, models, rtol=1e-3)
    holders = [sum(k in p for p in sent.values()) for k in range(CLASSES)]
    np.testing.assert_array_equal(last.state.server.holders, holders)
    np.testing.assert_array_equal(last.info["holders"], holders)


def test_a_class_that_no_other_client_holds_is_not_distilled():
    # With one client there is nobody to learn from.
    alone, local = (full.run("fd", rounds=3, sizes=(20,), lam=lam) for lam in (5.0, 0.0))
    np.testing.assert_allclose(alone.received["loss"], local.received["loss"], rtol=1e-5)


def test_fml():
    clients, alpha, beta = full.training_examples(), 0.3, 0.6
    w = reference.to_numpy(full.start_of("fml"))
    own = [w] * 3
    for _ in range(2):
        shared = []
        for client, (x, y) in enumerate(clients):
            v, u, of_v, of_u = own[client], w, {}, {}
            for _ in range(full.EPOCHS):

                def personal(v, u=u, x=x, y=y):
                    return alpha * reference.risk(v, x, y) + (1 - alpha) * divergence(v, x, u)

                def common(u, v=v, x=x, y=y):
                    return beta * reference.risk(u, x, y) + (1 - beta) * divergence(u, x, v)

                v, u = full.step(v, of_v, personal), full.step(u, of_u, common)
            own[client] = v
            shared.append(u)
        w = reference.mean(full.BETA, shared)
    last = full.run("fml", alpha=alpha, beta=beta)
    full.assert_model(last.state.server, w, rtol=1e-3, atol=1e-4)
    full.assert_models(last.state.clients, own, rtol=1e-3, atol=1e-4)
    full.assert_received(last, own, own, rtol=1e-3)


def truncated(change, energy):
    """Each matrix with as many singular values as keep the energy, unless its factors are larger; and their numbers."""
    found, numbers = {}, 0
    for name, value in change.items():
        if value.ndim < 2:
            found[name], count = value, value.size
        else:
            left, values, right = np.linalg.svd(value, full_matrices=False)
            rank = next((k for k in range(len(values)) if (values[:k] ** 2).sum() >= energy * (values**2).sum()), None)
            rank = len(values) if rank is None else rank
            count = rank * (sum(value.shape) + 1)
            smaller = count < value.size
            found[name] = (left[:, :rank] * values[:rank]) @ right[:rank] if smaller else value
            count = count if smaller else value.size
        numbers += count
    return found, numbers


def test_fedkd():
    clients, energies = full.training_examples(), [0.35, 0.4]
    w = reference.to_numpy(full.start_of("fedkd").student)
    teachers, mappings = [w] * 3, [np.eye(FEATURES)] * 3
    for energy in energies:
        changes, sent = [], []
        for client, (x, y) in enumerate(clients):
            t, s, m = teachers[client], w, mappings[client]
            of_t, of_s = {}, {}
            for _ in range(full.EPOCHS):

                def hidden(t, s, m, x=x):
                    return np.mean((reference.features(t, x) - reference.features(s, x) @ m) ** 2)

                def teaching(parts, s=s, x=x, y=y, hidden=hidden):
                    risk = reference.risk(parts, x, y)
                    more = divergence(parts, x, s) + hidden(parts, s, parts["m"])
                    return risk + more / (risk + reference.risk(s, x, y))

                def studying(s, t=t, m=m, x=x, y=y, hidden=hidden):
                    risk = reference.risk(s, x, y)
                    return risk + (divergence(s, x, t) + hidden(t, s, m)) / (risk + reference.risk(t, x, y))

                both, s = full.step({**t, "m": m}, of_t, teaching), full.step(s, of_s, studying)
                m = both.pop("m")
                t = both
            teachers[client], mappings[client] = t, m
            change, numbers = truncated({name: s[name] - w[name] for name in w}, energy)
            changes.append(change)
            sent.append(numbers)
        mean, _ = truncated(reference.mean(full.BETA, changes), energy)
        w = {name: w[name] + mean[name] for name in w}
    last = full.run("fedkd", first_energy=0.3, last_energy=0.4, energy_rounds=2)
    full.assert_model(last.state.server.student, w, rtol=2e-3, atol=2e-4)
    full.assert_models(last.state.clients.teacher, teachers, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(row(last.state.clients, 1).mapping, mappings[1], rtol=2e-3, atol=2e-4)
    full.assert_received(last, teachers, teachers, rtol=1e-3)
    assert last.info["energy"] == pytest.approx(energies[-1])
    assert last.info["sent"] == pytest.approx(np.mean(sent) / sum(value.size for value in w.values()))


def test_low_rank_changes():
    generator = np.random.default_rng(0)
    axes = [np.linalg.qr(generator.normal(size=(n, 4)))[0] for n in (30, 20)]
    matrix = jnp.asarray(axes[0] * np.array([4.0, 2.0, 1.0, 0.1]) @ axes[1].T, jnp.float32)
    for energy, rank in ((0.7, 1), (0.9, 2), (0.99, 3), (1.0, 4)):
        got, numbers = jax.jit(low_rank)({"w": matrix, "b": jnp.ones(3)}, energy)
        kept = np.array([4.0, 2.0, 1.0, 0.1]) * (np.arange(4) < rank)
        np.testing.assert_allclose(got["w"], axes[0] * kept @ axes[1].T, atol=1e-5)
        np.testing.assert_array_equal(got["b"], 1)
        assert numbers == 51 * rank + 3
    # Nothing changed, and factors that are no smaller than the matrix.
    got, numbers = low_rank({"w": jnp.zeros((5, 4)), "v": matrix[:2, :2]}, 0.95)
    assert not got["w"].any()
    np.testing.assert_array_equal(got["v"], matrix[:2, :2])
    assert numbers == 4


@pytest.mark.parametrize(("transfer", "expected"), [("outputs", 2), ("features", 1)])
def test_fedphp(transfer, expected):
    """Also of a client that trains more often than expected."""
    clients, lam, temperature = full.training_examples(), 0.4, 2.0
    w = reference.to_numpy(full.start_of("fedphp"))
    inherited = [w] * 3
    for number in range(3):
        trained = []
        for (x, y), before in zip(clients, inherited, strict=True):

            def loss(v, now, x=x, y=y, before=before):
                if transfer == "outputs":
                    more = learned(v, x, probabilities(before, x, temperature))
                else:
                    more = reference.discrepancy(reference.features(v, x), reference.features(before, x))
                return (1 - lam) * reference.risk(v, x, y) + lam * more

            trained.append(full.fit(w, loss))
        mu = 0.8 * min(1, number / expected)
        inherited = [reference.mean((mu, 1 - mu), pair) for pair in zip(inherited, trained, strict=True)]
        w = reference.mean(full.BETA, trained)
    options = {"lam": lam, "transfer": transfer, "temperature": temperature}
    last = full.run("fedphp", rounds=3, inheritance=0.8, expected_trainings=expected, **options)
    full.assert_model(last.state.server, w, rtol=1e-3, atol=1e-4)
    full.assert_models(last.state.clients.inherited, inherited, rtol=1e-3, atol=1e-4)
    full.assert_received(last, inherited, inherited, rtol=1e-3)


def test_fedphp_without_what_is_inherited_trains_fedavgs_model():
    assert_same(full.run("fedphp", lam=0.0).state.server, full.run("fedavg").state.server)


def generated(generator, noise, labels):
    """Features of FedGen's generator, whose parameters are a flat dict."""
    inputs = np.concatenate([noise, np.eye(CLASSES)[labels]], axis=1)
    hidden = inputs @ generator["hidden"]
    hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
    hidden = np.maximum(hidden * generator["norm/scale"] + generator["norm/bias"], 0)
    return hidden @ generator["output/kernel"] + generator["output/bias"]


def adam(w, moments, gradient, count, lr):
    """One step of Adam on a flat dict; moves its moments."""
    for name, slope in gradient.items():
        first, second = moments.get(name, (0.0, 0.0))
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        moments[name] = first, second
        size = np.sqrt(second / (1 - 0.999**count)) + 1e-8
        w = {**w, name: w[name] - lr * first / (1 - 0.9**count) / size}
    return w


@pytest.mark.parametrize("shared", ["model", "head"])
def test_fedgen(shared):
    alpha, lr, diversity, steps, size, width = 0.8, 0.05, 0.6, 3, 16, 2
    options = {"server_lr": lr, "diversity": diversity, "server_steps": steps, "noise_size": width, "hidden_size": 3}
    options |= full.SGD | {"epochs": full.EPOCHS, "batch_size": 32, "shared": shared, "alpha": alpha}
    method, size = fedgen(tiny_model(), **options), options["batch_size"]
    data = [client_data(tiny_federation(full.SIZES), client, "train") for client in range(3)]
    server = method.init_server(jax.random.key(3))
    states = [method.init_client(jax.random.key(4), server, one) for one in data]
    w, moments, count, shares = reference.to_numpy(server.params), {}, 0, np.zeros(CLASSES)
    generator, own = flatten(server.generator), [w] * 3
    cohort = Cohort(jnp.arange(3), jnp.array(full.SIZES), jnp.ones(3, bool), 3)

    def draw(key):
        label_key, noise_key = jax.random.split(key)
        labels = jax.random.categorical(label_key, jnp.log(jnp.array(shares, jnp.float32)), shape=(size,))
        return np.asarray(labels), np.float64(jax.random.normal(noise_key, (size, width)))

    def of_features(w, z, labels):
        return reference.cross_entropy(z @ w["head/kernel"] + w["head/bias"], labels)

    for number in range(2):
        trained = []
        for client, (x, y) in enumerate(full.training_examples()):
            own_key = fingerprint_key(jax.random.key(server.seed), fingerprint(data[client]))
            draws = [draw(jax.random.fold_in(own_key, step)) for step in range(full.EPOCHS)]
            # Each step has other labels, also where every step has all examples.
            assert len({tuple(labels) for labels, _ in draws}) == (full.EPOCHS if number else 1)
            v, velocity = w if shared == "model" else {**own[client], **reference.part(w, "head")}, {}
            for labels, noise in draws:
                z = generated(generator, noise, labels)

                def loss(v, x=x, y=y, z=z, labels=labels, number=number):
                    return reference.risk(v, x, y) + (alpha * of_features(v, z, labels) if number else 0)

                v = full.step(v, velocity, loss)
            trained.append(v)
        key = jax.random.key(10 + number)
        results = [jax.jit(method.local)(key, server, *pair) for pair in zip(states, data, strict=True)]
        own, states = trained, [result.client for result in results]
        for result, v in zip(results, trained, strict=True):
            full.assert_model(result.personal, v, rtol=1e-3, atol=1e-4)
        messages = received(jax.tree.map(lambda *rows: jnp.stack(rows), *[result.message for result in results]))
        mean = reference.mean(full.BETA, trained)
        w = mean if shared == "model" else {**w, **reference.part(mean, "head")}
        labels = np.concatenate([y for _, y in full.training_examples()])
        shares = np.bincount(labels, minlength=CLASSES) / len(labels)
        server, _, info = jax.jit(method.aggregate)(key, server, (), messages, cohort)
        for step_key in jax.random.split(jax.random.split(key)[0], steps):
            labels, noise = draw(step_key)

            def loss(g, labels=labels, noise=noise, w=w):
                z = generated(g, noise, labels)
                squares = np.mean((noise[:, None] - noise) ** 2, axis=-1)
                apart = np.mean(squares * np.mean(np.abs(z[:, None] - z), axis=-1))
                return of_features(w, z, labels) + diversity * np.exp(-apart)

            count += 1
            generator = adam(generator, moments, reference.numerical_gradient(loss, generator), count, lr)
        full.assert_model(server.params, w, rtol=1e-3, atol=1e-4)
        assert_flat(server.generator, generator, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(info["shares"], shares, rtol=1e-6)
    deployed = own[1] if shared == "model" else {**own[1], **reference.part(w, "head")}
    got = method.personalize(key, server, states[1], data[1])
    full.assert_model(got, w if shared == "model" else deployed, rtol=1e-3, atol=1e-4)


def test_fedmrl():
    size = 2
    server = full.start_of("fedmrl", small_features=size)
    w, own = flatten({"shared": server.shared}), [flatten(server.initial._asdict())] * 3

    def outputs(v, x):
        """Logits of the own head and of the shared one."""

        def hidden(name):
            return np.tanh(x.reshape(len(x), -1) @ v[f"{name}/backbone/kernel"] + v[f"{name}/backbone/bias"])

        layer = "shared/backbone/to_small_features"
        small = np.maximum(hidden("shared") @ v[f"{layer}/kernel"] + v[f"{layer}/bias"], 0)
        fused = np.concatenate([small, hidden("params")], axis=1) @ v["projector/kernel"] + v["projector/bias"]
        heads = (("params", fused), ("shared", fused[:, :size]))
        return [z @ v[f"{name}/head/kernel"] + v[f"{name}/head/bias"] for name, z in heads]

    for _ in range(2):
        models = []
        for (x, y), start in zip(full.training_examples(), own, strict=True):

            def loss(v, now, x=x, y=y):
                return sum(reference.cross_entropy(one, y) for one in outputs(v, x))

            models.append(full.fit(w | start, loss))
        own = [{name: v[name] for name in own[0]} for v in models]
        w = reference.mean(full.BETA, [reference.part(v, "shared") for v in models])
    last = full.run("fedmrl", small_features=size)
    assert_flat({"shared": last.state.server.shared}, w)
    for client in range(3):
        assert_flat(row(last.state.clients, client)._asdict(), own[client])
        x, y = full.unseen_examples(client)
        for scores, v in ((last.received, w | own[client]), (last.trained, models[client])):
            want = reference.cross_entropy(outputs(v, x)[0], y)
            np.testing.assert_allclose(scores["loss"][client], want, rtol=1e-3)


def test_fedmrl_has_no_more_shared_features_than_own_ones():
    with pytest.raises(InvalidInput, match=f"small_features must be at most {FEATURES}, the features"):
        fedmrl(tiny_model(), small_features=FEATURES + 1)
