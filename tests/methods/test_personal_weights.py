"""FedALA, pFedHN and CD2-pFed, whose clients have weights of their own: limits, and equations against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, tiny_federation, tiny_model
from trees import distance

from pfl_jax import InvalidInput
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, cd2pfed, default_training, fedas_cd2, make_method, pfedhn
from pfl_jax.methods.cd2pfed import personal_entries
from pfl_jax.methods.fedala import last_layers
from pfl_jax.networks.models import mlp
from pfl_jax.primitives import fixed_subset

# Adaptive local aggregation


def test_last_layers():
    params = {"backbone": {"conv1": {"bias": 0, "kernel": 0}, "fc1": {"bias": 0, "kernel": 0}}, "head": {"kernel": 0}}
    assert [last_layers(params, count) for count in range(4)] == [[], [4], [2, 3, 4], [0, 1, 2, 3, 4]]
    with pytest.raises(InvalidInput, match="layers must be at most 3, the number of layers of the model, not 4"):
        last_layers(params, 4)


def learn_weights(received, own, weights, x, y, names, passes, eta):
    """The interpolation's weights, learned on all examples at once, and the model they give."""

    def combine(weights):
        return {n: own[n] + (v - own[n]) * weights[n] if n in names else v for n, v in received.items()}

    for _ in range(passes):
        gradient = reference.cross_entropy_gradient(combine(weights), x, y)
        weights = {n: np.clip(weights[n] - eta * gradient[n] * (received[n] - own[n]), 0, 1) for n in names}
    return weights, combine(weights)


@pytest.mark.parametrize(
    ("layers", "share"),
    [pytest.param(1, 0.8, marks=pytest.mark.slow), (2, 0.8), pytest.param(1, 1.0, marks=pytest.mark.slow)],
)
def test_fedala(layers, share):
    clients = full.training_examples()
    eta, w, data = 20.0, reference.to_numpy(full.start_of("fedavg")), tiny_federation(full.SIZES)
    names = [name for name in w if layers == 2 or name.startswith("head")]
    shares = []
    for client, (x, _) in enumerate(clients):
        mask = client_data(data, client, "train").mask
        chosen = np.asarray(fixed_subset(mask, share))[np.asarray(mask)]
        # A share of 1 is every example.
        shares.append(chosen if share < 1 else np.ones(len(x), bool))
    weights, own = [{name: np.ones_like(w[name]) for name in names}] * len(clients), [None] * len(clients)
    for passes in (0, 12, 1, 1):
        for client, (x, y) in enumerate(clients):
            start, part = w, shares[client]
            if passes:
                weights[client], start = learn_weights(
                    w, own[client], weights[client], x[part], y[part], names, passes, eta
                )
            own[client] = full.train(start, x, y)
        w = reference.mean(full.BETA, own)
    # A threshold of zero is never undercut: the first learning takes all its passes.
    last = full.run("fedala", rounds=4, layers=layers, share=share, ala_lr=eta, ala_epochs=12, threshold=0.0)
    full.assert_model(last.state.server, w, rtol=1e-3, atol=2e-4)
    full.assert_models(last.state.clients.params, own, rtol=1e-3, atol=2e-4)
    for client in range(len(clients)):
        learned = reference.flat(weights[client])
        got = np.concatenate([np.ravel(leaf[client]) for leaf in last.state.clients.weights])
        np.testing.assert_allclose(got, learned, atol=2e-3)
        assert ((learned > 0.01) & (learned < 0.95)).any()
    # What it deploys is interpolated with the new global model.
    deployed = [
        learn_weights(w, own[client], weights[client], x[shares[client]], y[shares[client]], names, 1, eta)[1]
        for client, (x, y) in enumerate(clients)
    ]
    full.assert_received(last, deployed, rtol=2e-3, atol=5e-4)


# The hypernetwork


SMALL = {"embedding_size": 3, "hidden_size": 5, "hidden_layers": 1}
"""Of the hypernetwork."""


def test_embeddings_of_pfedhn_are_of_the_run_and_of_the_client():
    method, data = pfedhn(tiny_model(), **SMALL), tiny_federation(full.SIZES)
    clients = [client_data(data, client, "train") for client in range(2)]

    def embedding(seed, client):
        server = method.init_server(jax.random.key(seed))
        # Whatever the client's number, which is in the key of its initialization.
        return [np.asarray(method.init_client(jax.random.key(key), server, client)) for key in (5, 6)]

    found = [embedding(seed, client) for seed in (0, 1) for client in clients]
    for one, other in found:
        np.testing.assert_array_equal(one, other)
    assert len(np.unique(np.round([one for one, _ in found], 3), axis=0)) == 4


