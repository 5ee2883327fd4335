"""Whole rounds of the simpler methods against float64 NumPy, with full batches so that no order is left."""

import chex
import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from full_batches import BETA, EPOCHS, SGD, assert_model, assert_models, assert_parts, assert_received, train
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from reference import part, risk
from trees import assert_same

from pfl_jax.data import client_data
from pfl_jax.methods import make_method, pfedme
from pfl_jax.methods.factories import hyper_parameters
from pfl_jax.methods.scaffold import ScaffoldClient
from pfl_jax.primitives import supervised_loss

ROUNDS = 2


@pytest.fixture(scope="module")
def problem():
    """The initial model as the engine draws it, and each client's examples."""
    return reference.to_numpy(full.start_of("fedavg")), full.training_examples()


def pulled(x, y, strength, anchor):
    """CE(w) + (strength / 2) ||w - anchor||^2."""
    return lambda w, _: risk(w, x, y) + strength / 2 * reference.squared_distance(w, anchor)


def shifted(x, y, correction):
    """A loss whose gradient is that of the cross entropy plus the correction."""
    return lambda w, _: risk(w, x, y) + sum((correction[name] * w[name]).sum() for name in w)


def combine(function, *ws):
    return {name: function(*(w[name] for w in ws)) for name in ws[0]}


def test_local(problem):
    w, clients = problem
    own = [train(train(w, x, y), x, y) for x, y in clients]
    last = full.run("local")
    assert_models(last.state.clients, own)
    assert_received(last, own, own)


def test_fedavg_and_its_fine_tuning(problem):
    w, clients = problem
    for _ in range(ROUNDS):
        trained = [train(w, x, y) for x, y in clients]
        w = reference.mean(BETA, trained)
    last, tuned = full.run("fedavg"), full.run("fedavg_ft", finetune_epochs=2)
    assert_model(last.state.server, w)
    assert_received(last, [w] * 3, trained)
    assert_received(tuned, [train(w, x, y, steps=2) for x, y in clients], trained)


def assert_split(last, problem, own, shared, fit):
    """Rounds of models of which clients keep the one part, and the server averages the other."""
    w, clients = problem
    parts = [part(w, own)] * len(clients)
    for _ in range(ROUNDS):
        trained = [fit({**w, **mine}, x, y) for mine, (x, y) in zip(parts, clients, strict=True)]
        parts = [part(t, own) for t in trained]
        w = {**w, **part(reference.mean(BETA, trained), shared)}
    assert_model(last.state.server, w)
    assert_parts(last.state.clients, own, parts)
    assert_received(last, [{**w, **mine} for mine in parts], trained)


def test_fedper(problem):
    assert_split(full.run("fedper"), problem, "head", "backbone", train)


def test_fedprox_equations(problem):
    w, clients = problem
    mu = 0.7
    for _ in range(ROUNDS):
        trained = [full.fit(w, pulled(x, y, mu, w)) for x, y in clients]
        w = reference.mean(BETA, trained)
    last = full.run("fedprox", mu=mu)
    assert_model(last.state.server, w)
    assert_received(last, [w] * 3, trained)
    tuned = full.run("fedprox_ft", mu=mu, finetune_epochs=2)
    assert_received(tuned, [train(w, x, y, steps=2) for x, y in clients], trained)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_scaffold_equations(problem, momentum):
    w, clients = problem
    # With momentum a constant gradient of 1 moves lr times the sum of velocities 1, 1 + m, 1 + m + m^2.
    reach = SGD["lr"] * (EPOCHS if momentum == 0 else 1 + 1.5 + 1.75)
    c = combine(np.zeros_like, w)
    controls = [c] * len(clients)
    for cohort in full.cohorts(3, 2):
        trained, new = {}, {}
        for i in cohort:
            correction = combine(np.subtract, c, controls[i])
            trained[i] = full.fit(w, shifted(*clients[i], correction), momentum=momentum)
            new[i] = combine(lambda a, b, old, moved: a - b + (old - moved) / reach, controls[i], c, w, trained[i])
        # The mean over all clients moves by what the two of the cohort change.
        old = [controls[i] for i in cohort]
        c = combine(lambda c, a, b, d, e: c + (a + b - d - e) / 3, c, *new.values(), *old)
        controls = [new.get(i, own) for i, own in enumerate(controls)]
        # Both alike, whatever their sizes.
        w = combine(lambda a, b: a + 0.8 * (b - a), w, reference.mean([1 / 2] * 2, [*trained.values()]))
    last = full.run("scaffold", rounds=3, participation=0.67, momentum=momentum, server_lr=0.8)
    assert_model(last.state.server.params, w)
    assert_model(last.state.server.control, c)
    assert_models(last.state.clients.control, controls)
    assert_received(last, [w] * 3)


