"""Federated averaging whose clients train on earlier examples too (Rolnick et al. 2019; Chaudhry et al. 2019)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, LocalResult, Method, Model, Privacy, PyTree
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.fingerprints import example_fingerprints
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import choose
from pfl_jax.validation import Epochs

EXAMPLES = "examples themselves: kept by the client, for its later trainings"


def joined(data: ClientData, buffer: ClientData) -> ClientData:
    """Examples of `data`, and those of `buffer` that are not in `data`, [n + B]: `data` first, padding last.

    Args:
      data: examples [n] of a client.
      buffer: earlier examples [B].
    """
    both = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), data, buffer)
    identity, (number,) = example_fingerprints(both), data.mask.shape
    same = jnp.all(identity[number:, None] == identity[None, :number], axis=-1) & data.mask
    mask = both.mask.at[number:].set(buffer.mask & ~jnp.any(same, axis=1))
    return _rows(both._replace(mask=mask), jnp.argsort(~mask, stable=True))


def kept(data: ClientData, size: int) -> ClientData:
    """The `size` examples with the smallest fingerprints among distinct examples [n].

    Taken each time from the earlier sample and the new examples, this is a uniform sample without replacement of all
    examples ever seen, however often each was seen.
    """
    identity = example_fingerprints(data)
    order = jnp.lexsort((identity[:, 1], identity[:, 0], ~data.mask))
    data, identity = _rows((data, identity), order)
    repeated = jnp.all(identity[1:] == identity[:-1], axis=1)
    mask = data.mask.at[1:].set(data.mask[1:] & ~repeated)
    found = _rows(data._replace(mask=mask), jnp.argsort(~mask, stable=True)[:size])
    # Padding may differ from device to device, and the state of a client may not.
    return choose(found.mask, found, jax.tree.map(jnp.zeros_like, found))


def _rows(data: PyTree, order: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[order], data)


@method_factory
def fedreplay(model: Model, training: LocalTraining = LocalTraining(), *, buffer_size: Epochs = 50) -> Method:
    """FedReplay (experience replay): FedAvg whose clients keep some examples and train on them with their current ones.

        w_i = E epochs of SGD from w on D_i and B_i;   w = sum_i beta_i w_i
        B_i <- the examples with the smallest hashes of D_i and B_i, at most `buffer_size` distinct ones

    So B_i is a uniform sample, without replacement, of all examples that client i has seen in its local trainings.
    Where the data do not change, B_i is a part of D_i, in which each example counts once. It is a baseline for
    federations whose data change.

    Args:
      training: recipe of local training.
      buffer_size: most examples that a client keeps; with 0 this is FedAvg.

    Returns:
      A `Method` with the global model as server state and the kept examples, a `ClientData`, as client state.
      Trees: server model; client ClientData(x: numbers [50, 6], y: counts [50], mask: flags [50]).

    Reference:
      Rolnick, Ahuja, Schwarz, Lillicrap, Wayne. Experience Replay for Continual Learning. NeurIPS 2019. Chaudhry et al.
      On Tiny Episodic Memories in Continual Learning. 2019, reservoir sampling.

    Deviations:
      Both papers are about one learner; here each client has its own buffer, which no one else sees. The sample is
      taken by hashes, not by a reservoir, since clients see the same examples in many rounds. Mini-batches mix current
      and kept examples, without a fixed half of each. beta_i counts current examples alone.
    """
    loss: Callable = supervised_loss(model)

    def init_client(key, server, data):
        return jax.tree.map(lambda leaf: jnp.zeros((buffer_size, *leaf.shape[1:]), leaf.dtype), data)

    def train(key, server, client, data):
        every = joined(data, client)
        params = training.fit(key, server, every, loss)
        return LocalResult(kept(every, buffer_size), mean_by_size(params, data), params)

    return fedavg(model, training)._replace(
        init_client=init_client, local=train, privacy=Privacy(training.most_passes, (SIZE, EXAMPLES), clients=())
    )
