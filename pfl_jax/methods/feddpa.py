"""A global and a personal low-rank adapter, mixed anew for each input (Yang et al. 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.errors import NO_FEATURES, InvalidInput
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.low_rank import mix_adapters
from pfl_jax.streams import PERSONAL_MODEL
from pfl_jax.validation import Count, Fraction


class DualParams(NamedTuple):
    """Model that a client deploys.

    Attributes:
      shared: the global parameters.
      own: the client's parameters.
      references: features [S, d] of some of its training examples under the client's own parameters.
    """

    shared: Params
    own: Params
    references: jax.Array


@method_factory(adapters=True)
def feddpa(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    share: Fraction = 0.5,
    scale: Fraction = 0.5,
    references: Count = 5,
) -> Method:
    """FedDPA-T: FedAvg of one adapter, and on each client a second one, whose weight depends on the input.

        own_i <- E epochs of SGD on CE(share own_i + (1 - share) w),  w as received
        w_i    = E epochs of SGD from w on CE(w_i);   w = sum_i beta_i w_i
        prediction for x:  alpha_x own_i + (1 - alpha_x) w,  alpha_x = scale mean_s cos(f(x), f(x_s))

    A mixture has both adapters, whose outputs are added with these weights, and interpolates all other parameters. f is
    the backbone with the client's own adapter, and x_s are `references` of its training examples.

    Args:
      training: recipe of local training of both models.
      share: weight of the client's own adapter while it is trained.
      scale: largest weight of the client's adapter in a prediction.
      references: number S of training examples with which inputs are compared, the client's first ones.

    Returns:
      A `Method` with the global model as server state and the client's own parameters as client state.
      Trees: server model; client model.

    Reference:
      Yang, Long, Shen, Jiang, Blumenstein. Dual-Personalizing Adapter for Federated Foundation Models. NeurIPS 2024,
      Section 4, FedDPA-T.

    Deviations:
      The released code (github.com/Lydia-yang/FedDPA) draws the references anew for each input. There the features are
      the last hidden state of a language model, and the client's adapter is trained from the second round on, here from
      the first.
    """
    if not model.num_features:
        raise InvalidInput(NO_FEATURES)
    base = fedavg(model, training)
    loss = supervised_loss(model)

    def train(key, server, client, data):
        def of_mixture(own, batch, key):
            return loss(mix_adapters(share, own, server), batch, key)

        own = training.fit(jax.random.fold_in(key, PERSONAL_MODEL), client, data, of_mixture)
        # The same key as FedAvg, so that the global model equals FedAvg's batch for batch.
        return LocalResult(own, base.local(key, server, (), data).message, deployed(server, own, data))

    def deployed(server, own, data):
        rows = jnp.arange(references) % jnp.maximum(jnp.sum(data.mask), 1)
        some = jax.tree.map(lambda leaf: leaf[rows], data.x)
        features = model.features(own["backbone"], some).reshape(references, -1)
        # A client without examples has none to compare with: zeros give alpha = 0, the global model.
        return DualParams(server, own, jnp.where(jnp.any(data.mask), features, 0.0))

    def predict(personal, inputs):
        features = model.features(personal.own["backbone"], inputs)
        alpha = scale * jnp.mean(_cosines(features.reshape(len(features), -1), personal.references), axis=1)

        def one(alpha, x):
            return model.apply(mix_adapters(alpha, personal.own, personal.shared), x[None])[0]

        return jax.vmap(one)(alpha, inputs)

    return base._replace(
        init_client=lambda key, server, data: server,
        local=train,
        personalize=lambda key, server, client, data: deployed(server, client, data),
        predict=predict,
        privacy=Privacy(2 * training.most_passes, (SIZE, "features of some examples: kept, and compared with inputs")),
    )


def _cosines(left, right):
    """Cosines [B, S] of the angles between vectors [B, d] and [S, d]."""
    left, right = (rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in (left, right))
    return jnp.matmul(left, right.T, precision="highest")