def test_lg_fedavg_equations(problem):
    assert_split(full.run("lg_fedavg"), problem, "backbone", "head", train)


def test_fedrep_equations(problem):
    def fit(w, x, y):
        w = full.fit(w, lambda w, _: risk(w, x, y), 2, "head", lr=0.3)
        return full.fit(w, lambda w, _: risk(w, x, y), name="backbone")

    assert_split(full.run("fedrep", head_lr=0.3, head_epochs=2), problem, "head", "backbone", fit)


def test_fedbabu_equations(problem):
    w, clients = problem
    for _ in range(ROUNDS):
        trained = [full.fit(w, lambda v, _, x=x, y=y: risk(v, x, y), name="backbone") for x, y in clients]
        w = reference.mean(BETA, trained)
    last = full.run("fedbabu", finetune_epochs=4)
    assert_model(last.state.server, w)
    assert_received(last, [train(w, x, y, steps=4) for x, y in clients], trained)


def rod_loss(w, now, x, y):
    """Balanced softmax of the shared model, and cross entropy of the summed logits, which train the own head alone."""
    counts = np.maximum(np.bincount(y, minlength=3), 1e-30)
    own = reference.features(now, x) @ w["own/kernel"] + w["own/bias"]
    balanced = reference.cross_entropy(reference.logits(w, x) + np.log(counts), y)
    return balanced + reference.cross_entropy(reference.logits(now, x) + own, y)


def test_fedrod_equations(problem):
    w, clients = problem
    # One of the clients lacks a class.
    assert min(np.bincount(y, minlength=3).min() for _, y in clients) == 0
    heads = [{f"own/{name}": w[f"head/{name}"] for name in ("kernel", "bias")}] * len(clients)
    for _ in range(ROUNDS):
        trained = [
            full.fit({**w, **own}, lambda v, now, x=x, y=y: rod_loss(v, now, x, y))
            for own, (x, y) in zip(heads, clients, strict=True)
        ]
        heads = [part(t, "own") for t in trained]
        w = {name: value for name, value in reference.mean(BETA, trained).items() if not name.startswith("own")}
    last = full.run("fedrod")
    assert_model(last.state.server, w)
    assert_parts(last.state.clients, "own", heads)

    def summed(model, own):
        return {**model, **{f"head/{name}": model[f"head/{name}"] + own[f"own/{name}"] for name in ("kernel", "bias")}}

    assert_received(last, [summed(w, own) for own in heads], [summed(t, t) for t in trained])


def test_ditto_equations(problem):
    w, clients = problem
    lam, personal = 0.8, [w] * len(clients)
    for _ in range(ROUNDS):
        for index, (x, y) in enumerate(clients):
            personal[index] = full.fit(personal[index], pulled(x, y, lam, w), 4)
        w = reference.mean(BETA, [train(w, x, y) for x, y in clients])
    last = full.run("ditto", lam=lam, personal_epochs=4)
    assert_model(last.state.server, w)
    assert_models(last.state.clients, personal)
    assert_received(last, personal, personal)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_pfedme_equations(problem, momentum):
    w, clients = problem
    lam, steps = 2.0, 3
    # By default the steps have none, as in the released code.
    assert hyper_parameters(pfedme)["momentum"] == 0.0
    for _ in range(ROUNDS):
        moved, personal = [], []
        for x, y in clients:
            own = t = w
            for _ in range(EPOCHS):
                t = full.fit(t, pulled(x, y, lam, own), steps, lr=0.1, momentum=momentum)
                own = combine(lambda a, b: a - SGD["lr"] * lam * (a - b), own, t)
            moved.append(own)
            personal.append(t)
        w = combine(lambda a, b: 0.3 * a + 0.7 * b, w, reference.mean(BETA, moved))
    last = full.run("pfedme", lam=lam, inner_steps=steps, personal_lr=0.1, server_lr=0.7, momentum=momentum)
    assert_model(last.state.server, w)
    assert_models(last.state.clients, personal)
    assert_received(last, personal, personal)


