"""Personal models that inherit from a client's earlier ones and teach the next (Li et al. 2021)."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, WHOLE_BATCH, method_factory, needs_classes, needs_vectors
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fedcp import discrepancy
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features, masked_mean
from pfl_jax.primitives.tree import interpolate
from pfl_jax.validation import BelowOne, Count, Fraction, Positive, ReadWith


class FedPHPClient(NamedTuple):
    """State of a FedPHP client: its inherited model p_i, and how often it was trained (int32)."""

    inherited: Params
    trainings: jax.Array


@method_factory
def fedphp(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: Fraction = 0.1,
    transfer: Literal["outputs", "features"] = "outputs",
    temperature: Annotated[Positive, ReadWith("transfer", ("outputs",))] = 4.0,
    inheritance: BelowOne = 0.9,
    expected_trainings: Count = 50,
) -> Method:
    r"""FedPHP: FedAvg in which each client's running mean of its trained models teaches the next and is deployed.

        w_i = E epochs of SGD from w on  (1 - lambda) CE(w_i) + lambda R(w_i, p_i);   w = sum_i beta_i w_i
        p_i <- mu_i p_i + (1 - mu_i) w_i,   mu_i = inheritance min(1, q_i / expected_trainings)

    q_i counts the client's earlier trainings. R is the cross entropy between softmax(logits of p_i / temperature) and
    the outputs of w_i, or with transfer="features" the `discrepancy` of their features; p_i has no gradient. With
    lambda = 0 the server's model is FedAvg's.

    Args:
      training: recipe of local training.
      lam: weight lambda of the inherited model in the loss.
      transfer: whether the trained model learns the outputs or the features of the inherited one.
      temperature: divisor of the inherited model's logits.
      inheritance: largest weight of the inherited model in the running mean, below 1.
      expected_trainings: trainings of a client until the weight is largest, in the paper participation times rounds.

    Returns:
      A `Method` with the global model as server state and a `FedPHPClient` as client state. Both evaluation protocols
      score p_i.
      Trees: server model; client FedPHPClient(inherited: model, trainings: count).

    Reference:
      Li, Zhan, Shao, Li, Song. FedPHP: Federated Personalization with Inherited Private Models. ECML PKDD 2021. Only
      its abstract was available; the equations, the temperature and 0.9 are from the authors' code
      (github.com/lxcnju/FedRepo, commit 617ee01).

    Deviations:
      The authors' bandwidths of the discrepancy depend on the features; here they are fixed, as in PFLlib
      (github.com/TsingZ0/PFLlib, commit d832e76). In PFLlib mu_i grows with the round, not with the client's trainings,
      and w_i is evaluated. With transfer="features", three full-batch rounds of three clients agree with its code to
      1e-6.
    """
    needs_classes(model, "fedphp", "its models learn each other's probabilities of classes")
    if transfer == "features":
        needs_vectors(model, "fedphp", "it compares those vectors between two models")

    def train(key, server, client, data):
        def loss(params, features, batch):
            inherited = jax.lax.stop_gradient(model.features(client.inherited["backbone"], batch.x))
            logits = model.classify(params["head"], features)
            if transfer == "features":
                learned = discrepancy(features, inherited, batch.mask)
            else:
                target = jax.nn.softmax(model.classify(client.inherited["head"], inherited) / temperature)
                learned = masked_mean(-jnp.sum(target * jax.nn.log_softmax(logits), axis=-1), batch.mask)
            return (1 - lam) * model.task.loss(logits, batch.y, batch.mask) + lam * learned

        params = training.fit(key, server, data, loss_of_features(model, loss))
        mu = inheritance * jnp.minimum(client.trainings / expected_trainings, 1.0)
        inherited = interpolate(mu, client.inherited, params)
        return LocalResult(FedPHPClient(inherited, client.trainings + 1), mean_by_size(params, data), inherited)

    refused = WHOLE_BATCH if transfer == "features" else ""
    return fedavg(model, training)._replace(
        init_client=lambda key, server, data: FedPHPClient(server, jnp.zeros((), jnp.int32)),
        local=train,
        personalize=lambda key, server, client, data: client.inherited,
        privacy=Privacy(training.most_passes, (SIZE,), refused=refused, clients=()),
    )
