"""Personal parameters, chosen as those that a client's training changes most (Tamirisa et al. 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Mean, Method, Model, Params, Privacy, PyTree
from pfl_jax.messages import is_mean
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import Fraction


class FedSelectClient(NamedTuple):
    """The client's whole model after its previous local training, and its mask: which entries are personal (bool)."""

    params: Params
    personal: PyTree


def select(where: PyTree, params: PyTree, others: PyTree) -> PyTree:
    """Take the entries of `params` where the bool arrays of `where` are True, and entries of `others` elsewhere."""
    return jax.tree.map(jnp.where, where, params, others)


def grown(personal: PyTree, before: PyTree, after: PyTree, rate: float | jax.Array, limit: float | jax.Array) -> PyTree:
    """Mask with more personal entries: in every array the shared entries that changed most.

    Args:
      personal: the mask so far, a tree of bool arrays.
      before: params before local training.
      after: params after it.
      rate: share of an array's shared entries that become personal, rounded; entries that did not change stay shared.
      limit: largest share of an array's entries that are personal, rounded down.

    Returns:
      A tree of bool arrays. Running statistics of batch normalization stay shared.
    """

    def add(mask, old, new):
        change = jnp.where(mask, 0.0, jnp.abs(new - old)).ravel()
        chosen = jnp.sum(mask, dtype=jnp.float32)
        # The small constant prevents a rounding error for limits such as 0.3 of 10 entries.
        room = jnp.floor(limit * change.size + 1e-3) - chosen
        count = jnp.minimum(jnp.round(rate * (change.size - chosen)), room).astype(jnp.int32)
        least = jnp.sort(change)[jnp.clip(change.size - count, 0, change.size - 1)]
        return mask | ((change >= least) & (change > 0) & (count > 0)).reshape(mask.shape)

    return map_statistics(jnp.zeros_like, jax.tree.map(add, personal, before, after))


@method_factory
def fedselect(
    model: Model, training: LocalTraining = LocalTraining(), *, rate: Fraction = 0.25, limit: Fraction = 0.8
) -> Method:
    r"""FedSelect: a client's personal parameters are those that its training changes most; they grow in number.

        w_i = m_i v_i + (1 - m_i) w,   m_i = 0 before the client's first round
        w'_i = E epochs of SGD from w_i on its personal entries alone, then E epochs on its shared entries alone
        w   = sum_i n_i (1 - m_i) w'_i / sum_i n_i (1 - m_i), entry by entry;   v_i = w'_i
        m_i <- m_i and the given share (rate) of each array's other entries: the largest |w'_i - w_i|

    An entry that is personal for the whole cohort keeps its value in w. Without personal entries (rate or limit 0) this
    is `fedavg`.

    Args:
      training: recipe of local training, of both phases.
      rate: share of the shared entries of each array that become personal in a round of the client, from 0 to 1 (p in
        the paper).
      limit: largest share of each array's entries that are personal, from 0 to 1 (alpha in the paper).

    Returns:
      A `Method`. The server keeps w, a client a `FedSelectClient`.
      Trees: server model; client FedSelectClient(params: model, personal: model).

    Info:
      personal: [M], share of each client's entries that are personal from its next round on.

    Reference:
      Tamirisa, Xie, Bao, Zhou, Arel, Shamsian. FedSelect: Personalized Federated Learning with Customized Selection of
      Parameters for Fine-Tuning. CVPR 2024: its hypothesis, its alternating local training, and the mean of each entry
      over the clients that share it. The rest follows the released code, which has the same default rate and limit.

    Deviations:
      Only the paper's abstract and the released code (github.com/lapisrocks/fedselect, commit 0949f8a) were available.
      That code (1) takes the change since a client's previous selection, not since its last training began; (2) selects
      every third round, not in the first one; (3) gives entries that become personal the server's mean once more;
      (4) alternates the two phases epoch by epoch, without momentum; (5) averages clients equally; (6) never makes
      biases personal; (7) makes all entries of an array personal where a smaller share than the rate changed, and
      exceeds the limit by up to one selection; (8) keeps running statistics at the clients. With (1), (2), (3) and (6)
      changed in it, three rounds of one full-batch epoch with equal clients give the same masks, and models to 2e-6 of
      an update.
    """
    risk = supervised_loss(model)

    def train_entries(key, start, entries, data):
        """Model in which only these entries, and running statistics, have been trained."""
        entries = map_statistics(jnp.ones_like, entries)

        def loss(params, batch, key):
            return risk(select(entries, params, start), batch, key)

        return select(entries, training.fit(key, start, data, loss), start)

    def current(server, client):
        """The client's model w_i."""
        return select(client.personal, client.params, server)

    def train(key, server, client, data):
        personal_key, shared_key = jax.random.split(key)
        start, shared = current(server, client), jax.tree.map(jnp.logical_not, client.personal)
        params = train_entries(personal_key, start, client.personal, data)
        params = train_entries(shared_key, params, shared, data)
        size = jnp.sum(data.mask, dtype=jnp.float32)
        # Personal entries are never sent.
        message = jax.tree.map(lambda here, entry: Mean(entry, size * here), shared, select(shared, params, server))
        personal = grown(client.personal, start, params, rate, limit)
        return LocalResult(FedSelectClient(params, personal), message, params)

    def aggregate(key, server, clients, messages, cohort):
        server = jax.tree.map(
            lambda mean, entry: jnp.where(mean.weight > 0, mean.value, entry), messages, server, is_leaf=is_mean
        )
        masks = jax.tree.leaves(clients.personal)
        count = sum(jnp.sum(mask, axis=range(1, mask.ndim), dtype=jnp.float32) for mask in masks)
        return server, clients, {"personal": count / sum(mask[0].size for mask in masks)}

    def init_client(key, server, data):
        return FedSelectClient(server, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), server))

    return Method(
        init_server=model.init,
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: current(server, client),
        predict=model.apply,
        trained_from=lambda server, client: server,
        privacy=Privacy(2 * training.most_passes, (SIZE,)),
    )
