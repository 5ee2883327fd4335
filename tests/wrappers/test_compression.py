"""Compressed messages: error feedback against float64 NumPy, bytes, limits, and conformance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from full_batches import BETA, assert_model, run, start_of, train, training_examples
from problems import CLASSES, FEATURES, HYPER_PARAMETERS, tiny_federation, tiny_model
from test_server_state import counted_momentum
from trees import assert_same

from pfl_jax import LocalResult, Mean
from pfl_jax.engine.communication import traffic
from pfl_jax.methods import METHODS, fedavg, make_method
from pfl_jax.testing import CHECKS, Subject
from pfl_jax.wrappers.compression import Compression, compressed

THETA, PHI = 6 * FEATURES + FEATURES, FEATURES * CLASSES + CLASSES


def test_no_compression_is_the_method_itself():
    method = make_method("scaffold", tiny_model())
    for text in ("none", "quantize:32"):
        assert compressed(method, Compression(text)) is method


def test_rounds_of_fedavg_with_error_feedback():
    w = reference.to_numpy(start_of(fedavg))
    errors = [{name: np.zeros_like(value) for name, value in w.items()} for _ in BETA]
    for _ in range(3):
        sent = []
        for error, (x, y) in zip(errors, training_examples(), strict=True):
            v = train(w, x, y)
            change = {name: v[name] - w[name] + error[name] for name in w}
            sizes = np.sort(np.concatenate([np.abs(value).ravel() for value in change.values()]))
            least = sizes[-round(0.3 * len(sizes))]
            kept = {name: np.where(np.abs(value) >= least, value, 0.0) for name, value in change.items()}
            error.update({name: change[name] - kept[name] for name in w})
            sent.append(kept)
        w = {name: w[name] + reference.mean(BETA, sent)[name] for name in w}
    last = run(fedavg, rounds=3, compress="topk:0.3")
    assert_model(last.state.server, w)
    memory = last.state.clients.memory
    for client, error in enumerate(errors):
        own = jax.tree.map(lambda leaf, row=client: leaf[row], memory)
        assert_model(own, error)


def test_scaffold_s_control_variate_stays_the_mean_of_its_clients():
    last = run("scaffold", rounds=6, compress="topk:0.3")
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), last.state.clients.state.control)
    assert_same(last.state.server.control, mean)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(mean)) > 0.01


def test_values_that_were_not_received_follow_by_their_changes():
    """h <- h + C(v - h), and the weight stays."""
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)

    def local(key, server, client, data):
        return LocalResult(client + 1, (Mean(jnp.asarray(values)[client], jnp.float32(7)), client), ())

    plain = make_method("local", tiny_model())._replace(
        local=local, init_client=lambda *_: jnp.zeros((), jnp.int32), trained_from=lambda *_: (None, None)
    )
    method = compressed(plain, Compression("sign"))
    key, server = jax.random.key(0), {"w": jnp.ones((2, 2))}
    client, h = method.init_client(key, server, None), np.zeros(5)
    for number, v in enumerate(np.float64(values)):
        result = method.local(key, server, client, None)
        change = v - h
        h = h + np.where(change < 0, -1, 1) * np.abs(change).mean()
        mean, single = result.message
        np.testing.assert_allclose(mean.value, h, rtol=1e-5)
        np.testing.assert_allclose(result.client.memory[0], h, rtol=1e-5)
        assert (float(mean.weight), int(single), int(result.client.state)) == (7, number, number + 1)
        client = result.client
    # Rounding is drawn anew in every round.
    rounded = compressed(plain, Compression("quantize:2"))
    start = rounded.init_client(key, server, None)
    draws = [rounded.local(jax.random.key(seed), server, start, None).message[0].value for seed in range(4)]
    assert len({tuple(np.asarray(draw).tolist()) for draw in draws}) > 1
    # And for every mean of a message.
    twice = plain._replace(
        local=lambda *given: LocalResult(given[2], (Mean(jnp.asarray(values), jnp.ones(())),) * 2, ())
    )
    twice = compressed(twice, Compression("quantize:2"))
    one, other = twice.local(key, server, twice.init_client(key, server, None), None).message
    assert not np.array_equal(one.value, other.value)


@pytest.mark.parametrize(
    ("text", "backbone", "centroids"),
    [
        ("none", 4 * THETA, 4 * CLASSES * FEATURES),
        ("quantize:32", 4 * THETA, 4 * CLASSES * FEATURES),
        ("topk:0.1", 8 * 3, 8),
        ("sign", 3 + 1 + 8, 2 + 4),
        ("quantize:4", 12 + 2 + 8, 6 + 4),
    ],
)
def test_bytes(text, backbone, centroids):
    data = tiny_federation()
    sent = traffic(make_method("fedper", tiny_model(), **HYPER_PARAMETERS, compress=text), data)
    assert sent == (backbone, 4 * THETA)
    # Weights [K] and parts that are no mean are sent as they are.
    single = 4 * (PHI + 1 + CLASSES * FEATURES + CLASSES)
    sent = traffic(make_method("fedpac", tiny_model(), **HYPER_PARAMETERS, compress=text), data)
    assert sent.up == backbone + centroids + single
    # Nor are shares of classes compressed.
    sent = traffic(make_method("fedgen", tiny_model(), **HYPER_PARAMETERS, compress=text, shared="head"), data)
    assert (
        sent.up
        == traffic(make_method("lg_fedavg", tiny_model(), **HYPER_PARAMETERS, compress=text), data).up + 4 * CLASSES
    )


PRIVATE, PRIVATE_CLIENTS = {"dp_clip": 0.5, "dp_noise": 0.1}, {"client_clip": 0.5, "client_noise": 0.1}
USUAL = ("structure", "resumption", "clients_outside")
MOST = (*USUAL, "one_trace", "chunks_and_padding", "devices", "vmap")

DEFAULT = [
    ("fedper", {"compress": "quantize:4", "server_mean": "median"}, USUAL),
    ("fedper", {"server_optimizer": "yogi", "server_lr": 0.05}, USUAL),
    (counted_momentum, {}, ("structure", "resumption", "chunks_and_padding")),
]

SLOW = [
    ("fedper", PRIVATE | PRIVATE_CLIENTS, MOST),
    ("fedpac", PRIVATE, MOST),
    ("fedpac", {"dp_clip": 0.5}, ("order_of_clients",)),
    ("ditto", PRIVATE, USUAL),
    *((name, PRIVATE_CLIENTS, (*USUAL, "chunks_and_padding")) for name in ("fedrod", "fedpac")),
    ("fedavg", PRIVATE_CLIENTS | {"server_optimizer": "adam"}, ("vmap", "devices")),
    *(
        (name, {"server_mean": mean}, MOST if "krum" in mean else (*MOST, "order_of_clients"))
        for name in ("scaffold", "fedper", "fedpac", "fedas", "fedem", "fedproto_g")
        for mean in ("median", "trimmed:0.2", "krum", "multi_krum:0.3", "geometric_median")
    ),
    # Two orders of a sum may round to different levels, or have another sign at zero.
    *(
        (name, {"compress": text, "server_mean": "trimmed:0.3"}, (*USUAL, "one_trace", "devices", "seeds"))
        for name in ("scaffold", "fedper", "fedpac", "fedas", "fedem", "fedproto_g", "ditto")
        for text in ("topk:0.2", "quantize:8", "sign")
    ),
    *(("fedper", {"compress": text}, ("learning",)) for text in ("topk:0.2", "quantize:8", "sign")),
]
"""(method, hyper-parameters, checks). Where two clients score alike, Krum's choice depends on their order."""


@pytest.mark.parametrize(
    ("method", "values", "checks"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_wrapped_method_conforms(method, values, checks):
    subject = Subject(METHODS.get(method, method), **values)
    for check in checks:
        CHECKS[check](subject)
