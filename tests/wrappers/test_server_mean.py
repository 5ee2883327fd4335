"""Robust means of the server: rounds against float64 NumPy, the plain method as a limit, and who is refused."""

import jax
import numpy as np
import reference
from full_batches import BETA, SIZES, assert_model, assert_received, run, start_of, train, training_examples
from problems import tiny_model

from pfl_jax.base import LocalResult, Mean
from pfl_jax.messages import join, split
from pfl_jax.methods import make_method
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fedpac import FedPACMessage
from pfl_jax.wrappers.server_mean import ServerMean, robust

MEDIAN = ServerMean("median")


def test_the_weighted_mean_is_the_method_itself():
    method = make_method("fedpac", tiny_model())
    assert robust(method, ServerMean("mean")) is method
    assert robust(method, ServerMean("trimmed:0")) is method
    assert robust(method, ServerMean()) is method


def test_rounds_of_fedavg_with_a_median():
    w = reference.to_numpy(start_of(fedavg))
    for _ in range(2):
        clients = [train(w, x, y) for x, y in training_examples()]
        for name in w:
            stacked = np.concatenate(
                [np.repeat(one[name][None], size, 0) for one, size in zip(clients, SIZES, strict=True)]
            )
            w[name] = np.median(stacked, axis=0)
    last = run(fedavg, server_mean="median")
    assert_model(last.state.server, w)
    assert_received(last, [w] * 3)
    # It is not the mean.
    mean = reference.mean(BETA, clients)
    assert max(np.abs(w[name] - mean[name]).max() for name in w) > 1e-2


def test_each_mean_of_a_message_has_its_own_statistic():
    """Such as FedPAC's backbones and class means, whose weights are those of the classes; heads stay single."""
    method, draw = make_method("fedpac", tiny_model()), np.random.default_rng(0)
    backbone, head, means = (draw.normal(size=shape).astype(np.float32) for shape in ((4, 3), (4, 2), (4, 2, 3)))
    sizes, counts = np.float32([9, 20, 14, 5]), np.float32([[3, 6], [20, 0], [7, 7], [2, 3]])
    head[2] = np.nan

    @jax.jit
    def received(present):
        messages = FedPACMessage(Mean({"w": backbone}, sizes), head, Mean(means, counts), ())
        sends = robust(method._replace(local=lambda *message: LocalResult((), FedPACMessage(*message), ())), MEDIAN)
        sees = robust(method._replace(aggregate=lambda *arguments: arguments[3]), MEDIAN)
        rows, sums = jax.vmap(lambda message, here: split(sends.local(*message).message, here))(messages, present)
        return sees.aggregate((), (), (), join(rows, sums), ())

    got, here = received(np.array([True, True, False, True])), [0, 1, 3]
    np.testing.assert_array_equal(got.centroids.weight, counts[here].sum(0))
    for k in range(2):
        want = np.median(np.repeat(means[here, k], counts[here, k].astype(int), axis=0), axis=0)
        np.testing.assert_allclose(got.centroids.value[k], want, rtol=1e-5)
    copies = np.repeat(backbone[here], sizes[here].astype(int), axis=0)
    np.testing.assert_allclose(got.backbone.value["w"], np.median(copies, axis=0), rtol=1e-5)
    assert float(got.backbone.weight) == 34
    np.testing.assert_array_equal(got.head, np.where(np.arange(4)[:, None] == 2, 0, head))
