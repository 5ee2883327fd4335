"""A simplex of heads under one backbone, in which each client has its own region (Grinwald et al. 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Backbone, Head, LocalResult, Mean, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import OWN_GRADIENTS, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size, size_weights, weighted_mean
from pfl_jax.primitives.ensembles import init_models
from pfl_jax.primitives.fingerprints import fingerprint, fingerprint_key
from pfl_jax.primitives.float64 import in_float64
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.optimizers import descend, initial_state
from pfl_jax.primitives.tree import choose, merge
from pfl_jax.streams import SIMPLEX_POINTS
from pfl_jax.validation import Count, NotNegative

SCALES = 1000
"""Number of scales of the clients' scores that are compared, between 1e-4 and 1 (released code)."""

SMALLEST_DISTANCE = 1e-4
"""Distance of two points of the simplex below which they count as this far apart (released code)."""

RANK_TOLERANCE = 1e-12
"""Share of the changes' sum of squares below which a principal component is rounding."""


class Projection(NamedTuple):
    """Map from a client's change of the heads to its point of the simplex.

    Attributes:
      center: mean change [P].
      components: principal components of the changes [m, P]; zero beyond their rank.
      scale: z, by which the scores are divided before the nearest point of the simplex is taken.
    """

    center: jax.Array
    components: jax.Array
    scale: jax.Array


class FlocoServer(NamedTuple):
    """State of the server.

    Attributes:
      backbone: shared backbone.
      heads: the endpoints: matrices [m, ...], and the vectors (biases), which all endpoints share.
      projection: the map, from the round `projection_round` on; zero before.
      rounds: completed rounds, int32 scalar.
      seed: seed of the points that clients draw, uint32 scalar.
    """

    backbone: Backbone
    heads: Head
    projection: Projection
    rounds: jax.Array
    seed: jax.Array


class FlocoClient(NamedTuple):
    """State of a client: its point of the simplex [m], the center until it is projected; and whether it is (bool)."""

    point: jax.Array
    placed: jax.Array


class FlocoMessage(NamedTuple):
    """Message of a client: its backbone, whose mean the server needs, and its heads."""

    backbone: Mean
    heads: Head


