"""A global model interpolated with each client's nearest neighbors in feature space (Marfoq et al. 2022)."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.examples import map_examples
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.holdout import fixed_subset
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean
from pfl_jax.validation import Count, Fraction, ReadWith

Kernel = Literal["exponential", "gaussian"]

CANDIDATES = (0.5, 0.6, 0.7, 0.8)
"""Candidate weights of the neighbors' prediction (FedPAC, Appendix B.3)."""


class Datastore(NamedTuple):
    """Features of a client's examples under the global model.

    Attributes:
      features: f(x_l) [n, d].
      labels: y [n].
      mask: [n], bool; the examples that can be neighbors.
    """

    features: jax.Array
    labels: jax.Array
    mask: jax.Array


class KNNModel(NamedTuple):
    """Model that a client deploys: the global model, its datastore and the scalar weight a of the neighbors."""

    params: Params
    store: Datastore
    mixing: jax.Array


def neighbor_probabilities(
    store: Datastore, features: jax.Array, neighbors: int, num_classes: int, kernel: Kernel = "exponential"
) -> jax.Array:
    r"""Class probabilities p(y|x), proportional to sum_l exp(-||f(x) - f(x_l)||) over neighbors l with y_l = y.

    The neighbors are the k stored examples with the nearest features.

    Args:
      store: n examples.
      features: f(x) [B, d].
      neighbors: k.
      num_classes: K.
      kernel: "exponential", or "gaussian" for exp(-||f(x) - f(x_l)||^2 / d).

    Returns:
      [B, K]; rows sum to 1, or are zero if the store is empty.
    """
    # Without a center, features far from zero and close to each other would cancel in the product.
    center = (store.mask / jnp.maximum(jnp.sum(store.mask), 1)) @ store.features
    stored = store.features - center
    closeness = 2 * jnp.matmul(features - center, stored.T, precision="highest") - jnp.sum(jnp.square(stored), axis=-1)
    closeness = jnp.where(store.mask, closeness, -jnp.inf)
    _, nearest = jax.lax.top_k(closeness, min(neighbors, store.mask.shape[0]))
    # Distances of the k nearest are computed from differences, which avoids the cancellation in the product above.
    difference = features[:, None] - store.features[nearest]
    if kernel == "gaussian":
        distances = jnp.mean(jnp.square(difference), axis=-1)
    else:
        distances = jnp.linalg.norm(difference, axis=-1)
    real = store.mask[nearest]
    # Only ratios of the weights matter: relative to the nearest neighbor, they do not all underflow.
    offset = jnp.min(jnp.where(real, distances, jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(real, jnp.exp(-(distances - jnp.where(jnp.isfinite(offset), offset, 0.0))), 0.0)
    votes = jnp.einsum("bk,bkc->bc", weights, jax.nn.one_hot(store.labels[nearest], num_classes))
    return votes / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


@method_factory
def knn_per(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    neighbors: Count = 10,
    mixing: Fraction | Literal["auto"] = "auto",
    held_out: Annotated[Fraction, ReadWith("mixing", ("auto",))] = 0.2,
    kernel: Kernel = "exponential",
) -> Method:
    r"""kNN-Per: FedAvg, interpolated on each client with its k nearest training examples in feature space.

        p_i(y|x) = a_i p_knn(y|x) + (1 - a_i) softmax(w(x))_y,   p_knn by `neighbor_probabilities`

    With mixing auto, a_i is the value of 0.5, 0.6, 0.7, 0.8 with the highest accuracy on held-out examples (the
    smallest of equally good values), with the other examples as neighbors. The client then deploys all its examples as
    neighbors. With a_i = 0 this is FedAvg.

    Args:
      training: recipe of local training.
      neighbors: number k of nearest neighbors.
      mixing: weight a of the neighbors' prediction, from 0 to 1; auto chooses it on held-out examples of the client.
      held_out: share of a client's training examples that are held out to choose the weight with mixing auto.
      kernel: weight of a neighbor at distance r in d features: exponential is exp(-r), as in the paper; gaussian is
        exp(-r^2 / d), as in the released code.

    Returns:
      A `Method` with the global model as server state and no client state. The protocol `trained` interpolates the
      client's model right after local training in the same way.
      Trees: server model; client nothing.

    Reference:
      Marfoq, Neglia, Kameni, Vidal. Personalized Federated Learning through Local Memorization. ICML 2022. The section
      on kNN-Per. The candidate values of a are FedPAC's (Appendix B.3).

    Deviations:
      The paper's weights are exp(-r), the default here; its released code has exp(-r^2 / d), see `kernel`. Every client
      chooses its own weight a_i. The global model was trained on the held-out examples too.
    """
    needs_classes(model, "knn_per", "its neighbors vote for classes")

    def probabilities(params: Params, store: Datastore, features: jax.Array) -> tuple[jax.Array, jax.Array]:
        knn = neighbor_probabilities(store, features, neighbors, model.num_classes, kernel)
        return knn, jax.nn.softmax(model.classify(params["head"], features))

    def choose_mixing(params: Params, store: Datastore, data: ClientData) -> jax.Array:
        validation = fixed_subset(data.mask, held_out)
        others = store._replace(mask=data.mask & ~validation)
        knn, softmax = map_examples(lambda features: probabilities(params, others, features), store.features, data.mask)

        def accuracy(a):
            correct = jnp.argmax(a * knn + (1 - a) * softmax, axis=-1) == data.y
            return masked_mean(correct.astype(jnp.float32), validation)

        candidates = jnp.array(CANDIDATES)
        return candidates[jnp.argmax(jax.vmap(accuracy)(candidates))]

    def memorize(params: Params, data: ClientData) -> KNNModel:
        store = Datastore(extract_features(model, params["backbone"], data), data.y, data.mask)
        a = choose_mixing(params, store, data) if isinstance(mixing, str) else jnp.asarray(mixing, jnp.float32)
        return KNNModel(params, store, a)

    base = fedavg(model, training)

    def train(key, server, client, data):
        result = base.local(key, server, client, data)
        return result._replace(personal=memorize(result.personal, data))

    def predict(personal, inputs):
        features = model.features(personal.params["backbone"], inputs)
        knn, softmax = probabilities(personal.params, personal.store, features)
        mixture = personal.mixing * knn + (1 - personal.mixing) * softmax
        return jnp.log(jnp.maximum(mixture, jnp.finfo(jnp.float32).tiny))

    return base._replace(
        local=train,
        personalize=lambda key, server, client, data: memorize(server, data),
        predict=predict,
        privacy=Privacy(
            training.most_passes,
            (SIZE, "features and labels of the examples: kept by the client, for its own predictions"),
            clients=(),
        ),
    )
