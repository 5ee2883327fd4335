"""Federated averaging whose clients look for flat minima (Qu et al. 2022; Caldarola, Caputo, Ciccone 2022)."""

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import LocalResult, Method, Model, Privacy, TrainingLoss
from pfl_jax.methods.factories import OWN_GRADIENTS, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import NotNegative

TINY = 1e-16
"""Added to the norm of a gradient (released code)."""


def at_perturbed(loss: TrainingLoss, rho: float | jax.Array) -> TrainingLoss:
    """Loss of a mini-batch at parameters that are moved by the length `rho` along its own gradient.

    The move has no gradient itself: the gradient of L(w + rho g / ||g||), g = grad L(w), is the gradient of L at the
    moved parameters.

    Args:
      loss: L, the loss of local training; it is computed twice with the same key.
      rho: length of the move, over all parameters; statistics of batch normalization are not moved.
    """

    def perturbed(params, batch, key):
        slopes = jax.grad(lambda params: loss(params, batch, key)[0])(params)
        slopes = jax.lax.stop_gradient(map_statistics(jnp.zeros_like, slopes))
        length = rho / (optax.tree.norm(slopes) + TINY)
        return loss(jax.tree.map(lambda w, slope: w + length * slope, params, slopes), batch, key)

    return perturbed


@method_factory
def fedsam(model: Model, training: LocalTraining = LocalTraining(), *, rho: NotNegative = 0.05) -> Method:
    """FedSAM: FedAvg whose clients take steps of sharpness-aware minimization.

        every step on a mini-batch D:  g = grad f(w; D),   w <- w - eta grad f(w + rho g / ||g||; D)
        w = sum_i beta_i w_i

    So a client's model is one whose neighbors within rho have a small loss too. With rho = 0 this is FedAvg.

    Args:
      training: recipe of local training; momentum, weight decay and clipping apply to the gradient at the moved model.
      rho: distance rho at which the gradient is taken.

    Returns:
      A `Method` with the global model as server state and no client state.
      Trees: server model; client nothing.

    Reference:
      Qu, Li, Duan, Liu, Tang, Lu. Generalized Federated Learning via Sharpness Aware Minimization. ICML 2022. FedSAM.
      Caldarola, Caputo, Ciccone. Improving Generalization in Federated Learning by Seeking Flat Minima. ECCV 2022.

    Deviations:
      Only the papers' abstracts and the second paper's released code (github.com/debcaldarola/fedsam, commit 64bbf93)
      were available. Its adaptive variant FedASAM, its averages of the server's models over rounds, and the first
      paper's MoFedSAM are left out. Both gradients of a step have the same dropout, and the statistics of batch
      normalization follow the moved model alone; in that code each of the two passes has its own. rho = 0.05 is a usual
      value of sharpness-aware minimization. Three full-batch rounds of six equal clients agree with that code's steps
      to 2e-7 of an update.
    """
    loss = at_perturbed(supervised_loss(model), rho)

    def train(key, server, client, data):
        params = training.fit(key, server, data, loss)
        return LocalResult(client=(), message=mean_by_size(params, data), personal=params)

    # Private steps need the gradients of single examples, and the move is along the gradient of a mini-batch.
    return fedavg(model, training)._replace(local=train, privacy=Privacy(refused=OWN_GRADIENTS, clients=()))