@pytest.mark.parametrize(("adaptive", "start"), [pytest.param(False, 0.4, marks=pytest.mark.slow), (True, 0.96)])
def test_apfl_equations(problem, adaptive, start):
    w, clients = problem
    owns, alphas = [w] * len(clients), [start] * len(clients)

    def mixed(alpha, own, shared):
        return combine(lambda a, b: alpha * a + (1 - alpha) * b, own, shared)

    for _ in range(ROUNDS):
        shared_models = []
        for index, (x, y) in enumerate(clients):
            own, shared, alpha, of_own, of_shared = owns[index], w, alphas[index], {}, {}
            for _ in range(EPOCHS):

                def of_mixture(alpha, own, shared=shared, x=x, y=y):
                    return risk(mixed(alpha, own, shared), x, y)

                # The slope of a number, by finite differences as all gradients here.
                slope = (of_mixture(alpha + 1e-6, own) - of_mixture(alpha, own)) / 1e-6
                own, shared = (
                    full.step(own, of_own, lambda v, alpha=alpha, of=of_mixture: of(alpha, v)),
                    full.step(shared, of_shared, lambda v, x=x, y=y: risk(v, x, y)),
                )
                if adaptive:
                    alpha = np.clip(alpha - SGD["lr"] * slope, 0, 1)
            owns[index], alphas[index] = own, alpha
            shared_models.append(shared)
        w = reference.mean(BETA, shared_models)
    last = full.run("apfl", alpha=start, adaptive=adaptive)
    # One client stays within the range, one is at its end.
    assert not adaptive or (min(alphas) < 1 and max(alphas) == 1), alphas
    assert_model(last.state.server, w)
    for got in (last.state.clients.alpha, last.info["alpha"]):
        np.testing.assert_allclose(got, alphas, rtol=1e-4)
    assert_models(last.state.clients.own, owns)
    deployed, trained = (
        [mixed(*three) for three in zip(alphas, owns, ws, strict=True)] for ws in ([w] * 3, shared_models)
    )
    assert_received(last, deployed, trained)


# SCAFFOLD: whose steps its control variates count, and that they are finite without any


KEY = jax.random.key(0)


def test_without_a_learning_rate_it_stands_still():
    @jax.jit
    def train(lr):
        method = make_method("scaffold", tiny_model(), **{**HYPER_PARAMETERS, "lr": lr})
        server = method.init_server(KEY)
        # As in a later round: controls that are not zero.
        server = server._replace(control=jax.tree.map(jnp.ones_like, server.control))
        twice = jax.tree.map(lambda leaf: 2 * leaf, server.control)
        client = ScaffoldClient(twice, twice)
        return server, client, method.local(KEY, server, client, client_data(tiny_federation(), 1, "train"))

    server, client, result = train(0.0)
    assert_same(result.client, client)
    assert_same(result.message.params.value, server.params)
    chex.assert_trees_all_equal(result.message.control_change.value, jax.tree.map(jnp.zeros_like, server.control))


@pytest.mark.parametrize(("drop_last", "steps"), [(False, (6, 10, 8, 4)), (True, (4, 10, 6, 2))])
def test_each_clients_own_steps_are_counted(drop_last, steps):
    """c_i+ = (w - w_i) / (S lr) in the first round, for S steps of batches of 4."""
    method = make_method("scaffold", tiny_model(), lr=0.05, momentum=0.0, batch_size=4, epochs=2, drop_last=drop_last)
    server, local = method.init_server(KEY), jax.jit(method.local)
    for client, own in enumerate(steps):
        start = ScaffoldClient(server.control, server.control)
        message = local(KEY, server, start, client_data(tiny_federation(), client, "train")).message
        moved = jax.tree.map(lambda a, b, s=own: (a - b) / (s * 0.05), server.params, message.params.value)
        chex.assert_trees_all_close(message.control_change.value, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [{"optimizer": "adam"}, {"clip_norm": 0.1}], ids=["adam", "clipped"])
def test_control_variates_with_adam_are_gradients(steps):
    """SCAFFOLD's option I where steps are no multiples of gradients: c_i+ is the gradient at w."""
    model, data = tiny_model(), client_data(tiny_federation(pad=3), 1, "train")
    adam = make_method("scaffold", model, **HYPER_PARAMETERS, **steps)
    server = adam.init_server(KEY)
    control = jax.tree.map(lambda leaf: leaf + 0.1, server.control)
    result = jax.jit(adam.local)(KEY, server, ScaffoldClient(control, control), data)
    want, _ = jax.jit(jax.grad(supervised_loss(model), has_aux=True))(server.params, data, jax.random.key(0))
    chex.assert_trees_all_close(result.client.trained, want, rtol=1e-4, atol=1e-6)
    change = jax.tree.map(jnp.subtract, want, control)
    chex.assert_trees_all_close(result.message.control_change.value, change, rtol=1e-4, atol=1e-6)
