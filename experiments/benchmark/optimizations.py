"""Gain of single optimizations: the plain way and ours, on one client of FedPAC's setting and one device."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark import measure, workload
from experiments.benchmark.jax_rounds import convolutions
from experiments.benchmark.records import Section
from experiments.benchmark.workload import Scale, Setup
from pfl_jax.base import ClientData, Loss, PyTree
from pfl_jax.data.federated import client_data
from pfl_jax.networks.convolution import conv2d
from pfl_jax.networks.pooling import max_pool
from pfl_jax.primitives.examples import map_examples
from pfl_jax.primitives.feature_statistics import class_centroids
from pfl_jax.primitives.fisher import MICROBATCH, fisher_trace
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import cross_entropy, deployed_loss, feature_alignment

Ways: TypeAlias = tuple[Callable[[], PyTree], Callable[[], PyTree]]
"""The plain way to compute something, and ours; both are compiled."""


def optimizations(setup: Setup) -> Section:
    """Medians of interleaved repetitions of both ways, and the difference between their results."""
    rows = []
    for name, (build, before, after) in BUILDERS.items():
        setup.notify(f"{name}: before and after")
        plain, ours = build(setup.scale)
        apart = difference(plain(), ours())
        times = measure.medians(setup.scale.repetitions[0], {"before, ms": plain, "after, ms": ours})
        milliseconds = {heading: 1e3 * seconds for heading, seconds in times.items()}
        ratio = times["before, ms"] / times["after, ms"]
        rows.append({"what": name, "before": before, "after": after, **milliseconds, "ratio": ratio, "apart": apart})
    note = "one client, one device; medians of interleaved repetitions; apart: largest relative difference of results"
    return Section("Optimizations", rows, note)


def difference(left: PyTree, right: PyTree) -> float:
    """Largest difference between two trees' entries, relative to the largest entry."""
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    scale = max(float(jnp.abs(b).max()) for _, b in pairs)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs) / scale


def _compiled(fn: Callable[..., PyTree], *arguments: Any) -> Callable[[], PyTree]:
    compiled = jax.jit(fn).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


@functools.cache
def _client(scale: Scale) -> ClientData:
    data = workload.federation(scale.clients, scale.examples)
    return jax.tree.map(jnp.asarray, client_data(data, 0, "train"))


def _recipe(scale: Scale, lr: float) -> LocalTraining:
    return LocalTraining(lr, scale.momentum, scale.weight_decay, scale.batch_size, epochs=1)


def _classification(logits: Callable[[PyTree, jax.Array], jax.Array]) -> Loss:
    """Cross-entropy of a batch under some way to compute logits."""
    return lambda params, batch, key: cross_entropy(logits(params, batch.x), batch.y, batch.mask)


def _trained_epoch(scale: Scale, features: Callable[[PyTree, jax.Array], jax.Array]) -> Callable[[], PyTree]:
    """One epoch of the whole network with this backbone."""
    model = workload.network()
    loss = _classification(lambda params, x: model.classify(params["head"], features(params["backbone"], x)))
    train = functools.partial(_recipe(scale, scale.lr).fit, jax.random.key(1), loss=loss)
    return _compiled(train, model.init(jax.random.key(0)), _client(scale))


def _convolution(scale: Scale) -> Ways:
    features = workload.network().features
    with convolutions("lax"):
        plain = _trained_epoch(scale, features)
    return plain, _trained_epoch(scale, features)


def _handwritten(scale: Scale, block: Callable[[jax.Array, jax.Array], jax.Array]) -> Ways:
    """The network with another order or kind of pooling, block(convolved, bias), and as it is."""

    def features(backbone, x):
        for name, padding in (("conv1", 0), ("conv2", 1)):
            x = block(conv2d(x, backbone[name]["kernel"], padding), backbone[name]["bias"])
        x = x.reshape(x.shape[0], -1) @ backbone["fc1"]["kernel"] + backbone["fc1"]["bias"]
        return nn.leaky_relu(x)

    return _trained_epoch(scale, features), _trained_epoch(scale, workload.network().features)


def _pooling_order(scale: Scale) -> Ways:
    return _handwritten(scale, lambda x, bias: max_pool(nn.leaky_relu(x + bias)))


