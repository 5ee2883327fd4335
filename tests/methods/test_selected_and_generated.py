"""FedSelect, FLUTE and PeFLL: whole rounds against float64 NumPy, with full batches, and its limits."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, HYPER_PARAMETERS, tiny_federation, tiny_model
from trees import assert_same, row

from pfl_jax.data import client_data
from pfl_jax.methods import fedselect, pefll
from pfl_jax.methods.fedselect import grown
from pfl_jax.methods.flute import distance_to_simplex


def select(mask, w, others):
    return {name: np.where(mask[name], w[name], others[name]) for name in w}


def train_entries(w, mask, x, y):
    """Full-batch SGD that moves only the entries of the mask."""

    return select(mask, full.fit(w, lambda v, now: reference.risk(select(mask, v, w), x, y)), w)


def with_largest_changes(mask, before, after, rate, limit):
    """The mask with the entries of each array that changed most, one after another."""
    mask = {name: value.copy() for name, value in mask.items()}
    for name, chosen in mask.items():
        change = np.where(chosen, 0, np.abs(after[name] - before[name]))
        count = min(round(rate * np.sum(~chosen)), int(limit * chosen.size + 1e-9) - np.sum(chosen))
        for flat in np.argsort(-change, axis=None, kind="stable")[:count]:
            chosen.flat[flat] = True
    return mask


# With one client in the cohort, an entry that it has for itself has no mean.
@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_fedselect(size):
    clients, rate, limit = full.training_examples(), 0.3, 0.6
    w = reference.to_numpy(full.start_of("fedselect"))
    own, masks = [w] * 3, [{name: np.zeros(value.shape, bool) for name, value in w.items()}] * 3
    for number in range(1, 4):
        last = full.run("fedselect", rounds=number, rate=rate, limit=limit, participation=size / 3)
        sums, weights = ({name: np.zeros(value.shape) for name, value in w.items()} for _ in range(2))
        for client in last.cohort.tolist():
            x, y = clients[client]
            shared = {name: ~mask for name, mask in masks[client].items()}
            start = select(masks[client], own[client], w)
            trained = train_entries(start, masks[client], x, y)
            own[client] = trained = train_entries(trained, shared, x, y)
            for name in w:
                sums[name] += full.SIZES[client] * shared[name] * trained[name]
                weights[name] += full.SIZES[client] * shared[name]
            masks[client] = with_largest_changes(masks[client], start, trained, rate, limit)
        w = {name: np.where(weights[name], sums[name] / np.maximum(weights[name], 1), w[name]) for name in w}
        share = [np.mean(np.concatenate([mask.ravel() for mask in masks[i].values()])) for i in last.cohort]
        np.testing.assert_allclose(last.info["personal"], share, rtol=1e-6)
        if number == 1:
            assert all(0.2 < one < 0.4 for one in share)
    full.assert_model(last.state.server, w)
    for client in range(3):
        state = row(last.state.clients, client)
        full.assert_model(state.params, own[client])
        full.assert_model(state.personal, masks[client])
    models = [select(mask, mine, w) for mask, mine in zip(masks, own, strict=True)]
    full.assert_received(last, models, own if size == 3 else ())


@pytest.mark.parametrize("nothing", ["rate", "limit"])
def test_fedselect_without_personal_entries_is_fedavg(nothing):
    assert_same(full.run("fedselect", **{nothing: 0.0}).state.server, full.run("fedavg").state.server)


def test_entries_that_did_not_change_stay_shared():
    mask = {"w": jnp.zeros((2, 4), bool).at[0, 0].set(True)}
    before, after = {"w": jnp.zeros((2, 4))}, {"w": jnp.array([[9.0, 0, 0, -3], [2, 0, 0, 1]])}
    for rate, limit, chosen in ((1.0, 1.0, [0, 3, 4, 7]), (0.3, 1.0, [0, 3, 4]), (1.0, 0.25, [0, 3]), (0, 1, [0])):
        got = np.flatnonzero(jax.jit(grown)(mask, before, after, rate, limit)["w"])
        np.testing.assert_array_equal(got, chosen, err_msg=f"{rate} {limit}")


def test_values_of_personal_entries_are_not_sent():
    method, data = fedselect(tiny_model(), **HYPER_PARAMETERS), client_data(tiny_federation(), 1, "train")
    server = method.init_server(jax.random.key(0))
    client = method.init_client(None, server, data)
    kernel = client.personal["head"]["kernel"].at[1].set(True)
    client = client._replace(personal={**client.personal, "head": {**client.personal["head"], "kernel": kernel}})
    sent = jax.jit(method.local)(jax.random.key(1), server, client, data).message["head"]["kernel"]
    np.testing.assert_array_equal(sent.weight, np.where(kernel, 0, data.mask.sum()))
    np.testing.assert_array_equal(sent.value == server["head"]["kernel"], kernel)


def to_simplex(kernel, y):
    """How far a head's weights are from a simplex of the classes in y."""
    simplex = np.zeros((CLASSES, CLASSES))
    for i in set(y):
        for j in set(y):
            simplex[i, j] = ((i == j) - 1 / CLASSES) / np.sqrt(CLASSES - 1)
    gram = kernel.T @ kernel
    return np.linalg.norm(gram / np.linalg.norm(gram) - simplex)


