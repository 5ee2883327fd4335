"""Mixture of a personal model and the global model on each client (Deng, Kamani, Mahdavi 2020)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import OWN_GRADIENTS, method_factory
from pfl_jax.primitives.aggregation import follow_mixture, mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.optimizers import descend, initial_state
from pfl_jax.primitives.tree import interpolate
from pfl_jax.validation import AtInit, Fraction


class APFLClient(NamedTuple):
    """State of an APFL client: its own model v_i, and the scalar share alpha_i of v_i in the mixture."""

    own: Params
    alpha: jax.Array


@method_factory
def apfl(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    alpha: Annotated[Fraction, AtInit()] = 0.25,
    adaptive: bool = False,
) -> Method:
    """APFL: FedAvg, and on each client a personal model that is trained as part of a mixture with the global model.

    On every mini-batch of E epochs, with m_i = alpha v_i + (1 - alpha) w_i before the step:

        w_i:  step along the gradient of CE(w_i)
        v_i:  step along the gradient of CE(m_i) with respect to v_i, alpha times the gradient with respect to m_i
        alpha <- clip(alpha - lr <v_i - w_i, gradient of CE at m_i>, 0, 1), if adaptive

    The server averages the w_i with weights beta, so its model is FedAvg's; clients keep v_i and alpha. A client
    deploys the mixture of v_i and the received w.

    Args:
      training: recipe of local training.
      alpha: share of the client's own model in the mixture, between 0 and 1; the initial value if adaptive.
      adaptive: whether each client learns its own alpha.

    Returns:
      A `Method` with the global model as server state and an `APFLClient` as client state.
      Trees: server model; client APFLClient(own: model, alpha: number).

    Info:
      alpha: [M], share of each client's own model in its mixture after the round.

    Reference:
      Deng, Kamani, Mahdavi. Adaptive Personalized Federated Learning. 2020. The algorithm Local Descent APFL, and
      its adaptive mixing parameter.

    Deviations:
      The paper averages the w_i of a cohort equally; here clients are weighted by their numbers of examples, as in
      FedAvg. An adaptive alpha takes a step of plain gradient descent on every mini-batch, whatever optimizer trains
      the models. The rest is the paper's algorithm. The authors' code (github.com/MLOPTPSU/FedTorch, commit ab8068d)
      differs from it: v_i is trained on the loss of the mixed outputs alpha f_v(x) + (1 - alpha) f_w(x), after the step
      of w_i; an adaptive alpha moves once a round, with 0.02 alpha added to the gradient. Its default alpha is 0.5.
    """

    if adaptive:
        training.require_lr("an adaptive alpha of apfl")
    risk, one = supervised_loss(model), training.transformation()
    # Separate optimizers: each model's gradient is clipped by its own norm.
    optimizer = optax.partition({"own": one, "shared": one}, ("own", "shared"))

    def loss(models, alpha, batch, key):
        own, shared = models
        mixed_key, shared_key = jax.random.split(key)
        # The loss of the mixture does not train the shared model. Its gradient with respect to alpha is
        # <v - w, gradient at the mixture>.
        mixed = interpolate(alpha, own, jax.lax.stop_gradient(shared))
        mixed_risk, mixed_statistics = risk(mixed, batch, mixed_key)
        shared_risk, shared_statistics = risk(shared, batch, shared_key)
        own_statistics = follow_mixture(alpha, own, mixed, mixed_statistics)
        return mixed_risk + shared_risk, (own_statistics, shared_statistics)

    def train(key, server, client, data):
        def step(carry, batch, key):
            models, alpha, opt_state = carry
            (gradient, slope), statistics = jax.grad(loss, argnums=(0, 1), has_aux=True)(models, alpha, batch, key)
            models, opt_state = descend(optimizer, gradient, statistics, models, opt_state)
            if adaptive:
                alpha = jnp.clip(alpha - training.lr * slope, 0, 1)
            return models, alpha, opt_state

        models = (client.own, server)
        carry = (models, client.alpha, initial_state(optimizer, models))
        (own, shared), learned, _ = training.fold(key, carry, data, step)
        personal = interpolate(learned, own, shared)
        return LocalResult(APFLClient(own, learned), mean_by_size(shared, data), personal)

    def aggregate(key, server, clients, messages, cohort):
        return messages.value, clients, {"alpha": clients.alpha}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: APFLClient(server, jnp.asarray(alpha, jnp.float32)),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: interpolate(client.alpha, client.own, server),
        predict=model.apply,
        server_is_mean=True,
        privacy=Privacy(refused=OWN_GRADIENTS, clients=()),
    )
