"""FedAS whose clients align one backbone in turn, as its released code: a cohort of one, and NumPy for more."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import tiny_federation, tiny_model
from trees import assert_flat

from pfl_jax import Settings, simulate
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, make_method
from pfl_jax.primitives import LocalTraining
from pfl_jax.testing import conformance

KEY = jax.random.key(4)
RELEASED = {"drop_last": True, "shuffle": False}
OPTIONS = {
    "align_lr": 0.3,
    "lr": 0.2,
    "batch_size": 4,
    "align_batch_size": 4,
    "epochs": 2,
    "target": "class_mean",
    "align_loss": "class_sum",
    "first_alignment": True,
    "reduction": "batch_means",
}


def aligned(manner="in_turn", **options):
    return make_method("fedas", tiny_model(), **OPTIONS | options, manner=manner)


@pytest.mark.slow
@pytest.mark.without_f1_auc
def test_cohorts_of_one_client_are_the_method():
    data = tiny_federation()
    counts = jnp.asarray([3, 0, 5, 2], jnp.int32)
    data = data._replace(validation_index=data.test_index[:, :5], validation_count=counts)
    settings = Settings(rounds=5, participation=0.25)
    settings = dataclasses.replace(settings, before_aggregation=True)
    *_, last = simulate.run(aligned("serial", **RELEASED), data, settings, KEY)
    *_, own = simulate.run(aligned(**RELEASED), data, settings, KEY)
    chex.assert_trees_all_close(
        (own.state.server, own.state.clients), (last.state.server, last.state.clients), rtol=1e-5
    )
    np.testing.assert_allclose(own.info["trace"], last.info["trace"], rtol=1e-5)
    np.testing.assert_allclose(own.trained["loss"], last.trained["loss"], rtol=1e-5)
    np.testing.assert_allclose(own.before_aggregation["loss"], last.before_aggregation["loss"], rtol=1e-5)
    assert (own.cohort.tolist(), own.examples) == (last.cohort.tolist(), last.examples)
    for scores, others in ((own.received, last.received), (own.received.validation, last.received.validation)):
        np.testing.assert_allclose(scores["loss"], others["loss"], rtol=1e-5)


def squared_norm(gradient):
    return sum((value**2).sum() for value in gradient.values())


@pytest.mark.without_f1_auc
def test_each_client_receives_what_the_one_before_has_aligned():
    sizes = (9, 20, 14)
    data = tiny_federation(sizes)
    one_batch = {"batch_size": 32, "align_batch_size": 32, "align_loss": "mean", "target": "example"}
    engine = simulate.build(aligned(**one_batch), Settings(rounds=1)).jit()
    state = engine.init(data, KEY)
    start = reference.to_numpy(state.server)
    # Another previous backbone for each client, so that there is something to align with.
    shifts = np.array([0.5, -0.4, 0.3])
    backbone = jax.tree.map(lambda leaf: leaf + shifts.reshape(-1, *[1] * (leaf.ndim - 1)), state.clients.backbone)
    state = state._replace(clients=state.clients._replace(backbone=backbone))
    next_state, outcome = engine.round(data, state, 3)
    assert outcome.finite.all()
    assert outcome.server_finite
    info, w, trained, traces = outcome.info, dict(start), {}, []
    for client in outcome.cohort.clients.tolist():
        x, y = reference.examples(data, client)
        own = {name: value + shifts[client] if name.startswith("backbone") else value for name, value in start.items()}
        targets = reference.features(own, x)
        w = reference.descend(w, lambda w: reference.alignment_gradient(w, x, targets), 1, 0.3)  # noqa: B023
        trained[client] = reference.descend(w, lambda w: reference.cross_entropy_gradient(w, x, y), 2, 0.2)  # noqa: B023
        traces.append(squared_norm(reference.cross_entropy_gradient(trained[client], x, y)))
    # In the order of their numbers, whatever their sizes.
    assert list(trained) == [0, 1, 2]
    np.testing.assert_allclose(info["trace"], traces, rtol=1e-3)
    weights = np.array(traces) / sum(traces)
    want = reference.mean(weights, list(trained.values()))
    got = reference.to_numpy({"backbone": next_state.server.backbone, "head": next_state.server.head})
    assert_flat(got, want | reference.part(start, "head"), rtol=2e-4, atol=2e-5)


def batches_of(data, client, batch_size):
    """Each mini-batch of the fixed order, as float64 x and integer y, incomplete ones left out."""
    examples = client_data(data, client, "train")
    start = (jnp.full((9, batch_size), -1), jnp.zeros((), jnp.int32))
    numbered = examples._replace(x=jnp.arange(examples.mask.shape[0]))

    def step(carry, batch, key):
        rows, index = carry
        return rows.at[index].set(batch.x), index + 1

    rows, steps = LocalTraining(batch_size=batch_size, epochs=1, **RELEASED).fold(KEY, start, numbered, step)
    x, y = np.float64(examples.x), np.asarray(examples.y)
    return [(x[row], y[row]) for row in np.asarray(rows)[: int(steps)]]


def summed_over_classes(w, x, y, means):
    """Gradient of sum_k mean over the class of (1/d) ||f(x) - means[k]||^2, class by class."""
    total = {}
    for label in np.unique(y):
        targets = np.tile(means[label], ((y == label).sum(), 1))
        for name, value in reference.alignment_gradient(w, x[y == label], targets).items():
            total[name] = total.get(name, 0.0) + value
    return total


@pytest.mark.slow
@pytest.mark.without_f1_auc
def test_the_released_choices_against_numpy():
    """Three rounds of everyone, one mini-batch after another, clients one after another on copies of their own."""
    data = tiny_federation((9, 21, 14))
    method = aligned("serial", **RELEASED)
    results = list(simulate.run(method, data, Settings(rounds=3), KEY))
    start = reference.to_numpy(simulate.build(method, Settings(rounds=1)).init(data, KEY).server)
    clients = [batches_of(data, client, 4) for client in range(3)]
    assert [len(batches) for batches in clients] == [2, 5, 3]
    previous, server = [start] * 3, start
    for result in results:
        trained, traces = [], []
        for own, batches in zip(previous, clients, strict=True):
            every_x, every_y = (np.concatenate(leaves) for leaves in zip(*batches, strict=True))
            embeddings = reference.features(own, every_x)
            means = {label: embeddings[every_y == label].mean(0) for label in np.unique(every_y)}
            w = {name: server[name] if name.startswith("backbone") else own[name] for name in server}
            for x, y in batches:
                w = reference.descend(w, lambda w: summed_over_classes(w, x, y, means), 1, 0.3)  # noqa: B023
            for x, y in batches * 2:
                w = reference.descend(w, lambda w: reference.cross_entropy_gradient(w, x, y), 1, 0.2)  # noqa: B023
            gradients = [reference.cross_entropy_gradient(w, x, y) for x, y in batches]
            traces.append(sum(map(squared_norm, gradients)))
            trained.append(w)
        weights = np.array(traces) / sum(traces)
        mean = reference.mean(weights, trained)
        server = {name: mean[name] if name.startswith("backbone") else start[name] for name in start}
        previous = trained
        np.testing.assert_allclose(np.asarray(result.info["trace"])[np.argsort(result.cohort)], traces, rtol=2e-3)
    got = reference.to_numpy({name: results[-1].state.server._asdict()[name] for name in ("backbone", "head")})
    assert_flat(got, server, rtol=5e-4, atol=5e-5)


def test_the_first_alignment_is_with_the_initial_backbone():
    """Nobody has trained: the received backbone moves toward the initial one, or with the option off not at all."""
    data = client_data(tiny_federation((9,)), 0, "train")
    received = {}
    for on in (False, True):
        method = aligned("serial", first_alignment=on, target="example", align_loss="mean", align_batch_size=16)
        server = method.init_server(KEY)
        client = method.init_client(KEY, server, data)
        moved = server._replace(backbone=jax.tree.map(lambda leaf: leaf + 0.5, server.backbone))
        received[on] = jax.jit(method.personalize)(KEY, moved, client, data)["backbone"]
    chex.assert_trees_all_equal(received[False], moved.backbone)
    start = reference.to_numpy({"backbone": moved.backbone, "head": server.head})
    x, own = np.float64(data.x), reference.to_numpy({"backbone": server.backbone, "head": server.head})
    want = reference.descend(start, lambda w: reference.alignment_gradient(w, x, reference.features(own, x)), 1, 0.3)
    got = reference.to_numpy({"backbone": received[True], "head": server.head})
    assert_flat(got, want, rtol=2e-4, atol=2e-5)


def test_a_client_that_diverges_is_named():
    data = tiny_federation((9, 20, 14))
    engine = simulate.build(aligned(), Settings(rounds=1)).jit()
    state = engine.init(data, KEY)
    head = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), state.clients.head)
    _, outcome = engine.round(data, state._replace(clients=state.clients._replace(head=head)), 3)
    finite = dict(zip(outcome.cohort.clients.tolist(), outcome.finite.tolist(), strict=True))
    assert finite == {0: True, 1: False, 2: True}
    # The client keeps the state that it had.
    assert not outcome.server_finite


@pytest.mark.slow
@pytest.mark.without_f1_auc
@pytest.mark.parametrize("check", ["chunks_and_padding", "devices", "resumption", "clients_outside", "absent", "vmap"])
def test_conformance_in_turn(check):
    subject = conformance.Subject(METHODS["fedas"], manner="in_turn", first_alignment=True)
    conformance.CHECKS[check](subject)