def test_flute():
    clients, lam, head_penalty, feature_penalty, server_lr = full.training_examples(), 0.3, 0.02, 0.03, 0.8
    w = reference.to_numpy(full.start_of("flute"))
    models, heads = [w] * 3, [reference.part(w, "head")] * 3
    for _ in range(2):
        for client, (x, y) in enumerate(clients):

            def regularized(w, x=x, y=y):
                kernel = w["head/kernel"]
                risk = reference.risk(w, x, y)
                return risk + lam * to_simplex(kernel, y) + head_penalty * np.sum(kernel**2)

            def loss(w, now, x=x, regularized=regularized):
                return regularized(w) + feature_penalty * np.mean(np.sum(reference.features(w, x) ** 2, axis=1))

            tuned = full.fit({**w, **heads[client]}, lambda w, now, of=regularized: of(w), steps=2, name="head")
            models[client] = full.fit({**w, **tuned}, loss)
        w = reference.mean(full.BETA, models)
        distances = [to_simplex(model["head/kernel"], y) for model, (_, y) in zip(models, clients, strict=True)]
        for client, (_, y) in enumerate(clients):
            heads[client] = reference.part(models[client], "head")
            slopes = reference.numerical_gradient(lambda head, y=y: to_simplex(head["head/kernel"], y), heads[client])
            heads[client] = {name: value - server_lr / 3 * slopes[name] for name, value in heads[client].items()}
    penalties = {"lam": lam, "head_penalty": head_penalty, "feature_penalty": feature_penalty}
    last = full.run("flute", head_epochs=2, server_lr=server_lr, **penalties)
    np.testing.assert_allclose(last.state.server["backbone"]["kernel"], w["backbone/kernel"], rtol=1e-3, atol=1e-4)
    full.assert_parts(last.state.clients, "head", heads, rtol=1e-3, atol=1e-4)
    full.assert_received(last, [{**w, **head} for head in heads], models, rtol=1e-3)
    order = np.argsort(last.cohort)
    np.testing.assert_allclose(np.asarray(last.info["distance"])[order], distances, rtol=1e-3)


def test_flute_without_its_terms_is_fedper():
    nothing = dict.fromkeys(("lam", "head_penalty", "feature_penalty", "server_lr"), 0.0)
    got, want = full.run("flute", head_epochs=0, **nothing).state, full.run("fedper").state
    assert_same((got.server, got.clients), (want.server, want.clients))


def test_distance_to_the_simplex():
    centered = jnp.eye(CLASSES) - 1 / CLASSES
    everything, some = jnp.ones(CLASSES), jnp.ones(CLASSES).at[0].set(0.0)
    # A simplex of any size and direction has no distance, nor a gradient; nor have weights of zero.
    for kernel, held in ((3 * centered, everything), (jnp.zeros((4, CLASSES)), everything)):
        value, slope = jax.value_and_grad(distance_to_simplex)(kernel, held)
        assert value == pytest.approx(0.0 if kernel.any() else 1.0, abs=1e-6)
        assert np.isfinite(slope).all()
    assert not slope.any()
    assert distance_to_simplex(centered, some) > 0.1