def _pooling_gradient(scale: Scale) -> Ways:
    return _handwritten(scale, lambda x, bias: nn.leaky_relu(nn.max_pool(x, (2, 2), (2, 2)) + bias))


def _fedpac_features(scale: Scale) -> Ways:
    model = workload.network()

    def extract(backbone, x):
        return map_examples(lambda rows: model.features(backbone, rows), x, jnp.ones(x.shape[0], bool))

    def head_epoch(head, data, classify):
        return _recipe(scale, scale.head_lr).fit(jax.random.key(1), head, data, _classification(classify))

    def statistics(features, data):
        return class_centroids(features, data.y, data.mask, model.num_classes)[0]

    def separate(params, data):
        backbone, head = params["backbone"], params["head"]
        head = head_epoch(head, data, lambda head, x: model.classify(head, model.features(backbone, x)))
        return head, statistics(extract(backbone, data.x), data)

    def shared(params, data):
        features = extract(params["backbone"], data.x)
        head = head_epoch(params["head"], data._replace(x=features), model.classify)
        return head, statistics(features, data)

    arguments = model.init(jax.random.key(0)), _client(scale)
    return _compiled(separate, *arguments), _compiled(shared, *arguments)


def _fedas_targets(scale: Scale) -> Ways:
    model = workload.network()

    def epoch(backbone, data, target):
        def loss(backbone, batch, key):
            return feature_alignment(model.features(backbone, batch.x), target(batch), batch.mask)

        # FedAS, Section 4.1.
        return LocalTraining(scale.lr, 0.0, 0.0, batch_size=16, epochs=1).fit(jax.random.key(1), backbone, data, loss)

    def in_steps(backbone, previous, data):
        return epoch(backbone, data, lambda batch: model.features(previous, batch.x))

    def once(backbone, previous, data):
        targets = map_examples(lambda rows: model.features(previous, rows), data.x, data.mask)
        return epoch(backbone, data._replace(y=targets), lambda batch: batch.y)

    backbones = [model.init(jax.random.key(seed))["backbone"] for seed in (0, 1)]
    return _compiled(in_steps, *backbones, _client(scale)), _compiled(once, *backbones, _client(scale))


def _fisher(scale: Scale) -> Ways:
    model = workload.network()
    loss = deployed_loss(model)

    def one_by_one(params, data):
        def norms(rows):
            return jax.vmap(lambda row: squared_norm(params, row))(jax.tree.map(lambda leaf: leaf[:, None], rows))

        return jnp.mean(map_examples(norms, data, data.mask, batch_size=MICROBATCH))

    def squared_norm(params, row):
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(jax.grad(loss)(params, row)))

    arguments = model.init(jax.random.key(0)), _client(scale)
    return _compiled(one_by_one, *arguments), _compiled(functools.partial(fisher_trace, loss), *arguments)


def _gram(scale: Scale) -> Ways:
    model = workload.network()
    generator = np.random.default_rng(0)
    shape = (scale.clients, model.num_classes * model.num_features)
    means = jnp.asarray(generator.normal(size=shape), jnp.float32)

    def differences(means):
        apart = means[:, None] - means[None]
        return jnp.einsum("ijd,ikd->ijk", apart, apart)

    def gram(means):
        products = means @ means.T
        return jnp.diagonal(products)[:, None, None] - products[:, :, None] - products[:, None, :] + products[None]

    return _compiled(differences, means), _compiled(gram, means)


BUILDERS: dict[str, tuple[Callable[[Scale], Ways], str, str]] = {
    "convolutions in training": (_convolution, "lax.conv_general_dilated and its gradients", "conv2d's form here"),
    "order of pooling in training": (_pooling_order, "bias, activation, pooling", "pooling first, the same function"),
    "pooling in training": (_pooling_gradient, "flax's max_pool and its gradient", "each winner's place is kept"),
    "FedPAC's statistics and head epoch": (_fedpac_features, "a pass over the fixed backbone each", "one for both"),
    "FedAS's alignment epoch": (_fedas_targets, "previous embeddings in each step", "once, in large batches"),
    "FedAS's Fisher trace": (_fisher, "vmap of grad: one gradient per example", "closed forms of the squared norms"),
    "matrices of FedPAC's quadratic programs": (_gram, "inner products of all differences", "one Gram matrix"),
}
"""All optimizations: what is computed, and how the plain way and ours compute it."""
