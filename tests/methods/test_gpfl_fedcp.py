"""GPFL and FedCP: features split between a shared and a personal route, against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import reference
from problems import CLASSES, tiny_federation, tiny_model
from reference import cross_entropy
from trees import assert_flat, assert_same, flatten, row

from pfl_jax.data import client_data
from pfl_jax.methods import fedcp
from pfl_jax.methods.fedcp import context as fedcp_context
from pfl_jax.methods.gpfl import cosine_logits
from pfl_jax.primitives import LocalTraining


def dense(w, name, x):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def layer_norm(w, name, x):
    return reference.layer_norm(x, w[f"{name}/scale"], w[f"{name}/bias"], 1e-5)


def split(w):
    """What is shared of a flat model, and its personal head."""
    own = {name: value for name, value in w.items() if name.startswith("own")}
    return {name: value for name, value in w.items() if name not in own}, own


# GPFL


def route(w, condition, x):
    scale, shift = (
        layer_norm(w, f"valve/{name}_norm", np.maximum(dense(w, f"valve/{name}_dense", condition), 0))
        for name in ("gamma", "beta")
    )
    return np.maximum(reference.features(w, x) * (1 + scale) + shift, 0)


def personal_condition(w, y):
    return np.bincount(y, minlength=CLASSES) / len(y) @ w["embeddings"]


def gpfl_loss(w, received, x, y, lam, mu):
    generic, personal = received["embeddings"].mean(0), personal_condition(received, y)
    common = route(w, generic, x)
    units = [rows / np.maximum(np.linalg.norm(rows, axis=1), 1e-12)[:, None] for rows in (common, w["embeddings"])]
    decayed = [value for name, value in w.items() if name.startswith(("valve", "embeddings"))]
    return (
        cross_entropy(dense(w, "own", route(w, personal, x)), y)
        + cross_entropy(units[0] @ units[1].T, y)
        + lam * np.linalg.norm(common - received["embeddings"][y])
        + mu / 2 * sum((value**2).sum() for value in decayed)
    )


def test_gpfl():
    clients, start, settings = full.training_examples(), full.start_of("gpfl"), {"lam": 0.3, "mu": 0.05}
    shared = flatten(start.shared._asdict())
    heads = [{f"own/{name}": value for name, value in flatten(start.head).items()}] * len(clients)
    for _ in range(2):
        new, known = [], shared
        for client, (x, y) in enumerate(clients):
            w = {**shared, **heads[client]}
            w = full.fit(w, lambda w, now, known=shared, x=x, y=y: gpfl_loss(w, known, x, y, **settings))
            mine, heads[client] = split(w)
            new.append(mine)
        shared = reference.mean(full.BETA, new)
    last = full.run("gpfl", **settings)
    assert_flat(last.state.server.shared._asdict(), shared)
    for client, head in enumerate(heads):
        assert_flat({"own": row(last.state.clients, client)}, head)
        (x, y), (_, labels) = full.unseen_examples(client), clients[client]
        # Right after its training, a client still has the condition with which it trained.
        for w, embeddings, scores in ((shared, shared, last.received), (new[client], known, last.trained)):
            logits = dense(head, "own", route(w, personal_condition(embeddings, labels), x))
            np.testing.assert_allclose(scores["loss"][client], cross_entropy(logits, y), rtol=2e-3)


def test_cosines_of_zero_features_are_zero_and_so_are_their_gradients():
    embeddings, zeros = jnp.eye(2), jnp.zeros((1, 2))
    np.testing.assert_array_equal(cosine_logits(zeros, embeddings), 0.0)
    assert np.isfinite(jax.grad(lambda rows: cosine_logits(rows, embeddings).sum())(zeros)).all()


# FedCP


def fedcp_logits(w, head, vector, x):
    features = reference.features(w, x)
    scores = np.maximum(layer_norm(w, "policy/LayerNorm_0", dense(w, "policy/Dense_0", features * vector)), 0)
    size = features.shape[1]
    weights = np.exp(np.stack([scores[:, :size], scores[:, size:]]))
    personal, generic = weights / weights.sum(0)
    return dense(w, "own", features * personal) + dense(head, "head", features * generic)


def context(w):
    total = w["own/kernel"].sum(1)
    return total / np.linalg.norm(total)


def test_fedcp():
    lam, clients, start = 3.0, full.training_examples(), flatten(full.start_of("fedcp")._asdict())
    own = {f"own/{name.removeprefix('head/')}": start[name] for name in start if name.startswith("head")}
    shared, heads = start, [own] * len(clients)
    for _ in range(2):
        new = []
        for client, (x, y) in enumerate(clients):
            fixed = {name: value for name, value in shared.items() if name.startswith("head")}
            trained = {name: value for name, value in shared.items() if name not in fixed}
            vector, targets = context(heads[client]), reference.features(shared, x)

            def loss(w, now, x=x, y=y, fixed=fixed, vector=vector, targets=targets):
                return cross_entropy(fedcp_logits(w, fixed, vector, x), y) + lam * reference.discrepancy(
                    reference.features(w, x), targets
                )

            mine, heads[client] = split(full.fit({**trained, **heads[client]}, loss))
            for name, value in fixed.items():
                mine[name] = (value + heads[client][name.replace("head", "own")]) / 2
            new.append(mine)
        shared = reference.mean(full.BETA, new)
    last = full.run("fedcp", lam=lam)
    assert_flat(last.state.server._asdict(), shared)
    for client, head in enumerate(heads):
        assert_flat({"own": row(last.state.clients, client)}, head)
        x, y = full.unseen_examples(client)
        scores = fedcp_logits({**shared, **head}, shared, context(head), x)
        np.testing.assert_allclose(last.received["loss"][client], cross_entropy(scores, y), rtol=2e-3)


def test_a_head_of_zeros_is_a_context_of_zeros():
    model = tiny_model()
    zeros = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0))["head"])
    np.testing.assert_array_equal(fedcp_context(model, zeros), 0.0)


def test_the_discrepancy_is_between_features_of_the_same_augmented_inputs():
    # Augmentation that is always the same is another data set.
    def shifted(key, x):
        return 2 * x + 1

    model, key, data = tiny_model(), jax.random.key(0), client_data(tiny_federation(full.SIZES), 1, "train")
    recipe = LocalTraining(lr=0.2, batch_size=8, epochs=2)
    plain, augmented = (fedcp(model, one, lam=3.0) for one in (recipe, recipe.replace(augment=shifted)))
    server = plain.init_server(key)
    got = jax.jit(augmented.local)(key, server, server.head, data)
    want = jax.jit(plain.local)(key, server, server.head, data._replace(x=shifted(key, data.x)))
    assert_same(got, want)