SMALL = {"embedding_size": 2, "hidden_size": 5, "hidden_layers": 1}
"""Of the hypernetwork."""


def networks_of(server):
    """Hypernetwork and embedding network as one flat dict."""
    (kernel1, bias1), (kernel2, bias2) = server.hypernetwork
    hypernetwork = {"h/kernel1": kernel1, "h/bias1": bias1, "h/kernel2": kernel2, "h/bias2": bias2}
    embedding = server.embedding
    layers = {f"backbone/{name}": value for name, value in embedding.backbone.items()}
    return jax.tree.map(np.float64, {**hypernetwork, **layers, "kernel": embedding.kernel, "bias": embedding.bias})


def generated(networks, x, y):
    """The flat model of a client with these examples."""
    inputs = np.concatenate([reference.features(networks, x), np.eye(CLASSES)[y]], axis=1)
    descriptor = np.mean(inputs @ networks["kernel"] + networks["bias"], axis=0)
    hidden = np.maximum(descriptor @ networks["h/kernel1"] + networks["h/bias1"], 0)
    return hidden @ networks["h/kernel2"] + networks["h/bias2"]


def test_pefll():
    clients, rates = full.training_examples(), {"server_lr": 0.3, "server_momentum": 0.5}
    networks, velocity = networks_of(full.start_of("pefll", **SMALL)), {}
    for _ in range(2):
        changes = []
        for x, y in clients:
            flat = generated(networks, x, y)
            trained = full.train(reference.model_of(flat), x, y)
            changes.append(reference.flat(trained) - flat)

        def agreement(networks, changes=changes):
            """What the server's step ascends: how far the generated models are along their changes."""
            pairs = zip(clients, changes, strict=True)
            return np.mean([generated(networks, x, y) @ change for (x, y), change in pairs])

        for name, slope in reference.numerical_gradient(agreement, networks).items():
            velocity[name] = rates["server_momentum"] * velocity.get(name, 0.0) + slope
        networks = {name: value + rates["server_lr"] * velocity[name] for name, value in networks.items()}
    last = full.run("pefll", **SMALL, **rates)
    for name, value in networks_of(last.state.server).items():
        np.testing.assert_allclose(value, networks[name], rtol=1e-3, atol=1e-4, err_msg=name)
    full.assert_received(last, [reference.model_of(generated(networks, x, y)) for x, y in clients], rtol=1e-3)
    lengths = [np.linalg.norm(change) for change in changes]
    np.testing.assert_allclose(np.asarray(last.info["change"])[np.argsort(last.cohort)], lengths, rtol=1e-3)


def test_pefll_is_fedavg_where_the_hypernetwork_gives_everyone_the_same_model():
    def constant(state):
        *hidden, (kernel, bias) = state.server.hypernetwork
        layers = [*jax.tree.map(jnp.zeros_like, hidden), (jnp.zeros_like(kernel), bias)]
        return state._replace(server=state.server._replace(hypernetwork=layers))

    equal, rates = {"rounds": 3, "sizes": (14, 14, 14)}, {"server_lr": 1.0, "server_momentum": 0.0}
    got, want = full.run("pefll", change=constant, **equal, **rates, **SMALL), full.run("fedavg", **equal)
    full.assert_model(want.state.server, reference.model_of(np.asarray(got.state.server.hypernetwork[-1][1])))


def test_a_descriptor_is_of_a_mini_batch_in_training_and_of_all_examples_in_use():
    method, data = pefll(tiny_model(), batch_size=4, **SMALL), client_data(tiny_federation(), 1, "train")
    server = method.init_server(jax.random.key(0))

    def descriptor(key, rows):
        return jax.jit(method.local)(jax.random.key(key), server, (), rows).message.descriptor

    # Another mini-batch in each round, of real examples alone.
    assert len({tuple(np.asarray(descriptor(key, data)).tolist()) for key in range(4)}) == 4
    padded = data._replace(x=jnp.where(data.mask[:, None, None, None], data.x, 9.0))
    np.testing.assert_array_equal(descriptor(0, padded), descriptor(0, data))
    x, y = reference.examples(tiny_federation(), 1)
    deployed = method.personalize(jax.random.key(0), server, (), data)
    full.assert_model(deployed, reference.model_of(generated(networks_of(server), x, y)))