def test_pfedhn():
    clients = full.training_examples()
    rates = {"server_lr": 0.3, "embedding_lr": 0.2, "server_momentum": 0.5}
    leaves = [np.float64(leaf) for layer in full.start_of("pfedhn", **SMALL).hypernetwork for leaf in layer]
    networks = dict(zip(("kernel1", "bias1", "kernel2", "bias2"), leaves, strict=True))
    embeddings = np.float64(full.run("pfedhn", rounds=1, server_lr=0.0, embedding_lr=0.0, **SMALL).state.clients)

    def generated(parts):
        hidden = np.maximum(parts["embedding"] @ parts["kernel1"] + parts["bias1"], 0)
        return hidden @ parts["kernel2"] + parts["bias2"]

    velocity = dict.fromkeys(networks, 0.0)
    for _ in range(2):
        slopes, new, lengths = [], [], []
        for (x, y), v in zip(clients, embeddings, strict=True):
            parts = networks | {"embedding": v}
            change = reference.flat(full.train(reference.model_of(generated(parts)), x, y)) - generated(parts)
            lengths.append(np.linalg.norm(change))
            slopes.append(reference.numerical_gradient(lambda p, change=change: generated(p) @ change, parts))
            new.append(v + rates["embedding_lr"] * slopes[-1]["embedding"])
        for name in networks:
            velocity[name] = rates["server_momentum"] * velocity[name] + sum(one[name] for one in slopes)
            networks[name] = networks[name] + rates["server_lr"] * velocity[name]
        embeddings = np.array(new)
    last = full.run("pfedhn", rounds=2, **SMALL, **rates)
    np.testing.assert_allclose(last.state.clients, embeddings, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(last.info["change"], lengths, rtol=1e-3)
    got = [leaf for layer in last.state.server.hypernetwork for leaf in layer]
    for leaf, want in zip(got, networks.values(), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=1e-3, atol=1e-4)


# Channels


@pytest.mark.parametrize(("name", "options"), [("cd2pfed", {}), ("fedas_cd2", {}), ("fedas", {"align_lr": 0.5})])
def test_clients_never_trained_take_the_received_model(name, options):
    # A model that has moved since the client's first: entries of that one, or aligning with it, would be seen.
    given = options or {"growth_rounds": 0}
    method, data = METHODS[name](tiny_model(), **given), client_data(tiny_federation(full.SIZES), 1, "train")
    first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
    client = method.init_client(jax.random.key(2), first, data)
    personalize = jax.jit(method.personalize)
    want = {"backbone": later.backbone, "head": first.head} if name == "fedas" else later.params
    jax.tree.map(np.testing.assert_array_equal, personalize(jax.random.key(3), later, client, data), want)
    trained = personalize(jax.random.key(3), later, client._replace(trained=jnp.ones((), bool)), data)
    for part in ("backbone",) if name == "fedas" else ("backbone", "head"):
        assert float(jnp.abs(trained[part]["kernel"] - want[part]["kernel"]).max()) > 1e-2


@pytest.mark.parametrize("noise", [{}, {"dp_clip": 1.0, "dp_noise": 1.0}], ids=["", "noise"])
def test_the_alignment_leaves_personal_entries_alone(noise):
    # In a second layer they read shared channels that move: their own gradient is not zero.
    model, data = mlp((2, 3, 1), CLASSES, hidden=(4, 4)), client_data(tiny_federation(full.SIZES), 1, "train")
    method = fedas_cd2(model, default_training(fedas_cd2).replace(**noise), growth_rounds=0, align_lr=0.5)
    first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
    client = method.init_client(jax.random.key(2), first, data)._replace(trained=jnp.ones((), bool))
    aligned = jax.jit(method.personalize)(jax.random.key(3), later, client, data)
    personal = personal_entries(later.params, 0.5)
    for got, own, shared, mask in zip(
        *map(jax.tree.leaves, (aligned, first.params, later.params, personal)), strict=True
    ):
        np.testing.assert_array_equal(got[mask], own[mask])
        assert shared.ndim < 2 or own.shape[-1] == CLASSES or np.abs(got - shared)[~mask].max() > 1e-3


def test_personal_entries():
    params = tiny_model().init(jax.random.key(0))
    for share, channels in ((0.0, 0), (0.25, 1), (0.49, 1), (0.5, 2), (1.0, 4)):
        mask = jax.tree.map(np.asarray, personal_entries(params, share))
        want = np.arange(4) >= 4 - channels
        np.testing.assert_array_equal(mask["backbone"]["kernel"], np.tile(want, (6, 1)))
        np.testing.assert_array_equal(mask["backbone"]["bias"], want)
        np.testing.assert_array_equal(mask["head"]["kernel"], np.tile(want[:, None], (1, CLASSES)))
        assert not mask["head"]["bias"].any()


def test_nothing_is_distilled_before_there_are_personal_channels():
    data, key = client_data(tiny_federation(full.SIZES), 1, "train"), jax.random.key(0)

    @jax.jit
    def train(lam, done):
        method = make_method("cd2pfed", tiny_model(), lam=lam, growth_rounds=4, lr=0.2)
        server = method.init_server(key)._replace(round=done)
        result = method.local(key, server, method.init_client(key, server, data), data)
        _, _, info = method.aggregate(key, server, (), result.message, None)
        return result.personal, info["share"]

    for done, share in ((0, 0.0), (3, 3 / 8)):
        (strong, found), (none, same) = train(5.0, done), train(0.0, done)
        assert found == same == share
        assert (distance(strong, none) > 1e-6) == (done > 0)


OWN = np.array([0.0, 0.0, 1.0, 1.0])
MASK = {"backbone/kernel": np.tile(OWN, (6, 1)), "backbone/bias": OWN, "head/bias": np.zeros(CLASSES)}
MASK |= {"head/kernel": np.tile(OWN[:, None], (1, CLASSES))}
"""The personal channels, and the entries that belong to them."""


def distillation(w, now, x):
    """Half the sum of the two paths' divergences from what the other one gives now; both have the bias of the head."""

    def paths(w):
        mine = {name: value * (MASK[name] if name != "head/bias" else 1) for name, value in w.items()}
        common = {name: value * (1 - MASK[name]) for name, value in w.items()}
        return [reference.log_softmax(reference.logits(path, x)) for path in (mine, common)]

    pairs = zip(paths(now)[::-1], paths(w), strict=True)
    return 0.5 * sum(np.mean(np.sum(np.exp(t) * (t - p), 1)) for t, p in pairs)


@pytest.mark.parametrize("aligned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_cd2pfed_and_its_alignment(aligned):
    clients = full.training_examples()
    lam, align_lr = 1.5, 0.5
    w = reference.to_numpy(full.start_of("fedavg"))

    def choose(left, right):
        return {name: np.where(MASK[name] > 0, left[name], right[name]) for name in right}

    def align(received, last, x):
        def gradient(w):
            entries = reference.alignment_gradient(w, x, reference.features(last, x))
            return {name: value * (1 - MASK[name]) for name, value in entries.items()}

        return reference.descend(received, gradient, 1, align_lr)

    last_models = [None] * len(clients)
    for _ in range(2):
        for client, (x, y) in enumerate(clients):
            start = w
            if last_models[client] is not None:
                start = choose(last_models[client], w)
                if aligned:
                    start = align(start, last_models[client], x)

            def loss(v, now, x=x, y=y):
                return reference.risk(v, x, y) + lam * distillation(v, now, x)

            last_models[client] = full.fit(start, loss)
        w = choose(w, reference.mean(full.BETA, last_models))
    more = {"align_lr": align_lr, "align_batch_size": 32} if aligned else {}
    last = full.run(fedas_cd2 if aligned else cd2pfed, share=0.5, growth_rounds=0, lam=lam, **more)
    assert last.info["share"] == 0.5
    full.assert_model(last.state.server.params, w, rtol=1e-3, atol=1e-4)
    full.assert_models(last.state.clients.params, last_models, rtol=1e-3, atol=1e-4)
    deployed = [choose(own_last, w) for own_last in last_models]
    if aligned:
        deployed = [align(d, own_last, x) for d, own_last, (x, _) in zip(deployed, last_models, clients, strict=True)]
    full.assert_received(last, deployed, rtol=1e-3, atol=1e-4)
    assert np.abs(last_models[0]["head/kernel"][3] - last_models[1]["head/kernel"][3]).max() > 1e-3