def is_matrix(model: Model) -> Head:
    """Which arrays of the model's head have endpoints: the arrays with two axes or more."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, jax.eval_shape(model.init, jax.random.key(0))["head"])


def head_at(has_endpoints: Head, heads: Head, point: jax.Array) -> Head:
    """Head at a point [m] of the simplex: sum_j point_j phi_j of the matrices, and the vectors unchanged."""

    def combine(matrix, leaf):
        return jnp.tensordot(point, leaf, axes=1, precision="highest") if matrix else leaf

    return jax.tree.map(combine, has_endpoints, heads)


def endpoints_flat(has_endpoints: Head, heads: Head) -> jax.Array:
    """Endpoints of clients, leaves [M, m, ...], as one matrix [M, P]."""
    pairs = zip(jax.tree.leaves(has_endpoints), jax.tree.leaves(heads), strict=True)
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for matrix, leaf in pairs if matrix], axis=1)


def on_simplex(scores: jax.Array, scale: jax.Array) -> jax.Array:
    """Nearest points of the simplex to scores [M, m] divided by a scale."""
    return jax.vmap(optax.projections.projection_simplex)(scores / scale)


def spread_energy(points: jax.Array, present: jax.Array) -> jax.Array:
    """Riesz energy of points [M, m]: the sum over pairs of present ones of 1 / distance^2."""
    pairs = jnp.triu(present[:, None] & present, 1)
    squared = jnp.sum(jnp.square(points[:, None] - points), axis=-1)
    return jnp.sum(jnp.where(pairs, 1 / jnp.maximum(squared, SMALLEST_DISTANCE**2), 0.0))


def fit_projection(changes: jax.Array, present: jax.Array, size: int) -> Projection:
    """Projection of the clients' changes onto the simplex, by which their points spread best.

    Scores kappa are along the first m principal components. The scale z is the one for which the points nearest to
    kappa / z have the smallest `spread_energy`.

    Args:
      changes: [M, P].
      present: [M], bool.
      size: number m of endpoints.
    """

    def fit(changes: jax.Array, present: jax.Array) -> Projection:
        weights = present.astype(jnp.float64)
        rows = changes.astype(jnp.float64)
        total = jnp.sum(jnp.square(rows * weights[:, None]))
        center = weights @ rows / jnp.maximum(jnp.sum(weights), 1)
        rows = (rows - center) * weights[:, None]
        values, vectors = jnp.linalg.eigh(rows @ rows.T)
        count = min(size, rows.shape[0])
        values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
        found = values > RANK_TOLERANCE * jnp.maximum(total, jnp.finfo(jnp.float64).tiny)
        components = jnp.where(found, rows.T @ vectors / jnp.sqrt(jnp.where(found, values, 1)), 0).T
        # The sign of a component is arbitrary: its largest entry is positive.
        turned = jnp.max(components, 1, keepdims=True) < -jnp.min(components, 1, keepdims=True)
        components = jnp.pad(jnp.where(turned, -components, components), ((0, size - count), (0, 0)))
        scores, scales = rows @ components.T, jnp.linspace(1e-4, 1, SCALES)
        energies = jax.lax.map(lambda scale: spread_energy(on_simplex(scores, scale), present), scales)
        found = Projection(center, components, scales[jnp.argmin(energies)])
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), found)

    return in_float64(fit, one_by_one=True)(changes, present)


@in_float64
def place(changes: jax.Array, projection: Projection) -> jax.Array:
    """Points [M, m] of the simplex for changes [M, P]."""
    center, components, scale = (leaf.astype(jnp.float64) for leaf in projection)
    return on_simplex((changes.astype(jnp.float64) - center) @ components.T, scale).astype(jnp.float32)


def anywhere(key: PRNGKey, size: int) -> jax.Array:
    """Random point [m] of the simplex, uniformly distributed."""
    draws = jax.random.exponential(key, (size,))
    return draws / jnp.sum(draws)


def nearby(key: PRNGKey, point: jax.Array, radius: float | jax.Array) -> jax.Array:
    """Random point [m] at a uniformly distributed L1 distance of at most `radius` from a point."""
    direction_key, distance_key = jax.random.split(key)
    direction = jax.random.uniform(direction_key, point.shape, minval=-1.0)
    return point + radius * jax.random.uniform(distance_key) * direction / jnp.sum(jnp.abs(direction))


@method_factory(version=2)
def floco(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    endpoints: Count = 5,
    projection_round: Count = 20,
    radius: NotNegative = 0.01,
) -> Method:
    r"""Floco: heads on a simplex, in which each client trains and deploys near its own point.

        phi(alpha) = sum_j alpha_j phi_j,   alpha on the simplex of m endpoints
        (theta_i, phi_i1..m) = E epochs of SGD from (theta, phi_1..m) on CE(theta_i, phi_i(alpha)), alpha drawn anew for
               every mini-batch:  uniformly on the simplex at first, later with ||alpha - alpha_i||_1 <= radius
        theta = sum_i beta_i theta_i;   phi_j = sum_i beta_i phi_ij,   beta_i = n_i / sum_k n_k

    A client's point alpha_i is the center of the simplex until round `projection_round`. That round's changes of the
    heads are projected onto m principal components; alpha_i is the point of the simplex nearest to client i's scores
    divided by the scale that spreads the points best (`fit_projection`). A client deploys (theta, phi(alpha_i)).
    Before the projection, with one endpoint, this is `fedavg`.

    Args:
      training: recipe of local training.
      endpoints: number m of endpoints.
      projection_round: round, from 1, whose changes give the clients' points (tau in the paper); at least 1. In runs of
        fewer rounds all clients deploy the center of the simplex.
      radius: largest L1 distance of alpha from the client's point (rho in the paper).

    Returns:
      A `Method` with a `FlocoServer` and a `FlocoClient`. A client that has no point when the projection is made gets
      one in the first round in which it takes part.
      Trees: server FlocoServer(backbone, heads: {bias: numbers [K], kernel: numbers [5, d, K]}, projection:
      Projection(center: numbers [1105], components: numbers [5, 1105], scale: number), rounds: count, seed: count);
      client FlocoClient(point: numbers [5], placed: flag).

    Info:
      points: [M, m], the clients' points after the round.

    Reference:
      Grinwald, Wiesner, Nakajima. Federated Learning over Connected Modes. NeurIPS 2024. The equations follow the
      released code. Its settings are m = 20 and radius 0.01 for CIFAR-10 with Dirichlet 0.3, m = 10 and 0.1 for groups
      of classes, 10 and 0.5 for FEMNIST, and the projection after 250 of 500 rounds; the default here is half of 40
      rounds. With m endpoints, gradients of the heads are about 2 / (m + 1) times as large, so the default of m is
      smaller.

    Deviations:
      For the projection, the released code trains all clients once more, and discards the results; here the changes
      come from the round's cohort, and later clients are projected, by the same components, with the change of their
      first round. As there, points drawn near alpha_i may lie slightly outside of the simplex, and all endpoints share
      one bias. The weights of the endpoints have Xavier's initialization there, the model's here. The projection agrees
      with the released functions (github.com/dennis-grinwald/floco, commit a25b3a1): on the same changes of 12 and of
      20 clients, their points agree to 2e-5. Floco+, a personal model regularized toward the simplex, is left out: see
      `ditto`.
    """
    matrices, risk, optimizer = is_matrix(model), supervised_loss(model), training.transformation()

    def at(backbone: Backbone, heads: Head, point: jax.Array) -> Params:
        return merge(backbone, head_at(matrices, heads, point))

    def train(key, server, client, data):
        # By the client's data, so that the points do not depend on how clients are numbered.
        draws = fingerprint_key(jax.random.fold_in(jax.random.key(server.seed), server.rounds), fingerprint(data))

        def loss(params, batch, point, key):
            backbone, heads = params
            return risk(at(backbone, heads, point), batch, key)

        def step(carry, batch, key):
            params, opt_state, index = carry
            draw = jax.random.fold_in(draws, index)
            point = jnp.where(client.placed, nearby(draw, client.point, radius), anywhere(draw, endpoints))
            gradient, statistics = jax.grad(loss, has_aux=True)(params, batch, point, key)
            return *descend(optimizer, gradient, statistics, params, opt_state), index + 1

        start = (server.backbone, server.heads)
        (backbone, heads), *_ = training.fold(key, (start, initial_state(optimizer, start), 0), data, step)
        message = FlocoMessage(mean_by_size(backbone, data), heads)
        return LocalResult(client, message, at(backbone, heads, client.point))

    def aggregate(key, server, clients, messages, cohort):
        rounds = server.rounds + 1
        before = jax.tree.map(lambda leaf: leaf[None], server.heads)
        changes = endpoints_flat(matrices, messages.heads) - endpoints_flat(matrices, before)
        projection = jax.lax.cond(
            rounds == projection_round,
            lambda: fit_projection(changes, cohort.present, endpoints),
            lambda: server.projection,
        )
        new = cohort.present & ~clients.placed & (rounds >= projection_round)
        clients = FlocoClient(choose(new, place(changes, projection), clients.point), clients.placed | new)
        heads = weighted_mean(size_weights(cohort.weights), messages.heads)
        server = FlocoServer(messages.backbone.value, heads, projection, rounds, server.seed)
        return server, clients, {"points": clients.point}

    return fedavg(model, training)._replace(
        init_server=lambda key: _init_server(model, matrices, endpoints, key),
        init_client=lambda key, server, data: FlocoClient(
            jnp.full(endpoints, 1 / endpoints, jnp.float32), jnp.zeros((), bool)
        ),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: at(server.backbone, server.heads, client.point),
        download=lambda server, client: (server.backbone, server.heads, client.point),
        trained_from=lambda server, client: FlocoMessage(server.backbone, NOT_RECEIVED),
        server_is_mean=False,
        privacy=Privacy(refused=OWN_GRADIENTS),
    )


def _init_server(model: Model, matrices: PyTree, endpoints: int, key: PRNGKey) -> FlocoServer:
    """Server before the first round: endpoints that differ in their matrices, and no projection."""
    models = init_models(model, key, endpoints)
    first = jax.tree.map(lambda leaf: leaf[0], models)
    heads = jax.tree.map(lambda matrix, all_, one: all_ if matrix else one, matrices, models["head"], first["head"])
    width = endpoints_flat(matrices, jax.tree.map(lambda leaf: leaf[None], heads)).shape[1]
    zeros = jnp.zeros((endpoints, width), jnp.float32)
    projection = Projection(zeros[0], zeros, jnp.ones((), jnp.float32))
    seed = jax.random.bits(jax.random.fold_in(key, SIMPLEX_POINTS), (), jnp.uint32)
    return FlocoServer(first["backbone"], heads, projection, jnp.zeros((), jnp.int32), seed)
