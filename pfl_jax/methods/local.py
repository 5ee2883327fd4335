"""Every client for itself: the baseline that shows what federation is worth."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.primitives.local_sgd import fit, sgd
from pfl_jax.primitives.losses import cross_entropy


def local(
    model: Model,
    *,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
) -> Method:
    """Local-only training: each client trains its own model and nothing is ever sent.

    All clients start from the same random model, as in the papers' comparisons. A client advances only in the
    rounds it is sampled for, like in every other method.

    Args:
      lr: learning rate.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.

    Returns:
      A `Method` with the initial model as server state and the client's own model as its state.
    """
    optimizer = sgd(lr, momentum, weight_decay)

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)

    def train(key, server, client, data):
        params = fit(key, client, data, loss, optimizer=optimizer, epochs=epochs, batch_size=batch_size)
        return LocalResult(client=params, message=(), personal=params)

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: server,
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (server, clients, {}),
        personalize=lambda key, server, client, data: client,
        predict=model.apply,
        download=lambda server, client: (),
    )
