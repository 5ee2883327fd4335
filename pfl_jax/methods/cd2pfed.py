"""Personal and shared channels in every layer, with mutual distillation between the two (Shen et al. 2022)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean, supervised_loss
from pfl_jax.validation import Epochs, Fraction, NotNegative

Align = Callable[[PRNGKey, Params, PyTree, Params, ClientData, jax.Array], Params]
"""(key, received model, its personal entries, the client's previous model, data, whether the client was trained before)
-> model from which local training starts."""


class CD2Server(NamedTuple):
    """Shared model and number of completed rounds; entries that became personal keep their last shared value."""

    params: Params
    round: jax.Array


class CD2Client(NamedTuple):
    """The client's whole model after its previous local training, and whether it was ever trained (bool scalar)."""

    params: Params
    trained: jax.Array


def personal_entries(params: Params, share: float | jax.Array) -> PyTree:
    """Mask of the personal entries: a tree of bool arrays with the shapes of params.

    The last floor(share * C) of a layer's C output channels are personal, with their slices of the kernel [..., C] and
    of the bias [C]. In the head, whose outputs are classes, the rows of the kernel [d, K] for personal features are
    personal; the bias is shared.
    """

    def last(size: int) -> jax.Array:
        # The small constant prevents a rounding error for shares such as 0.3 of 10 channels.
        return jnp.arange(size) >= size - jnp.floor(share * size + 1e-4)

    def head(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:
            return jnp.zeros(leaf.shape, bool)
        return jnp.broadcast_to(last(leaf.shape[0])[:, None], leaf.shape)

    return {
        "backbone": jax.tree.map(lambda leaf: jnp.broadcast_to(last(leaf.shape[-1]), leaf.shape), params["backbone"]),
        "head": jax.tree.map(head, params["head"]),
    }


def select_entries(mask: PyTree, where_true: PyTree, where_false: PyTree) -> PyTree:
    """Select each entry from one of two trees."""
    return jax.tree.map(jnp.where, mask, where_true, where_false)


def shared_entries(params: Params, share: float | jax.Array) -> Params:
    """The params with zeros in their personal entries, which are never sent."""
    return select_entries(personal_entries(params, share), jax.tree.map(jnp.zeros_like, params), params)


def distillation(model: Model, params: Params, personal: PyTree, batch: ClientData, key: PRNGKey) -> jax.Array:
    """Distillation loss (1/2) (KL(p_shared || p_personal) + KL(p_personal || p_shared)) between the two paths.

    A path is the model with the entries of the other path set to zero; both use the head's bias. In each term only the
    second distribution has a gradient: the first is the teacher. Both paths have the same dropout, drawn by the key of
    the step.
    """
    zeros = jax.tree.map(jnp.zeros_like, params)
    in_both = {**personal, "head": jax.tree.map(lambda p: p if p.ndim > 1 else jnp.ones_like(p), personal["head"])}

    def log_probabilities(path):
        features, _ = model.training_features(path["backbone"], batch, key)
        return jax.nn.log_softmax(model.classify(path["head"], features))

    own = log_probabilities(select_entries(in_both, params, zeros))
    common = log_probabilities(select_entries(personal, zeros, params))
    divergence = optax.losses.kl_divergence_with_log_targets
    both = divergence(own, jax.lax.stop_gradient(common)) + divergence(common, jax.lax.stop_gradient(own))
    return 0.5 * masked_mean(both, batch.mask)


@method_factory
def cd2pfed(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    share: Fraction = 0.5,
    growth_rounds: Epochs = 20,
    lam: NotNegative = 1.0,
) -> Method:
    r"""CD2-pFed: the first channels of every layer are shared, the last ones are personal.

        share of personal channels in round t = 0, 1, ...:  share_t = share min(1, t / growth_rounds)
        w_i = E epochs of SGD, from the server's shared and the client's personal entries, on
              CE(w_i) + (lambda/2) (KL(p_shared || p_personal) + KL(p_personal || p_shared))
        server:  shared entries of w = sum_i beta_i w_i

    p_shared and p_personal are the predictions with only the shared or only the personal channels. With share = 0 this
    is FedAvg.

    Args:
      training: recipe of local training.
      share: share of each layer's channels that is personal after growth_rounds, from 0 to 1.
      growth_rounds: rounds over which the personal share grows from 0 to its final value; 0 for no growth phase.
      lam: strength lambda of the distillation between the two paths.

    Returns:
      A `Method`. The server keeps a `CD2Server`, a client a `CD2Client`. A client that was never trained starts
      from and deploys the server's model.
      Trees: server CD2Server(params: model, round: count); client CD2Client(params: model, trained: flag).

    Info:
      share: [], share of personal channels in the round.

    Reference:
      Shen, Zhou, Yu. CD2-pFed: Cyclic Distillation-guided Channel Decoupling for Model Personalization in Federated
      Learning. CVPR 2022.

    Deviations:
      There is no released code, and only the paper's abstract was available: the method follows the abstract and is
      otherwise unverified. Unverified choices: linear growth of the personal share from 0, over 20 rounds to one half;
      a symmetric KL divergence; lambda = 1; which channels are personal (the last ones, with their incoming weights; in
      a fully connected layer the weights from personal to shared channels are shared); a teacher without gradient; no
      temperature; distillation from the second round on, also before the share is large enough for a personal channel.
      Left out: the paper's moving average of the weights over time (here the weights after training are used
      unchanged), and a moving average in the teacher.
    """
    needs_classes(model, "cd2pfed", "its two paths learn each other's probabilities of classes")
    return decouple_channels(
        model,
        training,
        lambda key, received, personal, last, data, trained: received,
        share=share,
        growth_rounds=growth_rounds,
        lam=lam,
    )


def decouple_channels(
    model: Model,
    training: LocalTraining,
    align: Align,
    *,
    share: float,
    growth_rounds: int,
    lam: float,
) -> Method:
    """CD2-pFed with an alignment of the received model before local training.

    Args:
      model: the architecture.
      align: function that changes the received model, see `Align`.
      training, share, growth_rounds, lam: as in `cd2pfed`.
    """

    def current_share(server):
        return share * jnp.where(server.round >= growth_rounds, 1.0, server.round / max(growth_rounds, 1))

    def receive(key, server, client, data):
        personal = personal_entries(server.params, current_share(server))
        # A client that was never trained has no personal channels yet.
        own = jax.tree.map(lambda mask: mask & client.trained, personal)
        received = select_entries(own, client.params, server.params)
        return align(key, received, personal, client.params, data, client.trained), personal

    def train(key, server, client, data):
        align_key, train_key = jax.random.split(key)
        start, personal = receive(align_key, server, client, data)
        # The first round has no personal path. Later, a path without channels predicts by the head's bias alone.
        strength = jnp.where(current_share(server) > 0, lam, 0.0)

        risk = supervised_loss(model)

        def loss(params, batch, key):
            value, statistics = risk(params, batch, key)
            return value + strength * distillation(model, params, personal, batch, key), statistics

        params = training.fit(train_key, start, data, loss)
        sent = shared_entries(params, current_share(server))
        return LocalResult(CD2Client(params, jnp.ones((), bool)), mean_by_size(sent, data), params)

    def aggregate(key, server, clients, messages, cohort):
        personal = personal_entries(server.params, current_share(server))
        params = select_entries(personal, server.params, messages.value)
        return CD2Server(params, server.round + 1), clients, {"share": current_share(server)}

    return Method(
        init_server=lambda key: CD2Server(model.init(key), jnp.zeros((), jnp.int32)),
        init_client=lambda key, server, data: CD2Client(server.params, jnp.zeros((), bool)),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: receive(key, server, client, data)[0],
        predict=model.apply,
        download=lambda server, client: server.params,
        # Clients send zeros in their personal entries.
        trained_from=lambda server, client: shared_entries(server.params, current_share(server)),
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
