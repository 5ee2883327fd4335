"""Mutual learning of a personal model and a shared one on each client (Shen et al. 2020)."""

from collections.abc import Callable

import jax
import optax

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean
from pfl_jax.validation import Fraction

Computed = tuple[Params, jax.Array]
"""Parameters of one model, and its features [B, d] for a mini-batch."""

INITIAL = "initial"
"""Key of the initial personal model in the server's state, if its network differs from the shared model's."""


def divergence(logits: jax.Array, teacher: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over examples of KL(softmax(teacher) || softmax(logits)); the teacher has no gradient.

    Args:
      logits: [B, K].
      teacher: [B, K].
      mask: [B], the real examples.
    """
    target = jax.lax.stop_gradient(jax.nn.log_softmax(teacher))
    return masked_mean(optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), target), mask)


def fit_two(
    model: Model,
    training: LocalTraining,
    key: PRNGKey,
    start: tuple[Params, Params, PyTree],
    data: ClientData,
    value: Callable[[Computed, Computed, PyTree, ClientData], jax.Array],
) -> tuple[Params, Params, PyTree]:
    """Train a personal model, a shared model and other parameters together on the same mini-batches.

    Each of the three has its own optimizer, so that clip_norm limits the norm of each one's gradient.

    Args:
      model: the architecture of the personal model; its `Model.shared_network` is the shared model's.
      training: recipe of all three.
      key: as in `LocalTraining.fit`.
      start: personal and shared model, and other parameters.
      data: the client's examples.
      value: (personal model and its features, shared model and its features, other parameters, mini-batch) -> scalar.
    """

    def loss(parts, batch, key):
        (personal, shared, others), (personal_key, shared_key) = parts, jax.random.split(key)
        features, statistics = model.training_features(personal["backbone"], batch, personal_key)
        common = model.shared_network.training_features(shared["backbone"], batch, shared_key)
        risk = value((personal, features), (shared, common[0]), others, batch)
        return risk, (statistics, common[1])

    names = ("personal", "shared", "others")
    optimizer = optax.partition(dict.fromkeys(names, training.transformation()), names)
    return training.fit(key, start, data, loss, transformation=optimizer)


@method_factory
def fml(
    model: Model, training: LocalTraining = LocalTraining(), *, alpha: Fraction = 0.5, beta: Fraction = 0.5
) -> Method:
    r"""FML (federated mutual learning): a personal and a shared model teach each other on every client.

        v_i:  SGD on  alpha CE(v_i) + (1 - alpha) KL(p_w || p_v)
        w_i:  SGD on  beta CE(w_i) + (1 - beta) KL(p_v || p_w),   from the received w
        w = sum_i beta_i w_i

    Both take E epochs over the same mini-batches; in each KL only the second distribution has a gradient. The v_i stay
    on the clients, which deploy them. With alpha = 1 the personal models equal the models of `local`.

    Args:
      training: recipe of local training of both models.
      alpha: weight of the labels in the loss of the personal model.
      beta: weight of the labels in the loss of the shared model.

    Returns:
      A `Method` with the shared model as server state, and the initial v_i if its network differs; v_i is the client
      state. Both evaluation protocols score v_i.
      Trees: server model; client model.

    Reference:
      Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu. Federated Mutual Learning. 2020. Eq. 4 and 5.

    Deviations:
      Personal models with the shared model's network start from the initial shared model. In HtFLlib
      (github.com/TsingZ0/HtFLlib, commit e959261) the divergences are divided by K, both models descend the gradients
      of both losses, gradients are clipped at norm 10, clients are averaged equally, and the defaults alpha = 1 and
      beta = 0 train the personal model without the shared one. With these choices, three full-batch rounds of three
      clients agree with its clients to 1e-6.
    """
    needs_classes(model, "fml", "its models learn each other's probabilities of classes")

    network = model.shared_network

    def value(own, shared, _, batch):
        (own, own_features), (shared, shared_features) = own, shared
        own_logits = model.classify(own["head"], own_features)
        shared_logits = network.classify(shared["head"], shared_features)

        def mixed(share, logits, teacher):
            labels = model.task.loss(logits, batch.y, batch.mask)
            return share * labels + (1 - share) * divergence(logits, teacher, batch.mask)

        return mixed(alpha, own_logits, shared_logits) + mixed(beta, shared_logits, own_logits)

    def train(key, server, client, data):
        personal, shared, _ = fit_two(model, training, key, (client, download(server, client), ()), data, value)
        return LocalResult(personal, mean_by_size(shared, data), personal)

    def init_server(key):
        params = network.init(key)
        return params if model.shared is None else {**params, INITIAL: model.init(key)}

    def download(server, client):
        return {name: part for name, part in server.items() if name != INITIAL}

    return fedavg(model, training)._replace(
        init_server=init_server,
        init_client=lambda key, server, data: server.get(INITIAL, server),
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (server | messages.value, clients, {}),
        personalize=lambda key, server, client, data: client,
        download=download,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
