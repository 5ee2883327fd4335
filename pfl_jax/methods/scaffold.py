"""Federated averaging with control variates against client drift (Karimireddy et al. 2020)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.base import ClientData, Exact, LocalResult, Mean, Method, Model, Params, Privacy, PRNGKey, TrainingLoss
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import method_factory
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import interpolate
from pfl_jax.streams import FULL_GRADIENT
from pfl_jax.validation import NotNegative


class ScaffoldServer(NamedTuple):
    """Global model w and the server's control variate c, which is the mean of the c_i of all N clients."""

    params: Params
    control: Params


class ScaffoldClient(NamedTuple):
    """State of a client.

    Attributes:
      control: its control variate c_i, as included in the server's c.
      trained: c_i+ after its last training, which becomes c_i when its message arrives.
    """

    control: Params
    trained: Params


class ScaffoldMessage(NamedTuple):
    """Message of a client: its model w_i, and the change c_i+ - c_i of its control variate.

    The change is exact, because the client keeps c_i+: c would otherwise no longer be the mean of the c_i.
    """

    params: Mean
    control_change: Exact


def effective_steps(steps: jax.Array, momentum: jax.Array | float) -> jax.Array:
    """Distance that SGD with momentum covers in S steps with a constant gradient, in units of lr times the gradient.

        sum over t = 1..S of (1 - m^t) / (1 - m);   S without momentum

    Args:
      steps: S, an integer scalar.
      momentum: m in [0, 1).
    """

    def step(_, carry):
        velocity, distance = carry
        velocity = momentum * velocity + 1
        return velocity, distance + velocity

    # The closed form cancels for m near 1.
    _, distance = jax.lax.fori_loop(0, steps, step, (jnp.zeros(()), jnp.zeros(())))
    return distance


def mean_gradient(
    key: PRNGKey, training: LocalTraining, loss: TrainingLoss, params: Params, data: ClientData
) -> Params:
    """Gradient of the mean loss over all examples of a client, computed in mini-batches; zero without examples.

    `key` is the client's; each mini-batch has its own key for the loss.
    """
    count = jnp.maximum(jnp.sum(data.mask), 1)

    def add(carry, batch, _):
        total, index = carry
        share = jnp.sum(batch.mask) / count
        loss_key = jax.random.fold_in(jax.random.fold_in(key, FULL_GRADIENT), index)
        gradient, _ = jax.grad(loss, has_aux=True)(params, batch, loss_key)
        return jax.tree.map(lambda sums, g: sums + share * g, total, gradient), index + 1

    one_pass = LocalTraining(batch_size=training.batch_size, epochs=1)
    # The order does not matter for a sum.
    return one_pass.fold(jax.random.key(0), (jax.tree.map(jnp.zeros_like, params), 0), data, add)[0]


def _change_by_steps(training: LocalTraining, server: ScaffoldServer, params: Params, data: ClientData) -> Params:
    """Change c_i+ - c_i of a client's control variate by option II, from the distance that its steps covered."""
    reach = training.lr * effective_steps(training.num_steps(jnp.sum(data.mask)), training.momentum)
    # Without steps, or with a learning rate of zero, the control variate does not change.
    return jax.tree.map(
        lambda old, new, c: jnp.where(reach == 0, 0, (old - new) / jnp.where(reach == 0, 1, reach) - c),
        server.params,
        params,
        server.control,
    )


@method_factory
def scaffold(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    server_lr: NotNegative = 1.0,
) -> Method:
    """SCAFFOLD: control variates correct the clients' gradients for client drift.

        each step of w_i:  g(w_i) - c_i + c  in place of the gradient g(w_i)
        c_i+ = c_i - c + (w - w_i) / (S_i lr),  S_i steps of client i                      (option II)
        w <- w + server_lr mean_i (w_i - w);   c <- c + (M / N) mean_i (c_i+ - c_i)

    All control variates start at zero, so for clients of equal size the first round equals FedAvg's. Both means are
    unweighted over the cohort: c is the mean of the c_i, so the corrections c - c_i cancel in the server's mean only if
    all clients have equal weights. A client whose message does not arrive keeps its c_i. With a learning rate of zero
    neither models nor control variates change.

    Args:
      training: recipe of local training.
      server_lr: learning rate of the server; 1 takes the mean of the clients' models.

    Returns:
      A `Method`. The server keeps a `ScaffoldServer`, a client a `ScaffoldClient`.
      Trees: server ScaffoldServer(params: model, control: model); client ScaffoldClient(control: model, trained:
      model).

    Reference:
      Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
      ICML 2020. Algorithm 1, option II (Eq. 3 to 5).

    Deviations:
      The paper has no momentum. With momentum m, S_i is replaced by `effective_steps`, so that c_i remains an estimate
      of the client's gradient. With S_i itself, c_i would be up to 1 / (1 - m) times too large: the corrections would
      oscillate around their fixed point for m = 0.5 and diverge for m = 0.9. Weight decay is part of the steps, so c_i
      estimates the gradient of the loss with weight decay. Clipped steps and the steps of other optimizers are not
      multiples of gradients; there c_i+ is the client's gradient at w (option I), which takes one more pass over the
      examples.
    """
    loss = supervised_loss(model)
    by_steps = training.optimizer == "sgd" and training.clip_norm is None

    def init_server(key):
        params = model.init(key)
        return ScaffoldServer(params, jax.tree.map(jnp.zeros_like, params))

    def train(key, server, client, data):
        correction = jax.tree.map(jnp.subtract, server.control, client.control)
        corrected = optax.stateless(lambda gradient, _: jax.tree.map(jnp.add, gradient, correction))
        descent = optax.chain(corrected, training.transformation())
        params = training.fit(key, server.params, data, loss, transformation=descent)
        if by_steps:
            change = _change_by_steps(training, server, params, data)
        else:
            gradient = mean_gradient(key, training, loss, server.params, data)
            change = jax.tree.map(jnp.subtract, gradient, client.control)
        trained = jax.tree.map(jnp.add, client.control, change)
        message = ScaffoldMessage(Mean(params, np.float32(1)), Exact(change, np.float32(1)))
        return LocalResult(ScaffoldClient(client.control, trained), message, params)

    def aggregate(key, server, clients, messages, cohort):
        # (M / N) times the cohort's mean: each of its clients moves the mean of all N by 1 / N of its change.
        change = messages.control_change
        share = change.weight / cohort.num_clients
        control = jax.tree.map(lambda c, mean: c + share * mean, server.control, change.value)
        server = ScaffoldServer(interpolate(server_lr, messages.params.value, server.params), control)
        return server, ScaffoldClient(clients.trained, clients.trained), {}

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: ScaffoldClient(server.control, server.control),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server.params,
        predict=model.apply,
        trained_from=lambda server, client: ScaffoldMessage(server.params, NOT_RECEIVED),
        privacy=Privacy(
            training.most_passes,
            ("number of examples: the number of steps",),
            refused=""
            if by_steps
            else "its control variates need the gradient itself, except with sgd without clip_norm",
        ),
    )
